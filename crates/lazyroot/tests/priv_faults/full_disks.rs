//! Disks that fill up: a tmpfs and an ext4 on a loop device, 64 MiB each, that hold nothing but the root.

use crate::lab::{Lab, eventually, finish, needs_mounts};
use crate::support::{Random, Source, files_of, filled};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

const SIZE: u64 = 64 << 20;
const MIB: usize = 1 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Tmpfs,
    Ext4,
}

/// Makes the lab's root such a disk; or says why that cannot be.
fn small_disk(lab: &Lab, kind: Kind) -> Result<(), String> {
    std::fs::create_dir(&lab.root).unwrap();
    if kind == Kind::Tmpfs {
        let flags = sys::mount::MountFlags::empty();
        return sys::mount::mount_legacy(Path::new("none"), &lab.root, "tmpfs", flags, "size=64m,mode=700")
            .map_err(|e| format!("no tmpfs: {e}"));
    }
    let image = lab.path("disk");
    std::fs::File::create(&image).unwrap().set_len(SIZE).unwrap();
    run("mkfs.ext4", &["-q", "-m", "0", image.to_str().unwrap()])?;
    // mount(8) makes the loop device go with the mount.
    run("mount", &["-o", "loop", image.to_str().unwrap(), lab.root.to_str().unwrap()])?;
    let found = lab.root.join("lost+found");
    std::fs::remove_dir(&found).map_err(|e| format!("{}: {e}", found.display()))
}

fn run(program: &str, args: &[&str]) -> Result<(), String> {
    let done = Command::new(program).args(args).output().map_err(|e| format!("no {program}: {e}"))?;
    if done.status.success() {
        return Ok(());
    }
    Err(format!("{program} failed: {}", String::from_utf8_lossy(&done.stderr).trim()))
}

fn free(lab: &Lab) -> u64 {
    let stat = rustix::fs::statvfs(&lab.root).unwrap();
    stat.f_bavail * stat.f_frsize
}

/// Takes space until only `left` bytes of it are free, or until nothing more goes in.
fn ballast(lab: &Lab, name: &str, left: u64) -> PathBuf {
    let path = lab.root.join(name);
    let mut file = std::fs::File::create(&path).unwrap();
    for step in [256 << 10, 4096, 512] {
        let piece = vec![0xba; step];
        while free(lab) > left + step as u64 || (left == 0 && step == 512) {
            if file.write_all(&piece).and_then(|()| file.sync_data()).is_err() {
                break;
            }
        }
    }
    path
}

/// The name of an image's source of so many MiB that cannot be compressed.
fn noise(lab: &Lab, name: &str, mib: usize, seed: u64) -> Source {
    let mut source = Source::new(lab.path(name));
    let mut random = Random(seed);
    for i in 0..mib {
        source.add(&format!("d{}/f{i}", i % 5), random.noise(MIB - i));
    }
    source.add("text", random.text(MIB));
    source
}

fn an_import_that_does_not_fit(kind: Kind) -> Result<(), String> {
    let lab = Lab::new();
    small_disk(&lab, kind)?;
    lab.take(&noise(&lab, "fits", 8, 1), "fits");
    let (images, files) = (lab.images(), files_of(&lab.root));
    let large = noise(&lab, "large", 72, 2);
    let done = finish(lab.import_command(&large, "large"));
    done.fails(1, &["no space left", lab.root.to_str().unwrap(), "lazyroot gc"]);
    assert_eq!((lab.images(), files_of(&lab.root)), (images.clone(), files.clone()));
    // At every distance from the end: the pack, its map, the index and the ref are each what does not fit once.
    let source = noise(&lab, "medium", 12, 3);
    for kib in [11 << 10, 12 << 10, 12_600, 12_800, 12_864, 12_900, 12_930, 12_960, 13_000, 13_056, 13_100] {
        let ballast = ballast(&lab, "ballast", kib << 10);
        let done = finish(lab.import_command(&source, "medium"));
        std::fs::remove_file(ballast).unwrap();
        if done.code == 0 {
            assert_eq!(lab.problems(), (0, 0), "{kib} KiB free");
            lab.run(&["rm", "medium"]).ok();
        } else {
            done.fails(1, &["no space left"]);
            assert_eq!(lab.problems().0, 0, "{kib} KiB free");
        }
        lab.run(&["gc"]).ok();
        assert_eq!((lab.images(), files_of(&lab.root)), (images.clone(), files.clone()), "{kib} KiB free");
    }
    // A disk without a byte left: nothing new, but what takes space away works.
    let ballast = ballast(&lab, "ballast", 0);
    finish(lab.import_command(&source, "medium")).fails(1, &["no space left"]);
    let tagged = lab.run(&["tag", "fits", "other"]);
    if tagged.code != 0 {
        tagged.fails(1, &["no space left"]);
    }
    assert_eq!(lab.problems().0, 0);
    lab.run(&["rm", "fits"]).ok();
    let _ = lab.run(&["rm", "other"]);
    lab.run(&["gc"]).ok();
    assert!(lab.images().is_empty());
    std::fs::remove_file(ballast).unwrap();
    lab.take(&source, "medium");
    assert_eq!(lab.problems(), (0, 0));
    Ok(())
}

fn an_image_whose_spaces_do_not_fit(kind: Kind) -> Result<(), String> {
    let lab = Lab::new();
    small_disk(&lab, kind)?;
    let source = noise(&lab, "tree", 20, 4);
    lab.take(&source, "a");
    let first = ballast(&lab, "ballast", 6 << 20);
    for shape in ["erofs", "tree"] {
        let point = lab.mount("a", shape, shape);
        source.is_right_for(&point, 8);
        let stats = |name| lab.counter(name);
        assert!(stats("disk_refused") > 0, "{shape}: the disk was never full");
        assert_eq!((stats("failures"), stats("timeouts")), (0, 0), "{shape}");
        assert!(stats("overlay_bytes") <= 64 << 20, "{shape}");
    }
    // Without a byte left, from the start: a daemon that has just come up, and an image that it has never seen.
    lab.run(&["daemon", "stop", "--force"]).ok();
    let second = ballast(&lab, "more", 0);
    let point = lab.mount("a", "tree", "tree");
    source.is_right(&point);
    lab.umount(&point);
    let point = lab.mount("a", "erofs", "erofs");
    source.is_right(&point);
    // And back.
    std::fs::remove_file(first).unwrap();
    std::fs::remove_file(second).unwrap();
    eventually("what was kept in memory is on disk", || lab.counter("overlay_bytes") == 0);
    lab.umount(&point);
    lab.stop();
    let point = lab.mount("a", "erofs", "erofs");
    source.is_right(&point);
    assert!(filled(&lab.root) >= source.bytes(), "all of it is on disk now");
    assert_eq!((lab.counter("disk_refused"), lab.counter("corrupt_on_disk")), (0, 0));
    lab.umount(&point);
    lab.stop();
    // What it made durable is right, too.
    let point = lab.mount("a", "tree", "tree");
    source.is_right(&point);
    assert_eq!(lab.counter("corrupt_on_disk"), 0);
    assert_eq!(lab.problems(), (0, 0));
    Ok(())
}

/// An image in whose root there is not a byte left when it is mounted for the first time.
fn a_first_mount_on_a_full_disk(kind: Kind) -> Result<(), String> {
    let lab = Lab::new();
    small_disk(&lab, kind)?;
    let source = noise(&lab, "tree", 4, 5);
    lab.take(&source, "a");
    let ballast = ballast(&lab, "ballast", 0);
    let point = lab.point("m");
    let done = lab.run(&["mount", "a", &point]);
    if done.code == 0 {
        source.is_right(Path::new(&point));
    } else {
        // Where there is no room for the names of its space.
        done.fails(1, &["no space left", "cache"]);
    }
    std::fs::remove_file(ballast).unwrap();
    let other = lab.mount("a", "tree", "other");
    source.is_right(&other);
    Ok(())
}

/// The directory of sockets and leases is full; the root is not.
fn a_full_state_directory(kind: Kind) -> Result<(), String> {
    let mut lab = Lab::new();
    std::mem::swap(&mut lab.root, &mut lab.state);
    small_disk(&lab, kind)?;
    std::mem::swap(&mut lab.root, &mut lab.state);
    let source = noise(&lab, "tree", 2, 6);
    lab.take(&source, "a");
    let first = lab.mount("a", "erofs", "first");
    source.is_right(&first);
    std::mem::swap(&mut lab.root, &mut lab.state);
    let filler = ballast(&lab, "ballast", 0);
    std::mem::swap(&mut lab.root, &mut lab.state);
    let second = lab.point("second");
    let done = lab.run(&["mount", "a", &second, "--as", "tree"]);
    if done.code != 0 {
        // A mount that cannot be noted down is not given out.
        done.fails(1, &["leases", "o space left"]);
        assert!(!lab.mounted().contains(&PathBuf::from(&second)));
    }
    source.is_right(&first);
    lab.umount(&first);
    std::fs::remove_file(filler).unwrap();
    if !lab.mounted().contains(&PathBuf::from(&second)) {
        lab.run(&["mount", "a", &second, "--as", "tree"]).ok();
    }
    source.is_right(Path::new(&second));
    assert_eq!(lab.leases().len(), 1);
    Ok(())
}

/// Runs a test on such a disk.
fn on(kind: Kind, name: &str, test: fn(Kind) -> Result<(), String>) {
    let result = match needs_mounts() {
        Some(why) => Err(why),
        None => test(kind),
    };
    if let Err(why) = result {
        println!("SKIP {name}: {why}");
    }
}

macro_rules! tests {
    ($($kind:ident $name:ident $what:ident)*) => { $(
        #[test]
        fn $name() {
            on(Kind::$kind, stringify!($name), $what);
        }
    )* };
}

tests! {
    Tmpfs priv_an_import_too_large_for_a_tmpfs_leaves_the_store_as_it_was an_import_that_does_not_fit
    Ext4 priv_an_import_too_large_for_an_ext4_leaves_the_store_as_it_was an_import_that_does_not_fit
    Tmpfs priv_on_a_full_tmpfs_reads_go_on an_image_whose_spaces_do_not_fit
    Ext4 priv_on_a_full_ext4_reads_go_on an_image_whose_spaces_do_not_fit
    Tmpfs priv_a_first_mount_on_a_full_tmpfs a_first_mount_on_a_full_disk
    Ext4 priv_a_first_mount_on_a_full_ext4 a_first_mount_on_a_full_disk
    Tmpfs priv_a_state_directory_on_a_full_tmpfs a_full_state_directory
    Ext4 priv_a_state_directory_on_a_full_ext4 a_full_state_directory
}
