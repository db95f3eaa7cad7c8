//! An open image as front ends see it: as the one file of a layout ([`ErofsSource`]), or as a tree ([`ImageTree`]).
//!
//! Job: join index, plan and spaces. Both shapes of one image share an [`OpenImage`], so the index is mapped and
//! verified once. Invariants: whatever the index points at is resolved in the space it names or is an error; holes
//! are zeros only where the index says so. Resolving allocates nothing. It does not know mounts, FUSE or sockets.

use crate::front::{Attr, Entry, Fault, FileContent, FileTree, Seek};
use anyhow::Context;
use format::{BLOCK, Digest};
use image::erofs::{Data, Options, Plan, PlanError, Shape};
use image::index::{ExtentView, Index, IndexError, InodeKind, InodeView};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::Thread;
use store::space::Space;
use store::{BlockSource, Cache, Done, FetchError, IndexFile, Place, Presence, ReadError, Request, Resolution, Store};

/// Blocks of an object beyond which readers' tracks are not kept (64 GiB).
const MAX_TRACKED: u64 = 1 << 24;

/// Which blocks of an object have been read through this image: a bit each: 32 KiB for a gigabyte
/// of content, 2 MiB at most.
#[derive(Debug)]
struct Tracks(Vec<AtomicU64>);

impl Tracks {
    fn new(blocks: u64) -> Tracks {
        let words = if blocks > MAX_TRACKED { 0 } else { blocks.div_ceil(64) as usize };
        Tracks(std::iter::repeat_with(AtomicU64::default).take(words).collect())
    }

    fn mark(&self, first: u64, count: u64) {
        let (mut at, end) = (first, first.saturating_add(count));
        while at < end {
            let Some(word) = self.0.get((at / 64) as usize) else { return };
            let (low, high) = (at % 64, (end - at + at % 64).min(64));
            let mask = (u64::MAX << low) & (u64::MAX >> (64 - high));
            if word.load(Ordering::Relaxed) & mask != mask {
                word.fetch_or(mask, Ordering::Relaxed);
            }
            at += high - low;
        }
    }

    fn any(&self, first: u64, count: u64) -> bool {
        let set =
            |b: u64| self.0.get((b / 64) as usize).is_some_and(|w| w.load(Ordering::Relaxed) >> (b % 64) & 1 == 1);
        let (mut at, end) = (first, first.saturating_add(count));
        while at < end {
            if at.is_multiple_of(64) && self.0.get((at / 64) as usize).is_none_or(|w| w.load(Ordering::Relaxed) == 0) {
                at += 64;
            } else if set(at) {
                return true;
            } else {
                at += 1;
            }
        }
        false
    }

    fn count(&self) -> u64 {
        self.0.iter().map(|w| u64::from(w.load(Ordering::Relaxed).count_ones())).sum()
    }
}

/// One image, opened: its index, and the spaces of its objects.
#[derive(Debug)]
pub struct OpenImage {
    index: Index,
    spaces: Vec<Arc<Space>>,
    tracks: Vec<Tracks>,
    /// What it was called when it was first mounted.
    name: OnceLock<String>,
    /// Keeps the index and its objects from `gc`.
    _kept: IndexFile,
}

/// How much of an image has been read.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Touched {
    /// Files of which some block was read.
    pub files: u64,
    /// Blocks that were read.
    pub blocks: u64,
}

impl OpenImage {
    /// Opens and verifies the index `digest`, its object maps and their spaces.
    pub fn open(store: &Store, cache: &Cache, digest: &Digest) -> anyhow::Result<OpenImage> {
        let file = store.index_file(digest)?;
        let index = open_index(&file, digest)?;
        let mut spaces = Vec::new();
        let mut tracks = Vec::new();
        for (id, blocks) in index.objects() {
            let map = store.object_map(&id)?;
            if map.space_blocks() != blocks {
                return Err(crate::failure::Failure::corrupt(format!(
                    "index {digest}: object {id} has {} blocks, not {blocks}; import the image again",
                    map.space_blocks()
                ))
                .into());
            }
            spaces.push(cache.space(map).with_context(|| format!("space of object {id}"))?);
            tracks.push(Tracks::new(blocks));
        }
        Ok(OpenImage { index, spaces, tracks, name: OnceLock::new(), _kept: file })
    }

    /// Tells it a name of its image, for messages; the first one counts.
    pub fn call(&self, name: &str) {
        // Mounted under another name before: as good.
        let _ = self.name.set(name.to_owned());
    }

    /// What a message about a failure calls something in it.
    fn place(&self, inside: String) -> Place {
        let image = self.name.get().cloned().unwrap_or_else(|| format!("index {}", self.index.digest()));
        Place { image, inside }
    }

    /// Its index.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// What readers have touched so far.
    pub fn touched(&self) -> Touched {
        let mut touched = Touched { files: 0, blocks: self.tracks.iter().map(Tracks::count).sum() };
        for ino in 0..self.index.inode_count() {
            let Ok(extents) = self.index.extents(ino) else { continue };
            let hit = extents.flatten().any(|e| {
                self.tracks.get(e.object as usize).is_some_and(|t| t.any(e.space_block.into(), e.count.into()))
            });
            touched.files += u64::from(hit);
        }
        touched
    }

    /// Unpacked bytes of its objects that are on this node, other images' shares of them included.
    pub fn resident_bytes(&self) -> u64 {
        self.spaces.iter().map(|s| s.usage().present_bytes).sum()
    }

    fn object(&self, object: u32) -> Result<(&Arc<Space>, &Tracks), ReadError> {
        match (self.spaces.get(object as usize), self.tracks.get(object as usize)) {
            (Some(space), Some(tracks)) => Ok((space, tracks)),
            _ => Err(ReadError::Corrupt { what: "extent", at: object.into(), why: "no such object" }),
        }
    }

    /// Resolves `len` bytes of an object from `block`, `skip` bytes in.
    fn resolve_in(
        &self,
        object: u32,
        block: u32,
        skip: u64,
        len: usize,
        out: &mut Resolution,
    ) -> Result<Presence, ReadError> {
        let (space, tracks) = self.object(object)?;
        let offset = u64::from(block) * BLOCK + skip;
        tracks.mark(offset / BLOCK, (offset + len as u64).div_ceil(BLOCK) - offset / BLOCK);
        space.resolve(offset, len, out)
    }
}

/// Maps, opens and verifies an index file.
pub fn open_index(file: &IndexFile, digest: &Digest) -> anyhow::Result<Index> {
    let index =
        Index::open(file.map()?).with_context(|| format!("index {digest} is damaged; import the image again"))?;
    if index.digest() != *digest {
        return Err(crate::failure::Failure::corrupt(format!(
            "index {digest}: the file is another index ({}); import the image again",
            index.digest()
        ))
        .into());
    }
    index.verify().with_context(|| format!("index {digest} is damaged; import the image again"))?;
    Ok(index)
}

/// Completes one fetch when all of its parts are complete, with the first error.
struct Join {
    left: AtomicUsize,
    state: Mutex<(Option<FetchError>, Option<Done>)>,
}

impl Join {
    fn part_done(&self, result: Result<(), FetchError>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(e) = result {
            state.0.get_or_insert(e);
        }
        if self.left.fetch_sub(1, Ordering::AcqRel) == 1
            && let Some(done) = state.1.take()
        {
            let error = state.0.take();
            drop(state);
            done(error.map_or(Ok(()), Err));
        }
    }
}

/// A range of one space.
struct SpaceRange<'a> {
    space: &'a Arc<Space>,
    offset: u64,
    len: usize,
}

fn fetch_parts(parts: &[SpaceRange<'_>], request: Request, done: Done) {
    match parts {
        [] => done(Ok(())),
        [one] => one.space.fetch(one.offset, one.len, request, done),
        many => {
            let join = Arc::new(Join { left: AtomicUsize::new(many.len()), state: Mutex::new((None, Some(done))) });
            for part in many {
                let join = Arc::clone(&join);
                part.space.fetch(part.offset, part.len, request, Box::new(move |result| join.part_done(result)));
            }
        }
    }
}

/// A failure to resolve becomes a failure to fetch: the same bytes are asked for, so both fail alike.
fn as_fetch_error(error: ReadError) -> FetchError {
    match error {
        ReadError::Io(e) => FetchError::io("resolve", e),
        other => FetchError::io("resolve", std::io::Error::new(std::io::ErrorKind::InvalidData, other)),
    }
}

/// Reads of metadata, which tell whoever pushes it that pages are missing. Metadata has two parts: directories, which
/// is all that a walk over names needs, and everything else.
#[derive(Debug)]
pub struct MetadataReads {
    parts: [Part; 2],
    count: AtomicU64,
    satisfied: AtomicBool,
    wake: OnceLock<Thread>,
}

/// Reads of one part.
#[derive(Debug)]
struct Part {
    bytes: Range<u64>,
    last: AtomicU64,
    asked: AtomicBool,
}

impl Part {
    fn new(bytes: Range<u64>) -> Part {
        Part { last: AtomicU64::new(bytes.start), bytes, asked: AtomicBool::new(false) }
    }
}

impl MetadataReads {
    fn new(plan: &Plan) -> MetadataReads {
        let parts = [Part::new(0..plan.dirs_len()), Part::new(plan.dirs_len()..plan.meta_len())];
        MetadataReads { parts, count: AtomicU64::new(0), satisfied: AtomicBool::new(false), wake: OnceLock::new() }
    }

    /// How many parts there are.
    pub fn parts(&self) -> usize {
        self.parts.len()
    }

    /// Where a part lies, and where in it was read last.
    pub fn part(&self, part: usize) -> (Range<u64>, u64) {
        (self.parts[part].bytes.clone(), self.parts[part].last.load(Ordering::Relaxed))
    }

    /// Has `thread` woken by the next read. Only the first one that is given.
    pub fn wake_on_read(&self, thread: Thread) {
        let _ = self.wake.set(thread);
    }

    /// Somebody read.
    fn note(&self, offset: u64) {
        self.count.fetch_add(1, Ordering::Relaxed);
        let part = usize::from(offset >= self.parts[1].bytes.start);
        self.parts[part].last.store(offset, Ordering::Relaxed);
        self.ask(part);
    }

    /// A part is wanted.
    pub fn ask(&self, part: usize) {
        let asked = &self.parts[part].asked;
        if !asked.load(Ordering::Relaxed)
            && !asked.swap(true, Ordering::AcqRel)
            && let Some(thread) = self.wake.get()
        {
            thread.unpark();
        }
    }

    /// Whether somebody has asked for a part since [`MetadataReads::satisfied`].
    pub fn is_asked(&self, part: usize) -> bool {
        self.parts[part].asked.load(Ordering::Acquire)
    }

    /// All of a part is there; so is what was read meanwhile.
    pub fn satisfied(&self, part: usize) {
        self.parts[part].asked.store(false, Ordering::Release);
        if part + 1 == self.parts.len() {
            self.satisfied.store(true, Ordering::Relaxed);
        }
    }

    /// Whether all of it has been there once.
    pub fn was_satisfied(&self) -> bool {
        self.satisfied.load(Ordering::Relaxed)
    }

    /// How many there were.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }
}

/// An image as one EROFS file.
#[derive(Debug)]
pub struct ErofsSource {
    image: Arc<OpenImage>,
    plan: Plan,
    reads: Arc<MetadataReads>,
}

impl ErofsSource {
    /// Plans the layout.
    pub fn new(image: Arc<OpenImage>) -> Result<ErofsSource, PlanError> {
        let plan = Plan::new(image.index(), &Options::new(Shape::Kernel))?;
        let reads = Arc::new(MetadataReads::new(&plan));
        Ok(ErofsSource { image, plan, reads })
    }

    /// Bytes of metadata, all in front: whole blocks.
    pub fn metadata_bytes(&self) -> u64 {
        self.plan.meta_len()
    }

    /// Reads of metadata.
    pub fn metadata_reads(&self) -> &Arc<MetadataReads> {
        &self.reads
    }

    /// Makes metadata from `offset` on, which lies in front of the content.
    pub fn emit(&self, offset: u64, out: &mut [u8]) -> Result<(), PlanError> {
        self.plan.emit(self.image.index(), offset..offset + out.len() as u64, out)
    }

    /// The plan.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Walks the data part of a range: each run with the bytes of it that are wanted.
    fn runs(
        &self,
        mut at: u64,
        end: u64,
        mut each: impl FnMut(Data, u64, usize) -> Result<Presence, ReadError>,
    ) -> Result<Presence, ReadError> {
        let first = at / BLOCK;
        for data in self.plan.data_runs(self.image.index(), first, end.div_ceil(BLOCK) - first) {
            let data = data.map_err(plan_error)?;
            let (Data::Hole { blocks } | Data::Space { blocks, .. }) = data;
            let skip = at % BLOCK;
            let len = (blocks * BLOCK).saturating_sub(skip).min(end - at);
            if each(data, skip, len as usize)? == Presence::Missing {
                return Ok(Presence::Missing);
            }
            at += len;
        }
        if at != end {
            return Err(ReadError::Corrupt { what: "layout", at, why: "data ends early" });
        }
        Ok(Presence::Ready)
    }

    fn check(&self, offset: u64, len: usize) -> Result<u64, ReadError> {
        let size = self.plan.image_len();
        offset.checked_add(len as u64).filter(|end| *end <= size).ok_or(ReadError::OutOfRange { offset, len, size })
    }
}

fn plan_error(error: PlanError) -> ReadError {
    match error {
        PlanError::Corrupt { what, at, why } => ReadError::Corrupt { what, at: at.into(), why },
        PlanError::Range { start, what, .. } => ReadError::Corrupt { what, at: start, why: "outside of the layout" },
        _ => ReadError::Corrupt { what: "index", at: 0, why: "cannot be laid out" },
    }
}

impl BlockSource for ErofsSource {
    fn len_bytes(&self) -> u64 {
        self.plan.image_len()
    }

    fn resolve(&self, offset: u64, len: usize, out: &mut Resolution) -> Result<Presence, ReadError> {
        let end = self.check(offset, len)?;
        let meta_end = self.plan.meta_len().min(end);
        let mut at = offset;
        if at < meta_end {
            self.reads.note(at);
            self.emit(at, out.push_scratch((meta_end - at) as usize)).map_err(plan_error)?;
            at = meta_end;
        }
        if at == end {
            return Ok(Presence::Ready);
        }
        self.runs(at, end, |data, skip, len| match data {
            Data::Hole { .. } => {
                out.push_zeros(len);
                Ok(Presence::Ready)
            }
            Data::Space { object, space_block, .. } => self.image.resolve_in(object, space_block, skip, len, out),
        })
    }

    fn fetch(&self, offset: u64, len: usize, request: Request, done: Done) {
        let mut parts = Vec::new();
        let found = self.check(offset, len).and_then(|end| {
            let at = offset.max(self.plan.meta_len());
            if at >= end {
                return Ok(Presence::Ready);
            }
            self.runs(at, end, |data, skip, len| {
                if let Data::Space { object, space_block, .. } = data {
                    let (space, _) = self.image.object(object)?;
                    parts.push(SpaceRange { space, offset: u64::from(space_block) * BLOCK + skip, len });
                }
                Ok(Presence::Ready)
            })
        });
        match found {
            Ok(_) => fetch_parts(&parts, request, done),
            Err(e) => done(Err(as_fetch_error(e))),
        }
    }

    fn place(&self, offset: u64) -> Option<Place> {
        let mut object = None;
        let at = offset.max(self.plan.meta_len());
        // What cannot be found out is left out.
        let _ = self.runs(at, (at + BLOCK).min(self.plan.image_len()), |data, _, _| {
            if let Data::Space { object: number, .. } = data {
                object = self.image.index.object(number).ok();
            }
            Ok(Presence::Ready)
        });
        Some(self.image.place(object.map_or_else(String::new, |(id, _)| format!("object {id}"))))
    }
}

/// An image as a tree.
#[derive(Debug)]
pub struct ImageTree {
    image: Arc<OpenImage>,
}

/// A piece of a file: a hole, or bytes of an object.
enum Piece {
    Hole(usize),
    Bytes { object: u32, block: u32, skip: u64, len: usize },
}

impl ImageTree {
    /// The tree of an image.
    pub fn new(image: Arc<OpenImage>) -> ImageTree {
        ImageTree { image }
    }

    /// Walks a range of a file piece by piece.
    fn pieces(
        &self,
        ino: u32,
        offset: u64,
        len: usize,
        mut each: impl FnMut(Piece) -> Result<Presence, Fault>,
    ) -> Result<Presence, Fault> {
        let size = match self.image.index.inode(ino).map_err(fault)?.kind {
            InodeKind::File { size } => size,
            InodeKind::Dir { .. } => return Err(Fault::IsDirectory),
            _ => return Err(Fault::Invalid("not a regular file")),
        };
        let end = offset.checked_add(len as u64).filter(|e| *e <= size);
        let end = end.ok_or(ReadError::OutOfRange { offset, len, size })?;
        let mut at = offset;
        for extent in self.image.index.extents_from(ino, offset / BLOCK).map_err(fault)? {
            let ExtentView { file_block, count, object, space_block } = extent.map_err(fault)?;
            let start = u64::from(file_block) * BLOCK;
            let stop = (start + u64::from(count) * BLOCK).min(end);
            if stop <= at {
                continue;
            }
            if start >= end {
                break;
            }
            if at < start {
                if each(Piece::Hole((start - at) as usize))? == Presence::Missing {
                    return Ok(Presence::Missing);
                }
                at = start;
            }
            let piece = Piece::Bytes { object, block: space_block, skip: at - start, len: (stop - at) as usize };
            if each(piece)? == Presence::Missing {
                return Ok(Presence::Missing);
            }
            at = stop;
        }
        if at < end { each(Piece::Hole((end - at) as usize)) } else { Ok(Presence::Ready) }
    }
}

/// What a front end is told about a failed look into the index.
fn fault(error: IndexError) -> Fault {
    match error {
        IndexError::Range { what: "inode", .. } => Fault::NoInode,
        IndexError::WrongKind { want: "directory", .. } => Fault::NotDirectory,
        IndexError::WrongKind { .. } => Fault::Invalid("an inode of another kind"),
        other => Fault::Damaged(Box::new(other)),
    }
}

/// Units of 512 bytes.
const UNIT: u64 = 512;

/// The attributes that stat(2) shows of an inode.
pub fn attr_of(index: &Index, ino: u32) -> Result<Attr, IndexError> {
    let InodeView { mode, uid, gid, nlink, mtime_sec, mtime_nsec, kind, .. } = index.inode(ino)?;
    let (size, blocks, rdev) = match kind {
        InodeKind::File { size } => {
            let mut blocks = 0u64;
            for extent in index.extents(ino)? {
                blocks = blocks.saturating_add(u64::from(extent?.count) * (BLOCK / UNIT));
            }
            (size, blocks, (0, 0))
        }
        InodeKind::Dir { entries } => {
            (u64::from(entries).saturating_mul(32).next_multiple_of(BLOCK).max(BLOCK), 0, (0, 0))
        }
        InodeKind::Symlink { len } => (u64::from(len), 0, (0, 0)),
        InodeKind::Char { major, minor } | InodeKind::Block { major, minor } => (0, 0, (major, minor)),
        InodeKind::Fifo | InodeKind::Socket => (0, 0, (0, 0)),
    };
    Ok(Attr { mode: mode.into(), uid, gid, nlink, size, blocks, mtime_sec, mtime_nsec, rdev })
}

impl FileContent for ImageTree {
    fn resolve(&self, ino: u32, offset: u64, len: usize, out: &mut Resolution) -> Result<Presence, Fault> {
        self.pieces(ino, offset, len, |piece| match piece {
            Piece::Hole(len) => {
                out.push_zeros(len);
                Ok(Presence::Ready)
            }
            Piece::Bytes { object, block, skip, len } => Ok(self.image.resolve_in(object, block, skip, len, out)?),
        })
    }

    fn fetch(&self, ino: u32, offset: u64, len: usize, request: Request, done: Done) {
        let mut parts = Vec::new();
        let found = self.pieces(ino, offset, len, |piece| {
            if let Piece::Bytes { object, block, skip, len } = piece {
                let (space, _) = self.image.object(object)?;
                parts.push(SpaceRange { space, offset: u64::from(block) * BLOCK + skip, len });
            }
            Ok(Presence::Ready)
        });
        match found {
            Ok(_) => fetch_parts(&parts, request, done),
            Err(e) => done(Err(FetchError::io("resolve", std::io::Error::other(e)))),
        }
    }

    fn seek(&self, ino: u32, offset: u64, what: Seek) -> Result<Option<u64>, Fault> {
        let size = self.image.index.inode(ino).map_err(fault)?.size();
        let mut at = offset;
        for extent in self.image.index.extents_from(ino, offset / BLOCK).map_err(fault)? {
            let extent = extent.map_err(fault)?;
            let start = u64::from(extent.file_block) * BLOCK;
            let stop = start + u64::from(extent.count) * BLOCK;
            if stop <= at {
                continue;
            }
            match what {
                Seek::Data => return Ok(Some(at.max(start)).filter(|p| *p < size)),
                Seek::Hole if at < start => return Ok(Some(at)),
                Seek::Hole => at = stop,
            }
        }
        Ok(match what {
            Seek::Data => None,
            Seek::Hole => Some(at.min(size)),
        })
    }

    fn place(&self, ino: u32) -> Option<Place> {
        let path = self.image.index.path_of(ino).map(|p| crate::paths::show(&p.0)).unwrap_or_default();
        Some(self.image.place(path))
    }
}

impl FileTree for ImageTree {
    fn attr(&self, ino: u32) -> Result<Attr, Fault> {
        attr_of(&self.image.index, ino).map_err(fault)
    }

    fn lookup(&self, parent: u32, name: &[u8]) -> Result<Option<u32>, Fault> {
        if name == b".." {
            return self.image.index.parent(parent).map(Some).map_err(fault);
        }
        self.image.index.lookup(parent, name).map_err(fault)
    }

    fn entries(&self, dir: u32, from: u32, visit: &mut dyn FnMut(Entry<'_>) -> bool) -> Result<(), Fault> {
        let mut entries = self.image.index.entries(dir).map_err(fault)?;
        entries.seek(from);
        for entry in entries {
            let entry = entry.map_err(fault)?;
            let kind = u32::from(self.image.index.inode(entry.ino).map_err(fault)?.mode) & 0o170_000;
            if !visit(Entry { ordinal: entry.ordinal, name: entry.name, ino: entry.ino, kind }) {
                break;
            }
        }
        Ok(())
    }

    fn link_target(&self, ino: u32) -> Result<&[u8], Fault> {
        self.image.index.link_target(ino).map_err(fault)
    }

    fn xattrs(&self, ino: u32, visit: &mut dyn FnMut(&[u8], &[u8]) -> bool) -> Result<(), Fault> {
        let set = self.image.index.inode(ino).map_err(fault)?.xattrs;
        for entry in self.image.index.xattrs(set).map_err(fault)? {
            let (name, value) = entry.map_err(fault)?;
            if !visit(name, value) {
                break;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tracks_mark_exactly_what_was_read() {
        let tracks = Tracks::new(1000);
        for (first, count) in [(0u64, 1u64), (63, 2), (130, 200), (999, 1), (999, 50), (5000, 3)] {
            tracks.mark(first, count);
        }
        let want = |b: u64| b == 0 || b == 63 || b == 64 || (130..330).contains(&b) || b == 999;
        for b in 0..1000 {
            assert_eq!(tracks.any(b, 1), want(b), "{b}");
        }
        // The last word may hold bits beyond the end; they belong to no extent.
        assert!(tracks.count() >= 204);
        assert!(!tracks.any(65, 65) && tracks.any(65, 66) && !tracks.any(0, 0));
        let none = Tracks::new(MAX_TRACKED + 1);
        none.mark(0, 10);
        assert!(!none.any(0, 10));
    }

    #[test]
    fn a_join_completes_once_with_the_first_error() {
        let (send, receive) = std::sync::mpsc::channel();
        let join = Join {
            left: AtomicUsize::new(3),
            state: Mutex::new((None, Some(Box::new(move |r| send.send(r).unwrap())))),
        };
        join.part_done(Ok(()));
        join.part_done(Err(FetchError::TimedOut));
        assert!(receive.try_recv().is_err());
        join.part_done(Err(FetchError::Closed));
        assert!(matches!(receive.try_recv().unwrap(), Err(FetchError::TimedOut)));
    }
}
