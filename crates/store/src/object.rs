//! Object maps in memory, and the one way from a stored frame to verified content.
//!
//! An [`ObjectMap`] is checked against its name and in its structure when it is opened, so what it says about frames
//! is what the object's writer said. [`FrameDecoder::decode`] is the only code that turns stored bytes into content,
//! and it returns nothing that does not have the digest of its frame. Hostile maps and hostile frames are errors.
//!
//! It does not know where maps and stored bytes come from.

use format::digest::FrameHasher;
use format::objmap::{Codec, Frame, View};
use format::{BLOCK, Digest, FormatError};
use std::fmt;
use std::sync::Arc;

/// An object's name: the digest of its object map.
pub type ObjectId = Digest;

/// Immutable bytes that several owners read: a mapped file or a buffer.
pub type Shared = Arc<dyn AsRef<[u8]> + Send + Sync>;

/// Why a stored frame did not give its content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// No such frame.
    #[error("no such frame")]
    NoFrame,
    /// The stored bytes are not as many as the map says.
    #[error("{have} stored bytes, the map says {want}")]
    StoredLen {
        /// What the map says.
        want: u64,
        /// What came.
        have: u64,
    },
    /// The stored bytes cannot be decompressed.
    #[error("cannot be decompressed: {why}")]
    Codec {
        /// What the decompressor said.
        why: String,
    },
    /// The stored bytes decompress to something of another size.
    #[error("{have} bytes of content, the map says {want}")]
    ContentLen {
        /// What the map says.
        want: usize,
        /// What came out.
        have: usize,
    },
    /// A chunk is padded with something else than zeros.
    #[error("the padding of chunk {chunk} is not zero")]
    Padding {
        /// The chunk within the frame.
        chunk: u32,
    },
    /// The content is not what the map promises.
    #[error("digest mismatch, want {want}, have {have}")]
    Digest {
        /// What the map promises.
        want: Digest,
        /// The content's.
        have: Digest,
    },
    /// The map itself.
    #[error(transparent)]
    Format(#[from] FormatError),
}

/// An object map, verified against its name and in its structure. Cheap to clone.
#[derive(Clone)]
pub struct ObjectMap {
    bytes: Shared,
    id: ObjectId,
}

impl ObjectMap {
    /// Checks `bytes` against `id` and the specification, in time linear in their length and without allocation.
    ///
    /// # Errors
    /// Whatever is wrong with the bytes.
    pub fn open(bytes: Shared, id: &ObjectId) -> Result<ObjectMap, FormatError> {
        let have = Digest::of((*bytes).as_ref());
        if have != *id {
            return Err(FormatError::Digest { what: "object map", want: *id, have });
        }
        View::open((*bytes).as_ref())?;
        Ok(ObjectMap { bytes, id: *id })
    }

    fn view(&self) -> View<'_> {
        View::reopen((*self.bytes).as_ref()).expect("open checked the bytes, and they are immutable")
    }

    /// The object's name.
    pub fn id(&self) -> ObjectId {
        self.id
    }

    /// Blocks of the space.
    pub fn space_blocks(&self) -> u64 {
        self.view().header().space_blocks.get()
    }

    /// Bytes of the object.
    pub fn object_len(&self) -> u64 {
        self.view().header().object_len.get()
    }

    /// Number of frames.
    pub fn frame_count(&self) -> u32 {
        self.view().header().frame_count.get()
    }

    /// All frames, in the order of the space.
    pub fn frames(&self) -> &[Frame] {
        self.view().frames()
    }

    /// One frame.
    pub fn frame(&self, frame: u32) -> Option<&Frame> {
        self.frames().get(frame as usize)
    }

    /// The frame that holds a block of the space; `None` in a gap or beyond the end.
    pub fn frame_of_block(&self, block: u32) -> Option<u32> {
        self.view().frame_of_block(block)
    }

    /// The lengths of a frame's chunks, bytes; none for a frame that does not exist.
    pub fn chunk_lens(&self, frame: u32) -> impl ExactSizeIterator<Item = u32> + '_ {
        let view = self.view();
        let lens = view.frames().get(frame as usize).map_or(&[][..], |f| view.chunk_lens(f));
        lens.iter().map(|len| len.get())
    }

    /// The length of the chunk that starts at a block of the space; `None` where none starts.
    pub fn chunk_at(&self, block: u32) -> Option<u32> {
        self.view().chunk_at(block)
    }
}

impl fmt::Debug for ObjectMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectMap").field("id", &self.id).field("frames", &self.frame_count()).finish_non_exhaustive()
    }
}

/// Turns stored frames into verified content. Keeps its decompression context between frames; one per thread.
#[derive(Default)]
pub struct FrameDecoder {
    zstd: Option<zstd::bulk::Decompressor<'static>>,
}

impl FrameDecoder {
    /// A decoder. Its context (about 100 KiB) is made when it is first needed.
    pub fn new() -> FrameDecoder {
        FrameDecoder::default()
    }

    /// Decompresses and verifies one frame. On success `out` is the frame's blocks: every chunk padded with zeros
    /// to whole blocks. On an error nothing in `out` may be used.
    ///
    /// # Errors
    /// Whatever is wrong with the stored bytes.
    pub fn decode(&mut self, map: &ObjectMap, frame: u32, stored: &[u8], out: &mut Vec<u8>) -> Result<(), FrameError> {
        let row = map.frame(frame).ok_or(FrameError::NoFrame)?;
        if stored.len() as u64 != u64::from(row.stored_len.get()) {
            return Err(FrameError::StoredLen { want: row.stored_len.get().into(), have: stored.len() as u64 });
        }
        let want = row.unpacked_len();
        match Codec::from_raw(row.codec.get())? {
            Codec::Raw => {
                out.clear();
                out.extend_from_slice(stored);
            }
            Codec::Zstd => {
                // No clearing first: a buffer that is reused for frames of one size is not zeroed again and again.
                out.resize(want, 0);
                let have = self.decompress(stored, out)?;
                if have != want {
                    return Err(FrameError::ContentLen { want, have });
                }
            }
        }
        if out.len() != want {
            return Err(FrameError::ContentLen { want, have: out.len() });
        }
        verify(map, frame, row, out)
    }

    fn decompress(&mut self, stored: &[u8], out: &mut [u8]) -> Result<usize, FrameError> {
        let codec = |e: std::io::Error| FrameError::Codec { why: e.to_string() };
        let zstd = match &mut self.zstd {
            Some(zstd) => zstd,
            empty => empty.insert(zstd::bulk::Decompressor::new().map_err(codec)?),
        };
        zstd.decompress_to_buffer(stored, out).map_err(codec)
    }
}

impl fmt::Debug for FrameDecoder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FrameDecoder").finish_non_exhaustive()
    }
}

/// Checks the content of a frame: chunk digests, padding, frame digest.
pub(crate) fn verify(map: &ObjectMap, frame: u32, row: &Frame, content: &[u8]) -> Result<(), FrameError> {
    let mut hasher = FrameHasher::default();
    let mut rest = content;
    for (chunk, len) in (0u32..).zip(map.chunk_lens(frame)) {
        let bytes = len as usize;
        let padded = bytes.next_multiple_of(BLOCK as usize);
        let Some((head, tail)) = rest.split_at_checked(padded) else {
            return Err(FrameError::ContentLen { want: padded, have: rest.len() });
        };
        if head[bytes..].iter().any(|b| *b != 0) {
            return Err(FrameError::Padding { chunk });
        }
        hasher.chunk(&Digest::of(&head[..bytes]), len);
        rest = tail;
    }
    let have = hasher.finish();
    if have != row.digest || !rest.is_empty() {
        return Err(FrameError::Digest { want: row.digest, have });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use format::objmap::Header;
    use zerocopy::IntoBytes;

    /// A map of one frame over `chunks`, and the content.
    fn one_frame(chunks: &[&[u8]], codec: Codec, stored: impl Fn(&[u8]) -> Vec<u8>) -> (ObjectMap, Vec<u8>, Vec<u8>) {
        let mut hasher = FrameHasher::default();
        let mut content = Vec::new();
        for chunk in chunks {
            hasher.chunk(&Digest::of(chunk), chunk.len() as u32);
            content.extend_from_slice(chunk);
            content.resize(content.len().next_multiple_of(4096), 0);
        }
        let stored = stored(&content);
        let row = Frame {
            offset: 0.into(),
            stored_len: (stored.len() as u32).into(),
            codec: (codec as u32).into(),
            space_block: 0.into(),
            blocks: ((content.len() / 4096) as u32).into(),
            first_chunk: 0.into(),
            chunks: (chunks.len() as u32).into(),
            digest: hasher.finish(),
        };
        let blocks = (content.len() / 4096) as u64;
        let mut bytes = Header::new(stored.len() as u64, blocks, 1, chunks.len() as u32).as_bytes().to_vec();
        bytes.extend_from_slice(row.as_bytes());
        for chunk in chunks {
            bytes.extend_from_slice(&(chunk.len() as u32).to_le_bytes());
        }
        let id = Digest::of(&bytes);
        (ObjectMap::open(Arc::new(bytes), &id).unwrap(), stored, content)
    }

    fn zstd(content: &[u8]) -> Vec<u8> {
        zstd::bulk::compress(content, 3).unwrap()
    }

    #[test]
    fn frames_decode_to_their_content() {
        let chunks: [&[u8]; 3] = [b"hello", &[7; 65536], &[9; 4097]];
        let mut decoder = FrameDecoder::new();
        let mut out = vec![1; 3];
        let (map, stored, content) = one_frame(&chunks, Codec::Zstd, zstd);
        decoder.decode(&map, 0, &stored, &mut out).unwrap();
        assert_eq!(out, content);
        let (map, stored, content) = one_frame(&chunks, Codec::Raw, |c| c.to_vec());
        decoder.decode(&map, 0, &stored, &mut out).unwrap();
        assert_eq!(out, content);
        assert_eq!(map.chunk_lens(0).collect::<Vec<_>>(), [5, 65536, 4097]);
        assert_eq!(map.chunk_lens(1).len(), 0);
        assert_eq!(decoder.decode(&map, 1, &stored, &mut out), Err(FrameError::NoFrame));
    }

    #[test]
    fn a_map_under_another_name_is_refused() {
        let (map, ..) = one_frame(&[b"x"], Codec::Zstd, zstd);
        let other = ObjectMap::open(map.bytes.clone(), &Digest::of(b"other"));
        assert!(matches!(other, Err(FormatError::Digest { .. })));
    }

    #[test]
    fn every_flipped_bit_is_an_error() {
        let mut decoder = FrameDecoder::new();
        let mut out = Vec::new();
        let text: Vec<u8> = (0..6000u32).map(|i| (i * i / 7) as u8).collect();
        for codec in [Codec::Raw, Codec::Zstd] {
            let (map, stored, content) =
                one_frame(&[&text, b"tail"], codec, |c| if codec == Codec::Raw { c.to_vec() } else { zstd(c) });
            for bit in 0..stored.len() * 8 {
                let mut bytes = stored.clone();
                bytes[bit / 8] ^= 1 << (bit % 8);
                match decoder.decode(&map, 0, &bytes, &mut out) {
                    Err(_) => {}
                    // A few bits of a zstd header mean nothing; what comes out is what was promised.
                    Ok(()) => assert!(codec == Codec::Zstd && out == content, "{codec:?} bit {bit}"),
                }
            }
            for len in 0..stored.len() {
                assert!(decoder.decode(&map, 0, &stored[..len], &mut out).is_err());
            }
        }
    }

    #[test]
    fn stored_bytes_that_unpack_to_more_or_less_are_refused() {
        let mut decoder = FrameDecoder::new();
        let mut out = Vec::new();
        for len in [0usize, 4095, 4097, 1 << 20] {
            let (map, stored, _) = one_frame(&[&[3; 4096]], Codec::Zstd, |_| zstd(&vec![3; len]));
            let result = decoder.decode(&map, 0, &stored, &mut out);
            assert!(
                matches!(result, Err(FrameError::Codec { .. } | FrameError::ContentLen { .. })),
                "{len} {result:?}"
            );
        }
    }

    #[test]
    fn padding_must_be_zero() {
        let (map, stored, _) = one_frame(&[b"abc", b"def"], Codec::Raw, |c| {
            let mut c = c.to_vec();
            c[100] = 1;
            c
        });
        let result = FrameDecoder::new().decode(&map, 0, &stored, &mut Vec::new());
        assert_eq!(result, Err(FrameError::Padding { chunk: 0 }));
    }
}
