//! The names of a tree: their bytes, and a table that finds (directory, name).
//!
//! The table is open addressing with linear probing; slots hold dirent numbers. It hashes with the standard
//! library's keyed SipHash, so that nobody can choose names that collide.

use super::NIL;
use super::arena::Dirents;
use std::hash::{BuildHasher, Hasher, RandomState};

#[derive(Debug)]
pub(super) struct Names {
    /// Each name with its length before it.
    bytes: Vec<u8>,
    garbage: usize,
    slots: Vec<u32>,
    used: usize,
    hasher: RandomState,
}

impl Names {
    pub(super) fn new() -> Self {
        Names { bytes: Vec::new(), garbage: 0, slots: vec![NIL; 16], used: 0, hasher: RandomState::new() }
    }

    pub(super) fn get(&self, at: u32) -> &[u8] {
        let at = at as usize;
        &self.bytes[at + 1..at + 1 + self.bytes[at] as usize]
    }

    fn hash(&self, dir: u32, name: &[u8]) -> u64 {
        let mut h = self.hasher.build_hasher();
        h.write_u32(dir);
        h.write(name);
        h.finish()
    }

    fn slot_of(&self, hash: u64) -> usize {
        // The table's length is a power of two.
        (hash >> 16) as usize & (self.slots.len() - 1)
    }

    fn next(&self, slot: usize) -> usize {
        (slot + 1) & (self.slots.len() - 1)
    }

    /// The dirent called `name` in `dir`.
    pub(super) fn find(&self, dirents: &Dirents, dir: u32, name: &[u8]) -> Option<u32> {
        let hash = self.hash(dir, name);
        let mut slot = self.slot_of(hash);
        loop {
            let d = self.slots[slot];
            if d == NIL {
                return None;
            }
            let row = &dirents[d];
            if row.tag == hash as u16 && row.parent == dir && self.get(row.name) == name {
                return Some(d);
            }
            slot = self.next(slot);
        }
    }

    /// Stores the bytes of a name of at most 255 bytes; gives where, and the tag for its dirent.
    pub(super) fn store(&mut self, dir: u32, name: &[u8]) -> (u32, u16) {
        let at = self.bytes.len() as u32;
        self.bytes.push(name.len() as u8);
        self.bytes.extend_from_slice(name);
        (at, self.hash(dir, name) as u16)
    }

    /// Enters a dirent, whose row is filled in, into the table.
    pub(super) fn insert(&mut self, dirents: &Dirents, d: u32) {
        if (self.used + 1) * 8 > self.slots.len() * 7 {
            self.grow(dirents);
        }
        self.place(dirents, d);
        self.used += 1;
    }

    fn home(&self, dirents: &Dirents, d: u32) -> usize {
        let row = &dirents[d];
        self.slot_of(self.hash(row.parent, self.get(row.name)))
    }

    fn place(&mut self, dirents: &Dirents, d: u32) {
        let mut slot = self.home(dirents, d);
        while self.slots[slot] != NIL {
            slot = self.next(slot);
        }
        self.slots[slot] = d;
    }

    fn grow(&mut self, dirents: &Dirents) {
        let old = std::mem::take(&mut self.slots);
        self.slots = vec![NIL; old.len() * 2];
        for d in old.into_iter().filter(|&d| d != NIL) {
            self.place(dirents, d);
        }
    }

    /// Takes a dirent out of the table, and closes the gap that it leaves.
    pub(super) fn remove(&mut self, dirents: &Dirents, d: u32) {
        let mut slot = self.home(dirents, d);
        while self.slots[slot] != d {
            slot = self.next(slot);
        }
        let mask = self.slots.len() - 1;
        let mut gap = slot;
        loop {
            slot = self.next(slot);
            let other = self.slots[slot];
            if other == NIL {
                break;
            }
            let home = self.home(dirents, other);
            if slot.wrapping_sub(home) & mask >= slot.wrapping_sub(gap) & mask {
                self.slots[gap] = other;
                gap = slot;
            }
        }
        self.slots[gap] = NIL;
        self.used -= 1;
        self.garbage += self.get(dirents[d].name).len() + 1;
    }

    /// Bytes of the names in use, lengths included.
    pub(super) fn live_bytes(&self) -> usize {
        self.bytes.len() - self.garbage
    }

    /// Copies the names in use, when that frees at least half of the memory.
    pub(super) fn compact(&mut self, dirents: &mut Dirents) {
        if self.garbage <= self.live_bytes() + (1 << 20) {
            return;
        }
        let mut bytes = Vec::with_capacity(self.live_bytes());
        for row in dirents.iter_mut().filter(|row| row.node != NIL) {
            let at = row.name as usize;
            row.name = bytes.len() as u32;
            bytes.extend_from_slice(&self.bytes[at..at + 1 + self.bytes[at] as usize]);
        }
        self.bytes = bytes;
        self.garbage = 0;
    }

    /// Bytes of the names, those that are gone included.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Gives up the table: names are only read from now on, by place.
    pub(super) fn freeze(&mut self) {
        self.slots = vec![NIL];
        self.used = 0;
    }

    pub(super) fn memory(&self) -> usize {
        self.bytes.capacity() + self.slots.capacity() * size_of::<u32>()
    }
}
