//! Content that upper layers hide, so that it need not be packed.
//!
//! Layers are decoded from the top down. What each one puts or takes away is noted by path in [`Covers`]; a file of a
//! lower layer whose path is covered by then is not packed, and its record carries a [`Marker`] instead of a digest.
//! Whether a path is really what the merge will hide is only known when everything is merged (symbolic links on the
//! way, hard links to it): where the merge leaves a marked file visible, that layer is decoded once more for its sake.
//! So a note that is missing costs space and a wrong one costs time; neither changes the image.
//!
//! Notes are few bytes each and bounded in number.

use crate::chunker::lock;
use crate::tar::{Entry, EntryKind};
use format::Digest;
use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Paths that are noted: about 8 MiB of memory. Images whose upper layers have more are packed with what those hide.
const MAX_NOTES: usize = 1 << 18;
/// What whiteouts begin with, and the marker that empties a directory.
const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Covers {
    any: AtomicBool,
    hasher: RandomState,
    /// By the path's hash: a collision is a wrong note.
    notes: Mutex<HashMap<u64, Note>>,
}

/// The highest layers, numbered from 1, that do something to a path.
#[derive(Debug, Clone, Copy, Default)]
struct Note {
    /// Replace or remove what lower layers have there.
    at: u16,
    /// Replace or remove what lower layers have below it.
    below: u16,
}

impl Covers {
    /// Notes what an entry of `layer` hides of lower ones.
    pub(crate) fn note(&self, layer: usize, entry: &Entry) {
        let Ok(layer) = u16::try_from(layer + 1) else { return };
        let mut parts = components(&entry.path);
        let Some(last) = parts.next_back() else { return };
        if entry.path.starts_with(b"..") || parts.clone().any(|p| p == b".." || p.starts_with(WHITEOUT)) {
            return;
        }
        let dir = parts.fold(0, |hash, part| self.step(hash, part));
        let (path, note) = match last.strip_prefix(WHITEOUT) {
            Some(_) if last == OPAQUE => (dir, Note { at: 0, below: layer }),
            Some(name) if name.starts_with(WHITEOUT) => return,
            Some(name) => (self.step(dir, name), Note { at: layer, below: layer }),
            None => {
                let below = if entry.kind == EntryKind::Dir { 0 } else { layer };
                (self.step(dir, last), Note { at: layer, below })
            }
        };
        self.any.store(true, Ordering::Relaxed);
        let mut notes = lock(&self.notes);
        if notes.len() < MAX_NOTES || notes.contains_key(&path) {
            let have = notes.entry(path).or_default();
            (have.at, have.below) = (have.at.max(note.at), have.below.max(note.below));
        }
    }

    /// Whether a layer above `layer` is known to hide what is at `path`.
    pub(crate) fn hides(&self, layer: usize, path: &[u8]) -> bool {
        if !self.any.load(Ordering::Relaxed) {
            return false;
        }
        let notes = lock(&self.notes);
        let above = |layer: usize, note: u16| usize::from(note) > layer + 1;
        let note = |hash: u64| notes.get(&hash).copied().unwrap_or_default();
        let mut parts = components(path).peekable();
        let mut hash = 0;
        // An opaque marker in the root.
        let mut hidden = above(layer, note(hash).below);
        while let Some(part) = parts.next() {
            if part == b".." {
                return false;
            }
            hash = self.step(hash, part);
            let note = note(hash);
            hidden |= above(layer, if parts.peek().is_some() { note.below } else { note.at });
        }
        hidden
    }

    fn step(&self, dir: u64, name: &[u8]) -> u64 {
        self.hasher.hash_one((dir, name))
    }
}

fn components(path: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> + Clone {
    path.split(|&b| b == b'/').filter(|part| !part.is_empty() && *part != b".")
}

/// Stands for a file's content that was not packed: which record it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Marker {
    pub(crate) layer: u32,
    /// Its number among the layer's records.
    pub(crate) record: u32,
}

/// Bytes of a digest that say that it is none.
const NONE: usize = 24;

impl Marker {
    /// In place of a digest; no content has one that begins with so many zeros.
    pub(crate) fn digest(self) -> Digest {
        let mut digest = Digest::default();
        digest.0[NONE..NONE + 4].copy_from_slice(&self.layer.to_be_bytes());
        digest.0[NONE + 4..].copy_from_slice(&self.record.to_be_bytes());
        digest
    }

    /// `None` for the digest of content.
    pub(crate) fn of(digest: &Digest) -> Option<Marker> {
        let number = |at: usize| Some(u32::from_be_bytes(digest.0[at..at + 4].try_into().ok()?));
        let is = digest.0[..NONE] == [0; NONE];
        Some(Marker { layer: number(NONE)?, record: number(NONE + 4)? }).filter(|_| is)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_layers_above_hide_and_only_what_they_cover() {
        let covers = Covers::default();
        let note = |layer, path: &[u8], kind| {
            covers.note(layer, &Entry { path: path.to_vec(), kind, ..Entry::default() });
        };
        assert!(!covers.hides(0, b"a"));
        note(2, b"./a", EntryKind::File);
        note(2, b"d/.wh.gone", EntryKind::File);
        note(1, b"/opaque/.wh..wh..opq", EntryKind::File);
        note(1, b"dir/", EntryKind::Dir);
        note(1, b"link", EntryKind::Symlink);
        note(1, b"d/.wh..wh.plnk", EntryKind::File);
        note(1, b"up/../b", EntryKind::File);
        for (layer, path, hidden) in [
            (1, &b"a"[..], true),
            (2, b"a", false),
            (3, b"a", false),
            (0, b"//a", true),
            (0, b"a/below", true),
            (0, b"b", false),
            (1, b"d/gone", true),
            (1, b"d/gone/deep/er", true),
            (1, b"d/other", false),
            (1, b"d", false),
            (0, b"opaque/x", true),
            (1, b"opaque/x", false),
            (0, b"dir/x", false),
            (0, b"dir", true),
            (0, b"link/x", true),
            (0, b"d/.wh.plnk", false),
            (0, b"x/../a", false),
        ] {
            assert_eq!(covers.hides(layer, path), hidden, "{layer} {}", String::from_utf8_lossy(path));
        }
        note(1, b".wh..wh..opq", EntryKind::File);
        assert!(covers.hides(0, b"anything"));
        assert!(!covers.hides(1, b"anything"));
    }

    #[test]
    fn markers_are_not_digests() {
        let marker = Marker { layer: 7, record: 1 << 20 };
        assert_eq!(Marker::of(&marker.digest()), Some(marker));
        assert_eq!(Marker::of(&Digest::of(b"")), None);
    }
}
