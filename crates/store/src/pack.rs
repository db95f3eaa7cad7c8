//! Writes one object: chunks in, frames out, addresses at once.
//!
//! Each [`PackStream`] fills frames of its own, one after the other in regions of the space that it reserves, so what
//! one thread puts lies together whatever others do. A full frame goes through a bounded queue to worker threads,
//! which compress and write it, in whatever order they finish; the object map says where it went. Where there are
//! enough threads that put, each compresses its own frames instead ([`PackStream::compress_here`]): the frame is in its
//! processor's cache then, and nobody has to be woken.
//!
//! Memory: a buffer of 1 MiB for each stream and two for each worker, another MiB and a zstd context (about 2 MiB)
//! for each thread that compresses, 44 bytes for each of at most [`PackOptions::chunks_in_memory`] digests, 16 bytes a frame. Buffers
//! and contexts are reused: nothing is allocated per frame. Who puts faster than the workers write waits in `put`.
//!
//! The first error of any thread ends the pack: every later `put`, `flush` and `finish` fails with it.
//!
//! It does not know files, trees, or whether the store has a chunk already.

use crate::dedup::Dedup;
use crate::session::Shelf;
use crate::tmp::TmpFile;
use crate::{ObjectId, StoreError};
use format::digest::FrameHasher;
use format::objmap::{Codec, Frame, Header, MAX_SPACE_BLOCKS, chunk_blocks};
use format::{BLOCK, CHUNK, Digest, FRAME_BLOCKS};
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, BufWriter, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use zerocopy::{FromBytes, IntoBytes};

/// Blocks of the space that a stream reserves at a time (16 MiB).
const REGION_BLOCKS: u64 = 16 * FRAME_BLOCKS as u64;
/// A frame that compression does not bring below this part of its size is stored raw: reading it costs no
/// decompression then.
const WORTH: (usize, usize) = (15, 16);
/// How much is written between hints to begin writing to disk.
const WRITEBACK: u64 = 8 << 20;
/// Chunks in a pack that take so much memory that it is given back to the kernel at the end.
const MANY_CHUNKS: u64 = 1 << 18;
/// Bytes of a chunk length.
const LEN: usize = size_of::<u32>();

/// How to pack.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PackOptions {
    /// zstd level.
    pub level: i32,
    /// Threads that compress and write.
    pub workers: usize,
    /// Chunks whose digests are kept in memory (44 bytes each); more are looked up in sorted runs on disk.
    pub chunks_in_memory: usize,
}

impl Default for PackOptions {
    fn default() -> Self {
        PackOptions { level: 3, workers: 2, chunks_in_memory: 1 << 18 }
    }
}

/// A finished pack, part of its session until that is published.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct PackedObject {
    /// The object's name.
    pub id: ObjectId,
    /// Blocks of its space.
    pub space_blocks: u64,
    /// Bytes of the pack.
    pub stored_bytes: u64,
    /// Bytes of the chunks in it, without padding.
    pub content_bytes: u64,
    /// Chunks in it.
    pub chunks: u64,
    /// Frames.
    pub frames: u64,
    /// Frames that compression did not help.
    pub raw_frames: u64,
    /// Bytes of chunks that were put again and not stored again.
    pub duplicate_bytes: u64,
}

/// Writes a pack. Shared by threads, each with a stream of its own.
pub struct PackWriter {
    inner: Arc<Inner>,
    shelf: Arc<Shelf>,
    workers: Vec<JoinHandle<()>>,
}

/// One thread's way into a [`PackWriter`].
pub struct PackStream {
    inner: Arc<Inner>,
    buffer: Option<Buffer>,
    /// What compresses full frames here instead of handing them over.
    here: bool,
    compressor: Option<Compressor>,
    /// What is left of the reserved part of the space.
    next: u64,
    end: u64,
}

/// A frame being filled, or on its way.
struct Buffer {
    space_block: u32,
    /// Whole blocks, padded.
    content: Vec<u8>,
    lens: Vec<u32>,
    hasher: FrameHasher,
}

struct Inner {
    file: TmpFile,
    level: i32,
    /// End of what is written or being written of the pack.
    stored: AtomicU64,
    /// First block of the space that nobody has reserved.
    reserved: AtomicU64,
    /// Streams that hold content which was not handed over.
    unflushed: AtomicUsize,
    content_bytes: AtomicU64,
    duplicate_bytes: AtomicU64,
    failed: AtomicBool,
    failure: Mutex<Option<Failure>>,
    dedup: Mutex<Dedup>,
    spool: Mutex<Spool>,
    queue: Mutex<Queue>,
    /// A frame or the end is in the queue.
    filled: Condvar,
    /// A buffer is free again, or the pack has failed.
    freed: Condvar,
}

#[derive(Default)]
struct Queue {
    full: VecDeque<Buffer>,
    free: Vec<Buffer>,
    made: usize,
    limit: usize,
    closed: bool,
}

/// Frames that are written, in a file of their own until the order is known: for each a [`Frame`] and its chunk lengths.
struct Spool {
    out: BufWriter<TmpFile>,
    /// Where in the spool the frame at a space block is.
    places: Vec<(u32, u64)>,
    len: u64,
    chunks: u64,
    raw_frames: u64,
    space_blocks: u64,
}

/// The first error, to be told to everybody who asks.
#[derive(Debug, Clone)]
struct Failure {
    op: &'static str,
    path: PathBuf,
    os: Option<i32>,
    text: String,
}

impl Failure {
    fn error(&self) -> StoreError {
        let source = match self.os {
            Some(os) => io::Error::from_raw_os_error(os),
            None => io::Error::other(self.text.clone()),
        };
        StoreError::io(self.op, &self.path, source)
    }
}

/// A lock whose holder panicked: the panic is reported when its thread is joined.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl PackWriter {
    pub(crate) fn new(shelf: Arc<Shelf>, options: &PackOptions) -> Result<PackWriter, StoreError> {
        let dir = shelf.dir();
        let workers = options.workers.max(1);
        let spool = Spool {
            out: BufWriter::with_capacity(64 << 10, dir.file("frames")?),
            places: Vec::new(),
            len: 0,
            chunks: 0,
            raw_frames: 0,
            space_blocks: 0,
        };
        let inner = Arc::new(Inner {
            file: dir.file("pack")?,
            level: options.level,
            stored: AtomicU64::new(0),
            reserved: AtomicU64::new(0),
            unflushed: AtomicUsize::new(0),
            content_bytes: AtomicU64::new(0),
            duplicate_bytes: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            dedup: Mutex::new(Dedup::new(dir.clone(), options.chunks_in_memory)),
            spool: Mutex::new(spool),
            queue: Mutex::new(Queue { limit: 2 * workers, ..Queue::default() }),
            filled: Condvar::new(),
            freed: Condvar::new(),
        });
        let mut writer = PackWriter { inner, shelf, workers: Vec::new() };
        for i in 0..workers {
            let inner = writer.inner.clone();
            let thread = std::thread::Builder::new().name(format!("pack-{i}")).spawn(move || inner.work());
            match thread {
                Ok(thread) => writer.workers.push(thread),
                Err(e) => return Err(StoreError::io("start a thread for", writer.inner.file.path(), e)),
            }
        }
        Ok(writer)
    }

    /// A stream: what one thread puts lies together.
    pub fn stream(&self) -> PackStream {
        locked(&self.inner.queue).limit += 1;
        PackStream { inner: self.inner.clone(), buffer: None, here: false, compressor: None, next: 0, end: 0 }
    }

    /// Writes what is left, the object map and the chunk table, and returns when they are on disk. `None` when nothing
    /// was put. Every stream must have been flushed.
    ///
    /// # Errors
    /// The first error of any write; a stream that was not flushed.
    pub fn finish(mut self) -> Result<Option<PackedObject>, StoreError> {
        let packed = self.complete();
        drop(self);
        if packed.as_ref().is_ok_and(|p| p.as_ref().is_some_and(|p| p.chunks > MANY_CHUNKS)) {
            // What follows an import's packs, its index, is where it needs most memory.
            sys::memory::release_free();
        }
        packed
    }

    fn complete(&mut self) -> Result<Option<PackedObject>, StoreError> {
        self.close()?;
        let inner = &*self.inner;
        inner.check()?;
        if inner.unflushed.load(Ordering::Acquire) != 0 {
            return Err(StoreError::Usage("a stream of the pack was not flushed"));
        }
        let mut spool = locked(&inner.spool);
        if spool.places.is_empty() {
            return Ok(None);
        }
        inner.file.sync()?;
        let stored_bytes = inner.stored.load(Ordering::Acquire);
        let (id, map) = write_map(&mut spool, self.shelf.dir().file("map")?, stored_bytes)?;
        map.sync()?;
        let dedup = locked(&inner.dedup);
        let chunks = dedup.write(id)?;
        chunks.sync()?;
        let packed = PackedObject {
            id,
            space_blocks: spool.space_blocks,
            stored_bytes,
            content_bytes: inner.content_bytes.load(Ordering::Relaxed),
            chunks: dedup.total(),
            frames: spool.places.len() as u64,
            raw_frames: spool.raw_frames,
            duplicate_bytes: inner.duplicate_bytes.load(Ordering::Relaxed),
        };
        self.shelf.add(id, inner.file.path().into(), map.path().into(), chunks.path().into());
        Ok(Some(packed))
    }

    /// Ends the workers when the queue is empty.
    fn close(&mut self) -> Result<(), StoreError> {
        locked(&self.inner.queue).closed = true;
        self.inner.filled.notify_all();
        let mut result = Ok(());
        for worker in self.workers.drain(..) {
            if worker.join().is_err() {
                result = Err(StoreError::Usage("a thread that packs panicked"));
            }
        }
        result
    }
}

impl Drop for PackWriter {
    fn drop(&mut self) {
        if !self.workers.is_empty() {
            // Not finished: nobody will read the pack.
            self.inner.fail("pack", io::Error::other("abandoned"));
            let _ = self.close();
        }
    }
}

/// Writes the object map from the spooled frames.
fn write_map(spool: &mut Spool, file: TmpFile, object_len: u64) -> Result<(ObjectId, TmpFile), StoreError> {
    let spool_path = spool.out.get_ref().path().to_path_buf();
    let path = file.path().to_path_buf();
    spool.out.flush().map_err(|e| StoreError::io("write", &spool_path, e))?;
    let spooled = sys::Map::of(spool.out.get_ref().file()).map_err(|e| StoreError::io("map", &spool_path, e))?;
    let (Ok(frames), Ok(chunks)) = (u32::try_from(spool.places.len()), u32::try_from(spool.chunks)) else {
        return Err(StoreError::TooLarge { blocks: MAX_SPACE_BLOCKS });
    };
    spool.places.sort_unstable();
    let record = |at: u64| {
        let bytes = usize::try_from(at).ok().and_then(|at| spooled.as_slice().get(at..));
        bytes
            .and_then(|bytes| Frame::ref_from_prefix(bytes).ok())
            .ok_or_else(|| StoreError::Corrupt { path: spool_path.clone(), why: "somebody else wrote to it".into() })
    };
    let mut out = BufWriter::with_capacity(64 << 10, file);
    let mut hasher = blake3::Hasher::new();
    let mut emit = |bytes: &[u8]| {
        hasher.update(bytes);
        out.write_all(bytes).map_err(|e| StoreError::io("write", &path, e))
    };
    emit(Header::new(object_len, spool.space_blocks, frames, chunks).as_bytes())?;
    let mut first_chunk = 0u32;
    for (_, at) in &spool.places {
        let mut frame = *record(*at)?.0;
        frame.first_chunk = first_chunk.into();
        first_chunk += frame.chunks.get();
        emit(frame.as_bytes())?;
    }
    for (_, at) in &spool.places {
        let (frame, rest) = record(*at)?;
        emit(&rest[..rest.len().min(frame.chunks.get() as usize * LEN)])?;
    }
    let id = Digest(*hasher.finalize().as_bytes());
    let file = out.into_inner().map_err(|e| StoreError::io("write", &path, e.into_error()))?;
    Ok((id, file))
}

impl PackStream {
    /// Adds a chunk of 1 to [`format::CHUNK`] bytes, not all zero, and tells its block in the pack's space at once.
    /// A chunk that the pack has already is not stored again. Waits while the workers are behind.
    ///
    /// # Errors
    /// The first error of any write so far.
    pub fn put(&mut self, chunk: &[u8], digest: &Digest) -> Result<u32, StoreError> {
        if chunk.is_empty() || chunk.len() > CHUNK {
            return Err(StoreError::Usage("a chunk has 1 to 65,536 bytes"));
        }
        debug_assert!(chunk.iter().any(|b| *b != 0), "zeros become holes");
        let len = chunk.len() as u32;
        let blocks = chunk_blocks(len);
        if self.end - self.next < u64::from(blocks) {
            self.reserve()?;
        }
        // Regions end at 2^32 at the latest.
        let block = self.next as u32;
        if let Some(old) = locked(&self.inner.dedup).add(digest, block)? {
            self.inner.duplicate_bytes.fetch_add(len.into(), Ordering::Relaxed);
            return Ok(old);
        }
        self.next += u64::from(blocks);
        let fits = |b: &Buffer| {
            u64::from(b.space_block) + b.blocks() == u64::from(block)
                && b.blocks() + u64::from(blocks) <= u64::from(FRAME_BLOCKS)
        };
        if self.buffer.as_ref().is_some_and(|b| !fits(b)) {
            self.flush()?;
        }
        let buffer = match &mut self.buffer {
            Some(buffer) => buffer,
            none => {
                let buffer = none.insert(self.inner.take_buffer()?);
                buffer.space_block = block;
                self.inner.unflushed.fetch_add(1, Ordering::AcqRel);
                buffer
            }
        };
        buffer.push(chunk, digest);
        self.inner.content_bytes.fetch_add(len.into(), Ordering::Relaxed);
        Ok(block)
    }

    /// Hands over what is buffered. A stream that is dropped without this makes `finish` fail.
    ///
    /// # Errors
    /// The first error of any write so far.
    pub fn flush(&mut self) -> Result<(), StoreError> {
        if let Some(buffer) = self.buffer.take() {
            if self.here {
                let done = self.compress(&buffer);
                self.inner.give_back(buffer);
                done?;
            } else {
                self.inner.send(buffer)?;
            }
            self.inner.unflushed.fetch_sub(1, Ordering::AcqRel);
        }
        self.inner.check()
    }

    /// Whether the calling thread compresses and writes frames that are full from now on, or hands them to the workers
    /// (as at first). For threads that are as many as there are processors.
    pub fn compress_here(&mut self, here: bool) {
        self.here = here;
    }

    fn compress(&mut self, buffer: &Buffer) -> Result<(), StoreError> {
        let path = || self.inner.file.path();
        let compressor = match &mut self.compressor {
            Some(compressor) => compressor,
            none => {
                let made = Compressor::new(self.inner.level).map_err(|e| StoreError::io("compress for", path(), e))?;
                none.insert(made)
            }
        };
        let (codec, stored) = compressor.compress(&buffer.content);
        self.inner.write(buffer, codec, stored).map_err(|e| {
            let text = StoreError::io("write", path(), io::Error::from(e.kind()));
            self.inner.fail("write", e);
            self.inner.check().err().unwrap_or(text)
        })
    }

    fn reserve(&mut self) -> Result<(), StoreError> {
        let start = self.inner.reserved.fetch_add(REGION_BLOCKS, Ordering::Relaxed);
        let end = start.saturating_add(REGION_BLOCKS);
        if end > MAX_SPACE_BLOCKS {
            return Err(StoreError::TooLarge { blocks: MAX_SPACE_BLOCKS });
        }
        // What is left of the region before is used up first when nobody came between.
        if start != self.end {
            self.next = start;
        }
        self.end = end;
        Ok(())
    }
}

impl Drop for PackStream {
    fn drop(&mut self) {
        locked(&self.inner.queue).limit -= 1;
        if let Some(buffer) = self.buffer.take() {
            // Its content is lost, `unflushed` stays and `finish` fails; others may still wait for the buffer.
            self.inner.give_back(buffer);
        }
    }
}

impl Buffer {
    fn new() -> Buffer {
        Buffer {
            space_block: 0,
            content: Vec::with_capacity(FRAME_BLOCKS as usize * BLOCK as usize),
            lens: Vec::with_capacity(FRAME_BLOCKS as usize),
            hasher: FrameHasher::default(),
        }
    }

    fn blocks(&self) -> u64 {
        self.content.len() as u64 / BLOCK
    }

    fn push(&mut self, chunk: &[u8], digest: &Digest) {
        self.content.extend_from_slice(chunk);
        self.content.resize(self.content.len().next_multiple_of(BLOCK as usize), 0);
        self.lens.push(chunk.len() as u32);
        self.hasher.chunk(digest, chunk.len() as u32);
    }

    fn clear(&mut self) {
        self.content.clear();
        self.lens.clear();
        self.hasher = FrameHasher::default();
    }
}

impl Inner {
    fn fail(&self, op: &'static str, error: io::Error) {
        let failure = Failure { op, path: self.file.path().into(), os: error.raw_os_error(), text: error.to_string() };
        locked(&self.failure).get_or_insert(failure);
        self.failed.store(true, Ordering::Release);
        // Under the queue's lock: a thread that is about to wait has either seen the flag or is woken.
        let _queue = locked(&self.queue);
        self.freed.notify_all();
    }

    fn check(&self) -> Result<(), StoreError> {
        if !self.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        match &*locked(&self.failure) {
            Some(failure) => Err(failure.error()),
            None => Ok(()),
        }
    }

    fn take_buffer(&self) -> Result<Buffer, StoreError> {
        let mut queue = locked(&self.queue);
        loop {
            self.check()?;
            if let Some(buffer) = queue.free.pop() {
                return Ok(buffer);
            }
            if queue.made < queue.limit {
                queue.made += 1;
                return Ok(Buffer::new());
            }
            queue = self.freed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn send(&self, buffer: Buffer) -> Result<(), StoreError> {
        let mut queue = locked(&self.queue);
        if queue.closed {
            return Err(StoreError::Usage("the pack is finished already"));
        }
        queue.full.push_back(buffer);
        drop(queue);
        self.filled.notify_one();
        Ok(())
    }

    fn take_frame(&self) -> Option<Buffer> {
        let mut queue = locked(&self.queue);
        loop {
            if let Some(buffer) = queue.full.pop_front() {
                return Some(buffer);
            }
            if queue.closed {
                return None;
            }
            queue = self.filled.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn give_back(&self, mut buffer: Buffer) {
        buffer.clear();
        locked(&self.queue).free.push(buffer);
        self.freed.notify_one();
    }

    /// What a worker does until the queue is closed.
    fn work(&self) {
        let mut compressor = match Compressor::new(self.level) {
            Ok(compressor) => Some(compressor),
            Err(e) => {
                self.fail("compress", e);
                None
            }
        };
        while let Some(buffer) = self.take_frame() {
            // After a failure frames are only taken out of the way.
            if let Some(compressor) = compressor.as_mut().filter(|_| !self.failed.load(Ordering::Acquire)) {
                let (codec, stored) = compressor.compress(&buffer.content);
                if let Err(e) = self.write(&buffer, codec, stored) {
                    self.fail("write", e);
                }
            }
            self.give_back(buffer);
        }
    }

    /// Lets the disk begin with what was written, so that `finish` does not have to wait for all of it. A hint; the
    /// kernel starts writing pages of the range that are dirty.
    fn start_writeback(&self, offset: u64, len: u64) {
        let step = |at: u64| at / WRITEBACK * WRITEBACK;
        let (from, to) = (step(offset), step(offset + len));
        if to > from {
            let _ = sys::file::fadvise_dontneed(self.file.file(), from, to - from);
        }
    }

    fn write(&self, buffer: &Buffer, codec: Codec, stored: &[u8]) -> io::Result<()> {
        let offset = self.stored.fetch_add(stored.len() as u64, Ordering::AcqRel);
        self.file.write_at(stored, offset)?;
        self.start_writeback(offset, stored.len() as u64);
        let frame = Frame {
            offset: offset.into(),
            stored_len: (stored.len() as u32).into(),
            codec: (codec as u32).into(),
            space_block: buffer.space_block.into(),
            blocks: (buffer.blocks() as u32).into(),
            first_chunk: 0.into(),
            chunks: (buffer.lens.len() as u32).into(),
            digest: buffer.hasher.clone().finish(),
        };
        locked(&self.spool).push(&frame, &buffer.lens)
    }
}

impl Spool {
    fn push(&mut self, frame: &Frame, lens: &[u32]) -> io::Result<()> {
        self.out.write_all(frame.as_bytes())?;
        for len in lens {
            self.out.write_all(&len.to_le_bytes())?;
        }
        self.places.push((frame.space_block.get(), self.len));
        self.len += (size_of::<Frame>() + lens.len() * LEN) as u64;
        self.chunks += lens.len() as u64;
        self.raw_frames += u64::from(frame.codec.get() == Codec::Raw as u32);
        let end = u64::from(frame.space_block.get()) + u64::from(frame.blocks.get());
        self.space_blocks = self.space_blocks.max(end);
        Ok(())
    }
}

/// A worker's compression context and buffer.
struct Compressor {
    zstd: zstd::bulk::Compressor<'static>,
    out: Vec<u8>,
}

impl Compressor {
    fn new(level: i32) -> io::Result<Compressor> {
        let zstd = zstd::bulk::Compressor::new(level)?;
        Ok(Compressor { zstd, out: vec![0; FRAME_BLOCKS as usize * BLOCK as usize] })
    }

    /// The form in which a frame is stored.
    fn compress<'a>(&'a mut self, content: &'a [u8]) -> (Codec, &'a [u8]) {
        // The room is only what is worth it: zstd gives up when it is used up.
        let room = content.len() * WORTH.0 / WORTH.1;
        match self.zstd.compress_to_buffer(content, &mut self.out[..room]) {
            Ok(len) => (Codec::Zstd, &self.out[..len]),
            Err(_) => (Codec::Raw, content),
        }
    }
}

impl fmt::Debug for PackWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PackWriter").field("path", &self.inner.file.path()).finish_non_exhaustive()
    }
}

impl fmt::Debug for PackStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PackStream").field("next", &self.next).finish_non_exhaustive()
    }
}
