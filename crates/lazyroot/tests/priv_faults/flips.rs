//! Bits that flip in every file of a store and of its cache: found before a reader sees them.

use crate::lab::{Lab, needs_mounts, skip_if};
use crate::support::{Random, Source, find, flip, the};
use lazyroot::hostsnap::snapshot;
use rustix::io::Errno;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Corrupt, or of a version that nobody knows.
const REFUSED: [i32; 2] = [5, 6];

/// So many places in a file, its ends among them, with a bit each.
fn places(path: &Path, count: u64, seed: u64) -> Vec<(u64, u8)> {
    let last = std::fs::metadata(path).unwrap().len() - 1;
    let mut random = Random(seed);
    let at = |i, random: &mut Random| match i {
        0 => 0,
        1 => last,
        _ => (last * (i - 2) / (count - 2) + random.below(last / count + 1)).min(last),
    };
    (0..count).map(|i| (at(i, &mut random), (random.below(8)) as u8)).collect()
}

#[test]
fn priv_a_bit_that_flips_in_a_pack_fails_its_files_and_no_others() {
    skip_if!("priv_a_bit_that_flips_in_a_pack_fails_its_files_and_no_others", needs_mounts());
    let lab = Lab::new();
    let source = Source::small(&lab, "tree", 7);
    lab.take(&source, "a");
    let pack = the(&lab.root, "objects", ".pack");
    let mut hit = 0;
    let places = places(&pack, 12, 1);
    for (i, (at, bit)) in places.iter().copied().enumerate() {
        flip(&pack, at, bit);
        let point = lab.mount("a", if i % 2 == 0 { "erofs" } else { "tree" }, "m");
        let reading = source.read(&point);
        assert!(reading.failed.iter().all(|(_, errno)| *errno == Errno::IO), "byte {at}: {:?}", reading.failed);
        // A bit that its decompressor ignores changes nothing, and then nobody complains.
        assert_eq!(reading.failed.is_empty(), lab.problems().0 == 0, "byte {at}: {:?}", reading.failed);
        if let Some((name, _)) = reading.failed.first() {
            hit += 1;
            assert!(reading.right > 0, "byte {at}: one frame must not take all files along");
            lab.run(&["cat", "a", &format!("/{name}")]).fails(5, &[name, "frame"]);
            lab.run(&["export", "a", "--as", "erofs", lab.path(&format!("x{at}")).to_str().unwrap()]).fails(5, &[]);
            assert!(lab.counter("corrupt_fetched") > 0);
            // The log says of which image, and which file of a tree, which object's frame, and why, each once.
            let log = lab.run(&["logs"]).ok().out;
            let line = log.lines().rfind(|l| l.contains("the reader gets EIO")).unwrap();
            assert!(line.contains(" error: a:latest: "), "{line}");
            assert_eq!(line.matches("object ").count(), 1, "{line}");
            assert!(line.contains(", frame ") && line.matches("mismatch").count() <= 1, "{line}");
            if i % 2 == 1 {
                assert!(reading.failed.iter().any(|(name, _)| line.contains(&format!(" /{name}: "))), "{line}");
            }
        }
        // Mended, it is read again, by the same mount.
        flip(&pack, at, bit);
        source.is_right(&point);
        lab.umount(&point);
        lab.stop();
        lab.cold();
    }
    assert!(hit + 2 >= places.len(), "only {hit} flips were noticed");
    // Cut short, grown and empty.
    let good = std::fs::read(&pack).unwrap();
    for len in [0, good.len() / 2, good.len() - 1] {
        std::fs::write(&pack, &good[..len]).unwrap();
        let point = lab.mount("a", "erofs", "m");
        assert!(!source.read(&point).failed.is_empty());
        assert!(lab.problems().0 > 0);
        lab.umount(&point);
        lab.stop();
        lab.cold();
    }
}

/// Flips bits of a file that a mount needs: it is refused, or the bit is one that says nothing.
fn refused_or_right(lab: &Lab, source: &Source, path: &Path, count: u64) {
    let point = lab.point("m");
    let mut refused = 0;
    let places = places(path, count, 2);
    for (at, bit) in places.iter().copied() {
        flip(path, at, bit);
        let done = lab.run(&["mount", "a", &point]);
        let read = lab.run(&["cat", "a", "/text"]);
        if done.code == 0 {
            let differences = snapshot(&source.dir, true).unwrap().diff(&snapshot(Path::new(&point), true).unwrap());
            assert!(differences.is_empty(), "byte {at}: {differences:#?}");
            lab.umount(Path::new(&point));
            // The daemon is not to remember the mended file for the next place.
            lab.stop();
            assert_eq!(read.code, 0, "byte {at}: {}", read.err);
        } else {
            refused += 1;
            assert!(REFUSED.contains(&done.code), "byte {at}: {done:?}");
            assert!(REFUSED.contains(&read.code), "byte {at}: {read:?}");
            assert!(done.err.contains("damaged") || done.err.contains("import") || done.code == 6, "{}", done.err);
            assert!(lab.problems().0 > 0, "byte {at}: fsck finds nothing");
        }
        flip(path, at, bit);
    }
    assert_eq!(refused, places.len(), "some bits of {} were not missed", path.display());
    lab.run(&["mount", "a", &point]).ok();
    source.is_right(Path::new(&point));
}

#[test]
fn priv_a_bit_that_flips_in_an_index_is_found_at_mount() {
    skip_if!("priv_a_bit_that_flips_in_an_index_is_found_at_mount", needs_mounts());
    let lab = Lab::new();
    let source = Source::small(&lab, "tree", 8);
    lab.take(&source, "a");
    refused_or_right(&lab, &source, &the(&lab.root, "indexes", ""), 48);
}

#[test]
fn priv_a_bit_that_flips_in_an_object_map_is_found_at_mount() {
    skip_if!("priv_a_bit_that_flips_in_an_object_map_is_found_at_mount", needs_mounts());
    let lab = Lab::new();
    let source = Source::small(&lab, "tree", 9);
    lab.take(&source, "a");
    refused_or_right(&lab, &source, &the(&lab.root, "objects", ".map"), 32);
}

#[test]
fn priv_a_bit_that_flips_in_a_ref_is_found_by_whoever_reads_it() {
    skip_if!("priv_a_bit_that_flips_in_a_ref_is_found_by_whoever_reads_it", needs_mounts());
    let lab = Lab::new();
    lab.take(&Source::small(&lab, "tree", 10), "a");
    lab.run(&["tag", "a", "b:1"]).ok();
    let path = the(&lab.root, "refs", "a@latest.json");
    let good = lab.images();
    let mut random = Random(3);
    let mut noticed = 0;
    let len = std::fs::metadata(&path).unwrap().len();
    for at in (0..len).step_by(5) {
        let bit = random.below(8) as u8;
        flip(&path, at, bit);
        let done = lab.run(&["--json", "images"]);
        if done.code == 0 {
            // Space between the words.
            assert_eq!(done.json(), good, "byte {at}, bit {bit}");
        } else {
            noticed += 1;
            assert!(REFUSED.contains(&done.code), "byte {at}: {done:?}");
            assert_eq!(done.json()[1], good[1], "the other image is not hurt");
            assert!(lab.run(&["inspect", "a"]).code >= 5);
        }
        flip(&path, at, bit);
    }
    assert!(noticed > len / 5 / 2, "{noticed}");
    // Such a record stops gc, since nobody knows what it needs; fsck says so, and rm gets rid of it.
    flip(&path, len / 2, 1);
    assert!(lab.problems().0 > 0);
    assert!(lab.run(&["gc"]).code >= 5);
    lab.run(&["rm", "a"]).ok();
    lab.run(&["gc"]).ok();
    assert_eq!(lab.problems(), (0, 0));
    assert_eq!(lab.images(), good[1..]);
}

#[test]
fn priv_a_bit_that_flips_in_a_chunk_table_loses_duplicates_and_nothing_else() {
    skip_if!("priv_a_bit_that_flips_in_a_chunk_table_loses_duplicates_and_nothing_else", needs_mounts());
    let lab = Lab::new();
    // More objects than are looked up one by one, so that there is a merged table.
    for i in 0..9 {
        let mut tiny = Source::new(lab.path(&format!("tiny{i}")));
        tiny.add("f", Random(100 + i).noise(5000));
        lab.take(&tiny, &format!("tiny{i}"));
    }
    let source = Source::small(&lab, "tree", 11);
    lab.take(&source, "a");
    lab.run(&["gc"]).ok();
    let merged = lab.root.join("chunks");
    assert!(merged.exists(), "no merged table");
    let own = find(&lab.root, "objects", ".chunks");
    let own = own.iter().max_by_key(|p| std::fs::metadata(p).unwrap().len()).unwrap();
    for table in [merged.as_path(), own] {
        let good = std::fs::read(table).unwrap();
        for (at, bit) in places(table, 10, 4) {
            flip(table, at, bit);
            let (serious, _) = lab.problems();
            assert_eq!(serious, 0, "byte {at}: no image needs it");
            lab.take(&source, "b");
            let point = lab.mount("b", "tree", "m");
            source.is_right(&point);
            lab.umount(&point);
            lab.stop();
            assert_eq!(lab.problems().0, 0, "byte {at}");
            lab.run(&["rm", "b"]).ok();
            lab.run(&["gc"]).ok();
            std::fs::write(table, &good).unwrap();
        }
    }
}

#[test]
fn priv_what_is_wrong_in_a_space_is_fetched_again() {
    skip_if!("priv_what_is_wrong_in_a_space_is_fetched_again", needs_mounts());
    let lab = Lab::new();
    let source = Source::small(&lab, "tree", 12);
    lab.take(&source, "a");
    let fill = || {
        let point = lab.mount("a", "erofs", "m");
        source.is_right(&point);
        lab.umount(&point);
        lab.stop();
        (the(&lab.root, "cache/spaces", "data"), the(&lab.root, "cache/spaces", "presence"))
    };
    let (data, presence) = fill();
    let len = std::fs::metadata(&data).unwrap().len();
    let bits = |path: &Path, count: u64, seed: u64| {
        for (at, bit) in places(path, count, seed) {
            flip(path, at, bit);
        }
    };
    let write = |path: &Path, at: u64, bytes: &[u8]| {
        File::options().write(true).open(path).unwrap().write_all_at(bytes, at).unwrap();
    };
    let resize = |path: &Path, len: u64| File::options().write(true).open(path).unwrap().set_len(len).unwrap();
    type Damage<'a> = (&'a str, Box<dyn Fn() + 'a>, bool);
    let damages: Vec<Damage<'_>> = vec![
        ("nothing", Box::new(|| {}), false),
        ("one bit in each frame", Box::new(|| bits(&data, 2 * len.div_ceil(1 << 20), 5)), true),
        ("one bit", Box::new(|| bits(&data, 1, 6)), true),
        (
            "nothing but a hole",
            Box::new(|| {
                resize(&data, 0);
                resize(&data, len)
            }),
            true,
        ),
        (
            "another frame's content",
            Box::new(|| {
                let bytes = std::fs::read(&data).unwrap();
                write(&data, 0, &bytes[1 << 20..2 << 20]);
            }),
            true,
        ),
        ("too short", Box::new(|| resize(&data, len / 2)), false),
        ("too long", Box::new(|| resize(&data, len + 4096)), false),
        ("no data", Box::new(|| std::fs::remove_file(&data).unwrap()), false),
        ("no presence", Box::new(|| std::fs::remove_file(&presence).unwrap()), false),
        ("half a presence", Box::new(|| resize(&presence, 4096)), false),
        ("no bytes of presence", Box::new(|| resize(&presence, 0)), false),
        ("bits of presence", Box::new(|| bits(&presence, 40, 7)), false),
    ];
    for (i, (what, damage, noticed)) in damages.iter().enumerate() {
        damage();
        let point = lab.mount("a", if i % 2 == 0 { "tree" } else { "erofs" }, "m");
        source.is_right(&point);
        assert_eq!(lab.counter("corrupt_on_disk") > 0, *noticed, "{what}");
        assert_eq!((lab.counter("failures"), lab.counter("corrupt_fetched")), (0, 0), "{what}");
        lab.umount(&point);
        lab.stop();
        // Whole again, and claimed again.
        fill();
    }
    for (at, bit) in places(&presence, 16, 8) {
        flip(&presence, at, bit);
        fill();
    }
}

#[test]
fn priv_a_space_cut_short_under_a_daemon_gives_errors_and_no_zeros() {
    skip_if!("priv_a_space_cut_short_under_a_daemon_gives_errors_and_no_zeros", needs_mounts());
    for shape in ["erofs", "tree"] {
        let lab = Lab::new();
        let source = Source::small(&lab, "tree", 13);
        lab.take(&source, "a");
        // Fills all of it, through another mount, so that the kernel has none of it for the one that counts.
        let other = lab.mount("a", if shape == "erofs" { "tree" } else { "erofs" }, "other");
        source.is_right(&other);
        let point = lab.mount("a", shape, "m");
        let data = the(&lab.root, "cache/spaces", "data");
        File::options().write(true).open(&data).unwrap().set_len(12345).unwrap();
        let reading = source.read(&point);
        assert!(!reading.failed.is_empty());
        assert!(reading.failed.iter().all(|(_, errno)| *errno == Errno::IO), "{:?}", reading.failed);
        lab.umount(&point);
        lab.umount(&other);
        lab.stop();
        let point = lab.mount("a", shape, "m");
        source.is_right(&point);
    }
}

#[test]
fn priv_a_store_whose_version_cannot_be_read_is_left_alone() {
    skip_if!("priv_a_store_whose_version_cannot_be_read_is_left_alone", needs_mounts());
    let lab = Lab::new();
    let source = Source::small(&lab, "tree", 14);
    lab.take(&source, "a");
    let version = lab.root.join("version");
    for at in 0..std::fs::metadata(&version).unwrap().len() {
        flip(&version, at, (at % 7) as u8);
        let before = crate::support::files_of(&lab.root);
        for args in [&["images"][..], &["gc"], &["fsck"], &["rm", "a"], &["mount", "a", &lab.point("m")]] {
            let done = lab.run(args);
            // The last byte is the end of the line.
            assert!([1, 6].contains(&done.code), "byte {at}: {args:?}: {done:?}");
        }
        assert_eq!(crate::support::files_of(&lab.root), before);
        flip(&version, at, (at % 7) as u8);
    }
    let point = lab.mount("a", "erofs", "m");
    source.is_right(&point);
}
