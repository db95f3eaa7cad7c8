//! Unmounting in other mount namespaces, for `daemon stop --force`.

use crate::procscan::namespace_of;
use anyhow::Context;
use rustix::fs::{Mode, OFlags};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use std::os::fd::AsFd;
use std::path::PathBuf;
use sys::mount::UnmountFlags;

/// Detaches mounts at `points` in the mount namespace of `pid`. A thread of its own enters it and ends there.
pub fn detach(pid: i32, points: Vec<PathBuf>) -> anyhow::Result<()> {
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
        for point in points {
            sys::mount::unmount(&point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
                .with_context(|| format!("unmounting {}", point.display()))?;
        }
        Ok(())
    })?;
    thread.join().map_err(|_| anyhow::anyhow!("the thread panicked"))?
}
