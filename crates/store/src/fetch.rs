//! The fetch engine: brings missing frames into their spaces, each once however many wait.
//!
//! Job: take fetches from front ends, ask the store, have frames unpacked, verified and written by a small pool of
//! threads, and answer whoever waits: from the pool when the frame is there, from the timer when the deadline passes.
//!
//! Invariants:
//! - a frame has at most one flight (`table::Flight`), and every fetch of it joins that;
//! - a frame's usable bit is set after its bytes were verified and written, before its flight ends; so under the
//!   table's lock a frame that is neither usable nor in flight is really missing;
//! - every callback runs exactly once, and with no lock held;
//! - nothing waits for the store: a silent one costs table entries, bounded bytes and timer events, never a thread;
//! - demand before prefetch before scrub, at the store and in the pool; a frame has the class of its most urgent
//!   waiter; the less urgent classes get half of the bytes in flight at most, one object three quarters.
//!
//! Failure model: a store that fails transiently is asked again with growing pauses while somebody waits; one that
//! does not answer within the attempt's time is asked again likewise, and what it sends later is dropped. A frame
//! that does not verify is read once more, then its waiters get the error. Neighbours that were read together and
//! failed are read again one by one. A disk that refuses a frame costs memory, bounded, not the answer.
//!
//! It does not know: who reads, or how objects are transported.

mod overlay;
mod table;
#[cfg(test)]
mod tests;
mod timer;
mod waiter;
mod worker;

use crate::FrameError;
use crate::cache::CacheOptions;
use crate::cache::{Stats, StatsSnapshot, add, sub};
use crate::object_store::{Class, Done, FetchError, ObjectStore, ReadRequest, Request};
use crate::presence::Syncer;
use crate::space::Space;
use overlay::Overlay;
use std::cell::Cell;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use table::{Phase, Table, Work};
use timer::Timer;
use waiter::{Answer, Waiter};

/// One frame of one open space.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct FrameKey {
    /// [`Space::key`].
    pub(crate) space: u64,
    pub(crate) frame: u32,
}

/// What the engine keeps to.
#[derive(Debug)]
pub(crate) struct Limits {
    in_flight_bytes: u64,
    read_bytes: u64,
    attempt_timeout: Duration,
    evict_timeout: Duration,
    waiting: usize,
}

/// Pauses before the store is asked again: doubling from the first to the last.
const BACKOFF: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(1280)];

/// Reads that are handed to the store at once before the table is looked at again.
const READS_AT_ONCE: usize = 16;

#[derive(Debug)]
enum Event {
    /// A waiter's deadline.
    Deadline(Arc<Waiter>),
    /// The store did not answer a read.
    GiveUp(u64),
    /// A frame may be asked for again.
    Retry(FrameKey),
}

pub(crate) struct Engine {
    /// For the callbacks that the store keeps, which must not keep the engine.
    me: Weak<Engine>,
    store: Arc<dyn ObjectStore>,
    limits: Limits,
    pub(crate) stats: Stats,
    table: Mutex<Table>,
    work: Condvar,
    /// Threads of the pool that have their buffers.
    tools: AtomicUsize,
    timer: Timer<Event>,
    pub(crate) overlay: Overlay,
    pub(crate) syncer: Syncer,
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine")
            .field("store", &self.store.describe())
            .field("limits", &self.limits)
            .finish_non_exhaustive()
    }
}

impl Engine {
    pub(crate) fn new(store: Arc<dyn ObjectStore>, options: &CacheOptions) -> Arc<Engine> {
        Arc::new_cyclic(|me| Engine {
            me: me.clone(),
            store,
            limits: Limits {
                in_flight_bytes: options.in_flight_bytes,
                read_bytes: options.read_bytes,
                attempt_timeout: options.attempt_timeout,
                evict_timeout: options.evict_timeout,
                waiting: options.waiting,
            },
            stats: Stats::default(),
            table: Mutex::default(),
            work: Condvar::new(),
            tools: AtomicUsize::new(0),
            timer: Timer::new(),
            overlay: Overlay::new(options.overlay_bytes),
            syncer: Syncer::default(),
        })
    }

    /// The counters, and what is measured rather than counted.
    pub(crate) fn snapshot(&self) -> StatsSnapshot {
        let mut snapshot = self.stats.snapshot();
        snapshot.in_flight_bytes = self.lock().in_flight();
        snapshot.overlay_bytes = self.overlay.bytes();
        snapshot
    }

    pub(crate) fn evict_timeout(&self) -> Duration {
        self.limits.evict_timeout
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes `frames` usable.
    pub(crate) fn fetch(&self, space: &Arc<Space>, frames: Range<u32>, request: Request, done: Done) {
        if frames.clone().all(|frame| space.is_usable(frame)) {
            return done(Ok(()));
        }
        if request.deadline <= Instant::now() {
            add(&self.stats.fetches, 1);
            add(&self.stats.timeouts, 1);
            return done(Err(FetchError::TimedOut));
        }
        let waiter = Arc::new(Waiter::new(done));
        let refused = self.enlist(space, frames, request, &waiter);
        if let Some(result) = refused {
            if let Some(done) = waiter.disarm() {
                done(result);
            }
            return;
        }
        self.pump();
    }

    /// Enters a waiter for all of `frames` that are missing; or says what it is to be told at once.
    fn enlist(
        &self,
        space: &Arc<Space>,
        frames: Range<u32>,
        request: Request,
        waiter: &Arc<Waiter>,
    ) -> Option<Result<(), FetchError>> {
        let mut table = self.lock();
        let missing: Vec<u32> = frames.filter(|frame| !space.is_usable(*frame)).collect();
        if missing.is_empty() {
            return Some(Ok(()));
        }
        if table.closed {
            return Some(Err(FetchError::Closed));
        }
        let waiting = self.stats.reads_pending.load(Ordering::Relaxed);
        if table.flights() + missing.len() > self.limits.waiting || waiting >= self.limits.waiting as u64 {
            return Some(Err(FetchError::Overloaded));
        }
        add(&self.stats.fetches, 1);
        add(&self.stats.reads_pending, 1);
        let timer = self.timer.insert(request.deadline, Event::Deadline(Arc::clone(waiter)));
        // The lock is held: no frame can arrive before all are entered.
        waiter.arm(missing.len() as u32, timer);
        let mut work = 0;
        for frame in missing {
            let key = FrameKey { space: space.key(), frame };
            if let Some(flight) = table.flight(key) {
                flight.waiters.push(Arc::clone(waiter));
                add(&self.stats.coalesced, 1);
                table.raise(key, request.class);
                continue;
            }
            let phase = if space.is_claimed(frame) { Phase::Ready(Work::Verify) } else { Phase::Queued };
            work += usize::from(matches!(phase, Phase::Ready(_)));
            table.begin(key, space, request.class, request.id, phase).waiters.push(Arc::clone(waiter));
        }
        drop(table);
        self.wake(work);
        None
    }

    /// Hands reads to the store while there are some that may go. A store may complete a read before it returns, and
    /// that may lead back here: then the call that is under way looks again, so nothing piles up on the stack.
    fn pump(&self) {
        let Some(_here) = Pumping::begin(self) else { return };
        loop {
            let reads = self.next_reads();
            if reads.is_empty() {
                return;
            }
            for (id, read) in reads {
                add(&self.stats.store_reads, 1);
                let reply = Reply { engine: self.me.clone(), id, given: false };
                // A store that panics drops the callback, and that answers.
                let send = || self.store.read(read, Box::new(move |result| reply.give(result)));
                let _ = catch_unwind(AssertUnwindSafe(send));
            }
        }
    }

    fn next_reads(&self) -> Vec<(u64, ReadRequest)> {
        let mut table = self.lock();
        let mut reads = Vec::new();
        while reads.len() < READS_AT_ONCE
            && let Some(id) = table.next_read(&self.limits)
        {
            let deadline = Instant::now() + self.limits.attempt_timeout;
            let Some(attempt) = table.attempt(id) else { break };
            attempt.timer = Some(self.timer.insert(deadline, Event::GiveUp(id)));
            let request = Request { id: attempt.request, class: attempt.class, deadline };
            let range = attempt.range.clone();
            reads.push((id, ReadRequest { object: attempt.space.id(), range, request, buffer: Vec::new() }));
        }
        reads
    }

    /// There is work for the pool, for so many threads.
    fn wake(&self, threads: usize) {
        match threads {
            0 => {}
            1 => self.work.notify_one(),
            _ => self.work.notify_all(),
        }
    }

    /// The store has answered a read.
    fn on_read(&self, id: u64, result: Result<Vec<u8>, FetchError>) {
        let mut table = self.lock();
        let Some(attempt) = table.end_read(id) else {
            drop(table);
            add(&self.stats.late_answers, 1);
            return;
        };
        if let Some(timer) = attempt.timer {
            self.timer.remove(timer);
        }
        let want = attempt.range.end - attempt.range.start;
        let result = result.and_then(|bytes| {
            let have = bytes.len() as u64;
            let source = FrameError::StoredLen { want, have };
            let short = || FetchError::Corrupt { object: attempt.space.id(), frame: attempt.frames.start, source };
            if have == want { Ok(Arc::new(bytes)) } else { Err(short()) }
        });
        match result {
            Ok(bytes) => {
                add(&self.stats.fetched_bytes, want);
                for frame in attempt.frames.clone() {
                    let key = FrameKey { space: attempt.space.key(), frame };
                    let Some(stored) = table::stored(&attempt.space, frame) else { continue };
                    let part =
                        (stored.start - attempt.range.start) as usize..(stored.end - attempt.range.start) as usize;
                    table.turn(key, Phase::Ready(Work::Unpack(Arc::clone(&bytes), part)));
                }
                drop(table);
                self.wake(attempt.frames.len());
            }
            Err(error) => {
                drop(table);
                if matches!(error, FetchError::Corrupt { .. }) {
                    add(&self.stats.corrupt_fetched, 1);
                } else {
                    add(&self.stats.store_errors, 1);
                }
                self.read_failed(&attempt, &error);
            }
        }
    }

    fn read_failed(&self, attempt: &table::Attempt, error: &FetchError) {
        let together = attempt.frames.len() > 1;
        for frame in attempt.frames.clone() {
            let key = FrameKey { space: attempt.space.key(), frame };
            if together {
                // One bad range must not take its neighbours along.
                let mut table = self.lock();
                if let Some(flight) = table.flight(key) {
                    flight.solo = true;
                    table.turn(key, Phase::Queued);
                    add(&self.stats.retries, 1);
                }
            } else {
                self.frame_failed(key, error.clone());
            }
        }
        self.pump();
    }

    /// What was on disk did not check out.
    fn refetch(&self, key: FrameKey) {
        self.lock().turn(key, Phase::Queued);
        self.pump();
    }

    /// A frame could not be had: once more, later, or never.
    fn frame_failed(&self, key: FrameKey, error: FetchError) {
        let mut table = self.lock();
        let Some(flight) = table.flight(key) else { return };
        let wanted = flight.waiters.iter().any(|w| w.is_open());
        flight.solo = true;
        if matches!(error, FetchError::Corrupt { .. }) {
            flight.corrupt += 1;
            if wanted && flight.corrupt == 1 {
                table.turn(key, Phase::Queued);
                drop(table);
                add(&self.stats.retries, 1);
                return self.pump();
            }
        } else if wanted && error.is_transient() {
            let pause = BACKOFF[0] * (1 << flight.failures.min(6));
            flight.failures += 1;
            table.turn(key, Phase::Backoff);
            drop(table);
            add(&self.stats.retries, 1);
            self.timer.insert(Instant::now() + pause.min(BACKOFF[1]), Event::Retry(key));
            return self.pump();
        }
        drop(table);
        self.finish(key, Err(error));
    }

    /// A flight has ended: answers everybody. The frame's bit is set by now if it is there, or its bytes are in the
    /// overlay.
    fn finish(&self, key: FrameKey, result: Result<Option<Arc<Vec<u8>>>, FetchError>) {
        let Some(flight) = self.lock().end(key) else { return };
        for waiter in flight.waiters {
            let answer = match &result {
                Ok(memory) => waiter.arrived(memory.as_ref(), &self.overlay),
                Err(error) => waiter.fail(error.clone()),
            };
            self.answer(answer);
        }
        self.pump();
    }

    fn answer(&self, answer: Option<Answer>) {
        let Some(answer) = answer else { return };
        if let Some(timer) = answer.timer {
            self.timer.remove(timer);
        }
        sub(&self.stats.reads_pending, 1);
        match answer.result {
            Ok(()) => {}
            Err(FetchError::TimedOut) => add(&self.stats.timeouts, 1),
            Err(_) => add(&self.stats.failures, 1),
        }
        answer.give(&self.overlay);
    }

    /// The timer's thread.
    pub(crate) fn run_timer(&self) {
        while let Some(event) = self.timer.wait() {
            match event {
                Event::Deadline(waiter) => self.answer(waiter.fail(FetchError::TimedOut)),
                Event::GiveUp(id) => self.give_up(id),
                Event::Retry(key) => {
                    let mut table = self.lock();
                    if let Some(flight) = table.flight(key)
                        && matches!(flight.phase, Phase::Backoff)
                    {
                        table.turn(key, Phase::Queued);
                        drop(table);
                        self.pump();
                    }
                }
            }
        }
    }

    /// The store has not answered a read in time.
    fn give_up(&self, id: u64) {
        let Some(attempt) = self.lock().end_read(id) else { return };
        add(&self.stats.store_timeouts, 1);
        self.read_failed(&attempt, &FetchError::TimedOut);
    }

    /// Fails everything that is outstanding and lets the threads go.
    pub(crate) fn close(&self) {
        let flights = self.lock().close();
        self.work.notify_all();
        for flight in flights {
            for waiter in flight.waiters {
                self.answer(waiter.fail(FetchError::Closed));
            }
        }
        self.timer.close();
        self.syncer.close();
    }

    /// Keeps those of `frames` that are not in flight from being fetched until [`Engine::end_evict`].
    pub(crate) fn begin_evict(&self, space: &Arc<Space>, frames: Range<u32>) -> Vec<u32> {
        let mut table = self.lock();
        let key = |frame| FrameKey { space: space.key(), frame };
        let free: Vec<u32> = frames.filter(|frame| table.flight(key(*frame)).is_none()).collect();
        for frame in &free {
            table.begin(key(*frame), space, Class::Scrub, 0, Phase::Evicting);
        }
        free
    }

    /// The eviction of `frames` is over; whoever wanted one meanwhile gets it now.
    pub(crate) fn end_evict(&self, space: &Arc<Space>, frames: &[u32]) {
        let mut table = self.lock();
        for frame in frames {
            let key = FrameKey { space: space.key(), frame: *frame };
            match table.flight(key) {
                Some(flight) if flight.waiters.is_empty() => {
                    table.end(key);
                }
                Some(_) => table.turn(key, Phase::Queued),
                None => {}
            }
        }
        drop(table);
        self.pump();
    }

    /// Tries to move what is kept in memory to the disk.
    pub(crate) fn flush_overlay(&self) {
        let Some(entry) = self.overlay.oldest() else { return };
        let Some(space) = entry.space.upgrade() else { return self.overlay.remove(entry.key) };
        let mut table = self.lock();
        if !table.closed && table.flight(entry.key).is_none() {
            table.begin(entry.key, &space, Class::Scrub, 0, Phase::Ready(Work::Flush(entry.bytes)));
            drop(table);
            self.wake(1);
        }
    }
}

/// Marks that this thread is in [`Engine::pump`].
struct Pumping {
    before: usize,
}

thread_local!(static PUMPING: Cell<usize> = const { Cell::new(0) });

impl Pumping {
    /// `None` when it is there already, for the same engine.
    fn begin(engine: &Engine) -> Option<Pumping> {
        let own = std::ptr::from_ref(engine).addr();
        let before = PUMPING.replace(own);
        (before != own).then_some(Pumping { before })
    }
}

impl Drop for Pumping {
    fn drop(&mut self) {
        PUMPING.set(self.before);
    }
}

/// The store's way back: exactly one answer, also from a store that drops the callback.
struct Reply {
    engine: Weak<Engine>,
    id: u64,
    given: bool,
}

impl Reply {
    fn give(mut self, result: Result<Vec<u8>, FetchError>) {
        self.given = true;
        if let Some(engine) = self.engine.upgrade() {
            engine.on_read(self.id, result);
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.given
            && let Some(engine) = self.engine.upgrade()
        {
            let why = "it dropped a read without an answer".into();
            engine.on_read(self.id, Err(FetchError::Unavailable { why }));
        }
    }
}
