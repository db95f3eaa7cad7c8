//! Front ends: how a consumer reaches an image.
//!
//! Job: turn a consumer's requests into questions to two small traits, a *tree* ([`FileTree`]) and a *block source*
//! ([`store::BlockSource`]), and their answers into replies. Invariants: a read inside a file is answered with
//! exactly what was asked or with an errno; nobody waits for a fetch inside a serving thread. Failure model: every
//! fault becomes one errno and one log line, in [`errno`]. A front end does not know images, stores, paths on the
//! host or the daemon; it is given values.

pub mod blockfile;
pub mod errno;
pub mod fuse;
pub mod tree;

pub use blockfile::{BlockFile, BlockFiles, BlockFilesOptions};
pub use errno::{Fault, Level, Log, NoLog};
pub use fuse::read::{BufferPool, Context, ReadPath};
pub use fuse::serve::{Counters, Session};
pub use tree::{TreeOptions, TreeSession};

use store::{Done, Place, Presence, Request, Resolution};

/// What stat(2) tells of an inode, but for its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Attr {
    /// Type and permission bits, as in `st_mode`.
    pub mode: u32,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// How many names.
    pub nlink: u32,
    /// Bytes.
    pub size: u64,
    /// Units of 512 bytes of content; holes are not counted.
    pub blocks: u64,
    /// Modification time in seconds since 1970; given as access and change time too.
    pub mtime_sec: i64,
    /// Its fraction.
    pub mtime_nsec: u32,
    /// Device number of a device node: major and minor.
    pub rdev: (u32, u32),
}

/// A name in a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// The name's place in the directory, from 0; the names have a fixed order.
    pub ordinal: u32,
    /// The name.
    pub name: &'a [u8],
    /// Its inode.
    pub ino: u32,
    /// The type bits of its mode (`S_IFMT`).
    pub kind: u32,
}

/// What lseek(2) looks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Seek {
    /// `SEEK_DATA`
    Data,
    /// `SEEK_HOLE`
    Hole,
}

/// The bytes of a tree's regular files, by inode. `resolve` and `fetch` mean what they mean in
/// [`store::BlockSource`].
pub trait FileContent: Send + Sync {
    /// Appends segments that cover exactly `offset .. offset + len` of the file, which lies inside it.
    fn resolve(&self, ino: u32, offset: u64, len: usize, out: &mut Resolution) -> Result<Presence, Fault>;

    /// Makes the missing parts of a range present. `done` is called exactly once, maybe at once, maybe elsewhere.
    fn fetch(&self, ino: u32, offset: u64, len: usize, request: Request, done: Done);

    /// The first byte at or after `offset` that is data, or in a hole; the end of the file counts as a hole. `None`:
    /// no data from there on. `offset` lies inside the file.
    fn seek(&self, ino: u32, offset: u64, what: Seek) -> Result<Option<u64>, Fault>;

    /// Which file of which image that is, for messages about a failure; may take its time.
    fn place(&self, _ino: u32) -> Option<Place> {
        None
    }
}

/// A read-only directory tree that never changes. Inode 0 is its root; inodes are numbered without gaps that matter.
/// No call waits or allocates for long: everything comes from a mapped index.
pub trait FileTree: FileContent {
    /// The attributes of an inode. [`Fault::NoInode`] when there is none of that number.
    fn attr(&self, ino: u32) -> Result<Attr, Fault>;

    /// The inode of a name. `..` names the parent (of the root: the root itself). [`Fault::NotDirectory`] when
    /// `parent` is none.
    fn lookup(&self, parent: u32, name: &[u8]) -> Result<Option<u32>, Fault>;

    /// Shows the names of a directory from ordinal `from` on, without `.` and `..`, until `visit` returns false.
    fn entries(&self, dir: u32, from: u32, visit: &mut dyn FnMut(Entry<'_>) -> bool) -> Result<(), Fault>;

    /// The target of a symlink.
    fn link_target(&self, ino: u32) -> Result<&[u8], Fault>;

    /// Shows the extended attributes of an inode (full name, value) until `visit` returns false.
    fn xattrs(&self, ino: u32, visit: &mut dyn FnMut(&[u8], &[u8]) -> bool) -> Result<(), Fault>;
}
