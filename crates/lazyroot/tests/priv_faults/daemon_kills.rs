//! The daemon is killed while it fills.

use crate::lab::{Lab, collect, eventually, needs_mounts, skip_if};
use crate::support::{Random, Source, filled, has_claims, kill, read_file, rounds, the};
use rustix::fs::{FileType, Mode};
use rustix::io::Errno;
use std::path::Path;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};

const READERS: usize = 4;

/// What several readers of one mount got.
struct Readers {
    right: AtomicU64,
    failed: AtomicUsize,
    finished: AtomicUsize,
    /// Readers wait for it in the middle.
    open: AtomicBool,
}

impl Readers {
    /// One reader: every file once, in an order of its own.
    fn run(&self, source: &Source, mount: &Path, seed: u64) {
        let mut order: Vec<_> = source.files.iter().collect();
        Random(seed).shuffle(&mut order);
        for (i, (name, bytes)) in order.iter().enumerate() {
            while i == order.len() / 3 && !self.open.load(Ordering::Acquire) {
                std::thread::sleep(Duration::from_millis(1));
            }
            if let Err(errno) = read_file(&mount.join(name), bytes, &self.right) {
                self.failed.fetch_add(1, Ordering::Relaxed);
                assert!([Errno::IO, Errno::NOTCONN, Errno::CONNABORTED].contains(&errno));
            }
        }
        self.finished.fetch_add(1, Ordering::Release);
    }
}

#[test]
fn priv_a_daemon_killed_while_it_fills_never_gives_a_wrong_byte() {
    skip_if!("priv_a_daemon_killed_while_it_fills_never_gives_a_wrong_byte", needs_mounts());
    let lab = Lab::new();
    let source = Source::medium(&lab);
    lab.take(&source, "a");
    let (mut struck, mut reused, count) = (0, 0, rounds(20));
    for round in 0..count {
        let shapes = if round % 2 == 0 { ["erofs", "tree"] } else { ["tree", "erofs"] };
        // In some rounds only when part of it is durable.
        let durable = round % 3 == 2;
        let point = lab.mount("a", shapes[0], "m");
        let pid = lab.daemon_pid();
        let readers = Readers {
            right: AtomicU64::new(0),
            failed: AtomicUsize::new(0),
            finished: AtomicUsize::new(0),
            open: AtomicBool::new(!durable),
        };
        std::thread::scope(|s| {
            for n in 0..READERS {
                let (source, point, readers) = (&source, &point, &readers);
                s.spawn(move || readers.run(source, point, 1 + round * 10 + n as u64));
            }
            let all_finished = || readers.finished.load(Ordering::Acquire) == READERS;
            if durable {
                eventually("claims", || has_claims(&lab.root));
                readers.open.store(true, Ordering::Release);
            }
            let enough = source.bytes() * (1 + 2 * round) / (2 * count);
            let until = Instant::now() + Duration::from_secs(60);
            while filled(&lab.root) < enough && !all_finished() {
                assert!(Instant::now() < until, "nothing is filled");
                std::thread::sleep(Duration::from_micros(200));
            }
            kill(pid);
            // Nobody waits for a server that is dead.
            eventually("the readers are done", all_finished);
        });
        struck += u64::from(readers.failed.load(Ordering::Relaxed) > 0);

        let told = lab.run(&["ps"]).ok().err;
        for word in [&format!("process {pid}"), "killed", "1 mount was lost", "nobody used it"] {
            assert!(told.contains(word), "round {round}: no {word:?} in {told}");
        }
        assert!(lab.mounted().is_empty(), "round {round}: {:?}", lab.mounted());

        let point = lab.mount("a", shapes[1], "m");
        source.is_right(&point);
        for counter in ["corrupt_on_disk", "corrupt_fetched", "store_errors", "failures", "timeouts"] {
            assert_eq!(lab.counter(counter), 0, "round {round}: {counter}");
        }
        let verified = lab.counter("frames_verified");
        assert!(!durable || verified > 0, "round {round}: what was durable is not used again");
        reused += verified;
        lab.umount(&point);
        lab.stop();
        lab.cold();
    }
    assert!(struck >= count / 2, "in only {struck} rounds a reader was hit");
    assert!(reused > 0);
    assert_eq!(lab.problems(), (0, 0));
}

#[test]
fn priv_files_open_when_the_daemon_dies_keep_what_was_read_and_fail_the_rest() {
    skip_if!("priv_files_open_when_the_daemon_dies_keep_what_was_read_and_fail_the_rest", needs_mounts());
    for shape in ["erofs", "tree"] {
        let lab = Lab::new();
        let source = Source::small(&lab, "tree", 3);
        lab.take(&source, "a");
        let point = lab.mount("a", shape, "m");
        let cached = &source.files["dir0/f0"];
        let right = AtomicU64::new(0);
        read_file(&point.join("dir0/f0"), cached, &right).unwrap();
        let open = std::fs::File::open(point.join("text")).unwrap();
        kill(lab.daemon_pid());
        // What is in the kernel's cache stays; twice, since a failure must not spoil it.
        let fresh = |name: &str| read_file(&point.join(name), &source.files[name], &right);
        for _ in 0..2 {
            if shape == "erofs" {
                fresh("dir0/f0").unwrap();
            }
            let mut piece = [0u8; 4096];
            let error = std::os::unix::fs::FileExt::read_at(&open, &mut piece, 2 << 20).unwrap_err();
            assert!([Some(Errno::IO), Some(Errno::NOTCONN)].contains(&Errno::from_io_error(&error)), "{error}");
            fresh("noise1").unwrap_err();
        }
        drop(open);
        let told = lab.run(&["ps"]).ok().err;
        assert!(told.contains("unmounted, nobody used it"), "{told}");
    }
}

#[test]
fn priv_a_daemon_killed_while_it_evicts_never_gives_a_wrong_byte() {
    skip_if!("priv_a_daemon_killed_while_it_evicts_never_gives_a_wrong_byte", needs_mounts());
    let lab = Lab::new();
    let source = Source::medium(&lab);
    lab.take(&source, "a");
    let count = rounds(6);
    let drop_caches = || {
        let mut command = lab.command(&["daemon", "drop-caches", "a"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let mut took = Duration::ZERO;
    for round in 0..=count {
        let point = lab.mount("a", "tree", "m");
        source.is_right(&point);
        if round % 2 == 0 {
            eventually("claims", || has_claims(&lab.root));
        }
        let other = lab.mount("a", "erofs", "other");
        let pid = lab.daemon_pid();
        let (killed, finished) = (AtomicBool::new(false), AtomicBool::new(false));
        let mut told = String::new();
        std::thread::scope(|s| {
            // What is evicted is what somebody reads. After the kill its mount may be taken away.
            s.spawn(|| {
                for (name, bytes) in &source.files {
                    if !killed.load(Ordering::Acquire) {
                        let _ = read_file(&other.join(name), bytes, &AtomicU64::new(0));
                    }
                }
                finished.store(true, Ordering::Release);
            });
            let began = Instant::now();
            let mut child = drop_caches();
            if round == 0 {
                child.wait().unwrap();
                took = began.elapsed();
            } else {
                let until = began + took * round as u32 / count as u32;
                while Instant::now() < until {
                    std::hint::spin_loop();
                }
            }
            killed.store(true, Ordering::Release);
            kill(pid);
            told = collect(child).err;
            eventually("the reader is done", || finished.load(Ordering::Acquire));
        });
        told += &lab.run(&["ps"]).ok().err;
        assert!(told.contains("was killed"), "{told}");
        for left in lab.mounted() {
            assert!(told.contains("still in use"), "{told}");
            lab.run(&["umount", "--lazy", left.to_str().unwrap()]).ok();
        }
        let point = lab.mount("a", "erofs", "m");
        source.is_right(&point);
        for counter in ["corrupt_on_disk", "failures"] {
            assert_eq!(lab.counter(counter), 0, "round {round}: {counter}");
        }
        lab.umount(&point);
        lab.stop();
    }
}

#[test]
fn priv_reads_that_wait_for_a_silent_disk_end_with_their_daemon() {
    skip_if!("priv_reads_that_wait_for_a_silent_disk_end_with_their_daemon", needs_mounts());
    for (shape, end) in [("erofs", "kill"), ("tree", "kill"), ("erofs", "stop"), ("tree", "stop")] {
        let lab = Lab::new();
        let source = Source::small(&lab, "tree", 30);
        lab.take(&source, "a");
        let point = lab.mount("a", shape, "m");
        let right = AtomicU64::new(0);
        let read = |name: &str| read_file(&point.join(name), &source.files[name], &right);
        read("noise0").unwrap();
        lab.umount(&point);
        lab.stop();
        // Opening a pipe waits until somebody writes to it: a disk that does not answer.
        let pack = the(&lab.root, "objects", ".pack");
        let away = lab.path("away");
        std::fs::rename(&pack, &away).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &pack, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let point = lab.mount("a", shape, "m");
        let read = |name: &str| read_file(&point.join(name), &source.files[name], &right);
        let pid = lab.daemon_pid();
        std::thread::scope(|s| {
            let read = &read;
            let waiting: Vec<_> = (0..12).map(|_| s.spawn(move || read("text"))).collect();
            eventually("they wait", || lab.counter("reads_pending") > 0);
            // What is cached is read all the same.
            read("noise0").unwrap();
            assert!(waiting.iter().all(|w| !w.is_finished()));
            let began = Instant::now();
            if end == "kill" {
                kill(pid);
            } else {
                lab.run(&["daemon", "stop", "--force"]).ok();
            }
            eventually("they are told", || waiting.iter().all(ScopedJoinHandle::is_finished));
            assert!(began.elapsed() < Duration::from_secs(20), "{shape}, {end}: {:?}", began.elapsed());
            for reader in waiting {
                reader.join().unwrap().unwrap_err();
            }
        });
        eventually("the daemon is gone", || !lab.daemon_lives());
        std::fs::remove_file(&pack).unwrap();
        std::fs::rename(&away, &pack).unwrap();
        assert_eq!(lab.run(&["ps"]).ok().err.contains("killed"), end == "kill");
        let point = lab.mount("a", shape, "again");
        source.is_right(&point);
    }
}
