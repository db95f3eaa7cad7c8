//! Which files become chunk-based and how they are cut; attribute names' hashes. Whole images are tested in
//! `tests/erofs.rs`.

use super::sparse::chunk_bits;
use super::xattr::filter_bit;
use format::erofs::split_xattr_name;
use format::index::Extent;

fn extents(pieces: &[(u32, u32)]) -> Vec<Extent> {
    let row = |&(file_block, count): &(u32, u32)| Extent {
        file_block: file_block.into(),
        count: count.into(),
        object: 0.into(),
        space_block: 0.into(),
    };
    pieces.iter().map(row).collect()
}

#[test]
fn chunks_are_as_large_as_the_holes_allow() {
    for (blocks, pieces, want) in [
        // One hole: one chunk.
        (1u64, &[][..], Some(0)),
        (31, &[], Some(5)),
        (1 << 51, &[], Some(31)),
        // Extents that touch leave no hole.
        (100, &[(0, 50), (50, 50)], None),
        // Small holes are served as zeros.
        (100, &[(0, 90)], None),
        (1000, &[(0, 400), (500, 500)], None),
        // Holes of an eighth of the file, of at least 16 blocks; of 256 blocks whatever the file's size.
        (128, &[(0, 112)], Some(4)),
        (120, &[(0, 60), (75, 45)], None),
        (100_000, &[(0, 50_000), (50_256, 49_744)], Some(4)),
        (1 << 20, &[(0, 1 << 19), ((1 << 19) + 256, (1 << 19) - 256)], Some(8)),
        // A file's end is no border that chunks have to meet.
        (1000, &[(512, 488)], Some(9)),
        (1000, &[(512, 487)], Some(0)),
        (1024, &[(3, 1), (900, 1)], Some(0)),
        // At most 16,384 chunks; the holes that remain count.
        (1 << 28, &[(77, 1)], Some(14)),
        ((1 << 14) + 1, &[(77, 1)], Some(1)),
        (1 << 24, &[(0, (1 << 24) - 300)], None),
    ] {
        assert_eq!(chunk_bits(&extents(pieces), blocks), want, "{blocks} blocks, {pieces:?}");
    }
}

#[test]
fn names_hash_as_in_the_kernel() {
    // From the table in the kernel's commit that introduced the filter.
    for (name, bit) in [
        ("security.ima", 0),
        ("trusted.overlay.nlink", 2),
        ("user.overlay.nlink", 4),
        ("security.apparmor", 8),
        ("security.selinux", 11),
        ("security.SMACK64", 13),
        ("trusted.overlay.redirect", 17),
    ] {
        let (index, rest) = split_xattr_name(name.as_bytes()).expect("representable");
        assert_eq!(filter_bit(index, rest), 1 << bit, "{name}");
    }
}
