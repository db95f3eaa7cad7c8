//! LazyRoot's on-disk formats: bytes to fields and back.
//!
//! Every structure here is little-endian, made of zerocopy fields, with its size asserted beside it. Nothing
//! in this crate opens a file, starts a thread or knows what a path on the host is. Tags are kept raw and
//! decoded by fallible functions, so an unknown value is *unsupported*, not *corrupt*.
//!
//! The normative descriptions are in `doc/format/`.

#![forbid(unsafe_code)]

pub mod chunks;
pub mod digest;
pub mod erofs;
pub mod index;
pub mod objmap;
pub mod presence;

pub use digest::Digest;

/// The block size of spaces, extents and layouts, in bytes.
pub const BLOCK: u64 = 4096;

/// The fixed chunk size, in bytes: files are cut at multiples of it, and each piece is hashed, deduplicated
/// and addressed by itself. A multiple of [`BLOCK`].
pub const CHUNK: usize = 64 << 10;

/// The most content blocks that one frame holds (1 MiB of content).
pub const FRAME_BLOCKS: u32 = 256;

/// Why bytes could not be read as one of the formats.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone)]
#[non_exhaustive]
pub enum FormatError {
    /// The bytes contradict themselves or the specification.
    #[error("corrupt {what} at byte {at}: {why}")]
    Corrupt {
        /// The structure.
        what: &'static str,
        /// Where, in bytes from the start of the file or section.
        at: u64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// The bytes ask for something that this version does not know.
    #[error("unsupported {what}: {value:#x}; a newer LazyRoot wrote this")]
    Unsupported {
        /// The feature word or tag.
        what: &'static str,
        /// Its value.
        value: u64,
    },
    /// A digest does not match.
    #[error("{what}: digest mismatch, want {want}, have {have}")]
    Digest {
        /// The structure.
        what: &'static str,
        /// The digest that was promised.
        want: Digest,
        /// The digest of the bytes at hand.
        have: Digest,
    },
}
