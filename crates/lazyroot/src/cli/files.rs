//! `ls`, `cat`, `find`, `diff`, `export`: from index and objects, without mounting anything.

use super::Context;
use super::args::{self, ExportFormat, FileType};
use super::output::{moment, size};
use crate::failure::Failure;
use crate::hostsnap;
use crate::paths::{self, Last, glob, show};
use crate::reader::ImageReader;
use anyhow::Context as _;
use image::erofs::{Export, Options, Plan, Shape};
use image::index::{Index, InodeKind, InodeView};
use image::snapshot::{RecordKind, Snapshot};
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

fn type_of(kind: InodeKind) -> (char, &'static str) {
    match kind {
        InodeKind::File { .. } => ('-', "file"),
        InodeKind::Dir { .. } => ('d', "directory"),
        InodeKind::Symlink { .. } => ('l', "symlink"),
        InodeKind::Char { .. } => ('c', "char"),
        InodeKind::Block { .. } => ('b', "block"),
        InodeKind::Fifo => ('p', "fifo"),
        InodeKind::Socket => ('s', "socket"),
    }
}

/// `rwxr-xr-x`, with the set-id and sticky bits in their places.
fn permissions(mode: u16) -> String {
    let mut text = String::with_capacity(9);
    for (shift, special, sign) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (bits & 1 != 0, mode & special != 0) {
            (true, true) => sign,
            (false, true) => sign.to_ascii_uppercase(),
            (true, false) => 'x',
            (false, false) => '-',
        });
    }
    text
}

fn entry_json(index: &Index, path: &[u8], inode: &InodeView) -> anyhow::Result<Value> {
    let mut value = json!({
        "path": String::from_utf8_lossy(path), "type": type_of(inode.kind).1, "mode": format!("{:04o}", inode.permissions()),
        "uid": inode.uid, "gid": inode.gid, "nlink": inode.nlink, "size": inode.size(), "mtime": inode.mtime_sec,
        "mtime_nsec": inode.mtime_nsec, "inode": inode.ino,
    });
    match inode.kind {
        InodeKind::Symlink { .. } => value["target"] = json!(String::from_utf8_lossy(index.link_target(inode.ino)?)),
        InodeKind::Char { major, minor } | InodeKind::Block { major, minor } => {
            value["device"] = json!(format!("{major}:{minor}"))
        }
        _ => {}
    }
    let mut xattrs = serde_json::Map::new();
    for xattr in index.xattrs(inode.xattrs)? {
        let (name, data) = xattr?;
        xattrs.insert(String::from_utf8_lossy(name).into_owned(), json!(data.escape_ascii().to_string()));
    }
    if !xattrs.is_empty() {
        value["xattrs"] = Value::Object(xattrs);
    }
    Ok(value)
}

/// `ls`
pub fn ls(context: &Context, args: &args::Ls) -> anyhow::Result<()> {
    let store = context.store()?;
    let reader = ImageReader::open(&store, &args.name)?;
    let index = reader.index();
    let last = if args.long { Last::Keep } else { Last::Follow };
    let at = paths::find(index, &args.name, &args.path, last)?;
    let mut shown: Vec<(Vec<u8>, InodeView)> = Vec::new();
    if index.inode(at)?.is_dir() {
        for entry in index.entries(at)? {
            let entry = entry?;
            shown.push((entry.name.to_vec(), index.inode(entry.ino)?));
        }
    } else {
        use std::os::unix::ffi::OsStrExt;
        shown.push((args.path.as_os_str().as_bytes().to_vec(), index.inode(at)?));
    }
    if context.out.json {
        for (name, inode) in &shown {
            context.out.object(&entry_json(index, name, inode)?)?;
        }
        return Ok(());
    }
    let mut out = BufWriter::new(std::io::stdout().lock());
    for (name, inode) in &shown {
        if !args.long {
            writeln!(out, "{}", show(name))?;
            continue;
        }
        let amount = match inode.kind {
            InodeKind::Char { major, minor } | InodeKind::Block { major, minor } => format!("{major},{minor}"),
            _ => inode.size().to_string(),
        };
        let time =
            u64::try_from(inode.mtime_sec).map_or_else(|_| format!("{} s before 1970", -inode.mtime_sec), moment);
        let target = match inode.kind {
            InodeKind::Symlink { .. } => format!(" -> {}", show(index.link_target(inode.ino)?)),
            _ => String::new(),
        };
        writeln!(
            out,
            "{}{} {:>3} {:>5} {:>5} {amount:>10} {time} {}{target}",
            type_of(inode.kind).0,
            permissions(inode.permissions()),
            inode.nlink,
            inode.uid,
            inode.gid,
            show(name)
        )?;
    }
    out.flush()?;
    Ok(())
}

/// `cat`
pub fn cat(context: &Context, name: &str, wanted: &[PathBuf]) -> anyhow::Result<()> {
    let store = context.store()?;
    let mut reader = ImageReader::open(&store, name)?;
    let mut out = BufWriter::with_capacity(64 << 10, std::io::stdout().lock());
    for path in wanted {
        let ino = paths::find(reader.index(), name, path, Last::Follow)?;
        match reader.index().inode(ino)?.kind {
            InodeKind::File { .. } => {}
            kind => {
                let what = type_of(kind).1;
                return Err(Failure::usage(format!("{name}: {} is a {what}, not a file", path.display())).into());
            }
        }
        reader.copy(ino, &mut out).with_context(|| format!("{name}: {}", path.display()))?;
    }
    out.flush()?;
    Ok(())
}

/// `find`
pub fn find(context: &Context, args: &args::Find) -> anyhow::Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let store = context.store()?;
    let reader = ImageReader::open(&store, &args.name)?;
    let index = reader.index();
    let start = paths::find(index, &args.name, &args.path, Last::Keep)?;
    let base = args.path.as_os_str().as_bytes();
    let base = if base == b"/" { &b""[..] } else { base.strip_suffix(b"/").unwrap_or(base) };
    let mut out = BufWriter::new(std::io::stdout().lock());
    let mut stack = vec![(base.to_vec(), start, 0u32)];
    while let Some((path, ino, depth)) = stack.pop() {
        let inode = index.inode(ino)?;
        let shown: &[u8] = if path.is_empty() { b"/" } else { &path };
        let name = path.rsplit(|b| *b == b'/').next().unwrap_or(b"");
        let wanted = args.kind.is_none_or(|k| is_type(k, inode.kind))
            && args.pattern.as_ref().is_none_or(|p| glob(p.as_bytes(), if name.is_empty() { b"/" } else { name }));
        if wanted {
            if context.out.json {
                serde_json::to_writer(&mut out, &entry_json(index, shown, &inode)?)?;
                out.write_all(b"\n")?;
            } else {
                writeln!(out, "{}", show(shown))?;
            }
        }
        if inode.is_dir() {
            anyhow::ensure!(depth <= format::index::MAX_DEPTH, "{}: deeper than an image can be", show(shown));
            let from = stack.len();
            for entry in index.entries(ino)? {
                let entry = entry?;
                let mut below = path.clone();
                below.push(b'/');
                below.extend_from_slice(entry.name);
                stack.push((below, entry.ino, depth + 1));
            }
            stack[from..].reverse();
        }
    }
    out.flush()?;
    Ok(())
}

fn is_type(wanted: FileType, kind: InodeKind) -> bool {
    matches!(
        (wanted, kind),
        (FileType::File, InodeKind::File { .. })
            | (FileType::Dir, InodeKind::Dir { .. })
            | (FileType::Link, InodeKind::Symlink { .. })
            | (FileType::Block, InodeKind::Block { .. })
            | (FileType::Char, InodeKind::Char { .. })
            | (FileType::Fifo, InodeKind::Fifo)
            | (FileType::Socket, InodeKind::Socket)
    )
}

/// What a path of one side of a diff is read from.
enum Side {
    Image(Box<ImageReader>),
    Dir(PathBuf),
}

impl Side {
    fn snapshot(&self) -> anyhow::Result<Snapshot> {
        match self {
            Side::Image(reader) => Ok(Snapshot::from_index(reader.index(), |_, _| Ok(None))?),
            Side::Dir(path) => hostsnap::snapshot(path, false),
        }
    }

    fn hash(&mut self, path: &[u8]) -> anyhow::Result<format::Digest> {
        use std::os::unix::ffi::OsStrExt;
        match self {
            Side::Image(reader) => {
                let ino = reader.index().resolve(path)?.with_context(|| format!("no {} in the image", show(path)))?;
                reader.hash(ino)
            }
            Side::Dir(dir) => {
                let relative = path.strip_prefix(b"/").unwrap_or(path);
                hostsnap::hash_file(&dir.join(std::ffi::OsStr::from_bytes(relative)))
            }
        }
    }

    /// Whether a file lies in the same blocks of the same objects on both sides: then it is not read.
    fn same_place(&self, other: &Side, path: &[u8]) -> anyhow::Result<bool> {
        let (Side::Image(a), Side::Image(b)) = (self, other) else { return Ok(false) };
        let runs = |index: &Index| -> anyhow::Result<Vec<(u32, u32, format::Digest, u32)>> {
            let Some(ino) = index.resolve(path)? else { return Ok(Vec::new()) };
            index
                .extents(ino)?
                .map(|e| {
                    let e = e?;
                    Ok((e.file_block, e.count, index.object(e.object)?.0, e.space_block))
                })
                .collect()
        };
        Ok(runs(a.index())? == runs(b.index())?)
    }
}

/// `diff`
pub fn diff(context: &Context, args: &args::Diff) -> anyhow::Result<()> {
    let store = context.store()?;
    let open = |text: &str| -> anyhow::Result<Side> {
        let named = text.strip_prefix("dir:");
        let text = named.unwrap_or(text);
        let path = Path::new(text);
        // An image's name may contain slashes, too: a directory is what looks like a path.
        let like_path = ["/", "./", "../"].iter().any(|p| text.starts_with(p)) || text == "." || text == "..";
        if named.is_some() || like_path {
            if !path.is_dir() {
                return Err(Failure::not_found(format!("no directory {text}")).into());
            }
            return Ok(Side::Dir(path.to_owned()));
        }
        Ok(Side::Image(Box::new(ImageReader::open(&store, text)?)))
    };
    let (mut a, mut b) = (open(&args.a)?, open(&args.b)?);
    let (mut here, mut there) = (a.snapshot()?, b.snapshot()?);
    for (path, record) in &mut here.records {
        let Some(other) = there.records.get_mut(path) else { continue };
        if args.ignore_times {
            other.mtime = record.mtime;
        }
        if let (RecordKind::File { size: s, digest: d }, RecordKind::File { size: t, digest: e }) =
            (&mut record.kind, &mut other.kind)
            && s == t
            && *s > 0
            && !a.same_place(&b, path)?
        {
            *d = Some(a.hash(path).with_context(|| format!("{}: {}", args.a, show(path)))?);
            *e = Some(b.hash(path).with_context(|| format!("{}: {}", args.b, show(path)))?);
        }
    }
    let lines = here.diff(&there);
    for line in lines.iter().take(args.limit) {
        let (sign, rest) = line.split_once(' ').unwrap_or(("~", line));
        let change = match sign {
            "-" => "removed",
            "+" => "added",
            _ => "changed",
        };
        context.out.either(&json!({"change": change, "what": rest}), line)?;
    }
    if lines.is_empty() {
        context.out.note("no difference");
        return Ok(());
    }
    if lines.len() > args.limit {
        context.out.note(format!("… and {} more; --limit shows more", lines.len() - args.limit));
    }
    // Like diff(1): 1 says that they differ.
    Err(Failure::status(1, "").into())
}

/// `export`
pub fn export(context: &Context, args: &args::Export) -> anyhow::Result<()> {
    let store = context.store()?;
    let mut reader = ImageReader::open(&store, &args.name)?;
    let shown = args.file.display().to_string();
    match args.format {
        ExportFormat::Tar => {
            if args.metadata_only {
                return Err(Failure::usage("--metadata-only is for --as erofs").into());
            }
            if shown == "-" {
                let mut out = BufWriter::with_capacity(256 << 10, std::io::stdout().lock());
                super::tar::write(&mut reader, args.sparse, &mut out)?;
                out.flush()?;
                return Ok(());
            }
            written(context, &args.file, |file| {
                let mut out = BufWriter::with_capacity(256 << 10, file);
                super::tar::write(&mut reader, args.sparse, &mut out)?;
                out.flush()?;
                Ok(())
            })
        }
        ExportFormat::Erofs => {
            if args.sparse {
                return Err(Failure::usage("--sparse is for --as tar; holes of an EROFS image are holes anyway").into());
            }
            let index = reader.index().clone();
            let plan = Plan::new(&index, &Options::new(Shape::Kernel))?;
            let what = if args.metadata_only { Export::Metadata } else { Export::Whole };
            written(context, &args.file, |file| {
                let mut out = BufWriter::with_capacity(1 << 20, file);
                image::erofs::export(&plan, &index, what, &mut out, &mut |object, block, count, buf| {
                    reader.read_space(object, block, count, buf).map_err(std::io::Error::other)
                })?;
                out.flush()?;
                Ok(())
            })
        }
    }
}

/// Writes a new file, which is gone again if that fails.
fn written(
    context: &Context,
    path: &Path,
    f: impl FnOnce(&mut std::fs::File) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let shown = path.display();
    let mut file = OpenOptions::new().write(true).create_new(true).open(path).map_err(|e| match e.kind() {
        std::io::ErrorKind::AlreadyExists => {
            anyhow::Error::new(Failure::busy(format!("{shown} exists already; remove it or name another file")))
        }
        _ => store::StoreError::io("create", path, e).into(),
    })?;
    if let Err(e) = f(&mut file) {
        // What is half written is of no use, and the error is worth more than this one's.
        let _ = std::fs::remove_file(path);
        return Err(e.context(format!("writing {shown}")));
    }
    let meta = file.metadata()?;
    let stored = std::os::unix::fs::MetadataExt::blocks(&meta) * 512;
    context.out.either(
        &json!({"file": path, "bytes": meta.len(), "stored_bytes": stored}),
        format!("{shown}: {} ({} on disk)", size(meta.len()), size(stored)),
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_look_as_ls_shows_them() {
        for (mode, want) in [
            (0o755, "rwxr-xr-x"),
            (0o4755, "rwsr-xr-x"),
            (0o2640, "rw-r-S---"),
            (0o1777, "rwxrwxrwt"),
            (0, "---------"),
        ] {
            assert_eq!(permissions(mode), want);
        }
    }
}
