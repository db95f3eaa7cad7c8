//! The tree that importers fill: compact, mutable, in memory.
//!
//! Nodes are like inodes: a hard link is another name of the same node. Names, nodes, file contents, extents,
//! symlink targets and extended attributes lie in arenas and refer to each other by 32-bit numbers; a regular
//! file costs about 130 bytes with its name, 32 of them its digest, which can go to a scratch file. Every operation is O(1) but listing a directory, which sorts it.
//!
//! Invariants: every live node but the root has as many dirents as its link count says (a directory exactly
//! one); names are unique within a directory; what a [`Limits`] forbids is never stored. Nothing recurses, so
//! depth costs no stack.
//!
//! Failure model: a refused operation changes nothing and says which path it was about. A [`NodeId`] is valid
//! until the node's last name is unlinked; using it later gives another node or a panic, never memory unsafety.
//!
//! Knows nothing of layers' rules, archives, or where content lies beyond the numbers it is given.

mod arena;
mod digests;
mod error;
mod layers;
mod names;
mod walk;
mod xattrs;

use arena::{Content, Node};
use format::digest::FileHasher;
use format::{BLOCK, Digest, index as raw};
use std::collections::HashMap;

pub use digests::Scratch;
pub use error::{PathBytes, TreeError};
pub use walk::Children;
use walk::carry;
pub use xattrs::{XattrSet, Xattrs, xattr_is_supported};

const NIL: u32 = u32::MAX;

/// A node of one tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct NodeId(pub(crate) u32);

/// What a node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Regular file.
    File,
    /// Directory.
    Dir,
    /// Symbolic link.
    Symlink,
    /// Character device.
    Char {
        /// Major number, 12 bits.
        major: u32,
        /// Minor number, 20 bits.
        minor: u32,
    },
    /// Block device.
    Block {
        /// Major number, 12 bits.
        major: u32,
        /// Minor number, 20 bits.
        minor: u32,
    },
    /// FIFO.
    Fifo,
    /// Socket.
    Socket,
}

impl Kind {
    /// The type bits of `st_mode`.
    pub fn mode_bits(self) -> u16 {
        match self {
            Kind::Fifo => raw::S_IFIFO,
            Kind::Char { .. } => raw::S_IFCHR,
            Kind::Dir => raw::S_IFDIR,
            Kind::Block { .. } => raw::S_IFBLK,
            Kind::File => raw::S_IFREG,
            Kind::Symlink => raw::S_IFLNK,
            Kind::Socket => raw::S_IFSOCK,
        }
    }
}

/// What every node has besides its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Attrs {
    /// Permission bits, `07777` at most; other bits are dropped.
    pub mode: u16,
    /// User.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Modification time, seconds since 1970.
    pub mtime_sec: i64,
    /// Nanoseconds within the second; a second or more is carried over.
    pub mtime_nsec: u32,
    /// Extended attributes, from [`Tree::xattr_set`] of the same tree.
    pub xattrs: XattrSet,
}

impl Attrs {
    /// What a directory gets that no entry describes: `0755`, root's, 1970.
    pub const IMPLICIT_DIR: Attrs =
        Attrs { mode: 0o755, uid: 0, gid: 0, mtime_sec: 0, mtime_nsec: 0, xattrs: XattrSet::EMPTY };
}

/// A run of blocks of one file in one object's space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First block of the file.
    pub file_block: u32,
    /// Blocks, at least 1.
    pub count: u32,
    /// The object's ordinal in the tree: [`Tree::object`], [`Tree::object_placeholder`].
    pub object: u32,
    /// First block in the object's space.
    pub space_block: u32,
}

/// What a tree may hold. What goes beyond is refused with [`TreeError::Limit`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Limits {
    /// Names, the root not counted.
    pub names: u32,
    /// Components of a path.
    pub depth: u32,
    /// Bytes of one name.
    pub name_len: usize,
    /// Bytes of an absolute path, its first slash included.
    pub path_len: usize,
    /// Bytes of all names together.
    pub name_bytes: usize,
    /// Bytes of a symlink's target.
    pub target_len: usize,
    /// Bytes of all targets together.
    pub target_bytes: usize,
    /// Bytes of an attribute's value.
    pub xattr_value_len: usize,
    /// Bytes of one node's attributes: for each 4 + name + value, rounded up to a multiple of 4.
    pub xattr_set_bytes: usize,
    /// Bytes of all different attribute sets together.
    pub xattr_bytes: usize,
    /// Bytes of one file.
    pub file_size: u64,
    /// Extents of the files that need several.
    pub extents: usize,
    /// Objects that the content lies in.
    pub objects: u32,
    /// Bytes of memory for all of it together, the digests not counted.
    pub memory: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            names: raw::MAX_DIRENTS - 1,
            depth: raw::MAX_DEPTH,
            name_len: raw::MAX_NAME_LEN,
            path_len: raw::MAX_PATH_LEN,
            name_bytes: 128 << 20,
            target_len: raw::MAX_TARGET_LEN,
            target_bytes: 64 << 20,
            xattr_value_len: raw::MAX_XATTR_VALUE_LEN,
            xattr_set_bytes: raw::MAX_XATTR_SET_BYTES,
            xattr_bytes: 64 << 20,
            file_size: raw::MAX_FILE_SIZE,
            extents: 4 << 20,
            objects: 1 << 16,
            memory: usize::MAX,
        }
    }
}

/// An object that content lies in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ObjectRef {
    /// The digest of its object map; `None` while it is a placeholder.
    pub id: Option<Digest>,
    /// Blocks of its space.
    pub space_blocks: u64,
}

/// A file's content as the tree keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FileContent {
    /// Bytes.
    pub size: u64,
    /// Over the chunks' digests; see [`FileHasher`].
    pub digest: Digest,
}

/// A tree of files. See the [module](self).
#[derive(Debug)]
pub struct Tree {
    limits: Limits,
    nodes: arena::Nodes,
    dirents: arena::Dirents,
    names: names::Names,
    contents: arena::Contents,
    /// By content row.
    digests: digests::Digests,
    extents: arena::Extents,
    targets: arena::Bytes,
    xattrs: xattrs::XattrTable,
    owners: Vec<Owner>,
    owner_numbers: HashMap<Owner, u32>,
    objects: Vec<ObjectRef>,
    object_numbers: HashMap<Digest, u32>,
    /// The layer that new names belong to; only the merge gives it a meaning.
    layer: u16,
    /// Depth and path length of the directory last added to.
    place: Option<(NodeId, DirPlace)>,
    empty_digest: Digest,
}

/// Who owns a node, and its attributes; shared by many nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Owner {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) xattrs: XattrSet,
}

#[derive(Debug, Clone, Copy)]
struct DirPlace {
    depth: u32,
    path_len: usize,
}

impl Default for Tree {
    fn default() -> Self {
        Tree::new()
    }
}

impl Tree {
    /// The root directory.
    pub const ROOT: NodeId = NodeId(0);

    /// An empty tree: a root directory with [`Attrs::IMPLICIT_DIR`], and the default limits.
    pub fn new() -> Tree {
        Tree::with_limits(Limits::default())
    }

    /// An empty tree with other limits; what the index format cannot hold stays refused.
    pub fn with_limits(limits: Limits) -> Tree {
        let max = Limits::default();
        let limits = Limits {
            names: limits.names.min(max.names),
            depth: limits.depth.min(max.depth),
            name_len: limits.name_len.min(max.name_len),
            path_len: limits.path_len.min(max.path_len),
            name_bytes: limits.name_bytes.min(1 << 30),
            target_len: limits.target_len.min(max.target_len),
            target_bytes: limits.target_bytes.min(1 << 30),
            xattr_value_len: limits.xattr_value_len.min(max.xattr_value_len),
            xattr_set_bytes: limits.xattr_set_bytes.min(max.xattr_set_bytes),
            xattr_bytes: limits.xattr_bytes.min(1 << 30),
            file_size: limits.file_size.min(max.file_size),
            extents: limits.extents.min(1 << 28),
            objects: limits.objects.min(1 << 24),
            memory: limits.memory,
        };
        let mut tree = Tree {
            limits,
            nodes: Default::default(),
            dirents: Default::default(),
            names: names::Names::new(),
            contents: Default::default(),
            digests: Default::default(),
            extents: Default::default(),
            targets: Default::default(),
            xattrs: xattrs::XattrTable::new(),
            owners: Vec::new(),
            owner_numbers: HashMap::new(),
            objects: Vec::new(),
            object_numbers: HashMap::new(),
            layer: 0,
            place: None,
            empty_digest: FileHasher::default().finish(),
        };
        let owner = tree.owner_number(&Attrs::IMPLICIT_DIR);
        let mode = raw::S_IFDIR | Attrs::IMPLICIT_DIR.mode;
        tree.nodes.push(Node { mode, nlink: 2, owner, a: NIL, b: NIL, ..Node::default() });
        tree
    }

    /// The limits that hold.
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Names, the root not counted.
    pub fn name_count(&self) -> u32 {
        self.dirents.live()
    }

    /// Nodes, the root included.
    pub fn node_count(&self) -> u32 {
        self.nodes.live()
    }

    /// The node called `name` in `dir`.
    pub fn lookup(&self, dir: NodeId, name: &[u8]) -> Option<NodeId> {
        self.names.find(&self.dirents, dir.0, name).map(|d| NodeId(self.dirents[d].node))
    }

    /// Makes a new node and gives it a name. A symlink needs [`Tree::set_target`] too; a file is empty until
    /// [`Tree::set_content`].
    pub fn create(&mut self, dir: NodeId, name: &[u8], kind: Kind, attrs: Attrs) -> Result<NodeId, TreeError> {
        self.check_new_name(dir, name)?;
        let (a, b) = match kind {
            Kind::Char { major, minor } | Kind::Block { major, minor } => {
                if major >= 1 << 12 || minor >= 1 << 20 {
                    return Err(TreeError::BadDevice { path: self.path_in(dir, name), major, minor });
                }
                (minor, major)
            }
            Kind::Symlink => (0, 0),
            _ => (NIL, NIL),
        };
        let owner = self.owner_number(&attrs);
        let (mtime_sec, mtime_nsec) = carry(&attrs);
        let node = self.nodes.push(Node {
            mode: kind.mode_bits() | attrs.mode & 0o7777,
            mark: 0,
            nlink: if kind == Kind::Dir { 2 } else { 1 },
            owner,
            mtime_nsec,
            mtime_sec,
            a,
            b,
        });
        let dirent = self.add_name(dir, name, node);
        if kind == Kind::Dir {
            self.nodes[node].b = dirent;
            self.nodes[dir.0].nlink += 1;
        }
        Ok(NodeId(node))
    }

    /// Gives `node`, which is not a directory, another name.
    pub fn link(&mut self, dir: NodeId, name: &[u8], node: NodeId) -> Result<(), TreeError> {
        self.check_new_name(dir, name)?;
        if self.nodes[node.0].is_dir() {
            return Err(TreeError::LinkToDirectory(self.path_in(dir, name)));
        }
        self.nodes[node.0].nlink += 1;
        self.add_name(dir, name, node.0);
        Ok(())
    }

    /// Takes a name away, with everything below it. Gives the node that had the name, which is gone too unless it
    /// has other names.
    pub fn unlink(&mut self, dir: NodeId, name: &[u8]) -> Option<NodeId> {
        let dirent = self.names.find(&self.dirents, dir.0, name)?;
        Some(self.unlink_dirent(dirent))
    }

    /// The node's attributes.
    pub fn attrs(&self, node: NodeId) -> Attrs {
        let n = &self.nodes[node.0];
        let owner = self.owners[n.owner as usize];
        Attrs {
            mode: n.mode & 0o7777,
            uid: owner.uid,
            gid: owner.gid,
            mtime_sec: n.mtime_sec,
            mtime_nsec: n.mtime_nsec,
            xattrs: owner.xattrs,
        }
    }

    /// Replaces the node's attributes.
    pub fn set_attrs(&mut self, node: NodeId, attrs: Attrs) {
        let owner = self.owner_number(&attrs);
        let (mtime_sec, mtime_nsec) = carry(&attrs);
        let n = &mut self.nodes[node.0];
        n.mode = n.mode & !0o7777 | attrs.mode & 0o7777;
        (n.owner, n.mtime_sec, n.mtime_nsec) = (owner, mtime_sec, mtime_nsec);
    }

    /// What the node is.
    pub fn kind(&self, node: NodeId) -> Kind {
        let n = &self.nodes[node.0];
        match n.mode & raw::S_IFMT {
            raw::S_IFDIR => Kind::Dir,
            raw::S_IFLNK => Kind::Symlink,
            raw::S_IFCHR => Kind::Char { major: n.b, minor: n.a },
            raw::S_IFBLK => Kind::Block { major: n.b, minor: n.a },
            raw::S_IFIFO => Kind::Fifo,
            raw::S_IFSOCK => Kind::Socket,
            _ => Kind::File,
        }
    }

    /// Whether the node is a directory.
    pub fn is_dir(&self, node: NodeId) -> bool {
        self.nodes[node.0].is_dir()
    }

    /// Link count: the names of anything but a directory, 2 + child directories for those.
    pub fn nlink(&self, node: NodeId) -> u32 {
        self.nodes[node.0].nlink
    }

    /// Sets a symlink's target.
    pub fn set_target(&mut self, node: NodeId, target: &[u8]) -> Result<(), TreeError> {
        if self.kind(node) != Kind::Symlink {
            return Err(TreeError::WrongKind(self.path_of(node)));
        }
        let why = match target {
            [] => Some("is empty"),
            t if t.len() > self.limits.target_len => Some("is too long"),
            t if t.contains(&0) => Some("has a NUL byte"),
            _ => None,
        };
        if let Some(why) = why {
            return Err(TreeError::BadTarget { path: self.path_of(node), why });
        }
        let old = (self.nodes[node.0].a, self.nodes[node.0].b);
        self.targets.free(old.1 as usize);
        if self.targets.live() + target.len() > self.limits.target_bytes {
            self.targets.unfree(old.1 as usize);
            let limit = self.limits.target_bytes as u64;
            return Err(TreeError::Limit {
                path: self.path_of(node),
                what: "bytes of symlink targets together",
                limit,
            });
        }
        self.nodes[node.0].b = 0;
        self.compact_targets();
        let (at, len) = self.targets.push(target);
        (self.nodes[node.0].a, self.nodes[node.0].b) = (at, len);
        Ok(())
    }

    /// A symlink's target; empty for anything else.
    pub fn target(&self, node: NodeId) -> &[u8] {
        let n = &self.nodes[node.0];
        if n.mode & raw::S_IFMT == raw::S_IFLNK { self.targets.get(n.a, n.b) } else { &[] }
    }

    /// Replaces a file's content. `runs` are sorted by file block and do not overlap; what they leave out is a hole.
    pub fn set_content(&mut self, node: NodeId, size: u64, digest: Digest, runs: &[Run]) -> Result<(), TreeError> {
        if self.kind(node) != Kind::File {
            return Err(TreeError::WrongKind(self.path_of(node)));
        }
        self.check_content(size, runs).map_err(|e| e.with_path(|| self.path_of(node)))?;
        self.drop_content(node.0);
        self.compact_extents();
        if size == 0 && digest == self.empty_digest {
            // As a new file is.
            return Ok(());
        }
        let blocks = size.div_ceil(BLOCK);
        let (object, value) = self.extents.store(runs, blocks);
        let row = self.contents.push(Content { size, object, value });
        self.digests.set(row, &digest);
        self.nodes[node.0].a = row;
        Ok(())
    }

    /// A file's size and digest; those of an empty file for anything else.
    pub fn content(&self, node: NodeId) -> FileContent {
        match self.content_row(node.0) {
            Some(c) => FileContent { size: c.size, digest: self.digests.get(self.nodes[node.0].a) },
            None => FileContent { size: 0, digest: self.empty_digest },
        }
    }

    /// Every file that has content, whatever its names, in no order.
    pub fn files(&self) -> impl Iterator<Item = (NodeId, FileContent)> + '_ {
        let rows = 0..self.nodes.len() as u32;
        let files = rows.filter(|&n| self.nodes[n].nlink > 0 && self.content_row(n).is_some());
        files.map(|n| (NodeId(n), self.content(NodeId(n))))
    }

    /// Regular files, each once whatever its names.
    pub fn file_count(&self) -> u64 {
        let rows = 0..self.nodes.len() as u32;
        rows.filter(|&n| self.nodes[n].nlink > 0 && self.nodes[n].mode & raw::S_IFMT == raw::S_IFREG).count() as u64
    }

    /// Keeps the digests of `in_memory` files in memory and those of more in `scratch`. When that fails the tree cannot
    /// be built.
    pub fn spill_digests(&mut self, in_memory: usize, scratch: Box<dyn Scratch>) {
        self.digests.spill(in_memory, scratch);
    }

    /// What went wrong with the scratch file, if anything did.
    pub(crate) fn scratch_failure(&self) -> Option<std::io::Error> {
        self.digests.failure()
    }

    /// Gives up what only changing the tree and looking up names need.
    pub(crate) fn freeze(&mut self) {
        self.names.freeze();
    }

    /// Gives up the list of names: those of a frozen tree can still be read by place.
    pub(crate) fn drop_dirents(&mut self) {
        self.dirents = Default::default();
    }

    /// Gives up everything but the names' bytes.
    pub(crate) fn drop_nodes(&mut self) {
        self.nodes = Default::default();
        self.contents = Default::default();
        self.digests = Default::default();
        self.extents = Default::default();
        self.targets = Default::default();
    }

    /// Bytes that names, nodes, content and the like take, without what is reserved for more of them.
    pub(crate) fn used_bytes(&self) -> usize {
        self.nodes.bytes()
            + self.dirents.bytes()
            + self.names.bytes()
            + self.contents.bytes()
            + self.extents.bytes()
            + self.targets.bytes()
            + self.xattrs.memory()
    }

    /// A file's runs, merged where they touch.
    pub fn runs(&self, node: NodeId) -> impl Iterator<Item = Run> + '_ {
        self.content_row(node.0).map_or(arena::Runs::NONE, |c| self.extents.runs(c))
    }

    /// The ordinal of an object, for [`Run::object`]: always the same for the same id.
    pub fn object(&mut self, id: Digest, space_blocks: u64) -> u32 {
        if let Some(&n) = self.object_numbers.get(&id) {
            return n;
        }
        let n = self.push_object(ObjectRef { id: Some(id), space_blocks });
        self.object_numbers.insert(id, n);
        n
    }

    /// An ordinal for an object whose id is only known later: see [`Tree::name_object`].
    pub fn object_placeholder(&mut self) -> u32 {
        self.push_object(ObjectRef { id: None, space_blocks: u64::from(u32::MAX) })
    }

    /// Says what the placeholder stands for. Two ordinals may come to stand for the same object.
    pub fn name_object(&mut self, ordinal: u32, id: Digest, space_blocks: u64) {
        self.objects[ordinal as usize] = ObjectRef { id: Some(id), space_blocks };
        self.object_numbers.entry(id).or_insert(ordinal);
    }

    /// The objects by ordinal.
    pub fn objects(&self) -> &[ObjectRef] {
        &self.objects
    }

    /// The directory that a directory stands in; the root's is itself.
    pub fn parent(&self, dir: NodeId) -> NodeId {
        match self.nodes[dir.0] {
            ref n if n.is_dir() && n.b != NIL => NodeId(self.dirents[n.b].parent),
            _ => Tree::ROOT,
        }
    }

    /// Interns a set of extended attributes, given in any order.
    ///
    /// [`TreeError::UnsupportedXattr`] names an attribute whose namespace images do not carry; see
    /// [`xattr_is_supported`] for dropping those beforehand.
    pub fn xattr_set(&mut self, list: &[(&[u8], &[u8])]) -> Result<XattrSet, TreeError> {
        self.xattrs.intern(list, &self.limits)
    }

    /// The attributes of a set, sorted by name.
    pub fn xattrs(&self, set: XattrSet) -> Xattrs<'_> {
        self.xattrs.get(set)
    }

    pub(crate) fn owners(&self) -> &[Owner] {
        &self.owners
    }

    pub(crate) fn owner_of(&self, node: NodeId) -> u32 {
        self.nodes[node.0].owner
    }

    pub(crate) fn xattr_set_count(&self) -> usize {
        self.xattrs.count()
    }

    /// Numbers that nodes may have: live and free rows.
    pub(crate) fn node_rows(&self) -> usize {
        self.nodes.len()
    }

    /// Bytes of memory that the tree's arenas have reserved, about.
    pub fn memory(&self) -> usize {
        self.nodes.memory()
            + self.dirents.memory()
            + self.names.memory()
            + self.contents.memory()
            + self.digests.memory()
            + self.extents.memory()
            + self.targets.memory()
            + self.xattrs.memory()
            + self.owners.capacity() * size_of::<Owner>()
            + self.owner_numbers.capacity() * (size_of::<Owner>() + 5)
    }
}

#[cfg(test)]
mod tests;
