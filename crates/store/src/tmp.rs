//! Directories in `tmp/`: one per import, named with its process, held by a lock while it lives.
//!
//! A directory whose lock can be taken belongs to nobody any more; the next import or `gc` removes it. Making and
//! sweeping exclude each other by a lock on `tmp/` itself, so a directory is never seen between being made and locked.

use crate::disk::{Disk, DiskFile, Open};
use crate::layout::Layout;
use crate::lock::{self, Lock, Mode};
use crate::{StoreError, layout};
use std::fs::File;
use std::hash::{BuildHasher, Hasher};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Making or looking at directories takes no time; whoever holds this longer is stopped or stuck.
const WAIT: Duration = Duration::from_secs(30);

/// A directory of our own; removed with everything in it when dropped.
#[derive(Debug)]
pub(crate) struct TmpDir {
    path: PathBuf,
    disk: Arc<dyn Disk>,
    next: AtomicU64,
    _lock: Lock,
}

impl TmpDir {
    pub(crate) fn make(layout: &Layout, disk: &Arc<dyn Disk>) -> Result<TmpDir, StoreError> {
        let tmp = layout.tmp();
        let _making = lock::wait_path(&tmp, Mode::Exclusive, WAIT, "another process makes its directory")?;
        let random = std::hash::RandomState::new().build_hasher().finish();
        let path = tmp.join(format!("{}-{random:016x}", std::process::id()));
        disk.make_dir(&path).map_err(|e| StoreError::io("make", &path, e))?;
        match lock::try_path(&path, Mode::Exclusive) {
            Ok(Some(held)) => Ok(TmpDir { path, disk: disk.clone(), next: AtomicU64::new(0), _lock: held }),
            Ok(None) => Err(StoreError::Busy { path, who: "somebody else uses a directory of ours" }),
            Err(e) => Err(StoreError::io("lock", path, e)),
        }
    }

    /// A new file in it.
    pub(crate) fn file(&self, hint: &str) -> Result<TmpFile, StoreError> {
        let n = self.next.fetch_add(1, Ordering::Relaxed);
        let hint: String = hint.chars().filter(char::is_ascii_alphanumeric).take(32).collect();
        let path = self.path.join(format!("{n}-{hint}"));
        let file = self.disk.open(&path, Open::New).map_err(|e| StoreError::io("make", &path, e))?;
        Ok(TmpFile { disk: self.disk.clone(), file, path, position: 0 })
    }
}

impl Drop for TmpDir {
    fn drop(&mut self) {
        // What cannot be removed now is removed by the next import or gc.
        let _ = remove_tree(&self.path, self.disk.as_ref());
    }
}

/// Removes the directories of imports that are no more; returns how many and their bytes.
pub(crate) fn sweep(layout: &Layout, disk: &dyn Disk) -> Result<(u64, u64), StoreError> {
    let tmp = layout.tmp();
    let mut stale = Vec::new();
    {
        let _sweeping = lock::wait_path(&tmp, Mode::Exclusive, WAIT, "another process makes its directory")?;
        for name in layout::list(&tmp)? {
            let path = tmp.join(name);
            match lock::try_path(&path, Mode::Exclusive) {
                Ok(Some(held)) => stale.push((path, held)),
                Ok(None) => {}
                Err(e) if e.kind() == io::ErrorKind::NotFound => {}
                Err(e) => return Err(StoreError::io("lock", path, e)),
            }
        }
    }
    let (mut count, mut bytes) = (0, 0);
    for (path, _held) in stale {
        bytes += remove_tree(&path, disk).map_err(|e| StoreError::io("remove", &path, e))?;
        count += 1;
    }
    Ok((count, bytes))
}

/// Removes a file or a directory with what is in it; returns the bytes. Follows no symlinks.
fn remove_tree(path: &Path, disk: &dyn Disk) -> io::Result<u64> {
    let meta = std::fs::symlink_metadata(path)?;
    let mut bytes = 0;
    if meta.is_dir() {
        for entry in std::fs::read_dir(path)? {
            bytes += remove_tree(&entry?.path(), disk)?;
        }
    } else {
        bytes = meta.len();
    }
    disk.remove(path)?;
    Ok(bytes)
}

/// A file in an import's directory. Unbuffered: wrap it in a `BufWriter` or `BufReader`. Its name goes with the
/// import; what is written has no promise to survive anything until it is published.
#[derive(Debug)]
pub struct TmpFile {
    disk: Arc<dyn Disk>,
    file: DiskFile,
    path: PathBuf,
    position: u64,
}

impl TmpFile {
    /// For mapping and for reading at offsets.
    pub fn file(&self) -> &File {
        self.file.file()
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Writes at an offset, from any thread.
    ///
    /// # Errors
    /// A full disk and such.
    pub fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.disk.write_at(&self.file, bytes, offset)
    }

    /// Returns when the content is on disk.
    pub(crate) fn sync(&self) -> Result<(), StoreError> {
        self.disk.sync(&self.file).map_err(|e| StoreError::io("sync", &self.path, e))
    }

    /// Gives the file its final name, replacing what has it. The content must have been synced.
    pub(crate) fn rename(self, to: &Path) -> Result<(), StoreError> {
        self.disk.rename(&self.path, to).map_err(|e| StoreError::io("make", to, e))
    }
}

impl Write for TmpFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_at(bytes, self.position)?;
        self.position += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for TmpFile {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let n = std::os::unix::fs::FileExt::read_at(self.file(), out, self.position)?;
        self.position += n as u64;
        Ok(n)
    }
}

impl Seek for TmpFile {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        let bad = || io::Error::from(io::ErrorKind::InvalidInput);
        self.position = match to {
            SeekFrom::Start(at) => at,
            SeekFrom::Current(by) => self.position.checked_add_signed(by).ok_or_else(bad)?,
            SeekFrom::End(by) => self.file().metadata()?.len().checked_add_signed(by).ok_or_else(bad)?,
        };
        Ok(self.position)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::RealDisk;

    fn store() -> (tempfile::TempDir, Layout, Arc<dyn Disk>) {
        let dir = tempfile::tempdir().unwrap();
        let layout = Layout::new(dir.path());
        layout::open(&layout, &RealDisk).unwrap();
        (dir, layout, Arc::new(RealDisk))
    }

    #[test]
    fn a_directory_goes_with_its_owner_and_is_left_alone_before() {
        let (_dir, layout, disk) = store();
        let tmp = TmpDir::make(&layout, &disk).unwrap();
        let mut file = tmp.file("some/../hint").unwrap();
        file.write_all(b"hello").unwrap();
        file.seek(SeekFrom::End(-4)).unwrap();
        let mut back = String::new();
        file.read_to_string(&mut back).unwrap();
        assert_eq!(back, "ello");
        assert_eq!(sweep(&layout, disk.as_ref()).unwrap(), (0, 0));
        assert!(file.path().exists());
        drop(tmp);
        assert!(layout::list(&layout.tmp()).unwrap().is_empty());
    }

    #[test]
    fn what_nobody_holds_is_swept() {
        let (_dir, layout, disk) = store();
        let live = TmpDir::make(&layout, &disk).unwrap();
        let stale = layout.tmp().join("1-0000000000000000");
        std::fs::create_dir_all(stale.join("deep/er")).unwrap();
        std::fs::write(stale.join("deep/file"), [0; 100]).unwrap();
        std::os::unix::fs::symlink("/etc", stale.join("link")).unwrap();
        let (count, bytes) = sweep(&layout, disk.as_ref()).unwrap();
        assert_eq!((count, bytes), (1, 100 + 4));
        assert!(Path::new("/etc").exists());
        assert_eq!(layout::list(&layout.tmp()).unwrap().len(), 1);
        drop(live);
    }

    #[test]
    fn making_and_sweeping_at_once_never_loses_a_directory() {
        let (_dir, layout, disk) = store();
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    for _ in 0..50 {
                        let tmp = TmpDir::make(&layout, &disk).unwrap();
                        tmp.file("x").unwrap().write_all(b"x").unwrap();
                        tmp.file("y").expect("nobody swept it");
                    }
                });
            }
            s.spawn(|| {
                for _ in 0..100 {
                    sweep(&layout, disk.as_ref()).unwrap();
                }
            });
        });
    }
}
