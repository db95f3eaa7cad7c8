use super::*;
use crate::snapshot::{Record, RecordKind, Snapshot, SnapshotBuilder};
use crate::testing::Random;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// What a test layer has: a path, what it makes, a number that shows in its attributes.
#[derive(Debug, Clone, PartialEq)]
struct Item {
    path: String,
    what: What,
    mark: u32,
}

#[derive(Debug, Clone, PartialEq)]
enum What {
    File,
    Dir,
    Fifo,
    Link(String),
    Hard(String),
}

fn item(path: &str, what: What, mark: u32) -> Item {
    Item { path: path.into(), what, mark }
}
fn f(path: &str) -> Item {
    item(path, What::File, 1)
}
fn d(path: &str) -> Item {
    item(path, What::Dir, 1)
}
fn l(path: &str, target: &str) -> Item {
    item(path, What::Link(target.into()), 1)
}
fn h(path: &str, target: &str) -> Item {
    item(path, What::Hard(target.into()), 1)
}
fn with(mut item: Item, mark: u32) -> Item {
    item.mark = mark;
    item
}

fn attrs_of(mark: u32) -> Attrs {
    Attrs { mode: 0o700, uid: mark, mtime_sec: mark.into(), ..Attrs::default() }
}

fn apply(layers: &[Vec<Item>]) -> Result<Tree, MergeError> {
    let mut merger = Merger::new(Tree::new());
    for layer in layers {
        merger.begin_layer()?;
        for i in layer {
            let body = match &i.what {
                What::File => Body::File { size: i.mark.into(), digest: Digest::of(&i.mark.to_le_bytes()), runs: &[] },
                What::Dir => Body::Dir,
                What::Fifo => Body::Fifo,
                What::Link(target) => Body::Symlink { target: target.as_bytes() },
                What::Hard(target) => Body::Hardlink { target: target.as_bytes() },
            };
            merger.entry(i.path.as_bytes(), Entry { body, attrs: attrs_of(i.mark) })?;
        }
        merger.end_layer();
    }
    Ok(merger.finish())
}

/// Every path with its mark and kind, symlinks with their target: `d /etc 1`.
fn listing(layers: &[Vec<Item>]) -> Vec<String> {
    let tree = apply(layers).unwrap();
    let snapshot = Snapshot::from_tree(&tree);
    let show = |(path, record): (&Vec<u8>, &Record)| {
        let kind = match &record.kind {
            RecordKind::File { .. } => "f".to_string(),
            RecordKind::Dir => "d".to_string(),
            RecordKind::Symlink(target) => format!("l:{}", PathBytes::of(target)),
            _ => "o".to_string(),
        };
        format!("{kind} {} {}", PathBytes::of(path), record.uid)
    };
    snapshot.records.iter().skip(1).map(show).collect()
}

/// The order-free model: whiteouts first, then the additions, with plain maps.
mod model {
    use super::*;

    #[derive(Clone)]
    struct Node {
        what: What,
        mark: u32,
        id: u64,
    }

    fn parts(path: &str) -> Vec<String> {
        path.split('/').filter(|p| !p.is_empty() && *p != ".").map(str::to_string).collect()
    }

    #[derive(Default)]
    struct Model {
        tree: BTreeMap<String, Node>,
        mine: std::collections::BTreeSet<String>,
        next: u64,
    }

    impl Model {
        fn remove(&mut self, path: &str) {
            let below = format!("{path}/");
            self.tree.retain(|p, _| p != path && !p.starts_with(&below));
        }

        fn put(&mut self, path: String, what: What, mark: u32) {
            self.next += 1;
            self.mine.insert(path.clone());
            self.tree.insert(path, Node { what, mark, id: self.next });
        }

        fn place(&mut self, path: &str) -> Option<String> {
            let mut todo = parts(path);
            let last = todo.pop()?;
            todo.reverse();
            let (mut cur, mut hops): (Vec<String>, _) = (vec![], 0);
            while let Some(part) = todo.pop() {
                if part == ".." {
                    cur.pop();
                    continue;
                }
                let here = [&cur[..], std::slice::from_ref(&part)].concat().join("/");
                match self.tree.get(&here).map(|n| n.what.clone()) {
                    Some(What::Link(target)) if self.mine.contains(&here) => {
                        hops += 1;
                        if hops > MAX_HOPS {
                            return None;
                        }
                        if target.starts_with('/') {
                            cur.clear();
                        }
                        todo.extend(parts(&target).into_iter().rev());
                        continue;
                    }
                    Some(What::Dir) => {}
                    _ => {
                        self.remove(&here);
                        self.put(here, What::Dir, 0);
                    }
                }
                cur.push(part);
            }
            cur.push(last);
            Some(cur.join("/"))
        }
    }

    /// `None` when the layers are not well-formed: a link to nothing, a loop.
    pub(super) fn flatten(layers: &[Vec<Item>]) -> Option<Snapshot> {
        let mut m = Model::default();
        for layer in layers {
            m.mine.clear();
            for i in layer {
                let mut p = parts(&i.path);
                let Some(last) = p.pop() else { continue };
                let Some(name) = last.strip_prefix(".wh.") else { continue };
                if last == ".wh..wh..opq" {
                    let below = if p.is_empty() { String::new() } else { p.join("/") + "/" };
                    m.tree.retain(|path, _| !path.starts_with(&below));
                } else {
                    p.push(name.into());
                    m.remove(&p.join("/"));
                }
            }
            for i in layer {
                if parts(&i.path).last().is_some_and(|last| last.starts_with(".wh.")) {
                    continue;
                }
                let path = m.place(&i.path)?;
                let old = m.tree.get(&path).map(|n| n.what.clone());
                if let What::Hard(target) = &i.what {
                    let source = m.tree.get(&parts(target).join("/"))?.clone();
                    if source.what == What::Dir {
                        return None;
                    }
                    m.remove(&path);
                    m.mine.insert(path.clone());
                    m.tree.insert(path, source);
                    continue;
                }
                if !(i.what == What::Dir && old == Some(What::Dir)) {
                    m.remove(&path);
                }
                m.put(path, i.what.clone(), i.mark);
            }
        }
        let mut builder = SnapshotBuilder::default();
        let nlink = |path: &str, node: &Node| match node.what {
            What::Dir => {
                let below = |p: &String| p.rsplit_once('/').map_or("", |(dir, _)| dir) == path;
                2 + m.tree.iter().filter(|(p, n)| n.what == What::Dir && below(p) && *p != path).count() as u32
            }
            _ => m.tree.values().filter(|n| n.id == node.id).count() as u32,
        };
        let root = Node { what: What::Dir, mark: 0, id: 0 };
        for (path, node) in m.tree.iter().map(|(p, n)| (p.as_str(), n)).chain([("", &root)]) {
            let attrs = if node.mark == 0 { Attrs::IMPLICIT_DIR } else { attrs_of(node.mark) };
            let kind = match &node.what {
                What::File | What::Hard(_) => {
                    RecordKind::File { size: node.mark.into(), digest: Some(Digest::of(&node.mark.to_le_bytes())) }
                }
                What::Dir => RecordKind::Dir,
                What::Fifo => RecordKind::Fifo,
                What::Link(target) => RecordKind::Symlink(target.clone().into_bytes()),
            };
            let record = Record {
                kind,
                mode: attrs.mode,
                uid: attrs.uid,
                gid: 0,
                mtime: (attrs.mtime_sec, 0),
                nlink: nlink(path, node),
                xattrs: BTreeMap::new(),
                link_group: 0,
            };
            builder.add(format!("/{path}").into_bytes(), record, Some((0, node.id)));
        }
        Some(builder.finish())
    }
}

fn base() -> Vec<Item> {
    vec![d("etc"), f("etc/keep"), d("etc/sub"), f("etc/sub/x"), f("etc/gone")]
}

#[test]
fn whiteouts_hide_what_is_below_and_nothing_else() {
    let etc = |rest: &[&'static str]| [&["d /etc 1"], rest].concat();
    assert_eq!(listing(&[base(), vec![f("etc/.wh.gone")]]), etc(&["f /etc/keep 1", "d /etc/sub 1", "f /etc/sub/x 1"]));
    assert_eq!(listing(&[base(), vec![f("./etc/./.wh.sub")]]), etc(&["f /etc/gone 1", "f /etc/keep 1"]));
    assert_eq!(
        listing(&[base(), vec![f("etc/.wh.nothere"), d("new"), f("new/.wh.x"), f("new/.wh..wh..opq")]]).last(),
        Some(&"d /new 1".to_string())
    );
    assert_eq!(
        listing(&[vec![f("test"), f("test2"), d("d"), f("d/test")], vec![f(".wh.test")]]),
        ["d /d 1", "f /d/test 1", "f /test2 1"]
    );
}

/// A whiteout after the name that its own layer adds: the layer's stays, with what it says of itself.
#[test]
fn whiteouts_spare_their_own_layer_wherever_they_stand() {
    let upper = [
        with(d("etc"), 2),
        with(f("etc/gone"), 2),
        f("etc/.wh.gone"),
        with(d("etc/sub"), 2),
        with(f("etc/sub/y"), 2),
        f("etc/.wh.sub"),
    ];
    let want = ["d /etc 2", "f /etc/gone 2", "f /etc/keep 1", "d /etc/sub 2", "f /etc/sub/y 2"];
    assert_eq!(listing(&[base(), upper.to_vec()]), want);
    let mut backward = upper.to_vec();
    backward.reverse();
    assert_eq!(listing(&[base(), backward]), want);
    // A directory that the layer never describes starts again as an implicit one.
    let implicit = vec![with(f("etc/sub/deep/y"), 2), f("etc/.wh.sub")];
    let lower = vec![d("etc"), d("etc/sub"), d("etc/sub/deep"), f("etc/sub/deep/x"), f("etc/sub/z")];
    assert_eq!(listing(&[lower, implicit]), ["d /etc 1", "d /etc/sub 0", "d /etc/sub/deep 0", "f /etc/sub/deep/y 2"]);
}

#[test]
fn opaque_markers_hide_lower_content_whatever_their_position() {
    let lower = vec![d("a"), d("a/b"), d("a/b/c"), f("a/b/c/bar"), f("a/top")];
    let upper = vec![
        with(d("a"), 2),
        with(d("a/b"), 2),
        with(d("a/b/c"), 2),
        with(f("a/b/c/foo"), 2),
        with(f("a/top2"), 2),
        f("a/.wh..wh..opq"),
    ];
    let want = ["d /a 2", "d /a/b 2", "d /a/b/c 2", "f /a/b/c/foo 2", "f /a/top2 2"];
    assert_eq!(listing(&[lower.clone(), upper]), want);
    assert_eq!(listing(&[lower.clone(), vec![f(".wh..wh..opq"), with(f("n"), 2)]]), ["f /n 2"]);
    // A directory keeps its own attributes.
    assert_eq!(listing(&[lower, vec![f("a/.wh..wh..opq")]]), ["d /a 1"]);
}

#[test]
fn names_change_their_kind() {
    let lower = vec![d("data"), f("data/old"), d("data/sub"), f("data/sub/deep"), d("real"), f("real/r")];
    assert_eq!(listing(&[lower, vec![l("data", "real")]]), ["l:real /data 1", "d /real 1", "f /real/r 1"]);
    let lower = vec![d("d"), f("d/x"), d("d/e"), f("f1"), l("s", "one"), f("f2")];
    let upper = vec![f("d"), item("f1", What::Fifo, 1), l("s", "two"), d("f2")];
    assert_eq!(listing(&[lower, upper]), ["f /d 1", "o /f1 1", "d /f2 1", "l:two /s 1"]);
}

#[test]
fn directories_over_directories_replace_attributes_and_keep_children() {
    assert_eq!(listing(&[vec![d("d"), f("d/k")], vec![with(d("d"), 2)]]), ["d /d 2", "f /d/k 1"]);
    // The parent that an upper layer leaves out keeps its own.
    assert_eq!(listing(&[vec![d("d"), d("d/e")], vec![f("d/e/n")]]), ["d /d 1", "d /d/e 1", "f /d/e/n 1"]);
    // A directory's entry may come after its children.
    assert_eq!(listing(&[vec![f("d/e/x"), d("d/e"), with(d("d"), 3)]]), ["d /d 3", "d /d/e 1", "f /d/e/x 1"]);
    assert_eq!(apply(&[vec![with(d("./"), 5)]]).unwrap().attrs(Tree::ROOT).uid, 5);
}

#[test]
fn missing_parents_are_plain_directories() {
    let tree = apply(&[vec![f("usr/bin/x")]]).unwrap();
    let usr = tree.lookup(Tree::ROOT, b"usr").unwrap();
    assert_eq!(tree.attrs(usr), Attrs::IMPLICIT_DIR);
}

#[test]
fn symlinked_parents_of_the_same_layer_are_followed_inside_the_root() {
    let layer =
        vec![d("usr"), d("usr/lib"), l("lib", "usr/lib"), f("lib/a.so"), l("lib64", "/usr/lib"), f("lib64/b.so")];
    let want = [
        "l:usr/lib /lib 1",
        "l:/usr/lib /lib64 1",
        "d /usr 1",
        "d /usr/lib 1",
        "f /usr/lib/a.so 1",
        "f /usr/lib/b.so 1",
    ];
    assert_eq!(listing(&[layer]), want);
    let out = vec![l("out", "../../../etc"), f("out/passwd")];
    assert_eq!(listing(&[out]), ["d /etc 0", "f /etc/passwd 1", "l:../../../etc /out 1"]);
    // One from a lower layer is replaced.
    assert_eq!(listing(&[vec![l("lib", "usr")], vec![f("lib/x")]]), ["d /lib 0", "f /lib/x 1"]);
    let looping = apply(&[vec![l("a", "b"), l("b", "a"), f("a/x")]]);
    assert!(matches!(looping, Err(MergeError::BadEntry { why: "too many symlinks on the way", .. })));
}

#[test]
fn nothing_leaves_the_root() {
    let up = "../".repeat(14) + "tmp/a";
    assert_eq!(
        listing(&[vec![f("ok"), d("a"), f(&up), f("a/../../../tmp/b")]]),
        ["d /a 1", "f /ok 1", "d /tmp 0", "f /tmp/a 1", "f /tmp/b 1"]
    );
    assert!(matches!(apply(&[vec![d("a/..")]]), Err(MergeError::BadEntry { .. })));
    let whiteout = vec![f("a/../.wh.ok"), f("../.wh.ok")];
    assert_eq!(listing(&[vec![f("ok"), d("a")], whiteout]), ["d /a 1", "f /ok 1"]);
}

#[test]
fn hard_links_bind_to_nodes() {
    let tree = apply(&[vec![f("a"), h("./b", "/a"), h("d/c", ".//./b"), h("a", "b")], vec![h("e", "a")]]).unwrap();
    let node = tree.lookup(Tree::ROOT, b"a").unwrap();
    assert_eq!(tree.nlink(node), 4);
    assert_eq!(tree.lookup(Tree::ROOT, b"e"), Some(node));
    // A name that is replaced leaves the other one alone.
    let tree = apply(&[vec![f("a"), h("b", "a")], vec![with(f("a"), 2)]]).unwrap();
    let b = tree.lookup(Tree::ROOT, b"b").unwrap();
    assert_eq!((tree.nlink(b), tree.attrs(b).uid), (1, 1));
    // Symlinks have hard links too, and are not followed.
    let tree = apply(&[vec![f("z"), l("a", "z"), h("b", "a")]]).unwrap();
    assert_eq!(tree.nlink(tree.lookup(Tree::ROOT, b"a").unwrap()), 2);
    // The link may take the place of the directory that its target is in.
    assert_eq!(listing(&[vec![d("d"), f("d/x"), h("d", "d/x")]]), ["f /d 1"]);
    let through = vec![d("usr"), f("usr/x"), l("lib", "usr"), h("y", "lib/x")];
    assert_eq!(listing(&[through]), ["l:usr /lib 1", "d /usr 1", "f /usr/x 1", "f /y 1"]);
}

#[test]
fn refused_entries_are_named() {
    for (layer, want) in [
        (vec![h("self", "self")], "entry \"self\": hard link to \"self\", which is not there"),
        (vec![h("x", "no/such")], "entry \"x\": hard link to \"no/such\", which is not there"),
        (vec![f("etc/.wh.")], "entry \"etc/.wh.\": a whiteout that names nothing"),
        (vec![f("etc/.wh..")], "entry \"etc/.wh..\": a whiteout that names nothing"),
        (vec![f("etc/.wh...")], "entry \"etc/.wh...\": a whiteout that names nothing"),
        (vec![f(".wh.a/b")], "entry \".wh.a/b\": something below a whiteout"),
        (vec![f("./")], "entry \"./\": the root is not a directory"),
        (vec![d("d"), h("x", "d")], "entry \"x\""),
        (vec![f("a\0b")], "entry \"a\\u{0}b\""),
        (vec![l("x", "")], "entry \"x\""),
    ] {
        assert_eq!(apply(&[base(), layer]).unwrap_err().to_string(), want);
    }
}

#[test]
fn bookkeeping_of_aufs_is_left_out() {
    let layer = vec![d(".wh..wh.plnk"), f(".wh..wh.plnk/12.3"), f(".wh..wh.aufs"), f("x")];
    assert_eq!(listing(&[layer]), ["f /x 1"]);
}

#[test]
fn layers_are_counted() {
    let mut merger = Merger::new(Tree::new());
    for _ in 0..Tree::MAX_LAYERS {
        merger.begin_layer().unwrap();
    }
    assert_eq!(merger.begin_layer(), Err(MergeError::Layers(Tree::MAX_LAYERS)));
}

/// Whiteouts of the same wide directory again and again cost nothing more.
#[test]
fn repeated_whiteouts_are_cheap() {
    let mut merger = Merger::new(Tree::new());
    merger.begin_layer().unwrap();
    let entry = |body| Entry { body, attrs: attrs_of(1) };
    merger.entry(b"d/lower", entry(Body::Fifo)).unwrap();
    merger.begin_layer().unwrap();
    for i in 0..20_000 {
        merger.entry(format!("d/{i}").as_bytes(), entry(Body::Fifo)).unwrap();
        let marker = if i % 2 == 0 { &b".wh.d"[..] } else { b"d/.wh..wh..opq" };
        merger.entry(marker, entry(Body::Fifo)).unwrap();
    }
    assert_eq!(merger.finish().name_count(), 20_001);
}

fn random_layers(words: &[u64]) -> Vec<Vec<Item>> {
    let mut layers = vec![vec![]];
    for (n, &word) in words.iter().enumerate() {
        let mut r = Random(word);
        if r.below(8) == 0 {
            layers.push(vec![]);
        }
        let path = |r: &mut Random| {
            let parts: Vec<&str> =
                (0..1 + r.below(3)).map(|_| *r.pick(&["a", "b", "c", "a", "b", "c", "..", "."])).collect();
            parts.join("/")
        };
        let dir = path(&mut r);
        let mark = n as u32 + 1;
        let plain = |r: &mut Random| format!("{dir}/{}", r.pick(&["a", "b", "c"]));
        let next = match r.below(12) {
            0..3 => item(&plain(&mut r), What::Dir, mark),
            3..6 => item(&plain(&mut r), What::File, mark),
            6 => {
                let target = path(&mut r);
                let target = if r.below(2) == 0 { target } else { format!("/{target}") };
                item(&plain(&mut r), What::Link(target), mark)
            }
            7 => item(&plain(&mut r), What::Hard(["a", "a/b", "b/c", "c"][r.below(4) as usize].into()), mark),
            8..11 => item(&format!("{dir}/.wh.{}", r.pick(&["a", "b", "c"])), What::File, mark),
            _ => item(&format!("{dir}/.wh..wh..opq"), What::File, mark),
        };
        layers.last_mut().unwrap().push(next);
    }
    layers
}

/// Whether a whiteout comes after a hard link in some layer: then the link, which the model refuses or binds to
/// another node, may have bound to what the whiteout hides.
fn whiteout_after_link(layers: &[Vec<Item>]) -> bool {
    layers.iter().any(|layer| {
        let link = layer.iter().position(|i| matches!(i.what, What::Hard(_)));
        let whiteout = layer.iter().rposition(|i| i.path.contains(".wh."));
        link.zip(whiteout).is_some_and(|(link, whiteout)| link < whiteout)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    /// Entry by entry, in whatever order, comes to the same as whiteouts first and then the rest.
    #[test]
    fn agrees_with_the_model(words in prop::collection::vec(any::<u64>(), 0..40)) {
        let layers = random_layers(&words);
        let merged = apply(&layers);
        match model::flatten(&layers) {
            Some(model) => {
                if let (Ok(merged), false) = (&merged, whiteout_after_link(&layers)) {
                    let differences = model.diff(&Snapshot::from_tree(merged));
                    prop_assert!(differences.is_empty(), "{differences:#?}\n{layers:#?}");
                }
                if !whiteout_after_link(&layers) {
                    prop_assert!(merged.is_ok(), "{merged:?} {layers:#?}");
                }
            }
            None => prop_assert!(merged.is_err() || layers.iter().flatten().any(|i| matches!(i.what, What::Hard(_)))),
        }
    }
}
