//! `import`, `images`, `tag`, `rm`, `gc`, `inspect`, `fsck`.

use super::Context;
use super::args;
use super::output::{count, moment, size, span};
use super::progress::Line;
use crate::control::proto::{Reply, Request};
use crate::failure::{Failure, Kind};
use crate::reader;
use crate::source::open_index;
use import::{Options, Platform, Source};
use serde_json::{Value, json};
use std::io::Write;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use store::{Cache, FsckOptions, GcOptions, ImageName, ImageRecord, LocalStore, Store, StoreError};

fn record_json(name: &ImageName, record: &ImageRecord) -> Value {
    json!({
        "name": name.to_string(), "index": record.index.to_hex(), "identity": record.identity.to_hex(),
        "objects": record.objects.iter().map(|o| o.to_hex()).collect::<Vec<_>>(),
        "origin": record.origin, "created": record.created, "files": record.files, "names": record.names,
        "content_bytes": record.content_bytes, "packed_bytes": record.packed_bytes,
    })
}

/// `import`
pub fn import(context: &Context, args: &args::Import) -> anyhow::Result<()> {
    let source = Source::parse(&args.source).map_err(|e| Failure::usage(e.to_string()))?;
    let name = ImageName::parse(&args.name)?;
    let platform = match &args.platform {
        Some(text) => Platform::parse(text).ok_or_else(|| {
            Failure::usage(format!("--platform {text:?}: want OS/ARCH or OS/ARCH/VARIANT, as in linux/arm64/v8"))
        })?,
        None => Platform::from_rust(std::env::consts::OS, std::env::consts::ARCH),
    };
    let store = context.store()?;
    let line = Line::new(context.out.json, args.quiet);
    let mut options = Options::new(platform);
    options.include.clone_from(&args.include);
    options.exclude.clone_from(&args.exclude);
    options.skip_unreadable = args.skip_unreadable;
    options.progress = &line;
    options.limits.names = args.max_names;
    options.threads = match args.threads {
        Some(threads) => threads.into(),
        None => std::thread::available_parallelism().map_or(2, usize::from),
    };
    options.now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let began = Instant::now();
    let imported = import::import(&store, &source, &name, &options);
    line.finish();
    let imported = imported.map_err(|e| match &e {
        import::ImportError::Io { source, .. }
            if source.kind() == std::io::ErrorKind::PermissionDenied
                && args.source.as_encoded_bytes().starts_with(b"dir:") =>
        {
            let e = anyhow::Error::new(e);
            let said = crate::errors::message(&e);
            let advice = "import as root, or leave it out with --skip-unreadable or --exclude GLOB";
            anyhow::Error::new(Failure::new(crate::errors::kind_of(&e), format!("{said}; {advice}")))
        }
        _ => e.into(),
    })?;
    let (record, report) = (&imported.record, &imported.report);
    if args.quiet {
        return Ok(());
    }
    if context.out.json {
        let mut value = record_json(&name, record);
        value["event"] = json!("imported");
        value["seconds"] = json!(began.elapsed().as_secs_f64());
        value["report"] = json!({
            "names": report.names, "files": report.files, "content_bytes": report.content_bytes,
            "source_bytes": report.source_bytes, "duplicate_bytes": report.duplicate_bytes,
            "stored_bytes": report.stored_bytes, "added_bytes": report.added_bytes,
            "hidden_bytes": report.hidden_bytes, "layers": report.layers, "dropped_xattrs": report.dropped_xattrs,
            "mount_points": report.mount_points, "vanished": report.vanished, "unreadable": report.unreadable,
            "idle_whiteouts": report.idle_whiteouts, "ignored_entries": report.ignored_entries,
        });
        context.out.object(&value)?;
        return Ok(());
    }
    let mut left_out = String::new();
    for (bytes, what) in
        [(report.duplicate_bytes, "of it found there"), (report.hidden_bytes, "hidden by layers above")]
    {
        if bytes > 0 {
            left_out += &format!(", {} {what}", size(bytes));
        }
    }
    context.out.line(format!(
        "{name}: {}, {}, {} of content{left_out}; the store grew by {}; {}",
        count(report.names, "name"),
        count(report.files, "file"),
        size(report.content_bytes),
        size(report.added_bytes),
        span(began.elapsed())
    ))?;
    for (count, what) in [
        (report.unreadable, "files or directories may not be read and are left out; import as root to have them"),
        (report.dropped_xattrs, "extended attributes may not be read or are of a kind that images do not keep"),
        (report.vanished, "names were gone when their turn came"),
        (report.mount_points, "mount points are empty directories or files in the image"),
    ] {
        if count > 0 {
            context.out.note(format!("note: {count} {what}"));
        }
    }
    Ok(())
}

/// `images`
pub fn list(context: &Context) -> anyhow::Result<()> {
    let mut rows = Vec::new();
    let mut damaged = 0;
    for (name, record) in context.store()?.images()? {
        match record {
            Ok(record) if context.out.json => context.out.object(&record_json(&name, &record))?,
            Ok(record) => rows.push(vec![
                name.to_string(),
                record.identity.to_hex()[..12].to_owned(),
                moment(record.created),
                record.names.to_string(),
                size(record.content_bytes),
                record.origin.clone(),
            ]),
            Err(e) => {
                damaged += 1;
                if context.out.json {
                    context.out.object(&json!({"name": name.to_string(), "error": e.to_string()}))?;
                } else {
                    rows.push(vec![
                        name.to_string(),
                        "damaged".into(),
                        String::new(),
                        String::new(),
                        String::new(),
                        e.to_string(),
                    ]);
                }
            }
        }
    }
    if !context.out.json {
        context.out.table(&["NAME", "IDENTITY", "CREATED", "NAMES", "CONTENT", "ORIGIN"], &rows)?;
        if rows.is_empty() {
            context.out.note("no images; `lazyroot import SOURCE NAME` makes one");
        }
    }
    if damaged > 0 {
        return Err(Failure::corrupt(format!("{damaged} records are damaged; import those images again")).into());
    }
    Ok(())
}

/// `tag`
pub fn tag(context: &Context, name: &str, new: &str) -> anyhow::Result<()> {
    let store = context.store()?;
    Ok(store.tag(&ImageName::parse(name)?, &ImageName::parse(new)?)?)
}

/// `rm`
pub fn rm(context: &Context, args: &args::Rm) -> anyhow::Result<()> {
    let store = context.store()?;
    let mut first_error = None;
    for name in &args.names {
        let removed = if args.upper {
            super::uppers::remove(context, name)
        } else if args.container {
            super::containers::remove(context, name, args.force)
        } else {
            rm_one(context, &store, name, args.force)
        };
        match removed {
            Ok(what) => {
                context.out.either(&json!({"removed": name, "what": what}), format!("removed {what} {name}"))?
            }
            Err(e) if args.names.len() > 1 => {
                context.out.note(format!("lazyroot: {}", crate::errors::message(&e)));
                first_error.get_or_insert(e);
            }
            Err(e) => return Err(e),
        }
    }
    first_error.map_or(Ok(()), Err)
}

/// An image by that name, or else a container.
fn rm_one(context: &Context, store: &store::Store, name: &str, force: bool) -> anyhow::Result<&'static str> {
    let image = ImageName::parse(name).ok().filter(|n| store.image(n).is_ok());
    let container = super::containers::exists(context, name);
    match image {
        Some(image) if container => Err(Failure::usage(format!(
            "{name} is an image and a container; `rm --container {name}` removes the container, `rm {image}` the image"
        ))
        .into()),
        Some(image) => {
            store.remove(&image)?;
            Ok("image")
        }
        None if container => super::containers::remove(context, name, force),
        None => {
            // Also removes a record that cannot be read.
            match store.remove(&ImageName::parse(name)?) {
                Err(StoreError::NoImage { .. }) => Err(Failure::not_found(format!(
                    "no image and no container named {name}; `lazyroot images` and `lazyroot ps -a` list what there is"
                ))
                .into()),
                removed => Ok(removed.map(|()| "image")?),
            }
        }
    }
}

/// `gc`
pub fn gc(context: &Context) -> anyhow::Result<()> {
    let store = context.store()?;
    super::containers::tidy(context)?;
    let report = store.gc(&GcOptions::default())?;
    let pruned = prune(context, &store)?;
    let hex = |list: &[format::Digest]| list.iter().map(|d| d.to_hex()).collect::<Vec<_>>();
    let value = json!({
        "indexes": hex(&report.indexes), "objects": hex(&report.objects), "leftovers": report.leftovers,
        "bytes": report.bytes, "cache_bytes": pruned, "in_use": hex(&report.in_use),
    });
    let mut text = format!(
        "removed {}, {} and {} of imports: {}",
        count(report.indexes.len() as u64, "index"),
        count(report.objects.len() as u64, "object"),
        count(report.leftovers, "leftover"),
        size(report.bytes)
    );
    if pruned > 0 {
        text += &format!("; {} of the cache", size(pruned));
    }
    if !report.in_use.is_empty() {
        text += &format!("; {} images without a name are still in use and stay", report.in_use.len());
    }
    context.out.either(&value, text)?;
    Ok(())
}

/// Frees what the node cache holds of objects that are gone: through the daemon where one runs, for it has the cache open.
fn prune(context: &Context, store: &Store) -> anyhow::Result<u64> {
    if let Some(mut daemon) = context.running_daemon()? {
        return match daemon.ask(&Request::Prune)? {
            Reply::Pruned { bytes } => Ok(bytes),
            other => anyhow::bail!("the daemon answered prune with {other:?}"),
        };
    }
    let objects = Arc::new(LocalStore::new(&store.objects_dir(), 1)?);
    match Cache::open(&store.cache_dir(), objects, store::cache::CacheOptions::default()) {
        Ok(cache) => Ok(cache.prune(&|id| store.has_object(id))?),
        // A daemon that is just starting or ending; the next gc finds it.
        Err(StoreError::Busy { .. }) => Ok(0),
        Err(e) => Err(e.into()),
    }
}

/// `inspect`
pub fn inspect(context: &Context, name: &str) -> anyhow::Result<()> {
    let store = context.store()?;
    let (name, record) = reader::find(&store, name)?;
    let index = open_index(&store.index_file(&record.index)?, &record.index)?;
    let mut value = record_json(&name, &record);
    let header = index.header();
    value["index_bytes"] = json!(header.total_len.get());
    value["inodes"] = json!(header.inode_count.get());
    value["data_blocks"] = json!(header.data_blocks.get());
    value["config"] = record.config.clone();
    if context.out.json {
        context.out.object(&value)?;
    } else {
        context.out.line(serde_json::to_string_pretty(&value)?)?;
    }
    Ok(())
}

/// `fsck`
pub fn fsck(context: &Context, names: &[String]) -> anyhow::Result<()> {
    let store = context.store()?;
    let mut options = FsckOptions::default();
    options.images = names.iter().map(|n| ImageName::parse(n)).collect::<Result<_, _>>()?;
    for name in &options.images {
        store.image(name)?;
    }
    let report = store.fsck(&options)?;
    let mut problems: Vec<(String, String, bool, Vec<String>)> = report
        .problems
        .iter()
        .map(|p| {
            let images = p.images.iter().map(ToString::to_string).collect();
            (p.path.display().to_string(), p.what.clone(), p.serious, images)
        })
        .collect();
    // The store knows digests; whether an index is a sound tree is seen here.
    for (name, record) in store.images()? {
        if !options.images.is_empty() && !options.images.contains(&name) {
            continue;
        }
        let Ok(record) = record else { continue };
        let checked = store
            .index_file(&record.index)
            .map_err(anyhow::Error::from)
            .and_then(|file| Ok(open_index(&file, &record.index)?.check()?));
        if let Err(e) = checked {
            let place = format!("index {} of {name}", record.index);
            problems.push((place, crate::errors::message(&e), true, vec![name.to_string()]));
        }
    }
    for (place, what, serious, images) in &problems {
        let value = json!({"event": "problem", "path": place, "what": what, "serious": serious, "images": images});
        let weight = if *serious { "damaged" } else { "minor" };
        let affects = if images.is_empty() { String::new() } else { format!("; affects {}", images.join(", ")) };
        context.out.either(&value, format!("{weight}: {place}: {what}{affects}"))?;
    }
    let serious = problems.iter().filter(|(_, _, s, _)| *s).count();
    context.out.either(
        &json!({"event": "done", "images": report.images, "objects": report.objects, "frames": report.frames,
            "bytes": report.bytes, "problems": problems.len(), "serious": serious}),
        format!(
            "checked {}, {}, {} ({}): {}",
            count(report.images, "image"),
            count(report.objects, "object"),
            count(report.frames, "frame"),
            size(report.bytes),
            count(problems.len() as u64, "problem")
        ),
    )?;
    std::io::stdout().flush()?;
    if serious > 0 {
        return Err(Failure::new(
            Kind::Corrupt,
            format!("{serious} problems make images unreadable in part; import those images again"),
        )
        .into());
    }
    Ok(())
}
