//! The store as a whole: import, publish, names, gc, fsck, other processes, failing disks and crashes.

mod crash;
mod dedup;
mod pack;
mod process;

use super::*;
use crate::layout::list;
use std::collections::BTreeMap;
use std::time::Instant;

/// Bytes that look like nothing else, compress a little and are not zero.
pub(crate) fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8 & 0x3f | 0x40
        })
        .collect()
}

pub(crate) fn name(text: &str) -> ImageName {
    ImageName::parse(text).unwrap()
}

pub(crate) fn new_store() -> (tempfile::TempDir, Store) {
    let dir = tempfile::tempdir().unwrap();
    let mut store = Store::open(&dir.path().join("store")).unwrap();
    store.set_lock_wait(Duration::from_millis(100));
    (dir, store)
}

/// Imports an image that consists of `chunks`; its record's config says where each went.
pub(crate) fn import(store: &Store, image: &str, chunks: &[Vec<u8>]) -> Result<ImageRecord, StoreError> {
    let session = store.import()?;
    let (record, index) = write_image(&session, image, chunks)?;
    session.publish(&name(image), &record, index)?;
    Ok(record)
}

/// Everything of an import but publishing.
pub(crate) fn write_image(
    session: &ImportSession,
    image: &str,
    chunks: &[Vec<u8>],
) -> Result<(ImageRecord, TmpFile), StoreError> {
    let pack = session.pack(&PackOptions::default())?;
    let mut stream = pack.stream();
    let mut places: Vec<(Digest, Option<ObjectId>, u32)> = Vec::new();
    let mut objects: BTreeMap<ObjectId, u64> = BTreeMap::new();
    for chunk in chunks {
        let digest = Digest::of(chunk);
        match session.find_chunk(&digest)? {
            Some(found) => {
                objects.insert(found.object, found.space_blocks);
                places.push((digest, Some(found.object), found.block));
            }
            None => places.push((digest, None, stream.put(chunk, &digest)?)),
        }
    }
    stream.flush()?;
    let packed = pack.finish()?;
    if let Some(packed) = &packed {
        objects.insert(packed.id, packed.space_blocks);
    }
    let places: Vec<(String, String, u32)> = places
        .into_iter()
        .map(|(d, object, block)| {
            let object = object.or(packed.as_ref().map(|p| p.id)).unwrap();
            (d.to_hex(), object.to_hex(), block)
        })
        .collect();
    let objects: Vec<(ObjectId, u64)> = objects.into_iter().collect();
    let bytes = index::example(&objects, image);
    let mut index = session.tmp_file("index")?;
    index.write_all(&bytes).map_err(|e| StoreError::io("write", index.path(), e))?;
    let record = ImageRecord {
        index: index::read(index.file(), index.path())?.digest,
        identity: Digest::of(image.as_bytes()),
        objects: objects.iter().map(|(id, _)| *id).collect(),
        config: serde_json::json!(places),
        origin: format!("test:{image}"),
        created: 1,
        packed_bytes: packed.map_or(0, |p| p.stored_bytes),
        ..ImageRecord::default()
    };
    Ok((record, index))
}

/// Reads every chunk of an image through its objects and checks it.
pub(crate) fn check(store: &Store, image: &ImageName) -> usize {
    check_record(store, &store.image(image).unwrap())
}

pub(crate) fn check_record(store: &Store, record: &ImageRecord) -> usize {
    let index = store.index_file(&record.index).unwrap();
    let summary = index::read(index.file(), index.path()).unwrap();
    assert_eq!((summary.digest, &summary.objects), (record.index, &record.objects));
    let mut spaces: BTreeMap<ObjectId, Vec<u8>> = BTreeMap::new();
    for id in &record.objects {
        let map = store.object_map(id).unwrap();
        let pack = std::fs::read(store.layout.object(id, Part::Pack)).unwrap();
        let mut space = vec![0; map.space_blocks() as usize * 4096];
        let (mut decoder, mut out) = (FrameDecoder::new(), Vec::new());
        for (i, frame) in (0..).zip(map.frames()) {
            let range = frame.stored_range();
            decoder.decode(&map, i, &pack[range.start as usize..range.end as usize], &mut out).unwrap();
            space[frame.space_block.get() as usize * 4096..][..out.len()].copy_from_slice(&out);
        }
        spaces.insert(*id, space);
    }
    let places: Vec<(String, String, u32)> = serde_json::from_value(record.config.clone()).unwrap();
    for (digest, object, block) in &places {
        let object = Digest::from_hex(object).unwrap();
        let len = store.object_map(&object).unwrap().chunk_at(*block).unwrap();
        let chunk = &spaces[&object][*block as usize * 4096..][..len as usize];
        assert_eq!(Digest::of(chunk).to_hex(), *digest);
    }
    places.len()
}

pub(crate) fn names(store: &Store) -> Vec<String> {
    store.images().unwrap().into_iter().map(|(n, r)| r.map(|_| n.to_string()).unwrap()).collect()
}

#[test]
fn images_are_imported_named_and_removed() {
    let (_dir, store) = new_store();
    let chunks: Vec<Vec<u8>> = (0..20).map(|i| content(i, 1000 * i as usize + 1)).collect();
    let record = import(&store, "a:1", &chunks).unwrap();
    assert_eq!(store.image(&name("a:1")).unwrap(), record);
    assert_eq!(check(&store, &name("a:1")), 20);
    store.tag(&name("a:1"), &name("reg.io:5000/b/c")).unwrap();
    assert_eq!(names(&store), ["a:1", "reg.io:5000/b/c:latest"]);
    store.remove(&name("a:1")).unwrap();
    assert_eq!(names(&store), ["reg.io:5000/b/c:latest"]);
    check(&store, &name("reg.io:5000/b/c"));
    for error in [
        store.remove(&name("a:1")).unwrap_err(),
        store.image(&name("a:1")).unwrap_err(),
        store.tag(&name("a:1"), &name("x")).unwrap_err(),
    ] {
        assert!(matches!(error, StoreError::NoImage { .. }), "{error}");
        assert!(error.to_string().contains("a:1"), "{error}");
    }
    // Replacing a name.
    let other = import(&store, "reg.io:5000/b/c", &[content(99, 10)]).unwrap();
    assert_eq!(store.image(&name("reg.io:5000/b/c")).unwrap(), other);
    assert!(list(&store.layout.tmp()).unwrap().is_empty());
}

#[test]
fn a_store_is_found_again_by_another_handle() {
    let (dir, store) = new_store();
    import(&store, "a", &[content(1, 100)]).unwrap();
    drop(store);
    let store = Store::open(&dir.path().join("store")).unwrap();
    check(&store, &name("a"));
    assert!(store.cache_dir().is_dir() && store.objects_dir().is_dir());
}

#[test]
fn the_same_import_again_changes_nothing() {
    let (_dir, store) = new_store();
    let chunks = [content(1, 5000), content(2, 70)];
    let first = import(&store, "a", &chunks).unwrap();
    let files = list(&store.layout.objects()).unwrap();
    let again = import(&store, "a", &chunks).unwrap();
    assert_eq!((first.index, first.objects), (again.index, again.objects));
    assert_eq!(again.packed_bytes, 0, "everything is there already");
    assert_eq!(list(&store.layout.objects()).unwrap(), files);
}

#[test]
fn what_does_not_fit_together_is_not_published() {
    let (_dir, store) = new_store();
    type Damage = fn(&mut ImageRecord);
    let cases: [(&str, Damage); 4] = [
        ("another index", |r| r.index = Digest::of(b"x")),
        ("another index", |r| r.identity = Digest::of(b"x")),
        ("every object", |r| r.objects.clear()),
        ("missing from the store", |r| r.objects.push(Digest::of(b"x"))),
    ];
    for (why, damage) in cases {
        let session = store.import().unwrap();
        let (mut record, index) = write_image(&session, "a", &[content(1, 100)]).unwrap();
        damage(&mut record);
        let error = session.publish(&name("a"), &record, index).unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
    assert!(names(&store).is_empty());
    assert!(list(&store.layout.objects()).unwrap().is_empty(), "nothing was moved");
}

#[test]
fn an_abandoned_import_leaves_nothing() {
    let (_dir, store) = new_store();
    import(&store, "a", &[content(1, 100)]).unwrap();
    let before = list(&store.layout.objects()).unwrap();
    let session = store.import().unwrap();
    let _ = write_image(&session, "b", &[content(2, 10_000)]).unwrap();
    drop(session);
    // In the middle of a pack.
    let session = store.import().unwrap();
    let pack = session.pack(&PackOptions::default()).unwrap();
    let mut stream = pack.stream();
    stream.put(&[1; 100], &Digest::of(&[1; 100])).unwrap();
    drop((session, stream, pack));
    assert_eq!(list(&store.layout.objects()).unwrap(), before);
    assert!(list(&store.layout.tmp()).unwrap().is_empty());
    assert_eq!(names(&store), ["a:latest"]);
}

#[test]
fn two_imports_at_once_both_arrive() {
    let (_dir, store) = new_store();
    let shared: Vec<Vec<u8>> = (0..10).map(|i| content(i, 30_000)).collect();
    std::thread::scope(|s| {
        for t in 0..4u64 {
            let (store, mut chunks) = (store.clone(), shared.clone());
            chunks.push(content(100 + t, 5000));
            s.spawn(move || {
                for round in 0..5 {
                    import(&store, &format!("i{t}:{round}"), &chunks).unwrap();
                }
            });
        }
    });
    let all = names(&store);
    assert_eq!(all.len(), 20);
    for n in all {
        assert_eq!(check(&store, &name(&n)), 11);
    }
    let report = store.fsck(&FsckOptions::default()).unwrap();
    assert!(report.problems.is_empty(), "{:?}", report.problems);
}

#[test]
fn gc_removes_what_nothing_refers_to() {
    let (_dir, store) = new_store();
    let (one, two, three) = (content(1, 60_000), content(2, 60_000), content(3, 60_000));
    let a = import(&store, "a", std::slice::from_ref(&one)).unwrap();
    let b = import(&store, "b", &[one.clone(), two.clone()]).unwrap();
    let c = import(&store, "c", &[two, three]).unwrap();
    assert_eq!(b.objects.len(), 2);
    let new = |r: &ImageRecord, old: &ImageRecord| *r.objects.iter().find(|o| !old.objects.contains(o)).unwrap();
    let c_own = new(&c, &b);
    assert_eq!(store.gc(&GcOptions::default()).unwrap(), GcReport::default());

    store.remove(&name("a")).unwrap();
    let report = store.gc(&GcOptions::default()).unwrap();
    assert_eq!((report.indexes, report.objects), (vec![a.index], vec![]), "b still needs a's object");
    store.remove(&name("c")).unwrap();
    let report = store.gc(&GcOptions::default()).unwrap();
    assert_eq!((report.indexes, report.objects), (vec![c.index], vec![c_own]));
    assert!(report.bytes > 30_000, "{}", report.bytes);
    assert_eq!(check(&store, &name("b")), 2);
    assert!(store.fsck(&FsckOptions::default()).unwrap().problems.is_empty());
    store.remove(&name("b")).unwrap();
    store.gc(&GcOptions::default()).unwrap();
    for dir in [store.layout.objects(), store.layout.indexes(), store.layout.refs(), store.layout.tmp()] {
        assert!(list(&dir).unwrap().is_empty(), "{}", dir.display());
    }
}

#[test]
fn gc_keeps_what_somebody_has_open() {
    let (_dir, store) = new_store();
    let record = import(&store, "a", &[content(1, 60_000)]).unwrap();
    let open = store.index_file(&record.index).unwrap();
    store.remove(&name("a")).unwrap();
    let report = store.gc(&GcOptions::default()).unwrap();
    assert_eq!((&report.in_use, report.objects.len()), (&vec![record.index], 0));
    check_record(&store, &record);
    // Importing it again must not hide the one that is open.
    import(&store, "a", &[content(1, 60_000)]).unwrap();
    store.remove(&name("a")).unwrap();
    assert_eq!(store.gc(&GcOptions::default()).unwrap().in_use, [record.index]);
    drop(open);
    let report = store.gc(&GcOptions::default()).unwrap();
    assert_eq!((report.in_use.len(), report.objects), (0, record.objects));
    assert!(matches!(store.index_file(&record.index), Err(StoreError::Missing { .. })));
}

#[test]
fn gc_waits_for_imports_and_imports_for_gc() {
    let (_dir, store) = new_store();
    let session = store.import().unwrap();
    let wait = GcOptions { wait: Duration::from_millis(50) };
    let start = Instant::now();
    let busy = store.gc(&wait).unwrap_err();
    assert!(start.elapsed() >= Duration::from_millis(50));
    assert!(busy.to_string().contains("an import"), "{busy}");
    std::thread::scope(|s| {
        let gc = s.spawn(|| store.gc(&GcOptions { wait: Duration::from_secs(60) }).is_ok());
        std::thread::sleep(Duration::from_millis(30));
        drop(session);
        assert!(gc.join().unwrap());
    });
    let lock = lock::try_path(&store.layout.lock(), Mode::Exclusive).unwrap().unwrap();
    for error in [store.import().unwrap_err(), store.remove(&name("a")).unwrap_err()] {
        assert!(error.to_string().contains("a gc is running"), "{error}");
    }
    drop(lock);
    store.import().unwrap();
}

#[test]
fn gc_touches_nothing_when_a_ref_is_damaged() {
    let (_dir, store) = new_store();
    let record = import(&store, "a", &[content(1, 1000)]).unwrap();
    std::fs::write(store.layout.refs().join(name("b").file_name()), "{").unwrap();
    store.remove(&name("a")).unwrap();
    let error = store.gc(&GcOptions::default()).unwrap_err();
    assert!(error.to_string().contains("b@latest"), "{error}");
    check_record(&store, &record);
    let images = store.images().unwrap();
    assert!(matches!(&images[..], [(_, Err(StoreError::Corrupt { .. }))]), "{images:?}");
    store.remove(&name("b")).unwrap();
    assert_eq!(store.gc(&GcOptions::default()).unwrap().objects.len(), 1);
}

#[test]
fn every_flipped_bit_is_found() {
    let (_dir, store) = new_store();
    let noise: Vec<u8> = blake3::Hasher::new().finalize_xof().bytes(5000);
    let record = import(&store, "a", &[content(1, 3000), noise, content(2, 100)]).unwrap();
    let id = record.objects[0];
    let clean = store.fsck(&FsckOptions::images(vec![name("a")])).unwrap();
    assert!(clean.problems.is_empty(), "{:?}", clean.problems);
    assert_eq!((clean.images, clean.indexes, clean.objects, clean.frames), (1, 1, 1, 1));
    let ref_path = store.layout.refs().join(name("a").file_name());
    let files = [
        (store.layout.object(&id, Part::Pack), true),
        (store.layout.object(&id, Part::Map), true),
        (store.layout.object(&id, Part::Chunks), false),
        (store.layout.index(&record.index), true),
    ];
    let table = (files[2].0.clone(), std::fs::read(&files[2].0).unwrap());
    for (path, serious) in files {
        // A damaged object loses its table.
        std::fs::write(&table.0, &table.1).unwrap();
        let good = std::fs::read(&path).unwrap();
        // Every byte once, every bit position in turn.
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 1 << (at % 8);
            std::fs::write(&path, &bytes).unwrap();
            let report = store.fsck(&FsckOptions::default()).unwrap();
            let found = report.problems.iter().any(|p| p.path == path && p.serious == serious);
            // One bit of a zstd header means nothing: what is read is still what was written.
            let harmless = || path.extension().is_some_and(|e| e == "pack") && at < 8 && check(&store, &name("a")) == 3;
            assert!(found || harmless(), "{} byte {at}: {:?}", path.display(), report.problems);
        }
        std::fs::write(&path, &good[..good.len() - 1]).unwrap();
        assert!(!store.fsck(&FsckOptions::default()).unwrap().problems.is_empty(), "{} cut", path.display());
        std::fs::remove_file(&path).unwrap();
        assert!(!store.fsck(&FsckOptions::default()).unwrap().problems.is_empty(), "{} gone", path.display());
        std::fs::write(&path, &good).unwrap();
    }
    std::fs::write(&ref_path, "no").unwrap();
    assert!(store.fsck(&FsckOptions::default()).unwrap().problems.iter().any(|p| p.path == ref_path));
    let missing = store.fsck(&FsckOptions::images(vec![name("x")]));
    assert!(matches!(missing, Err(StoreError::NoImage { .. })));
}

#[test]
fn damage_that_hurts_no_image_is_not_serious() {
    let (_dir, store) = new_store();
    let record = import(&store, "a", &[content(1, 1000)]).unwrap();
    store.remove(&name("a")).unwrap();
    std::fs::remove_file(store.layout.index(&record.index)).unwrap();
    std::fs::remove_file(store.layout.object(&record.objects[0], Part::Pack)).unwrap();
    let problems = store.fsck(&FsckOptions::default()).unwrap().problems;
    assert!(matches!(&problems[..], [p] if !p.serious && p.what.contains("gc")), "{problems:?}");
    store.gc(&GcOptions::default()).unwrap();
    assert!(store.fsck(&FsckOptions::default()).unwrap().problems.is_empty());
}

#[test]
fn importing_again_heals_a_damaged_image() {
    let (_dir, store) = new_store();
    let chunks = [content(1, 60_000)];
    let record = import(&store, "a", &chunks).unwrap();
    let index = store.layout.index(&record.index);
    let pack = store.layout.object(&record.objects[0], Part::Pack);
    let good = std::fs::read(&index).unwrap();
    let mut bytes = good.clone();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&index, bytes).unwrap();
    std::fs::remove_file(&pack).unwrap();
    import(&store, "a", &chunks).unwrap();
    check(&store, &name("a"));
    let problems = store.fsck(&FsckOptions::images(vec![name("a")])).unwrap().problems;
    assert!(problems.is_empty(), "{problems:?}");
}

#[test]
fn importing_again_heals_what_fsck_found_damaged() {
    // With and without a merged table, which covers the damaged object too.
    for others in [0u64, 12] {
        let (_dir, store) = new_store();
        let chunks = [content(1, 60_000), content(2, 60_000)];
        let record = import(&store, "a", &chunks).unwrap();
        for i in 0..others {
            import(&store, &format!("o{i}"), &[content(100 + i, 5000)]).unwrap();
        }
        let own = import(&store, "b", &[chunks[0].clone(), content(3, 100)]).unwrap();
        assert_eq!(store.layout.merged().exists(), others > 0);
        let id = record.objects[0];
        assert!(own.objects.contains(&id) && own.objects.len() == 2);
        let pack = store.layout.object(&id, Part::Pack);
        let mut bytes = std::fs::read(&pack).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle..middle + 8].iter_mut().for_each(|b| *b ^= 0xff);
        std::fs::write(&pack, bytes).unwrap();
        let merged = std::fs::read(store.layout.merged()).ok();

        for _ in 0..2 {
            // Those that share the object are named even if only one is asked about.
            let report = store.fsck(&FsckOptions::images(vec![name("a")])).unwrap();
            assert!(matches!(&report.problems[..], [p] if p.serious && p.path == pack), "{:?}", report.problems);
            assert_eq!(report.problems[0].images, [name("a"), name("b")]);
            assert_eq!(report.distrusted, [id]);
            assert!(!store.layout.object(&id, Part::Chunks).exists() && !store.layout.merged().exists());
        }
        // An import beside it may bring back a merged table that still names the object.
        if let Some(merged) = &merged {
            std::fs::write(store.layout.merged(), merged).unwrap();
        }
        assert_eq!(store.import().unwrap().find_chunk(&Digest::of(&chunks[0])).unwrap(), None);

        let again = import(&store, "c", &[chunks[1].clone(), chunks[0].clone(), content(4, 9)]).unwrap();
        assert!(!again.objects.contains(&id) && again.packed_bytes > 0);
        assert_eq!(check(&store, &name("c")), 3);
        let report = store.fsck(&FsckOptions::images(vec![name("c")])).unwrap();
        assert!(report.problems.is_empty() && report.distrusted.is_empty(), "{report:?}");
        // The same content under the same names is the same again, and sound.
        for n in ["a", "b"] {
            let all = if n == "a" { chunks.to_vec() } else { vec![chunks[0].clone(), content(3, 100)] };
            import(&store, n, &all).unwrap();
            check(&store, &name(n));
        }
        store.gc(&GcOptions::default()).unwrap();
        let report = store.fsck(&FsckOptions::default()).unwrap();
        assert!(report.problems.is_empty(), "{report:?}");
    }
}

trait XofBytes {
    fn bytes(self, len: usize) -> Vec<u8>;
}

impl XofBytes for blake3::OutputReader {
    fn bytes(mut self, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.fill(&mut out);
        out
    }
}
