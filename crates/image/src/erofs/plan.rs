//! Fixes the address of everything: inodes, directory blocks, link targets, attributes, content.

use super::rows::{Rows, corrupt, halves};
use super::sparse::Fragments;
use super::xattr::Xattrs;
use super::{Options, PlanError, Shape};
use crate::index::Index;
use format::erofs::{self, DataLayout, InodeExtended, SuperBlock, compat, file_type, incompat};
use format::index::Inode;
use std::fmt;
use std::ops::Range;
use zerocopy::IntoBytes;

/// Bytes of a block, as this module counts.
pub(super) const BLOCK: u64 = format::BLOCK;
const BLOCK_LEN: usize = BLOCK as usize;
/// The longest symlink target that the kernel follows.
const TARGET_MAX: u32 = 4095;
/// Node numbers are packed into 27 bits, which ends the metadata at 4 GiB.
const META_BLOCKS_MAX: u64 = 1 << 20;
/// Block addresses have 32 bits, of which the last value means a hole.
pub(super) const IMAGE_BLOCKS_MAX: u64 = u32::MAX as u64;

/// Blocks of a space have 32-bit numbers.
pub(super) const SPACE_BLOCKS_MAX: u64 = 1 << 32;

/// The addresses of everything in one image.
///
/// Takes 8 bytes an inode, 36 more for a directory, 4 for each block of a directory and little for the rest.
pub struct Plan {
    pub(super) shape: Shape,
    /// The first 4 KiB from the superblock on.
    pub(super) superblock: SuperBlock,
    /// One per inode: where it lies, how it is laid out, what it is. Those of directories, and those of all others,
    /// are in the order of their addresses.
    pub(super) slots: Vec<Slot>,
    /// One per inode and one more: the first block of its content, counted from the first block of content. An
    /// inode without any has its successor's.
    pub(super) data: Vec<u32>,
    /// In the order of inodes.
    pub(super) dirs: Vec<Dir>,
    /// For each block of a directory but its first: which of the directory's entries it starts with.
    pub(super) breaks: Vec<u32>,
    /// Symlinks whose target has a block of its own, in the order of inodes and of those blocks.
    pub(super) links: Vec<u32>,
    /// Files that are not one extent.
    pub(super) fragments: Fragments,
    pub(super) xattrs: Xattrs,
    pub(super) regions: Regions,
    /// Blocks of content, holes that have addresses included.
    pub(super) data_blocks: u32,
}

/// Where each part of the metadata starts, in blocks. The superblock has block 0; directories' inodes follow.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Regions {
    /// Directory blocks.
    pub dir_blocks: u32,
    /// The inodes that are not directories.
    pub inodes: u32,
    /// Shared extended attributes.
    pub xattrs: u32,
    /// Link targets.
    pub links: u32,
    /// Content.
    pub data: u32,
}

impl Regions {
    /// The first block of directories' inodes.
    pub const DIRS: u32 = 1;
}

/// Inode slots in a block.
const BLOCK_SLOTS: u32 = (BLOCK >> erofs::SLOT_BITS) as u32;

/// Where an inode lies: the number of its slot in the region of directories or of other inodes in the high 27 bits,
/// then its layout, then its type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Slot(u32);

impl Slot {
    fn new(number: u32, layout: DataLayout, file_type: u8) -> Self {
        // The layouts that we use are the numbers 0, 2 and 4.
        Slot(number << 5 | (layout as u32) << 2 | u32::from(file_type))
    }

    pub fn number(self) -> u32 {
        self.0 >> 5
    }

    /// Byte offset in its region.
    pub fn offset(self) -> u64 {
        u64::from(self.number()) << erofs::SLOT_BITS
    }

    pub fn layout(self) -> DataLayout {
        match self.0 >> 3 & 3 {
            0 => DataLayout::FlatPlain,
            1 => DataLayout::FlatInline,
            _ => DataLayout::ChunkBased,
        }
    }

    pub fn file_type(self) -> u8 {
        (self.0 & 7) as u8
    }
}

/// A directory. Its entries are its names with `.` and `..` among them in bytewise order.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dir {
    pub ino: u32,
    pub parent: u32,
    /// Its first block in the region of directory blocks; those that are inline are not there.
    pub first_block: u32,
    /// Its blocks, an inline one included; at least 1.
    pub blocks: u32,
    /// Bytes in the last block; 1 to 4096.
    pub tail: u32,
    /// The first of `blocks - 1` rows in `breaks`.
    pub breaks: u32,
    /// Names that sort before `.`, and before `..`.
    pub before: [u32; 2],
    /// The slot that other inodes begin at which come behind it in inode order; those up to the next directory are
    /// its own children.
    pub inodes: u32,
}

impl Dir {
    pub fn size(&self) -> u64 {
        u64::from(self.blocks - 1) * BLOCK + u64::from(self.tail)
    }
}

impl Plan {
    /// Plans the image of `index`.
    ///
    /// Reads inodes, names, places and attributes once. Content is not needed.
    pub fn new(index: &Index, options: &Options) -> Result<Plan, PlanError> {
        let rows = Rows::of(index);
        let mut planner = Planner::new(rows, options)?;
        for (ino, inode) in (0..).zip(rows.inodes) {
            planner.inode(ino, inode)?;
        }
        planner.finish(index)
    }

    /// Bytes of the whole image, whole blocks. At least its last block holds only zeros.
    pub fn image_len(&self) -> u64 {
        self.meta_len() + (u64::from(self.data_blocks) + 1) * BLOCK
    }

    /// Bytes of the superblock and all directories, which lie in front of the other metadata; whole blocks.
    pub fn dirs_len(&self) -> u64 {
        u64::from(self.regions.inodes) * BLOCK
    }

    /// Bytes of the metadata in front, whole blocks.
    pub fn meta_len(&self) -> u64 {
        u64::from(self.regions.data) * BLOCK
    }

    /// Which reader the image is for.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Inodes in the image.
    pub fn inode_count(&self) -> u32 {
        self.slots.len() as u32
    }

    /// An inode's node number, which the kernel shows as `st_ino`.
    pub fn nid(&self, ino: u32) -> Option<u64> {
        self.slots.get(ino as usize).map(|slot| self.slot_nid(*slot).into())
    }

    /// The inode with this node number.
    pub fn ino(&self, nid: u64) -> Option<u32> {
        let nid = u32::try_from(nid).ok()?;
        let block = nid / BLOCK_SLOTS;
        let number = |region: u32| nid.checked_sub(region * BLOCK_SLOTS);
        let ino = if block < self.regions.inodes {
            self.dirs[self.dir_at(number(Regions::DIRS)?)].ino
        } else {
            let number = number(self.regions.inodes)?;
            let inos = self.children(self.group_at(number));
            let at = self.slots[inos.clone()].partition_point(|slot| slot.number() <= number).checked_sub(1)?;
            (inos.start + at) as u32
        };
        (self.slot_nid(self.slots[ino as usize]) == nid).then_some(ino)
    }

    pub(super) fn slot_nid(&self, slot: Slot) -> u32 {
        let region = if slot.file_type() == file_type::DIR { Regions::DIRS } else { self.regions.inodes };
        region * BLOCK_SLOTS + slot.number()
    }

    /// The last directory whose inode starts at or before this slot; the first one if there is none.
    pub(super) fn dir_at(&self, number: u32) -> usize {
        self.dirs.partition_point(|dir| self.slots[dir.ino as usize].number() <= number).saturating_sub(1)
    }

    /// The directory whose children, directories left out, have this slot of other inodes among theirs.
    pub(super) fn group_at(&self, number: u32) -> usize {
        self.dirs.partition_point(|dir| dir.inodes <= number).saturating_sub(1)
    }

    /// The inodes between this directory's and the next one's.
    pub(super) fn children(&self, dir: usize) -> Range<usize> {
        self.dirs[dir].ino as usize + 1..self.dirs.get(dir + 1).map_or(self.slots.len(), |next| next.ino as usize)
    }

    /// How many attributes were left out because EROFS has no place for their names, counted per inode.
    pub fn omitted_xattrs(&self) -> u64 {
        self.xattrs.omitted
    }
}

impl fmt::Debug for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plan")
            .field("shape", &self.shape)
            .field("inodes", &self.slots.len())
            .field("directories", &self.dirs.len())
            .field("regions", &self.regions)
            .field("data_blocks", &self.data_blocks)
            .finish_non_exhaustive()
    }
}

/// A plan being made; `plan.data` of a directory not reached yet holds its parent plus one.
struct Planner<'a> {
    rows: Rows<'a>,
    plan: Plan,
    dir_inodes: Area,
    other_inodes: Area,
    /// Where the next content may lie, in blocks of content.
    data_end: u64,
    dir_blocks: u64,
    /// The dirent that the next directory's entries start with.
    next_dirent: u32,
    /// Where the next symlink's target starts.
    next_target: u32,
}

impl<'a> Planner<'a> {
    fn new(rows: Rows<'a>, options: &Options) -> Result<Self, PlanError> {
        let count = rows.inodes.len();
        if u32::try_from(count).is_err() || rows.places.len() != count {
            return Err(corrupt("inode", 0, "there is not one place per inode"));
        }
        if rows.inodes.first().is_none_or(|root| file_type::of_mode(root.mode.get()) != Some(file_type::DIR)) {
            return Err(corrupt("inode", 0, "the root is not a directory"));
        }
        let xattrs = match options.shape {
            Shape::Kernel => Xattrs::plan(&rows)?,
            Shape::Gvisor => Xattrs::default(),
        };
        let mut plan = Plan {
            shape: options.shape,
            superblock: zerocopy::FromZeros::new_zeroed(),
            slots: Vec::with_capacity(count),
            data: vec![0; count + 1],
            dirs: Vec::new(),
            breaks: Vec::new(),
            links: Vec::new(),
            fragments: Fragments::default(),
            xattrs,
            regions: Regions::default(),
            data_blocks: 0,
        };
        plan.data[0] = 1; // the root is its own parent
        Ok(Planner {
            rows,
            plan,
            dir_inodes: Area { end: 0 },
            other_inodes: Area { end: 0 },
            data_end: 0,
            dir_blocks: 0,
            next_dirent: 1,
            next_target: 0,
        })
    }

    fn inode(&mut self, ino: u32, inode: &Inode) -> Result<(), PlanError> {
        let file_type = file_type::of_mode(inode.mode.get()).ok_or(corrupt("inode", ino, "its type does not exist"))?;
        if inode.mtime_nsec.get() >= 1_000_000_000 {
            return Err(corrupt("inode", ino, "its nanoseconds are a second or more"));
        }
        let owner = self.rows.owner(ino, inode.owner.get())?;
        let body = (size_of::<InodeExtended>() + self.plan.xattrs.body_len(ino, owner.xattrs.get())?) as u64;
        let data_start = self.data_end;
        let (layout, behind) = match file_type {
            file_type::FILE => self.file(ino, inode)?,
            file_type::DIR => self.directory(ino, inode, body)?,
            file_type::SYMLINK => self.symlink(ino, inode, body)?,
            file_type::CHAR | file_type::BLOCK => {
                let (minor, major) = halves(inode);
                let why = "its device number needs more than 12 bits of major or 20 of minor number";
                erofs::encode_device(major, minor).ok_or(PlanError::Unsupported { ino, why })?;
                (DataLayout::FlatPlain, 0)
            }
            _ => (DataLayout::FlatPlain, 0),
        };
        let area = if file_type == file_type::DIR { &mut self.dir_inodes } else { &mut self.other_inodes };
        let slot = Slot::new(area.put(body + behind), layout, file_type);
        too_large("its metadata", area.end.div_ceil(BLOCK), META_BLOCKS_MAX)?;
        too_large("its content", self.data_end, IMAGE_BLOCKS_MAX)?;
        self.plan.slots.push(slot);
        self.plan.data[ino as usize] = data_start as u32;
        Ok(())
    }

    fn symlink(&mut self, ino: u32, inode: &Inode, body: u64) -> Result<(DataLayout, u64), PlanError> {
        let target = self.rows.target(ino, inode)?;
        if target.is_empty() || target.contains(&0) {
            return Err(corrupt("inode", ino, "its target is empty or has a zero byte"));
        }
        if target.len() > TARGET_MAX as usize {
            return Err(PlanError::Unsupported { ino, why: "its link target is longer than 4095 bytes" });
        }
        let (start, len) = halves(inode);
        if start != self.next_target {
            return Err(corrupt("inode", ino, "its target does not follow that of the symlink before"));
        }
        self.next_target = start + len;
        let len = u64::from(len);
        if self.other_inodes.inline(body, len) {
            return Ok((DataLayout::FlatInline, len));
        }
        self.plan.links.push(ino);
        Ok((DataLayout::FlatPlain, 0))
    }

    fn file(&mut self, ino: u32, inode: &Inode) -> Result<(DataLayout, u64), PlanError> {
        let size = inode.data.get();
        if i64::try_from(size).is_err() {
            return Err(corrupt("inode", ino, "its size is negative"));
        }
        let place = self.rows.places[ino as usize];
        let blocks = size.div_ceil(BLOCK);
        if blocks == 0 {
            return Ok((DataLayout::FlatPlain, 0));
        }
        if (place.object.get() as usize) < self.rows.objects.len() {
            let object = &self.rows.objects[place.object.get() as usize];
            let end = u64::from(place.value.get()).checked_add(blocks);
            if end.is_none_or(|end| end > object.space_blocks.get().min(SPACE_BLOCKS_MAX)) {
                return Err(corrupt("inode", ino, "its content lies outside its object"));
            }
            self.data_end += blocks;
            return Ok((DataLayout::FlatPlain, 0));
        }
        let chunks = self.plan.shape == Shape::Kernel;
        let placed = self.plan.fragments.add(&self.rows, ino, place, blocks, chunks)?;
        self.data_end = self.data_end.saturating_add(placed.blocks);
        Ok(match placed.chunks {
            Some(chunks) => (DataLayout::ChunkBased, chunks * size_of::<u32>() as u64),
            None => (DataLayout::FlatPlain, 0),
        })
    }

    fn directory(&mut self, ino: u32, inode: &Inode, body: u64) -> Result<(DataLayout, u64), PlanError> {
        let rows = self.rows;
        let (first, count) = halves(inode);
        let parent = self.plan.data[ino as usize];
        if parent == 0 {
            return Err(corrupt("inode", ino, "this directory has no name, or one only in a later directory"));
        }
        if first != self.next_dirent {
            return Err(corrupt("inode", ino, "its names do not follow those of the directory before"));
        }
        self.next_dirent = first.checked_add(count).ok_or(corrupt("inode", ino, "it has too many names"))?;
        let (first, end) = (first as usize, self.next_dirent as usize);
        let Some(entries) = rows.dirents.get(first..end + 1) else {
            return Err(corrupt("inode", ino, "its names do not exist"));
        };

        let breaks = self.plan.breaks.len();
        let mut pages = Pages { blocks: 1, used: 0, entries: 0, breaks: &mut self.plan.breaks };
        let mut before = [count; 2];
        // The names `.` and `..` that are still to come, as an index into DOTS.
        let mut dots = 0;
        let mut last: &[u8] = &[];
        for (n, pair) in (0u32..).zip(entries.windows(2)) {
            let at = first as u32 + n;
            let name = rows.names.get(pair[0].name.get() as usize..pair[1].name.get() as usize).ok_or(corrupt(
                "dirent",
                at,
                "its name lies outside the names",
            ))?;
            if name.is_empty() || name.len() > erofs::NAME_LEN || name.iter().any(|b| matches!(b, 0 | b'/')) {
                return Err(corrupt("dirent", at, "its name is not one"));
            }
            if name <= last {
                return Err(corrupt("dirent", at, "its name is not in order"));
            }
            while dots < DOTS.len() && DOTS[dots] <= name {
                if DOTS[dots] == name {
                    return Err(corrupt("dirent", at, "its name is `.` or `..`"));
                }
                before[dots] = n;
                pages.entry(DOTS[dots].len());
                dots += 1;
            }
            pages.entry(name.len());
            last = name;

            let child = pair[0].ino.get();
            let mode = rows.inode(child)?.mode.get();
            if file_type::of_mode(mode) == Some(file_type::DIR) {
                // Every directory has one name, in a directory before it: so they are a tree.
                if child <= ino || self.plan.data[child as usize] != 0 {
                    return Err(corrupt("dirent", at, "this directory has another name or contains itself"));
                }
                self.plan.data[child as usize] = ino + 1;
            }
        }
        for dot in &DOTS[dots..] {
            pages.entry(dot.len());
        }
        let (blocks, tail) = (pages.blocks, pages.used);
        let inline = self.dir_inodes.inline(body, u64::from(tail));
        self.plan.dirs.push(Dir {
            ino,
            parent: parent - 1,
            first_block: self.dir_blocks as u32,
            blocks,
            tail,
            breaks: breaks as u32,
            before,
            inodes: (self.other_inodes.end >> erofs::SLOT_BITS) as u32,
        });
        self.dir_blocks += u64::from(blocks - u32::from(inline));
        too_large("its directories", self.dir_blocks, META_BLOCKS_MAX)?;
        Ok(if inline { (DataLayout::FlatInline, tail.into()) } else { (DataLayout::FlatPlain, 0) })
    }

    fn finish(mut self, index: &Index) -> Result<Plan, PlanError> {
        let plan = &mut self.plan;
        if self.next_dirent as usize + 1 != self.rows.dirents.len() {
            return Err(corrupt("dirent", self.next_dirent, "it is in no directory"));
        }
        let count = plan.slots.len();
        plan.data[count] = self.data_end as u32;
        let dir_blocks = u64::from(Regions::DIRS) + self.dir_inodes.end.div_ceil(BLOCK);
        let inodes = dir_blocks + self.dir_blocks;
        let xattrs = inodes + self.other_inodes.end.div_ceil(BLOCK);
        let links = xattrs + plan.xattrs.shared_len().div_ceil(BLOCK);
        let data = links + plan.links.len() as u64;
        too_large("its metadata", data, META_BLOCKS_MAX)?;
        let blocks = data + self.data_end + 1;
        too_large("it", blocks, IMAGE_BLOCKS_MAX)?;
        plan.regions = Regions {
            dir_blocks: dir_blocks as u32,
            inodes: inodes as u32,
            xattrs: xattrs as u32,
            links: links as u32,
            data: data as u32,
        };
        plan.data_blocks = self.data_end as u32;
        plan.dirs.shrink_to_fit();
        plan.breaks.shrink_to_fit();
        plan.superblock = superblock(plan, index, blocks as u32);
        Ok(self.plan)
    }
}

/// A region of inodes being filled.
struct Area {
    /// Where the next inode may lie, in bytes from the region's start.
    end: u64,
}

impl Area {
    /// Finds a place for an inode and what lies behind it, `len` bytes together, and gives its slot.
    fn put(&mut self, len: u64) -> u32 {
        // An inode's core never straddles blocks: the kernel would have to read two and copy.
        if self.end % BLOCK > BLOCK - size_of::<InodeExtended>() as u64 {
            self.end = self.end.next_multiple_of(BLOCK);
        }
        let number = self.end >> erofs::SLOT_BITS;
        self.end = (self.end + len).next_multiple_of(1 << erofs::SLOT_BITS);
        number as u32
    }

    /// Whether `tail` bytes fit behind an inode of `body` bytes without crossing a block's end, in the place at
    /// `self.end` or, where that costs less than a block for the tail alone, in the next block.
    fn inline(&mut self, body: u64, tail: u64) -> bool {
        let fits = |at: u64| (at + body) % BLOCK + tail <= BLOCK;
        let left = BLOCK - self.end % BLOCK;
        if tail >= BLOCK {
            return false;
        }
        if left >= size_of::<InodeExtended>() as u64 && fits(self.end) {
            return true;
        }
        if left <= BLOCK - tail && fits(self.end + left) {
            self.end += left;
            return true;
        }
        false
    }
}

const DOTS: [&[u8]; 2] = [b".", b".."];

/// Entries being put into directory blocks.
struct Pages<'a> {
    blocks: u32,
    /// Bytes in the last block.
    used: u32,
    entries: u32,
    breaks: &'a mut Vec<u32>,
}

impl Pages<'_> {
    fn entry(&mut self, name_len: usize) {
        // Names have at most 255 bytes.
        let len = (size_of::<erofs::Dirent>() + name_len) as u32;
        self.used += len;
        if self.used as usize > BLOCK_LEN {
            self.breaks.push(self.entries);
            self.blocks += 1;
            self.used = len;
        }
        self.entries += 1;
    }
}

pub(super) fn too_large(what: &'static str, blocks: u64, limit: u64) -> Result<(), PlanError> {
    if blocks > limit { Err(PlanError::TooLarge { what, blocks, limit }) } else { Ok(()) }
}

fn superblock(plan: &Plan, index: &Index, blocks: u32) -> SuperBlock {
    let identity = index.identity();
    let mut uuid = [0; 16];
    uuid.copy_from_slice(&identity.0[..16]);
    // RFC 9562 version 8 (made in our own way), variant 10.
    uuid[6] = uuid[6] & 0x0F | 0x80;
    uuid[8] = uuid[8] & 0x3F | 0x80;
    let mut volume_name = [0; 16];
    volume_name[..3].copy_from_slice(b"lr-");
    volume_name[3..15].copy_from_slice(&identity.to_hex().as_bytes()[..12]);

    let filter = if plan.xattrs.any() { compat::XATTR_FILTER } else { 0 };
    let chunked = if plan.fragments.any_chunked() { incompat::CHUNKED_FILE } else { 0 };
    let shared = if plan.xattrs.shared_len() > 0 { plan.regions.xattrs } else { 0 };
    let mut sb = SuperBlock {
        magic: erofs::SUPER_MAGIC.into(),
        checksum: 0.into(),
        feature_compat: (compat::SB_CHKSUM | compat::MTIME | filter).into(),
        block_bits: erofs::BLOCK_BITS,
        ext_slots: 0,
        root_nid: (plan.slot_nid(plan.slots[0]) as u16).into(),
        inodes: (plan.slots.len() as u64).into(),
        epoch: 0.into(),
        fixed_nsec: 0.into(),
        blocks: blocks.into(),
        meta_block: 0.into(),
        xattr_block: shared.into(),
        uuid,
        volume_name,
        feature_incompat: chunked.into(),
        compression: 0.into(),
        extra_devices: 0.into(),
        device_table: 0.into(),
        dir_block_bits: 0,
        xattr_prefix_count: 0,
        xattr_prefix_start: 0.into(),
        packed_nid: 0.into(),
        xattr_filter_reserved: 0,
        reserved: [0; 23],
    };
    let mut block = [0; BLOCK_LEN - erofs::SUPER_OFFSET];
    block[..size_of::<SuperBlock>()].copy_from_slice(sb.as_bytes());
    sb.checksum = SuperBlock::checksum_of(&block).into();
    sb
}
