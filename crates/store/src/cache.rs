//! The node cache: all spaces of this machine, the engine that fills them, and its threads.
//!
//! Job: open and keep spaces, own the threads (pool, timer, syncer), count, evict, shut down.
//!
//! On disk: `spaces/<object>/{data,presence}`, see `doc/format/space.md`. The directory is locked while a cache is open.
//! Everything in there can be fetched again; removing it loses time, not data.
//!
//! Invariants: one cache per directory; one open space per object. A space stays open while somebody uses it, and
//! after that until [`Cache::release_unused`], so that its verified frames need not be verified again.
//!
//! Failure model: see [`crate::fetch`] and [`crate::space`]. After [`Cache::shutdown`] spaces serve what they have and
//! fail the rest.
//!
//! Memory, besides what each open space needs: two stacks and one per pool thread; while something is fetched, at most
//! `in_flight_bytes` of stored bytes, one frame of content (1 MiB) and a decompressor per pool thread, and some 300
//! bytes for each fetch that waits; while the disk refuses frames, at most twice `overlay_bytes`, and what readers are
//! just being sent. All of it is freed a second after the last frame; that the C library then gives it back to the kernel
//! takes [`sys::memory::return_large_buffers`] at the start of the program.
//!
//! It does not know: images, names, mounts.

mod stats;
#[cfg(test)]
pub(crate) mod tests;

pub use stats::StatsSnapshot;
pub(crate) use stats::{Stats, add, sub};

use crate::disk::{Disk, RealDisk};
use crate::fetch::Engine;
use crate::lock::{self, Lock, Mode};
use crate::object_store::ObjectStore;
use crate::space::Space;
use crate::{ObjectId, ObjectMap, StoreError};
use std::collections::HashMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

/// How a cache works. Every field has a sensible default.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CacheOptions {
    /// Threads that unpack, verify and write frames. Default: one per core, at least 2.
    pub threads: usize,
    /// How long filled frames wait for each other before they are made durable together. Default: 1 s.
    pub sync_interval: Duration,
    /// After this a read that the store has not answered is given up, and asked again if somebody still waits.
    /// Default: 15 s.
    pub attempt_timeout: Duration,
    /// Stored bytes that are on their way or wait for being unpacked, at most. Prefetch and scrub get half of it, one
    /// object three quarters. Default: 16 MiB.
    pub in_flight_bytes: u64,
    /// The most bytes of an object that are asked for at once, when neighbouring frames are missing. Default: 8 MiB.
    pub read_bytes: u64,
    /// Frames on their way, and fetches that wait for them, at most; more are refused. Default: 32,768.
    pub waiting: usize,
    /// Unpacked bytes that are kept in memory while the disk refuses to take them, and as many again for fetches of
    /// several frames. Default: 8 MiB, or 2 MiB a thread if that is more.
    pub overlay_bytes: u64,
    /// How long an eviction waits for readers before it leaves the bytes on disk. Default: 10 s.
    pub evict_timeout: Duration,
    /// Where everything durable goes through. Default: the real disk.
    pub disk: Arc<dyn Disk>,
}

impl Default for CacheOptions {
    fn default() -> Self {
        let threads = std::thread::available_parallelism().map_or(2, usize::from).max(2);
        CacheOptions {
            threads,
            sync_interval: Duration::from_secs(1),
            attempt_timeout: Duration::from_secs(15),
            in_flight_bytes: 16 << 20,
            read_bytes: 8 << 20,
            waiting: 32_768,
            // A frame must survive those that the other threads push through the ring until its reader has it.
            overlay_bytes: (8 << 20).max(threads as u64 * (2 << 20)),
            evict_timeout: Duration::from_secs(10),
            disk: Arc::new(RealDisk),
        }
    }
}

/// What an eviction did.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Evicted {
    /// Frames given up.
    pub frames: u64,
    /// Their unpacked bytes, free on disk now.
    pub bytes: u64,
    /// Frames left alone: on their way, or read for longer than the eviction waits.
    pub kept: u64,
}

/// The node cache.
#[derive(Debug)]
pub struct Cache {
    dir: PathBuf,
    disk: Arc<dyn Disk>,
    engine: Arc<Engine>,
    spaces: Mutex<Spaces>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    _lock: Lock,
}

#[derive(Debug, Default)]
struct Spaces {
    open: HashMap<ObjectId, Arc<Space>>,
    next_key: u64,
}

impl Cache {
    /// Opens the cache in `dir` (made when missing), which fills its spaces from `store`. One cache per directory.
    ///
    /// # Errors
    /// [`StoreError::Busy`] when it is open already, in this process or another; whatever the disk says.
    pub fn open(dir: &Path, store: Arc<dyn ObjectStore>, options: CacheOptions) -> Result<Cache, StoreError> {
        let disk = Arc::clone(&options.disk);
        for dir in [dir, &dir.join("spaces")] {
            make_dir(&*disk, dir)?;
        }
        let lock = lock::try_path(dir, Mode::Exclusive).map_err(|e| StoreError::io("lock", dir, e))?;
        let busy = || StoreError::Busy { path: dir.to_path_buf(), who: "another process has its cache open" };
        let lock = lock.ok_or_else(busy)?;
        let engine = Engine::new(store, &options);
        let cache = Cache {
            dir: dir.to_path_buf(),
            disk,
            engine,
            spaces: Mutex::default(),
            threads: Mutex::default(),
            _lock: lock,
        };
        cache.start(&options)?;
        Ok(cache)
    }

    fn start(&self, options: &CacheOptions) -> Result<(), StoreError> {
        let spawn = |name: &str, body: Box<dyn FnOnce(Arc<Engine>) + Send>| {
            let engine = Arc::clone(&self.engine);
            let thread = std::thread::Builder::new().name(name.into()).spawn(move || body(engine));
            let thread = thread.map_err(|e| StoreError::io("start a thread for", &self.dir, e))?;
            self.threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
            Ok(())
        };
        for _ in 0..options.threads.max(1) {
            spawn("fill", Box::new(|engine| engine.run_worker()))?;
        }
        spawn("fetch-timer", Box::new(|engine| engine.run_timer()))?;
        let interval = options.sync_interval;
        spawn(
            "space-sync",
            Box::new(move |engine| {
                loop {
                    let at_most = (engine.overlay.bytes() > 0).then_some(interval);
                    if !engine.syncer.wait(interval, at_most) {
                        return;
                    }
                    // What failed is counted, and tried again with the next batch.
                    let _ = engine.syncer.run();
                    engine.flush_overlay();
                }
            }),
        )
    }

    fn lock(&self) -> MutexGuard<'_, Spaces> {
        self.spaces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn space_dir(&self, id: &ObjectId) -> PathBuf {
        self.dir.join("spaces").join(id.to_hex())
    }

    /// The space of an object: opened, made, or the one that is open already.
    ///
    /// # Errors
    /// Whatever the disk says.
    pub fn space(&self, map: ObjectMap) -> Result<Arc<Space>, StoreError> {
        let mut spaces = self.lock();
        if let Some(space) = spaces.open.get(&map.id()) {
            return Ok(Arc::clone(space));
        }
        let (id, key) = (map.id(), spaces.next_key);
        let dir = self.space_dir(&id);
        make_dir(&*self.disk, &dir)?;
        let space = Space::open(key, map, Arc::clone(&self.engine), Arc::clone(&self.disk), &dir)?;
        spaces.next_key += 1;
        spaces.open.insert(id, Arc::clone(&space));
        Ok(space)
    }

    /// The spaces that are open.
    pub fn open_spaces(&self) -> Vec<Arc<Space>> {
        self.lock().open.values().cloned().collect()
    }

    /// Closes the spaces that nobody uses; how many.
    ///
    /// # Errors
    /// What they hold could not be made durable; they stay open then.
    pub fn release_unused(&self) -> Result<usize, StoreError> {
        self.sync()?;
        let mut spaces = self.lock();
        let before = spaces.open.len();
        // Nobody gets another reference while the lock is held: one that is the only one stays so.
        spaces.open.retain(|_, space| Arc::strong_count(space) > 1);
        Ok(before - spaces.open.len())
    }

    /// The counters as they are now.
    pub fn stats(&self) -> StatsSnapshot {
        self.engine.snapshot()
    }

    /// Evicts every frame of an object that is not on its way or being read. Of a space that is not open, whatever
    /// is there: the files go, and `frames` is 0.
    ///
    /// # Errors
    /// Whatever the disk says; nothing is punched then that is still claimed.
    pub fn drop_object(&self, id: &ObjectId) -> Result<Evicted, StoreError> {
        let spaces = self.lock();
        if let Some(space) = spaces.open.get(id).cloned() {
            drop(spaces);
            return space.evict(0, u64::MAX);
        }
        // The lock is kept, so that nobody opens what is being removed.
        let bytes = self.remove_space(id)?;
        drop(spaces);
        Ok(Evicted { bytes, ..Evicted::default() })
    }

    /// Removes the spaces of objects that are not `wanted` and that nobody uses; the bytes that this freed.
    ///
    /// # Errors
    /// Whatever the disk says.
    pub fn prune(&self, wanted: &dyn Fn(&ObjectId) -> bool) -> Result<u64, StoreError> {
        let dir = self.dir.join("spaces");
        let fail = |e| StoreError::io("list", &dir, e);
        let mut freed = 0;
        for entry in std::fs::read_dir(&dir).map_err(fail)? {
            let name = entry.map_err(fail)?.file_name();
            // What does not look like a space is not ours to remove.
            let Some(id) = name.to_str().and_then(ObjectId::from_hex) else { continue };
            if wanted(&id) {
                continue;
            }
            let mut spaces = self.lock();
            match spaces.open.get(&id) {
                Some(space) if Arc::strong_count(space) > 1 => continue,
                _ => spaces.open.remove(&id),
            };
            freed += self.remove_space(&id)?;
        }
        Ok(freed)
    }

    /// Removes a space's files; the bytes that they took.
    fn remove_space(&self, id: &ObjectId) -> Result<u64, StoreError> {
        let dir = self.space_dir(id);
        let data = dir.join("data");
        let bytes = match std::fs::symlink_metadata(&data) {
            Ok(meta) => std::os::unix::fs::MetadataExt::blocks(&meta) * 512,
            Err(e) if e.kind() == io::ErrorKind::NotFound => 0,
            Err(e) => return Err(StoreError::io("stat", data, e)),
        };
        let gone = |path: &Path| match self.disk.remove(path) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => Err(StoreError::io("remove", path, e)),
            _ => Ok(()),
        };
        // The claims first, and for good, then what they are about.
        gone(&dir.join("presence"))?;
        if dir.exists() {
            self.disk.sync_dir(&dir).map_err(|e| StoreError::io("sync", &dir, e))?;
        }
        gone(&data)?;
        gone(&dir)?;
        Ok(bytes)
    }

    /// Makes everything durable that is filled.
    ///
    /// # Errors
    /// Whatever the disk says.
    pub fn sync(&self) -> Result<(), StoreError> {
        self.engine.syncer.run().map_err(|e| StoreError::io("sync", &self.dir, e))
    }

    /// Fails what is outstanding with [`crate::FetchError::Closed`], makes durable what is filled and ends the threads.
    /// Spaces go on serving what they have. Dropping the cache does the same.
    ///
    /// # Errors
    /// Whatever the disk says.
    pub fn shutdown(&self) -> Result<(), StoreError> {
        self.engine.close();
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        for thread in threads {
            // A completer may be what ends the cache, and it runs on one of these threads.
            if thread.thread().id() != std::thread::current().id() {
                // A thread that panicked has said so.
                let _ = thread.join();
            }
        }
        let result = self.sync();
        self.engine.syncer.clear();
        result
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        // Nobody is left to tell; what did not become durable is fetched again.
        let _ = self.shutdown();
    }
}

fn make_dir(disk: &dyn Disk, dir: &Path) -> Result<(), StoreError> {
    match disk.make_dir(dir) {
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists && dir.is_dir() => Ok(()),
        other => other.map_err(|e| StoreError::io("make", dir, e)),
    }
}
