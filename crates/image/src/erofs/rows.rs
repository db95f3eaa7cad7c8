//! The index's sections as slices of rows, with lookups that give errors.

use super::PlanError;
use crate::index::Index;
use format::index::{Dirent, Extent, Inode, Object, Owner, Place, SectionKind, XattrEntry};
use zerocopy::little_endian::U32;

/// Borrowed rows; cheap to make.
#[derive(Clone, Copy)]
pub(super) struct Rows<'a> {
    pub inodes: &'a [Inode],
    pub owners: &'a [Owner],
    pub dirents: &'a [Dirent],
    pub names: &'a [u8],
    pub links: &'a [u8],
    pub objects: &'a [Object],
    pub places: &'a [Place],
    pub extents: &'a [Extent],
    pub xattr_sets: &'a [U32],
    pub xattr_entries: &'a [XattrEntry],
    pub xattr_data: &'a [u8],
}

impl<'a> Rows<'a> {
    pub fn of(index: &'a Index) -> Self {
        Rows {
            inodes: index.rows(SectionKind::Inodes),
            owners: index.rows(SectionKind::Owners),
            dirents: index.rows(SectionKind::Dirents),
            names: index.section(SectionKind::Names),
            links: index.section(SectionKind::Links),
            objects: index.rows(SectionKind::Objects),
            places: index.rows(SectionKind::Places),
            extents: index.rows(SectionKind::Extents),
            xattr_sets: index.rows(SectionKind::XattrSets),
            xattr_entries: index.rows(SectionKind::XattrEntries),
            xattr_data: index.section(SectionKind::XattrData),
        }
    }

    pub fn inode(&self, ino: u32) -> Result<&'a Inode, PlanError> {
        self.inodes.get(ino as usize).ok_or(corrupt("inode", ino, "no such inode"))
    }

    pub fn owner(&self, ino: u32, row: u32) -> Result<&'a Owner, PlanError> {
        self.owners.get(row as usize).ok_or(corrupt("inode", ino, "its owner does not exist"))
    }

    /// The name in a dirent's row.
    pub fn name(&self, dirent: u32) -> Result<&'a [u8], PlanError> {
        let at = dirent as usize;
        match self.dirents.get(at..at + 2) {
            Some([this, next]) => self.names.get(this.name.get() as usize..next.name.get() as usize).ok_or(corrupt(
                "dirent",
                dirent,
                "its name lies outside the names",
            )),
            _ => Err(corrupt("dirent", dirent, "no such dirent")),
        }
    }

    /// A symlink's target.
    pub fn target(&self, ino: u32, inode: &Inode) -> Result<&'a [u8], PlanError> {
        let (start, len) = halves(inode);
        (self.links.get(start as usize..start as usize + len as usize)).ok_or(corrupt(
            "inode",
            ino,
            "its target lies outside the link targets",
        ))
    }

    /// The rows of one set of extended attributes, as a range.
    pub fn xattr_set(&self, set: u32) -> Result<std::ops::Range<usize>, PlanError> {
        let at = set as usize;
        let bounds = self.xattr_sets.get(at..at + 2).map(|b| (b[0].get() as usize, b[1].get() as usize));
        match bounds {
            Some((start, end)) if start <= end && end <= self.xattr_entries.len() => Ok(start..end),
            _ => Err(corrupt("attribute set", set, "no such set, or its entries do not exist")),
        }
    }

    /// Name and value of one extended attribute.
    pub fn xattr(&self, row: usize) -> Result<(&'a [u8], &'a [u8]), PlanError> {
        let parts = self.xattr_entries.get(row).and_then(|entry| {
            let (name, value) = (entry.name.get() as usize, entry.value.get() as usize);
            Some((
                self.xattr_data.get(name..name + usize::from(entry.name_len.get()))?,
                self.xattr_data.get(value..value + entry.value_len.get() as usize)?,
            ))
        });
        parts.ok_or(corrupt("attribute", row as u32, "it lies outside the attribute data"))
    }
}

/// The low and the high half of an inode's `data`.
pub(super) fn halves(inode: &Inode) -> (u32, u32) {
    let data = inode.data.get();
    (data as u32, (data >> 32) as u32)
}

pub(super) fn corrupt(what: &'static str, at: u32, why: &'static str) -> PlanError {
    PlanError::Corrupt { what, at, why }
}
