//! Processes: starting one that outlives us, watching one, and limits.

#![allow(unsafe_code)]

use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Resource, Rlimit, Signal};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};
use std::time::Duration;

/// Starts `command` in a session of its own, with `/` as its directory and a umask of 077, so that neither the
/// caller's terminal nor its death reaches it. Standard streams and environment are the command's own business.
///
/// To start this program again, give `Command::new("/proc/self/exe")`.
pub fn spawn_detached(command: &mut Command) -> io::Result<Child> {
    command.current_dir("/");
    // SAFETY: the closure runs between fork and exec and calls only setsid(2) and umask(2), which are
    // async-signal-safe and allocate nothing.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o077));
            Ok(())
        });
    }
    command.spawn()
}

/// Makes `command` die with SIGKILL when the thread that started it ends.
pub fn kill_with_parent(command: &mut Command) {
    // SAFETY: prctl(2) is async-signal-safe and the closure allocates nothing.
    unsafe {
        command.pre_exec(|| {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            Ok(())
        });
    }
}

/// Lets `command` inherit `fd` under its own number, although it is close-on-exec here.
///
/// The descriptor must still be open when the command is spawned.
pub fn pass_fd(command: &mut Command, fd: BorrowedFd<'_>) {
    let number = fd.as_raw_fd();
    // SAFETY: the closure makes one fcntl(2), which is async-signal-safe, in the child, where the descriptor has the
    // same number. If the caller closed it in between, the call fails with EBADF or touches whatever the child has
    // there, which only decides about inheritance.
    unsafe {
        command.pre_exec(move || {
            if libc::fcntl(number, libc::F_SETFD, 0) == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
        });
    }
}

/// Starts a thread that has a descriptor table of its own, in which there is nothing but a copy of `kept` and the
/// standard streams. `work` must neither use nor drop what holds other descriptors of the process: they mean something
/// else, or nothing, where it runs.
///
/// For work on files that the process itself serves. Who waits for a FUSE answer cannot be killed, and keeps the
/// descriptors that it shares with its process; this thread shares none, so when the process is killed its session
/// ends, and with it the wait.
pub fn spawn_apart(
    name: &str,
    kept: BorrowedFd<'_>,
    work: impl FnOnce(OwnedFd) + Send + 'static,
) -> io::Result<std::thread::JoinHandle<()>> {
    let (tell, told) = std::sync::mpsc::sync_channel(1);
    let number = kept.as_raw_fd();
    let thread = std::thread::Builder::new().name(name.into()).stack_size(256 << 10).spawn(move || {
        // SAFETY: the caller of `spawn_apart` keeps the descriptor open until it was told below.
        let left = leave_descriptors_but(unsafe { BorrowedFd::borrow_raw(number) });
        let ok = left.is_ok();
        // Whoever asked waits for it.
        let _ = tell.send(left);
        if ok {
            // SAFETY: in this thread's own table, where the number stayed open and nobody else knows of it.
            work(unsafe { OwnedFd::from_raw_fd(number) });
        }
    })?;
    match told.recv() {
        Ok(Ok(())) => Ok(thread),
        Ok(Err(e)) => Err(e),
        Err(_) => Err(io::Error::other("the thread ended at once")),
    }
}

/// Gives the calling thread a descriptor table of its own and closes everything in it but `kept` and the standard
/// streams.
pub(crate) fn leave_descriptors_but(kept: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: unsharing the table is unsafe because this thread then no longer sees what others open, and they not
    // what it opens. The callers' threads use nothing but `kept`, which was open before, and what they open themselves.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FILES)? };
    let kept = u32::try_from(kept.as_raw_fd()).expect("an open descriptor is not negative");
    for (first, last) in [(3, kept.saturating_sub(1)), (kept.max(2) + 1, u32::MAX)] {
        if first > last {
            continue;
        }
        // SAFETY: only this thread's own table is touched, and nobody else can use it.
        let rc = unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        if rc != 0 {
            return Err(io::Error::last_os_error());
        }
    }
    Ok(())
}

/// A reference to one process that its pid's reuse does not confuse.
#[derive(Debug)]
pub struct PidFd {
    fd: OwnedFd,
}

impl PidFd {
    /// Refers to the process `pid`. ESRCH when there is none.
    pub fn open(pid: i32) -> io::Result<PidFd> {
        let pid = Some(pid).filter(|p| *p > 0).and_then(Pid::from_raw).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(PidFd { fd: rustix::process::pidfd_open(pid, PidfdFlags::empty())? })
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> io::Result<()> {
        Ok(rustix::process::pidfd_send_signal(&self.fd, signal)?)
    }

    /// Waits until the process has ended; false when `timeout` passed first.
    pub fn wait(&self, timeout: Option<Duration>) -> io::Result<bool> {
        let until = timeout.map(|t| std::time::Instant::now() + t);
        loop {
            let left = until.map(|u| u.saturating_duration_since(std::time::Instant::now()));
            let left =
                left.map(rustix::time::Timespec::try_from).transpose().map_err(|_| io::ErrorKind::InvalidInput)?;
            match poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], left.as_ref()) {
                Ok(0) => return Ok(false),
                Ok(_) => return Ok(true),
                Err(rustix::io::Errno::INTR) => continue,
                Err(e) => return Err(e.into()),
            }
        }
    }

    /// Whether the process has ended.
    pub fn has_ended(&self) -> io::Result<bool> {
        self.wait(Some(Duration::ZERO))
    }
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Whether a thread is about to die of SIGKILL, as `/proc/TID/status` tells. None when there is no such thread or it
/// cannot be seen.
pub fn is_being_killed(tid: u32) -> Option<bool> {
    let text = std::fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
    killed_in_status(&text)
}

/// SIGKILL pending on the thread or its process in the text of a status file.
fn killed_in_status(text: &str) -> Option<bool> {
    const KILL: u64 = 1 << (9 - 1);
    let mut pending = None;
    for line in text.lines() {
        if let Some(mask) = line.strip_prefix("SigPnd:").or_else(|| line.strip_prefix("ShdPnd:")) {
            let mask = u64::from_str_radix(mask.trim(), 16).ok()?;
            pending = Some(pending.unwrap_or(0) | mask);
        }
    }
    pending.map(|mask| mask & KILL != 0)
}

/// Whether a thread has CAP_SYS_ADMIN in this process's user namespace; false when that cannot be told.
pub fn is_administrator(tid: u32) -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    let mask = || {
        let text = std::fs::read_to_string(format!("/proc/{tid}/status")).ok()?;
        u64::from_str_radix(text.lines().find_map(|l| l.strip_prefix("CapEff:"))?.trim(), 16).ok()
    };
    let space = |who: &str| std::fs::read_link(format!("/proc/{who}/ns/user")).ok();
    let same = || space(&tid.to_string()).is_some_and(|theirs| space("self") == Some(theirs));
    mask().is_some_and(|mask| mask & SYS_ADMIN != 0) && same()
}

/// The signal that wakes threads. Nobody sends it for anything else; glibc keeps the first real-time signals to itself.
fn wake_signal() -> libc::c_int {
    libc::SIGRTMIN() + 7
}

/// Lets the calling thread be woken by [`wake_thread`], whatever mask it inherited.
pub fn allow_wake() -> io::Result<()> {
    extern "C" fn nothing(_: libc::c_int) {}
    static INSTALLED: std::sync::Once = std::sync::Once::new();
    let mut result = Ok(());
    INSTALLED.call_once(|| {
        // SAFETY: an all-zero sigaction is a valid one (no flags, empty mask); SA_RESTART is left out so that the
        // interrupted call returns. The handler does nothing, which is async-signal-safe. The pointers are live.
        let rc = unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = nothing as extern "C" fn(libc::c_int) as usize;
            libc::sigaction(wake_signal(), &raw const action, std::ptr::null_mut())
        };
        if rc != 0 {
            result = Err(io::Error::last_os_error());
        }
    });
    result?;
    // SAFETY: the set is initialised by sigemptyset before it is used, and only this thread's mask changes.
    let rc = unsafe {
        let mut set = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
        libc::sigemptyset(set.as_mut_ptr());
        libc::sigaddset(set.as_mut_ptr(), wake_signal());
        libc::pthread_sigmask(libc::SIG_UNBLOCK, set.as_ptr(), std::ptr::null_mut())
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(rc)) }
}

/// Interrupts the blocking call that a thread is in, once it has called [`allow_wake`]: the call fails with EINTR. A
/// thread that is just about to block is missed, so try again until it has ended.
pub fn wake_thread<T>(thread: &std::thread::JoinHandle<T>) {
    if thread.is_finished() {
        return;
    }
    // SAFETY: the handle is borrowed, so the thread has not been joined and its pthread_t is valid. A thread that has
    // ended in the meantime is ESRCH or nothing.
    unsafe { libc::pthread_kill(std::os::unix::thread::JoinHandleExt::as_pthread_t(thread), wake_signal()) };
}

/// Raises the number of descriptors that this process may open to its hard limit. Returns the limit.
pub fn raise_nofile() -> u64 {
    let now = rustix::process::getrlimit(Resource::Nofile);
    let want = Rlimit { current: now.maximum, maximum: now.maximum };
    match rustix::process::setrlimit(Resource::Nofile, want) {
        Ok(()) => now.maximum.unwrap_or(u64::MAX),
        Err(_) => now.current.unwrap_or(u64::MAX),
    }
}

/// Names the calling thread, as shown by `top -H`; 15 bytes.
pub fn set_thread_name(name: &str) {
    if let Ok(name) = std::ffi::CString::new(name) {
        // Only cosmetics.
        let _ = rustix::thread::set_name(&name);
    }
}

/// This process's effective user.
pub fn euid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// This process's effective group.
pub fn egid() -> u32 {
    rustix::process::getegid().as_raw()
}

/// Whether this process runs as root.
pub fn is_root() -> bool {
    euid() == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    #[test]
    fn a_thread_apart_has_what_was_kept_and_nothing_else() {
        let kept = tempfile::tempfile().unwrap();
        let other = tempfile::tempfile().unwrap();
        let number = other.as_raw_fd();
        let (send, receive) = std::sync::mpsc::channel();
        let thread = spawn_apart("apart", kept.as_fd(), move |copy| {
            let open = |fd: i32| {
                // SAFETY: F_GETFD only looks the number up.
                unsafe { libc::fcntl(fd, libc::F_GETFD) >= 0 }
            };
            let (has_copy, has_other) = (open(copy.as_raw_fd()), open(number));
            send.send((has_copy, has_other, rustix::fs::fstat(&copy).unwrap().st_ino)).unwrap();
        })
        .unwrap();
        thread.join().unwrap();
        let inode = rustix::fs::fstat(&kept).unwrap().st_ino;
        assert_eq!(receive.recv().unwrap(), (true, false, inode));
        // Here everything is as it was.
        assert!(other.metadata().is_ok());
    }

    #[test]
    fn a_detached_child_leads_its_own_session() {
        let mut child = spawn_detached(
            Command::new("sh")
                .args(["-c", "pwd; umask; ps -o sid= -p $$ 2>/dev/null || cut -d' ' -f6 /proc/$$/stat"])
                .stdout(Stdio::piped()),
        )
        .unwrap();
        let pid = child.id();
        let mut text = String::new();
        std::io::Read::read_to_string(child.stdout.as_mut().unwrap(), &mut text).unwrap();
        child.wait().unwrap();
        let mut words = text.split_whitespace();
        assert_eq!(words.next(), Some("/"));
        assert_eq!(words.next(), Some("0077"));
        assert_eq!(words.next(), Some(pid.to_string().as_str()));
    }

    #[test]
    fn a_pidfd_waits_and_signals() {
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let fd = PidFd::open(child.id() as i32).unwrap();
        assert!(!fd.has_ended().unwrap());
        assert_eq!(is_being_killed(child.id()), Some(false));
        fd.signal(Signal::KILL).unwrap();
        assert!(fd.wait(Some(Duration::from_secs(30))).unwrap());
        child.wait().unwrap();
        assert_eq!(is_being_killed(child.id()), None);
        assert!(PidFd::open(0).is_err() && PidFd::open(-5).is_err());
    }

    #[test]
    fn priv_administrators_are_told_from_others() {
        let me = std::process::id();
        if !is_root() || !is_administrator(me) {
            println!("SKIP priv_administrators_are_told_from_others: not root");
            return;
        }
        assert!(!is_administrator(0));
        let told = |command: &mut Command| {
            let mut child = command.stdin(std::process::Stdio::piped()).spawn().unwrap();
            // It reads a line when it has become what it is to be.
            let exe = |pid| std::fs::read_link(format!("/proc/{pid}/exe")).ok();
            let cat = std::fs::canonicalize("/bin/cat").unwrap();
            while exe(child.id()) != Some(cat.clone()) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let told = is_administrator(child.id());
            drop(child.stdin.take());
            child.wait().unwrap();
            told
        };
        assert!(told(&mut Command::new("cat")));
        assert!(!told(std::os::unix::process::CommandExt::uid(&mut Command::new("cat"), 65_534)));
        // Root in a user namespace of its own is not it.
        if std::fs::read_to_string("/proc/sys/user/max_user_namespaces").is_ok_and(|n| n.trim() != "0") {
            assert!(!told(Command::new("unshare").args(["--user", "--map-root-user", "cat"])));
        }
    }

    #[test]
    fn a_child_dies_with_its_parent_thread() {
        let mut child = std::thread::spawn(|| {
            let mut command = Command::new("sleep");
            command.arg("1000");
            kill_with_parent(&mut command);
            command.spawn().unwrap()
        })
        .join()
        .unwrap();
        let status = child.wait().unwrap();
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    }

    #[test]
    fn a_passed_descriptor_arrives_and_others_do_not() {
        let f = tempfile::tempfile().unwrap();
        let number = f.as_raw_fd();
        let mut command = Command::new("test");
        command.args(["-e", &format!("/proc/self/fd/{number}")]);
        assert!(!command.status().unwrap().success());
        pass_fd(&mut command, f.as_fd());
        assert!(command.status().unwrap().success());
    }

    #[test]
    fn a_thread_is_woken_from_a_read() {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        let (ready, is_ready) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            allow_wake().unwrap();
            ready.send(()).unwrap();
            rustix::io::read(&theirs, &mut [0u8; 1])
        });
        is_ready.recv().unwrap();
        while !thread.is_finished() {
            wake_thread(&thread);
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(thread.join().unwrap(), Err(rustix::io::Errno::INTR));
        drop(ours);
    }

    #[test]
    fn status_text() {
        assert_eq!(killed_in_status("Name:\tx\nSigPnd:\t0000000000000100\nShdPnd:\t0\n"), Some(true));
        assert_eq!(killed_in_status("SigPnd:\t0\nShdPnd:\t0000000000000100\n"), Some(true));
        assert_eq!(killed_in_status("SigPnd:\t0\nShdPnd:\t00000000000000ff\n"), Some(false));
        assert_eq!(killed_in_status("Name: x\n"), None);
        assert_eq!(killed_in_status("SigPnd: zz\n"), None);
    }

    #[test]
    fn limits_and_names() {
        assert!(raise_nofile() >= 256);
        set_thread_name("named");
        assert_eq!(rustix::thread::name().unwrap().to_str().unwrap(), "named");
        assert_eq!(is_root(), euid() == 0);
        let _ = egid();
    }
}
