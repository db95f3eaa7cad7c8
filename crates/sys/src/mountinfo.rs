//! Parses `/proc/PID/mountinfo`.
//!
//! Pure but for [`read`]. A line that does not parse is skipped, not an error: the kernel may add fields, and a mount
//! that we cannot name is not ours.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// The mount's id, unique while it is mounted.
    pub id: u64,
    /// The id of the mount that it sits on.
    pub parent: u64,
    /// Device number of the superblock.
    pub dev: (u32, u32),
    /// Which directory of the file system is mounted.
    pub root: PathBuf,
    /// Where, seen from the process's root.
    pub mount_point: PathBuf,
    /// Options of the mount.
    pub options: String,
    /// Type, `type.subtype` where there is one.
    pub fstype: String,
    /// What was given as its source.
    pub source: OsString,
    /// Options of the superblock.
    pub super_options: String,
}

/// The mounts that this process sees.
pub fn of_self() -> io::Result<Vec<Entry>> {
    read(Path::new("/proc/self/mountinfo"))
}

/// The mounts that the calling thread sees, which may be in a mount namespace of its own.
pub fn of_thread() -> io::Result<Vec<Entry>> {
    read(Path::new("/proc/thread-self/mountinfo"))
}

/// The mounts that the process `pid` sees.
pub fn of(pid: i32) -> io::Result<Vec<Entry>> {
    read(Path::new(&format!("/proc/{pid}/mountinfo")))
}

/// Reads and parses a mountinfo file.
pub fn read(path: &Path) -> io::Result<Vec<Entry>> {
    Ok(parse(&std::fs::read(path)?))
}

/// Parses the text of a mountinfo file.
pub fn parse(text: &[u8]) -> Vec<Entry> {
    text.split(|b| *b == b'\n').filter_map(line).collect()
}

fn line(text: &[u8]) -> Option<Entry> {
    let mut fields = text.split(|b| *b == b' ');
    let id = number(fields.next()?)?;
    let parent = number(fields.next()?)?;
    let dev = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let dev = (dev.0.parse().ok()?, dev.1.parse().ok()?);
    let root = unescape(fields.next()?);
    let mount_point = unescape(fields.next()?);
    let options = fields.next()?;
    fields.by_ref().find(|f| *f == b"-")?;
    let fstype = fields.next()?;
    let source = fields.next()?;
    let super_options = fields.next().unwrap_or_default();
    Some(Entry {
        id,
        parent,
        dev,
        root: root.into(),
        mount_point: mount_point.into(),
        options: String::from_utf8_lossy(options).into_owned(),
        fstype: String::from_utf8_lossy(fstype).into_owned(),
        source: unescape(source),
        super_options: String::from_utf8_lossy(super_options).into_owned(),
    })
}

fn number(text: &[u8]) -> Option<u64> {
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// `\040` and its like back to bytes.
fn unescape(text: &[u8]) -> OsString {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, tail)) = rest.split_first() {
        if let (b'\\', [a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..]) = (first, tail) {
            out.push(((a - b'0') << 6) | ((b - b'0') << 3) | (c - b'0'));
            rest = after;
        } else {
            out.push(*first);
            rest = tail;
        }
    }
    OsString::from_vec(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_with_escapes_and_optional_fields() {
        let text = b"36 35 98:0 /mnt1 /mnt\\0402\\134x rw,noatime master:1 shared:7 - fuse.lazyroot src\\011 rw,a=b\n\
                     37 35 0:5 / /plain ro - tmpfs none rw\nrubbish\n38 x 0:5 / / ro - tmpfs none rw\n";
        let got = parse(text);
        assert_eq!(got.len(), 2);
        assert_eq!(got[0].mount_point, Path::new("/mnt 2\\x"));
        assert_eq!((got[0].id, got[0].parent, got[0].dev), (36, 35, (98, 0)));
        assert_eq!((got[0].fstype.as_str(), got[0].source.to_str()), ("fuse.lazyroot", Some("src\t")));
        assert_eq!(got[1].super_options, "rw");
    }

    #[test]
    fn the_root_is_there() {
        let all = of_self().unwrap();
        assert!(all.iter().any(|e| e.mount_point == Path::new("/")));
        assert_eq!(all, of_thread().unwrap());
        assert!(!of(std::process::id() as i32).unwrap().is_empty());
    }
}
