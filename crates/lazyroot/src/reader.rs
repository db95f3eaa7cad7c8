//! Reads an image's content straight from the store's objects: without daemon, mount or cache.
//!
//! For commands that read once (`cat`, `export`, `diff`). Every frame is verified before a byte of it is used. A few
//! unpacked frames are kept, so that reading in path order, which is how packs are written, unpacks each once.

use crate::source::open_index;
use anyhow::{Context, anyhow};
use format::digest::FileHasher;
use format::{BLOCK, CHUNK, Digest};
use image::index::{Index, InodeKind};
use std::io::Write;
use std::sync::mpsc;
use std::time::{Duration, Instant};
use store::{
    Class, FrameDecoder, ImageName, ImageRecord, IndexFile, LocalStore, ObjectMap, ObjectStore, ReadRequest, Request,
    Store,
};

/// Unpacked frames that are kept.
const KEPT_FRAMES: usize = 8;
/// How long one read of the store may take.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// Zeros that are written at once for holes.
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

struct Kept {
    object: u32,
    frame: u32,
    used: u64,
    bytes: Vec<u8>,
}

/// An image, open for reading.
pub struct ImageReader {
    name: String,
    index: Index,
    maps: Vec<ObjectMap>,
    objects: LocalStore,
    decoder: FrameDecoder,
    kept: Vec<Kept>,
    clock: u64,
    _file: IndexFile,
}

impl std::fmt::Debug for ImageReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ImageReader").field("name", &self.name).field("index", &self.index).finish_non_exhaustive()
    }
}

/// Finds an image by name.
pub fn find(store: &Store, name: &str) -> anyhow::Result<(ImageName, ImageRecord)> {
    let name = ImageName::parse(name)?;
    let record = store.image(&name)?;
    Ok((name, record))
}

impl ImageReader {
    /// Opens the image called `name`.
    pub fn open(store: &Store, name: &str) -> anyhow::Result<ImageReader> {
        let (name, record) = find(store, name)?;
        Self::open_index(store, &name.to_string(), &record.index)
    }

    /// Opens an index by digest.
    pub fn open_index(store: &Store, name: &str, digest: &Digest) -> anyhow::Result<ImageReader> {
        let file = store.index_file(digest).with_context(|| format!("image {name}"))?;
        let index = open_index(&file, digest).with_context(|| format!("image {name}"))?;
        let mut maps = Vec::new();
        for (id, _) in index.objects() {
            maps.push(store.object_map(&id).with_context(|| format!("image {name}"))?);
        }
        let objects = LocalStore::new(&store.objects_dir(), 1).context("starting to read objects")?;
        Ok(ImageReader {
            name: name.to_owned(),
            index,
            maps,
            objects,
            decoder: FrameDecoder::new(),
            kept: Vec::new(),
            clock: 0,
            _file: file,
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its index; cheap to clone.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// Reads whole blocks of an object's space.
    pub fn read_space(&mut self, object: u32, block: u32, count: u32, out: &mut [u8]) -> anyhow::Result<()> {
        let mut at = block;
        let mut rest = out;
        let end = block.checked_add(count).context("blocks beyond the end of a space")?;
        while at < end {
            let bytes = self.blocks_at(object, at)?;
            let take = bytes.len().min((end - at) as usize * BLOCK as usize);
            let (head, tail) = rest.split_at_mut_checked(take).context("buffer too small")?;
            head.copy_from_slice(&bytes[..take]);
            rest = tail;
            at += (take / BLOCK as usize) as u32;
        }
        Ok(())
    }

    /// What the frame that holds `block` holds from there on: whole blocks, at least one.
    fn blocks_at(&mut self, object: u32, block: u32) -> anyhow::Result<&[u8]> {
        let map = self.maps.get(object as usize).ok_or_else(|| anyhow!("no object number {object}"))?;
        let frame =
            map.frame_of_block(block).ok_or_else(|| anyhow!("block {block} of object {} is in no frame", map.id()))?;
        let row = map.frame(frame).ok_or_else(|| anyhow!("no frame {frame}"))?;
        let (first, blocks) = (row.space_block.get(), row.blocks.get());
        let (from, to) = ((block - first) as usize * BLOCK as usize, blocks as usize * BLOCK as usize);
        self.frame(object, frame)?.get(from..to).context("a frame is shorter than its map says")
    }

    fn frame(&mut self, object: u32, frame: u32) -> anyhow::Result<&[u8]> {
        self.clock += 1;
        let clock = self.clock;
        if let Some(i) = self.kept.iter().position(|k| (k.object, k.frame) == (object, frame)) {
            self.kept[i].used = clock;
            return Ok(&self.kept[i].bytes);
        }
        let map = self.maps.get(object as usize).ok_or_else(|| anyhow!("no object number {object}"))?;
        let row = map.frame(frame).ok_or_else(|| anyhow!("no frame {frame}"))?;
        let start = row.offset.get();
        let end = start.checked_add(row.stored_len.get().into()).context("a frame beyond the end of its object")?;
        let (send, receive) = mpsc::sync_channel(1);
        let request = Request { id: clock, class: Class::Demand, deadline: Instant::now() + READ_TIMEOUT };
        let read = ReadRequest { object: map.id(), range: start..end, request, buffer: Vec::new() };
        self.objects.read(
            read,
            Box::new(move |result| {
                // Nobody waits any more when this fails.
                let _ = send.send(result);
            }),
        );
        let stored = receive.recv().context("the object store went away")??;
        let mut bytes = if self.kept.len() < KEPT_FRAMES {
            Vec::new()
        } else {
            let oldest = (0..self.kept.len()).min_by_key(|i| self.kept[*i].used).unwrap_or(0);
            self.kept.swap_remove(oldest).bytes
        };
        bytes.clear();
        self.decoder
            .decode(map, frame, &stored, &mut bytes)
            .with_context(|| format!("object {}, frame {frame}", map.id()))?;
        self.kept.push(Kept { object, frame, used: clock, bytes });
        Ok(self.kept.last().map_or(&[], |k| &k.bytes))
    }

    /// Writes a regular file's content to `out`, holes as zeros.
    pub fn copy(&mut self, ino: u32, out: &mut dyn Write) -> anyhow::Result<()> {
        self.pieces(ino, &mut |piece| {
            match piece {
                Piece::Hole(mut len) => {
                    while len > 0 {
                        let part = len.min(ZEROS.len() as u64);
                        out.write_all(&ZEROS[..part as usize])?;
                        len -= part;
                    }
                }
                Piece::Bytes(bytes) => out.write_all(bytes)?,
            }
            Ok(())
        })
    }

    /// Shows a regular file's content piece by piece.
    pub fn pieces(&mut self, ino: u32, each: &mut dyn FnMut(Piece<'_>) -> anyhow::Result<()>) -> anyhow::Result<()> {
        let index = self.index.clone();
        let InodeKind::File { size } = index.inode(ino)?.kind else {
            return Err(anyhow!("not a regular file"));
        };
        let mut at = 0u64;
        for extent in index.extents(ino)? {
            let extent = extent?;
            let start = u64::from(extent.file_block) * BLOCK;
            if at < start {
                each(Piece::Hole(start - at))?;
            }
            let stop = (start + u64::from(extent.count) * BLOCK).min(size);
            at = start;
            let mut block = extent.space_block;
            while at < stop {
                let bytes = self.blocks_at(extent.object, block)?;
                let len = (bytes.len() as u64).min(stop - at);
                each(Piece::Bytes(&bytes[..len as usize]))?;
                at += len;
                let read = u32::try_from(len.div_ceil(BLOCK)).context("frame too long")?;
                if at < stop {
                    block = block.checked_add(read).context("blocks beyond the end of a space")?;
                }
            }
        }
        if at < size {
            each(Piece::Hole(size - at))?;
        }
        Ok(())
    }

    /// The digest of a regular file's content, as snapshots have it.
    pub fn hash(&mut self, ino: u32) -> anyhow::Result<Digest> {
        let mut hasher = FileHasher::default();
        let mut chunk: Vec<u8> = Vec::with_capacity(CHUNK);
        self.pieces(ino, &mut |piece| {
            let (mut bytes, mut zeros) = match piece {
                Piece::Hole(len) => (&[][..], len),
                Piece::Bytes(bytes) => (bytes, 0),
            };
            while !bytes.is_empty() || zeros > 0 {
                if chunk.is_empty() && zeros >= CHUNK as u64 {
                    let whole = zeros - zeros % CHUNK as u64;
                    hasher.zeros(whole);
                    zeros -= whole;
                    continue;
                }
                let room = CHUNK - chunk.len();
                if bytes.is_empty() {
                    let take = zeros.min(room as u64);
                    chunk.resize(chunk.len() + take as usize, 0);
                    zeros -= take;
                } else {
                    let (head, tail) = bytes.split_at(bytes.len().min(room));
                    chunk.extend_from_slice(head);
                    bytes = tail;
                }
                if chunk.len() == CHUNK {
                    hasher.chunk(&Digest::of(&chunk), CHUNK);
                    chunk.clear();
                }
            }
            Ok(())
        })?;
        if !chunk.is_empty() {
            hasher.chunk(&Digest::of(&chunk), chunk.len());
        }
        Ok(hasher.finish())
    }

    /// A whole file of at most `limit` bytes.
    pub fn read_small(&mut self, ino: u32, limit: u64) -> anyhow::Result<Vec<u8>> {
        let size = self.index.inode(ino)?.size();
        anyhow::ensure!(size <= limit, "larger than {limit} bytes");
        let mut out = Vec::with_capacity(size as usize);
        self.copy(ino, &mut out)?;
        Ok(out)
    }
}

/// A piece of a file.
#[derive(Debug, Clone, Copy)]
pub enum Piece<'a> {
    /// So many zeros that are not stored.
    Hole(u64),
    /// Content.
    Bytes(&'a [u8]),
}
