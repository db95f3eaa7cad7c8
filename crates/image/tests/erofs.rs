//! Images made from random and particular trees, read back by an independent reader and by erofs-utils.

extern crate lazyroot_image as image;

mod erofs_support;

use erofs_rs::EroFS;
use erofs_rs::backend::SliceImage;
use erofs_support::*;
use format::BLOCK;
use format::index::{self as raw, SectionKind};
use image::erofs::{Data, Export, Options, Plan, PlanError, Shape};
use image::index::Index;
use image::snapshot::Snapshot;
use image::tree::{Attrs, Tree};
use proptest::prelude::*;
use std::os::unix::fs::MetadataExt;
use std::process::Command;
use std::sync::Arc;
use zerocopy::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// The tree in an image, as erofs-rs reads it; without the files' content if there is none.
fn read_back(image: &[u8], content: bool) -> Snapshot {
    reader::snapshot(image, content).expect("an image that erofs-rs reads")
}

/// The metadata and the block map agree with the exported image, in pieces of any alignment.
fn check_pieces(built: &Built, plan: &Plan, image: &[u8], random: &mut Random) {
    assert_eq!(image.len() as u64, plan.image_len());
    let meta_len = plan.meta_len();
    let mut piece = Vec::new();
    for _ in 0..60 {
        let start = random.below(meta_len);
        let most = if random.one_in(2) { 200 } else { 20_000 };
        let end = meta_len.min(start + random.below(most));
        piece.clear();
        piece.resize((end - start) as usize, 0xAA);
        plan.emit(&built.index, start..end, &mut piece).expect("emit");
        assert!(piece == image[start as usize..end as usize], "bytes {start}..{end} of {meta_len}");
    }
    // Every byte once, in uneven pieces.
    let (mut at, mut whole) = (0, Vec::new());
    while at < meta_len {
        let end = meta_len.min(at + 1 + random.below(9000));
        piece.clear();
        piece.resize((end - at) as usize, 0xAA);
        plan.emit(&built.index, at..end, &mut piece).expect("emit");
        whole.extend_from_slice(&piece);
        at = end;
    }
    assert!(whole == image[..meta_len as usize]);

    let blocks = plan.image_len() / BLOCK;
    for _ in 0..60 {
        let block = meta_len / BLOCK + random.below(blocks - meta_len / BLOCK);
        let run = plan.data_at(&built.index, block).expect("data");
        assert!(run.blocks() >= 1 && block + run.blocks() <= blocks);
        assert_run(built, run, block, image);
        let count = 1 + random.below((blocks - block).min(50));
        let mut at = block;
        let mut last: Option<Data> = None;
        for run in plan.data_runs(&built.index, block, count) {
            let run = run.expect("run");
            assert_run(built, run, at, image);
            if let (Some(Data::Hole { .. }), Data::Hole { .. }) = (last, run) {
                panic!("two holes in a row");
            }
            at += run.blocks();
            last = Some(run);
        }
        assert_eq!(at, block + count);
    }
}

fn assert_run(built: &Built, run: Data, block: u64, image: &[u8]) {
    let part = &image[(block * BLOCK) as usize..][..(run.blocks() * BLOCK) as usize];
    match run {
        Data::Hole { .. } => assert!(part.iter().all(|b| *b == 0)),
        Data::Space { object, space_block, blocks } => {
            let mut bytes = vec![0; part.len()];
            built.read_space(object, space_block, blocks as u32, &mut bytes).expect("space");
            assert!(bytes == part);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_trees_round_trip(seed: u64, names in 0u64..600) {
        let mut fixture = Fixture::new(seed);
        fixture.grow(names);
        let built = fixture.build();
        let want = built.snapshot();
        let mut random = Random(seed);

        let plan = built.plan(Shape::Kernel);
        let image = built.image(&plan);
        check_pieces(&built, &plan, &image, &mut random);
        assert_same(&want, &read_back(&image, true), "kernel shape");
        for ino in 0..plan.inode_count() {
            prop_assert_eq!(plan.ino(plan.nid(ino).expect("nid")), Some(ino));
        }

        let plan = built.plan(Shape::Gvisor);
        let image = built.image(&plan);
        check_pieces(&built, &plan, &image, &mut random);
        assert_same(&without_xattrs(want), &read_back(&image, true), "gVisor shape");
        prop_assert_eq!(EroFS::new(SliceImage::new(&image)).expect("opens").super_block().feature_incompat, 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn metadata_of_shrinkable_trees_round_trips(words in proptest::collection::vec(any::<u64>(), 0..300)) {
        let mut bytes = std::io::Cursor::new(Vec::new());
        image::index::build(&image::testing::tree_of(&words), &mut bytes).expect("index");
        let index = Index::open(Arc::new(bytes.into_inner())).expect("opens");
        let plan = Plan::new(&index, &Options::default()).expect("plan");
        let mut metadata = vec![0; plan.meta_len() as usize];
        plan.emit(&index, 0..plan.meta_len(), &mut metadata).expect("emit");
        let want = Snapshot::from_index(&index, |_, _| Ok(None)).expect("snapshot");
        assert_same(&want, &read_back(&metadata, false), "metadata");
    }
}

#[test]
fn corners_round_trip() {
    let mut fixture = Fixture::new(3);
    fixture.corners(5000);
    let built = fixture.build();
    let plan = built.plan(Shape::Kernel);
    let mut image = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).expect("file");
    built.export_to(&plan, Export::Whole, &mut image);
    assert_eq!(image.metadata().expect("metadata").len(), plan.image_len());
    // Only the blocks that hold something: metadata, content, the last.
    let data_blocks = built.index.header().data_blocks.get();
    assert!(image.metadata().expect("metadata").blocks() * 512 <= plan.meta_len() + (data_blocks + 64) * BLOCK);

    let mut metadata = std::io::Cursor::new(Vec::new());
    built.export_to(&plan, Export::Metadata, &mut metadata);
    let metadata = metadata.into_inner();
    assert_eq!(metadata.len() as u64, plan.meta_len());
    assert_same(&built.snapshot(), &read_back(&metadata, false), "metadata");
}

/// Runs one of erofs-utils' programs; `None`, with a line about it, where it is not installed.
fn erofs_utils(program: &str, args: &[&str], image: &std::path::Path) -> Option<String> {
    let output = match Command::new(program).args(args).arg(image).output() {
        Ok(output) => output,
        Err(e) => {
            println!("SKIP {program}: {e}");
            return None;
        }
    };
    let text = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    println!("{program} {args:?}: {}\n{text}", output.status);
    assert!(output.status.success(), "{program} {args:?}: {text}");
    Some(text)
}

#[test]
fn erofs_utils_find_nothing() {
    for seed in 0..6 {
        let mut fixture = Fixture::new(seed);
        if seed == 0 {
            fixture.corners(2000);
        } else {
            fixture.grow(seed * 100);
        }
        let built = fixture.build();
        for shape in [Shape::Kernel, Shape::Gvisor] {
            let plan = built.plan(shape);
            let mut image = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).expect("file");
            built.export_to(&plan, Export::Whole, image.as_file_mut());
            if let Some(text) = erofs_utils("fsck.erofs", &["-d3"], image.path()) {
                assert!(text.contains("No errors found"), "{text}");
            }
            if let Some(text) = erofs_utils("dump.erofs", &["-s"], image.path()) {
                assert!(text.contains(&format!("inode count:                       {}", plan.inode_count())), "{text}");
            }
            // Statistics read every inode and directory.
            if let Some(text) = erofs_utils("dump.erofs", &["-S"], image.path()) {
                assert!(!text.contains("<E>"), "{text}");
            }
        }
    }
}

/// Bytes of an index, to be damaged. Sections' digests are not checked on opening.
struct Patch {
    bytes: Vec<u8>,
}

impl Patch {
    /// Where a section lies.
    fn section(&self, kind: SectionKind) -> std::ops::Range<usize> {
        let table = &self.bytes[size_of::<raw::Header>()..][..SectionKind::ALL.len() * size_of::<raw::Section>()];
        let rows = <[raw::Section]>::ref_from_bytes(table).expect("table");
        let row = rows.iter().find(|row| row.kind.get() == kind as u32).expect("section");
        row.offset.get() as usize..(row.offset.get() + row.len.get()) as usize
    }

    fn rows<T: FromBytes + IntoBytes + KnownLayout + Immutable>(&mut self, kind: SectionKind) -> &mut [T] {
        let range = self.section(kind);
        <[T]>::mut_from_bytes(&mut self.bytes[range]).expect("rows")
    }

    fn plan(&self) -> Result<Plan, PlanError> {
        let index = Index::open(Arc::new(self.bytes.clone())).expect("opens");
        let result = Plan::new(&index, &Options::default());
        // What is planned can be emitted.
        if let Ok(plan) = &result {
            let mut piece = vec![0; 1 << 16];
            let mut at = 0;
            while at < plan.meta_len() {
                let end = plan.meta_len().min(at + piece.len() as u64);
                plan.emit(&index, at..end, &mut piece[..(end - at) as usize]).expect("planned");
                at = end;
            }
            let (first, end) = (plan.meta_len() / BLOCK, plan.image_len() / BLOCK);
            let blocks: u64 =
                plan.data_runs(&index, first, end - first).map(|run| run.expect("planned").blocks()).sum();
            assert_eq!(blocks, end - first);
        }
        result
    }

    fn refused(&self, why: &str) {
        match self.plan() {
            Err(e) if e.to_string().contains(why) => {}
            other => panic!("wanted an error with {why:?}, got {other:?}"),
        }
    }
}

fn small_fixture() -> Fixture {
    let mut fixture = Fixture::new(1);
    let root = Tree::ROOT;
    fixture.file(root, "a", &[1; 9000]);
    fixture.symlink(root, "b", b"target");
    let outer = fixture.dir(root, "c");
    let inner = fixture.dir(outer, "d");
    fixture.file(inner, "e", &[2; 10]);
    let holes = fixture.empty(inner, "f");
    fixture.fill(holes, 1 << 20, &[(0, &[3; 4096]), (9, &[4; 4096])]);
    let holes = fixture.empty(inner, "g");
    fixture.fill(holes, 9 << 20, &[(1000, &[3; 4096]), (2000, &[4; 4096])]);
    let last = fixture.dir(root, "z");
    let xattrs = fixture.tree.xattr_set(&[(b"user.x", b"y"), (b"trusted.z", b"")]).expect("attributes");
    fixture.tree.set_attrs(last, Attrs { xattrs, ..Attrs::default() });
    fixture.dir(last, "y");
    fixture
}

#[test]
fn what_is_not_a_tree_is_refused() {
    // Inodes: / 0, a 1, b 2, c 3, d 4, e 5, f 6, g 7, z 8, y 9. Dirents: / 0, then a b c z, d, e f g, y.
    let patch = || Patch { bytes: small_fixture().build_bytes() };
    patch().plan().expect("sound");
    let dirent = |at: usize, change: &dyn Fn(&mut raw::Dirent), why: &str| {
        let mut patch = patch();
        change(&mut patch.rows::<raw::Dirent>(SectionKind::Dirents)[at]);
        patch.refused(why);
    };
    dirent(5, &|d| d.ino = 0.into(), "contains itself");
    dirent(5, &|d| d.ino = 3.into(), "contains itself");
    dirent(9, &|d| d.ino = 3.into(), "another name or contains itself");
    dirent(4, &|d| d.ino = 3.into(), "another name");
    dirent(4, &|d| d.ino = 1.into(), "has no name");
    dirent(1, &|d| d.ino = 77.into(), "no such inode");
    dirent(1, &|d| d.ino = u32::MAX.into(), "no such inode");
    dirent(2, &|d| d.name = 0.into(), "its name is not one");
    dirent(2, &|d| d.name = 7.into(), "its name");
    dirent(2, &|d| d.name = u32::MAX.into(), "its name");
    for (name, why) in
        [(*b"ab", "is not in order"), (*b"aa", "is not in order"), (*b"a/", "is not one"), (*b"a\0", "is not one")]
    {
        let mut patch = patch();
        let names = patch.section(SectionKind::Names);
        patch.bytes[names][2..4].copy_from_slice(&[name[1], name[0]]);
        patch.refused(why);
    }
    let mut patch_dot = patch();
    let names = patch_dot.section(SectionKind::Names);
    patch_dot.bytes[names][0] = b'.';
    patch_dot.refused("`.` or `..`");

    let inode = |at: usize, change: &dyn Fn(&mut raw::Inode), why: &str| {
        let mut patch = patch();
        change(&mut patch.rows::<raw::Inode>(SectionKind::Inodes)[at]);
        patch.refused(why);
    };
    inode(0, &|i| i.mode = 0o100_644.into(), "root is not a directory");
    inode(1, &|i| i.mode = 0o644.into(), "type does not exist");
    inode(1, &|i| i.owner = 99.into(), "owner does not exist");
    inode(1, &|i| i.mtime_nsec = 1_000_000_000.into(), "nanoseconds");
    inode(1, &|i| i.data = u64::MAX.into(), "size is negative");
    inode(1, &|i| i.data = (1 << 40).into(), "outside its object");
    inode(1, &|i| i.data = (i64::MAX as u64).into(), "outside its object");
    inode(1, &|i| (i.mode, i.data) = (0o020_644.into(), (1 << 44).into()), "device number");
    inode(2, &|i| i.data = (7 << 32).into(), "outside the link targets");
    inode(2, &|i| i.data = 0.into(), "empty");
    inode(2, &|i| i.data = (1 | 5 << 32).into(), "does not follow");
    inode(3, &|i| i.data = (6 | 1 << 32).into(), "do not follow those");
    inode(3, &|i| i.data = (5 | 6 << 32).into(), "do not exist");
    inode(3, &|i| i.data = (5 | 0xFFFF_FFFF << 32).into(), "too many names");
    inode(3, &|i| i.data = (5 | 0xFFFF_0000 << 32).into(), "do not exist");
    inode(9, &|i| i.data = 9.into(), "do not follow those");
    inode(6, &|i| i.data = 4096.into(), "lie behind its end");
    inode(7, &|i| i.data = (u64::MAX >> 1).into(), "too long to be cut");

    let place = |at: usize, change: &dyn Fn(&mut raw::Place), why: &str| {
        let mut patch = patch();
        change(&mut patch.rows::<raw::Place>(SectionKind::Places)[at]);
        patch.refused(why);
    };
    place(1, &|p| p.object = 3.into(), "object does not exist");
    place(1, &|p| p.value = u32::MAX.into(), "outside its object");
    place(1, &|p| (p.object, p.value) = (raw::Place::MANY.into(), 1.into()), "do not follow those");
    place(7, &|p| p.value = 0.into(), "do not follow those");
    place(7, &|p| p.value = u32::MAX.into(), "do not follow those");
    let extent = |at: usize, change: &dyn Fn(&mut raw::Extent), why: &str| {
        let mut patch = patch();
        change(&mut patch.rows::<raw::Extent>(SectionKind::Extents)[at]);
        patch.refused(why);
    };
    extent(0, &|e| e.count = 0.into(), "overlap");
    extent(1, &|e| e.file_block = 0.into(), "overlap");
    extent(0, &|e| e.object = 9.into(), "object does not exist");
    extent(0, &|e| e.space_block = u32::MAX.into(), "outside its object");
    extent(1, &|e| e.count = 1.into(), "overlap");
    extent(3, &|e| e.count = 1.into(), "last extent is missing");
    extent(3, &|e| e.file_block = u32::MAX.into(), "lie behind");

    let mut sets = patch();
    sets.rows::<U32>(SectionKind::XattrSets)[1] = 9.into();
    sets.refused("not in order");
    let mut sets = patch();
    sets.rows::<raw::Owner>(SectionKind::Owners).iter_mut().for_each(|o| o.xattrs = 9.into());
    sets.refused("set of attributes does not exist");
    let mut entries = patch();
    entries.rows::<raw::XattrEntry>(SectionKind::XattrEntries)[0].name = u32::MAX.into();
    entries.refused("outside the attribute data");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    /// Damaged indexes that open are refused, or planned and emitted; nothing else.
    #[test]
    fn damaged_indexes_do_no_harm(seed: u64, hits in 1usize..12) {
        let mut fixture = Fixture::new(seed);
        fixture.grow(seed % 200);
        let sound = Patch { bytes: fixture.build_bytes() };
        let mut random = Random(seed);
        for _ in 0..50 {
            let mut patch = Patch { bytes: sound.bytes.clone() };
            for _ in 0..hits {
                // Rows rather than names, mostly; not the hashes, whose heads opening checks.
                let kind = random.pick(&SectionKind::ALL[..SectionKind::ALL.len() - 2]);
                let range = patch.section(kind);
                if range.is_empty() {
                    continue;
                }
                let at = range.start + random.below(range.len() as u64) as usize;
                patch.bytes[at] = match random.below(4) {
                    0 => 0xFF,
                    1 => 0,
                    2 => patch.bytes[at] ^ 1 << random.below(8),
                    _ => random.below(256) as u8,
                };
            }
            let _ = patch.plan();
        }
    }
}

#[test]
fn another_index_than_the_planned_one_does_no_harm() {
    let plans: Vec<_> = (0..6)
        .map(|seed| {
            let mut fixture = Fixture::new(seed);
            fixture.grow(seed * 60);
            let built = fixture.build();
            (built.plan(Shape::Kernel), built)
        })
        .collect();
    for (plan, _) in &plans {
        for (_, other) in &plans {
            let mut bytes = vec![0; plan.meta_len() as usize];
            let _ = plan.emit(&other.index, 0..plan.meta_len(), &mut bytes);
            let first = plan.meta_len() / BLOCK;
            for block in first..plan.image_len() / BLOCK {
                let _ = plan.data_at(&other.index, block);
            }
        }
    }
}

#[test]
fn ranges_outside_are_refused() {
    let built = small_fixture().build();
    let plan = built.plan(Shape::Kernel);
    let (meta, image) = (plan.meta_len(), plan.image_len());
    let mut buf = [0; 100];
    assert!(plan.emit(&built.index, 0..100, &mut buf).is_ok());
    assert!(plan.emit(&built.index, meta..meta, &mut []).is_ok());
    assert!(plan.emit(&built.index, 0..99, &mut buf).is_err());
    assert!(plan.emit(&built.index, meta - 99..meta + 1, &mut buf).is_err());
    #[expect(clippy::reversed_empty_ranges)]
    let backward = 100..0;
    assert!(plan.emit(&built.index, backward, &mut buf).is_err());
    let (first, end) = (meta / BLOCK, image / BLOCK);
    assert!(plan.data_at(&built.index, first - 1).is_err());
    assert_eq!(plan.data_at(&built.index, end - 1).expect("zeros"), Data::Hole { blocks: 1 });
    assert!(plan.data_at(&built.index, end).is_err());
    assert!(plan.data_at(&built.index, u64::MAX).is_err());
    assert_eq!(plan.data_runs(&built.index, first, 0).count(), 0);
    assert!(plan.data_runs(&built.index, first, end - first + 1).any(|run| run.is_err()));
    assert!(plan.data_runs(&built.index, 0, 1).any(|run| run.is_err()));
    assert!(plan.data_runs(&built.index, end, u64::MAX).any(|run| run.is_err()));
}

/// Lines of 16 bytes: offset, bytes, and the printable ones; none for zeros.
fn hexdump(bytes: &[u8]) -> String {
    let lines = bytes.chunks(16).enumerate().filter(|(_, line)| line.iter().any(|b| *b != 0));
    let lines = lines.map(|(n, line)| {
        let hex: String = line.iter().map(|b| format!(" {b:02x}")).collect();
        let text: String =
            line.iter().map(|b| if b.is_ascii_graphic() || *b == b' ' { *b as char } else { '.' }).collect();
        format!("{:06x} {hex}  |{text}|\n", n * 16)
    });
    lines.collect()
}

#[test]
fn the_specification_shows_what_is_emitted() {
    let mut fixture = Fixture::new(0);
    let mtime = Attrs { mtime_sec: 1_000_000_000, mtime_nsec: 5, ..Attrs::default() };
    let file = fixture.file(Tree::ROOT, "hello", b"hello\n");
    fixture.tree.set_attrs(file, Attrs { mode: 0o644, uid: 1000, gid: 100, ..mtime });
    let link = fixture.symlink(Tree::ROOT, "link", b"hello");
    fixture.tree.set_attrs(link, Attrs { mode: 0o777, ..mtime });
    let built = fixture.build();
    let dump = hexdump(&built.image(&built.plan(Shape::Kernel)));
    let page = include_str!("../../../doc/format/erofs.md");
    let shown = page.split_once("```hexdump\n").and_then(|(_, rest)| rest.split_once("```")).expect("a dump").0;
    assert!(shown == dump, "doc/format/erofs.md should show:\n{dump}");
}
