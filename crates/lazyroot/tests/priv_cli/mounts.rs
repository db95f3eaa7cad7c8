//! `mount`, `umount`, `ps`.

use crate::lab::{Lab, needs_mounts, skip_if};
use crate::nobody::Nobody;
use lazyroot::hostsnap::snapshot;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::Command;

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
    lab.no_leases();
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
    lab.no_leases();
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
    lab.no_leases();
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
    let said = lab.run(&["umount", &point]).fails(4, &["in use", &pid, "sleep", "--lazy"]).err;
    // The daemon holds the mount as well, and ending it would help nobody.
    assert!(!said.contains(&format!("{} (", lab.daemon_pid())), "{said}");
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
    lab.no_leases();
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

#[test]
fn priv_an_ordinary_user_mounts_a_tree() {
    skip_if!("priv_an_ordinary_user_mounts_a_tree", Nobody::missing());
    let user = Nobody::new("666");
    let (place, tree) = (user.text("m"), user.text("tree"));
    user.run(&["import", &format!("dir:{tree}"), "t"]).ok();
    user.run(&["mount", "t", &place]).ok();
    let read = user.other("cat", &[&user.text("m/f")]);
    let leases = user.run(&["--json", "ps"]).ok().json();
    let erofs = user.run(&["mount", "t", &tree, "--as", "erofs"]);
    let rw = user.run(&["mount", "t", &tree, "--rw"]);
    let run = user.run(&["run", "t", "--", "/f"]);
    let elsewhere = user.run(&["mount", "t", "/usr"]);
    user.run(&["umount", &place]).ok();
    let after = user.run(&["--json", "ps"]).ok().json();
    user.run(&["daemon", "stop"]).ok();
    assert_eq!(read.ok().out, "content");
    assert_eq!(leases.len(), 1);
    assert_eq!(leases[0]["use"], "user");
    erofs.fails(6, &["needs root", "--as tree"]);
    rw.fails(6, &["needs root"]);
    run.fails(125, &["needs root"]);
    let said = elsewhere.fails(6, &["fusermount3", "/usr"]).err;
    assert_eq!(said.matches("fusermount3").count(), 1, "{said}");
    assert!(after.is_empty());
}

#[test]
fn priv_a_user_who_may_not_open_the_device_is_told_what_to_do() {
    skip_if!("priv_a_user_who_may_not_open_the_device_is_told_what_to_do", Nobody::missing());
    let user = Nobody::new("600");
    user.run(&["import", &format!("dir:{}", user.text("tree")), "t"]).ok();
    for args in [&["mount", "t", &user.text("m")][..], &["mount", "t", &user.text("m"), "--as", "tree"]] {
        user.run(args).fails(6, &["/dev/fuse may not be opened by you", "mode 0600", "chmod 666", "run as root"]);
    }
    let found = user.run(&["--json", "doctor"]).json();
    let fuse = found.iter().find(|f| f["what"] == "FUSE").unwrap();
    assert_eq!(fuse["verdict"], "missing");
    let follows = fuse["follows"].as_str().unwrap();
    assert!(follows.contains("chmod 666") && !follows.contains("modprobe"), "{follows}");
}

#[test]
fn priv_upper_directories_are_listed_and_removed() {
    skip_if!("priv_upper_directories_are_listed_and_removed", needs_mounts());
    let lab = Lab::new();
    lab.image("a");
    let (point, other) = (lab.point("rw"), lab.point("other"));
    assert!(lab.run(&["ps", "--uppers"]).ok().err.contains("nothing is kept"));
    // What cannot be leaves nothing: no upper directory, no lease, no daemon even.
    lab.run(&["mount", "a", &point, "--rw", "--upper", "none"]).fails(3, &["no upper directory", "ps --uppers"]);
    assert!(!lab.daemon_lives(), "asked before it was checked");
    lab.run(&["mount", "a", "/proc", "--rw"]).fails(4, &[]);
    assert!(lab.run(&["--json", "ps", "--uppers"]).ok().json().is_empty());

    lab.run(&["mount", "a", &point, "--rw"]).ok();
    std::fs::write(Path::new(&point).join("new"), vec![1u8; 300_000]).unwrap();
    let listed = lab.run(&["--json", "ps", "--uppers"]).ok().json();
    assert_eq!(listed.len(), 1);
    let id = listed[0]["id"].as_str().unwrap();
    assert_eq!((listed[0]["image"].as_str(), listed[0]["mounted"].as_str()), (Some("a:latest"), Some(point.as_str())));
    assert_eq!(listed[0]["names"], 1);
    assert!((300_000..400_000).contains(&listed[0]["bytes"].as_u64().unwrap()), "{listed:?}");
    let upper = Path::new(listed[0]["path"].as_str().unwrap());
    assert!(upper.join("new").exists());
    for text in [id, "a:latest", &point] {
        assert!(lab.run(&["ps", "--uppers"]).ok().out.contains(text), "{text}");
    }
    // In use it is neither removed nor used twice.
    lab.run(&["rm", "--upper", id]).fails(4, &["is mounted at", &point]);
    lab.run(&["mount", "a", &other, "--rw", "--upper", id]).fails(4, &["is mounted at", &point]);
    assert_eq!(lab.leases().len(), 1);
    lab.run(&["umount", &point]).ok();
    assert_eq!(lab.run(&["--json", "ps", "--uppers"]).ok().json()[0]["mounted"], serde_json::Value::Null);
    for bad in ["../root", ".", "none"] {
        assert!([2, 3].contains(&lab.run(&["rm", "--upper", bad]).code), "{bad}");
    }
    // A name alone is an image or a container, never what somebody wrote.
    lab.run(&["rm", id]).fails(3, &[]);
    assert!(upper.exists());
    lab.run(&["rm", "--upper", id]).ok();
    assert!(!upper.exists());
    assert!(std::fs::read_dir(lab.root.join("upper")).unwrap().next().is_none());
    lab.run(&["rm", "--upper", id]).fails(3, &["no upper directory"]);
}
