//! Validation of a whole index: its digests ([`Index::verify`]), and that it is one that [`super::build`] could have
//! written ([`Index::check`]).
//!
//! Both are linear in the index's size, and need memory for a few numbers per row. The first fault ends them.

use super::read::halves;
use super::{Index, IndexError};
use crate::hash;
use crate::tree::xattr_is_supported;
use format::digest::identity;
use format::index::{
    Dirent, Extent, HashHeader, Header, Inode, MAX_DEPTH, MAX_FILE_SIZE, MAX_NAME_LEN, MAX_PATH_LEN, MAX_TARGET_LEN,
    MAX_XATTR_NAME_LEN, MAX_XATTR_SET_BYTES, MAX_XATTR_VALUE_LEN, Object, Owner, Place, S_IFBLK, S_IFCHR, S_IFDIR,
    S_IFIFO, S_IFLNK, S_IFMT, S_IFREG, S_IFSOCK, Section, SectionKind, SectionSum, XattrEntry, sections_digest,
};
use format::{BLOCK, Digest, FormatError};
use std::collections::{HashMap, HashSet};
use zerocopy::FromBytes;
use zerocopy::little_endian::U32;

impl Index {
    /// Checks the digests of all sections, those that follow from them, and that the padding is zero: finds every
    /// bit that is not as it was written.
    pub fn verify(&self) -> Result<(), IndexError> {
        let bytes = self.bytes();
        let table = bytes.get(size_of::<Header>()..).unwrap_or(&[]);
        let rows = <[Section]>::ref_from_prefix_with_elems(table, SectionKind::ALL.len());
        let (rows, _) = rows.map_err(|_| IndexError::corrupt("section table", 0, "cut short"))?;
        let mut sums: Vec<SectionSum> = Vec::new();
        for (row, kind) in rows.iter().zip(SectionKind::ALL) {
            let section = self.section(kind);
            let have = Digest::of(section);
            if have != row.digest {
                let what = section_name(kind);
                return Err(FormatError::Digest { what, want: row.digest, have }.into());
            }
            let end = self.section_start(kind) + section.len() as u64;
            let padding = bytes.get(end as usize..end.next_multiple_of(8) as usize);
            if padding.is_none_or(|p| p.iter().any(|&b| b != 0)) {
                return Err(IndexError::corrupt("padding", end, "is not zero"));
            }
            sums.push((kind, section.len() as u64, have));
        }
        let header = self.header();
        let tree = sections_digest(true, &sums);
        for (what, want, have) in [
            ("tree", header.tree_digest, tree),
            ("placement", header.placement_digest, sections_digest(false, &sums)),
            ("identity", header.identity, identity(&tree, &header.content_root)),
        ] {
            if want != have {
                return Err(FormatError::Digest { what, want, have }.into());
            }
        }
        Ok(())
    }

    /// Checks that the index is one that [`super::build`] could have written: numbers in canonical order, names
    /// sorted and legal, link counts right, every reference in range, hashes that find every name.
    pub fn check(&self) -> Result<(), IndexError> {
        let check = Check {
            index: self,
            inodes: self.rows(SectionKind::Inodes),
            dirents: self.rows(SectionKind::Dirents),
            places: self.rows(SectionKind::Places),
            parents: self.rows(SectionKind::Parents),
            owners: self.rows(SectionKind::Owners),
        };
        check.names()?;
        check.inodes()?;
        check.owners()?;
        check.xattrs()?;
        check.content()?;
        check.name_hash()?;
        check.path_hash()
    }
}

struct Check<'a> {
    index: &'a Index,
    inodes: &'a [Inode],
    dirents: &'a [Dirent],
    places: &'a [Place],
    parents: &'a [U32],
    owners: &'a [Owner],
}

/// A directory that is still to be visited.
struct Todo {
    own: u32,
    depth: u32,
    path_len: usize,
}

impl<'a> Check<'a> {
    fn bad_inode(&self, ino: usize, why: &'static str) -> IndexError {
        self.index.bad::<Inode>(SectionKind::Inodes, ino as u64, "inode", why)
    }

    fn bad_dirent(&self, d: usize, why: &'static str) -> IndexError {
        self.index.bad::<Dirent>(SectionKind::Dirents, d as u64, "dirent", why)
    }

    fn name(&self, d: usize) -> Result<&'a [u8], IndexError> {
        let range = match self.dirents.get(d..d + 2) {
            Some([row, after]) => row.name.get() as usize..after.name.get() as usize,
            _ => return Err(self.bad_dirent(d, "out of range")),
        };
        let name = self.index.section(SectionKind::Names).get(range);
        name.ok_or_else(|| self.bad_dirent(d, "its name is out of range"))
    }

    fn inode(&self, ino: usize) -> Result<&'a Inode, IndexError> {
        self.inodes.get(ino).ok_or_else(|| self.bad_inode(ino, "out of range"))
    }

    /// The dirents and the canonical order: visits directories as `build` does.
    fn names(&self) -> Result<(), IndexError> {
        let count = self.dirents.len() - 1;
        let (first, last) = (&self.dirents[0], &self.dirents[count]);
        let names_len = self.index.section(SectionKind::Names).len();
        if first.name.get() != 0 || !self.name(0)?.is_empty() {
            return Err(self.bad_dirent(0, "the root has a name"));
        }
        if last.name.get() as usize != names_len || last.ino.get() != 0 {
            return Err(self.bad_dirent(count, "the closing row does not close the names"));
        }
        if self.parents.first().map(|p| p.get()) != Some(0) {
            return Err(self.index.bad::<U32>(SectionKind::Parents, 0, "parent link", "the root has a parent"));
        }
        let mut links = vec![0u32; self.inodes.len()];
        let (mut next_ino, mut next_dirent) = (0usize, 1usize);
        let mut todo = vec![Todo { own: 0, depth: 0, path_len: 0 }];
        while let Some(dir) = todo.pop() {
            let own = dir.own as usize;
            let ino = self.dirents[own].ino.get() as usize;
            if ino != next_ino {
                return Err(self.bad_dirent(own, "a directory out of order, or with two names"));
            }
            next_ino += 1;
            let row = self.inode(ino)?;
            if row.mode.get() & S_IFMT != S_IFDIR {
                return Err(self.bad_inode(ino, "the root is not a directory"));
            }
            let (first, entries) = halves(row);
            let end = first as usize + entries as usize;
            if first as usize != next_dirent || end > count {
                return Err(self.bad_inode(ino, "a directory's entries are not where they belong"));
            }
            let place = self.places.get(ino).ok_or_else(|| self.bad_inode(ino, "has no place"))?;
            if place.object.get() != Place::NONE || place.value.get() != dir.own {
                return Err(self.index.bad::<Place>(SectionKind::Places, ino as u64, "place", "a wrong own dirent"));
            }
            let subdirs = todo.len();
            let mut before: &[u8] = b"";
            for d in next_dirent..end {
                let name = self.name(d)?;
                self.check_name(d, name, before, &dir)?;
                before = name;
                if self.parents.get(d).map(|p| p.get()) != Some(dir.own) {
                    return Err(self.index.bad::<U32>(SectionKind::Parents, d as u64, "parent link", "is wrong"));
                }
                let child = self.dirents[d].ino.get() as usize;
                if self.inode(child)?.mode.get() & S_IFMT == S_IFDIR {
                    let path_len = dir.path_len + 1 + name.len();
                    todo.push(Todo { own: d as u32, depth: dir.depth + 1, path_len });
                    continue;
                }
                if child > next_ino {
                    return Err(self.bad_dirent(d, "an inode out of order"));
                }
                next_ino += usize::from(child == next_ino);
                links[child] += 1;
            }
            links[ino] = 2 + (todo.len() - subdirs) as u32;
            todo[subdirs..].reverse();
            next_dirent = end;
        }
        if next_ino != self.inodes.len() || next_dirent != count {
            return Err(self.bad_inode(next_ino, "inodes or dirents that nothing leads to"));
        }
        match links.iter().zip(self.inodes).position(|(&links, row)| links != row.nlink.get()) {
            Some(ino) => Err(self.bad_inode(ino, "a wrong link count")),
            None => Ok(()),
        }
    }

    fn check_name(&self, d: usize, name: &[u8], before: &[u8], dir: &Todo) -> Result<(), IndexError> {
        if matches!(name, b"" | b"." | b"..") || name.len() > MAX_NAME_LEN || name.iter().any(|b| b"/\0".contains(b)) {
            return Err(self.bad_dirent(d, "not a name that a file can have"));
        }
        if name <= before {
            return Err(self.bad_dirent(d, "names not sorted, or one twice"));
        }
        if dir.depth >= MAX_DEPTH || dir.path_len + 1 + name.len() > MAX_PATH_LEN {
            return Err(self.bad_dirent(d, "too deep, or too long a path"));
        }
        Ok(())
    }

    /// What an inode says about itself.
    fn inodes(&self) -> Result<(), IndexError> {
        let mut link_at = 0;
        for (ino, row) in self.inodes.iter().enumerate() {
            let (low, high) = halves(row);
            if row.flags.get() != 0 || row.mtime_nsec.get() >= 1_000_000_000 {
                return Err(self.bad_inode(ino, "reserved bits or nanoseconds out of range"));
            }
            match row.mode.get() & S_IFMT {
                S_IFDIR => {}
                S_IFREG if row.data.get() <= MAX_FILE_SIZE => {}
                S_IFLNK => {
                    let target = self.index.link_target(ino as u32)?;
                    if low != link_at || target.is_empty() || target.len() > MAX_TARGET_LEN || target.contains(&0) {
                        return Err(self.bad_inode(ino, "not a symlink's target"));
                    }
                    link_at += high;
                }
                S_IFCHR | S_IFBLK if high < 1 << 12 && low < 1 << 20 => {}
                S_IFIFO | S_IFSOCK if row.data.get() == 0 => {}
                _ => return Err(self.bad_inode(ino, "a type or a size or device number out of range")),
            }
        }
        if link_at as usize != self.index.section(SectionKind::Links).len() {
            return Err(IndexError::corrupt("links", self.index.section_start(SectionKind::Links), "unused bytes"));
        }
        Ok(())
    }

    fn owners(&self) -> Result<(), IndexError> {
        let bad = |n: usize, why| self.index.bad::<Owner>(SectionKind::Owners, n as u64, "owner", why);
        let mut used = 0;
        for (ino, row) in self.inodes.iter().enumerate() {
            let owner = row.owner.get() as usize;
            if owner > used || owner >= self.owners.len() {
                return Err(self.bad_inode(ino, "its owner is out of range or out of order"));
            }
            used += usize::from(owner == used);
        }
        if used != self.owners.len() {
            return Err(bad(used, "is not used"));
        }
        let mut seen = HashSet::new();
        let mut sets = 1;
        for (n, owner) in self.owners.iter().enumerate() {
            if !seen.insert(owner) {
                return Err(bad(n, "is there twice"));
            }
            let set = owner.xattrs.get();
            if set > sets || set >= self.index.xattr_set_count() {
                return Err(bad(n, "its attributes are out of range or out of order"));
            }
            sets += u32::from(set == sets);
        }
        if sets != self.index.xattr_set_count() {
            return Err(bad(0, "there are attributes that nobody has"));
        }
        Ok(())
    }

    fn xattrs(&self) -> Result<(), IndexError> {
        let bad = |set: u32, why| self.index.bad::<U32>(SectionKind::XattrSets, set.into(), "xattr set", why);
        let starts = self.index.rows::<U32>(SectionKind::XattrSets);
        let rows = self.index.rows::<XattrEntry>(SectionKind::XattrEntries);
        if starts[0].get() != 0 || starts[1].get() != 0 || starts[starts.len() - 1].get() as usize != rows.len() {
            return Err(bad(0, "the sets do not cover the entries"));
        }
        let mut places: HashMap<&[u8], u32> = HashMap::new();
        let mut sets: HashSet<Digest> = HashSet::new();
        let mut end = 0u32;
        for set in 0..self.index.xattr_set_count() {
            let first = starts[set as usize].get() as usize;
            let (mut before, mut total): (&[u8], usize) = (b"", 0);
            let mut content = blake3::Hasher::new();
            for (n, item) in self.index.xattrs(set)?.enumerate() {
                let (name, value) = item?;
                let row = &rows[first + n];
                total += (4 + name.len() + value.len()).next_multiple_of(4);
                if !xattr_is_supported(name) || name.len() > MAX_XATTR_NAME_LEN || name.contains(&0) {
                    return Err(bad(set, "a name that no attribute can have"));
                }
                if name <= before {
                    return Err(bad(set, "names not sorted, or one twice"));
                }
                if value.len() > MAX_XATTR_VALUE_LEN || total > MAX_XATTR_SET_BYTES || row.reserved.get() != 0 {
                    return Err(bad(set, "too large, or reserved bits set"));
                }
                for (string, at) in [(name, row.name), (value, row.value)] {
                    let want = if string.is_empty() { 0 } else { *places.entry(string).or_insert(end) };
                    if at.get() != want {
                        return Err(bad(set, "its bytes are not where they belong"));
                    }
                    if want == end {
                        end += string.len() as u32;
                    }
                }
                before = name;
                content.update(&[name.len() as u8]).update(name);
                content.update(&(value.len() as u32).to_le_bytes()).update(value);
            }
            if (first == starts[set as usize + 1].get() as usize) != (set == 0) {
                return Err(bad(set, "an empty set that is not the first"));
            }
            if !sets.insert(Digest(*content.finalize().as_bytes())) {
                return Err(bad(set, "is there twice"));
            }
        }
        if end as usize != self.index.section(SectionKind::XattrData).len() {
            return Err(bad(0, "bytes that no attribute has"));
        }
        Ok(())
    }

    /// Places, extents and objects, and the header's sums.
    fn content(&self) -> Result<(), IndexError> {
        let bad = |ino: usize, why| self.index.bad::<Place>(SectionKind::Places, ino as u64, "place", why);
        let rows = self.index.rows::<Extent>(SectionKind::Extents);
        let objects = self.index.rows::<Object>(SectionKind::Objects);
        let (mut content_bytes, mut data_blocks) = (0u64, 0u64);
        let (mut next_row, mut next_object) = (0usize, 0u32);
        for (ino, (row, place)) in self.inodes.iter().zip(self.places).enumerate() {
            let (object, value) = (place.object.get(), place.value.get());
            if row.mode.get() & S_IFMT != S_IFREG {
                if object != Place::NONE || row.mode.get() & S_IFMT != S_IFDIR && value != 0 {
                    return Err(bad(ino, "content of something that is not a regular file"));
                }
                continue;
            }
            let size = row.data.get();
            content_bytes = content_bytes.saturating_add(size);
            let many = object == Place::MANY;
            if many && value as usize != next_row || object == Place::NONE && value != 0 {
                return Err(bad(ino, "extents that are not where they belong"));
            }
            let (mut count, mut only) = (0usize, None);
            for extent in self.index.extents(ino as u32)? {
                let extent = extent?;
                data_blocks += u64::from(extent.count);
                if extent.object > next_object {
                    return Err(bad(ino, "an object out of order"));
                }
                next_object += u32::from(extent.object == next_object);
                count += 1;
                only = Some(extent);
            }
            if many {
                next_row += count;
                let whole = |e: super::ExtentView| e.file_block == 0 && u64::from(e.count) == size.div_ceil(BLOCK);
                if count == 1 && only.is_some_and(whole) {
                    return Err(bad(ino, "an extents row for one that needs none"));
                }
            }
        }
        let header = self.index.header();
        if next_row != rows.len() || next_object as usize != objects.len() {
            return Err(bad(0, "extents or objects that no file uses"));
        }
        if header.content_bytes.get() != content_bytes || header.data_blocks.get() != data_blocks {
            return Err(IndexError::corrupt("index header", 48, "wrong sums of sizes"));
        }
        if objects.iter().map(|o| o.id).collect::<HashSet<_>>().len() != objects.len() {
            return Err(self.index.bad::<Object>(SectionKind::Objects, 0, "object", "one is there twice"));
        }
        Ok(())
    }

    fn check_counts(&self, kind: SectionKind, keys: u64) -> Result<bool, IndexError> {
        let Some(head) = self.index.hash_header(kind) else {
            return Ok(false);
        };
        let used = self.index.hash_slots(kind).iter().filter(|s| s.get() != HashHeader::EMPTY).count();
        if u64::from(head.keys.get()) != keys || used as u64 != keys {
            return Err(IndexError::corrupt("hash", self.index.section_start(kind), "a wrong number of keys"));
        }
        Ok(true)
    }

    fn name_hash(&self) -> Result<(), IndexError> {
        let min = self.index.hash_header(SectionKind::NameHash).map_or(0, |head| head.min_entries.get());
        let dirs = || self.inodes.iter().zip(0u32..).filter(|(row, _)| row.mode.get() & S_IFMT == S_IFDIR);
        let wide = || dirs().filter(|(row, _)| halves(row).1 >= min);
        let keys = wide().map(|(row, _)| u64::from(halves(row).1)).sum();
        if !self.check_counts(SectionKind::NameHash, keys)? {
            return Ok(());
        }
        for (row, ino) in wide() {
            let (first, count) = halves(row);
            for d in first..first + count {
                if self.index.probe_name(ino, self.name(d as usize)?) != Some(d) {
                    return Err(self.bad_dirent(d as usize, "the hash over names does not find it"));
                }
            }
        }
        Ok(())
    }

    fn path_hash(&self) -> Result<(), IndexError> {
        let count = self.dirents.len() - 1;
        if !self.check_counts(SectionKind::PathHash, count as u64 - 1)? {
            return Ok(());
        }
        let head = self.index.hash_header(SectionKind::PathHash);
        let mut keys: Vec<u64> = Vec::with_capacity(count);
        keys.push(head.map_or(0, |head| head.seed.get()));
        for d in 1..count {
            let key = hash::path_key(keys[self.parents[d].get() as usize], self.name(d)?);
            keys.push(key);
            if self.index.probe_path(key) != Some(d as u32) {
                return Err(self.bad_dirent(d, "the hash over paths does not find it"));
            }
        }
        Ok(())
    }
}

fn section_name(kind: SectionKind) -> &'static str {
    match kind {
        SectionKind::Inodes => "section of inodes",
        SectionKind::Owners => "section of owners",
        SectionKind::Dirents => "section of dirents",
        SectionKind::Names => "section of names",
        SectionKind::Links => "section of links",
        SectionKind::XattrSets => "section of xattr sets",
        SectionKind::XattrEntries => "section of xattr entries",
        SectionKind::XattrData => "section of xattr data",
        SectionKind::Objects => "section of objects",
        SectionKind::Places => "section of places",
        SectionKind::Extents => "section of extents",
        SectionKind::Parents => "section of parents",
        SectionKind::NameHash => "section of the name hash",
        SectionKind::PathHash => "section of the path hash",
    }
}
