//! The leases on disk: what a successor needs to clean up after a daemon that was killed.
//!
//! One small JSON file in the state directory, replaced atomically at every change and removed at a clean end: that
//! it is there while nobody holds the lock means that the daemon was killed.

use crate::control::proto::Lease;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// The file's version.
pub const VERSION: u32 = 1;
/// The longest file that is read.
const MAX_BYTES: u64 = 16 << 20;

/// The file's content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseFile {
    /// [`VERSION`].
    pub version: u32,
    /// The daemon's process.
    pub pid: i32,
    /// The boot it belongs to; nothing of another boot is still mounted.
    pub boot: String,
    /// The leases.
    pub leases: Vec<Lease>,
}

impl LeaseFile {
    /// Reads the file; `None` when there is none.
    pub fn read(path: &Path) -> anyhow::Result<Option<LeaseFile>> {
        let file = match std::fs::File::open(path) {
            Ok(file) => file,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).with_context(|| format!("leases {}", path.display())),
        };
        let read: LeaseFile = serde_json::from_reader(std::io::Read::take(file, MAX_BYTES))
            .with_context(|| format!("leases {}", path.display()))?;
        anyhow::ensure!(
            read.version == VERSION,
            "leases {}: version {}, this program knows {VERSION}",
            path.display(),
            read.version
        );
        Ok(Some(read))
    }

    /// Replaces the file.
    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        replace(path, self)
    }
}

/// Replaces a JSON file by a rename. One writer at a time.
pub(super) fn replace(path: &Path, content: &impl Serialize) -> std::io::Result<()> {
    let tmp = path.with_extension("json.tmp");
    let mut file = std::fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&tmp)?;
    file.write_all(&serde_json::to_vec(content)?)?;
    std::fs::rename(&tmp, path)
}

/// This boot's identifier; empty when the kernel does not tell.
pub fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::proto::{Dev, Shape, Top, Use};

    #[test]
    fn leases_survive_their_file_and_bad_files_are_errors() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("leases.json");
        assert!(LeaseFile::read(&path).unwrap().is_none());
        let lease = Lease {
            id: 3,
            image: "a:latest".into(),
            index: "ab".into(),
            shape: Shape::Tree,
            r#use: Use::Rw,
            target: "/mnt".into(),
            device: Dev { major: 0, minor: 44 },
            source: "lazyroot".into(),
            top: Some(Top { device: Dev { major: 0, minor: 45 }, source: "lazyroot:x".into() }),
            pid: 7,
            since: 1,
            upper: Some("/u".into()),
            container: None,
        };
        let file = LeaseFile { version: VERSION, pid: 1, boot: boot_id(), leases: vec![lease] };
        file.write(&path).unwrap();
        assert_eq!(LeaseFile::read(&path).unwrap(), Some(file.clone()));
        LeaseFile { version: 9, ..file }.write(&path).unwrap();
        assert!(LeaseFile::read(&path).is_err());
        std::fs::write(&path, "{").unwrap();
        assert!(LeaseFile::read(&path).is_err());
    }
}
