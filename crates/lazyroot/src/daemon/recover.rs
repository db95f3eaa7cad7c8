//! After a daemon that was killed: says what was lost and takes away the mounts that nobody uses.
//!
//! What is taken away was recorded in the lease file *and* still has the device number and the source that were
//! recorded, so nothing of anybody else's is touched. A mount that is in use stays: its cached part still works, and
//! whoever uses it must decide.

use super::leases::{LeaseFile, boot_id};
use crate::control::proto::{Lease, Use};
use crate::dirs::Dirs;
use crate::lock::Lock;
use crate::procscan::{self, User, dev_of};
use anyhow::Context;
use serde_json::{Value, json};
use std::path::Path;
use sys::mount::UnmountFlags;

/// Users of a mount that are named.
const NAMED_USERS: usize = 8;

/// What became of one mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fate {
    /// Taken away: nobody used it.
    Unmounted,
    /// Gone already.
    Gone,
    /// In use.
    Busy(Vec<User>),
    /// It could not be taken away.
    Failed(String),
    /// Below a container, which goes on without its server.
    Container(String),
}

/// What a dead daemon left.
#[derive(Debug, Clone)]
pub struct Recovered {
    /// Its process.
    pub pid: i32,
    /// Its mounts.
    pub mounts: Vec<(Lease, Fate)>,
}

/// Cleans up after a dead daemon; `None` when there is nothing to clean up, or a daemon lives.
pub fn recover(dirs: &Dirs) -> anyhow::Result<Option<Recovered>> {
    let path = dirs.leases();
    if !path.exists() {
        return Ok(None);
    }
    let Some(_lock) = Lock::try_take(&dirs.daemon_lock()).context("the daemon's lock")? else { return Ok(None) };
    // Only now is it sure that nobody is about to remove it.
    let file = match LeaseFile::read(&path) {
        Ok(Some(file)) => file,
        Ok(None) => return Ok(None),
        Err(e) => {
            // Nothing can be learnt from it, and nothing may be unmounted without it.
            std::fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
            return Err(e.context("the record of a dead daemon's mounts is damaged and was removed; look for its mounts in /proc/self/mountinfo"));
        }
    };
    let mut mounts = Vec::new();
    if file.boot == boot_id() {
        // The last mounted first: it may lie on another one.
        for lease in file.leases.into_iter().rev() {
            let fate = fate_of(&lease)?;
            mounts.push((lease, fate));
        }
        mounts.reverse();
    }
    std::fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
    Ok(Some(Recovered { pid: file.pid, mounts }))
}

fn fate_of(lease: &Lease) -> anyhow::Result<Fate> {
    if let (Use::Run, Some(container)) = (lease.r#use, &lease.container) {
        return Ok(Fate::Container(container.clone()));
    }
    let (device, source) = match &lease.top {
        Some(top) => (top.device, top.source.as_str()),
        None => (lease.device, lease.source.as_str()),
    };
    let target = Path::new(&lease.target);
    let ours = procscan::mounted_at(target)?.filter(|e| dev_of(e) == device && e.source == *source);
    if ours.is_none() {
        return Ok(Fate::Gone);
    }
    match sys::mount::unmount(target, UnmountFlags::NOFOLLOW) {
        Ok(()) => Ok(Fate::Unmounted),
        Err(e) if e.kind() == std::io::ErrorKind::ResourceBusy => {
            Ok(Fate::Busy(procscan::users_of(device, NAMED_USERS, None)))
        }
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied && lease.r#use == Use::User => {
            Ok(match crate::mounts::fusermount(target, false) {
                Ok(()) => Fate::Unmounted,
                Err(_) => Fate::Busy(procscan::users_of(device, NAMED_USERS, None)),
            })
        }
        Err(e) => Ok(Fate::Failed(e.to_string())),
    }
}

impl Recovered {
    /// For people.
    pub fn text(&self) -> String {
        let count = self.mounts.len();
        let mut text = format!("the daemon (process {}) was killed; ", self.pid);
        if count == 0 {
            text += "nothing was mounted";
            return text;
        }
        text += &format!("{count} {} lost:", if count == 1 { "mount was" } else { "mounts were" });
        for (lease, fate) in &self.mounts {
            let users = |users: &[User]| users.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let what = match fate {
                Fate::Unmounted => "unmounted, nobody used it".to_owned(),
                Fate::Gone => "was unmounted already".to_owned(),
                Fate::Busy(by) if by.is_empty() => {
                    format!("still in use, uncached reads fail; `lazyroot umount --lazy {}` detaches it", lease.target)
                }
                Fate::Busy(by) => format!(
                    "still in use by {}, uncached reads fail; `lazyroot umount --lazy {}` detaches it",
                    users(by),
                    lease.target
                ),
                Fate::Failed(e) => format!("could not be unmounted: {e}"),
                Fate::Container(id) => {
                    format!(
                        "below container {id}, whose uncached reads fail; `lazyroot rm --force --container {id}` ends it"
                    )
                }
            };
            text += &format!("\n  {} ({}, {}): {what}", lease.target, lease.image, lease.shape);
        }
        text
    }

    /// For scripts.
    pub fn json(&self) -> Value {
        let mounts: Vec<Value> = self
            .mounts
            .iter()
            .map(|(lease, fate)| {
                let fate = match fate {
                    Fate::Unmounted => "unmounted",
                    Fate::Gone => "gone",
                    Fate::Busy(_) => "busy",
                    Fate::Failed(_) => "failed",
                    Fate::Container(_) => "container",
                };
                json!({"target": lease.target, "image": lease.image, "shape": lease.shape, "fate": fate})
            })
            .collect();
        json!({"event": "recovered", "pid": self.pid, "mounts": mounts})
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::proto::{Dev, Shape};
    use crate::daemon::leases::VERSION;

    #[test]
    fn a_dead_daemons_leases_are_reported_once_and_nothing_else_is_touched() {
        let tmp = tempfile::tempdir().unwrap();
        let dirs = Dirs { root: tmp.path().join("r"), state: tmp.path().join("s") }.prepare().unwrap();
        assert!(recover(&dirs).unwrap().is_none());
        let lease = Lease {
            id: 1,
            image: "a:latest".into(),
            index: "ab".into(),
            shape: Shape::Erofs,
            r#use: Use::Mount,
            // Something is mounted there, but it is not what was recorded.
            target: "/proc".into(),
            device: Dev { major: 0, minor: 9999 },
            source: "lazyroot".into(),
            top: None,
            pid: 1,
            since: 0,
            upper: None,
            container: None,
        };
        let file = LeaseFile { version: VERSION, pid: 77, boot: boot_id(), leases: vec![lease] };
        file.write(&dirs.leases()).unwrap();
        let held = Lock::try_take(&dirs.daemon_lock()).unwrap().unwrap();
        assert!(recover(&dirs).unwrap().is_none(), "a daemon lives");
        drop(held);
        let got = recover(&dirs).unwrap().unwrap();
        assert_eq!((got.pid, got.mounts.len()), (77, 1));
        assert_eq!(got.mounts[0].1, Fate::Gone);
        assert!(got.text().contains("1 mount was lost:\n  /proc (a:latest, erofs)"));
        assert!(recover(&dirs).unwrap().is_none());
        LeaseFile { boot: "another".into(), ..file }.write(&dirs.leases()).unwrap();
        assert!(recover(&dirs).unwrap().unwrap().mounts.is_empty());
    }
}
