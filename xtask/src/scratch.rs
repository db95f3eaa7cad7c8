//! Directories for a run, and putting away what it leaves: mounts first, then files.
//!
//! Everything lies below one directory, so that a later run (or `xtask clean`) can put away what a killed one left.

use anyhow::{Context, Result};
use rustix::mount::UnmountFlags;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// A directory of this run, removed at the end.
#[derive(Debug)]
pub struct Scratch {
    dir: PathBuf,
    keep: bool,
}

impl Scratch {
    /// Makes `NAME-PID` below the first place that suits.
    pub fn new(name: &str) -> Result<Scratch> {
        let dir = place()?.join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        Ok(Scratch { dir, keep: false })
    }

    /// Leaves the files where they are at the end; mounts go all the same.
    pub fn keep(&mut self) {
        self.keep = true;
    }

    /// The directory.
    pub fn dir(&self) -> &Path {
        &self.dir
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        unmount_below(&self.dir);
        if self.keep {
            println!("kept: {}", self.dir.display());
        } else if let Err(e) = std::fs::remove_dir_all(&self.dir) {
            eprintln!("cannot remove {}: {e}", self.dir.display());
        }
    }
}

/// The directory that all runs use: in the target directory, or where that lies on an overlay, which a kernel mount
/// cannot have below it, in a place that does not.
pub fn place() -> Result<PathBuf> {
    let target = crate::target_dir()?;
    let candidates = [target, PathBuf::from("/var/tmp/lazyroot"), PathBuf::from("/dev/shm/lazyroot")];
    for parent in &candidates {
        let dir = parent.join("scratch");
        if std::fs::create_dir_all(&dir).is_ok() && !on_overlay(&dir) {
            return Ok(dir);
        }
    }
    anyhow::bail!("no place for scratch files that is not an overlay; tried {candidates:?}")
}

/// Puts away all that earlier runs left.
pub fn clean() -> Result<()> {
    let place = place()?;
    unmount_below(&place);
    for entry in std::fs::read_dir(&place)? {
        let path = entry?.path();
        println!("removing {}", path.display());
        std::fs::remove_dir_all(&path).with_context(|| format!("cannot remove {}", path.display()))?;
    }
    Ok(())
}

fn on_overlay(path: &Path) -> bool {
    const OVERLAYFS: i64 = 0x794c_7630;
    rustix::fs::statfs(path).is_ok_and(|s| s.f_type == OVERLAYFS)
}

/// Detaches every mount below a directory, the latest first.
pub fn unmount_below(dir: &Path) {
    for point in mounts_below(dir).into_iter().rev() {
        if let Err(e) = rustix::mount::unmount(&point, UnmountFlags::DETACH) {
            eprintln!("cannot unmount {}: {e}", point.display());
        }
    }
}

/// The mount points below a directory, in the order in which they were made.
pub fn mounts_below(dir: &Path) -> Vec<PathBuf> {
    let table = std::fs::read("/proc/self/mountinfo").unwrap_or_default();
    let points = table.split(|&b| b == b'\n').filter_map(|line| line.split(|&b| b == b' ').nth(4));
    points.map(unescape).filter(|point| point.starts_with(dir)).collect()
}

/// Undoes the octal escapes of proc(5).
fn unescape(field: &[u8]) -> PathBuf {
    let mut out = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, behind)) = rest.split_first() {
        let octal = (first == b'\\').then(|| behind.get(..3)).flatten();
        match octal.and_then(|d| u8::from_str_radix(std::str::from_utf8(d).ok()?, 8).ok()) {
            Some(byte) => {
                out.push(byte);
                rest = &behind[3..];
            }
            None => {
                out.push(first);
                rest = behind;
            }
        }
    }
    PathBuf::from(std::ffi::OsString::from_vec(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_with_blanks_are_read_back() {
        assert_eq!(unescape(br"/a\040b\134c"), PathBuf::from(r"/a b\c"));
        assert_eq!(unescape(br"/plain\9"), PathBuf::from(r"/plain\9"));
    }
}
