//! What a store of objects must offer to whoever fills spaces: byte ranges of objects by name, completion-based.
//!
//! A read returns at once; its completion runs exactly once, on any thread, possibly before `read` returns and
//! possibly much later: a silent store costs its callers a queue entry, never a thread. Every read carries a class
//! and a deadline; a store completes it with [`FetchError::TimedOut`] rather than long after that. A store that is
//! dropped completes what is outstanding with [`FetchError::Closed`].
//!
//! Bytes are not verified here: whoever asked knows the digests.

use crate::ObjectId;
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// Who waits for a read. Earlier classes go first, always.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Class {
    /// Somebody is blocked on it.
    Demand,
    /// Somebody will probably need it.
    Prefetch,
    /// Checking what is there.
    Scrub,
}

impl Class {
    /// Every class, most urgent first.
    pub const ALL: [Class; 3] = [Class::Demand, Class::Prefetch, Class::Scrub];
}

/// What every read carries from the front end to the transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Names the request in logs and traces.
    pub id: u64,
    /// Who waits.
    pub class: Class,
    /// After this, the answer is an error.
    pub deadline: Instant,
}

/// A byte range of an object.
#[derive(Debug, Clone)]
pub struct ReadRequest {
    /// The object.
    pub object: ObjectId,
    /// The bytes: all of them or an error.
    pub range: Range<u64>,
    /// Id, class and deadline.
    pub request: Request,
    /// Comes back with the bytes; what it holds before does not matter, its capacity is reused.
    pub buffer: Vec<u8>,
}

/// Completes a read: exactly the bytes asked for, in the request's buffer.
pub type ReadDone = Box<dyn FnOnce(Result<Vec<u8>, FetchError>) + Send>;

/// Completes a question for an object's length.
pub type LenDone = Box<dyn FnOnce(Result<u64, FetchError>) + Send>;

/// Completes a fetch into a space.
pub type Done = Box<dyn FnOnce(Result<(), FetchError>) + Send>;

/// Why bytes could not be fetched. Cheap to clone: one failure can have many waiters.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// The store does not have the object.
    #[error("object {object} is not in the store")]
    NotFound {
        /// The object.
        object: ObjectId,
    },
    /// The range reaches beyond the object's end.
    #[error("bytes {start}..{end} of object {object} are beyond its end", start = .range.start, end = .range.end)]
    OutOfRange {
        /// The object.
        object: ObjectId,
        /// What was asked for.
        range: Range<u64>,
    },
    /// The deadline passed.
    #[error("the deadline passed before the bytes were there")]
    TimedOut,
    /// The store or the cache is going away.
    #[error("shutting down")]
    Closed,
    /// More requests are waiting than the store takes.
    #[error("too many requests are waiting")]
    Overloaded,
    /// The bytes are not what the object map promises.
    #[error("object {object}, frame {frame}: {source}")]
    Corrupt {
        /// The object.
        object: ObjectId,
        /// The frame.
        frame: u32,
        /// What is wrong.
        #[source]
        source: crate::FrameError,
    },
    /// The system said no.
    #[error("cannot {op}: {source}")]
    Io {
        /// What was being done.
        op: &'static str,
        /// What it said.
        #[source]
        source: Arc<io::Error>,
    },
    /// A transport could not reach the store.
    #[error("the store is not reachable: {why}")]
    Unavailable {
        /// What happened.
        why: Arc<str>,
    },
}

impl FetchError {
    /// An error of the system.
    pub fn io(op: &'static str, source: io::Error) -> FetchError {
        FetchError::Io { op, source: Arc::new(source) }
    }

    /// Whether trying again may help.
    pub fn is_transient(&self) -> bool {
        matches!(self, FetchError::TimedOut | FetchError::Overloaded | FetchError::Unavailable { .. })
    }
}

/// A store of objects.
pub trait ObjectStore: Send + Sync {
    /// Reads a range. `done` runs exactly once.
    fn read(&self, read: ReadRequest, done: ReadDone);

    /// Tells an object's length in bytes. `done` runs exactly once.
    fn len(&self, object: &ObjectId, request: Request, done: LenDone);

    /// Names the store in messages.
    fn describe(&self) -> String;
}
