use super::*;
use crate::snapshot::Snapshot;
use crate::testing::{Random, tree_of};
use proptest::prelude::*;
use std::collections::BTreeMap;

fn attrs() -> Attrs {
    Attrs { mode: 0o644, ..Attrs::default() }
}

fn names(tree: &Tree, dir: NodeId) -> Vec<Vec<u8>> {
    tree.children(dir).map(|(name, _)| name.to_vec()).collect()
}

#[test]
fn names_are_found_sorted_and_unique() {
    let mut t = Tree::new();
    let d = t.create(Tree::ROOT, b"d", Kind::Dir, attrs()).unwrap();
    for name in [&b"b"[..], b"a", b"\xff", b"a.b", b"ab"] {
        t.create(d, name, Kind::File, attrs()).unwrap();
    }
    assert_eq!(names(&t, d), [&b"a"[..], b"a.b", b"ab", b"b", b"\xff"]);
    assert!(t.lookup(d, b"ab").is_some());
    assert!(t.lookup(Tree::ROOT, b"ab").is_none());
    assert_eq!(t.create(d, b"a", Kind::Fifo, attrs()), Err(TreeError::Exists(PathBytes::of(b"/d/a"))));
    let a = t.lookup(d, b"a").unwrap();
    assert_eq!(t.create(a, b"x", Kind::File, attrs()), Err(TreeError::NotADirectory(PathBytes::of(b"/d/a"))));
}

#[test]
fn link_counts_follow_names() {
    let mut t = Tree::new();
    let f = t.create(Tree::ROOT, b"f", Kind::File, attrs()).unwrap();
    let d = t.create(Tree::ROOT, b"d", Kind::Dir, attrs()).unwrap();
    t.create(d, b"e", Kind::Dir, attrs()).unwrap();
    t.link(d, b"g", f).unwrap();
    assert_eq!((t.nlink(f), t.nlink(Tree::ROOT), t.nlink(d)), (2, 3, 3));
    assert_eq!(t.link(d, b"h", d), Err(TreeError::LinkToDirectory(PathBytes::of(b"/d/h"))));
    assert_eq!(t.unlink(Tree::ROOT, b"d"), Some(d));
    assert_eq!((t.nlink(f), t.nlink(Tree::ROOT), t.name_count(), t.node_count()), (1, 2, 1, 2));
    assert_eq!(t.unlink(Tree::ROOT, b"d"), None);
}

#[test]
fn names_that_no_directory_holds_are_refused() {
    let mut t = Tree::new();
    for name in [&b""[..], b".", b"..", b"a/b", b"a\0b", b"/"] {
        let refused = t.create(Tree::ROOT, name, Kind::File, attrs());
        assert!(matches!(refused, Err(TreeError::BadName { .. })), "{name:?} {refused:?}");
    }
    assert_eq!((t.name_count(), t.node_count()), (0, 1));
}

#[test]
fn limits_name_the_path() {
    let mut t = Tree::new();
    let long = t.create(Tree::ROOT, &[b'n'; 256], Kind::File, attrs()).unwrap_err();
    assert!(matches!(long, TreeError::Limit { what: "bytes of one name", limit: 255, .. }), "{long}");
    t.create(Tree::ROOT, &[b'n'; 255], Kind::File, attrs()).unwrap();

    let mut dir = Tree::ROOT;
    for _ in 0..1024 {
        dir = t.create(dir, b"d", Kind::Dir, attrs()).unwrap();
    }
    let deep = t.create(dir, b"d", Kind::Dir, attrs()).unwrap_err();
    assert!(matches!(deep, TreeError::Limit { what: "directories deep", limit: 1024, .. }));
    assert!(deep.to_string().starts_with("/d/d/d/"), "{deep}");

    let mut dir = Tree::ROOT;
    for _ in 0..15 {
        dir = t.create(dir, &[b'p'; 255], Kind::Dir, attrs()).unwrap();
    }
    t.create(dir, &[b'p'; 254], Kind::File, attrs()).unwrap();
    let long = t.create(dir, &[b'q'; 255], Kind::File, attrs()).unwrap_err();
    assert!(matches!(long, TreeError::Limit { what: "bytes of a path", limit: 4095, .. }));

    let mut small = Tree::with_limits(Limits { names: 2, name_bytes: 7, ..Limits::default() });
    small.create(Tree::ROOT, b"a", Kind::File, attrs()).unwrap();
    let bytes = small.create(Tree::ROOT, b"bcdefgh", Kind::File, attrs()).unwrap_err();
    assert!(matches!(bytes, TreeError::Limit { what: "bytes of names together", .. }));
    small.create(Tree::ROOT, b"b", Kind::File, attrs()).unwrap();
    let many = small.create(Tree::ROOT, b"c", Kind::File, attrs()).unwrap_err();
    assert!(matches!(many, TreeError::Limit { what: "names", limit: 2, .. }));
}

#[test]
fn devices_and_targets_are_checked() {
    let mut t = Tree::new();
    let big = Kind::Char { major: 4096, minor: 0 };
    assert!(matches!(t.create(Tree::ROOT, b"c", big, attrs()), Err(TreeError::BadDevice { .. })));
    let c = t.create(Tree::ROOT, b"c", Kind::Char { major: 4095, minor: 1048575 }, attrs()).unwrap();
    assert_eq!(t.kind(c), Kind::Char { major: 4095, minor: 1048575 });
    assert!(matches!(t.set_target(c, b"x"), Err(TreeError::WrongKind(_))));

    let l = t.create(Tree::ROOT, b"l", Kind::Symlink, attrs()).unwrap();
    for target in [&b""[..], b"a\0", &[b'x'; 4096]] {
        assert!(matches!(t.set_target(l, target), Err(TreeError::BadTarget { .. })));
    }
    t.set_target(l, &[b'x'; 4095]).unwrap();
    t.set_target(l, b"y").unwrap();
    assert_eq!(t.target(l), b"y");
}

#[test]
fn attribute_sets_are_shared_sorted_and_checked() {
    let mut t = Tree::new();
    let a = t.xattr_set(&[(b"user.b", b"2"), (b"user.a", b"")]).unwrap();
    let b = t.xattr_set(&[(b"user.a", b""), (b"user.b", b"2")]).unwrap();
    assert_eq!(a, b);
    assert_eq!(t.xattrs(a).collect::<Vec<_>>(), [(&b"user.a"[..], &b""[..]), (b"user.b", b"2")]);
    assert_eq!(t.xattr_set(&[]).unwrap(), XattrSet::EMPTY);

    let value = vec![7u8; 65_536];
    let refused = |t: &mut Tree, name: &[u8], value: &[u8]| t.xattr_set(&[(name, value)]).unwrap_err();
    for name in [&b"system.nfs4_acl"[..], b"lustre.x", b"user.", b"x", b"system.posix_acl_access2"] {
        assert_eq!(refused(&mut t, name, b""), TreeError::UnsupportedXattr(PathBytes::of(name)));
    }
    assert!(matches!(refused(&mut t, b"user.x\0", b""), TreeError::BadXattr { .. }));
    assert!(matches!(refused(&mut t, b"user.x", &value), TreeError::Limit { .. }));
    assert!(matches!(refused(&mut t, &[b'u'; 256], b""), TreeError::Limit { .. }));
    t.xattr_set(&[(b"user.x", &value[1..])]).unwrap();
    let twice = t.xattr_set(&[(b"user.x", b"1"), (b"user.x", b"2")]);
    assert!(matches!(twice, Err(TreeError::BadXattr { why: "is there twice", .. })));
    let many = t.xattr_set(&[(b"user.x", &value[1..]), (b"user.y", &value[1..]), (b"user.z", b"")]);
    assert!(matches!(many, Err(TreeError::Limit { what: "bytes of extended attributes of one file", .. })));
}

#[test]
fn runs_are_merged_kept_and_checked() {
    let mut t = Tree::new();
    let o = t.object(Digest::of(b"o"), 1000);
    let p = t.object_placeholder();
    assert_eq!(t.object(Digest::of(b"o"), 1000), o);
    let f = t.create(Tree::ROOT, b"f", Kind::File, attrs()).unwrap();
    let run = |file_block, count, object, space_block| Run { file_block, count, object, space_block };
    let set = |t: &mut Tree, blocks: u64, runs: &[Run]| t.set_content(f, blocks * BLOCK, Digest::of(b"c"), runs);

    set(&mut t, 4, &[run(0, 2, o, 10), run(2, 2, o, 12)]).unwrap();
    assert_eq!(t.runs(f).collect::<Vec<_>>(), [run(0, 4, o, 10)]);
    let sparse = [run(1, 1, o, 10), run(2, 1, p, 11), run(5, 3, p, 12)];
    set(&mut t, 9, &sparse).unwrap();
    assert_eq!(t.runs(f).collect::<Vec<_>>(), sparse);
    assert_eq!(t.content(f), FileContent { size: 9 * BLOCK, digest: Digest::of(b"c") });
    let g = t.create(Tree::ROOT, b"g", Kind::File, attrs()).unwrap();
    t.set_content(g, 5 * BLOCK - 1, Digest::of(b"g"), &[run(0, 1, o, 1), run(4, 1, o, 1)]).unwrap();
    assert_eq!(t.runs(f).collect::<Vec<_>>(), sparse);
    assert_eq!(t.runs(g).count(), 2);

    for (blocks, runs) in [
        (4, &[run(0, 5, o, 0)][..]),
        (4, &[run(0, 0, o, 0)]),
        (4, &[run(1, 2, o, 0), run(2, 1, o, 9)]),
        (4, &[run(2, 1, o, 0), run(0, 1, o, 9)]),
        (4, &[run(0, 1, 9, 0)]),
        (4, &[run(0, 2, o, u32::MAX - 1)]),
        (u64::from(u32::MAX), &[run(0, 1 << 31, o, 0)]),
    ] {
        assert!(matches!(set(&mut t, blocks, runs), Err(TreeError::BadRuns { .. })), "{runs:?}");
    }
    assert!(matches!(set(&mut t, 1 << 32, &[]), Err(TreeError::Limit { what: "bytes of one file", .. })));
    assert_eq!(t.runs(f).collect::<Vec<_>>(), sparse, "a refused call changes nothing");
    set(&mut t, 0, &[]).unwrap();
    assert_eq!(t.runs(f).count(), 0);
}

#[test]
fn seconds_are_carried_out_of_nanoseconds() {
    let mut t = Tree::new();
    let odd = Attrs { mtime_sec: -2, mtime_nsec: 1_500_000_000, mode: 0o177_777, ..attrs() };
    let f = t.create(Tree::ROOT, b"f", Kind::File, odd).unwrap();
    assert_eq!((t.attrs(f).mtime_sec, t.attrs(f).mtime_nsec, t.attrs(f).mode), (-1, 500_000_000, 0o7777));
}

/// Names, targets and extents that are gone do not pile up.
#[test]
fn memory_of_replaced_things_is_used_again() {
    let mut t = Tree::new();
    let o = t.object(Digest::of(b"o"), 1 << 20);
    let runs: Vec<Run> = (0..50).map(|i| Run { file_block: 2 * i, count: 1, object: o, space_block: 3 * i }).collect();
    let mut high = 0;
    for round in 0..20_000u32 {
        let name = format!("{round:0200}");
        let f = t.create(Tree::ROOT, name.as_bytes(), Kind::File, attrs()).unwrap();
        t.set_content(f, 100 * BLOCK, Digest::default(), &runs).unwrap();
        let l = t.create(Tree::ROOT, b"l", Kind::Symlink, attrs()).unwrap();
        t.set_target(l, &[b't'; 300]).unwrap();
        assert_eq!(t.runs(f).count(), 50);
        t.unlink(Tree::ROOT, name.as_bytes()).unwrap();
        t.unlink(Tree::ROOT, b"l").unwrap();
        high = high.max(t.memory());
    }
    assert!(high < 24 << 20, "{high}");
    assert_eq!((t.name_count(), t.node_count()), (0, 1));
}

/// A million names in one directory, in no order, and all of them away again: no operation looks at the others.
#[test]
fn a_directory_may_be_wide() {
    let mut t = Tree::new();
    let d = t.create(Tree::ROOT, b"wide", Kind::Dir, attrs()).unwrap();
    let count = 300_000u64;
    for i in 0..count {
        let name = (i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_string();
        t.create(d, name.as_bytes(), Kind::File, attrs()).unwrap();
    }
    let sorted: Vec<_> = t.children(d).map(|(name, _)| name).collect();
    assert!(sorted.is_sorted());
    assert_eq!(sorted.len() as u64, count);
    for i in (0..count).step_by(2) {
        let name = (i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_string();
        assert!(t.unlink(d, name.as_bytes()).is_some());
    }
    assert_eq!(u64::from(t.name_count()), count / 2 + 1);
    t.unlink(Tree::ROOT, b"wide");
    assert_eq!((t.name_count(), t.node_count()), (0, 1));
}

#[test]
fn paths_are_shown_so_that_they_can_be_read() {
    let shown = PathBytes::of(b"/caf\xc3\xa9/\xff\n\\").to_string();
    assert_eq!(shown, "/café/\\xff\\n\\\\");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Against a map of paths: creating, linking, unlinking in any order.
    #[test]
    fn behaves_like_a_map_of_paths(words in prop::collection::vec(any::<u64>(), 0..150)) {
        let mut tree = Tree::new();
        // Path -> the number of the node.
        let mut model: BTreeMap<Vec<u8>, u64> = BTreeMap::new();
        let mut next = 0u64;
        for word in words {
            let mut r = Random(word);
            let mut dir = (Vec::new(), Tree::ROOT);
            for _ in 0..r.below(4) {
                let below: Vec<_> = tree.children(dir.1).map(|(n, id)| (n.to_vec(), id)).collect();
                let dirs: Vec<_> = below.into_iter().filter(|(_, id)| tree.is_dir(*id)).collect();
                if dirs.is_empty() { break }
                let (name, id) = r.pick(&dirs);
                dir = ([&dir.0[..], b"/", name].concat(), *id);
            }
            let name = vec![b'a' + r.below(4) as u8; 1 + r.below(2) as usize];
            let path = [&dir.0[..], b"/", &name].concat();
            match r.below(6) {
                0 => {
                    let gone = tree.unlink(dir.1, &name);
                    prop_assert_eq!(gone.is_some(), model.contains_key(&path));
                    let below = [&path[..], b"/"].concat();
                    model.retain(|p, _| *p != path && !p.starts_with(&below));
                }
                1 => {
                    let files: Vec<_> = tree.children(dir.1).filter(|(_, id)| !tree.is_dir(*id))
                        .map(|(n, id)| (n.to_vec(), id)).collect();
                    if files.is_empty() { continue }
                    let (other, id) = r.pick(&files).clone();
                    let number = model[&[&dir.0[..], b"/", &other].concat()];
                    let linked = tree.link(dir.1, &name, id);
                    prop_assert_eq!(linked.is_ok(), !model.contains_key(&path));
                    model.entry(path).or_insert(number);
                }
                kind => {
                    next += 1;
                    let kind = if kind < 4 { Kind::Dir } else { Kind::File };
                    let made = tree.create(dir.1, &name, kind, Attrs { mtime_sec: next as i64, ..attrs() });
                    prop_assert_eq!(made.is_ok(), !model.contains_key(&path));
                    model.entry(path).or_insert(next);
                }
            }
        }
        let mut seen = BTreeMap::new();
        let Ok(()) = tree.walk(|path, node| -> Result<(), std::convert::Infallible> {
            if node != Tree::ROOT {
                seen.insert(path.to_vec(), tree.attrs(node).mtime_sec as u64);
                let names = model.values().filter(|&&n| n as i64 == tree.attrs(node).mtime_sec).count() as u32;
                assert!(tree.is_dir(node) || tree.nlink(node) == names);
                assert!(!tree.is_dir(node) || tree.path_of(node).0 == path);
            }
            Ok(())
        });
        prop_assert_eq!(seen, model.clone());
        prop_assert_eq!(tree.name_count() as usize, model.len());
        let nodes: std::collections::BTreeSet<_> = model.values().collect();
        prop_assert_eq!(tree.node_count() as usize, nodes.len() + 1);
    }

    #[test]
    fn words_make_the_same_tree_twice(words in prop::collection::vec(any::<u64>(), 0..60)) {
        let (a, b) = (tree_of(&words), tree_of(&words));
        prop_assert_eq!(Snapshot::from_tree(&a), Snapshot::from_tree(&b));
    }
}
