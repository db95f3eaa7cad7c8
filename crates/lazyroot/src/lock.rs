//! Advisory locks on files (flock): gone with the process that holds them, whatever ends it.
//!
//! A lock belongs to the open file, which a program that is being started shares until its exec closes it. So a lock is
//! let go by name: closing the file alone would leave it held for as long as some other thread's child needs.

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::Path;

/// A lock that is held.
#[derive(Debug)]
pub struct Lock {
    file: File,
}

impl Lock {
    /// Takes the lock if it is free; its file is made where it is missing.
    pub fn try_take(path: &Path) -> std::io::Result<Option<Lock>> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = File::from(rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?);
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Lock { file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    /// Writes who holds it, for people and messages.
    pub fn note(&mut self, text: &str) -> std::io::Result<()> {
        self.file.set_len(0)?;
        self.file.rewind()?;
        self.file.write_all(text.as_bytes())
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing the file comes next and does the same, if later.
        let _ = flock(&self.file, FlockOperation::Unlock);
    }
}

/// What the holder of a lock has noted.
pub fn note_of(path: &Path) -> String {
    let mut text = String::new();
    if let Ok(file) = File::open(path) {
        // Only for a message.
        let _ = file.take(4096).read_to_string(&mut text);
    }
    text.trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_is_held_once_and_freed_with_its_holder() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let mut lock = Lock::try_take(&path).unwrap().unwrap();
        lock.note("process 1").unwrap();
        assert!(Lock::try_take(&path).unwrap().is_none());
        assert_eq!(note_of(&path), "process 1");
        drop(lock);
        assert!(Lock::try_take(&path).unwrap().is_some());
    }

    #[test]
    fn a_lock_is_free_though_a_child_still_has_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        let lock = Lock::try_take(&path).unwrap().unwrap();
        // What a child has between its fork and its exec.
        let shared = lock.file.try_clone().unwrap();
        drop(lock);
        assert!(Lock::try_take(&path).unwrap().is_some());
        drop(shared);
    }
}
