//! The daemon, or the command that mounts, is killed in the middle of a mount.

use crate::lab::{Lab, collect, eventually, needs_mounts, skip_if};
use crate::support::{Random, Source, flip, kill, rounds};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const SHAPES: [&[&str]; 4] = [&["--as", "erofs"], &["--as", "tree"], &["--rw"], &["--rw", "--as", "tree"]];

fn start_mount(lab: &Lab, point: &Path, how: &[&str]) -> Child {
    let mut args = vec!["mount", "a", point.to_str().unwrap()];
    args.extend(how);
    lab.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

/// How long a mount takes that nobody disturbs, by a daemon that runs already.
fn undisturbed(lab: &Lab, point: &Path, how: &[&str]) -> Duration {
    let began = Instant::now();
    let child = start_mount(lab, point, how);
    collect(child).ok();
    let took = began.elapsed();
    lab.umount(point);
    took
}

/// Keeps this thread busy: a moment in a mount is shorter than what a sleep may be off by.
fn spin(until: Instant, mut or: impl FnMut() -> bool) {
    while Instant::now() < until && !or() {
        std::hint::spin_loop();
    }
}

fn is_mounted(lab: &Lab, point: &Path) -> bool {
    lab.mounted().iter().any(|p| p == point)
}

/// When to strike: a part of a mount's time, or when it has just become visible.
fn strike_at(lab: &Lab, point: &Path, (round, count): (u32, u32), took: Duration) {
    let now = Instant::now();
    if round % 8 == 7 {
        spin(now + 20 * took, || is_mounted(lab, point));
    } else {
        spin(now + took * (2 * round + 1) / (2 * count - 3), || false);
    }
}

#[test]
fn priv_a_daemon_killed_in_the_middle_of_a_mount_is_cleaned_up_after() {
    skip_if!("priv_a_daemon_killed_in_the_middle_of_a_mount_is_cleaned_up_after", needs_mounts());
    let lab = Lab::new();
    let source = Source::small(&lab, "tree", 4);
    lab.take(&source, "a");
    let point = PathBuf::from(lab.point("m"));
    let count = rounds(8) as u32;
    for round in 0..count {
        for how in SHAPES {
            lab.run(&["daemon", "start"]).ok();
            let pid = lab.daemon_pid();
            let took = undisturbed(&lab, &point, how);
            lab.stop();
            lab.run(&["daemon", "start"]).ok();
            let pid = if lab.daemon_pid() == pid { panic!("the same daemon") } else { lab.daemon_pid() };
            let child = start_mount(&lab, &point, how);
            strike_at(&lab, &point, (round, count), took);
            kill(pid);
            let done = collect(child);
            // It may have been done, have started another daemon, or fail with a message.
            assert!(done.code == 0 || !done.err.is_empty(), "round {round} {how:?}: {done:?}");
            let told = lab.run(&["ps"]).ok().err;
            if done.code != 0 || !lab.daemon_lives() {
                assert!(!is_mounted(&lab, &point), "round {round} {how:?}: stale, after {done:?} and {told}");
            }
            let all = format!("{}{told}", done.err);
            assert!(all.contains(&format!("process {pid}")), "round {round} {how:?}: {done:?}, {told}");
            if is_mounted(&lab, &point) {
                source.is_right(&point);
                lab.umount(&point);
            }
            let again = lab.mount("a", "erofs", "again");
            source.is_right(&again);
            lab.umount(&again);
            lab.stop();
            assert!(lab.mounted().is_empty(), "round {round} {how:?}: {:?}", lab.mounted());
        }
    }
}

#[test]
fn priv_a_mount_command_that_is_killed_leaves_a_mount_or_none() {
    skip_if!("priv_a_mount_command_that_is_killed_leaves_a_mount_or_none", needs_mounts());
    let lab = Lab::new();
    let source = Source::small(&lab, "tree", 5);
    lab.take(&source, "a");
    let point = PathBuf::from(lab.point("m"));
    let count = rounds(8) as u32;
    for round in 0..count {
        for how in SHAPES {
            lab.run(&["daemon", "start"]).ok();
            let took = undisturbed(&lab, &point, how);
            let mut child = start_mount(&lab, &point, how);
            strike_at(&lab, &point, (round, count), took);
            child.kill().unwrap();
            child.wait().unwrap();
            if is_mounted(&lab, &point) {
                source.is_right(&point);
                // Who shows what is mounted sees it, too, once the daemon has noticed that the one before is gone.
                if !how.contains(&"--rw") {
                    eventually("one lease is left", || lab.leases().len() == 1);
                }
                lab.umount(&point);
            }
            eventually("no lease is left", || lab.leases().is_empty());
            lab.stop();
            assert!(lab.mounted().is_empty(), "round {round} {how:?}: {:?}", lab.mounted());
        }
    }
}

#[test]
fn priv_a_daemon_killed_while_it_starts_is_replaced() {
    skip_if!("priv_a_daemon_killed_while_it_starts_is_replaced", needs_mounts());
    let lab = Lab::new();
    let source = Source::small(&lab, "tree", 6);
    lab.take(&source, "a");
    let point = PathBuf::from(lab.point("m"));
    // Whoever holds the lock has written who it is.
    let note = || lazyroot::lock::note_of(&lab.state.join("daemon.lock"));
    let pid = |note: &str| note.strip_prefix("process ")?.split(',').next()?.parse::<i32>().ok();
    let count = rounds(8);
    for round in 0..count {
        let old = note();
        let child = start_mount(&lab, &point, &[]);
        eventually("a daemon takes the lock", || {
            let now = note();
            now != old && pid(&now).is_some()
        });
        spin(Instant::now() + Duration::from_micros(round * 16_000 / count), || false);
        let victim = pid(&note()).unwrap();
        // It may be gone already when starting it failed, but nothing here makes it fail.
        kill(victim);
        let done = collect(child);
        assert!(done.code == 0 || !done.err.is_empty(), "round {round}: {done:?}");
        lab.run(&["ps"]).ok();
        if is_mounted(&lab, &point) {
            source.is_right(&point);
            lab.umount(&point);
        }
        let again = lab.mount("a", "tree", "again");
        source.is_right(&again);
        lab.umount(&again);
        lab.stop();
    }
}

#[test]
fn priv_a_damaged_record_of_mounts_is_said_and_takes_nothing_away() {
    skip_if!("priv_a_damaged_record_of_mounts_is_said_and_takes_nothing_away", needs_mounts());
    let lab = Lab::new();
    let source = Source::small(&lab, "tree", 7);
    lab.take(&source, "a");
    let (point, bystander) = (PathBuf::from(lab.point("m")), lab.path("bystander"));
    std::fs::create_dir(&bystander).unwrap();
    sys::mount::mount_legacy(Path::new("none"), &bystander, "tmpfs", sys::mount::MountFlags::empty(), "").unwrap();
    let leases = lab.state.join("leases.json");
    let mut random = Random(9);
    for round in 0..rounds(12) {
        lab.run(&["mount", "a", point.to_str().unwrap(), "--as", "tree"]).ok();
        let pid = lab.daemon_pid();
        kill(pid);
        let len = std::fs::metadata(&leases).unwrap().len();
        if round == 0 {
            std::fs::write(&leases, b"").unwrap();
        } else {
            flip(&leases, random.below(len), random.below(8) as u8);
        }
        let done = lab.run(&["ps"]);
        let damaged = done.code != 0;
        assert!(!damaged || done.err.contains("leases.json") || done.err.contains("damaged"), "{done:?}");
        assert!(damaged || done.err.contains("killed") || done.err.contains("mounts were lost"), "{done:?}");
        // Said once, and then it works again.
        assert!(!lab.run(&["ps"]).ok().err.contains("damaged"));
        assert!(lab.mounted().contains(&bystander), "round {round}");
        if is_mounted(&lab, &point) {
            lab.umount(&point);
        }
        let again = lab.mount("a", "erofs", "again");
        source.is_right(&again);
        lab.umount(&again);
        lab.stop();
    }
}
