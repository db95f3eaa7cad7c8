use super::build::build_with;
use super::*;
use crate::snapshot::Snapshot;
use crate::testing::{Random, reseal, tree_of};
use crate::tree::{Attrs, Kind, NodeId, Run, Tree};
use format::index::{Header, Section, SectionKind};
use format::{BLOCK, Digest};
use proptest::prelude::*;
use std::collections::HashMap;
use std::io::Cursor;
use std::sync::Arc;
use zerocopy::FromBytes;

fn built(tree: &Tree) -> (BuiltIndex, Vec<u8>) {
    let mut out = Cursor::new(Vec::new());
    let built = build(tree, &mut out).unwrap();
    (built, out.into_inner())
}

fn open(bytes: &[u8]) -> Result<Index, IndexError> {
    Index::open(Arc::new(bytes.to_vec()))
}

/// The snapshot of an index; a file's digest comes from the tree that it was built from.
fn snapshot(index: &Index, tree: &Tree) -> Snapshot {
    let mut digests = HashMap::new();
    let Ok(()) = tree.walk(|path, node| -> Result<(), std::convert::Infallible> {
        digests.insert(index.resolve(path).unwrap().unwrap(), tree.content(node).digest);
        Ok(())
    });
    Snapshot::from_index(index, |ino, _| Ok(digests.get(&ino).copied())).unwrap()
}

/// Extents that reach beyond a block, by halving and row by row.
fn sought(index: &Index, ino: u32, block: u64) -> Vec<ExtentView> {
    index.extents_from(ino, block).unwrap().map(|e| e.unwrap()).collect()
}

fn listed(index: &Index, ino: u32, block: u64) -> Vec<ExtentView> {
    let all = index.extents(ino).unwrap().map(|e| e.unwrap());
    all.filter(|e| u64::from(e.file_block) + u64::from(e.count) > block).collect()
}

/// Files in many pieces, more than are remembered.
#[test]
fn extents_are_found_from_any_block() {
    let mut r = Random(11);
    let mut tree = Tree::new();
    let object = tree.object(Digest::of(b"object"), u32::MAX.into());
    for n in 0..100 {
        let node = tree.create(Tree::ROOT, format!("{n}").as_bytes(), Kind::File, Attrs::default()).unwrap();
        let (mut at, mut runs) = (0, Vec::new());
        for i in 0..r.below(400) as u32 {
            at += r.below(3) as u32;
            let count = 1 + r.below(5) as u32;
            // Never where the run before it ends.
            runs.push(Run { file_block: at, count, object, space_block: 100 * (i + 1) });
            at += count;
        }
        let size = u64::from(at + r.below(3) as u32) * 4096;
        tree.set_content(node, size, Digest::of(&[n]), &runs).unwrap();
    }
    let mut out = std::io::Cursor::new(Vec::new());
    build(&tree, &mut out).unwrap();
    let index = Index::open(Arc::new(out.into_inner())).unwrap();
    for _ in 0..3000 {
        let ino = 1 + r.below(100) as u32;
        let block = r.below(1600);
        assert_eq!(sought(&index, ino, block), listed(&index, ino, block), "inode {ino}, block {block}");
    }
}

/// Everything that the index says about the tree is so.
fn agrees(index: &Index, tree: &Tree) {
    index.verify().unwrap();
    index.check().unwrap();
    assert_eq!(Snapshot::from_tree(tree).diff(&snapshot(index, tree)), [""; 0]);
    let objects: Vec<_> = index.objects().map(|(id, _)| id).collect();
    let Ok(()) = tree.walk(|path, node| -> Result<(), std::convert::Infallible> {
        let ino = index.resolve(path).unwrap().unwrap();
        let view = index.inode(ino).unwrap();
        match tree.kind(node) {
            Kind::Dir => {
                assert_eq!(index.path_of(ino).unwrap().0, path);
                let parent = tree.path_of(tree.parent(node)).0;
                assert_eq!(index.parent(ino).unwrap(), index.resolve(&parent).unwrap().unwrap());
                let mut entries = index.entries(ino).unwrap();
                for (n, (name, child)) in tree.children(node).enumerate() {
                    let entry = entries.next().unwrap().unwrap();
                    assert_eq!((entry.ordinal as usize, entry.name), (n, name));
                    assert_eq!(index.lookup(ino, name).unwrap(), Some(entry.ino));
                    assert_eq!(index.inode(entry.ino).unwrap().is_dir(), tree.is_dir(child));
                    entries.seek(n as u32);
                    assert_eq!(entries.next().unwrap().unwrap(), entry);
                }
                assert!(entries.next().is_none());
                for name in [&b"no such name"[..], b"", b".", b"..", b"/", &[b'x'; 300]] {
                    assert_eq!(index.lookup(ino, name).unwrap(), None);
                }
                assert_eq!(index.resolve(&[path, b"/no such name"].concat()).unwrap(), None);
            }
            Kind::File => {
                assert_eq!(view.size(), tree.content(node).size);
                let runs: Vec<_> = tree.runs(node).collect();
                let extents: Vec<_> = index.extents(ino).unwrap().map(|e| e.unwrap()).collect();
                assert_eq!(runs.len(), extents.len());
                for (run, extent) in runs.iter().zip(extents) {
                    assert_eq!((run.file_block, run.count), (extent.file_block, extent.count));
                    assert_eq!(tree.objects()[run.object as usize].id, Some(objects[extent.object as usize]));
                    assert_eq!(run.space_block, extent.space_block);
                }
                assert!(index.link_target(ino).is_err() && index.entries(ino).is_err());
                for block in 0..view.size().div_ceil(4096).min(300) + 2 {
                    assert_eq!(sought(index, ino, block), listed(index, ino, block), "block {block}");
                }
            }
            _ => assert!(index.extents(ino).is_err() && index.lookup(ino, b"x").is_err()),
        }
        assert!(tree.is_dir(node) || index.resolve(&index.path_of(ino).unwrap().0).unwrap() == Some(ino));
        Ok(())
    });
}

/// The same tree, filled in another order, its objects too; `place` may move content.
fn copied(from: &Tree, seed: u64, place: impl Fn(Run) -> Run) -> Tree {
    let mut r = Random(seed);
    let mut to = Tree::new();
    let mut objects: Vec<u32> = vec![0; from.objects().len()];
    for n in (0..objects.len()).rev() {
        let object = from.objects()[n];
        objects[n] = to.object(object.id.unwrap(), object.space_blocks);
    }
    let mut nodes: HashMap<NodeId, NodeId> = HashMap::new();
    let attrs_of = |to: &mut Tree, node| {
        let attrs = from.attrs(node);
        let list: Vec<_> = from.xattrs(attrs.xattrs).collect();
        let list: Vec<_> = list.into_iter().rev().collect();
        Attrs { xattrs: to.xattr_set(&list).unwrap(), ..attrs }
    };
    let root = attrs_of(&mut to, Tree::ROOT);
    to.set_attrs(Tree::ROOT, root);
    let mut todo: Vec<(NodeId, Vec<u8>, NodeId)> =
        from.children(Tree::ROOT).map(|(n, id)| (Tree::ROOT, n.to_vec(), id)).collect();
    while !todo.is_empty() {
        let (dir, name, node) = todo.swap_remove(r.below(todo.len() as u64) as usize);
        if let Some(known) = nodes.get(&node) {
            to.link(dir, &name, *known).unwrap();
            continue;
        }
        let attrs = attrs_of(&mut to, node);
        let made = to.create(dir, &name, from.kind(node), attrs).unwrap();
        nodes.insert(node, made);
        match from.kind(node) {
            Kind::Dir => todo.extend(from.children(node).map(|(n, id)| (made, n.to_vec(), id))),
            Kind::Symlink => to.set_target(made, from.target(node)).unwrap(),
            Kind::File => {
                let content = from.content(node);
                let runs: Vec<Run> =
                    from.runs(node).map(|r| place(Run { object: objects[r.object as usize], ..r })).collect();
                to.set_content(made, content.size, content.digest, &runs).unwrap();
            }
            _ => {}
        }
    }
    to
}

fn attrs() -> Attrs {
    Attrs { mode: 0o644, ..Attrs::default() }
}

fn words(count: u64, seed: u64) -> Vec<u64> {
    let mut r = Random(seed);
    (0..count).map(|_| r.bits()).collect()
}

/// The tree of the worked example in `doc/format/index.md`.
fn example() -> Tree {
    let mut t = Tree::new();
    let pack = t.object(Digest::of(b"the object map of a pack"), 16);
    let at = |mode, sec| Attrs { mode, mtime_sec: sec, ..Attrs::default() };
    let bin = t.create(Tree::ROOT, b"bin", Kind::Dir, at(0o755, 1_700_000_000)).unwrap();
    let sh = t.create(bin, b"sh", Kind::File, at(0o755, 1_700_000_001)).unwrap();
    let run = |file_block, count, space_block| Run { file_block, count, object: pack, space_block };
    t.set_content(sh, 10_000, Digest::of(b"sh"), &[run(0, 3, 4)]).unwrap();
    t.link(bin, b"ash", sh).unwrap();
    let xattrs = t.xattr_set(&[(b"user.a", b"1")]).unwrap();
    let sparse = t.create(Tree::ROOT, b"sparse", Kind::File, Attrs { uid: 7, xattrs, ..at(0o600, -1) }).unwrap();
    t.set_content(sparse, 5 * BLOCK, Digest::of(b"sparse"), &[run(0, 1, 7), run(4, 1, 8)]).unwrap();
    let link = t.create(Tree::ROOT, b"link", Kind::Symlink, at(0o777, 0)).unwrap();
    t.set_target(link, b"bin/sh").unwrap();
    t
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn random_trees_come_back(words in prop::collection::vec(any::<u64>(), 0..250)) {
        let tree = tree_of(&words);
        let (built, bytes) = built(&tree);
        let index = open(&bytes).unwrap();
        prop_assert_eq!(index.digest(), built.digest);
        prop_assert_eq!(index.identity(), built.identity);
        prop_assert_eq!(bytes.len() as u64, built.len_bytes);
        agrees(&index, &tree);
    }

    #[test]
    fn the_order_of_filling_does_not_matter(words in prop::collection::vec(any::<u64>(), 0..120), seed: u64) {
        let tree = tree_of(&words);
        prop_assert_eq!(built(&tree).1, built(&copied(&tree, seed, |run| run)).1);
    }

    #[test]
    fn the_place_of_content_does_not_enter_the_identity(words in prop::collection::vec(any::<u64>(), 0..120)) {
        let tree = tree_of(&words);
        let moved = copied(&tree, 1, |run| Run { space_block: run.space_block ^ 1, count: 1, ..run });
        let (a, b) = (built(&tree).0, built(&moved).0);
        prop_assert_eq!(a.identity, b.identity);
    }

    /// Whatever is done to an index whose digests are made right again: no panic, no endless loop.
    #[test]
    fn hostile_indexes_give_errors(
        words in prop::collection::vec(any::<u64>(), 0..60),
        changes in prop::collection::vec((any::<u32>(), any::<u8>(), any::<bool>()), 1..8),
    ) {
        let (_, mut bytes) = built(&tree_of(&words));
        for (at, value, word) in changes {
            // The table is hit as often as everything else together.
            let range = if at % 2 == 0 { 256 + 14 * 64 } else { bytes.len() };
            let at = (at / 2) as usize % range;
            let len = if word { 4 } else { 1 };
            for byte in bytes.iter_mut().skip(at).take(len) {
                *byte = value;
            }
        }
        reseal(&mut bytes);
        fuzz_index(&bytes);
    }
}

#[test]
fn a_wide_directory_is_hashed() {
    let mut t = Tree::new();
    for i in 0..3000 {
        t.create(Tree::ROOT, format!("name-{i}").as_bytes(), Kind::Fifo, attrs()).unwrap();
    }
    let (_, bytes) = built(&t);
    let index = open(&bytes).unwrap();
    assert!(index.section_len(SectionKind::NameHash) > 3000 * 4);
    agrees(&index, &t);
}

#[test]
fn lookups_work_without_hashes() {
    let tree = tree_of(&words(300, 5));
    let mut out = Cursor::new(Vec::new());
    build_with(&tree, &mut out, 0).unwrap();
    let index = open(&out.into_inner()).unwrap();
    assert_eq!(index.section_len(SectionKind::PathHash), 0);
    agrees(&index, &tree);
}

#[test]
fn paths_are_resolved_exactly() {
    let index = open(&built(&example()).1).unwrap();
    let sh = index.resolve(b"/bin/sh").unwrap();
    assert!(sh.is_some());
    for same in [&b"bin/sh"[..], b"//bin//sh", b"/./bin/./sh/", b"/bin/ash"] {
        assert_eq!(index.resolve(same).unwrap(), sh);
    }
    assert_eq!(index.resolve(b"").unwrap(), Some(0));
    assert_eq!(index.resolve(b"/").unwrap(), Some(0));
    for not in [&b"/sh"[..], b"/bin/../bin/sh", b"/bin/sh/x", b"/link/x", b"/bi", b"/bin/shh"] {
        assert_eq!(index.resolve(not).unwrap(), None);
    }
    let deep = [b"/d".repeat(5000), b"/bin/sh".to_vec()].concat();
    assert_eq!(index.resolve(&deep).unwrap(), None);
}

#[test]
fn the_deepest_tree_is_built_and_checked() {
    let mut t = Tree::new();
    let mut dir = Tree::ROOT;
    for _ in 0..1024 {
        dir = t.create(dir, b"d", Kind::Dir, attrs()).unwrap();
    }
    let (_, bytes) = built(&t);
    let index = open(&bytes).unwrap();
    agrees(&index, &t);
    assert_eq!(index.path_of(1024).unwrap().0, b"/d".repeat(1024));
}

#[test]
fn a_flipped_bit_is_found_wherever_it_is() {
    let (_, bytes) = built(&example());
    let found = |bytes: &[u8]| open(bytes).and_then(|index| index.verify()).is_err();
    assert!(!found(&bytes));
    for at in 0..bytes.len() {
        for bit in [0, 3, 7] {
            let mut bad = bytes.clone();
            bad[at] ^= 1 << bit;
            assert!(found(&bad), "byte {at} bit {bit}");
            fuzz_index(&bad);
        }
    }
    for len in 0..bytes.len() {
        assert!(found(&bytes[..len]), "cut to {len}");
    }
    assert!(found(&[&bytes[..], &[0; 8]].concat()));
}

/// Every byte of a small index changed in turn, digests made right: everything that reads it returns, and what
/// `check` lets pass is still a tree.
#[test]
fn every_byte_may_lie() {
    let (_, bytes) = built(&example());
    let mut passed = 0;
    for at in 0..bytes.len() {
        for value in [0, 1, 0x7f, 0xff, bytes[at] ^ 1, bytes[at] ^ 0x80, bytes[at].wrapping_add(1)] {
            let mut bad = bytes.clone();
            bad[at] = value;
            reseal(&mut bad);
            fuzz_index(&bad);
            let Ok(index) = open(&bad) else { continue };
            if index.check().is_ok() {
                passed += 1;
                Snapshot::from_index(&index, |_, _| Ok(None)).unwrap();
            }
        }
    }
    // Times, owners, modes, names, targets, sizes within a block: those may have any value.
    assert!(passed > 100);
}

fn section_range(bytes: &[u8], kind: SectionKind) -> std::ops::Range<usize> {
    let n = SectionKind::ALL.iter().position(|&k| k == kind).unwrap();
    let at = size_of::<Header>() + n * size_of::<Section>();
    let row = Section::read_from_bytes(&bytes[at..at + size_of::<Section>()]).unwrap();
    row.offset.get() as usize..(row.offset.get() + row.len.get()) as usize
}

/// What only `check` finds: the digests are right.
#[test]
fn check_finds_what_build_would_not_write() {
    let (_, bytes) = built(&example());
    let change = |kind, at: usize, value: &[u8]| {
        let mut bad = bytes.clone();
        let start = section_range(&bytes, kind).start + at;
        bad[start..start + value.len()].copy_from_slice(value);
        reseal(&mut bad);
        open(&bad).and_then(|index| index.verify().and_then(|()| index.check())).map_err(|e| e.to_string())
    };
    let cases: &[(&str, SectionKind, usize, &[u8])] = &[
        ("link count", SectionKind::Inodes, 4, &[9]),
        ("out of range or out of order", SectionKind::Inodes, 8, &[9]),
        ("nanoseconds", SectionKind::Inodes, 12, &[255, 255, 255, 255]),
        ("not where they belong", SectionKind::Inodes, 24, &[2]),
        ("a type or", SectionKind::Inodes, 32, &[0, 0]),
        ("a directory out of order, or with two names", SectionKind::Dirents, 8 + 4, &[0]),
        ("out of range", SectionKind::Dirents, 8 + 4, &[200]),
        ("not sorted", SectionKind::Names, 0, b"z"),
        ("not a name", SectionKind::Names, 0, b"a/b"),
        ("not a symlink's target", SectionKind::Links, 0, b"\0"),
        ("that no attribute can have", SectionKind::XattrData, 0, b"x"),
        ("parent link", SectionKind::Parents, 4 * 4, &[2]),
        ("the hash over paths", SectionKind::PathHash, 0, &[1]),
        ("extents that are not where they belong", SectionKind::Places, 16 + 4, &[1]),
        ("past the end of its object", SectionKind::Objects, 32, &[5]),
        ("sorted", SectionKind::Extents, 16, &[0]),
    ];
    for (want, kind, at, value) in cases {
        let got = change(*kind, *at, value);
        assert!(got.as_ref().is_err_and(|e| e.contains(want)), "{want}: {got:?}");
    }
}

#[test]
fn versions_and_features_are_unsupported_not_corrupt() {
    let (_, bytes) = built(&example());
    for (at, what) in [(8, "index version"), (20, "index features")] {
        let mut newer = bytes.clone();
        newer[at] = 2;
        let error = open(&newer).unwrap_err();
        assert!(
            matches!(error, IndexError::Format(format::FormatError::Unsupported { what: w, value: 2 }) if w == what)
        );
    }
}

#[test]
fn what_cannot_be_built_says_why() {
    let mut out = Cursor::new(Vec::new());
    let mut t = Tree::new();
    t.create(Tree::ROOT, b"l", Kind::Symlink, attrs()).unwrap();
    assert_eq!(build(&t, &mut out).unwrap_err().to_string(), "/l: symlink without a target");

    let mut t = Tree::new();
    let pack = t.object_placeholder();
    let f = t.create(Tree::ROOT, b"f", Kind::File, attrs()).unwrap();
    let run = Run { file_block: 0, count: 2, object: pack, space_block: 7 };
    t.set_content(f, 2 * BLOCK, Digest::default(), &[run]).unwrap();
    assert!(matches!(build(&t, &mut out), Err(IndexError::UnnamedObject(0))));
    t.name_object(pack, Digest::of(b"p"), 8);
    assert!(matches!(build(&t, &mut out), Err(IndexError::BeyondObject(0))));
    t.name_object(pack, Digest::of(b"p"), 9);
    build(&t, &mut out).unwrap();
}

/// A pack that turns out to be one that was there already is one object.
#[test]
fn ordinals_of_one_object_share_its_row() {
    let mut t = Tree::new();
    let pack = t.object_placeholder();
    let old = t.object(Digest::of(b"p"), 9);
    for (name, object) in [(b"a", pack), (b"b", old)] {
        let f = t.create(Tree::ROOT, name, Kind::File, attrs()).unwrap();
        let run = Run { file_block: 0, count: 1, object, space_block: 7 };
        t.set_content(f, BLOCK, Digest::default(), &[run]).unwrap();
    }
    t.name_object(pack, Digest::of(b"p"), 9);
    let (built, bytes) = built(&t);
    assert_eq!(built.objects, [Digest::of(b"p")]);
    open(&bytes).unwrap().check().unwrap();
}

/// A dump, sixteen bytes a line, of one part.
fn dump(bytes: &[u8], range: std::ops::Range<usize>) -> String {
    let mut text = String::new();
    for at in range.clone().step_by(16) {
        let row = &bytes[at..(at + 16).min(range.end)];
        let hex: Vec<String> = row.iter().map(|b| format!("{b:02x}")).collect();
        let shown: String = row.iter().map(|&b| if (0x20..0x7f).contains(&b) { b as char } else { '.' }).collect();
        text += &format!("{at:08x}  {:<47}  |{shown}|\n", hex.join(" "));
    }
    text
}

/// The dumps in `doc/format/index.md` are the example's bytes, all of them.
#[test]
fn the_specification_shows_what_is_written() {
    let (_, bytes) = built(&example());
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../doc/format/index.md");
    let text = std::fs::read_to_string(path).unwrap();
    let is_dump = |l: &&str| l.get(..10).is_some_and(|p| p.ends_with("  ") && u32::from_str_radix(&p[..8], 16).is_ok());
    let shown: String = text.lines().filter(is_dump).map(|l| format!("{l}\n")).collect();
    let ends = SectionKind::ALL.map(|kind| section_range(&bytes, kind).start);
    let mut want = dump(&bytes, 0..256);
    for row in 0..14 {
        want += &dump(&bytes, 256 + row * 64..256 + (row + 1) * 64);
    }
    for (start, end) in ends.iter().zip(ends.iter().skip(1).chain([&bytes.len()])) {
        want += &dump(&bytes, *start..*end);
    }
    assert!(shown == want, "the dumps must be:\n{want}");
}

#[test]
fn saved_inputs_replay() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/index");
    let mut count = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let mut bytes = std::fs::read(entry.unwrap().path()).unwrap();
        fuzz_index(&bytes);
        reseal(&mut bytes);
        fuzz_index(&bytes);
        count += 1;
    }
    assert!(count >= 10, "{count}");
}

/// Writes the inputs that `saved_inputs_replay` reads; to be run by hand after a change of the format.
#[test]
#[ignore = "writes into the source tree"]
fn write_saved_inputs() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/index");
    std::fs::create_dir_all(&dir).unwrap();
    let save = |name: &str, bytes: &[u8]| std::fs::write(dir.join(name), bytes).unwrap();
    let (_, small) = built(&example());
    save("example", &small);
    save("empty-tree", &built(&Tree::new()).1);
    save("random", &built(&tree_of(&words(40, 1))).1);
    save("cut", &small[..small.len() / 2]);
    save("magic-only", &small[..8]);
    let lie = |kind, at: usize, value: &[u8]| {
        let mut bad = small.clone();
        let start = section_range(&small, kind).start + at;
        bad[start..start + value.len()].copy_from_slice(value);
        reseal(&mut bad);
        bad
    };
    save("parent-cycle", &lie(SectionKind::Parents, 4, &[2, 0, 0, 0, 1]));
    save("directory-in-itself", &lie(SectionKind::Dirents, 12, &[0]));
    save("entries-out-of-range", &lie(SectionKind::Inodes, 24, &[1, 0, 0, 0, 255, 255, 255, 255]));
    save("names-backward", &lie(SectionKind::Dirents, 8, &[9]));
    save("extents-without-end", &lie(SectionKind::Extents, 16 + 4, &[1, 0, 0, 0]));
    save("hash-of-no-slots", &lie(SectionKind::PathHash, 8, &[0; 8]));
    save("link-target-out-of-range", &lie(SectionKind::Inodes, 32 + 24, &[255; 8]));
    let mut huge = small.clone();
    huge[36..44].fill(0xff);
    reseal(&mut huge);
    save("huge-counts", &huge);
}
