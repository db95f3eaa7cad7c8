//! Operations on open files that the standard library lacks.

use rustix::fs::{self, FallocateFlags, IFlags};
use std::io::{self, IoSliceMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Makes a hole of `len` bytes at `offset`; the file keeps its size.
pub fn punch_hole(fd: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    Ok(fs::fallocate(fd, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)?)
}

/// Sets or clears the immutable attribute (`chattr +i`). On ext4 it blocks writes, truncation, punching and unlinking
/// even through descriptors that are open already. Needs CAP_LINUX_IMMUTABLE.
pub fn set_immutable(fd: impl AsFd, on: bool) -> io::Result<()> {
    let fd = fd.as_fd();
    let mut flags = fs::ioctl_getflags(fd)?;
    flags.set(IFlags::IMMUTABLE, on);
    Ok(fs::ioctl_setflags(fd, flags)?)
}

/// Whether the immutable attribute is set.
pub fn is_immutable(fd: impl AsFd) -> io::Result<bool> {
    Ok(fs::ioctl_getflags(fd)?.contains(IFlags::IMMUTABLE))
}

/// Drops the clean pages of a range from the page cache. `len` 0 means to the end. Only a hint.
pub fn fadvise_dontneed(fd: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    Ok(fs::fadvise(fd, offset, std::num::NonZeroU64::new(len), fs::Advice::DontNeed)?)
}

/// Turns readahead off for this open file. Only a hint.
pub fn fadvise_random(fd: impl AsFd) -> io::Result<()> {
    Ok(fs::fadvise(fd, 0, None, fs::Advice::Random)?)
}

/// Starts reading a range into the page cache. Only a hint.
pub fn fadvise_willneed(fd: impl AsFd, offset: u64, len: u64) -> io::Result<()> {
    Ok(fs::fadvise(fd, offset, std::num::NonZeroU64::new(len), fs::Advice::WillNeed)?)
}

/// How many pages of a range of a file are in the page cache, by cachestat(2) (Linux 6.5). The caller must own the file
/// or be able to write to it. Asks the file's file system nothing, so a FUSE server may ask it of its own files.
#[allow(unsafe_code)]
pub fn cached_pages(fd: impl AsFd, offset: u64, len: u64) -> io::Result<u64> {
    /// The same number on all architectures that Rust has.
    const SYS_CACHESTAT: libc::c_long = 451;
    // `struct cachestat_range` and `struct cachestat` of include/uapi/linux/mman.h.
    let range = [offset, len];
    let mut counts = [0u64; 5];
    // SAFETY: the kernel reads two words and writes five; both arrays live through the call.
    let done = unsafe {
        libc::syscall(SYS_CACHESTAT, fd.as_fd().as_raw_fd(), range.as_ptr(), counts.as_mut_ptr(), 0 as libc::c_uint)
    };
    if done == 0 { Ok(counts[0]) } else { Err(io::Error::last_os_error()) }
}

/// Scattered read at an offset; may be short.
pub fn preadv(fd: impl AsFd, bufs: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
    Ok(rustix::io::retry_on_intr(|| rustix::io::preadv(fd.as_fd(), bufs, offset))?)
}

/// [`preadv`] that leaves nothing behind in the page cache (`RWF_DONTCACHE`); an ordinary one where the file system
/// or kernel does not know that.
pub fn preadv_uncached(fd: impl AsFd, bufs: &mut [IoSliceMut<'_>], offset: u64) -> io::Result<usize> {
    const RWF_DONTCACHE: u32 = 0x80;
    let flags = rustix::io::ReadWriteFlags::from_bits_retain(RWF_DONTCACHE);
    match rustix::io::retry_on_intr(|| rustix::io::preadv2(fd.as_fd(), bufs, offset, flags)) {
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL) => preadv(fd, bufs, offset),
        other => Ok(other?),
    }
}

/// Reads exactly `buf.len()` bytes at `offset`; the end of the file before that is `UnexpectedEof`.
pub fn pread_exact(fd: BorrowedFd<'_>, buf: &mut [u8], offset: u64) -> io::Result<()> {
    let mut done = 0usize;
    while done < buf.len() {
        let n = rustix::io::retry_on_intr(|| rustix::io::pread(fd, &mut buf[done..], offset + done as u64))?;
        if n == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "file ends inside the range"));
        }
        done += n;
    }
    Ok(())
}

/// Writes all of `buf` at `offset`.
pub fn pwrite_all(fd: BorrowedFd<'_>, buf: &[u8], offset: u64) -> io::Result<()> {
    let mut done = 0usize;
    while done < buf.len() {
        let n = rustix::io::retry_on_intr(|| rustix::io::pwrite(fd, &buf[done..], offset + done as u64))?;
        if n == 0 {
            return Err(io::Error::new(io::ErrorKind::WriteZero, "nothing was written"));
        }
        done += n;
    }
    Ok(())
}

/// The next byte of data at or after `offset`; `None` when only a hole follows.
pub fn seek_data(fd: impl AsFd, offset: u64) -> io::Result<Option<u64>> {
    match fs::seek(fd, fs::SeekFrom::Data(offset)) {
        Ok(at) => Ok(Some(at)),
        Err(rustix::io::Errno::NXIO) => Ok(None),
        Err(e) => Err(e.into()),
    }
}

/// The next hole at or after `offset`; the end of the file counts as one.
pub fn seek_hole(fd: impl AsFd, offset: u64) -> io::Result<u64> {
    Ok(fs::seek(fd, fs::SeekFrom::Hole(offset))?)
}

/// Bytes that are allocated on disk.
pub fn allocated_bytes(fd: impl AsFd) -> io::Result<u64> {
    Ok(u64::try_from(fs::fstat(fd)?.st_blocks).unwrap_or(0) * 512)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_pages_are_counted() {
        let mut f = tempfile::NamedTempFile::new_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        std::io::Write::write_all(&mut f, &[1u8; 5 * 4096]).unwrap();
        let counted = |offset, len| cached_pages(f.as_file(), offset, len);
        match counted(0, 5 * 4096) {
            Err(e) if e.raw_os_error() == Some(libc::ENOSYS) => {
                println!("SKIP cached_pages_are_counted: this kernel has no cachestat");
                return;
            }
            other => assert_eq!(other.unwrap(), 5),
        }
        assert_eq!(counted(4096, 2 * 4096).unwrap(), 2);
        assert_eq!(counted(5 * 4096, 4096).unwrap(), 0, "behind the end");
        f.as_file().sync_all().unwrap();
        // All of it: the pages may be one folio.
        fadvise_dontneed(f.as_file(), 0, 0).unwrap();
        assert_eq!(counted(0, 5 * 4096).unwrap(), 0);
    }

    #[test]
    fn holes_are_punched_and_found() {
        let f = tempfile::tempfile().unwrap();
        pwrite_all(f.as_fd(), &[1u8; 3 * 4096], 0).unwrap();
        if let Err(e) = punch_hole(&f, 4096, 4096) {
            println!("SKIP holes_are_punched_and_found: {e}");
            return;
        }
        let mut buf = [9u8; 3 * 4096];
        pread_exact(f.as_fd(), &mut buf, 0).unwrap();
        assert!(buf[4096..8192].iter().all(|b| *b == 0));
        assert!(buf[..4096].iter().chain(&buf[8192..]).all(|b| *b == 1));
        assert_eq!(seek_hole(&f, 0).unwrap(), 4096);
        assert_eq!(seek_data(&f, 4096).unwrap(), Some(8192));
        assert_eq!(seek_data(&f, 3 * 4096).unwrap(), None);
        assert_eq!(
            pread_exact(f.as_fd(), &mut buf, 1).unwrap_err().kind(),
            io::ErrorKind::UnexpectedEof,
            "a short file is an error, never zeros"
        );
        fadvise_dontneed(&f, 0, 0).unwrap();
        fadvise_random(&f).unwrap();
        fadvise_willneed(&f, 0, 4096).unwrap();
        assert!(allocated_bytes(&f).unwrap() <= 3 * 4096);
        let (mut a, mut b) = ([0u8; 10], [9u8; 10]);
        let n = preadv(&f, &mut [IoSliceMut::new(&mut a), IoSliceMut::new(&mut b)], 4086).unwrap();
        assert_eq!((n, a, b), (20, [1; 10], [0; 10]));
        a.fill(7);
        assert_eq!(preadv_uncached(&f, &mut [IoSliceMut::new(&mut a)], 4091).unwrap(), 10);
        assert_eq!(a, [1, 1, 1, 1, 1, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn immutable_files_refuse_writes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("f");
        std::fs::write(&path, b"x").unwrap();
        let f = std::fs::OpenOptions::new().read(true).write(true).open(&path).unwrap();
        if let Err(e) = set_immutable(&f, true) {
            println!("SKIP immutable_files_refuse_writes: {e}");
            return;
        }
        assert!(is_immutable(&f).unwrap());
        let unlinked = std::fs::remove_file(&path);
        set_immutable(&f, false).unwrap();
        assert!(unlinked.is_err());
        assert!(!is_immutable(&f).unwrap());
    }
}
