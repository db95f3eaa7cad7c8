//! What the program exits with: one kind per exit code, and one function from any error to its code.
//!
//! Every command ends in an `anyhow::Error`; the code is found by walking its chain for the first error that says
//! something about its kind. `doc/cli.md` lists the codes.

use std::fmt;

/// What sort of failure a command ended in; each has an exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Anything without a code of its own.
    Failed,
    /// The command line cannot be understood.
    Usage,
    /// An image, path, mount or container that does not exist.
    NotFound,
    /// In use, or already there.
    Busy,
    /// Stored bytes contradict their digests or formats.
    Corrupt,
    /// No daemon, no privilege, or a kernel without the feature.
    Unavailable,
    /// A status that is passed on as it is: a container's, or 125 to 127 when it did not start.
    Status(u8),
}

impl Kind {
    /// The exit code.
    pub fn code(self) -> u8 {
        match self {
            Kind::Failed => 1,
            Kind::Usage => 2,
            Kind::NotFound => 3,
            Kind::Busy => 4,
            Kind::Corrupt => 5,
            Kind::Unavailable => 6,
            Kind::Status(code) => code,
        }
    }

    /// The kind that an exit code stands for.
    pub fn from_code(code: u8) -> Kind {
        match code {
            2 => Kind::Usage,
            3 => Kind::NotFound,
            4 => Kind::Busy,
            5 => Kind::Corrupt,
            6 => Kind::Unavailable,
            0 | 1 => Kind::Failed,
            other => Kind::Status(other),
        }
    }
}

/// A message with its kind.
#[derive(Debug)]
pub struct Failure {
    kind: Kind,
    message: String,
}

impl Failure {
    /// A failure of `kind`; the message says what, where and what to do.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Failure { kind, message: message.into() }
    }

    /// Something does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(Kind::NotFound, message)
    }

    /// The command line is wrong.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Kind::Usage, message)
    }

    /// In use.
    pub fn busy(message: impl Into<String>) -> Self {
        Self::new(Kind::Busy, message)
    }

    /// Stored bytes are damaged.
    pub fn corrupt(message: impl Into<String>) -> Self {
        Self::new(Kind::Corrupt, message)
    }

    /// This machine, user or moment cannot do it.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(Kind::Unavailable, message)
    }

    /// A status passed on; an empty message prints nothing.
    pub fn status(code: u8, message: impl Into<String>) -> Self {
        Self::new(Kind::Status(code), message)
    }

    /// Its kind.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Whether there is nothing to print: a container's status speaks for itself.
    pub fn is_silent(&self) -> bool {
        self.message.is_empty()
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}
