//! BLAKE3 digests and what each of them is taken over.
//!
//! Every content byte is hashed once: the digest of a *chunk* is BLAKE3 of its bytes, and the digests of files
//! and frames are taken over the digests of their chunks. The derivations carry a context each, so that one
//! can never be taken for another.

use std::fmt;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// A BLAKE3 digest, 32 bytes.
#[derive(
    Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned,
)]
#[repr(transparent)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// BLAKE3 of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Digest(*blake3::hash(bytes).as_bytes())
    }

    /// Lower-case hexadecimal, 64 characters.
    pub fn to_hex(&self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }

    /// Reads 64 hexadecimal characters; `None` for anything else.
    pub fn from_hex(text: &str) -> Option<Self> {
        blake3::Hash::from_hex(text).ok().map(|h| Digest(*h.as_bytes()))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}…", &self.to_hex()[..12])
    }
}

const FILE_CONTEXT: &str = "lazyroot 2026 file content v1";
const FRAME_CONTEXT: &str = "lazyroot 2026 frame content v1";
const CONTENT_ROOT_CONTEXT: &str = "lazyroot 2026 content root v1";
const IDENTITY_CONTEXT: &str = "lazyroot 2026 tree identity v1";

/// Takes the digest of one file: its size and the digests of its chunks (cut at multiples of
/// [`crate::CHUNK`], the last one short, all-zero chunks like any other).
#[derive(Debug, Clone)]
pub struct FileHasher {
    inner: blake3::Hasher,
    size: u64,
}

impl Default for FileHasher {
    fn default() -> Self {
        Self { inner: blake3::Hasher::new_derive_key(FILE_CONTEXT), size: 0 }
    }
}

impl FileHasher {
    /// Adds the next chunk: its digest and its length in bytes.
    pub fn chunk(&mut self, digest: &Digest, len: usize) {
        self.inner.update(&digest.0);
        self.size += len as u64;
    }

    /// Adds `len` bytes of zeros that were never read; `self` must stand at a chunk boundary. The digest is the
    /// same as if they had been read and hashed.
    pub fn zeros(&mut self, len: u64) {
        let full = zero_chunk();
        for _ in 0..len / crate::CHUNK as u64 {
            self.inner.update(&full.0);
        }
        let tail = (len % crate::CHUNK as u64) as usize;
        if tail > 0 {
            self.inner.update(&Digest::of(&[0u8; crate::CHUNK][..tail]).0);
        }
        self.size += len;
    }

    /// The file's digest.
    pub fn finish(mut self) -> Digest {
        self.inner.update(&self.size.to_le_bytes());
        Digest(*self.inner.finalize().as_bytes())
    }
}

/// The digest of a whole chunk of zeros.
pub fn zero_chunk() -> Digest {
    static ZERO: std::sync::OnceLock<Digest> = std::sync::OnceLock::new();
    *ZERO.get_or_init(|| Digest::of(&[0u8; crate::CHUNK]))
}

/// Takes the digest of one frame: the length (u32 LE) and digest of each of its chunks, in order.
#[derive(Debug, Clone)]
pub struct FrameHasher(blake3::Hasher);

impl Default for FrameHasher {
    fn default() -> Self {
        FrameHasher(blake3::Hasher::new_derive_key(FRAME_CONTEXT))
    }
}

impl FrameHasher {
    /// Adds the next chunk: its digest and its length in bytes.
    pub fn chunk(&mut self, digest: &Digest, len: u32) {
        self.0.update(&len.to_le_bytes());
        self.0.update(&digest.0);
    }

    /// The frame's digest.
    pub fn finish(self) -> Digest {
        Digest(*self.0.finalize().as_bytes())
    }
}

/// Takes the digest over the content of a whole tree: the file digests of all regular files in inode order.
#[derive(Debug, Clone)]
pub struct ContentRootHasher(blake3::Hasher);

impl Default for ContentRootHasher {
    fn default() -> Self {
        ContentRootHasher(blake3::Hasher::new_derive_key(CONTENT_ROOT_CONTEXT))
    }
}

impl ContentRootHasher {
    /// Adds the next regular file's digest.
    pub fn file(&mut self, digest: &Digest) {
        self.0.update(&digest.0);
    }

    /// The content root.
    pub fn finish(self) -> Digest {
        Digest(*self.0.finalize().as_bytes())
    }
}

/// An image's identity: from the digest of the tree's sections and the content root.
pub fn identity(tree: &Digest, content_root: &Digest) -> Digest {
    let mut h = blake3::Hasher::new_derive_key(IDENTITY_CONTEXT);
    h.update(&tree.0);
    h.update(&content_root.0);
    Digest(*h.finalize().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unread_zeros_hash_like_read_ones() {
        for len in [0u64, 1, 4096, 65535, 65536, 65537, 200_000] {
            let mut a = FileHasher::default();
            a.zeros(len);
            let mut b = FileHasher::default();
            let bytes = vec![0u8; len as usize];
            for c in bytes.chunks(crate::CHUNK) {
                b.chunk(&Digest::of(c), c.len());
            }
            assert_eq!(a.finish(), b.finish(), "{len}");
        }
    }

    #[test]
    fn hex_round_trips() {
        let d = Digest::of(b"x");
        assert_eq!(Digest::from_hex(&d.to_hex()), Some(d));
        assert_eq!(Digest::from_hex("zz"), None);
        assert_eq!(d.to_string(), d.to_hex());
    }
}
