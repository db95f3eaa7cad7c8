//! Finding chunks across images: tables per object, the merged one, and damage to either.

use super::*;
use std::collections::HashSet;

fn chunk(i: u64) -> Vec<u8> {
    content(i, 3000)
}

fn find(store: &Store, i: u64) -> Option<ChunkRef> {
    store.import().unwrap().find_chunk(&Digest::of(&chunk(i))).unwrap()
}

/// A store of so many images with one object each; image `i` has the chunks `10 i` to `10 i + 9`.
fn filled(images: u64) -> (tempfile::TempDir, Store, Vec<ImageRecord>) {
    let (dir, store) = new_store();
    let records = (0..images)
        .map(|i| {
            let chunks: Vec<Vec<u8>> = (0..10).map(|k| chunk(i * 10 + k)).collect();
            import(&store, &format!("i{i}"), &chunks).unwrap()
        })
        .collect();
    (dir, store, records)
}

fn assert_all_found(store: &Store, records: &[ImageRecord]) {
    let session = store.import().unwrap();
    for (i, record) in (0..).zip(records) {
        for k in 0..10 {
            let found = session.find_chunk(&Digest::of(&chunk(i * 10 + k))).unwrap().unwrap();
            assert_eq!(found.object, record.objects[0]);
            let map = store.object_map(&found.object).unwrap();
            assert_eq!(map.chunk_at(found.block), Some(3000));
        }
    }
    assert_eq!(session.find_chunk(&Digest::of(b"nowhere")).unwrap(), None);
}

fn covered(store: &Store) -> HashSet<ObjectId> {
    match std::fs::read(store.layout.merged()) {
        Ok(bytes) => format::chunks::View::open(&bytes).unwrap().objects().iter().copied().collect(),
        Err(_) => HashSet::new(),
    }
}

#[test]
fn chunks_are_found_before_and_after_tables_are_merged() {
    for images in [1, 8, 9, 20] {
        let (_dir, store, records) = filled(images);
        assert_eq!(covered(&store).len() as u64, images / 9 * 9, "{images}");
        assert_all_found(&store, &records);
    }
}

#[test]
fn a_merged_table_that_is_lost_is_made_again() {
    let (_dir, store, records) = filled(20);
    for damage in [None, Some(&b"LRCHUNKS and then something else"[..]), Some(b"")] {
        match damage {
            Some(bytes) => std::fs::write(store.layout.merged(), bytes).unwrap(),
            None => std::fs::remove_file(store.layout.merged()).unwrap(),
        }
        assert_all_found(&store, &records);
        assert_eq!(covered(&store).len(), 20);
    }
}

#[test]
fn gc_takes_removed_objects_out_of_the_merged_table() {
    let (_dir, store, records) = filled(10);
    assert_eq!(covered(&store).len(), 9);
    for i in 0..5 {
        store.remove(&name(&format!("i{i}"))).unwrap();
    }
    // Before gc they are still there, and good to be found.
    assert!(find(&store, 0).is_some());
    store.gc(&GcOptions::default()).unwrap();
    assert_eq!(covered(&store), records[5..].iter().map(|r| r.objects[0]).collect());
    assert_eq!(find(&store, 0), None);
    assert!(find(&store, 50).is_some() && find(&store, 99).is_some());
    assert!(store.fsck(&FsckOptions::default()).unwrap().problems.is_empty());
}

#[test]
fn rows_of_objects_that_are_gone_or_damaged_are_not_believed() {
    let (_dir, store, records) = filled(9);
    let id = records[3].objects[0];
    let pack = store.layout.object(&id, Part::Pack);
    let good = std::fs::read(&pack).unwrap();
    std::fs::write(&pack, &good[1..]).unwrap();
    assert_eq!(find(&store, 30), None, "a pack of the wrong length");
    std::fs::write(&pack, &good).unwrap();
    assert!(find(&store, 30).is_some());
    let map = store.layout.object(&id, Part::Map);
    let good = std::fs::read(&map).unwrap();
    let mut bad = good.clone();
    bad[70] ^= 1;
    std::fs::write(&map, bad).unwrap();
    assert_eq!(find(&store, 30), None, "a damaged map");
    std::fs::remove_file(&map).unwrap();
    assert_eq!(find(&store, 30), None, "no map");
    assert!(find(&store, 40).is_some());
}

#[test]
fn a_flipped_bit_in_a_table_never_gives_a_wrong_place() {
    let (_dir, store, records) = filled(1);
    let path = store.layout.object(&records[0].objects[0], Part::Chunks);
    let right: Vec<ChunkRef> = (0..10).map(|k| find(&store, k).unwrap()).collect();
    let good = std::fs::read(&path).unwrap();
    for at in 0..good.len() {
        for bit in [0, 7] {
            let mut bytes = good.clone();
            bytes[at] ^= 1 << bit;
            std::fs::write(&path, &bytes).unwrap();
            let finder = chunks::Finder::open(&store.layout).unwrap();
            for (k, right) in (0..).zip(&right) {
                let found = finder.find(&Digest::of(&chunk(k)));
                assert!(found.is_none() || found == Some(*right), "byte {at}");
            }
        }
    }
}

#[test]
fn a_row_that_points_elsewhere_is_not_believed() {
    use format::chunks::{Header, Row};
    use zerocopy::IntoBytes;
    let (_dir, store, records) = filled(1);
    let id = records[0].objects[0];
    let digest = Digest::of(&chunk(0));
    let place = find(&store, 0).unwrap().block;
    for (object, block, found) in [(0, place, true), (1, place, false), (0, u32::MAX, false), (0, 1_000_000, false)] {
        let mut bytes = Header::new(&[id], 1).as_bytes().to_vec();
        bytes.extend_from_slice(id.as_bytes());
        bytes.extend_from_slice(Row::new(digest, object, block).as_bytes());
        std::fs::write(store.layout.object(&id, Part::Chunks), bytes).unwrap();
        assert_eq!(find(&store, 0).is_some(), found, "object {object} block {block}");
    }
}

#[test]
fn imports_at_once_rebuild_the_merged_table_without_harm() {
    let (_dir, store) = new_store();
    std::thread::scope(|s| {
        for t in 0..3u64 {
            let store = store.clone();
            s.spawn(move || {
                for i in 0..12 {
                    import(&store, &format!("t{t}:{i}"), &[chunk(1000 * t + i)]).unwrap();
                }
            });
        }
    });
    let session = store.import().unwrap();
    for t in 0..3 {
        for i in 0..12 {
            assert!(session.find_chunk(&Digest::of(&chunk(1000 * t + i))).unwrap().is_some());
        }
    }
    assert!(covered(&store).len() >= 9);
    drop(session);
    assert!(store.fsck(&FsckOptions::default()).unwrap().problems.is_empty());
}
