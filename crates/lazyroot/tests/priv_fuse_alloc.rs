//! Serving allocates nothing once its buffers have grown.

mod fuse_support;

use fuse_support::*;
use lazyroot::front::fuse::decide::Readdirplus;
use lazyroot::front::{BlockFiles, BlockFilesOptions, Context, ReadPath, TreeOptions, TreeSession};
use rustix::fs::{AtFlags, Mode, OFlags, SeekFrom, StatxFlags};
use std::fs::File;
use std::io::Write;
use std::os::fd::AsFd;
use std::sync::Arc;

#[global_allocator]
static ALLOCATOR: sys::alloc::Counting = sys::alloc::Counting::new();

/// The tree of this test answers lookups from a map whose keys are owned, so names are kept short and looked up by
/// the number of allocations that the tree itself makes: one each.
#[test]
fn priv_nothing_is_allocated_in_the_steady_state() {
    if skip("priv_nothing_is_allocated_in_the_steady_state") {
        return;
    }
    let mut host = tempfile::tempfile().unwrap();
    host.write_all(&pattern(8 << 20, 1)).unwrap();
    let host = Arc::new(host);
    let mut tree = MemTree::new();
    for i in 0..2000 {
        let f = tree.file(0, &format!("f{i}"), vec![]);
        tree.at(f).attr.size = 4096;
        tree.at(f).bytes = Some(Bytes::Host { file: Arc::clone(&host), extents: vec![(0, 4096)] });
        tree.at(f).xattrs = vec![(b"user.x".to_vec(), b"value".to_vec())];
    }
    let options = TreeOptions { threads: 1, readdirplus: Readdirplus::Always, ..Default::default() };
    let session = TreeSession::start(tree.finish(), &options, Context::default()).unwrap();
    let root = session.mount().unwrap();
    let names: Vec<_> = (0..2000).map(|i| std::ffi::CString::new(format!("f{i}")).unwrap()).collect();
    let mut listing = vec![std::mem::MaybeUninit::uninit(); 32 << 10];
    let dir = rustix::fs::openat(root, c".", OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty()).unwrap();
    let mut use_files = |range: std::ops::Range<usize>, lookups_of_the_tree: u64| {
        let before = (ALLOCATOR.calls(), session.counters().all_requests());
        for name in &names[range] {
            rustix::fs::statx(root, name, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::ALL).unwrap();
            let f = rustix::fs::openat(root, name, OFlags::RDONLY, Mode::empty()).unwrap();
            let mut buf = [0u8; 4096];
            assert_eq!(rustix::io::pread(&f, &mut buf, 0), Ok(4096));
            assert_eq!(rustix::fs::fgetxattr(&f, c"user.x", &mut buf), Ok(5));
        }
        rustix::fs::seek(&dir, SeekFrom::Start(0)).unwrap();
        let mut raw = rustix::fs::RawDir::new(&dir, &mut listing);
        while raw.next().is_some() {}
        let after = (ALLOCATOR.calls(), session.counters().all_requests());
        assert!(after.1 - before.1 >= lookups_of_the_tree);
        (after.0 - before.0, after.1 - before.1)
    };
    use_files(0..500, 500);
    let (allocations, requests) = use_files(500..2000, 1500);
    // One for each lookup in the tree of the test.
    assert!(allocations <= 1500, "{allocations} allocations for {requests} requests");
    session.stop();

    for read_path in [ReadPath::Copy, ReadPath::Splice] {
        let gate = Arc::new(Gate::default());
        gate.open();
        let context = Context { read_path, ..Default::default() };
        let options = BlockFilesOptions { threads: 1, read_ahead_kb: Some(256), ..Default::default() };
        let files = BlockFiles::start(&options, context).unwrap();
        let file = files.add("f", Arc::new(HostImage { file: Arc::clone(&host), len: 8 << 20, gate })).unwrap();
        let fd = File::from(files.open(file).unwrap());
        let mut buf = vec![0u8; 64 << 10];
        let mut read = |range: std::ops::Range<u64>| {
            let before = (ALLOCATOR.calls(), files.counters().all_requests());
            for i in range {
                sys::file::pread_exact(fd.as_fd(), &mut buf, i * (64 << 10)).unwrap();
            }
            (ALLOCATOR.calls() - before.0, files.counters().all_requests() - before.1)
        };
        read(0..32);
        let (allocations, requests) = read(32..128);
        assert!(requests > 10);
        assert_eq!(allocations, 0, "{read_path:?}, {requests} requests");
    }
}
