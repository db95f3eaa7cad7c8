//! `mount`, `umount`, `ps`.

use crate::lab::{Lab, finish, needs_mounts, skip_if};
use lazyroot::hostsnap::snapshot;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

fn same(a: &Path, b: &Path) {
    let differences = snapshot(a, true).unwrap().diff(&snapshot(b, true).unwrap());
    assert!(differences.is_empty(), "{differences:#?}");
}

#[test]
fn priv_an_image_looks_like_its_source_in_every_shape_and_is_mounted_once() {
    skip_if!("priv_an_image_looks_like_its_source_in_every_shape_and_is_mounted_once", needs_mounts());
    let lab = Lab::new();
    let tree = lab.image("a");
    let (erofs, fuse, again) = (lab.point("erofs"), lab.point("fuse"), lab.point("again"));
    let first = lab.run(&["--json", "mount", "a", &erofs, "--as", "erofs"]).ok().json().remove(0);
    assert_eq!((first["shape"].as_str(), first["shared"].as_bool()), (Some("erofs"), Some(false)));
    lab.run(&["mount", "a", &fuse, "--as", "tree"]).ok();
    let second = lab.run(&["--json", "mount", "a:latest", &again]).ok().json().remove(0);
    assert_eq!((second["shape"].as_str(), second["shared"].as_bool()), (Some("erofs"), Some(true)));
    assert!(second["why"].as_str().unwrap().contains("fastest"));
    for point in [&erofs, &fuse, &again] {
        same(&tree, Path::new(point));
    }
    let dev = |p: &str| std::fs::metadata(p).unwrap().dev();
    assert_eq!(dev(&erofs), dev(&again), "one superblock");
    assert_ne!(dev(&erofs), dev(&fuse));
    let options = |p: &str| {
        let all = sys::mountinfo::of_self().unwrap();
        all.into_iter().find(|e| e.mount_point == Path::new(p)).unwrap().options
    };
    for point in [&erofs, &fuse] {
        for option in ["ro", "nosuid", "nodev"] {
            assert!(options(point).split(',').any(|o| o == option), "{point}: {}", options(point));
        }
    }
    assert_eq!(lab.leases().len(), 3);
    let error = std::fs::write(Path::new(&erofs).join("new"), b"").unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    let stats = lab.run(&["--json", "stats"]).ok().json().remove(0);
    assert_eq!(stats["images"].as_array().unwrap().len(), 2);
    assert!(stats["images"][0]["resident_bytes"].as_u64().unwrap() > 6 << 20);

    lab.run(&["umount", &erofs, &fuse]).ok();
    assert_eq!(lab.leases().len(), 1);
    same(&tree, Path::new(&again));
    lab.run(&["umount", &again]).ok();
    assert!(lab.leases().is_empty());
    assert!(lab.mounted().is_empty());
    lab.run(&["daemon", "stop"]).ok();
    assert!(!lab.daemon_lives());
}

#[test]
fn priv_suid_and_devices_are_honoured_only_when_asked_for() {
    skip_if!("priv_suid_and_devices_are_honoured_only_when_asked_for", needs_mounts());
    let lab = Lab::new();
    lab.image("a");
    let (strict, open) = (lab.point("strict"), lab.point("open"));
    lab.run(&["mount", "a", &strict]).ok();
    lab.run(&["mount", "a", &open, "--suid", "--dev"]).ok();
    let options = |p: &str| {
        sys::mountinfo::of_self().unwrap().into_iter().find(|e| e.mount_point == Path::new(p)).unwrap().options
    };
    assert!(options(&strict).contains("nosuid") && options(&strict).contains("nodev"));
    assert!(!options(&open).contains("nosuid") && !options(&open).contains("nodev") && options(&open).contains("ro"));
}

#[test]
fn priv_a_writable_mount_keeps_its_changes() {
    skip_if!("priv_a_writable_mount_keeps_its_changes", needs_mounts());
    let lab = Lab::new();
    let tree = lab.image("a");
    let point = lab.point("rw");
    let mounted = lab.run(&["--json", "mount", "a", &point, "--rw"]).ok().json().remove(0);
    let upper = mounted["upper"].as_str().unwrap().to_owned();
    let (mut want, mut have) = (snapshot(&tree, true).unwrap(), snapshot(Path::new(&point), true).unwrap());
    // An overlay does not count a directory's links.
    for record in want.records.values_mut().chain(have.records.values_mut()) {
        record.nlink = 0;
    }
    assert_eq!(want.diff(&have), Vec::<String>::new());
    std::fs::write(Path::new(&point).join("dir/new"), b"new").unwrap();
    std::fs::remove_file(Path::new(&point).join("empty")).unwrap();
    assert_eq!(std::fs::read(Path::new(&upper).join("dir/new")).unwrap(), b"new");
    let lease = lab.leases().remove(0);
    assert_eq!((lease["use"].as_str(), lease["upper"].as_str()), (Some("rw"), Some(upper.as_str())));
    let done = lab.run(&["--json", "umount", &point]).ok().json().remove(0);
    assert_eq!(done["upper"].as_str(), Some(upper.as_str()));
    let id = done["upper_id"].as_str().unwrap();
    assert!(lab.leases().is_empty());
    assert!(Path::new(&upper).join("dir/new").exists());

    lab.run(&["mount", "a", &point, "--rw", "--upper", id]).ok();
    assert_eq!(std::fs::read(Path::new(&point).join("dir/new")).unwrap(), b"new");
    assert!(!Path::new(&point).join("empty").exists());
    lab.run(&["umount", &point]).ok();
    let other = lab.path("other");
    std::fs::create_dir(&other).unwrap();
    lab.import(&other, "b");
    lab.run(&["mount", "b", &point, "--rw", "--upper", id]).fails(2, &["another image"]);
    lab.run(&["mount", "a", &point, "--rw", "--upper", "../x"]).fails(2, &["identifier"]);
    lab.run(&["mount", "a", &point, "--rw", "--upper", "none"]).fails(3, &["no upper directory"]);
}

#[test]
fn priv_umount_by_hand_is_noticed() {
    skip_if!("priv_umount_by_hand_is_noticed", needs_mounts());
    let lab = Lab::new();
    lab.image("a");
    let (one, two) = (lab.point("one"), lab.point("two"));
    lab.run(&["mount", "a", &one]).ok();
    lab.run(&["mount", "a", &two]).ok();
    sys::mount::unmount(Path::new(&one), sys::mount::UnmountFlags::empty()).unwrap();
    let leases = lab.leases();
    assert_eq!(leases.len(), 1);
    assert_eq!(leases[0]["target"].as_str(), Some(two.as_str()));
    // A mount that is moved is still somebody's.
    let elsewhere = lab.point("elsewhere");
    sys::mount::bind(Path::new(&two), Path::new(&elsewhere), false).unwrap();
    sys::mount::unmount(Path::new(&two), sys::mount::UnmountFlags::empty()).unwrap();
    let leases = lab.leases();
    assert_eq!(leases.len(), 1);
    assert_eq!(leases[0]["target"].as_str(), Some(elsewhere.as_str()));
    lab.run(&["umount", &elsewhere]).ok();
    assert!(lab.leases().is_empty());
}

#[test]
fn priv_a_mount_in_use_is_not_taken_away_and_its_user_is_named() {
    skip_if!("priv_a_mount_in_use_is_not_taken_away_and_its_user_is_named", needs_mounts());
    let lab = Lab::new();
    lab.image("a");
    let point = lab.point("m");
    lab.run(&["mount", "a", &point]).ok();
    let mut user = Command::new("sleep").arg("1000").current_dir(Path::new(&point).join("dir")).spawn().unwrap();
    let pid = user.id().to_string();
    lab.run(&["umount", &point]).fails(4, &["in use", &pid, "sleep", "--lazy"]);
    lab.run(&["umount", &point, "--lazy"]).ok();
    assert!(lab.mounted().is_empty());
    user.kill().unwrap();
    user.wait().unwrap();
}

#[test]
fn priv_many_at_once_get_one_superblock() {
    skip_if!("priv_many_at_once_get_one_superblock", needs_mounts());
    let lab = Lab::new();
    lab.image("a");
    let points: Vec<String> = (0..8).map(|i| lab.point(&format!("m{i}"))).collect();
    std::thread::scope(|s| {
        for point in &points {
            let lab = &lab;
            s.spawn(move || lab.run(&["mount", "a", point]).ok());
        }
    });
    let devices: std::collections::HashSet<u64> = points.iter().map(|p| std::fs::metadata(p).unwrap().dev()).collect();
    assert_eq!(devices.len(), 1);
    assert_eq!(lab.leases().len(), 8);
    let status = lab.run(&["--json", "daemon", "status"]).ok().json().remove(0);
    assert_eq!(status["superblocks"].as_u64(), Some(1));
    let mut args = vec!["umount".to_owned()];
    args.extend(points);
    lab.run(&args).ok();
    assert!(lab.leases().is_empty());
}

#[test]
fn priv_directories_of_a_writable_mount_keep_their_inode_numbers() {
    skip_if!("priv_directories_of_a_writable_mount_keep_their_inode_numbers", needs_mounts());
    let lab = Lab::new();
    let tree = lab.path("tree");
    let names: Vec<String> = (0..20).map(|i| format!("d{i}")).collect();
    names.iter().for_each(|name| std::fs::create_dir_all(tree.join(name)).unwrap());
    lab.run(&["import", &format!("dir:{}", tree.display()), "dirs"]).ok();
    let point = lab.point("rw");
    lab.run(&["mount", "dirs", &point, "--rw"]).ok();
    let numbers = || -> Vec<u64> {
        names.iter().map(|name| std::fs::symlink_metadata(Path::new(&point).join(name)).unwrap().ino()).collect()
    };
    let before = numbers();
    // Makes the kernel forget the directories.
    std::fs::write("/proc/sys/vm/drop_caches", "2").unwrap();
    let after = numbers();
    lab.run(&["umount", &point]).ok();
    assert_eq!(before, after);
}

/// A process that holds a mount namespace.
struct Namespace(Child);

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn priv_an_ordinary_user_mounts_a_tree() {
    let missing =
        ["fusermount3", "setpriv", "nsenter", "unshare"].iter().find(|n| lazyroot::run::runtime::in_path(n).is_none());
    skip_if!(
        "priv_an_ordinary_user_mounts_a_tree",
        needs_mounts().or(missing.map(|n| format!("{n} is not installed")))
    );
    let lab = Lab::new();
    let tree = lab.path("tree");
    std::fs::create_dir(&tree).unwrap();
    std::fs::write(tree.join("f"), b"content").unwrap();
    // A copy that the user can reach and run, in a directory of the user's own.
    let home = tempfile::Builder::new().prefix("lazyroot-user-").tempdir_in("/var/tmp").unwrap();
    let program = home.path().join("lazyroot");
    std::fs::copy(env!("CARGO_BIN_EXE_lazyroot"), &program).unwrap();
    for dir in ["m", "tree"] {
        std::fs::create_dir(home.path().join(dir)).unwrap();
    }
    std::fs::write(home.path().join("tree/f"), b"content").unwrap();
    let chown = Command::new("chown").args(["-R", "65534:65534"]).arg(home.path()).status().unwrap();
    assert!(chown.success());
    // Where users may not open /dev/fuse, a mount namespace of the test's own has one that they may.
    let device = home.path().join("fuse");
    let script = "mknod -m 666 \"$0\" c 10 229 && mount --bind \"$0\" /dev/fuse && echo ready && exec sleep 600";
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "slave", "sh", "-c", script]).arg(&device).stdout(Stdio::piped());
    let mut namespace = Namespace(command.spawn().unwrap());
    let mut ready = String::new();
    BufReader::new(namespace.0.stdout.take().unwrap()).read_line(&mut ready).unwrap();
    assert_eq!(ready, "ready\n");
    let user = |program: &Path| {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--target", &namespace.0.id().to_string(), "--", "setpriv"]);
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(program);
        command
    };
    let as_user = |args: &[&str]| {
        let mut command = user(&program);
        for (option, dir) in [("--root", "root"), ("--state", "state")] {
            command.arg(option).arg(home.path().join(dir));
        }
        // Absolute, for entering a namespace changes the directory.
        command.args(args).env("HOME", home.path());
        finish(command)
    };
    let at = |name: &str| home.path().join(name).to_str().unwrap().to_owned();
    let (place, tree_place) = (at("m"), at("tree"));
    as_user(&["import", &format!("dir:{tree_place}"), "t"]).ok();
    as_user(&["mount", "t", &place]).ok();
    let read = finish({
        let mut command = user(Path::new("cat"));
        command.arg(home.path().join("m/f"));
        command
    });
    let leases = as_user(&["--json", "ps"]).ok().json();
    let erofs = as_user(&["mount", "t", &tree_place, "--as", "erofs"]);
    let rw = as_user(&["mount", "t", &tree_place, "--rw"]);
    let run = as_user(&["run", "t", "--", "/f"]);
    as_user(&["umount", &place]).ok();
    let after = as_user(&["--json", "ps"]).ok().json();
    as_user(&["daemon", "stop"]).ok();
    assert_eq!(read.ok().out, "content");
    assert_eq!(leases.len(), 1);
    assert_eq!(leases[0]["use"], "user");
    erofs.fails(6, &["needs root", "--as tree"]);
    rw.fails(6, &["needs root"]);
    run.fails(125, &["needs root"]);
    assert!(after.is_empty());
}
