//! Messages with descriptors over a unix socket (SCM_RIGHTS), and who is at its other end.
//!
//! One call is one message. Works on stream and on seqpacket sockets; on a stream socket the receiver must read with
//! a buffer that ends where the message ends (a length prefix of its own), because a plain read there would throw
//! the descriptors away.

#![allow(unsafe_code)]

use rustix::net::{
    self, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

/// The most descriptors in one message (the kernel's own limit is 253).
pub const MAX_FDS: usize = 16;

const SPACE: usize = rustix::cmsg_space!(ScmRights(MAX_FDS));

/// Sends `payload` (at least one byte) with `fds`, in one message. Returns how many payload bytes went: on a stream
/// socket the rest can be sent by plain writes, the descriptors are with the first byte.
pub fn send_fds(socket: impl AsFd, payload: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    if payload.is_empty() || fds.len() > MAX_FDS {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a message has a payload and at most 16 descriptors"));
    }
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "too many descriptors"));
    }
    Ok(rustix::io::retry_on_intr(|| {
        net::sendmsg(socket.as_fd(), &[IoSlice::new(payload)], &mut control, SendFlags::NOSIGNAL)
    })?)
}

/// Receives one message into `buf`. Returns how many bytes came (0: the peer closed) and the descriptors, which are
/// close-on-exec. A message whose descriptors did not fit is an error, and those that came are closed.
pub fn recv_fds(socket: impl AsFd, buf: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); SPACE];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = rustix::io::retry_on_intr(|| {
        net::recvmsg(socket.as_fd(), &mut [IoSliceMut::new(buf)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if got.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the peer sent more descriptors than allowed"));
    }
    Ok((got.bytes, fds))
}

/// Who connected (SO_PEERCRED): as of the moment of connect(2) or socketpair(2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerCred {
    /// Process id, in our pid namespace; 0 when it is not visible here.
    pub pid: i32,
    /// Effective user id.
    pub uid: u32,
    /// Effective group id.
    pub gid: u32,
}

/// The credentials of the peer of a connected unix socket.
///
/// Not through rustix: its type cannot hold the pid 0 that the kernel gives for a peer in a foreign pid namespace.
pub fn peer_cred(socket: impl AsFd) -> io::Result<PeerCred> {
    let mut cred = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `cred` and `len` are live, writable and as large as stated; the kernel writes at most `len` bytes of a
    // struct ucred, of which every bit pattern is valid; the descriptor is borrowed for the call.
    let rc = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &raw mut len,
        )
    };
    if rc != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(PeerCred { pid: cred.pid, uid: cred.uid, gid: cred.gid })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek, Write};
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_file_passes_with_its_message() {
        let (a, b) = UnixStream::pair().unwrap();
        let mut f = tempfile::tempfile().unwrap();
        f.write_all(b"content").unwrap();
        f.rewind().unwrap();
        assert_eq!(send_fds(&a, b"hi", &[f.as_fd(), f.as_fd()]).unwrap(), 2);
        let mut buf = [0u8; 16];
        let (n, mut fds) = recv_fds(&b, &mut buf).unwrap();
        assert_eq!((&buf[..n], fds.len()), (&b"hi"[..], 2));
        let mut text = String::new();
        std::fs::File::from(fds.remove(0)).read_to_string(&mut text).unwrap();
        assert_eq!(text, "content");
        assert!(rustix::io::fcntl_getfd(&fds[0]).unwrap().contains(rustix::io::FdFlags::CLOEXEC));
    }

    #[test]
    fn no_fds_empty_and_too_many() {
        let (a, b) = UnixStream::pair().unwrap();
        assert_eq!(send_fds(&a, b"x", &[]).unwrap(), 1);
        let mut buf = [0u8; 4];
        let (n, fds) = recv_fds(&b, &mut buf).unwrap();
        assert_eq!((n, fds.len()), (1, 0));
        assert_eq!(send_fds(&a, b"", &[]).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        let many = vec![a.as_fd(); MAX_FDS + 1];
        assert_eq!(send_fds(&a, b"x", &many).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        drop(a);
        assert_eq!(recv_fds(&b, &mut buf).unwrap().0, 0, "the peer closed");
    }

    #[test]
    fn the_peer_is_us() {
        let (a, _b) = UnixStream::pair().unwrap();
        let cred = peer_cred(&a).unwrap();
        assert_eq!(cred.pid, std::process::id() as i32);
        assert_eq!(cred.uid, rustix::process::geteuid().as_raw());
    }
}
