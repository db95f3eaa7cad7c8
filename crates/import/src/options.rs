//! What the caller passes in, and what it gets back.

use crate::Limits;
use std::fmt;
use store::ImageRecord;

/// An operating system and architecture, as OCI spells them: `linux/amd64`, `linux/arm64/v8`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Platform {
    /// `linux`.
    pub os: String,
    /// `amd64`, `arm64`, …
    pub architecture: String,
    /// `v8`; without it any variant will do.
    pub variant: Option<String>,
}

impl Platform {
    /// Reads `OS/ARCH[/VARIANT]`; `None` for anything else.
    pub fn parse(text: &str) -> Option<Platform> {
        let parts: Vec<&str> = text.split('/').collect();
        let ok = |s: &&str| !s.is_empty() && s.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
        if !(2..=3).contains(&parts.len()) || !parts.iter().all(ok) {
            return None;
        }
        Some(Platform {
            os: parts[0].into(),
            architecture: parts[1].into(),
            variant: parts.get(2).map(|v| (*v).into()),
        })
    }

    /// The platform in OCI's words for Rust's names of one, as in `std::env::consts::{OS, ARCH}`.
    pub fn from_rust(os: &str, arch: &str) -> Platform {
        let (architecture, variant) = match arch {
            "x86_64" => ("amd64", None),
            "x86" => ("386", None),
            "aarch64" => ("arm64", None),
            "arm" => ("arm", None),
            "powerpc64" => ("ppc64le", None),
            "loongarch64" => ("loong64", None),
            other => (other, None),
        };
        Platform { os: os.into(), architecture: architecture.into(), variant }
    }
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.os, self.architecture)?;
        match &self.variant {
            Some(v) => write!(f, "/{v}"),
            None => Ok(()),
        }
    }
}

/// How far an import is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Bytes of the source taken in (compressed ones where it is compressed).
    pub bytes: u64,
    /// Bytes of the source altogether, where that is known.
    pub total_bytes: Option<u64>,
    /// Files and other entries taken in.
    pub files: u64,
    /// Entries altogether, where that is known.
    pub total_files: Option<u64>,
}

/// Told how far an import is: often, and from several threads. Rate limiting is the listener's job.
pub trait Progress: Sync {
    /// `counts` is the state now; nothing goes backwards except between threads.
    fn progress(&self, counts: &Counts);

    /// Whether it is worth some work to know how much there is: a directory is then gone through by one more thread,
    /// which says so when it is done. Everything else knows its size anyway.
    fn wants_totals(&self) -> bool {
        false
    }
}

/// Nobody listens.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoProgress;

impl Progress for NoProgress {
    fn progress(&self, _: &Counts) {}
}

/// How to import.
#[non_exhaustive]
pub struct Options<'a> {
    /// Which image of a manifest list; the host's own by default of the command line.
    pub platform: Platform,
    /// `dir:` only: globs of what to take; empty takes everything. See `doc/semantics.md`.
    pub include: Vec<String>,
    /// `dir:` only: globs of what to leave out.
    pub exclude: Vec<String>,
    /// `dir:` only: leave out what may not be read, instead of failing.
    pub skip_unreadable: bool,
    /// Who is told how far it is.
    pub progress: &'a dyn Progress,
    /// Threads that decode and hash; at least 1.
    pub threads: usize,
    /// Limits.
    pub limits: Limits,
    /// The time that the image's record is to carry, seconds since 1970.
    pub now: u64,
}

impl<'a> Options<'a> {
    /// Everything of a source, silently, on two threads.
    pub fn new(platform: Platform) -> Options<'a> {
        Options {
            platform,
            include: Vec::new(),
            exclude: Vec::new(),
            skip_unreadable: false,
            progress: &NoProgress,
            threads: 2,
            limits: Limits::default(),
            now: 0,
        }
    }
}

impl fmt::Debug for Options<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("platform", &self.platform)
            .field("include", &self.include)
            .field("exclude", &self.exclude)
            .field("skip_unreadable", &self.skip_unreadable)
            .field("threads", &self.threads)
            .field("limits", &self.limits)
            .field("now", &self.now)
            .finish_non_exhaustive()
    }
}

/// What an import took, and what it could not keep.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Names in the image.
    pub names: u64,
    /// Regular files.
    pub files: u64,
    /// Bytes of content of those, holes included.
    pub content_bytes: u64,
    /// Bytes of the source that were read.
    pub source_bytes: u64,
    /// Content bytes that were already in the store or seen twice.
    pub duplicate_bytes: u64,
    /// Bytes that this import added to the store's packs.
    pub stored_bytes: u64,
    /// Bytes by which the store grew: packs, object maps, chunk tables, index and record.
    pub added_bytes: u64,
    /// Content bytes of files that were not packed, since upper layers hide them.
    pub hidden_bytes: u64,
    /// Layers merged.
    pub layers: u64,
    /// Extended attributes in namespaces that images do not carry, or that may not be read.
    pub dropped_xattrs: u64,
    /// Mount points that became empty directories or files (`dir:` only).
    pub mount_points: u64,
    /// Names that were gone when their turn came (`dir:` only).
    pub vanished: u64,
    /// Files and directories that were left out because they may not be read (`dir:` only).
    pub unreadable: u64,
    /// Whiteouts with nothing to hide.
    pub idle_whiteouts: u64,
    /// Bookkeeping entries of old storage drivers, which mean nothing in an image.
    pub ignored_entries: u64,
}

/// A finished import.
#[derive(Debug, Clone)]
pub struct Imported {
    /// What the store now says about the image.
    pub record: ImageRecord,
    /// What happened on the way.
    pub report: Report,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn platforms_parse() {
        for good in ["linux/amd64", "linux/arm64/v8", "windows/amd64"] {
            assert_eq!(Platform::parse(good).unwrap().to_string(), good);
        }
        for bad in ["", "linux", "linux/", "/amd64", "a/b/c/d", "linux/amd 64"] {
            assert_eq!(Platform::parse(bad), None, "{bad}");
        }
        assert_eq!(Platform::from_rust("linux", "x86_64").to_string(), "linux/amd64");
    }
}
