//! The chunks of a pack that is being written: which digests it has, and where. Bounded memory.
//!
//! Up to a limit, digests are in a hash table (44 bytes each at most). At the limit they are written out as a sorted
//! run and looked up there by interpolation; then the table starts again. Each run has a filter in memory (2 bytes a
//! digest), which spares nearly all lookups of what it does not have. The runs also give the pack's chunk table, by a
//! merge.

use crate::StoreError;
use crate::chunks;
use crate::tmp::{TmpDir, TmpFile};
use format::Digest;
use format::chunks::{Row, View};
use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

/// Rows of one allocation, so that growing never copies them.
const SLAB: usize = 4096;

#[derive(Debug, Clone, Copy)]
struct Entry {
    digest: Digest,
    block: u32,
}

/// Digests that were written out.
#[derive(Debug)]
struct Run {
    map: sys::Map,
    filter: Filter,
}

/// Says of most digests that they are not there: a Bloom filter of 16 bits a digest and four probes.
#[derive(Debug)]
struct Filter(Vec<u64>);

impl Filter {
    fn new(digests: usize) -> Filter {
        Filter(vec![0; digests.div_ceil(4).next_power_of_two()])
    }

    /// Word and bit of each probe: two halves of the hash, combined.
    fn probes(&self, hash: u64) -> [(usize, u64); 4] {
        let (a, b) = (hash as u32, (hash >> 32) as u32 | 1);
        [0, 1, 2, 3].map(|i: u32| {
            let bit = a.wrapping_add(b.wrapping_mul(i)) as usize & (self.0.len() * 64 - 1);
            (bit / 64, 1 << (bit % 64))
        })
    }

    fn add(&mut self, hash: u64) {
        for (word, bit) in self.probes(hash) {
            self.0[word] |= bit;
        }
    }

    fn may_have(&self, hash: u64) -> bool {
        self.probes(hash).iter().all(|&(word, bit)| self.0[word] & bit != 0)
    }
}

/// Lookups in runs between giving their pages back: the process would seem to grow by all of them.
const LOOKUPS: u32 = 128;

/// The digests of one pack.
#[derive(Debug)]
pub(crate) struct Dedup {
    dir: Arc<TmpDir>,
    limit: usize,
    slabs: Vec<Vec<Entry>>,
    len: usize,
    /// Open addressing: row number plus one, 0 is free. A power of two, at most 2/3 full.
    index: Vec<u32>,
    seed: (u64, u64),
    runs: Vec<Run>,
    total: u64,
    lookups: u32,
}

impl Dedup {
    pub(crate) fn new(dir: Arc<TmpDir>, limit: usize) -> Dedup {
        // Seeded, so that nobody can choose content whose digests collide in the table.
        let random = || std::hash::RandomState::new().build_hasher().finish();
        Dedup {
            dir,
            limit: limit.clamp(1, 1 << 30),
            slabs: Vec::new(),
            len: 0,
            index: vec![0; 1024],
            seed: (random(), random()),
            runs: Vec::new(),
            total: 0,
            lookups: 0,
        }
    }

    /// How many digests there are.
    pub(crate) fn total(&self) -> u64 {
        self.total
    }

    /// Says where a digest is, or notes that it is at `block` from now on.
    pub(crate) fn add(&mut self, digest: &Digest, block: u32) -> Result<Option<u32>, StoreError> {
        let slot = match self.slot(digest) {
            Ok(row) => return Ok(Some(self.entry(row).block)),
            Err(free) => free,
        };
        if let Some(block) = self.find_in_runs(digest) {
            return Ok(Some(block));
        }
        if self.slabs.last().is_none_or(|s| s.len() == SLAB) {
            self.slabs.push(Vec::with_capacity(SLAB));
        }
        if let Some(slab) = self.slabs.last_mut() {
            slab.push(Entry { digest: *digest, block });
        }
        self.len += 1;
        self.total += 1;
        self.index[slot] = self.len as u32;
        if self.len >= self.limit {
            self.spill()?;
        } else if self.len * 3 > self.index.len() * 2 {
            self.grow();
        }
        Ok(None)
    }

    fn find_in_runs(&mut self, digest: &Digest) -> Option<u32> {
        let hash = self.hash(digest);
        for run in self.runs.iter().filter(|run| run.filter.may_have(hash)) {
            self.lookups += 1;
            if self.lookups == LOOKUPS {
                self.lookups = 0;
                self.give_back();
            }
            if let Some(row) = View::reopen(run.map.as_slice()).and_then(|v| v.find(digest)) {
                return Some(row.block.get());
            }
        }
        None
    }

    /// Lets go of the runs' pages, which stay in the kernel's cache. Only a hint, which does not have to be taken.
    fn give_back(&self) {
        for run in &self.runs {
            let _ = run.map.advise(sys::map::Access::DontNeed);
        }
    }

    fn entry(&self, row: usize) -> &Entry {
        &self.slabs[row / SLAB][row % SLAB]
    }

    fn start(&self, digest: &Digest) -> usize {
        self.hash(digest) as usize & (self.index.len() - 1)
    }

    fn hash(&self, digest: &Digest) -> u64 {
        let word = |at: usize| u64::from_le_bytes(digest.0[at..at + 8].try_into().expect("a digest has 32 bytes"));
        let product = u128::from(word(0) ^ self.seed.0) * u128::from(word(8) ^ self.seed.1);
        product as u64 ^ (product >> 64) as u64
    }

    /// The row of a digest, or the slot where it would go.
    fn slot(&self, digest: &Digest) -> Result<usize, usize> {
        let mut slot = self.start(digest);
        loop {
            match self.index[slot] {
                0 => return Err(slot),
                row if self.entry(row as usize - 1).digest == *digest => return Ok(row as usize - 1),
                _ => slot = (slot + 1) & (self.index.len() - 1),
            }
        }
    }

    fn grow(&mut self) {
        self.index = vec![0; self.index.len() * 2];
        for row in 0..self.len {
            if let Err(slot) = self.slot(&self.entry(row).digest) {
                self.index[slot] = row as u32 + 1;
            }
        }
    }

    /// The rows in memory, sorted.
    fn sorted(&self) -> impl Iterator<Item = Row> + '_ {
        let mut order: Vec<u32> = (0..self.len as u32).collect();
        order.sort_unstable_by_key(|row| self.entry(*row as usize).digest);
        order.into_iter().map(|row| {
            let entry = self.entry(row as usize);
            Row::new(entry.digest, 0, entry.block)
        })
    }

    fn spill(&mut self) -> Result<(), StoreError> {
        let file = chunks::write(self.dir.file("run")?, &[Digest::default()], self.sorted())?;
        let map = sys::Map::of(file.file()).map_err(|e| StoreError::io("map", file.path(), e))?;
        View::open(map.as_slice()).map_err(|e| StoreError::format(file.path(), e))?;
        let mut filter = Filter::new(self.len);
        (0..self.len).for_each(|row| filter.add(self.hash(&self.entry(row).digest)));
        let _ = map.advise(sys::map::Access::DontNeed);
        self.runs.push(Run { map, filter });
        self.slabs.clear();
        self.len = 0;
        self.index.fill(0);
        Ok(())
    }

    /// Writes the chunk table of the pack, which is called `id`.
    pub(crate) fn write(&self, id: Digest) -> Result<TmpFile, StoreError> {
        let file = self.dir.file("chunks")?;
        if self.runs.is_empty() {
            return chunks::write(file, &[id], self.sorted());
        }
        let mut inputs: Vec<Box<dyn Iterator<Item = Row> + '_>> = vec![Box::new(self.sorted())];
        for run in &self.runs {
            let view = View::open(run.map.as_slice()).map_err(|e| StoreError::format(file.path(), e))?;
            inputs.push(Box::new(view.rows().iter().copied()));
        }
        let mut rows = 0u32;
        let merged = chunks::merge(inputs).inspect(|_| {
            rows = rows.wrapping_add(1);
            if rows.is_multiple_of(1 << 16) {
                self.give_back();
            }
        });
        let file = chunks::write(file, &[id], merged)?;
        self.give_back();
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::{Disk, RealDisk};
    use crate::layout::{self, Layout};

    #[test]
    fn digests_are_found_in_memory_and_in_runs() {
        let root = tempfile::tempdir().unwrap();
        let layout = Layout::new(root.path());
        layout::open(&layout, &RealDisk).unwrap();
        let disk: Arc<dyn Disk> = Arc::new(RealDisk);
        for limit in [1, 7, 1000, 10_000, 1 << 20] {
            let dir = Arc::new(TmpDir::make(&layout, &disk).unwrap());
            let mut dedup = Dedup::new(dir, limit);
            let n = if limit < 100 { 40u32 } else { 10_000 };
            let digest = |i: u32| Digest::of(&i.to_le_bytes());
            for i in 0..n {
                assert_eq!(dedup.add(&digest(i), i).unwrap(), None);
                assert_eq!(dedup.add(&digest(i / 2), n).unwrap(), Some(i / 2));
            }
            assert_eq!(dedup.total(), u64::from(n));
            assert_eq!(dedup.runs.len(), n as usize / limit);
            let id = Digest::of(b"pack");
            let file = dedup.write(id).unwrap();
            let bytes = std::fs::read(file.path()).unwrap();
            let view = View::open(&bytes).unwrap();
            assert_eq!(view.objects(), [id]);
            assert_eq!(view.rows().len(), n as usize);
            assert!(view.rows().is_sorted_by(|a, b| a.digest < b.digest));
            for i in 0..n {
                assert_eq!(view.find(&digest(i)).unwrap().block.get(), i);
            }
        }
    }
}
