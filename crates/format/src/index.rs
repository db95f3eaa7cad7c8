//! The index file: one image's compiled namespace. Normative text: `doc/format/index.md`.
//!
//! A header, a section table, and sections aligned to 8 bytes. Sections belong to the *tree* (a pure function of
//! names, attributes and content) or to the *placement* (where the bytes lie, and hashes over the names).
//!
//! Inodes are numbered in one canonical order: the root is 0; after each directory come its children that are
//! not directories, in bytewise order of their names (a hard-linked inode at its first name in this order), then
//! each child directory, recursively, in bytewise order. Dirents are stored in the order of the directories'
//! inode numbers, sorted bytewise within one; dirent 0 is the root's own, with an empty name.

use crate::Digest;
use zerocopy::little_endian::{I64, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first 8 bytes of an index.
pub const MAGIC: [u8; 8] = *b"LRINDEX\0";
/// The version that this code reads and writes.
pub const VERSION: u32 = 1;

/// The most dirents of an index, the root's own included.
pub const MAX_DIRENTS: u32 = 4 << 20;
/// The most components of a path.
pub const MAX_DEPTH: u32 = 1024;
/// The most bytes of a name.
pub const MAX_NAME_LEN: usize = 255;
/// The most bytes of an absolute path, its first slash included.
pub const MAX_PATH_LEN: usize = 4095;
/// The most bytes of a symlink's target.
pub const MAX_TARGET_LEN: usize = 4095;
/// The most bytes of an extended attribute's name.
pub const MAX_XATTR_NAME_LEN: usize = 255;
/// The most bytes of an extended attribute's value.
pub const MAX_XATTR_VALUE_LEN: usize = 65_535;
/// The most bytes of one set of extended attributes: for each one 4 + name + value, rounded up to a multiple of 4.
pub const MAX_XATTR_SET_BYTES: usize = 128 << 10;
/// The most bytes of a file: 2^32 - 1 blocks.
pub const MAX_FILE_SIZE: u64 = u32::MAX as u64 * crate::BLOCK;

/// The type bits of a mode.
pub const S_IFMT: u16 = 0o170_000;
/// A FIFO's type bits.
pub const S_IFIFO: u16 = 0o010_000;
/// A character device's type bits.
pub const S_IFCHR: u16 = 0o020_000;
/// A directory's type bits.
pub const S_IFDIR: u16 = 0o040_000;
/// A block device's type bits.
pub const S_IFBLK: u16 = 0o060_000;
/// A regular file's type bits.
pub const S_IFREG: u16 = 0o100_000;
/// A symlink's type bits.
pub const S_IFLNK: u16 = 0o120_000;
/// A socket's type bits.
pub const S_IFSOCK: u16 = 0o140_000;

/// Which section a row of the section table describes (raw: [`Section::kind`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum SectionKind {
    /// Tree: [`Inode`] rows, in inode order.
    Inodes = 1,
    /// Tree: [`Owner`] rows, deduplicated, in order of first use.
    Owners = 2,
    /// Tree: [`Dirent`] rows; one more than there are names, the last closing the name range.
    Dirents = 3,
    /// Tree: names, back to back in dirent order, without terminators.
    Names = 4,
    /// Tree: symlink targets, back to back in inode order, without terminators.
    Links = 5,
    /// Tree: u32 per set plus one: the first [`XattrEntry`] of each set. Set 0 is empty.
    XattrSets = 6,
    /// Tree: [`XattrEntry`] rows, sorted by full name within a set.
    XattrEntries = 7,
    /// Tree: bytes of xattr names and values.
    XattrData = 8,
    /// Placement: [`Object`] rows.
    Objects = 16,
    /// Placement: one [`Place`] per inode.
    Places = 17,
    /// Placement: [`Extent`] rows, for files that one `Place` cannot describe.
    Extents = 18,
    /// Placement: u32 per dirent: the dirent of the directory that it stands in (0 for the root's own).
    Parents = 19,
    /// Placement: hash over (parent inode, name) of wide directories: [`HashHeader`], slots (u32 dirent numbers),
    /// pilots (u16). Empty when there is none; then names are searched in the sorted dirents.
    NameHash = 20,
    /// Placement: hash over absolute paths, in the same form.
    PathHash = 21,
}

impl SectionKind {
    /// Every kind, tree first, in file order.
    pub const ALL: [SectionKind; 14] = [
        SectionKind::Inodes,
        SectionKind::Owners,
        SectionKind::Dirents,
        SectionKind::Names,
        SectionKind::Links,
        SectionKind::XattrSets,
        SectionKind::XattrEntries,
        SectionKind::XattrData,
        SectionKind::Objects,
        SectionKind::Places,
        SectionKind::Extents,
        SectionKind::Parents,
        SectionKind::NameHash,
        SectionKind::PathHash,
    ];

    /// Whether the section is part of the tree, and so of the image's identity.
    pub fn is_tree(self) -> bool {
        (self as u32) < 16
    }
}

/// The header, at byte 0. The index's own digest (its file name in a store) is BLAKE3 over header and section
/// table, which between them hold the digests of all sections.
#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`]; readable without knowing the rest.
    pub version: U32,
    /// Bytes of this header.
    pub header_len: U32,
    /// Bits that a reader may ignore.
    pub compat: U32,
    /// Bits that a reader must know.
    pub incompat: U32,
    /// Bytes of the whole file.
    pub total_len: U64,
    /// Rows of the section table, which follows the header at once.
    pub section_count: U32,
    /// Inodes.
    pub inode_count: U32,
    /// Dirents, the root's own included, the closing row not.
    pub dirent_count: U32,
    /// Reserved, zero.
    pub reserved0: U32,
    /// Sum of the sizes of all regular files, bytes.
    pub content_bytes: U64,
    /// Sum of the sizes of all regular files less their holes, in blocks.
    pub data_blocks: U64,
    /// BLAKE3 over the tree's rows of the section table (kind, length and digest, see the specification).
    pub tree_digest: Digest,
    /// Over all file digests; see [`crate::digest::ContentRootHasher`].
    pub content_root: Digest,
    /// The image's identity; see [`crate::digest::identity`].
    pub identity: Digest,
    /// BLAKE3 over the placement's rows of the section table.
    pub placement_digest: Digest,
    /// Reserved, zero.
    pub reserved: [u8; 60],
    /// CRC-32C over the header before this field, then the section table.
    pub crc: U32,
}
const _: () = assert!(size_of::<Header>() == 256);

/// One row of the section table.
#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Section {
    /// A [`SectionKind`].
    pub kind: U32,
    /// Reserved, zero.
    pub reserved: U32,
    /// Byte offset in the file, a multiple of 8.
    pub offset: U64,
    /// Bytes, without the padding behind.
    pub len: U64,
    /// BLAKE3 of the section's bytes.
    pub digest: Digest,
    /// Reserved, zero.
    pub reserved1: U64,
}
const _: () = assert!(size_of::<Section>() == 64);

/// One inode.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, PartialEq, Eq)]
#[repr(C)]
pub struct Inode {
    /// File type and permission bits, as in `st_mode`.
    pub mode: U16,
    /// Reserved, zero.
    pub flags: U16,
    /// Link count: names for everything but directories, 2 + child directories for those.
    pub nlink: U32,
    /// Row of the owners table.
    pub owner: U32,
    /// Modification time, nanoseconds within the second, below 10^9.
    pub mtime_nsec: U32,
    /// Modification time, seconds since 1970, negative before.
    pub mtime_sec: I64,
    /// By type. Regular file: size in bytes. Directory: first dirent (low 32 bits) and number of dirents (high).
    /// Symlink: offset in `Links` (low 32 bits) and length (high). Device: minor (low 32 bits) and major (high).
    /// FIFO and socket: 0.
    pub data: U64,
}
const _: () = assert!(size_of::<Inode>() == 32);

/// User, group and extended attributes that inodes share.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Owner {
    /// User.
    pub uid: U32,
    /// Group.
    pub gid: U32,
    /// Set of extended attributes; 0 is the empty set.
    pub xattrs: U32,
}
const _: () = assert!(size_of::<Owner>() == 12);

/// One name. Its length is the next row's `name` less its own.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Dirent {
    /// Byte offset in `Names`.
    pub name: U32,
    /// Inode.
    pub ino: U32,
}
const _: () = assert!(size_of::<Dirent>() == 8);

/// One extended attribute. Names are full ("user.x").
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct XattrEntry {
    /// Byte offset of the name in `XattrData`.
    pub name: U32,
    /// Byte offset of the value in `XattrData`.
    pub value: U32,
    /// Bytes of the name, 1 to 255.
    pub name_len: U16,
    /// Reserved, zero.
    pub reserved: U16,
    /// Bytes of the value, at most 65,535.
    pub value_len: U32,
}
const _: () = assert!(size_of::<XattrEntry>() == 16);

/// An object that the placement refers to.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Object {
    /// The digest of its object map: the object's name.
    pub id: Digest,
    /// Blocks of its space.
    pub space_blocks: U64,
}
const _: () = assert!(size_of::<Object>() == 40);

/// Where an inode's content lies.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Place {
    /// An object's row: the file is one extent from file block 0, without holes. [`Place::NONE`]: no data (an empty
    /// file, one hole, not a regular file). [`Place::MANY`]: see `value`.
    pub object: U32,
    /// With an object: the space block. With `MANY`: the first row in `Extents`, whose file ends with the row that
    /// has [`Extent::LAST`] set. Directories have `NONE` and their own dirent here.
    pub value: U32,
}
const _: () = assert!(size_of::<Place>() == 8);

impl Place {
    /// No data.
    pub const NONE: u32 = u32::MAX;
    /// Several extents.
    pub const MANY: u32 = u32::MAX - 1;
}

/// A run of blocks of one file in one space. File blocks that no extent covers are a hole and read as zeros.
/// Sorted by `file_block`, not overlapping.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Extent {
    /// First block of the file.
    pub file_block: U32,
    /// Blocks, and [`Extent::LAST`] in the highest bit.
    pub count: U32,
    /// Row of the objects table.
    pub object: U32,
    /// First block in the object's space.
    pub space_block: U32,
}
const _: () = assert!(size_of::<Extent>() == 16);

/// The head of a hash section. `slots` u32 and then `buckets` u16 follow at once.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct HashHeader {
    /// What the keys are hashed with.
    pub seed: U64,
    /// Keys.
    pub keys: U32,
    /// Slots, at least as many as keys. A slot holds a dirent's number, or [`HashHeader::EMPTY`].
    pub slots: U32,
    /// Buckets, one pilot each.
    pub buckets: U32,
    /// Directories with fewer entries have no keys here (names), 0 (paths).
    pub min_entries: U32,
    /// Reserved, zero.
    pub reserved: U64,
}
const _: () = assert!(size_of::<HashHeader>() == 32);

impl HashHeader {
    /// A slot without a key.
    pub const EMPTY: u32 = u32::MAX;
}

impl Extent {
    /// Set in `count` of a file's last extent.
    pub const LAST: u32 = 1 << 31;
}

/// A row of the section table as far as digests take it in: kind, length, digest of the bytes.
pub type SectionSum = (SectionKind, u64, Digest);

/// The digest over the tree's sections, or over the placement's: kind (u32), length (u64) and digest of each, in the
/// order of the kinds. Offsets do not enter.
pub fn sections_digest(tree: bool, sums: &[SectionSum]) -> Digest {
    let context = if tree { "lazyroot 2026 index tree v1" } else { "lazyroot 2026 index placement v1" };
    let mut h = blake3::Hasher::new_derive_key(context);
    for (kind, len, digest) in sums.iter().filter(|(kind, ..)| kind.is_tree() == tree) {
        h.update(&(*kind as u32).to_le_bytes());
        h.update(&len.to_le_bytes());
        h.update(&digest.0);
    }
    Digest(*h.finalize().as_bytes())
}
