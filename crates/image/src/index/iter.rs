//! The lists that an index has: names of a directory, attributes of a set, extents of a file.

use super::{Index, IndexError};
use format::index::{Dirent, Extent, Object, SectionKind, XattrEntry};
use zerocopy::little_endian::U32;

/// One name in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DirEntry<'a> {
    /// Its position in the directory, from 0.
    pub ordinal: u32,
    /// The name.
    pub name: &'a [u8],
    /// The inode it names.
    pub ino: u32,
}

/// A run of a file's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExtentView {
    /// First block of the file.
    pub file_block: u32,
    /// Blocks.
    pub count: u32,
    /// Row of the objects table.
    pub object: u32,
    /// First block in the object's space.
    pub space_block: u32,
}

/// The names in a directory; see [`Index::entries`].
#[derive(Debug, Clone)]
pub struct Entries<'a> {
    pub(super) index: &'a Index,
    pub(super) names: &'a [u8],
    /// One more than there are entries.
    pub(super) rows: &'a [Dirent],
    pub(super) first: u32,
    pub(super) next: usize,
}

impl Entries<'_> {
    /// Names in the directory, wherever the iterator stands.
    pub fn count_all(&self) -> u32 {
        (self.rows.len() - 1) as u32
    }

    /// Goes on with the entry of that ordinal.
    pub fn seek(&mut self, ordinal: u32) {
        self.next = (ordinal as usize).min(self.rows.len() - 1);
    }
}

impl<'a> Iterator for Entries<'a> {
    type Item = Result<DirEntry<'a>, IndexError>;

    fn next(&mut self) -> Option<Self::Item> {
        let [row, after] = self.rows.get(self.next..self.next + 2)? else { return None };
        let ordinal = self.next as u32;
        self.next += 1;
        Some(match self.names.get(row.name.get() as usize..after.name.get() as usize) {
            Some(name) => Ok(DirEntry { ordinal, name, ino: row.ino.get() }),
            None => {
                let number = u64::from(self.first) + u64::from(ordinal);
                Err(self.index.bad::<Dirent>(SectionKind::Dirents, number, "dirent", "its name is out of range"))
            }
        })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.rows.len() - 1 - self.next;
        (left, Some(left))
    }
}

/// Names and values of a set; see [`Index::xattrs`].
#[derive(Debug, Clone)]
pub struct XattrIter<'a> {
    pub(super) index: &'a Index,
    pub(super) rows: std::slice::Iter<'a, XattrEntry>,
    pub(super) set: u32,
}

impl<'a> Iterator for XattrIter<'a> {
    type Item = Result<(&'a [u8], &'a [u8]), IndexError>;

    fn next(&mut self) -> Option<Self::Item> {
        let row = self.rows.next()?;
        let data = self.index.section(SectionKind::XattrData);
        let get = |at: U32, len: usize| data.get(at.get() as usize..(at.get() as usize).checked_add(len)?);
        let found = get(row.name, row.name_len.get().into()).zip(get(row.value, row.value_len.get() as usize));
        Some(found.ok_or_else(|| {
            self.index.bad::<U32>(SectionKind::XattrSets, self.set.into(), "xattr set", "bytes out of range")
        }))
    }
}

/// A file's extents; see [`Index::extents`]. Ends after the first error.
#[derive(Debug, Clone)]
pub struct Extents<'a> {
    pub(super) index: &'a Index,
    /// Blocks of the file.
    pub(super) blocks: u64,
    /// First block that no extent has had yet.
    pub(super) at: u64,
    pub(super) single: Option<ExtentView>,
    pub(super) row: u32,
    pub(super) more: bool,
}

impl Extents<'_> {
    fn take(&mut self) -> Result<ExtentView, IndexError> {
        let number = self.row;
        let view = match self.single.take() {
            Some(view) => view,
            None => {
                let row = self.index.rows::<Extent>(SectionKind::Extents).get(number as usize);
                let row = row.ok_or_else(|| self.bad("extent out of range"))?;
                self.row += 1;
                self.more = row.count.get() & Extent::LAST == 0;
                ExtentView {
                    file_block: row.file_block.get(),
                    count: row.count.get() & !Extent::LAST,
                    object: row.object.get(),
                    space_block: row.space_block.get(),
                }
            }
        };
        let end = u64::from(view.file_block) + u64::from(view.count);
        if view.count == 0 || u64::from(view.file_block) < self.at || end > self.blocks {
            return Err(self.bad("empty, overlapping, unsorted, or past the end of the file"));
        }
        self.at = end;
        let object = self.index.rows::<Object>(SectionKind::Objects).get(view.object as usize);
        match object {
            Some(o) if u64::from(view.space_block) + u64::from(view.count) <= o.space_blocks.get() => Ok(view),
            Some(_) => Err(self.bad("reaches past the end of its object")),
            None => Err(self.bad("its object is out of range")),
        }
    }

    fn bad(&self, why: &'static str) -> IndexError {
        self.index.bad::<Extent>(SectionKind::Extents, self.row.into(), "extent", why)
    }
}

impl Iterator for Extents<'_> {
    type Item = Result<ExtentView, IndexError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.single.is_none() && !self.more {
            return None;
        }
        let result = self.take();
        if result.is_err() {
            (self.single, self.more) = (None, false);
        }
        Some(result)
    }
}
