//! Extended attributes.

use crate::common::*;
use lazyroot::front::{Context, TreeOptions};
use rustix::io::Errno;
use std::fs::File;
use std::path::Path;

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
fn priv_trusted_attributes_are_listed_to_root_only() {
    if skip("priv_trusted_attributes_are_listed_to_root_only") {
        return;
    }
    let tree = || {
        let mut tree = MemTree::new();
        let f = tree.file(0, "f", vec![]);
        tree.at(f).attr.mode = FILE | 0o644;
        tree.at(f).xattrs = vec![
            (b"trusted.secret".to_vec(), b"x".to_vec()),
            (b"user.open".to_vec(), b"y".to_vec()),
            (b"trusted.overlay.opaque".to_vec(), b"y".to_vec()),
        ];
        tree.finish()
    };
    let listed = |root: &Path, user: u32| {
        let file = File::open(root.join("f")).unwrap();
        within(SOON, "listing", move || {
            // The thread's only.
            let id = rustix::process::Uid::from_raw(user);
            rustix::thread::set_thread_res_uid(id, id, id).unwrap();
            let mut list = [0u8; 256];
            let n = rustix::fs::flistxattr(&file, &mut list[..]).unwrap();
            assert_eq!(rustix::fs::flistxattr_query(&file), Ok(n), "asked for the length");
            let mut value = [0u8; 16];
            let read = rustix::fs::fgetxattr(&file, "trusted.secret", &mut value[..]);
            (String::from_utf8(list[..n].to_vec()).unwrap(), read)
        })
    };
    let (_session, root) = serve(tree());
    assert_eq!(listed(&root, 0), ("trusted.secret\0user.open\0trusted.overlay.opaque\0".to_owned(), Ok(1)));
    assert_eq!(listed(&root, 65_534), ("user.open\0".to_owned(), Err(Errno::NODATA)));
    // A user's own session has none, whoever asks.
    let options = TreeOptions { trusted: false, ..Default::default() };
    let (_session, root) = serve_with(tree(), &options, Context::default());
    assert_eq!(listed(&root, 0), ("user.open\0".to_owned(), Err(Errno::NODATA)));
}
