//! File content into chunks: cut, hashed, looked up, packed.
//!
//! A [`ChunkWriter`] belongs to one thread. It takes the bytes of one file after the other, in ascending order with
//! gaps for holes, and yields each file's digest and runs. Chunks of zeros become holes; what the store or this
//! import's pack has already is only referred to. Memory is one chunk and the current file's runs.
//!
//! Knows neither trees nor where the bytes come from.

use crate::context::Context;
use crate::error::ImportError;
use format::digest::FileHasher;
use format::{BLOCK, CHUNK, Digest};
use std::collections::HashMap;
use std::sync::Mutex;
use store::{ChunkRef, ObjectId, PackStream};

/// The number of this import's own pack among the objects of [`Objects`].
pub(crate) const OWN_PACK: u32 = 0;

/// A run of blocks, its object numbered by [`Objects`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LocalRun {
    pub(crate) file_block: u32,
    pub(crate) count: u32,
    pub(crate) object: u32,
    pub(crate) space_block: u32,
}

/// The objects that this import refers to: its own pack and older ones.
#[derive(Debug, Default)]
pub(crate) struct Objects(Mutex<ObjectTable>);

#[derive(Debug, Default)]
struct ObjectTable {
    numbers: HashMap<ObjectId, u32>,
    list: Vec<(ObjectId, u64)>,
}

impl Objects {
    fn number(&self, chunk: &ChunkRef) -> u32 {
        let mut table = lock(&self.0);
        if let Some(&n) = table.numbers.get(&chunk.object) {
            return n;
        }
        table.list.push((chunk.object, chunk.space_blocks));
        let n = table.list.len() as u32;
        table.numbers.insert(chunk.object, n);
        n
    }

    /// Id and space of each older object, the first having number 1.
    pub(crate) fn list(&self) -> Vec<(ObjectId, u64)> {
        lock(&self.0).list.clone()
    }
}

/// The lock; a thread that panicked while holding it left nothing half done.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Who compresses full frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Frames {
    /// The pack's workers.
    HandedOver,
    /// The thread that fills them, but for those of files so large that the others might run out of work meanwhile.
    Here,
}

/// Bytes of a file whose frames several threads compress.
const LARGE: u64 = 8 << 20;

/// See the module.
#[derive(Debug)]
pub(crate) struct ChunkWriter<'a> {
    context: &'a Context<'a>,
    stream: PackStream,
    frames: Frames,
    /// The last object that a chunk was found in, and its number.
    recent: Option<(ObjectId, u32)>,
    size: u64,
    /// Where in the file the current chunk begins.
    chunk_at: u64,
    chunk: Vec<u8>,
    hasher: FileHasher,
    runs: Vec<LocalRun>,
    /// Content bytes counted since the last report.
    unreported: u64,
}

impl<'a> ChunkWriter<'a> {
    pub(crate) fn new(context: &'a Context<'a>, frames: Frames) -> Self {
        ChunkWriter {
            context,
            frames,
            stream: context.pack.stream(),
            recent: None,
            size: 0,
            chunk_at: 0,
            chunk: Vec::with_capacity(CHUNK),
            hasher: FileHasher::default(),
            runs: Vec::new(),
            unreported: 0,
        }
    }

    /// Starts a file of `size` bytes; an unfinished one is forgotten.
    pub(crate) fn begin(&mut self, size: u64) {
        self.stream.compress_here(self.frames == Frames::Here && size < LARGE);
        self.size = size;
        self.chunk_at = 0;
        self.chunk.clear();
        self.hasher = FileHasher::default();
        self.runs.clear();
    }

    /// Adds bytes at `offset`, which is not before the end of the last ones. The caller keeps within the size.
    pub(crate) fn data(&mut self, offset: u64, mut bytes: &[u8]) -> Result<(), ImportError> {
        self.skip_to(offset)?;
        while !bytes.is_empty() {
            let len = self.chunk_len();
            if self.chunk.is_empty() && bytes.len() >= len {
                let (head, rest) = bytes.split_at(len);
                bytes = rest;
                self.put(head)?;
                continue;
            }
            let (head, rest) = bytes.split_at(bytes.len().min(len - self.chunk.len()));
            bytes = rest;
            self.chunk.extend_from_slice(head);
            self.put_if_full()?;
        }
        Ok(())
    }

    /// Counts bytes of a file whose content is not wanted.
    pub(crate) fn pass(&mut self, bytes: u64) -> Result<(), ImportError> {
        self.report(bytes)
    }

    /// Ends the file: its digest, and its runs until the next `begin`.
    pub(crate) fn finish(&mut self) -> Result<(Digest, &[LocalRun]), ImportError> {
        self.skip_to(self.size)?;
        let digest = std::mem::take(&mut self.hasher).finish();
        self.report(0)?;
        Ok((digest, &self.runs))
    }

    /// Hands over what is buffered; nothing may follow.
    pub(crate) fn close(mut self) -> Result<(), ImportError> {
        Ok(self.stream.flush()?)
    }

    /// Bytes that the current chunk will have; 0 behind the file's end.
    fn chunk_len(&self) -> usize {
        (self.size - self.chunk_at).min(CHUNK as u64) as usize
    }

    fn put_if_full(&mut self) -> Result<(), ImportError> {
        if self.chunk.len() < self.chunk_len() || self.chunk.is_empty() {
            return Ok(());
        }
        let chunk = std::mem::take(&mut self.chunk);
        let result = self.put(&chunk);
        self.chunk = chunk;
        self.chunk.clear();
        result
    }

    /// Everything up to `offset` that was not given is zeros.
    fn skip_to(&mut self, offset: u64) -> Result<(), ImportError> {
        if !self.chunk.is_empty() {
            let gap = offset.saturating_sub(self.chunk_at + self.chunk.len() as u64);
            let fill = gap.min((self.chunk_len() - self.chunk.len()) as u64) as usize;
            self.chunk.resize(self.chunk.len() + fill, 0);
            self.put_if_full()?;
        }
        if self.chunk.is_empty() && offset > self.chunk_at {
            let gap = offset - self.chunk_at;
            // Whole chunks, and a last short one.
            let whole = if offset == self.size { gap } else { gap - gap % CHUNK as u64 };
            self.hasher.zeros(whole);
            self.chunk_at += whole;
            self.chunk.resize((gap - whole) as usize, 0);
        }
        Ok(())
    }

    /// One complete chunk at `chunk_at`.
    fn put(&mut self, chunk: &[u8]) -> Result<(), ImportError> {
        let file_block = (self.chunk_at / BLOCK) as u32;
        self.chunk_at += chunk.len() as u64;
        self.report(chunk.len() as u64)?;
        if is_zero(chunk) {
            self.hasher.zeros(chunk.len() as u64);
            return Ok(());
        }
        let digest = Digest::of(chunk);
        self.hasher.chunk(&digest, chunk.len());
        let (object, space_block) = match self.context.session.find_chunk(&digest)? {
            Some(found) => {
                self.context.found(chunk.len() as u64);
                (self.object_number(&found), found.block)
            }
            None => (OWN_PACK, self.stream.put(chunk, &digest)?),
        };
        let count = (chunk.len() as u64).div_ceil(BLOCK) as u32;
        match self.runs.last_mut() {
            Some(last)
                if last.object == object
                    && last.file_block + last.count == file_block
                    && last.space_block.checked_add(last.count) == Some(space_block) =>
            {
                last.count += count;
            }
            _ => self.runs.push(LocalRun { file_block, count, object, space_block }),
        }
        Ok(())
    }

    fn object_number(&mut self, found: &ChunkRef) -> u32 {
        match self.recent {
            Some((id, n)) if id == found.object => n,
            _ => {
                let n = self.context.objects.number(found);
                self.recent = Some((found.object, n));
                n
            }
        }
    }

    /// Counts content, a megabyte at a time or at a file's end.
    fn report(&mut self, bytes: u64) -> Result<(), ImportError> {
        self.unreported += bytes;
        if self.unreported >= 1 << 20 || (bytes == 0 && self.unreported > 0) {
            self.context.unpacked(std::mem::take(&mut self.unreported))?;
        }
        Ok(())
    }
}

/// Whether there is no bit set; quick to say no.
fn is_zero(bytes: &[u8]) -> bool {
    let mut blocks = bytes.chunks_exact(256);
    blocks.by_ref().all(|b| b.iter().fold(0, |a, b| a | b) == 0) && blocks.remainder().iter().all(|&b| b == 0)
}
