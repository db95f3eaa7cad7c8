//! One thread's worth of deadlines: events that fire when their time has come unless they are taken back.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Names an event that was put in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TimerKey(Instant, u64);

/// A queue of events by time. Removal is exact, so what was answered in time leaves nothing behind.
#[derive(Debug)]
pub(crate) struct Timer<E> {
    state: Mutex<State<E>>,
    changed: Condvar,
}

#[derive(Debug)]
struct State<E> {
    events: BTreeMap<TimerKey, E>,
    next: u64,
    closed: bool,
}

impl<E> Timer<E> {
    pub(crate) fn new() -> Self {
        Timer { state: Mutex::new(State { events: BTreeMap::new(), next: 0, closed: false }), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State<E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts an event in.
    pub(crate) fn insert(&self, at: Instant, event: E) -> TimerKey {
        let mut state = self.lock();
        let key = TimerKey(at, state.next);
        state.next += 1;
        let first = state.events.first_key_value().is_none_or(|(first, _)| key < *first);
        state.events.insert(key, event);
        drop(state);
        if first {
            self.changed.notify_one();
        }
        key
    }

    /// Takes an event back, if it has not fired.
    pub(crate) fn remove(&self, key: TimerKey) -> Option<E> {
        self.lock().events.remove(&key)
    }

    /// Waits for the next event that is due. `None` once closed.
    pub(crate) fn wait(&self) -> Option<E> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            let now = Instant::now();
            state = match state.events.first_key_value().map(|(key, _)| key.0) {
                Some(at) if at <= now => return state.events.pop_first().map(|(_, event)| event),
                Some(at) => self.changed.wait_timeout(state, at - now).unwrap_or_else(PoisonError::into_inner).0,
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Drops all events and lets the waiting thread go.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        let events = std::mem::take(&mut state.events);
        drop(state);
        drop(events);
        self.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn events_fire_in_the_order_of_their_time_and_not_when_taken_back() {
        let timer = Timer::new();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        timer.insert(at(30), 'c');
        let gone = timer.insert(at(10), 'x');
        timer.insert(at(5), 'a');
        timer.insert(at(5), 'b');
        assert_eq!(timer.remove(gone), Some('x'));
        assert_eq!(timer.remove(gone), None);
        assert_eq!([timer.wait(), timer.wait(), timer.wait()], [Some('a'), Some('b'), Some('c')]);
        assert!(start.elapsed() >= Duration::from_millis(30));
    }

    #[test]
    fn an_earlier_event_wakes_the_waiting_thread_and_closing_ends_it() {
        let timer = Timer::new();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| (timer.wait(), timer.wait()));
            timer.insert(Instant::now() + Duration::from_secs(3600), 1);
            timer.insert(Instant::now(), 2);
            while timer.lock().events.len() > 1 {
                std::thread::yield_now();
            }
            timer.close();
            assert_eq!(waiter.join().unwrap(), (Some(2), None));
        });
    }
}
