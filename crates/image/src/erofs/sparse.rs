//! Files that are not one extent: several, or with holes. Decides which of them become chunk-based.
//!
//! In a flat file every block has an address, a hole's too, and reads of a hole reach whoever serves the image.
//! In a chunk-based file, chunks that are entirely holes have no address: they cost neither address space nor
//! reads, and programs that ask for holes find them. Other chunks have the addresses of all their blocks.

use super::PlanError;
use super::plan::{IMAGE_BLOCKS_MAX, SPACE_BLOCKS_MAX, too_large};
use super::rows::{Rows, corrupt};
use format::index::{Extent, Place};

/// The most chunks that one file is cut into; smaller holes of very large files are served as zeros.
const CHUNKS_MAX: u64 = 1 << 14;
/// log2 of the largest chunk, in blocks: what the format's field holds.
const CHUNK_BITS_MAX: u32 = 31;
/// A hole of this many blocks (1 MiB) makes its file chunk-based.
const LARGE_HOLE: u64 = 256;
/// Holes of this many blocks altogether (64 KiB) do, if they are at least an eighth of the file.
const MANY_HOLES: u64 = 16;

/// All files of a plan that are not one extent.
#[derive(Debug, Default)]
pub(super) struct Fragments {
    /// In the order of inodes.
    files: Vec<Fragmented>,
    /// Chunk-based files' runs of chunks with addresses.
    runs: Vec<Run>,
    /// Extents seen; a file's follow those of the file before.
    extents: usize,
    chunked: bool,
}

/// One file that is not one extent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fragmented {
    ino: u32,
    /// Its rows in the index's extents.
    first_extent: u32,
    extents: u32,
    /// log2 of its chunks' blocks, if it is chunk-based.
    pub chunk_bits: Option<u8>,
    /// Its rows in `runs`.
    first_run: u32,
    runs: u32,
}

/// A run of chunks with consecutive addresses.
#[derive(Debug, Clone, Copy)]
pub(super) struct Run {
    pub chunk: u32,
    pub count: u32,
    /// Address of the first one, in blocks from the file's first address.
    pub block: u32,
}

/// What [`Fragments::add`] decided.
pub(super) struct Placed {
    /// Blocks of address space.
    pub blocks: u64,
    /// Chunks of a chunk-based file.
    pub chunks: Option<u64>,
}

/// A run of blocks with content.
#[derive(Clone, Copy)]
struct Piece {
    start: u64,
    end: u64,
}

impl Fragments {
    pub fn any_chunked(&self) -> bool {
        self.chunked
    }

    /// Adds a file of `blocks` blocks, checking its extents. `chunks`: whether it may become chunk-based.
    pub fn add(
        &mut self,
        rows: &Rows<'_>,
        ino: u32,
        place: Place,
        blocks: u64,
        chunks: bool,
    ) -> Result<Placed, PlanError> {
        let extents = self.check(rows, ino, place, blocks)?;
        let mut file = Fragmented {
            ino,
            first_extent: (self.extents - extents.len()) as u32,
            extents: extents.len() as u32,
            chunk_bits: None,
            first_run: self.runs.len() as u32,
            runs: 0,
        };
        let bits = if chunks { chunk_bits(extents, blocks) } else { None };
        let Some(bits) = bits else {
            self.files.push(file);
            return Ok(Placed { blocks, chunks: None });
        };
        let chunk_count = blocks.div_ceil(1 << bits);
        if chunk_count > CHUNKS_MAX {
            return Err(PlanError::Unsupported { ino, why: "it is too long to be cut into chunks" });
        }
        let mut block = 0;
        for piece in pieces(extents) {
            let (chunk, end) = (piece.start >> bits, piece.end.div_ceil(1 << bits));
            let fresh = match self.runs[file.first_run as usize..].last_mut() {
                // The last chunk before holds the first of this piece, or ends where it starts.
                Some(run) if chunk <= u64::from(run.chunk + run.count) => {
                    let more = end.saturating_sub(u64::from(run.chunk + run.count));
                    run.count += more as u32;
                    more
                }
                _ => {
                    let count = end - chunk;
                    self.runs.push(Run { chunk: chunk as u32, count: count as u32, block: block as u32 });
                    count
                }
            };
            block += fresh << bits;
            if end << bits > blocks && fresh > 0 {
                block -= (end << bits) - blocks; // the file ends within its last chunk
            }
            too_large("its content", block, IMAGE_BLOCKS_MAX)?;
        }
        file.runs = (self.runs.len() - file.first_run as usize) as u32;
        file.chunk_bits = Some(bits as u8);
        self.chunked = true;
        self.files.push(file);
        Ok(Placed { blocks: block, chunks: Some(chunk_count) })
    }

    /// The file's extents, if they are what the format prescribes.
    fn check<'a>(&mut self, rows: &Rows<'a>, ino: u32, place: Place, blocks: u64) -> Result<&'a [Extent], PlanError> {
        match place.object.get() {
            Place::NONE => return Ok(&[]),
            Place::MANY => {}
            _ => return Err(corrupt("inode", ino, "its object does not exist")),
        }
        if place.value.get() as usize != self.extents {
            return Err(corrupt("inode", ino, "its extents do not follow those of the file before"));
        }
        let rest = rows.extents.get(self.extents..).unwrap_or(&[]);
        let mut end = 0;
        for (n, extent) in rest.iter().enumerate() {
            let count = u64::from(extent.count.get() & !Extent::LAST);
            let start = u64::from(extent.file_block.get());
            let Some(object) = rows.objects.get(extent.object.get() as usize) else {
                return Err(corrupt("inode", ino, "an extent's object does not exist"));
            };
            if count == 0 || start < end || start + count > blocks {
                return Err(corrupt("inode", ino, "its extents overlap or lie behind its end"));
            }
            if u64::from(extent.space_block.get()) + count > object.space_blocks.get().min(SPACE_BLOCKS_MAX) {
                return Err(corrupt("inode", ino, "an extent lies outside its object"));
            }
            end = start + count;
            if extent.count.get() & Extent::LAST != 0 {
                self.extents += n + 1;
                return Ok(&rest[..=n]);
            }
        }
        Err(corrupt("inode", ino, "its last extent is missing"))
    }

    pub fn get(&self, ino: u32) -> Option<&Fragmented> {
        self.files.binary_search_by_key(&ino, |file| file.ino).ok().map(|at| &self.files[at])
    }

    pub fn runs(&self, file: &Fragmented) -> &[Run] {
        &self.runs[file.first_run as usize..][..file.runs as usize]
    }
}

impl Fragmented {
    /// The file's rows in the index's extents.
    pub fn extents<'a>(&self, rows: &Rows<'a>) -> Option<&'a [Extent]> {
        rows.extents.get(self.first_extent as usize..)?.get(..self.extents as usize)
    }
}

/// Runs of blocks with content: extents that touch are one.
fn pieces(extents: &[Extent]) -> impl Iterator<Item = Piece> {
    let mut rest = extents.iter().map(|extent| {
        let start = u64::from(extent.file_block.get());
        Piece { start, end: start + u64::from(extent.count.get() & !Extent::LAST) }
    });
    let mut ahead = rest.next();
    std::iter::from_fn(move || {
        let mut piece = ahead.take()?;
        for next in rest.by_ref() {
            if next.start != piece.end {
                ahead = Some(next);
                break;
            }
            piece.end = next.end;
        }
        Some(piece)
    })
}

/// log2 of the blocks of the chunks that a file is cut into, or `None` if it stays flat.
///
/// The largest size at which each chunk has either content or is a hole, but one that gives at most
/// [`CHUNKS_MAX`] chunks.
pub(super) fn chunk_bits(extents: &[Extent], blocks: u64) -> Option<u32> {
    let (mut holes, mut largest, mut end) = (0, 0, 0);
    // The lowest bit set in any border between content and hole.
    let mut borders = 0;
    for piece in pieces(extents) {
        let hole = piece.start - end;
        holes += hole;
        largest = largest.max(hole);
        borders |= piece.start;
        if piece.end != blocks {
            borders |= piece.end;
        }
        end = piece.end;
    }
    holes += blocks - end;
    largest = largest.max(blocks - end);
    let whole = blocks.next_power_of_two().trailing_zeros();
    if holes == blocks {
        return Some(whole.min(CHUNK_BITS_MAX));
    }
    if largest < LARGE_HOLE && (holes < MANY_HOLES || holes < blocks / 8) {
        return None;
    }
    let exact = if borders == 0 { whole } else { borders.trailing_zeros() };
    let few = blocks.div_ceil(CHUNKS_MAX).next_power_of_two().trailing_zeros();
    let bits = exact.max(few).min(CHUNK_BITS_MAX);
    // Cut that coarsely, a hole may be left or not.
    let mut end = 0;
    for piece in pieces(extents) {
        if piece.start >> bits > end {
            return Some(bits);
        }
        end = piece.end.div_ceil(1 << bits);
    }
    (end << bits < blocks).then_some(bits)
}
