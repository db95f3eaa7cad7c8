//! Removes what no name and no open index refers to.
//!
//! Runs under the store's exclusive lock, so no import and no change of names is under way. An index that somebody has
//! open is locked by them and counts like a named one, so a mounted image stays readable after its name is gone. Indexes
//! go before objects, so a crash in between leaves objects that nothing refers to, in whatever part: the next run
//! removes them.
//!
//! It does not know spaces: whoever runs the cache drops those of the objects in the report.

use crate::index::{self, Summary};
use crate::layout::{self, Part, digest_name};
use crate::lock::{self, Mode};
use crate::{ObjectId, Store, StoreError, chunks, refs, tmp};
use format::Digest;
use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::time::Duration;

/// How to collect.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GcOptions {
    /// How long to wait for running imports.
    pub wait: Duration,
}

impl Default for GcOptions {
    fn default() -> Self {
        GcOptions { wait: Duration::from_secs(10) }
    }
}

/// What was removed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GcReport {
    /// Indexes removed.
    pub indexes: Vec<Digest>,
    /// Objects removed: their spaces can go too.
    pub objects: Vec<ObjectId>,
    /// Leftovers of killed imports removed.
    pub leftovers: u64,
    /// Bytes freed.
    pub bytes: u64,
    /// Indexes that no name refers to but that somebody has open: they and their objects stayed.
    pub in_use: Vec<Digest>,
}

impl Store {
    /// Removes what no name and no open index refers to.
    ///
    /// # Errors
    /// [`StoreError::Busy`] when an import runs longer than the wait; a ref that cannot be read, since nobody knows
    /// what it needs; a read-only disk.
    pub fn gc(&self, options: &GcOptions) -> Result<GcReport, StoreError> {
        let who = "an import, an fsck or another gc is running";
        let _lock = lock::wait_path(&self.layout.lock(), Mode::Exclusive, options.wait, who)?;
        let mut report = GcReport::default();
        (report.leftovers, report.bytes) = tmp::sweep(&self.layout, self.disk.as_ref())?;

        let mut indexes: BTreeSet<Digest> = BTreeSet::new();
        let mut objects: BTreeSet<ObjectId> = BTreeSet::new();
        for name in refs::names(&self.layout.refs())? {
            let record = self.image(&name)?;
            indexes.insert(record.index);
            objects.extend(record.objects);
            if let Ok(summary) = self.summary(&record.index) {
                objects.extend(summary.objects);
            }
        }
        self.remove_indexes(&indexes, &mut objects, &mut report)?;
        self.remove_objects(&objects, &mut report)?;
        self.purge_merged()?;
        Ok(report)
    }

    pub(crate) fn summary(&self, digest: &Digest) -> Result<Summary, StoreError> {
        let path = self.layout.index(digest);
        let file = layout::open_read(&path).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => StoreError::Missing { what: "index", digest: *digest, path: path.clone() },
            _ => StoreError::io("open", &path, e),
        })?;
        index::read(&file, &path)
    }

    /// Removes indexes that are not in `named`; what those need that are open is added to `objects`.
    fn remove_indexes(
        &self,
        named: &BTreeSet<Digest>,
        objects: &mut BTreeSet<ObjectId>,
        report: &mut GcReport,
    ) -> Result<(), StoreError> {
        let dir = self.layout.indexes();
        for digest in layout::list(&dir)?.iter().filter_map(|name| digest_name(name)) {
            if named.contains(&digest) {
                continue;
            }
            let path = self.layout.index(&digest);
            // Held until it is removed: whoever opens it now waits and then finds it gone.
            match lock::try_path(&path, Mode::Exclusive).map_err(|e| StoreError::io("lock", &path, e))? {
                Some(_alone) => {
                    report.bytes += self.unlink(&path)?;
                    report.indexes.push(digest);
                }
                None => {
                    objects.extend(self.summary(&digest)?.objects);
                    report.in_use.push(digest);
                }
            }
        }
        self.sync_removed(&dir, !report.indexes.is_empty())
    }

    fn remove_objects(&self, needed: &BTreeSet<ObjectId>, report: &mut GcReport) -> Result<(), StoreError> {
        let dir = self.layout.objects();
        let dead: BTreeSet<ObjectId> = layout::list(&dir)?
            .iter()
            .filter_map(|name| Part::parse(name))
            .map(|(id, _)| id)
            .filter(|id| !needed.contains(id))
            .collect();
        for id in &dead {
            for part in Part::ALL {
                report.bytes += self.unlink(&self.layout.object(id, part))?;
            }
        }
        self.sync_removed(&dir, !dead.is_empty())?;
        report.objects.extend(dead);
        Ok(())
    }

    /// Removes a file if it is there; returns its bytes.
    fn unlink(&self, path: &Path) -> Result<u64, StoreError> {
        match std::fs::symlink_metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(0),
            Err(e) => Err(StoreError::io("look at", path, e)),
            Ok(meta) => {
                self.disk.remove(path).map_err(|e| StoreError::io("remove", path, e))?;
                Ok(meta.len())
            }
        }
    }

    fn sync_removed(&self, dir: &Path, any: bool) -> Result<(), StoreError> {
        if any { self.disk.sync_dir(dir).map_err(|e| StoreError::io("sync", dir, e)) } else { Ok(()) }
    }

    /// Takes removed objects out of the merged chunk table, or removes the table if there is no room to write it anew.
    fn purge_merged(&self) -> Result<(), StoreError> {
        let rebuilt =
            tmp::TmpDir::make(&self.layout, &self.disk).and_then(|dir| chunks::cover(&self.layout, &dir, true));
        match rebuilt {
            Err(StoreError::Full { .. }) => self.unlink(&self.layout.merged()).map(|_| ()),
            other => other,
        }
    }
}
