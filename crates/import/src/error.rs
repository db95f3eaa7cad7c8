//! Why an import failed: what, where and what to do.

use std::io;
use std::path::PathBuf;

/// Why an import failed. The store is as it was before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ImportError {
    /// The source or the options make no sense together.
    #[error("{what}: {todo}")]
    Usage {
        /// What was asked for.
        what: String,
        /// What to do.
        todo: String,
    },
    /// Something that the source should hold is not there: a tag, a platform, a blob, a file.
    #[error("{place}: {what}")]
    NotFound {
        /// Where it was looked for.
        place: String,
        /// What is missing and what there is instead.
        what: String,
    },
    /// The source contradicts itself or its format.
    #[error("{place}: {what}")]
    Corrupt {
        /// The layer, the entry, the offset.
        place: String,
        /// What is wrong.
        what: String,
    },
    /// Bytes do not have the digest or the size that they were promised with.
    #[error("{place}: {what} is {have}, the image says {want}; the source is damaged or incomplete, fetch it again")]
    Mismatch {
        /// The blob.
        place: String,
        /// `digest`, `diff_id` or `size`.
        what: &'static str,
        /// What was promised.
        want: String,
        /// What is there.
        have: String,
    },
    /// A limit of [`crate::Limits`] or of the tree.
    #[error("{place}: {what}")]
    Limit {
        /// The layer, the entry.
        place: String,
        /// Which limit.
        what: String,
    },
    /// Something that is right but not supported.
    #[error("{place}: {what}")]
    Unsupported {
        /// The layer, the entry.
        place: String,
        /// What it is.
        what: String,
    },
    /// A file that somebody writes to while it is read.
    #[error(
        "{path}: changed while it was being read, {tries} times; stop what writes to it, or leave it out with --exclude"
    )]
    Changing {
        /// The file.
        path: PathBuf,
        /// How often it was tried.
        tries: u32,
    },
    /// The operating system said no.
    #[error("{op} {place}: {source}")]
    Io {
        /// What was being done.
        op: &'static str,
        /// To what.
        place: String,
        /// What it said.
        #[source]
        source: io::Error,
    },
    /// Another part of the same import failed first.
    #[error("stopped")]
    Stopped,
    /// The tree could not be made an index.
    #[error(transparent)]
    Index(#[from] image::index::IndexError),
    /// The store.
    #[error(transparent)]
    Store(#[from] store::StoreError),
}

impl ImportError {
    pub(crate) fn io(op: &'static str, place: impl Into<String>, source: io::Error) -> Self {
        ImportError::Io { op, place: place.into(), source }
    }

    pub(crate) fn corrupt(place: impl Into<String>, what: impl Into<String>) -> Self {
        ImportError::Corrupt { place: place.into(), what: what.into() }
    }

    pub(crate) fn mismatch(place: &str, what: &'static str, want: impl ToString, have: impl ToString) -> Self {
        ImportError::Mismatch { place: place.into(), what, want: want.to_string(), have: have.to_string() }
    }
}
