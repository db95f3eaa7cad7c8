//! Names, attributes, owners, directories.

use crate::common::*;
use lazyroot::front::fuse::decide::Readdirplus;
use lazyroot::front::fuse::wire::init;
use lazyroot::front::{Attr, Context, TreeOptions};
use rustix::fs::{AtFlags, CWD, RawDir, SeekFrom};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirEntryExt, FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

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
