//! Objects, packs, spaces and the node cache.
//!
//! A [`Store`] is a root directory: names of images (`refs`), their compiled indexes, the objects that hold their
//! content, and the node's cache of unpacked spaces. Imports write packs into it ([`ImportSession`], [`PackWriter`]);
//! an [`ObjectStore`] gives byte ranges of objects, on this machine or elsewhere; the [`cache`] turns them into verified
//! spaces, which front ends read.
//!
//! Invariants: an image that has a name has all its files, durable and complete; nothing in the store is ever changed
//! in place; no content leaves this crate that was not verified against an object map. A crash at any moment leaves
//! every name with what it had before or after. Everything durable goes through the [`disk`] seam.
//!
//! It knows no trees, no mounts, no network and no command line.

#![forbid(unsafe_code)]

pub mod cache;
mod chunks;
pub mod conformance;
mod dedup;
pub mod disk;
mod error;
pub mod fault;
pub mod fetch;
mod fsck;
mod gc;
mod index;
mod layout;
mod local;
mod lock;
pub mod object;
pub mod object_store;
mod pack;
pub mod presence;
mod refs;
mod session;
pub mod source;
pub mod space;
mod tmp;

pub use cache::{Cache, CacheOptions};
pub use chunks::ChunkRef;
pub use error::StoreError;
pub use fsck::{FsckOptions, FsckReport, Problem};
pub use gc::{GcOptions, GcReport};
pub use local::LocalStore;
pub use object::{FrameDecoder, FrameError, ObjectId, ObjectMap, Shared};
pub use object_store::{Class, Done, FetchError, LenDone, ObjectStore, ReadDone, ReadRequest, Request};
pub use pack::{PackOptions, PackStream, PackWriter, PackedObject};
pub use refs::{ImageName, ImageRecord};
pub use session::ImportSession;
pub use source::{BlockSource, Place, Presence, ReadError, Resolution, Segment, SpaceGuard};
pub use tmp::TmpFile;

use disk::{Disk, RealDisk};
use format::Digest;
use layout::{Layout, Part};
use lock::{Lock, Mode};
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

/// How long an import or a change of names waits for a running `gc` or `fsck`.
const LOCK_WAIT: Duration = Duration::from_secs(60);

/// A store: a root directory. Cheap to clone; every process that uses the root opens its own.
#[derive(Debug, Clone)]
pub struct Store {
    layout: Layout,
    disk: Arc<dyn Disk>,
    lock_wait: Duration,
}

/// What is known about a name: its record, or what is wrong with that.
pub type Listed = (ImageName, Result<ImageRecord, StoreError>);

impl Store {
    /// Opens the store at `root`, making it when there is none.
    ///
    /// # Errors
    /// A directory that holds something else or belongs to another user; a version that this code does not know.
    pub fn open(root: &Path) -> Result<Store, StoreError> {
        Store::open_on(root, Arc::new(RealDisk))
    }

    /// The same through a given seam.
    pub(crate) fn open_on(root: &Path, disk: Arc<dyn Disk>) -> Result<Store, StoreError> {
        // The process may change its directory later.
        let root = std::path::absolute(root).map_err(|e| StoreError::io("find", root, e))?;
        let layout = Layout::new(&root);
        layout::open(&layout, disk.as_ref())?;
        Ok(Store { layout, disk, lock_wait: LOCK_WAIT })
    }

    /// How long to wait for `gc` in other processes; a minute by default.
    pub fn set_lock_wait(&mut self, wait: Duration) {
        self.lock_wait = wait;
    }

    /// The root directory.
    pub fn root(&self) -> &Path {
        self.layout.root()
    }

    /// Where the node cache of this store lives.
    pub fn cache_dir(&self) -> PathBuf {
        self.layout.cache()
    }

    /// Where the packs are; for [`LocalStore`].
    pub fn objects_dir(&self) -> PathBuf {
        self.layout.objects()
    }

    /// Starts an import. Waits a bounded time for a running `gc`.
    ///
    /// # Errors
    /// [`StoreError::Busy`], a full or read-only disk.
    pub fn import(&self) -> Result<ImportSession, StoreError> {
        ImportSession::start(&self.layout, &self.disk, self.share()?)
    }

    fn share(&self) -> Result<Lock, StoreError> {
        lock::wait_path(&self.layout.lock(), Mode::Shared, self.lock_wait, "a gc is running")
    }

    /// What is known about an image.
    ///
    /// # Errors
    /// [`StoreError::NoImage`]; a damaged or too new record.
    pub fn image(&self, name: &ImageName) -> Result<ImageRecord, StoreError> {
        refs::read(&self.layout.refs(), name)
    }

    /// Every name, sorted, with its record or what is wrong with that.
    ///
    /// # Errors
    /// The directory cannot be read.
    pub fn images(&self) -> Result<Vec<Listed>, StoreError> {
        let names = refs::names(&self.layout.refs())?;
        let mut out: Vec<Listed> = names.into_iter().map(|n| (n.clone(), self.image(&n))).collect();
        // Removed since the directory was read.
        out.retain(|(_, record)| !matches!(record, Err(StoreError::NoImage { .. })));
        Ok(out)
    }

    /// Gives an image another name, replacing what has that.
    ///
    /// # Errors
    /// [`StoreError::NoImage`]; a full or read-only disk.
    pub fn tag(&self, from: &ImageName, to: &ImageName) -> Result<(), StoreError> {
        let _shared = self.share()?;
        let record = self.image(from)?;
        let dir = tmp::TmpDir::make(&self.layout, &self.disk)?;
        let mut file = dir.file("ref")?;
        file.write_all(&refs::encode(to, &record)?).map_err(|e| StoreError::io("write", file.path(), e))?;
        file.sync()?;
        file.rename(&self.layout.refs().join(to.file_name()))?;
        self.sync_refs()
    }

    /// Removes a name. `gc` frees what nothing refers to any more.
    ///
    /// # Errors
    /// [`StoreError::NoImage`]; a read-only disk.
    pub fn remove(&self, name: &ImageName) -> Result<(), StoreError> {
        let _shared = self.share()?;
        let path = self.layout.refs().join(name.file_name());
        self.disk.remove(&path).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => StoreError::NoImage { name: name.to_string() },
            _ => StoreError::io("remove", &path, e),
        })?;
        self.sync_refs()
    }

    fn sync_refs(&self) -> Result<(), StoreError> {
        let refs = self.layout.refs();
        self.disk.sync_dir(&refs).map_err(|e| StoreError::io("sync", &refs, e))
    }

    /// Opens an index. While the result lives, in any process, `gc` keeps the index and its objects.
    ///
    /// # Errors
    /// [`StoreError::Missing`].
    pub fn index_file(&self, digest: &Digest) -> Result<IndexFile, StoreError> {
        let path = self.layout.index(digest);
        let missing = || StoreError::Missing { what: "index", digest: *digest, path: path.clone() };
        let io = |op| {
            let path = path.clone();
            move |e: io::Error| StoreError::io(op, path, e)
        };
        let file = match layout::open_read(&path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(missing()),
            other => other.map_err(io("open"))?,
        };
        // Only a gc that is about to remove the file holds this exclusively, and not for long.
        file.lock_shared().map_err(io("lock"))?;
        if file.metadata().map_err(io("look at"))?.nlink() == 0 {
            return Err(missing());
        }
        Ok(IndexFile { file, path })
    }

    /// Whether the store holds an object, whole or not: its map is what names it.
    pub fn has_object(&self, id: &ObjectId) -> bool {
        self.layout.object(id, Part::Map).exists()
    }

    /// Opens and verifies an object map.
    ///
    /// # Errors
    /// [`StoreError::Missing`], or what is wrong with it.
    pub fn object_map(&self, id: &ObjectId) -> Result<ObjectMap, StoreError> {
        let path = self.layout.object(id, Part::Map);
        let map = layout::map(&path).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => StoreError::Missing { what: "object", digest: *id, path: path.clone() },
            _ => StoreError::io("open", &path, e),
        })?;
        ObjectMap::open(Arc::new(map), id).map_err(|e| StoreError::format(&path, e))
    }
}

/// An open index, kept from `gc` while this lives.
#[derive(Debug)]
pub struct IndexFile {
    file: File,
    path: PathBuf,
}

impl IndexFile {
    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its bytes, mapped. Keep the `IndexFile` as long as the image is in use: the mapping alone does not hold off `gc`.
    ///
    /// # Errors
    /// The file cannot be mapped.
    pub fn map(&self) -> Result<Shared, StoreError> {
        Ok(Arc::new(sys::Map::of(&self.file).map_err(|e| StoreError::io("map", &self.path, e))?))
    }
}

#[cfg(test)]
mod tests;
