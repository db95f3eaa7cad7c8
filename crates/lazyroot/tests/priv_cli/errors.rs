//! Messages and exit codes.

use crate::lab::{Lab, finish, needs_mounts, skip_if};
use crate::nobody::Nobody;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

#[test]
fn messages_say_what_where_and_what_to_do() {
    let lab = Lab::new();
    let tree = lab.image("a");
    let source = format!("dir:{}", tree.display());
    let table: &[(&[&str], i32, &[&str])] = &[
        (&["fly"], 2, &["fly"]),
        (&["mount", "a"], 2, &["DIR"]),
        (&["import", &source, "Bad Name!"], 2, &["bad image name", "NAME[:TAG]"]),
        (&["import", "zip:/x", "b"], 2, &["zip:/x", "dir:PATH"]),
        (&["import", "dir:/no/such/place", "b"], 3, &["/no/such/place"]),
        (&["import", &source, "b", "--platform", "x"], 2, &["OS/ARCH"]),
        (&["inspect", "nothing"], 3, &["nothing:latest", "lazyroot images"]),
        (&["inspect", "a:missing"], 3, &["a:missing"]),
        (&["tag", "nothing", "b"], 3, &["nothing"]),
        (&["rm", "nothing"], 3, &["no image and no container named nothing", "ps -a"]),
        (&["cat", "a", "/no/such"], 3, &["/no/such"]),
        (&["cat", "a", "/dir"], 2, &["directory"]),
        (&["ls", "a", "/no"], 3, &["/no"]),
        (&["export", "a", "/dev/null", "--as", "erofs"], 4, &["exists already"]),
        (&["export", "a", "/no/such/dir/f", "--as", "tar"], 3, &["/no/such/dir/f"]),
        (&["rm", "--container", "nothing"], 3, &["nothing", "ps -a"]),
        (&["fsck", "nothing"], 3, &["nothing"]),
    ];
    for (args, code, words) in table {
        lab.run(args).fails(*code, words);
    }
    let done = lab.run(&["--json", "inspect", "nothing"]).fails(3, &[]);
    let error: serde_json::Value = serde_json::from_str(&done.err).unwrap();
    assert_eq!(error["code"], 3);
    // What cannot be understood, too, wherever the option stands; on one line, without the help.
    for args in [&["--json", "fly"][..], &["mount", "a", "--json"], &["--json"], &["images", "--json", "--no-such"]] {
        let done = lab.run(args);
        assert_eq!((done.code, done.out.as_str()), (2, ""), "{args:?}");
        let error: serde_json::Value = serde_json::from_str(&done.err).unwrap_or_else(|e| panic!("{e}: {}", done.err));
        assert_eq!(error["code"], 2);
        assert!(!error["error"].as_str().unwrap().contains("Usage:"), "{error}");
        assert_eq!(done.err.lines().count(), 1);
    }
    assert!(lab.run(&["run", "a", "x", "--", "--json"]).fails(2, &[]).err.contains("Usage:"), "the command's own");
}

#[test]
fn priv_what_a_user_may_not_read_is_an_error_or_left_out() {
    skip_if!("priv_what_a_user_may_not_read_is_an_error_or_left_out", Nobody::missing());
    let user = Nobody::new("666");
    let tree = user.path("tree");
    std::fs::write(tree.join("secret"), b"x").unwrap();
    std::fs::create_dir(tree.join("closed")).unwrap();
    for name in ["secret", "closed"] {
        std::fs::set_permissions(tree.join(name), std::os::unix::fs::PermissionsExt::from_mode(0o000)).unwrap();
    }
    let source = format!("dir:{}", tree.display());
    user.run(&["import", &source, "t"]).fails(6, &["closed", "--skip-unreadable", "--exclude"]);
    user.run(&["inspect", "t"]).fails(3, &[]);
    let done = user.run(&["import", &source, "t", "--skip-unreadable"]).ok();
    assert!(done.err.contains("2 files or directories may not be read"), "{}", done.err);
    assert_eq!(user.run(&["ls", "t"]).ok().out, "f\n");
    let report = user.run(&["--json", "import", &source, "t", "--skip-unreadable"]).ok().json().pop().unwrap();
    assert_eq!(report["report"]["unreadable"], 2);
    user.run(&["import", &source, "t", "--exclude", "closed", "--exclude", "secret"]).ok();
}

#[test]
fn priv_bad_mount_points_are_refused() {
    skip_if!("priv_bad_mount_points_are_refused", needs_mounts());
    let lab = Lab::new();
    let tree = lab.image("a");
    let point = lab.point("m");
    let link = lab.path("link");
    symlink(&point, &link).unwrap();
    let missing = lab.path("missing");
    let file = tree.join("small");
    let run = |path: &Path| lab.run(&["mount", "a", path.to_str().unwrap()]);
    run(&missing).fails(3, &["mkdir"]);
    run(&file).fails(2, &["not a directory"]);
    run(&link).fails(2, &["symbolic link"]);
    run(Path::new("/")).fails(2, &["/ cannot be"]);
    lab.run(&["mount", "nothing", &point]).fails(3, &["nothing"]);
    run(Path::new(&point)).ok();
    run(Path::new(&point)).fails(4, &["already", &point]);
    lab.run(&["umount", link.to_str().unwrap()]).fails(3, &["nothing is mounted"]);
    lab.run(&["umount", missing.to_str().unwrap()]).fails(3, &["nothing is mounted"]);
    lab.run(&["umount", "/proc"]).fails(2, &["not lazyroot's"]);
    lab.run(&["umount", &point]).ok();
    lab.run(&["umount", &point]).fails(3, &["nothing is mounted"]);
}

#[test]
fn priv_damaged_and_foreign_stores_are_refused() {
    skip_if!("priv_damaged_and_foreign_stores_are_refused", needs_mounts());
    let lab = Lab::new();
    lab.image("a");
    let point = lab.point("m");
    let index = lab.run(&["--json", "images"]).ok().json()[0]["index"].as_str().unwrap().to_owned();
    let file =
        find(&lab.root, &|p| p.file_name().is_some_and(|n| n.to_string_lossy().contains(&index[2..])) && p.is_file())
            .or_else(|| find(&lab.root.join("indexes"), &|p| p.is_file()))
            .expect("the index file");
    let good = std::fs::read(&file).unwrap();
    let mut bad = good.clone();
    let at = bad.len() / 2;
    bad[at] ^= 1;
    rewrite(&file, &bad);
    lab.run(&["mount", "a", &point]).fails(5, &["import"]);
    lab.run(&["fsck"]).fails(5, &["import"]);
    rewrite(&file, &good);
    lab.run(&["mount", "a", &point]).ok();
    lab.run(&["umount", &point]).ok();
    lab.run(&["daemon", "stop"]).ok();

    let other = lab.path("other");
    std::fs::create_dir(&other).unwrap();
    std::fs::write(other.join("somebody's"), b"").unwrap();
    let at = |root: &Path, args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lazyroot"));
        command.arg("--root").arg(root).arg("--state").arg(lab.path("state2")).args(args);
        finish(command)
    };
    at(&other, &["images"]).fails(1, &["not a LazyRoot store"]);
    let version = find(&lab.root, &|p| p.file_name().is_some_and(|n| n == "version")).expect("the version file");
    rewrite(&version, b"lazyroot store 99\n");
    lab.run(&["images"]).fails(6, &["version", "99"]);
    lab.run(&["mount", "a", &point]).fails(6, &["version"]);
}

#[test]
fn priv_a_read_only_root_is_said_to_be_one() {
    skip_if!("priv_a_read_only_root_is_said_to_be_one", needs_mounts());
    let lab = Lab::new();
    let tree = lab.image("a");
    let place = lab.point("ro");
    let flags = sys::mount::MountFlags::RDONLY;
    sys::mount::mount_legacy(Path::new("none"), Path::new(&place), "tmpfs", flags, "").unwrap();
    let run = |root: &str, args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lazyroot"));
        command.arg("--root").arg(root).arg("--state").arg(lab.path("state2")).args(args);
        finish(command)
    };
    run(&format!("{place}/r"), &["images"]).fails(1, &["ead-only"]);
    sys::mount::unmount(Path::new(&place), sys::mount::UnmountFlags::empty()).unwrap();
    // A store that has become read-only.
    sys::mount::bind(&lab.root, &lab.root, false).unwrap();
    let own = sys::mount::open_target(&lab.root).unwrap();
    let set = u64::from(sys::mount::MountAttrFlags::MOUNT_ATTR_RDONLY.bits());
    sys::mount::set_attrs(std::os::fd::AsFd::as_fd(&own), sys::mount::SetAttrs { set, ..Default::default() }).unwrap();
    drop(own);
    let source = format!("dir:{}", tree.display());
    lab.run(&["import", &source, "b"]).fails(1, &["read-only", "--root"]);
    lab.run(&["cat", "a", "/small"]).ok();
    sys::mount::unmount(&lab.root, sys::mount::UnmountFlags::empty()).unwrap();
}

fn find(dir: &Path, wanted: &dyn Fn(&Path) -> bool) -> Option<std::path::PathBuf> {
    for entry in std::fs::read_dir(dir).ok()?.flatten() {
        let path = entry.path();
        if wanted(&path) {
            return Some(path);
        }
        if path.is_dir()
            && let Some(found) = find(&path, wanted)
        {
            return Some(found);
        }
    }
    None
}

/// Puts other bytes into a file of the store, which may be write-protected.
fn rewrite(path: &Path, bytes: &[u8]) {
    let tmp = path.with_extension("rewritten");
    std::fs::write(&tmp, bytes).unwrap();
    std::fs::rename(&tmp, path).unwrap();
}
