//! The frames that are on their way, and who goes next. Pure bookkeeping under one lock: no I/O, no callbacks.

use super::waiter::Waiter;
use super::{FrameKey, Limits};
use crate::object_store::Class;
use crate::space::Space;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

/// A frame on its way, and everybody who waits for it.
#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) space: Arc<Space>,
    /// The most urgent of its waiters'.
    pub(crate) class: Class,
    pub(crate) phase: Phase,
    pub(crate) waiters: Vec<Arc<Waiter>>,
    /// Names the request that began it, in the store's logs.
    pub(crate) request: u64,
    /// Times that its bytes were not what they should be.
    pub(crate) corrupt: u32,
    /// Times that the store failed or did not answer.
    pub(crate) failures: u32,
    /// To be read by itself: with others it failed.
    pub(crate) solo: bool,
    /// Bytes that count as in flight for it.
    charged: Option<Charge>,
}

#[derive(Debug, Clone, Copy)]
struct Charge {
    bytes: u64,
    low: bool,
}

/// What happens to a frame.
#[derive(Debug)]
pub(crate) enum Phase {
    /// Waits for its turn at the store.
    Queued,
    /// The store was asked.
    Reading,
    /// Waits for a thread of the pool.
    Ready(Work),
    /// A thread of the pool has it.
    Working,
    /// Waits until it may ask the store again.
    Backoff,
    /// Is being evicted; who waits for it will have it fetched afterwards.
    Evicting,
}

/// What a thread of the pool does with a frame.
#[derive(Debug)]
pub(crate) enum Work {
    /// Unpacks a part of what the store sent.
    Unpack(Arc<Vec<u8>>, Range<usize>),
    /// Verifies what is on disk from before.
    Verify,
    /// Tries to write what the disk refused earlier.
    Flush(Arc<Vec<u8>>),
}

/// A read that the store was asked for.
#[derive(Debug)]
pub(crate) struct Attempt {
    pub(crate) space: Arc<Space>,
    pub(crate) frames: Range<u32>,
    /// Bytes of the object.
    pub(crate) range: Range<u64>,
    pub(crate) timer: Option<super::timer::TimerKey>,
    pub(crate) class: Class,
    pub(crate) request: u64,
}

/// Everything under the lock.
#[derive(Debug, Default)]
pub(crate) struct Table {
    flights: HashMap<FrameKey, Flight>,
    /// For the store, by class. May name frames that are elsewhere by now.
    queued: [Fair; 3],
    /// For the pool, by class. The same.
    ready: [VecDeque<FrameKey>; 3],
    attempts: HashMap<u64, Attempt>,
    next_attempt: u64,
    in_flight: u64,
    in_flight_low: u64,
    in_flight_by_space: HashMap<u64, u64>,
    pub(crate) closed: bool,
}

/// A queue that takes from each space in turn.
#[derive(Debug, Default)]
struct Fair {
    ring: VecDeque<u64>,
    frames: HashMap<u64, VecDeque<u32>>,
}

impl Fair {
    fn push(&mut self, key: FrameKey) {
        let frames = self.frames.entry(key.space).or_default();
        if frames.is_empty() {
            self.ring.push_back(key.space);
        }
        frames.push_back(key.frame);
    }

    fn pop(&mut self, may: impl Fn(u64) -> bool) -> Option<FrameKey> {
        for _ in 0..self.ring.len() {
            let space = self.ring.pop_front()?;
            if !may(space) {
                self.ring.push_back(space);
                continue;
            }
            let frames = self.frames.get_mut(&space)?;
            let frame = frames.pop_front();
            if frames.is_empty() {
                self.frames.remove(&space);
            } else {
                self.ring.push_back(space);
            }
            if let Some(frame) = frame {
                return Some(FrameKey { space, frame });
            }
        }
        None
    }

    /// Puts a frame back to where it was taken from.
    fn unpop(&mut self, key: FrameKey) {
        let frames = self.frames.entry(key.space).or_default();
        if frames.is_empty() {
            self.ring.push_front(key.space);
        }
        frames.push_front(key.frame);
    }
}

impl Table {
    pub(crate) fn flight(&mut self, key: FrameKey) -> Option<&mut Flight> {
        self.flights.get_mut(&key)
    }

    pub(crate) fn flights(&self) -> usize {
        self.flights.len()
    }

    /// Bytes on their way or waiting for the pool.
    pub(crate) fn in_flight(&self) -> u64 {
        self.in_flight
    }

    /// Begins a flight. There must be none of that frame.
    pub(crate) fn begin(
        &mut self,
        key: FrameKey,
        space: &Arc<Space>,
        class: Class,
        request: u64,
        phase: Phase,
    ) -> &mut Flight {
        let flight = Flight {
            space: Arc::clone(space),
            class,
            phase: Phase::Backoff,
            waiters: Vec::new(),
            request,
            corrupt: 0,
            failures: 0,
            solo: false,
            charged: None,
        };
        self.flights.insert(key, flight);
        self.turn(key, phase);
        self.flights.get_mut(&key).expect("inserted above")
    }

    /// Moves a flight on, into the queue that its new phase stands for.
    pub(crate) fn turn(&mut self, key: FrameKey, phase: Phase) {
        let Some(flight) = self.flights.get_mut(&key) else { return };
        flight.phase = phase;
        let class = flight.class as usize;
        match flight.phase {
            Phase::Queued => {
                self.uncharge(key);
                self.queued[class].push(key);
            }
            Phase::Ready(_) => self.ready[class].push_back(key),
            Phase::Backoff => self.uncharge(key),
            Phase::Reading | Phase::Working | Phase::Evicting => {}
        }
    }

    /// A flight has got a waiter of `class`, which may be more urgent than those that it had.
    pub(crate) fn raise(&mut self, key: FrameKey, class: Class) {
        let Some(flight) = self.flights.get_mut(&key) else { return };
        if class >= flight.class {
            return;
        }
        flight.class = class;
        // The entry in the old queue stays and will find that it is not meant.
        match flight.phase {
            Phase::Queued => self.queued[class as usize].push(key),
            Phase::Ready(_) => self.ready[class as usize].push_back(key),
            Phase::Reading | Phase::Working | Phase::Backoff | Phase::Evicting => {}
        }
    }

    /// Ends a flight.
    pub(crate) fn end(&mut self, key: FrameKey) -> Option<Flight> {
        self.uncharge(key);
        self.flights.remove(&key)
    }

    /// Ends all of them.
    pub(crate) fn close(&mut self) -> Vec<Flight> {
        self.closed = true;
        self.queued = Default::default();
        self.ready = Default::default();
        self.attempts.clear();
        (self.in_flight, self.in_flight_low) = (0, 0);
        self.in_flight_by_space.clear();
        self.flights.drain().map(|(_, flight)| flight).collect()
    }

    /// The next frame for the pool.
    pub(crate) fn next_work(&mut self) -> Option<(FrameKey, Arc<Space>, Work)> {
        for class in 0..self.ready.len() {
            while let Some(key) = self.ready[class].pop_front() {
                if let Some(flight) = self.flights.get_mut(&key)
                    && flight.class as usize == class
                    && matches!(flight.phase, Phase::Ready(_))
                    && let Phase::Ready(work) = std::mem::replace(&mut flight.phase, Phase::Working)
                {
                    return Some((key, Arc::clone(&flight.space), work));
                }
            }
        }
        None
    }

    /// The next read for the store, if its bytes may be in flight now. Flights that nobody waits for end here.
    pub(crate) fn next_read(&mut self, limits: &Limits) -> Option<u64> {
        for class in Class::ALL {
            while let Some(key) = self.pop_queued(class, limits) {
                let Some(flight) = self.flights.get(&key) else { continue };
                if flight.class != class || !matches!(flight.phase, Phase::Queued) {
                    continue;
                }
                if !flight.waiters.iter().any(|w| w.is_open()) {
                    self.flights.remove(&key);
                    continue;
                }
                let Some(first) = stored(&flight.space, key.frame) else { continue };
                if !self.fits(class, first.end - first.start, limits) {
                    self.queued[class as usize].unpop(key);
                    // Nor may a less urgent one take the room that this one waits for.
                    return None;
                }
                return Some(self.begin_read(key, class, first, limits));
            }
        }
        None
    }

    fn pop_queued(&mut self, class: Class, limits: &Limits) -> Option<FrameKey> {
        let mut queue = std::mem::take(&mut self.queued[class as usize]);
        let key = queue.pop(|space| self.has_room(space, limits));
        self.queued[class as usize] = queue;
        key
    }

    /// Whether so many bytes more may be in flight. One frame by itself always may, however large it is.
    fn fits(&self, class: Class, bytes: u64, limits: &Limits) -> bool {
        let low = class == Class::Demand || self.in_flight_low + bytes <= limits.in_flight_bytes / 2;
        self.in_flight == 0 || (low && self.in_flight + bytes <= limits.in_flight_bytes)
    }

    /// Whether a space has less than its share of what may be in flight, so that one object whose store is silent
    /// leaves room for the others.
    fn has_room(&self, space: u64, limits: &Limits) -> bool {
        self.in_flight_by_space.get(&space).is_none_or(|bytes| *bytes < limits.in_flight_bytes / 4 * 3)
    }

    /// Takes a queued frame, and those behind it that are queued too and lie next to it in the object.
    fn begin_read(&mut self, key: FrameKey, class: Class, first: Range<u64>, limits: &Limits) -> u64 {
        let id = self.next_attempt;
        self.next_attempt += 1;
        let flight = &self.flights[&key];
        let (space, request, solo) = (Arc::clone(&flight.space), flight.request, flight.solo);
        let mut attempt = Attempt {
            space,
            frames: key.frame..key.frame,
            range: first.start..first.start,
            timer: None,
            class,
            request,
        };
        let mut next = Some(first);
        while let Some(range) = next {
            let key = FrameKey { space: key.space, frame: attempt.frames.end };
            let bytes = range.end - range.start;
            attempt.frames.end += 1;
            attempt.range.end = range.end;
            self.charge(key, bytes, class != Class::Demand);
            if let Some(flight) = self.flights.get_mut(&key) {
                flight.phase = Phase::Reading;
            }
            next = if solo { None } else { self.neighbour(key, class, &attempt, limits) };
        }
        self.attempts.insert(id, attempt);
        id
    }

    /// The frame behind `key`, if it can be read along.
    fn neighbour(&self, key: FrameKey, class: Class, attempt: &Attempt, limits: &Limits) -> Option<Range<u64>> {
        let next = FrameKey { space: key.space, frame: key.frame.checked_add(1)? };
        let flight = self.flights.get(&next)?;
        let range = stored(&flight.space, next.frame)?;
        let queued = matches!(flight.phase, Phase::Queued) && flight.class == class && !flight.solo;
        let wanted = flight.waiters.iter().any(|w| w.is_open());
        // Frames that follow each other in the space may lie anywhere in the object.
        let fits = range.start == attempt.range.end
            && range.end - attempt.range.start <= limits.read_bytes
            && self.has_room(next.space, limits)
            && self.fits(class, range.end - range.start, limits);
        (queued && wanted && fits).then_some(range)
    }

    pub(crate) fn attempt(&mut self, id: u64) -> Option<&mut Attempt> {
        self.attempts.get_mut(&id)
    }

    /// Ends a read: `None` when it was given up before.
    pub(crate) fn end_read(&mut self, id: u64) -> Option<Attempt> {
        self.attempts.remove(&id)
    }

    fn charge(&mut self, key: FrameKey, bytes: u64, low: bool) {
        let Some(flight) = self.flights.get_mut(&key) else { return };
        debug_assert!(flight.charged.is_none(), "{key:?} is charged");
        flight.charged = Some(Charge { bytes, low });
        self.in_flight += bytes;
        self.in_flight_low += if low { bytes } else { 0 };
        *self.in_flight_by_space.entry(key.space).or_default() += bytes;
    }

    fn uncharge(&mut self, key: FrameKey) {
        let Some(Charge { bytes, low }) = self.flights.get_mut(&key).and_then(|flight| flight.charged.take()) else {
            return;
        };
        self.in_flight -= bytes;
        self.in_flight_low -= if low { bytes } else { 0 };
        if let Some(of_space) = self.in_flight_by_space.get_mut(&key.space) {
            *of_space -= bytes;
            if *of_space == 0 {
                self.in_flight_by_space.remove(&key.space);
            }
        }
    }
}

/// Where a frame lies in its object.
pub(crate) fn stored(space: &Space, frame: u32) -> Option<Range<u64>> {
    Some(space.map().frame(frame)?.stored_range())
}
