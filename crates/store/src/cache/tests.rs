use super::*;
use crate::disk::recording::Recording;
use crate::disk::{DiskFile, Open};
use crate::fault::{Fault, FaultStore, MemoryStore, TestObject};
use crate::source::{Presence, ReadIntoError, Resolution, read_into};
use crate::{Class, FetchError, Request};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Instant;

/// Long enough for anything that is to happen at all.
pub(crate) const LONG: Duration = Duration::from_secs(120);

pub(crate) fn request(deadline: Duration) -> Request {
    Request { id: 1, class: Class::Demand, deadline: Instant::now() + deadline }
}

/// What a fetch failed with.
pub(crate) fn fetch_error(error: &ReadIntoError) -> Option<&FetchError> {
    match error {
        ReadIntoError::Fetch(error) => Some(error),
        _ => None,
    }
}

/// Waits until a condition holds.
pub(crate) fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + LONG;
    while !holds() {
        assert!(Instant::now() < end, "{what} does not come");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A cache over a store that misbehaves on order, with one object.
pub(crate) struct Rig {
    pub(crate) space: Arc<Space>,
    pub(crate) cache: Cache,
    pub(crate) store: Arc<FaultStore>,
    pub(crate) memory: Arc<MemoryStore>,
    pub(crate) object: TestObject,
    pub(crate) options: CacheOptions,
    pub(crate) dir: tempfile::TempDir,
}

impl Rig {
    pub(crate) fn new(object: TestObject) -> Rig {
        Rig::with(object, options())
    }

    pub(crate) fn with(object: TestObject, options: CacheOptions) -> Rig {
        let dir = tempfile::tempdir().unwrap();
        let memory = Arc::new(MemoryStore::new());
        memory.put(object.id(), object.stored.clone());
        let store = Arc::new(FaultStore::new(memory.clone()));
        let cache = Cache::open(dir.path(), store.clone(), options.clone()).unwrap();
        let space = cache.space(object.map.clone()).unwrap();
        Rig { space, cache, store, memory, object, options, dir }
    }

    /// Ends the cache as if the process ended, well or badly, and opens it again.
    pub(crate) fn reopen(self, clean: bool) -> Rig {
        let Rig { space, cache, store, memory, object, options, dir } = self;
        if clean {
            cache.shutdown().unwrap();
        }
        drop(cache);
        drop(space);
        let cache = Cache::open(dir.path(), store.clone(), options.clone()).unwrap();
        let space = cache.space(object.map.clone()).unwrap();
        Rig { space, cache, store, memory, object, options, dir }
    }

    pub(crate) fn read(&self, offset: u64, len: usize) -> Result<Vec<u8>, ReadIntoError> {
        let mut out = vec![0xaa; len];
        read_into(&self.space, offset, &mut out, request(LONG)).map(|()| out)
    }

    /// Reads a range and compares it.
    pub(crate) fn check(&self, offset: u64, len: usize) {
        let got = self.read(offset, len).unwrap();
        assert!(got == self.object.content[offset as usize..][..len], "bytes {offset}+{len}");
    }

    pub(crate) fn check_all(&self) {
        self.check(0, self.object.content.len());
    }

    pub(crate) fn fetch(&self, offset: u64, len: usize, request: Request) -> mpsc::Receiver<Result<(), FetchError>> {
        let (tell, told) = mpsc::channel();
        self.space.fetch(offset, len, request, Box::new(move |result| _ = tell.send(result)));
        told
    }

    pub(crate) fn engine(&self) -> &Engine {
        &self.cache.engine
    }

    pub(crate) fn presence(&self, offset: u64, len: usize) -> Presence {
        self.space.resolve(offset, len, &mut Resolution::new()).unwrap()
    }

    /// The file that holds the space.
    pub(crate) fn data(&self) -> PathBuf {
        self.cache.space_dir(&self.object.id()).join("data")
    }
}

/// Quick ones: tests wait for what is to happen, not for intervals.
pub(crate) fn options() -> CacheOptions {
    CacheOptions { sync_interval: Duration::from_millis(5), threads: 2, ..CacheOptions::default() }
}

/// A disk that refuses to write or to sync on order.
#[derive(Debug, Default)]
pub(crate) struct Refusing {
    pub(crate) writes: AtomicBool,
    pub(crate) syncs: AtomicBool,
    pub(crate) refused: AtomicU64,
    /// Files' syncs wait while this is set, and say so.
    pub(crate) slow: AtomicBool,
    pub(crate) waiting: AtomicBool,
}

impl Refusing {
    fn check(&self, refuse: &AtomicBool, errno: rustix::io::Errno) -> io::Result<()> {
        if refuse.load(Ordering::SeqCst) {
            self.refused.fetch_add(1, Ordering::SeqCst);
            return Err(errno.into());
        }
        Ok(())
    }
}

impl Disk for Refusing {
    fn open(&self, path: &Path, how: Open) -> io::Result<DiskFile> {
        RealDisk.open(path, how)
    }
    fn write_at(&self, file: &DiskFile, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.check(&self.writes, rustix::io::Errno::NOSPC)?;
        RealDisk.write_at(file, bytes, offset)
    }
    fn resize(&self, file: &DiskFile, len: u64) -> io::Result<()> {
        RealDisk.resize(file, len)
    }
    fn punch(&self, file: &DiskFile, offset: u64, len: u64) -> io::Result<()> {
        RealDisk.punch(file, offset, len)
    }
    fn sync(&self, file: &DiskFile) -> io::Result<()> {
        while self.slow.load(Ordering::SeqCst) {
            self.waiting.store(true, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(1));
        }
        self.check(&self.syncs, rustix::io::Errno::IO)?;
        RealDisk.sync(file)
    }
    fn make_dir(&self, path: &Path) -> io::Result<()> {
        RealDisk.make_dir(path)
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        RealDisk.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        RealDisk.remove(path)
    }
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.check(&self.syncs, rustix::io::Errno::IO)?;
        RealDisk.sync_dir(path)
    }
}

#[test]
fn reopening_keeps_durable_frames_without_fetching_them_again() {
    let rig = Rig::new(TestObject::uniform(1, 20, 16));
    rig.check(0, 10 * 65536);
    rig.cache.sync().unwrap();
    let reads = rig.store.reads().len();
    let rig = rig.reopen(false);
    assert_eq!(rig.space.usage().present_frames, 10);
    rig.check(0, 10 * 65536);
    assert_eq!(rig.store.reads().len(), reads);
    assert_eq!(rig.cache.stats().frames_verified, 10);
    // Verified once, not at every read.
    rig.check(0, 10 * 65536);
    assert_eq!(rig.cache.stats().frames_verified, 10);
    rig.check_all();
    assert_eq!(rig.cache.stats().frames_filled, 10);
}

#[test]
fn frames_become_durable_by_themselves() {
    let rig = Rig::new(TestObject::uniform(2, 4, 16));
    rig.check_all();
    until("a batch", || rig.cache.stats().syncs > 0);
    let file = rig.cache.space_dir(&rig.object.id()).join("presence");
    let place = format::presence::Place { object: rig.object.id(), frame_count: 4, page: 0 };
    until("the claims", || {
        let [page, _] = format::presence::slots(&std::fs::read(&file).unwrap(), &place);
        page.is_some_and(|page| page.words[0] == 0b1111)
    });
}

#[test]
fn dropping_without_shutdown_is_as_good() {
    let rig = Rig::with(TestObject::uniform(3, 4, 16), CacheOptions { sync_interval: LONG, ..options() });
    rig.check_all();
    let rig = rig.reopen(false);
    assert_eq!(rig.space.usage().present_frames, 4);
}

#[test]
fn a_bit_flipped_on_disk_is_repaired_from_the_store() {
    let rig = Rig::new(TestObject::uniform(4, 6, 16));
    rig.check_all();
    rig.cache.shutdown().unwrap();
    let data = std::fs::File::options().write(true).open(rig.data()).unwrap();
    let flipped = 3 * 65536 + 777;
    data.write_all_at(&[!rig.object.content[flipped]], flipped as u64).unwrap();
    let rig = rig.reopen(true);
    rig.check_all();
    let stats = rig.cache.stats();
    assert_eq!((stats.corrupt_on_disk, stats.frames_verified, stats.frames_filled), (1, 5, 1));
    let rig = rig.reopen(true);
    rig.check_all();
    let stats = rig.cache.stats();
    assert_eq!((stats.corrupt_on_disk, stats.frames_verified), (0, 6), "the repair is durable");
}

#[test]
fn a_bit_flipped_on_disk_is_an_error_when_the_store_lacks_the_object() {
    let rig = Rig::new(TestObject::uniform(5, 6, 16));
    rig.check_all();
    rig.cache.shutdown().unwrap();
    let data = std::fs::File::options().write(true).open(rig.data()).unwrap();
    data.write_all_at(&[!rig.object.content[0]], 0).unwrap();
    rig.memory.remove(&rig.object.id());
    let rig = rig.reopen(true);
    let error = rig.read(100, 10).unwrap_err();
    assert!(matches!(fetch_error(&error), Some(FetchError::NotFound { .. })), "{error:?}");
    // And not only once; the others are not affected.
    rig.read(0, 1).unwrap_err();
    rig.check(65536, 5 * 65536);
}

#[test]
fn a_file_that_was_cut_or_replaced_is_fetched_anew() {
    for len in [0u64, 5, 3 * 65536] {
        let rig = Rig::new(TestObject::uniform(6, 6, 16));
        rig.check_all();
        rig.cache.shutdown().unwrap();
        std::fs::File::options().write(true).open(rig.data()).unwrap().set_len(len).unwrap();
        let rig = rig.reopen(true);
        assert_eq!(rig.space.usage().present_frames, 0);
        rig.check_all();
    }
}

#[test]
fn a_file_that_is_cut_while_in_use_gives_errors() {
    let rig = Rig::new(TestObject::uniform(7, 2, 16));
    rig.check_all();
    std::fs::File::options().write(true).open(rig.data()).unwrap().set_len(70_000).unwrap();
    rig.check(0, 65536);
    let error = rig.read(65536, 65536).unwrap_err();
    assert!(matches!(error, ReadIntoError::Read(crate::source::ReadError::Io(_))), "{error:?}");
}

#[test]
fn damaged_presence_files_claim_nothing() {
    let rig = Rig::new(TestObject::uniform(8, 6, 16));
    rig.check_all();
    rig.cache.shutdown().unwrap();
    let presence = rig.cache.space_dir(&rig.object.id()).join("presence");
    let good = std::fs::read(&presence).unwrap();
    for bad in [vec![], vec![0; 100], vec![0xff; 8192], good[..good.len() - 4096 - 1].to_vec()] {
        let other = tempfile::tempdir().unwrap();
        let dir = other.path().join("spaces").join(rig.object.id().to_hex());
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("presence"), &bad).unwrap();
        std::fs::copy(rig.data(), dir.join("data")).unwrap();
        let cache = Cache::open(other.path(), rig.store.clone(), options()).unwrap();
        let space = cache.space(rig.object.map.clone()).unwrap();
        assert_eq!(space.usage().present_frames, 0);
    }
}

#[test]
fn one_cache_per_directory() {
    let rig = Rig::new(TestObject::uniform(9, 1, 16));
    let second = Cache::open(rig.dir.path(), rig.store.clone(), options());
    assert!(matches!(second, Err(StoreError::Busy { .. })));
    let Rig { cache, dir, store, .. } = rig;
    drop(cache);
    Cache::open(dir.path(), store, options()).unwrap();
}

#[test]
fn shutting_down_fails_what_is_outstanding_and_serves_what_is_there() {
    let rig = Rig::new(TestObject::uniform(10, 4, 16));
    rig.check(0, 65536);
    rig.store.set(Fault::Silent);
    let parked: Vec<_> = (1..4).map(|i| rig.fetch(i * 65536, 65536, request(LONG))).collect();
    rig.cache.shutdown().unwrap();
    for told in parked {
        assert!(matches!(told.recv().unwrap(), Err(FetchError::Closed)));
    }
    rig.check(0, 65536);
    assert!(matches!(fetch_error(&rig.read(65536, 1).unwrap_err()), Some(FetchError::Closed)));
    rig.cache.shutdown().unwrap();
    rig.store.release();
    assert_eq!(rig.cache.stats().reads_pending, 0);
}

#[test]
fn a_completer_may_end_the_cache() {
    let Rig { space, cache, object: _object, dir: _dir, .. } = Rig::new(TestObject::uniform(11, 2, 16));
    let (tell, told) = mpsc::channel();
    let done = move |result: Result<(), FetchError>| {
        drop(cache);
        tell.send(result).unwrap();
    };
    space.fetch(0, 1, request(LONG), Box::new(done));
    told.recv().unwrap().unwrap();
}

#[test]
fn a_completer_that_panics_harms_nobody_else() {
    let rig = Rig::new(TestObject::uniform(12, 8, 16));
    for i in 0..4 {
        rig.space.fetch(i * 65536, 1, request(LONG), Box::new(|_| panic!("on order")));
    }
    rig.check_all();
}

#[test]
fn dropping_an_object_frees_its_blocks_and_it_can_be_read_again() {
    let rig = Rig::new(TestObject::uniform(13, 50, 16));
    rig.check_all();
    rig.cache.sync().unwrap();
    let allocated = || std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(rig.data()).unwrap()) * 512;
    assert!(allocated() >= 50 * 65536);
    let evicted = rig.cache.drop_object(&rig.object.id()).unwrap();
    assert_eq!(evicted, Evicted { frames: 50, bytes: 50 * 65536, kept: 0 });
    assert!(allocated() < 65536, "{}", allocated());
    assert_eq!(rig.presence(0, 1), Presence::Missing);
    assert_eq!(rig.cache.drop_object(&rig.object.id()).unwrap(), Evicted::default());
    rig.check_all();
    assert_eq!(rig.cache.stats().frames_evicted, 50);
}

#[test]
fn spaces_that_are_not_open_are_removed_whole() {
    let rig = Rig::new(TestObject::uniform(14, 10, 16));
    let other = TestObject::uniform(15, 10, 16);
    rig.memory.put(other.id(), other.stored.clone());
    rig.check_all();
    let space = rig.cache.space(other.map.clone()).unwrap();
    read_into(&space, 0, &mut vec![0; other.content.len()], request(LONG)).unwrap();
    assert_eq!(rig.cache.release_unused().unwrap(), 0);
    drop(space);
    assert_eq!(rig.cache.release_unused().unwrap(), 1);
    assert_eq!(rig.cache.open_spaces().len(), 1);
    let dropped = rig.cache.drop_object(&other.id()).unwrap();
    assert!(dropped.bytes >= 10 * 65536, "{dropped:?}");
    assert!(!rig.cache.space_dir(&other.id()).exists());
    assert_eq!(rig.cache.drop_object(&other.id()).unwrap(), Evicted::default());

    rig.cache.space(other.map.clone()).unwrap();
    std::fs::create_dir(rig.dir.path().join("spaces/not-a-space")).unwrap();
    rig.cache.prune(&|id| *id == rig.object.id()).unwrap();
    assert!(!rig.cache.space_dir(&other.id()).exists());
    rig.cache.prune(&|_| false).unwrap();
    assert!(rig.data().exists(), "in use");
    assert!(rig.dir.path().join("spaces/not-a-space").exists());
}

#[test]
fn a_disk_that_refuses_frames_costs_memory_and_not_the_answer() {
    let disk = Arc::new(Refusing::default());
    let rig = Rig::with(
        TestObject::uniform(16, 40, 16),
        CacheOptions { disk: disk.clone(), overlay_bytes: 8 * 65536, ..options() },
    );
    rig.check(0, 65536);
    disk.writes.store(true, Ordering::SeqCst);
    for round in 0..3 {
        for frame in 1..40u64 {
            rig.check(frame * 65536 + 5, 1000);
            assert!(rig.cache.stats().overlay_bytes <= 8 * 65536, "round {round}");
        }
    }
    // Several frames at once, more than a ring of that size would keep for them without their being held.
    rig.check(65536, 8 * 65536);
    assert!(rig.cache.stats().disk_refused >= 39 * 3);
    assert!(rig.space.usage().present_frames <= 1 + 16);
    disk.writes.store(false, Ordering::SeqCst);
    until("the overlay to be written", || rig.cache.stats().overlay_bytes == 0);
    let reads = rig.store.reads().len();
    rig.check(8 * 65536, 65536);
    assert_eq!(rig.store.reads().len(), reads, "what was in memory is on disk now");
    rig.check_all();
    rig.check_all();
    assert_eq!(rig.presence(0, rig.object.content.len()), Presence::Ready);
}

#[test]
fn readers_on_a_refusing_disk_all_get_their_bytes() {
    let disk = Arc::new(Refusing::default());
    disk.writes.store(true, Ordering::SeqCst);
    let rig = Rig::with(TestObject::uniform(17, 64, 16), CacheOptions { disk, overlay_bytes: 4 * 65536, ..options() });
    std::thread::scope(|scope| {
        for t in 0..4u64 {
            let rig = &rig;
            scope.spawn(move || {
                for i in 0..64 {
                    let frame = (i * 7 + t * 16) % 62;
                    rig.check(frame * 65536 + 60_000, 70_000);
                }
            });
        }
    });
}

#[test]
fn frames_that_could_not_be_synced_are_fetched_again() {
    let disk = Arc::new(Refusing::default());
    let rig = Rig::with(
        TestObject::uniform(18, 4, 16),
        CacheOptions { disk: disk.clone(), sync_interval: LONG, ..options() },
    );
    rig.check(0, 65536);
    rig.cache.sync().unwrap();
    disk.syncs.store(true, Ordering::SeqCst);
    rig.check_all();
    rig.cache.sync().unwrap_err();
    assert_eq!(rig.presence(0, 65536), Presence::Ready, "what was durable stays");
    assert_eq!(rig.presence(65536, 65536), Presence::Missing);
    assert_eq!(rig.cache.stats().sync_errors, 1);
    disk.syncs.store(false, Ordering::SeqCst);
    rig.check_all();
    assert_eq!(rig.cache.stats().frames_filled, 7);
    rig.cache.sync().unwrap();
    let rig = rig.reopen(true);
    assert_eq!(rig.space.usage().present_frames, 4);
}

/// The kernel tells of lost pages once; the sync that hears of it may have begun before they were written.
#[test]
fn frames_that_were_filled_while_a_sync_failed_are_fetched_again() {
    let disk = Arc::new(Refusing::default());
    let rig = Rig::with(
        TestObject::uniform(28, 4, 16),
        CacheOptions { disk: disk.clone(), sync_interval: LONG, ..options() },
    );
    rig.check(0, 65536);
    disk.syncs.store(true, Ordering::SeqCst);
    disk.slow.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        let syncing = scope.spawn(|| rig.cache.sync());
        until("the sync", || disk.waiting.load(Ordering::SeqCst));
        rig.check(65536, 65536);
        disk.slow.store(false, Ordering::SeqCst);
        syncing.join().unwrap().unwrap_err();
    });
    assert_eq!(rig.presence(0, 1), Presence::Missing);
    assert_eq!(rig.presence(65536, 1), Presence::Missing);
    disk.syncs.store(false, Ordering::SeqCst);
    rig.cache.sync().unwrap();
    let rig = rig.reopen(true);
    assert_eq!(rig.space.usage().present_frames, 0);
    rig.check_all();
    assert_eq!(rig.cache.stats().frames_filled, 4);
}

#[test]
fn a_failing_disk_does_not_stop_eviction_from_being_safe() {
    let disk = Arc::new(Refusing::default());
    let rig = Rig::with(TestObject::uniform(19, 4, 16), CacheOptions { disk: disk.clone(), ..options() });
    rig.check_all();
    rig.cache.sync().unwrap();
    disk.syncs.store(true, Ordering::SeqCst);
    rig.cache.drop_object(&rig.object.id()).unwrap_err();
    // The claims may still be on disk, so the bytes must be too.
    let data = std::fs::read(rig.data()).unwrap();
    assert!(data == rig.object.content);
    disk.syncs.store(false, Ordering::SeqCst);
    rig.check_all();
    assert_eq!(rig.cache.drop_object(&rig.object.id()).unwrap().frames, 4);
}

#[test]
fn frames_can_be_evicted_when_the_disk_takes_no_page() {
    let disk = Arc::new(Refusing::default());
    let rig = Rig::with(TestObject::uniform(22, 8, 16), CacheOptions { disk: disk.clone(), ..options() });
    rig.check_all();
    rig.cache.sync().unwrap();
    disk.writes.store(true, Ordering::SeqCst);
    assert_eq!(rig.space.evict(0, 65536).unwrap().frames, 1);
    disk.writes.store(false, Ordering::SeqCst);
    rig.check(65536, 7 * 65536);
    let rig = rig.reopen(true);
    assert_eq!(rig.space.usage().present_frames, 7, "the others are claimed anew");
    rig.check_all();
    assert_eq!(rig.cache.stats().corrupt_on_disk, 0);
}

/// Every state that a crash can leave opens, claims only what is there, and reads right.
#[test]
fn every_crash_state_reads_right() {
    let object = TestObject::new(20, [(0, 3), (1, 16), (0, 1), (2, 5), (0, 2)]);
    let root = tempfile::tempdir().unwrap();
    let disk = Arc::new(Recording::new(root.path()));
    let memory = Arc::new(MemoryStore::new());
    memory.put(object.id(), object.stored.clone());
    let frame = |i: u32| {
        let row = object.map.frame(i).unwrap();
        (u64::from(row.space_block.get()) * 4096, row.unpacked_len())
    };
    {
        let options = CacheOptions { disk: disk.clone(), sync_interval: LONG, ..options() };
        let cache = Cache::open(&root.path().join("cache"), memory.clone(), options).unwrap();
        let space = cache.space(object.map.clone()).unwrap();
        let read = |i: u32| {
            let (offset, len) = frame(i);
            let mut out = vec![0; len];
            read_into(&space, offset, &mut out, request(LONG)).unwrap();
            assert!(out == object.content[offset as usize..][..len]);
        };
        read(0);
        read(1);
        cache.sync().unwrap();
        disk.mark("01");
        read(2);
        read(3);
        cache.sync().unwrap();
        disk.mark("0123");
        space.evict(frame(1).0, frame(1).1 as u64).unwrap();
        disk.mark("023");
        read(4);
        cache.sync().unwrap();
        disk.mark("0234");
        read(1);
        cache.sync().unwrap();
        disk.mark("01234");
        cache.drop_object(&object.id()).unwrap();
        disk.mark("none");
    }
    let mut opened = std::collections::HashSet::new();
    let mut marks_seen = std::collections::BTreeSet::new();
    let states = disk.crashes(6000, 1, |dir, marks, name| {
        let cache_dir = dir.join("cache");
        // What the presence file says, against what is on disk.
        let space_dir = cache_dir.join("spaces").join(object.id().to_hex());
        let presence = std::fs::read(space_dir.join("presence")).unwrap_or_default();
        let data = std::fs::read(space_dir.join("data")).unwrap_or_default();
        let frame_count = object.map.frame_count();
        let place = format::presence::Place { object: object.id(), frame_count, page: 0 };
        let claimed = |page: &format::presence::Page| {
            (0..frame_count).filter(|i| page.words[0] >> i & 1 == 1).collect::<Vec<_>>()
        };
        let slots = format::presence::slots(&presence, &place);
        for i in slots.iter().flatten().flat_map(claimed) {
            let (offset, len) = frame(i);
            let have = data.get(offset as usize..offset as usize + len);
            assert!(
                have == Some(&object.content[offset as usize..][..len]),
                "{name}: frame {i} is claimed and not there"
            );
        }
        // What was promised stays, until it is evicted.
        marks_seen.insert(marks.len());
        let promised: &[u32] = match marks.last().map(String::as_str) {
            Some("01") => &[0, 1],
            Some("0123") => &[0, 2, 3],
            Some("023") => &[0, 2, 3],
            Some("0234") => &[0, 2, 3, 4],
            // From here everything is being evicted.
            _ => &[],
        };
        let newest = slots[0].as_ref().map(claimed).unwrap_or_default();
        assert!(promised.iter().all(|i| newest.contains(i)), "{name}: {promised:?} promised, {newest:?} claimed");
        // And it opens and reads right, whatever it says. Many states look alike by then.
        if !cache_dir.exists() || !opened.insert((presence, data)) {
            return;
        }
        let cache = Cache::open(&cache_dir, memory.clone(), CacheOptions { sync_interval: LONG, ..options() }).unwrap();
        let space = cache.space(object.map.clone()).unwrap();
        for i in 0..frame_count {
            let (offset, len) = frame(i);
            let mut out = vec![0; len];
            read_into(&space, offset, &mut out, request(LONG)).unwrap();
            assert!(out == object.content[offset as usize..][..len], "{name}: frame {i}");
        }
        assert_eq!(cache.stats().corrupt_on_disk, 0, "{name}");
    });
    assert!(states > 300 && opened.len() > 50, "{states} states, {} of them opened", opened.len());
    assert_eq!(marks_seen.len(), 7);
}

/// What the next test kills: fills, evicts and claims for ever. Does nothing by itself.
#[test]
fn a_child_that_fills() {
    let Some(dir) = std::env::var_os("LAZYROOT_TEST_FILL") else { return };
    let object = TestObject::uniform(23, 40, 4);
    let memory = Arc::new(MemoryStore::new());
    memory.put(object.id(), object.stored.clone());
    let options = CacheOptions { sync_interval: Duration::from_millis(1), ..options() };
    let cache = Cache::open(Path::new(&dir), memory, options).unwrap();
    let space = cache.space(object.map.clone()).unwrap();
    for i in 0u64.. {
        read_into(&space, i * 7 % 40 * 16384, &mut [0; 16384], request(LONG)).unwrap();
        if i % 5 == 0 {
            space.evict(i * 11 % 40 * 16384, 16384).unwrap();
        }
    }
}

#[test]
fn killed_at_any_moment_what_is_claimed_is_there() {
    let object = TestObject::uniform(23, 40, 4);
    let memory = Arc::new(MemoryStore::new());
    memory.put(object.id(), object.stored.clone());
    let dir = tempfile::tempdir().unwrap();
    let mut claimed = 0;
    for round in 0..12u64 {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "cache::tests::a_child_that_fills"])
            .env("LAZYROOT_TEST_FILL", dir.path())
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        let presence = dir.path().join("spaces").join(object.id().to_hex()).join("presence");
        until("the child to begin", || presence.exists() || child.try_wait().unwrap().is_some());
        std::thread::sleep(Duration::from_millis(round * 13 % 50));
        assert!(child.try_wait().unwrap().is_none(), "it runs until it is killed");
        child.kill().unwrap();
        child.wait().unwrap();
        let cache = Cache::open(dir.path(), memory.clone(), options()).unwrap();
        let space = cache.space(object.map.clone()).unwrap();
        claimed += space.usage().present_frames;
        let mut bytes = vec![0; object.content.len()];
        read_into(&space, 0, &mut bytes, request(LONG)).unwrap();
        assert!(bytes == object.content);
        assert_eq!(cache.stats().corrupt_on_disk, 0, "round {round}");
        if round % 3 == 2 {
            cache.drop_object(&object.id()).unwrap();
        }
    }
    assert!(claimed > 0);
}

#[test]
fn priv_a_full_disk_serves_from_memory() {
    const NAME: &str = "priv_a_full_disk_serves_from_memory";
    let dir = tempfile::tempdir().unwrap();
    let mounted =
        std::process::Command::new("mount").args(["-t", "tmpfs", "-o", "size=4m", "none"]).arg(dir.path()).output();
    match mounted {
        Ok(out) if out.status.success() => {}
        Ok(out) => return println!("SKIP {NAME}: {}", String::from_utf8_lossy(&out.stderr).trim()),
        Err(e) => return println!("SKIP {NAME}: mount: {e}"),
    }
    let object = TestObject::uniform(21, 16, 256);
    let memory = Arc::new(MemoryStore::new());
    memory.put(object.id(), object.stored.clone());
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let cache = Cache::open(dir.path(), memory.clone(), options()).unwrap();
        let space = cache.space(object.map.clone()).unwrap();
        let check = || {
            for (i, want) in object.content.chunks(300_000).enumerate() {
                let mut out = vec![0; want.len()];
                read_into(&space, i as u64 * 300_000, &mut out, request(LONG)).unwrap();
                assert!(out == want);
            }
        };
        check();
        check();
        assert!(cache.stats().disk_refused > 0, "16 MiB do not fit into 4");
        // Room can be made on a full disk.
        let evicted = cache.drop_object(&object.id()).unwrap();
        assert!(evicted.frames > 0, "{evicted:?}");
        until("the overlay to be written", || cache.stats().overlay_bytes == 0);
        check();
    }));
    let out = std::process::Command::new("umount").arg(dir.path()).output().unwrap();
    assert!(out.status.success(), "{out:?}");
    result.unwrap();
}
