//! After a daemon that was killed: says what was lost and takes away the mounts that nobody uses.
//!
//! What is taken away was recorded in the lease file *and* still has the device number and the source that were
//! recorded, so nothing of anybody else's is touched; it is checked through a descriptor of the mount itself, and that
//! one is detached, whatever its path leads to by then. A mount that is in use stays: its cached part still works, and
//! whoever uses it must decide; [`lost`] keeps it on record.

use super::leases::{LeaseFile, boot_id};
use super::lost;
use crate::control::proto::{Lease, Use};
use crate::dirs::Dirs;
use crate::lock::Lock;
use crate::mounts::Mounted;
use crate::procscan::{self, User, dev_of};
use anyhow::Context;
use serde_json::{Value, json};
use std::path::Path;
use sys::mountinfo::Entry;

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
    /// Not where it was recorded, but at another path or in another mount namespace: a process that sees it, and where.
    Elsewhere(i32, String),
    /// Below a container, which goes on without its server.
    Container(String),
}

/// What a dead daemon left.
#[derive(Debug, Clone)]
pub struct Recovered {
    /// Its process; none when these are what earlier ones left, tried again.
    pub pid: Option<i32>,
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
    let is_left = |fate: &Fate| !matches!(fate, Fate::Unmounted | Fate::Gone);
    let left = mounts.iter().filter(|(_, fate)| is_left(fate)).map(|(lease, _)| lease.clone());
    lost::add(dirs, file.pid, left)?;
    std::fs::remove_file(&path).with_context(|| format!("removing {}", path.display()))?;
    Ok(Some(Recovered { pid: Some(file.pid), mounts }))
}

/// Takes a mount away that has no server any more, if nobody uses it; or says why not.
pub(super) fn fate_of(lease: &Lease) -> anyhow::Result<Fate> {
    let (device, source) = match &lease.top {
        Some(top) => (top.device, top.source.as_str()),
        None => (lease.device, lease.source.as_str()),
    };
    let is_it = |e: &Entry| dev_of(e) == device && e.source == *source;
    let target = Path::new(&lease.target);
    let container = lease.container.as_ref().filter(|_| lease.r#use == Use::Run);
    let found = if container.is_some() { None } else { Mounted::open(target)?.filter(|m| is_it(&m.entry)) };
    let Some(mounted) = found else {
        let seen = procscan::namespaces(None).into_iter().find_map(|space| {
            let entry = space.mounts.into_iter().find(is_it)?;
            Some((space.pid, entry.mount_point.display().to_string()))
        });
        return Ok(match (seen, container) {
            (None, _) => Fate::Gone,
            (Some(_), Some(container)) => Fate::Container(container.clone()),
            (Some((pid, at)), None) => Fate::Elsewhere(pid, at),
        });
    };
    let busy = || Fate::Busy(procscan::users_of(device, Some(target), NAMED_USERS, None));
    match mounted.unmount_unused() {
        Ok(true) => Ok(Fate::Unmounted),
        Ok(false) => Ok(busy()),
        Err(e) if e.kind() == std::io::ErrorKind::PermissionDenied && lease.r#use == Use::User => {
            Ok(crate::mounts::fusermount(target, false).map_or_else(|_| busy(), |()| Fate::Unmounted))
        }
        Err(e) => Ok(Fate::Failed(e.to_string())),
    }
}

impl Recovered {
    /// For people.
    pub fn text(&self) -> String {
        let count = self.mounts.len();
        let mut text = match self.pid {
            Some(pid) if count == 0 => return format!("the daemon (process {pid}) was killed; nothing was mounted"),
            Some(pid) => {
                let what = if count == 1 { "mount was" } else { "mounts were" };
                format!("the daemon (process {pid}) was killed; {count} {what} lost:")
            }
            None => "of what an earlier daemon left when it was killed:".to_owned(),
        };
        for (lease, fate) in &self.mounts {
            let users = |users: &[User]| users.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
            let what = match fate {
                Fate::Unmounted if self.pid.is_none() => "unmounted, nobody uses it any more".to_owned(),
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
                Fate::Elsewhere(pid, at) => {
                    format!("process {pid} sees it at {at}; uncached reads fail, and it is not touched there")
                }
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
                    Fate::Elsewhere(..) => "elsewhere",
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
        assert_eq!((got.pid, got.mounts.len()), (Some(77), 1));
        assert_eq!(got.mounts[0].1, Fate::Gone);
        assert!(got.text().contains("1 mount was lost:\n  /proc (a:latest, erofs)"));
        assert!(recover(&dirs).unwrap().is_none());
        LeaseFile { boot: "another".into(), ..file }.write(&dirs.leases()).unwrap();
        assert!(recover(&dirs).unwrap().unwrap().mounts.is_empty());
    }
}
