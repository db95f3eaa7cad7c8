//! OCI layers merged into one tree, as the image specification's `layer.md` says: entry by entry, in any order
//! that an archive has them in.
//!
//! The rules, where the specification leaves room:
//! - A whiteout or an opaque marker takes away what lower layers put there, never what its own layer did, wherever
//!   in the layer it stands. It names its path exactly: no symlink is followed for it.
//! - A directory over a directory replaces its attributes and keeps its children. Anything else that meets a name
//!   takes its place, with everything below.
//! - Missing parents become directories, `0755`, root's. So does a parent that is not a directory. A parent that is
//!   a symlink made by the same layer is followed, inside the root; one from a lower layer is replaced.
//! - `..` in a path goes up, at the root nowhere: nothing ever leaves the root.
//! - A hard link binds to the node that its target names at that moment, in this layer or a lower one. Its own
//!   attributes do not count. A target that is not there is an error: never an empty file.
//!
//! Failure model: an error names the entry. The tree may then hold part of the layer, and is to be thrown away.
//!
//! Pure: no input, no output. Knows nothing of archives or compression.

use crate::tree::{Attrs, Kind, NodeId, PathBytes, Run, Tree, TreeError};
use format::Digest;
use std::borrow::Cow;

/// What an entry of a layer makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body<'a> {
    /// Regular file.
    File {
        /// Bytes.
        size: u64,
        /// The file's digest.
        digest: Digest,
        /// Where its content lies.
        runs: &'a [Run],
    },
    /// Directory.
    Dir,
    /// Symbolic link.
    Symlink {
        /// Its target, kept byte for byte.
        target: &'a [u8],
    },
    /// Another name for something that is there.
    Hardlink {
        /// Its path, absolute or relative to the root.
        target: &'a [u8],
    },
    /// Character device.
    Char {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// Block device.
    Block {
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// FIFO.
    Fifo,
    /// Socket.
    Socket,
}

/// One entry of a layer, without its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry<'a> {
    /// What it makes.
    pub body: Body<'a>,
    /// With what attributes.
    pub attrs: Attrs,
}

/// What an entry did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// It made this node, or replaced this directory's attributes.
    Placed(NodeId),
    /// It gave this node another name.
    Linked(NodeId),
    /// It was a whiteout or an opaque marker, and `true` when it took something away.
    Whiteout(bool),
    /// It has no meaning in an image: an aufs bookkeeping file.
    Ignored,
}

/// Why an entry was refused.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone)]
#[non_exhaustive]
pub enum MergeError {
    /// The tree refused it.
    #[error("entry \"{entry}\"")]
    Tree {
        /// The entry's path as it came.
        entry: PathBytes,
        /// Why.
        #[source]
        source: TreeError,
    },
    /// A name that an entry cannot have.
    #[error("entry \"{entry}\": {why}")]
    BadEntry {
        /// The entry's path as it came.
        entry: PathBytes,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A hard link to something that is not there.
    #[error("entry \"{entry}\": hard link to \"{target}\", which is not there")]
    DanglingLink {
        /// The entry's path as it came.
        entry: PathBytes,
        /// What it was to be a name of.
        target: PathBytes,
    },
    /// More layers than the merge can tell apart.
    #[error("more than {0} layers")]
    Layers(u16),
}

/// What whiteouts begin with.
const WHITEOUT: &[u8] = b".wh.";
/// What aufs's own files begin with, the opaque marker among them.
const AUFS: &[u8] = b".wh..wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Symlinks followed on the way to one entry.
const MAX_HOPS: u32 = 40;
/// Bytes of a path as it may come, before dots and slashes are taken out.
const MAX_RAW_PATH: usize = 4 * format::index::MAX_PATH_LEN;

/// Applies layers to a tree, lowest first.
#[derive(Debug)]
pub struct Merger {
    tree: Tree,
}

/// Where a step along a path leads.
enum Step {
    Dir(NodeId),
    Follow(NodeId),
}

impl Merger {
    /// Starts with a tree, empty as a rule, that counts as lower than every layer.
    pub fn new(mut tree: Tree) -> Merger {
        tree.forget_layers();
        Merger { tree }
    }

    /// The tree as it stands: for limits, objects, reading.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// The tree, for [`Tree::xattr_set`], [`Tree::object`] and the like. Its names are the merge's own business.
    pub fn tree_mut(&mut self) -> &mut Tree {
        &mut self.tree
    }

    /// The next layer begins.
    pub fn begin_layer(&mut self) -> Result<(), MergeError> {
        if self.tree.next_layer() { Ok(()) } else { Err(MergeError::Layers(Tree::MAX_LAYERS)) }
    }

    /// Applies one entry. `path` is as the archive has it: leading, doubled and trailing slashes and `.` do not count.
    pub fn entry(&mut self, path: &[u8], entry: Entry<'_>) -> Result<Outcome, MergeError> {
        let bad = |why| Err(MergeError::BadEntry { entry: PathBytes::of(path), why });
        if path.len() > MAX_RAW_PATH {
            return bad("its path is too long");
        }
        let mut parts = components(path);
        let Some(last) = parts.next_back() else {
            if entry.body != Body::Dir {
                return bad("the root is not a directory");
            }
            self.tree.set_attrs(Tree::ROOT, entry.attrs);
            self.tree.set_explicit(Tree::ROOT);
            return Ok(Outcome::Placed(Tree::ROOT));
        };
        if parts.clone().any(|part| part.starts_with(AUFS)) {
            return Ok(Outcome::Ignored);
        }
        if parts.clone().any(|part| part.starts_with(WHITEOUT)) {
            return bad("something below a whiteout");
        }
        if last.starts_with(WHITEOUT) {
            return self.whiteout(parts, last).map_or_else(bad, Ok);
        }
        if last == b".." {
            return bad("its name is \"..\"");
        }
        let dir = self.make_parents(path, parts)?;
        let old = self.tree.find_dirent(dir, last);
        let refused = |source| MergeError::Tree { entry: PathBytes::of(path), source };
        if let Body::Hardlink { target } = entry.body {
            let Some(node) = self.find(target) else {
                return Err(MergeError::DanglingLink { entry: PathBytes::of(path), target: PathBytes::of(target) });
            };
            return self.tree.relink(dir, last, node, old).map(|()| Outcome::Linked(node)).map_err(refused);
        }
        self.put(dir, last, old, entry).map(Outcome::Placed).map_err(refused)
    }

    /// The layer is complete.
    pub fn end_layer(&mut self) {}

    /// The merged tree.
    pub fn finish(self) -> Tree {
        self.tree
    }

    /// Puts a new node, or a directory's new attributes, at `name` in `dir`, where `old` is now.
    fn put(&mut self, dir: NodeId, name: &[u8], old: Option<u32>, entry: Entry<'_>) -> Result<NodeId, TreeError> {
        if let Some(old) = old {
            let node = self.tree.dirent_node(old);
            if entry.body == Body::Dir && self.tree.is_dir(node) {
                self.tree.set_attrs(node, entry.attrs);
                self.tree.set_explicit(node);
                return Ok(node);
            }
            self.tree.unlink_dirent(old);
        }
        let kind = match entry.body {
            Body::Dir => Kind::Dir,
            Body::Symlink { .. } => Kind::Symlink,
            Body::Char { major, minor } => Kind::Char { major, minor },
            Body::Block { major, minor } => Kind::Block { major, minor },
            Body::Fifo => Kind::Fifo,
            Body::Socket => Kind::Socket,
            Body::File { .. } | Body::Hardlink { .. } => Kind::File,
        };
        let node = self.tree.create(dir, name, kind, entry.attrs)?;
        match entry.body {
            Body::File { size, digest, runs } => self.tree.set_content(node, size, digest, runs)?,
            Body::Symlink { target } => self.tree.set_target(node, target)?,
            Body::Dir => self.tree.set_explicit(node),
            _ => {}
        }
        Ok(node)
    }

    /// Walks to the directory at `parts`, making what is missing.
    fn make_parents<'p>(
        &mut self,
        path: &[u8],
        mut parts: impl Iterator<Item = &'p [u8]>,
    ) -> Result<NodeId, MergeError> {
        let mut dir = Tree::ROOT;
        let mut hops = 0;
        // Components of symlinks that are still to be gone through, the next one last.
        let mut detour: Vec<Vec<u8>> = Vec::new();
        loop {
            let part = match detour.pop() {
                Some(part) => Cow::Owned(part),
                None => match parts.next() {
                    Some(part) => Cow::Borrowed(part),
                    None => return Ok(dir),
                },
            };
            let step = self.make_dir(dir, &part);
            match step.map_err(|source| MergeError::Tree { entry: PathBytes::of(path), source })? {
                Step::Dir(next) => dir = next,
                Step::Follow(link) => {
                    hops += 1;
                    if hops > MAX_HOPS {
                        let why = "too many symlinks on the way";
                        return Err(MergeError::BadEntry { entry: PathBytes::of(path), why });
                    }
                    let target = self.tree.target(link);
                    if target.starts_with(b"/") {
                        dir = Tree::ROOT;
                    }
                    detour.extend(components(target).rev().map(<[u8]>::to_vec));
                }
            }
        }
    }

    /// One step of a path towards a directory, which is made when it is not there.
    fn make_dir(&mut self, dir: NodeId, part: &[u8]) -> Result<Step, TreeError> {
        if part == b".." {
            self.tree.set_visited(dir);
            return Ok(Step::Dir(self.tree.parent(dir)));
        }
        if let Some(dirent) = self.tree.find_dirent(dir, part) {
            let node = self.tree.dirent_node(dirent);
            match self.tree.kind(node) {
                Kind::Dir => return Ok(Step::Dir(node)),
                Kind::Symlink if self.tree.is_of_this_layer(dirent) => return Ok(Step::Follow(node)),
                _ => self.tree.unlink_dirent(dirent),
            };
        }
        self.tree.create(dir, part, Kind::Dir, Attrs::IMPLICIT_DIR).map(Step::Dir)
    }

    /// What a hard link's target names. Symlinks on the way are followed, inside the root.
    fn find(&self, target: &[u8]) -> Option<NodeId> {
        let mut todo: Vec<&[u8]> = components(target).rev().collect();
        let (mut dir, mut hops) = (Tree::ROOT, 0);
        while let Some(part) = todo.pop() {
            if part == b".." {
                dir = self.tree.parent(dir);
                continue;
            }
            let node = self.tree.lookup(dir, part)?;
            if todo.is_empty() {
                return Some(node);
            }
            match self.tree.kind(node) {
                Kind::Dir => dir = node,
                Kind::Symlink if hops < MAX_HOPS => {
                    hops += 1;
                    let target = self.tree.target(node);
                    if target.starts_with(b"/") {
                        dir = Tree::ROOT;
                    }
                    todo.extend(components(target).rev());
                }
                _ => return None,
            }
        }
        None
    }

    /// Applies a whiteout or an opaque marker called `marker` in the directory at `parts`.
    fn whiteout<'p>(
        &mut self,
        mut parts: impl Iterator<Item = &'p [u8]>,
        marker: &[u8],
    ) -> Result<Outcome, &'static str> {
        let name = &marker[WHITEOUT.len()..];
        if matches!(name, b"" | b"." | b"..") {
            return Err("a whiteout that names nothing");
        }
        if marker.starts_with(AUFS) && marker != OPAQUE {
            return Ok(Outcome::Ignored);
        }
        let dir =
            parts.try_fold(Tree::ROOT, |dir, part| self.tree.lookup(dir, part).filter(|&node| self.tree.is_dir(node)));
        let Some(dir) = dir else { return Ok(Outcome::Whiteout(false)) };
        if marker == OPAQUE {
            return Ok(Outcome::Whiteout(self.purge(dir)));
        }
        match self.tree.find_dirent(dir, name) {
            Some(dirent) if !self.tree.is_of_this_layer(dirent) => {
                let node = self.tree.dirent_node(dirent);
                if self.tree.is_dir(node) {
                    self.purge(node);
                }
                self.settle(dirent);
                Ok(Outcome::Whiteout(true))
            }
            _ => Ok(Outcome::Whiteout(false)),
        }
    }

    /// Takes away everything below `top` that lower layers put there; whether there was anything.
    ///
    /// What this layer has put below a lower directory stays, and so does the directory, as if this layer had made
    /// it. Each directory is gone through once in a layer, however often it is named.
    fn purge(&mut self, top: NodeId) -> bool {
        if self.tree.is_purged(top) {
            return false;
        }
        let mut any = false;
        // Directories being gone through: the next dirent to look at in each, and its own.
        let mut stack = vec![(self.tree.first_dirent(top), None)];
        self.tree.set_purged(top);
        while let Some((next, own)) = stack.last_mut() {
            let Some(dirent) = *next else {
                if let Some(own) = *own {
                    self.settle(own);
                }
                stack.pop();
                continue;
            };
            *next = self.tree.next_dirent(dirent);
            if self.tree.is_of_this_layer(dirent) {
                continue;
            }
            any = true;
            let node = self.tree.dirent_node(dirent);
            if self.tree.is_dir(node) && !self.tree.is_purged(node) {
                self.tree.set_purged(node);
                stack.push((self.tree.first_dirent(node), Some(dirent)));
            } else {
                self.settle(dirent);
            }
        }
        any
    }

    /// Removes a lower name that was whited out, unless it is a directory that this layer has described, gone through or
    /// put something into: that one becomes the layer's own.
    fn settle(&mut self, dirent: u32) {
        let node = self.tree.dirent_node(dirent);
        let explicit = self.tree.is_explicit(node);
        let used = explicit || self.tree.is_visited(node) || self.tree.first_dirent(node).is_some();
        if !self.tree.is_dir(node) || !used {
            self.tree.unlink_dirent(dirent);
            return;
        }
        if !explicit {
            self.tree.set_attrs(node, Attrs::IMPLICIT_DIR);
        }
        self.tree.claim(dirent);
    }
}

/// The components of a path that mean something.
fn components(path: &[u8]) -> impl DoubleEndedIterator<Item = &[u8]> + Clone {
    path.split(|&b| b == b'/').filter(|part| !part.is_empty() && *part != b".")
}

#[cfg(test)]
mod tests;
