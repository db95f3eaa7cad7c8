//! Reading an index in place.

use super::open::ENDS;
use super::{Entries, ExtentView, Extents, Index, IndexError, XattrIter};
use crate::hash;
use crate::tree::PathBytes;
use format::index::{
    Dirent, Extent, Inode, MAX_DEPTH, MAX_NAME_LEN, Object, Owner, Place, S_IFBLK, S_IFCHR, S_IFDIR, S_IFIFO, S_IFLNK,
    S_IFMT, S_IFREG, S_IFSOCK, SectionKind, XattrEntry,
};
use format::{BLOCK, Digest};
use std::ops::Range;
use std::sync::atomic::Ordering;
use zerocopy::little_endian::U32;

/// One inode, decoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InodeView {
    /// Its number.
    pub ino: u32,
    /// File type and permission bits, as in `st_mode`.
    pub mode: u16,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Its set of extended attributes; 0 is the empty one. See [`Index::xattrs`].
    pub xattrs: u32,
    /// Link count.
    pub nlink: u32,
    /// Modification time, seconds since 1970.
    pub mtime_sec: i64,
    /// Nanoseconds within the second.
    pub mtime_nsec: u32,
    /// What it is.
    pub kind: InodeKind,
}

/// What an inode is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InodeKind {
    /// Regular file.
    File {
        /// Bytes.
        size: u64,
    },
    /// Directory.
    Dir {
        /// Names in it, without `.` and `..`.
        entries: u32,
    },
    /// Symbolic link.
    Symlink {
        /// Bytes of its target.
        len: u32,
    },
    /// Character device.
    Char {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// Block device.
    Block {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// FIFO.
    Fifo,
    /// Socket.
    Socket,
}

impl InodeView {
    /// Whether it is a directory.
    pub fn is_dir(&self) -> bool {
        matches!(self.kind, InodeKind::Dir { .. })
    }

    /// Bytes of a file or of a symlink's target; 0 for everything else.
    pub fn size(&self) -> u64 {
        match self.kind {
            InodeKind::File { size } => size,
            InodeKind::Symlink { len } => len.into(),
            _ => 0,
        }
    }

    /// The permission bits.
    pub fn permissions(&self) -> u16 {
        self.mode & 0o7777
    }
}

impl Index {
    pub(super) fn raw_inode(&self, ino: u32) -> Result<&Inode, IndexError> {
        let rows = self.rows::<Inode>(SectionKind::Inodes);
        rows.get(ino as usize).ok_or(IndexError::Range { what: "inode", number: ino, count: rows.len() as u32 })
    }

    /// An inode.
    pub fn inode(&self, ino: u32) -> Result<InodeView, IndexError> {
        let row = self.raw_inode(ino)?;
        let bad = |why| self.bad::<Inode>(SectionKind::Inodes, ino.into(), "inode", why);
        let owner = self.rows::<Owner>(SectionKind::Owners).get(row.owner.get() as usize);
        let owner = owner.ok_or_else(|| bad("its owner is out of range"))?;
        let mode = row.mode.get();
        let (low, high) = halves(row);
        let kind = match mode & S_IFMT {
            S_IFREG => InodeKind::File { size: row.data.get() },
            S_IFDIR => InodeKind::Dir { entries: high },
            S_IFLNK => InodeKind::Symlink { len: high },
            S_IFCHR => InodeKind::Char { major: high, minor: low },
            S_IFBLK => InodeKind::Block { major: high, minor: low },
            S_IFIFO => InodeKind::Fifo,
            S_IFSOCK => InodeKind::Socket,
            _ => return Err(bad("unknown file type")),
        };
        if row.mtime_nsec.get() >= 1_000_000_000 {
            return Err(bad("nanoseconds of a second or more"));
        }
        Ok(InodeView {
            ino,
            mode,
            uid: owner.uid.get(),
            gid: owner.gid.get(),
            xattrs: owner.xattrs.get(),
            nlink: row.nlink.get(),
            mtime_sec: row.mtime_sec.get(),
            mtime_nsec: row.mtime_nsec.get(),
            kind,
        })
    }

    /// A directory's dirents: the first and how many.
    pub(super) fn dir_range(&self, ino: u32) -> Result<Range<u32>, IndexError> {
        let row = self.raw_inode(ino)?;
        if row.mode.get() & S_IFMT != S_IFDIR {
            return Err(IndexError::WrongKind { ino, want: "directory" });
        }
        let (first, count) = halves(row);
        match first.checked_add(count) {
            Some(end) if end <= self.0.header.dirent_count.get() => Ok(first..end),
            _ => Err(self.bad::<Inode>(SectionKind::Inodes, ino.into(), "directory", "entries out of range")),
        }
    }

    /// The names in a directory, sorted bytewise, without `.` and `..`.
    pub fn entries(&self, dir: u32) -> Result<Entries<'_>, IndexError> {
        let range = self.dir_range(dir)?;
        let rows = self.rows::<Dirent>(SectionKind::Dirents);
        // One row more: it says where the last name ends.
        let rows = rows.get(range.start as usize..=range.end as usize);
        let rows = rows
            .ok_or_else(|| self.bad::<Inode>(SectionKind::Inodes, dir.into(), "directory", "entries out of range"))?;
        Ok(Entries { index: self, names: self.section(SectionKind::Names), rows, first: range.start, next: 0 })
    }

    /// The name of a dirent.
    fn dirent(&self, number: u32) -> Result<(&[u8], u32), IndexError> {
        let rows = self.rows::<Dirent>(SectionKind::Dirents);
        let at = number as usize;
        let Some([row, after]) = rows.get(at..at.saturating_add(2)) else {
            return Err(self.bad::<Dirent>(SectionKind::Dirents, number.into(), "dirent", "out of range"));
        };
        let name = self.section(SectionKind::Names).get(row.name.get() as usize..after.name.get() as usize);
        let name = name.ok_or_else(|| {
            self.bad::<Dirent>(SectionKind::Dirents, number.into(), "dirent", "its name is out of range")
        })?;
        Ok((name, row.ino.get()))
    }

    /// The dirent of the directory that a dirent stands in.
    fn dirent_parent(&self, number: u32) -> Result<u32, IndexError> {
        let bad = |why| self.bad::<U32>(SectionKind::Parents, number.into(), "parent link", why);
        let up = self.rows::<U32>(SectionKind::Parents).get(number as usize).ok_or_else(|| bad("out of range"))?;
        match up.get() {
            0 if number == 0 => Ok(0),
            // Parents come first, so every chain ends at the root.
            up if up < number => Ok(up),
            _ => Err(bad("does not point backward")),
        }
    }

    /// The directory's own dirent.
    fn own_dirent(&self, dir: u32) -> Result<u32, IndexError> {
        if self.raw_inode(dir)?.mode.get() & S_IFMT != S_IFDIR {
            return Err(IndexError::WrongKind { ino: dir, want: "directory" });
        }
        let bad = |why| self.bad::<Place>(SectionKind::Places, dir.into(), "directory's place", why);
        let place = self.rows::<Place>(SectionKind::Places).get(dir as usize).ok_or_else(|| bad("out of range"))?;
        let own = place.value.get();
        if own >= self.0.header.dirent_count.get() || self.dirent(own)?.1 != dir {
            return Err(bad("is not its own dirent"));
        }
        Ok(own)
    }

    /// The inode called `name` in the directory `parent`.
    pub fn lookup(&self, parent: u32, name: &[u8]) -> Result<Option<u32>, IndexError> {
        let range = self.dir_range(parent)?;
        if name.is_empty() || name.len() > MAX_NAME_LEN {
            return Ok(None);
        }
        match self.0.names {
            Some(hash) if range.len() >= hash.min_entries as usize => {
                let Some(found) = self.probe_name(parent, name) else { return Ok(None) };
                if !range.contains(&found) {
                    return Ok(None);
                }
                let (have, ino) = self.dirent(found)?;
                Ok((have == name).then_some(ino))
            }
            _ => self.search(range, name),
        }
    }

    /// Looks for `name` among sorted dirents.
    fn search(&self, range: Range<u32>, name: &[u8]) -> Result<Option<u32>, IndexError> {
        let (mut low, mut high) = (range.start, range.end);
        while low < high {
            let middle = low + (high - low) / 2;
            let (have, ino) = self.dirent(middle)?;
            match have.cmp(name) {
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
                std::cmp::Ordering::Equal => return Ok(Some(ino)),
            }
        }
        Ok(None)
    }

    /// The inode at an absolute path. Symlinks are not followed; `.` and empty components are skipped; `..` is a
    /// name like any other, and never there.
    pub fn resolve(&self, path: &[u8]) -> Result<Option<u32>, IndexError> {
        let parts = || path.split(|&b| b == b'/').filter(|p| !p.is_empty() && *p != b".");
        let Some(hash) = self.0.paths else {
            return self.resolve_by_name(parts());
        };
        let (mut key, mut depth) = (hash.seed, 0);
        for part in parts() {
            key = hash::path_key(key, part);
            depth += 1;
            if depth > MAX_DEPTH {
                return Ok(None);
            }
        }
        if depth == 0 {
            return Ok(Some(0));
        }
        let Some(found) = self.probe_path(key) else { return Ok(None) };
        let mut at = found;
        for part in parts().rev() {
            if at == 0 || self.dirent(at)?.0 != part {
                return Ok(None);
            }
            at = self.dirent_parent(at)?;
        }
        Ok(if at == 0 { Some(self.dirent(found)?.1) } else { None })
    }

    fn resolve_by_name<'p>(&self, parts: impl Iterator<Item = &'p [u8]>) -> Result<Option<u32>, IndexError> {
        let mut ino = 0;
        for part in parts {
            if !self.inode(ino)?.is_dir() {
                return Ok(None);
            }
            match self.lookup(ino, part)? {
                Some(next) => ino = next,
                None => return Ok(None),
            }
        }
        Ok(Some(ino))
    }

    /// The directory that a directory stands in; the root's is itself.
    pub fn parent(&self, dir: u32) -> Result<u32, IndexError> {
        let own = self.own_dirent(dir)?;
        Ok(self.dirent(self.dirent_parent(own)?)?.1)
    }

    /// A path of the inode: a directory's only one, the first one of anything else (found by looking through its
    /// directory, so not for every read).
    pub fn path_of(&self, ino: u32) -> Result<PathBytes, IndexError> {
        let own = if self.inode(ino)?.is_dir() { self.own_dirent(ino)? } else { self.first_dirent(ino)? };
        let mut parts = Vec::new();
        let mut at = own;
        while at != 0 {
            if parts.len() >= MAX_DEPTH as usize {
                return Err(self.bad::<U32>(SectionKind::Parents, own.into(), "parent link", "too deep"));
            }
            parts.push(self.dirent(at)?.0);
            at = self.dirent_parent(at)?;
        }
        let mut path = Vec::new();
        for part in parts.iter().rev() {
            path.push(b'/');
            path.extend_from_slice(part);
        }
        if path.is_empty() {
            path.push(b'/');
        }
        Ok(PathBytes(path))
    }

    /// The first dirent of something that is not a directory: it stands in the last directory before it.
    fn first_dirent(&self, ino: u32) -> Result<u32, IndexError> {
        for dir in (0..ino).rev() {
            if self.raw_inode(dir)?.mode.get() & S_IFMT == S_IFDIR {
                let range = self.dir_range(dir)?;
                for number in range {
                    if self.dirent(number)?.1 == ino {
                        return Ok(number);
                    }
                }
                break;
            }
        }
        Err(self.bad::<Inode>(SectionKind::Inodes, ino.into(), "inode", "no name where its number says"))
    }

    /// A symlink's target.
    pub fn link_target(&self, ino: u32) -> Result<&[u8], IndexError> {
        let row = self.raw_inode(ino)?;
        if row.mode.get() & S_IFMT != S_IFLNK {
            return Err(IndexError::WrongKind { ino, want: "symlink" });
        }
        let (at, len) = halves(row);
        let range = at as usize..(at as usize).saturating_add(len as usize);
        self.section(SectionKind::Links)
            .get(range)
            .ok_or_else(|| self.bad::<Inode>(SectionKind::Inodes, ino.into(), "symlink", "target out of range"))
    }

    /// The names and values of a set of extended attributes, sorted by name.
    pub fn xattrs(&self, set: u32) -> Result<XattrIter<'_>, IndexError> {
        let starts = self.rows::<U32>(SectionKind::XattrSets);
        let at = set as usize;
        let Some([first, end]) = starts.get(at..at.saturating_add(2)) else {
            let count = starts.len().saturating_sub(1) as u32;
            return Err(IndexError::Range { what: "set of extended attributes", number: set, count });
        };
        let rows = self.rows::<XattrEntry>(SectionKind::XattrEntries);
        let rows = rows
            .get(first.get() as usize..end.get() as usize)
            .ok_or_else(|| self.bad::<U32>(SectionKind::XattrSets, set.into(), "xattr set", "entries out of range"))?;
        Ok(XattrIter { index: self, rows: rows.iter(), set })
    }

    /// Sets of extended attributes, the empty one included.
    pub fn xattr_set_count(&self) -> u32 {
        self.rows::<U32>(SectionKind::XattrSets).len().saturating_sub(1) as u32
    }

    /// A file's extents, sorted by file block. What they leave out is a hole.
    pub fn extents(&self, ino: u32) -> Result<Extents<'_>, IndexError> {
        let row = self.raw_inode(ino)?;
        if row.mode.get() & S_IFMT != S_IFREG {
            return Err(IndexError::WrongKind { ino, want: "regular file" });
        }
        let bad = |why| self.bad::<Place>(SectionKind::Places, ino.into(), "place", why);
        let place = self.rows::<Place>(SectionKind::Places).get(ino as usize).ok_or_else(|| bad("out of range"))?;
        let blocks = row.data.get().div_ceil(BLOCK);
        let mut extents = Extents { index: self, blocks, at: 0, single: None, row: 0, more: false };
        match place.object.get() {
            Place::NONE => {}
            Place::MANY => (extents.row, extents.more) = (place.value.get(), true),
            object => {
                let Ok(count) = u32::try_from(blocks) else {
                    return Err(bad("one extent for too large a file"));
                };
                extents.single = Some(ExtentView { file_block: 0, count, object, space_block: place.value.get() });
            }
        }
        Ok(extents)
    }

    /// A file's extents from the first one on that reaches beyond block `from`, found by halving. Where a file's
    /// extents end is only said by the last of them: the first time that one is looked for row by row, then remembered
    /// with those of some other files.
    pub fn extents_from(&self, ino: u32, from: u64) -> Result<Extents<'_>, IndexError> {
        let mut extents = self.extents(ino)?;
        if from >= extents.blocks {
            extents.single = None;
        }
        if from == 0 || !extents.more {
            return Ok(extents);
        }
        let start = extents.row as usize;
        let rows = self.rows::<Extent>(SectionKind::Extents).get(start..).unwrap_or(&[]);
        let rows = rows.get(..self.extent_count(extents.row, rows)).unwrap_or(rows);
        let end = |row: &Extent| u64::from(row.file_block.get()) + u64::from(row.count.get() & !Extent::LAST);
        let skipped = rows.partition_point(|row| end(row) <= from);
        if skipped > 0 {
            extents.at = end(&rows[skipped - 1]);
            extents.row += skipped as u32;
            // Without a last one the rows end with the section: that is found when they are read.
            extents.more = skipped < rows.len() || rows.last().is_none_or(|row| row.count.get() & Extent::LAST == 0);
        }
        Ok(extents)
    }

    /// How many of `rows`, which begin with row `first` of the section, are of one file.
    fn extent_count(&self, first: u32, rows: &[Extent]) -> usize {
        let slot = &self.0.ends[first as usize % ENDS];
        let known = slot.load(Ordering::Relaxed);
        if known >> 32 == u64::from(first) && known as u32 > 0 {
            return known as u32 as usize;
        }
        let count = rows.iter().position(|row| row.count.get() & Extent::LAST != 0).map_or(rows.len(), |n| n + 1);
        if let Ok(count) = u32::try_from(count) {
            // Whoever comes between finds one or the other whole.
            slot.store(u64::from(first) << 32 | u64::from(count), Ordering::Relaxed);
        }
        count
    }

    /// The objects that extents refer to: the digest of each one's map, and the blocks of its space.
    pub fn objects(&self) -> impl ExactSizeIterator<Item = (Digest, u64)> + '_ {
        self.rows::<Object>(SectionKind::Objects).iter().map(|o| (o.id, o.space_blocks.get()))
    }

    /// One object.
    pub fn object(&self, number: u32) -> Result<(Digest, u64), IndexError> {
        let rows = self.rows::<Object>(SectionKind::Objects);
        let row = rows.get(number as usize);
        let row = row.ok_or(IndexError::Range { what: "object", number, count: rows.len() as u32 })?;
        Ok((row.id, row.space_blocks.get()))
    }
}

/// The low and the high half of an inode's `data`.
pub(super) fn halves(row: &Inode) -> (u32, u32) {
    let data = row.data.get();
    (data as u32, (data >> 32) as u32)
}
