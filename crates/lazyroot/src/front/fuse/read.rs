//! Answers READ: at once when the bytes are there, from the completing thread when they had to be fetched.
//!
//! Invariants: an answer has exactly the bytes that were asked, or is an errno; the guards of a resolution are held
//! until its answer has been written; the serving thread never waits. Failure model: a fetch that fails is an errno;
//! bytes that are evicted between fetch and answer are fetched again, a few times within the same deadline.

use super::parked::ParkedRead;
use super::reply::{MAX_PARTS, Request};
use super::serve::Shared;
use super::wire::OutHeader;
use crate::front::{Fault, FileTree, Log, NoLog, errno};
use std::cell::RefCell;
use std::io::IoSliceMut;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use store::{BlockSource, Class, FetchError, Place, Presence, Resolution, Segment};
use sys::pipe::Pipe;
use zerocopy::IntoBytes;

/// How present bytes get from a space into an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ReadPath {
    /// Read into a buffer, write from it.
    #[default]
    Copy,
    /// The same, and the space's pages leave the page cache right after (`RWF_DONTCACHE`), where the file system of
    /// the spaces can.
    Uncached,
    /// Large reads by splice(2): one copy less, more system calls.
    Splice,
}

/// Reads from this size on are spliced with [`ReadPath::Splice`].
const SPLICE_FROM: usize = 64 << 10;
static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

/// How often a read is fetched before it fails with [`Fault::Evicted`].
const MAX_FETCHES: u32 = 8;

/// What sessions of one process share.
#[derive(Clone)]
pub struct Context {
    /// Where log lines go.
    pub log: Arc<dyn Log>,
    /// Buffers for answers.
    pub buffers: Arc<BufferPool>,
    /// How long a read may wait for missing bytes.
    pub deadline: Duration,
    /// How bytes are sent.
    pub read_path: ReadPath,
}

impl Default for Context {
    fn default() -> Self {
        Context {
            log: Arc::new(NoLog),
            buffers: Arc::new(BufferPool::new(2)),
            deadline: Duration::from_secs(30),
            read_path: ReadPath::default(),
        }
    }
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("deadline", &self.deadline).field("read_path", &self.read_path).finish()
    }
}

/// Buffers of the largest read's size, a few of which are kept. One that is not touched costs no memory.
#[derive(Debug)]
pub struct BufferPool {
    free: Mutex<Vec<Box<[u8]>>>,
    keep: usize,
}

impl BufferPool {
    /// A pool that keeps at most `keep` buffers; more are made when more are needed at once.
    pub fn new(keep: usize) -> BufferPool {
        BufferPool { free: Mutex::new(Vec::with_capacity(keep)), keep }
    }

    fn take(&self) -> Box<[u8]> {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        free.unwrap_or_else(|| vec![0; super::decide::MAX_READ].into_boxed_slice())
    }

    fn put(&self, buffer: Box<[u8]>) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.len() < self.keep {
            free.push(buffer);
        }
    }
}

/// What is read: one file.
#[derive(Clone)]
pub(crate) enum Target {
    Tree(Arc<dyn FileTree>, u32),
    Block(Arc<dyn BlockSource>),
}

/// The same, borrowed: a read that is answered at once clones nothing.
#[derive(Clone, Copy)]
pub(crate) enum TargetRef<'a> {
    Tree(&'a Arc<dyn FileTree>, u32),
    Block(&'a Arc<dyn BlockSource>),
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Target::Tree(_, ino) => write!(f, "inode {ino}"),
            Target::Block(_) => f.write_str("image file"),
        }
    }
}

impl Target {
    fn as_ref(&self) -> TargetRef<'_> {
        match self {
            Target::Tree(tree, ino) => TargetRef::Tree(tree, *ino),
            Target::Block(source) => TargetRef::Block(source),
        }
    }
}

impl TargetRef<'_> {
    fn to_owned(self) -> Target {
        match self {
            TargetRef::Tree(tree, ino) => Target::Tree(Arc::clone(tree), ino),
            TargetRef::Block(source) => Target::Block(Arc::clone(source)),
        }
    }

    fn resolve(self, offset: u64, len: usize, out: &mut Resolution) -> Result<Presence, Fault> {
        match self {
            TargetRef::Tree(tree, ino) => tree.resolve(ino, offset, len, out),
            TargetRef::Block(source) => source.resolve(offset, len, out).map_err(Fault::Read),
        }
    }
}

/// What a thread that answers reads keeps from one to the next.
#[derive(Debug, Default)]
pub(crate) struct ReadScratch {
    resolution: Resolution,
    pipe: Option<Pipe>,
}

thread_local! {
    /// The scratch of threads that are not ours: those that complete fetches.
    static COMPLETER: RefCell<ReadScratch> = RefCell::default();
}

/// Answers a read of `len` bytes at `offset`, which lie inside the target, or parks it.
pub(crate) fn read(
    shared: &Arc<Shared>,
    scratch: &mut ReadScratch,
    target: TargetRef<'_>,
    request: Request,
    (offset, len, tid): (u64, usize, u32),
) {
    if len == 0 {
        return request.ok(&[]);
    }
    match try_answer(shared, scratch, target, request, offset, len) {
        None => {}
        Some(request) => {
            shared.counters.count_parked();
            let deadline = Instant::now() + shared.context.deadline;
            let target = target.to_owned();
            park(shared, ParkedRead { request, target, offset, len, deadline, fetches: 0, tid });
        }
    }
}

/// Answers if everything is there; gives the request back if something is missing.
fn try_answer(
    shared: &Shared,
    scratch: &mut ReadScratch,
    target: TargetRef<'_>,
    request: Request,
    offset: u64,
    len: usize,
) -> Option<Request> {
    scratch.resolution.clear();
    let resolved = target.resolve(offset, len, &mut scratch.resolution);
    let left = match resolved {
        Ok(Presence::Missing) => Some(request),
        Ok(Presence::Ready) if scratch.resolution.len() == len => {
            send(shared, scratch, target, request, offset);
            None
        }
        Ok(Presence::Ready) => {
            fail(shared, target, request, &broken("a range was resolved to another length"), offset, len);
            None
        }
        Err(fault) => {
            fail(shared, target, request, &fault, offset, len);
            None
        }
    };
    scratch.resolution.clear();
    left
}

fn fail(shared: &Shared, target: TargetRef<'_>, request: Request, fault: &Fault, offset: u64, len: usize) {
    let what = What { shared, target, fault, offset, len };
    request.error(errno::of(fault, &*shared.context.log, format_args!("{what}")));
}

/// A read for a log line. Where it is about is only looked up when it is written.
struct What<'a> {
    shared: &'a Shared,
    target: TargetRef<'a>,
    fault: &'a Fault,
    offset: u64,
    len: usize,
}

impl std::fmt::Display for What<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let place = match self.target {
            TargetRef::Tree(tree, ino) => tree.place(ino),
            TargetRef::Block(source) => source.place(self.offset),
        };
        match place {
            // What the fault names itself is not said twice.
            Some(Place { image, inside }) if !errno::Chain(self.fault).to_string().contains(&inside) => {
                write!(f, "{image}: {inside}: ")?;
            }
            Some(Place { image, .. }) => write!(f, "{image}: ")?,
            None => write!(f, "{}: ", self.shared.name)?,
        }
        let of = if matches!(self.target, TargetRef::Block(_)) { " of the image file" } else { "" };
        write!(f, "reading {} bytes at {}{of}", self.len, self.offset)
    }
}

/// A source that does not keep its word.
fn broken(why: &'static str) -> Fault {
    Fault::Io { what: "resolving", source: std::io::Error::other(why) }
}

/// Hands a read to its source, which completes it later.
fn park(shared: &Arc<Shared>, mut read: ParkedRead) {
    read.fetches += 1;
    if read.fetches > MAX_FETCHES || Instant::now() >= read.deadline {
        let fault = if read.fetches > MAX_FETCHES { Fault::Evicted } else { FetchError::TimedOut.into() };
        return fail(shared, read.target.as_ref(), read.request, &fault, read.offset, read.len);
    }
    let unique = read.request.unique();
    let request = store::Request { id: unique, class: Class::Demand, deadline: read.deadline };
    let (target, offset, len) = (read.target.clone(), read.offset, read.len);
    if let Err(read) = shared.parked.park(read) {
        return fail(shared, read.target.as_ref(), read.request, &Fault::Ending, offset, len);
    }
    // From here on the completion, an interruption or the session's end may have answered already.
    let shared = Arc::clone(shared);
    let done: store::Done = Box::new(move |result| complete(&shared, unique, result));
    match target {
        Target::Tree(tree, ino) => tree.fetch(ino, offset, len, request, done),
        Target::Block(source) => source.fetch(offset, len, request, done),
    }
}

/// Answers a parked read, on whatever thread ended its fetch.
fn complete(shared: &Arc<Shared>, unique: u64, result: Result<(), FetchError>) {
    let Some(read) = shared.parked.take(unique) else { return };
    let (offset, len) = (read.offset, read.len);
    if let Err(e) = result {
        return fail(shared, read.target.as_ref(), read.request, &e.into(), offset, len);
    }
    let ParkedRead { request, target, deadline, fetches, tid, .. } = read;
    let left = COMPLETER.with(|scratch| match scratch.try_borrow_mut() {
        Ok(mut scratch) => try_answer(shared, &mut scratch, target.as_ref(), request, offset, len),
        // A source that completes one fetch from inside another's completion.
        Err(_) => try_answer(shared, &mut ReadScratch::default(), target.as_ref(), request, offset, len),
    });
    if let Some(request) = left {
        park(shared, ParkedRead { request, target, offset, len, deadline, fetches, tid });
    }
}

/// Answers a reader that is being killed. Returns whether the request was parked at all.
pub(crate) fn interrupt(shared: &Shared, unique: u64) -> bool {
    let Some(tid) = shared.parked.reader_of(unique) else { return false };
    // Only death is worth an EINTR: a reader that merely got a signal would see its read of a regular file fail, and
    // a page fault would become a SIGBUS.
    if sys::proc::is_being_killed(tid) == Some(true)
        && let Some(read) = shared.parked.take(unique)
    {
        let (offset, len) = (read.offset, read.len);
        fail(shared, read.target.as_ref(), read.request, &Fault::Interrupted, offset, len);
    }
    true
}

/// Sends what a resolution holds.
fn send(shared: &Shared, scratch: &mut ReadScratch, target: TargetRef<'_>, request: Request, offset: u64) {
    let resolution = &scratch.resolution;
    let len = resolution.len();
    shared.counters.count_read(len);
    let request = if shared.context.read_path == ReadPath::Splice && len >= SPLICE_FROM {
        match spliced(resolution, &mut scratch.pipe, request) {
            None => return,
            Some(request) => request,
        }
    } else {
        request
    };
    let in_files: usize =
        resolution.segments().iter().filter(|s| matches!(s, Segment::Space { .. })).map(Segment::len).sum();
    if in_files == 0 && resolution.segments().len() <= MAX_PARTS / 2 {
        return gathered(resolution, &[], request);
    }
    let mut buffer = shared.context.buffers.take();
    if buffer.len() < len {
        buffer = vec![0; len].into_boxed_slice();
    }
    let uncached = shared.context.read_path == ReadPath::Uncached;
    // Many pieces go through the buffer whole; few are gathered around the bytes that were read from files.
    if resolution.segments().len() > MAX_PARTS / 4 {
        match fill(resolution, &mut buffer[..len], uncached, true) {
            Ok(()) => request.ok(&[&buffer[..len]]),
            Err(fault) => fail(shared, target, request, &fault, offset, len),
        }
    } else {
        match fill(resolution, &mut buffer[..in_files], uncached, false) {
            Ok(()) => gathered(resolution, &buffer[..in_files], request),
            Err(fault) => fail(shared, target, request, &fault, offset, len),
        }
    }
    shared.context.buffers.put(buffer);
}

/// Puts the segments that lie in files into `buffer`, one after the other; with `all`, every segment.
fn fill(resolution: &Resolution, buffer: &mut [u8], uncached: bool, all: bool) -> Result<(), Fault> {
    let mut rest = buffer;
    for segment in resolution.segments() {
        if !all && !matches!(segment, Segment::Space { .. }) {
            continue;
        }
        let (piece, behind) =
            rest.split_at_mut_checked(segment.len()).ok_or_else(|| broken("a resolution is longer than it says"))?;
        rest = behind;
        match *segment {
            Segment::Space { guard, offset, .. } => read_file(resolution.fd(guard), piece, offset, uncached)?,
            Segment::Bytes { start, len } => piece.copy_from_slice(&resolution.scratch()[start..start + len]),
            Segment::Memory { guard, offset, len } => {
                piece.copy_from_slice(&resolution.memory(guard)[offset..offset + len]);
            }
            Segment::Zeros { .. } => piece.fill(0),
        }
    }
    Ok(())
}

fn read_file(fd: BorrowedFd<'_>, piece: &mut [u8], offset: u64, uncached: bool) -> Result<(), Fault> {
    let fault = |source| Fault::Io { what: "reading a space", source };
    let mut done = 0;
    if uncached {
        done = sys::file::preadv_uncached(fd, &mut [IoSliceMut::new(piece)], offset).map_err(fault)?;
    }
    sys::file::pread_exact(fd, &mut piece[done..], offset + done as u64).map_err(fault)
}

/// Answers from the segments where they lie, with those in files taken from `files`.
fn gathered(resolution: &Resolution, files: &[u8], request: Request) {
    let mut parts = [&[][..]; MAX_PARTS];
    let mut count = 0;
    let mut files = files;
    let mut push = |part| {
        if let Some(slot) = parts.get_mut(count) {
            *slot = part;
        }
        count += 1;
    };
    for segment in resolution.segments() {
        match *segment {
            Segment::Bytes { start, len } => push(&resolution.scratch()[start..start + len]),
            Segment::Memory { guard, offset, len } => push(&resolution.memory(guard)[offset..offset + len]),
            Segment::Space { len, .. } => {
                let (piece, behind) = files.split_at(len);
                files = behind;
                push(piece);
            }
            Segment::Zeros { len } => {
                let mut left = len;
                while left > 0 {
                    let part = left.min(ZEROS.len());
                    push(&ZEROS[..part]);
                    left -= part;
                }
            }
        }
    }
    match parts.get(..count) {
        Some(parts) => request.ok(parts),
        // Cannot happen: at most 31 segments, and a megabyte of zeros is 16 parts. Were it to, it is an EIO.
        None => drop(request),
    }
}

/// Answers through a pipe; gives the request back when that does not work out.
fn spliced(resolution: &Resolution, kept: &mut Option<Pipe>, request: Request) -> Option<Request> {
    let len = resolution.len();
    // A pipe counts pages, not bytes: one for the header, and one more for each end of a segment.
    let pages = len / 4096 + 2 * resolution.segments().len() + 2;
    let fits = |pipe: &Pipe| pipe.capacity() / 4096 >= pages;
    let pipe = match kept.take().filter(fits) {
        Some(pipe) => pipe,
        None => match Pipe::new((pages * 4096).max(super::decide::MAX_READ + 16 * 4096)) {
            Ok(pipe) if fits(&pipe) => pipe,
            _ => return Some(request),
        },
    };
    // A pipe that something was left in is thrown away.
    if !fill_pipe(resolution, &pipe, &request) {
        return Some(request);
    }
    match request.splice(&pipe, size_of::<OutHeader>() + len) {
        Ok(()) => {
            *kept = Some(pipe);
            None
        }
        Err(request) => Some(request),
    }
}

/// Puts a whole message into an empty pipe; false when it does not take all of it.
fn fill_pipe(resolution: &Resolution, pipe: &Pipe, request: &Request) -> bool {
    let put = |bytes: &[u8]| pipe.put(bytes).is_ok_and(|n| n == bytes.len());
    if !put(request.header(resolution.len()).as_bytes()) {
        return false;
    }
    resolution.segments().iter().all(|segment| match *segment {
        Segment::Bytes { start, len } => put(&resolution.scratch()[start..start + len]),
        Segment::Memory { guard, offset, len } => put(&resolution.memory(guard)[offset..offset + len]),
        Segment::Zeros { len } => (0..len).step_by(ZEROS.len()).all(|at| put(&ZEROS[..ZEROS.len().min(len - at)])),
        Segment::Space { guard, offset, len } => {
            let mut done = 0;
            while done < len {
                match pipe.splice_in(resolution.fd(guard), offset + done as u64, len - done) {
                    Ok(n) if n > 0 => done += n,
                    _ => return false,
                }
            }
            true
        }
    })
}

#[cfg(test)]
mod tests;
