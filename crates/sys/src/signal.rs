//! Signals as readable events: blocked in the whole process, read from a descriptor.
//!
//! Block them before any thread exists: threads inherit the mask. Children started through `std::process` get an
//! empty mask again.

#![allow(unsafe_code)]

use rustix::process::Signal;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// A descriptor from which blocked signals are read.
#[derive(Debug)]
pub struct SignalFd {
    fd: OwnedFd,
}

/// One signal that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrived {
    /// Its number.
    pub number: i32,
    /// Whether the kernel sent it by itself: a key on the terminal, a child's end. Then everybody in the
    /// foreground group has it already.
    pub by_kernel: bool,
    /// Process that sent it.
    pub pid: u32,
}

impl SignalFd {
    /// Blocks `signals` in the calling thread (and those that it starts) and opens a descriptor for them.
    pub fn block(signals: &[Signal]) -> io::Result<SignalFd> {
        let mut set = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: sigemptyset initialises the set it is given; sigaddset gets that set and valid signal numbers.
        let set = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            let mut set = set.assume_init();
            for signal in signals {
                libc::sigaddset(&raw mut set, signal.as_raw());
            }
            set
        };
        // SAFETY: the set is initialised and outlives the call; the old mask is not asked for.
        let rc = unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut()) };
        if rc != 0 {
            return Err(io::Error::from_raw_os_error(rc));
        }
        // SAFETY: the set is initialised; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC | libc::SFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just made this descriptor and nobody else knows it.
        Ok(SignalFd { fd: unsafe { OwnedFd::from_raw_fd(fd) } })
    }

    /// The next signal that has come; none when there is none.
    pub fn next(&self) -> io::Result<Option<Arrived>> {
        let mut info = MaybeUninit::<libc::signalfd_siginfo>::zeroed();
        // SAFETY: the buffer is as large as stated and writable; every bit pattern of the structure is valid, and it
        // starts zeroed.
        let (n, info) = unsafe {
            let size = size_of::<libc::signalfd_siginfo>();
            (libc::read(self.fd.as_raw_fd(), info.as_mut_ptr().cast(), size), info.assume_init())
        };
        if n < 0 {
            let e = io::Error::last_os_error();
            return if e.kind() == io::ErrorKind::WouldBlock { Ok(None) } else { Err(e) };
        }
        // SI_KERNEL and above: codes that a process cannot send for itself are positive.
        Ok(Some(Arrived { number: info.ssi_signo as i32, by_kernel: info.ssi_code > 0, pid: info.ssi_pid }))
    }
}

impl AsFd for SignalFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Marks every descriptor from `first` on close-on-exec, so that a child gets only what it is given.
pub fn close_on_exec_from(first: u32) -> io::Result<()> {
    // SAFETY: with CLOSE_RANGE_CLOEXEC nothing is closed; only a flag of the descriptors changes.
    let rc = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocked_signal_is_read() {
        std::thread::spawn(|| {
            let fd = SignalFd::block(&[Signal::USR2]).unwrap();
            assert_eq!(fd.next().unwrap(), None);
            // SAFETY: raising a blocked signal in this thread has no effect but its being pending.
            unsafe { libc::raise(libc::SIGUSR2) };
            let got = fd.next().unwrap().unwrap();
            assert_eq!((got.number, got.by_kernel, got.pid), (libc::SIGUSR2, false, std::process::id()));
            assert_eq!(fd.next().unwrap(), None);
        })
        .join()
        .unwrap();
    }

    #[test]
    fn children_get_nothing_that_was_not_given() {
        let file = tempfile::tempfile().unwrap();
        rustix::io::fcntl_setfd(&file, rustix::io::FdFlags::empty()).unwrap();
        close_on_exec_from(3).unwrap();
        assert!(rustix::io::fcntl_getfd(&file).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }
}
