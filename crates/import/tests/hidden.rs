//! Content of lower layers that upper ones hide: not stored, unless it is seen after all.

mod common;

use common::make::{gzip, noise, plain_layout, tar};
use common::{Home, Opened, options};
use std::path::Path;

/// Larger than what counts as a small layer, so that every upper layer is known before it is read.
const LARGE: usize = 2 << 20;

/// One entry of an archive.
enum Item<'a> {
    File(&'a str, &'a [u8]),
    Symlink(&'a str, &'a str),
    Hardlink(&'a str, &'a str),
}

fn archive(items: &[Item<'_>]) -> Vec<u8> {
    let mut b = tar::Builder::new(Vec::new());
    for item in items {
        let mut h = tar::Header::new_gnu();
        h.set_mode(0o644);
        match item {
            Item::File(name, data) => {
                h.set_size(data.len() as u64);
                b.append_data(&mut h, name, *data).unwrap();
            }
            Item::Symlink(name, target) => {
                h.set_entry_type(tar::EntryType::Symlink);
                b.append_link(&mut h, name, target).unwrap();
            }
            Item::Hardlink(name, target) => {
                h.set_entry_type(tar::EntryType::Link);
                b.append_link(&mut h, name, target).unwrap();
            }
        }
    }
    b.into_inner().unwrap()
}

fn import(dir: &Path, layers: &[Vec<u8>]) -> (Home, lazyroot_import::Report) {
    plain_layout(dir, layers);
    let home = Home::new();
    let mut options = options();
    options.threads = 3;
    let report = home.import_with(&format!("oci:{}", dir.display()), &options).unwrap().report;
    (home, report)
}

#[test]
fn what_upper_layers_hide_is_not_stored() {
    let dir = tempfile::tempdir().unwrap();
    let file = |seed| noise(seed, LARGE);
    let kept = file(1);
    let base = tar(&[
        ("keep", &kept),
        ("removed", &file(2)),
        ("replaced", &file(3)),
        ("tree/a/b", &file(4)),
        ("opaque/x", &file(5)),
        ("opaque/y/z", &file(6)),
        ("was-a-directory/x", &file(7)),
    ]);
    let middle = tar(&[(".wh.removed", b""), ("replaced", b"new"), ("was-a-directory", b"file")]);
    let top = tar(&[("opaque/.wh..wh..opq", b""), ("opaque/own", b"own"), (".wh.tree", b"")]);
    let (home, report) = import(dir.path(), &[base, middle, top]);
    assert_eq!(report.hidden_bytes, 6 * LARGE as u64);
    let stored = report.stored_bytes;
    assert!(stored < LARGE as u64 * 5 / 4, "{stored} bytes are stored for one visible file of {LARGE}");
    let image = home.opened();
    assert_eq!(image.content("/keep"), kept);
    assert_eq!(image.content("/replaced"), b"new");
    assert_eq!(image.content("/opaque/own"), b"own");
    for gone in ["/removed", "/tree", "/opaque/x", "/opaque/y"] {
        assert!(image.find(gone).is_none(), "{gone}");
    }
}

/// Each file here is covered by its path, but seen by another way.
#[test]
fn what_seemed_hidden_is_read_again_when_it_is_seen() {
    use Item::{File, Hardlink, Symlink};
    let dir = tempfile::tempdir().unwrap();
    let files: Vec<Vec<u8>> = (0..5).map(|seed| noise(100 + seed, LARGE)).collect();
    let base = archive(&[
        // Another name stays.
        File("first", &files[0]),
        Hardlink("second", "first"),
        // The path leads elsewhere.
        Symlink("via", "real"),
        File("via/moved", &files[1]),
        // Hidden, and no more to it.
        File("gone", &files[2]),
        // A layer above links to it before it goes.
        File("linked", &files[3]),
        File("plain", &files[4]),
    ]);
    let middle = archive(&[Hardlink("kept-by-link", "linked")]);
    let top = archive(&[
        File(".wh.first", b""),
        File("via/moved", b"in a directory of this layer"),
        File(".wh.gone", b""),
        File(".wh.linked", b""),
    ]);
    let check = |image: &Opened| {
        assert_eq!(image.content("/second"), files[0]);
        assert_eq!(image.content("/real/moved"), files[1]);
        assert_eq!(image.content("/kept-by-link"), files[3]);
        assert_eq!(image.content("/plain"), files[4]);
        assert_eq!(image.content("/via/moved"), b"in a directory of this layer");
        assert!(image.find("/gone").is_none() && image.find("/first").is_none());
    };
    let layers = [base, middle, top];
    let (home, report) = import(dir.path(), &layers);
    check(&home.opened());
    assert_eq!(report.hidden_bytes, LARGE as u64, "only one file is really hidden");
    assert!(report.stored_bytes < LARGE as u64 * 17 / 4, "{}", report.stored_bytes);
    let total: u64 = layers.iter().map(|l| l.len() as u64).sum();
    assert_eq!(report.source_bytes, total, "what is read again is not counted again");

    // Compressed, on one thread, and in a store that has it all.
    let again = tempfile::tempdir().unwrap();
    let mut layout = common::make::Layout::new(again.path());
    let pairs: Vec<_> = layers.iter().map(|t| (gzip(t), t.clone())).collect();
    let image = layout.image("linux/amd64", &pairs);
    layout.add(image, None, None);
    layout.finish();
    let mut options = options();
    options.threads = 1;
    let source = format!("oci:{}", again.path().display());
    let imported = home.import_with(&source, &options).unwrap();
    check(&home.opened());
    assert_eq!(imported.report.stored_bytes, 0);
    assert_eq!(imported.report.hidden_bytes, LARGE as u64);
}

/// A layer that stands twice is hidden only by what lies above its upper place.
#[test]
fn repeated_layers_count_at_their_highest_place() {
    let dir = tempfile::tempdir().unwrap();
    let data = noise(7, LARGE);
    let repeated = tar(&[("file", &data)]);
    let (home, report) = import(dir.path(), &[repeated.clone(), tar(&[(".wh.file", b"")]), repeated]);
    assert_eq!(home.opened().content("/file"), data);
    assert_eq!(report.hidden_bytes, 0);
}
