//! Sources into images: directories, tar archives, OCI layouts and docker archives become an index and packs in
//! a store. `doc/semantics.md` says how each source is read.
//!
//! Everything happens in the calling process: sources are read as streams, decoded, hashed and packed by threads
//! that overlap, and the image appears by one rename at the end. Every byte that comes in is checked against what
//! its source promises (digest, diff_id, size), and everything that a hostile source could blow up has a limit in
//! [`Limits`].
//!
//! A failed or killed import leaves the store as it was. Errors name the source, the layer and the entry.
//!
//! This crate knows no front end, no daemon, no terminal, no clock and no environment: the caller passes the
//! time, the host's platform and a [`Progress`] in.

#![forbid(unsafe_code)]

mod archive;
mod blob;
mod blobs;
mod chunker;
mod context;
mod decode;
mod dir;
mod docker;
mod error;
mod glob;
mod hidden;
mod layer;
mod layers;
mod limits;
mod oci;
mod options;
mod source;
mod spool;
mod tar;

pub use error::ImportError;
pub use limits::Limits;
pub use options::{Counts, Imported, NoProgress, Options, Platform, Progress, Report};
pub use source::{Source, SourceError};

use blob::Promise;
use blobs::Blobs;
use context::Context;
use image::index::BuiltIndex;
use image::tree::{Scratch, Tree};
use layer::LayerSource;
use layers::TreeAndPack;
use serde_json::Value;
use std::io::BufWriter;
use std::path::Path;
use store::{ImageName, ImageRecord, ImportSession, PackOptions, PackWriter, Store, TmpFile};

#[doc(hidden)]
pub fn fuzz_archive(bytes: &[u8]) {
    layer::fuzz_archive(bytes);
}

/// Imports `source` into `store` under `name`, replacing an image of that name.
///
/// # Errors
/// Whatever is wrong with the source or the store; the store is then as it was.
pub fn import(
    store: &Store,
    source: &Source,
    name: &ImageName,
    options: &Options<'_>,
) -> Result<Imported, ImportError> {
    check_usage(source, options)?;
    let session = store.import()?;
    let mut pack_options = PackOptions::default();
    pack_options.workers = options.threads.max(1);
    let pack = session.pack(&pack_options)?;
    let (read, mut report) = {
        let context = Context::new(&session, &pack, options);
        let read = read(&context, source, store.root())?;
        let totals = context.totals();
        let mut report = read.report.clone();
        report.source_bytes = totals.source_bytes;
        report.duplicate_bytes = totals.found_bytes;
        report.dropped_xattrs = totals.dropped_xattrs;
        report.hidden_bytes = totals.hidden_bytes;
        (read, report)
    };
    let (record, index) = finish(&session, pack, read, source, options, &mut report)?;
    report.added_bytes = session.publish(name, &record, index)?;
    Ok(Imported { record, report })
}

fn check_usage(source: &Source, options: &Options<'_>) -> Result<(), ImportError> {
    let patterns = !options.include.is_empty() || !options.exclude.is_empty();
    if patterns && !matches!(source, Source::Dir(_)) {
        return Err(ImportError::Usage {
            what: "--include and --exclude choose files of a directory".into(),
            todo: "leave them out, or import with dir:".into(),
        });
    }
    Ok(())
}

/// Files whose digests are kept in memory (8 MiB).
const DIGESTS_IN_MEMORY: usize = 1 << 18;

/// Where the digests of more files are.
struct DigestFile(TmpFile);

impl Scratch for DigestFile {
    fn write_at(&mut self, bytes: &[u8], offset: u64) -> std::io::Result<()> {
        self.0.write_at(bytes, offset)
    }

    fn read_at(&mut self, out: &mut [u8], offset: u64) -> std::io::Result<()> {
        std::os::unix::fs::FileExt::read_exact_at(self.0.file(), out, offset)
    }
}

/// A source that was read.
struct Read {
    tree: TreeAndPack,
    config: Value,
    report: Report,
}

fn read<'a>(context: &'a Context<'a>, source: &Source, store: &Path) -> Result<Read, ImportError> {
    let names = context.options.limits.names;
    let memory = limits::TREE_BYTES.max(names as usize * limits::BYTES_PER_NAME);
    let mut tree = Tree::with_limits(image::tree::Limits { names, memory, ..Default::default() });
    tree.spill_digests(DIGESTS_IN_MEMORY, Box::new(DigestFile(context.session.tmp_file("digests")?)));
    let (layers, config) = match source {
        Source::Dir(path) => {
            let (tree, counts) = dir::import_dir(context, tree, path, store)?;
            let report = Report {
                mount_points: counts.mount_points,
                vanished: counts.vanished,
                unreadable: counts.unreadable,
                ..Report::default()
            };
            return Ok(Read { tree, config: Value::Null, report });
        }
        Source::Tar(path) => (vec![tar_file(context, path)?], Value::Null),
        Source::TarStdin => (vec![tar_layer("tar:-".into(), Box::new(|| Ok(Box::new(std::io::stdin()))))], Value::Null),
        Source::Oci { dir, tag } => {
            let blobs = Blobs::layout(dir)?;
            let image = oci::find(&blobs, tag.as_deref(), &context.options.platform, &context.options.limits)?;
            image_layers(context, &blobs, image)?
        }
        Source::DockerArchive { file, tag } => {
            let blobs = docker::open(context, file)?;
            let image = docker::find(context, &blobs, tag.as_deref())?;
            image_layers(context, &blobs, image)?
        }
    };
    let (tree, counts) = layers::import_layers(context, tree, &layers)?;
    let report = Report {
        layers: layers.len() as u64,
        idle_whiteouts: counts.idle_whiteouts,
        ignored_entries: counts.ignored,
        ..Report::default()
    };
    Ok(Read { tree, config, report })
}

/// A plain archive as the only layer.
fn tar_layer<'a>(place: String, open: layer::Open<'a>) -> LayerSource<'a> {
    LayerSource { place, promise: Promise { digest: None, size: None }, diff_id: None, open }
}

fn tar_file<'a>(context: &Context<'_>, path: &Path) -> Result<LayerSource<'a>, ImportError> {
    let place = format!("tar:{}", path.display());
    let file = docker::open_file(path, &place)?;
    if let Ok(meta) = file.metadata()
        && meta.is_file()
    {
        context.expect(meta.len());
    }
    let again = place.clone();
    let open = move || match file.try_clone() {
        Ok(file) => Ok(Box::new(file) as Box<dyn std::io::Read + Send>),
        Err(e) => Err(ImportError::io("open", &again, e)),
    };
    Ok(tar_layer(place, Box::new(open)))
}

/// The layers of a described image, each there.
fn image_layers<'a>(
    context: &Context<'_>,
    blobs: &Blobs,
    image: oci::Image,
) -> Result<(Vec<LayerSource<'a>>, Value), ImportError> {
    let mut total = 0;
    let mut seen = std::collections::HashSet::new();
    let mut layers = Vec::with_capacity(image.layers.len());
    for layer in image.layers {
        let Some(file) = blobs.find(&layer.name)? else {
            let what = "its blob is missing; copy the image again (urls in descriptors are never followed)".into();
            return Err(ImportError::NotFound { place: layer.place, what });
        };
        if seen.insert(layer.name) {
            total += file.len();
        }
        let open: layer::Open<'a> = Box::new(move || Ok(Box::new(file.clone())));
        layers.push(LayerSource { place: layer.place, promise: layer.promise, diff_id: Some(layer.diff_id), open });
    }
    context.expect(total);
    Ok((layers, image.config))
}

/// Everything is read: names the pack, writes the index and the record.
fn finish(
    session: &ImportSession,
    pack: PackWriter,
    read: Read,
    source: &Source,
    options: &Options<'_>,
    report: &mut Report,
) -> Result<(ImageRecord, TmpFile), ImportError> {
    let TreeAndPack { mut tree, pack: ordinal } = read.tree;
    if let Some(packed) = pack.finish()? {
        tree.name_object(ordinal, packed.id, packed.space_blocks);
        report.stored_bytes = packed.stored_bytes;
        report.duplicate_bytes += packed.duplicate_bytes;
    }
    let mut out = BufWriter::with_capacity(1 << 20, session.tmp_file("index")?);
    report.files = tree.file_count();
    let built: BuiltIndex = image::index::build_from(tree, &mut out)?;
    let index = out.into_inner().map_err(|e| ImportError::io("write", "the index", e.into_error()))?;
    report.names = u64::from(built.name_count);
    report.content_bytes = built.content_bytes;
    let record = ImageRecord {
        index: built.digest,
        identity: built.identity,
        objects: built.objects,
        config: read.config,
        origin: source.to_string(),
        created: options.now,
        files: report.files,
        names: report.names,
        content_bytes: report.content_bytes,
        packed_bytes: report.stored_bytes,
    };
    Ok((record, index))
}
