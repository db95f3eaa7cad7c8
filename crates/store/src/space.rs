//! A space: the unpacked address space of one object, on this node, as one sparse file.
//!
//! Job: resolve ranges into segments of the file, keep track of which frames are usable, make them durable in batches,
//! give them up again. [`crate::fetch`] brings the bytes.
//!
//! Each frame is in one of these states, told by one bit each:
//! - *absent*;
//! - *claimed*: the presence file says that it is on disk, but this process has not verified it. Not readable: the
//!   first fetch reads it back, hashes it and makes it usable, or drops it and asks the store;
//! - *usable*: verified in this process. Only this makes it readable;
//! - *held*: verified, but the disk refused it; readable from memory for a while.
//!
//! Invariants: a usable bit is set after the frame's verified bytes were written. It is cleared, with the claim, before
//! they are punched, and only after every reader of before has left (module `guard`). The presence file claims a frame only
//! after its bytes were synced. No reader ever waits for a sync: resolving reads a bit per frame and takes no lock.
//!
//! Failure model: when the disk fails to sync, what was to be synced is given up (its pages may be gone from the page
//! cache without a trace) and fetched again. A file that somebody truncates gives errors, never zeros: it is read with
//! pread and friends, never mapped. Bits that flip on disk after a frame was verified are found at its first use in
//! the next process.
//!
//! Memory: five bitmaps and the claims of both slots, one bit per frame each, so less than a byte per frame (20 GB of
//! content are 20,000 frames, 18 KB); less than 2 KiB besides. The object map is mapped, not read.
//!
//! It does not know: images, layouts, who reads.

pub(crate) mod bits;
pub(crate) mod guard;
#[cfg(test)]
mod tests;

use crate::cache::{Evicted, add};
use crate::disk::{Disk, DiskFile, Open};
use crate::fetch::{Engine, FrameKey};
use crate::presence::{PresenceFile, Revoked};
use crate::source::{BlockSource, Presence, ReadError, Resolution};
use crate::{Done, FetchError, FrameError, ObjectId, ObjectMap, Request, StoreError};
use bits::{Bits, ones};
use format::{BLOCK, FormatError};
use guard::{Readers, Slot};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

/// Frames that one step of an eviction takes: they cannot be fetched meanwhile.
const EVICT_AT_ONCE: u32 = 1024;

/// The unpacked address space of one object on this node.
#[derive(Debug)]
pub struct Space {
    /// Names it among the spaces that the cache has had open.
    key: u64,
    map: ObjectMap,
    engine: Arc<Engine>,
    disk: Arc<dyn Disk>,
    dir: PathBuf,
    data: DiskFile,
    usable: Bits,
    claimed: Bits,
    held: Bits,
    /// Filled since the last sync.
    dirty: Bits,
    /// Claimed on disk, but found to be wrong.
    wrong: Bits,
    readers: Readers,
    /// Syncs that failed.
    failed_syncs: AtomicU64,
    /// The syncer has been told.
    queued: AtomicBool,
    durable: Mutex<Durable>,
    /// One eviction at a time, as [`Readers::drain`] needs.
    evicting: Mutex<()>,
}

#[derive(Debug)]
struct Durable {
    file: PresenceFile,
    /// The names of the files are on disk.
    named: bool,
}

/// How much of a space is there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Usage {
    /// Frames of the space.
    pub frames: u32,
    /// Unpacked bytes in them.
    pub bytes: u64,
    /// Frames that can be read, or are on disk and will be verified at their first use.
    pub present_frames: u32,
    /// Unpacked bytes in them.
    pub present_bytes: u64,
}

impl Space {
    /// Opens or makes the space in `dir`, which exists. Whatever is wrong with what was there, it then counts as absent.
    pub(crate) fn open(
        key: u64,
        map: ObjectMap,
        engine: Arc<Engine>,
        disk: Arc<dyn Disk>,
        dir: &Path,
    ) -> Result<Arc<Space>, StoreError> {
        let (data_path, presence_path) = (dir.join("data"), dir.join("presence"));
        let frames = map.frame_count();
        let len = map.space_blocks().saturating_mul(BLOCK);
        let fail = |op: &'static str, path: &Path| {
            let path = path.to_path_buf();
            move |e: io::Error| StoreError::io(op, path, e)
        };
        let data = disk.open(&data_path, Open::Either).map_err(fail("open", &data_path))?;
        if data.file().metadata().map_err(fail("stat", &data_path))?.len() != len {
            // New, or not ours any more: claims of before are about other bytes, and must be gone before these begin
            // to look right.
            match disk.remove(&presence_path) {
                Ok(()) => disk.sync_dir(dir).map_err(fail("sync", dir))?,
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(StoreError::io("remove", presence_path, e)),
            }
            disk.resize(&data, len).map_err(fail("resize", &data_path))?;
        }
        let file = PresenceFile::open(Arc::clone(&disk), &presence_path, map.id(), frames)
            .map_err(fail("open", &presence_path))?;
        Ok(Arc::new(Space {
            key,
            engine,
            disk,
            dir: dir.to_path_buf(),
            data,
            usable: Bits::new(frames),
            claimed: Bits::from_words(frames, file.claims()),
            held: Bits::new(frames),
            dirty: Bits::new(frames),
            wrong: Bits::new(frames),
            readers: Readers::default(),
            failed_syncs: AtomicU64::new(0),
            queued: AtomicBool::new(false),
            durable: Mutex::new(Durable { file, named: false }),
            evicting: Mutex::new(()),
            map,
        }))
    }

    /// The object.
    pub fn id(&self) -> ObjectId {
        self.map.id()
    }

    /// Bytes of the space.
    pub fn len_bytes(&self) -> u64 {
        self.map.space_blocks().saturating_mul(BLOCK)
    }

    /// How the object materialises.
    pub fn map(&self) -> &ObjectMap {
        &self.map
    }

    /// How much of it is there.
    pub fn usage(&self) -> Usage {
        let mut usage = Usage { frames: self.map.frame_count(), ..Usage::default() };
        for frame in 0..usage.frames {
            let bytes = self.frame_range(frame).map_or(0, |range| range.end - range.start);
            usage.bytes += bytes;
            if self.claimed.get(frame) || self.is_usable(frame) {
                usage.present_frames += 1;
                usage.present_bytes += bytes;
            }
        }
        usage
    }

    pub(crate) fn key(&self) -> u64 {
        self.key
    }

    /// The bytes that a frame takes in the file.
    fn frame_range(&self, frame: u32) -> Option<Range<u64>> {
        let row = self.map.frame(frame)?;
        let start = u64::from(row.space_block.get()) * BLOCK;
        Some(start..start + u64::from(row.blocks.get()) * BLOCK)
    }

    fn check(&self, offset: u64, len: usize) -> Result<u64, ReadError> {
        let size = self.len_bytes();
        let end = offset.checked_add(len as u64).filter(|end| *end <= size);
        end.ok_or(ReadError::OutOfRange { offset, len, size })
    }

    /// The frames that make up a range, in order; an error when they leave a gap.
    fn frames_of(&self, offset: u64, len: usize) -> Result<Frames<'_>, ReadError> {
        let end = self.check(offset, len)?;
        // The blocks of a space have 32-bit numbers; beyond them there is no frame.
        let first = u32::try_from(offset / BLOCK).ok().and_then(|block| self.map.frame_of_block(block));
        Ok(Frames { space: self, next: first, at: offset, end })
    }

    /// Appends segments that cover exactly `offset .. offset + len` (bytes), or says that something is missing.
    ///
    /// # Errors
    /// A range outside of the space, or one that touches blocks that no frame holds.
    pub fn resolve(self: &Arc<Self>, offset: u64, len: usize, out: &mut Resolution) -> Result<Presence, ReadError> {
        let frames = self.frames_of(offset, len)?;
        if len == 0 {
            return Ok(Presence::Ready);
        }
        // Before any bit is looked at.
        let guard = out.guard_of(self);
        for piece in frames {
            let (frame, range) = piece?;
            let len = (range.end - range.start) as usize;
            if self.usable.get(frame) {
                out.push_held(guard, range.start, len);
            } else if self.held.get(frame)
                && let Some(bytes) = self.in_memory(frame)
                && let Some(whole) = self.frame_range(frame)
            {
                out.push_memory(bytes, (range.start - whole.start) as usize, len);
            } else {
                return Ok(Presence::Missing);
            }
        }
        Ok(Presence::Ready)
    }

    /// Makes the frames of the range usable. `done` runs exactly once, see [`BlockSource::fetch`].
    pub fn fetch(self: &Arc<Self>, offset: u64, len: usize, request: Request, done: Done) {
        match self.frames_to_fetch(offset, len) {
            Ok(frames) => self.engine.fetch(self, frames, request, done),
            Err(error) => done(Err(error)),
        }
    }

    fn frames_to_fetch(&self, offset: u64, len: usize) -> Result<Range<u32>, FetchError> {
        let mut found: Option<Range<u32>> = None;
        let corrupt = |frame, error| {
            let (at, why) = match error {
                ReadError::Corrupt { at, why, .. } => (at, why),
                _ => (offset, "a range outside of the space"),
            };
            let source = FrameError::Format(FormatError::Corrupt { what: "extent", at, why });
            FetchError::Corrupt { object: self.id(), frame, source }
        };
        let frames = self.frames_of(offset, len).map_err(|e| corrupt(0, e))?;
        if len == 0 {
            return Ok(0..0);
        }
        for piece in frames {
            let (frame, _) = piece.map_err(|e| corrupt(found.as_ref().map_or(0, |f| f.end), e))?;
            found = Some(found.map_or(frame, |f| f.start)..frame + 1);
        }
        Ok(found.unwrap_or(0..0))
    }

    /// Counts a reader in.
    pub(crate) fn pin(self: &Arc<Self>) -> Pin {
        Pin { slot: self.readers.enter(), space: Arc::clone(self) }
    }

    /// Whether a frame can be read now.
    pub(crate) fn is_usable(&self, frame: u32) -> bool {
        self.usable.get(frame) || (self.held.get(frame) && self.in_memory(frame).is_some())
    }

    /// Whether the presence file says that a frame is there.
    pub(crate) fn is_claimed(&self, frame: u32) -> bool {
        self.claimed.get(frame)
    }

    fn in_memory(&self, frame: u32) -> Option<Arc<Vec<u8>>> {
        let bytes = self.engine.overlay.get(FrameKey { space: self.key, frame });
        if bytes.is_none() {
            // It was pushed out. Should it come back at this very moment, it will only be fetched once more.
            self.held.clear(frame);
        }
        bytes
    }

    /// Writes a frame's verified content and makes it usable.
    pub(crate) fn fill(self: &Arc<Self>, frame: u32, content: &[u8]) -> io::Result<()> {
        let range = self.frame_range(frame).filter(|range| range.end - range.start == content.len() as u64);
        let range = range.ok_or(io::ErrorKind::InvalidInput)?;
        let failed = self.failed_syncs.load(Ordering::SeqCst);
        self.disk.write_at(&self.data, content, range.start)?;
        self.usable.set(frame);
        self.claimed.clear(frame);
        // After the write, so that a sync which takes this bit covers it.
        self.dirty.set(frame);
        self.tell_syncer();
        // A sync that failed meanwhile may have been about this write, and no other one will say so. Either it is seen
        // here, or `persist` sees the bit just set.
        if self.failed_syncs.load(Ordering::SeqCst) != failed {
            self.usable.clear(frame);
            return Err(io::Error::other("a sync failed while this was written"));
        }
        Ok(())
    }

    /// Reads what is on disk of a frame.
    pub(crate) fn read_frame(&self, frame: u32, buffer: &mut Vec<u8>) -> io::Result<()> {
        let range = self.frame_range(frame).ok_or(io::ErrorKind::InvalidInput)?;
        buffer.resize((range.end - range.start) as usize, 0);
        sys::file::pread_exact(self.data.as_fd(), buffer, range.start)
    }

    /// A claimed frame has been verified.
    pub(crate) fn accept(&self, frame: u32) {
        self.usable.set(frame);
        self.claimed.clear(frame);
    }

    /// A claimed frame is not what it should be.
    pub(crate) fn reject(self: &Arc<Self>, frame: u32) {
        self.claimed.clear(frame);
        self.wrong.set(frame);
        self.tell_syncer();
    }

    /// A frame's content is in the overlay.
    pub(crate) fn hold(&self, frame: u32) {
        self.held.set(frame);
    }

    /// It is on disk now.
    pub(crate) fn unhold(&self, frame: u32) {
        self.held.clear(frame);
    }

    fn tell_syncer(self: &Arc<Self>) {
        if !self.queued.swap(true, Ordering::SeqCst) {
            self.engine.syncer.add(Arc::clone(self));
        }
    }

    /// Makes durable what was filled: first the bytes, then the claims.
    pub(crate) fn persist(self: &Arc<Self>) -> io::Result<()> {
        let mut durable = self.durable.lock().unwrap_or_else(PoisonError::into_inner);
        // Before the bits are taken: what comes later asks for another batch.
        self.queued.store(false, Ordering::SeqCst);
        let mut remove = self.wrong.take();
        let mut add = self.dirty.take();
        if remove.iter().chain(&add).all(|word| *word == 0) {
            return Ok(());
        }
        let stats = &self.engine.stats;
        crate::cache::add(&stats.syncs, 1);
        if let Err(e) = self.disk.sync(&self.data) {
            // The kernel has told it once and may have dropped the pages: nothing of it can be relied on, nor of what
            // was filled while it tried, which it will not tell about again.
            crate::cache::add(&stats.sync_errors, 1);
            self.failed_syncs.fetch_add(1, Ordering::SeqCst);
            add.iter_mut().zip(self.dirty.take()).for_each(|(add, late)| *add |= late);
            ones(&add).for_each(|frame| _ = self.usable.clear(frame));
            ones(&remove).for_each(|frame| _ = self.wrong.set(frame));
            return Err(e);
        }
        // What was given up meanwhile is not claimed. Nothing can have been filled anew in its place: an eviction
        // waits for this lock before it lets that happen.
        add.iter_mut().zip(self.usable.words()).for_each(|(add, usable)| *add &= usable);
        remove.iter_mut().zip(&add).for_each(|(remove, add)| *remove &= !add);
        let result = self.name(&mut durable).and_then(|()| durable.file.update(&add, &remove));
        if result.is_err() {
            crate::cache::add(&stats.sync_errors, 1);
            ones(&add).for_each(|frame| _ = self.dirty.set(frame));
            ones(&remove).for_each(|frame| _ = self.wrong.set(frame));
            self.tell_syncer();
        }
        result
    }

    /// Makes the files' names durable, once: in the space's directory, the one of all spaces, the cache's and the one
    /// that this stands in.
    fn name(&self, durable: &mut Durable) -> io::Result<()> {
        if !durable.named {
            self.dir.ancestors().take(4).try_for_each(|dir| self.disk.sync_dir(dir))?;
            durable.named = true;
        }
        Ok(())
    }

    /// Gives up the frames that lie wholly or partly in a range of the space: takes their claims back, waits for their
    /// readers and frees their blocks. Frames that are on their way are left alone, and so are the blocks of those that
    /// somebody goes on reading.
    ///
    /// # Errors
    /// Whatever the disk says. Nothing is punched then that is still claimed.
    pub fn evict(self: &Arc<Self>, offset: u64, len: u64) -> Result<Evicted, StoreError> {
        let _one = self.evicting.lock().unwrap_or_else(PoisonError::into_inner);
        let end = offset.saturating_add(len);
        let touched = |frame: u32| self.frame_range(frame).is_some_and(|r| r.start < end && offset < r.end);
        let frames = self.map.frame_count();
        let mut all = Evicted::default();
        for first in (0..frames).step_by(EVICT_AT_ONCE as usize) {
            let step = (first..frames.min(first.saturating_add(EVICT_AT_ONCE))).filter(|frame| touched(*frame));
            let step: Vec<u32> = step.collect();
            let Some((low, high)) = step.first().zip(step.last()) else { continue };
            let free = self.engine.begin_evict(self, *low..*high + 1);
            all.kept += (step.len() - free.len()) as u64;
            let result = self.evict_step(&free, &mut all);
            self.engine.end_evict(self, &free);
            result.map_err(|e| StoreError::io("evict from", self.dir.join("data"), e))?;
        }
        Ok(all)
    }

    fn evict_step(self: &Arc<Self>, frames: &[u32], all: &mut Evicted) -> io::Result<()> {
        let mut mask = vec![0u64; self.map.frame_count().div_ceil(64) as usize];
        let (mut gone, mut bytes) = (0, 0);
        let mut runs: Vec<Range<u64>> = Vec::new();
        for &frame in frames {
            mask[frame as usize / 64] |= 1 << (frame % 64);
            let there = self.usable.clear(frame) | self.claimed.clear(frame);
            self.dirty.clear(frame);
            if self.held.clear(frame) {
                self.engine.overlay.remove(FrameKey { space: self.key, frame });
            }
            let Some(range) = self.frame_range(frame) else { continue };
            if there {
                gone += 1;
                bytes += range.end - range.start;
            }
            // All of them, also those that are not there: an earlier process may have left bytes that nobody claims.
            match runs.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => runs.push(range),
            }
        }
        let revoked = self.durable.lock().unwrap_or_else(PoisonError::into_inner).file.revoke(&mask)?;
        if revoked == Revoked::All {
            ones(&self.usable.words().collect::<Vec<_>>()).for_each(|frame| _ = self.dirty.set(frame));
            self.tell_syncer();
        }
        if !self.readers.drain(Instant::now() + self.engine.evict_timeout()) {
            all.kept += gone;
            return Ok(());
        }
        for run in runs {
            self.disk.punch(&self.data, run.start, run.end - run.start)?;
        }
        all.frames += gone;
        all.bytes += bytes;
        add(&self.engine.stats.frames_evicted, gone);
        add(&self.engine.stats.evicted_bytes, bytes);
        Ok(())
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.engine.overlay.forget(self.key);
    }
}

/// Walks the frames of a range: each frame's number, and the part of the range that lies in it.
struct Frames<'a> {
    space: &'a Space,
    next: Option<u32>,
    at: u64,
    end: u64,
}

impl Iterator for Frames<'_> {
    type Item = Result<(u32, Range<u64>), ReadError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.at >= self.end {
            return None;
        }
        let found = self.next.and_then(|frame| Some((frame, self.space.frame_range(frame)?)));
        let Some((frame, whole)) = found.filter(|(_, whole)| whole.contains(&self.at)) else {
            let at = std::mem::replace(&mut self.at, self.end);
            return Some(Err(ReadError::Corrupt { what: "extent", at, why: "no frame holds these blocks" }));
        };
        let part = self.at..whole.end.min(self.end);
        self.at = part.end;
        self.next = frame.checked_add(1);
        Some(Ok((frame, part)))
    }
}

/// A reader of a space, counted in.
#[derive(Debug)]
pub(crate) struct Pin {
    space: Arc<Space>,
    slot: Slot,
}

impl Pin {
    pub(crate) fn is_of(&self, space: &Arc<Space>) -> bool {
        Arc::ptr_eq(&self.space, space)
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.space.data.as_fd()
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.space.readers.leave(self.slot);
    }
}

impl BlockSource for Arc<Space> {
    fn len_bytes(&self) -> u64 {
        Space::len_bytes(self)
    }

    fn resolve(&self, offset: u64, len: usize, out: &mut Resolution) -> Result<Presence, ReadError> {
        Space::resolve(self, offset, len, out)
    }

    fn fetch(&self, offset: u64, len: usize, request: Request, done: Done) {
        Space::fetch(self, offset, len, request, done);
    }
}
