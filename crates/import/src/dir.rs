//! A directory of this machine, read while others may be at it.
//!
//! The calling thread walks: directories by descriptor, never through a symbolic link, names sorted, in the order in
//! which an index numbers them. Files go to worker threads in batches, which open them below their directory's
//! descriptor, read, hash and pack them. A file must be the same before and after it is read (size, times, inode);
//! otherwise it is read again, and after [`TRIES`] times the import fails and names it. A name that is gone when its
//! turn comes is left out.
//!
//! The walk stays on one file system: what is mounted below the root is an empty directory (or file) with the
//! attributes of what is mounted there. It never enters the store that it imports into. Open descriptors are few
//! whatever the depth: those of distant ancestors are closed, and when needed again reopened from the root and
//! compared.

mod count;
mod read;
mod walk;

use crate::chunker::{LocalRun, lock};
use crate::context::Context;
use crate::error::ImportError;
use crate::glob::Patterns;
use crate::layers::TreeAndPack;
use format::Digest;
use image::tree::{Attrs, NodeId, Run, Tree, TreeError};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex};

/// How often a file is read that changes meanwhile.
pub(crate) const TRIES: u32 = 3;
/// Files in a batch.
const BATCH: usize = 32;
/// Directories in a batch: each keeps a descriptor open.
const BATCH_DIRS: usize = 8;
/// Threads that read files.
const MAX_READERS: usize = 16;

/// What the walk saw on the way.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct DirCounts {
    pub(crate) mount_points: u64,
    pub(crate) vanished: u64,
    pub(crate) unreadable: u64,
}

/// Attributes as `stat` has them.
#[derive(Debug, Clone, Copy)]
struct RawAttrs {
    mode: u16,
    uid: u32,
    gid: u32,
    mtime_sec: i64,
    mtime_nsec: u32,
}

type XattrList = Vec<(Vec<u8>, Vec<u8>)>;

/// Device and inode.
type FileId = (u64, u64);

/// A directory that files of a batch stand in.
#[derive(Debug)]
struct BatchDir {
    /// Given up as soon as the batch is read.
    fd: Option<Arc<OwnedFd>>,
    node: NodeId,
    /// Relative to the root, for messages.
    path: Arc<[u8]>,
}

#[derive(Debug)]
struct BatchFile {
    dir: usize,
    name: Vec<u8>,
    node: NodeId,
}

/// Files to be read by one worker.
#[derive(Debug, Default)]
struct Batch {
    dirs: Vec<BatchDir>,
    files: Vec<BatchFile>,
}

/// What became of a file.
#[derive(Debug)]
enum Outcome {
    File {
        attrs: RawAttrs,
        xattrs: XattrList,
        size: u64,
        digest: Digest,
        runs: Vec<LocalRun>,
    },
    /// Another name of a file that is read elsewhere.
    Link(NodeId),
    /// Something is mounted on it.
    MountPoint(RawAttrs),
    Vanished,
    Unreadable,
}

enum Message {
    Batch(Batch, Vec<Outcome>),
    Failed(ImportError),
    Closed(Result<(), ImportError>),
}

/// Files with several names: the node of the first one that was met.
#[derive(Debug, Default)]
struct Links(Mutex<HashMap<FileId, (NodeId, u64)>>);

impl Links {
    /// The node that has this file already; `None` makes `node` the one. `nlink` names are all that can come.
    fn claim(&self, id: FileId, nlink: u64, node: NodeId) -> Option<NodeId> {
        let mut map = lock(&self.0);
        match map.get_mut(&id) {
            None => {
                map.insert(id, (node, nlink - 1));
                None
            }
            Some((first, left)) => {
                let first = *first;
                *left = left.saturating_sub(1);
                if *left == 0 {
                    map.remove(&id);
                }
                Some(first)
            }
        }
    }
}

/// Imports the directory at `path`. `store` is the store's own directory, if it could lie inside.
pub(crate) fn import_dir<'a>(
    context: &'a Context<'a>,
    mut tree: Tree,
    path: &Path,
    store: &Path,
) -> Result<(TreeAndPack, DirCounts), ImportError> {
    let pack = tree.object_placeholder();
    let root = walk::open_root(path)?;
    let store = walk::id_of(store);
    let parse = |texts: &[String], option: &str| {
        Patterns::parse(texts).map_err(|what| ImportError::Usage {
            what: format!("{option}: {what}"),
            todo: "see doc/semantics.md for how patterns are written".into(),
        })
    };
    let options = context.options;
    let (include, exclude) = (parse(&options.include, "--include")?, parse(&options.exclude, "--exclude")?);
    let read = AtomicBool::new(false);
    let links = Links::default();
    let readers = context.options.threads.clamp(1, MAX_READERS);
    let (to_workers, batches) = mpsc::sync_channel::<Batch>(2 * readers);
    let batches = Mutex::new(batches);
    let (tx, results) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..readers {
            let (tx, batches, links) = (tx.clone(), &batches, &links);
            let work = move || read::work(context, path, batches, links, &tx);
            if let Err(e) = std::thread::Builder::new().name("read".into()).spawn_scoped(scope, work) {
                context.stop();
                return Err(ImportError::io("start a thread to read", path.display().to_string(), e));
            }
        }
        drop(tx);
        if options.progress.wants_totals() {
            let scope_of_walk = count::Scope { path, store, include: &include, exclude: &exclude };
            let read = &read;
            let work = move || {
                let stopped = || read.load(Ordering::Relaxed) || context.stopped();
                if let Some((bytes, entries)) = count::count(&scope_of_walk, &stopped) {
                    context.totals_are(bytes, entries);
                }
            };
            // Without the thread there is no total.
            let _ = std::thread::Builder::new().name("count".into()).spawn_scoped(scope, work);
        }
        let applier = Applier { context, path, tree, objects: vec![pack], counts: DirCounts::default(), files: 0 };
        let patterns = (&include, &exclude);
        let mut walk = walk::Walk::new(applier, root, store, patterns, &links, to_workers, &results)?;
        let walked = walk.run();
        let mut applier = walk.finish();
        if walked.is_err() {
            context.stop();
        }
        // Whatever the walk said, a worker's own error explains it better than "stopped".
        let mut failure = walked.err();
        for message in &results {
            if let Err(e) = applier.message(message) {
                context.stop();
                if failure.as_ref().is_none_or(|f| matches!(f, ImportError::Stopped)) {
                    failure = Some(e);
                }
            }
        }
        read.store(true, Ordering::Relaxed);
        match failure {
            Some(e) => Err(e),
            None => Ok((TreeAndPack { tree: applier.tree, pack }, applier.counts)),
        }
    })
}

/// Puts what workers found out into the tree.
struct Applier<'a> {
    context: &'a Context<'a>,
    path: &'a Path,
    tree: Tree,
    /// Ordinals in the tree of the import's objects by number.
    objects: Vec<u32>,
    counts: DirCounts,
    files: u64,
}

impl Applier<'_> {
    fn message(&mut self, message: Message) -> Result<(), ImportError> {
        match message {
            Message::Closed(result) => result,
            Message::Failed(e) => Err(e),
            Message::Batch(batch, outcomes) => {
                for (file, outcome) in batch.files.iter().zip(outcomes) {
                    let dir = &batch.dirs[file.dir];
                    self.outcome(dir, file, outcome)?;
                }
                Ok(())
            }
        }
    }

    fn outcome(&mut self, dir: &BatchDir, file: &BatchFile, outcome: Outcome) -> Result<(), ImportError> {
        let fail = |path: &Path, e: TreeError| tree_error(&full_path(path, &dir.path, &file.name), e);
        match outcome {
            Outcome::File { attrs, xattrs, size, digest, runs } => {
                let attrs = self.attrs(&attrs, &xattrs).map_err(|e| fail(self.path, e))?;
                self.tree.set_attrs(file.node, attrs);
                self.learn_objects(&runs);
                let run = |r: &LocalRun| Run {
                    file_block: r.file_block,
                    count: r.count,
                    object: self.objects[r.object as usize],
                    space_block: r.space_block,
                };
                let runs: Vec<Run> = runs.iter().map(run).collect();
                self.tree.set_content(file.node, size, digest, &runs).map_err(|e| fail(self.path, e))?;
            }
            Outcome::Link(first) => {
                self.tree.unlink(dir.node, &file.name);
                self.tree.link(dir.node, &file.name, first).map_err(|e| fail(self.path, e))?;
            }
            Outcome::MountPoint(attrs) => {
                self.counts.mount_points += 1;
                let attrs = self.attrs(&attrs, &[]).map_err(|e| fail(self.path, e))?;
                self.tree.set_attrs(file.node, attrs);
            }
            Outcome::Vanished => {
                self.counts.vanished += 1;
                self.tree.unlink(dir.node, &file.name);
            }
            Outcome::Unreadable => {
                self.counts.unreadable += 1;
                self.tree.unlink(dir.node, &file.name);
            }
        }
        self.files += 1;
        Ok(())
    }

    fn learn_objects(&mut self, runs: &[LocalRun]) {
        if runs.iter().any(|r| r.object as usize >= self.objects.len()) {
            for (id, space_blocks) in self.context.objects.list().into_iter().skip(self.objects.len() - 1) {
                let n = self.tree.object(id, space_blocks);
                self.objects.push(n);
            }
        }
    }

    fn attrs(&mut self, raw: &RawAttrs, xattrs: &[(Vec<u8>, Vec<u8>)]) -> Result<Attrs, TreeError> {
        let list: Vec<(&[u8], &[u8])> = xattrs.iter().map(|(n, v)| (&n[..], &v[..])).collect();
        Ok(Attrs {
            mode: raw.mode,
            uid: raw.uid,
            gid: raw.gid,
            mtime_sec: raw.mtime_sec,
            mtime_nsec: raw.mtime_nsec,
            xattrs: self.tree.xattr_set(&list)?,
        })
    }
}

/// A path for messages.
fn full_path(root: &Path, dir: &[u8], name: &[u8]) -> PathBuf {
    let mut path = root.to_path_buf();
    for part in [dir, name] {
        if !part.is_empty() {
            path.push(OsStr::from_bytes(part));
        }
    }
    path
}

fn tree_error(path: &Path, e: TreeError) -> ImportError {
    let (place, what) = (path.display().to_string(), e.to_string());
    match e {
        TreeError::Limit { .. } => ImportError::Limit { place, what },
        _ => ImportError::Unsupported { place, what },
    }
}
