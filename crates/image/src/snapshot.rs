//! What a tree looks like from outside: one record per path, from whatever shows the tree, to be compared.
//!
//! Link counts, hard-link groups, times, attributes and content are all in it; inode numbers and the like are not.
//! Everything is in memory: for tests, for `diff`, not for serving.

use crate::index::{Index, IndexError, InodeKind};
use crate::tree::{Kind, PathBytes, Tree};
use format::Digest;
use format::digest::FileHasher;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::io::{self, Read};

/// What there is at one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// What it is.
    pub kind: RecordKind,
    /// Permission bits.
    pub mode: u16,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time: seconds since 1970 and nanoseconds.
    pub mtime: (i64, u32),
    /// Link count.
    pub nlink: u32,
    /// Extended attributes.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Paths with the same number are names of one inode; 0 for what has one name. Set by [`SnapshotBuilder::finish`].
    pub link_group: u32,
}

/// What is at a path, with what belongs to its kind.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RecordKind {
    /// Regular file: size, and the digest of its content where that was read ([`hash_content`]).
    File {
        /// Bytes.
        size: u64,
        /// Digest; [`Snapshot::diff`] takes `None` for equal to any.
        digest: Option<Digest>,
    },
    /// Directory.
    Dir,
    /// Symbolic link and its target.
    Symlink(Vec<u8>),
    /// Character device: major and minor number.
    Char(u32, u32),
    /// Block device: major and minor number.
    Block(u32, u32),
    /// FIFO.
    Fifo,
    /// Socket.
    Socket,
}

/// A tree's records by absolute path; the root is `/`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// The records.
    pub records: BTreeMap<Vec<u8>, Record>,
}

/// Any key that names of one inode share.
type InodeKey = (u64, u64);

/// Collects records and finds out which belong to one inode.
#[derive(Debug, Default)]
pub struct SnapshotBuilder {
    records: BTreeMap<Vec<u8>, (Record, Option<InodeKey>)>,
}

impl SnapshotBuilder {
    /// Adds a record. `inode` is any key that names of the same inode share, (device, inode) for instance.
    pub fn add(&mut self, path: Vec<u8>, record: Record, inode: Option<(u64, u64)>) {
        self.records.insert(path, (record, inode));
    }

    /// The snapshot. Groups are numbered by their first path, so that snapshots of equal trees are equal.
    pub fn finish(self) -> Snapshot {
        let mut names: HashMap<InodeKey, u32> = HashMap::new();
        for (record, inode) in self.records.values() {
            if let (Some(inode), false) = (inode, record.kind == RecordKind::Dir) {
                *names.entry(*inode).or_default() += 1;
            }
        }
        let mut groups: HashMap<InodeKey, u32> = HashMap::new();
        let mut records = BTreeMap::new();
        for (path, (mut record, inode)) in self.records {
            record.link_group = match inode {
                Some(inode) if names.get(&inode).is_some_and(|&n| n > 1) => {
                    let next = groups.len() as u32 + 1;
                    *groups.entry(inode).or_insert(next)
                }
                _ => 0,
            };
            records.insert(path, record);
        }
        Snapshot { records }
    }
}

/// The digest that records have of a file's content: what an import takes of it.
pub fn hash_content(content: &mut dyn Read) -> io::Result<Digest> {
    let mut hasher = FileHasher::default();
    let mut chunk = vec![0u8; format::CHUNK];
    loop {
        let mut len = 0;
        while len < chunk.len() {
            match content.read(&mut chunk[len..]) {
                Ok(0) => break,
                Ok(n) => len += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
        if len > 0 {
            hasher.chunk(&Digest::of(&chunk[..len]), len);
        }
        if len < chunk.len() {
            return Ok(hasher.finish());
        }
    }
}

/// Why a snapshot of an index could not be taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SnapshotError {
    /// The index.
    #[error(transparent)]
    Index(#[from] IndexError),
    /// A file's content.
    #[error("content of {path}")]
    Content {
        /// The file.
        path: PathBytes,
        /// Why.
        #[source]
        source: io::Error,
    },
}

impl Snapshot {
    /// The tree that an index holds. `content` gives the digest of a file's content, by inode and size, or `None`
    /// for what is not to be read. The index is checked first: one that is no tree might have paths without end.
    pub fn from_index(
        index: &Index,
        mut content: impl FnMut(u32, u64) -> io::Result<Option<Digest>>,
    ) -> Result<Snapshot, SnapshotError> {
        index.check()?;
        let mut builder = SnapshotBuilder::default();
        let mut digests: HashMap<u32, Option<Digest>> = HashMap::new();
        let mut stack = vec![(Vec::new(), 0u32)];
        while let Some((path, ino)) = stack.pop() {
            let inode = index.inode(ino)?;
            let kind = match inode.kind {
                InodeKind::File { size } => {
                    let digest = match digests.get(&ino) {
                        Some(known) => *known,
                        None => {
                            let read = content(ino, size)
                                .map_err(|source| SnapshotError::Content { path: PathBytes::of(&path), source })?;
                            if inode.nlink > 1 {
                                digests.insert(ino, read);
                            }
                            read
                        }
                    };
                    RecordKind::File { size, digest }
                }
                InodeKind::Dir { .. } => RecordKind::Dir,
                InodeKind::Symlink { .. } => RecordKind::Symlink(index.link_target(ino)?.to_vec()),
                InodeKind::Char { major, minor } => RecordKind::Char(major, minor),
                InodeKind::Block { major, minor } => RecordKind::Block(major, minor),
                InodeKind::Fifo => RecordKind::Fifo,
                InodeKind::Socket => RecordKind::Socket,
            };
            if kind == RecordKind::Dir {
                for entry in index.entries(ino)? {
                    let entry = entry?;
                    let mut below = path.clone();
                    below.push(b'/');
                    below.extend_from_slice(entry.name);
                    stack.push((below, entry.ino));
                }
            }
            let mut xattrs = BTreeMap::new();
            for xattr in index.xattrs(inode.xattrs)? {
                let (name, value) = xattr?;
                xattrs.insert(name.to_vec(), value.to_vec());
            }
            let record = Record {
                kind,
                mode: inode.permissions(),
                uid: inode.uid,
                gid: inode.gid,
                mtime: (inode.mtime_sec, inode.mtime_nsec),
                nlink: inode.nlink,
                xattrs,
                link_group: 0,
            };
            let path = if path.is_empty() { b"/".to_vec() } else { path };
            builder.add(path, record, Some((0, ino.into())));
        }
        Ok(builder.finish())
    }

    /// A tree in memory.
    pub fn from_tree(tree: &Tree) -> Snapshot {
        let mut builder = SnapshotBuilder::default();
        let Ok(()) = tree.walk(|path, node| -> Result<(), std::convert::Infallible> {
            let attrs = tree.attrs(node);
            let kind = match tree.kind(node) {
                Kind::File => {
                    let content = tree.content(node);
                    RecordKind::File { size: content.size, digest: Some(content.digest) }
                }
                Kind::Dir => RecordKind::Dir,
                Kind::Symlink => RecordKind::Symlink(tree.target(node).to_vec()),
                Kind::Char { major, minor } => RecordKind::Char(major, minor),
                Kind::Block { major, minor } => RecordKind::Block(major, minor),
                Kind::Fifo => RecordKind::Fifo,
                Kind::Socket => RecordKind::Socket,
            };
            let record = Record {
                kind,
                mode: attrs.mode,
                uid: attrs.uid,
                gid: attrs.gid,
                mtime: (attrs.mtime_sec, attrs.mtime_nsec),
                nlink: tree.nlink(node),
                xattrs: tree.xattrs(attrs.xattrs).map(|(n, v)| (n.to_vec(), v.to_vec())).collect(),
                link_group: 0,
            };
            builder.add(path.to_vec(), record, Some((0, node.0.into())));
            Ok(())
        });
        builder.finish()
    }

    /// What differs from `self` to `other`, one line for each difference; empty when nothing does. Lines begin with
    /// `-` (only here), `+` (only there) or `~` (changed: what, from, to).
    pub fn diff(&self, other: &Snapshot) -> Vec<String> {
        let mut lines = Vec::new();
        for (path, here) in &self.records {
            match other.records.get(path) {
                None => lines.push(format!("- {}", PathBytes::of(path))),
                Some(there) => {
                    let changes = here.changes(there);
                    if !changes.is_empty() {
                        lines.push(format!("~ {}:{changes}", PathBytes::of(path)));
                    }
                }
            }
        }
        for path in other.records.keys().filter(|path| !self.records.contains_key(*path)) {
            lines.push(format!("+ {}", PathBytes::of(path)));
        }
        lines
    }
}

impl Record {
    /// What differs, as ` field from -> to` for each field.
    pub fn changes(&self, other: &Record) -> String {
        let mut text = String::new();
        let mut changed = |field: &str, from: String, to: String| {
            if from != to {
                let _ = write!(text, " {field} {from} -> {to};");
            }
        };
        changed("type", self.kind.name().into(), other.kind.name().into());
        match (&self.kind, &other.kind) {
            (RecordKind::File { size: a, digest: d }, RecordKind::File { size: b, digest: e }) => {
                changed("size", a.to_string(), b.to_string());
                if let (Some(d), Some(e)) = (d, e) {
                    changed("content", d.to_string(), e.to_string());
                }
            }
            (RecordKind::Symlink(a), RecordKind::Symlink(b)) => {
                changed("target", PathBytes::of(a).to_string(), PathBytes::of(b).to_string());
            }
            (RecordKind::Char(a, b), RecordKind::Char(c, d)) | (RecordKind::Block(a, b), RecordKind::Block(c, d)) => {
                changed("device", format!("{a}:{b}"), format!("{c}:{d}"));
            }
            _ => {}
        }
        changed("mode", format!("{:04o}", self.mode), format!("{:04o}", other.mode));
        changed("uid", self.uid.to_string(), other.uid.to_string());
        changed("gid", self.gid.to_string(), other.gid.to_string());
        let time = |(sec, nsec): (i64, u32)| format!("{sec}+{nsec}ns");
        changed("mtime", time(self.mtime), time(other.mtime));
        changed("nlink", self.nlink.to_string(), other.nlink.to_string());
        changed("hard-link group", self.link_group.to_string(), other.link_group.to_string());
        for (name, value) in &self.xattrs {
            let to = other.xattrs.get(name).map_or("none".into(), |v| v.escape_ascii().to_string());
            changed(&format!("xattr {}", PathBytes::of(name)), value.escape_ascii().to_string(), to);
        }
        for (name, value) in other.xattrs.iter().filter(|(name, _)| !self.xattrs.contains_key(*name)) {
            changed(&format!("xattr {}", PathBytes::of(name)), "none".into(), value.escape_ascii().to_string());
        }
        text
    }
}

impl RecordKind {
    fn name(&self) -> &'static str {
        match self {
            RecordKind::File { .. } => "file",
            RecordKind::Dir => "directory",
            RecordKind::Symlink(_) => "symlink",
            RecordKind::Char(..) => "character device",
            RecordKind::Block(..) => "block device",
            RecordKind::Fifo => "fifo",
            RecordKind::Socket => "socket",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::Attrs;

    fn tree(change: impl FnOnce(&mut Tree)) -> Snapshot {
        let mut tree = Tree::new();
        let attrs = Attrs { mode: 0o644, mtime_sec: 5, ..Attrs::default() };
        let d = tree.create(Tree::ROOT, b"d", Kind::Dir, attrs).unwrap();
        let f = tree.create(d, b"f", Kind::File, attrs).unwrap();
        tree.link(d, b"g", f).unwrap();
        let l = tree.create(d, b"l", Kind::Symlink, attrs).unwrap();
        tree.set_target(l, b"to").unwrap();
        change(&mut tree);
        Snapshot::from_tree(&tree)
    }

    #[test]
    fn differences_are_listed_by_path_and_field() {
        let base = tree(|_| {});
        assert_eq!(base.diff(&tree(|_| {})), [""; 0]);
        let other = tree(|t| {
            let d = t.lookup(Tree::ROOT, b"d").unwrap();
            t.unlink(d, b"g");
            t.unlink(d, b"l");
            let xattrs = t.xattr_set(&[(b"user.a", b"\0")]).unwrap();
            t.set_attrs(d, Attrs { mode: 0o700, mtime_nsec: 7, xattrs, ..Attrs::IMPLICIT_DIR });
            t.create(d, b"l", Kind::Fifo, Attrs::default()).unwrap();
            t.create(d, b"n\n", Kind::Fifo, Attrs::default()).unwrap();
        });
        assert_eq!(
            base.diff(&other),
            [
                "~ /d: mode 0644 -> 0700; mtime 5+0ns -> 0+7ns; xattr user.a none -> \\x00;",
                "~ /d/f: nlink 2 -> 1; hard-link group 1 -> 0;",
                "- /d/g",
                "~ /d/l: type symlink -> fifo; mode 0644 -> 0000; mtime 5+0ns -> 0+0ns;",
                "+ /d/n\\n",
            ]
        );
    }

    #[test]
    fn content_that_was_not_read_is_no_difference() {
        let mut other = tree(|_| {});
        for record in other.records.values_mut() {
            if let RecordKind::File { digest, .. } = &mut record.kind {
                *digest = None;
            }
        }
        assert_eq!(tree(|_| {}).diff(&other), [""; 0]);
    }

    #[test]
    fn content_hashes_as_an_import_takes_it() {
        for len in [0usize, 1, 65_535, 65_536, 65_537, 200_000] {
            let bytes: Vec<u8> = (0..len).map(|i| (i / 7) as u8).collect();
            let mut hasher = FileHasher::default();
            for chunk in bytes.chunks(format::CHUNK) {
                hasher.chunk(&Digest::of(chunk), chunk.len());
            }
            assert_eq!(hash_content(&mut &bytes[..]).unwrap(), hasher.finish());
        }
    }
}
