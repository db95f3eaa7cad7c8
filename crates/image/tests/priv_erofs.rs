//! Images mounted by the running kernel, from plain files, and everything in them compared.
//!
//! Needs root and a kernel that mounts EROFS from files; prints `SKIP name: reason` where that is missing.

extern crate lazyroot_image as image;

mod erofs_support;

use erofs_support::*;
use image::erofs::{Export, Shape};
use image::snapshot::{Record, RecordKind, Snapshot, SnapshotBuilder, hash_content};
use image::tree::Tree;
use rustix::fs::{Mode, OFlags, SeekFrom};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// A mounted image; unmounted when dropped.
struct Mounted {
    dir: tempfile::TempDir,
}

impl Mounted {
    /// Writes the image to a file and mounts that. `None`, with a line about the reason, where this cannot be.
    fn new(test: &str, built: &Built, shape: Shape) -> Option<Mounted> {
        if !rustix::process::geteuid().is_root() {
            println!("SKIP {test}: not root");
            return None;
        }
        let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("temporary directory");
        let (image, root) = (dir.path().join("image"), dir.path().join("root"));
        let plan = built.plan(shape);
        let mut file = fs::File::create(&image).expect("image");
        built.export_to(&plan, Export::Whole, &mut file);
        file.sync_all().expect("sync");
        assert_eq!(file.metadata().expect("metadata").len(), plan.image_len());
        fs::create_dir(&root).expect("mount point");
        // Not mount(8), which would put a loop device in between.
        match rustix::mount::mount(&image, &root, "erofs", MountFlags::RDONLY, None) {
            Ok(()) => Some(Mounted { dir }),
            Err(e @ (Errno::NODEV | Errno::NOTBLK | Errno::PERM)) => {
                println!("SKIP {test}: mounting EROFS from a file: {e}");
                None
            }
            Err(e) => panic!("mount: {e}"),
        }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.root(), UnmountFlags::DETACH);
    }
}

/// What a mounted tree looks like. Goes down by file descriptors, so paths may be of any length.
fn walk(root: &Path, want: &Snapshot) -> Snapshot {
    let mut builder = SnapshotBuilder::default();
    let fd = open_dir(root);
    builder.add(b"/".to_vec(), record(root, b"/", want), None);
    walk_dir(&fd, &mut Vec::new(), want, &mut builder);
    builder.finish()
}

fn open_dir(path: &Path) -> OwnedFd {
    rustix::fs::open(path, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).expect("open")
}

fn walk_dir(fd: &OwnedFd, path: &mut Vec<u8>, want: &Snapshot, builder: &mut SnapshotBuilder) {
    let here = PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()));
    for entry in fs::read_dir(&here).expect("list") {
        let entry = entry.expect("entry");
        let name = entry.file_name();
        let len = path.len();
        path.push(b'/');
        path.extend_from_slice(name.as_bytes());
        let full = here.join(&name);
        let meta = fs::symlink_metadata(&full).expect("stat");
        assert_eq!(entry.file_type().expect("type"), meta.file_type(), "type in the directory");
        assert_eq!(std::os::unix::fs::DirEntryExt::ino(&entry), meta.ino(), "inode number in the directory");
        builder.add(path.clone(), record(&full, path, want), Some((0, meta.ino())));
        if meta.is_dir() {
            walk_dir(&open_dir(&full), path, want, builder);
        }
        path.truncate(len);
    }
}

fn record(at: &Path, path: &[u8], want: &Snapshot) -> Record {
    let meta = fs::symlink_metadata(at).expect("stat");
    let device = (rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev()));
    let file_type = meta.file_type();
    let kind = if file_type.is_dir() {
        RecordKind::Dir
    } else if file_type.is_symlink() {
        RecordKind::Symlink(fs::read_link(at).expect("target").into_os_string().into_vec())
    } else if file_type.is_file() {
        let digest = (meta.size() <= 1 << 30).then(|| {
            let mut file = fs::File::open(at).expect("open");
            hash_content(&mut file).expect("read")
        });
        RecordKind::File { size: meta.size(), digest }
    } else if file_type.is_char_device() {
        RecordKind::Char(device.0, device.1)
    } else if file_type.is_block_device() {
        RecordKind::Block(device.0, device.1)
    } else if file_type.is_fifo() {
        RecordKind::Fifo
    } else {
        assert!(file_type.is_socket());
        RecordKind::Socket
    };
    Record {
        kind,
        mode: (meta.mode() & 0o7777) as u16,
        uid: meta.uid(),
        gid: meta.gid(),
        mtime: (meta.mtime(), meta.mtime_nsec() as u32),
        nlink: meta.nlink() as u32,
        xattrs: xattrs(at, path, want),
        link_group: 0,
    }
}

/// The attributes that are listed, and those that should be, each asked for by name.
fn xattrs(at: &Path, path: &[u8], want: &Snapshot) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut list = vec![0; 1 << 16];
    let len = rustix::fs::llistxattr(at, &mut list).expect("list attributes");
    let listed: BTreeSet<&[u8]> = list[..len].split(|b| *b == 0).filter(|name| !name.is_empty()).collect();
    let wanted = want.records.get(path).map(|record| record.xattrs.keys()).into_iter().flatten();
    let names: BTreeSet<&[u8]> = listed.iter().copied().chain(wanted.map(|name| &name[..])).collect();
    let mut found = BTreeMap::new();
    let mut value = vec![0; 1 << 16];
    for name in names {
        match rustix::fs::lgetxattr(at, OsStr::from_bytes(name), &mut value) {
            Ok(len) => {
                assert!(listed.contains(name), "an attribute is there but not listed");
                found.insert(name.to_vec(), value[..len].to_vec());
            }
            Err(Errno::NODATA) => {}
            Err(e) => panic!("{}: {}: {e}", path.escape_ascii(), name.escape_ascii()),
        }
    }
    for absent in ["user.absent", "trusted.absent", "security.absent", "system.posix_acl_access"] {
        if !found.contains_key(absent.as_bytes()) {
            let error = rustix::fs::lgetxattr(at, absent, &mut value).expect_err("absent");
            assert!(matches!(error, Errno::NODATA | Errno::OPNOTSUPP), "{absent}: {error}");
        }
    }
    found
}

/// As the kernel shows it: attributes of users on files and directories only, whatever the file system has.
fn as_kernel_shows(mut snapshot: Snapshot) -> Snapshot {
    for record in snapshot.records.values_mut() {
        if !matches!(record.kind, RecordKind::File { .. } | RecordKind::Dir) {
            record.xattrs.retain(|name, _| !name.starts_with(b"user."));
        }
    }
    snapshot
}

fn compare(test: &str, built: &Built) {
    for shape in [Shape::Kernel, Shape::Gvisor] {
        let Some(mounted) = Mounted::new(test, built, shape) else {
            return;
        };
        let want = as_kernel_shows(built.snapshot());
        let want = if shape == Shape::Gvisor { without_xattrs(want) } else { want };
        assert_same(&want, &walk(&mounted.root(), &want), test);
    }
}

#[test]
fn priv_random_trees() {
    for seed in 0..8 {
        let mut fixture = Fixture::new(seed * 77);
        fixture.grow(500);
        compare("priv_random_trees", &fixture.build());
    }
}

#[test]
fn priv_corners() {
    let mut fixture = Fixture::new(5);
    fixture.corners(100_000);
    assert!(fixture.tree.nlink(fixture.tree.lookup(Tree::ROOT, b"wide").expect("wide")) == 2);
    compare("priv_corners", &fixture.build());
}

#[test]
fn priv_holes_are_found() {
    let mut fixture = Fixture::new(5);
    fixture.corners(10);
    let built = fixture.build();
    let Some(mounted) = Mounted::new("priv_holes_are_found", &built, Shape::Kernel) else {
        return;
    };
    let seek = |name: &str, from| {
        let file = fs::File::open(mounted.root().join("content").join(name)).expect("open");
        rustix::fs::seek(&file, from)
    };
    assert_eq!(seek("hole-only", SeekFrom::Data(0)), Err(Errno::NXIO));
    assert_eq!(seek("hole-only", SeekFrom::Hole(5)), Ok(5));
    assert_eq!(seek("hole-only", SeekFrom::Hole(123_456)), Err(Errno::NXIO));
    assert_eq!(seek("hole-9t", SeekFrom::Data(1 << 42)), Err(Errno::NXIO));
    assert_eq!(seek("plain1000000", SeekFrom::Hole(0)), Ok(1_000_000));
    assert_eq!(seek("holes-many", SeekFrom::Data(0)), Ok(16 * 4096));
    assert_eq!(seek("holes-many", SeekFrom::Hole(20 * 4096)), Ok(32 * 4096));
    assert_eq!(seek("holes-many", SeekFrom::Data(32 * 4096)), Ok(48 * 4096));
    assert_eq!(seek("holes-odd", SeekFrom::Data(0)), Ok(3 * 4096));
    assert_eq!(seek("holes-odd", SeekFrom::Hole(3 * 4096)), Ok(4 * 4096));
    assert_eq!(seek("holes-odd", SeekFrom::Data(5 * 4096)), Ok(901 * 4096));
    // Of a file this long, only holes of a 16,384th of it and more.
    let found = seek("sparse-3t", SeekFrom::Data(0)).expect("data");
    assert!(found <= 1 << 40 && found + (256 << 20) > 1 << 40, "{found}");
    let found = seek("sparse-3t", SeekFrom::Hole(1 << 40)).expect("hole");
    assert!(found > 1 << 40 && found <= (1 << 40) + (512 << 20), "{found}");

    // Bytes around the borders, beyond 2 TiB too.
    use std::os::unix::fs::FileExt;
    let read = |name: &str, at: u64, len: usize| {
        let file = fs::File::open(mounted.root().join("content").join(name)).expect("open");
        let mut buf = vec![0xAA; len];
        let got = file.read_at(&mut buf, at).expect("read");
        buf.truncate(got);
        buf
    };
    let plain = read("sparse-5g", 0, 4096);
    let end = read("sparse-3t", (3 << 40) - 8192, 10_000);
    assert_eq!(end.len(), 8192 - 5);
    assert_eq!(&end[..4096], &plain[..]);
    assert_eq!(read("sparse-3t", 1 << 40, 4096), plain);
    assert!(read("sparse-3t", (1 << 40) - 4096, 4096).iter().all(|b| *b == 0));
    assert!(read("sparse-3t", (1 << 40) + 8192, 4096).iter().all(|b| *b == 0));
    assert!(read("sparse-3t", 2 << 40, 100_000).iter().all(|b| *b == 0));
    assert_eq!(read("sparse-5g", (5 << 30) - 4096, 5000), plain);
    assert!(read("hole-9t", 5 << 40, 4096).iter().all(|b| *b == 0));
}
