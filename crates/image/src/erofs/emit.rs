//! Computes metadata bytes from index and plan.
//!
//! Everything is written through a window that keeps what falls into the range asked for, so ranges of any
//! alignment give the same bytes as the whole. Bytes that nothing writes are zero.

use super::PlanError;
use super::plan::{BLOCK, Dir, Plan, Regions, Slot};
use super::rows::{Rows, corrupt, halves};
use super::xattr::Home;
use crate::index::Index;
use format::erofs::{self, DataLayout, InodeExtended, XattrEntry, XattrHeader, file_type, split_xattr_name};
use std::ops::Range;
use zerocopy::IntoBytes;

impl Plan {
    /// Writes the metadata bytes `range` (below [`Plan::meta_len`]) to `out`, which has exactly their length.
    ///
    /// `index` is the one that was planned. What the range starts within is found by binary search.
    pub fn emit(&self, index: &Index, range: Range<u64>, out: &mut [u8]) -> Result<(), PlanError> {
        let wrong = |what| PlanError::Range { start: range.start, end: range.end, what };
        if range.end > self.meta_len() {
            return Err(wrong("metadata"));
        }
        if range.end.checked_sub(range.start) != Some(out.len() as u64) {
            return Err(wrong("as many as the buffer's"));
        }
        out.fill(0);
        let mut window = Window { start: range.start, end: range.end, out };
        let emitter = Emitter { plan: self, rows: Rows::of(index) };
        let regions = &self.regions;
        window.put(erofs::SUPER_OFFSET as u64, self.superblock.as_bytes());
        if window.has_blocks(Regions::DIRS, regions.dir_blocks) {
            emitter.dir_inodes(&mut window)?;
        }
        if window.has_blocks(regions.dir_blocks, regions.inodes) {
            emitter.dir_blocks(&mut window)?;
        }
        if window.has_blocks(regions.inodes, regions.xattrs) {
            emitter.other_inodes(&mut window)?;
        }
        if window.has_blocks(regions.xattrs, regions.links) {
            emitter.shared_xattrs(&mut window)?;
        }
        if window.has_blocks(regions.links, regions.data) {
            emitter.link_blocks(&mut window)?;
        }
        Ok(())
    }
}

/// The bytes asked for.
struct Window<'o> {
    start: u64,
    end: u64,
    out: &'o mut [u8],
}

impl Window<'_> {
    fn overlaps(&self, start: u64, end: u64) -> bool {
        start < self.end && end > self.start
    }

    fn has_blocks(&self, first: u32, end: u32) -> bool {
        first < end && self.overlaps(u64::from(first) * BLOCK, u64::from(end) * BLOCK)
    }

    /// Writes what of `bytes`, which lie at `at` in the image, is in the window.
    #[inline]
    fn put(&mut self, at: u64, bytes: &[u8]) {
        let end = at + bytes.len() as u64;
        if at >= self.start && end <= self.end {
            let at = (at - self.start) as usize;
            self.out[at..at + bytes.len()].copy_from_slice(bytes);
        } else if self.overlaps(at, end) {
            let (from, to) = (at.max(self.start), end.min(self.end));
            let part = &bytes[(from - at) as usize..(to - at) as usize];
            self.out[(from - self.start) as usize..][..part.len()].copy_from_slice(part);
        }
    }
}

struct Emitter<'a> {
    plan: &'a Plan,
    rows: Rows<'a>,
}

impl Emitter<'_> {
    fn dir_inodes(&self, window: &mut Window<'_>) -> Result<(), PlanError> {
        let base = u64::from(Regions::DIRS) * BLOCK;
        let first = self.plan.dir_at(first_slot(window, base));
        for dir in &self.plan.dirs[first..] {
            let slot = self.plan.slots[dir.ino as usize];
            if base + slot.offset() >= window.end {
                break;
            }
            self.inode(dir.ino, slot, base + slot.offset(), Some(dir), window)?;
        }
        Ok(())
    }

    fn other_inodes(&self, window: &mut Window<'_>) -> Result<(), PlanError> {
        let plan = self.plan;
        let base = u64::from(plan.regions.inodes) * BLOCK;
        let first = first_slot(window, base);
        let mut group = plan.group_at(first);
        let mut inos = plan.children(group);
        // The last inode that starts at or before the window does.
        inos.start += plan.slots[inos.clone()].partition_point(|slot| slot.number() <= first).saturating_sub(1);
        loop {
            for (ino, slot) in inos.clone().zip(&plan.slots[inos.clone()]) {
                if base + slot.offset() >= window.end {
                    return Ok(());
                }
                self.inode(ino as u32, *slot, base + slot.offset(), None, window)?;
            }
            let Some(next) = plan.dirs.get(group + 1) else {
                return Ok(());
            };
            group += 1;
            inos = plan.children(group);
            if inos.is_empty() {
                // There may be many directories that have no other children.
                group = plan.group_at(next.inodes);
                inos = plan.children(group);
            }
        }
    }

    /// Writes the inode in this slot, which lies at `at`, and what follows it.
    fn inode(
        &self,
        ino: u32,
        slot: Slot,
        mut at: u64,
        dir: Option<&Dir>,
        window: &mut Window<'_>,
    ) -> Result<(), PlanError> {
        let row = self.rows.inode(ino)?;
        let owner = self.rows.owner(ino, row.owner.get())?;
        let xattrs = self.plan.xattrs.get(owner.xattrs.get());
        let (low, high) = halves(row);
        let (size, data) = match slot.file_type() {
            file_type::FILE => (row.data.get(), self.file_data(ino, slot, row.data.get())?),
            file_type::DIR => {
                let dir = dir.ok_or(corrupt("inode", ino, "not as planned"))?;
                (dir.size(), self.plan.regions.dir_blocks + dir.first_block)
            }
            file_type::SYMLINK => (high.into(), self.link_block(ino, slot)?),
            file_type::CHAR | file_type::BLOCK => {
                (0, erofs::encode_device(high, low).ok_or(corrupt("inode", ino, "not as planned"))?)
            }
            _ => (0, 0),
        };
        let inode = InodeExtended {
            format: slot.layout().extended_format().into(),
            xattr_count: xattrs.count.into(),
            mode: row.mode,
            block_high: 0.into(),
            size: size.into(),
            data: data.into(),
            serial: (ino.wrapping_add(1)).into(),
            uid: owner.uid,
            gid: owner.gid,
            mtime_sec: (row.mtime_sec.get() as u64).into(),
            mtime_nsec: row.mtime_nsec,
            nlink: row.nlink,
            reserved: [0; 16],
        };
        window.put(at, inode.as_bytes());
        at += size_of::<InodeExtended>() as u64;
        if xattrs.count > 0 {
            self.xattrs(owner.xattrs.get(), at, window)?;
            at += xattrs.body_len() as u64;
        }
        match (slot.layout(), dir) {
            (DataLayout::FlatInline, Some(dir)) => self.dir_block(dir, dir.blocks - 1, at, window),
            (DataLayout::FlatInline, None) => {
                window.put(at, self.rows.target(ino, row)?);
                Ok(())
            }
            (DataLayout::ChunkBased, _) => self.chunks(ino, row.data.get(), at, window),
            (DataLayout::FlatPlain, _) => Ok(()),
        }
    }

    /// What a regular file's inode says about its content.
    fn file_data(&self, ino: u32, slot: Slot, size: u64) -> Result<u32, PlanError> {
        if slot.layout() == DataLayout::ChunkBased {
            let bits = self.plan.fragments.get(ino).and_then(|file| file.chunk_bits);
            return bits.map(u32::from).ok_or(corrupt("inode", ino, "not as planned"));
        }
        Ok(if size == 0 { 0 } else { self.plan.regions.data + self.plan.data[ino as usize] })
    }

    fn chunks(&self, ino: u32, size: u64, at: u64, window: &mut Window<'_>) -> Result<(), PlanError> {
        let planned = self.plan.fragments.get(ino).and_then(|file| Some((file, file.chunk_bits?)));
        let (file, bits) = planned.ok_or(corrupt("inode", ino, "not as planned"))?;
        let count = size.div_ceil(BLOCK).div_ceil(1 << bits);
        let base = self.plan.regions.data + self.plan.data[ino as usize];
        let unit = size_of::<u32>() as u64;
        let end = window.end.saturating_sub(at).div_ceil(unit).min(count);
        let mut chunk = window.start.saturating_sub(at) / unit;
        let runs = self.plan.fragments.runs(file);
        let mut runs = runs[runs.partition_point(|run| u64::from(run.chunk + run.count) <= chunk)..].iter().peekable();
        while chunk < end {
            let address = match runs.peek() {
                Some(run) if chunk >= u64::from(run.chunk) => {
                    base + run.block + (((chunk - u64::from(run.chunk)) as u32) << bits)
                }
                _ => erofs::NULL_ADDR,
            };
            window.put(at + chunk * unit, &address.to_le_bytes());
            chunk += 1;
            runs.next_if(|run| u64::from(run.chunk + run.count) <= chunk);
        }
        Ok(())
    }

    fn xattrs(&self, set: u32, at: u64, window: &mut Window<'_>) -> Result<(), PlanError> {
        let planned = self.plan.xattrs.get(set);
        if !window.overlaps(at, at + planned.body_len() as u64) {
            return Ok(());
        }
        let header = XattrHeader { name_filter: planned.filter.into(), shared_count: planned.shared, reserved: [0; 7] };
        window.put(at, header.as_bytes());
        let mut shared_at = at + size_of::<XattrHeader>() as u64;
        let mut inline_at = shared_at + u64::from(planned.shared) * size_of::<u32>() as u64;
        for row in self.rows.xattr_set(set)? {
            match self.plan.xattrs.home(row) {
                Home::Shared(id) => {
                    window.put(shared_at, &id.to_le_bytes());
                    shared_at += size_of::<u32>() as u64;
                }
                Home::Inline => inline_at += self.xattr(row, inline_at, window)?,
                Home::Omitted => {}
            }
        }
        Ok(())
    }

    /// Writes one attribute and tells its length.
    fn xattr(&self, row: usize, at: u64, window: &mut Window<'_>) -> Result<u64, PlanError> {
        let (name, value) = self.rows.xattr(row)?;
        let split = split_xattr_name(name).and_then(|(index, rest)| {
            let header = XattrEntry {
                name_len: u8::try_from(rest.len()).ok()?,
                name_index: index,
                value_len: u16::try_from(value.len()).ok()?.into(),
            };
            Some((header, rest))
        });
        let (header, rest) = split.ok_or(corrupt("attribute", row as u32, "not as planned"))?;
        let name_at = at + size_of::<XattrEntry>() as u64;
        window.put(at, header.as_bytes());
        window.put(name_at, rest);
        window.put(name_at + rest.len() as u64, value);
        Ok(erofs::xattr_entry_len(rest.len(), value.len()) as u64)
    }

    fn shared_xattrs(&self, window: &mut Window<'_>) -> Result<(), PlanError> {
        let base = u64::from(self.plan.regions.xattrs) * BLOCK;
        for (offset, row) in self.plan.xattrs.shared_from(window.start.saturating_sub(base)) {
            if base + offset >= window.end {
                break;
            }
            self.xattr(row, base + offset, window)?;
        }
        Ok(())
    }

    fn dir_blocks(&self, window: &mut Window<'_>) -> Result<(), PlanError> {
        let dirs = &self.plan.dirs;
        let base = u64::from(self.plan.regions.dir_blocks);
        let mut block = (window.start / BLOCK).saturating_sub(base);
        let end = window.end.div_ceil(BLOCK).min(self.plan.regions.inodes.into()) - base;
        // The last directory that starts in or before the block is the one that has it.
        let first = dirs.partition_point(|dir| u64::from(dir.first_block) <= block).saturating_sub(1);
        for (n, dir) in (first..).zip(&dirs[first..]) {
            let next = dirs
                .get(n + 1)
                .map_or(self.plan.regions.inodes - self.plan.regions.dir_blocks, |next| next.first_block);
            while block < u64::from(next) {
                if block >= end {
                    return Ok(());
                }
                let nth = (block - u64::from(dir.first_block)) as u32;
                self.dir_block(dir, nth, (base + block) * BLOCK, window)?;
                block += 1;
            }
        }
        Ok(())
    }

    /// Writes the directory's block number `nth`, which lies at `at`.
    fn dir_block(&self, dir: &Dir, nth: u32, at: u64, window: &mut Window<'_>) -> Result<(), PlanError> {
        let planned = corrupt("inode", dir.ino, "not as planned");
        let (first, count) = halves(self.rows.inode(dir.ino)?);
        let breaks = &self.plan.breaks[dir.breaks as usize..][..dir.blocks as usize - 1];
        let start = if nth == 0 { 0 } else { breaks[nth as usize - 1] };
        let end = breaks.get(nth as usize).copied().unwrap_or(count.saturating_add(2));
        let dirent_len = size_of::<erofs::Dirent>();
        let mut name_offset = end.saturating_sub(start) as usize * dirent_len;
        let mut dirent_at = at;
        for entry in start..end {
            let entry = dir.entry(entry);
            let (name, child) = match entry {
                Entry::Dot => (&b"."[..], dir.ino),
                Entry::DotDot => (&b".."[..], dir.parent),
                Entry::Name(n) => {
                    let row = first.wrapping_add(n);
                    let name = self.rows.name(row)?;
                    (name, self.rows.dirents[row as usize].ino.get())
                }
            };
            let Some(slot) = self.plan.slots.get(child as usize) else {
                return Err(planned);
            };
            let Ok(offset) = u16::try_from(name_offset) else {
                return Err(planned);
            };
            let dirent = erofs::Dirent {
                nid: u64::from(self.plan.slot_nid(*slot)).into(),
                name_offset: offset.into(),
                file_type: slot.file_type(),
                reserved: 0,
            };
            window.put(dirent_at, dirent.as_bytes());
            window.put(at + name_offset as u64, name);
            dirent_at += dirent_len as u64;
            name_offset += name.len();
        }
        Ok(())
    }

    /// What a symlink's inode says about where its target lies.
    fn link_block(&self, ino: u32, slot: Slot) -> Result<u32, PlanError> {
        if slot.layout() == DataLayout::FlatInline {
            return Ok(0);
        }
        let nth = self.plan.links.binary_search(&ino).map_err(|_| corrupt("inode", ino, "not as planned"))?;
        Ok(self.plan.regions.links + nth as u32)
    }

    fn link_blocks(&self, window: &mut Window<'_>) -> Result<(), PlanError> {
        let base = u64::from(self.plan.regions.links);
        let first = (window.start / BLOCK).saturating_sub(base);
        let end = window.end.div_ceil(BLOCK) - base;
        for (block, ino) in (first..end).zip(self.plan.links.get(first as usize..).unwrap_or(&[])) {
            window.put((base + block) * BLOCK, self.rows.target(*ino, self.rows.inode(*ino)?)?);
        }
        Ok(())
    }
}

/// The number of the slot that the window starts in, in a region of inodes that starts at `base`.
fn first_slot(window: &Window<'_>, base: u64) -> u32 {
    // Metadata ends at 4 GiB, so this fits.
    (window.start.saturating_sub(base) >> erofs::SLOT_BITS) as u32
}

/// One entry of a directory.
enum Entry {
    Dot,
    DotDot,
    /// The directory's name with this number.
    Name(u32),
}

impl Dir {
    /// The entry with this number, among its names, `.` and `..` in order.
    fn entry(&self, number: u32) -> Entry {
        let [dot, dot_dot] = [self.before[0], self.before[1].saturating_add(1)];
        if number == dot {
            Entry::Dot
        } else if number == dot_dot {
            Entry::DotDot
        } else {
            Entry::Name(number - u32::from(number > dot) - u32::from(number > dot_dot))
        }
    }
}
