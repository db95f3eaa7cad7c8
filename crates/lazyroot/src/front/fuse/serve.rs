//! Threads that wait in read(2) on descriptors of one connection, and the session that owns them.
//!
//! Invariants: each thread reads from a descriptor of its own and answers on it; a session that ends has answered
//! everything, parked reads included, before its descriptors close. Failure model: ENODEV (unmounted, aborted) ends
//! the threads; a panic in a handler costs one request an EIO, not the mount. Ending never hangs: threads that sleep
//! in read(2) are woken by a signal; closing the last descriptor then aborts the connection, so users of a mount that
//! is still attached get ENOTCONN.
//!
//! A serving thread must not touch its own mount, nor send a notification.

use super::decide::{self, Wish};
use super::parked::Parked;
use super::read::{self, Context, ReadScratch};
use super::reply::{Channel, Request};
use super::wire::{self, InHeader, InitIn, InitOut, Op, WireError, init, opcode};
use crate::front::{Fault, Level, errno};
use rustix::io::Errno;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use sys::fuse::Device;
use zerocopy::IntoBytes;

/// Room for one request. The largest are batches of forgets, which the kernel cuts to fit; nothing is written.
const REQUEST_BYTES: usize = 32 << 10;
/// How long the kernel may take to say its first word after the mount.
const INIT_PATIENCE: Duration = Duration::from_secs(10);

/// Counts of one session since it began. All are approximate while it runs.
#[derive(Debug)]
pub struct Counters {
    by_opcode: [AtomicU64; opcode::COUNT],
    reads: AtomicU64,
    read_bytes: AtomicU64,
    parked: AtomicU64,
    errors: AtomicU64,
    refused: AtomicU64,
}

impl Default for Counters {
    fn default() -> Self {
        Counters {
            by_opcode: std::array::from_fn(|_| AtomicU64::new(0)),
            reads: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            parked: AtomicU64::new(0),
            errors: AtomicU64::new(0),
            refused: AtomicU64::new(0),
        }
    }
}

impl Counters {
    /// Requests with that operation code; unknown codes count as 0.
    pub fn requests(&self, code: u32) -> u64 {
        self.by_opcode.get(code as usize).unwrap_or(&self.by_opcode[0]).load(Relaxed)
    }

    /// All requests.
    pub fn all_requests(&self) -> u64 {
        self.by_opcode.iter().map(|n| n.load(Relaxed)).sum()
    }

    /// Reads that were answered with bytes.
    pub fn reads(&self) -> u64 {
        self.reads.load(Relaxed)
    }

    /// Bytes that reads were answered with.
    pub fn read_bytes(&self) -> u64 {
        self.read_bytes.load(Relaxed)
    }

    /// Reads that had to wait for missing bytes.
    pub fn parked(&self) -> u64 {
        self.parked.load(Relaxed)
    }

    /// Requests that were answered with an errno, ordinary ones (no such name) included.
    pub fn errors(&self) -> u64 {
        self.errors.load(Relaxed)
    }

    /// Answers that the kernel did not understand; a fault of ours.
    pub fn refused(&self) -> u64 {
        self.refused.load(Relaxed)
    }

    pub(crate) fn count_request(&self, code: u32) {
        self.by_opcode.get(code as usize).unwrap_or(&self.by_opcode[0]).fetch_add(1, Relaxed);
    }
    pub(crate) fn count_read(&self, bytes: usize) {
        self.reads.fetch_add(1, Relaxed);
        self.read_bytes.fetch_add(bytes as u64, Relaxed);
    }
    pub(crate) fn count_parked(&self) {
        self.parked.fetch_add(1, Relaxed);
    }
    pub(crate) fn count_error(&self) {
        self.errors.fetch_add(1, Relaxed);
    }
    pub(crate) fn count_refused(&self) {
        self.refused.fetch_add(1, Relaxed);
    }
}

/// What was said in INIT; a successor that takes the descriptors over needs it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InitRecord {
    /// What the kernel offered.
    pub offer: InitIn,
    /// What was taken.
    pub answer: InitOut,
}

/// What the threads, the parked reads and the owner of a session share. Holds no descriptor.
#[derive(Debug)]
pub(crate) struct Shared {
    /// Names the session in log lines.
    pub(crate) name: String,
    pub(crate) context: Context,
    pub(crate) counters: Arc<Counters>,
    pub(crate) parked: Parked,
    wish: Wish,
    /// The flags that were taken in INIT.
    taken: AtomicU64,
    stopping: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    live: usize,
    init: Option<InitRecord>,
    refusal: Option<Fault>,
}

impl Shared {
    fn new(name: String, context: Context, wish: Wish) -> Shared {
        Shared {
            name,
            context,
            counters: Arc::default(),
            parked: Parked::default(),
            wish,
            taken: AtomicU64::new(0),
            stopping: AtomicBool::new(false),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    #[cfg(test)]
    pub(crate) fn for_tests(context: Context) -> Shared {
        let wish = Wish {
            readdirplus: decide::Readdirplus::Never,
            posix_acl: false,
            idmap: false,
            no_open: true,
            export: false,
        };
        Shared::new("test".to_owned(), context, wish)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn log(&self, level: Level, text: std::fmt::Arguments<'_>) {
        self.context.log.line(level, format_args!("{}: {text}", self.name));
    }

    /// Whether opening a file (and a directory) can be answered with ENOSYS, which the kernel takes as success and
    /// for leave to ask never again.
    pub(crate) fn has_no_open(&self) -> bool {
        const BOTH: u64 = init::NO_OPEN_SUPPORT | init::NO_OPENDIR_SUPPORT;
        self.taken.load(Relaxed) & BOTH == BOTH
    }

    /// Answers with the errno of a fault.
    pub(crate) fn fail(&self, request: Request, fault: &Fault, header: &InHeader) {
        let what = format_args!("{}: operation {} on node {}", self.name, header.opcode, header.nodeid);
        request.error(errno::of(fault, &*self.context.log, what));
    }
}

/// What a serving thread keeps from one request to the next.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// For answers whose length is only known when they are made.
    pub(crate) out: Vec<u8>,
    pub(crate) read: ReadScratch,
}

/// Answers the operations that are about the tree or file behind a session.
pub(crate) trait Handler: Send + Sync + 'static {
    /// Answers one request, or hands it on to be answered later.
    fn handle(&self, shared: &Arc<Shared>, header: &InHeader, op: Op<'_>, request: Request, scratch: &mut Scratch);

    /// The kernel gave back references to a node.
    fn forget(&self, _nodeid: u64, _nlookup: u64) {}
}

/// A device that was mounted, and how to be rid of the mount.
#[derive(Debug)]
pub(crate) struct Mounted {
    pub(crate) device: Device,
    /// The detached mount, where there is one.
    pub(crate) mount: Option<OwnedFd>,
    /// The place that fusermount3 mounted at.
    pub(crate) place: Option<std::path::PathBuf>,
}

/// A running session. Dropping it ends it: everything that waits is answered, the threads are joined, and what is
/// still mounted answers ENOTCONN.
#[derive(Debug)]
pub struct Session {
    shared: Arc<Shared>,
    /// For notifications, and to keep the connection while threads come and go. None once the session has ended.
    primary: Option<Arc<Channel>>,
    threads: Vec<JoinHandle<()>>,
    mount: Option<OwnedFd>,
    place: Option<std::path::PathBuf>,
}

impl Session {
    /// Serves a mounted device with `threads` threads. Returns when the kernel and we have agreed on a protocol.
    pub(crate) fn start(
        mounted: Mounted,
        handler: Arc<dyn Handler>,
        name: String,
        context: Context,
        wish: Wish,
        threads: usize,
    ) -> Result<Session, Fault> {
        let shared = Arc::new(Shared::new(name, context, wish));
        let counters = Arc::clone(&shared.counters);
        let mut devices = Vec::new();
        for _ in 1..threads.max(1) {
            match mounted.device.clone_fd() {
                Ok(device) => devices.push(Some(device)),
                // No right to open the device (fusermount3 opened ours): the threads share one descriptor.
                Err(_) => devices.push(None),
            }
        }
        let device = Arc::new(mounted.device);
        let primary = Arc::new(Channel::new(device.clone(), Arc::clone(&counters)));
        let mut session = Session {
            shared,
            primary: Some(Arc::clone(&primary)),
            threads: Vec::new(),
            mount: mounted.mount,
            place: mounted.place,
        };
        session.spawn(device.clone(), Arc::clone(&primary), &handler)?;
        for own in devices {
            match own {
                Some(own) => {
                    let own = Arc::new(own);
                    let channel = Arc::new(Channel::new(own.clone(), Arc::clone(&counters)));
                    session.spawn(own, channel, &handler)?;
                }
                None => session.spawn(Arc::clone(&device), Arc::clone(&primary), &handler)?,
            }
        }
        session.await_init()?;
        Ok(session)
    }

    fn spawn(&mut self, device: Arc<Device>, channel: Arc<Channel>, handler: &Arc<dyn Handler>) -> Result<(), Fault> {
        let (shared, handler) = (Arc::clone(&self.shared), Arc::clone(handler));
        self.shared.state().live += 1;
        let builder = std::thread::Builder::new().name("fuse".into()).stack_size(256 << 10);
        let spawned = builder.spawn(move || {
            serve(&shared, &device, &channel, &*handler);
            drop((device, channel));
            shared.state().live -= 1;
            shared.changed.notify_all();
        });
        match spawned {
            Ok(thread) => {
                self.threads.push(thread);
                Ok(())
            }
            Err(source) => {
                self.shared.state().live -= 1;
                Err(Fault::Io { what: "starting a serving thread", source })
            }
        }
    }

    fn await_init(&self) -> Result<(), Fault> {
        let until = Instant::now() + INIT_PATIENCE;
        let mut state = self.shared.state();
        loop {
            if let Some(fault) = state.refusal.take() {
                return Err(fault);
            }
            if state.init.is_some() {
                return Ok(());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || state.live == 0 {
                return Err(Fault::Io { what: "the kernel did not begin the session", source: Errno::TIMEDOUT.into() });
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The detached mount, while the session has it. Clone it with [`sys::mount::clone_tree`] to hand it out.
    pub fn mount(&self) -> Option<BorrowedFd<'_>> {
        self.mount.as_ref().map(AsFd::as_fd)
    }

    /// Takes the detached mount out of the session.
    pub fn take_mount(&mut self) -> Option<OwnedFd> {
        self.mount.take()
    }

    /// What was counted so far.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// How many reads are waiting for missing bytes now.
    pub fn parked_now(&self) -> usize {
        self.shared.parked.len()
    }

    /// What was agreed on with the kernel.
    pub fn init_record(&self) -> Option<InitRecord> {
        self.shared.state().init
    }

    /// Whether the session still serves: false after its last mount went, or it was aborted.
    pub fn is_alive(&self) -> bool {
        self.shared.state().live > 0
    }

    /// Waits until the session no longer serves; false when `timeout` passed first.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        let until = timeout.map(|t| Instant::now() + t);
        let mut state = self.shared.state();
        while state.live > 0 {
            let left = until.map_or(Duration::from_secs(3600), |u| u.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return false;
            }
            state = self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }

    /// Sends an unsolicited message. Never from a serving thread.
    pub(crate) fn notify(&self, code: i32, parts: &[&[u8]]) -> io::Result<()> {
        match &self.primary {
            Some(channel) => channel.notify(code, parts),
            None => Err(Errno::NODEV.into()),
        }
    }

    /// Ends the session, as dropping it does.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(_primary) = self.primary.take() else { return };
        for read in self.shared.parked.close() {
            read.request.error(errno::classify(&Fault::Ending).0);
        }
        // While the threads still serve: fusermount3 may look at what it unmounts.
        if let Some(place) = self.place.take()
            && let Err(e) = super::mount::fusermount_unmount(&place)
        {
            self.shared.log(Level::Warn, format_args!("unmounting {}: {e}", place.display()));
        }
        self.shared.stopping.store(true, Relaxed);
        self.mount = None;
        // A signal is missed by a thread that is about to sleep, so wake again until all are gone.
        // Not more often than they can take: a thread that is signalled without a pause gets nothing else done.
        let mut state = self.shared.state();
        while state.live > 0 {
            self.threads.iter().for_each(sys::proc::wake_thread);
            let pause = Duration::from_millis(10);
            state = self.shared.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        for thread in self.threads.drain(..) {
            // A panic was answered and logged where it happened.
            let _ = thread.join();
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.end();
    }
}

/// One thread's life.
fn serve(shared: &Arc<Shared>, device: &Device, channel: &Arc<Channel>, handler: &dyn Handler) {
    // Words, so that lists in requests are aligned.
    let mut buf = vec![0u64; REQUEST_BYTES / 8];
    let mut scratch = Scratch::default();
    let mut interrupts = (0u64, 0u32);
    if let Err(e) = sys::proc::allow_wake() {
        shared.log(Level::Error, format_args!("a serving thread cannot be woken and does not serve: {e}"));
        return;
    }
    while !shared.stopping.load(Relaxed) {
        let len = match device.read_request(buf.as_mut_bytes()) {
            Ok(len) => len,
            Err(e) => match e.raw_os_error().map(Errno::from_raw_os_error) {
                // The request was taken back before it was read.
                Some(Errno::NOENT | Errno::INTR | Errno::AGAIN) => continue,
                Some(Errno::NODEV | Errno::CONNABORTED) => break,
                _ => {
                    shared.log(Level::Error, format_args!("reading requests: {e}; a serving thread ends"));
                    break;
                }
            },
        };
        let Some(message) = buf.as_bytes().get(..len) else { continue };
        let (header, op) = match wire::parse(message) {
            Ok(parsed) => parsed,
            Err(WireError::Header) => {
                shared.log(Level::Error, format_args!("a message of {len} bytes without a header"));
                continue;
            }
            Err(WireError::Body(header)) => {
                let request = Request::new(Arc::clone(channel), header.unique);
                shared.log(Level::Error, format_args!("operation {}: its body is cut short", header.opcode));
                request.error(Errno::INVAL);
                continue;
            }
        };
        shared.counters.count_request(header.opcode);
        let request = Request::new(Arc::clone(channel), header.unique);
        // The scratch is only ever cleared and written again, so what a panic left in it does no harm.
        let handled = catch_unwind(AssertUnwindSafe(|| match op {
            Op::Init(offer) => initialise(shared, &offer, request),
            Op::Interrupt { unique } => interrupt(shared, unique, request, &mut interrupts),
            Op::Forget { nlookup } => {
                request.none();
                handler.forget(header.nodeid, nlookup);
            }
            Op::BatchForget(list) => {
                request.none();
                list.iter().for_each(|one| handler.forget(one.nodeid, one.nlookup));
            }
            Op::Destroy => request.ok(&[]),
            Op::Release => request.ok(&[]),
            Op::Change => shared.fail(request, &Fault::ReadOnly, &header),
            Op::Other => shared.fail(request, &Fault::Unsupported, &header),
            op => handler.handle(shared, &header, op, request, &mut scratch),
        }));
        if handled.is_err() {
            shared.log(Level::Error, format_args!("panic in operation {} on node {}", header.opcode, header.nodeid));
        }
    }
}

fn initialise(shared: &Shared, offer: &InitIn, request: Request) {
    let answer = decide::negotiate(offer, &shared.wish);
    let mut state = shared.state();
    match answer {
        Ok(answer) => {
            shared.taken.store(decide::taken(&answer), Relaxed);
            request.ok(&[answer.as_bytes()]);
            state.init = Some(InitRecord { offer: *offer, answer });
        }
        Err(fault) => {
            request.error(Errno::PROTO);
            state.refusal = Some(fault);
        }
    }
    drop(state);
    shared.changed.notify_all();
}

/// A signal hit somebody who waits. Only parked reads take long enough to care, and of their readers only those that
/// are being killed. A read that is about to be parked is not in the table yet, so the kernel is asked to tell us
/// again (EAGAIN); a few times only, because what is not parked is a read from disk that takes its time.
fn interrupt(shared: &Shared, unique: u64, request: Request, last: &mut (u64, u32)) {
    *last = if last.0 == unique { (unique, last.1 + 1) } else { (unique, 0) };
    if read::interrupt(shared, unique) || last.1 > 100 {
        request.none();
    } else {
        request.error(Errno::AGAIN);
    }
}
