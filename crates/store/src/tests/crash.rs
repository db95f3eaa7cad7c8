//! Disks that fail and crashes that lose what was not synced: the store is as before or as after, never in between.

use super::*;
use crate::disk::faulty::Faulty;
use crate::disk::recording::Recording;
use std::collections::BTreeSet;

/// Opens a store that is not synced: nothing that happens to it after the crash matters.
fn reopen(root: &Path) -> Store {
    Store::open_on(root, Arc::new(Faulty::dead_after(u64::MAX))).unwrap()
}

/// Opens a store that a crash left, checks everything that it shows, and returns its names.
fn survivors(root: &Path) -> BTreeSet<String> {
    let store = reopen(root);
    let mut out = BTreeSet::new();
    for (name, record) in store.images().unwrap() {
        let record = record.unwrap();
        assert!(check_record(&store, &record) > 0);
        out.insert(format!("{name} {}", record.origin));
    }
    // What is left over can be collected, and then nothing is wrong or superfluous.
    store.gc(&GcOptions::default()).unwrap();
    let problems = store.fsck(&FsckOptions::default()).unwrap().problems;
    assert!(problems.is_empty(), "{problems:?}");
    for (name, record) in store.images().unwrap() {
        check_record(&store, &record.unwrap());
        assert!(out.iter().any(|o| o.starts_with(&name.to_string())));
    }
    out
}

fn set(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|n| (*n).to_owned()).collect()
}

/// Something done to a store, and the names that it has afterwards.
type Step<'a> = (&'a dyn Fn(&Store), BTreeSet<String>);

/// Runs `steps` on a recording disk, each followed by a mark, and checks every crash: after the marks of steps `0..n`
/// the store is as after step `n - 1` or as after step `n`.
fn every_crash(limit: usize, steps: &[Step<'_>]) {
    let top = tempfile::tempdir().unwrap();
    let disk = Arc::new(Recording::new(top.path()));
    let store = Store::open_on(&top.path().join("store"), disk.clone()).unwrap();
    disk.mark("made");
    for (step, _) in steps {
        step(&store);
        disk.mark("step");
    }
    drop(store);
    let n = disk.crashes(limit, 20_261_201, |dir, marks, what| {
        let root = dir.join("store");
        if marks.is_empty() {
            // The store itself may be half made; making it again completes it.
            assert_eq!(survivors(&root), set(&[]), "{what}");
            return;
        }
        let have = survivors(&root);
        let done = marks.len() - 1;
        let before = done.checked_sub(1).map_or(set(&[]), |i| steps[i].1.clone());
        let after = steps.get(done).map_or(before.clone(), |s| s.1.clone());
        assert!(have == before || have == after, "{what}: {have:?} after {done} steps");
    });
    println!("{n} states after {} operations", disk.len());
    assert!(n > steps.len() * 20, "{n} states");
}

#[test]
fn publishing_and_naming_survive_every_crash() {
    let a = [content(1, 9000), content(2, 65_000)];
    let b = [content(2, 65_000), content(3, 500)];
    every_crash(
        1200,
        &[
            (&|s| drop(import(s, "a", &a).unwrap()), set(&["a:latest test:a"])),
            (&|s| drop(import(s, "b", &b).unwrap()), set(&["a:latest test:a", "b:latest test:b"])),
            (
                &|s| s.tag(&name("b"), &name("c")).unwrap(),
                set(&["a:latest test:a", "b:latest test:b", "c:latest test:b"]),
            ),
            (
                &|s| s.tag(&name("b"), &name("a")).unwrap(),
                set(&["a:latest test:b", "b:latest test:b", "c:latest test:b"]),
            ),
            (&|s| s.remove(&name("b")).unwrap(), set(&["a:latest test:b", "c:latest test:b"])),
        ],
    );
}

#[test]
fn collecting_survives_every_crash() {
    let a = [content(1, 9000)];
    let b = [content(1, 9000), content(3, 500)];
    let both = set(&["a:latest test:a", "b:latest test:b"]);
    every_crash(
        900,
        &[
            (&|s| drop(import(s, "a", &a).unwrap()), set(&["a:latest test:a"])),
            (&|s| drop(import(s, "b", &b).unwrap()), both.clone()),
            (&|s| drop(s.gc(&GcOptions::default()).unwrap()), both),
            (&|s| s.remove(&name("a")).unwrap(), set(&["b:latest test:b"])),
            (&|s| drop(s.gc(&GcOptions::default()).unwrap()), set(&["b:latest test:b"])),
            (&|s| s.remove(&name("b")).unwrap(), set(&[])),
            (&|s| drop(s.gc(&GcOptions::default()).unwrap()), set(&[])),
            (&|s| drop(import(s, "b", &b).unwrap()), set(&["b:latest test:b"])),
        ],
    );
}

#[test]
fn merging_tables_survives_every_crash() {
    let top = tempfile::tempdir().unwrap();
    let root = top.path().join("store");
    let plain = Store::open(&root).unwrap();
    let chunks = |i: u64| [content(i, 200)];
    for i in 0..8 {
        import(&plain, &format!("i{i}"), &chunks(i)).unwrap();
    }
    let disk = Arc::new(Recording::new(top.path()));
    let store = Store::open_on(&root, disk.clone()).unwrap();
    for i in 8..10 {
        import(&store, &format!("i{i}"), &chunks(i)).unwrap();
        disk.mark("import");
    }
    disk.crashes(300, 3, |dir, marks, what| {
        let root = dir.join("store");
        let store = reopen(&root);
        // Whatever became of the tables, what they say is right.
        let session = store.import().unwrap();
        for i in 0..8 + marks.len() as u64 {
            let found = session.find_chunk(&Digest::of(&chunks(i)[0])).unwrap();
            let found = found.unwrap_or_else(|| panic!("{what}: chunk {i} is lost"));
            assert_eq!(store.object_map(&found.object).unwrap().chunk_at(found.block), Some(200));
        }
        drop(session);
        assert!(survivors(&root).len() >= 8 + marks.len(), "{what}");
    });
}

#[test]
fn a_disk_that_dies_anywhere_leaves_old_or_new() {
    let old = [content(1, 9000)];
    let new = [content(2, 9000), content(3, 65_000)];
    let (mut failures, mut operations) = (0, 0);
    loop {
        let top = tempfile::tempdir().unwrap();
        let root = top.path().join("store");
        import(&reopen(&root), "a", &old).unwrap();
        let broken = Store::open_on(&root, Arc::new(Faulty::dead_after(operations))).unwrap();
        let result = import(&broken, "a", &new).and_then(|_| {
            broken.tag(&name("a"), &name("b"))?;
            broken.remove(&name("a"))?;
            broken.gc(&GcOptions::default())
        });
        let have = survivors(&root);
        let a = "a:latest test:a";
        let allowed = [set(&[a]), set(&[a, "b:latest test:a"]), set(&["b:latest test:a"])];
        assert!(allowed.contains(&have), "after {operations} operations: {have:?}");
        match result {
            Ok(_) => break,
            Err(e) => {
                assert!(e.to_string().contains("Input/output error"), "{e}");
                failures += 1;
            }
        }
        operations += 1;
    }
    assert!(failures > 30, "{failures}");
}

#[test]
fn a_full_disk_says_so_and_leaves_the_old_image() {
    let old = [content(1, 9000)];
    let new: Vec<Vec<u8>> = (0..40).map(|i| content(100 + i, 65_536)).collect();
    // One that never fits, one that fails at the end, one for all in between.
    for bytes in [0, 1000, 100_000, 1_000_000, 1_900_000] {
        let top = tempfile::tempdir().unwrap();
        let root = top.path().join("store");
        import(&reopen(&root), "a", &old).unwrap();
        let full = Store::open_on(&root, Arc::new(Faulty::full_after(bytes))).unwrap();
        let error = import(&full, "a", &new).expect_err("2 MiB do not fit");
        assert!(matches!(error, StoreError::Full { .. }), "{error:?}");
        assert!(error.to_string().contains("no space left"), "{error}");
        assert!(list(&full.layout.tmp()).unwrap().is_empty(), "what was written is gone, so there is space again");
        assert_eq!(survivors(&root), set(&["a:latest test:a"]));
        assert!(import(&reopen(&root), "a", &new).is_ok());
    }
}

/// A small file system of its own, where mounting is possible; unmounted when dropped.
struct Tmpfs(tempfile::TempDir);

impl Tmpfs {
    fn mount(test: &str) -> Option<Tmpfs> {
        let dir = tempfile::tempdir().unwrap();
        if Tmpfs::run("mount", &["-t", "tmpfs", "-o", "size=8m", "tmpfs"], dir.path()) {
            return Some(Tmpfs(dir));
        }
        println!("SKIP {test}: cannot mount a tmpfs");
        None
    }

    fn run(command: &str, args: &[&str], dir: &Path) -> bool {
        std::process::Command::new(command).args(args).arg(dir).output().is_ok_and(|o| o.status.success())
    }

    fn root(&self) -> PathBuf {
        self.0.path().join("store")
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        Tmpfs::run("umount", &["-l"], self.0.path());
    }
}

#[test]
fn priv_a_full_file_system_says_so() {
    let Some(small) = Tmpfs::mount("priv_a_full_file_system_says_so") else { return };
    let store = Store::open(&small.root()).unwrap();
    import(&store, "a", &[content(1, 9000)]).unwrap();
    let noise = blake3::Hasher::new().finalize_xof().bytes(12 << 20);
    let new: Vec<Vec<u8>> = noise.chunks(65_536).map(<[u8]>::to_vec).collect();
    let error = import(&store, "a", &new).expect_err("12 MiB do not fit into 8");
    assert!(error.to_string().contains("no space left"), "{error}");
    assert_eq!(survivors(&small.root()), set(&["a:latest test:a"]));
    import(&store, "a", &new[..16]).unwrap();
}

#[test]
fn priv_a_read_only_file_system_is_read_and_says_so() {
    let Some(small) = Tmpfs::mount("priv_a_read_only_file_system_is_read_and_says_so") else { return };
    let store = Store::open(&small.root()).unwrap();
    import(&store, "a", &[content(1, 9000)]).unwrap();
    assert!(Tmpfs::run("mount", &["-o", "remount,ro"], small.0.path()));
    let store = Store::open(&small.root()).unwrap();
    check(&store, &name("a"));
    assert!(store.fsck(&FsckOptions::default()).unwrap().problems.is_empty());
    for error in [
        import(&store, "b", &[content(2, 100)]).unwrap_err(),
        store.tag(&name("a"), &name("b")).unwrap_err(),
        store.remove(&name("a")).unwrap_err(),
        store.gc(&GcOptions::default()).unwrap_err(),
        Store::open(&small.0.path().join("other")).unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::ReadOnly { .. }), "{error:?}");
        assert!(error.to_string().contains("read-only"), "{error}");
    }
}
