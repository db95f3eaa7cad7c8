//! The FUSE device: whole messages in and out.
//!
//! Invariants: a request is answered on the descriptor it was read from, because each clone has a queue of its own for
//! what it has handed out; so a [`Device`] is kept alive (in an `Arc`) by every request that came from it. Knows
//! nothing of the protocol but that a message is one read and one write.

#![allow(unsafe_code)]

use crate::pipe::Pipe;
use rustix::fs::{Mode, OFlags};
use rustix::ioctl;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

// _IOR(229, 0, u32)
const DEV_IOC_CLONE: ioctl::Opcode = ioctl::opcode::read::<u32>(229, 0);

/// An open FUSE device.
#[derive(Debug)]
pub struct Device {
    fd: OwnedFd,
}

impl Device {
    /// Opens `/dev/fuse`: a device that no mount uses yet.
    pub fn open() -> io::Result<Device> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC;
        Ok(Device { fd: rustix::fs::open("/dev/fuse", flags, Mode::empty())? })
    }

    /// Uses a descriptor that somebody else opened, fusermount3 for one.
    pub fn from_fd(fd: OwnedFd) -> Device {
        Device { fd }
    }

    /// A second descriptor of the same connection with a queue of its own. The device must have been mounted.
    pub fn clone_fd(&self) -> io::Result<Device> {
        let other = Device::open()?;
        let master = u32::try_from(self.fd.as_raw_fd()).expect("an open descriptor is not negative");
        // SAFETY: FUSE_DEV_IOC_CLONE takes a pointer to the u32 number of an open descriptor and only reads it;
        // `self.fd` is open for the whole call.
        unsafe { ioctl::ioctl(&other.fd, ioctl::Setter::<DEV_IOC_CLONE, u32>::new(master))? };
        Ok(other)
    }

    /// Waits for the next request and reads it whole. ENODEV: unmounted or aborted. ENOENT: the request was
    /// interrupted before it was read; read again.
    pub fn read_request(&self, buf: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::read(&self.fd, buf)?)
    }

    /// Writes one message, made of `parts`.
    pub fn write_message(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        Ok(rustix::io::writev(&self.fd, parts)?)
    }

    /// Moves one message of `len` bytes out of a pipe.
    pub fn splice_message(&self, pipe: &Pipe, len: usize) -> io::Result<usize> {
        pipe.splice_out(self.fd.as_fd(), len)
    }
}

impl AsFd for Device {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priv_an_unmounted_device_answers_eperm_and_cannot_be_cloned() {
        let device = match Device::open() {
            Ok(device) => device,
            Err(e) => {
                println!("SKIP priv_an_unmounted_device_answers_eperm_and_cannot_be_cloned: /dev/fuse: {e}");
                return;
            }
        };
        let mut buf = vec![0u8; 64 << 10];
        assert_eq!(device.read_request(&mut buf).unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert_eq!(device.write_message(&[IoSlice::new(&[0u8; 16])]).unwrap_err().raw_os_error(), Some(libc::EPERM));
        // EINVAL or EPERM, as the kernel's age has it.
        assert!(device.clone_fd().is_err());
    }
}
