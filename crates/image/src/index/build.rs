//! Building an index from a tree.
//!
//! First the order: directories are walked without recursion, each one's names sorted once, which fixes the numbers
//! of all dirents and inodes. Then the sections are written one after the other, each from the tree and the order
//! alone, so that beside the tree there are only some numbers per name in memory: 25 bytes, 32 while a hash is built.
//! A tree that is given away ([`build_from`]) is given up part by part meanwhile, so that its own memory is the most.
//! The tree's rows lie in the order in which it was filled, so each pass over them waits for memory: inodes, places
//! and the content root are made in one.

use super::IndexError;
use super::write::SectionWriter;
use crate::hash::{self, Hash};
use crate::tree::{Kind, NodeId, Run, Tree, XattrSet};
use format::digest::{ContentRootHasher, identity};
use format::index::{
    Dirent, Extent, HashHeader, Header, Inode, MAGIC, Object, Owner, Place, SectionKind, VERSION, XattrEntry,
    sections_digest,
};
use format::{BLOCK, Digest};
use std::collections::HashMap;
use std::io::{Seek, Write};
use zerocopy::little_endian::U32;

/// Directories with at least so many entries have their names in the hash; smaller ones are searched.
const HASHED_ENTRIES: u32 = 9;

const NIL: u32 = u32::MAX;

/// What [`build`] has written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BuiltIndex {
    /// The index's own digest.
    pub digest: Digest,
    /// The image's identity.
    pub identity: Digest,
    /// Inodes.
    pub inode_count: u32,
    /// Names, the root's not counted.
    pub name_count: u32,
    /// Bytes of all regular files.
    pub content_bytes: u64,
    /// Bytes of the index.
    pub len_bytes: u64,
    /// The objects that the placement refers to.
    pub objects: Vec<Digest>,
}

/// Writes the index of `tree` to `out`, from `out`'s start. The same tree gives the same bytes, whatever the order in
/// which it was filled.
pub fn build<W: Write + Seek>(tree: &Tree, out: &mut W) -> Result<BuiltIndex, IndexError> {
    build_with(tree, out, hash::SEEDS)
}

/// [`build`] for a tree that is not needed any more: takes less memory.
pub fn build_from<W: Write + Seek>(mut tree: Tree, out: &mut W) -> Result<BuiltIndex, IndexError> {
    tree.freeze();
    let order = Order::of(&tree);
    tree.drop_dirents();
    Builder { tree: Held::Ours(Box::new(tree)), order, out: SectionWriter::new(out)?, seeds: hash::SEEDS }.run()
}

/// [`build`] with fewer seeds for the hashes; none means no hashes.
pub(super) fn build_with<W: Write + Seek>(tree: &Tree, out: &mut W, seeds: u32) -> Result<BuiltIndex, IndexError> {
    Builder { tree: Held::Lent(tree), order: Order::of(tree), out: SectionWriter::new(out)?, seeds }.run()
}

/// The tree that an index is built from.
enum Held<'t> {
    Lent(&'t Tree),
    Ours(Box<Tree>),
}

impl std::ops::Deref for Held<'_> {
    type Target = Tree;

    fn deref(&self) -> &Tree {
        match self {
            Held::Lent(tree) => tree,
            Held::Ours(tree) => tree,
        }
    }
}

/// The numbers of dirents and inodes.
struct Order {
    /// For each dirent of the index the place of its name and its node; the root's own is not one of the tree's.
    dirents: Vec<(u32, NodeId)>,
    /// The length of each one's name.
    name_lens: Vec<u8>,
    /// The node of each inode.
    nodes: Vec<NodeId>,
    /// The inode of each node, by the node's number.
    inos: Vec<u32>,
    /// Directories, in inode order.
    dirs: Vec<DirRow>,
}

/// A directory: its dirents, and its own one.
#[derive(Clone, Copy)]
struct DirRow {
    first: u32,
    count: u32,
    own: u32,
}

impl Order {
    fn of(tree: &Tree) -> Order {
        let names = tree.name_count() as usize;
        let mut order = Order {
            dirents: Vec::with_capacity(names + 1),
            name_lens: Vec::with_capacity(names + 1),
            nodes: Vec::with_capacity(tree.node_count() as usize),
            inos: vec![NIL; tree.node_rows()],
            dirs: Vec::new(),
        };
        order.dirents.push((NIL, Tree::ROOT));
        order.name_lens.push(0);
        let (mut scratch, mut ids) = (Vec::new(), Vec::new());
        // Directories still to be visited, by their own dirent; the next one last.
        let mut todo = vec![(0u32, Tree::ROOT)];
        while let Some((own, dir)) = todo.pop() {
            order.number(dir);
            let first = order.dirents.len();
            ids.clear();
            ids.extend(tree.dirents_of(dir));
            tree.sort_dirents(&mut ids, &mut scratch);
            let subdirs = todo.len();
            for &d in &ids {
                let (at, node) = (order.dirents.len(), tree.dirent_node(d));
                order.dirents.push((tree.dirent_place(d), node));
                order.name_lens.push(tree.dirent_name(d).len() as u8);
                if tree.is_dir(node) {
                    todo.push((at as u32, node));
                } else if order.inos[node.0 as usize] == NIL {
                    order.number(node);
                }
            }
            todo[subdirs..].reverse();
            let count = (order.dirents.len() - first) as u32;
            order.dirs.push(DirRow { first: first as u32, count, own });
        }
        order
    }

    fn number(&mut self, node: NodeId) {
        self.inos[node.0 as usize] = self.nodes.len() as u32;
        self.nodes.push(node);
    }
}

/// Numbers by first use.
struct Renumber {
    new: Vec<u32>,
    /// The old numbers, in the new order.
    used: Vec<u32>,
}

impl Renumber {
    fn new(count: usize) -> Self {
        Renumber { new: vec![NIL; count], used: Vec::new() }
    }

    fn of(&mut self, old: u32) -> u32 {
        let new = &mut self.new[old as usize];
        if *new == NIL {
            *new = self.used.len() as u32;
            self.used.push(old);
        }
        *new
    }
}

struct Builder<'a, W> {
    tree: Held<'a>,
    order: Order,
    out: SectionWriter<'a, W>,
    seeds: u32,
}

impl<W: Write + Seek> Builder<'_, W> {
    fn run(mut self) -> Result<BuiltIndex, IndexError> {
        let Content { root: content_root, bytes: content_bytes, data_blocks, places, objects, .. } =
            self.tree_sections()?;
        let objects = self.placement_sections(places, objects)?;
        self.parents()?;
        let inode_count = self.order.nodes.len() as u32;
        let dirent_count = self.order.dirents.len() as u32;
        if let Some(e) = self.tree.scratch_failure() {
            return Err(e.into());
        }
        // What is left needs names and directories only.
        self.order.nodes = Vec::new();
        self.order.name_lens = Vec::new();
        if let Held::Ours(tree) = &mut self.tree {
            tree.drop_nodes();
        }
        self.name_hash()?;
        self.path_hash()?;
        let sums = self.out.sums();
        let tree_digest = sections_digest(true, &sums);
        let identity = identity(&tree_digest, &content_root);
        let header = Header {
            magic: MAGIC,
            version: VERSION.into(),
            header_len: (size_of::<Header>() as u32).into(),
            compat: 0.into(),
            incompat: 0.into(),
            total_len: self.out.len().into(),
            section_count: (sums.len() as u32).into(),
            inode_count: inode_count.into(),
            dirent_count: dirent_count.into(),
            reserved0: 0.into(),
            content_bytes: content_bytes.into(),
            data_blocks: data_blocks.into(),
            tree_digest,
            content_root,
            identity,
            placement_digest: sections_digest(false, &sums),
            reserved: [0; 60],
            crc: 0.into(),
        };
        let len_bytes = self.out.len();
        let digest = self.out.finish(header)?;
        Ok(BuiltIndex {
            digest,
            identity,
            inode_count,
            name_count: dirent_count - 1,
            content_bytes,
            len_bytes,
            objects,
        })
    }

    fn tree_sections(&mut self) -> Result<Content, IndexError> {
        let Builder { tree, order, out, .. } = self;
        let mut content = Content {
            root: Digest::default(),
            bytes: 0,
            data_blocks: 0,
            places: Vec::with_capacity(order.nodes.len()),
            extents: 0,
            objects: Objects { rows: Renumber::new(tree.objects().len()), by_id: HashMap::new() },
        };
        let mut content_root = ContentRootHasher::default();
        let mut owners = Renumber::new(tree.owners().len());
        let mut dirs = order.dirs.iter();
        let mut link_at = 0u32;
        for &node in &order.nodes {
            let attrs = tree.attrs(node);
            let kind = tree.kind(node);
            let mut place = Place { object: Place::NONE.into(), value: 0.into() };
            let data = match kind {
                Kind::File => {
                    let file = tree.content(node);
                    content_root.file(&file.digest);
                    place = content.add(tree, node, file.size)?;
                    file.size
                }
                Kind::Dir => {
                    let dir = dirs.next().expect("as many rows as directories");
                    place.value = dir.own.into();
                    join(dir.first, dir.count)
                }
                Kind::Symlink => {
                    let len = tree.target(node).len() as u32;
                    if len == 0 {
                        return Err(IndexError::NoTarget(tree.path_of(node)));
                    }
                    link_at += len;
                    join(link_at - len, len)
                }
                Kind::Char { major, minor } | Kind::Block { major, minor } => join(minor, major),
                Kind::Fifo | Kind::Socket => 0,
            };
            content.places.push(place);
            out.put(&Inode {
                mode: (kind.mode_bits() | attrs.mode).into(),
                flags: 0.into(),
                nlink: tree.nlink(node).into(),
                owner: owners.of(tree.owner_of(node)).into(),
                mtime_nsec: attrs.mtime_nsec.into(),
                mtime_sec: attrs.mtime_sec.into(),
                data: data.into(),
            })?;
        }
        content.root = content_root.finish();
        out.end(SectionKind::Inodes)?;

        // The empty set is there always, and first.
        let mut sets = Renumber::new(tree.xattr_set_count());
        sets.of(XattrSet::EMPTY.0);
        for &old in &owners.used {
            let owner = tree.owners()[old as usize];
            let xattrs = sets.of(owner.xattrs.0);
            out.put(&Owner { uid: owner.uid.into(), gid: owner.gid.into(), xattrs: xattrs.into() })?;
        }
        out.end(SectionKind::Owners)?;

        let mut name_at = 0u32;
        out.put(&Dirent { name: 0.into(), ino: 0.into() })?;
        for (&(_, node), &name_len) in order.dirents[1..].iter().zip(&order.name_lens[1..]) {
            let ino = order.inos[node.0 as usize];
            out.put(&Dirent { name: name_at.into(), ino: ino.into() })?;
            name_at += u32::from(name_len);
        }
        out.put(&Dirent { name: name_at.into(), ino: 0.into() })?;
        out.end(SectionKind::Dirents)?;
        for &(name, _) in &order.dirents[1..] {
            out.bytes(tree.name_at(name))?;
        }
        out.end(SectionKind::Names)?;
        if link_at > 0 {
            for &node in &order.nodes {
                out.bytes(tree.target(node))?;
            }
        }
        out.end(SectionKind::Links)?;
        self.xattr_sections(&sets.used)?;
        Ok(content)
    }

    fn xattr_sections(&mut self, sets: &[u32]) -> Result<(), IndexError> {
        let Builder { tree, out, .. } = self;
        let mut first = 0u32;
        out.put(&U32::new(0))?;
        for &set in sets {
            first += tree.xattrs(XattrSet(set)).count() as u32;
            out.put(&U32::new(first))?;
        }
        out.end(SectionKind::XattrSets)?;

        let mut places: HashMap<&[u8], u32> = HashMap::new();
        let mut strings: Vec<&[u8]> = Vec::new();
        let mut end = 0u32;
        let mut place = |string| {
            if <[u8]>::is_empty(string) {
                return 0;
            }
            *places.entry(string).or_insert_with(|| {
                strings.push(string);
                end += string.len() as u32;
                end - string.len() as u32
            })
        };
        for &set in sets {
            for (name, value) in tree.xattrs(XattrSet(set)) {
                out.put(&XattrEntry {
                    name: place(name).into(),
                    value: place(value).into(),
                    name_len: (name.len() as u16).into(),
                    reserved: 0.into(),
                    value_len: (value.len() as u32).into(),
                })?;
            }
        }
        out.end(SectionKind::XattrEntries)?;
        for string in strings {
            out.bytes(string)?;
        }
        out.end(SectionKind::XattrData)
    }

    /// Gives the objects' ids.
    fn placement_sections(&mut self, places: Vec<Place>, mut objects: Objects) -> Result<Vec<Digest>, IndexError> {
        let Builder { tree, order, out, .. } = self;
        let mut ids = Vec::new();
        for &ordinal in &objects.rows.used {
            let object = tree.objects()[ordinal as usize];
            let id = object.id.ok_or(IndexError::UnnamedObject(ordinal))?;
            out.put(&Object { id, space_blocks: object.space_blocks.into() })?;
            ids.push(id);
        }
        out.end(SectionKind::Objects)?;
        for place in &places {
            out.put(place)?;
        }
        out.end(SectionKind::Places)?;
        for (&node, _) in order.nodes.iter().zip(&places).filter(|(_, place)| place.object.get() == Place::MANY) {
            let mut runs = tree.runs(node).peekable();
            while let Some(run) = runs.next() {
                let last = if runs.peek().is_none() { Extent::LAST } else { 0 };
                out.put(&Extent {
                    file_block: run.file_block.into(),
                    count: (run.count | last).into(),
                    object: objects.row(tree, &run)?.into(),
                    space_block: run.space_block.into(),
                })?;
            }
        }
        out.end(SectionKind::Extents)?;
        Ok(ids)
    }

    fn parents(&mut self) -> Result<(), IndexError> {
        self.out.put(&U32::new(0))?;
        for dir in &self.order.dirs {
            for _ in 0..dir.count {
                self.out.put(&U32::new(dir.own))?;
            }
        }
        self.out.end(SectionKind::Parents)
    }

    fn name_hash(&mut self) -> Result<(), IndexError> {
        let Builder { tree, order, out, seeds } = self;
        let wide = || order.dirs.iter().filter(|d| d.count >= HASHED_ENTRIES);
        let count = wide().map(|d| d.count as usize).sum();
        let mut keys = Vec::with_capacity(count);
        let found = (0..*seeds).map(hash::seed).find_map(|seed| {
            keys.clear();
            for dir in wide() {
                let ino = order.inos[order.dirents[dir.own as usize].1.0 as usize];
                keys.extend((dir.first..dir.first + dir.count).map(|d| {
                    let name = tree.name_at(order.dirents[d as usize].0);
                    (hash::name_key(seed, ino, name), d)
                }));
            }
            hash::build(&mut keys).map(|hash| (seed, hash))
        });
        write_hash(out, SectionKind::NameHash, count, HASHED_ENTRIES, found)
    }

    fn path_hash(&mut self) -> Result<(), IndexError> {
        let Builder { tree, order, out, seeds } = self;
        let count = order.dirents.len() - 1;
        let mut keys: Vec<(u64, u32)> = Vec::with_capacity(count + 1);
        let found = (0..*seeds).map(hash::seed).find_map(|seed| {
            keys.clear();
            keys.push((seed, 0));
            for dir in &order.dirs {
                let parent = keys[dir.own as usize].0;
                keys.extend((dir.first..dir.first + dir.count).map(|d| {
                    let name = tree.name_at(order.dirents[d as usize].0);
                    (hash::path_key(parent, name), d)
                }));
            }
            // The root needs no key of its own.
            keys.swap_remove(0);
            hash::build(&mut keys).map(|hash| (seed, hash))
        });
        write_hash(out, SectionKind::PathHash, count, 0, found)
    }
}

/// What the files' content comes to.
struct Content {
    root: Digest,
    bytes: u64,
    data_blocks: u64,
    /// By inode.
    places: Vec<Place>,
    /// Rows of extents so far.
    extents: u32,
    objects: Objects,
}

impl Content {
    /// Takes in the next file's runs; gives its place.
    fn add(&mut self, tree: &Tree, node: NodeId, size: u64) -> Result<Place, IndexError> {
        self.bytes = self.bytes.saturating_add(size);
        let (mut count, mut first) = (0u32, None);
        for run in tree.runs(node) {
            let row = self.objects.row(tree, &run)?;
            self.data_blocks += u64::from(run.count);
            first = first.or(Some((run, row)));
            count += 1;
        }
        let (object, value) = match first {
            None => (Place::NONE, 0),
            Some((run, row)) if run.file_block == 0 && u64::from(run.count) == size.div_ceil(BLOCK) => {
                (row, run.space_block)
            }
            Some(_) => {
                self.extents += count;
                (Place::MANY, self.extents - count)
            }
        };
        Ok(Place { object: object.into(), value: value.into() })
    }
}

/// Rows of the objects table, by first use; ordinals that stand for the same object share one.
struct Objects {
    rows: Renumber,
    by_id: HashMap<Digest, u32>,
}

impl Objects {
    fn row(&mut self, tree: &Tree, run: &Run) -> Result<u32, IndexError> {
        let ordinal = run.object;
        let object = tree.objects()[ordinal as usize];
        if u64::from(run.space_block) + u64::from(run.count) > object.space_blocks {
            return Err(IndexError::BeyondObject(ordinal));
        }
        let known = self.rows.new[ordinal as usize];
        if known != NIL {
            return Ok(known);
        }
        let id = object.id.ok_or(IndexError::UnnamedObject(ordinal))?;
        let first = *self.by_id.entry(id).or_insert(ordinal);
        let row = self.rows.of(first);
        self.rows.new[ordinal as usize] = row;
        Ok(row)
    }
}

fn join(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

/// Writes a hash section; an empty one when there are no keys, or none of the seeds would do.
fn write_hash<W: Write + Seek>(
    out: &mut SectionWriter<'_, W>,
    kind: SectionKind,
    keys: usize,
    min_entries: u32,
    found: Option<(u64, Hash)>,
) -> Result<(), IndexError> {
    if let (Some((seed, hash)), true) = (found, keys > 0) {
        out.put(&HashHeader {
            seed: seed.into(),
            keys: (keys as u32).into(),
            slots: hash.shape.slots.into(),
            buckets: hash.shape.buckets.into(),
            min_entries: min_entries.into(),
            reserved: 0.into(),
        })?;
        for slot in hash.slots {
            out.bytes(&slot.to_le_bytes())?;
        }
        for pilot in hash.pilots {
            out.bytes(&pilot.to_le_bytes())?;
        }
    }
    out.end(kind)
}
