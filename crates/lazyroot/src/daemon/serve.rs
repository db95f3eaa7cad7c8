//! The daemon's life: locks, namespace, socket, signals, idle time; and its side of the control protocol.

use super::images::Images;
use super::log::LogFile;
use super::state::State;
use crate::cli::args::DaemonOptions;
use crate::control::client;
use crate::control::proto::{Reply, Request, Status, VERSION};
use crate::control::wire::{self, WireError};
use crate::dirs::Dirs;
use crate::errors;
use crate::failure::{Failure, Kind};
use crate::lock::{Lock, note_of};
use crate::procscan;
use anyhow::Context;
use format::Digest;
use rustix::event::{EventfdFlags, PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::Signal;
use serde_json::{Value, json};
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use store::Store;
use sys::signal::SignalFd;

/// Connections at once.
const MAX_CONNECTIONS: usize = 64;
/// How long a client may be silent.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(60);
/// How often mount tables are read while something is mounted.
const RESCAN_EVERY: Duration = Duration::from_secs(15);
/// The same while the last lease is awaited.
const RESCAN_STOPPING: Duration = Duration::from_secs(1);
/// Users that a message names.
const NAMED_USERS: usize = 8;

/// What starting found.
#[derive(Debug)]
pub enum Begun {
    /// It served, and ended.
    Ended,
    /// Another daemon has this root; the note of its lock.
    Other(String),
    /// A daemon before was killed, and its mounts have not been looked after: whoever starts one does that first.
    Unclean,
}

/// Where the daemon runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ground {
    /// Under a service manager or in a terminal: logs to standard error.
    Foreground,
    /// On its own: logs to its file; says `ready` on standard output once.
    Background,
}

/// Serves until idle or told to end.
pub fn serve(dirs: &Dirs, options: &DaemonOptions, ground: Ground) -> anyhow::Result<Begun> {
    let Some(mut lock) = Lock::try_take(&dirs.daemon_lock()).context("the daemon's lock")? else {
        return Ok(Begun::Other(note_of(&dirs.daemon_lock())));
    };
    // A dying process lets go of its lock after its socket, so whoever started this one may have taken it for alive.
    if dirs.leases().exists() {
        return Ok(Begun::Unclean);
    }
    // Started as /proc/self/exe it is called `exe`; its threads take the name over. Only for people.
    let _ = rustix::thread::set_name(c"lazyroot");
    // Made first where there is none: a new store takes only an empty directory.
    drop(Store::open(&dirs.root)?);
    let Some(mut root_lock) =
        Lock::try_take(&dirs.root_lock()).map_err(|e| store::StoreError::io("open", dirs.root_lock(), e))?
    else {
        return Err(Failure::busy(format!(
            "another daemon serves {}: {}; use its state directory, or stop it there",
            dirs.root.display(),
            note_of(&dirs.root_lock())
        ))
        .into());
    };
    let note = format!("process {}, state directory {}", std::process::id(), dirs.state.display());
    // For messages only: a disk without room for it must not keep what is there from being read.
    for lock in [&mut lock, &mut root_lock] {
        let _ = lock.note(&note);
    }

    // Frames come and go: what they leave behind is not to stay resident.
    sys::memory::return_large_buffers();
    let signals = SignalFd::block(&[Signal::TERM, Signal::INT, Signal::HUP, Signal::USR1]).context("signals")?;
    sys::proc::raise_nofile();
    let log = Arc::new(match ground {
        Ground::Foreground => LogFile::stderr(),
        Ground::Background => {
            LogFile::open(&dirs.log()).with_context(|| format!("the log {}", dirs.log().display()))?
        }
    });
    let namespace = own_namespace(dirs, &log)?;
    std::env::set_current_dir("/")?;
    let push_bytes = u64::from(options.push_metadata) << 20;
    let images = Images::open(&dirs.root, namespace.clone(), options.threads.into(), push_bytes, Arc::clone(&log))?;
    let state = Arc::new(State::new(images, Arc::clone(&log), dirs.leases()));
    let listener = listen(&dirs.socket())?;
    state.begin()?;
    log.info(format_args!(
        "lazyroot {} serves {} (process {}, {}, idle time {} s)",
        env!("CARGO_PKG_VERSION"),
        dirs.root.display(),
        std::process::id(),
        if namespace.is_some() { "with mounts of its own" } else { "for user mounts" },
        options.idle
    ));
    if ground == Ground::Background {
        std::io::stdout().write_all(b"ready\n").context("saying that the daemon is ready")?;
        log.take_streams()?;
    }
    notify("READY=1", &log);
    // Not before: nobody waits for it. Where it does not work, commands that come after long silence start slower.
    if let Err(e) = sys::memory::keep_program() {
        log.info(format_args!("the program's pages are not kept in memory: {e}"));
    }
    let daemon = Arc::new(Daemon {
        state,
        log: Arc::clone(&log),
        root: dirs.root.clone(),
        since: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
        idle: options.idle,
        connections: AtomicUsize::new(0),
        end_now: AtomicBool::new(false),
        wake: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).context("eventfd")?,
    });
    let why = daemon.live(&listener, &signals)?;
    notify("STOPPING=1", &log);
    // Nobody can ask for anything any more; a client that comes now starts a new daemon once the lock is free.
    drop(listener);
    if let Err(e) = std::fs::remove_file(dirs.socket()) {
        log.warn(format_args!("removing {}: {e}", dirs.socket().display()));
    }
    daemon.state.finish();
    if let Some(place) = &namespace {
        // Ours alone; it would go with the namespace anyway.
        let _ = sys::mount::unmount(place, sys::mount::UnmountFlags::DETACH);
    }
    log.info(format_args!("ended: {why}"));
    Ok(Begun::Ended)
}

/// Tells a service manager that asked to be told (sd_notify(3)).
fn notify(what: &str, log: &LogFile) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else { return };
    let send = || -> std::io::Result<usize> {
        let address = match socket.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            _ => SocketAddr::from_pathname(&socket)?,
        };
        UnixDatagram::unbound()?.send_to_addr(what.as_bytes(), &address)
    };
    if let Err(e) = send() {
        log.warn(format_args!("telling the service manager {what}: {e}"));
    }
}

/// Enters a mount namespace of its own and prepares the directory for mounts. `None`: no right to, so only users'
/// trees can be served.
fn own_namespace(dirs: &Dirs, log: &LogFile) -> anyhow::Result<Option<PathBuf>> {
    if let Err(e) = sys::mount::enter_own_namespace() {
        if sys::proc::is_root() {
            log.warn(format_args!("no mount namespace of its own ({e}): only trees through fusermount3 can be served"));
        }
        return Ok(None);
    }
    leave_others_alone(dirs, log);
    let place = dirs.state.join("ns");
    match std::fs::create_dir(&place) {
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
            return Err(e).with_context(|| format!("creating {}", place.display()));
        }
        _ => {}
    }
    sys::mount::mount_legacy(
        Path::new("lazyroot"),
        &place,
        "tmpfs",
        sys::mount::MountFlags::NOSUID | sys::mount::MountFlags::NODEV | sys::mount::MountFlags::NOEXEC,
        "mode=700,size=1m",
    )
    .with_context(|| format!("mounting a tmpfs at {}", place.display()))?;
    Ok(Some(place))
}

/// Lets go of every mount that the daemon does not need, in its own namespace: where mounts do not propagate, it would
/// otherwise keep other people's file systems busy.
fn leave_others_alone(dirs: &Dirs, log: &LogFile) {
    let needed = [
        dirs.root.as_path(),
        dirs.state.as_path(),
        Path::new("/dev/fuse"),
        Path::new("/proc/self"),
        Path::new("/sys/class"),
    ];
    let Ok(mounts) = sys::mountinfo::of_self() else { return };
    for mount in mounts.iter().rev() {
        let point = &mount.mount_point;
        let is_needed = needed.iter().any(|n| n.starts_with(point))
            || point.starts_with(&dirs.root)
            || point.starts_with(&dirs.state);
        if !is_needed
            && let Err(e) = sys::mount::unmount(point, sys::mount::UnmountFlags::DETACH)
            && ![Some(Errno::INVAL), Some(Errno::NOENT)].contains(&Errno::from_io_error(&e))
        {
            log.warn(format_args!("letting go of {}: {e}", point.display()));
        }
    }
}

fn listen(path: &Path) -> anyhow::Result<UnixListener> {
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            return Err(e).with_context(|| format!("removing the old socket {}", path.display()));
        }
        _ => {}
    }
    let listener = client::listen(path).with_context(|| format!("control socket {}", path.display()))?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// What the threads of a daemon share.
struct Daemon {
    state: Arc<State>,
    log: Arc<LogFile>,
    root: PathBuf,
    since: u64,
    idle: u64,
    connections: AtomicUsize,
    end_now: AtomicBool,
    /// Readable when the main thread should look again at once.
    wake: OwnedFd,
}

impl Daemon {
    /// Accepts connections and watches over idle time and signals. Returns why it ends.
    fn live(self: &Arc<Self>, listener: &UnixListener, signals: &SignalFd) -> anyhow::Result<String> {
        let mut scanned = Instant::now();
        loop {
            let timeout = rustix::time::Timespec { tv_sec: 1, tv_nsec: 0 };
            let mut fds = [listener.as_fd(), signals.as_fd(), self.wake.as_fd()]
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            match poll(&mut fds, Some(&timeout)) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(std::io::Error::from(e)).context("waiting for clients"),
            }
            // Only a wake-up; what it is about is looked at below.
            let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
            while let Ok((stream, _)) = listener.accept() {
                self.accept(stream);
            }
            while let Some(signal) = signals.next()? {
                self.signal(signal);
            }
            if self.end_now.load(Ordering::Acquire) {
                return Ok("told to".into());
            }
            let stopping = self.state.is_stopping();
            let every = if stopping { RESCAN_STOPPING } else { RESCAN_EVERY };
            if self.state.idle().is_none() && scanned.elapsed() >= every {
                self.state.rescan(false);
                scanned = Instant::now();
            }
            let Some(idle) = self.state.idle() else { continue };
            let tired = self.idle > 0 && idle >= Duration::from_secs(self.idle);
            if (stopping || tired) && self.connections.load(Ordering::Acquire) == 0 {
                self.state.rescan(true);
                scanned = Instant::now();
                if self.state.idle().is_none() {
                    continue;
                }
                match self.state.images.in_use() {
                    0 => {
                        return Ok(if stopping {
                            "nothing is mounted any more".into()
                        } else {
                            format!("idle for {} s", self.idle)
                        });
                    }
                    // Detached mounts, namespaces without processes: not seen, but the kernel still reads.
                    n => self.log.info(format_args!("{n} superblocks are still in use out of sight, going on")),
                }
            } else if self.state.superblocks().iter().any(|s| s.since.elapsed() > Duration::from_secs(60))
                && scanned.elapsed() >= Duration::from_secs(60)
            {
                self.state.rescan(false);
                scanned = Instant::now();
            }
        }
    }

    fn signal(&self, signal: sys::signal::Arrived) {
        match Signal::from_named_raw(signal.number) {
            Some(Signal::USR1 | Signal::HUP) => self.state.rescan(false),
            _ => {
                self.state.rescan(false);
                self.state.stop_when_unused();
                let leases = self.state.leases();
                if leases.is_empty() {
                    self.log.info(format_args!("signal {} from process {}: ending", signal.number, signal.pid));
                    return;
                }
                self.log.info(format_args!(
                    "signal {} from process {}: {} mounts are in use, ending with the last",
                    signal.number,
                    signal.pid,
                    leases.len()
                ));
                for lease in leases {
                    let device = lease.top.as_ref().map_or(lease.device, |t| t.device);
                    let me = std::process::id() as i32;
                    // A container has its root elsewhere than where it was made.
                    let at = lease.container.is_none().then_some(Path::new(&lease.target));
                    let users = procscan::users_of(device, at, NAMED_USERS, Some(me));
                    let users: Vec<String> = users.iter().map(ToString::to_string).collect();
                    let users = if users.is_empty() { "nobody at the moment".to_owned() } else { users.join(", ") };
                    self.log.info(format_args!("{} at {} is used by {users}", lease.image, lease.target));
                }
            }
        }
    }

    fn accept(self: &Arc<Self>, stream: UnixStream) {
        let refuse = |reply: Reply| {
            // Whoever does not read it has gone.
            let _ = stream.set_write_timeout(Some(Duration::from_secs(1))).map(|()| wire::send(&stream, &reply, &[]));
        };
        let cred = match sys::scm::peer_cred(&stream) {
            Ok(cred) => cred,
            Err(e) => return self.log.warn(format_args!("a client without credentials: {e}")),
        };
        if cred.uid != sys::proc::euid() && cred.uid != 0 {
            self.log.warn(format_args!("user {} (process {}) is refused", cred.uid, cred.pid));
            return refuse(Reply::error(Kind::Unavailable, "this daemon serves another user"));
        }
        if self.connections.fetch_add(1, Ordering::AcqRel) >= MAX_CONNECTIONS {
            self.connections.fetch_sub(1, Ordering::AcqRel);
            return refuse(Reply::error(
                Kind::Busy,
                format!("the daemon has {MAX_CONNECTIONS} clients already; try again"),
            ));
        }
        let daemon = Arc::clone(self);
        let spawned = std::thread::Builder::new().name("control".into()).stack_size(512 << 10).spawn(move || {
            let mut connection = Connection { daemon: &daemon, stream, pid: cred.pid, pending: Vec::new() };
            if let Err(e) = connection.run() {
                daemon.log.warn(format_args!("client {}: {:#}", cred.pid, anyhow::Error::new(e)));
            }
            drop(connection);
            daemon.connections.fetch_sub(1, Ordering::AcqRel);
            daemon.wake();
        });
        if let Err(e) = spawned {
            self.connections.fetch_sub(1, Ordering::AcqRel);
            self.log.warn(format_args!("no thread for a client: {e}"));
        }
    }

    fn wake(&self) {
        // Full only when it is readable already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    fn status(&self) -> Status {
        Status {
            pid: std::process::id() as i32,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            root: self.root.display().to_string(),
            since: self.since,
            idle: self.idle,
            privileged: self.state.images.is_privileged(),
            leases: self.state.leases().len(),
            superblocks: self.state.superblocks().len(),
            stopping: self.state.is_stopping(),
        }
    }

    fn stats(&self) -> anyhow::Result<Value> {
        let mut images = Vec::new();
        for superblock in self.state.superblocks() {
            let touched = superblock.opened.touched();
            let header = superblock.opened.index().header();
            images.push(json!({
                "image": superblock.image, "index": superblock.key.0.to_hex(), "shape": superblock.key.1.to_string(),
                "device": superblock.device.to_string(), "seconds": superblock.since.elapsed().as_secs(),
                "content_bytes": header.content_bytes.get(),
                "files_read": touched.files, "bytes_read": touched.blocks * format::BLOCK,
                "resident_bytes": superblock.opened.resident_bytes(),
                "session": superblock.counters(),
            }));
        }
        for (name, image, session) in self.state.user_images() {
            let touched = image.touched();
            images.push(json!({
                "image": name, "index": image.index().digest().to_hex(), "shape": "tree",
                "content_bytes": image.index().header().content_bytes.get(),
                "files_read": touched.files, "bytes_read": touched.blocks * format::BLOCK,
                "resident_bytes": image.resident_bytes(),
                "session": session,
            }));
        }
        Ok(json!({
            "pid": std::process::id(),
            "memory": memory(),
            "cache": self.state.images.cache().stats(),
            "block_files": self.state.images.file_counters(),
            "images": images,
        }))
    }

    fn drop_caches(&self, index: Option<&str>) -> anyhow::Result<()> {
        let images = &self.state.images;
        let mut objects = Vec::new();
        match index {
            Some(hex) => {
                let image = images.image(&parse_digest(hex)?)?;
                objects.extend(image.index().objects().map(|(id, _)| id));
            }
            None => {
                for (_, record) in images.store().images()? {
                    objects.extend(record?.objects);
                }
                // Of images that have lost their name, what is mounted.
                let mounted = self.state.superblocks().into_iter().map(|s| Arc::clone(&s.opened));
                for image in mounted.chain(self.state.user_images().into_iter().map(|(_, image, _)| image)) {
                    objects.extend(image.index().objects().map(|(id, _)| id));
                }
                objects.sort_unstable();
                objects.dedup();
            }
        }
        for object in objects {
            images.cache().drop_object(&object)?;
        }
        Ok(())
    }
}

fn parse_digest(hex: &str) -> Result<Digest, Failure> {
    Digest::from_hex(hex).ok_or_else(|| Failure::usage(format!("{hex:?} is not a digest")))
}

/// This process's memory, from `/proc/self/status`, in KiB.
fn memory() -> Value {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| -> Option<u64> {
        text.lines().find_map(|l| l.strip_prefix(name))?.split_ascii_whitespace().next()?.parse().ok()
    };
    json!({"rss_anon_kib": field("RssAnon:"), "rss_file_kib": field("RssFile:"), "rss_kib": field("VmRSS:")})
}

/// One client.
struct Connection<'a> {
    daemon: &'a Arc<Daemon>,
    stream: UnixStream,
    pid: i32,
    pending: Vec<u64>,
}

impl Drop for Connection<'_> {
    fn drop(&mut self) {
        for lease in &self.pending {
            self.daemon.state.end_pending(*lease);
        }
    }
}

impl Connection<'_> {
    fn run(&mut self) -> Result<(), WireError> {
        self.stream.set_nonblocking(false)?;
        self.stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
        self.stream.set_write_timeout(Some(CLIENT_TIMEOUT))?;
        let mut greeted = false;
        loop {
            // Received first as plain JSON, so that an unknown request gets an answer and not a closed door.
            let (value, _fds) = match wire::recv::<Value>(&self.stream) {
                Ok(received) => received,
                Err(WireError::Closed) => return Ok(()),
                Err(e) => return Err(e),
            };
            let request = match serde_json::from_value::<Request>(value) {
                Ok(request) => request,
                Err(e) => {
                    wire::send(&self.stream, &Reply::error(Kind::Usage, format!("unknown request: {e}")), &[])?;
                    continue;
                }
            };
            if !greeted {
                let Request::Hello { version } = request else {
                    return wire::send(&self.stream, &Reply::error(Kind::Usage, "say hello first"), &[]);
                };
                greeted = version == VERSION;
                let root = Some(self.daemon.root.display().to_string());
                let hello = Reply::Hello { version: VERSION, pid: std::process::id() as i32, root };
                wire::send(&self.stream, &hello, &[])?;
                if !greeted {
                    return Ok(());
                }
                continue;
            }
            self.answer(request)?;
        }
    }

    fn answer(&mut self, request: Request) -> Result<(), WireError> {
        if let Request::Mount(mount) = &request {
            let began = Instant::now();
            let given = parse_digest(&mount.index)
                .map_err(anyhow::Error::from)
                .and_then(|digest| self.daemon.state.mount(mount, &digest, self.pid));
            return match given {
                Ok(given) => {
                    self.pending.push(given.lease);
                    let reply = Reply::Mounted {
                        lease: given.lease,
                        shape: given.shape,
                        why: given.why,
                        device: given.superblock.device,
                        source: given.superblock.source.clone(),
                        shared: given.shared,
                        micros: u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX),
                    };
                    wire::send(&self.stream, &reply, &[given.mount.as_fd()])
                }
                Err(e) => wire::send(&self.stream, &self.failed(&e), &[]),
            };
        }
        let reply = self.simple(request).unwrap_or_else(|e| self.failed(&e));
        wire::send(&self.stream, &reply, &[])
    }

    fn failed(&self, error: &anyhow::Error) -> Reply {
        let message = errors::message(error);
        self.daemon.log.warn(format_args!("client {}: {message}", self.pid));
        Reply::error(errors::kind_of(error), message)
    }

    fn simple(&mut self, request: Request) -> anyhow::Result<Reply> {
        let state = &self.daemon.state;
        Ok(match request {
            Request::Hello { .. } => Reply::error(Kind::Usage, "hello has been said"),
            Request::Mount(_) => Reply::error(Kind::Usage, "answered elsewhere"),
            Request::Status => Reply::Status(self.daemon.status()),
            Request::Attached { lease, target, top, upper, container } => {
                anyhow::ensure!(self.pending.contains(&lease), "lease {lease} is not this client's");
                state.attached(lease, |l| {
                    l.target = target;
                    l.top = top;
                    l.upper = upper;
                    l.container = container;
                })?;
                self.pending.retain(|p| *p != lease);
                Reply::Done
            }
            Request::Serve { index, image, target } => {
                let here = procscan::namespace_of("self");
                if procscan::namespace_of(&self.pid.to_string()) != here {
                    return Err(Failure::unavailable(
                        "the daemon runs in another mount namespace than you; stop it (`lazyroot daemon stop`) and try again",
                    )
                    .into());
                }
                Reply::Serving { lease: state.serve(&parse_digest(&index)?, &image, &target, self.pid)? }
            }
            Request::Rescan => {
                state.rescan(false);
                Reply::Done
            }
            Request::Leases => {
                state.rescan(false);
                Reply::Leases { leases: state.leases() }
            }
            Request::Stats => Reply::Stats { stats: self.daemon.stats()? },
            Request::DropCaches { index } => {
                self.daemon.drop_caches(index.as_deref())?;
                Reply::Done
            }
            Request::Prune => Reply::Pruned { bytes: state.images.prune()? },
            Request::Stop { force } => {
                state.rescan(false);
                if force {
                    let failed = state.unmount_all();
                    for what in &failed {
                        self.daemon.log.warn(format_args!("stop --force: {what}"));
                    }
                    self.daemon.end_now.store(true, Ordering::Release);
                    self.daemon.wake();
                    return Ok(Reply::Stopping { leases: Vec::new() });
                }
                state.stop_when_unused();
                Reply::Stopping { leases: state.leases() }
            }
        })
    }
}
