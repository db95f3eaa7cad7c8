//! What front ends see of the bytes: a block source that *resolves* ranges into segments, and fetches what is
//! missing.
//!
//! Job: the [`BlockSource`] trait, and [`Resolution`], the answer that a front end turns into a reply.
//!
//! Invariants: a resolution that came back [`Presence::Ready`] covers exactly the range that was asked, in order,
//! and everything in it stays readable until it is cleared or dropped (its guards do that). Resolving never
//! waits, never takes a lock that is held across I/O, and copies no file data; in the steady state it allocates
//! nothing, because a `Resolution` is kept by its thread and reused.
//!
//! Failure model: what cannot be resolved is an error, never zeros and never a shorter range. After
//! [`Presence::Missing`] or an error the resolution's content is unspecified: clear it.
//!
//! It does not know: images, layouts, mounts, stores.

use crate::space::{Pin, Space};
use crate::{Done, FetchError, Request};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, mpsc};

/// Whether a range could be resolved.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Presence {
    /// The resolution covers the whole range.
    Ready,
    /// At least one part is not usable yet: clear the resolution, fetch the range and resolve again.
    Missing,
}

/// Why a range cannot be resolved, now or ever. All of them are EIO to a reader, but for `OutOfRange` (EINVAL).
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The range does not lie within the source.
    #[error("range {offset}+{len} lies outside of the {size} bytes there are")]
    OutOfRange {
        /// First byte asked.
        offset: u64,
        /// Bytes asked.
        len: usize,
        /// Bytes of the source.
        size: u64,
    },
    /// The index, layout or object map points where nothing is.
    #[error("corrupt {what} at {at:#x}: {why}")]
    Corrupt {
        /// The structure.
        what: &'static str,
        /// Where, in bytes.
        at: u64,
        /// What is wrong.
        why: &'static str,
    },
    /// Resolved bytes could not be read from their file.
    #[error("reading resolved bytes")]
    Io(#[from] io::Error),
}

/// A piece of a resolved range.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Segment {
    /// Bytes made for this answer (metadata), in [`Resolution::scratch`].
    Bytes {
        /// First byte in the scratch buffer.
        start: usize,
        /// Bytes.
        len: usize,
    },
    /// A range of a space's file, see [`Resolution::fd`].
    Space {
        /// The guard that holds it.
        guard: u32,
        /// First byte in the file.
        offset: u64,
        /// Bytes.
        len: usize,
    },
    /// A range of a buffer that is held in memory because the disk refuses it, see [`Resolution::memory`].
    Memory {
        /// The guard that holds it.
        guard: u32,
        /// First byte in the buffer.
        offset: usize,
        /// Bytes.
        len: usize,
    },
    /// Zeros (a hole of a file, padding of a layout).
    Zeros {
        /// Bytes.
        len: usize,
    },
}

impl Segment {
    /// Bytes of the piece.
    pub fn len(&self) -> usize {
        match *self {
            Segment::Bytes { len, .. }
            | Segment::Space { len, .. }
            | Segment::Memory { len, .. }
            | Segment::Zeros { len } => len,
        }
    }

    /// Whether there is nothing in it; a resolution never holds such a segment.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Keeps a file's segments present while it lives.
#[derive(Debug)]
pub struct SpaceGuard(Held);

#[derive(Debug)]
enum Held {
    Space(Pin),
    File(Arc<File>),
    Memory(Arc<Vec<u8>>),
}

impl SpaceGuard {
    pub(crate) fn pin(pin: Pin) -> Self {
        SpaceGuard(Held::Space(pin))
    }

    /// A guard over a plain file that nobody punches or truncates: for sources that are not spaces, and for tests.
    pub fn file(file: Arc<File>) -> Self {
        SpaceGuard(Held::File(file))
    }
}

/// The answer to a resolved range: its segments in order, and the guards that keep them present. Kept by a thread
/// and reused; [`Resolution::clear`] (or dropping it) releases the guards, so do that right after the reply has
/// been *written*.
#[derive(Debug, Default)]
pub struct Resolution {
    segments: Vec<Segment>,
    scratch: Vec<u8>,
    guards: Vec<SpaceGuard>,
    len: usize,
}

impl Resolution {
    /// An empty one.
    pub fn new() -> Self {
        Self::default()
    }

    /// Empties it and releases its guards; the buffers keep their capacity.
    pub fn clear(&mut self) {
        self.segments.clear();
        self.scratch.clear();
        self.guards.clear();
        self.len = 0;
    }

    /// Bytes of all segments.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The pieces, in order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The buffer that [`Segment::Bytes`] point into.
    pub fn scratch(&self) -> &[u8] {
        &self.scratch
    }

    /// Appends `len` bytes of scratch for the caller to fill.
    pub fn push_scratch(&mut self, len: usize) -> &mut [u8] {
        let start = self.scratch.len();
        self.scratch.resize(start + len, 0);
        if len > 0 {
            self.len += len;
            match self.segments.last_mut() {
                // Scratch only grows at its end, so a preceding Bytes segment always ends where this one starts.
                Some(Segment::Bytes { len: last, .. }) => *last += len,
                _ => self.segments.push(Segment::Bytes { start, len }),
            }
        }
        &mut self.scratch[start..]
    }

    /// Appends a copy of `bytes`.
    pub fn push_bytes(&mut self, bytes: &[u8]) {
        self.push_scratch(bytes.len()).copy_from_slice(bytes);
    }

    /// Appends zeros.
    pub fn push_zeros(&mut self, len: usize) {
        if len == 0 {
            return;
        }
        self.len += len;
        match self.segments.last_mut() {
            Some(Segment::Zeros { len: last }) => *last += len,
            _ => self.segments.push(Segment::Zeros { len }),
        }
    }

    /// Appends a range of the file that `guard` holds.
    pub fn push_space(&mut self, guard: SpaceGuard, offset: u64, len: usize) {
        let guard = self.add_guard(guard);
        self.push_held(guard, offset, len);
    }

    /// Appends a range of a buffer in memory.
    pub fn push_memory(&mut self, bytes: Arc<Vec<u8>>, offset: usize, len: usize) {
        debug_assert!(offset + len <= bytes.len());
        if len == 0 {
            return;
        }
        let guard = self.add_guard(SpaceGuard(Held::Memory(bytes)));
        self.len += len;
        self.segments.push(Segment::Memory { guard, offset, len });
    }

    /// Appends a range of the file that guard number `guard` holds.
    pub(crate) fn push_held(&mut self, guard: u32, offset: u64, len: usize) {
        if len == 0 {
            return;
        }
        self.len += len;
        match self.segments.last_mut() {
            Some(Segment::Space { guard: g, offset: o, len: l }) if *g == guard && *o + *l as u64 == offset => {
                *l += len
            }
            _ => self.segments.push(Segment::Space { guard, offset, len }),
        }
    }

    /// A guard over `space`: the one that is already held, or a new one.
    pub(crate) fn guard_of(&mut self, space: &Arc<Space>) -> u32 {
        // A request touches very few spaces; walking the guards is cheaper than anything cleverer. An older guard
        // of the same space protects at least what a new one would: it was taken before.
        for (i, g) in self.guards.iter().enumerate() {
            if let SpaceGuard(Held::Space(pin)) = g
                && pin.is_of(space)
            {
                return i as u32;
            }
        }
        self.add_guard(SpaceGuard::pin(space.pin()))
    }

    fn add_guard(&mut self, guard: SpaceGuard) -> u32 {
        self.guards.push(guard);
        (self.guards.len() - 1) as u32
    }

    /// The file of a [`Segment::Space`].
    ///
    /// # Panics
    /// When `guard` is not that of a `Space` segment of this resolution.
    pub fn fd(&self, guard: u32) -> BorrowedFd<'_> {
        match &self.guards[guard as usize].0 {
            Held::Space(pin) => pin.fd(),
            Held::File(file) => file.as_fd(),
            Held::Memory(_) => panic!("guard {guard} holds memory, not a file"),
        }
    }

    /// The buffer of a [`Segment::Memory`].
    ///
    /// # Panics
    /// When `guard` is not that of a `Memory` segment of this resolution.
    pub fn memory(&self, guard: u32) -> &[u8] {
        match &self.guards[guard as usize].0 {
            Held::Memory(bytes) => bytes,
            _ => panic!("guard {guard} holds a file, not memory"),
        }
    }

    /// Copies all bytes to `out`, which must have exactly [`Resolution::len`] bytes. For readers that want plain
    /// bytes; a serving thread splices or gathers instead.
    pub fn copy_to(&self, out: &mut [u8]) -> Result<(), ReadError> {
        if out.len() != self.len {
            return Err(ReadError::OutOfRange { offset: 0, len: out.len(), size: self.len as u64 });
        }
        let mut rest = out;
        for segment in &self.segments {
            let (piece, behind) = rest.split_at_mut(segment.len());
            rest = behind;
            match *segment {
                Segment::Bytes { start, len } => piece.copy_from_slice(&self.scratch[start..start + len]),
                Segment::Memory { guard, offset, len } => {
                    piece.copy_from_slice(&self.memory(guard)[offset..offset + len])
                }
                Segment::Zeros { .. } => piece.fill(0),
                Segment::Space { guard, offset, .. } => sys::file::pread_exact(self.fd(guard), piece, offset)?,
            }
        }
        Ok(())
    }
}

/// A read-only run of bytes that is there at once and loads as it is read: a layout over spaces, one file of a
/// tree.
///
/// The way of a read: `resolve`; on [`Presence::Ready`] reply from the segments; on [`Presence::Missing`] clear
/// the resolution and call `fetch` with a completer that resolves again and replies. After a successful fetch a
/// range may already be gone again (evicted in between): the completer then fetches once more, within the same
/// deadline.
pub trait BlockSource: Send + Sync {
    /// Bytes of the source; never changes.
    fn len_bytes(&self) -> u64;

    /// Appends segments that cover exactly `offset .. offset + len` to `out`, or says that something is missing.
    /// Never waits and never copies file data. A range that does not lie within the source is an error.
    fn resolve(&self, offset: u64, len: usize, out: &mut Resolution) -> Result<Presence, ReadError>;

    /// Makes what is missing of the range present. `done` is called exactly once, at once or later on another
    /// thread, at the latest when the request's deadline passes; it must not block.
    fn fetch(&self, offset: u64, len: usize, request: Request, done: Done);

    /// What lies there, for messages about a failure; may take its time.
    fn place(&self, _offset: u64) -> Option<Place> {
        None
    }
}

/// What a failed read was about, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The image.
    pub image: String,
    /// A path in it, or an object of it; empty when neither is known.
    pub inside: String,
}

/// Why [`read_into`] has no bytes.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadIntoError {
    /// The range could not be resolved.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// What is missing could not be fetched.
    #[error(transparent)]
    Fetch(Box<FetchError>),
}

impl From<FetchError> for ReadIntoError {
    fn from(error: FetchError) -> Self {
        ReadIntoError::Fetch(Box::new(error))
    }
}

/// Reads exactly `out.len()` bytes at `offset`, waiting for what is missing. For commands and tests: a serving thread
/// must not wait.
///
/// # Errors
/// Whatever resolving or fetching says; `out` is unspecified then.
pub fn read_into(source: &dyn BlockSource, offset: u64, out: &mut [u8], request: Request) -> Result<(), ReadIntoError> {
    let mut resolution = Resolution::new();
    while source.resolve(offset, out.len(), &mut resolution)? == Presence::Missing {
        // Its guards must not hold up an eviction while this waits.
        resolution.clear();
        let (tell, told) = mpsc::sync_channel(1);
        source.fetch(offset, out.len(), request, Box::new(move |result| _ = tell.send(result)));
        // `done` runs exactly once, so an end without an answer means that it was dropped.
        told.recv().unwrap_or(Err(FetchError::Closed))?;
    }
    Ok(resolution.copy_to(out)?)
}
