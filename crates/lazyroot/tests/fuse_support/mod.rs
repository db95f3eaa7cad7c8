//! An in-memory tree and block sources for tests of the FUSE front ends, with gates that hold fetches back.

// Each test program uses a part of it.
#![allow(dead_code)]

use lazyroot::front::{Attr, Entry, Fault, FileContent, FileTree, Level, Log, Seek};
use std::collections::HashMap;
use std::fs::File;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, mpsc};
use std::time::{Duration, Instant};
use store::source::SpaceGuard;
use store::{BlockSource, Done, FetchError, Presence, ReadError, Request, Resolution};

pub const S_IFMT: u32 = 0o170_000;
pub const DIR: u32 = 0o040_000;
pub const FILE: u32 = 0o100_000;
pub const LINK: u32 = 0o120_000;
pub const CHAR: u32 = 0o020_000;
pub const BLOCK: u32 = 0o060_000;
pub const FIFO: u32 = 0o010_000;
pub const SOCKET: u32 = 0o140_000;

/// Prints why a test cannot run here. True: skip it.
pub fn skip(name: &str) -> bool {
    let why = if !sys::proc::is_root() {
        Some("not root".to_owned())
    } else {
        sys::fuse::Device::open().err().map(|e| format!("/dev/fuse: {e}"))
    };
    if let Some(why) = &why {
        println!("SKIP {name}: {why}");
    }
    why.is_some()
}

/// Runs `f` on a thread and waits for its result; panics when it takes longer than `limit`.
pub fn within<T: Send + 'static>(limit: Duration, what: &str, f: impl FnOnce() -> T + Send + 'static) -> T {
    start(f).wait(limit, what)
}

/// Something that runs on a thread of its own.
pub struct Running<T>(mpsc::Receiver<T>);

pub fn start<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> Running<T> {
    let (send, receive) = mpsc::channel();
    std::thread::spawn(move || send.send(f()));
    Running(receive)
}

impl<T> Running<T> {
    pub fn wait(&self, limit: Duration, what: &str) -> T {
        match self.0.recv_timeout(limit) {
            Ok(value) => value,
            Err(e) => panic!("{what}: {e} after {limit:?}"),
        }
    }

    pub fn is_running(&self) -> bool {
        matches!(self.0.try_recv(), Err(mpsc::TryRecvError::Empty))
    }
}

/// Waits until `condition` holds.
pub fn until(what: &str, condition: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Log lines, kept.
#[derive(Default)]
pub struct KeptLog(pub Mutex<Vec<String>>);

impl Log for KeptLog {
    fn line(&self, level: Level, text: std::fmt::Arguments<'_>) {
        self.0.lock().unwrap().push(format!("{level:?} {text}"));
    }
}

/// Holds fetches back until it is opened. What lies behind a closed gate is missing.
#[derive(Default)]
pub struct Gate {
    inner: Mutex<GateInner>,
    came: Condvar,
    /// How many more resolutions find nothing although the gate is open: bytes that are evicted at once.
    pub evicted: AtomicUsize,
}

#[derive(Default)]
struct GateInner {
    open: bool,
    waiting: Vec<Done>,
    fetches: usize,
}

impl Gate {
    pub fn presence(&self) -> Presence {
        let open = self.inner.lock().unwrap().open;
        let evicted = self.evicted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1)).is_ok();
        if open && !evicted { Presence::Ready } else { Presence::Missing }
    }

    pub fn fetch(&self, done: Done) {
        let mut inner = self.inner.lock().unwrap();
        inner.fetches += 1;
        if inner.open {
            drop(inner);
            return done(Ok(()));
        }
        inner.waiting.push(done);
        self.came.notify_all();
    }

    /// Lets everything through, from this thread.
    pub fn open(&self) {
        let waiting = {
            let mut inner = self.inner.lock().unwrap();
            inner.open = true;
            std::mem::take(&mut inner.waiting)
        };
        waiting.into_iter().for_each(|done| done(Ok(())));
    }

    /// Fails everything that waits.
    pub fn fail(&self) {
        let waiting = std::mem::take(&mut self.inner.lock().unwrap().waiting);
        waiting.into_iter().for_each(|done| done(Err(FetchError::TimedOut)));
    }

    pub fn fetches(&self) -> usize {
        self.inner.lock().unwrap().fetches
    }

    pub fn await_waiting(&self, count: usize) {
        let mut inner = self.inner.lock().unwrap();
        while inner.waiting.len() < count {
            let (next, timeout) = self.came.wait_timeout(inner, Duration::from_secs(20)).unwrap();
            assert!(!timeout.timed_out(), "only {} of {count} fetches came", next.waiting.len());
            inner = next;
        }
    }
}

/// Where a file's bytes are.
pub enum Bytes {
    /// In memory.
    Memory(Arc<Vec<u8>>),
    /// In a file on the host, with its holes as zeros: extents of (offset, length).
    Host { file: Arc<File>, extents: Vec<(u64, u64)> },
}

pub struct Node {
    pub attr: Attr,
    pub parent: u32,
    pub names: Vec<(Vec<u8>, u32)>,
    pub target: Vec<u8>,
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub bytes: Option<Bytes>,
    pub gate: Option<Arc<Gate>>,
}

/// A tree in memory.
pub struct MemTree {
    nodes: Vec<Node>,
    index: HashMap<(u32, Vec<u8>), u32>,
}

impl MemTree {
    pub fn new() -> MemTree {
        let mut tree = MemTree { nodes: Vec::new(), index: HashMap::new() };
        tree.nodes.push(node(DIR | 0o755, 0));
        tree
    }

    /// Adds a node below `parent`; names must be finished by [`MemTree::finish`].
    pub fn add(&mut self, parent: u32, name: &str, mode: u32) -> u32 {
        let ino = self.nodes.len() as u32;
        self.nodes.push(node(mode, parent));
        self.link(parent, name, ino);
        if mode & S_IFMT == DIR {
            self.nodes[parent as usize].attr.nlink += 1;
        }
        ino
    }

    pub fn link(&mut self, parent: u32, name: &str, ino: u32) {
        self.nodes[parent as usize].names.push((name.as_bytes().to_vec(), ino));
        self.index.insert((parent, name.as_bytes().to_vec()), ino);
    }

    pub fn file(&mut self, parent: u32, name: &str, bytes: Vec<u8>) -> u32 {
        let ino = self.add(parent, name, FILE | 0o644);
        let node = &mut self.nodes[ino as usize];
        node.attr.size = bytes.len() as u64;
        node.attr.blocks = bytes.len().div_ceil(4096) as u64 * 8;
        node.bytes = Some(Bytes::Memory(Arc::new(bytes)));
        ino
    }

    pub fn at(&mut self, ino: u32) -> &mut Node {
        &mut self.nodes[ino as usize]
    }

    pub fn finish(mut self) -> Arc<MemTree> {
        self.nodes.iter_mut().for_each(|n| n.names.sort());
        Arc::new(self)
    }

    fn node(&self, ino: u32) -> Result<&Node, Fault> {
        self.nodes.get(ino as usize).ok_or(Fault::NoInode)
    }

    fn dir(&self, ino: u32) -> Result<&Node, Fault> {
        let node = self.node(ino)?;
        if node.attr.mode & S_IFMT == DIR { Ok(node) } else { Err(Fault::NotDirectory) }
    }
}

fn node(mode: u32, parent: u32) -> Node {
    let nlink = if mode & S_IFMT == DIR { 2 } else { 1 };
    Node {
        attr: Attr { mode, nlink, ..Default::default() },
        parent,
        names: Vec::new(),
        target: Vec::new(),
        xattrs: Vec::new(),
        bytes: None,
        gate: None,
    }
}

impl FileContent for MemTree {
    fn resolve(&self, ino: u32, offset: u64, len: usize, out: &mut Resolution) -> Result<Presence, Fault> {
        let node = self.node(ino)?;
        if let Some(gate) = &node.gate
            && gate.presence() == Presence::Missing
        {
            return Ok(Presence::Missing);
        }
        match node.bytes.as_ref().ok_or(Fault::IsDirectory)? {
            Bytes::Memory(bytes) => out.push_memory(Arc::clone(bytes), offset as usize, len),
            Bytes::Host { file, extents } => {
                let (mut at, end) = (offset, offset + len as u64);
                for (start, length) in extents {
                    let (from, to) = ((*start).max(at), (start + length).min(end));
                    if from < to {
                        out.push_zeros((from - at) as usize);
                        out.push_space(SpaceGuard::file(Arc::clone(file)), from, (to - from) as usize);
                        at = to;
                    }
                }
                out.push_zeros((end - at) as usize);
            }
        }
        Ok(Presence::Ready)
    }

    fn fetch(&self, ino: u32, _: u64, _: usize, _: Request, done: Done) {
        match self.node(ino).ok().and_then(|n| n.gate.as_ref()) {
            Some(gate) => gate.fetch(done),
            None => done(Ok(())),
        }
    }

    fn seek(&self, ino: u32, offset: u64, what: Seek) -> Result<Option<u64>, Fault> {
        let node = self.node(ino)?;
        let Some(Bytes::Host { extents, .. }) = &node.bytes else {
            return Ok(Some(if what == Seek::Data { offset } else { node.attr.size }));
        };
        let inside = extents.iter().find(|(start, len)| (*start..start + len).contains(&offset));
        Ok(match (what, inside) {
            (Seek::Data, Some(_)) | (Seek::Hole, None) => Some(offset),
            (Seek::Hole, Some((start, len))) => Some(start + len),
            (Seek::Data, None) => extents.iter().map(|e| e.0).find(|start| *start >= offset),
        })
    }
}

impl FileTree for MemTree {
    fn attr(&self, ino: u32) -> Result<Attr, Fault> {
        Ok(self.node(ino)?.attr)
    }

    fn lookup(&self, parent: u32, name: &[u8]) -> Result<Option<u32>, Fault> {
        let node = self.dir(parent)?;
        if name == b".." {
            return Ok(Some(node.parent));
        }
        Ok(self.index.get(&(parent, name.to_vec())).copied())
    }

    fn entries(&self, dir: u32, from: u32, visit: &mut dyn FnMut(Entry<'_>) -> bool) -> Result<(), Fault> {
        for (i, (name, ino)) in self.dir(dir)?.names.iter().enumerate().skip(from as usize) {
            let kind = self.node(*ino)?.attr.mode & S_IFMT;
            if !visit(Entry { ordinal: i as u32, name, ino: *ino, kind }) {
                break;
            }
        }
        Ok(())
    }

    fn link_target(&self, ino: u32) -> Result<&[u8], Fault> {
        Ok(&self.node(ino)?.target)
    }

    fn xattrs(&self, ino: u32, visit: &mut dyn FnMut(&[u8], &[u8]) -> bool) -> Result<(), Fault> {
        for (name, value) in &self.node(ino)?.xattrs {
            if !visit(name, value) {
                break;
            }
        }
        Ok(())
    }
}

/// An image in a host file, behind a gate.
pub struct HostImage {
    pub file: Arc<File>,
    pub len: u64,
    pub gate: Arc<Gate>,
}

impl BlockSource for HostImage {
    fn len_bytes(&self) -> u64 {
        self.len
    }

    fn resolve(&self, offset: u64, len: usize, out: &mut Resolution) -> Result<Presence, ReadError> {
        if offset.checked_add(len as u64).is_none_or(|end| end > self.len) {
            return Err(ReadError::OutOfRange { offset, len, size: self.len });
        }
        if self.gate.presence() == Presence::Missing {
            return Ok(Presence::Missing);
        }
        out.push_space(SpaceGuard::file(Arc::clone(&self.file)), offset, len);
        Ok(Presence::Ready)
    }

    fn fetch(&self, _: u64, _: usize, _: Request, done: Done) {
        self.gate.fetch(done);
    }
}

/// Bytes that tell where they belong.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(len + 8);
    let mut word = 0u64;
    while out.len() < len {
        out.extend_from_slice(&(word.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed).to_le_bytes());
        word += 1;
    }
    out.truncate(len);
    out
}
