//! Whoever waits for frames: answered exactly once, by the last frame, the first failure or the deadline.

use super::overlay::Overlay;
use super::timer::TimerKey;
use crate::{Done, FetchError};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub(crate) struct Waiter {
    open: AtomicBool,
    state: Mutex<State>,
}

struct State {
    /// Frames that are not there yet.
    remaining: u32,
    done: Option<Done>,
    timer: Option<TimerKey>,
    /// Frames in memory that must live until all are there.
    held: Vec<Arc<Vec<u8>>>,
}

impl std::fmt::Debug for Waiter {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiter").field("open", &self.open).finish_non_exhaustive()
    }
}

/// An answer that is due: to be given without any lock held.
pub(crate) struct Answer {
    done: Done,
    pub(crate) result: Result<(), FetchError>,
    pub(crate) timer: Option<TimerKey>,
    held: Vec<Arc<Vec<u8>>>,
}

impl Waiter {
    pub(crate) fn new(done: Done) -> Self {
        let state = State { remaining: 0, done: Some(done), timer: None, held: Vec::new() };
        Waiter { open: AtomicBool::new(true), state: Mutex::new(state) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it has not been answered.
    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    /// Arms it: `remaining` frames, and the deadline's timer. Before any of them can be reported.
    pub(crate) fn arm(&self, remaining: u32, timer: TimerKey) {
        let mut state = self.lock();
        state.remaining = remaining;
        state.timer = Some(timer);
    }

    /// One frame more is there, perhaps only in memory.
    pub(crate) fn arrived(&self, memory: Option<&Arc<Vec<u8>>>, overlay: &Overlay) -> Option<Answer> {
        let mut state = self.lock();
        state.done.as_ref()?;
        state.remaining = state.remaining.saturating_sub(1);
        if state.remaining == 0 {
            return self.close(state, Ok(()));
        }
        if let Some(bytes) = memory
            && overlay.hold(bytes.len() as u64)
        {
            state.held.push(Arc::clone(bytes));
        }
        None
    }

    /// It cannot be answered as it wished.
    pub(crate) fn fail(&self, error: FetchError) -> Option<Answer> {
        self.close(self.lock(), Err(error))
    }

    /// Takes the callback back without an answer.
    pub(crate) fn disarm(&self) -> Option<Done> {
        self.open.store(false, Ordering::Relaxed);
        self.lock().done.take()
    }

    fn close(&self, mut state: MutexGuard<'_, State>, result: Result<(), FetchError>) -> Option<Answer> {
        let done = state.done.take()?;
        self.open.store(false, Ordering::Relaxed);
        Some(Answer { done, result, timer: state.timer.take(), held: std::mem::take(&mut state.held) })
    }
}

impl Answer {
    /// Gives it. A completer that panics has said so itself; the thread that runs it has others to serve.
    pub(crate) fn give(self, overlay: &Overlay) {
        let (done, result) = (self.done, self.result);
        let _ = catch_unwind(AssertUnwindSafe(move || done(result)));
        for bytes in self.held {
            overlay.unhold(bytes.len() as u64);
        }
    }
}
