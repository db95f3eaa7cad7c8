//! Holes, and every way of reading.

use crate::common::*;
use lazyroot::front::fuse::wire::opcode;
use lazyroot::front::{Context, ReadPath, TreeOptions};
use rustix::fs::{OFlags, SeekFrom};
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::Arc;

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
