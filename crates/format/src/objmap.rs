//! The object map: how to materialise one object's space. Normative text: `doc/format/object-map.md`.
//!
//! A header, the frame table and the chunk lengths. The map's BLAKE3 is the object's name, so the frame digests
//! are authenticated by whoever names the object.
//!
//! [`View::open`] checks everything that the specification promises, so that accessors need not; a map that was
//! opened once can be viewed again with [`View::reopen`], which costs nothing.

use crate::{BLOCK, CHUNK, Digest, FRAME_BLOCKS, FormatError};
use std::ops::Range;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first 8 bytes of an object map.
pub const MAGIC: [u8; 8] = *b"LROBJMAP";
/// The version that this code reads and writes.
pub const VERSION: u32 = 1;
/// The most blocks that a space has: block addresses are 32 bits.
pub const MAX_SPACE_BLOCKS: u64 = 1 << 32;

/// The header, at byte 0; [`Frame`] rows follow at once, then the chunk lengths (u32 each).
#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: U32,
    /// Bits that a reader must know.
    pub incompat: U32,
    /// Bytes of the whole map.
    pub total_len: U64,
    /// Bytes of the object (the pack) that the frames lie in.
    pub object_len: U64,
    /// Blocks of the space.
    pub space_blocks: U64,
    /// Frames.
    pub frame_count: U32,
    /// Chunks of all frames.
    pub chunk_count: U32,
    /// Reserved, zero.
    pub reserved: [u8; 12],
    /// CRC-32C over the header before this field.
    pub crc: U32,
}
const _: () = assert!(size_of::<Header>() == 64);

impl Header {
    /// A complete header for a map with these counts.
    pub fn new(object_len: u64, space_blocks: u64, frame_count: u32, chunk_count: u32) -> Header {
        let total = size_of::<Header>() as u64
            + u64::from(frame_count) * size_of::<Frame>() as u64
            + u64::from(chunk_count) * size_of::<U32>() as u64;
        let mut header = Header {
            magic: MAGIC,
            version: VERSION.into(),
            incompat: 0.into(),
            total_len: total.into(),
            object_len: object_len.into(),
            space_blocks: space_blocks.into(),
            frame_count: frame_count.into(),
            chunk_count: chunk_count.into(),
            reserved: [0; 12],
            crc: 0.into(),
        };
        header.crc = header.checksum().into();
        header
    }

    fn checksum(&self) -> u32 {
        let bytes = self.as_bytes();
        crc32c::crc32c(&bytes[..bytes.len() - size_of::<U32>()])
    }
}

/// One frame: a stored byte range of the object that unpacks to consecutive blocks of the space. Rows are sorted
/// by `space_block` and do not overlap; gaps between them hold nothing and no extent may point there.
///
/// The unpacked content is the frame's chunks, each padded with zeros to whole blocks.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Frame {
    /// Byte offset in the object.
    pub offset: U64,
    /// Stored bytes.
    pub stored_len: U32,
    /// A [`Codec`].
    pub codec: U32,
    /// First block in the space.
    pub space_block: U32,
    /// Blocks, 1 to [`crate::FRAME_BLOCKS`].
    pub blocks: U32,
    /// First of its chunk lengths.
    pub first_chunk: U32,
    /// Chunks.
    pub chunks: U32,
    /// Digest over the lengths and digests of its chunks; see [`crate::digest::FrameHasher`].
    pub digest: Digest,
}
const _: () = assert!(size_of::<Frame>() == 64);

impl Frame {
    /// Bytes that it unpacks to.
    pub fn unpacked_len(&self) -> usize {
        self.blocks.get() as usize * BLOCK as usize
    }

    /// Where it lies in the object.
    pub fn stored_range(&self) -> Range<u64> {
        let start = self.offset.get();
        start..start.saturating_add(self.stored_len.get().into())
    }
}

/// How a frame is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Codec {
    /// As it is, padding included.
    Raw = 0,
    /// One zstd frame.
    Zstd = 1,
}

impl Codec {
    /// Decodes the tag.
    pub fn from_raw(raw: u32) -> Result<Self, crate::FormatError> {
        match raw {
            0 => Ok(Codec::Raw),
            1 => Ok(Codec::Zstd),
            other => Err(crate::FormatError::Unsupported { what: "frame codec", value: other.into() }),
        }
    }
}

/// Blocks that a chunk of `len` bytes takes.
pub fn chunk_blocks(len: u32) -> u32 {
    len.div_ceil(BLOCK as u32)
}

/// A map's bytes, seen as what they are.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    header: &'a Header,
    frames: &'a [Frame],
    chunks: &'a [U32],
}

impl<'a> View<'a> {
    /// Checks `bytes` against the specification, in time linear in their length and without allocation. Says nothing
    /// about their digest.
    ///
    /// # Errors
    /// The first thing that is wrong, and where.
    pub fn open(bytes: &'a [u8]) -> Result<View<'a>, FormatError> {
        let header = check_header(bytes)?;
        let view = View::split(bytes, header).ok_or(corrupt(16, "length does not fit the counts"))?;
        view.check_frames()?;
        Ok(view)
    }

    /// The view of bytes that [`View::open`] has accepted before. `None` only when they were not.
    pub fn reopen(bytes: &'a [u8]) -> Option<View<'a>> {
        let (header, _) = Header::ref_from_prefix(bytes).ok()?;
        View::split(bytes, header)
    }

    fn split(bytes: &'a [u8], header: &'a Header) -> Option<View<'a>> {
        let body = bytes.get(size_of::<Header>()..)?;
        let (frames, rest) = <[Frame]>::ref_from_prefix_with_elems(body, header.frame_count.get() as usize).ok()?;
        let chunks = <[U32]>::ref_from_bytes_with_elems(rest, header.chunk_count.get() as usize).ok()?;
        Some(View { header, frames, chunks })
    }

    fn check_frames(&self) -> Result<(), FormatError> {
        let space_blocks = self.header.space_blocks.get();
        let object_len = self.header.object_len.get();
        let mut next_block = 0u64;
        let mut next_chunk = 0u32;
        for (i, frame) in self.frames.iter().enumerate() {
            let bad = |field: usize, why| Err(corrupt(size_of::<Header>() + i * size_of::<Frame>() + field, why));
            let (start, blocks) = (u64::from(frame.space_block.get()), frame.blocks.get());
            if blocks == 0 || blocks > FRAME_BLOCKS {
                return bad(20, "frame of no or too many blocks");
            }
            if start < next_block {
                return bad(16, "frame overlaps the one before or is out of order");
            }
            next_block = start + u64::from(blocks);
            if next_block > space_blocks {
                return bad(16, "frame reaches beyond the space");
            }
            let stored = u64::from(frame.stored_len.get());
            match frame.offset.get().checked_add(stored) {
                Some(end) if end <= object_len => {}
                _ => return bad(0, "frame reaches beyond the object"),
            }
            let unpacked = u64::from(blocks) * BLOCK;
            let fits = match Codec::from_raw(frame.codec.get())? {
                Codec::Raw => stored == unpacked,
                Codec::Zstd => stored > 0 && stored <= unpacked,
            };
            if !fits {
                return bad(8, "stored length does not fit the codec and the blocks");
            }
            if frame.first_chunk.get() != next_chunk {
                return bad(24, "chunks are not in the order of the frames");
            }
            let lens = next_chunk.checked_add(frame.chunks.get()).and_then(|end| {
                let lens = self.chunks.get(next_chunk as usize..end as usize);
                next_chunk = end;
                lens
            });
            let Some(lens) = lens else { return bad(28, "more chunks than the map has") };
            let mut sum = 0u32;
            for len in lens {
                let len = len.get();
                if len == 0 || len > CHUNK as u32 {
                    return bad(28, "chunk of no or too many bytes");
                }
                // At most `blocks` + 16 before the check below ends it.
                sum += chunk_blocks(len);
                if sum > blocks {
                    break;
                }
            }
            if sum != blocks {
                return bad(28, "the chunks do not fill the frame's blocks");
            }
        }
        if next_chunk as usize != self.chunks.len() {
            return Err(corrupt(44, "chunks that belong to no frame"));
        }
        Ok(())
    }

    /// The header.
    pub fn header(&self) -> &'a Header {
        self.header
    }

    /// The frame table.
    pub fn frames(&self) -> &'a [Frame] {
        self.frames
    }

    /// The lengths of a frame's chunks.
    pub fn chunk_lens(&self, frame: &Frame) -> &'a [U32] {
        let first = frame.first_chunk.get() as usize;
        first.checked_add(frame.chunks.get() as usize).and_then(|end| self.chunks.get(first..end)).unwrap_or(&[])
    }

    /// The frame that holds a block; `None` in a gap or beyond the end.
    pub fn frame_of_block(&self, block: u32) -> Option<u32> {
        let after = self.frames.partition_point(|f| f.space_block.get() <= block);
        let i = after.checked_sub(1)?;
        let frame = &self.frames[i];
        (block - frame.space_block.get() < frame.blocks.get()).then_some(i as u32)
    }

    /// The length of the chunk that starts at a block; `None` where none starts.
    pub fn chunk_at(&self, block: u32) -> Option<u32> {
        let frame = &self.frames[self.frame_of_block(block)? as usize];
        let (mut at, block) = (u64::from(frame.space_block.get()), u64::from(block));
        for len in self.chunk_lens(frame) {
            if at >= block {
                return (at == block).then_some(len.get());
            }
            at += u64::from(chunk_blocks(len.get()));
        }
        None
    }
}

fn check_header(bytes: &[u8]) -> Result<&Header, FormatError> {
    let (header, _) = Header::ref_from_prefix(bytes).map_err(|_| corrupt(0, "shorter than its header"))?;
    if header.magic != MAGIC {
        return Err(corrupt(0, "not an object map"));
    }
    if header.version.get() != VERSION {
        return Err(FormatError::Unsupported { what: "object map version", value: header.version.get().into() });
    }
    if header.crc.get() != header.checksum() {
        return Err(corrupt(60, "header checksum"));
    }
    if header.incompat.get() != 0 {
        return Err(FormatError::Unsupported { what: "object map feature", value: header.incompat.get().into() });
    }
    if header.reserved != [0; 12] {
        return Err(corrupt(48, "reserved bytes are not zero"));
    }
    if header.total_len.get() != bytes.len() as u64 {
        return Err(corrupt(16, "length is not the file's"));
    }
    if header.space_blocks.get() > MAX_SPACE_BLOCKS {
        return Err(corrupt(32, "space of too many blocks"));
    }
    Ok(header)
}

fn corrupt(at: usize, why: &'static str) -> FormatError {
    FormatError::Corrupt { what: "object map", at: at as u64, why }
}

#[cfg(test)]
#[path = "objmap/tests.rs"]
mod tests;
