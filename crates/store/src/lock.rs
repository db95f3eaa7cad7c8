//! Locks between processes: flock on files and directories of the store.
//!
//! A lock belongs to an open file description and goes with the process that holds it, however that ends. Waiting is
//! bounded; there is no fairness. It is let go by name, since a program that another thread is starting shares the open
//! file until its exec closes it.

use crate::StoreError;
use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// How a lock is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Shared,
    Exclusive,
}

/// A held lock; dropping it releases it.
#[derive(Debug)]
pub(crate) struct Lock {
    file: File,
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing the file comes next and does the same, if later.
        let _ = self.file.unlock();
    }
}

/// Opens a file or directory for locking, not through a symlink. Reading suffices, so it works on a read-only disk.
fn open(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32).open(path)
}

/// Takes the lock on an open file if it is free. The lock is the file's.
pub(crate) fn try_file(file: &File, mode: Mode) -> io::Result<bool> {
    let result = match mode {
        Mode::Shared => file.try_lock_shared(),
        Mode::Exclusive => file.try_lock(),
    };
    match result {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(e)) => Err(e),
    }
}

/// Takes the lock on `path` if it is free.
pub(crate) fn try_path(path: &Path, mode: Mode) -> io::Result<Option<Lock>> {
    let file = open(path)?;
    Ok(try_file(&file, mode)?.then_some(Lock { file }))
}

/// Takes the lock on `path`, waiting at most `wait`. `who` says who is likely to hold it.
pub(crate) fn wait_path(path: &Path, mode: Mode, wait: Duration, who: &'static str) -> Result<Lock, StoreError> {
    // Short against what the holders do, long against what a poll costs.
    const POLL: Duration = Duration::from_millis(10);
    let file = open(path).map_err(|e| StoreError::io("open", path, e))?;
    let until = Instant::now() + wait;
    loop {
        if try_file(&file, mode).map_err(|e| StoreError::io("lock", path, e))? {
            return Ok(Lock { file });
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let path = path.parent().unwrap_or(path).to_path_buf();
            return Err(StoreError::Busy { path, who });
        }
        std::thread::sleep(left.min(POLL));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shared_locks_go_together_and_exclusive_ones_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("lock");
        File::create(&path).unwrap();
        let a = try_path(&path, Mode::Shared).unwrap().unwrap();
        let b = try_path(&path, Mode::Shared).unwrap().unwrap();
        assert!(try_path(&path, Mode::Exclusive).unwrap().is_none());
        drop(a);
        let busy = wait_path(&path, Mode::Exclusive, Duration::from_millis(30), "a test is running").unwrap_err();
        assert!(busy.to_string().contains("a test is running"), "{busy}");
        drop(b);
        let c = wait_path(&path, Mode::Exclusive, Duration::ZERO, "").unwrap();
        assert!(try_path(&path, Mode::Shared).unwrap().is_none());
        drop(c);
        assert!(try_path(dir.path(), Mode::Exclusive).unwrap().is_some(), "directories can be locked");
    }

    #[test]
    fn a_lock_is_free_though_a_child_still_has_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let held = try_path(dir.path(), Mode::Exclusive).unwrap().unwrap();
        let shared = held.file.try_clone().unwrap();
        drop(held);
        assert!(try_path(dir.path(), Mode::Exclusive).unwrap().is_some());
        drop(shared);
    }

    #[test]
    fn a_waiter_gets_the_lock_when_it_is_released() {
        let dir = tempfile::tempdir().unwrap();
        let held = try_path(dir.path(), Mode::Exclusive).unwrap().unwrap();
        std::thread::scope(|s| {
            let waiter = s.spawn(|| wait_path(dir.path(), Mode::Shared, Duration::from_secs(60), "x").is_ok());
            std::thread::sleep(Duration::from_millis(30));
            drop(held);
            assert!(waiter.join().unwrap());
        });
    }
}
