//! Faults of front ends, and the one place where they become an errno and a log line.

use rustix::io::Errno;
use std::fmt;
use store::{FetchError, ReadError};

/// How much a log line matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// A consumer will see an error that it did not cause.
    Error,
    /// Odd, but nobody was hurt.
    Warn,
    /// Worth knowing.
    Info,
}

/// Where log lines go.
pub trait Log: Send + Sync {
    /// Takes one line.
    fn line(&self, level: Level, text: fmt::Arguments<'_>);
}

impl<F: Fn(Level, fmt::Arguments<'_>) + Send + Sync> Log for F {
    fn line(&self, level: Level, text: fmt::Arguments<'_>) {
        self(level, text);
    }
}

/// A log that forgets.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoLog;

impl Log for NoLog {
    fn line(&self, _: Level, _: fmt::Arguments<'_>) {}
}

/// Why a request cannot be answered with what it asked for.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// The inode number names nothing (a consumer's stale handle).
    #[error("no such inode")]
    NoInode,
    /// The name names nothing.
    #[error("no such name")]
    NoName,
    /// The name is longer than any name can be; the kernel's FUSE lets up to 1024 bytes through.
    #[error("name too long")]
    NameTooLong,
    /// A directory was needed.
    #[error("not a directory")]
    NotDirectory,
    /// A regular file was needed, and this is a directory.
    #[error("is a directory")]
    IsDirectory,
    /// The request makes no sense for that inode.
    #[error("invalid request: {0}")]
    Invalid(&'static str),
    /// There is no extended attribute of that name.
    #[error("no such attribute")]
    NoXattr,
    /// The consumer's buffer is too small.
    #[error("the buffer is too small")]
    Range,
    /// No data behind that offset.
    #[error("no data behind the offset")]
    NoData,
    /// Something would have to change.
    #[error("read-only")]
    ReadOnly,
    /// An operation that this front end does not have.
    #[error("not supported")]
    Unsupported,
    /// The reader is being killed.
    #[error("interrupted")]
    Interrupted,
    /// The index or a layout contradicts itself.
    #[error("damaged index")]
    Damaged(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A range could not be resolved.
    #[error("resolving a range")]
    Read(#[from] ReadError),
    /// Missing bytes could not be had.
    #[error("fetching missing bytes")]
    Fetch(#[source] Box<FetchError>),
    /// Bytes that were there a moment ago keep vanishing before they can be sent.
    #[error("content was evicted again and again before it could be sent")]
    Evicted,
    /// The host's kernel refused something.
    #[error("{what}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// What it said.
        #[source]
        source: std::io::Error,
    },
    /// The session is ending.
    #[error("the session ends")]
    Ending,
}

impl From<FetchError> for Fault {
    fn from(e: FetchError) -> Fault {
        Fault::Fetch(Box::new(e))
    }
}

/// The errno that a consumer gets for a fault, and how loudly it is logged. `None`: an ordinary answer, not logged.
pub fn classify(fault: &Fault) -> (Errno, Option<Level>) {
    match fault {
        Fault::NoInode => (Errno::STALE, None),
        Fault::NoName => (Errno::NOENT, None),
        Fault::NameTooLong => (Errno::NAMETOOLONG, None),
        Fault::NotDirectory => (Errno::NOTDIR, None),
        Fault::IsDirectory => (Errno::ISDIR, None),
        Fault::Invalid(_) => (Errno::INVAL, None),
        Fault::NoXattr => (Errno::NODATA, None),
        Fault::Range => (Errno::RANGE, None),
        Fault::NoData => (Errno::NXIO, None),
        Fault::ReadOnly => (Errno::ROFS, None),
        Fault::Unsupported => (Errno::NOSYS, None),
        Fault::Interrupted => (Errno::INTR, None),
        Fault::Read(ReadError::OutOfRange { .. }) => (Errno::INVAL, Some(Level::Warn)),
        Fault::Ending => (Errno::NOTCONN, None),
        // Whatever cannot be filled fails; it is never zeros and never somebody else's bytes.
        Fault::Damaged(_) | Fault::Read(_) | Fault::Fetch(_) | Fault::Evicted | Fault::Io { .. } => {
            (Errno::IO, Some(Level::Error))
        }
    }
}

/// The errno for a fault; logs it with its causes where it matters. `what` says which request it hit.
pub fn of(fault: &Fault, log: &dyn Log, what: fmt::Arguments<'_>) -> Errno {
    let (errno, level) = classify(fault);
    if let Some(level) = level {
        log.line(level, format_args!("{what}: {}: the reader gets {}", Chain(fault), name(errno)));
    }
    errno
}

/// The name by which people know an errno, or what the system calls it.
fn name(errno: Errno) -> String {
    match errno {
        Errno::IO => "EIO".to_owned(),
        Errno::INVAL => "EINVAL".to_owned(),
        other => other.to_string(),
    }
}

/// An error with its causes, on one line, each said once: many messages name their cause themselves.
pub(crate) struct Chain<'a>(pub(crate) &'a dyn std::error::Error);

impl fmt::Display for Chain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = self.0.to_string();
        let mut next = self.0.source();
        while let Some(cause) = next {
            let said = cause.to_string();
            if !text.contains(&said) {
                text = format!("{text}: {said}");
            }
            next = cause.source();
        }
        f.write_str(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    #[test]
    fn ordinary_answers_are_silent_and_lost_bytes_are_eio() {
        let lines = Mutex::new(Vec::new());
        let log = |level: Level, text: fmt::Arguments<'_>| lines.lock().unwrap().push((level, text.to_string()));
        for (fault, want) in [
            (Fault::NoName, Errno::NOENT),
            (Fault::NoInode, Errno::STALE),
            (Fault::ReadOnly, Errno::ROFS),
            (Fault::Unsupported, Errno::NOSYS),
            (Fault::NoXattr, Errno::NODATA),
            (Fault::Interrupted, Errno::INTR),
            (Fault::Ending, Errno::NOTCONN),
        ] {
            assert_eq!(of(&fault, &log, format_args!("x")), want);
        }
        assert!(lines.lock().unwrap().is_empty());
        let cause = std::io::Error::other("the disk says no");
        for fault in [
            Fault::Damaged(Box::new(std::io::Error::other("the disk says no"))),
            Fault::Read(ReadError::Corrupt { what: "extent", at: 1, why: "the disk says no" }),
            FetchError::TimedOut.into(),
            Fault::Evicted,
            Fault::Io { what: "reading a space", source: cause },
            FetchError::io("read", std::io::Error::other("the disk says no")).into(),
        ] {
            assert_eq!(of(&fault, &log, format_args!("image: reading")), Errno::IO, "{fault}");
        }
        let lines = lines.into_inner().unwrap();
        assert_eq!(lines.len(), 6);
        assert!(lines.iter().all(|(level, _)| *level == Level::Error));
        assert_eq!(lines[4].1, "image: reading: reading a space: the disk says no: the reader gets EIO");
        assert!(lines.iter().all(|(_, line)| line.matches("the disk says no").count() <= 1), "{lines:?}");
    }
}
