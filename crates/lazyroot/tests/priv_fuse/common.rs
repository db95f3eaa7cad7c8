//! What the tests of this program share.

pub use crate::fuse_support::*;
use lazyroot::front::{Context, Session, TreeOptions, TreeSession};
use rustix::io::Errno;
use std::os::fd::{AsFd, AsRawFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

pub const SOON: Duration = Duration::from_secs(20);

pub fn serve(tree: Arc<MemTree>) -> (Session, PathBuf) {
    serve_with(tree, &TreeOptions::default(), Context::default())
}

pub fn serve_with(tree: Arc<MemTree>, options: &TreeOptions, context: Context) -> (Session, PathBuf) {
    let session = TreeSession::start(tree, options, context).unwrap();
    // Of the process, not of `self`: children use it too.
    let number = session.mount().unwrap().as_raw_fd();
    (session, PathBuf::from(format!("/proc/{}/fd/{number}", std::process::id())))
}

pub fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> Errno {
    Errno::from_io_error(&result.unwrap_err()).unwrap()
}

/// A tree with a gated file of `len` bytes and other things.
pub fn gated(len: usize) -> (Arc<MemTree>, Arc<Gate>) {
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

pub fn proc_path(fd: impl AsFd) -> PathBuf {
    sys::mount::fd_path(fd.as_fd())
}
