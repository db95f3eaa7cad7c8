//! The arenas of a tree: rows with 32-bit numbers, freed rows used again.

use super::{NIL, Run};
use format::BLOCK;
use format::index as raw;
use std::ops::{Index, IndexMut};

/// One name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dirent {
    /// Where its name starts in the names.
    pub(super) name: u32,
    /// The directory it stands in.
    pub(super) parent: u32,
    /// The node it names.
    pub(super) node: u32,
    /// Neighbours in the directory's list, in no order.
    pub(super) prev: u32,
    pub(super) next: u32,
    /// The layer that put it there.
    pub(super) layer: u16,
    /// Some bits of the name's hash, so that most wrong names need not be compared.
    pub(super) tag: u16,
}

/// One inode. `a` and `b` by kind: a directory's first dirent and its own dirent; a file's content row and nothing; a
/// symlink's target and its length; a device's minor and major number.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Node {
    pub(super) mode: u16,
    /// The merge's notes on a directory.
    pub(super) mark: u16,
    /// 0 when the row is free; then `a` is the next free row.
    pub(super) nlink: u32,
    pub(super) owner: u32,
    pub(super) mtime_nsec: u32,
    pub(super) mtime_sec: i64,
    pub(super) a: u32,
    pub(super) b: u32,
}

impl Node {
    pub(super) fn is_dir(&self) -> bool {
        self.mode & raw::S_IFMT == raw::S_IFDIR
    }
}

/// A file's content but its digest. `object` and `value` as in [`raw::Place`].
#[derive(Debug, Clone, Copy)]
pub(super) struct Content {
    pub(super) size: u64,
    pub(super) object: u32,
    pub(super) value: u32,
}

/// A row that can say where the next free row is.
pub(super) trait Row: Copy {
    fn free(next: u32) -> Self;
    fn next_free(&self) -> u32;
}

impl Row for Dirent {
    fn free(next: u32) -> Self {
        Dirent { name: NIL, parent: NIL, node: NIL, prev: NIL, next, layer: 0, tag: 0 }
    }
    fn next_free(&self) -> u32 {
        self.next
    }
}

impl Row for Node {
    fn free(next: u32) -> Self {
        Node { a: next, ..Node::default() }
    }
    fn next_free(&self) -> u32 {
        self.a
    }
}

impl Row for Content {
    fn free(next: u32) -> Self {
        Content { size: 0, object: raw::Place::NONE, value: next }
    }
    fn next_free(&self) -> u32 {
        self.value
    }
}

/// Rows of one type.
#[derive(Debug)]
pub(super) struct Arena<T> {
    rows: Vec<T>,
    first_free: u32,
    free: u32,
}

impl<T> Default for Arena<T> {
    fn default() -> Self {
        Arena { rows: Vec::new(), first_free: NIL, free: 0 }
    }
}

impl<T: Row> Arena<T> {
    pub(super) fn push(&mut self, row: T) -> u32 {
        if self.first_free != NIL {
            let n = self.first_free;
            self.first_free = self.rows[n as usize].next_free();
            self.free -= 1;
            self.rows[n as usize] = row;
            return n;
        }
        self.rows.push(row);
        (self.rows.len() - 1) as u32
    }

    pub(super) fn free(&mut self, n: u32) {
        self.rows[n as usize] = T::free(self.first_free);
        self.first_free = n;
        self.free += 1;
    }

    pub(super) fn live(&self) -> u32 {
        self.rows.len() as u32 - self.free
    }

    /// Rows, the free ones included.
    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn iter_mut(&mut self) -> std::slice::IterMut<'_, T> {
        self.rows.iter_mut()
    }

    pub(super) fn memory(&self) -> usize {
        self.rows.capacity() * size_of::<T>()
    }

    /// Bytes of the rows.
    pub(super) fn bytes(&self) -> usize {
        self.rows.len() * size_of::<T>()
    }
}

impl<T> Index<u32> for Arena<T> {
    type Output = T;
    fn index(&self, n: u32) -> &T {
        &self.rows[n as usize]
    }
}

impl<T> IndexMut<u32> for Arena<T> {
    fn index_mut(&mut self, n: u32) -> &mut T {
        &mut self.rows[n as usize]
    }
}

pub(super) type Nodes = Arena<Node>;
pub(super) type Dirents = Arena<Dirent>;
pub(super) type Contents = Arena<Content>;

/// Byte strings back to back, with a count of those that nobody uses any more.
#[derive(Debug, Default)]
pub(super) struct Bytes {
    bytes: Vec<u8>,
    garbage: usize,
}

impl Bytes {
    pub(super) fn push(&mut self, s: &[u8]) -> (u32, u32) {
        let at = self.bytes.len();
        self.bytes.extend_from_slice(s);
        (at as u32, s.len() as u32)
    }

    pub(super) fn get(&self, at: u32, len: u32) -> &[u8] {
        &self.bytes[at as usize..at as usize + len as usize]
    }

    pub(super) fn free(&mut self, len: usize) {
        self.garbage += len;
    }

    pub(super) fn unfree(&mut self, len: usize) {
        self.garbage -= len;
    }

    pub(super) fn live(&self) -> usize {
        self.bytes.len() - self.garbage
    }

    /// Whether a copy of what is in use is worth its time.
    pub(super) fn wants_compaction(&self) -> bool {
        self.garbage > self.live() + (1 << 20)
    }

    pub(super) fn memory(&self) -> usize {
        self.bytes.capacity()
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes.len()
    }
}

/// The extents of files that need several, as in the index.
#[derive(Debug, Default)]
pub(super) struct Extents {
    rows: Vec<Run>,
    garbage: usize,
}

impl Extents {
    /// Stores a file's runs, merged where they touch; gives `object` and `value` as in [`raw::Place`].
    pub(super) fn store(&mut self, runs: &[Run], blocks: u64) -> (u32, u32) {
        let start = self.rows.len();
        for &run in runs {
            match self.rows[start..].last_mut() {
                Some(last) if touches(last, &run) => last.count += run.count,
                _ => self.rows.push(run),
            }
        }
        match self.rows[start..] {
            [] => return (raw::Place::NONE, 0),
            [only] if only.file_block == 0 && u64::from(only.count) == blocks => {
                self.rows.truncate(start);
                return (only.object, only.space_block);
            }
            _ => {}
        }
        if let Some(last) = self.rows.last_mut() {
            last.count |= raw::Extent::LAST;
        }
        (raw::Place::MANY, start as u32)
    }

    pub(super) fn runs(&self, c: &Content) -> Runs<'_> {
        match c.object {
            raw::Place::NONE => Runs { single: None, rows: &[] },
            raw::Place::MANY => Runs { single: None, rows: &self.rows[c.value as usize..][..self.len_at(c.value)] },
            object => {
                let count = c.size.div_ceil(BLOCK) as u32;
                Runs { single: Some(Run { file_block: 0, count, object, space_block: c.value }), rows: &[] }
            }
        }
    }

    /// Rows of the file whose first row is `first`.
    fn len_at(&self, first: u32) -> usize {
        let rows = &self.rows[first as usize..];
        rows.iter().position(|r| r.count & raw::Extent::LAST != 0).map_or(rows.len(), |n| n + 1)
    }

    pub(super) fn free(&mut self, c: &Content) {
        if c.object == raw::Place::MANY {
            self.garbage += self.len_at(c.value);
        }
    }

    pub(super) fn live(&self) -> usize {
        self.rows.len() - self.garbage
    }

    pub(super) fn wants_compaction(&self) -> bool {
        self.garbage > self.live() + (1 << 16)
    }

    /// Moves what `contents` use to new rows and forgets the rest.
    pub(super) fn compact(&mut self, contents: &mut Contents) {
        let mut rows = Vec::with_capacity(self.live());
        for c in contents.iter_mut() {
            if c.object == raw::Place::MANY {
                let from = c.value as usize;
                let len = self.len_at(c.value);
                c.value = rows.len() as u32;
                rows.extend_from_slice(&self.rows[from..from + len]);
            }
        }
        *self = Extents { rows, garbage: 0 };
    }

    pub(super) fn memory(&self) -> usize {
        self.rows.capacity() * size_of::<Run>()
    }

    pub(super) fn bytes(&self) -> usize {
        self.rows.len() * size_of::<Run>()
    }
}

/// A file's runs.
#[derive(Debug, Clone)]
pub(super) struct Runs<'a> {
    single: Option<Run>,
    rows: &'a [Run],
}

impl Runs<'_> {
    pub(super) const NONE: Runs<'static> = Runs { single: None, rows: &[] };
}

impl Iterator for Runs<'_> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        if let Some(run) = self.single.take() {
            return Some(run);
        }
        let (run, rest) = self.rows.split_first()?;
        self.rows = rest;
        Some(Run { count: run.count & !raw::Extent::LAST, ..*run })
    }
}

fn touches(a: &Run, b: &Run) -> bool {
    a.object == b.object
        && a.file_block.checked_add(a.count) == Some(b.file_block)
        && a.space_block.checked_add(a.count) == Some(b.space_block)
}
