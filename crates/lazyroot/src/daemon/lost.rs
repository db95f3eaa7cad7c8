//! Mounts that outlived their daemon and could not be taken away at once: they are kept on record and tried again by
//! every command, until they are gone.
//!
//! The record is a small file in the state directory, replaced atomically and changed only under a lock of its own,
//! because a successor of the dead daemon may live by then. What it says of another boot is void. Failure model: a
//! record that cannot be read counts as none, for nothing may be unmounted without it; the mounts are in mountinfo.

use super::leases::{boot_id, replace};
use super::recover::{Fate, Recovered, fate_of};
use crate::control::proto::Lease;
use crate::dirs::Dirs;
use crate::lock::Lock;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::time::{Duration, Instant};

/// The file's version.
const VERSION: u32 = 1;
/// How long somebody else may be at it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);

/// A mount without its server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// The process that was the daemon.
    pub daemon: i32,
    /// What it had recorded.
    #[serde(flatten)]
    pub lease: Lease,
}

#[derive(Serialize, Deserialize)]
struct LostFile {
    version: u32,
    boot: String,
    mounts: Vec<Lost>,
}

fn read(path: &Path) -> Vec<Lost> {
    let Ok(text) = std::fs::read(path) else { return Vec::new() };
    let file = serde_json::from_slice::<LostFile>(&text);
    file.ok().filter(|f| f.version == VERSION && f.boot == boot_id()).map(|f| f.mounts).unwrap_or_default()
}

fn write(path: &Path, mounts: Vec<Lost>) -> anyhow::Result<()> {
    let done = if mounts.is_empty() {
        std::fs::remove_file(path).or_else(|e| if e.kind() == std::io::ErrorKind::NotFound { Ok(()) } else { Err(e) })
    } else {
        replace(path, &LostFile { version: VERSION, boot: boot_id(), mounts })
    };
    done.with_context(|| format!("recording lost mounts in {}", path.display()))
}

fn lock(dirs: &Dirs, timeout: Duration) -> anyhow::Result<Option<Lock>> {
    let until = Instant::now() + timeout;
    loop {
        if let Some(lock) = Lock::try_take(&dirs.lost().with_extension("lock")).context("the lock of lost mounts")? {
            return Ok(Some(lock));
        }
        if Instant::now() >= until {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// All that are known.
pub fn all(dirs: &Dirs) -> Vec<Lost> {
    read(&dirs.lost())
}

/// Keeps mounts of the dead daemon `pid` on record.
pub fn add(dirs: &Dirs, pid: i32, leases: impl Iterator<Item = Lease>) -> anyhow::Result<()> {
    let new: Vec<Lost> = leases.map(|lease| Lost { daemon: pid, lease }).collect();
    if new.is_empty() {
        return Ok(());
    }
    let _lock = lock(dirs, LOCK_TIMEOUT)?.context("the record of lost mounts is in use; try again")?;
    let mut mounts = all(dirs);
    // Whoever was here before may have died before it could remove the leases.
    mounts.retain(|m| !new.contains(m));
    mounts.extend(new);
    write(&dirs.lost(), mounts)
}

/// Tries again to take them away, and forgets those that are gone. What was taken away is returned.
pub fn retry(dirs: &Dirs) -> anyhow::Result<Option<Recovered>> {
    if !dirs.lost().exists() {
        return Ok(None);
    }
    // Somebody else is just doing the same.
    let Some(_lock) = lock(dirs, Duration::ZERO)? else { return Ok(None) };
    let before = all(dirs);
    let (mut left, mut mounts) = (Vec::new(), Vec::new());
    // The last mounted first: it may lie on another one.
    for lost in before.iter().rev() {
        match fate_of(&lost.lease)? {
            Fate::Gone => {}
            Fate::Unmounted => mounts.push((lost.lease.clone(), Fate::Unmounted)),
            _ => left.push(lost.clone()),
        }
    }
    left.reverse();
    if left != before || before.is_empty() {
        write(&dirs.lost(), left)?;
    }
    mounts.reverse();
    Ok((!mounts.is_empty()).then_some(Recovered { pid: None, mounts }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::proto::{Dev, Shape, Use};

    fn lease(target: &Path, device: Dev, source: &str) -> Lease {
        Lease {
            id: 1,
            image: "a:latest".into(),
            index: "ab".into(),
            shape: Shape::Erofs,
            r#use: Use::Mount,
            target: target.display().to_string(),
            device,
            source: source.into(),
            top: None,
            pid: 1,
            since: 0,
            upper: None,
            container: None,
        }
    }

    #[test]
    fn what_is_gone_is_forgotten_and_other_boots_do_not_count() {
        let tmp = tempfile::tempdir().unwrap();
        let dirs = Dirs { root: tmp.path().join("r"), state: tmp.path().join("s") }.prepare().unwrap();
        assert!(all(&dirs).is_empty() && retry(&dirs).unwrap().is_none());
        let gone = lease(Path::new("/proc"), Dev { major: 0, minor: 9999 }, "lazyroot-x");
        add(&dirs, 7, [gone.clone()].into_iter()).unwrap();
        add(&dirs, 7, [gone.clone()].into_iter()).unwrap();
        assert_eq!(all(&dirs), [Lost { daemon: 7, lease: gone.clone() }], "once");
        let text = std::fs::read_to_string(dirs.lost()).unwrap();
        std::fs::write(dirs.lost(), text.replace(&boot_id(), "another")).unwrap();
        assert!(all(&dirs).is_empty());
        std::fs::write(dirs.lost(), text).unwrap();
        // Something is mounted there, but it is not what was recorded.
        assert!(retry(&dirs).unwrap().is_none());
        assert!(!dirs.lost().exists() && all(&dirs).is_empty());
        std::fs::write(dirs.lost(), "{").unwrap();
        assert!(all(&dirs).is_empty() && retry(&dirs).unwrap().is_none());
    }

    #[test]
    fn priv_a_mount_is_taken_away_when_its_last_user_is_gone() {
        if !crate::mounts::may_mount() {
            println!("SKIP priv_a_mount_is_taken_away_when_its_last_user_is_gone: no right to mount");
            return;
        }
        let tmp = tempfile::tempdir().unwrap();
        let dirs = Dirs { root: tmp.path().join("r"), state: tmp.path().join("s") }.prepare().unwrap();
        let target = tmp.path().canonicalize().unwrap().join("m");
        std::fs::create_dir(&target).unwrap();
        sys::mount::mount_legacy(
            Path::new("lazyroot-test"),
            &target,
            "tmpfs",
            sys::mount::MountFlags::empty(),
            "size=1m",
        )
        .unwrap();
        let device = Dev::from_st(std::os::unix::fs::MetadataExt::dev(&target.metadata().unwrap()));
        let user = std::fs::File::create(target.join("f")).unwrap();
        add(&dirs, 7, [lease(&target, device, "lazyroot-test")].into_iter()).unwrap();
        assert!(retry(&dirs).unwrap().is_none());
        assert_eq!(all(&dirs).len(), 1, "it is in use");
        // Another one on top: what is below is not to be mistaken for it, nor to be forgotten.
        drop(user);
        let over = |name: &str| {
            sys::mount::mount_legacy(Path::new(name), &target, "tmpfs", sys::mount::MountFlags::empty(), "size=1m")
        };
        over("other").unwrap();
        assert!(retry(&dirs).unwrap().is_none());
        assert_eq!(all(&dirs).len(), 1);
        assert_eq!(crate::procscan::mounted_at(&target).unwrap().unwrap().source, *"other");
        sys::mount::unmount(&target, sys::mount::UnmountFlags::empty()).unwrap();
        let told = retry(&dirs).unwrap().unwrap();
        assert!(told.text().contains("unmounted, nobody uses it any more"), "{}", told.text());
        assert!(crate::procscan::mounted_at(&target).unwrap().is_none());
        assert!(all(&dirs).is_empty());
    }
}
