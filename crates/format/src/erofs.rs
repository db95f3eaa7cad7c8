//! EROFS on-disk structures, as the Linux kernel's `fs/erofs/erofs_fs.h` defines them: the part that we write.
//!
//! Names in comments are the kernel's. What we emit of the format, and why, is in `doc/format/erofs.md`.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// `EROFS_SUPER_MAGIC_V1`.
pub const SUPER_MAGIC: u32 = 0xE0F5_E1E2;
/// `EROFS_SUPER_OFFSET`: where the superblock lies in the image, in bytes.
pub const SUPER_OFFSET: usize = 1024;
/// log2 of the block size that we write (`blkszbits`).
pub const BLOCK_BITS: u8 = 12;
/// log2 of an inode slot: a node number (*nid*) counts slots of 32 bytes from the start of the metadata.
pub const SLOT_BITS: u32 = 5;
/// `EROFS_NAME_LEN`: the longest name, in bytes.
pub const NAME_LEN: usize = 255;
/// `EROFS_NULL_ADDR`: the block address of a chunk that is a hole.
pub const NULL_ADDR: u32 = u32::MAX;

/// Bits of [`SuperBlock::feature_compat`], which a reader may ignore.
pub mod compat {
    /// `EROFS_FEATURE_COMPAT_SB_CHKSUM`: the superblock's checksum is valid.
    pub const SB_CHKSUM: u32 = 1 << 0;
    /// `EROFS_FEATURE_COMPAT_MTIME`: inode times are modification times.
    pub const MTIME: u32 = 1 << 1;
    /// `EROFS_FEATURE_COMPAT_XATTR_FILTER`: [`super::XattrHeader::name_filter`] is valid.
    pub const XATTR_FILTER: u32 = 1 << 2;
}

/// Bits of [`SuperBlock::feature_incompat`], which a reader must know.
pub mod incompat {
    /// `EROFS_FEATURE_INCOMPAT_CHUNKED_FILE`: some file has the layout [`super::DataLayout::ChunkBased`].
    pub const CHUNKED_FILE: u32 = 1 << 2;
}

/// `struct erofs_super_block`, without extension slots.
#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct SuperBlock {
    /// [`SUPER_MAGIC`].
    pub magic: U32,
    /// CRC-32C, see [`SuperBlock::checksum_of`].
    pub checksum: U32,
    /// See [`compat`].
    pub feature_compat: U32,
    /// [`BLOCK_BITS`] (`blkszbits`).
    pub block_bits: u8,
    /// Further 16-byte slots behind this structure (`sb_extslots`).
    pub ext_slots: u8,
    /// Node number of the root directory (`rootnid_2b`).
    pub root_nid: U16,

    /// Inodes (`inos`).
    pub inodes: U64,
    /// Base of compact inodes' times, in seconds (`epoch`).
    pub epoch: U64,

    /// Nanoseconds of compact inodes' times (`fixed_nsec`).
    pub fixed_nsec: U32,
    /// Blocks of the image, for statfs (`blocks_lo`).
    pub blocks: U32,
    /// Block from which node numbers count (`meta_blkaddr`).
    pub meta_block: U32,
    /// Block from which identifiers of shared extended attributes count (`xattr_blkaddr`).
    pub xattr_block: U32,

    /// Volume UUID.
    pub uuid: [u8; 16],

    /// Volume name, NUL-terminated.
    pub volume_name: [u8; 16],

    /// See [`incompat`].
    pub feature_incompat: U32,
    /// Compression algorithms (`u1`).
    pub compression: U16,
    /// Devices besides the first one (`extra_devices`).
    pub extra_devices: U16,
    /// Place of the device table (`devt_slotoff`).
    pub device_table: U16,
    /// log2 of the directory block size less that of the block size (`dirblkbits`); 0.
    pub dir_block_bits: u8,
    /// Long prefixes of attribute names (`xattr_prefix_count`).
    pub xattr_prefix_count: u8,
    /// Where those prefixes lie (`xattr_prefix_start`).
    pub xattr_prefix_start: U32,

    /// Node number of the inode with packed data (`packed_nid`).
    pub packed_nid: U64,
    /// 0, else readers must not use the name filters (`xattr_filter_reserved`).
    pub xattr_filter_reserved: u8,
    /// Reserved, zero.
    pub reserved: [u8; 23],
}
const _: () = assert!(size_of::<SuperBlock>() == 128);
const _: () = assert!(std::mem::offset_of!(SuperBlock, uuid) == 48);
const _: () = assert!(std::mem::offset_of!(SuperBlock, feature_incompat) == 80);
const _: () = assert!(std::mem::offset_of!(SuperBlock, packed_nid) == 96);

impl SuperBlock {
    /// The checksum of the block whose bytes from [`SUPER_OFFSET`] on are `rest`, with the checksum field zero:
    /// CRC-32C without the usual inversion of the result.
    pub fn checksum_of(rest: &[u8]) -> u32 {
        !crc32c::crc32c(rest)
    }
}

/// How an inode's data is laid out (`EROFS_INODE_*`); in bits 1 to 3 of [`InodeExtended::format`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum DataLayout {
    /// `EROFS_INODE_FLAT_PLAIN`: consecutive blocks.
    FlatPlain = 0,
    /// `EROFS_INODE_FLAT_INLINE`: consecutive blocks, and the last one, short, behind the inode.
    FlatInline = 2,
    /// `EROFS_INODE_CHUNK_BASED`: an array of block addresses behind the inode, one per chunk.
    ChunkBased = 4,
}

impl DataLayout {
    /// The value of [`InodeExtended::format`] for a 64-byte inode with this layout.
    pub const fn extended_format(self) -> u16 {
        // bit 0: EROFS_INODE_LAYOUT_EXTENDED; from bit 1: the layout
        1 | (self as u16) << 1
    }
}

/// `EROFS_CHUNK_FORMAT_BLKBITS_MASK`: bits of a chunk format that hold log2 of the chunk's blocks.
pub const CHUNK_BITS_MASK: u16 = 0x1F;

/// `struct erofs_inode_extended`: an inode in full.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct InodeExtended {
    /// See [`DataLayout::extended_format`] (`i_format`).
    pub format: U16,
    /// Size of the inline attributes, see [`xattr_count`] (`i_xattr_icount`).
    pub xattr_count: U16,
    /// `st_mode` (`i_mode`).
    pub mode: U16,
    /// High bits of block addresses; zero (`i_nb`).
    pub block_high: U16,
    /// Size in bytes (`i_size`).
    pub size: U64,

    /// By type and layout (`i_u`): first block, encoded device number, or chunk format (low 16 bits).
    pub data: U32,
    /// A serial number, for 32-bit programs only (`i_ino`).
    pub serial: U32,
    /// User (`i_uid`).
    pub uid: U32,
    /// Group (`i_gid`).
    pub gid: U32,

    /// Modification time, seconds since 1970, two's complement (`i_mtime`).
    pub mtime_sec: U64,
    /// Modification time, nanoseconds within the second (`i_mtime_nsec`).
    pub mtime_nsec: U32,
    /// Link count (`i_nlink`).
    pub nlink: U32,

    /// Reserved, zero (`i_reserved2`).
    pub reserved: [u8; 16],
}
const _: () = assert!(size_of::<InodeExtended>() == 64);
const _: () = assert!(std::mem::offset_of!(InodeExtended, data) == 16);
const _: () = assert!(std::mem::offset_of!(InodeExtended, mtime_sec) == 32);

/// A device number as inodes hold it: 12 bits of major and 20 of minor number, in the kernel's
/// `new_encode_dev` order. `None` when it does not fit.
pub const fn encode_device(major: u32, minor: u32) -> Option<u32> {
    if major >= 1 << 12 || minor >= 1 << 20 {
        return None;
    }
    Some((minor & 0xFF) | major << 8 | (minor & !0xFF) << 12)
}

/// `struct erofs_dirent`. A directory block starts with its dirents; their names follow back to back. The first
/// one's `name_offset` tells how many there are.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Dirent {
    /// Node number.
    pub nid: U64,
    /// Where the name starts in the block, in bytes (`nameoff`).
    pub name_offset: U16,
    /// See [`file_type`].
    pub file_type: u8,
    /// Reserved, zero.
    pub reserved: u8,
}
const _: () = assert!(size_of::<Dirent>() == 12);

/// The kernel's generic `FT_*` numbers, as dirents have them.
pub mod file_type {
    /// `FT_REG_FILE`.
    pub const FILE: u8 = 1;
    /// `FT_DIR`.
    pub const DIR: u8 = 2;
    /// `FT_CHRDEV`.
    pub const CHAR: u8 = 3;
    /// `FT_BLKDEV`.
    pub const BLOCK: u8 = 4;
    /// `FT_FIFO`.
    pub const FIFO: u8 = 5;
    /// `FT_SOCK`.
    pub const SOCKET: u8 = 6;
    /// `FT_SYMLINK`.
    pub const SYMLINK: u8 = 7;

    /// The number for the type bits of a mode; `None` for a type that does not exist.
    pub const fn of_mode(mode: u16) -> Option<u8> {
        match mode >> 12 {
            0o10 => Some(FILE),
            0o4 => Some(DIR),
            0o2 => Some(CHAR),
            0o6 => Some(BLOCK),
            0o1 => Some(FIFO),
            0o14 => Some(SOCKET),
            0o12 => Some(SYMLINK),
            _ => None,
        }
    }
}

/// `struct erofs_xattr_ibody_header`, at once behind an inode that has attributes. The identifiers of its shared
/// ones follow (u32 each, counting 4 bytes from [`SuperBlock::xattr_block`]), then its inline entries.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct XattrHeader {
    /// One bit per hash of a name: set means that no attribute here has that hash (`h_name_filter`).
    pub name_filter: U32,
    /// Identifiers that follow (`h_shared_count`).
    pub shared_count: u8,
    /// Reserved, zero (`h_reserved2`).
    pub reserved: [u8; 7],
}
const _: () = assert!(size_of::<XattrHeader>() == 12);

/// `struct erofs_xattr_entry`; the name's rest and the value follow, then zeros up to 4-byte alignment.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct XattrEntry {
    /// Bytes of the name behind its prefix (`e_name_len`).
    pub name_len: u8,
    /// The prefix, see [`split_xattr_name`] (`e_name_index`).
    pub name_index: u8,
    /// Bytes of the value (`e_value_size`).
    pub value_len: U16,
}
const _: () = assert!(size_of::<XattrEntry>() == 4);

/// Bytes of an entry with its name and value.
pub const fn xattr_entry_len(name_len: usize, value_len: usize) -> usize {
    (size_of::<XattrEntry>() + name_len + value_len).next_multiple_of(4)
}

/// [`InodeExtended::xattr_count`] for `len` bytes of identifiers and entries behind the header (a multiple of 4,
/// not 0): the header counts as one, every 4 bytes as another. `None` when that is too much for the field.
pub fn xattr_count(len: usize) -> Option<u16> {
    u16::try_from(1 + len / 4).ok()
}

/// Divides an attribute's name into the prefix's number (`EROFS_XATTR_INDEX_*`) and what follows. `None` for
/// names that the format cannot hold.
pub fn split_xattr_name(name: &[u8]) -> Option<(u8, &[u8])> {
    const PREFIXES: [(u8, &[u8]); 3] = [(1, b"user."), (4, b"trusted."), (6, b"security.")];
    match name {
        b"system.posix_acl_access" => return Some((2, b"")),
        b"system.posix_acl_default" => return Some((3, b"")),
        _ => {}
    }
    PREFIXES
        .iter()
        .find_map(|&(index, prefix)| Some((index, name.strip_prefix(prefix)?)))
        .filter(|(_, rest)| !rest.is_empty() && rest.len() <= NAME_LEN)
}

/// `EROFS_XATTR_FILTER_SEED`: a name's bit in the filter is XXH32 of what follows its prefix, with this plus the
/// prefix's number as the seed, modulo 32.
pub const XATTR_FILTER_SEED: u32 = 0x25BB_E08F;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attribute_names_split_as_the_kernel_has_them() {
        assert_eq!(split_xattr_name(b"user.x"), Some((1, &b"x"[..])));
        assert_eq!(split_xattr_name(b"trusted.overlay.opaque"), Some((4, &b"overlay.opaque"[..])));
        assert_eq!(split_xattr_name(b"security.capability"), Some((6, &b"capability"[..])));
        assert_eq!(split_xattr_name(b"system.posix_acl_access"), Some((2, &b""[..])));
        assert_eq!(split_xattr_name(b"system.posix_acl_default"), Some((3, &b""[..])));
        for name in [&b"user."[..], b"user", b"system.nfs4_acl", b"com.apple.quarantine", b"", b"lustre.lov"] {
            assert_eq!(split_xattr_name(name), None, "{name:?}");
        }
    }

    #[test]
    fn devices_encode_as_the_kernel_decodes_them() {
        for (major, minor) in [(0, 0), (1, 3), (8, 1), (259, 65_537), (4095, (1 << 20) - 1)] {
            let raw = encode_device(major, minor).expect("in range");
            assert_eq!(((raw & 0xFFF00) >> 8, (raw & 0xFF) | ((raw >> 12) & 0xFFF00)), (major, minor));
        }
        assert_eq!(encode_device(4096, 0), None);
        assert_eq!(encode_device(0, 1 << 20), None);
    }

    #[test]
    fn types_follow_the_mode() {
        assert_eq!(file_type::of_mode(0o100_644), Some(file_type::FILE));
        assert_eq!(file_type::of_mode(0o041_777), Some(file_type::DIR));
        assert_eq!(file_type::of_mode(0o140_000), Some(file_type::SOCKET));
        assert_eq!(file_type::of_mode(0o000_644), None);
        assert_eq!(file_type::of_mode(0o170_000), None);
    }
}
