//! Where blobs and small documents of an image lie: the directory of an OCI layout, or a tar archive of one file.
//!
//! Names come from the image. They are never followed out of the directory, only regular files are opened, and
//! what is read into memory is limited.

use crate::archive::Archive;
use crate::blob::{BlobDigest, Promise, digest_of};
use crate::error::ImportError;
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

/// A place to open blobs in.
#[derive(Debug)]
pub(crate) enum Blobs {
    Layout { place: String, dir: OwnedFd },
    Archive { place: String, archive: Archive },
}

/// A range of an open file, read from its start.
#[derive(Debug, Clone)]
pub(crate) struct BlobFile {
    file: Arc<File>,
    at: u64,
    end: u64,
}

impl BlobFile {
    pub(crate) fn new(file: Arc<File>, at: u64, len: u64) -> Self {
        BlobFile { file, at, end: at.saturating_add(len) }
    }

    /// Bytes not yet read.
    pub(crate) fn len(&self) -> u64 {
        self.end - self.at
    }
}

impl Read for BlobFile {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let want = usize::try_from(self.end - self.at).unwrap_or(usize::MAX).min(out.len());
        let n = self.file.read_at(&mut out[..want], self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

impl Blobs {
    /// Opens an OCI layout's directory.
    pub(crate) fn layout(path: &Path) -> Result<Blobs, ImportError> {
        let place = format!("oci:{}", path.display());
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        match rustix::fs::openat(CWD, path, flags, Mode::empty()) {
            Ok(dir) => Ok(Blobs::Layout { place, dir }),
            Err(Errno::NOENT) => Err(ImportError::NotFound { place, what: "no such directory".into() }),
            Err(Errno::NOTDIR) => {
                let what = "not a directory; use docker-archive: for an image in one file".into();
                Err(ImportError::NotFound { place, what })
            }
            Err(e) => Err(ImportError::io("open", place, e.into())),
        }
    }

    /// For messages.
    pub(crate) fn place(&self) -> &str {
        match self {
            Blobs::Layout { place, .. } | Blobs::Archive { place, .. } => place,
        }
    }

    /// Opens a file by its relative name; `None` when there is none.
    pub(crate) fn find(&self, name: &str) -> Result<Option<BlobFile>, ImportError> {
        match self {
            Blobs::Archive { archive, .. } => Ok(archive.find(name)),
            Blobs::Layout { place, dir } => {
                let place = || format!("{place}: {name}");
                let fd = match open_beneath(dir, name) {
                    Ok(fd) => fd,
                    Err(Errno::NOENT | Errno::NOTDIR) => return Ok(None),
                    Err(Errno::XDEV | Errno::LOOP) => {
                        return Err(ImportError::Unsupported {
                            place: place(),
                            what: "a symbolic link that leads out of the layout; such links are not followed".into(),
                        });
                    }
                    Err(e) => return Err(ImportError::io("open", place(), e.into())),
                };
                let file = File::from(fd);
                let meta = file.metadata().map_err(|e| ImportError::io("stat", place(), e))?;
                if !meta.is_file() {
                    return Err(ImportError::corrupt(place(), "not a regular file"));
                }
                // Only read ahead: it does not matter when this fails.
                let _ = rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Sequential);
                Ok(Some(BlobFile::new(Arc::new(file), 0, meta.len())))
            }
        }
    }

    /// Reads a small document; `None` when there is none.
    pub(crate) fn document(&self, name: &str, promise: &Promise, limit: u64) -> Result<Option<Vec<u8>>, ImportError> {
        let Some(mut file) = self.find(name)? else { return Ok(None) };
        let place = format!("{}: {name}", self.place());
        let len = file.len();
        if len > limit {
            let what = format!("it has {len} bytes, the limit on manifests and configs is {limit}");
            return Err(ImportError::Limit { place, what });
        }
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(|e| ImportError::io("read", &place, e))?;
        if let Some(want) = promise.size.filter(|&n| n != bytes.len() as u64) {
            return Err(ImportError::mismatch(&place, "size", want, bytes.len()));
        }
        if let Some(want) = &promise.digest {
            let have = digest_of(want.algorithm(), &bytes);
            if have != *want {
                return Err(ImportError::mismatch(&place, "digest", want, have));
            }
        }
        Ok(Some(bytes))
    }
}

/// The file name of a blob in a layout.
pub(crate) fn blob_name(digest: &BlobDigest) -> String {
    format!("blobs/{}/{}", digest.algorithm().name(), digest.hex())
}

/// Opens `name` for reading without leaving `dir`, by symbolic links either.
fn open_beneath(dir: &OwnedFd, name: &str) -> Result<OwnedFd, Errno> {
    // A FIFO must not make this wait.
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
    match rustix::fs::openat2(dir, name, flags, Mode::empty(), resolve) {
        // Some sandboxes forbid the call; then without any symbolic links.
        Err(Errno::NOSYS | Errno::PERM) => {}
        other => return other,
    }
    let parts: Vec<&str> = name.split('/').filter(|p| !p.is_empty() && *p != ".").collect();
    let mut at: Option<OwnedFd> = None;
    for (i, part) in parts.iter().enumerate() {
        if *part == ".." {
            return Err(Errno::XDEV);
        }
        let step = if i + 1 < parts.len() { OFlags::RDONLY | OFlags::CLOEXEC | OFlags::DIRECTORY } else { flags };
        at = Some(rustix::fs::openat(at.as_ref().unwrap_or(dir), *part, step | OFlags::NOFOLLOW, Mode::empty())?);
    }
    at.ok_or(Errno::NOENT)
}
