//! A host directory, or a mount, as the snapshot type that every comparison uses.

use crate::lab::Way;
use anyhow::{Context, Result};
use format::Digest;
use image::snapshot::{Record, RecordKind, Snapshot, SnapshotBuilder, hash_content};
use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The tree below `root`, with the content of every file read by `threads` threads. Stays on one file system.
pub fn of_directory(root: &Path, threads: usize) -> Result<Snapshot> {
    let mut builder = SnapshotBuilder::default();
    let mut found = Vec::new();
    walk(root, &mut found)?;
    let mut files: HashMap<(u64, u64), &Path> = HashMap::new();
    for entry in &found {
        if entry.meta.is_file() {
            files.entry((entry.meta.dev(), entry.meta.ino())).or_insert(&entry.host);
        }
    }
    let digests = hash_all(files, threads)?;
    for entry in &found {
        let inode = (entry.meta.dev(), entry.meta.ino());
        let record = record(entry, digests.get(&inode).copied())?;
        builder.add(entry.path.clone(), record, Some(inode));
    }
    Ok(builder.finish())
}

/// One name: where it is on the host and in the tree.
#[derive(Debug)]
struct Found {
    host: PathBuf,
    path: Vec<u8>,
    meta: std::fs::Metadata,
}

fn walk(root: &Path, found: &mut Vec<Found>) -> Result<()> {
    let meta = std::fs::symlink_metadata(root).with_context(|| format!("cannot stat {}", root.display()))?;
    let device = meta.dev();
    found.push(Found { host: root.to_owned(), path: b"/".to_vec(), meta });
    let mut stack = vec![(root.to_owned(), Vec::new())];
    while let Some((dir, prefix)) = stack.pop() {
        let entries = std::fs::read_dir(&dir).with_context(|| format!("cannot list {}", dir.display()))?;
        for entry in entries {
            let entry = entry.with_context(|| format!("cannot list {}", dir.display()))?;
            let host = entry.path();
            let meta = std::fs::symlink_metadata(&host).with_context(|| format!("cannot stat {}", host.display()))?;
            let mut path = prefix.clone();
            path.push(b'/');
            path.extend_from_slice(entry.file_name().as_bytes());
            if meta.is_dir() && meta.dev() == device {
                stack.push((host.clone(), path.clone()));
            }
            found.push(Found { host, path, meta });
        }
    }
    Ok(())
}

fn record(entry: &Found, digest: Option<Digest>) -> Result<Record> {
    let meta = &entry.meta;
    let kind = meta.file_type();
    let device = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
    let kind = if kind.is_file() {
        RecordKind::File { size: meta.len(), digest }
    } else if kind.is_dir() {
        RecordKind::Dir
    } else if kind.is_symlink() {
        let target = std::fs::read_link(&entry.host).with_context(|| format!("readlink {}", entry.host.display()))?;
        RecordKind::Symlink(target.into_os_string().into_vec())
    } else if kind.is_char_device() {
        RecordKind::Char(device.0, device.1)
    } else if kind.is_block_device() {
        RecordKind::Block(device.0, device.1)
    } else if kind.is_fifo() {
        RecordKind::Fifo
    } else {
        RecordKind::Socket
    };
    Ok(Record {
        kind,
        mode: (meta.mode() & 0o7777) as u16,
        uid: meta.uid(),
        gid: meta.gid(),
        mtime: (meta.mtime(), meta.mtime_nsec() as u32),
        nlink: meta.nlink() as u32,
        xattrs: xattrs(&entry.host)?,
        link_group: 0,
    })
}

fn xattrs(path: &Path) -> Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut list = vec![0u8; 64 << 10];
    let len = match rustix::fs::llistxattr(path, &mut list[..]) {
        Ok(len) => len,
        Err(rustix::io::Errno::OPNOTSUPP) => return Ok(BTreeMap::new()),
        Err(e) => return Err(e).with_context(|| format!("listxattr {}", path.display())),
    };
    let mut out = BTreeMap::new();
    for name in list[..len].split(|&b| b == 0).filter(|n| !n.is_empty()) {
        // The host's security module labels what it likes; that is not the tree's.
        if name == b"security.selinux" {
            continue;
        }
        let mut value = vec![0u8; 64 << 10];
        let key = OsString::from_vec(name.to_vec());
        let len = rustix::fs::lgetxattr(path, key.as_os_str(), &mut value[..])
            .with_context(|| format!("getxattr {} {}", path.display(), key.display()))?;
        value.truncate(len);
        out.insert(name.to_vec(), value);
    }
    Ok(out)
}

fn hash_all(files: HashMap<(u64, u64), &Path>, threads: usize) -> Result<HashMap<(u64, u64), Digest>> {
    let files: Vec<_> = files.into_iter().collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    let hash = || -> Result<Vec<((u64, u64), Digest)>> {
        let mut out = Vec::new();
        while let Some((inode, path)) = files.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed)) {
            let digest = File::open(path).and_then(|mut file| hash_content(&mut file));
            out.push((*inode, digest.with_context(|| format!("cannot read {}", path.display()))?));
        }
        Ok(out)
    };
    let mut digests = HashMap::new();
    std::thread::scope(|scope| -> Result<()> {
        let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(hash)).collect();
        for worker in workers {
            digests.extend(worker.join().expect("hashing does not panic")?);
        }
        Ok(())
    })?;
    Ok(digests)
}

/// Compares what is seen at `point` with what should be, reading with `threads` threads.
pub fn same_through(want: &Snapshot, point: &Path, way: Way, threads: usize) -> Result<()> {
    let have = of_directory(point, threads)?;
    match way {
        Way::Overlay => same(&for_overlay(want.clone()), &for_overlay(have)),
        _ => same(want, &have),
    }
}

/// Sets what a way of mounting cannot keep to a common value: overlayfs has its own link counts for directories.
fn for_overlay(mut snapshot: Snapshot) -> Snapshot {
    for record in snapshot.records.values_mut() {
        if record.kind == RecordKind::Dir {
            record.nlink = 1;
        }
    }
    snapshot
}

/// An error that lists the first differences, or nothing when there are none.
pub fn same(want: &Snapshot, have: &Snapshot) -> Result<()> {
    let lines = want.diff(have);
    anyhow::ensure!(lines.is_empty(), "{} differences:\n{}", lines.len(), lines[..lines.len().min(20)].join("\n"));
    Ok(())
}
