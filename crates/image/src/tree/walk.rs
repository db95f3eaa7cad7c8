//! Names and paths of a tree: adding and removing dirents, listing, walking.

use super::arena::{Content, Dirent};
use super::{Attrs, DirPlace, Kind, NIL, NodeId, Owner, PathBytes, Run, Tree, TreeError};
use format::BLOCK;
use format::index as raw;

/// Directories with fewer names are sorted by comparing names alone.
const SMALL_SORT: usize = 24;
/// Directories with more names are sorted with less memory for each.
const WIDE_SORT: usize = 1 << 18;

/// The first bytes of a name, zeros behind it.
fn key<const N: usize>(name: &[u8]) -> [u8; N] {
    let mut key = [0; N];
    let n = name.len().min(N);
    key[..n].copy_from_slice(&name[..n]);
    key
}

pub(super) fn carry(attrs: &Attrs) -> (i64, u32) {
    const NSEC: u32 = 1_000_000_000;
    (attrs.mtime_sec.saturating_add((attrs.mtime_nsec / NSEC).into()), attrs.mtime_nsec % NSEC)
}

/// What is wrong with a file's content, before its path is known.
pub(super) enum ContentFault {
    Runs(&'static str),
    Limit(&'static str, u64),
}

impl ContentFault {
    pub(super) fn with_path(self, path: impl FnOnce() -> PathBytes) -> TreeError {
        match self {
            ContentFault::Runs(why) => TreeError::BadRuns { path: path(), why },
            ContentFault::Limit(what, limit) => TreeError::Limit { path: path(), what, limit },
        }
    }
}

impl Tree {
    pub(super) fn owner_number(&mut self, attrs: &Attrs) -> u32 {
        let owner = Owner { uid: attrs.uid, gid: attrs.gid, xattrs: attrs.xattrs };
        *self.owner_numbers.entry(owner).or_insert_with(|| {
            self.owners.push(owner);
            (self.owners.len() - 1) as u32
        })
    }

    pub(super) fn push_object(&mut self, object: super::ObjectRef) -> u32 {
        self.objects.push(object);
        (self.objects.len() - 1) as u32
    }

    pub(super) fn content_row(&self, node: u32) -> Option<&Content> {
        let n = &self.nodes[node];
        (n.mode & raw::S_IFMT == raw::S_IFREG && n.a != NIL).then(|| &self.contents[n.a])
    }

    pub(super) fn check_content(&self, size: u64, runs: &[Run]) -> Result<(), ContentFault> {
        use ContentFault::{Limit, Runs};
        if size > self.limits.file_size {
            return Err(Limit("bytes of one file", self.limits.file_size));
        }
        if self.extents.live() + runs.len() > self.limits.extents && runs.len() > 1 {
            return Err(Limit("extents of all files", self.limits.extents as u64));
        }
        let blocks = size.div_ceil(BLOCK);
        let mut at = 0u64;
        for run in runs {
            if run.count == 0 || run.count >= raw::Extent::LAST {
                return Err(Runs("a run of no block, or of too many"));
            }
            if u64::from(run.file_block) < at {
                return Err(Runs("runs overlap or are not sorted"));
            }
            at = u64::from(run.file_block) + u64::from(run.count);
            if at > blocks {
                return Err(Runs("a run reaches past the end of the file"));
            }
            if run.object as usize >= self.objects.len() {
                return Err(Runs("a run in an unknown object"));
            }
            if u64::from(run.space_block) + u64::from(run.count) > u64::from(u32::MAX) {
                return Err(Runs("a run beyond the 32-bit blocks of a space"));
            }
        }
        Ok(())
    }

    pub(super) fn drop_content(&mut self, node: u32) {
        if let Some(&content) = self.content_row(node) {
            self.extents.free(&content);
            self.contents.free(self.nodes[node].a);
            self.nodes[node].a = NIL;
        }
    }

    pub(super) fn compact_extents(&mut self) {
        if self.extents.wants_compaction() {
            self.extents.compact(&mut self.contents);
        }
    }

    pub(super) fn compact_targets(&mut self) {
        if self.targets.wants_compaction() {
            let old = std::mem::take(&mut self.targets);
            for n in self.nodes.iter_mut().filter(|n| n.nlink > 0 && n.mode & raw::S_IFMT == raw::S_IFLNK) {
                (n.a, n.b) = self.targets.push(old.get(n.a, n.b));
            }
        }
    }

    /// Depth and path length of a directory; remembered, since names come directory by directory.
    fn place_of(&mut self, dir: NodeId) -> DirPlace {
        match self.place {
            Some((known, place)) if known == dir => place,
            _ => {
                let mut place = DirPlace { depth: 0, path_len: 0 };
                self.ancestors(dir, |name| {
                    place.depth += 1;
                    place.path_len += 1 + name.len();
                });
                self.place = Some((dir, place));
                place
            }
        }
    }

    /// Calls `f` with the names on the way from `dir` up to the root.
    fn ancestors<'a>(&'a self, dir: NodeId, mut f: impl FnMut(&'a [u8])) {
        let mut own = self.nodes[dir.0].b;
        while own != NIL {
            let d = &self.dirents[own];
            f(self.names.get(d.name));
            own = self.nodes[d.parent].b;
        }
    }

    pub(super) fn check_new_name(&mut self, dir: NodeId, name: &[u8]) -> Result<(), TreeError> {
        if !self.nodes[dir.0].is_dir() {
            return Err(TreeError::NotADirectory(self.path_of(dir)));
        }
        let why = match name {
            b"" => Some("empty name"),
            b"." | b".." => Some("a name of dots only"),
            _ if name.contains(&b'/') => Some("a slash in a name"),
            _ if name.contains(&0) => Some("a NUL byte in a name"),
            _ => None,
        };
        if let Some(why) = why {
            return Err(TreeError::BadName { path: self.path_in(dir, name), why });
        }
        if self.names.find(&self.dirents, dir.0, name).is_some() {
            return Err(TreeError::Exists(self.path_in(dir, name)));
        }
        let place = self.place_of(dir);
        let l = &self.limits;
        let over = if name.len() > l.name_len {
            Some(("bytes of one name", l.name_len as u64))
        } else if place.depth >= l.depth {
            Some(("directories deep", l.depth.into()))
        } else if place.path_len + 1 + name.len() > l.path_len {
            Some(("bytes of a path", l.path_len as u64))
        } else if self.dirents.live() >= l.names {
            Some(("names", l.names.into()))
        } else if self.names.live_bytes() + name.len() + 1 > l.name_bytes {
            Some(("bytes of names together", l.name_bytes as u64))
        } else if self.used_bytes() > l.memory {
            Some(("bytes of memory for the image's names and inodes", l.memory as u64))
        } else {
            None
        };
        match over {
            Some((what, limit)) => Err(TreeError::Limit { path: self.path_in(dir, name), what, limit }),
            None => Ok(()),
        }
    }

    pub(super) fn add_name(&mut self, dir: NodeId, name: &[u8], node: u32) -> u32 {
        self.names.compact(&mut self.dirents);
        let (at, tag) = self.names.store(dir.0, name);
        let next = self.nodes[dir.0].a;
        let row = Dirent { name: at, parent: dir.0, node, prev: NIL, next, layer: self.layer, tag };
        let d = self.dirents.push(row);
        if next != NIL {
            self.dirents[next].prev = d;
        }
        self.nodes[dir.0].a = d;
        self.names.insert(&self.dirents, d);
        d
    }

    pub(crate) fn unlink_dirent(&mut self, dirent: u32) -> NodeId {
        let d = self.dirents[dirent];
        match d.prev {
            NIL => self.nodes[d.parent].a = d.next,
            prev => self.dirents[prev].next = d.next,
        }
        if d.next != NIL {
            self.dirents[d.next].prev = d.prev;
        }
        if self.nodes[d.node].is_dir() {
            self.nodes[d.parent].nlink -= 1;
            self.place = None;
        }
        // Directories whose dirent is gone and whose children are still to go.
        let mut dirs = Vec::new();
        self.drop_dirent(dirent, &mut dirs);
        while let Some(dir) = dirs.pop() {
            let mut child = self.nodes[dir].a;
            while child != NIL {
                let next = self.dirents[child].next;
                self.drop_dirent(child, &mut dirs);
                child = next;
            }
            self.nodes.free(dir);
        }
        NodeId(d.node)
    }

    /// Frees a dirent that is in no list any more, and its node when that was its last name.
    fn drop_dirent(&mut self, dirent: u32, dirs: &mut Vec<u32>) {
        let node = self.dirents[dirent].node;
        self.names.remove(&self.dirents, dirent);
        self.dirents.free(dirent);
        if self.nodes[node].is_dir() {
            dirs.push(node);
            return;
        }
        self.nodes[node].nlink -= 1;
        if self.nodes[node].nlink == 0 {
            self.drop_content(node);
            if self.nodes[node].mode & raw::S_IFMT == raw::S_IFLNK {
                self.targets.free(self.nodes[node].b as usize);
            }
            self.nodes.free(node);
        }
    }

    /// The path of `name` in `dir`.
    pub(crate) fn path_in(&self, dir: NodeId, name: &[u8]) -> PathBytes {
        let mut path = if self.nodes[dir.0].is_dir() { self.path_of(dir).0 } else { Vec::new() };
        if path.last() != Some(&b'/') {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        PathBytes::of(&path)
    }

    /// A path of the node: a directory's only one, any one of another's. Slow for those: it looks at every name.
    pub fn path_of(&self, node: NodeId) -> PathBytes {
        let n = &self.nodes[node.0];
        let own = if n.is_dir() {
            n.b
        } else {
            (0..self.dirents.len() as u32).find(|&d| self.dirents[d].node == node.0).unwrap_or(NIL)
        };
        if own == NIL {
            return PathBytes::of(b"/");
        }
        let d = &self.dirents[own];
        let mut parts = vec![self.names.get(d.name)];
        self.ancestors(NodeId(d.parent), |name| parts.push(name));
        let mut path = Vec::new();
        for part in parts.iter().rev() {
            path.push(b'/');
            path.extend_from_slice(part);
        }
        PathBytes(path)
    }

    /// The dirents of a directory, newest first.
    pub(crate) fn dirents_of(&self, dir: NodeId) -> impl Iterator<Item = u32> + '_ {
        let n = &self.nodes[dir.0];
        let first = if n.is_dir() { n.a } else { NIL };
        std::iter::successors((first != NIL).then_some(first), |&d| {
            let next = self.dirents[d].next;
            (next != NIL).then_some(next)
        })
    }

    /// Sorts dirents of one directory bytewise by name. `scratch` is kept for the next directory.
    pub(crate) fn sort_dirents(&self, ids: &mut [u32], scratch: &mut Vec<(u64, u32)>) {
        let name = |d: u32| self.names.get(self.dirents[d].name);
        if ids.len() < SMALL_SORT {
            ids.sort_unstable_by(|&a, &b| name(a).cmp(name(b)));
            return;
        }
        // Names lie all over memory, so most comparisons use some bytes of each, taken beside its number: those behind
        // what all names have in common. Fewer where there are very many names.
        let first = name(ids[0]);
        let common = ids.iter().fold(first.len(), |n, &d| {
            name(d).iter().zip(&first[..n]).position(|(a, b)| a != b).unwrap_or(n.min(name(d).len()))
        });
        // Equal keys are names that go on behind the key's bytes, or end there: no name has a NUL byte.
        if ids.len() <= WIDE_SORT {
            scratch.clear();
            scratch.extend(ids.iter().map(|&d| (u64::from_be_bytes(key(&name(d)[common..])), d)));
            scratch.sort_unstable_by(|a, b| a.0.cmp(&b.0).then_with(|| name(a.1).cmp(name(b.1))));
            ids.iter_mut().zip(scratch.iter()).for_each(|(id, &(_, d))| *id = d);
        } else {
            let mut rows: Vec<(u32, u32)> =
                ids.iter().map(|&d| (u32::from_be_bytes(key(&name(d)[common..])), d)).collect();
            rows.sort_unstable_by(|a, b| a.0.cmp(&b.0).then_with(|| name(a.1).cmp(name(b.1))));
            ids.iter_mut().zip(rows).for_each(|(id, (_, d))| *id = d);
        }
    }

    /// Where the dirent's name is.
    pub(crate) fn dirent_place(&self, dirent: u32) -> u32 {
        self.dirents[dirent].name
    }

    /// The name at a place.
    pub(crate) fn name_at(&self, place: u32) -> &[u8] {
        self.names.get(place)
    }

    pub(crate) fn dirent_name(&self, dirent: u32) -> &[u8] {
        self.names.get(self.dirents[dirent].name)
    }

    pub(crate) fn dirent_node(&self, dirent: u32) -> NodeId {
        NodeId(self.dirents[dirent].node)
    }

    /// The names in a directory and their nodes, sorted bytewise, without `.` and `..`; nothing for other nodes.
    pub fn children(&self, dir: NodeId) -> Children<'_> {
        let mut ids: Vec<u32> = self.dirents_of(dir).collect();
        self.sort_dirents(&mut ids, &mut Vec::new());
        Children { tree: self, ids: ids.into_iter() }
    }

    /// Calls `f` with every path and its node, parents first, the root (`/`) at the start, siblings in bytewise order.
    pub fn walk<E>(&self, mut f: impl FnMut(&[u8], NodeId) -> Result<(), E>) -> Result<(), E> {
        f(b"/", Tree::ROOT)?;
        let mut path = Vec::new();
        let mut stack = vec![(self.children(Tree::ROOT), 0)];
        while let Some((children, len)) = stack.last_mut() {
            path.truncate(*len);
            let Some((name, node)) = children.next() else {
                stack.pop();
                continue;
            };
            path.push(b'/');
            path.extend_from_slice(name);
            f(&path, node)?;
            if self.kind(node) == Kind::Dir {
                stack.push((self.children(node), path.len()));
            }
        }
        Ok(())
    }
}

/// The names in a directory and their nodes, sorted bytewise.
#[derive(Debug)]
pub struct Children<'a> {
    tree: &'a Tree,
    ids: std::vec::IntoIter<u32>,
}

impl<'a> Iterator for Children<'a> {
    type Item = (&'a [u8], NodeId);

    fn next(&mut self) -> Option<Self::Item> {
        let d = self.ids.next()?;
        Some((self.tree.dirent_name(d), self.tree.dirent_node(d)))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.ids.size_hint()
    }
}

impl ExactSizeIterator for Children<'_> {}
