//! A store that never answers, and many readers who wait for it: whoever reads what is cached, or only names and
//! attributes, does not notice.
//!
//! Counted, not timed: while every one of a thousand readers waits, whole walks and reads of everything that is cached
//! come to their end, and the server has answered for them. How fast they were is printed: it
//! is milliseconds, so other load on the machine shows.

use crate::lab::{Lab, eventually, needs_mounts, skip_if};
use crate::support::{Random, Source, read_file, the};
use rustix::fs::{Advice, FileType, Mode};
use serde_json::Value;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

const READERS: usize = 1000;
const BETWEEN: usize = 300;
/// Files that are cached, in `a`, and as many of the same sizes in `b`.
const FILES: usize = 200;
/// Threads that walk and read what is cached.
const THREADS: u64 = 2;

/// What is going to be cached, as the image `cached`; and the image `a` of the same and a thousand files more, whose
/// content is in a pack of its own, which is returned too. Between what is read and what is missing lie 2 MiB that are
/// cached and that nobody reads (`c`): readahead is a request like any other, and one that covers missing bytes waits for
/// them with all of its pages.
fn images(lab: &Lab) -> (Source, Source, PathBuf) {
    let mut cached = Source::new(lab.path("tree"));
    let mut random = Random(0x51e7);
    for i in 0..FILES {
        let len = 12_000 + random.below(9_000) as usize;
        for dir in ["a", "b"] {
            cached.add(&format!("{dir}/d{}/f{i}", i % 7), random.noise(len));
        }
    }
    for i in 0..BETWEEN {
        cached.add(&format!("c/f{i}"), random.noise(6_000));
    }
    lab.take(&cached, "cached");
    let first = the(&lab.root, "objects", ".pack");
    let mut missing = Source::new(cached.dir.clone());
    for i in 0..READERS {
        missing.add(&format!("z/d{}/f{i}", i % 10), random.noise(6_000));
    }
    lab.take(&missing, "a");
    let packs = crate::support::find(&lab.root, "objects", ".pack");
    let second = packs.into_iter().find(|p| *p != first).unwrap();
    (cached, missing, second)
}

/// Counters of the session that answers for a mount of this shape.
fn session(lab: &Lab, shape: &str) -> Value {
    let stats = lab.run(&["--json", "stats"]).ok().json().remove(0);
    if shape == "tree" { stats["images"][0]["session"].clone() } else { stats["block_files"].clone() }
}

/// Names below a directory, each with its attributes.
fn find(dir: &Path) -> usize {
    let mut count = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let meta = path.symlink_metadata().unwrap();
        assert!(meta.mtime() != 0);
        count += 1 + if meta.is_dir() { find(&path) } else { 0 };
    }
    count
}

/// Reads the cached files of a directory on two threads, from the server where the kernel lets it. Returns how long that
/// took.
fn read_cached(source: &Source, point: &Path, dir: &str) -> Duration {
    for name in source.files.keys().filter(|n| n.starts_with(dir)) {
        let file = File::open(point.join(name)).unwrap();
        rustix::fs::fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    }
    let began = Instant::now();
    std::thread::scope(|s| {
        for thread in 0..THREADS {
            s.spawn(move || {
                for (i, (name, bytes)) in source.files.iter().enumerate() {
                    if name.starts_with(dir) && i as u64 % THREADS == thread {
                        read_file(&point.join(name), bytes, &AtomicU64::new(0)).unwrap();
                    }
                }
            });
        }
    });
    began.elapsed()
}

/// The median of a few dozen times.
fn typical(f: impl Fn() -> Duration) -> Duration {
    let mut times: Vec<Duration> = (0..41).map(|_| f()).collect();
    times.sort();
    times[times.len() / 2]
}

#[test]
fn priv_a_thousand_readers_of_a_silent_store_hold_nobody_else_up() {
    skip_if!("priv_a_thousand_readers_of_a_silent_store_hold_nobody_else_up", needs_mounts());
    for shape in ["erofs", "tree"] {
        let lab = Lab::new();
        let (cached, missing, pack) = images(&lab);
        let point = lab.mount("cached", shape, "m");
        cached.is_right(&point);
        lab.umount(&point);
        lab.stop();
        // Opening a pipe waits until somebody writes to it: a disk that does not answer.
        std::fs::remove_file(&pack).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &pack, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();

        let point = lab.mount("a", shape, "m");
        let quiet = typical(|| read_cached(&cached, &point, "a/"));
        let before = session(&lab, shape);
        let (begun, ended) = (AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|s| {
            for name in missing.files.keys() {
                let (point, begun, ended) = (&point, &begun, &ended);
                let reader = move || {
                    let mut file = File::open(point.join(name)).unwrap();
                    begun.fetch_add(1, Ordering::Release);
                    let result = file.read_exact(&mut [0; 512]);
                    ended.fetch_add(1, Ordering::Release);
                    result.unwrap_err();
                };
                std::thread::Builder::new().stack_size(64 << 10).spawn_scoped(s, reader).unwrap();
            }
            // Each reader of a tree is a request of its own; of EROFS many wait for the same pages.
            let at_least = if shape == "tree" { READERS as u64 } else { 100 };
            eventually("they wait", || {
                begun.load(Ordering::Acquire) == READERS
                    && session(&lab, shape)["parked_now"].as_u64().unwrap() >= at_least
            });
            assert_eq!(ended.load(Ordering::Acquire), 0);
            assert_eq!(find(&point), 4 + 2 * (7 + FILES) + BETWEEN + 10 + READERS);
            let loud = typical(|| read_cached(&cached, &point, "b/"));
            // All of it while nobody got an answer, or gave up.
            assert_eq!(ended.load(Ordering::Acquire), 0, "{shape}: it took longer than a deadline");
            let now = session(&lab, shape);
            let rose = |name: &str| now[name].as_u64().unwrap() - before[name].as_u64().unwrap();
            assert!(now["parked_now"].as_u64().unwrap() >= at_least, "{before} {now}");
            // At least once each byte came from the server, besides what waits.
            assert!(rose("read_bytes") >= FILES as u64 * 12_000, "{before} {now}");
            let log = lab.run(&["logs"]).ok().out;
            assert!(!log.contains(" error: "), "{log}");
            for counter in ["timeouts", "failures", "store_errors"] {
                assert_eq!(lab.counter(counter), 0, "{shape}: {counter}");
            }
            let ratio = quiet.as_secs_f64() / loud.as_secs_f64();
            println!("{shape}: with {READERS} readers waiting, cached reads have {ratio:.2} × their speed ({quiet:?})");
            lab.run(&["daemon", "stop", "--force"]).ok();
        });
        assert_eq!(ended.load(Ordering::Acquire), READERS);
    }
}
