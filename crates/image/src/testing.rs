//! For the tests of this and other crates: trees made of random numbers, and indexes that lie.
//!
//! A tree is a list of words, and each word one operation, so that a test which fails for a long list fails for a
//! short one too: property tests shrink lists. The same words give the same tree.

use crate::tree::{Attrs, Kind, NodeId, Run, Tree};
use format::index::{Header, Section, SectionKind, sections_digest};
use format::{BLOCK, Digest};
use zerocopy::{FromBytes, IntoBytes};

/// A small generator (splitmix64).
#[derive(Debug, Clone)]
pub struct Random(pub u64);

impl Random {
    /// The next 64 bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        self.bits() % n
    }

    /// One of the items.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }
}

/// A file name: short, long, not UTF-8, nearly a dot; clashes are frequent.
pub fn name(r: &mut Random) -> Vec<u8> {
    match r.below(12) {
        0 => format!("{:0width$}", r.below(30), width = 1 + r.below(255) as usize).into_bytes(),
        1 => vec![0xff, 0x80 + r.below(128) as u8],
        2 => [&b"..."[..], b"..a", b".a", b" ", b"-", b"\n", b"a\\b"][r.below(7) as usize].to_vec(),
        3 => format!("same-prefix-{}", r.below(2000)).into_bytes(),
        _ => vec![b'a' + r.below(8) as u8; 1 + r.below(3) as usize],
    }
}

/// Attributes with every field anywhere in its range.
pub fn attrs(r: &mut Random, tree: &mut Tree) -> Attrs {
    let mut list: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
    if r.below(4) == 0 {
        for _ in 0..r.below(4) {
            let prefix = *r.pick(&["user.", "trusted.", "security.", "system.posix_acl_access"]);
            let name = if prefix.ends_with('.') { format!("{prefix}{}", r.below(5)) } else { prefix.into() };
            let len = *r.pick(&[0, 1, 3, 4, 20, 300, 5000]);
            if list.iter().all(|(n, _)| n != name.as_bytes()) {
                list.push((name.into_bytes(), vec![r.below(3) as u8; len]));
            }
        }
    }
    let list: Vec<(&[u8], &[u8])> = list.iter().map(|(n, v)| (&n[..], &v[..])).collect();
    let id = |r: &mut Random| *r.pick(&[0, 0, 0, 1000, 65_535, 65_536, u32::MAX - 1]);
    Attrs {
        mode: r.below(0o10000) as u16,
        uid: id(r),
        gid: id(r),
        mtime_sec: *r.pick(&[0, -1, 1_700_000_000, i64::from(u32::MAX) + 7, -5_000_000_000]),
        mtime_nsec: *r.pick(&[0, 0, 1, 999_999_999]),
        xattrs: tree.xattr_set(&list).unwrap_or_default(),
    }
}

/// A tree of these words.
pub fn tree_of(words: &[u64]) -> Tree {
    let mut tree = Tree::new();
    let mut dirs = vec![Tree::ROOT];
    let mut files: Vec<NodeId> = Vec::new();
    let objects = [tree.object(Digest::of(b"one"), 1 << 32), tree.object(Digest::of(b"two"), 1 << 20)];
    for &word in words {
        let mut r = Random(word);
        let dir = *r.pick(&dirs);
        let name = name(&mut r);
        let attrs = attrs(&mut r, &mut tree);
        let device = (r.below(1 << 12) as u32, r.below(1 << 20) as u32);
        let kind = match r.below(16) {
            0..4 => Kind::Dir,
            4..6 => Kind::Symlink,
            6 => Kind::Char { major: device.0, minor: device.1 },
            7 => Kind::Block { major: device.0, minor: device.1 },
            8 => Kind::Fifo,
            9 => Kind::Socket,
            10 if !files.is_empty() => {
                // An error means that the name is there, which is as good.
                let _ = tree.link(dir, &name, *r.pick(&files));
                continue;
            }
            _ => Kind::File,
        };
        let Ok(node) = tree.create(dir, &name, kind, attrs) else { continue };
        let filled = match kind {
            Kind::Dir => {
                dirs.push(node);
                Ok(())
            }
            Kind::Symlink => tree.set_target(node, &vec![b'x'; 1 + r.below(80) as usize]),
            Kind::File => {
                let (size, runs) = content(&mut r, objects);
                tree.set_content(node, size, Digest::of(&word.to_le_bytes()), &runs)
            }
            _ => Ok(()),
        };
        debug_assert_eq!(filled, Ok(()));
        if kind != Kind::Dir {
            files.push(node);
        }
    }
    tree
}

/// A size and runs that go with it: none, one, several, with holes.
pub fn content(r: &mut Random, objects: [u32; 2]) -> (u64, Vec<Run>) {
    let size = match r.below(6) {
        0 => 0,
        1 => r.below(BLOCK),
        2 => BLOCK * r.below(5),
        3 => r.below(1 << 20),
        4 => (5 << 30) + r.below(1 << 20),
        _ => r.below(40_000),
    };
    let blocks = size.div_ceil(BLOCK);
    let mut runs = Vec::new();
    let mut at = 0;
    let pieces = *r.pick(&[0, 1, 1, 1, 2, 5]);
    for piece in 0..pieces {
        if at >= blocks {
            break;
        }
        let count = if pieces == 1 { blocks } else { 1 + r.below(blocks - at) }.min(1 << 30);
        let object = *r.pick(&objects);
        runs.push(Run {
            file_block: at as u32,
            count: count as u32,
            object,
            space_block: (r.below(1 << 19) / count * count) as u32,
        });
        at += count + if piece % 2 == 0 { r.below(3) } else { 0 };
    }
    // The second object is small.
    runs.retain(|run| run.object == objects[0] || u64::from(run.space_block) + u64::from(run.count) <= 1 << 20);
    (size, runs)
}

/// Puts an index's digests and checksum right again after something in it was changed.
pub fn reseal(bytes: &mut [u8]) {
    let (head, table_len) = (size_of::<Header>(), SectionKind::ALL.len() * size_of::<Section>());
    if bytes.len() < head + table_len {
        return;
    }
    let mut sums = Vec::new();
    for (n, kind) in SectionKind::ALL.into_iter().enumerate() {
        let at = head + n * size_of::<Section>();
        let mut row = Section::read_from_bytes(&bytes[at..at + size_of::<Section>()]).expect("as long as a row");
        let start = (row.offset.get() as usize).min(bytes.len());
        let end = start.saturating_add(row.len.get() as usize).min(bytes.len());
        row.digest = Digest::of(&bytes[start..end]);
        sums.push((kind, row.len.get(), row.digest));
        bytes[at..at + size_of::<Section>()].copy_from_slice(row.as_bytes());
    }
    let mut header = Header::read_from_bytes(&bytes[..head]).expect("as long as a header");
    header.tree_digest = sections_digest(true, &sums);
    header.placement_digest = sections_digest(false, &sums);
    header.identity = format::digest::identity(&header.tree_digest, &header.content_root);
    let crc = crc32c::crc32c(&header.as_bytes()[..head - 4]);
    header.crc = crc32c::crc32c_append(crc, &bytes[head..head + table_len]).into();
    bytes[..head].copy_from_slice(header.as_bytes());
}
