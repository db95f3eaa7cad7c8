//! What all threads of one import share.

use crate::chunker::Objects;
use crate::error::ImportError;
use crate::options::{Counts, Options};
use crate::spool::Budget;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use store::{ImportSession, PackWriter};

/// Bytes of memory for the entries of layers that wait to be merged.
const SPOOL_BYTES: u64 = 16 << 20;

/// One import: where its bytes go, its limits, how far it is.
#[derive(Debug)]
pub(crate) struct Context<'a> {
    pub(crate) session: &'a ImportSession,
    pub(crate) pack: &'a PackWriter,
    pub(crate) options: &'a Options<'a>,
    pub(crate) objects: Objects,
    pub(crate) budget: Budget,
    /// Held by the one decoder that may have a wide window.
    pub(crate) wide_window: Mutex<()>,
    total_bytes: OnceLock<u64>,
    total_files: OnceLock<u64>,
    bytes: AtomicU64,
    files: AtomicU64,
    unpacked: AtomicU64,
    sparse: AtomicU64,
    found: AtomicU64,
    dropped_xattrs: AtomicU64,
    hidden: AtomicU64,
    stop: AtomicBool,
}

impl<'a> Context<'a> {
    pub(crate) fn new(session: &'a ImportSession, pack: &'a PackWriter, options: &'a Options<'a>) -> Self {
        Context {
            session,
            pack,
            options,
            objects: Objects::default(),
            budget: Budget::new(SPOOL_BYTES),
            wide_window: Mutex::new(()),
            total_bytes: OnceLock::new(),
            total_files: OnceLock::new(),
            bytes: AtomicU64::new(0),
            files: AtomicU64::new(0),
            unpacked: AtomicU64::new(0),
            sparse: AtomicU64::new(0),
            found: AtomicU64::new(0),
            dropped_xattrs: AtomicU64::new(0),
            hidden: AtomicU64::new(0),
            stop: AtomicBool::new(false),
        }
    }

    /// So many bytes are still to come.
    pub(crate) fn expect(&self, bytes: u64) {
        // Said once, when the source is known.
        let _ = self.total_bytes.set(self.bytes.load(Ordering::Relaxed).saturating_add(bytes));
    }

    /// So many bytes and entries there are altogether, those included that were taken in already.
    pub(crate) fn totals_are(&self, bytes: u64, files: u64) {
        let _ = (self.total_bytes.set(bytes), self.total_files.set(files));
    }

    /// Source bytes were taken in.
    pub(crate) fn took(&self, bytes: u64) {
        let bytes = self.bytes.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.tell(bytes, self.files.load(Ordering::Relaxed));
    }

    /// Entries were taken in.
    pub(crate) fn entries(&self, n: u64) {
        if n > 0 {
            let files = self.files.fetch_add(n, Ordering::Relaxed) + n;
            self.tell(self.bytes.load(Ordering::Relaxed), files);
        }
    }

    fn tell(&self, bytes: u64, files: u64) {
        let total_files = self.total_files.get().copied();
        let counts = Counts { bytes, total_bytes: self.total_bytes.get().copied(), files, total_files };
        self.options.progress.progress(&counts);
    }

    /// Content was read or unpacked; refuses when that is too much altogether.
    pub(crate) fn unpacked(&self, bytes: u64) -> Result<(), ImportError> {
        let limit = self.options.limits.unpacked_bytes;
        let sum = self.unpacked.fetch_add(bytes, Ordering::Relaxed).saturating_add(bytes);
        if sum > limit {
            return Err(ImportError::Limit {
                place: "the image".into(),
                what: format!("its files hold more than {limit} bytes, which is the limit on unpacked content"),
            });
        }
        Ok(())
    }

    /// A stream has unpacked to `total` bytes, from `packed`.
    pub(crate) fn check_ratio(&self, place: &str, total: u64, packed: u64) -> Result<(), ImportError> {
        let limits = &self.options.limits;
        let what = if total > limits.layer_bytes {
            format!("it unpacks to more than {} bytes, which is the limit on one layer", limits.layer_bytes)
        } else if total > limits.ratio_from && total / limits.ratio.max(1) > packed {
            format!("it unpacks to more than {} times its size; unpack it first if that is meant", limits.ratio)
        } else {
            return Ok(());
        };
        Err(ImportError::Limit { place: place.into(), what })
    }

    /// A file of that size comes; refuses when all sizes together, holes included, are too much.
    pub(crate) fn file_size(&self, size: u64) -> Result<(), ImportError> {
        let limit = self.options.limits.sparse_bytes;
        let before = self.sparse.fetch_add(size.min(limit + 1), Ordering::Relaxed);
        if before.saturating_add(size) > limit {
            return Err(ImportError::Limit {
                place: "the image".into(),
                what: format!("the sizes of its files, holes included, add up to more than {limit} bytes"),
            });
        }
        Ok(())
    }

    /// Content was found in the store.
    pub(crate) fn found(&self, bytes: u64) {
        self.found.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A file's content was not packed, since an upper layer hides it.
    pub(crate) fn hidden(&self, bytes: u64) {
        self.hidden.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Some of that was wanted after all.
    pub(crate) fn shown(&self, bytes: u64) {
        self.hidden.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Attributes were left out.
    pub(crate) fn dropped_xattrs(&self, n: u64) {
        self.dropped_xattrs.fetch_add(n, Ordering::Relaxed);
    }

    /// Some thread failed: the others need not go on.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Relaxed);
    }

    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub(crate) fn totals(&self) -> Totals {
        Totals {
            source_bytes: self.bytes.load(Ordering::Relaxed),
            found_bytes: self.found.load(Ordering::Relaxed),
            dropped_xattrs: self.dropped_xattrs.load(Ordering::Relaxed),
            hidden_bytes: self.hidden.load(Ordering::Relaxed),
        }
    }
}

/// Sums at the end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Totals {
    pub(crate) source_bytes: u64,
    pub(crate) found_bytes: u64,
    pub(crate) dropped_xattrs: u64,
    pub(crate) hidden_bytes: u64,
}
