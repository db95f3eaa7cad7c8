//! The block-file session: image files for kernels to mount.
//!
//! Job: one FUSE session per daemon whose root directory (0700) has one regular file per image layout. Files are
//! added and removed while it runs; a file's size, times and bytes never change. Invariants: a file that was removed
//! is served until the kernel has forgotten it, because a file system that was mounted from it reads on; node
//! numbers are never used twice. Names are not cached by the kernel, in case they come and go, but files are: their
//! attributes and pages hold for ever. It does not know what the bytes mean.

use super::fuse::decide::{self, Readdirplus, Wish};
use super::fuse::mount::{self, MountOptions};
use super::fuse::read::{self, Context, TargetRef};
use super::fuse::reply::Request;
use super::fuse::serve::{Counters, Handler, InitRecord, Scratch, Session, Shared};
use super::fuse::wire::{
    self, Dirent, InHeader, InvalEntryOut, InvalInodeOut, Op, OpenOut, StatfsOut, StoreOut, fopen, notify,
};
use super::{Attr, Fault, Level};
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;
use store::BlockSource;
use zerocopy::IntoBytes;

/// How block files are served.
#[derive(Debug, Clone)]
pub struct BlockFilesOptions {
    /// Names the session in logs and in mountinfo.
    pub name: String,
    /// Serving threads.
    pub threads: usize,
    /// Readahead of the files in KiB; None leaves the kernel's 128.
    pub read_ahead_kb: Option<u32>,
}

impl Default for BlockFilesOptions {
    fn default() -> Self {
        BlockFilesOptions { name: "lazyroot-images".to_owned(), threads: 2, read_ahead_kb: Some(DEFAULT_READ_AHEAD_KB) }
    }
}

/// Measured: see `doc/format/fuse.md`.
const DEFAULT_READ_AHEAD_KB: u32 = 1024;

/// Pages are pushed in pieces of this size: larger calls take longer in sum.
const STORE_PIECE: usize = 128 << 10;

/// A file that was added. Only a name for it: it stays until [`BlockFiles::remove`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockFile {
    nodeid: u64,
}

/// The session. Dropping it ends it; file systems mounted from its files then get errors for what is not cached.
#[derive(Debug)]
pub struct BlockFiles {
    session: Session,
    handler: Arc<FilesHandler>,
    /// Bytes; 0 where it could not be set.
    read_ahead: u64,
}

impl BlockFiles {
    /// Starts a session without files on a detached mount. Needs root.
    pub fn start(options: &BlockFilesOptions, context: Context) -> Result<BlockFiles, Fault> {
        let mounted = mount::detached(&MountOptions {
            source: options.name.clone(),
            // 0700 root: nobody but us has business here.
            allow_other: false,
            suid: false,
            dev: false,
        })?;
        let handler = Arc::new(FilesHandler::default());
        // No passthrough, ever: a session that negotiated it could not lie below EROFS.
        let wish =
            Wish { readdirplus: Readdirplus::Never, posix_acl: false, idmap: false, no_open: true, export: false };
        let serving: Arc<dyn Handler> = handler.clone();
        let log = Arc::clone(&context.log);
        let session = Session::start(mounted, serving, options.name.clone(), context, wish, options.threads)?;
        let mut files = BlockFiles { session, handler, read_ahead: 0 };
        if let Some(kb) = options.read_ahead_kb {
            // Before anybody opens a file: open files keep what they found. Where /sys is read-only it is only slower.
            let ids = files.mount().and_then(sys::mount::ids);
            match ids.and_then(|ids| sys::mount::set_read_ahead_kb(ids, kb)) {
                Ok(()) => files.read_ahead = u64::from(kb) << 10,
                Err(e) => {
                    log.line(
                        Level::Warn,
                        format_args!("{}: readahead stays at the kernel's 128 KiB: {e}", options.name),
                    );
                }
            }
        }
        Ok(files)
    }

    /// Adds a file. Its size is the source's. Fails when the name is taken or is no file name.
    pub fn add(&self, name: &str, source: Arc<dyn BlockSource>) -> Result<BlockFile, Fault> {
        if name.is_empty() || name.len() > 255 || name == "." || name == ".." || name.contains(['/', '\0']) {
            return Err(Fault::Invalid("no file name"));
        }
        let mut table = self.handler.write();
        if table.by_name.contains_key(name.as_bytes()) {
            return Err(Fault::Invalid("the name is taken"));
        }
        table.last += 1;
        let nodeid = wire::ROOT + table.last;
        table.by_name.insert(name.as_bytes().into(), nodeid);
        table
            .nodes
            .insert(nodeid, Node { size: source.len_bytes(), source, name: Some(name.as_bytes().into()), lookups: 0 });
        Ok(BlockFile { nodeid })
    }

    /// Removes a file's name. Who has it open, a mounted file system for one, reads on; the source is dropped when
    /// the kernel has forgotten the file. Returns false when it was removed before. Not from a serving thread.
    pub fn remove(&self, file: BlockFile) -> bool {
        let mut table = self.handler.write();
        let Some(name) = table.nodes.get_mut(&file.nodeid).and_then(|node| node.name.take()) else { return false };
        table.by_name.remove(&name);
        table.drop_if_unused(file.nodeid);
        drop(table);
        // Lets the kernel drop the name and with it its reference. Refused when it does not know the name.
        let head = InvalEntryOut { parent: wire::ROOT, namelen: name.len() as u32, flags: 0 };
        let _ = self.session.notify(notify::INVAL_ENTRY, &[head.as_bytes(), &name, b"\0"]);
        true
    }

    /// The path at which this process reaches a file, to be given to mount(2) as a source. None when it was removed.
    /// The path works only in this process and only while the session lives. Not from a serving thread.
    pub fn path(&self, file: BlockFile) -> Option<PathBuf> {
        let table = self.handler.read();
        let name = table.nodes.get(&file.nodeid)?.name.as_ref()?;
        let name = std::str::from_utf8(name).expect("names were given as str");
        Some(sys::mount::fd_path(self.mount().ok()?).join(name))
    }

    /// Opens a file. Keep it open while pages are pushed, so that the kernel does not forget the file. Not from a
    /// serving thread, and not where it may be open when the process is killed: closing it waits for an answer to FLUSH
    /// that never comes (see [`sys::proc::spawn_apart`]).
    pub fn open(&self, file: BlockFile) -> io::Result<OwnedFd> {
        let path = self.path(file).ok_or(io::ErrorKind::NotFound)?;
        Ok(std::fs::File::open(path)?.into())
    }

    /// Puts bytes into the page cache of a file, as if they had been read. The caller vouches for them: the kernel
    /// overwrites what it has. `offset` and the length are whole pages inside the file; the last partial page cannot
    /// be pushed.
    ///
    /// The kernel must know the file ([`BlockFiles::open`]). Never from a serving thread or a completion: it waits
    /// for pages that are being read, whose answer would wait for it.
    pub fn notify_store(&self, file: BlockFile, offset: u64, data: &[u8]) -> io::Result<()> {
        let size = self.handler.read().nodes.get(&file.nodeid).map(|node| node.size).ok_or(io::ErrorKind::NotFound)?;
        let end = offset.checked_add(data.len() as u64).ok_or(io::ErrorKind::InvalidInput)?;
        if !offset.is_multiple_of(4096) || !data.len().is_multiple_of(4096) || end > size {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "only whole pages inside the file can be pushed"));
        }
        for (i, piece) in data.chunks(STORE_PIECE).enumerate() {
            let head = StoreOut {
                nodeid: file.nodeid,
                offset: offset + (i * STORE_PIECE) as u64,
                size: piece.len() as u32,
                padding: 0,
            };
            self.session.notify(notify::STORE, &[head.as_bytes(), piece])?;
        }
        Ok(())
    }

    /// Drops pages of a file from the page cache; `len` 0 means to the end. Not from a serving thread.
    pub fn invalidate(&self, file: BlockFile, offset: u64, len: u64) -> io::Result<()> {
        let signed = |n: u64| i64::try_from(n).map_err(|_| io::ErrorKind::InvalidInput);
        let head = InvalInodeOut { ino: file.nodeid, off: signed(offset)?, len: signed(len)? };
        self.session.notify(notify::INVAL_INODE, &[head.as_bytes()])
    }

    /// The session's detached mount.
    pub fn mount(&self) -> io::Result<BorrowedFd<'_>> {
        self.session.mount().ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// What the kernel reads ahead of the files, in bytes; 0 when that was left to the kernel.
    pub fn read_ahead(&self) -> u64 {
        self.read_ahead
    }

    /// How many files the session holds, those that were removed but are still in use included.
    pub fn len(&self) -> usize {
        self.handler.read().nodes.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What was counted so far, over all files.
    pub fn counters(&self) -> &Counters {
        self.session.counters()
    }

    /// How many reads are waiting for missing bytes now.
    pub fn parked_now(&self) -> usize {
        self.session.parked_now()
    }

    /// What was agreed on with the kernel.
    pub fn init_record(&self) -> Option<InitRecord> {
        self.session.init_record()
    }

    /// Whether the session still serves.
    pub fn is_alive(&self) -> bool {
        self.session.is_alive()
    }

    /// Waits until the session no longer serves; false when `timeout` passed first.
    pub fn wait(&self, timeout: Option<Duration>) -> bool {
        self.session.wait(timeout)
    }

    /// Ends the session, as dropping it does.
    pub fn stop(self) {
        self.session.stop();
    }
}

#[derive(Default)]
struct FilesHandler {
    table: RwLock<Table>,
}

impl std::fmt::Debug for FilesHandler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FilesHandler({} files)", self.read().nodes.len())
    }
}

#[derive(Default)]
struct Table {
    by_name: HashMap<Box<[u8]>, u64>,
    /// By node number, which also orders the directory.
    nodes: BTreeMap<u64, Node>,
    last: u64,
}

struct Node {
    source: Arc<dyn BlockSource>,
    size: u64,
    /// None once removed.
    name: Option<Box<[u8]>>,
    /// How many references the kernel has.
    lookups: u64,
}

impl Table {
    fn drop_if_unused(&mut self, nodeid: u64) {
        if self.nodes.get(&nodeid).is_some_and(|node| node.name.is_none() && node.lookups == 0) {
            self.nodes.remove(&nodeid);
        }
    }
}

const DIR_MODE: u32 = 0o040_700;
const FILE_MODE: u32 = 0o100_400;

fn root_attr() -> Attr {
    Attr { mode: DIR_MODE, uid: sys::proc::euid(), gid: sys::proc::egid(), nlink: 2, ..Default::default() }
}

fn file_attr(size: u64) -> Attr {
    Attr {
        mode: FILE_MODE,
        uid: sys::proc::euid(),
        gid: sys::proc::egid(),
        nlink: 1,
        size,
        blocks: size.div_ceil(512),
        ..Default::default()
    }
}

impl FilesHandler {
    fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.table.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Table> {
        self.table.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn lookup(&self, name: &[u8]) -> Result<wire::EntryOut, Fault> {
        let mut table = self.write();
        let nodeid = *table.by_name.get(name).ok_or(Fault::NoName)?;
        let node = table.nodes.get_mut(&nodeid).ok_or(Fault::NoName)?;
        node.lookups += 1;
        Ok(wire::EntryOut { entry_valid: 0, ..decide::entry_out(nodeid, &file_attr(node.size)) })
    }

    fn attr(&self, nodeid: u64) -> Result<Attr, Fault> {
        if nodeid == wire::ROOT {
            return Ok(root_attr());
        }
        self.read().nodes.get(&nodeid).map(|node| file_attr(node.size)).ok_or(Fault::NoInode)
    }

    /// The cookie of a name is its node number.
    fn readdir(&self, cookie: u64, size: u32, out: &mut Vec<u8>) {
        let limit = usize::try_from(size).unwrap_or(usize::MAX).min(decide::MAX_READ);
        out.clear();
        let table = self.read();
        let dot = (0, &b"."[..], wire::ROOT, DIR_MODE, 0);
        let dots = [dot, (1, b"..", wire::ROOT, DIR_MODE, 1)];
        let files = table
            .nodes
            .range(cookie.max(2).saturating_sub(1)..)
            .filter_map(|(id, node)| Some((*id, node.name.as_deref()?, *id, FILE_MODE, *id)));
        for (at, name, ino, mode, _) in dots.into_iter().chain(files) {
            if at < cookie {
                continue;
            }
            let head = Dirent { ino, off: at + 1, namelen: 0, kind: mode >> 12 };
            if !wire::push_dirent(out, limit, None, head, name) {
                break;
            }
        }
    }
}

impl Handler for FilesHandler {
    fn handle(&self, shared: &Arc<Shared>, header: &InHeader, op: Op<'_>, request: Request, scratch: &mut Scratch) {
        let node = header.nodeid;
        let fault = match op {
            Op::Read { offset, size } => {
                let source = self.read().nodes.get(&node).map(|n| (Arc::clone(&n.source), n.size));
                match source {
                    Some((source, file_size)) => {
                        let len = decide::clip(offset, size, file_size);
                        let target = TargetRef::Block(&source);
                        return read::read(shared, &mut scratch.read, target, request, (offset, len, header.pid));
                    }
                    None if node == wire::ROOT => Fault::IsDirectory,
                    None => Fault::NoInode,
                }
            }
            Op::Lookup { name } if node == wire::ROOT => match self.lookup(name) {
                Ok(entry) => return request.ok(&[entry.as_bytes()]),
                Err(fault) => fault,
            },
            Op::Lookup { .. } => Fault::NotDirectory,
            Op::Getattr => match self.attr(node) {
                Ok(attr) => return request.ok(&[decide::attr_out(node, &attr).as_bytes()]),
                Err(fault) => fault,
            },
            Op::Readdir { offset, size, plus: false } if node == wire::ROOT => {
                self.readdir(offset, size, &mut scratch.out);
                return request.ok(&[&scratch.out]);
            }
            // The directory changes, so its listing is not kept.
            Op::Opendir => return request.ok(&[OpenOut::default().as_bytes()]),
            // Without a request from now on, and with the pages kept.
            Op::Open { .. } if shared.has_no_open() => Fault::Unsupported,
            Op::Open { .. } => {
                let out = OpenOut { open_flags: fopen::KEEP_CACHE, ..Default::default() };
                return request.ok(&[out.as_bytes()]);
            }
            Op::Statfs => {
                let out = StatfsOut { bsize: 4096, frsize: 4096, namelen: 255, ..Default::default() };
                return request.ok(&[out.as_bytes()]);
            }
            Op::Getxattr { .. } | Op::Listxattr { .. } => Fault::Unsupported,
            _ => Fault::Unsupported,
        };
        shared.fail(request, &fault, header);
    }

    fn forget(&self, nodeid: u64, nlookup: u64) {
        let mut table = self.write();
        if let Some(node) = table.nodes.get_mut(&nodeid) {
            node.lookups = node.lookups.saturating_sub(nlookup);
            table.drop_if_unused(nodeid);
        }
    }
}
