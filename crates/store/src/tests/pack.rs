//! What packs promise: addresses, contiguity, dedup, raw frames, bounded memory, errors.

use super::*;
use format::objmap::Codec;
use format::{CHUNK, FRAME_BLOCKS};
use std::collections::HashMap;

fn noise(seed: u64, len: usize) -> Vec<u8> {
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().bytes(len)
}

/// Publishes what is in the session's pack as image `x`, and gives the object's map.
fn publish(store: &Store, session: ImportSession, packed: &PackedObject) -> ObjectMap {
    let mut index = session.tmp_file("index").unwrap();
    index.write_all(&index::example(&[(packed.id, packed.space_blocks)], "x")).unwrap();
    let record = ImageRecord {
        index: index::read(index.file(), index.path()).unwrap().digest,
        identity: Digest::of(b"x"),
        objects: vec![packed.id],
        config: serde_json::json!([]),
        ..ImageRecord::default()
    };
    session.publish(&name("x"), &record, index).unwrap();
    check(store, &name("x"));
    store.object_map(&packed.id).unwrap()
}

#[test]
fn each_streams_chunks_lie_together_and_are_where_put_said() {
    let (_dir, store) = new_store();
    let session = store.import().unwrap();
    let pack = session.pack(&PackOptions { workers: 3, ..PackOptions::default() }).unwrap();
    // More than a region each.
    const CHUNKS: u64 = 300;
    let places: Vec<Vec<(Digest, u32, usize)>> = std::thread::scope(|s| {
        let threads: Vec<_> = (0..3u64)
            .map(|t| {
                let mut stream = pack.stream();
                s.spawn(move || {
                    let put = (0..CHUNKS).map(|i| {
                        // The second stream compresses by itself, the third one now and then.
                        stream.compress_here(t == 1 || t == 2 && i % 50 > 25);
                        let len = if i % 7 == 0 { 1 + i as usize } else { CHUNK };
                        let chunk = content(t * 1000 + i, len);
                        let digest = Digest::of(&chunk);
                        (digest, stream.put(&chunk, &digest).unwrap(), len)
                    });
                    let places = put.collect();
                    stream.flush().unwrap();
                    places
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let packed = pack.finish().unwrap().unwrap();
    assert_eq!(packed.chunks, 3 * CHUNKS);
    assert_eq!(packed.duplicate_bytes, 0);
    let map = publish(&store, session, &packed);
    assert_eq!((map.space_blocks(), map.object_len()), (packed.space_blocks, packed.stored_bytes));
    assert_eq!(u64::from(map.frame_count()), packed.frames);
    // Full frames, but for a few at the ends of streams.
    assert!(packed.frames <= 3 * CHUNKS * 16 / (FRAME_BLOCKS as u64 - 15) + 6, "{}", packed.frames);
    for stream in &places {
        let jumps = stream.windows(2).filter(|w| w[0].1 + w[0].2.div_ceil(4096) as u32 != w[1].1).count();
        assert!(jumps <= 2, "{jumps} breaks in one stream of {CHUNKS} chunks");
        for (_, block, len) in stream {
            assert_eq!(map.chunk_at(*block), Some(*len as u32));
        }
    }
}

#[test]
fn one_stream_is_contiguous_for_ever() {
    let (_dir, store) = new_store();
    let session = store.import().unwrap();
    let pack = session.pack(&PackOptions::default()).unwrap();
    let mut stream = pack.stream();
    let mut next = 0;
    for i in 0..800u64 {
        let chunk = content(i, if i % 3 == 0 { 5000 } else { CHUNK });
        assert_eq!(stream.put(&chunk, &Digest::of(&chunk)).unwrap(), next);
        next += chunk.len().div_ceil(4096) as u32;
    }
    stream.flush().unwrap();
    let packed = pack.finish().unwrap().unwrap();
    assert_eq!(packed.space_blocks, u64::from(next));
    let map = publish(&store, session, &packed);
    let mut at = 0;
    for frame in map.frames() {
        assert_eq!(frame.space_block.get(), at);
        at += frame.blocks.get();
    }
}

#[test]
fn chunks_are_stored_once_however_many_streams_put_them() {
    let (_dir, store) = new_store();
    let session = store.import().unwrap();
    // A limit that makes the table spill again and again.
    let pack = session.pack(&PackOptions { chunks_in_memory: 16, ..PackOptions::default() }).unwrap();
    let chunks: Vec<Vec<u8>> = (0..100).map(|i| content(i, 2000)).collect();
    let places: Vec<HashMap<Digest, u32>> = std::thread::scope(|s| {
        let threads: Vec<_> = (0..4)
            .map(|t| {
                let (mut stream, chunks) = (pack.stream(), &chunks);
                s.spawn(move || {
                    let places = (0..chunks.len())
                        .map(|i| {
                            let chunk = &chunks[(i * 7 + t * 13) % chunks.len()];
                            let digest = Digest::of(chunk);
                            (digest, stream.put(chunk, &digest).unwrap())
                        })
                        .collect();
                    stream.flush().unwrap();
                    places
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    assert!(places.windows(2).all(|w| w[0] == w[1]), "everybody was told the same places");
    let packed = pack.finish().unwrap().unwrap();
    assert_eq!((packed.chunks, packed.duplicate_bytes), (100, 300 * 2000));
    assert_eq!(packed.content_bytes, 100 * 2000);
    let map = publish(&store, session, &packed);
    for (digest, block) in &places[0] {
        assert_eq!(map.chunk_at(*block), Some(2000));
        // The next import finds them on disk.
        let found = store.import().unwrap().find_chunk(digest).unwrap().unwrap();
        assert_eq!((found.object, found.block, found.space_blocks), (packed.id, *block, packed.space_blocks));
    }
}

#[test]
fn frames_that_do_not_shrink_are_raw() {
    let (_dir, store) = new_store();
    let session = store.import().unwrap();
    let pack = session.pack(&PackOptions::default()).unwrap();
    let mut stream = pack.stream();
    for i in 0..16 {
        let chunk = noise(i, CHUNK);
        stream.put(&chunk, &Digest::of(&chunk)).unwrap();
    }
    for i in 0..16 {
        let chunk = content(i, CHUNK);
        stream.put(&chunk, &Digest::of(&chunk)).unwrap();
    }
    stream.flush().unwrap();
    let packed = pack.finish().unwrap().unwrap();
    assert_eq!((packed.frames, packed.raw_frames), (2, 1));
    let map = publish(&store, session, &packed);
    let codecs: Vec<u32> = map.frames().iter().map(|f| f.codec.get()).collect();
    assert_eq!(codecs, [Codec::Raw as u32, Codec::Zstd as u32]);
    assert_eq!(map.frames()[0].stored_len.get(), 1 << 20);
    assert!(packed.stored_bytes < (1 << 20) * 9 / 5);
}

#[test]
fn levels_are_a_choice() {
    let (_dir, store) = new_store();
    let size = |level| {
        let session = store.import().unwrap();
        let pack = session.pack(&PackOptions { level, ..PackOptions::default() }).unwrap();
        let mut stream = pack.stream();
        let words = content(1, 60_000);
        let text: Vec<u8> =
            words.chunks(3).flat_map(|w| format!("word {} of {}\n", w[0], w[1] % 7).into_bytes()).collect();
        for chunk in text.chunks(CHUNK) {
            stream.put(chunk, &Digest::of(chunk)).unwrap();
        }
        stream.flush().unwrap();
        pack.finish().unwrap().unwrap().stored_bytes
    };
    assert!(size(12) < size(1));
}

#[test]
fn nothing_put_is_no_object() {
    let (_dir, store) = new_store();
    let session = store.import().unwrap();
    let pack = session.pack(&PackOptions::default()).unwrap();
    let mut stream = pack.stream();
    stream.flush().unwrap();
    assert_eq!(pack.finish().unwrap(), None);
}

#[test]
fn misuse_is_an_error() {
    let (_dir, store) = new_store();
    let session = store.import().unwrap();
    let pack = session.pack(&PackOptions::default()).unwrap();
    let mut stream = pack.stream();
    for bad in [&[][..], &vec![1; CHUNK + 1]] {
        assert!(matches!(stream.put(bad, &Digest::of(bad)), Err(StoreError::Usage(_))));
    }
    stream.put(b"x", &Digest::of(b"x")).unwrap();
    let lost = pack.finish().unwrap_err();
    assert!(lost.to_string().contains("flushed"), "{lost}");
    assert!(stream.flush().is_err(), "the pack is gone");

    let pack = session.pack(&PackOptions::default()).unwrap();
    // More streams than there are spare buffers, all dropped with content.
    for i in 0..20u8 {
        let mut stream = pack.stream();
        stream.put(&[i + 1], &Digest::of(&[i + 1])).unwrap();
    }
    assert!(matches!(pack.finish(), Err(StoreError::Usage(_))));
}

#[test]
fn more_streams_than_buffers_do_not_block_each_other() {
    let (_dir, store) = new_store();
    let session = store.import().unwrap();
    let pack = session.pack(&PackOptions { workers: 1, ..PackOptions::default() }).unwrap();
    let mut streams: Vec<PackStream> = (0..10).map(|_| pack.stream()).collect();
    for round in 0..40u64 {
        for (i, stream) in streams.iter_mut().enumerate() {
            let chunk = content(round * 100 + i as u64, CHUNK);
            stream.put(&chunk, &Digest::of(&chunk)).unwrap();
        }
    }
    for stream in &mut streams {
        stream.flush().unwrap();
    }
    drop(streams);
    assert_eq!(pack.finish().unwrap().unwrap().chunks, 400);
}
