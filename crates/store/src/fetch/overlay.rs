//! Frames that the disk refuses, kept in memory for a while so that their readers are answered all the same.
//!
//! A bounded ring: a new frame pushes the oldest out. A fetch of several frames may keep those that it has got
//! until the last one is there ([`Overlay::hold`], bounded too), so that it is answered even while others push
//! frames through the ring.

use super::FrameKey;
use crate::space::Space;
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

#[derive(Debug)]
pub(crate) struct Overlay {
    limit: u64,
    state: Mutex<State>,
    held: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    ring: VecDeque<Entry>,
    bytes: u64,
    /// Frames in the ring, and those that were pushed out while somebody held them.
    frames: HashMap<FrameKey, Weak<Vec<u8>>>,
}

#[derive(Debug, Clone)]
pub(crate) struct Entry {
    pub(crate) key: FrameKey,
    pub(crate) space: Weak<Space>,
    pub(crate) bytes: Arc<Vec<u8>>,
}

impl Overlay {
    pub(crate) fn new(limit: u64) -> Self {
        Overlay { limit, state: Mutex::default(), held: AtomicU64::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, key: FrameKey) -> Option<Arc<Vec<u8>>> {
        self.lock().frames.get(&key)?.upgrade()
    }

    /// Bytes in the ring.
    pub(crate) fn bytes(&self) -> u64 {
        self.lock().bytes
    }

    pub(crate) fn insert(&self, entry: Entry) {
        let mut state = self.lock();
        state.remove(entry.key);
        state.frames.insert(entry.key, Arc::downgrade(&entry.bytes));
        state.bytes += entry.bytes.len() as u64;
        state.ring.push_back(entry);
        // The newest always stays: its reader needs it.
        while state.bytes > self.limit && state.ring.len() > 1 {
            let Some(old) = state.ring.pop_front() else { break };
            state.bytes -= old.bytes.len() as u64;
        }
        state.frames.retain(|_, bytes| bytes.strong_count() > 0);
    }

    /// The frame that has been here longest.
    pub(crate) fn oldest(&self) -> Option<Entry> {
        self.lock().ring.front().cloned()
    }

    pub(crate) fn remove(&self, key: FrameKey) {
        self.lock().remove(key);
    }

    /// Drops all frames of a space.
    pub(crate) fn forget(&self, space: u64) {
        let mut state = self.lock();
        state.frames.retain(|key, _| key.space != space);
        let old = std::mem::take(&mut state.ring);
        state.ring = old.into_iter().filter(|entry| entry.key.space != space).collect();
        state.bytes = state.ring.iter().map(|entry| entry.bytes.len() as u64).sum();
    }

    /// Whether a fetch may keep `len` bytes beyond the ring's life; it gives them back with [`Overlay::unhold`].
    pub(crate) fn hold(&self, len: u64) -> bool {
        self.held
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |held| (held + len <= self.limit).then_some(held + len))
            .is_ok()
    }

    pub(crate) fn unhold(&self, len: u64) {
        self.held.fetch_sub(len, Ordering::Relaxed);
    }
}

impl State {
    fn remove(&mut self, key: FrameKey) {
        if self.frames.remove(&key).is_some()
            && let Some(at) = self.ring.iter().position(|entry| entry.key == key)
            && let Some(old) = self.ring.remove(at)
        {
            self.bytes -= old.bytes.len() as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(frame: u32, len: usize) -> Entry {
        Entry { key: FrameKey { space: 1, frame }, space: Weak::new(), bytes: Arc::new(vec![frame as u8; len]) }
    }

    #[test]
    fn the_ring_is_bounded_and_the_newest_stays() {
        let overlay = Overlay::new(100);
        for frame in 0..10 {
            overlay.insert(entry(frame, 40));
            assert!(overlay.bytes() <= 100);
            assert_eq!(overlay.get(FrameKey { space: 1, frame }).unwrap()[0], frame as u8);
        }
        assert!(overlay.get(FrameKey { space: 1, frame: 7 }).is_none());
        overlay.insert(entry(10, 1000));
        assert_eq!(overlay.bytes(), 1000);
        overlay.insert(entry(10, 10));
        assert_eq!(overlay.bytes(), 10);
        assert_eq!(overlay.oldest().unwrap().key.frame, 10);
        overlay.insert(entry(11, 10));
        overlay.remove(FrameKey { space: 1, frame: 10 });
        assert_eq!(overlay.bytes(), 10);
        overlay.forget(1);
        assert_eq!(overlay.bytes(), 0);
        assert!(overlay.oldest().is_none());
    }

    #[test]
    fn a_held_frame_outlives_the_ring_within_bounds() {
        let overlay = Overlay::new(100);
        let first = entry(0, 60);
        let kept = first.bytes.clone();
        overlay.insert(first);
        overlay.insert(entry(1, 60));
        assert!(overlay.get(FrameKey { space: 1, frame: 0 }).is_some());
        drop(kept);
        assert!(overlay.get(FrameKey { space: 1, frame: 0 }).is_none());
        assert!(overlay.hold(60) && !overlay.hold(60) && overlay.hold(40));
        overlay.unhold(60);
        assert!(overlay.hold(60));
    }
}
