//! `-v SRC:DST[:ro]`: parsing, and what makes a bind mount out of it.

use std::path::{Component, Path, PathBuf};
use std::str::FromStr;

/// One bind mount.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Volume {
    /// On the host; relative ones are relative to the caller's directory.
    pub source: PathBuf,
    /// In the container, absolute and without `..`.
    pub target: PathBuf,
    /// Whether the container may not write there.
    pub read_only: bool,
}

/// Why a volume was not understood.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VolumeError {
    /// No colon.
    #[error("want SRC:DST or SRC:DST:ro")]
    Form,
    /// Something else than `ro` or `rw` behind the second colon.
    #[error("unknown option {0:?}; ro and rw are known")]
    Option(String),
    /// An empty or relative target.
    #[error("the path in the container must be absolute, {0:?} is not")]
    Target(String),
    /// A target with `..` in it, or the root itself.
    #[error("the path in the container must not be / or contain .., {0:?} does")]
    Outside(String),
}

/// An absolute path without `.`, `..` and doubled slashes; `None` for anything that is not absolute or has `..`.
pub fn clean_absolute(path: &Path) -> Option<PathBuf> {
    if !path.is_absolute() {
        return None;
    }
    let mut out = PathBuf::from("/");
    for component in path.components() {
        match component {
            Component::RootDir | Component::CurDir => {}
            Component::Normal(name) => out.push(name),
            Component::ParentDir | Component::Prefix(_) => return None,
        }
    }
    Some(out)
}

impl FromStr for Volume {
    type Err = VolumeError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut parts = text.splitn(3, ':');
        let (source, target) = match (parts.next(), parts.next()) {
            (Some(s), Some(t)) if !s.is_empty() => (s, t),
            _ => return Err(VolumeError::Form),
        };
        let read_only = match parts.next() {
            None | Some("rw") => false,
            Some("ro") => true,
            Some(other) => return Err(VolumeError::Option(other.to_owned())),
        };
        if !target.starts_with('/') {
            return Err(VolumeError::Target(target.to_owned()));
        }
        let clean = clean_absolute(Path::new(target)).filter(|t| t != Path::new("/"));
        let target = clean.ok_or_else(|| VolumeError::Outside(target.to_owned()))?;
        Ok(Volume { source: PathBuf::from(source), target, read_only })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_parse() {
        let ok = |s: &str, t: &str, ro| Ok(Volume { source: s.into(), target: t.into(), read_only: ro });
        let table = [
            ("/a:/b", ok("/a", "/b", false)),
            ("/a:/b:ro", ok("/a", "/b", true)),
            ("./a:/b//c/./d/:rw", ok("./a", "/b/c/d", false)),
            ("/a", Err(VolumeError::Form)),
            (":/b", Err(VolumeError::Form)),
            ("/a:", Err(VolumeError::Target("".into()))),
            ("/a:b", Err(VolumeError::Target("b".into()))),
            ("/a:/b:rx", Err(VolumeError::Option("rx".into()))),
            ("/a:/b:ro:x", Err(VolumeError::Option("ro:x".into()))),
            ("/a:/", Err(VolumeError::Outside("/".into()))),
            ("/a:/b/../../etc", Err(VolumeError::Outside("/b/../../etc".into()))),
        ];
        for (text, want) in table {
            assert_eq!(text.parse::<Volume>(), want, "{text}");
        }
    }
}
