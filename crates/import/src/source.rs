//! What the user typed, as a value: `dir:PATH`, `tar:FILE`, `tar:-`, `oci:DIR[:TAG]`, `docker-archive:FILE[:TAG]`.
//!
//! Pure: nothing here looks at the file system.

use std::ffi::OsStr;
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Where an image comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Source {
    /// A directory on this machine.
    Dir(PathBuf),
    /// A tar archive: plain, gzip or zstd.
    Tar(PathBuf),
    /// The same from standard input.
    TarStdin,
    /// An OCI image layout.
    Oci {
        /// Its directory.
        dir: PathBuf,
        /// The value of `org.opencontainers.image.ref.name`; without it the layout must hold one image.
        tag: Option<String>,
    },
    /// What `docker save` writes: either form, compressed or not.
    DockerArchive {
        /// The file.
        file: PathBuf,
        /// A name from `RepoTags`; without it the archive must hold one image.
        tag: Option<String>,
    },
}

/// Why a source could not be understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{text:?} is not a source: {why}; use dir:PATH, tar:FILE, tar:- (standard input), oci:DIR[:TAG] or docker-archive:FILE[:TAG]"
)]
pub struct SourceError {
    text: String,
    why: &'static str,
}

impl Source {
    /// Reads a source as it is typed.
    ///
    /// # Errors
    /// An unknown kind, an empty path.
    pub fn parse(text: impl AsRef<OsStr>) -> Result<Source, SourceError> {
        let bytes = text.as_ref().as_bytes();
        let fail = |why| SourceError { text: String::from_utf8_lossy(bytes).into_owned(), why };
        let colon = bytes.iter().position(|&b| b == b':').ok_or_else(|| fail("it does not say of what kind"))?;
        let (kind, rest) = (&bytes[..colon], &bytes[colon + 1..]);
        if rest.is_empty() {
            return Err(fail("the path is missing"));
        }
        let path = |b: &[u8]| PathBuf::from(OsStr::from_bytes(b));
        match kind {
            b"dir" => Ok(Source::Dir(path(rest))),
            b"tar" if rest == b"-" => Ok(Source::TarStdin),
            b"tar" => Ok(Source::Tar(path(rest))),
            b"oci" => {
                let (dir, tag) = split_tag(rest);
                Ok(Source::Oci { dir: path(dir), tag })
            }
            b"docker-archive" => {
                let (file, tag) = split_tag(rest);
                Ok(Source::DockerArchive { file: path(file), tag })
            }
            b"docker" | b"registry" => Err(fail("registries are not read yet")),
            _ => Err(fail("unknown kind")),
        }
    }

    /// The path that is read, if any.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Source::Dir(p) | Source::Tar(p) | Source::Oci { dir: p, .. } | Source::DockerArchive { file: p, .. } => {
                Some(p)
            }
            Source::TarStdin => None,
        }
    }
}

/// Splits a tag off at the first colon behind the last slash.
fn split_tag(bytes: &[u8]) -> (&[u8], Option<String>) {
    let start = bytes.iter().rposition(|&b| b == b'/').map_or(0, |p| p + 1);
    match bytes[start..].iter().position(|&b| b == b':') {
        Some(p) if start + p > 0 && start + p + 1 < bytes.len() => match std::str::from_utf8(&bytes[start + p + 1..]) {
            Ok(tag) => (&bytes[..start + p], Some(tag.to_owned())),
            Err(_) => (bytes, None),
        },
        _ => (bytes, None),
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tagged = |f: &mut fmt::Formatter<'_>, kind: &str, path: &Path, tag: &Option<String>| match tag {
            Some(tag) => write!(f, "{kind}:{}:{tag}", path.display()),
            None => write!(f, "{kind}:{}", path.display()),
        };
        match self {
            Source::Dir(p) => write!(f, "dir:{}", p.display()),
            Source::Tar(p) => write!(f, "tar:{}", p.display()),
            Source::TarStdin => f.write_str("tar:-"),
            Source::Oci { dir, tag } => tagged(f, "oci", dir, tag),
            Source::DockerArchive { file, tag } => tagged(f, "docker-archive", file, tag),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_parse_and_print_back() {
        let p = |s: &str| PathBuf::from(s);
        let table = [
            ("dir:/a:b", Source::Dir(p("/a:b"))),
            ("dir:.", Source::Dir(p("."))),
            ("tar:-", Source::TarStdin),
            ("tar:./-", Source::Tar(p("./-"))),
            ("oci:/a/b", Source::Oci { dir: p("/a/b"), tag: None }),
            ("oci:/a/b:1.2", Source::Oci { dir: p("/a/b"), tag: Some("1.2".into()) }),
            ("oci:/a:x/b", Source::Oci { dir: p("/a:x/b"), tag: None }),
            ("docker-archive:f.tar", Source::DockerArchive { file: p("f.tar"), tag: None }),
            ("docker-archive:f.tar:n:latest", Source::DockerArchive { file: p("f.tar"), tag: Some("n:latest".into()) }),
        ];
        for (text, want) in table {
            let have = Source::parse(text).unwrap();
            assert_eq!(have, want, "{text}");
            assert_eq!(have.to_string(), text);
        }
        for bad in ["", "x", "/a/b", "dir:", "tar:", "zip:/a", "docker://x/y", "oci:"] {
            assert!(Source::parse(bad).is_err(), "{bad}");
        }
    }
}
