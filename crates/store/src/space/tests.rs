use super::*;
use crate::cache::CacheOptions;
use crate::cache::tests::{LONG, Rig, options, request, until};
use crate::fault::{Fault, TestObject};
use crate::source::Segment;
use proptest::prelude::*;
use std::time::Duration;

#[test]
fn a_resolved_range_is_one_segment_over_many_frames() {
    let rig = Rig::new(TestObject::uniform(1, 8, 16));
    rig.check_all();
    let mut out = Resolution::new();
    out.push_bytes(b"head");
    assert_eq!(rig.space.resolve(1000, 300_000, &mut out).unwrap(), Presence::Ready);
    assert_eq!(rig.space.resolve(301_000, 10, &mut out).unwrap(), Presence::Ready);
    assert_eq!(rig.space.resolve(0, 10, &mut out).unwrap(), Presence::Ready);
    out.push_zeros(3);
    let segments = [
        Segment::Bytes { start: 0, len: 4 },
        Segment::Space { guard: 0, offset: 1000, len: 300_010 },
        Segment::Space { guard: 0, offset: 0, len: 10 },
        Segment::Zeros { len: 3 },
    ];
    assert_eq!(out.segments(), segments);
    assert_eq!(out.len(), 300_027);
    let mut bytes = vec![1; out.len()];
    out.copy_to(&mut bytes).unwrap();
    assert!(bytes[4..300_014] == rig.object.content[1000..301_010]);
    assert!(out.copy_to(&mut bytes[1..]).is_err(), "never short");
    out.clear();
    assert!(out.is_empty() && out.segments().is_empty() && out.scratch().is_empty());
    assert_eq!(rig.space.resolve(5, 0, &mut out).unwrap(), Presence::Ready);
    assert!(out.is_empty());
}

#[test]
fn gaps_and_ends_are_errors_and_never_zeros() {
    let rig = Rig::new(TestObject::new(2, [(0, 2), (3, 4), (1, 1)]));
    let size = rig.space.len_bytes();
    assert_eq!(size, 11 * 4096);
    let bad = [(2 * 4096, 1), (4096, 4097), (2 * 4096 + 5, 3 * 4096), (9 * 4096, 1), (8 * 4096, 3 * 4096)];
    for round in 0..2 {
        for (offset, len) in bad {
            // A gap behind something that is missing shows up when that is there, or when it is fetched.
            let resolved = rig.space.resolve(offset, len, &mut Resolution::new());
            match resolved {
                Err(ReadError::Corrupt { .. }) => {}
                Ok(Presence::Missing) if round == 0 => {}
                other => panic!("{offset}+{len}: {other:?}"),
            }
            let told = rig.fetch(offset, len, request(LONG)).recv().unwrap();
            assert!(matches!(told, Err(FetchError::Corrupt { .. })), "{offset}+{len}: {told:?}");
        }
        for (offset, len) in [(size, 1), (size - 1, 2), (u64::MAX, 1), (u64::MAX - 5, 10), (0, size as usize + 1)] {
            let resolved = rig.space.resolve(offset, len, &mut Resolution::new());
            assert!(matches!(resolved, Err(ReadError::OutOfRange { .. })), "{offset}+{len}");
            assert!(rig.fetch(offset, len, request(LONG)).recv().unwrap().is_err());
        }
        for (offset, len) in [(0, 2 * 4096), (5 * 4096, 4 * 4096), (10 * 4096, 4096)] {
            rig.check(offset, len);
        }
    }
    assert_eq!(rig.presence(size, 0), Presence::Ready);
}

#[test]
fn a_guard_holds_its_frame_and_eviction_gives_up_in_the_end() {
    let rig = Rig::with(
        TestObject::uniform(3, 4, 16),
        CacheOptions { evict_timeout: Duration::from_millis(50), ..options() },
    );
    rig.check_all();
    let mut held = Resolution::new();
    assert_eq!(rig.space.resolve(0, 70_000, &mut held).unwrap(), Presence::Ready);
    let evicted = rig.space.evict(0, 65536).unwrap();
    assert_eq!(evicted, Evicted { frames: 0, bytes: 0, kept: 1 });
    assert_eq!(rig.presence(0, 1), Presence::Missing, "nobody new gets it");
    let mut bytes = vec![0; 70_000];
    held.copy_to(&mut bytes).unwrap();
    assert!(bytes == rig.object.content[..70_000]);
    rig.check(0, 65536);
    held.copy_to(&mut bytes).unwrap();
    assert!(bytes == rig.object.content[..70_000]);
    held.clear();
    assert_eq!(rig.space.evict(0, 65536).unwrap(), Evicted { frames: 1, bytes: 65536, kept: 0 });
    rig.check_all();
}

#[test]
fn eviction_leaves_frames_alone_that_are_on_their_way() {
    let rig = Rig::new(TestObject::uniform(4, 4, 16));
    rig.check(0, 2 * 65536);
    rig.store.set(Fault::Silent);
    let told = rig.fetch(2 * 65536, 65536, request(LONG));
    let evicted = rig.space.evict(0, u64::MAX).unwrap();
    assert_eq!((evicted.frames, evicted.kept), (2, 1));
    rig.store.release();
    told.recv().unwrap().unwrap();
    rig.check_all();
}

#[test]
fn who_wants_a_frame_that_is_being_evicted_gets_it_afterwards() {
    let rig = Rig::new(TestObject::uniform(5, 4, 16));
    rig.check_all();
    let mut held = Resolution::new();
    assert_eq!(rig.space.resolve(0, 1, &mut held).unwrap(), Presence::Ready);
    std::thread::scope(|scope| {
        let evictor = scope.spawn(|| rig.space.evict(0, 65536).unwrap());
        until("the frame to go", || rig.presence(0, 1) == Presence::Missing);
        let told = rig.fetch(0, 65536, request(LONG));
        assert!(told.recv_timeout(Duration::from_millis(20)).is_err(), "it waits for the eviction");
        drop(held);
        assert_eq!(evictor.join().unwrap().frames, 1);
        told.recv().unwrap().unwrap();
    });
    rig.check_all();
}

#[test]
fn readers_never_see_a_hole_while_frames_are_evicted() {
    let rig = Rig::new(TestObject::uniform(6, 24, 4));
    let stop = AtomicBool::new(false);
    let reads = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        let reader = |t: u64| {
            let (rig, stop, reads) = (&rig, &stop, &reads);
            scope.spawn(move || {
                let mut state = t;
                let mut out = Resolution::new();
                let mut bytes = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(77);
                    let offset = (state >> 33) % (20 * 16384);
                    let len = 1 + (state >> 20) as usize % 50_000;
                    // Resolved here and read a little later, with the guard in between.
                    out.clear();
                    if rig.space.resolve(offset, len, &mut out).unwrap() == Presence::Ready {
                        std::thread::yield_now();
                        bytes.resize(len, 0);
                        out.copy_to(&mut bytes).unwrap();
                        assert!(bytes == rig.object.content[offset as usize..][..len], "{offset}+{len}");
                        reads.fetch_add(1, Ordering::Relaxed);
                    } else {
                        out.clear();
                        rig.check(offset, len);
                    }
                }
            })
        };
        let readers: Vec<_> = (0..3).map(reader).collect();
        let mut evicted = 0;
        let mut rounds = 0u64;
        let enough = |rounds, evicted| rounds >= 150 && evicted >= 150 && reads.load(Ordering::Relaxed) >= 2000;
        // A reader that ends has failed.
        while !enough(rounds, evicted) && !readers.iter().any(|reader| reader.is_finished()) {
            evicted += rig.space.evict(rounds * 7 % 24 * 16384, 5 * 16384).unwrap().frames;
            rounds += 1;
        }
        stop.store(true, Ordering::Relaxed);
    });
    let rig = rig.reopen(true);
    rig.check_all();
    assert_eq!(rig.cache.stats().corrupt_on_disk, 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    /// Against a model: per block, whether a frame holds it and whether that was fetched.
    #[test]
    fn ranges_resolve_as_the_model_says(
        frames in proptest::collection::vec((0u32..3, 1u32..6), 1..12),
        ranges in proptest::collection::vec((any::<u16>(), 0usize..60_000, any::<bool>()), 1..30),
    ) {
        let rig = Rig::new(TestObject::new(7, frames.clone()));
        let mut owner = Vec::new();
        for (i, (gap, blocks)) in frames.iter().enumerate() {
            owner.extend(std::iter::repeat_n(None, *gap as usize));
            owner.extend(std::iter::repeat_n(Some(i), *blocks as usize));
        }
        let size = owner.len() as u64 * 4096;
        prop_assert_eq!(rig.space.len_bytes(), size);
        let mut there = vec![false; frames.len()];
        for (at, len, fetch) in ranges {
            let offset = u64::from(at) * size / 60_000;
            let end = offset + len as u64;
            let mut out = Resolution::new();
            if end > size {
                prop_assert!(rig.space.resolve(offset, len, &mut out).is_err());
                continue;
            }
            let blocks = (offset / 4096) as usize..if len == 0 { (offset / 4096) as usize } else { end.div_ceil(4096) as usize };
            let owners: Vec<Option<usize>> = owner[blocks].to_vec();
            let gap = owners.contains(&None);
            if fetch {
                let told = rig.fetch(offset, len, request(LONG)).recv().unwrap();
                prop_assert_eq!(told.is_err(), gap);
                if !gap {
                    owners.iter().flatten().for_each(|i| there[*i] = true);
                }
            }
            // The walk stops at the first frame that is missing or the first gap, whichever comes first.
            let first = owners.iter().position(|o| o.is_none_or(|i| !there[i]));
            match rig.space.resolve(offset, len, &mut out) {
                Ok(Presence::Ready) => {
                    prop_assert_eq!(first, None);
                    prop_assert_eq!(out.len(), len);
                    let mut bytes = vec![0xaa; len];
                    out.copy_to(&mut bytes).unwrap();
                    prop_assert!(bytes == rig.object.content[offset as usize..end as usize]);
                }
                Ok(Presence::Missing) => prop_assert!(owners[first.unwrap()].is_some()),
                Err(ReadError::Corrupt { .. }) => prop_assert!(owners[first.unwrap()].is_none()),
                Err(e) => prop_assert!(false, "{}", e),
            }
        }
    }
}
