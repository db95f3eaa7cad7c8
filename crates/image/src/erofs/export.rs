//! An image written to a stand-alone file.

use super::plan::{BLOCK, Plan};
use super::{Data, PlanError};
use crate::index::Index;
use std::io::{self, Seek, SeekFrom, Write};

/// Metadata and content are written in pieces of this many blocks (1 MiB).
const PIECE: u64 = 256;

/// How much of an image [`export`] writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Export {
    /// Everything; holes are left out, so the file is sparse.
    Whole,
    /// The metadata only. The file ends where content would start, so that reading any fails rather than gives
    /// zeros.
    Metadata,
}

/// Why an image could not be exported.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ExportError {
    /// The image's bytes could not be computed.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// Content could not be read.
    #[error("cannot read {count} blocks from block {block} of object {object}")]
    Space {
        /// Row of the index's objects.
        object: u32,
        /// First block.
        block: u32,
        /// Blocks.
        count: u32,
        /// Why.
        source: io::Error,
    },
    /// The image could not be written.
    #[error("cannot write the image at byte {at}")]
    Write {
        /// Where.
        at: u64,
        /// Why.
        source: io::Error,
    },
}

/// Reads `count` blocks from `block` on of the space of `object` (a row of the index's objects) into a buffer of
/// just that length: `(object, block, count, buffer)`.
pub type ReadSpace<'a> = &'a mut dyn FnMut(u32, u32, u32, &mut [u8]) -> io::Result<()>;

/// Writes the image to `out`, an empty file, from its start.
pub fn export<W: Write + Seek>(
    plan: &Plan,
    index: &Index,
    what: Export,
    out: &mut W,
    read_space: ReadSpace<'_>,
) -> Result<(), ExportError> {
    let mut buf = vec![0; (PIECE * BLOCK) as usize];
    let mut at = 0;
    while at < plan.meta_len() {
        let end = plan.meta_len().min(at + PIECE * BLOCK);
        let piece = &mut buf[..(end - at) as usize];
        plan.emit(index, at..end, piece)?;
        out.write_all(piece).map_err(|source| ExportError::Write { at, source })?;
        at = end;
    }
    if what == Export::Whole {
        let blocks = (plan.image_len() - at) / BLOCK;
        for run in plan.data_runs(index, at / BLOCK, blocks) {
            match run? {
                Data::Hole { blocks } => at += blocks * BLOCK,
                Data::Space { object, space_block, blocks } => {
                    out.seek(SeekFrom::Start(at)).map_err(|source| ExportError::Write { at, source })?;
                    let mut done = 0;
                    while done < blocks {
                        let count = PIECE.min(blocks - done) as u32;
                        // Plans hold no run that leaves its object, whose blocks have 32-bit numbers.
                        let block = space_block + done as u32;
                        let piece = &mut buf[..count as usize * BLOCK as usize];
                        read_space(object, block, count, piece).map_err(|source| ExportError::Space {
                            object,
                            block,
                            count,
                            source,
                        })?;
                        out.write_all(piece).map_err(|source| ExportError::Write { at, source })?;
                        done += u64::from(count);
                        at += u64::from(count) * BLOCK;
                    }
                }
            }
        }
        // The image ends with zeros, of which writing the last gives the file its length.
        let last = plan.image_len() - 1;
        out.seek(SeekFrom::Start(last))
            .and_then(|_| out.write_all(&[0]))
            .map_err(|source| ExportError::Write { at: last, source })?;
    }
    out.flush().map_err(|source| ExportError::Write { at, source })
}
