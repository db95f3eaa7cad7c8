//! What every [`ObjectStore`] must do, as plain functions that panic where it does not. For tests of stores.
//!
//! Each takes the store and a way to put an object into it: `seed` makes the bytes readable and returns their name.

use crate::object_store::{Class, ObjectStore, ReadRequest, Request};
use crate::{FetchError, ObjectId};
use format::Digest;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

/// Puts an object into the store under test.
pub type Seed<'a> = dyn Fn(&[u8]) -> ObjectId + 'a;

/// Longer than any healthy store takes; a test that waits this long has failed.
const PATIENCE: Duration = Duration::from_secs(30);

/// Everything below.
pub fn all(store: &dyn ObjectStore, seed: &Seed<'_>) {
    exact_ranges(store, seed);
    lengths(store, seed);
    beyond_the_end(store, seed);
    absent_objects(store, seed);
    passed_deadlines(store, seed);
    reused_buffers(store, seed);
    concurrent_reads_complete_once(store, seed);
    assert!(!store.describe().is_empty(), "a store has a name for messages");
}

/// Every range comes back exactly, empty ones too.
pub fn exact_ranges(store: &dyn ObjectStore, seed: &Seed<'_>) {
    let bytes = pattern(300_000, 1);
    let object = seed(&bytes);
    let ends = [0usize, 1, 4095, 4096, 4097, 65_536, 299_999, 300_000];
    for start in ends {
        for end in ends.into_iter().filter(|e| *e >= start) {
            let have = read(store, object, start as u64..end as u64).expect("the range is within the object");
            assert!(have == bytes[start..end], "bytes {start}..{end}");
        }
    }
    let empty = seed(b"");
    assert_eq!(read(store, empty, 0..0).expect("an empty object can be read"), b"");
}

/// Lengths are told.
pub fn lengths(store: &dyn ObjectStore, seed: &Seed<'_>) {
    for len in [0, 1, 5000] {
        let object = seed(&pattern(len, 2));
        assert_eq!(length(store, object, soon()).expect("the object is there"), len as u64);
    }
}

/// A range that reaches beyond the end is an error, never a short answer.
pub fn beyond_the_end(store: &dyn ObjectStore, seed: &Seed<'_>) {
    let object = seed(&pattern(5000, 3));
    #[allow(clippy::reversed_empty_ranges)]
    for range in [4999..5001, 5000..5001, 5001..5001, 0..u64::MAX, u64::MAX - 1..u64::MAX, 10..9] {
        let result = read(store, object, range.clone());
        assert!(matches!(result, Err(FetchError::OutOfRange { .. })), "{range:?}: {result:?}");
    }
}

/// An object that is not there is told apart.
pub fn absent_objects(store: &dyn ObjectStore, _seed: &Seed<'_>) {
    let object = Digest::of(b"an object that nobody seeds");
    let result = read(store, object, 0..1);
    assert!(matches!(result, Err(FetchError::NotFound { object: o }) if o == object), "{result:?}");
    let result = length(store, object, soon());
    assert!(matches!(result, Err(FetchError::NotFound { .. })), "{result:?}");
}

/// A request whose deadline has passed gets no bytes.
pub fn passed_deadlines(store: &dyn ObjectStore, seed: &Seed<'_>) {
    let object = seed(b"late");
    let late = Request { deadline: Instant::now(), ..soon() };
    let result = wait(|done| {
        let read = ReadRequest { object, range: 0..4, request: late, buffer: Vec::new() };
        store.read(read, Box::new(done));
    });
    assert!(matches!(result, Err(FetchError::TimedOut)), "{result:?}");
    let result = length(store, object, late);
    assert!(matches!(result, Err(FetchError::TimedOut)), "{result:?}");
}

/// What the request's buffer held before does not show.
pub fn reused_buffers(store: &dyn ObjectStore, seed: &Seed<'_>) {
    let bytes = pattern(1000, 4);
    let object = seed(&bytes);
    let mut buffer = vec![0xee; 5000];
    for range in [0..1000u64, 10..20, 0..0, 0..1000] {
        let read = ReadRequest { object, range: range.clone(), request: soon(), buffer };
        buffer = wait(|done| store.read(read, Box::new(done))).expect("the range is within the object");
        assert!(buffer == bytes[range.start as usize..range.end as usize], "{range:?}");
    }
}

/// Many reads at once, of all classes, from several threads: each completes exactly once, with its own bytes.
pub fn concurrent_reads_complete_once(store: &dyn ObjectStore, seed: &Seed<'_>) {
    const THREADS: usize = 4;
    const READS: usize = 200;
    let objects: Vec<(ObjectId, Vec<u8>)> = (0..3u8)
        .map(|i| {
            let bytes = pattern(100_000, 10 + i);
            (seed(&bytes), bytes)
        })
        .collect();
    let completions: Arc<Vec<AtomicUsize>> = Arc::new((0..THREADS * READS).map(|_| AtomicUsize::new(0)).collect());
    let (sender, receiver) = mpsc::channel();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (sender, completions, objects) = (sender.clone(), completions.clone(), &objects);
            scope.spawn(move || {
                for i in 0..READS {
                    let n = thread * READS + i;
                    let (object, bytes) = &objects[n % objects.len()];
                    let start = n * 97 % 90_000;
                    let want = bytes[start..start + n % 10_000].to_vec();
                    let request = Request { id: n as u64, class: Class::ALL[n % 3], ..soon() };
                    let range = start as u64..(start + want.len()) as u64;
                    let read = ReadRequest { object: *object, range, request, buffer: Vec::new() };
                    let (sender, completions) = (sender.clone(), completions.clone());
                    store.read(
                        read,
                        Box::new(move |result| {
                            completions[n].fetch_add(1, Ordering::SeqCst);
                            // The receiver is only gone when the test has failed already.
                            let _ = sender.send((n, result.is_ok_and(|have| have == want)));
                        }),
                    );
                }
            });
        }
    });
    for _ in 0..THREADS * READS {
        let (n, right) = receiver.recv_timeout(PATIENCE).expect("every read completes");
        assert!(right, "read {n}");
    }
    assert!(completions.iter().all(|c| c.load(Ordering::SeqCst) == 1), "each completion runs once");
}

/// Reads of a store that is dropped complete, with their bytes or [`FetchError::Closed`].
pub fn dropping_completes_what_is_outstanding(store: Box<dyn ObjectStore>, object: ObjectId, len: u64) {
    const READS: usize = 500;
    let (sender, receiver) = mpsc::channel();
    for _ in 0..READS {
        let sender = sender.clone();
        let read = ReadRequest { object, range: 0..len, request: soon(), buffer: Vec::new() };
        store.read(
            read,
            Box::new(move |result| {
                let _ = sender.send(result);
            }),
        );
    }
    drop((store, sender));
    let mut count = 0;
    while let Ok(result) = receiver.recv_timeout(PATIENCE) {
        match result {
            Ok(bytes) => assert_eq!(bytes.len() as u64, len),
            Err(error) => assert!(matches!(error, FetchError::Closed), "{error}"),
        }
        count += 1;
    }
    assert_eq!(count, READS, "every read completes once");
}

fn soon() -> Request {
    Request { id: 0, class: Class::Demand, deadline: Instant::now() + PATIENCE }
}

fn pattern(len: usize, salt: u8) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(i) >> 7) as u8 ^ (i as u8) ^ salt).collect()
}

fn read(store: &dyn ObjectStore, object: ObjectId, range: Range<u64>) -> Result<Vec<u8>, FetchError> {
    let read = ReadRequest { object, range, request: soon(), buffer: Vec::new() };
    wait(|done| store.read(read, Box::new(done)))
}

fn length(store: &dyn ObjectStore, object: ObjectId, request: Request) -> Result<u64, FetchError> {
    wait(|done| store.len(&object, request, Box::new(done)))
}

/// Waits for a completion.
fn wait<T: Send + 'static>(start: impl FnOnce(Box<dyn FnOnce(T) + Send>)) -> T {
    let (sender, receiver) = mpsc::channel();
    start(Box::new(move |result| {
        let _ = sender.send(result);
    }));
    receiver.recv_timeout(PATIENCE).expect("every request completes")
}
