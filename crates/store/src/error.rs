//! Why the store could not do something: what, where and what to do.

use format::{Digest, FormatError};
use std::io;
use std::path::{Path, PathBuf};

/// Why an operation on the store failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A name that no image can have.
    #[error("bad image name {name:?}: {why}; use NAME[:TAG] of letters, digits, '.', '_', '-' and '/'")]
    BadName {
        /// As given.
        name: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// No image of that name.
    #[error("no image named {name}; `lazyroot images` lists what there is")]
    NoImage {
        /// The name.
        name: String,
    },
    /// A file of the store that should be there is not.
    #[error("{what} {digest} is missing from the store at {path}; run `lazyroot fsck`, then import the image again")]
    Missing {
        /// `index`, `object`, …
        what: &'static str,
        /// Its name.
        digest: Digest,
        /// Where it should be.
        path: PathBuf,
    },
    /// A file of the store contradicts itself or its name.
    #[error("{path}: {source}; run `lazyroot fsck`, which looks for more, then import the image again")]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: FormatError,
    },
    /// A file of the store holds something else than it should.
    #[error("{path}: {why}")]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        why: String,
    },
    /// The directory holds other things than a store.
    #[error("{path} is not a LazyRoot store: {why}; name an empty or missing directory with --root")]
    NotAStore {
        /// The directory.
        path: PathBuf,
        /// Why not.
        why: String,
    },
    /// A store of a version that this code does not know.
    #[error(
        "the store at {path} has version {version:?}, this LazyRoot knows {known}; use the LazyRoot that made it, or another --root"
    )]
    Version {
        /// The store.
        path: PathBuf,
        /// What its version file says.
        version: String,
        /// What this code knows.
        known: u32,
    },
    /// Somebody else holds the store's lock.
    #[error("the store at {path} is busy: {who}; try again when that is done")]
    Busy {
        /// The store.
        path: PathBuf,
        /// Who is at it.
        who: &'static str,
    },
    /// The disk or the quota is full.
    #[error("no space left to {op} {path}; free some, or run `lazyroot gc`")]
    Full {
        /// What was being done.
        op: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The file system is mounted read-only.
    #[error("cannot {op} {path}: the file system is read-only; use another --root")]
    ReadOnly {
        /// What was being done.
        op: &'static str,
        /// To what.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// The system said no.
    #[error("cannot {op} {path}: {source}")]
    Io {
        /// What was being done.
        op: &'static str,
        /// To what.
        path: PathBuf,
        /// What it said.
        #[source]
        source: io::Error,
    },
    /// The caller asked for something that cannot be.
    #[error("{0}")]
    Usage(&'static str),
    /// More content than one object can address.
    #[error("the image needs more than {blocks} blocks of new content, more than one object can address")]
    TooLarge {
        /// The limit.
        blocks: u64,
    },
}

impl StoreError {
    /// Sorts an error of the system into full, read-only and other.
    pub fn io(op: &'static str, path: impl AsRef<Path>, source: io::Error) -> StoreError {
        let path = path.as_ref().to_path_buf();
        match source.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StoreError::Full { op, path, source },
            io::ErrorKind::ReadOnlyFilesystem => StoreError::ReadOnly { op, path, source },
            _ => StoreError::Io { op, path, source },
        }
    }

    /// An error of the formats, in a file.
    pub fn format(path: impl AsRef<Path>, source: FormatError) -> StoreError {
        StoreError::Format { path: path.as_ref().to_path_buf(), source }
    }
}
