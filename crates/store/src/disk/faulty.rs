//! A disk that fails: full after so many bytes, or dead from a certain operation on.

use super::{Disk, DiskFile, Open, RealDisk};
use std::io;
use std::path::Path;
use std::sync::Mutex;

/// Does what [`RealDisk`] does until a budget is used up.
#[derive(Debug)]
pub(crate) struct Faulty {
    left: Mutex<Budget>,
}

#[derive(Debug, Clone, Copy)]
struct Budget {
    bytes: u64,
    operations: u64,
}

impl Faulty {
    /// No space left after `bytes` written bytes. Removing still works.
    pub(crate) fn full_after(bytes: u64) -> Faulty {
        Faulty { left: Mutex::new(Budget { bytes, operations: u64::MAX }) }
    }

    /// I/O errors after `operations` operations, for ever.
    pub(crate) fn dead_after(operations: u64) -> Faulty {
        Faulty { left: Mutex::new(Budget { bytes: u64::MAX, operations }) }
    }

    fn take(&self, bytes: u64) -> io::Result<()> {
        let mut left = self.left.lock().unwrap();
        if left.operations == 0 {
            return Err(io::Error::from(rustix::io::Errno::IO));
        }
        left.operations -= 1;
        if bytes > left.bytes {
            return Err(io::Error::from(rustix::io::Errno::NOSPC));
        }
        left.bytes -= bytes;
        Ok(())
    }
}

impl Disk for Faulty {
    fn open(&self, path: &Path, how: Open) -> io::Result<DiskFile> {
        self.take(0)?;
        RealDisk.open(path, how)
    }
    fn write_at(&self, file: &DiskFile, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.take(bytes.len() as u64)?;
        RealDisk.write_at(file, bytes, offset)
    }
    fn resize(&self, file: &DiskFile, len: u64) -> io::Result<()> {
        self.take(0)?;
        RealDisk.resize(file, len)
    }
    fn punch(&self, file: &DiskFile, offset: u64, len: u64) -> io::Result<()> {
        self.take(0)?;
        RealDisk.punch(file, offset, len)
    }
    fn sync(&self, _file: &DiskFile) -> io::Result<()> {
        self.take(0)
    }
    fn make_dir(&self, path: &Path) -> io::Result<()> {
        self.take(0)?;
        RealDisk.make_dir(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.take(0)?;
        RealDisk.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.take(0)?;
        RealDisk.remove(path)
    }
    fn sync_dir(&self, _path: &Path) -> io::Result<()> {
        self.take(0)
    }
}
