//! Roots that cannot be written, and packs that are not there.

use crate::lab::{Lab, needs_mounts, skip_if};
use crate::support::{Random, Source, files_of, has_claims, kill, the};
use rustix::io::Errno;
use std::os::fd::AsFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

/// Makes what is mounted at, or bound to, a directory read-only.
fn make_read_only(path: &Path) {
    sys::mount::bind(path, path, false).unwrap();
    let own = sys::mount::open_target(path).unwrap();
    let set = u64::from(sys::mount::MountAttrFlags::MOUNT_ATTR_RDONLY.bits());
    sys::mount::set_attrs(own.as_fd(), sys::mount::SetAttrs { set, ..Default::default() }).unwrap();
}

#[test]
fn priv_on_a_read_only_root_what_only_reads_works_and_the_rest_says_why_not() {
    skip_if!("priv_on_a_read_only_root_what_only_reads_works_and_the_rest_says_why_not", needs_mounts());
    let lab = Lab::new();
    let mut source = Source::small(&lab, "tree", 20);
    source.add("bin/true", b"#!/bin/sh\n".to_vec());
    std::fs::set_permissions(source.dir.join("bin/true"), PermissionsExt::from_mode(0o755)).unwrap();
    lab.take(&source, "a");
    let before = files_of(&lab.root);
    make_read_only(&lab.root);
    let path = |name: &str| lab.path(name).to_str().unwrap().to_owned();
    let (tar, erofs, dir) = (path("a.tar"), path("a.erofs"), source.dir.to_str().unwrap());
    for args in [
        &["images"][..],
        &["inspect", "a"],
        &["ls", "a", "/dir0"],
        &["find", "a", "/"],
        &["cat", "a", "/dir0/f0"],
        &["diff", "a", dir],
        &["export", "a", "--as", "tar", &tar],
        &["export", "a", "--as", "erofs", &erofs],
        &["fsck"],
        &["ps"],
        &["ps", "-a"],
        &["doctor"],
        &["daemon", "status"],
    ] {
        let done = lab.run(args);
        // Without a daemon there is none to show.
        let expected = if args[0] == "daemon" { done.code } else { 0 };
        assert_eq!(done.code, expected, "{args:?}: {done:?}");
        assert!(!done.err.contains("ead-only"), "{args:?}: {done:?}");
    }
    let cat = lab.run(&["cat", "a", "/dir0/f0"]).ok();
    assert_eq!(cat.out.as_bytes(), source.files["dir0/f0"]);
    let point = lab.point("m");
    for args in [
        &["import", &format!("dir:{dir}"), "b"][..],
        &["tag", "a", "b"],
        &["rm", "a"],
        &["gc"],
        &["mount", "a", &point],
        &["mount", "a", &point, "--rw"],
        &["run", "a", "--", "/bin/true"],
        &["daemon", "start"],
    ] {
        let done = lab.run(args);
        assert!(done.code != 0, "{args:?}: {done:?}");
        for word in ["ead-only", lab.root.to_str().unwrap()] {
            assert!(done.err.contains(word), "{args:?}: no {word:?} in {}", done.err);
        }
    }
    assert!(lab.mounted().iter().all(|p| *p == lab.root));
    sys::mount::unmount(&lab.root, sys::mount::UnmountFlags::empty()).unwrap();
    assert_eq!(files_of(&lab.root), before);
    lab.run(&["mount", "a", &point]).ok();
    source.is_right(Path::new(&point));
}

#[test]
fn priv_without_its_pack_what_is_cached_is_read_and_the_rest_fails_at_once() {
    skip_if!("priv_without_its_pack_what_is_cached_is_read_and_the_rest_fails_at_once", needs_mounts());
    for (shape, killed) in [("erofs", false), ("tree", true)] {
        let lab = Lab::new();
        let mut cached = Source::new(lab.path("tree"));
        let mut random = Random(21);
        for i in 0..4 {
            cached.add(&format!("cached{i}"), random.noise((1 << 20) + 1000 * i));
        }
        let mut missing = Source::new(cached.dir.clone());
        for i in 0..4 {
            missing.add(&format!("far/missing{i}"), random.noise(3 << 20));
        }
        lab.take(&cached, "a");
        let point = lab.mount("a", shape, "m");
        cached.is_right(&point);
        if killed {
            crate::lab::eventually("claims", || has_claims(&lab.root) && lab.counter("syncs") > 0);
            kill(lab.daemon_pid());
            lab.run(&["ps"]).ok();
        } else {
            lab.umount(&point);
            lab.stop();
        }
        let pack = the(&lab.root, "objects", ".pack");
        let away = lab.path("away");
        std::fs::rename(&pack, &away).unwrap();

        let point = lab.mount("a", shape, "m");
        let began = Instant::now();
        let reading = missing.read(&point);
        assert!(began.elapsed() < Duration::from_secs(15), "{shape}: it hung for {:?}", began.elapsed());
        assert!(reading.failed.len() >= 3, "{shape}: {reading:?}");
        assert!(reading.failed.iter().all(|(_, errno)| *errno == Errno::IO), "{shape}: {:?}", reading.failed);
        // Killed, only what had become durable by then is there.
        let reading = cached.read(&point);
        assert!(reading.right >= if killed { 1 } else { 4 }, "{shape}: {reading:?}");
        assert!(lab.counter("frames_verified") > 0);
        lab.run(&["cat", "a", "/far/missing0"]).fails(3, &["a"]);
        let words = lab.run(&["fsck"]).fails(5, &["import"]).out;
        assert!(words.contains(pack.to_str().unwrap()), "{words}");

        std::fs::rename(&away, &pack).unwrap();
        missing.is_right(&point);
        cached.is_right(&point);
        lab.umount(&point);
    }
}

#[test]
fn priv_without_its_index_or_its_map_an_image_is_refused_and_named() {
    skip_if!("priv_without_its_index_or_its_map_an_image_is_refused_and_named", needs_mounts());
    let lab = Lab::new();
    let source = Source::small(&lab, "tree", 22);
    lab.take(&source, "a");
    let point = lab.point("m");
    for file in [the(&lab.root, "indexes", ""), the(&lab.root, "objects", ".map")] {
        let away = lab.path("away");
        std::fs::rename(&file, &away).unwrap();
        for args in [&["mount", "a", &point][..], &["cat", "a", "/text"]] {
            lab.run(args).fails(5, &["import", file.to_str().unwrap()]);
        }
        assert!(lab.problems().0 > 0);
        std::fs::rename(&away, &file).unwrap();
    }
    lab.run(&["mount", "a", &point]).ok();
    source.is_right(Path::new(&point));
}
