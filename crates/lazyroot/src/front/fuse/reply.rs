//! A request is a value that is consumed by its one answer.
//!
//! Invariants: every request that wants an answer gets exactly one; one that is dropped unanswered (a panic, a
//! forgotten path) is answered with EIO. The answer goes out on the channel that the request came in on. Failure
//! model: the kernel refusing an answer because it no longer wants it (ENOENT: the reader is gone; ENODEV: unmounted)
//! is no fault; any other refusal is counted, and tried once more as EIO so that nobody waits for ever.

use super::serve::Counters;
use super::wire::{OutHeader, notify};
use rustix::io::Errno;
use std::io::{self, IoSlice};
use std::sync::Arc;
use sys::fuse::Device;
use sys::pipe::Pipe;

/// Where messages to the kernel go.
pub trait Sink: Send + Sync {
    /// Sends one message made of parts.
    fn write(&self, parts: &[IoSlice<'_>]) -> io::Result<usize>;
    /// Sends one message of `len` bytes that lies in a pipe.
    fn splice(&self, pipe: &Pipe, len: usize) -> io::Result<usize>;
}

impl Sink for Device {
    fn write(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        self.write_message(parts)
    }
    fn splice(&self, pipe: &Pipe, len: usize) -> io::Result<usize> {
        self.splice_message(pipe, len)
    }
}

/// One descriptor of a connection, with the counters of its session.
pub struct Channel {
    sink: Arc<dyn Sink>,
    counters: Arc<Counters>,
}

impl std::fmt::Debug for Channel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Channel")
    }
}

/// The most parts of an answer, its header not counted.
pub const MAX_PARTS: usize = 63;

impl Channel {
    /// A channel to `sink`.
    pub fn new(sink: Arc<dyn Sink>, counters: Arc<Counters>) -> Channel {
        Channel { sink, counters }
    }

    /// Sends an unsolicited message.
    pub fn notify(&self, code: i32, parts: &[&[u8]]) -> io::Result<()> {
        debug_assert!([notify::INVAL_INODE, notify::INVAL_ENTRY, notify::STORE].contains(&code));
        self.send(code, 0, parts)
    }

    fn send(&self, error: i32, unique: u64, parts: &[&[u8]]) -> io::Result<()> {
        let len = size_of::<OutHeader>() + parts.iter().map(|p| p.len()).sum::<usize>();
        let header = OutHeader { len: u32::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?, error, unique };
        let mut slices = [IoSlice::new(&[]); MAX_PARTS + 1];
        slices[0] = IoSlice::new(zerocopy::IntoBytes::as_bytes(&header));
        for (slot, part) in slices[1..].iter_mut().zip(parts) {
            *slot = IoSlice::new(part);
        }
        if parts.len() > MAX_PARTS {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let sent = self.sink.write(&slices[..=parts.len()])?;
        if sent == len { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }
}

/// A request that waits for its answer.
#[derive(Debug)]
pub struct Request {
    channel: Arc<Channel>,
    unique: u64,
    answered: bool,
}

impl Request {
    /// A request that came in on `channel`.
    pub fn new(channel: Arc<Channel>, unique: u64) -> Request {
        Request { channel, unique, answered: false }
    }

    /// Its number, unique while it is unanswered.
    pub fn unique(&self) -> u64 {
        self.unique
    }

    /// Answers with bytes, made of at most [`MAX_PARTS`] parts.
    pub fn ok(self, parts: &[&[u8]]) {
        self.finish(0, parts);
    }

    /// Answers with an errno.
    pub fn error(self, errno: Errno) {
        self.finish(errno.raw_os_error().wrapping_neg(), &[]);
    }

    /// No answer is wanted.
    pub fn none(mut self) {
        self.answered = true;
    }

    /// Answers with a whole message (header included) of `len` bytes that lies in `pipe`. When the kernel refuses
    /// the message, the request comes back unanswered, and what is left in the pipe is garbage.
    pub fn splice(mut self, pipe: &Pipe, len: usize) -> Result<(), Request> {
        match self.channel.sink.splice(pipe, len) {
            Ok(sent) if sent == len => {}
            Err(e) if is_gone(&e) => {}
            _ => return Err(self),
        }
        self.answered = true;
        Ok(())
    }

    /// The header of an answer of `len` payload bytes to this request, for [`Request::splice`].
    pub fn header(&self, len: usize) -> OutHeader {
        OutHeader { len: (size_of::<OutHeader>() + len) as u32, error: 0, unique: self.unique }
    }

    fn finish(mut self, error: i32, parts: &[&[u8]]) {
        self.answered = true;
        if error != 0 {
            self.channel.counters.count_error();
        }
        let Err(first) = self.channel.send(error, self.unique, parts) else { return };
        if is_gone(&first) {
            return;
        }
        // The kernel did not understand us. The reader must not wait for what never comes.
        self.channel.counters.count_refused();
        let _ = self.channel.send(Errno::IO.raw_os_error().wrapping_neg(), self.unique, &[]);
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if !self.answered {
            self.answered = true;
            self.channel.counters.count_error();
            // Best effort: there is nobody left to tell.
            let _ = self.channel.send(Errno::IO.raw_os_error().wrapping_neg(), self.unique, &[]);
        }
    }
}

/// Whether the kernel no longer wants the answer.
fn is_gone(e: &io::Error) -> bool {
    let errno = e.raw_os_error().map(Errno::from_raw_os_error);
    matches!(errno, Some(Errno::NOENT | Errno::NODEV | Errno::CONNABORTED))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use std::sync::Mutex;
    use zerocopy::FromBytes;

    /// A sink that keeps what it was given, or refuses it.
    #[derive(Default)]
    pub(crate) struct Kept {
        pub(crate) messages: Mutex<Vec<Vec<u8>>>,
        pub(crate) refuse: Mutex<Vec<Errno>>,
    }

    impl Sink for Kept {
        fn write(&self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
            if let Some(errno) = self.refuse.lock().unwrap().pop() {
                return Err(errno.into());
            }
            let message: Vec<u8> = parts.iter().flat_map(|p| p.iter().copied()).collect();
            let len = message.len();
            self.messages.lock().unwrap().push(message);
            Ok(len)
        }
        fn splice(&self, pipe: &Pipe, len: usize) -> io::Result<usize> {
            let mut message = vec![0; len];
            let mut have = 0;
            while have < len {
                have += pipe.take(&mut message[have..])?;
            }
            self.write(&[IoSlice::new(&message)])
        }
    }

    impl Kept {
        pub(crate) fn answers(&self) -> Vec<(u64, i32, Vec<u8>)> {
            let messages = self.messages.lock().unwrap();
            messages
                .iter()
                .map(|m| {
                    let (h, body) = OutHeader::read_from_prefix(m).unwrap();
                    assert_eq!(h.len as usize, m.len());
                    (h.unique, h.error, body.to_vec())
                })
                .collect()
        }
    }

    pub(crate) fn kept() -> (Arc<Kept>, Arc<Channel>) {
        let kept = Arc::new(Kept::default());
        let channel = Arc::new(Channel::new(kept.clone(), Arc::new(Counters::default())));
        (kept, channel)
    }

    #[test]
    fn exactly_one_answer() {
        let (kept, channel) = kept();
        Request::new(Arc::clone(&channel), 2).ok(&[b"ab", b"c"]);
        Request::new(Arc::clone(&channel), 4).error(Errno::NOENT);
        Request::new(Arc::clone(&channel), 6).none();
        drop(Request::new(Arc::clone(&channel), 8));
        let pipe = Pipe::new(4096).unwrap();
        let request = Request::new(channel, 10);
        pipe.put(zerocopy::IntoBytes::as_bytes(&request.header(3))).unwrap();
        pipe.put(b"xyz").unwrap();
        request.splice(&pipe, 19).unwrap();
        assert_eq!(
            kept.answers(),
            [(2, 0, b"abc".to_vec()), (4, -2, vec![]), (8, -5, vec![]), (10, 0, b"xyz".to_vec())]
        );
    }

    #[test]
    fn a_refused_answer_becomes_eio_and_an_unwanted_one_nothing() {
        let (kept, channel) = kept();
        kept.refuse.lock().unwrap().push(Errno::INVAL);
        Request::new(Arc::clone(&channel), 2).ok(&[b"bad"]);
        kept.refuse.lock().unwrap().push(Errno::NOENT);
        Request::new(Arc::clone(&channel), 4).ok(&[b"late"]);
        assert_eq!(kept.answers(), [(2, -5, vec![])]);
    }

    #[test]
    fn too_many_parts_become_eio() {
        let (kept, channel) = kept();
        let parts = [&b"x"[..]; MAX_PARTS + 1];
        Request::new(Arc::clone(&channel), 2).ok(&parts);
        Request::new(channel, 4).ok(&parts[1..]);
        assert_eq!(kept.answers(), [(2, -5, vec![]), (4, 0, vec![b'x'; MAX_PARTS])]);
    }
}
