use super::*;
use crate::cache::tests::{LONG, Rig, fetch_error, options, request, until};
use crate::fault::{Fault, TestObject};
use crate::source::{Presence, Resolution, read_into};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Barrier, mpsc};

const FRAME: u64 = 65536;

fn class(class: Class) -> Request {
    Request { class, ..request(LONG) }
}

impl Engine {
    /// As if every deadline passed now, and all reads were given up.
    fn expire(&self) {
        let flights = {
            let mut table = self.lock();
            let flights = table.close();
            table.closed = false;
            flights
        };
        for waiter in flights.iter().flat_map(|flight| &flight.waiters) {
            self.answer(waiter.fail(FetchError::TimedOut));
        }
    }
}

#[test]
fn one_fetch_however_many_wait() {
    let rig = Rig::new(TestObject::uniform(1, 4, 16));
    rig.store.set(Fault::Silent);
    let start = Barrier::new(32);
    std::thread::scope(|scope| {
        for i in 0..32 {
            let (rig, start) = (&rig, &start);
            scope.spawn(move || {
                start.wait();
                rig.check(i * 100, 5000);
            });
        }
        until("all of them to wait", || rig.cache.stats().reads_pending == 32);
        assert!(rig.store.wait_for_reads(1, LONG));
        rig.store.release();
    });
    assert_eq!(rig.store.reads().len(), 1);
    let stats = rig.cache.stats();
    assert_eq!((stats.frames_filled, stats.coalesced, stats.reads_pending, stats.fetches), (1, 31, 0, 32));
}

#[test]
fn neighbours_are_read_together_and_within_bounds() {
    let object = TestObject::uniform(2, 64, 16);
    let rig = Rig::with(object, CacheOptions { read_bytes: 500_000, ..options() });
    rig.check_all();
    let reads = rig.store.reads();
    assert!(reads.len() < 20, "{}", reads.len());
    assert!(reads.iter().all(|(_, range)| range.end - range.start <= 500_000));
    let total: u64 = reads.iter().map(|(_, range)| range.end - range.start).sum();
    assert_eq!(total, rig.object.stored.len() as u64, "every byte once");
    assert_eq!(rig.cache.stats().fetched_bytes, total);
    until("the bytes to be free", || rig.cache.stats().in_flight_bytes == 0);
}

#[test]
fn a_deadline_fires_though_the_store_is_silent_and_the_fetch_goes_on() {
    let rig = Rig::new(TestObject::uniform(3, 4, 16));
    rig.store.set(Fault::Silent);
    let start = Instant::now();
    let impatient: Vec<_> = (0..20).map(|i| rig.fetch(i % 4 * FRAME, 10, request(Duration::from_millis(40)))).collect();
    let patient = rig.fetch(0, 2 * FRAME as usize, request(LONG));
    for told in impatient {
        assert!(matches!(told.recv().unwrap(), Err(FetchError::TimedOut)));
    }
    assert!(start.elapsed() >= Duration::from_millis(40));
    assert!(patient.try_recv().is_err());
    rig.store.release();
    patient.recv().unwrap().unwrap();
    until("the frames nobody waits for", || rig.presence(0, 4 * FRAME as usize) == Presence::Ready);
    let stats = rig.cache.stats();
    assert_eq!((stats.timeouts, stats.reads_pending), (20, 0));
    let late = rig.fetch(0, 10, Request { deadline: Instant::now(), ..request(LONG) });
    late.recv().unwrap().expect("what is there needs no time");
}

#[test]
fn a_deadline_that_has_passed_asks_for_nothing() {
    let rig = Rig::new(TestObject::uniform(4, 4, 16));
    let told = rig.fetch(0, 10, Request { deadline: Instant::now(), ..request(LONG) });
    assert!(matches!(told.recv().unwrap(), Err(FetchError::TimedOut)));
    assert!(rig.store.reads().is_empty());
}

#[test]
fn a_read_that_is_not_answered_is_asked_again_while_somebody_waits() {
    let rig = Rig::with(
        TestObject::uniform(5, 4, 16),
        CacheOptions { attempt_timeout: Duration::from_millis(30), ..options() },
    );
    rig.store.next(&[Fault::Silent, Fault::Silent]);
    rig.check(0, 100);
    assert_eq!(rig.store.reads().len(), 3);
    assert_eq!(rig.cache.stats().store_timeouts, 2);
    // What comes late is dropped.
    rig.store.release();
    until("the late answers", || rig.cache.stats().late_answers == 2);
    // Nobody waits any more: nothing is asked again.
    rig.store.set(Fault::Silent);
    let told = rig.fetch(FRAME, 100, request(Duration::from_millis(5)));
    assert!(told.recv().unwrap().is_err());
    until("it to be given up", || rig.cache.stats().store_timeouts == 3);
    until("the bytes to be free", || rig.cache.stats().in_flight_bytes == 0);
    assert_eq!(rig.store.reads().len(), 4);
    rig.store.set(Fault::None);
    rig.check_all();
}

#[test]
fn a_corrupt_frame_is_read_once_more_and_then_an_error() {
    for fault in [Fault::Corrupt, Fault::Short] {
        let rig = Rig::new(TestObject::uniform(6, 4, 16));
        rig.store.next(&[fault]);
        rig.check(0, 100);
        assert_eq!(rig.store.reads().len(), 2);
        assert_eq!(rig.cache.stats().corrupt_fetched, 1);
        rig.store.set(fault);
        let error = rig.read(FRAME, 100).unwrap_err();
        assert!(matches!(fetch_error(&error), Some(FetchError::Corrupt { frame: 1, .. })), "{error:?}");
        assert_eq!(rig.store.reads().len(), 4);
        assert_eq!(rig.presence(FRAME, 1), Presence::Missing);
        rig.store.set(Fault::None);
        rig.check_all();
    }
}

#[test]
fn one_bad_frame_does_not_take_its_neighbours_along() {
    let mut rig = Rig::new(TestObject::uniform(7, 8, 16));
    let mut stored = rig.object.stored.clone();
    let bad = rig.object.map.frame(3).unwrap().stored_range();
    stored[bad.start as usize + 50] ^= 1;
    rig.memory.put(rig.object.id(), stored);
    assert!(rig.read(0, 8 * FRAME as usize).is_err());
    until("the others", || rig.space.usage().present_frames == 7);
    // A store that has only the first half fails the read as a whole; the frames in that half are got one by one.
    rig = Rig::new(TestObject::uniform(8, 8, 16));
    let half = rig.object.map.frame(4).unwrap().stored_range().start;
    rig.memory.put(rig.object.id(), rig.object.stored[..half as usize].to_vec());
    assert!(rig.read(0, 8 * FRAME as usize).is_err());
    until("the first half", || rig.space.usage().present_frames == 4);
    rig.check(0, 4 * FRAME as usize);
}

#[test]
fn a_store_that_cannot_be_reached_is_asked_again_until_the_deadline() {
    let rig = Rig::new(TestObject::uniform(9, 4, 16));
    rig.store.next(&[Fault::Unavailable, Fault::Dropped, Fault::Panic, Fault::Unavailable]);
    rig.check(0, 100);
    assert_eq!(rig.store.reads().len(), 5);
    assert_eq!(rig.cache.stats().store_errors, 4);
    rig.store.set(Fault::Unavailable);
    let told = rig.fetch(FRAME, 100, request(Duration::from_millis(100)));
    assert!(matches!(told.recv().unwrap(), Err(FetchError::TimedOut)));
    let reads = rig.store.reads().len();
    assert!((7..=12).contains(&reads), "pauses grow: {reads}");
}

#[test]
fn an_object_that_is_not_there_is_an_error_at_once() {
    let rig = Rig::new(TestObject::uniform(10, 4, 16));
    rig.store.set(Fault::NotFound);
    let error = rig.read(0, 4 * FRAME as usize).unwrap_err();
    assert!(matches!(fetch_error(&error), Some(FetchError::NotFound { .. })), "{error:?}");
}

#[test]
fn many_failing_reads_do_not_pile_up_on_the_stack() {
    let rig = Rig::new(TestObject::uniform(11, 20_000, 1));
    rig.store.set(Fault::NotFound);
    assert!(rig.read(0, 20_000 * 4096).is_err());
    until("all of them to fail", || rig.engine().lock().flights() == 0);
}

#[test]
fn demand_goes_before_prefetch_before_scrub() {
    // One frame in flight at a time, so that the order shows.
    let rig =
        Rig::with(TestObject::uniform(12, 12, 16), CacheOptions { in_flight_bytes: 1, read_bytes: 1, ..options() });
    rig.store.set(Fault::Silent);
    let mut told = vec![rig.fetch(0, 1, class(Class::Prefetch))];
    assert!(rig.store.wait_for_reads(1, LONG));
    for (frame, of) in
        [(1, Class::Scrub), (2, Class::Prefetch), (3, Class::Demand), (4, Class::Prefetch), (5, Class::Demand)]
    {
        told.push(rig.fetch(frame * FRAME, 1, class(of)));
    }
    // This one was in no hurry, until somebody came who is.
    told.push(rig.fetch(4 * FRAME, 1, class(Class::Demand)));
    rig.store.release();
    told.iter().for_each(|t| t.recv().unwrap().unwrap());
    let frame_of =
        |range: &Range<u64>| (0..12).find(|i| rig.object.map.frame(*i).unwrap().stored_range() == *range).unwrap();
    let order: Vec<u32> = rig.store.reads().iter().map(|(_, range)| frame_of(range)).collect();
    assert_eq!(order, [0, 3, 5, 4, 2, 1]);
}

#[test]
fn prefetch_leaves_room_for_demand_and_one_object_for_others() {
    let object = TestObject::uniform(13, 200, 16);
    let other = TestObject::uniform(14, 4, 16);
    // Raw frames are FRAME bytes, the others smaller.
    let limit = 16 * FRAME;
    let rig = Rig::with(object, CacheOptions { in_flight_bytes: limit, read_bytes: 1, ..options() });
    rig.memory.put(other.id(), other.stored.clone());
    rig.store.set(Fault::Silent);
    let slow = rig.fetch(0, 100 * FRAME as usize, class(Class::Prefetch));
    until("prefetch to fill its half", || rig.store.parked() >= 8);
    let in_flight = rig.cache.stats().in_flight_bytes;
    assert!(in_flight <= limit / 2, "{in_flight}");
    let demand = rig.fetch(100 * FRAME, 100 * FRAME as usize, class(Class::Demand));
    let in_flight = rig.cache.stats().in_flight_bytes;
    assert!(in_flight > limit / 2 && in_flight <= limit / 4 * 3 + FRAME, "{in_flight}");
    // The store is silent for that object; this one still gets through.
    rig.store.next(&[Fault::None; 4]);
    let space = rig.cache.space(other.map.clone()).unwrap();
    let mut bytes = vec![0; other.content.len()];
    read_into(&space, 0, &mut bytes, request(LONG)).unwrap();
    assert!(bytes == other.content);
    rig.store.release();
    demand.recv().unwrap().unwrap();
    slow.recv().unwrap().unwrap();
    until("the bytes to be free", || rig.cache.stats().in_flight_bytes == 0);
}

#[test]
fn more_than_the_limit_is_refused() {
    let rig = Rig::with(TestObject::uniform(15, 40, 16), CacheOptions { waiting: 10, ..options() });
    rig.store.set(Fault::Silent);
    let told: Vec<_> = (0..40).map(|i| rig.fetch(i * FRAME, 1, request(LONG))).collect();
    let refused = told.iter().filter(|t| matches!(t.try_recv(), Ok(Err(FetchError::Overloaded)))).count();
    assert_eq!(refused, 30);
    let joined: Vec<_> = (0..40).map(|_| rig.fetch(0, 1, request(LONG))).collect();
    assert!(joined.iter().all(|t| matches!(t.try_recv(), Ok(Err(FetchError::Overloaded)))));
    rig.store.release();
    assert_eq!(told.iter().filter(|t| matches!(t.recv(), Ok(Ok(())))).count(), 10);
    (0..40).for_each(|i| rig.check(i * FRAME, FRAME as usize));
}

#[test]
fn a_fetch_of_what_is_there_completes_at_once() {
    let rig = Rig::new(TestObject::uniform(16, 4, 16));
    rig.check_all();
    rig.store.set(Fault::Silent);
    assert!(matches!(rig.fetch(0, 4 * FRAME as usize, request(LONG)).try_recv(), Ok(Ok(()))));
    assert!(matches!(rig.fetch(77, 0, request(LONG)).try_recv(), Ok(Ok(()))));
}

#[test]
fn a_slow_store_is_only_slow() {
    let rig = Rig::new(TestObject::uniform(17, 16, 16));
    rig.store.set(Fault::Delay(Duration::from_millis(3)));
    std::thread::scope(|scope| {
        for t in 0..4u64 {
            let rig = &rig;
            scope.spawn(move || (0..16).for_each(|i| rig.check((i * 5 + t) % 16 * FRAME, 60_000)));
        }
    });
    assert_eq!(rig.cache.stats().frames_filled, 16);
}

/// What a round of cached reads cost its two threads: processor time, and how often they had to wait for somebody.
/// Neither depends on what else this machine does, as the time on the clock would.
#[derive(Debug, Clone, Copy)]
struct Cost {
    time: Duration,
    waits: u64,
}

impl Cost {
    const MAX: Cost = Cost { time: Duration::MAX, waits: u64::MAX };

    /// Of the calling thread since it began.
    fn so_far() -> Cost {
        let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let waits = status.lines().find_map(|line| line.strip_prefix("voluntary_ctxt_switches:")).unwrap();
        Cost { time: Duration::new(time.tv_sec as u64, time.tv_nsec as u32), waits: waits.trim().parse().unwrap() }
    }

    fn since(self, before: Cost) -> Cost {
        Cost { time: self.time - before.time, waits: self.waits - before.waits }
    }

    fn plus(self, other: Cost) -> Cost {
        Cost { time: self.time + other.time, waits: self.waits + other.waits }
    }

    fn least(self, other: Cost) -> Cost {
        Cost { time: self.time.min(other.time), waits: self.waits.min(other.waits) }
    }
}

/// 1,000 readers that a silent store keeps waiting leave cached reads as fast as they are without.
#[test]
fn cached_reads_keep_their_speed_beside_a_silent_store() {
    const ROUNDS: usize = 60;
    let object = TestObject::uniform(18, 1100, 16);
    let rig = Rig::new(object);
    let cached = 100 * FRAME;
    rig.check(0, cached as usize);
    rig.store.set(Fault::Silent);

    // Two threads resolve and read a fixed amount.
    let round = || {
        let start = Barrier::new(2);
        std::thread::scope(|scope| {
            let threads = [0u64, 1].map(|t| {
                let (rig, start) = (&rig, &start);
                scope.spawn(move || {
                    let mut out = Resolution::new();
                    let mut bytes = vec![0; 16384];
                    start.wait();
                    let before = Cost::so_far();
                    for i in 0..6000u64 {
                        let offset = (i * 40_961 + t * 777) % (cached - 16384);
                        out.clear();
                        assert_eq!(rig.space.resolve(offset, bytes.len(), &mut out).unwrap(), Presence::Ready);
                        out.copy_to(&mut bytes).unwrap();
                    }
                    Cost::so_far().since(before)
                })
            });
            threads.into_iter().map(|t| t.join().unwrap()).reduce(Cost::plus).unwrap()
        })
    };
    let (mut free, mut beside) = (Cost::MAX, Cost::MAX);
    round();
    for i in 0..ROUNDS {
        // In turn, the least of each: caches that others empty cost both something, but hardly all rounds.
        free = free.least(round());
        let answered = Arc::new(AtomicU64::new(0));
        for r in 0..1000 {
            let answered = Arc::clone(&answered);
            let done = move |result: Result<(), FetchError>| {
                assert!(matches!(result, Err(FetchError::TimedOut)));
                answered.fetch_add(1, Ordering::Relaxed);
            };
            rig.space.fetch((100 + r) * FRAME, 4096, request(LONG), Box::new(done));
        }
        assert_eq!(rig.cache.stats().reads_pending, 1000);
        beside = beside.least(round());
        assert_eq!(answered.load(Ordering::Relaxed), 0);
        // Lets them all go, with an answer each.
        rig.engine().expire();
        until("all answers", || answered.load(Ordering::Relaxed) == 1000);
        if i >= 2 && free.time.as_secs_f64() / beside.time.as_secs_f64() >= 0.95 {
            break;
        }
    }
    let ratio = free.time.as_secs_f64() / beside.time.as_secs_f64();
    println!("cached reads beside 1,000 parked ones: {ratio:.3} of their speed; {free:?}, {beside:?}");
    assert!(ratio >= 0.9, "{ratio:.3}");
    // 12,000 reads: had they waited for the fetches, they had done so more often than this.
    assert!(beside.waits <= free.waits + 50, "{free:?}, {beside:?}");
}

#[test]
fn threads_fetch_and_read_at_random() {
    let rig = Rig::new(TestObject::new(19, (0..60).map(|i| (0, 1 + i * 7 % 40))));
    let size = rig.object.content.len() as u64;
    rig.store.cycle(&[Fault::None, Fault::Unavailable, Fault::None, Fault::Corrupt, Fault::None, Fault::Dropped]);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..4u64)
            .map(|t| {
                let rig = &rig;
                scope.spawn(move || {
                    let mut state = t + 1;
                    for _ in 0..60 {
                        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(99);
                        let offset = (state >> 30) % (size - 1);
                        let len = 1 + (state >> 10) % (size - offset).min(400_000);
                        match rig.read(offset, len as usize) {
                            Ok(got) => assert!(got == rig.object.content[offset as usize..][..len as usize]),
                            Err(e) => assert!(matches!(fetch_error(&e), Some(FetchError::Corrupt { .. })), "{e:?}"),
                        }
                    }
                })
            })
            .collect();
        scope.spawn(|| {
            let mut i = 0u64;
            while !stop.load(Ordering::Relaxed) {
                rig.space.evict(i * 333_333 % size, 300_000).unwrap();
                i += 1;
            }
        });
        let results: Vec<_> = readers.into_iter().map(|reader| reader.join()).collect();
        stop.store(true, Ordering::Relaxed);
        results.into_iter().for_each(|result| result.unwrap());
    });
    rig.store.release();
    assert_eq!(rig.cache.stats().reads_pending, 0);
    let (tell, told) = mpsc::channel();
    rig.space.fetch(0, 1, request(LONG), Box::new(move |r| tell.send(r).unwrap()));
    told.recv().unwrap().unwrap();
}
