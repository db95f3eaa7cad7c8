//! Who uses what: leases, superblocks, and when something ends.
//!
//! Invariants: a lease is recorded on disk before its mount leaves the daemon; a superblock goes only when no lease
//! names it, no mount namespace sees it, and nobody is just asking for it. Whether a mount still exists is read from
//! mountinfo, never assumed: `umount` by hand is as good as ours.

use super::images::{Images, Superblock};
use super::leases::{LeaseFile, VERSION, boot_id};
use super::log::LogFile;
use crate::control::proto::{Dev, Lease, MountRequest, Shape, Top, Use};
use crate::failure::Failure;
use crate::front::Session;
use crate::procscan::{self, Namespace, dev_of};
use crate::source::OpenImage;
use anyhow::Context;
use format::Digest;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// How long a superblock that nobody uses stays, for the next one to find it warm.
const LINGER: Duration = Duration::from_secs(60);

type Key = (Digest, Shape);

/// The place where a superblock is or is just being made.
#[derive(Debug, Default)]
struct Slot {
    made: Mutex<Option<Arc<Superblock>>>,
}

#[derive(Debug)]
struct Held {
    lease: Lease,
    /// Handed out, not yet attached: ends with its connection.
    pending: bool,
    /// Of a user's mount: what serves it.
    session: Option<(Session, Arc<OpenImage>)>,
}

#[derive(Debug)]
struct Inner {
    next: u64,
    held: BTreeMap<u64, Held>,
    slots: HashMap<Key, Arc<Slot>>,
    idle_since: Instant,
    stopping: bool,
    released: HashMap<Key, Instant>,
}

/// The daemon's state.
#[derive(Debug)]
pub struct State {
    /// What makes superblocks.
    pub images: Images,
    log: Arc<LogFile>,
    file: PathBuf,
    boot: String,
    namespace: Option<OsString>,
    inner: Mutex<Inner>,
}

/// What a mount request got.
#[derive(Debug)]
pub struct Given {
    /// Its lease.
    pub lease: u64,
    /// The shape.
    pub shape: Shape,
    /// Why that one.
    pub why: String,
    /// The superblock.
    pub superblock: Arc<Superblock>,
    /// Whether the superblock was there already.
    pub shared: bool,
    /// The detached mount.
    pub mount: OwnedFd,
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// A lease on a mount of `superblock` itself, which nothing lies on top of.
fn lease_on(superblock: &Superblock, id: u64, pid: i32, r#use: Use, target: String) -> Lease {
    Lease {
        id,
        image: superblock.image.clone(),
        index: superblock.key.0.to_hex(),
        shape: superblock.key.1,
        r#use,
        target,
        device: superblock.device,
        source: superblock.source.clone(),
        top: None,
        pid,
        since: now(),
        upper: None,
        container: None,
    }
}

impl State {
    /// Nothing mounted yet.
    pub fn new(images: Images, log: Arc<LogFile>, file: PathBuf) -> State {
        State {
            images,
            log,
            file,
            boot: boot_id(),
            namespace: procscan::namespace_of("self"),
            inner: Mutex::new(Inner {
                next: 1,
                held: BTreeMap::new(),
                slots: HashMap::new(),
                idle_since: Instant::now(),
                stopping: false,
                released: HashMap::new(),
            }),
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, inner: &Inner) -> anyhow::Result<()> {
        let leases = inner.held.values().map(|h| h.lease.clone()).collect();
        let file = LeaseFile { version: VERSION, pid: std::process::id() as i32, boot: self.boot.clone(), leases };
        file.write(&self.file).with_context(|| format!("recording leases in {}", self.file.display()))
    }

    fn record_or_log(&self, inner: &Inner) {
        if let Err(e) = self.record(inner) {
            self.log.warn(format_args!("{e:#}"));
        }
    }

    /// The empty file: from now on its being there means that somebody died.
    pub fn begin(&self) -> anyhow::Result<()> {
        self.record(&self.inner())
    }

    /// All leases.
    pub fn leases(&self) -> Vec<Lease> {
        self.inner().held.values().filter(|h| !h.pending).map(|h| h.lease.clone()).collect()
    }

    /// Superblocks that exist.
    pub fn superblocks(&self) -> Vec<Arc<Superblock>> {
        let slots: Vec<_> = self.inner().slots.values().cloned().collect();
        slots.iter().filter_map(|s| s.made.lock().unwrap_or_else(PoisonError::into_inner).clone()).collect()
    }

    /// Images of users' mounts.
    pub fn user_images(&self) -> Vec<(String, Arc<OpenImage>, serde_json::Value)> {
        let inner = self.inner();
        let held = inner.held.values().filter_map(|h| Some((&h.lease.image, h.session.as_ref()?)));
        held.map(|(name, (session, image))| {
            (name.clone(), Arc::clone(image), super::images::counters_json(session.counters(), session.parked_now()))
        })
        .collect()
    }

    /// Gives out a detached mount under a new, pending lease.
    pub fn mount(&self, request: &MountRequest, digest: &Digest, pid: i32) -> anyhow::Result<Given> {
        let (shape, why, superblock, shared, lease) = match request.shape {
            Some(shape) => {
                let (superblock, shared, lease) = self.hold(request, digest, shape, pid)?;
                (shape, format!("{shape}: as asked"), superblock, shared, lease)
            }
            None => match self.hold(request, digest, Shape::Erofs, pid) {
                Ok((superblock, shared, lease)) => {
                    let why = "erofs: the kernel answers names and attributes itself, the fastest there is here";
                    (Shape::Erofs, why.to_owned(), superblock, shared, lease)
                }
                // Damage is damage in every shape.
                Err(e) if crate::errors::kind_of(&e) == crate::failure::Kind::Corrupt => return Err(e),
                Err(e) => {
                    let (superblock, shared, lease) = self.hold(request, digest, Shape::Tree, pid)?;
                    (Shape::Tree, format!("tree: EROFS does not work here ({e:#})"), superblock, shared, lease)
                }
            },
        };
        match superblock.clone_mount(request.suid, request.dev) {
            Ok(mount) => Ok(Given { lease, shape, why, superblock, shared, mount }),
            Err(e) => {
                self.end(lease);
                Err(e)
            }
        }
    }

    /// Finds or makes the superblock and takes a lease on it.
    fn hold(
        &self,
        request: &MountRequest,
        digest: &Digest,
        shape: Shape,
        pid: i32,
    ) -> anyhow::Result<(Arc<Superblock>, bool, u64)> {
        let key = (*digest, shape);
        loop {
            let slot = Arc::clone(self.inner().slots.entry(key).or_default());
            let mut made = slot.made.lock().unwrap_or_else(PoisonError::into_inner);
            if made.as_ref().is_some_and(|s| !s.is_alive()) {
                // Its session ended by itself (somebody aborted the connection); what is mounted of it is lost.
                if let Some(dead) = made.take() {
                    self.log.warn(format_args!("{}: its session has ended, making a new one", dead.image));
                    self.images.release(&dead);
                }
            }
            let (superblock, shared) = match &*made {
                Some(superblock) => (Arc::clone(superblock), true),
                None => {
                    let superblock = Arc::new(self.images.make(digest, shape, &request.image)?);
                    superblock.opened.call(&request.image);
                    *made = Some(Arc::clone(&superblock));
                    (superblock, false)
                }
            };
            let mut inner = self.inner();
            let current = inner.slots.entry(key).or_insert_with(|| Arc::clone(&slot));
            if !Arc::ptr_eq(current, &slot) {
                // Collected and made anew by somebody else in between.
                drop(inner);
                if let Some(orphan) = made.take() {
                    self.images.release(&orphan);
                }
                continue;
            }
            let id = inner.next;
            inner.next += 1;
            let mut lease = lease_on(&superblock, id, pid, request.r#use, request.target.clone());
            // The name that this one asked for.
            lease.image.clone_from(&request.image);
            inner.held.insert(id, Held { lease, pending: true, session: None });
            if let Err(e) = self.record(&inner) {
                inner.held.remove(&id);
                return Err(e);
            }
            return Ok((superblock, shared, id));
        }
    }

    /// A pending lease's mount is in place.
    pub fn attached(&self, id: u64, change: impl FnOnce(&mut Lease)) -> anyhow::Result<()> {
        let mut inner = self.inner();
        let held = inner.held.get_mut(&id).ok_or_else(|| Failure::not_found(format!("no lease {id}")))?;
        change(&mut held.lease);
        held.pending = false;
        self.log.info(format_args!(
            "lease {id}: {} as {} at {} ({}), process {}",
            held.lease.image, held.lease.shape, held.lease.target, held.lease.r#use, held.lease.pid
        ));
        self.record(&inner)
    }

    /// Serves a user's tree.
    pub fn serve(&self, digest: &Digest, image: &str, target: &str, pid: i32) -> anyhow::Result<u64> {
        let (session, opened, label) = self.images.serve_at(digest, Path::new(target))?;
        opened.call(image);
        let entry = sys::mountinfo::of_self()?.into_iter().rfind(|e| e.source == *label);
        let device = entry.as_ref().map_or(Dev { major: 0, minor: 0 }, dev_of);
        let mut inner = self.inner();
        let id = inner.next;
        inner.next += 1;
        let lease = Lease {
            id,
            image: image.to_owned(),
            index: digest.to_hex(),
            shape: Shape::Tree,
            r#use: Use::User,
            target: entry.map_or_else(|| target.to_owned(), |e| e.mount_point.display().to_string()),
            device,
            source: label,
            top: None,
            pid,
            since: now(),
            upper: None,
            container: None,
        };
        self.log.info(format_args!("lease {id}: {image} as tree at {target} (user mount), process {pid}"));
        inner.held.insert(id, Held { lease, pending: false, session: Some((session, opened)) });
        self.record(&inner)?;
        Ok(id)
    }

    /// A lease ends.
    pub fn end(&self, id: u64) {
        let mut inner = self.inner();
        let Some(held) = inner.held.remove(&id) else { return };
        self.after_end(&mut inner, &held);
        self.record_or_log(&inner);
        drop(inner);
        // Ends the session of a user's mount, outside of the lock.
        drop(held);
    }

    /// A pending lease whose connection is gone ends; one that was attached stays.
    pub fn end_pending(&self, id: u64) {
        let pending = self.inner().held.get(&id).is_some_and(|h| h.pending);
        if pending {
            self.log.warn(format_args!("lease {id}: its asker went away before attaching it"));
            self.end(id);
        }
    }

    fn after_end(&self, inner: &mut Inner, held: &Held) {
        if let Some(digest) = Digest::from_hex(&held.lease.index) {
            inner.released.insert((digest, held.lease.shape), Instant::now());
        }
        if !held.pending {
            self.log.info(format_args!("lease {}: {} at {} ended", held.lease.id, held.lease.image, held.lease.target));
        }
        if inner.held.is_empty() {
            inner.idle_since = Instant::now();
        }
    }

    /// Looks at all mount namespaces: ends leases whose mounts are gone, finds uses that no lease knows, and drops
    /// superblocks that nobody has needed for a while (`all`: at all).
    pub fn rescan(&self, all: bool) {
        // What is attached while the tables are read may be missing from them.
        let known: HashSet<u64> = self.inner().held.values().filter(|h| !h.pending).map(|h| h.lease.id).collect();
        let spaces =
            if self.images.is_privileged() { procscan::namespaces(self.namespace.as_ref()) } else { Vec::new() };
        let superblocks = self.superblocks();
        let mut inner = self.inner();
        let is_gone = |h: &&Held| known.contains(&h.lease.id) && !lives(h, &spaces);
        let ended: Vec<u64> = inner.held.values().filter(is_gone).map(|h| h.lease.id).collect();
        let mut gone = Vec::new();
        for id in &ended {
            if let Some(held) = inner.held.remove(id) {
                self.after_end(&mut inner, &held);
                gone.push(held);
            }
        }
        self.adopt(&mut inner, &spaces, &superblocks);
        let mut dropped = Vec::new();
        let used: HashSet<Dev> = inner.held.values().map(|h| h.lease.device).collect();
        let visible: HashSet<Dev> = spaces.iter().flat_map(|s| s.mounts.iter().map(dev_of)).collect();
        let keys: Vec<Key> = inner.slots.keys().copied().collect();
        for key in keys {
            let slot = Arc::clone(&inner.slots[&key]);
            // Somebody is just making it.
            let Ok(mut made) = slot.made.try_lock() else { continue };
            let since = inner.released.get(&key).copied();
            let drop_it = match &*made {
                None => true,
                Some(s) => {
                    let rested = since.unwrap_or(s.since).elapsed();
                    !used.contains(&s.device) && !visible.contains(&s.device) && (all || rested >= LINGER)
                }
            };
            if drop_it {
                dropped.extend(made.take());
                inner.slots.remove(&key);
                inner.released.remove(&key);
            }
        }
        if !ended.is_empty() {
            self.record_or_log(&inner);
        }
        drop(inner);
        drop(gone);
        let unmounted = !dropped.is_empty();
        for superblock in dropped {
            self.images.release(&superblock);
            self.log.info(format_args!("{} as {}: unmounted", superblock.image, superblock.key.1));
        }
        // Spaces that nobody uses any more hold descriptors and maps.
        if unmounted && let Err(e) = self.images.cache().release_unused() {
            self.log.warn(format_args!("closing spaces: {e}"));
        }
    }

    /// A superblock that is mounted somewhere without a lease (a mount that was moved, a bind mount that outlived
    /// it) gets one, so that it is shown and keeps the daemon.
    fn adopt(&self, inner: &mut Inner, spaces: &[Namespace], superblocks: &[Arc<Superblock>]) {
        for superblock in superblocks {
            if inner.held.values().any(|h| h.lease.device == superblock.device) {
                continue;
            }
            let seen = spaces.iter().find_map(|s| {
                let entry = s.mounts.iter().find(|e| dev_of(e) == superblock.device)?;
                Some((s.pid, entry.mount_point.display().to_string()))
            });
            let Some((pid, target)) = seen else { continue };
            let id = inner.next;
            inner.next += 1;
            self.log.info(format_args!(
                "lease {id}: {} is also mounted at {target}, seen by process {pid}",
                superblock.image
            ));
            let lease = lease_on(superblock, id, pid, Use::Mount, target);
            inner.held.insert(id, Held { lease, pending: false, session: None });
            self.record_or_log(inner);
        }
    }

    /// How long nobody has had a lease; none while somebody has.
    pub fn idle(&self) -> Option<Duration> {
        let inner = self.inner();
        inner.held.is_empty().then(|| inner.idle_since.elapsed())
    }

    /// From now on the last lease ends the daemon.
    pub fn stop_when_unused(&self) {
        self.inner().stopping = true;
    }

    /// Whether the last lease ends the daemon.
    pub fn is_stopping(&self) -> bool {
        self.inner().stopping
    }

    /// Unmounts what is mounted, wherever it can be reached. Returns what could not be.
    pub fn unmount_all(&self) -> Vec<String> {
        let mut failed = Vec::new();
        let users: Vec<Held> = {
            let mut inner = self.inner();
            let ids: Vec<u64> = inner.held.values().filter(|h| h.session.is_some()).map(|h| h.lease.id).collect();
            ids.iter().filter_map(|id| inner.held.remove(id)).collect()
        };
        // Ending their sessions unmounts them.
        drop(users);
        let mut watched: HashSet<Dev> = self.superblocks().iter().map(|s| s.device).collect();
        let tops: Vec<Top> = self.inner().held.values().filter_map(|h| h.lease.top.clone()).collect();
        watched.extend(tops.iter().map(|t| t.device));
        for space in procscan::namespaces(self.namespace.as_ref()) {
            let mut points: Vec<(PathBuf, Dev)> = space
                .mounts
                .iter()
                .filter(|e| watched.contains(&dev_of(e)) && e.mount_point != Path::new("/"))
                .filter(|e| tops.iter().all(|t| t.device != dev_of(e) || *t.source == *e.source))
                .map(|e| (e.mount_point.clone(), dev_of(e)))
                .collect();
            points.reverse();
            if let Err(e) = super::force::detach(space.pid, points) {
                failed.push(format!("in the namespace of process {}: {e:#}", space.pid));
            }
        }
        failed
    }

    /// The end: releases everything and removes the record.
    pub fn finish(&self) {
        let slots: Vec<Arc<Slot>> = self.inner().slots.drain().map(|(_, s)| s).collect();
        for slot in slots {
            if let Some(superblock) = slot.made.lock().unwrap_or_else(PoisonError::into_inner).take() {
                self.images.release(&superblock);
            }
        }
        self.images.stop();
        if let Err(e) = self.images.cache().shutdown() {
            self.log.warn(format_args!("the cache: {e}"));
        }
        if let Err(e) = std::fs::remove_file(&self.file) {
            self.log.warn(format_args!("removing {}: {e}", self.file.display()));
        }
    }
}

/// Whether a lease's mount still exists.
fn lives(held: &Held, spaces: &[Namespace]) -> bool {
    let lease = &held.lease;
    if let Some((session, _)) = &held.session {
        return session.is_alive();
    }
    let mut all = spaces.iter().flat_map(|s| &s.mounts);
    match &lease.top {
        Some(top) => all.any(|e| dev_of(e) == top.device && e.source == *top.source),
        None => all.any(|e| dev_of(e) == lease.device && e.mount_point == Path::new(&lease.target)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sys::mountinfo;

    fn held(target: &str, top: Option<Top>) -> Held {
        let lease = Lease {
            id: 1,
            image: "a".into(),
            index: String::new(),
            shape: Shape::Erofs,
            r#use: Use::Mount,
            target: target.into(),
            device: Dev { major: 0, minor: 50 },
            source: "s".into(),
            top,
            pid: 1,
            since: 0,
            upper: None,
            container: None,
        };
        Held { lease, pending: false, session: None }
    }

    #[test]
    fn a_lease_lives_as_long_as_its_mount() {
        let table = b"1 0 0:50 / /mnt/a ro - erofs s ro\n2 0 0:60 / / rw - overlay lazyroot:x rw\n";
        let spaces = [Namespace { id: "mnt:[1]".into(), pid: 1, mounts: mountinfo::parse(table) }];
        let top = |minor, source: &str| Some(Top { device: Dev { major: 0, minor }, source: source.into() });
        assert!(lives(&held("/mnt/a", None), &spaces));
        assert!(!lives(&held("/mnt/b", None), &spaces));
        assert!(lives(&held("/anywhere", top(60, "lazyroot:x")), &spaces));
        assert!(!lives(&held("/anywhere", top(60, "lazyroot:y")), &spaces), "the number was used again");
        assert!(!lives(&held("/anywhere", top(61, "lazyroot:x")), &spaces));
    }
}
