//! The digests of a tree's files: in memory up to a number, in a scratch file beyond it.
//!
//! They are the largest part of what a file costs, and wanted twice only: when the content is set and when the index is
//! built. Blocks of them go to the file and come back one at a time; neighbours are wanted together as a rule.
//!
//! Failure model: what goes wrong with the file is kept until somebody asks ([`Digests::failure`]); until then digests
//! are zeros, which those of no content are.

use format::Digest;
use std::fmt;
use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A scratch file, written and read at offsets. What was written nowhere is not read.
pub trait Scratch: Send {
    /// Writes all bytes.
    ///
    /// # Errors
    /// A full disk and such.
    fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Fills `out`.
    ///
    /// # Errors
    /// The file cannot be read.
    fn read_at(&mut self, out: &mut [u8], offset: u64) -> io::Result<()>;
}

/// Bytes of a digest.
const LEN: usize = size_of::<Digest>();
/// Digests that are written and read together.
const BLOCK: usize = 128;

/// See the module.
#[derive(Default)]
pub(super) struct Digests {
    memory: Vec<Digest>,
    /// Digests to be kept in memory, and where the others are.
    beyond: Option<(usize, Mutex<Spilled>)>,
}

struct Spilled {
    scratch: Box<dyn Scratch>,
    /// Blocks that the file has.
    blocks: usize,
    /// The block in memory, and whether the file does not have it so.
    current: usize,
    changed: bool,
    block: [Digest; BLOCK],
    failure: Option<io::Error>,
}

impl Digests {
    /// Sends what goes beyond `in_memory` digests to `scratch`. Before there are so many.
    pub(super) fn spill(&mut self, in_memory: usize, scratch: Box<dyn Scratch>) {
        let block = [Digest::default(); BLOCK];
        let spilled = Spilled { scratch, blocks: 0, current: 0, changed: false, block, failure: None };
        self.beyond = Some((in_memory.max(self.memory.len()), Mutex::new(spilled)));
    }

    pub(super) fn set(&mut self, n: u32, digest: &Digest) {
        let n = n as usize;
        match &self.beyond {
            Some((in_memory, spilled)) if n >= *in_memory => {
                let mut spilled = locked(spilled);
                if let Some(place) = spilled.at(n - in_memory) {
                    *place = *digest;
                    spilled.changed = true;
                }
            }
            _ => {
                if n >= self.memory.len() {
                    self.memory.resize(n + 1, Digest::default());
                }
                self.memory[n] = *digest;
            }
        }
    }

    pub(super) fn get(&self, n: u32) -> Digest {
        let n = n as usize;
        match &self.beyond {
            Some((in_memory, spilled)) if n >= *in_memory => {
                locked(spilled).at(n - in_memory).map_or_else(Digest::default, |place| *place)
            }
            _ => self.memory[n],
        }
    }

    /// What went wrong with the scratch file, once.
    pub(super) fn failure(&self) -> Option<io::Error> {
        self.beyond.as_ref().and_then(|(_, spilled)| locked(spilled).failure.take())
    }

    pub(super) fn memory(&self) -> usize {
        self.memory.capacity() * LEN
    }
}

impl Spilled {
    /// Brings the block with a digest into memory.
    fn at(&mut self, n: usize) -> Option<&mut Digest> {
        let (block, place) = (n / BLOCK, n % BLOCK);
        if block != self.current
            && let Err(e) = self.turn_to(block)
        {
            self.failure.get_or_insert(e);
            return None;
        }
        Some(&mut self.block[place])
    }

    fn turn_to(&mut self, block: usize) -> io::Result<()> {
        let offset = |block: usize| (block * BLOCK * LEN) as u64;
        let mut bytes = [0; BLOCK * LEN];
        if self.changed {
            for (to, from) in bytes.chunks_exact_mut(LEN).zip(&self.block) {
                to.copy_from_slice(&from.0);
            }
            self.scratch.write_at(&bytes, offset(self.current))?;
            self.blocks = self.blocks.max(self.current + 1);
            self.changed = false;
        }
        // A block that was jumped over is a hole of the file, zeros.
        if block < self.blocks {
            self.scratch.read_at(&mut bytes, offset(block))?;
        } else {
            bytes = [0; BLOCK * LEN];
        }
        for (to, from) in self.block.iter_mut().zip(bytes.chunks_exact(LEN)) {
            to.0.copy_from_slice(from);
        }
        self.current = block;
        Ok(())
    }
}

fn locked(spilled: &Mutex<Spilled>) -> MutexGuard<'_, Spilled> {
    spilled.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Digests {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Digests").field("in_memory", &self.memory.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;

    struct Bytes(Vec<u8>, bool);

    impl Scratch for Bytes {
        fn write_at(&mut self, bytes: &[u8], offset: u64) -> io::Result<()> {
            let at = offset as usize;
            self.0.resize(self.0.len().max(at + bytes.len()), 0);
            self.0[at..at + bytes.len()].copy_from_slice(bytes);
            if self.1 { Err(io::Error::other("full")) } else { Ok(()) }
        }

        fn read_at(&mut self, out: &mut [u8], offset: u64) -> io::Result<()> {
            out.copy_from_slice(&self.0[offset as usize..][..out.len()]);
            Ok(())
        }
    }

    #[test]
    fn digests_come_back_whatever_the_order() {
        let mut r = Random(1);
        for in_memory in [0, 1, 100, 1000, 10_000] {
            let mut digests = Digests::default();
            digests.spill(in_memory, Box::new(Bytes(Vec::new(), false)));
            let mut want = vec![Digest::default(); 3000];
            for n in 0..3000u32 {
                want[n as usize] = Digest::of(&n.to_le_bytes());
                digests.set(n, &want[n as usize]);
            }
            for _ in 0..5000 {
                let n = r.below(3000) as u32;
                if r.below(3) == 0 {
                    want[n as usize] = Digest::of(&r.bits().to_le_bytes());
                    digests.set(n, &want[n as usize]);
                }
                assert_eq!(digests.get(n), want[n as usize]);
            }
            assert!(digests.failure().is_none());
            assert!(digests.memory() <= 2 * LEN * in_memory.max(4));
        }
    }

    #[test]
    fn a_full_disk_is_told() {
        let mut digests = Digests::default();
        digests.spill(10, Box::new(Bytes(Vec::new(), true)));
        for n in 0..1000u32 {
            digests.set(n, &Digest::of(b"x"));
        }
        assert!(digests.failure().is_some());
    }
}
