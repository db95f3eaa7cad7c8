//! An index laid out as one EROFS image: plan every address, then emit any range.
//!
//! [`Plan::new`] fixes all addresses in one pass over the index, without reading any content. The metadata lies
//! together in front and is computed from index and plan on demand, any byte range at a time; what follows is
//! file content, of which the plan knows only where it lies in which space ([`Plan::data_at`]). The format and
//! the reasons for this layout are in `doc/format/erofs.md`.
//!
//! Invariants: the same index and options give the same bytes, in one piece or in many; the places of directories,
//! of other inodes, and of content grow with inode numbers, so all are found by binary search; planning and emitting
//! allocate nothing per inode, name or path.
//!
//! Failure model: an index that opens may still be hostile. The plan accepts it only if it is a tree of
//! directories in the order that the index format prescribes, with names in order and extents inside their
//! files and spaces; what it takes to plan is bounded by the size of the index. Emitting with another index than
//! the one planned gives errors or wrong bytes, never a panic.
//!
//! Does not know: what a space is, who asks for ranges, what a front end does.

mod data;
mod emit;
mod export;
mod plan;
mod rows;
mod sparse;
mod xattr;

#[cfg(test)]
mod tests;

pub use data::{Data, DataRuns};
pub use export::{Export, ExportError, ReadSpace, export};
pub use plan::Plan;

use crate::index::IndexError;

/// Who reads the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Shape {
    /// The Linux kernel.
    #[default]
    Kernel,
    /// gVisor: no extended attributes and no chunk-based files, since it refuses inodes that have them.
    Gvisor,
}

/// What to plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub struct Options {
    /// Who reads the image.
    pub shape: Shape,
}

impl Options {
    /// The usual options for this reader.
    pub fn new(shape: Shape) -> Self {
        Options { shape }
    }
}

/// Why an index could not be planned, or a range not emitted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// The index contradicts itself.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// The index opens, but something in it is not what the format prescribes.
    #[error("corrupt index: {what} {at}: {why}")]
    Corrupt {
        /// The kind of row.
        what: &'static str,
        /// Its number.
        at: u32,
        /// What is wrong with it.
        why: &'static str,
    },
    /// An inode is sound, but EROFS cannot hold it.
    #[error("inode {ino} cannot be put into an EROFS image: {why}")]
    Unsupported {
        /// The inode.
        ino: u32,
        /// What EROFS cannot hold.
        why: &'static str,
    },
    /// The image would be larger than EROFS or our limits allow.
    #[error(
        "the image is too large for EROFS: {what} would take {blocks} blocks or more, the limit is {limit}; split it or mount it as a tree"
    )]
    TooLarge {
        /// Metadata or the whole image.
        what: &'static str,
        /// Blocks of 4 KiB needed, as far as counted.
        blocks: u64,
        /// Blocks of 4 KiB allowed.
        limit: u64,
    },
    /// Bytes were asked for that the image does not have, or the buffer's length is not the range's.
    #[error("bytes {start}..{end} are not {what}")]
    Range {
        /// First byte.
        start: u64,
        /// Byte behind the last.
        end: u64,
        /// What they should have been.
        what: &'static str,
    },
}
