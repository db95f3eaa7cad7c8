//! Checks everything that the store holds, bit by bit, and takes damaged objects out of deduplication.
//!
//! An object whose map or pack is damaged loses its chunk table, which is what makes it one to deduplicate against: so
//! importing its content again stores that anew instead of pointing at the damage. Nothing else is changed.
//!
//! Under the store's shared lock: imports may go on, `gc` waits. One that publishes the same object meanwhile may lose
//! the new chunk table, which costs space later, never content. One that began before may have found chunks in the
//! damaged object already; the next check names its image. What is damaged is collected, not thrown: one bad file
//! must not hide another. Damage to an index or an object that no name refers to hurts nobody and is not serious: a
//! crash may leave such ones in part. Whether an index is a sound tree is for whoever knows trees; here its digests are checked.

use crate::index::Summary;
use crate::layout::{self, Part, digest_name};
use crate::{FrameDecoder, ImageName, ObjectId, ObjectMap, Store, StoreError};
use format::chunks::View;
use format::{Digest, FormatError};
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// What to check.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FsckOptions {
    /// Only these images' indexes and objects; empty checks everything.
    pub images: Vec<ImageName>,
}

impl FsckOptions {
    /// Checks only these images.
    pub fn images(images: Vec<ImageName>) -> FsckOptions {
        FsckOptions { images }
    }
}

/// Something wrong.
#[derive(Debug)]
#[non_exhaustive]
pub struct Problem {
    /// The file.
    pub path: PathBuf,
    /// What is wrong with it, for a user.
    pub what: String,
    /// Whether an image can no longer be read in full. Otherwise only deduplication suffers.
    pub serious: bool,
    /// The images that it affects, sorted; also those that were not asked for.
    pub images: Vec<ImageName>,
}

/// What was found.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct FsckReport {
    /// Everything wrong.
    pub problems: Vec<Problem>,
    /// Names checked.
    pub images: u64,
    /// Indexes checked.
    pub indexes: u64,
    /// Objects checked.
    pub objects: u64,
    /// Frames decompressed and verified.
    pub frames: u64,
    /// Stored bytes read.
    pub bytes: u64,
    /// Damaged objects that deduplication does not use any more: importing their content again stores it anew.
    pub distrusted: Vec<ObjectId>,
}

impl FsckReport {
    fn add(&mut self, path: &Path, what: impl ToString, serious: bool) {
        self.problems.push(Problem { path: path.into(), what: what.to_string(), serious, images: Vec::new() });
    }

    /// Says of the problems from the `from`th on whom they affect.
    fn affects(&mut self, from: usize, images: Option<&BTreeSet<ImageName>>) {
        for problem in self.problems.iter_mut().skip(from) {
            problem.images = images.into_iter().flatten().cloned().collect();
        }
    }
}

/// Which images use an index or an object.
type Users = BTreeMap<Digest, BTreeSet<ImageName>>;

impl Store {
    /// Checks refs, the digests of indexes, object maps, every frame of every pack, chunk tables. Deduplication does not
    /// use objects that are damaged from then on.
    ///
    /// # Errors
    /// Only when checking itself is impossible; what is wrong is in the report.
    pub fn fsck(&self, options: &FsckOptions) -> Result<FsckReport, StoreError> {
        let _shared = self.share()?;
        let mut report = FsckReport::default();
        let mut indexes: BTreeSet<Digest> = BTreeSet::new();
        let mut objects: BTreeSet<ObjectId> = BTreeSet::new();
        let mut users = Users::new();
        for (name, record) in self.images()? {
            let asked = options.images.is_empty() || options.images.contains(&name);
            report.images += u64::from(asked);
            match record {
                Ok(record) => {
                    for digest in record.objects.iter().chain([&record.index]) {
                        users.entry(*digest).or_default().insert(name.clone());
                    }
                    if asked {
                        indexes.insert(record.index);
                        objects.extend(record.objects);
                    }
                }
                Err(e) if asked => {
                    let from = report.problems.len();
                    report.add(&self.layout.refs().join(name.file_name()), e, true);
                    report.affects(from, Some(&BTreeSet::from([name])));
                }
                Err(_) => {}
            }
        }
        for name in &options.images {
            // One that does not exist is the caller's mistake, not the store's damage.
            self.image(name)
                .map(drop)
                .or_else(|e| if matches!(e, StoreError::NoImage { .. }) { Err(e) } else { Ok(()) })?;
        }
        for digest in &indexes {
            report.indexes += 1;
            let from = report.problems.len();
            let owners = users.get(digest).cloned().unwrap_or_default();
            match self.check_index(digest, &mut report) {
                Ok(summary) => {
                    for id in &summary.objects {
                        users.entry(*id).or_default().extend(owners.iter().cloned());
                    }
                    objects.extend(summary.objects);
                }
                Err(e) => report.add(&self.layout.index(digest), e, true),
            }
            report.affects(from, Some(&owners));
        }
        let mut decoder = FrameDecoder::new();
        let mut damaged: Vec<ObjectId> = Vec::new();
        for id in &objects {
            let from = report.problems.len();
            if self.check_object(id, &mut decoder, &mut report)? {
                damaged.push(*id);
            }
            report.affects(from, users.get(id));
        }
        if options.images.is_empty() {
            let known = report.problems.len();
            for digest in layout::list(&self.layout.indexes())?.iter().filter_map(|n| digest_name(n)) {
                if indexes.contains(&digest) {
                    continue;
                }
                report.indexes += 1;
                if let Err(e) = self.check_index(&digest, &mut report) {
                    report.add(&self.layout.index(&digest), e, true);
                }
            }
            let files = layout::list(&self.layout.objects())?;
            let unused: BTreeSet<ObjectId> = files
                .iter()
                .filter_map(|n| Part::parse(n))
                .map(|(id, _)| id)
                .filter(|id| !objects.contains(id))
                .collect();
            for id in &unused {
                // Without a map it is no object: what a crash left, or what an import is just publishing.
                if self.check_object(id, &mut decoder, &mut report)? && self.layout.object(id, Part::Map).exists() {
                    damaged.push(*id);
                }
            }
            for problem in &mut report.problems[known..] {
                problem.serious = false;
                problem.what.push_str("; no image needs it, `lazyroot gc` removes it");
            }
            self.check_table(&self.layout.merged(), false, &mut report);
        }
        for id in &damaged {
            match self.distrust(id) {
                Ok(()) => report.distrusted.push(*id),
                Err(e) => {
                    let from = report.problems.len();
                    report.add(&self.layout.object(id, Part::Chunks), format!("imports still share it: {e}"), false);
                    report.affects(from, users.get(id));
                }
            }
        }
        Ok(report)
    }

    /// Keeps later imports from finding chunks in an object, durably. Without its own table an object is not used,
    /// whatever the merged one says; that goes too if it covers the object, since its rows may hide those of others.
    fn distrust(&self, id: &ObjectId) -> Result<(), StoreError> {
        let remove = |path: &Path, dir: &Path| {
            match self.disk.remove(path) {
                // Perhaps by somebody whose removal is not on disk yet.
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(StoreError::io("remove", path, e)),
                _ => {}
            }
            self.disk.sync_dir(dir).map_err(|e| StoreError::io("sync", dir, e))
        };
        remove(&self.layout.object(id, Part::Chunks), &self.layout.objects())?;
        let merged = self.layout.merged();
        let covers = layout::map(&merged)
            .is_ok_and(|bytes| View::open(bytes.as_slice()).is_ok_and(|view| view.objects().contains(id)));
        if covers { remove(&merged, self.layout.root()) } else { Ok(()) }
    }

    /// Tells whether the object's map or pack is damaged.
    fn check_object(
        &self,
        id: &ObjectId,
        decoder: &mut FrameDecoder,
        report: &mut FsckReport,
    ) -> Result<bool, StoreError> {
        report.objects += 1;
        let from = report.problems.len();
        let map = match self.object_map(id) {
            Ok(map) => map,
            Err(e) => {
                report.add(&self.layout.object(id, Part::Map), e, true);
                return Ok(true);
            }
        };
        self.check_pack(&map, decoder, report)?;
        let damaged = report.problems.len() > from;
        // The table of a damaged object goes, or has gone when it was last checked.
        if !damaged {
            self.check_table(&self.layout.object(id, Part::Chunks), true, report);
        }
        Ok(damaged)
    }

    fn check_index(&self, digest: &Digest, report: &mut FsckReport) -> Result<Summary, StoreError> {
        let summary = self.summary(digest)?;
        let path = self.layout.index(digest);
        if summary.digest != *digest {
            let source = FormatError::Digest { what: "index", want: *digest, have: summary.digest };
            return Err(StoreError::format(path, source));
        }
        let map = layout::map(&path).map_err(|e| StoreError::io("map", &path, e))?;
        for (offset, len, want) in &summary.sections {
            let range = usize::try_from(*offset).ok().zip(usize::try_from(*len).ok());
            let bytes = range.and_then(|(at, len)| map.as_slice().get(at..)?.get(..len)).unwrap_or(&[]);
            let have = Digest::of(bytes);
            report.bytes += *len;
            if have != *want {
                let at = format!("the section at byte {offset} has digest {have}, should be {want}");
                report.add(&path, at, true);
            }
        }
        Ok(summary)
    }

    fn check_pack(
        &self,
        map: &ObjectMap,
        decoder: &mut FrameDecoder,
        report: &mut FsckReport,
    ) -> Result<(), StoreError> {
        let path = self.layout.object(&map.id(), Part::Pack);
        let pack = match layout::open_read(&path) {
            Ok(pack) => pack,
            Err(e) => {
                report.add(&path, e, true);
                return Ok(());
            }
        };
        let len = pack.metadata().map_err(|e| StoreError::io("look at", &path, e))?.len();
        if len != map.object_len() {
            report.add(&path, format!("{len} bytes long, should be {}", map.object_len()), true);
        }
        let (mut stored, mut content) = (Vec::new(), Vec::new());
        for (i, frame) in (0..).zip(map.frames()) {
            stored.resize(frame.stored_len.get() as usize, 0);
            let checked = match pack.read_exact_at(&mut stored, frame.offset.get()) {
                Ok(()) => decoder.decode(map, i, &stored, &mut content).map_err(|e| e.to_string()),
                Err(e) => Err(e.to_string()),
            };
            report.frames += 1;
            report.bytes += u64::from(frame.stored_len.get());
            if let Err(why) = checked {
                report.add(&path, format!("frame {i} at byte {}: {why}", frame.offset.get()), true);
            }
        }
        Ok(())
    }

    /// A chunk table only matters to deduplication; one that should be there and is not is worth a word.
    fn check_table(&self, path: &Path, expected: bool, report: &mut FsckReport) {
        let bytes = match layout::map(path) {
            Ok(bytes) => bytes,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound && !expected => return,
            Err(e) => return report.add(path, e, false),
        };
        let view = match View::open(bytes.as_slice()) {
            Ok(view) => view,
            Err(e) => return report.add(path, e, false),
        };
        // What a merged table says of objects that are gone does not matter.
        let maps: Vec<Option<ObjectMap>> = view.objects().iter().map(|id| self.object_map(id).ok()).collect();
        let mut bad = 0u64;
        let mut last = None;
        for row in view.rows() {
            let right = match maps.get(row.object.get() as usize) {
                Some(Some(map)) => map.chunk_at(row.block.get()).is_some(),
                Some(None) => true,
                None => false,
            };
            bad += u64::from(!(right && row.is_intact() && last < Some(row.digest)));
            last = Some(row.digest);
        }
        report.bytes += bytes.len() as u64;
        if bad > 0 {
            report.add(path, format!("{bad} of {} rows are damaged or out of order", view.rows().len()), false);
        }
    }
}
