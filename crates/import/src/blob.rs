//! Digests as OCI writes them, and a reader that checks one while it is read.

use crate::error::ImportError;
use serde_json::Value;
use sha2::{Digest as _, Sha256, Sha512};
use std::fmt;
use std::io::{self, Read};

/// `sha256:HEX` or `sha512:HEX`.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct BlobDigest {
    algorithm: Algorithm,
    hex: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Algorithm {
    Sha256,
    Sha512,
}

impl Algorithm {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Algorithm::Sha256 => "sha256",
            Algorithm::Sha512 => "sha512",
        }
    }
}

impl BlobDigest {
    /// Reads a digest; the hexadecimal part is checked, so that it can be used as a file name.
    pub(crate) fn parse(text: &str) -> Option<BlobDigest> {
        let (name, hex) = text.split_once(':')?;
        let (algorithm, len) = match name {
            "sha256" => (Algorithm::Sha256, 64),
            "sha512" => (Algorithm::Sha512, 128),
            _ => return None,
        };
        let ok = hex.len() == len && hex.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        ok.then(|| BlobDigest { algorithm, hex: hex.into() })
    }

    /// The digest in a JSON value.
    pub(crate) fn from_json(value: &Value) -> Option<BlobDigest> {
        value.as_str().and_then(BlobDigest::parse)
    }

    pub(crate) fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    pub(crate) fn hex(&self) -> &str {
        &self.hex
    }

    /// The algorithm and the first digits, for messages.
    pub(crate) fn short(&self) -> String {
        format!("{}:{}…", self.algorithm.name(), &self.hex[..12])
    }
}

impl fmt::Display for BlobDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.algorithm.name(), self.hex)
    }
}

impl fmt::Debug for BlobDigest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Either hash.
#[derive(Clone)]
pub(crate) enum Hasher {
    Sha256(Sha256),
    Sha512(Box<Sha512>),
}

impl Hasher {
    pub(crate) fn new(algorithm: Algorithm) -> Hasher {
        match algorithm {
            Algorithm::Sha256 => Hasher::Sha256(Sha256::new()),
            Algorithm::Sha512 => Hasher::Sha512(Box::new(Sha512::new())),
        }
    }

    pub(crate) fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(h) => h.update(bytes),
            Hasher::Sha512(h) => h.update(bytes),
        }
    }

    pub(crate) fn finish(self) -> BlobDigest {
        let (algorithm, bytes) = match self {
            Hasher::Sha256(h) => (Algorithm::Sha256, h.finalize().to_vec()),
            Hasher::Sha512(h) => (Algorithm::Sha512, h.finalize().to_vec()),
        };
        BlobDigest { algorithm, hex: bytes.iter().map(|b| format!("{b:02x}")).collect() }
    }
}

impl fmt::Debug for Hasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hasher")
    }
}

/// The digest of bytes in memory.
pub(crate) fn digest_of(algorithm: Algorithm, bytes: &[u8]) -> BlobDigest {
    let mut h = Hasher::new(algorithm);
    h.update(bytes);
    h.finish()
}

/// What a blob must be.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Promise {
    pub(crate) digest: Option<BlobDigest>,
    pub(crate) size: Option<u64>,
}

/// Reads a blob in big steps, hashes what it reads, and lets the next bytes be looked at before they are taken.
pub(crate) struct BlobReader<'a> {
    inner: Box<dyn Read + Send + 'a>,
    hasher: Option<Hasher>,
    /// Bytes read from `inner`.
    read: u64,
    buffer: Box<[u8]>,
    at: usize,
    end: usize,
    eof: bool,
    /// More bytes than this are a mismatch at once.
    max: u64,
    /// Told of every step.
    progress: &'a (dyn Fn(u64) + Sync),
}

impl fmt::Debug for BlobReader<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlobReader").field("read", &self.read).finish_non_exhaustive()
    }
}

/// Bytes read at a time.
const STEP: usize = 256 << 10;

impl<'a> BlobReader<'a> {
    pub(crate) fn new(inner: Box<dyn Read + Send + 'a>, promise: &Promise, progress: &'a (dyn Fn(u64) + Sync)) -> Self {
        BlobReader {
            inner,
            hasher: promise.digest.as_ref().map(|d| Hasher::new(d.algorithm())),
            read: 0,
            buffer: vec![0; STEP].into_boxed_slice(),
            at: 0,
            end: 0,
            eof: false,
            max: promise.size.unwrap_or(u64::MAX),
            progress,
        }
    }

    /// Offset of the next byte that [`BlobReader::available`] gives.
    pub(crate) fn position(&self) -> u64 {
        self.read - (self.end - self.at) as u64
    }

    /// The next bytes; empty at the end only.
    pub(crate) fn available(&mut self) -> io::Result<&[u8]> {
        self.peek(1)
    }

    /// The next bytes, at least `n` of them if there are as many. `n` is at most a few.
    pub(crate) fn peek(&mut self, n: usize) -> io::Result<&[u8]> {
        while self.end - self.at < n && !self.eof {
            if self.at > 0 {
                self.buffer.copy_within(self.at..self.end, 0);
                self.end -= self.at;
                self.at = 0;
            }
            let got = read_some(&mut *self.inner, &mut self.buffer[self.end..])?;
            self.account(self.end, got, None)?;
            self.end += got;
        }
        Ok(&self.buffer[self.at..self.end])
    }

    pub(crate) fn consume(&mut self, n: usize) {
        self.at = (self.at + n).min(self.end);
    }

    /// Reads into `out`, past the buffer where that is empty. 0 at the end only.
    pub(crate) fn read_into(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.at < self.end {
            let n = out.len().min(self.end - self.at);
            out[..n].copy_from_slice(&self.buffer[self.at..self.at + n]);
            self.at += n;
            return Ok(n);
        }
        if self.eof {
            return Ok(0);
        }
        let n = read_some(&mut *self.inner, out)?;
        self.account(0, n, Some(out))?;
        Ok(n)
    }

    /// Hashes and counts bytes that were read to `at` of the buffer, or to the start of `out`.
    fn account(&mut self, at: usize, n: usize, out: Option<&[u8]>) -> io::Result<()> {
        let bytes = out.map_or_else(|| &self.buffer[at..at + n], |o| &o[..n]);
        if let Some(h) = &mut self.hasher {
            h.update(bytes);
        }
        self.read += n as u64;
        self.eof = n == 0;
        (self.progress)(n as u64);
        if self.read > self.max {
            return Err(io::Error::other(TooLong));
        }
        Ok(())
    }

    /// Reads what is left and checks digest and size, where any was promised. `place` names the blob.
    pub(crate) fn check(mut self, promise: &Promise, place: &str) -> Result<(), ImportError> {
        if promise.digest.is_none() && promise.size.is_none() {
            return Ok(());
        }
        self.at = self.end;
        while !self.eof {
            self.available().map_err(|e| read_error(e, promise, place))?;
            self.at = self.end;
        }
        if let Some(want) = promise.size.filter(|&want| want != self.read) {
            return Err(ImportError::mismatch(place, "size", want, self.read));
        }
        match (&promise.digest, self.hasher) {
            (Some(want), Some(hasher)) => match hasher.finish() {
                have if have == *want => Ok(()),
                have => Err(ImportError::mismatch(place, "digest", want, have)),
            },
            _ => Ok(()),
        }
    }
}

/// The blob is longer than promised.
#[derive(Debug, thiserror::Error)]
#[error("longer than the image says")]
struct TooLong;

/// What went wrong while a blob was read.
pub(crate) fn read_error(e: io::Error, promise: &Promise, place: &str) -> ImportError {
    match promise.size {
        Some(size) if e.get_ref().is_some_and(|e| e.is::<TooLong>()) => {
            ImportError::mismatch(place, "size", size, "larger")
        }
        _ => ImportError::io("read", place, e),
    }
}

fn read_some(inner: &mut dyn Read, out: &mut [u8]) -> io::Result<usize> {
    loop {
        match inner.read(out) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}
