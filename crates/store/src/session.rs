//! An import's claim on the store: everything that it writes is in a directory of its own until it is published.
//!
//! Publishing moves the import's files to their places, makes them durable, and then replaces the ref: that one rename
//! makes the image appear. Whatever happens before leaves the store's images as they were; files that were moved by
//! then belong to no image, and `gc` removes them.

use crate::chunks::{self, ChunkRef, Finder};
use crate::disk::Disk;
use crate::layout::{Layout, Part};
use crate::lock::Lock;
use crate::tmp::{self, TmpDir, TmpFile};
use crate::{ImageName, ImageRecord, ObjectId, PackOptions, PackWriter, StoreError, index, refs};
use format::Digest;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// One import: a shared lock, a directory of its own, and everything it writes until it is published. Dropping it
/// removes what it wrote.
#[derive(Debug)]
pub struct ImportSession {
    layout: Layout,
    disk: Arc<dyn Disk>,
    finder: Finder,
    shelf: Arc<Shelf>,
    /// Behind the directory: `gc` starts when both are gone.
    _lock: Lock,
}

/// What an import has finished but not published.
#[derive(Debug)]
pub(crate) struct Shelf {
    dir: Arc<TmpDir>,
    packs: Mutex<Vec<Finished>>,
}

#[derive(Debug, Clone)]
struct Finished {
    id: ObjectId,
    /// In the order of [`PARTS`].
    files: [PathBuf; 3],
}

/// The map comes last: with it others take the object for there.
const PARTS: [Part; 3] = [Part::Pack, Part::Chunks, Part::Map];

impl Shelf {
    pub(crate) fn dir(&self) -> &Arc<TmpDir> {
        &self.dir
    }

    /// Notes a finished pack: its pack, map and chunk table, all synced.
    pub(crate) fn add(&self, id: ObjectId, pack: PathBuf, map: PathBuf, chunks: PathBuf) {
        let finished = Finished { id, files: [pack, chunks, map] };
        self.packs.lock().unwrap_or_else(PoisonError::into_inner).push(finished);
    }

    fn packs(&self) -> Vec<Finished> {
        self.packs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl ImportSession {
    /// Starts an import under a shared lock that is held already.
    pub(crate) fn start(layout: &Layout, disk: &Arc<dyn Disk>, lock: Lock) -> Result<ImportSession, StoreError> {
        // What is stale takes space, nothing else: not being able to remove it is no reason not to import.
        let _ = tmp::sweep(layout, disk.as_ref());
        let dir = Arc::new(TmpDir::make(layout, disk)?);
        // Usually nothing to do. Without it, a merged table that was lost would leave lookups to ask every object.
        let _ = chunks::cover(layout, &dir, false);
        let finder = Finder::open(layout)?;
        let shelf = Arc::new(Shelf { dir, packs: Mutex::new(Vec::new()) });
        Ok(ImportSession { layout: layout.clone(), disk: disk.clone(), finder, shelf, _lock: lock })
    }

    /// Starts a pack. One import may have several; one after the other or at once.
    ///
    /// # Errors
    /// A full or read-only disk.
    pub fn pack(&self, options: &PackOptions) -> Result<PackWriter, StoreError> {
        PackWriter::new(self.shelf.clone(), options)
    }

    /// Looks for a chunk in the objects that were in the store when the import began. From any thread.
    ///
    /// # Errors
    /// None that the tables can cause: a damaged table loses dedup, nothing else.
    pub fn find_chunk(&self, digest: &Digest) -> Result<Option<ChunkRef>, StoreError> {
        Ok(self.finder.find(digest))
    }

    /// A file of this import: scratch, or the index. Gone with the session unless published.
    ///
    /// # Errors
    /// A full or read-only disk.
    pub fn tmp_file(&self, hint: &str) -> Result<TmpFile, StoreError> {
        self.shelf.dir.file(hint)
    }

    /// Makes the image visible under `name`, replacing what has that name, and returns when that is durable.
    /// `index` is a complete index file. Gives the bytes by which the store's files grew; a merged chunk table, which
    /// is rebuilt now and then, does not count.
    ///
    /// # Errors
    /// A record, an index and objects that do not fit each other; a full or read-only disk. Unless the very last step
    /// failed (syncing the directory of names), the store's images are as they were.
    pub fn publish(self, name: &ImageName, record: &ImageRecord, index: TmpFile) -> Result<u64, StoreError> {
        let packs = self.shelf.packs();
        self.check(record, &index, &packs)?;
        // Everything that can fail for want of space comes before anything moves.
        index.sync()?;
        let encoded = refs::encode(name, record)?;
        let mut ref_file = self.shelf.dir.file("ref")?;
        ref_file.write_all(&encoded).map_err(|e| StoreError::io("write", ref_file.path(), e))?;
        ref_file.sync()?;
        let mut grown = encoded.len() as u64;
        for pack in &packs {
            for (part, from) in PARTS.into_iter().zip(&pack.files) {
                let to = self.layout.object(&pack.id, part);
                grown += len_of(from).saturating_sub(len_of(&to));
                self.disk.rename(from, &to).map_err(|e| StoreError::io("make", &to, e))?;
            }
        }
        let to = self.layout.index(&record.index);
        // An index that is there and right stays: somebody may have it open and rely on its lock.
        if !same_content(&index, &to) {
            grown += len_of(index.path()).saturating_sub(len_of(&to));
            index.rename(&to)?;
        }
        for dir in [self.layout.objects(), self.layout.indexes()] {
            self.disk.sync_dir(&dir).map_err(|e| StoreError::io("sync", &dir, e))?;
        }
        let refs = self.layout.refs();
        let to = refs.join(name.file_name());
        grown = grown.saturating_sub(len_of(&to));
        ref_file.rename(&to)?;
        self.disk.sync_dir(&refs).map_err(|e| StoreError::io("sync", &refs, e))?;
        // The image is there. A merged table that cannot be rebuilt now is rebuilt by a later import.
        let _ = chunks::cover(&self.layout, &self.shelf.dir, false);
        Ok(grown)
    }

    /// Refuses what would be damaged from the start.
    fn check(&self, record: &ImageRecord, index: &TmpFile, packs: &[Finished]) -> Result<(), StoreError> {
        let summary = index::read(index.file(), index.path())?;
        if summary.digest != record.index || summary.identity != record.identity {
            return Err(StoreError::Usage("the record names another index than the one to publish"));
        }
        for id in summary.objects.iter().chain(&record.objects) {
            let path = self.layout.object(id, Part::Map);
            if !record.objects.contains(id) {
                return Err(StoreError::Usage("the record does not name every object of the index"));
            }
            if !packs.iter().any(|p| p.id == *id) && !path.exists() {
                return Err(StoreError::Missing { what: "object", digest: *id, path });
            }
        }
        Ok(())
    }
}

/// Bytes of a file; 0 when there is none.
fn len_of(path: &Path) -> u64 {
    std::fs::symlink_metadata(path).map_or(0, |meta| meta.len())
}

/// Whether the file at `path` has the same bytes.
fn same_content(file: &TmpFile, path: &Path) -> bool {
    let compare = || -> io::Result<bool> {
        let other = crate::layout::open_read(path)?;
        if other.metadata()?.len() != file.file().metadata()?.len() {
            return Ok(false);
        }
        let mut other = io::BufReader::with_capacity(64 << 10, other);
        let (mut at, mut ours, mut theirs) = (0, vec![0; 64 << 10], vec![0; 64 << 10]);
        loop {
            let n = std::os::unix::fs::FileExt::read_at(file.file(), &mut ours, at)?;
            if n == 0 {
                return Ok(true);
            }
            other.read_exact(&mut theirs[..n])?;
            if ours[..n] != theirs[..n] {
                return Ok(false);
            }
            at += n as u64;
        }
    };
    compare().unwrap_or(false)
}
