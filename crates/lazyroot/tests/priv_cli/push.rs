//! Metadata that is pushed: what the kernel then does not ask for.

use crate::lab::{Lab, eventually, needs_mounts, skip_if};
use serde_json::Value;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// A tree whose metadata takes some hundred blocks: directories of every size, long names, attributes, links.
fn wide(lab: &Lab) {
    let tree = lab.path("tree");
    for dir in 0..40 {
        let dir = tree.join(format!("directory-{dir}"));
        std::fs::create_dir_all(&dir).unwrap();
        for file in 0..60 {
            let file = dir.join(format!("a-name-that-takes-some-room-in-its-block-{file}"));
            std::fs::write(&file, b"x").unwrap();
            std::os::unix::fs::symlink("elsewhere", file.with_extension("link")).unwrap();
        }
    }
    lab.import(&tree, "wide");
}

fn stats(lab: &Lab) -> Value {
    lab.run(&["--json", "stats"]).ok().json().remove(0)
}

fn pushes(lab: &Lab) -> u64 {
    stats(lab)["block_files"]["metadata"]["pushes"].as_u64().unwrap()
}

fn is_pushed(lab: &Lab) -> bool {
    stats(lab)["images"][0]["session"]["metadata_pushed"] == true
}

/// Reads that the server has answered, and reads of metadata among them.
fn reads(lab: &Lab) -> (u64, u64) {
    let stats = stats(lab);
    (stats["block_files"]["reads"].as_u64().unwrap(), stats["images"][0]["session"]["metadata_reads"].as_u64().unwrap())
}

/// Looks at every name and inode; how many there are.
fn walk(dir: &Path) -> usize {
    let mut count = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        let meta = std::fs::symlink_metadata(entry.path()).unwrap();
        count += 1;
        if meta.is_dir() {
            count += walk(&entry.path());
        } else if meta.is_symlink() {
            assert_eq!(std::fs::read_link(entry.path()).unwrap(), Path::new("elsewhere"));
        }
    }
    count
}

/// Held while the kernel's caches are dropped, and while they must not be.
static CACHES: Mutex<()> = Mutex::new(());

const NAMES: usize = 40 * (1 + 60 * 2);

/// Lets the kernel forget names and inodes, and with them what it keeps of a mount but the pages of the image's file.
fn forget_names() {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
}

#[test]
fn priv_a_walk_reads_no_metadata_once_it_was_pushed() {
    skip_if!("priv_a_walk_reads_no_metadata_once_it_was_pushed", needs_mounts());
    let _caches = CACHES.lock().unwrap_or_else(PoisonError::into_inner);
    let lab = Lab::new();
    wide(&lab);
    let (a, b) = (lab.point("a"), lab.point("b"));
    lab.run(&["mount", "wide", &a, "--as", "erofs"]).ok();
    eventually("the push is done", || is_pushed(&lab));
    let pushed = stats(&lab);
    let session = &pushed["images"][0]["session"];
    let bytes = session["metadata_bytes"].as_u64().unwrap();
    assert!(bytes > 400 << 10, "{bytes}");
    let counted = &pushed["block_files"]["metadata"];
    assert!(counted["pushed_bytes"].as_u64().unwrap() >= bytes);
    let before = reads(&lab);
    assert_eq!(walk(Path::new(&a)), NAMES);
    // Another mount of it, and another walk.
    lab.run(&["mount", "wide", &b, "--as", "erofs"]).ok();
    forget_names();
    assert_eq!(walk(Path::new(&b)), NAMES);
    assert_eq!(reads(&lab), before, "reads, reads of metadata");
    lab.run(&["umount", &a, &b]).ok();
    lab.run(&["daemon", "stop"]).ok();
}

#[test]
fn priv_metadata_that_was_dropped_is_pushed_again() {
    skip_if!("priv_metadata_that_was_dropped_is_pushed_again", needs_mounts());
    let _caches = CACHES.lock().unwrap_or_else(PoisonError::into_inner);
    let lab = Lab::new();
    wide(&lab);
    let a = lab.point("a");
    lab.run(&["mount", "wide", &a, "--as", "erofs"]).ok();
    eventually("the push is done", || is_pushed(&lab));
    let before = pushes(&lab);
    // By dropping everything: the file itself is reachable for the daemon only.
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "3").unwrap();
    assert_eq!(walk(Path::new(&a)), NAMES);
    // Directories and the rest. Somebody else may drop caches too, so more often is as good.
    eventually("it is pushed again", || pushes(&lab) >= before + 2);
    lab.run(&["umount", &a]).ok();
}

#[test]
fn priv_nothing_is_pushed_when_that_is_switched_off() {
    skip_if!("priv_nothing_is_pushed_when_that_is_switched_off", needs_mounts());
    let lab = Lab::new();
    wide(&lab);
    lab.run(&["daemon", "start", "--push-metadata", "0"]).ok();
    let a = lab.point("a");
    lab.run(&["mount", "wide", &a, "--as", "erofs"]).ok();
    let before = reads(&lab);
    assert_eq!(walk(Path::new(&a)), NAMES);
    assert!(reads(&lab).1 > before.1 + 10, "metadata is read page by page");
    assert!(stats(&lab)["block_files"]["metadata"].is_null());
    lab.run(&["umount", &a]).ok();
}
