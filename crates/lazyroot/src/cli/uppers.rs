//! Upper directories: what was written on `mount --rw`, kept below `ROOT/upper` until somebody removes it.
//!
//! Invariants: a directory that an overlay uses is neither removed nor given to a second overlay; whether one does is
//! read from mountinfo of every namespace, by the overlay's source, in which the identifier stands. One that is being
//! removed is renamed first, so nobody takes up half of it. Failure model: an overlay that was detached while in use
//! (`umount --lazy`) is in no table, and its directory counts as free.

use super::Context;
use super::mount::random_hex;
use super::output::{moment, size};
use crate::dirs::private_dir;
use crate::failure::Failure;
use crate::mounts::remove_tree;
use crate::procscan;
use crate::run::record;
use anyhow::Context as _;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// What a directory that is being removed is called.
const REMOVING: &str = ".removing-";
/// Directories that are open at once while one is measured.
const MAX_OPEN: usize = 256;

/// The directory of a writable mount.
#[derive(Debug)]
pub struct Upper {
    /// What `mount --rw --upper` takes.
    pub id: String,
    /// It holds `upper` and `work`.
    pub base: PathBuf,
    /// Made just now: goes again unless it is kept.
    new: bool,
}

impl Upper {
    /// It is in use: from now on it stays.
    pub fn keep(mut self) {
        self.new = false;
    }
}

impl Drop for Upper {
    fn drop(&mut self) {
        if self.new {
            // Nothing was written to it, and the reason is worth more than this one's.
            let _ = remove_tree(&self.base);
        }
    }
}

fn note(base: &Path) -> PathBuf {
    base.join("image.json")
}

fn checked(id: &str) -> Result<&str, Failure> {
    let good = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
    if id.is_empty() || id.starts_with('.') || !id.bytes().all(good) {
        return Err(Failure::usage(format!("{id:?} is not an identifier that `mount --rw` gave; see `ps --uppers`")));
    }
    Ok(id)
}

fn not_there(context: &Context, id: &str) -> Failure {
    Failure::not_found(format!(
        "no upper directory {}; `lazyroot ps --uppers` lists what there is",
        context.dirs.uppers().join(id).display()
    ))
}

/// The source of an overlay on the upper directory `id`, different each time.
pub fn label(id: &str) -> anyhow::Result<String> {
    // No identifier has a colon.
    Ok(format!("{id}:{}", random_hex(4)?))
}

/// Where overlays on upper directories are mounted, by their identifiers, in any namespace.
fn mounted() -> HashMap<String, PathBuf> {
    let mut found = HashMap::new();
    for entry in procscan::namespaces(None).into_iter().flat_map(|space| space.mounts) {
        let source = entry.source.to_string_lossy();
        if entry.fstype == "overlay"
            && let Some(id) = source.strip_prefix("lazyroot:").and_then(|s| s.split(':').next())
        {
            found.entry(id.to_owned()).or_insert(entry.mount_point);
        }
    }
    found
}

fn check_unused(id: &str, what: &str) -> Result<(), Failure> {
    match mounted().get(id) {
        Some(at) => Err(Failure::busy(format!(
            "upper directory {id} is mounted at {}; {what} after `lazyroot umount`",
            at.display()
        ))),
        None => Ok(()),
    }
}

/// The upper directory of an earlier mount of the image `index`.
pub fn taken_up(context: &Context, id: &str, index: &str) -> anyhow::Result<Upper> {
    let base = context.dirs.uppers().join(checked(id)?);
    let text = std::fs::read(note(&base)).map_err(|_| not_there(context, id))?;
    let value: Value = serde_json::from_slice(&text).with_context(|| note(&base).display().to_string())?;
    if value["index"] != *index {
        return Err(Failure::usage(format!(
            "{} belongs to another image ({}); an overlay needs the image that it was made on",
            base.display(),
            value["image"].as_str().unwrap_or("unknown")
        ))
        .into());
    }
    check_unused(id, "mount it again")?;
    Ok(Upper { id: id.to_owned(), base, new: false })
}

/// A new upper directory for an image.
pub fn made(context: &Context, image: &str, index: &str) -> anyhow::Result<Upper> {
    let all = private_dir(&context.dirs.uppers(), "root")?;
    let stem: String =
        image.chars().map(|c| if c.is_ascii_alphanumeric() || c == '.' { c } else { '-' }).take(60).collect();
    let stem = stem.trim_start_matches('.');
    for _ in 0..100 {
        let id = format!("{stem}-{}", random_hex(4)?);
        let base = all.join(&id);
        match std::fs::create_dir(&base) {
            Ok(()) => {
                let upper = Upper { id, base, new: true };
                let text = json!({"version": 1, "image": image, "index": index}).to_string();
                let file = note(&upper.base);
                std::fs::write(&file, text).map_err(|e| store::StoreError::io("write", file, e))?;
                return Ok(upper);
            }
            Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(store::StoreError::io("create", &base, e).into()),
        }
    }
    anyhow::bail!("no free name for an upper directory in {}", all.display())
}

/// `rm --upper`
pub fn remove(context: &Context, id: &str) -> anyhow::Result<&'static str> {
    let all = context.dirs.uppers();
    let base = all.join(checked(id)?);
    if !base.is_dir() {
        return Err(not_there(context, id).into());
    }
    check_unused(id, "remove it")?;
    let away = all.join(format!("{REMOVING}{id}"));
    remove_tree(&away).with_context(|| format!("removing {}", away.display()))?;
    std::fs::rename(&base, &away).map_err(|e| store::StoreError::io("rename", &base, e))?;
    // Somebody may have mounted it meanwhile.
    if let Err(e) = check_unused(id, "remove it") {
        std::fs::rename(&away, &base).map_err(|e| store::StoreError::io("rename", &away, e))?;
        return Err(e.into());
    }
    remove_tree(&away).with_context(|| format!("removing {}", away.display()))?;
    Ok("upper directory")
}

/// Bytes that a tree takes on disk, and its files and directories. Nothing is followed; what is nested deeper than
/// [`MAX_OPEN`] directories, or goes away meanwhile, is not counted.
fn measure(path: &Path) -> (u64, u64) {
    let open = |at: &OwnedFd, name: &OsStr| {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(at, name, flags, Mode::empty()).ok()?;
        Some((Dir::read_from(&fd).ok()?, fd))
    };
    let Ok(top) = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) else { return (0, 0) };
    let (mut bytes, mut names) = (0u64, 0u64);
    let mut stack: Vec<(Dir, OwnedFd)> = open(&top, path.as_os_str()).into_iter().collect();
    while let Some((dir, fd)) = stack.last_mut() {
        let Some(Ok(entry)) = dir.next() else {
            stack.pop();
            continue;
        };
        let name = OsStr::from_bytes(entry.file_name().to_bytes());
        if name == "." || name == ".." {
            continue;
        }
        let Ok(stat) = rustix::fs::statat(&*fd, name, AtFlags::SYMLINK_NOFOLLOW) else { continue };
        bytes += u64::try_from(stat.st_blocks).unwrap_or(0) * 512;
        names += 1;
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory
            && stack.len() < MAX_OPEN
            && let Some(below) = stack.last().and_then(|(_, fd)| open(fd, name))
        {
            stack.push(below);
        }
    }
    (bytes, names)
}

/// `ps --uppers`
pub fn list(context: &Context) -> anyhow::Result<()> {
    let all = context.dirs.uppers();
    let mounted = mounted();
    let mut rows: Vec<(String, Value)> = Vec::new();
    for entry in std::fs::read_dir(&all).into_iter().flatten().flatten() {
        let id = entry.file_name().to_string_lossy().into_owned();
        if checked(&id).is_err() {
            continue;
        }
        let value: Value =
            std::fs::read(note(&entry.path())).ok().and_then(|t| serde_json::from_slice(&t).ok()).unwrap_or_default();
        let created = entry.path().join("image.json").metadata().map_or(0, |m| m.mtime());
        let path = entry.path().join("upper");
        rows.push((
            id.clone(),
            json!({"kind": "upper", "id": id, "image": value["image"], "index": value["index"],
                "created": created, "mounted": mounted.get(&id), "container": null, "path": path}),
        ));
    }
    for container in record::all(&context.dirs)? {
        let path = container.dir(&context.dirs).join("upper");
        if path.is_dir() {
            let at = mounted.get(&container.id);
            rows.push((
                container.id.clone(),
                json!({"kind": "upper", "id": container.id, "image": container.image, "index": container.index,
                    "created": container.created, "mounted": at, "container": container.name, "path": path}),
            ));
        }
    }
    rows.sort_by(|a, b| (a.1["created"].as_i64(), &a.0).cmp(&(b.1["created"].as_i64(), &b.0)));
    let mut table = Vec::new();
    for (id, mut value) in rows {
        let (bytes, names) = measure(Path::new(value["path"].as_str().unwrap_or_default()));
        (value["bytes"], value["names"]) = (json!(bytes), json!(names));
        if context.out.json {
            context.out.object(&value)?;
            continue;
        }
        let use_of = match (&value["container"], &value["mounted"]) {
            (Value::String(name), at) => {
                format!("container {name}, {}", if at.is_null() { "not running" } else { "running" })
            }
            (_, Value::String(at)) => format!("mounted at {at}"),
            _ => "not mounted".to_owned(),
        };
        table.push(vec![
            id,
            value["image"].as_str().unwrap_or("unknown").to_owned(),
            moment(value["created"].as_u64().unwrap_or(0)),
            names.to_string(),
            size(bytes),
            use_of,
        ]);
    }
    if !context.out.json {
        if table.is_empty() {
            context.out.note("nothing is kept of `mount --rw` and of containers");
        } else {
            context.out.table(&["UPPER", "IMAGE", "CREATED", "NAMES", "SIZE", "USE"], &table)?;
            context
                .out
                .note("`lazyroot rm --upper UPPER` removes one that is not mounted, `rm CONTAINER` a container's");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trees_are_measured_without_following_links() {
        let tmp = tempfile::tempdir().unwrap();
        let (tree, outside) = (tmp.path().join("tree"), tmp.path().join("outside"));
        std::fs::create_dir_all(tree.join("a/b")).unwrap();
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("f"), vec![1u8; 1 << 20]).unwrap();
        std::fs::write(tree.join("a/b/f"), vec![1u8; 100_000]).unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("a/link")).unwrap();
        let (bytes, names) = measure(&tree);
        assert_eq!(names, 4);
        assert!((100_000..600_000).contains(&bytes), "{bytes}");
        assert_eq!(measure(&tmp.path().join("none")), (0, 0));
    }

    #[test]
    fn identifiers_stay_in_their_directory() {
        for id in ["", ".", "..", "../x", "a/b", ".removing-x", "a b", "a:b"] {
            assert!(checked(id).is_err(), "{id}");
        }
        assert!(checked("debian-latest-0123abcd").is_ok());
        assert!(label("a").unwrap().starts_with("a:") && label("a").unwrap() != label("a").unwrap());
    }
}
