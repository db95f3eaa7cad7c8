//! Reads that wait for missing bytes.
//!
//! A parked read is owned by this table, not by the completion that will answer it. So whoever comes first answers:
//! the completion, a reader that is being killed, or the end of the session. A completion that comes later finds
//! nothing and does nothing.

use super::read::Target;
use super::reply::Request;
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// A read whose bytes are being fetched.
#[derive(Debug)]
pub(crate) struct ParkedRead {
    pub(crate) request: Request,
    pub(crate) target: Target,
    pub(crate) offset: u64,
    pub(crate) len: usize,
    pub(crate) deadline: Instant,
    /// How many fetches were started for it.
    pub(crate) fetches: u32,
    /// The thread that reads, as the kernel named it.
    pub(crate) tid: u32,
}

/// The parked reads of one session, by the number of their request.
#[derive(Debug, Default)]
pub(crate) struct Parked {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    closed: bool,
    reads: HashMap<u64, ParkedRead>,
}

impl Parked {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Every critical section leaves the table whole, so a poisoned one is as good as any.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Parks a read; gives it back when the session is ending.
    pub(crate) fn park(&self, read: ParkedRead) -> Result<(), ParkedRead> {
        let mut inner = self.lock();
        if inner.closed {
            return Err(read);
        }
        inner.reads.insert(read.request.unique(), read);
        Ok(())
    }

    /// Takes the read with that number, if it is still parked.
    pub(crate) fn take(&self, unique: u64) -> Option<ParkedRead> {
        self.lock().reads.remove(&unique)
    }

    /// Who waits for the request with that number.
    pub(crate) fn reader_of(&self, unique: u64) -> Option<u32> {
        self.lock().reads.get(&unique).map(|r| r.tid)
    }

    /// How many wait.
    pub(crate) fn len(&self) -> usize {
        self.lock().reads.len()
    }

    /// Takes all, and lets nothing be parked from now on.
    pub(crate) fn close(&self) -> Vec<ParkedRead> {
        let mut inner = self.lock();
        inner.closed = true;
        inner.reads.drain().map(|(_, read)| read).collect()
    }
}
