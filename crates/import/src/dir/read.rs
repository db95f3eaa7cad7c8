//! The workers: open, read, hash and pack files below their directories' descriptors.

use super::{Batch, BatchDir, BatchFile, FileId, Links, Message, Outcome, RawAttrs, TRIES, XattrList, full_path};
use crate::chunker::{ChunkWriter, Frames, lock};
use crate::context::Context;
use crate::error::ImportError;
use image::tree::xattr_is_supported;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, Statx, StatxAttributes, StatxFlags};
use rustix::io::Errno;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender};

/// Bytes read at a time; a multiple of the chunk size.
const BUFFER: usize = 256 << 10;
const _: () = assert!(BUFFER.is_multiple_of(format::CHUNK));

/// Reads batches until there are no more.
pub(super) fn work<'a>(
    context: &'a Context<'a>,
    root: &Path,
    batches: &Mutex<Receiver<Batch>>,
    links: &Links,
    results: &Sender<Message>,
) {
    let mut reader = Reader {
        context,
        root,
        links,
        writer: ChunkWriter::new(context, Frames::Here),
        buffer: vec![0; BUFFER],
        xattrs: XattrBuffers::default(),
        noatime: true,
    };
    loop {
        let batch = lock(batches).recv();
        let Ok(mut batch) = batch else { break };
        if context.stopped() {
            continue;
        }
        let mut outcomes = Vec::with_capacity(batch.files.len());
        let mut failed = None;
        for file in &batch.files {
            match reader.file(&batch.dirs[file.dir], file) {
                Ok(outcome) => outcomes.push(outcome),
                Err(e) => {
                    failed = Some(e);
                    break;
                }
            }
        }
        context.entries(outcomes.len() as u64);
        for dir in &mut batch.dirs {
            dir.fd = None;
        }
        // The receiver stays to the end.
        let _ = match failed {
            Some(e) => {
                context.stop();
                results.send(Message::Failed(e))
            }
            None => results.send(Message::Batch(batch, outcomes)),
        };
    }
    let _ = results.send(Message::Closed(reader.writer.close()));
}

struct Reader<'a, 'r> {
    context: &'a Context<'a>,
    root: &'r Path,
    links: &'r Links,
    writer: ChunkWriter<'a>,
    buffer: Vec<u8>,
    xattrs: XattrBuffers,
    /// Reading does not have to change access times; only owners may say so.
    noatime: bool,
}

/// Why a file has to be read again.
enum Again {
    Changed,
    Failed(ImportError),
}

impl From<ImportError> for Again {
    fn from(e: ImportError) -> Self {
        Again::Failed(e)
    }
}

impl Reader<'_, '_> {
    fn file(&mut self, dir: &BatchDir, file: &BatchFile) -> Result<Outcome, ImportError> {
        let Some(dir_fd) = dir.fd.clone() else { return Ok(Outcome::Vanished) };
        let path = || full_path(self.root, &dir.path, &file.name);
        let failed = |op, e: Errno| ImportError::io(op, path().display().to_string(), e.into());
        // A claim on a file with several names is made once, whatever happens afterwards.
        let mut claimed: Option<FileId> = None;
        for _ in 0..TRIES {
            let fd = match self.open(&dir_fd, &file.name) {
                Ok(fd) => fd,
                Err(Errno::NOENT) => return Ok(Outcome::Vanished),
                Err(Errno::LOOP | Errno::NXIO | Errno::NODEV) => continue,
                Err(Errno::ACCESS | Errno::PERM) if self.context.options.skip_unreadable => {
                    return Ok(Outcome::Unreadable);
                }
                Err(e) => return Err(failed("open", e)),
            };
            let before = stat(&fd).map_err(|e| failed("stat", e))?;
            if FileType::from_raw_mode(before.stx_mode.into()) != FileType::RegularFile {
                continue;
            }
            if is_mount_root(&before) {
                return Ok(Outcome::MountPoint(raw_attrs(&before)));
            }
            let id = file_id(&before);
            if before.stx_nlink > 1 && claimed != Some(id) {
                if let Some(first) = self.links.claim(id, before.stx_nlink.into(), file.node) {
                    return Ok(Outcome::Link(first));
                }
                claimed = Some(id);
            }
            match self.content(&fd, &before) {
                Ok(outcome) => return Ok(outcome),
                Err(Again::Changed) => {}
                Err(Again::Failed(ImportError::Io { op, source, .. })) => {
                    return Err(ImportError::io(
                        op,
                        full_path(self.root, &dir.path, &file.name).display().to_string(),
                        source,
                    ));
                }
                Err(Again::Failed(ImportError::Limit { what, .. })) => {
                    let place = full_path(self.root, &dir.path, &file.name).display().to_string();
                    return Err(ImportError::Limit { place, what });
                }
                Err(Again::Failed(e)) => return Err(e),
            }
        }
        Err(ImportError::Changing { path: full_path(self.root, &dir.path, &file.name), tries: TRIES })
    }

    fn open(&mut self, dir: &OwnedFd, name: &[u8]) -> Result<OwnedFd, Errno> {
        // A FIFO or device that has taken the name's place must not make this wait.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
        if self.noatime {
            match rustix::fs::openat(dir, name, flags | OFlags::NOATIME, Mode::empty()) {
                Err(Errno::PERM) => self.noatime = false,
                other => return other,
            }
        }
        rustix::fs::openat(dir, name, flags, Mode::empty())
    }

    fn content(&mut self, fd: &OwnedFd, before: &Statx) -> Result<Outcome, Again> {
        let size = before.stx_size;
        let io = |op| move |e: Errno| Again::Failed(ImportError::io(op, "", e.into()));
        let limit = self.context.options.limits.file_bytes;
        if size > limit {
            let what = format!("it has {size} bytes, the limit on one file is {limit}");
            return Err(Again::Failed(ImportError::Limit { place: String::new(), what }));
        }
        self.writer.begin(size);
        if before.stx_blocks.saturating_mul(512) < size {
            let mut at = 0;
            while at < size {
                let data = match rustix::fs::seek(fd, SeekFrom::Data(at)) {
                    Ok(data) => data.min(size),
                    Err(Errno::NXIO) => break,
                    // The file system cannot tell.
                    Err(Errno::INVAL) => at,
                    Err(e) => return Err(io("seek in")(e)),
                };
                let hole = match rustix::fs::seek(fd, SeekFrom::Hole(data)) {
                    Ok(hole) => hole.min(size),
                    Err(Errno::NXIO | Errno::INVAL) => size,
                    Err(e) => return Err(io("seek in")(e)),
                };
                self.range(fd, data, hole)?;
                at = hole.max(data);
                if at == data && data < size && hole <= data {
                    return Err(Again::Changed);
                }
            }
        } else {
            self.range(fd, 0, size)?;
        }
        let xattrs = self.xattrs.of_fd(fd, self.context).map_err(io("read the attributes of"))?;
        let (digest, runs) = self.writer.finish()?;
        let runs = runs.to_vec();
        let after = stat(fd).map_err(io("stat"))?;
        if changed(before, &after) {
            return Err(Again::Changed);
        }
        self.context.file_size(size)?;
        Ok(Outcome::File { attrs: raw_attrs(before), xattrs, size, digest, runs })
    }

    /// Reads and packs one range of data.
    fn range(&mut self, fd: &OwnedFd, mut at: u64, end: u64) -> Result<(), Again> {
        while at < end {
            // Steps end at chunk boundaries, so that whole chunks are taken from the buffer without a copy.
            let step = BUFFER as u64 - at % format::CHUNK as u64;
            let want = step.min(end - at) as usize;
            let n = match rustix::io::pread(fd, &mut self.buffer[..want], at) {
                Ok(0) => return Err(Again::Changed),
                Ok(n) => n,
                Err(Errno::INTR) => continue,
                Err(e) => return Err(Again::Failed(ImportError::io("read", "", e.into()))),
            };
            self.writer.data(at, &self.buffer[..n])?;
            self.context.took(n as u64);
            at += n as u64;
        }
        Ok(())
    }
}

/// Everything that is wanted about an open file.
pub(super) fn stat(fd: impl AsFd) -> Result<Statx, Errno> {
    rustix::fs::statx(fd, c"", AtFlags::EMPTY_PATH, StatxFlags::BASIC_STATS)
}

pub(super) fn is_mount_root(s: &Statx) -> bool {
    s.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT)
        && s.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)
}

pub(super) fn file_id(s: &Statx) -> FileId {
    (rustix::fs::makedev(s.stx_dev_major, s.stx_dev_minor), s.stx_ino)
}

pub(super) fn raw_attrs(s: &Statx) -> RawAttrs {
    RawAttrs {
        mode: s.stx_mode & 0o7777,
        uid: s.stx_uid,
        gid: s.stx_gid,
        mtime_sec: s.stx_mtime.tv_sec,
        mtime_nsec: s.stx_mtime.tv_nsec,
    }
}

/// Whether somebody wrote to the file (or to its attributes) in between.
fn changed(a: &Statx, b: &Statx) -> bool {
    let time = |t: &rustix::fs::StatxTimestamp| (t.tv_sec, t.tv_nsec);
    (a.stx_size, time(&a.stx_mtime), time(&a.stx_ctime)) != (b.stx_size, time(&b.stx_mtime), time(&b.stx_ctime))
}

/// Room for reading extended attributes: small at first, as large as the kernel's limits when needed.
#[derive(Debug)]
pub(super) struct XattrBuffers {
    names: Vec<u8>,
    value: Vec<u8>,
}

impl Default for XattrBuffers {
    fn default() -> Self {
        XattrBuffers { names: vec![0; 512], value: vec![0; 1024] }
    }
}

/// The most bytes of a list of names, and of a value.
const XATTR_MAX: usize = 64 << 10;

impl XattrBuffers {
    pub(super) fn of_fd(&mut self, fd: impl AsFd, context: &Context<'_>) -> Result<XattrList, Errno> {
        let fd = fd.as_fd();
        self.read(context, |buf| rustix::fs::flistxattr(fd, buf), |name, buf| rustix::fs::fgetxattr(fd, name, buf))
    }

    /// For what cannot be opened: symbolic links, devices. Not followed.
    pub(super) fn of_path(&mut self, path: &[u8], context: &Context<'_>) -> Result<XattrList, Errno> {
        self.read(context, |buf| rustix::fs::llistxattr(path, buf), |name, buf| rustix::fs::lgetxattr(path, name, buf))
    }

    fn read(
        &mut self,
        context: &Context<'_>,
        list: impl Fn(&mut [u8]) -> Result<usize, Errno>,
        get: impl Fn(&[u8], &mut [u8]) -> Result<usize, Errno>,
    ) -> Result<XattrList, Errno> {
        let len = match grow(&mut self.names, &list) {
            Ok(len) => len,
            Err(Errno::OPNOTSUPP | Errno::NODATA) => 0,
            Err(Errno::ACCESS | Errno::PERM) => {
                context.dropped_xattrs(1);
                0
            }
            Err(e) => return Err(e),
        };
        let mut out = Vec::new();
        for name in self.names[..len].split(|&b| b == 0).filter(|n| !n.is_empty()) {
            if !xattr_is_supported(name) {
                context.dropped_xattrs(1);
                continue;
            }
            match grow(&mut self.value, |buf| get(name, buf)) {
                Ok(len) => out.push((name.to_vec(), self.value[..len].to_vec())),
                // Gone in between; the change of ctime is noticed elsewhere.
                Err(Errno::NODATA) => {}
                Err(Errno::ACCESS | Errno::PERM | Errno::OPNOTSUPP) => context.dropped_xattrs(1),
                Err(e) => return Err(e),
            }
        }
        Ok(out)
    }
}

fn grow(buffer: &mut Vec<u8>, get: impl Fn(&mut [u8]) -> Result<usize, Errno>) -> Result<usize, Errno> {
    match get(buffer) {
        Err(Errno::RANGE) if buffer.len() < XATTR_MAX => {
            buffer.resize(XATTR_MAX, 0);
            get(buffer)
        }
        other => other,
    }
}
