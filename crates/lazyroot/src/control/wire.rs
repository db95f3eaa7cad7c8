//! Frames on the control socket: a fixed header, then JSON; descriptors travel with the header.
//!
//! Invariants: a frame is at most [`MAX_BODY`] bytes and carries at most [`MAX_FDS`] descriptors, checked before
//! anything is allocated. Received descriptors are owned at once (close-on-exec), so an error cannot leak them.
//! What the messages mean is not known here.

use std::io::{self, Read, Write};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// The first bytes of every frame.
pub const MAGIC: [u8; 2] = *b"LR";
/// Bytes of a frame's header.
pub const HEADER: usize = 8;
/// The longest body.
pub const MAX_BODY: usize = 1 << 20;
/// The most descriptors with one frame.
pub const MAX_FDS: usize = 4;

/// Why a frame could not be sent or received.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WireError {
    /// The other side closed the connection between frames.
    #[error("the connection was closed")]
    Closed,
    /// The socket failed or timed out.
    #[error("control socket")]
    Io(#[from] io::Error),
    /// The bytes are not a frame of this protocol.
    #[error("not a control frame: {0}")]
    Malformed(&'static str),
    /// The body is not the JSON that is expected.
    #[error("control message")]
    Json(#[from] serde_json::Error),
}

/// The fields of a frame's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Header {
    /// Descriptors that come with it.
    pub fds: usize,
    /// Bytes of the body.
    pub len: usize,
}

/// The header's bytes.
pub fn encode_header(header: Header) -> Result<[u8; HEADER], WireError> {
    if header.len > MAX_BODY {
        return Err(WireError::Malformed("body too long"));
    }
    if header.fds > MAX_FDS {
        return Err(WireError::Malformed("too many descriptors"));
    }
    let mut out = [0u8; HEADER];
    out[..2].copy_from_slice(&MAGIC);
    out[2] = header.fds as u8;
    out[4..].copy_from_slice(&(header.len as u32).to_le_bytes());
    Ok(out)
}

/// Reads a header; anything out of bounds is refused.
pub fn decode_header(bytes: &[u8; HEADER]) -> Result<Header, WireError> {
    if bytes[..2] != MAGIC {
        return Err(WireError::Malformed("wrong magic"));
    }
    if bytes[3] != 0 {
        return Err(WireError::Malformed("reserved byte set"));
    }
    let fds = bytes[2] as usize;
    if fds > MAX_FDS {
        return Err(WireError::Malformed("too many descriptors"));
    }
    let len = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]) as usize;
    if len > MAX_BODY {
        return Err(WireError::Malformed("body too long"));
    }
    Ok(Header { fds, len })
}

/// Sends one message with its descriptors.
pub fn send<T: serde::Serialize>(stream: &UnixStream, message: &T, fds: &[BorrowedFd<'_>]) -> Result<(), WireError> {
    let body = serde_json::to_vec(message)?;
    let mut frame = encode_header(Header { fds: fds.len(), len: body.len() })?.to_vec();
    frame.extend_from_slice(&body);
    let sent = sys::scm::send_fds(stream, &frame, fds)?;
    // Descriptors went with the first byte; the rest is plain.
    (&*stream).write_all(&frame[sent..])?;
    Ok(())
}

/// Receives one message and its descriptors.
pub fn recv<T: serde::de::DeserializeOwned>(stream: &UnixStream) -> Result<(T, Vec<OwnedFd>), WireError> {
    let mut head = [0u8; HEADER];
    let mut fds: Vec<OwnedFd> = Vec::new();
    let mut have = 0;
    while have < HEADER {
        let (got, received) = sys::scm::recv_fds(stream, &mut head[have..])?;
        fds.extend(received);
        if fds.len() > MAX_FDS {
            return Err(WireError::Malformed("too many descriptors"));
        }
        if got == 0 {
            return Err(if have == 0 { WireError::Closed } else { WireError::Malformed("cut off in the header") });
        }
        have += got;
    }
    let header = decode_header(&head)?;
    if header.fds != fds.len() {
        return Err(WireError::Malformed("descriptors missing"));
    }
    let mut body = vec![0u8; header.len];
    (&*stream).read_exact(&mut body)?;
    Ok((serde_json::from_slice(&body)?, fds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::os::fd::AsFd;

    #[test]
    fn headers_round_trip_and_bad_ones_are_refused() {
        for header in [Header { fds: 0, len: 0 }, Header { fds: 4, len: MAX_BODY }, Header { fds: 1, len: 77 }] {
            assert_eq!(decode_header(&encode_header(header).unwrap()).unwrap(), header);
        }
        assert!(encode_header(Header { fds: 5, len: 0 }).is_err());
        assert!(encode_header(Header { fds: 0, len: MAX_BODY + 1 }).is_err());
        let bad: [[u8; HEADER]; 4] = [
            *b"XR\0\0\0\0\0\0",
            *b"LR\x05\0\0\0\0\0",
            *b"LR\0\x01\0\0\0\0",
            [b'L', b'R', 0, 0, 0xff, 0xff, 0xff, 0xff],
        ];
        for bytes in bad {
            assert!(matches!(decode_header(&bytes), Err(WireError::Malformed(_))), "{bytes:?}");
        }
    }

    #[test]
    fn messages_and_descriptors_arrive_together() {
        let (a, b) = UnixStream::pair().unwrap();
        let file = tempfile::tempfile().unwrap();
        (&file).write_all(b"content").unwrap();
        send(&a, &json!({"n": 1}), &[file.as_fd()]).unwrap();
        send(&a, &json!({"n": 2}), &[]).unwrap();
        let (first, fds): (Value, _) = recv(&b).unwrap();
        assert_eq!((first["n"].as_u64(), fds.len()), (Some(1), 1));
        let mut text = String::new();
        let mut got = std::fs::File::from(fds.into_iter().next().unwrap());
        io::Seek::rewind(&mut got).unwrap();
        got.read_to_string(&mut text).unwrap();
        assert_eq!(text, "content");
        let (second, fds): (Value, _) = recv(&b).unwrap();
        assert_eq!((second["n"].as_u64(), fds.len()), (Some(2), 0));
        drop(a);
        assert!(matches!(recv::<Value>(&b), Err(WireError::Closed)));
    }

    #[test]
    fn a_cut_frame_is_an_error() {
        let frame = [&encode_header(Header { fds: 0, len: 9 }).unwrap()[..], b"{\"n\":123}"].concat();
        for cut in 1..frame.len() {
            let (a, b) = UnixStream::pair().unwrap();
            (&a).write_all(&frame[..cut]).unwrap();
            drop(a);
            assert!(recv::<Value>(&b).is_err(), "cut at {cut}");
        }
    }

    #[test]
    fn large_messages_pass_through_small_buffers() {
        let (a, b) = UnixStream::pair().unwrap();
        let text = "x".repeat(900_000);
        let sent = text.clone();
        let writer = std::thread::spawn(move || send(&a, &sent, &[]).unwrap());
        let (got, _): (String, _) = recv(&b).unwrap();
        writer.join().unwrap();
        assert_eq!(got, text);
    }
}
