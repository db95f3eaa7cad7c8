//! Resolving what is there allocates nothing once its buffers have grown.

use lazyroot_store::cache::{Cache, CacheOptions};
use lazyroot_store::fault::{MemoryStore, TestObject};
use lazyroot_store::source::{Presence, Resolution, read_into};
use lazyroot_store::{Class, Request};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[global_allocator]
static ALLOCATOR: sys::alloc::Counting = sys::alloc::Counting::new();

#[test]
fn resolving_allocates_nothing_in_the_steady_state() {
    let object = TestObject::uniform(1, 32, 16);
    let memory = Arc::new(MemoryStore::new());
    memory.put(object.id(), object.stored.clone());
    let dir = tempfile::tempdir().unwrap();
    // Nothing else is to run meanwhile.
    let mut options = CacheOptions::default();
    options.sync_interval = Duration::from_secs(3600);
    let cache = Cache::open(dir.path(), memory, options).unwrap();
    let space = cache.space(object.map.clone()).unwrap();
    let request = Request { id: 1, class: Class::Demand, deadline: Instant::now() + Duration::from_secs(120) };
    let mut bytes = vec![0; object.content.len()];
    read_into(&space, 0, &mut bytes, request).unwrap();
    assert!(bytes == object.content);

    let mut out = Resolution::new();
    let mut round = |n: u64| {
        for i in 0..n {
            out.clear();
            out.push_scratch(4096).fill(1);
            assert_eq!(space.resolve(i * 4099 % (31 * 65536), 60_000, &mut out).unwrap(), Presence::Ready);
            out.push_zeros(10);
            out.copy_to(&mut bytes[..out.len()]).unwrap();
        }
    };
    round(2);
    let fewest = (0..20).map(|_| {
        let before = ALLOCATOR.calls();
        round(1000);
        ALLOCATOR.calls() - before
    });
    // Other threads of the test program may allocate now and then, but not in every round.
    assert_eq!(fewest.min(), Some(0));
}
