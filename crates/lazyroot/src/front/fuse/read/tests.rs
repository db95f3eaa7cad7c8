//! Reads without a kernel: what is sent for a resolution, and who answers a parked one.

use super::*;
use crate::front::fuse::reply::tests::{Kept, kept};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};
use store::source::SpaceGuard;
use store::{Done, ReadError};

/// One piece of a source.
#[derive(Clone, Copy)]
enum Piece {
    Bytes,
    Memory,
    File,
    Zeros,
}

/// A source made of pieces of 5,000 bytes; holds its fetches back, and loses bytes that were fetched.
struct Pieces {
    pieces: Vec<Piece>,
    file: Arc<File>,
    want: Vec<u8>,
    missing: AtomicUsize,
    waiting: Mutex<Vec<(store::Request, Done)>>,
    at_once: bool,
    short_by: usize,
}

const PIECE: usize = 5000;

impl Pieces {
    fn new(pieces: &[Piece]) -> Pieces {
        let file = tempfile::tempfile().unwrap();
        let mut want = Vec::new();
        for (i, piece) in pieces.iter().enumerate() {
            let bytes = match piece {
                Piece::Zeros => vec![0; PIECE],
                _ => (0..PIECE).map(|n| (n * 7 + i * 13 + 1) as u8).collect(),
            };
            file.write_all_at(&bytes, (i * PIECE) as u64).unwrap();
            want.extend(bytes);
        }
        Pieces {
            pieces: pieces.to_vec(),
            file: Arc::new(file),
            want,
            missing: AtomicUsize::new(0),
            waiting: Mutex::default(),
            at_once: false,
            short_by: 0,
        }
    }

    fn complete(&self, well: bool) {
        let waiting = std::mem::take(&mut *self.waiting.lock().unwrap());
        waiting.into_iter().for_each(|(_, done)| done(if well { Ok(()) } else { Err(FetchError::TimedOut) }));
    }
}

impl BlockSource for Pieces {
    fn len_bytes(&self) -> u64 {
        self.want.len() as u64
    }

    fn resolve(&self, offset: u64, len: usize, out: &mut Resolution) -> Result<Presence, ReadError> {
        if self.missing.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok() {
            return Ok(Presence::Missing);
        }
        let (mut at, end) = (offset as usize, offset as usize + len - self.short_by);
        while at < end {
            let n = (end - at).min(PIECE - at % PIECE);
            let bytes = &self.want[at..at + n];
            match self.pieces[at / PIECE] {
                Piece::Bytes => out.push_bytes(bytes),
                Piece::Memory => out.push_memory(Arc::new(bytes.to_vec()), 0, n),
                Piece::File => out.push_space(SpaceGuard::file(Arc::clone(&self.file)), at as u64, n),
                Piece::Zeros => out.push_zeros(n),
            }
            at += n;
        }
        Ok(Presence::Ready)
    }

    fn fetch(&self, _: u64, _: usize, request: store::Request, done: Done) {
        if self.at_once {
            return done(Ok(()));
        }
        self.waiting.lock().unwrap().push((request, done));
    }
}

fn shared(read_path: ReadPath) -> Arc<Shared> {
    Arc::new(Shared::for_tests(Context { read_path, ..Default::default() }))
}

/// Reads and gives back the sink that the answer went, or will go, to.
fn ask(shared: &Arc<Shared>, source: &Arc<Pieces>, unique: u64, offset: u64, len: usize) -> Arc<Kept> {
    let (kept, channel) = kept();
    let source: Arc<dyn BlockSource> = source.clone();
    let mut scratch = ReadScratch::default();
    read(shared, &mut scratch, TargetRef::Block(&source), Request::new(channel, unique), (offset, len, 0));
    kept
}

#[test]
fn every_mixture_of_segments_is_sent_whole_in_every_way() {
    use Piece::*;
    let mixtures = [
        vec![File],
        vec![Zeros],
        vec![Bytes, Memory, File, Zeros, File, Bytes, Zeros, Memory],
        // More pieces than parts of an answer.
        [Bytes, File, Zeros, Memory].repeat(20),
        [Bytes, Zeros, Memory].repeat(30),
        vec![Zeros; 200],
        vec![File; 200],
    ];
    for read_path in [ReadPath::Copy, ReadPath::Uncached, ReadPath::Splice] {
        let shared = shared(read_path);
        for (m, pieces) in mixtures.iter().enumerate() {
            let source = Arc::new(Pieces::new(pieces));
            let all = source.want.len();
            for (offset, len) in [(0, all), (1, all - 1), (0, all - 1), (100, 1), (all / 2, all / 3)] {
                let kept = ask(&shared, &source, 2, offset as u64, len);
                let answers = kept.answers();
                assert_eq!(answers.len(), 1);
                assert_eq!((answers[0].0, answers[0].1), (2, 0), "{read_path:?} {m} {offset} {len}");
                assert!(answers[0].2 == source.want[offset..offset + len], "{read_path:?} {m} {offset} {len}");
            }
        }
    }
}

#[test]
fn a_file_that_ends_early_and_a_short_resolution_are_eio() {
    for read_path in [ReadPath::Copy, ReadPath::Uncached, ReadPath::Splice] {
        let shared = shared(read_path);
        let source = Arc::new(Pieces::new(&[Piece::File; 40]));
        source.file.set_len(150_000).unwrap();
        assert_eq!(ask(&shared, &source, 2, 0, 200_000).answers(), [(2, -5, vec![])]);
        assert_eq!(ask(&shared, &source, 4, 0, 100_000).answers()[0].2.len(), 100_000, "the next one is well");
        let source = Arc::new(Pieces { short_by: 1, ..Pieces::new(&[Piece::Bytes]) });
        assert_eq!(ask(&shared, &source, 6, 0, 100).answers(), [(6, -5, vec![])]);
    }
}

#[test]
fn a_parked_read_is_answered_by_its_completion() {
    let shared = shared(ReadPath::Copy);
    let source = Arc::new(Pieces::new(&[Piece::Bytes, Piece::File]));
    // Missing at first, and evicted once after it was fetched.
    source.missing.store(2, Ordering::Relaxed);
    let kept = ask(&shared, &source, 8, 10, 6000);
    assert!(kept.answers().is_empty());
    assert_eq!((shared.parked.len(), shared.counters.parked()), (1, 1));
    {
        let waiting = source.waiting.lock().unwrap();
        let request = &waiting[0].0;
        assert_eq!((request.id, request.class), (8, Class::Demand));
        let left = request.deadline.saturating_duration_since(Instant::now());
        assert!(left <= Duration::from_secs(30) && left > Duration::from_secs(20));
    }
    source.complete(true);
    assert!(kept.answers().is_empty());
    source.complete(true);
    assert_eq!(kept.answers(), [(8, 0, source.want[10..6010].to_vec())]);
    assert_eq!(shared.parked.len(), 0);
}

#[test]
fn failed_fetches_and_endless_evictions_are_eio() {
    let shared = shared(ReadPath::Copy);
    let source = Arc::new(Pieces::new(&[Piece::Bytes]));
    source.missing.store(1, Ordering::Relaxed);
    let kept = ask(&shared, &source, 2, 0, 10);
    source.complete(false);
    assert_eq!(kept.answers(), [(2, -5, vec![])]);
    // Also when the source completes on the asking thread, each within the other.
    let source = Arc::new(Pieces { at_once: true, ..Pieces::new(&[Piece::Bytes]) });
    source.missing.store(usize::MAX, Ordering::Relaxed);
    assert_eq!(ask(&shared, &source, 4, 0, 10).answers(), [(4, -5, vec![])]);
    source.missing.store(MAX_FETCHES as usize, Ordering::Relaxed);
    assert_eq!(ask(&shared, &source, 6, 0, 10).answers(), [(6, 0, source.want[..10].to_vec())]);
}

#[test]
fn the_end_of_the_session_answers_and_late_completions_do_nothing() {
    let shared = shared(ReadPath::Copy);
    let source = Arc::new(Pieces::new(&[Piece::Bytes]));
    source.missing.store(1, Ordering::Relaxed);
    let kept = ask(&shared, &source, 2, 0, 10);
    shared.parked.close().into_iter().for_each(|read| read.request.error(rustix::io::Errno::NOTCONN));
    source.complete(true);
    assert_eq!(kept.answers(), [(2, -107, vec![])]);
    source.missing.store(1, Ordering::Relaxed);
    assert_eq!(ask(&shared, &source, 4, 0, 10).answers(), [(4, -107, vec![])], "nothing is parked any more");
    assert!(source.waiting.lock().unwrap().is_empty());
}

#[test]
fn an_interruption_of_a_living_reader_changes_nothing() {
    let shared = shared(ReadPath::Copy);
    let source = Arc::new(Pieces::new(&[Piece::Bytes]));
    assert!(!interrupt(&shared, 2), "not parked");
    source.missing.store(1, Ordering::Relaxed);
    let (kept, channel) = kept();
    let target: Arc<dyn BlockSource> = source.clone();
    let request = Request::new(channel, 2);
    let me = std::process::id();
    read(&shared, &mut ReadScratch::default(), TargetRef::Block(&target), request, (0, 10, me));
    assert!(interrupt(&shared, 2));
    assert_eq!(shared.parked.len(), 1);
    source.complete(true);
    assert_eq!(kept.answers().len(), 1);
}
