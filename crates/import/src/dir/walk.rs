//! The walk: directories in order, everything but the content of files.

use super::read::{XattrBuffers, file_id, is_mount_root, raw_attrs, stat};
use super::{
    Applier, BATCH, BATCH_DIRS, Batch, BatchDir, BatchFile, FileId, Links, Message, RawAttrs, TRIES, XattrList,
    full_path, tree_error,
};
use crate::error::ImportError;
use crate::glob::{Patterns, State};
use image::tree::{Kind, NodeId, Tree};
use rustix::fs::{AtFlags, CWD, FileType, Mode, OFlags, RawDir, Statx, StatxFlags};
use rustix::io::Errno;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender};

/// Descriptors of ancestors that stay open.
const OPEN_ANCESTORS: usize = 64;

/// Opens the directory that the user named; a symbolic link to it is followed, since the user wrote it.
pub(super) fn open_root(path: &Path) -> Result<OwnedFd, ImportError> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let place = || format!("dir:{}", path.display());
    rustix::fs::openat(CWD, path, flags, Mode::empty()).map_err(|e| match e {
        Errno::NOENT => ImportError::NotFound { place: place(), what: "no such directory".into() },
        Errno::NOTDIR => ImportError::NotFound { place: place(), what: "not a directory".into() },
        e => ImportError::io("open", place(), e.into()),
    })
}

/// Device and inode of a directory.
pub(super) fn id_of(path: &Path) -> Option<FileId> {
    rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::BASIC_STATS).ok().map(|s| file_id(&s))
}

/// A directory whose subdirectories are being visited.
struct Frame {
    /// Its own name; empty for the root.
    name: Vec<u8>,
    path: Arc<[u8]>,
    /// Closed while far from the walk.
    fd: Option<Arc<OwnedFd>>,
    id: FileId,
    attrs: RawAttrs,
    xattrs: XattrList,
    /// Made when something in it is wanted.
    node: Option<NodeId>,
    state: Matched,
    /// Subdirectories still to be visited, the next one last.
    left: Vec<(Vec<u8>, Matched)>,
}

/// What the patterns say about a path.
#[derive(Debug, Clone)]
pub(super) struct Matched {
    include: State,
    exclude: State,
    /// It, or an ancestor, is included.
    pub(super) included: bool,
}

impl Matched {
    /// About the root.
    pub(super) fn start(include: &Patterns, exclude: &Patterns) -> Matched {
        Matched { include: include.start(), exclude: exclude.start(), included: include.is_empty() }
    }

    /// About a name in a directory; `None` when it is not to be looked at.
    pub(super) fn step(&self, include: &Patterns, exclude: &Patterns, name: &[u8], is_dir: bool) -> Option<Matched> {
        let mut state = Matched {
            include: include.step(&self.include, name),
            exclude: exclude.step(&self.exclude, name),
            included: self.included,
        };
        if exclude.hit(&state.exclude, is_dir) {
            return None;
        }
        state.included |= include.hit(&state.include, is_dir);
        (state.included || is_dir && include.open(&state.include)).then_some(state)
    }
}

/// The walk over one tree.
pub(super) struct Walk<'a, 'w> {
    applier: Applier<'a>,
    frames: Vec<Frame>,
    device: (u32, u32),
    store: Option<FileId>,
    include: &'w Patterns,
    exclude: &'w Patterns,
    links: &'w Links,
    batch: Batch,
    to_workers: SyncSender<Batch>,
    results: &'w Receiver<Message>,
    xattrs: XattrBuffers,
}

impl<'a, 'w> Walk<'a, 'w> {
    pub(super) fn new(
        applier: Applier<'a>,
        root: OwnedFd,
        store: Option<FileId>,
        patterns: (&'w Patterns, &'w Patterns),
        links: &'w Links,
        to_workers: SyncSender<Batch>,
        results: &'w Receiver<Message>,
    ) -> Result<Self, ImportError> {
        let place = applier.path.display().to_string();
        let s = stat(&root).map_err(|e| ImportError::io("stat", &place, e.into()))?;
        let (include, exclude) = patterns;
        let state = Matched::start(include, exclude);
        let mut walk = Walk {
            applier,
            frames: Vec::new(),
            device: (s.stx_dev_major, s.stx_dev_minor),
            store,
            include,
            exclude,
            links,
            batch: Batch::default(),
            to_workers,
            results,
            xattrs: XattrBuffers::default(),
        };
        if store == Some(file_id(&s)) {
            return Err(ImportError::Usage {
                what: format!("{place} is the store itself"),
                todo: "import another directory, or use another --root".into(),
            });
        }
        walk.enter(Vec::new(), Arc::from(&b""[..]), Arc::new(root), &s, state)?;
        walk.make(0)?;
        Ok(walk)
    }

    /// Visits everything; what workers find out later is for [`Applier::message`].
    pub(super) fn run(&mut self) -> Result<(), ImportError> {
        while let Some(frame) = self.frames.last_mut() {
            match frame.left.pop() {
                Some((name, state)) => self.directory(name, state)?,
                None => {
                    self.frames.pop();
                }
            }
            self.drain()?;
        }
        self.send()
    }

    /// Ends the walk: the workers come to their end.
    pub(super) fn finish(self) -> Applier<'a> {
        self.applier
    }

    fn place(&self, dir: &[u8], name: &[u8]) -> String {
        full_path(self.applier.path, dir, name).display().to_string()
    }

    /// One subdirectory of the last frame.
    fn directory(&mut self, name: Vec<u8>, state: Matched) -> Result<(), ImportError> {
        let parent = self.frames.len() - 1;
        let fd = self.reopen(parent)?;
        let dir_path = self.frames[parent].path.clone();
        let Some(before) = self.stat_name(&fd, &dir_path, &name)? else { return Ok(()) };
        let id = file_id(&before);
        let elsewhere = (before.stx_dev_major, before.stx_dev_minor) != self.device || is_mount_root(&before);
        if elsewhere || self.store == Some(id) {
            self.applier.counts.mount_points += u64::from(elsewhere);
            if state.included {
                let dir = self.make(parent)?;
                self.create(dir, &dir_path, &name, Kind::Dir, &raw_attrs(&before), &[])?;
            }
            return Ok(());
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = match rustix::fs::openat(&*fd, &name[..], flags, Mode::empty()) {
            Ok(opened) => opened,
            Err(Errno::NOENT) => {
                self.applier.counts.vanished += 1;
                return Ok(());
            }
            Err(Errno::ACCESS | Errno::PERM) if self.applier.context.options.skip_unreadable => {
                self.applier.counts.unreadable += 1;
                return Ok(());
            }
            Err(e) => return Err(ImportError::io("open", self.place(&dir_path, &name), e.into())),
        };
        let s = stat(&opened).map_err(|e| ImportError::io("stat", self.place(&dir_path, &name), e.into()))?;
        if file_id(&s) != id {
            return Err(ImportError::Changing { path: full_path(self.applier.path, &dir_path, &name), tries: 1 });
        }
        let path: Arc<[u8]> = match &dir_path[..] {
            [] => Arc::from(&name[..]),
            dir => Arc::from([dir, b"/", &name].concat()),
        };
        self.enter(name, path, Arc::new(opened), &s, state)?;
        let last = self.frames.len() - 1;
        if self.frames[last].state.included {
            self.make(last)?;
        }
        if last > OPEN_ANCESTORS {
            // The root stays open: everything else can be found again from there.
            self.frames[last - OPEN_ANCESTORS].fd = None;
        }
        Ok(())
    }

    /// Reads a directory: what is not a directory is taken in, what is becomes the frame's list.
    fn enter(
        &mut self,
        name: Vec<u8>,
        path: Arc<[u8]>,
        fd: Arc<OwnedFd>,
        s: &Statx,
        state: Matched,
    ) -> Result<(), ImportError> {
        let failed = |op, e: Errno| {
            ImportError::io(op, full_path(self.applier.path, &path, b"").display().to_string(), e.into())
        };
        let xattrs = self.xattrs.of_fd(&fd, self.applier.context).map_err(|e| failed("read the attributes of", e))?;
        let listing = Listing::read(&fd).map_err(|e| failed("list", e))?;
        self.frames.push(Frame {
            name,
            path: path.clone(),
            fd: Some(fd.clone()),
            id: file_id(s),
            attrs: raw_attrs(s),
            xattrs,
            node: None,
            state,
            left: Vec::new(),
        });
        let frame = self.frames.len() - 1;
        let mut left = Vec::new();
        for i in 0..listing.len() {
            let (name, mut kind) = listing.get(i);
            if kind == FileType::Unknown {
                let Some(s) = self.stat_name(&fd, &path, name)? else { continue };
                kind = FileType::from_raw_mode(s.stx_mode.into());
            }
            let is_dir = kind == FileType::Directory;
            let state = self.frames[frame].state.step(self.include, self.exclude, name, is_dir);
            match state {
                Some(state) if is_dir => left.push((name.to_vec(), state)),
                Some(_) => self.leaf(frame, &fd, name, kind)?,
                None => {}
            }
        }
        left.reverse();
        self.frames[frame].left = left;
        Ok(())
    }

    /// One name that is not a directory's.
    fn leaf(&mut self, frame: usize, fd: &Arc<OwnedFd>, name: &[u8], kind: FileType) -> Result<(), ImportError> {
        let dir = self.make(frame)?;
        let path = self.frames[frame].path.clone();
        if kind == FileType::RegularFile {
            let node = self.applier.tree.create(dir, name, Kind::File, Default::default());
            let node = node.map_err(|e| tree_error(&full_path(self.applier.path, &path, name), e))?;
            if self.batch.dirs.last().is_none_or(|d| d.node != dir) {
                if self.batch.dirs.len() == BATCH_DIRS {
                    self.send()?;
                }
                self.batch.dirs.push(BatchDir { fd: Some(fd.clone()), node: dir, path });
            }
            self.batch.files.push(BatchFile { dir: self.batch.dirs.len() - 1, name: name.to_vec(), node });
            return if self.batch.files.len() == BATCH { self.send() } else { Ok(()) };
        }
        let Some(s) = self.stat_name(fd, &path, name)? else { return Ok(()) };
        let device = (s.stx_rdev_major, s.stx_rdev_minor);
        let kind = match FileType::from_raw_mode(s.stx_mode.into()) {
            FileType::Symlink => Kind::Symlink,
            FileType::Fifo => Kind::Fifo,
            FileType::Socket => Kind::Socket,
            FileType::CharacterDevice => Kind::Char { major: device.0, minor: device.1 },
            FileType::BlockDevice => Kind::Block { major: device.0, minor: device.1 },
            // Something else took the name's place just now.
            _ => return Err(ImportError::Changing { path: full_path(self.applier.path, &path, name), tries: 1 }),
        };
        let failed = |op, e: Errno, place: String| ImportError::io(op, place, e.into());
        let target = match kind {
            Kind::Symlink => match rustix::fs::readlinkat(&**fd, name, Vec::new()) {
                Ok(target) => Some(target),
                Err(Errno::NOENT) => {
                    self.applier.counts.vanished += 1;
                    return Ok(());
                }
                Err(e) => return Err(failed("read the link", e, self.place(&path, name))),
            },
            _ => None,
        };
        // These cannot be opened; their directory's descriptor keeps the way to them from being changed.
        let by_fd = [format!("/proc/self/fd/{}/", fd.as_raw_fd()).as_bytes(), name].concat();
        let xattrs = match self.xattrs.of_path(&by_fd, self.applier.context) {
            Ok(xattrs) => xattrs,
            Err(Errno::NOENT) => Vec::new(),
            Err(e) => return Err(failed("read the attributes of", e, self.place(&path, name))),
        };
        let node = self.create(dir, &path, name, kind, &raw_attrs(&s), &xattrs)?;
        let fail = |root: &Path, e| tree_error(&full_path(root, &path, name), e);
        if let Some(target) = target {
            self.applier.tree.set_target(node, target.to_bytes()).map_err(|e| fail(self.applier.path, e))?;
        }
        if s.stx_nlink > 1
            && let Some(first) = self.links.claim(file_id(&s), s.stx_nlink.into(), node)
        {
            self.applier.tree.unlink(dir, name);
            self.applier.tree.link(dir, name, first).map_err(|e| fail(self.applier.path, e))?;
        }
        self.applier.context.entries(1);
        Ok(())
    }

    /// `None`: the name is gone.
    fn stat_name(&mut self, fd: &OwnedFd, dir: &[u8], name: &[u8]) -> Result<Option<Statx>, ImportError> {
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        match rustix::fs::statx(fd, name, flags, StatxFlags::BASIC_STATS) {
            Ok(s) => Ok(Some(s)),
            Err(Errno::NOENT) => {
                self.applier.counts.vanished += 1;
                Ok(None)
            }
            Err(e) => Err(ImportError::io("stat", self.place(dir, name), e.into())),
        }
    }

    fn create(
        &mut self,
        dir: NodeId,
        path: &[u8],
        name: &[u8],
        kind: Kind,
        attrs: &RawAttrs,
        xattrs: &[(Vec<u8>, Vec<u8>)],
    ) -> Result<NodeId, ImportError> {
        let made = self.applier.attrs(attrs, xattrs).and_then(|attrs| self.applier.tree.create(dir, name, kind, attrs));
        made.map_err(|e| tree_error(&full_path(self.applier.path, path, name), e))
    }

    /// The node of a frame's directory, made with its ancestors when it is the first time that it is wanted.
    fn make(&mut self, frame: usize) -> Result<NodeId, ImportError> {
        let missing = self.frames[..=frame].iter().rposition(|f| f.node.is_some()).map_or(0, |p| p + 1);
        for i in missing..=frame {
            let (attrs, xattrs) = (self.frames[i].attrs, std::mem::take(&mut self.frames[i].xattrs));
            let node = if i == 0 {
                let root = self.applier.attrs(&attrs, &xattrs).map_err(|e| tree_error(self.applier.path, e))?;
                self.applier.tree.set_attrs(Tree::ROOT, root);
                Tree::ROOT
            } else {
                let parent = &self.frames[i - 1];
                let (dir, path) = (parent.node.unwrap_or(Tree::ROOT), parent.path.clone());
                let name = self.frames[i].name.clone();
                self.applier.context.entries(1);
                self.create(dir, &path, &name, Kind::Dir, &attrs, &xattrs)?
            };
            self.frames[i].node = Some(node);
        }
        Ok(self.frames[frame].node.unwrap_or(Tree::ROOT))
    }

    /// The descriptor of a frame; walks down to it again when it was closed.
    fn reopen(&mut self, frame: usize) -> Result<Arc<OwnedFd>, ImportError> {
        if let Some(fd) = &self.frames[frame].fd {
            return Ok(fd.clone());
        }
        let open = self.frames[..frame].iter().rposition(|f| f.fd.is_some()).unwrap_or(0);
        let Some(mut fd) = self.frames[open].fd.clone() else { return Err(ImportError::Stopped) };
        for f in &self.frames[open + 1..=frame] {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let again = rustix::fs::openat(&*fd, &f.name[..], flags, Mode::empty());
            let same = again.and_then(|again| stat(&again).map(|s| (again, file_id(&s) == f.id)));
            match same {
                Ok((again, true)) => fd = Arc::new(again),
                Ok((_, false)) | Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => {
                    // The directory was moved away while something deep inside it was read.
                    return Err(ImportError::Changing {
                        path: full_path(self.applier.path, &f.path, b""),
                        tries: TRIES,
                    });
                }
                Err(e) => {
                    return Err(ImportError::io(
                        "open",
                        full_path(self.applier.path, &f.path, b"").display().to_string(),
                        e.into(),
                    ));
                }
            }
        }
        self.frames[frame].fd = Some(fd.clone());
        Ok(fd)
    }

    /// Hands the batch over.
    fn send(&mut self) -> Result<(), ImportError> {
        let batch = std::mem::take(&mut self.batch);
        if !batch.files.is_empty() && self.to_workers.send(batch).is_err() {
            return Err(ImportError::Stopped);
        }
        self.drain()
    }

    fn drain(&mut self) -> Result<(), ImportError> {
        while let Ok(message) = self.results.try_recv() {
            self.applier.message(message)?;
        }
        if self.applier.context.stopped() { Err(ImportError::Stopped) } else { Ok(()) }
    }
}

/// The names of a directory, sorted bytewise, in little memory however many there are.
struct Listing {
    bytes: Vec<u8>,
    /// Start and length in `bytes`, and the type.
    rows: Vec<(usize, u16, FileType)>,
}

impl Listing {
    fn read(fd: &OwnedFd) -> Result<Listing, Errno> {
        // The descriptor's position may be at the end from an earlier visit.
        rustix::fs::seek(fd, rustix::fs::SeekFrom::Start(0))?;
        let mut listing = Listing { bytes: Vec::new(), rows: Vec::new() };
        let mut buffer = [const { MaybeUninit::uninit() }; 32 << 10];
        let mut dir = RawDir::new(fd, &mut buffer);
        while let Some(entry) = dir.next() {
            let entry = entry?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                listing.rows.push((listing.bytes.len(), name.len() as u16, entry.file_type()));
                listing.bytes.extend_from_slice(name);
            }
        }
        let bytes = &listing.bytes;
        let name = |&(at, len, _): &(usize, u16, FileType)| &bytes[at..at + usize::from(len)];
        listing.rows.sort_unstable_by(|a, b| name(a).cmp(name(b)));
        listing.rows.dedup_by(|a, b| name(a) == name(b));
        Ok(listing)
    }

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn get(&self, i: usize) -> (&[u8], FileType) {
        let (at, len, kind) = self.rows[i];
        (&self.bytes[at..at + usize::from(len)], kind)
    }
}
