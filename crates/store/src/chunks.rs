//! Finding chunks that the store has already: chunk tables on disk, mapped.
//!
//! Every object has a table of its own; one merged table covers many objects, so that a lookup does not have to ask
//! each. Imports that publish rebuild the merged table when too many objects are not in it. It is replaced by a
//! rename, so whoever has it mapped goes on with what there was.
//!
//! Tables are only believed as far as they can be checked: a row must be intact, and its object's own map, which is
//! verified, must have a chunk of its own at that place. An object without a table of its own is not used, whatever the
//! merged one says: so `fsck` takes damaged objects out. What does not fit is not found. So a damaged, stale or missing
//! table costs space, never content.

use crate::layout::{self, Layout, Part};
use crate::object::ObjectMap;
use crate::tmp::{TmpDir, TmpFile};
use crate::{ObjectId, StoreError};
use format::Digest;
use format::chunks::{Header, Row, View};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, HashSet};
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use zerocopy::IntoBytes;

/// Objects outside of the merged table before it is rebuilt.
const UNCOVERED: usize = 8;

/// Where a chunk lies in the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkRef {
    /// The object.
    pub object: ObjectId,
    /// Blocks of its space.
    pub space_blocks: u64,
    /// The chunk's first block.
    pub block: u32,
}

/// Looks in all tables of a store. Any number of threads at once.
#[derive(Debug)]
pub(crate) struct Finder {
    layout: Layout,
    tables: Vec<Table>,
    /// Whether pages are to be given back now and then.
    large: bool,
    lookups: AtomicU32,
}

/// Lookups between giving the tables' pages back, each of which may bring in 64 KiB: the process would seem to grow by
/// all of the tables. Where those are small it may.
const LOOKUPS: u32 = 128;
const SMALL_TABLES: usize = 16 << 20;

#[derive(Debug)]
struct Table {
    bytes: sys::Map,
    /// The maps of its objects, opened when first needed; `None` for what is not there or not right.
    maps: Vec<OnceLock<Option<ObjectMap>>>,
}

impl Table {
    fn view(&self) -> Option<View<'_>> {
        View::reopen(self.bytes.as_slice())
    }
}

impl Finder {
    /// Opens the tables that there are now.
    pub(crate) fn open(layout: &Layout) -> Result<Finder, StoreError> {
        let mut tables: Vec<Table> = open_table(&layout.merged()).into_iter().collect();
        for id in uncovered(layout, tables.first())? {
            tables.extend(open_table(&layout.object(&id, Part::Chunks)));
        }
        let large = tables.iter().map(|t| t.bytes.as_slice().len()).sum::<usize>() > SMALL_TABLES;
        Ok(Finder { layout: layout.clone(), tables, large, lookups: AtomicU32::new(0) })
    }

    pub(crate) fn find(&self, digest: &Digest) -> Option<ChunkRef> {
        if self.large && self.lookups.fetch_add(1, Ordering::Relaxed) % LOOKUPS == LOOKUPS - 1 {
            // They stay in the kernel's cache. Only a hint, which does not have to be taken.
            self.tables.iter().for_each(|table| drop(table.bytes.advise(sys::map::Access::DontNeed)));
        }
        self.tables.iter().find_map(|table| {
            let view = table.view()?;
            let row = view.find(digest)?;
            let object = row.object.get() as usize;
            let id = view.objects().get(object)?;
            let map = table.maps.get(object)?.get_or_init(|| usable(&self.layout, id)).as_ref()?;
            let block = row.block.get();
            map.chunk_at(block)?;
            Some(ChunkRef { object: *id, space_blocks: map.space_blocks(), block })
        })
    }
}

/// Whether an object is there and not distrusted, as far as names tell.
fn alive(layout: &Layout, id: &ObjectId) -> bool {
    [Part::Map, Part::Chunks].iter().all(|part| layout.object(id, *part).exists())
}

/// The map of an object that is there in full, its own table included.
fn usable(layout: &Layout, id: &ObjectId) -> Option<ObjectMap> {
    if !alive(layout, id) {
        return None;
    }
    let bytes = layout::map(&layout.object(id, Part::Map)).ok()?;
    let map = ObjectMap::open(Arc::new(bytes), id).ok()?;
    let pack = std::fs::symlink_metadata(layout.object(id, Part::Pack)).ok()?;
    (pack.is_file() && pack.len() == map.object_len()).then_some(map)
}

/// A table that cannot be opened is as good as none.
fn open_table(path: &std::path::Path) -> Option<Table> {
    let bytes = layout::map(path).ok()?;
    let objects = View::open(bytes.as_slice()).ok()?.objects().len();
    // Lookups jump about: reading ahead would only push other pages out.
    let _ = bytes.advise(sys::map::Access::Random);
    Some(Table { bytes, maps: (0..objects).map(|_| OnceLock::new()).collect() })
}

/// Objects of the store that a merged table does not cover.
fn uncovered(layout: &Layout, merged: Option<&Table>) -> Result<Vec<ObjectId>, StoreError> {
    let covered: HashSet<&Digest> = merged.and_then(Table::view).map_or(&[][..], |v| v.objects()).iter().collect();
    let mut out: Vec<ObjectId> = layout::list(&layout.objects())?
        .iter()
        .filter_map(|name| Part::parse(name))
        .filter(|(id, part)| *part == Part::Chunks && !covered.contains(id))
        .map(|(id, _)| id)
        .collect();
    out.sort();
    Ok(out)
}

/// Rebuilds the merged table if more than a few objects are not in it, or (`purge`) if it covers objects that are no
/// more. Under the store's lock, shared suffices: of two that rebuild at once, the later rename stays, and what that
/// one does not cover is found in the objects' own tables.
pub(crate) fn cover(layout: &Layout, dir: &TmpDir, purge: bool) -> Result<(), StoreError> {
    let path = layout.merged();
    let merged = open_table(&path);
    let new = uncovered(layout, merged.as_ref())?;
    let alive = |id: &ObjectId| alive(layout, id);
    let stale = purge
        && (merged.as_ref().and_then(Table::view).is_some_and(|v| !v.objects().iter().all(alive))
            || (merged.is_none() && path.exists()));
    if new.len() <= UNCOVERED && !stale {
        return Ok(());
    }
    let mut tables: Vec<Table> = merged.into_iter().collect();
    tables.extend(new.iter().filter_map(|id| open_table(&layout.object(id, Part::Chunks))));
    let mut objects: Vec<ObjectId> = Vec::new();
    let mut ordinals: HashMap<ObjectId, u32> = HashMap::new();
    let mut inputs: Vec<Box<dyn Iterator<Item = Row> + '_>> = Vec::new();
    for view in tables.iter().filter_map(Table::view) {
        let remap: Vec<Option<u32>> = view
            .objects()
            .iter()
            .map(|id| {
                alive(id).then(|| {
                    *ordinals.entry(*id).or_insert_with(|| {
                        objects.push(*id);
                        objects.len() as u32 - 1
                    })
                })
            })
            .collect();
        inputs.push(Box::new(view.rows().iter().filter(|row| row.is_intact()).filter_map(move |row| {
            let object = (*remap.get(row.object.get() as usize)?)?;
            Some(Row::new(row.digest, object, row.block.get()))
        })));
    }
    let file = write(dir.file("merged")?, &objects, merge(inputs))?;
    file.sync()?;
    file.rename(&path)
}

/// Merges sorted inputs; of rows with the same digest the first input's stays. Rows that are out of order, which only
/// a damaged table has, are left out.
pub(crate) fn merge<'a>(mut inputs: Vec<Box<dyn Iterator<Item = Row> + 'a>>) -> impl Iterator<Item = Row> + 'a {
    let mut heads: BinaryHeap<Reverse<(Digest, usize)>> = BinaryHeap::new();
    let mut rows: Vec<Option<Row>> = inputs.iter_mut().map(Iterator::next).collect();
    for (i, row) in rows.iter().enumerate() {
        heads.extend(row.map(|r| Reverse((r.digest, i))));
    }
    let mut last = None;
    std::iter::from_fn(move || {
        loop {
            let Reverse((_, i)) = heads.pop()?;
            let row = rows[i].take();
            rows[i] = inputs[i].next();
            heads.extend(rows[i].map(|r| Reverse((r.digest, i))));
            match row {
                Some(row) if last.is_none_or(|l| l < row.digest) => {
                    last = Some(row.digest);
                    return Some(row);
                }
                _ => {}
            }
        }
    })
}

/// Writes a table. Not synced.
pub(crate) fn write(
    file: TmpFile,
    objects: &[ObjectId],
    rows: impl Iterator<Item = Row>,
) -> Result<TmpFile, StoreError> {
    let path = file.path().to_path_buf();
    let io = |e| StoreError::io("write", &path, e);
    let mut out = BufWriter::with_capacity(256 << 10, file);
    out.write_all(Header::new(objects, 0).as_bytes()).map_err(io)?;
    out.write_all(objects.as_bytes()).map_err(io)?;
    let mut count = 0u64;
    for row in rows {
        out.write_all(row.as_bytes()).map_err(io)?;
        count += 1;
    }
    out.seek(SeekFrom::Start(0)).map_err(io)?;
    out.write_all(Header::new(objects, count).as_bytes()).map_err(io)?;
    out.into_inner().map_err(|e| StoreError::io("write", &path, e.into_error()))
}
