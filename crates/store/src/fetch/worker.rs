//! The pool: threads that unpack, verify and write frames.

use super::overlay::Entry;
use super::table::Work;
use super::{Engine, FrameKey};
use crate::cache::add;
use crate::object_store::FetchError;
use crate::space::Space;
use crate::{FrameDecoder, FrameError, ObjectMap, object};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

/// A thread that has had nothing to do for so long gives its buffers back.
const IDLE: Duration = Duration::from_secs(1);

/// How a piece of work went.
enum Outcome {
    /// The frame is usable, from the disk or from memory.
    Usable(Option<Arc<Vec<u8>>>),
    /// What was on disk is not the frame: it must be fetched.
    Refetch,
    Failed(FetchError),
}

/// What a thread needs for its work: some megabytes.
struct Tools<'a> {
    decoder: FrameDecoder,
    buffer: Vec<u8>,
    /// Counts the threads that have theirs.
    users: &'a AtomicUsize,
}

impl<'a> Tools<'a> {
    fn new(users: &'a AtomicUsize) -> Self {
        users.fetch_add(1, Ordering::Relaxed);
        Tools { decoder: FrameDecoder::new(), buffer: Vec::new(), users }
    }

    /// Gives the memory back, and with the last one's also what reading and writing have left behind.
    fn put_away(self) {
        let users = self.users;
        drop(self);
        if users.load(Ordering::Relaxed) == 0 {
            sys::memory::release_free();
        }
    }
}

impl Drop for Tools<'_> {
    fn drop(&mut self) {
        self.users.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Engine {
    /// A thread of the pool.
    pub(crate) fn run_worker(&self) {
        let mut tools = None;
        loop {
            let Some((key, space, work)) = self.next_work(&mut tools) else { return };
            let Tools { decoder, buffer, .. } = tools.get_or_insert_with(|| Tools::new(&self.tools));
            let outcome = catch_unwind(AssertUnwindSafe(|| self.work_on(key, &space, work, decoder, buffer)));
            match outcome {
                Ok(Outcome::Usable(memory)) => self.finish(key, Ok(memory)),
                Ok(Outcome::Refetch) => self.refetch(key),
                Ok(Outcome::Failed(error)) => self.frame_failed(key, error),
                Err(_) => {
                    // A bug; it has printed its place. Neither the thread nor the waiters are to be lost to it.
                    tools = None;
                    let why = std::io::Error::other("the thread that unpacked it panicked");
                    self.finish(key, Err(FetchError::io("unpack a frame", why)));
                }
            }
        }
    }

    /// Waits for work. `None` when the engine closes.
    fn next_work(&self, tools: &mut Option<Tools<'_>>) -> Option<(FrameKey, Arc<Space>, Work)> {
        let mut table = self.lock();
        loop {
            if table.closed {
                return None;
            }
            if let Some(work) = table.next_work() {
                return Some(work);
            }
            if tools.is_none() {
                table = self.work.wait(table).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let (back, waited) = self.work.wait_timeout(table, IDLE).unwrap_or_else(PoisonError::into_inner);
            table = back;
            if waited.timed_out()
                && let Some(tools) = tools.take()
            {
                drop(table);
                tools.put_away();
                table = self.lock();
            }
        }
    }

    fn work_on(
        &self,
        key: FrameKey,
        space: &Arc<Space>,
        work: Work,
        decoder: &mut FrameDecoder,
        buffer: &mut Vec<u8>,
    ) -> Outcome {
        match work {
            Work::Unpack(stored, part) => {
                let result = match stored.get(part) {
                    Some(stored) => decoder.decode(space.map(), key.frame, stored, buffer),
                    None => Err(FrameError::NoFrame),
                };
                drop(stored);
                if let Err(source) = result {
                    add(&self.stats.corrupt_fetched, 1);
                    return Outcome::Failed(FetchError::Corrupt { object: space.id(), frame: key.frame, source });
                }
                add(&self.stats.frames_filled, 1);
                add(&self.stats.filled_bytes, buffer.len() as u64);
                if space.fill(key.frame, buffer).is_ok() {
                    return Outcome::Usable(None);
                }
                // Whatever the disk has against it: the reader is answered, and later frames try again.
                add(&self.stats.disk_refused, 1);
                let bytes = Arc::new(std::mem::take(buffer));
                self.overlay.insert(Entry { key, space: Arc::downgrade(space), bytes: Arc::clone(&bytes) });
                space.hold(key.frame);
                self.syncer.wake();
                Outcome::Usable(Some(bytes))
            }
            Work::Verify => match space.read_frame(key.frame, buffer) {
                Ok(()) if is_frame(space.map(), key.frame, buffer) => {
                    add(&self.stats.frames_verified, 1);
                    space.accept(key.frame);
                    Outcome::Usable(None)
                }
                _ => {
                    add(&self.stats.corrupt_on_disk, 1);
                    space.reject(key.frame);
                    Outcome::Refetch
                }
            },
            Work::Flush(bytes) => {
                if space.fill(key.frame, &bytes).is_ok() {
                    space.unhold(key.frame);
                    self.overlay.remove(key);
                    self.flush_overlay();
                    return Outcome::Usable(None);
                }
                Outcome::Usable(Some(bytes))
            }
        }
    }
}

/// Whether `content` is what the map promises.
fn is_frame(map: &ObjectMap, frame: u32, content: &[u8]) -> bool {
    map.frame(frame).is_some_and(|row| object::verify(map, frame, row, content).is_ok())
}
