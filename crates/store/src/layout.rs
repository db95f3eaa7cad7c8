//! Where things are in a store's root directory, and making one. Normative text: `doc/format/store.md`.
//!
//! Everything below the root has mode 0700 or 0600. The `version` file is written last, so a root without one is a
//! root whose making was cut short, and making it again completes it.

use crate::disk::{Disk, Open};
use crate::{ObjectId, StoreError};
use format::Digest;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The version that this code makes and reads.
pub(crate) const VERSION: u32 = 1;

/// The directories of a root. No other module spells their names.
const DIRS: [&str; 5] = ["cache", "indexes", "objects", "refs", "tmp"];
const LOCK: &str = "lock";

/// The paths of one store.
#[derive(Debug, Clone)]
pub(crate) struct Layout {
    root: PathBuf,
}

impl Layout {
    pub(crate) fn new(root: &Path) -> Layout {
        Layout { root: root.to_path_buf() }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn version(&self) -> PathBuf {
        self.root.join("version")
    }

    /// Imports and changes of names hold it shared, `gc` exclusively.
    pub(crate) fn lock(&self) -> PathBuf {
        self.root.join(LOCK)
    }

    pub(crate) fn refs(&self) -> PathBuf {
        self.root.join("refs")
    }

    pub(crate) fn indexes(&self) -> PathBuf {
        self.root.join("indexes")
    }

    pub(crate) fn index(&self, digest: &Digest) -> PathBuf {
        self.indexes().join(digest.to_hex())
    }

    pub(crate) fn objects(&self) -> PathBuf {
        self.root.join("objects")
    }

    pub(crate) fn object(&self, id: &ObjectId, part: Part) -> PathBuf {
        self.objects().join(object_name(id, part))
    }

    /// The chunk table over many objects.
    pub(crate) fn merged(&self) -> PathBuf {
        self.root.join("chunks")
    }

    pub(crate) fn tmp(&self) -> PathBuf {
        self.root.join("tmp")
    }

    pub(crate) fn cache(&self) -> PathBuf {
        self.root.join("cache")
    }
}

/// The name of one of an object's files.
pub(crate) fn object_name(id: &ObjectId, part: Part) -> String {
    format!("{id}.{}", part.extension())
}

/// The files of one object.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// The frames.
    Pack,
    /// The object map; the object is in the store when this is.
    Map,
    /// Its chunk table.
    Chunks,
}

impl Part {
    pub(crate) const ALL: [Part; 3] = [Part::Map, Part::Chunks, Part::Pack];

    fn extension(self) -> &'static str {
        match self {
            Part::Pack => "pack",
            Part::Map => "map",
            Part::Chunks => "chunks",
        }
    }

    /// Reads a file name in `objects/`.
    pub(crate) fn parse(name: &str) -> Option<(ObjectId, Part)> {
        let (id, extension) = name.split_once('.')?;
        let part = Part::ALL.into_iter().find(|p| p.extension() == extension)?;
        Some((digest_name(id)?, part))
    }
}

/// Reads a file name that is a digest, in the one way that it is written.
pub(crate) fn digest_name(name: &str) -> Option<Digest> {
    Digest::from_hex(name).filter(|d| d.to_hex() == name)
}

/// Checks that there is a store at the root, making one in an empty or missing directory.
pub(crate) fn open(layout: &Layout, disk: &dyn Disk) -> Result<(), StoreError> {
    let root = layout.root();
    match std::fs::metadata(root) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            make_root(root, disk).map_err(|e| StoreError::io("make", root, e))?;
        }
        Err(e) => return Err(StoreError::io("open", root, e)),
        Ok(meta) if !meta.is_dir() => {
            return Err(StoreError::NotAStore { path: root.into(), why: "it is not a directory".into() });
        }
        Ok(meta) => {
            let us = rustix::process::geteuid().as_raw();
            if meta.uid() != us {
                let why = format!("it belongs to user {}, not to user {us}", meta.uid());
                return Err(StoreError::NotAStore { path: root.into(), why });
            }
        }
    }
    let path = layout.version();
    match read_small(&path, 64) {
        Ok(text) => check_version(root, &text),
        Err(e) if e.kind() == io::ErrorKind::NotFound => make(layout, disk),
        Err(e) => Err(StoreError::io("read", &path, e)),
    }
}

fn check_version(root: &Path, text: &[u8]) -> Result<(), StoreError> {
    let text = String::from_utf8_lossy(text);
    let version = text.strip_prefix("lazyroot store ").map(str::trim_end);
    match version {
        Some(v) if v.parse() == Ok(VERSION) => Ok(()),
        Some(v) => Err(StoreError::Version { path: root.into(), version: v.to_owned(), known: VERSION }),
        None => Err(StoreError::NotAStore { path: root.into(), why: "its version file is something else".into() }),
    }
}

fn make_root(root: &Path, disk: &dyn Disk) -> io::Result<()> {
    if let Some(parent) = root.parent().filter(|p| !p.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent)?;
    }
    match disk.make_dir(root) {
        // Somebody else makes it just now.
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

/// Completes a root that has no version file. Several processes may do this at once.
fn make(layout: &Layout, disk: &dyn Disk) -> Result<(), StoreError> {
    let root = layout.root();
    let entries = std::fs::read_dir(root).map_err(|e| StoreError::io("list", root, e))?;
    for entry in entries {
        let name = entry.map_err(|e| StoreError::io("list", root, e))?.file_name();
        let ours = |n: &str| DIRS.contains(&n) || n == LOCK || n == "version" || n.starts_with("version.");
        if !name.to_str().is_some_and(ours) {
            let why = format!("it has no version file but holds {name:?}");
            return Err(StoreError::NotAStore { path: root.into(), why });
        }
    }
    let io = |op, path: &Path| {
        let path = path.to_path_buf();
        move |e| StoreError::io(op, path, e)
    };
    std::fs::set_permissions(root, PermissionsExt::from_mode(0o700)).map_err(io("restrict", root))?;
    for name in DIRS {
        let path = root.join(name);
        match disk.make_dir(&path) {
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(StoreError::io("make", path, e)),
            _ => {}
        }
    }
    let path = layout.lock();
    disk.open(&path, Open::Either).map_err(io("make", &path))?;
    // Its directories first: whoever sees the version must see them.
    disk.sync_dir(root).map_err(io("sync", root))?;
    let tmp = root.join(format!("version.{}", std::process::id()));
    let file = disk.open(&tmp, Open::Either).map_err(io("make", &tmp))?;
    disk.write_at(&file, format!("lazyroot store {VERSION}\n").as_bytes(), 0).map_err(io("write", &tmp))?;
    disk.sync(&file).map_err(io("sync", &tmp))?;
    let path = layout.version();
    disk.rename(&tmp, &path).map_err(io("make", &path))?;
    disk.sync_dir(root).map_err(io("sync", root))?;
    if let Some(parent) = root.parent().filter(|p| !p.as_os_str().is_empty()) {
        disk.sync_dir(parent).map_err(io("sync", parent))?;
    }
    Ok(())
}

/// Opens a file of the store for reading, never through a symlink.
pub(crate) fn open_read(path: &Path) -> io::Result<File> {
    File::options().read(true).custom_flags(rustix::fs::OFlags::NOFOLLOW.bits() as i32).open(path)
}

/// Reads a whole file of at most `limit` bytes.
pub(crate) fn read_small(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let mut out = Vec::new();
    open_read(path)?.take(limit + 1).read_to_end(&mut out)?;
    if out.len() as u64 > limit {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("more than {limit} bytes")));
    }
    Ok(out)
}

/// The names in a directory of the store, sorted. Names that are not UTF-8 are not ours and left out.
pub(crate) fn list(dir: &Path) -> Result<Vec<String>, StoreError> {
    let io = |e| StoreError::io("list", dir, e);
    let mut out = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(io)? {
        if let Ok(name) = entry.map_err(io)?.file_name().into_string() {
            out.push(name);
        }
    }
    out.sort();
    Ok(out)
}

/// Maps a published file of the store.
pub(crate) fn map(path: &Path) -> io::Result<sys::Map> {
    sys::Map::of(&open_read(path)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::RealDisk;

    fn mode(path: &Path) -> u32 {
        std::fs::metadata(path).unwrap().mode() & 0o7777
    }

    fn open_at(root: &Path) -> Result<(), StoreError> {
        open(&Layout::new(root), &RealDisk)
    }

    #[test]
    fn a_root_is_made_private_and_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("a/b");
        open_at(&root).unwrap();
        open_at(&root).unwrap();
        assert_eq!(mode(&root), 0o700);
        for name in DIRS {
            assert_eq!(mode(&root.join(name)), 0o700, "{name}");
        }
        assert_eq!(mode(&root.join("version")), 0o600);
        // An empty directory will do, and becomes private.
        let empty = dir.path().join("empty");
        std::fs::create_dir(&empty).unwrap();
        std::fs::set_permissions(&empty, PermissionsExt::from_mode(0o755)).unwrap();
        open_at(&empty).unwrap();
        assert_eq!(mode(&empty), 0o700);
    }

    #[test]
    fn what_is_no_store_is_refused_with_a_reason() {
        let dir = tempfile::tempdir().unwrap();
        let table: [(&str, &str, &str); 4] = [
            ("other", "somefile", "somefile"),
            ("newer", "version", "lazyroot store 2"),
            ("strange", "version", "hello"),
            ("huge", "version", &"x".repeat(100)),
        ];
        for (name, file, text) in table {
            let root = dir.path().join(name);
            std::fs::create_dir(&root).unwrap();
            std::fs::write(root.join(file), text).unwrap();
            let error = open_at(&root).unwrap_err();
            match name {
                "newer" => assert!(error.to_string().contains("version \"2\""), "{error}"),
                "huge" => assert!(matches!(error, StoreError::Io { .. }), "{error}"),
                _ => assert!(matches!(error, StoreError::NotAStore { .. }), "{error}"),
            }
        }
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert!(matches!(open_at(&file), Err(StoreError::NotAStore { .. })));
    }

    #[test]
    fn object_file_names_parse_in_one_way() {
        let id = Digest::of(b"x");
        let layout = Layout::new(Path::new("/r"));
        for part in Part::ALL {
            let path = layout.object(&id, part);
            assert_eq!(Part::parse(path.file_name().unwrap().to_str().unwrap()), Some((id, part)));
        }
        let hex = id.to_hex();
        for bad in
            ["", ".map", &hex, &format!("{hex}."), &format!("{hex}.mapx"), &format!("{}.map", hex.to_uppercase())]
        {
            assert_eq!(Part::parse(bad), None, "{bad}");
        }
    }
}
