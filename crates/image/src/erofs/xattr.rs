//! Extended attributes: which are shared, and how many bytes each set takes behind its inodes.
//!
//! An attribute that several inodes have is stored once, in an area of its own, and named by an identifier
//! behind each of them; one that a single inode has lies behind it.

use super::PlanError;
use super::rows::{Rows, corrupt};
use format::erofs::{self, XattrHeader, split_xattr_name};
use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};
use xxhash_rust::xxh32::xxh32;

/// Marks an attribute that is stored inline.
const INLINE: u32 = u32::MAX;
/// Marks an attribute that EROFS has no place for.
const OMITTED: u32 = u32::MAX - 1;
/// The most bytes of attributes that a plan reads, whose rows may overlap in a hostile index. The trees that
/// indexes are built from hold less.
const BYTES_MAX: u64 = 1 << 30;
/// The most attributes of one inode: more than the index's limit on their bytes leaves room for.
const SET_ROWS_MAX: usize = 1 << 14;
/// `h_shared_count` is one byte.
const SHARED_MAX: usize = 255;

/// All attributes of a plan.
#[derive(Debug, Default)]
pub(super) struct Xattrs {
    /// One per set of the index. Empty: no attributes are planned.
    sets: Vec<Set>,
    /// One per attribute of the index: its identifier if it is shared, or one of the marks.
    ids: Vec<u32>,
    /// The shared ones' identifiers and their rows in the index, by identifier.
    shared: Vec<(u32, u32)>,
    /// Bytes of the shared ones.
    shared_len: u64,
    /// Left out, counted per inode.
    pub omitted: u64,
}

/// A set of attributes as it follows an inode.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Set {
    /// `i_xattr_icount`; 0: nothing follows.
    pub count: u16,
    pub shared: u8,
    /// `h_name_filter`.
    pub filter: u32,
}

/// Where an attribute lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Home {
    Inline,
    /// With this identifier.
    Shared(u32),
    Omitted,
}

impl Xattrs {
    pub fn plan(rows: &Rows<'_>) -> Result<Self, PlanError> {
        if rows.xattr_entries.is_empty() {
            return Ok(Self::default());
        }
        if !rows.xattr_sets.is_sorted_by_key(|start| start.get()) {
            return Err(corrupt("attribute set", 0, "the sets are not in order"));
        }
        let uses = set_uses(rows)?;
        let mut this = Xattrs {
            sets: vec![Set::default(); uses.len()],
            ids: vec![INLINE; rows.xattr_entries.len()],
            ..Self::default()
        };
        let mut hashes: Vec<(u64, u32)> = Vec::with_capacity(rows.xattr_entries.len());
        let mut bytes = 0;
        for (set, &uses) in (0..).zip(&uses) {
            if uses == 0 {
                continue; // Set 0 has no attributes, whatever its rows say.
            }
            let set_rows = rows.xattr_set(set)?;
            if set_rows.len() > SET_ROWS_MAX {
                return Err(corrupt("attribute set", set, "it has too many attributes"));
            }
            for row in set_rows {
                let (name, value) = rows.xattr(row)?;
                if u16::try_from(value.len()).is_err() {
                    return Err(corrupt("attribute", row as u32, "its value is longer than 65535 bytes"));
                }
                if split_xattr_name(name).is_none() {
                    this.ids[row] = OMITTED;
                    this.omitted += u64::from(uses);
                    continue;
                }
                bytes += (name.len() + value.len()) as u64;
                if bytes > BYTES_MAX {
                    return Err(corrupt("attribute", row as u32, "all attributes together are too long"));
                }
                let hash = xxh3_64_with_seed(value, xxh3_64(name));
                // Twice, if the set alone is reason enough to share.
                hashes.extend(std::iter::repeat_n((hash, row as u32), if uses > 1 { 2 } else { 1 }));
            }
        }
        this.share(rows, hashes)?;
        for (set, _) in (0..).zip(&uses).filter(|(_, uses)| **uses > 0) {
            this.sets[set as usize] = this.set(rows, set)?;
        }
        Ok(this)
    }

    /// Gives identifiers to the attributes that occur more than once.
    fn share(&mut self, rows: &Rows<'_>, mut hashes: Vec<(u64, u32)>) -> Result<(), PlanError> {
        hashes.sort_unstable();
        for group in hashes.chunk_by(|a, b| a.0 == b.0).filter(|group| group.len() > 1) {
            let first = group[0].1;
            let (name, value) = rows.xattr(first as usize)?;
            // BYTES_MAX keeps this far from the marks.
            let id = (self.shared_len / 4) as u32;
            self.shared.push((id, first));
            self.shared_len += entry_len(name, value) as u64;
            for (_, row) in group {
                // Another attribute with the same hash stays inline.
                if rows.xattr(*row as usize)? == (name, value) {
                    self.ids[*row as usize] = id;
                }
            }
        }
        Ok(())
    }

    /// Measures one set.
    fn set(&mut self, rows: &Rows<'_>, set: u32) -> Result<Set, PlanError> {
        let (mut len, mut shared, mut present) = (0, 0, 0);
        for row in rows.xattr_set(set)? {
            let (name, value) = rows.xattr(row)?;
            let Some((index, rest)) = split_xattr_name(name) else {
                continue;
            };
            present |= filter_bit(index, rest);
            if self.ids[row] != INLINE && shared == SHARED_MAX {
                self.ids[row] = INLINE;
            }
            if self.ids[row] == INLINE {
                len += entry_len(name, value);
            } else {
                len += size_of::<u32>();
                shared += 1;
            }
        }
        if len == 0 {
            return Ok(Set::default());
        }
        let count = erofs::xattr_count(len).ok_or(corrupt("attribute set", set, "it is longer than 256 KiB"))?;
        Ok(Set { count, shared: shared as u8, filter: !present })
    }

    /// Whether any inode has attributes.
    pub fn any(&self) -> bool {
        self.sets.iter().any(|set| set.count > 0)
    }

    pub fn get(&self, set: u32) -> Set {
        self.sets.get(set as usize).copied().unwrap_or_default()
    }

    /// Bytes between an inode with this set and what follows.
    pub fn body_len(&self, ino: u32, set: u32) -> Result<usize, PlanError> {
        match self.sets.get(set as usize) {
            Some(set) => Ok(set.body_len()),
            None if self.sets.is_empty() => Ok(0),
            None => Err(corrupt("inode", ino, "its set of attributes does not exist")),
        }
    }

    /// Bytes of all shared attributes.
    pub fn shared_len(&self) -> u64 {
        self.shared_len
    }

    /// The shared attributes from the first one on that ends behind byte `at` of them: offset and row.
    pub fn shared_from(&self, at: u64) -> impl Iterator<Item = (u64, usize)> {
        let first = self.shared.partition_point(|(id, _)| u64::from(*id) * 4 <= at).saturating_sub(1);
        self.shared[first..].iter().map(|(id, row)| (u64::from(*id) * 4, *row as usize))
    }

    /// Where the attribute in this row lies.
    pub fn home(&self, row: usize) -> Home {
        match self.ids.get(row).copied().unwrap_or(OMITTED) {
            OMITTED => Home::Omitted,
            INLINE => Home::Inline,
            id => Home::Shared(id),
        }
    }
}

impl Set {
    pub fn body_len(self) -> usize {
        match self.count {
            0 => 0,
            count => size_of::<XattrHeader>() + (usize::from(count) - 1) * 4,
        }
    }
}

/// How many inodes have each set.
fn set_uses(rows: &Rows<'_>) -> Result<Vec<u32>, PlanError> {
    let mut uses = vec![0u32; rows.xattr_sets.len().saturating_sub(1)];
    for (ino, inode) in (0..).zip(rows.inodes) {
        let set = rows.owner(ino, inode.owner.get())?.xattrs.get();
        if set != 0 {
            let uses =
                uses.get_mut(set as usize).ok_or(corrupt("inode", ino, "its set of attributes does not exist"))?;
            *uses += 1;
        }
    }
    Ok(uses)
}

fn entry_len(name: &[u8], value: &[u8]) -> usize {
    let rest = split_xattr_name(name).map_or(0, |(_, rest)| rest.len());
    erofs::xattr_entry_len(rest, value.len())
}

/// A name's bit in the filter, by its prefix's number and what follows the prefix.
pub(super) fn filter_bit(index: u8, rest: &[u8]) -> u32 {
    1 << (xxh32(rest, erofs::XATTR_FILTER_SEED.wrapping_add(index.into())) % 32)
}
