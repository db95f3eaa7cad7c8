//! The tree session: an image as a FUSE file system.
//!
//! Job: answer the operations on names and inodes from a [`FileTree`]. A node's number is its inode's plus one (the
//! root is 1 for the kernel, 0 in a tree); so numbers are stable, hard links share one, and forgets mean nothing.
//! Invariants: nothing is remembered between requests; no request allocates once the thread's buffers have grown.
//! Failure model: a fault of the tree becomes an errno in one place. It does not know indexes or spaces.

use super::fuse::decide::{self, Readdirplus, Wish, XattrReply};
use super::fuse::mount::{self, MountOptions};
use super::fuse::read::{self, Context, TargetRef};
use super::fuse::reply::Request;
use super::fuse::serve::{Handler, Scratch, Session, Shared};
use super::fuse::wire::{self, Dirent, GetxattrOut, InHeader, LseekOut, Op, OpenOut, StatfsOut, fopen};
use super::{Attr, Fault, FileTree, Level, Seek};
use std::path::Path;
use std::sync::Arc;
use zerocopy::IntoBytes;

const S_IFMT: u32 = 0o170_000;
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;

/// How a tree is served.
#[derive(Debug, Clone)]
pub struct TreeOptions {
    /// Names the session in logs and in mountinfo.
    pub name: String,
    /// Serving threads.
    pub threads: usize,
    /// Users other than the one who mounts may use it.
    pub allow_other: bool,
    /// Set user id bits count.
    pub suid: bool,
    /// Device nodes work.
    pub dev: bool,
    /// The image has ACLs: the kernel asks for them and goes by them. Without, it never asks.
    pub posix_acl: bool,
    /// `trusted.*` attributes exist, for root: not in a user's own mount, whose image could make up any.
    pub trusted: bool,
    /// When the kernel asks for names with their attributes.
    pub readdirplus: Readdirplus,
    /// Opening a file or directory needs no request.
    pub no_open: bool,
    /// Readahead in KiB, as far as we may set it (root may). None: the kernel's 128.
    pub read_ahead_kb: Option<u32>,
    /// For statfs: inodes in the tree.
    pub inodes: u64,
    /// For statfs: bytes of content.
    pub bytes: u64,
}

impl Default for TreeOptions {
    fn default() -> Self {
        TreeOptions {
            name: "lazyroot".to_owned(),
            threads: 2,
            allow_other: sys::proc::is_root(),
            suid: false,
            dev: false,
            posix_acl: false,
            trusted: sys::proc::is_root(),
            readdirplus: Readdirplus::default(),
            no_open: true,
            read_ahead_kb: None,
            inodes: 0,
            bytes: 0,
        }
    }
}

/// Starts sessions that serve a tree.
#[derive(Debug)]
pub struct TreeSession;

impl TreeSession {
    /// Serves `tree` on a detached mount, which the session holds ([`Session::mount`]). Needs root.
    pub fn start(tree: Arc<dyn FileTree>, options: &TreeOptions, context: Context) -> Result<Session, Fault> {
        let log = Arc::clone(&context.log);
        let session = Self::serve(mount::detached(&mount_options(options))?, tree, options, context)?;
        if let (Some(kb), Some(mount)) = (options.read_ahead_kb, session.mount())
            && let Err(e) = sys::mount::ids(mount).and_then(|ids| sys::mount::set_read_ahead_kb(ids, kb))
        {
            log.line(Level::Warn, format_args!("{}: readahead stays at the kernel's 128 KiB: {e}", options.name));
        }
        Ok(session)
    }

    /// Serves `tree` at a path, mounted through fusermount3, as an ordinary user can. The mount ends with the session.
    pub fn start_at(
        tree: Arc<dyn FileTree>,
        place: &Path,
        options: &TreeOptions,
        context: Context,
    ) -> Result<Session, Fault> {
        Self::serve(mount::through_fusermount(place, &mount_options(options))?, tree, options, context)
    }

    fn serve(
        mounted: super::fuse::serve::Mounted,
        tree: Arc<dyn FileTree>,
        options: &TreeOptions,
        context: Context,
    ) -> Result<Session, Fault> {
        let wish = Wish {
            readdirplus: options.readdirplus,
            posix_acl: options.posix_acl,
            idmap: true,
            no_open: options.no_open,
            export: true,
        };
        let handler =
            Arc::new(TreeHandler { tree, inodes: options.inodes, bytes: options.bytes, trusted: options.trusted });
        Session::start(mounted, handler, options.name.clone(), context, wish, options.threads)
    }
}

fn mount_options(options: &TreeOptions) -> MountOptions {
    MountOptions {
        source: options.name.clone(),
        allow_other: options.allow_other,
        suid: options.suid,
        dev: options.dev,
    }
}

struct TreeHandler {
    tree: Arc<dyn FileTree>,
    trusted: bool,
    inodes: u64,
    bytes: u64,
}

/// The inode of a node number.
fn ino_of(nodeid: u64) -> Result<u32, Fault> {
    nodeid.checked_sub(wire::ROOT).and_then(|n| u32::try_from(n).ok()).ok_or(Fault::NoInode)
}

/// The node number of an inode, also its `st_ino`.
fn node_of(ino: u32) -> u64 {
    u64::from(ino) + wire::ROOT
}

impl Handler for TreeHandler {
    fn handle(&self, shared: &Arc<Shared>, header: &InHeader, op: Op<'_>, request: Request, scratch: &mut Scratch) {
        let answered = ino_of(header.nodeid).and_then(|ino| match op {
            Op::Lookup { name } => self.lookup(ino, name).map(|entry| Answer::Bytes(Fixed::Entry(entry))),
            Op::Getattr => {
                self.tree.attr(ino).map(|attr| Answer::Bytes(Fixed::Attr(decide::attr_out(node_of(ino), &attr))))
            }
            Op::Readlink => self.tree.link_target(ino).map(Answer::Slice),
            // The kernel takes ENOSYS as success, asks never again, and keeps its caches as with these flags.
            Op::Open { .. } | Op::Opendir if shared.has_no_open() => Err(Fault::Unsupported),
            Op::Open { .. } => Ok(opened(fopen::KEEP_CACHE)),
            Op::Opendir => Ok(opened(fopen::KEEP_CACHE | fopen::CACHE_DIR)),
            Op::Read { offset, size } => {
                self.regular(ino).map(|attr| Answer::Read { ino, offset, len: decide::clip(offset, size, attr.size) })
            }
            Op::Readdir { offset, size, plus } => self.readdir(ino, offset, size, plus, scratch).map(|()| Answer::Out),
            Op::Statfs => Ok(Answer::Bytes(Fixed::Statfs(self.statfs()))),
            // Whether the caller may read `trusted.*` the kernel decides before it asks.
            Op::Getxattr { name, .. } if !self.trusted && is_trusted(name) => Err(Fault::NoXattr),
            Op::Getxattr { name, size } => self.getxattr(ino, name, size, scratch),
            Op::Listxattr { size } => self.listxattr(ino, header.pid, size, scratch),
            Op::Lseek { offset, whence } => self.lseek(ino, offset, whence),
            _ => Err(Fault::Unsupported),
        });
        match answered {
            Ok(Answer::Bytes(fixed)) => request.ok(&[fixed.as_bytes()]),
            Ok(Answer::Slice(bytes)) => request.ok(&[bytes]),
            Ok(Answer::Out) => request.ok(&[&scratch.out]),
            Ok(Answer::Read { ino, offset, len }) => {
                let target = TargetRef::Tree(&self.tree, ino);
                read::read(shared, &mut scratch.read, target, request, (offset, len, header.pid));
            }
            Err(fault) => shared.fail(request, &fault, header),
        }
    }
}

/// How a request is answered.
enum Answer<'a> {
    Bytes(Fixed),
    Slice(&'a [u8]),
    /// With what lies in the thread's buffer.
    Out,
    Read {
        ino: u32,
        offset: u64,
        len: usize,
    },
}

/// Answers of a fixed size.
enum Fixed {
    Entry(wire::EntryOut),
    Attr(wire::AttrOut),
    Open(OpenOut),
    Statfs(StatfsOut),
    Xattr(GetxattrOut),
    Lseek(LseekOut),
}

impl Fixed {
    fn as_bytes(&self) -> &[u8] {
        match self {
            Fixed::Entry(x) => x.as_bytes(),
            Fixed::Attr(x) => x.as_bytes(),
            Fixed::Open(x) => x.as_bytes(),
            Fixed::Statfs(x) => x.as_bytes(),
            Fixed::Xattr(x) => x.as_bytes(),
            Fixed::Lseek(x) => x.as_bytes(),
        }
    }
}

impl TreeHandler {
    fn lookup(&self, parent: u32, name: &[u8]) -> Result<wire::EntryOut, Fault> {
        if name.len() > 255 {
            return Err(Fault::NameTooLong);
        }
        // Of a node that it only knows by number (a file handle) the kernel asks for `.` and `..`.
        let found = if name == b"." { Some(parent) } else { self.tree.lookup(parent, name)? };
        match found {
            Some(ino) => Ok(decide::entry_out(node_of(ino), &self.tree.attr(ino)?)),
            None => Ok(decide::no_entry()),
        }
    }

    fn regular(&self, ino: u32) -> Result<Attr, Fault> {
        let attr = self.tree.attr(ino)?;
        match attr.mode & S_IFMT {
            S_IFREG => Ok(attr),
            S_IFDIR => Err(Fault::IsDirectory),
            _ => Err(Fault::Invalid("not a regular file")),
        }
    }

    fn readdir(&self, dir: u32, cookie: u64, size: u32, plus: bool, scratch: &mut Scratch) -> Result<(), Fault> {
        let limit = usize::try_from(size).unwrap_or(usize::MAX).min(decide::MAX_READ);
        let out = &mut scratch.out;
        out.clear();
        // The dots have no entry of their own (node 0): the kernel knows these inodes.
        let nothing = plus.then(wire::EntryOut::default);
        for (at, name) in [(0, &b"."[..]), (1, b"..")] {
            if cookie > at {
                continue;
            }
            let ino = if at == 0 { dir } else { self.tree.lookup(dir, b"..")?.unwrap_or(dir) };
            let head = Dirent { ino: node_of(ino), off: at + 1, namelen: 0, kind: S_IFDIR >> 12 };
            if !wire::push_dirent(out, limit, nothing.as_ref(), head, name) {
                return Ok(());
            }
        }
        // A cookie beyond what ordinals can count is beyond the end.
        let from = if cookie < 2 { Some(0) } else { decide::ordinal_of(cookie) };
        let Some(from) = from else { return Ok(()) };
        let mut fault = None;
        self.tree.entries(dir, from, &mut |entry| {
            let head = Dirent {
                ino: node_of(entry.ino),
                off: decide::cookie_after(entry.ordinal),
                namelen: 0,
                kind: (entry.kind & S_IFMT) >> 12,
            };
            let with = match plus.then(|| self.tree.attr(entry.ino)).transpose() {
                Ok(attr) => attr.map(|attr| decide::entry_out(node_of(entry.ino), &attr)),
                Err(e) => {
                    fault = Some(e);
                    return false;
                }
            };
            wire::push_dirent(out, limit, with.as_ref(), head, entry.name)
        })?;
        match fault {
            // What came before it is good; the next request starts with the bad one and fails.
            Some(fault) if out.is_empty() => Err(fault),
            _ => Ok(()),
        }
    }

    fn statfs(&self) -> StatfsOut {
        StatfsOut {
            // Tools take a file system without blocks for none at all.
            blocks: self.bytes.div_ceil(4096).max(1),
            files: self.inodes,
            bsize: 4096,
            frsize: 4096,
            namelen: 255,
            ..Default::default()
        }
    }

    fn getxattr(&self, ino: u32, name: &[u8], room: u32, scratch: &mut Scratch) -> Result<Answer<'_>, Fault> {
        let out = &mut scratch.out;
        out.clear();
        let mut found = false;
        self.tree.xattrs(ino, &mut |n, value| {
            if n == name {
                found = true;
                out.extend_from_slice(value);
            }
            !found
        })?;
        if !found {
            return Err(Fault::NoXattr);
        }
        sized(out.len(), room)
    }

    /// The kernel lists what it is told, to everybody, while file systems of its own show `trusted.*` to CAP_SYS_ADMIN
    /// only. The request names no user (where mounts can be id-mapped), but the thread, which waits for the answer.
    fn listxattr(&self, ino: u32, tid: u32, room: u32, scratch: &mut Scratch) -> Result<Answer<'_>, Fault> {
        let out = &mut scratch.out;
        out.clear();
        // Looked up only when there is something to hide.
        let mut may_see = None;
        self.tree.xattrs(ino, &mut |name, _| {
            let mut is_seen = || *may_see.get_or_insert_with(|| self.trusted && sys::proc::is_administrator(tid));
            if !is_trusted(name) || is_seen() {
                out.extend_from_slice(name);
                out.push(0);
            }
            true
        })?;
        sized(out.len(), room)
    }

    fn lseek(&self, ino: u32, offset: u64, whence: u32) -> Result<Answer<'_>, Fault> {
        // SEEK_DATA and SEEK_HOLE; the kernel answers all others itself.
        let what = match whence {
            3 => Seek::Data,
            4 => Seek::Hole,
            _ => return Err(Fault::Invalid("lseek")),
        };
        if offset >= self.regular(ino)?.size {
            return Err(Fault::NoData);
        }
        let at = self.tree.seek(ino, offset, what)?.ok_or(Fault::NoData)?;
        Ok(Answer::Bytes(Fixed::Lseek(LseekOut { offset: at })))
    }
}

fn is_trusted(name: &[u8]) -> bool {
    name.starts_with(b"trusted.")
}

fn sized<'a>(len: usize, room: u32) -> Result<Answer<'a>, Fault> {
    Ok(match decide::xattr_reply(len, room)? {
        XattrReply::Size(size) => Answer::Bytes(Fixed::Xattr(GetxattrOut { size, padding: 0 })),
        XattrReply::Value => Answer::Out,
    })
}

fn opened<'a>(flags: u32) -> Answer<'a> {
    Answer::Bytes(Fixed::Open(OpenOut { open_flags: flags, ..Default::default() }))
}
