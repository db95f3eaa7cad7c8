//! The seam through which everything durable goes: write, sync, rename, punch and a few more.
//!
//! Nothing that must survive a crash is written past it. Its real form does what it says; its test form also records
//! every operation and rebuilds each directory that a crash between two syncs could leave. Reading goes past the
//! seam.
//!
//! It does not know what the files mean, and it retries nothing.

#[cfg(test)]
pub(crate) mod faulty;
#[cfg(test)]
pub(crate) mod recording;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

/// How to open a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Open {
    /// It must not exist yet.
    New,
    /// It must exist.
    Existing,
    /// Either way.
    Either,
}

/// A file that the seam knows. Read it through [`DiskFile::file`]; write it only through the [`Disk`] that opened it.
#[derive(Debug)]
pub struct DiskFile {
    file: File,
    /// The recording form's name for it.
    #[cfg(test)]
    id: u64,
}

impl DiskFile {
    fn new(file: File) -> DiskFile {
        DiskFile {
            file,
            #[cfg(test)]
            id: 0,
        }
    }

    /// For reading, locking, mapping and asking for attributes.
    pub fn file(&self) -> &File {
        &self.file
    }
}

impl AsFd for DiskFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Durable operations. Files are made with mode 0600, directories with 0700.
pub trait Disk: fmt::Debug + Send + Sync {
    /// Opens a file for reading and writing. A symlink in the last place is an error.
    fn open(&self, path: &Path, how: Open) -> io::Result<DiskFile>;
    /// Writes all bytes at an offset. Not durable before `sync`.
    fn write_at(&self, file: &DiskFile, bytes: &[u8], offset: u64) -> io::Result<()>;
    /// Sets the length; a longer file is sparse at its end.
    fn resize(&self, file: &DiskFile, len: u64) -> io::Result<()>;
    /// Makes a range a hole, keeping the length.
    fn punch(&self, file: &DiskFile, offset: u64, len: u64) -> io::Result<()>;
    /// Returns when the file's content and length are on disk. Says nothing about its name.
    fn sync(&self, file: &DiskFile) -> io::Result<()>;
    /// Makes a directory.
    fn make_dir(&self, path: &Path) -> io::Result<()>;
    /// Moves a file, replacing what has the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file or an empty directory.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Returns when the names in a directory are on disk.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;
}

/// The real form.
#[derive(Debug, Clone, Copy, Default)]
pub struct RealDisk;

impl Disk for RealDisk {
    fn open(&self, path: &Path, how: Open) -> io::Result<DiskFile> {
        use std::os::unix::fs::OpenOptionsExt;
        let mut options = File::options();
        options.read(true).write(true).mode(0o600).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32);
        match how {
            Open::New => options.create_new(true),
            Open::Existing => &mut options,
            Open::Either => options.create(true).truncate(false),
        };
        Ok(DiskFile::new(options.open(path)?))
    }

    fn write_at(&self, file: &DiskFile, bytes: &[u8], offset: u64) -> io::Result<()> {
        std::os::unix::fs::FileExt::write_all_at(&file.file, bytes, offset)
    }

    fn resize(&self, file: &DiskFile, len: u64) -> io::Result<()> {
        file.file.set_len(len)
    }

    fn punch(&self, file: &DiskFile, offset: u64, len: u64) -> io::Result<()> {
        use rustix::fs::FallocateFlags;
        Ok(rustix::fs::fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, offset, len)?)
    }

    fn sync(&self, file: &DiskFile) -> io::Result<()> {
        file.file.sync_data()
    }

    fn make_dir(&self, path: &Path) -> io::Result<()> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new().mode(0o700).create(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        // The type is asked for first: unlink on a directory may give EISDIR or EPERM.
        if std::fs::symlink_metadata(path)?.is_dir() { std::fs::remove_dir(path) } else { std::fs::remove_file(path) }
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }
}
