//! What a directory of this machine looks like, in the same form as an image: for `diff` and for comparing mounts.
//!
//! Stays on one file system, follows no symlink, reads every attribute that an image keeps.

use anyhow::Context;
use format::Digest;
use image::snapshot::{Record, RecordKind, Snapshot, SnapshotBuilder, hash_content};
use rustix::fs::{Mode, OFlags};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Takes a snapshot of the tree at `root`. With `content`, every file is read and hashed.
pub fn snapshot(root: &Path, content: bool) -> anyhow::Result<Snapshot> {
    let device = root.symlink_metadata().with_context(|| root.display().to_string())?.dev();
    let mut builder = SnapshotBuilder::default();
    let mut stack = vec![(Vec::new(), root.to_owned())];
    while let Some((name, path)) = stack.pop() {
        let meta = path.symlink_metadata().with_context(|| path.display().to_string())?;
        let kind = kind_of(&path, &meta, content)?;
        if kind == RecordKind::Dir && meta.dev() == device {
            for entry in std::fs::read_dir(&path).with_context(|| path.display().to_string())? {
                let entry = entry.with_context(|| path.display().to_string())?;
                let mut below = name.clone();
                below.push(b'/');
                below.extend_from_slice(entry.file_name().as_bytes());
                stack.push((below, entry.path()));
            }
        }
        let record = Record {
            kind,
            mode: (meta.mode() & 0o7777) as u16,
            uid: meta.uid(),
            gid: meta.gid(),
            mtime: (meta.mtime(), meta.mtime_nsec() as u32),
            nlink: meta.nlink() as u32,
            xattrs: xattrs_of(&path).with_context(|| path.display().to_string())?,
            link_group: 0,
        };
        let name = if name.is_empty() { b"/".to_vec() } else { name };
        builder.add(name, record, Some((meta.dev(), meta.ino())));
    }
    Ok(builder.finish())
}

fn kind_of(path: &Path, meta: &std::fs::Metadata, content: bool) -> anyhow::Result<RecordKind> {
    let kind = meta.file_type();
    let rdev = || (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
    Ok(if kind.is_file() {
        let digest = if content { Some(hash_file(path)?) } else { None };
        RecordKind::File { size: meta.len(), digest }
    } else if kind.is_dir() {
        RecordKind::Dir
    } else if kind.is_symlink() {
        let target = std::fs::read_link(path).with_context(|| path.display().to_string())?;
        RecordKind::Symlink(target.as_os_str().as_bytes().to_vec())
    } else if kind.is_char_device() {
        RecordKind::Char(rdev().0, rdev().1)
    } else if kind.is_block_device() {
        RecordKind::Block(rdev().0, rdev().1)
    } else if kind.is_fifo() {
        RecordKind::Fifo
    } else {
        RecordKind::Socket
    })
}

/// The digest of a file's content, as images have it.
pub fn hash_file(path: &Path) -> anyhow::Result<Digest> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let file = rustix::fs::open(path, flags, Mode::empty()).with_context(|| path.display().to_string())?;
    hash_content(&mut std::fs::File::from(file)).with_context(|| path.display().to_string())
}

/// The extended attributes of what `path` names, a symlink itself included.
pub fn xattrs_of(path: &Path) -> std::io::Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut list = vec![0u8; 1 << 16];
    let len = match rustix::fs::llistxattr(path, &mut list[..]) {
        Ok(len) => len,
        Err(rustix::io::Errno::NOTSUP) => 0,
        Err(e) => return Err(e.into()),
    };
    let mut found = BTreeMap::new();
    let mut value = vec![0u8; 1 << 16];
    for name in list[..len].split(|b| *b == 0).filter(|n| !n.is_empty()) {
        match rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..]) {
            Ok(len) => drop(found.insert(name.to_vec(), value[..len].to_vec())),
            // Listed but not for us, or gone in between.
            Err(rustix::io::Errno::NODATA | rustix::io::Errno::PERM | rustix::io::Errno::NOTSUP) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_recorded_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("d")).unwrap();
        std::fs::write(dir.path().join("d/f"), b"content").unwrap();
        std::fs::hard_link(dir.path().join("d/f"), dir.path().join("g")).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", dir.path().join("l")).unwrap();
        let got = snapshot(dir.path(), true).unwrap();
        let paths: Vec<_> = got.records.keys().map(|p| String::from_utf8_lossy(p).into_owned()).collect();
        assert_eq!(paths, ["/", "/d", "/d/f", "/g", "/l"]);
        let file = &got.records[&b"/g"[..]];
        assert_eq!((file.nlink, file.link_group), (2, got.records[&b"/d/f"[..]].link_group));
        assert_eq!(file.kind, RecordKind::File { size: 7, digest: Some(hash_content(&mut &b"content"[..]).unwrap()) });
        assert_eq!(got.records[&b"/l"[..]].kind, RecordKind::Symlink(b"/etc/passwd".to_vec()));
        assert!(got.diff(&snapshot(dir.path(), false).unwrap()).is_empty());
    }
}
