//! Test support: a store that misbehaves on order. Public so that the tests of other crates can use it; nothing in the
//! product does.

use crate::object_store::{LenDone, ObjectStore, ReadDone, ReadRequest, Request};
use crate::{FetchError, ObjectId, ObjectMap};
use format::digest::FrameHasher;
use format::objmap::{Codec, Frame, Header};
use format::{BLOCK, CHUNK, Digest};
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use zerocopy::IntoBytes;

/// What becomes of a read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Fault {
    /// It is answered.
    #[default]
    None,
    /// It is never answered, whatever its deadline, until [`FaultStore::release`].
    Silent,
    /// It is answered after a while.
    Delay(Duration),
    /// The store says that it cannot be reached, which may pass.
    Unavailable,
    /// The store says that it does not have the object.
    NotFound,
    /// One byte in the middle is another.
    Corrupt,
    /// One byte less than asked for.
    Short,
    /// The callback is dropped.
    Dropped,
    /// The store panics.
    Panic,
}

/// Wraps a store; reads do what they are told to.
pub struct FaultStore {
    inner: Arc<dyn ObjectStore>,
    state: Arc<State>,
}

#[derive(Default)]
struct State {
    plan: Mutex<Plan>,
    changed: Condvar,
}

#[derive(Default)]
struct Plan {
    /// In turn, when `next` is empty.
    cycle: Vec<Fault>,
    turn: usize,
    next: VecDeque<Fault>,
    parked: Vec<(ReadRequest, ReadDone)>,
    reads: Vec<(ObjectId, std::ops::Range<u64>)>,
}

impl std::fmt::Debug for FaultStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FaultStore").field("inner", &self.inner.describe()).finish_non_exhaustive()
    }
}

impl State {
    fn lock(&self) -> MutexGuard<'_, Plan> {
        self.plan.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FaultStore {
    /// A store that does what `inner` does, for the time being.
    pub fn new(inner: Arc<dyn ObjectStore>) -> FaultStore {
        FaultStore { inner, state: Arc::default() }
    }

    /// What becomes of reads from now on.
    pub fn set(&self, fault: Fault) {
        self.cycle(&[fault]);
    }

    /// What becomes of reads from now on, in turn.
    pub fn cycle(&self, faults: &[Fault]) {
        let mut plan = self.state.lock();
        plan.cycle = faults.to_vec();
        plan.turn = 0;
    }

    /// What becomes of the next reads, one each; those after them do what was set.
    pub fn next(&self, faults: &[Fault]) {
        self.state.lock().next.extend(faults);
    }

    /// Answers the reads that a silent store has kept, and is not silent any more.
    pub fn release(&self) {
        let parked = {
            let mut plan = self.state.lock();
            plan.cycle.clear();
            std::mem::take(&mut plan.parked)
        };
        for (read, done) in parked {
            self.inner.read(read, done);
        }
    }

    /// Reads that are kept without an answer.
    pub fn parked(&self) -> usize {
        self.state.lock().parked.len()
    }

    /// Every read so far.
    pub fn reads(&self) -> Vec<(ObjectId, std::ops::Range<u64>)> {
        self.state.lock().reads.clone()
    }

    /// Waits until there were `count` reads; `false` if they do not come.
    pub fn wait_for_reads(&self, count: usize, at_most: Duration) -> bool {
        let until = Instant::now() + at_most;
        let mut plan = self.state.lock();
        while plan.reads.len() < count {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            plan = self.state.changed.wait_timeout(plan, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

impl ObjectStore for FaultStore {
    fn read(&self, read: ReadRequest, done: ReadDone) {
        let mut plan = self.state.lock();
        plan.reads.push((read.object, read.range.clone()));
        let fault = plan.next.pop_front().unwrap_or_else(|| {
            plan.turn += 1;
            let turn = plan.turn;
            plan.cycle.get(turn % plan.cycle.len().max(1)).copied().unwrap_or_default()
        });
        if fault == Fault::Silent {
            plan.parked.push((read, done));
            self.state.changed.notify_all();
            return;
        }
        drop(plan);
        self.state.changed.notify_all();
        match fault {
            Fault::None | Fault::Silent => self.inner.read(read, done),
            Fault::Delay(time) => {
                let inner = Arc::clone(&self.inner);
                std::thread::spawn(move || {
                    std::thread::sleep(time);
                    inner.read(read, done);
                });
            }
            Fault::Unavailable => done(Err(FetchError::Unavailable { why: "on order".into() })),
            Fault::NotFound => done(Err(FetchError::NotFound { object: read.object })),
            Fault::Corrupt | Fault::Short => {
                let spoil = move |result: Result<Vec<u8>, FetchError>| {
                    done(result.map(|mut bytes| {
                        let middle = bytes.len() / 2;
                        if fault == Fault::Short {
                            bytes.pop();
                        } else if let Some(byte) = bytes.get_mut(middle) {
                            *byte ^= 0x10;
                        }
                        bytes
                    }));
                };
                self.inner.read(read, Box::new(spoil));
            }
            Fault::Dropped => drop(done),
            Fault::Panic => panic!("on order"),
        }
    }

    fn len(&self, object: &ObjectId, request: Request, done: LenDone) {
        self.inner.len(object, request, done);
    }

    fn describe(&self) -> String {
        format!("{} with faults", self.inner.describe())
    }
}

/// Objects in memory.
#[derive(Debug, Default)]
pub struct MemoryStore {
    objects: Mutex<HashMap<ObjectId, Arc<Vec<u8>>>>,
}

impl MemoryStore {
    /// An empty one.
    pub fn new() -> MemoryStore {
        MemoryStore::default()
    }

    /// Puts an object in, or another one in its place.
    pub fn put(&self, id: ObjectId, bytes: Vec<u8>) {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner).insert(id, Arc::new(bytes));
    }

    /// Takes an object out.
    pub fn remove(&self, id: &ObjectId) {
        self.objects.lock().unwrap_or_else(PoisonError::into_inner).remove(id);
    }

    fn get(&self, object: &ObjectId) -> Result<Arc<Vec<u8>>, FetchError> {
        let objects = self.objects.lock().unwrap_or_else(PoisonError::into_inner);
        objects.get(object).cloned().ok_or(FetchError::NotFound { object: *object })
    }
}

impl ObjectStore for MemoryStore {
    fn read(&self, mut read: ReadRequest, done: ReadDone) {
        let result = self.get(&read.object).and_then(|bytes| {
            let range = read.range.start as usize..read.range.end as usize;
            let out_of_range = FetchError::OutOfRange { object: read.object, range: read.range.clone() };
            read.buffer.clear();
            read.buffer.extend_from_slice(bytes.get(range).ok_or(out_of_range)?);
            Ok(read.buffer)
        });
        done(result);
    }

    fn len(&self, object: &ObjectId, _request: Request, done: LenDone) {
        done(self.get(object).map(|bytes| bytes.len() as u64));
    }

    fn describe(&self) -> String {
        "memory".into()
    }
}

/// An object made of numbers: its map, its stored bytes and what its space must read as.
#[derive(Debug, Clone)]
pub struct TestObject {
    /// The object map.
    pub map: ObjectMap,
    /// The object.
    pub stored: Vec<u8>,
    /// The space, gaps as zeros.
    pub content: Vec<u8>,
}

impl TestObject {
    /// `count` frames of `blocks` blocks each, without gaps.
    pub fn uniform(seed: u64, count: u32, blocks: u32) -> TestObject {
        TestObject::new(seed, (0..count).map(|_| (0, blocks)))
    }

    /// Frames of (blocks of the space left free before it, its own blocks). Every other one is stored raw.
    pub fn new(seed: u64, frames: impl IntoIterator<Item = (u32, u32)>) -> TestObject {
        let (mut rows, mut lens) = (Vec::new(), Vec::new());
        let (mut stored, mut content) = (Vec::new(), Vec::new());
        let mut state = seed;
        for (i, (gap, blocks)) in frames.into_iter().enumerate() {
            content.resize(content.len() + gap as usize * BLOCK as usize, 0);
            let start = content.len();
            let first_chunk = lens.len() as u32;
            let mut hasher = FrameHasher::default();
            let mut left = blocks as usize * BLOCK as usize;
            while left > 0 {
                // The last chunk of a frame ends inside of its last block.
                let len = if left <= CHUNK { left - 100 } else { CHUNK };
                let mut chunk = vec![0u8; len];
                for word in chunk.chunks_mut(8) {
                    state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
                    word[0] = (state >> 56) as u8;
                    word[word.len() / 2] = (i as u8).wrapping_add(1);
                }
                hasher.chunk(&Digest::of(&chunk), len as u32);
                lens.push(len as u32);
                content.extend_from_slice(&chunk);
                content.resize(content.len().next_multiple_of(BLOCK as usize), 0);
                left = left.saturating_sub(CHUNK);
            }
            let raw = &content[start..];
            let (codec, bytes) = match i % 2 {
                0 => (Codec::Zstd, zstd::bulk::compress(raw, 1).expect("memory suffices")),
                _ => (Codec::Raw, raw.to_vec()),
            };
            rows.push(Frame {
                offset: (stored.len() as u64).into(),
                stored_len: (bytes.len() as u32).into(),
                codec: (codec as u32).into(),
                space_block: ((start / BLOCK as usize) as u32).into(),
                blocks: blocks.into(),
                first_chunk: first_chunk.into(),
                chunks: (lens.len() as u32 - first_chunk).into(),
                digest: hasher.finish(),
            });
            stored.extend_from_slice(&bytes);
        }
        let blocks = content.len() as u64 / BLOCK;
        let header = Header::new(stored.len() as u64, blocks, rows.len() as u32, lens.len() as u32);
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(rows.as_bytes());
        lens.iter().for_each(|len| bytes.extend_from_slice(&len.to_le_bytes()));
        let id = Digest::of(&bytes);
        let map = ObjectMap::open(Arc::new(bytes), &id).expect("a map as it should be");
        TestObject { map, stored, content }
    }

    /// Its name.
    pub fn id(&self) -> ObjectId {
        self.map.id()
    }
}
