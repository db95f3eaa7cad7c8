//! Pushing metadata: what a kernel is about to ask of an image's file is put into the file's page cache before it asks.
//!
//! A kernel's EROFS reads metadata a page at a time and never ahead, so every page that is missing costs a round trip.
//! One thread for each session of block files has the kernel read the metadata of an image in large pieces when it was
//! mounted, beside whatever comes next, and again when a read of metadata shows that pages have gone (memory was short,
//! or somebody dropped the caches): the part that was asked for, directories or the rest, from where it was read on. Pages
//! that are there are left alone.
//!
//! It reads files that this very process serves, so it has a descriptor table of its own ([`sys::proc::spawn_apart`])
//! and touches nothing that holds other descriptors; and it waits for no page that somebody else's read has locked but
//! after all its own are under way. (FUSE's notify_store would wait for such pages while it has the device open: a
//! daemon that is killed at that moment would never end.)
//!
//! Bounds: a budget of bytes for each push, a twentieth of a processor over time, nothing while memory is short.
//! Failure model: what is not pushed is read page by page, so a failure costs time only; it is counted.

use crate::front::BlockFiles;
use crate::source::MetadataReads;
use rustix::fs::{Mode, OFlags};
use serde_json::{Value, json};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The kernel's readahead of a file where it was not set.
const LEAST_STEP: u64 = 128 << 10;
/// Bytes between two looks at the memory that is left.
const LOOK_EVERY: u64 = 4 << 20;
/// Time that is not spent on pushing for each time that is.
const REST: u32 = 20;
/// The shortest rest.
const REST_LEAST: Duration = Duration::from_millis(200);
/// How long nothing is pushed when memory is short.
const HOLD: Duration = Duration::from_secs(10);
/// How long the thread sleeps when nothing is to be done; it is woken when something is.
const SLEEP: Duration = Duration::from_secs(3600);

/// Pushes the metadata of the files of one session. Dropping it ends its thread.
#[derive(Debug)]
pub struct Pusher {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// Nothing in here holds a descriptor.
#[derive(Debug)]
struct Shared {
    budget: u64,
    /// What the kernel reads of a file in one go.
    step: u64,
    targets: Mutex<Vec<Arc<Target>>>,
    stopping: AtomicBool,
    pushes: AtomicU64,
    pushed_bytes: AtomicU64,
    held_back: AtomicU64,
    failures: AtomicU64,
}

/// One image's file.
#[derive(Debug)]
struct Target {
    /// In the session's root directory.
    name: String,
    reads: Arc<MetadataReads>,
    gone: AtomicBool,
    /// Nothing of a part before that. Only the thread changes it.
    rest_until: Mutex<Vec<Instant>>,
}

impl Pusher {
    /// Starts a thread that pushes at most `budget` bytes at a time into a file of `files`.
    pub fn start(files: &BlockFiles, budget: u64) -> io::Result<Pusher> {
        let shared = Arc::new(Shared {
            budget,
            step: files.read_ahead().max(LEAST_STEP),
            targets: Mutex::default(),
            stopping: AtomicBool::new(false),
            pushes: AtomicU64::new(0),
            pushed_bytes: AtomicU64::new(0),
            held_back: AtomicU64::new(0),
            failures: AtomicU64::new(0),
        });
        let working = Arc::clone(&shared);
        let thread = sys::proc::spawn_apart("push", files.mount()?, move |root| working.work(&root))?;
        Ok(Pusher { shared, thread: Some(thread) })
    }

    /// Pushes the metadata of the file `name` now, and from now on each part of it that is missed.
    pub fn add(&self, name: &str, reads: &Arc<MetadataReads>) {
        let Some(thread) = &self.thread else { return };
        self.shared.targets().push(Arc::new(Target {
            name: name.to_owned(),
            reads: Arc::clone(reads),
            gone: AtomicBool::new(false),
            rest_until: Mutex::new(vec![Instant::now(); reads.parts()]),
        }));
        reads.wake_on_read(thread.thread().clone());
        // The mount has asked already, when nobody was to be woken.
        (0..reads.parts()).for_each(|part| reads.ask(part));
        thread.thread().unpark();
    }

    /// Leaves a file alone from now on.
    pub fn remove(&self, name: &str) {
        self.shared.targets().retain(|target| {
            let same = target.name == name;
            if same {
                target.gone.store(true, Relaxed);
            }
            !same
        });
    }

    /// What was counted since it began.
    pub fn counters(&self) -> Value {
        let shared = &self.shared;
        json!({
            "pushes": shared.pushes.load(Relaxed),
            "pushed_bytes": shared.pushed_bytes.load(Relaxed),
            "held_back": shared.held_back.load(Relaxed),
            "failures": shared.failures.load(Relaxed),
        })
    }
}

impl Drop for Pusher {
    fn drop(&mut self) {
        self.shared.stopping.store(true, Relaxed);
        let Some(thread) = self.thread.take() else { return };
        thread.thread().unpark();
        // A panic was said on standard error, which is the log.
        let _ = thread.join();
    }
}

/// How a push ended.
enum Outcome {
    /// All is there, or as much as the budget allows.
    Done,
    /// The file is gone.
    Gone,
    /// Memory is short.
    Short,
}

impl Shared {
    fn targets(&self) -> MutexGuard<'_, Vec<Arc<Target>>> {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self, root: &OwnedFd) {
        while !self.stopping.load(Relaxed) {
            match self.next() {
                Ok((target, part)) => self.serve(root, &target, part),
                Err(pause) => std::thread::park_timeout(pause),
            }
        }
    }

    /// A file of which a part is missed and may be pushed now, or how long there is none.
    fn next(&self) -> Result<(Arc<Target>, usize), Duration> {
        let now = Instant::now();
        let mut pause = SLEEP;
        for target in self.targets().iter() {
            for part in (0..target.reads.parts()).filter(|part| target.reads.is_asked(*part)) {
                let left = target.rests()[part].saturating_duration_since(now);
                if left.is_zero() {
                    return Ok((Arc::clone(target), part));
                }
                pause = pause.min(left);
            }
        }
        Err(pause)
    }

    fn serve(&self, root: &OwnedFd, target: &Target, part: usize) {
        let began = Instant::now();
        let outcome = self.push(root, target, part);
        let spent = began.elapsed();
        let rest = match outcome {
            Ok(Outcome::Done) => {
                self.pushes.fetch_add(1, Relaxed);
                target.reads.satisfied(part);
                (spent * REST).max(REST_LEAST)
            }
            Ok(Outcome::Gone) => SLEEP,
            Ok(Outcome::Short) => {
                self.held_back.fetch_add(1, Relaxed);
                HOLD
            }
            Err(_) => {
                self.failures.fetch_add(1, Relaxed);
                HOLD
            }
        };
        target.rests()[part] = Instant::now() + rest;
    }

    /// Has the kernel read what it has not of a part of a file's metadata, from where it was asked for last, round to
    /// there again.
    fn push(&self, root: &OwnedFd, target: &Target, part: usize) -> io::Result<Outcome> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(root, target.name.as_str(), flags, Mode::empty())?;
        let (bytes, last) = target.reads.part(part);
        let pieces = (bytes.end - bytes.start).div_ceil(self.step);
        let first = last.saturating_sub(bytes.start) / self.step;
        let mut last_pages = Vec::new();
        for n in 0..pieces.min(self.budget.div_ceil(self.step)) {
            if self.stopping.load(Relaxed) || target.gone.load(Relaxed) {
                return Ok(Outcome::Gone);
            }
            if n * self.step % LOOK_EVERY < self.step && memory_is_short() {
                return Ok(Outcome::Short);
            }
            let at = bytes.start + (first + n) % pieces * self.step;
            let len = self.step.min(bytes.end - at);
            // Allocates pages where there are none and sends for them; waits for nobody.
            sys::file::fadvise_willneed(&file, at, len)?;
            last_pages.push(at + len - 1);
            self.pushed_bytes.fetch_add(len, Relaxed);
        }
        // Now for the answers, so that none of these reads is taken for somebody's who misses something.
        for at in last_pages {
            sys::file::pread_exact(file.as_fd(), &mut [0], at)?;
        }
        Ok(Outcome::Done)
    }
}

impl Target {
    fn rests(&self) -> MutexGuard<'_, Vec<Instant>> {
        self.rest_until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether pages that are pushed now would be taken from somebody who needs them.
fn memory_is_short() -> bool {
    let read = |path| std::fs::read_to_string(path).unwrap_or_default();
    stalls(&read("/proc/pressure/memory")) || little_is_left(&read("/proc/meminfo"))
}

/// Whether somebody waited for memory in a twentieth of the last ten seconds (`Documentation/accounting/psi.rst`).
fn stalls(pressure: &str) -> bool {
    let some = pressure.lines().find_map(|line| line.strip_prefix("some avg10="));
    let share = some.and_then(|rest| rest.split_whitespace().next()?.parse::<f64>().ok());
    share.is_some_and(|percent| percent >= 5.0)
}

/// Whether less than a twentieth of the memory is available.
fn little_is_left(meminfo: &str) -> bool {
    let field = |name: &str| -> Option<u64> {
        let rest = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        rest.split_whitespace().next()?.parse().ok()
    };
    match (field("MemAvailable:"), field("MemTotal:")) {
        (Some(available), Some(total)) => available < total / 20,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_short_when_the_kernel_says_so() {
        let pressure = |percent| format!("some avg10={percent} avg60=0.00 avg300=0.00 total=1\nfull avg10=99.00");
        assert!(!stalls(&pressure("4.99")) && stalls(&pressure("5.00")));
        let meminfo = |available| format!("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable:   {available} kB\n");
        assert!(!little_is_left(&meminfo(50)) && little_is_left(&meminfo(49)));
        // Kernels without these files.
        assert!(!stalls("") && !little_is_left("") && !stalls("some avg10="));
    }
}
