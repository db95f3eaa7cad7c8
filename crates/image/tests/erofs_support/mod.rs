//! Trees with content in memory, and images of them: what the EROFS tests share.

#![allow(dead_code)]

pub mod reader;

use format::{BLOCK, Digest};
use image::erofs::{Export, Options, Plan, Shape, export};
use image::index::{Index, build};
use image::snapshot::{Snapshot, hash_content};
use image::tree::{Attrs, Kind, NodeId, Run, Tree};
use std::io::{self, Cursor};
use std::sync::Arc;

/// A small generator of numbers (splitmix64): the same seed gives the same tree.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    pub fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    /// Below `few` mostly, below `many` once in `n`.
    pub fn mostly_below(&mut self, n: u64, few: u64, many: u64) -> u64 {
        let limit = if self.one_in(n) { many } else { few };
        self.below(limit)
    }

    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub fn pick<T: Clone>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize].clone()
    }

    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.next().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// A name of up to `max` bytes, often one that sorts near `.` and `..`.
    pub fn name(&mut self, max: usize) -> Vec<u8> {
        let len = 1 + self.mostly_below(10, max.min(16) as u64, max as u64) as usize;
        let mut name: Vec<u8> = (0..len)
            .map(|_| match self.below(10) {
                0 => b'.',
                1 => b'-',
                2 => self.pick(b" !+,0\xff\xc3\x01"),
                _ => b'a' + self.below(26) as u8,
            })
            .collect();
        if name == b"." || name == b".." {
            name.extend(b"..");
        }
        name.truncate(255);
        name
    }
}

/// A tree whose content is in memory.
pub struct Fixture {
    pub tree: Tree,
    /// The spaces' bytes, by the tree's object ordinals.
    spaces: Vec<Vec<u8>>,
    pub random: Random,
}

impl Fixture {
    pub fn new(seed: u64) -> Self {
        let mut tree = Tree::new();
        let spaces = vec![Vec::new(); 3];
        for _ in &spaces {
            tree.object_placeholder();
        }
        Fixture { tree, spaces, random: Random(seed) }
    }

    pub fn dir(&mut self, parent: NodeId, name: impl AsRef<[u8]>) -> NodeId {
        self.tree.create(parent, name.as_ref(), Kind::Dir, Attrs::IMPLICIT_DIR).expect("dir")
    }

    pub fn empty(&mut self, parent: NodeId, name: impl AsRef<[u8]>) -> NodeId {
        let attrs = Attrs { mode: 0o644, ..Attrs::IMPLICIT_DIR };
        self.tree.create(parent, name.as_ref(), Kind::File, attrs).expect("file")
    }

    pub fn file(&mut self, parent: NodeId, name: impl AsRef<[u8]>, content: &[u8]) -> NodeId {
        let node = self.empty(parent, name);
        self.fill(node, content.len() as u64, &[(0, content)]);
        node
    }

    pub fn symlink(&mut self, parent: NodeId, name: impl AsRef<[u8]>, target: &[u8]) -> NodeId {
        let attrs = Attrs { mode: 0o777, ..Attrs::IMPLICIT_DIR };
        let node = self.tree.create(parent, name.as_ref(), Kind::Symlink, attrs).expect("symlink");
        self.tree.set_target(node, target).expect("target");
        node
    }

    /// A tree with all that a file system has to get right and random trees seldom have. `wide`: names in its widest
    /// directory.
    pub fn corners(&mut self, wide: u32) {
        let root = Tree::ROOT;
        let dir = self.dir(root, "times");
        for (n, (mtime_sec, mtime_nsec)) in [
            (0, 0),
            (0, 1),
            (-1, 999_999_999),
            (-1_500_000_000, 500),
            (-(1 << 40), 0),
            (i64::from(i32::MAX) + 1, 1),
            (i64::from(u32::MAX) + 1, 123_456_789),
            (1 << 40, 999_999_999),
        ]
        .into_iter()
        .enumerate()
        {
            let node = self.empty(dir, format!("t{n}"));
            self.tree.set_attrs(node, Attrs { mode: 0o604, mtime_sec, mtime_nsec, ..Attrs::default() });
        }

        let dir = self.dir(root, "kinds");
        for (n, (major, minor)) in
            [(0, 0), (1, 3), (8, 255), (259, 65_536), (4095, (1 << 20) - 1)].into_iter().enumerate()
        {
            let attrs = Attrs { mode: 0o660, gid: u32::MAX - 1, ..Attrs::IMPLICIT_DIR };
            self.tree.create(dir, format!("c{n}").as_bytes(), Kind::Char { major, minor }, attrs).expect("char");
            self.tree.create(dir, format!("b{n}").as_bytes(), Kind::Block { major, minor }, attrs).expect("block");
        }
        self.tree.create(dir, b"fifo", Kind::Fifo, Attrs { mode: 0o4711, ..Attrs::default() }).expect("fifo");
        self.tree.create(dir, b"socket", Kind::Socket, Attrs { mode: 0o1777, ..Attrs::default() }).expect("socket");

        // Directories whose entries end a byte before, at and behind the end of a block.
        let dir = self.dir(root, "fill");
        for blocks in 1..=4usize {
            for more in [-1isize, 0, 1] {
                let full = self.dir(dir, format!("{blocks}{more:+}"));
                let mut left = 4096 - 27; // less `.` and `..`
                for n in 0..blocks {
                    for m in 0..16 {
                        self.empty(full, format!("{n}{m:02}{}", "x".repeat(236)));
                        left -= 12 + 239;
                    }
                    let last = (left - 12 + if n + 1 == blocks { more } else { 0 }) as usize;
                    self.empty(full, format!("{n}16{}", "y".repeat(last - 3)));
                    left = 4096;
                }
            }
        }
        let dir = self.dir(root, "lengths");
        for len in 1..=255 {
            self.empty(dir, "n".repeat(len));
        }
        let dir = self.dir(root, "dots");
        for name in ["-", "!", ".-", "..-", "...", "..a", ".a", "+x", ".\x01", "/".trim_matches('/'), "0", "~"] {
            if !name.is_empty() {
                self.empty(dir, name);
            }
        }
        let dir = self.dir(root, "targets");
        for len in (1..80).chain((80..4095).step_by(173)).chain([3900, 4031, 4032, 4033, 4095]) {
            if self.tree.lookup(dir, format!("l{len}").as_bytes()).is_none() {
                self.symlink(dir, format!("l{len}"), &vec![b'a' + (len % 26) as u8; len]);
            }
        }
        let wide_dir = self.dir(root, "wide");
        let node = self.empty(wide_dir, "first");
        for n in 0..wide {
            if n % 4 == 0 {
                self.empty(wide_dir, format!("w{:x}", u64::from(n) * 0x9E37_79B9 % (1 << 32)));
            } else {
                self.tree
                    .link(wide_dir, format!("k{:x}", u64::from(n) * 0x9E37_79B9 % (1 << 32)).as_bytes(), node)
                    .expect("link");
            }
        }
        let mut dir = self.dir(root, "deep");
        for n in 0..200 {
            dir = self.dir(dir, format!("d{n}"));
        }
        self.file(dir, "bottom", b"deep down");

        self.attribute_corners();
        self.content_corners();
    }

    fn attribute_corners(&mut self) {
        let dir = self.dir(Tree::ROOT, "attributes");
        let long = [&b"user."[..], &[b'n'; 250]].concat();
        let acl = |perm: u16| -> Vec<u8> {
            let none = u32::MAX;
            let entries = [(1u16, 6, none), (2, perm, 1000), (4, 5, none), (16, 7, none), (32, 0, none)];
            let mut value = 2u32.to_le_bytes().to_vec();
            for (tag, perm, id) in entries {
                value.extend(tag.to_le_bytes().into_iter().chain(perm.to_le_bytes()).chain(id.to_le_bytes()));
            }
            value
        };
        let big: Vec<u8> = (0..60_000u32).map(|n| n as u8).collect();
        let many: Vec<(Vec<u8>, Vec<u8>)> =
            (0..300).map(|n| (format!("user.many.{n}").into_bytes(), vec![n as u8; n % 50])).collect();
        let other: Vec<(Vec<u8>, Vec<u8>)> =
            (0..1200).map(|n| (format!("trusted.single.{n}").into_bytes(), n.to_string().into_bytes())).collect();
        let sets: Vec<Vec<(Vec<u8>, Vec<u8>)>> = vec![
            vec![(b"user.empty".to_vec(), vec![])],
            vec![(b"user.one".to_vec(), (0..=255).collect())],
            vec![(b"security.capability".to_vec(), capability(10))],
            vec![(b"trusted.overlay.opaque".to_vec(), b"y".to_vec()), (b"user.one".to_vec(), (0..=255).collect())],
            vec![(b"system.posix_acl_access".to_vec(), acl(4)), (b"system.posix_acl_default".to_vec(), acl(7))],
            vec![(b"system.posix_acl_access".to_vec(), acl(4))],
            vec![(b"user.big".to_vec(), big.clone())],
            vec![
                (b"user.big".to_vec(), big),
                (b"user.mime_type".to_vec(), b"text/plain".to_vec()),
                (long, vec![0; 99]),
            ],
            many.clone(),
            [many, vec![(b"user.z".to_vec(), b"last".to_vec())]].concat(),
            other,
            // Names with every hash of the kernel's filter, each alone.
            vec![(b"security.selinux".to_vec(), b"system_u:object_r:etc_t:s0\0".to_vec())],
        ];
        for (n, set) in sets.iter().enumerate() {
            let list: Vec<_> = set.iter().map(|(name, value)| (&name[..], &value[..])).collect();
            let xattrs = self.tree.xattr_set(&list).expect("attributes");
            let attrs = Attrs { mode: 0o640, xattrs, ..Attrs::IMPLICIT_DIR };
            let node = self.file(dir, format!("f{n}"), format!("content {n}").as_bytes());
            self.tree.set_attrs(node, attrs);
            let node = self.dir(dir, format!("d{n}"));
            self.tree.set_attrs(node, Attrs { mode: 0o750, ..attrs });
            if n % 2 == 0 {
                self.file(node, "inside", b"x");
            }
        }
        for n in 0..64 {
            let name = format!("user.filter{n}");
            let xattrs = self.tree.xattr_set(&[(name.as_bytes(), b"here")]).expect("attributes");
            let node = self.empty(dir, format!("filter{n}"));
            self.tree.set_attrs(node, Attrs { mode: 0o600, xattrs, ..Attrs::IMPLICIT_DIR });
            // Targets of all lengths behind attributes.
            let list: [(&[u8], &[u8]); 1] = [(b"trusted.link", &vec![b'v'; n * 3])];
            let xattrs = self.tree.xattr_set(&list).expect("attributes");
            let node = self.symlink(dir, format!("link{n}"), &vec![b'l'; 1 + n * 64]);
            self.tree.set_attrs(node, Attrs { mode: 0o777, xattrs, ..Attrs::IMPLICIT_DIR });
        }
    }

    fn content_corners(&mut self) {
        let dir = self.dir(Tree::ROOT, "content");
        for size in [1usize, 4095, 4096, 4097, 8192, 65_536, 1_000_000, 5_000_000] {
            let content = self.random.bytes(size);
            self.file(dir, format!("plain{size}"), &content);
        }
        let data = self.random.bytes(100_000);
        let blocks = &data[..25 * 4096 - 4096];
        let node = self.empty(dir, "hole-only");
        self.fill(node, 123_456, &[]);
        let node = self.empty(dir, "hole-small");
        self.fill(node, 400_000, &[(0, &data[..]), (30, blocks)]);
        let node = self.empty(dir, "hole-first");
        self.fill(node, 3_000_000, &[(700, &data[..50_000])]);
        let node = self.empty(dir, "hole-last");
        self.fill(node, 3_000_001, &[(0, &data[..40_000])]);
        let node = self.empty(dir, "holes-many");
        let pieces: Vec<(u32, &[u8])> = (0..40).map(|n| (n * 32 + 16, &data[..16 * 4096])).collect();
        self.fill(node, 41 * 32 * 4096 - 77, &pieces);
        let node = self.empty(dir, "holes-odd");
        self.fill(node, 9_000_000, &[(3, &data[..4096]), (901, &data[..5000]), (2000, &data[..1])]);
        // Beyond 4 GiB and 2 TiB.
        let node = self.empty(dir, "sparse-5g");
        self.fill(node, 5 << 30, &[(0, &data[..4096]), ((5 << 18) - 1, &data[..4096])]);
        let node = self.empty(dir, "sparse-3t");
        self.fill(node, (3 << 40) - 5, &[(1 << 28, &data[..8192]), ((3u32 << 28) - 2, &data[..4096 + 4091])]);
        let node = self.empty(dir, "hole-9t");
        self.fill(node, 9 << 40, &[]);
    }

    /// Gives `node` these pieces of content (first block, bytes); the rest of `size` is holes. Each piece goes to the
    /// end of some space. Files of more than 1 GiB get no true digest.
    pub fn fill(&mut self, node: NodeId, size: u64, pieces: &[(u32, &[u8])]) {
        let mut runs = Vec::new();
        for (block, bytes) in pieces.iter().filter(|(_, bytes)| !bytes.is_empty()) {
            let object = self.random.below(self.spaces.len() as u64) as usize;
            let space = &mut self.spaces[object];
            runs.push(Run {
                file_block: *block,
                count: bytes.len().div_ceil(BLOCK as usize) as u32,
                object: object as u32,
                space_block: (space.len() as u64 / BLOCK) as u32,
            });
            space.extend_from_slice(bytes);
            space.resize(space.len().next_multiple_of(BLOCK as usize), 0);
        }
        let mut digest = Digest::of(&size.to_le_bytes());
        if size <= 1 << 30 {
            let mut content = vec![0; size as usize];
            for (block, bytes) in pieces {
                content[*block as usize * BLOCK as usize..][..bytes.len()].copy_from_slice(bytes);
            }
            digest = hash_content(&mut &content[..]).expect("in memory");
        }
        self.tree.set_content(node, size, digest, &runs).expect("content");
    }

    /// Random content, with pieces scattered and holes.
    pub fn fill_random(&mut self, node: NodeId) {
        let blocks = self.random.mostly_below(8, 12, 600);
        let size = (blocks * BLOCK).saturating_sub(self.random.below(BLOCK));
        let blocks = size.div_ceil(BLOCK) as u32;
        let mut pieces: Vec<(u32, Vec<u8>)> = Vec::new();
        let (mut at, holes) = (0, self.random.one_in(3));
        while at < blocks {
            let run = 1 + self.random.mostly_below(3, 6, 200) as u32;
            let run = run.min(blocks - at);
            if !holes || self.random.one_in(2) {
                let end = size.min(u64::from(at + run) * BLOCK);
                pieces.push((at, self.random.bytes((end - u64::from(at) * BLOCK) as usize)));
            }
            at += run;
        }
        let pieces: Vec<_> = pieces.iter().map(|(at, bytes)| (*at, &bytes[..])).collect();
        self.fill(node, size, &pieces);
    }

    pub fn random_attrs(&mut self) -> Attrs {
        let random = &mut self.random;
        let mtime_sec = match random.below(5) {
            0 => -(random.below(1 << 33) as i64),
            1 => random.below(1 << 36) as i64,
            _ => random.below(1 << 31) as i64,
        };
        let ids = [0, 0, 1000, 65_535, 65_536, u32::MAX - 1];
        let mut attrs = Attrs {
            mode: random.below(0o10000) as u16,
            uid: random.pick(&ids),
            gid: random.pick(&ids),
            mtime_sec,
            mtime_nsec: random.below(1_000_000_000) as u32,
            ..Attrs::default()
        };
        if random.one_in(3) {
            attrs.xattrs = self.random_xattrs();
        }
        attrs
    }

    fn random_xattrs(&mut self) -> image::tree::XattrSet {
        let random = &mut self.random;
        let mut list: Vec<(Vec<u8>, Vec<u8>)> = Vec::new();
        for _ in 0..1 + random.below(4) {
            let name = match random.below(6) {
                0 => b"security.capability".to_vec(),
                1 => b"trusted.overlay.opaque".to_vec(),
                2 => b"security.selinux".to_vec(),
                3 => [&b"user."[..], &random.bytes(1)[..], b"x"].concat(),
                4 => [&b"user."[..], &vec![b'n'; 1 + random.below(250) as usize]].concat(),
                _ => b"user.mime_type".to_vec(),
            };
            let len = random.mostly_below(20, 40, 9000) as usize;
            let value = match random.below(3) {
                0 => random.bytes(len),
                1 => b"the same".to_vec(),
                _ => vec![],
            };
            // The kernel shows no capabilities that are not any.
            let value = if name == b"security.capability" { capability(random.below(41)) } else { value };
            if !name.contains(&0) && list.iter().all(|(have, _)| *have != name) {
                list.push((name, value));
            }
        }
        let list: Vec<_> = list.iter().map(|(name, value)| (&name[..], &value[..])).collect();
        self.tree.xattr_set(&list).expect("attributes")
    }

    /// Adds about `count` names of every kind below the root.
    pub fn grow(&mut self, count: u64) {
        let mut dirs = vec![Tree::ROOT];
        let mut nodes = Vec::new();
        let attrs = self.random_attrs();
        self.tree.set_attrs(Tree::ROOT, attrs);
        for _ in 0..count {
            // Often the same directory, so that some have many names.
            let dir = if self.random.one_in(2) { dirs[dirs.len() / 2] } else { self.random.pick(&dirs) };
            let max = if self.random.one_in(4) { 255 } else { 40 };
            let name = self.random.name(max);
            if self.tree.lookup(dir, &name).is_some() {
                continue;
            }
            if self.random.one_in(12) && !nodes.is_empty() {
                let node = self.random.pick(&nodes);
                self.tree.link(dir, &name, node).expect("link");
                continue;
            }
            let attrs = self.random_attrs();
            let (major, minor) = (self.random.below(1 << 12) as u32, self.random.below(1 << 20) as u32);
            let kind = match self.random.below(20) {
                0..4 => Kind::Dir,
                4..6 => Kind::Symlink,
                6 => Kind::Char { major, minor },
                7 => Kind::Block { major, minor },
                8 => Kind::Fifo,
                9 => Kind::Socket,
                _ => Kind::File,
            };
            let Ok(node) = self.tree.create(dir, &name, kind, attrs) else {
                continue; // its path is too long
            };
            match kind {
                Kind::Dir => dirs.push(node),
                Kind::Symlink => {
                    let len = 1 + self.random.mostly_below(8, 60, 4095) as usize;
                    let mut target = self.random.name(255);
                    target.resize(len, b't');
                    self.tree.set_target(node, &target).expect("target");
                }
                Kind::File => self.fill_random(node),
                _ => {}
            }
            if kind != Kind::Dir {
                nodes.push(node);
            }
        }
    }

    /// The index's bytes.
    pub fn build_bytes(&mut self) -> Vec<u8> {
        for (ordinal, space) in (0u32..).zip(&self.spaces) {
            self.tree.name_object(ordinal, Digest::of(&ordinal.to_le_bytes()), space.len() as u64 / BLOCK);
        }
        let mut bytes = Cursor::new(Vec::new());
        build(&self.tree, &mut bytes).expect("index");
        bytes.into_inner()
    }

    pub fn build(mut self) -> Built {
        let index = Index::open(Arc::new(self.build_bytes())).expect("opens");
        let spaces = index.objects().map(|(id, _)| {
            let ordinal = (0..self.spaces.len()).find(|n| Digest::of(&(*n as u32).to_le_bytes()) == id);
            self.spaces[ordinal.expect("one of ours")].clone()
        });
        let spaces = spaces.collect();
        Built { index, spaces }
    }
}

/// A value of `security.capability` that permits one capability.
pub fn capability(number: u64) -> Vec<u8> {
    let bits = 1u64 << number;
    let words = [0x0200_0001, bits as u32, 0, (bits >> 32) as u32, 0];
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// An index and its content.
pub struct Built {
    pub index: Index,
    /// The spaces' bytes, by the index's object rows.
    pub spaces: Vec<Vec<u8>>,
}

impl Built {
    pub fn plan(&self, shape: Shape) -> Plan {
        Plan::new(&self.index, &Options::new(shape)).expect("plan")
    }

    pub fn read_space(&self, object: u32, block: u32, count: u32, buf: &mut [u8]) -> io::Result<()> {
        let start = u64::from(block) * BLOCK;
        let end = start + u64::from(count) * BLOCK;
        buf.copy_from_slice(&self.spaces[object as usize][start as usize..end as usize]);
        Ok(())
    }

    pub fn export_to(&self, plan: &Plan, what: Export, out: &mut (impl io::Write + io::Seek)) {
        export(plan, &self.index, what, out, &mut |object, block, count, buf| {
            self.read_space(object, block, count, buf)
        })
        .expect("export");
    }

    pub fn image(&self, plan: &Plan) -> Vec<u8> {
        let mut out = Cursor::new(Vec::new());
        self.export_to(plan, Export::Whole, &mut out);
        out.into_inner()
    }

    /// The digest of a file's content as the index places it; `None` for files of more than 1 GiB.
    pub fn digest(&self, ino: u32, size: u64) -> Option<Digest> {
        if size > 1 << 30 {
            return None;
        }
        let mut content = vec![0; size.next_multiple_of(BLOCK) as usize];
        for extent in self.index.extents(ino).expect("extents") {
            let extent = extent.expect("extent");
            let at = extent.file_block as usize * BLOCK as usize;
            let part = &mut content[at..][..extent.count as usize * BLOCK as usize];
            self.read_space(extent.object, extent.space_block, extent.count, part).expect("in memory");
        }
        content.truncate(size as usize);
        Some(hash_content(&mut &content[..]).expect("in memory"))
    }

    pub fn snapshot(&self) -> Snapshot {
        Snapshot::from_index(&self.index, |ino, size| Ok(self.digest(ino, size))).expect("snapshot")
    }
}

/// Asserts that two snapshots are equal, showing the differences when not.
pub fn assert_same(want: &Snapshot, have: &Snapshot, what: &str) {
    let lines = want.diff(have);
    assert!(lines.is_empty(), "{what}: {} differences:\n{}", lines.len(), lines[..lines.len().min(20)].join("\n"));
    assert_eq!(want.records.len(), have.records.len());
}

/// The snapshot without attributes, as readers that know none see it.
pub fn without_xattrs(mut snapshot: Snapshot) -> Snapshot {
    for record in snapshot.records.values_mut() {
        record.xattrs.clear();
    }
    snapshot
}
