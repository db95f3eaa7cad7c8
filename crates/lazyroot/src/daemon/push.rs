//! Pushing metadata: what a kernel is about to ask of an image's file is put into the file's page cache before it asks.
//!
//! A kernel's EROFS reads metadata a page at a time without readahead, so every page that is missing costs a round
//! trip. One thread for each session of block files pushes the metadata of an image when its file is added, beside the
//! mount and never in its way, and again when a read of metadata shows that pages have gone (memory was short, or
//! somebody dropped the caches). It starts with what was asked for and goes on from there.
//!
//! Invariants: it is no serving thread, and waits for none of its own (see [`BlockFiles::notify_store`]); what is
//! pushed was made from the verified index; pages that are there are left alone. Bounds: a budget of bytes for each
//! push, a twentieth of a processor over time, nothing while memory is short. Failure model: what cannot be pushed is
//! read, so a failure costs time only; it is logged once for each image.

use super::log::LogFile;
use crate::front::{BlockFile, BlockFiles};
use crate::source::ErofsSource;
use serde_json::{Value, json};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Bytes that are made and pushed in one go; what [`BlockFiles::notify_store`] sends in one message.
const PIECE: u64 = 128 << 10;
/// Pieces between two looks at the memory that is left.
const LOOK_EVERY: u64 = 32;
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

#[derive(Debug)]
struct Shared {
    files: Arc<BlockFiles>,
    budget: u64,
    log: Arc<LogFile>,
    targets: Mutex<Vec<Arc<Target>>>,
    stopping: AtomicBool,
    pushes: AtomicU64,
    pushed_bytes: AtomicU64,
    present_bytes: AtomicU64,
    held_back: AtomicU64,
}

/// One image's file.
#[derive(Debug)]
struct Target {
    file: BlockFile,
    /// Keeps the kernel's knowledge of the file, without which nothing can be pushed.
    open: OwnedFd,
    source: Arc<ErofsSource>,
    gone: AtomicBool,
    /// Nothing before that. Only the thread changes it.
    rest_until: Mutex<Instant>,
}

impl Pusher {
    /// Starts a thread that pushes at most `budget` bytes at a time into a file of `files`.
    pub fn start(files: Arc<BlockFiles>, budget: u64, log: Arc<LogFile>) -> io::Result<Pusher> {
        let shared = Arc::new(Shared {
            files,
            budget,
            log,
            targets: Mutex::default(),
            stopping: AtomicBool::new(false),
            pushes: AtomicU64::new(0),
            pushed_bytes: AtomicU64::new(0),
            present_bytes: AtomicU64::new(0),
            held_back: AtomicU64::new(0),
        });
        let working = Arc::clone(&shared);
        let builder = std::thread::Builder::new().name("push".into()).stack_size(256 << 10);
        let thread = Some(builder.spawn(move || working.work())?);
        Ok(Pusher { shared, thread })
    }

    /// Pushes the metadata of a file from now on, whenever it is missed. Not from a serving thread.
    pub fn add(&self, file: BlockFile, source: &Arc<ErofsSource>) -> io::Result<()> {
        let Some(thread) = &self.thread else { return Ok(()) };
        let target = Target {
            file,
            open: self.shared.files.open(file)?,
            source: Arc::clone(source),
            gone: AtomicBool::new(false),
            rest_until: Mutex::new(Instant::now()),
        };
        self.shared.targets().push(Arc::new(target));
        source.metadata_reads().wake_on_read(thread.thread().clone());
        // The mount has asked already, when nobody was to be woken; if not, it is about to.
        source.metadata_reads().ask(0);
        thread.thread().unpark();
        Ok(())
    }

    /// Leaves a file alone from now on, and lets go of it.
    pub fn remove(&self, file: BlockFile) {
        self.shared.targets().retain(|target| {
            let same = target.file == file;
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
            "present_bytes": shared.present_bytes.load(Relaxed),
            "held_back": shared.held_back.load(Relaxed),
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
    /// The file or the session is gone.
    Gone,
    /// Memory is short.
    Short,
}

impl Shared {
    fn targets(&self) -> MutexGuard<'_, Vec<Arc<Target>>> {
        self.targets.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn work(&self) {
        while !self.stopping.load(Relaxed) {
            match self.next() {
                Ok(target) => self.serve(&target),
                Err(pause) => std::thread::park_timeout(pause),
            }
        }
    }

    /// A file whose metadata is missed and that may be served now, or how long there is none.
    fn next(&self) -> Result<Arc<Target>, Duration> {
        let now = Instant::now();
        let mut pause = SLEEP;
        for target in self.targets().iter() {
            if target.source.metadata_reads().is_asked() {
                let left = target.rest().saturating_duration_since(now);
                if left.is_zero() {
                    return Ok(Arc::clone(target));
                }
                pause = pause.min(left);
            }
        }
        Err(pause)
    }

    fn serve(&self, target: &Target) {
        let began = Instant::now();
        let outcome = self.push(target);
        let spent = began.elapsed();
        let rest = match outcome {
            Ok(Outcome::Done) => {
                self.pushes.fetch_add(1, Relaxed);
                target.source.metadata_reads().satisfied();
                (spent * REST).max(REST_LEAST)
            }
            Ok(Outcome::Gone) => SLEEP,
            Ok(Outcome::Short) => {
                self.held_back.fetch_add(1, Relaxed);
                HOLD
            }
            Err(e) => {
                self.log.warn(format_args!("metadata is not pushed, and is read page by page: {e}"));
                SLEEP
            }
        };
        *target.rest_until.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now() + rest;
    }

    /// Pushes what is missing of a file's metadata, from where it was asked for last, round to there again.
    fn push(&self, target: &Target) -> io::Result<Outcome> {
        let end = target.source.metadata_bytes();
        let pieces = end.div_ceil(PIECE);
        let first = target.source.metadata_reads().last().min(end.saturating_sub(1)) / PIECE;
        let mut buffer = vec![0; PIECE.min(end) as usize];
        for n in 0..pieces.min(self.budget.div_ceil(PIECE)) {
            if self.stopping.load(Relaxed) || target.gone.load(Relaxed) {
                return Ok(Outcome::Gone);
            }
            if n % LOOK_EVERY == 0 && memory_is_short() {
                return Ok(Outcome::Short);
            }
            let at = (first + n) % pieces * PIECE;
            let len = PIECE.min(end - at);
            // Where the kernel cannot tell (before Linux 6.5) everything counts as missing.
            if sys::file::cached_pages(&target.open, at, len).is_ok_and(|pages| pages >= len.div_ceil(4096)) {
                self.present_bytes.fetch_add(len, Relaxed);
                continue;
            }
            let piece = &mut buffer[..len as usize];
            target.source.emit(at, piece).map_err(io::Error::other)?;
            match self.files.notify_store(target.file, at, piece) {
                Ok(()) => self.pushed_bytes.fetch_add(len, Relaxed),
                Err(e) if e.kind() == io::ErrorKind::OutOfMemory => return Ok(Outcome::Short),
                // The kernel has forgotten the file, or the session is over.
                Err(e) if is_gone(&e) => return Ok(Outcome::Gone),
                Err(e) => return Err(e),
            };
        }
        Ok(Outcome::Done)
    }
}

impl Target {
    fn rest(&self) -> Instant {
        *self.rest_until.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_gone(error: &io::Error) -> bool {
    use rustix::io::Errno;
    let gone = [Errno::NOENT, Errno::NODEV, Errno::NOTCONN, Errno::CONNABORTED];
    error.kind() == io::ErrorKind::NotFound
        || sys::mount::raw_errno(error).is_some_and(|n| gone.iter().any(|e| e.raw_os_error() == n))
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
