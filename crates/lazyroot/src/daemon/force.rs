//! Unmounting in other mount namespaces, for `daemon stop --force`.
//!
//! Paths there are in the hands of whoever is root there. So a mount is opened, looked at, and detached as the current
//! directory of the thread: what was checked is what goes, without a `/proc` that may be anybody's.

use crate::control::proto::Dev;
use crate::procscan::namespace_of;
use anyhow::Context;
use rustix::fs::{Mode, OFlags};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use sys::mount::UnmountFlags;

/// Detaches the mounts of these superblocks at these paths in the mount namespace of `pid`. A thread of its own enters it
/// and ends there.
pub fn detach(pid: i32, points: Vec<(PathBuf, Dev)>) -> anyhow::Result<()> {
    if points.is_empty() {
        return Ok(());
    }
    let before = namespace_of(&pid.to_string());
    let path = format!("/proc/{pid}/ns/mnt");
    let space = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty()).context(path)?;
    let thread = std::thread::Builder::new().name("detach".into()).spawn(move || -> anyhow::Result<()> {
        // A thread that shares its root and directory with others may not enter another namespace; having had one
        // of its own for a moment, it no longer does.
        sys::mount::enter_own_namespace().context("leaving the daemon's namespace")?;
        move_into_link_name_space(space.as_fd(), Some(LinkNameSpaceType::Mount)).context("entering the namespace")?;
        anyhow::ensure!(before == namespace_of("thread-self"), "the process has ended");
        // All that can be; the first failure is told.
        let mut failed = Ok(());
        for (point, device) in points {
            let done = detach_one(&point, device).with_context(|| format!("unmounting {}", point.display()));
            failed = failed.and(done);
        }
        failed
    })?;
    thread.join().map_err(|_| anyhow::anyhow!("the thread panicked"))?
}

fn detach_one(point: &Path, device: Dev) -> anyhow::Result<()> {
    let mount = sys::mount::open_target(point)?;
    let ids = sys::mount::ids(&mount)?;
    anyhow::ensure!((ids.dev_major, ids.dev_minor) == (device.major, device.minor), "something else is mounted there");
    rustix::process::fchdir(&mount).context("entering it")?;
    let done = sys::mount::unmount(Path::new("."), UnmountFlags::DETACH);
    // A directory that is detached is of no use any more.
    std::env::set_current_dir("/")?;
    Ok(done?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::procscan::mounted_at;

    #[test]
    fn priv_only_the_superblock_that_is_meant_is_detached() {
        if !crate::mounts::may_mount() {
            println!("SKIP priv_only_the_superblock_that_is_meant_is_detached: no right to mount");
            return;
        }
        let tmp = tempfile::tempdir().unwrap();
        let points: Vec<PathBuf> = ["a", "b", "c"].iter().map(|n| tmp.path().canonicalize().unwrap().join(n)).collect();
        let devices: Vec<Dev> = points
            .iter()
            .map(|point| {
                std::fs::create_dir(point).unwrap();
                let flags = sys::mount::MountFlags::empty();
                sys::mount::mount_legacy(Path::new("force"), point, "tmpfs", flags, "size=1m").unwrap();
                Dev::from_st(std::os::unix::fs::MetadataExt::dev(&point.metadata().unwrap()))
            })
            .collect();
        let user = std::fs::File::create(points[2].join("f")).unwrap();
        let me = std::process::id() as i32;
        // The first is another one by now, or so it seems.
        let wanted = [(0, devices[1]), (1, devices[1]), (2, devices[2])].map(|(i, dev)| (points[i].clone(), dev));
        let error = format!("{:#}", detach(me, wanted.to_vec()).unwrap_err());
        assert!(error.contains("something else") && error.contains(points[0].to_str().unwrap()), "{error}");
        let left: Vec<bool> = points.iter().map(|p| mounted_at(p).unwrap().is_some()).collect();
        assert_eq!(left, [true, false, false]);
        drop(user);
        detach(me, vec![(points[0].clone(), devices[0])]).unwrap();
        assert!(mounted_at(&points[0]).unwrap().is_none());
    }
}
