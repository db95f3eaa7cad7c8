//! Sets of extended attributes, interned: nodes with the same attributes share one set.

use super::{Limits, PathBytes, TreeError};
use format::Digest;
use format::index as raw;
use std::collections::HashMap;

/// A set of extended attributes of one tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct XattrSet(pub(crate) u32);

impl XattrSet {
    /// No attributes; the same in every tree.
    pub const EMPTY: XattrSet = XattrSet(0);
}

/// Whether an image can carry an attribute of that name: `user.*`, `trusted.*`, `security.*` and POSIX ACLs.
pub fn xattr_is_supported(name: &[u8]) -> bool {
    matches!(name, b"system.posix_acl_access" | b"system.posix_acl_default")
        || [&b"user."[..], b"trusted.", b"security."].iter().any(|p| name.len() > p.len() && name.starts_with(p))
}

/// Each set is a byte string: for each attribute, sorted by name, the name's length (u8), the value's (u16), both.
#[derive(Debug)]
pub(super) struct XattrTable {
    bytes: Vec<u8>,
    sets: Vec<(u32, u32)>,
    numbers: HashMap<Digest, u32>,
}

impl XattrTable {
    pub(super) fn new() -> Self {
        XattrTable { bytes: Vec::new(), sets: vec![(0, 0)], numbers: HashMap::new() }
    }

    pub(super) fn intern(&mut self, list: &[(&[u8], &[u8])], limits: &Limits) -> Result<XattrSet, TreeError> {
        if list.is_empty() {
            return Ok(XattrSet::EMPTY);
        }
        let mut total = 0;
        for &(name, value) in list {
            let bad = |why| TreeError::BadXattr { name: PathBytes::of(name), why };
            let limit = |what, limit: usize| TreeError::Limit { path: PathBytes::of(name), what, limit: limit as u64 };
            if name.is_empty() {
                return Err(bad("has no name"));
            }
            if name.contains(&0) {
                return Err(bad("has a NUL byte in its name"));
            }
            if name.len() > raw::MAX_XATTR_NAME_LEN {
                return Err(limit("bytes of an extended attribute's name", raw::MAX_XATTR_NAME_LEN));
            }
            if !xattr_is_supported(name) {
                return Err(TreeError::UnsupportedXattr(PathBytes::of(name)));
            }
            if value.len() > limits.xattr_value_len {
                return Err(limit("bytes of an extended attribute's value", limits.xattr_value_len));
            }
            total += (4 + name.len() + value.len()).next_multiple_of(4);
            if total > limits.xattr_set_bytes {
                return Err(limit("bytes of extended attributes of one file", limits.xattr_set_bytes));
            }
        }
        let mut sorted = list.to_vec();
        sorted.sort_unstable_by_key(|&(name, _)| name);
        if let Some(twice) = sorted.windows(2).find(|w| w[0].0 == w[1].0) {
            return Err(TreeError::BadXattr { name: PathBytes::of(twice[0].0), why: "is there twice" });
        }
        let mut bytes = Vec::with_capacity(total);
        for (name, value) in sorted {
            bytes.push(name.len() as u8);
            bytes.extend_from_slice(&(value.len() as u16).to_le_bytes());
            bytes.extend_from_slice(name);
            bytes.extend_from_slice(value);
        }
        let digest = Digest::of(&bytes);
        if let Some(&n) = self.numbers.get(&digest) {
            return Ok(XattrSet(n));
        }
        // A set's own row and its key count too, so that many tiny sets are bounded as well.
        let row = 64;
        if self.bytes.len() + bytes.len() + self.sets.len() * row > limits.xattr_bytes {
            let name = list.first().map_or(&[][..], |&(name, _)| name);
            let what = "bytes of different extended attributes together";
            return Err(TreeError::Limit { path: PathBytes::of(name), what, limit: limits.xattr_bytes as u64 });
        }
        let n = self.sets.len() as u32;
        self.sets.push((self.bytes.len() as u32, bytes.len() as u32));
        self.bytes.extend_from_slice(&bytes);
        self.numbers.insert(digest, n);
        Ok(XattrSet(n))
    }

    pub(super) fn get(&self, set: XattrSet) -> Xattrs<'_> {
        let (at, len) = self.sets[set.0 as usize];
        Xattrs(&self.bytes[at as usize..at as usize + len as usize])
    }

    pub(super) fn count(&self) -> usize {
        self.sets.len()
    }

    pub(super) fn memory(&self) -> usize {
        self.bytes.capacity() + self.sets.capacity() * 8 + self.numbers.capacity() * 37
    }
}

/// The names and values of a set, sorted by name.
#[derive(Debug, Clone)]
pub struct Xattrs<'a>(&'a [u8]);

impl<'a> Iterator for Xattrs<'a> {
    type Item = (&'a [u8], &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        let (&[name_len, v0, v1], rest) = self.0.split_first_chunk()?;
        let (name, rest) = rest.split_at(name_len as usize);
        let (value, rest) = rest.split_at(u16::from_le_bytes([v0, v1]) as usize);
        self.0 = rest;
        Some((name, value))
    }
}
