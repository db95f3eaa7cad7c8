//! The FUSE front ends against the running kernel.

mod fuse_support;

use fuse_support::*;
use lazyroot::front::fuse::decide::Readdirplus;
use lazyroot::front::fuse::wire::{init, opcode};
use lazyroot::front::{Attr, BlockFiles, BlockFilesOptions, Context, ReadPath, Session, TreeOptions, TreeSession};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RawDir, SeekFrom};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{DirEntryExt, FileExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

const SOON: Duration = Duration::from_secs(20);

fn serve(tree: Arc<MemTree>) -> (Session, PathBuf) {
    serve_with(tree, &TreeOptions::default(), Context::default())
}

fn serve_with(tree: Arc<MemTree>, options: &TreeOptions, context: Context) -> (Session, PathBuf) {
    let session = TreeSession::start(tree, options, context).unwrap();
    // Of the process, not of `self`: children use it too.
    let number = session.mount().unwrap().as_raw_fd();
    (session, PathBuf::from(format!("/proc/{}/fd/{number}", std::process::id())))
}

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> Errno {
    Errno::from_io_error(&result.unwrap_err()).unwrap()
}

#[test]
fn priv_attributes_and_a_walk() {
    if skip("priv_attributes_and_a_walk") {
        return;
    }
    let mut tree = MemTree::new();
    let d = tree.add(0, "d", DIR | 0o2751);
    tree.at(d).attr.uid = 4_000_000_000;
    tree.at(d).attr.gid = 70_000;
    let f = tree.file(d, "f", b"hello".to_vec());
    tree.link(d, "hard", f);
    tree.at(f).attr =
        Attr { nlink: 2, mtime_sec: -86_400, mtime_nsec: 123_456_789, mode: FILE | 0o4711, ..tree.at(f).attr };
    let l = tree.add(0, "l", LINK | 0o777);
    tree.at(l).target = b"d/f".to_vec();
    tree.at(l).attr.size = 3;
    let c = tree.add(0, "c", CHAR | 0o600);
    tree.at(c).attr.rdev = (0xabc, 0x12345);
    tree.add(0, "b", BLOCK | 0o600);
    tree.add(0, "p", FIFO | 0o600);
    tree.add(0, "s", SOCKET | 0o600);
    let (session, root) = serve(tree.finish());

    let meta = root.join("d").symlink_metadata().unwrap();
    assert_eq!((meta.mode(), meta.uid(), meta.gid(), meta.nlink()), (DIR | 0o2751, 4_000_000_000, 70_000, 2));
    let meta = root.join("d/f").symlink_metadata().unwrap();
    assert_eq!((meta.mtime(), meta.mtime_nsec(), meta.size(), meta.blocks()), (-86_400, 123_456_789, 5, 8));
    assert_eq!((meta.mode(), meta.nlink(), meta.blksize()), (FILE | 0o4711, 2, 4096));
    assert_eq!((meta.atime(), meta.ctime()), (-86_400, -86_400));
    assert_eq!(meta.ino(), root.join("d/hard").symlink_metadata().unwrap().ino());
    assert_eq!(meta.ino(), u64::from(f) + 1);
    assert_eq!(root.join("l").read_link().unwrap(), Path::new("d/f"));
    assert_eq!(std::fs::read(root.join("l")).unwrap(), b"hello");
    let meta = root.join("c").symlink_metadata().unwrap();
    assert_eq!((rustix::fs::major(meta.rdev()), rustix::fs::minor(meta.rdev())), (0xabc, 0x12345));

    let mut names: Vec<_> = std::fs::read_dir(&root)
        .unwrap()
        .map(|e| {
            let e = e.unwrap();
            let t = e.file_type().unwrap();
            let kind = match () {
                () if t.is_dir() => "dir",
                () if t.is_symlink() => "link",
                () if t.is_char_device() => "char",
                () if t.is_block_device() => "block",
                () if t.is_fifo() => "fifo",
                () if t.is_socket() => "socket",
                () => "file",
            };
            assert_eq!(e.ino(), e.metadata().unwrap().ino());
            (e.file_name().into_string().unwrap(), kind)
        })
        .collect();
    names.sort();
    let want = [("b", "block"), ("c", "char"), ("d", "dir"), ("l", "link"), ("p", "fifo"), ("s", "socket")];
    assert_eq!(names, want.map(|(n, k)| (n.to_owned(), k)));
    assert_eq!(errno(root.join("d/none").symlink_metadata()), Errno::NOENT);
    assert_eq!(errno(root.join("d/f/x").symlink_metadata()), Errno::NOTDIR);

    // Names that are not there, and all that was seen, are not asked for twice.
    let before = session.counters().all_requests();
    for _ in 0..10 {
        let _ = root.join("d/none").symlink_metadata();
        root.join("d/f").symlink_metadata().unwrap();
        root.join("l").read_link().unwrap();
        assert_eq!(std::fs::read(root.join("d/f")).unwrap(), b"hello");
        assert_eq!(std::fs::read_dir(&root).unwrap().count(), 6);
    }
    assert_eq!(session.counters().all_requests(), before);
    assert_eq!(session.counters().refused(), 0);
    let flags = session.init_record().map(|r| lazyroot::front::fuse::decide::taken(&r.answer)).unwrap();
    assert_ne!(flags & init::NO_OPEN_SUPPORT, 0);
    assert_eq!(flags & init::PASSTHROUGH, 0);
}

#[test]
fn priv_dot_dot_of_directories() {
    if skip("priv_dot_dot_of_directories") {
        return;
    }
    let mut tree = MemTree::new();
    let a = tree.add(0, "a", DIR | 0o755);
    let b = tree.add(a, "b", DIR | 0o755);
    tree.file(b, "f", vec![1]);
    for mode in [Readdirplus::Never, Readdirplus::Auto, Readdirplus::Always] {
        let mut again = MemTree::new();
        let a = again.add(0, "a", DIR | 0o755);
        let b = again.add(a, "b", DIR | 0o755);
        again.file(b, "f", vec![1]);
        let options = TreeOptions { readdirplus: mode, ..Default::default() };
        let (_session, root) = serve_with(again.finish(), &options, Context::default());
        let inos = |dir: &Path| -> Vec<(String, u64)> {
            let fd = File::open(dir).unwrap();
            let mut buf = [MaybeUninit::uninit(); 4096];
            let mut raw = RawDir::new(&fd, &mut buf);
            let mut out = Vec::new();
            while let Some(e) = raw.next() {
                let e = e.unwrap();
                out.push((e.file_name().to_str().unwrap().to_owned(), e.ino()));
            }
            out
        };
        let want = [(".", u64::from(b) + 1), ("..", u64::from(a) + 1), ("f", u64::from(b) + 2)];
        assert_eq!(inos(&root.join("a/b")), want.map(|(n, i)| (n.to_owned(), i)));
        let want = [(".", 1), ("..", 1), ("a", u64::from(a) + 1)];
        assert_eq!(inos(&root), want.map(|(n, i)| (n.to_owned(), i)));
    }
}

#[test]
fn priv_extended_attributes() {
    if skip("priv_extended_attributes") {
        return;
    }
    let mut tree = MemTree::new();
    let f = tree.file(0, "f", vec![]);
    let capability = vec![1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    tree.at(f).xattrs = vec![
        (b"user.empty".to_vec(), vec![]),
        (b"user.big".to_vec(), pattern(60_000, 1)),
        (b"trusted.overlay.opaque".to_vec(), b"y".to_vec()),
        (b"security.capability".to_vec(), capability.clone()),
    ];
    tree.file(0, "plain", vec![]);
    let (_session, root) = serve(tree.finish());
    let get = |name: &str| {
        let mut buf = vec![0u8; 65_536];
        let n = rustix::fs::lgetxattr(root.join("f"), name, &mut buf[..])?;
        buf.truncate(n);
        Ok::<_, Errno>(buf)
    };
    assert_eq!(get("user.empty"), Ok(vec![]));
    assert_eq!(get("user.big"), Ok(pattern(60_000, 1)));
    assert_eq!(get("trusted.overlay.opaque"), Ok(b"y".to_vec()));
    assert_eq!(get("security.capability"), Ok(capability));
    assert_eq!(get("user.none"), Err(Errno::NODATA));
    let mut small = [0u8; 10];
    assert_eq!(rustix::fs::lgetxattr(root.join("f"), "user.big", &mut small[..]), Err(Errno::RANGE));
    assert_eq!(rustix::fs::lgetxattr_query(root.join("f"), "user.big"), Ok(60_000));
    let mut list = [0u8; 256];
    let n = rustix::fs::llistxattr(root.join("f"), &mut list[..]).unwrap();
    let names: Vec<_> = list[..n].split(|b| *b == 0).filter(|n| !n.is_empty()).collect();
    assert_eq!(names, [&b"user.empty"[..], b"user.big", b"trusted.overlay.opaque", b"security.capability"]);
    assert_eq!(rustix::fs::llistxattr(root.join("plain"), &mut list[..]), Ok(0));
}

#[test]
fn priv_acls_decide_when_the_image_has_them() {
    if skip("priv_acls_decide_when_the_image_has_them") {
        return;
    }
    let mut tree = MemTree::new();
    let f = tree.file(0, "f", b"secret".to_vec());
    tree.at(f).attr.mode = FILE | 0o640;
    // user::rw- user:65534:r-- group::--- mask::r-- other::---
    let mut acl = 2u32.to_le_bytes().to_vec();
    for (tag, perm, id) in
        [(1u16, 6u16, u32::MAX), (2, 4, 65_534), (4, 0, u32::MAX), (16, 4, u32::MAX), (32, 0, u32::MAX)]
    {
        acl.extend([&tag.to_le_bytes()[..], &perm.to_le_bytes(), &id.to_le_bytes()].concat());
    }
    tree.at(f).xattrs = vec![(b"system.posix_acl_access".to_vec(), acl)];
    let (session, _) =
        serve_with(tree.finish(), &TreeOptions { posix_acl: true, ..Default::default() }, Context::default());
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let place = dir.path().to_owned();
    within(SOON, "cat as others", move || {
        sys::mount::enter_own_namespace().unwrap();
        sys::mount::attach(session.mount().unwrap(), sys::mount::open_target(&place).unwrap().as_fd()).unwrap();
        let cat = |id: u32| {
            use std::os::unix::process::CommandExt;
            let out = Command::new("cat").arg(place.join("f")).uid(id).gid(id).stderr(Stdio::null()).output().unwrap();
            out.stdout
        };
        assert_eq!(cat(65_534), b"secret", "the ACL lets them in");
        assert_eq!(cat(65_533), b"", "and nobody else");
        sys::mount::unmount(&place, sys::mount::UnmountFlags::DETACH).unwrap();
    });
}

#[test]
fn priv_a_directory_of_a_hundred_thousand_names_is_seekable() {
    if skip("priv_a_directory_of_a_hundred_thousand_names_is_seekable") {
        return;
    }
    const COUNT: usize = 100_000;
    let mut tree = MemTree::new();
    let d = tree.add(0, "big", DIR | 0o755);
    for i in 0..COUNT {
        tree.add(d, &format!("n{i:06}"), FILE | 0o644);
    }
    let tree = tree.finish();
    for mode in [Readdirplus::Never, Readdirplus::Auto, Readdirplus::Always] {
        let options = TreeOptions { readdirplus: mode, ..Default::default() };
        let (session, root) = serve_with(Arc::clone(&tree), &options, Context::default());
        let fd = File::open(root.join("big")).unwrap();
        // Twice: from us, then from the kernel's cache.
        for _ in 0..2 {
            rustix::fs::seek(&fd, SeekFrom::Start(0)).unwrap();
            let mut buf = vec![MaybeUninit::uninit(); 32 << 10];
            let mut raw = RawDir::new(&fd, &mut buf);
            let mut places = Vec::new();
            let mut count = 0;
            while let Some(e) = raw.next() {
                let e = e.unwrap();
                if count >= 2 {
                    assert_eq!(e.file_name().to_bytes(), format!("n{:06}", count - 2).as_bytes());
                }
                if count % 9973 == 1 {
                    places.push((count + 1, e.next_entry_cookie()));
                }
                count += 1;
            }
            assert_eq!(count, COUNT + 2);
            for (at, cookie) in places.into_iter().rev() {
                rustix::fs::seek(&fd, SeekFrom::Start(cookie)).unwrap();
                let mut raw = RawDir::new(&fd, &mut buf);
                let e = raw.next().unwrap().unwrap();
                assert_eq!(e.file_name().to_bytes(), format!("n{:06}", at - 2).as_bytes());
            }
        }
        for i in (0..COUNT).step_by(997) {
            let meta = root.join(format!("big/n{i:06}")).symlink_metadata().unwrap();
            assert_eq!(meta.ino(), i as u64 + 3);
        }
        assert_eq!(session.counters().refused(), 0);
    }
}

/// A file on the host with extents of data and holes between them.
fn sparse() -> (Arc<File>, Vec<(u64, u64)>, u64) {
    let file = tempfile::tempfile().unwrap();
    let extents = vec![(0, 4096), (1 << 20, 300 << 10), (3 << 20, (2 << 20) + 123)];
    let mut size = 0;
    for (i, (at, len)) in extents.iter().enumerate() {
        file.write_all_at(&pattern(*len as usize, i as u64), *at).unwrap();
        size = at + len;
    }
    (Arc::new(file), extents, size)
}

fn sparse_tree() -> (Arc<MemTree>, Arc<File>, u64) {
    let (file, extents, size) = sparse();
    let mut tree = MemTree::new();
    let f = tree.add(0, "sparse", FILE | 0o644);
    tree.at(f).attr.size = size;
    tree.at(f).bytes = Some(Bytes::Host { file: Arc::clone(&file), extents });
    tree.file(0, "memory", pattern((3 << 20) + 5, 9));
    tree.file(0, "empty", vec![]);
    (tree.finish(), file, size)
}

#[test]
fn priv_holes_are_found() {
    if skip("priv_holes_are_found") {
        return;
    }
    let (tree, _, size) = sparse_tree();
    let (_session, root) = serve(tree);
    let f = File::open(root.join("sparse")).unwrap();
    assert_eq!(sys::file::seek_hole(&f, 0).unwrap(), 4096);
    assert_eq!(sys::file::seek_data(&f, 4096).unwrap(), Some(1 << 20));
    assert_eq!(sys::file::seek_hole(&f, 1 << 20).unwrap(), (1 << 20) + (300 << 10));
    assert_eq!(sys::file::seek_data(&f, 2 << 20).unwrap(), Some(3 << 20));
    assert_eq!(sys::file::seek_hole(&f, 3 << 20).unwrap(), size);
    assert_eq!(rustix::fs::seek(&f, SeekFrom::Data(size)), Err(Errno::NXIO));
    let m = File::open(root.join("memory")).unwrap();
    assert_eq!(sys::file::seek_hole(&m, 0).unwrap(), (3 << 20) + 5);
}

#[test]
fn priv_every_way_of_reading_gives_the_same_bytes() {
    if skip("priv_every_way_of_reading_gives_the_same_bytes") {
        return;
    }
    for read_path in [ReadPath::Copy, ReadPath::Uncached, ReadPath::Splice] {
        let (tree, host, size) = sparse_tree();
        let mut want = vec![0; size as usize];
        host.read_exact_at(&mut want, 0).unwrap();
        let memory = pattern((3 << 20) + 5, 9);
        let options = TreeOptions { read_ahead_kb: Some(1024), ..Default::default() };
        let (session, root) = serve_with(tree, &options, Context { read_path, ..Default::default() });

        let direct = OpenOptions::new().read(true).custom_flags(OFlags::DIRECT.bits() as i32).open(root.join("sparse"));
        let direct = direct.unwrap();
        for (at, len) in
            [(0u64, 4096usize), (4096, 8192), (1 << 20, 1 << 20), (5 << 20, 4096), (512, 512), (0, 6 << 20)]
        {
            let mut buf = vec![0u8; len];
            let n = direct.read_at(&mut buf, at).unwrap();
            let end = (at as usize + len).min(want.len());
            assert_eq!(buf[..n], want[at as usize..end], "direct {at} {len}");
        }
        let f = File::open(root.join("sparse")).unwrap();
        for (at, len) in [(4090u64, 20usize), ((1 << 20) - 1, 3), (size - 5, 100), (size, 10), (size + 4096, 10)] {
            let mut buf = vec![0u8; len];
            let n = f.read_at(&mut buf, at).unwrap();
            let from = (at as usize).min(want.len());
            assert_eq!(buf[..n], want[from..(from + len).min(want.len())], "{at} {len}");
        }
        assert!(std::fs::read(root.join("sparse")).unwrap() == want);
        assert!(sys::Map::open(&root.join("sparse")).unwrap().as_slice() == want);
        assert!(sys::Map::open(&root.join("memory")).unwrap().as_slice() == memory);
        assert!(std::fs::read(root.join("memory")).unwrap() == memory);
        assert_eq!(std::fs::read(root.join("empty")).unwrap(), b"");
        assert_eq!(session.counters().refused(), 0, "{read_path:?}");
        assert!(session.counters().read_bytes() >= size);
        let reads = session.counters().requests(opcode::READ);
        assert!(std::fs::read(root.join("sparse")).unwrap() == want);
        assert_eq!(session.counters().requests(opcode::READ), reads, "pages stay");
    }
}

#[test]
fn priv_nothing_can_be_changed() {
    if skip("priv_nothing_can_be_changed") {
        return;
    }
    let mut tree = MemTree::new();
    tree.file(0, "f", b"x".to_vec());
    tree.add(0, "d", DIR | 0o755);
    let (_session, root) = serve(tree.finish());
    let f = root.join("f");
    assert_eq!(errno(OpenOptions::new().write(true).open(&f)), Errno::ROFS);
    assert_eq!(errno(File::create(root.join("new"))), Errno::ROFS);
    assert_eq!(errno(std::fs::remove_file(&f)), Errno::ROFS);
    assert_eq!(errno(std::fs::remove_dir(root.join("d"))), Errno::ROFS);
    assert_eq!(errno(std::fs::create_dir(root.join("e"))), Errno::ROFS);
    assert_eq!(errno(std::fs::rename(&f, root.join("g"))), Errno::ROFS);
    assert_eq!(errno(std::fs::set_permissions(&f, std::fs::Permissions::from_mode(0o600))), Errno::ROFS);
    assert_eq!(errno(std::os::unix::fs::symlink("x", root.join("y"))), Errno::ROFS);
    assert_eq!(rustix::fs::lsetxattr(&f, "user.x", b"", rustix::fs::XattrFlags::empty()), Err(Errno::ROFS),);
}

#[test]
fn priv_statfs_and_handles() {
    if skip("priv_statfs_and_handles") {
        return;
    }
    let mut tree = MemTree::new();
    tree.file(0, "f", b"x".to_vec());
    let options = TreeOptions { inodes: 1234, bytes: 5 << 20, ..Default::default() };
    let (_session, root) = serve_with(tree.finish(), &options, Context::default());
    let st = rustix::fs::statfs(&root).unwrap();
    assert_eq!((st.f_files, st.f_blocks, st.f_bsize, st.f_namelen), (1234, 1280, 4096, 255));
    let info = sys::mountinfo::of_self().unwrap();
    assert!(info.iter().all(|e| e.fstype != "fuse.lazyroot" || e.mount_point != root), "attached nowhere");
    let birth = rustix::fs::statx(CWD, root.join("f"), AtFlags::empty(), rustix::fs::StatxFlags::ALL).unwrap();
    assert_eq!(birth.stx_size, 1);
}

/// A tree with a gated file of `len` bytes and other things.
fn gated(len: usize) -> (Arc<MemTree>, Arc<Gate>) {
    let mut tree = MemTree::new();
    let gate = Arc::new(Gate::default());
    let f = tree.file(0, "slow", pattern(len, 3));
    tree.at(f).gate = Some(Arc::clone(&gate));
    let d = tree.add(0, "d", DIR | 0o755);
    for i in 0..500 {
        tree.file(d, &format!("f{i}"), pattern(1000, i));
    }
    (tree.finish(), gate)
}

#[test]
fn priv_a_silent_source_holds_nobody_else_up() {
    if skip("priv_a_silent_source_holds_nobody_else_up") {
        return;
    }
    const READERS: usize = 1000;
    let (tree, gate) = gated(READERS * 4096);
    let options = TreeOptions { read_ahead_kb: Some(0), ..Default::default() };
    let (session, root) = serve_with(tree, &options, Context::default());
    let slow = Arc::new(File::open(root.join("slow")).unwrap());
    let readers: Vec<_> = (0..READERS)
        .map(|i| {
            let slow = Arc::clone(&slow);
            let builder = std::thread::Builder::new().stack_size(64 << 10);
            builder
                .spawn(move || {
                    let mut buf = vec![0u8; 4096];
                    slow.read_exact_at(&mut buf, i as u64 * 4096).unwrap();
                    buf
                })
                .unwrap()
        })
        .collect();
    gate.await_waiting(READERS);
    assert_eq!(session.parked_now(), READERS);
    let there = root.clone();
    within(SOON, "reading everything else", move || {
        for e in std::fs::read_dir(there.join("d")).unwrap() {
            assert_eq!(std::fs::read(e.unwrap().path()).unwrap().len(), 1000);
        }
    });
    assert_eq!(session.parked_now(), READERS);
    gate.open();
    let want = pattern(READERS * 4096, 3);
    for (i, reader) in readers.into_iter().enumerate() {
        assert!(reader.join().unwrap() == want[i * 4096..][..4096]);
    }
    assert_eq!((session.parked_now(), session.counters().parked()), (0, READERS as u64));
}

#[test]
fn priv_a_killed_reader_goes_at_once() {
    if skip("priv_a_killed_reader_goes_at_once") {
        return;
    }
    let (tree, gate) = gated(1 << 20);
    let (session, root) = serve(tree);
    let file = root.join("slow").into_os_string().into_string().unwrap();
    // Through the page cache, where the kernel gives the reader up by itself, and directly, where it asks us to.
    for (i, flags) in ["", "iflag=direct"].into_iter().enumerate() {
        let mut command = Command::new("dd");
        command.args([&format!("if={file}"), "of=/dev/null", "bs=64k"]).stderr(Stdio::null());
        if !flags.is_empty() {
            command.arg(flags);
        }
        let mut child = command.spawn().unwrap();
        gate.await_waiting(i + 1);
        let began = Instant::now();
        child.kill().unwrap();
        let status = within(SOON, "a killed reader", move || child.wait().unwrap());
        assert_eq!(status.signal(), Some(9));
        assert!(began.elapsed() < SOON);
    }
    until("only the page cache's read is left", || session.parked_now() <= 1);
    gate.open();
    assert!(within(SOON, "a read later", move || std::fs::read(root.join("slow")).unwrap()) == pattern(1 << 20, 3));
}

#[test]
fn priv_a_signal_that_does_not_kill_does_not_fail_a_read() {
    if skip("priv_a_signal_that_does_not_kill_does_not_fail_a_read") {
        return;
    }
    let (tree, gate) = gated(8192);
    let (session, root) = serve(tree);
    // The shell handles USR1; its own read of the file is interrupted by it.
    let script = "import os,signal,sys\nsignal.signal(signal.SIGUSR1, lambda *a: None)\n\
                  fd=os.open(sys.argv[1], os.O_RDONLY|os.O_DIRECT)\nimport mmap\nm=mmap.mmap(-1,8192)\n\
                  n=os.preadv(fd,[m],0)\nsys.stdout.write(str(n))\n";
    let child = Command::new("python3").args(["-c", script]).arg(root.join("slow")).stdout(Stdio::piped()).spawn();
    let Ok(child) = child else {
        println!("SKIP priv_a_signal_that_does_not_kill_does_not_fail_a_read: no python3");
        return;
    };
    gate.await_waiting(1);
    let pid = sys::proc::PidFd::open(child.id() as i32).unwrap();
    let before = session.counters().requests(opcode::INTERRUPT);
    pid.signal(rustix::process::Signal::USR1).unwrap();
    until("the interruption came", || session.counters().requests(opcode::INTERRUPT) > before);
    assert_eq!(session.parked_now(), 1);
    gate.open();
    let out = within(SOON, "the reader", move || child.wait_with_output().unwrap());
    assert_eq!(out.stdout, b"8192");
}

#[test]
fn priv_a_fetch_that_fails_is_an_error_and_logged() {
    if skip("priv_a_fetch_that_fails_is_an_error_and_logged") {
        return;
    }
    let (tree, gate) = gated(8192);
    let log = Arc::new(KeptLog::default());
    let (_session, root) =
        serve_with(tree, &TreeOptions::default(), Context { log: log.clone(), ..Default::default() });
    let there = root.join("slow");
    let reader = start(move || errno(std::fs::read(there)));
    gate.await_waiting(1);
    // Each retry of the kernel's, single pages after the readahead, fails too.
    let failing = Arc::clone(&gate);
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let fail = std::thread::spawn(move || {
        while stopped.try_recv().is_err() {
            failing.fail();
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    assert_eq!(reader.wait(SOON, "a failing read"), Errno::IO);
    stop.send(()).unwrap();
    fail.join().unwrap();
    assert!(
        log.0.lock().unwrap().iter().any(|l| l.starts_with("Error lazyroot: reading 8192 bytes at 0: ")),
        "{:?}",
        log.0
    );
    // Not for good: what failed is not remembered.
    gate.open();
    assert!(std::fs::read(root.join("slow")).unwrap() == pattern(8192, 3));
}

#[test]
fn priv_bytes_evicted_before_the_answer_are_fetched_again_but_not_for_ever() {
    if skip("priv_bytes_evicted_before_the_answer_are_fetched_again_but_not_for_ever") {
        return;
    }
    let (tree, gate) = gated(4096);
    let (_session, root) = serve(tree);
    gate.open();
    gate.evicted.store(4, Ordering::Relaxed);
    assert!(std::fs::read(root.join("slow")).unwrap() == pattern(4096, 3));
    assert_eq!(gate.fetches(), 4);
    let (tree, gate) = gated(4096);
    let (_session, root) = serve(tree);
    gate.open();
    gate.evicted.store(usize::MAX, Ordering::Relaxed);
    let there = root.join("slow");
    assert_eq!(within(SOON, "an endless eviction", move || errno(std::fs::read(there))), Errno::IO);
}

#[test]
fn priv_a_session_ends_while_reads_are_parked() {
    if skip("priv_a_session_ends_while_reads_are_parked") {
        return;
    }
    for attached in [false, true] {
        let (tree, gate) = gated(1 << 20);
        let (session, root) = serve(tree);
        let slow = File::open(root.join("slow")).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let place = dir.path().to_owned();
        let reader = start(move || {
            let mut buf = vec![0u8; 4096];
            errno(slow.read_at(&mut buf, 0))
        });
        gate.await_waiting(1);
        within(SOON, "ending the session", move || {
            if attached {
                sys::mount::enter_own_namespace().unwrap();
                sys::mount::attach(session.mount().unwrap(), sys::mount::open_target(&place).unwrap().as_fd()).unwrap();
                assert!(place.join("d/f1").exists());
            }
            session.stop();
            if attached {
                assert_eq!(errno(place.join("d/new").symlink_metadata()), Errno::NOTCONN);
                // The reader may not have closed its file yet.
                sys::mount::unmount(&place, sys::mount::UnmountFlags::DETACH).unwrap();
            }
        });
        let got = reader.wait(SOON, "the parked reader");
        assert!([Errno::IO, Errno::NOTCONN, Errno::CONNABORTED].contains(&got), "{got:?}");
        // The fetch may end at any time later.
        gate.open();
    }
}

#[test]
fn priv_an_unmounted_session_notices() {
    if skip("priv_an_unmounted_session_notices") {
        return;
    }
    let (tree, gate) = gated(1 << 20);
    let (mut session, root) = serve(tree);
    let slow = File::open(root.join("slow")).unwrap();
    let reader = start(move || {
        let mut buf = vec![0u8; 4096];
        slow.read_exact_at(&mut buf, 0).map(|()| buf)
    });
    gate.await_waiting(1);
    // The last mount goes while a file is open and a read is parked: the session goes on until they are done.
    drop(session.take_mount());
    assert!(!session.wait(Some(Duration::from_millis(50))));
    gate.open();
    assert!(reader.wait(SOON, "the parked reader").unwrap() == pattern(4096, 3));
    assert!(session.wait(Some(SOON)), "unmounted");
    assert!(!session.is_alive());
    within(SOON, "stopping what has ended", move || session.stop());
}

#[test]
fn priv_an_aborted_session_ends() {
    if skip("priv_an_aborted_session_ends") {
        return;
    }
    let (tree, gate) = gated(1 << 20);
    let (session, root) = serve(tree);
    let id = sys::mount::ids(session.mount().unwrap()).unwrap().dev_minor;
    let fs = sys::mount::FsContext::open("fusectl").unwrap();
    fs.create().unwrap();
    let control = fs.mount(sys::mount::MountAttrFlags::empty()).unwrap();
    let slow = File::open(root.join("slow")).unwrap();
    let reader = start(move || {
        let mut buf = vec![0u8; 4096];
        errno(slow.read_at(&mut buf, 0))
    });
    gate.await_waiting(1);
    let abort = rustix::fs::openat(&control, format!("{id}/abort"), OFlags::WRONLY, Mode::empty()).unwrap();
    rustix::io::write(&abort, b"1").unwrap();
    let got = reader.wait(SOON, "the parked reader");
    assert!([Errno::IO, Errno::NOTCONN, Errno::CONNABORTED].contains(&got), "{got:?}");
    assert!(session.wait(Some(SOON)), "aborted");
    gate.open();
    within(SOON, "stopping what was aborted", move || session.stop());
}

#[test]
fn priv_owners_are_shifted_by_an_id_mapped_mount() {
    if skip("priv_owners_are_shifted_by_an_id_mapped_mount") {
        return;
    }
    let mut tree = MemTree::new();
    let f = tree.file(0, "f", b"x".to_vec());
    tree.at(f).attr.uid = 7;
    tree.at(f).attr.gid = 8;
    let (session, root) = serve(tree.finish());
    let flags = session.init_record().map(|r| lazyroot::front::fuse::decide::taken(&r.answer)).unwrap();
    let mut child = Command::new("unshare").args(["-U", "sleep", "60"]).spawn().unwrap();
    let proc = PathBuf::from(format!("/proc/{}", child.id()));
    let own = std::fs::read_link("/proc/self/ns/user").unwrap();
    until("the child has a user namespace", || std::fs::read_link(proc.join("ns/user")).is_ok_and(|ns| ns != own));
    std::fs::write(proc.join("uid_map"), "0 100000 65536").unwrap();
    std::fs::write(proc.join("gid_map"), "0 200000 65536").unwrap();
    let ns = File::open(proc.join("ns/user")).unwrap();
    let copy = sys::mount::clone_tree(session.mount().unwrap(), "", false).unwrap();
    let change = sys::mount::SetAttrs { idmap: Some(ns.as_fd()), ..Default::default() };
    let mapped = sys::mount::set_attrs(copy.as_fd(), change);
    child.kill().unwrap();
    child.wait().unwrap();
    if flags & init::ALLOW_IDMAP == 0 {
        println!("SKIP priv_owners_are_shifted_by_an_id_mapped_mount: this kernel's FUSE cannot");
        return;
    }
    mapped.unwrap();
    let meta = proc_path(&copy).join("f").symlink_metadata().unwrap();
    assert_eq!((meta.uid(), meta.gid()), (100_007, 200_008));
    let meta = root.join("f").symlink_metadata().unwrap();
    assert_eq!((meta.uid(), meta.gid()), (7, 8), "the mount itself is as before");
}

#[test]
fn priv_through_fusermount() {
    if skip("priv_through_fusermount") {
        return;
    }
    if Command::new("fusermount3").arg("-V").output().is_err() {
        println!("SKIP priv_through_fusermount: no fusermount3");
        return;
    }
    let me = std::env::current_exe().unwrap();
    for user in [0, 65_534] {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        std::os::unix::fs::chown(dir.path(), Some(user), Some(user)).unwrap();
        // The program where the user can read it, and the device as udev would have made it.
        let copy = tempfile::tempdir_in("/tmp").unwrap();
        std::fs::set_permissions(copy.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let program = copy.path().join("test");
        std::fs::copy(&me, &program).unwrap();
        let node = copy.path().join("fuse");
        let dev = rustix::fs::makedev(10, 229);
        rustix::fs::mknodat(CWD, &node, rustix::fs::FileType::CharacterDevice, Mode::from_raw_mode(0o666), dev)
            .unwrap();
        std::fs::set_permissions(&node, std::fs::Permissions::from_mode(0o666)).unwrap();
        let mut command = Command::new(&program);
        use std::os::unix::process::CommandExt;
        command.args(["--exact", "helper_mount_as_this_user", "--include-ignored", "--nocapture"]);
        command.env("FUSE_TEST_PLACE", dir.path()).uid(user).gid(user).current_dir("/").stdout(Stdio::piped());
        let place = dir.path().to_owned();
        let (out, left) = within(Duration::from_secs(60), "the helper", move || {
            sys::mount::enter_own_namespace().unwrap();
            sys::mount::bind(&node, Path::new("/dev/fuse"), false).unwrap();
            let out = command.output().unwrap();
            (out, sys::mountinfo::of_thread().unwrap().iter().any(|e| e.mount_point == place))
        });
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(
            out.status.success() && text.contains("helper did it"),
            "{text} {}",
            String::from_utf8_lossy(&out.stderr)
        );
        assert!(!left, "the mount stayed");
    }
}

/// Not a test by itself: runs as the user that the test above chose.
#[test]
#[ignore = "run by priv_through_fusermount"]
fn helper_mount_as_this_user() {
    let Some(place) = std::env::var_os("FUSE_TEST_PLACE") else { return };
    let place = PathBuf::from(place);
    let (tree, gate) = gated(1 << 20);
    let options = TreeOptions { name: "a,b\\c".to_owned(), ..Default::default() };
    let session = TreeSession::start_at(tree, &place, &options, Context::default()).unwrap();
    let entry = sys::mountinfo::of_self().unwrap().into_iter().find(|e| e.mount_point == place).unwrap();
    assert_eq!((entry.fstype.as_str(), entry.source.to_str()), ("fuse.lazyroot", Some("a,b\\c")));
    assert!(entry.options.contains("nosuid") && entry.options.contains("nodev"), "{}", entry.options);
    assert_eq!(std::fs::read_dir(place.join("d")).unwrap().count(), 500);
    assert!(std::fs::read(place.join("d/f7")).unwrap() == pattern(1000, 7));
    let slow = File::open(place.join("slow")).unwrap();
    let reader = start(move || {
        let mut buf = vec![0u8; 4096];
        errno(slow.read_at(&mut buf, 0))
    });
    gate.await_waiting(1);
    within(SOON, "stopping", move || session.stop());
    reader.wait(SOON, "the parked reader");
    println!("helper did it");
}

/// Files by path.
type Contents = Vec<(String, Vec<u8>)>;

/// An EROFS image of a small tree, made by mkfs.erofs, in a file without a name; and what is in it.
fn erofs_image() -> Option<(File, Contents)> {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    let mut files = Vec::new();
    for d in 0..20 {
        let sub = source.join(format!("d{d}"));
        std::fs::create_dir_all(&sub).unwrap();
        for f in 0..20 {
            let bytes = pattern((d * 20 + f) * 997, (d * 20 + f) as u64);
            std::fs::write(sub.join(format!("f{f}")), &bytes).unwrap();
            files.push((format!("d{d}/f{f}"), bytes));
        }
    }
    let big = pattern(20 << 20, 77);
    std::fs::write(source.join("big"), &big).unwrap();
    files.push(("big".to_owned(), big));
    let image = dir.path().join("image");
    let made = Command::new("mkfs.erofs").arg(&image).arg(&source).stdout(Stdio::null()).stderr(Stdio::null()).status();
    if !made.is_ok_and(|s| s.success()) {
        println!("SKIP: mkfs.erofs does not work");
        return None;
    }
    Some((File::open(&image).unwrap(), files))
}

/// Mounts a block file as EROFS, attached nowhere.
fn mount_erofs(files: &BlockFiles, file: lazyroot::front::BlockFile) -> std::os::fd::OwnedFd {
    erofs_recipe(files, file).make_apart().unwrap()
}

fn erofs_recipe(files: &BlockFiles, file: lazyroot::front::BlockFile) -> sys::mount::Recipe {
    sys::mount::Recipe {
        fstype: "erofs".to_owned(),
        options: vec![("source".to_owned(), files.path(file).unwrap().to_str().map(str::to_owned))],
        attrs: sys::mount::MountAttrFlags::MOUNT_ATTR_RDONLY,
    }
}

fn proc_path(fd: impl AsFd) -> PathBuf {
    sys::mount::fd_path(fd.as_fd())
}

#[test]
fn priv_block_files_are_mounted_as_erofs() {
    if skip("priv_block_files_are_mounted_as_erofs") {
        return;
    }
    let Some((image, contents)) = erofs_image() else { return };
    let image = Arc::new(image);
    for read_path in [ReadPath::Copy, ReadPath::Uncached, ReadPath::Splice] {
        let gate = Arc::new(Gate::default());
        gate.open();
        let source = Arc::new(HostImage { file: Arc::clone(&image), len: image.metadata().unwrap().len(), gate });
        let files =
            BlockFiles::start(&BlockFilesOptions::default(), Context { read_path, ..Default::default() }).unwrap();
        assert!(files.is_empty());
        let one = files.add("one", source.clone()).unwrap();
        let two = files.add("two", source.clone()).unwrap();
        assert!(files.add("two", source.clone()).is_err());
        for bad in ["", ".", "..", "a/b", "a\0"] {
            assert!(files.add(bad, source.clone()).is_err());
        }
        let listed: Vec<_> = std::fs::read_dir(proc_path(files.mount().unwrap()))
            .unwrap()
            .map(|e| e.unwrap().file_name().into_string().unwrap())
            .collect();
        assert_eq!(listed, ["one", "two"]);
        let meta = files.path(one).unwrap().symlink_metadata().unwrap();
        assert_eq!((meta.mode(), meta.size(), meta.mtime()), (FILE | 0o400, source.len, 0));
        assert_eq!(proc_path(files.mount().unwrap()).metadata().unwrap().mode(), DIR | 0o700);
        let three = files.add("three", source.clone()).unwrap();
        assert!(files.path(three).unwrap().exists(), "added at run time");
        assert!(files.remove(three) && !files.remove(three));
        assert!(files.path(three).is_none());

        let mounted = mount_erofs(&files, one);
        let root = proc_path(&mounted);
        for (name, bytes) in &contents {
            assert!(std::fs::read(root.join(name)).unwrap() == *bytes, "{name}");
        }
        // Removed, it is served as long as it is mounted, and dropped afterwards.
        files.remove(one);
        assert!(files.remove(two));
        assert!(std::fs::read_dir(proc_path(files.mount().unwrap())).unwrap().next().is_none());
        files.invalidate(one, 0, 0).unwrap();
        rustix::fs::fadvise(File::open(root.join("big")).unwrap(), 0, None, rustix::fs::Advice::DontNeed).unwrap();
        assert!(std::fs::read(root.join("big")).unwrap() == contents.last().unwrap().1);
        assert_eq!(files.len(), 1);
        drop(mounted);
        until("the kernel forgot the file", || files.is_empty());
        until("the source is free", || Arc::strong_count(&source) == 1);
        assert_eq!(files.counters().refused(), 0);
        files.stop();
    }
}

#[test]
fn priv_a_mounted_block_file_may_wait_for_its_source() {
    if skip("priv_a_mounted_block_file_may_wait_for_its_source") {
        return;
    }
    let Some((image, contents)) = erofs_image() else { return };
    let gate = Arc::new(Gate::default());
    let len = image.metadata().unwrap().len();
    let files = BlockFiles::start(&BlockFilesOptions::default(), Context::default()).unwrap();
    let file = files.add("image", Arc::new(HostImage { file: Arc::new(image), len, gate: Arc::clone(&gate) })).unwrap();
    let files = Arc::new(files);
    let mounting = Arc::clone(&files);
    let mount = start(move || mount_erofs(&mounting, file));
    gate.await_waiting(1);
    std::thread::sleep(Duration::from_millis(20));
    assert!(mount.is_running());
    gate.open();
    let mounted = mount.wait(SOON, "the mount");
    let (name, bytes) = &contents[3];
    assert!(std::fs::read(proc_path(&mounted).join(name)).unwrap() == *bytes);
    // The daemon goes; what is not cached fails, and nothing hangs.
    let files = Arc::into_inner(files).unwrap();
    within(SOON, "stopping below a mounted image", move || files.stop());
    let got = errno(std::fs::read(proc_path(&mounted).join("big")));
    assert!([Errno::IO, Errno::NOTCONN].contains(&got), "{got:?}");
}

#[test]
fn priv_a_server_killed_while_it_mounts_its_own_file_is_gone() {
    if skip("priv_a_server_killed_while_it_mounts_its_own_file_is_gone") {
        return;
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "helper_mount_and_wait", "--include-ignored", "--nocapture"]);
    let mut child = command.env("FUSE_TEST_MOUNTING", "1").stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().unwrap()));
    assert!(lines.any(|line| line.is_ok_and(|line| line.contains("mounting now"))));
    child.kill().unwrap();
    let status = within(SOON, "a killed server", move || child.wait().unwrap());
    assert_eq!(status.signal(), Some(9));
}

/// Not a test by itself: mounts a file whose bytes never come.
#[test]
#[ignore = "run by priv_a_server_killed_while_it_mounts_its_own_file_is_gone"]
fn helper_mount_and_wait() {
    if std::env::var_os("FUSE_TEST_MOUNTING").is_none() {
        return;
    }
    let gate = Arc::new(Gate::default());
    let files = BlockFiles::start(&BlockFilesOptions::default(), Context::default()).unwrap();
    let source = HostImage { file: Arc::new(tempfile::tempfile().unwrap()), len: 1 << 20, gate: Arc::clone(&gate) };
    let file = files.add("image", Arc::new(source)).unwrap();
    let recipe = erofs_recipe(&files, file);
    let mount = start(move || recipe.make_apart().map(|_| ()));
    // The first by readahead, which is given up; then the one that the mount waits for.
    gate.await_waiting(1);
    println!("mounting now");
    let _ = mount.wait(Duration::from_secs(60), "killed before that");
}

#[test]
fn priv_pushed_pages_are_not_asked_for() {
    if skip("priv_pushed_pages_are_not_asked_for") {
        return;
    }
    let bytes = pattern((1 << 20) + 100, 5);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes).unwrap();
    let gate = Arc::new(Gate::default());
    gate.open();
    let files = BlockFiles::start(&BlockFilesOptions::default(), Context::default()).unwrap();
    let source = Arc::new(HostImage { file: Arc::new(file), len: bytes.len() as u64, gate });
    let pushed = files.add("pushed", source).unwrap();
    let fd = files.open(pushed).unwrap();
    files.notify_store(pushed, 0, &bytes[..1 << 20]).unwrap();
    let kind = |r: std::io::Result<()>| r.unwrap_err().kind();
    assert_eq!(kind(files.notify_store(pushed, 1 << 20, &bytes[1 << 20..])), std::io::ErrorKind::InvalidInput);
    assert_eq!(kind(files.notify_store(pushed, 1, &bytes[..4096])), std::io::ErrorKind::InvalidInput);
    assert_eq!(kind(files.notify_store(pushed, 1 << 20, &[0; 4096])), std::io::ErrorKind::InvalidInput);
    let mut got = vec![0; 1 << 20];
    sys::file::pread_exact(fd.as_fd(), &mut got, 0).unwrap();
    assert!(got == bytes[..1 << 20]);
    assert_eq!(files.counters().requests(opcode::READ), 0);
    let mut all = Vec::new();
    File::from(fd).read_to_end(&mut all).unwrap();
    assert!(all == bytes);
    assert!(files.counters().requests(opcode::READ) > 0, "the last, partial page");
    // What was dropped is asked for again.
    let before = files.counters().read_bytes();
    files.invalidate(pushed, 0, 0).unwrap();
    assert!(std::fs::read(files.path(pushed).unwrap()).unwrap() == bytes);
    assert!(files.counters().read_bytes() >= before + bytes.len() as u64);
}

#[test]
fn priv_reads_are_as_large_as_the_readahead() {
    if skip("priv_reads_are_as_large_as_the_readahead") {
        return;
    }
    let bytes = pattern(16 << 20, 5);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&bytes).unwrap();
    let gate = Arc::new(Gate::default());
    gate.open();
    let options = BlockFilesOptions { read_ahead_kb: Some(1024), ..Default::default() };
    let files = BlockFiles::start(&options, Context::default()).unwrap();
    let ids = sys::mount::ids(files.mount().unwrap()).unwrap();
    assert_eq!(sys::mount::read_ahead_kb(ids).unwrap(), 1024);
    let file = files.add("f", Arc::new(HostImage { file: Arc::new(file), len: bytes.len() as u64, gate })).unwrap();
    assert!(std::fs::read(files.path(file).unwrap()).unwrap() == bytes);
    let reads = files.counters().requests(opcode::READ);
    assert!(reads <= 16 + 8, "{reads} reads for 16 MiB");
}
