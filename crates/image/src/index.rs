//! The index: a tree compiled to one file that is mapped and read in place. Normative text: `doc/format/index.md`.
//!
//! [`build`] writes one from a [`Tree`](crate::tree::Tree); [`Index`] reads one.
//!
//! Opening checks the header and that the sections have the lengths that the counts ask for, and parses nothing.
//! Every access checks its own bounds. Nobody has to trust the bytes: a damaged or hostile index gives errors, or
//! wrong answers about itself, but no panic, no endless loop and no allocation that follows from a number in it.
//! [`Index::verify`] finds every flipped bit; [`Index::check`] finds everything that is not as `build` writes it.
//!
//! Knows nothing about files, mappings or where objects are.

mod build;
mod check;
mod iter;
mod open;
mod read;
mod write;

pub use build::{BuiltIndex, build, build_from};
pub use iter::{DirEntry, Entries, ExtentView, Extents, XattrIter};
pub use open::Index;
pub use read::{InodeKind, InodeView};

use crate::tree::PathBytes;
use format::FormatError;
use std::sync::Arc;

/// Why an index could not be built, opened or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IndexError {
    /// The bytes are not a valid index.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// The caller asked for something beyond the index's end.
    #[error("no {what} {number} in an index of {count}")]
    Range {
        /// What was asked for.
        what: &'static str,
        /// Its number.
        number: u32,
        /// How many there are.
        count: u32,
    },
    /// The inode is of another kind than was asked for.
    #[error("inode {ino} is not a {want}")]
    WrongKind {
        /// The inode.
        ino: u32,
        /// What it would have to be.
        want: &'static str,
    },
    /// The tree cannot be built: a symlink was never given its target.
    #[error("{0}: symlink without a target")]
    NoTarget(PathBytes),
    /// The tree cannot be built: content lies in a placeholder that was never named.
    #[error("object {0} was never named")]
    UnnamedObject(u32),
    /// The tree cannot be built: content lies behind the end of its object's space.
    #[error("content beyond the end of object {0}")]
    BeyondObject(u32),
    /// Writing failed.
    #[error("writing the index")]
    Io(#[from] std::io::Error),
}

impl IndexError {
    fn corrupt(what: &'static str, at: u64, why: &'static str) -> Self {
        IndexError::Format(FormatError::Corrupt { what, at, why })
    }
}

/// Opens `bytes` as an index and calls everything that reads it. Whatever the bytes are, it returns, soon.
pub fn fuzz_index(bytes: &[u8]) {
    let Ok(index) = Index::open(Arc::new(bytes.to_vec())) else { return };
    let _ = index.verify();
    let _ = index.check();
    let _ = (index.digest(), index.identity(), index.objects().count(), index.object(0), index.xattr_set_count());
    for ino in 0..index.inode_count().min(1000) {
        let _ = index.inode(ino);
        let _ = index.link_target(ino);
        let _ = index.parent(ino);
        let _ = index.path_of(ino).map(|path| index.resolve(&path.0).is_ok());
        let _ = index.extents(ino).map(|extents| extents.count());
        let _ = index.extents_from(ino, 1 << (ino % 40)).map(|extents| extents.count());
        if let Ok(mut entries) = index.entries(ino) {
            for entry in entries.by_ref().take(1000).flatten() {
                let _ = index.lookup(ino, entry.name);
            }
            entries.seek(u32::MAX);
            let _ = (entries.next().is_none(), entries.count_all());
        }
        let _ = index.lookup(ino, b"no such name");
    }
    for set in 0..index.xattr_set_count().min(1000) {
        let _ = index.xattrs(set).map(|set| set.count());
    }
    let _ = (index.inode(u32::MAX).is_err(), index.xattrs(u32::MAX).is_err(), index.resolve(b"//a/./b/../c"));
}

#[cfg(test)]
mod tests;
