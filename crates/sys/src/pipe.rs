//! A pipe used as a buffer between two descriptors, for splice(2).

use rustix::pipe::{self, PipeFlags, SpliceFlags};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Both ends of one pipe in one hand.
///
/// The owner keeps it empty between uses: what went in goes out again, or the pipe is thrown away.
#[derive(Debug)]
pub struct Pipe {
    read: OwnedFd,
    write: OwnedFd,
    capacity: usize,
}

impl Pipe {
    /// A pipe of at least `capacity` bytes, if the user's limits allow; see [`Pipe::capacity`] for what it became.
    pub fn new(capacity: usize) -> io::Result<Pipe> {
        let (read, write) = pipe::pipe_with(PipeFlags::CLOEXEC)?;
        // Beyond the user's limit the kernel refuses: keep what there is.
        let capacity = match pipe::fcntl_setpipe_size(&write, capacity) {
            Ok(size) => size,
            Err(_) => pipe::fcntl_getpipe_size(&write)?,
        };
        Ok(Pipe { read, write, capacity })
    }

    /// How many bytes fit when every one of its pages is full. A piece that is not a whole page takes a page all the
    /// same.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Copies `bytes` in.
    pub fn put(&self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| rustix::io::write(&self.write, bytes))?)
    }

    /// Moves up to `len` bytes of `from`'s page cache in, without copying and without waiting for room. Short at the
    /// end of the file and when the pipe is full.
    pub fn splice_in(&self, from: BorrowedFd<'_>, offset: u64, len: usize) -> io::Result<usize> {
        let mut at = offset;
        Ok(rustix::io::retry_on_intr(|| {
            pipe::splice(from, Some(&mut at), &self.write, None, len, SpliceFlags::NONBLOCK)
        })?)
    }

    /// Moves `len` bytes out to `to` in one call.
    pub fn splice_out(&self, to: BorrowedFd<'_>, len: usize) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| pipe::splice(&self.read, None, to, None, len, SpliceFlags::empty()))?)
    }

    /// Takes bytes out by copying.
    pub fn take(&self, buf: &mut [u8]) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| rustix::io::read(&self.read, &mut *buf))?)
    }

    /// Duplicates up to `len` bytes into another pipe without consuming them.
    pub fn tee(&self, to: &Pipe, len: usize) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| pipe::tee(&self.read, &to.write, len, SpliceFlags::NONBLOCK))?)
    }

    /// The end to read from.
    pub fn read_end(&self) -> BorrowedFd<'_> {
        self.read.as_fd()
    }

    /// The end to write to.
    pub fn write_end(&self) -> BorrowedFd<'_> {
        self.write.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn header_and_pages_come_out_in_order() {
        let mut f = tempfile::tempfile().unwrap();
        f.write_all(&[5u8; 8192]).unwrap();
        let (a, b) = (Pipe::new(64 << 10).unwrap(), Pipe::new(64 << 10).unwrap());
        assert!(a.capacity() >= 64 << 10);
        assert_eq!(a.put(b"head").unwrap(), 4);
        assert_eq!(a.splice_in(f.as_fd(), 4000, 4192).unwrap(), 4192);
        assert_eq!(a.splice_in(f.as_fd(), 8192, 10).unwrap(), 0, "end of file");
        assert_eq!(a.tee(&b, 4).unwrap(), 4);
        let mut head = [0u8; 4];
        assert_eq!(b.take(&mut head).unwrap(), 4);
        assert_eq!(&head, b"head");
        let mut out = tempfile::tempfile().unwrap();
        let mut left = 4196;
        while left > 0 {
            left -= a.splice_out(out.as_fd(), left).unwrap();
        }
        let mut bytes = Vec::new();
        use std::io::{Read, Seek};
        out.rewind().unwrap();
        out.read_to_end(&mut bytes).unwrap();
        assert_eq!(&bytes[..4], b"head");
        assert!(bytes[4..].iter().all(|b| *b == 5) && bytes.len() == 4196);
    }
}
