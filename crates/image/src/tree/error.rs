//! Why a tree refused something, and paths that can be shown.

use format::index as raw;
use std::fmt;

/// Bytes of a path or name; shows itself with everything unprintable escaped.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct PathBytes(pub Vec<u8>);

impl PathBytes {
    /// Copies `bytes`, cut short when they are absurdly long.
    pub fn of(bytes: &[u8]) -> Self {
        PathBytes(bytes[..bytes.len().min(2 * raw::MAX_PATH_LEN)].to_vec())
    }
}

impl fmt::Display for PathBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in self.0.utf8_chunks() {
            for c in part.valid().chars() {
                if c.is_control() || c == '\\' {
                    write!(f, "{}", c.escape_default())?;
                } else {
                    write!(f, "{c}")?;
                }
            }
            write!(f, "{}", part.invalid().escape_ascii())?;
        }
        Ok(())
    }
}

impl fmt::Debug for PathBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{self}\"")
    }
}

/// Why a tree refused something.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone)]
#[non_exhaustive]
pub enum TreeError {
    /// The name is there already.
    #[error("{0}: exists already")]
    Exists(PathBytes),
    /// A name was to be put into something that is not a directory.
    #[error("{0}: not a directory")]
    NotADirectory(PathBytes),
    /// A second name for a directory.
    #[error("{0}: a directory cannot have a second name")]
    LinkToDirectory(PathBytes),
    /// A name that no directory can hold.
    #[error("{path}: {why}")]
    BadName {
        /// The path.
        path: PathBytes,
        /// What is wrong with its last component.
        why: &'static str,
    },
    /// A limit; see [`super::Limits`].
    #[error("{path}: more than {limit} {what}")]
    Limit {
        /// The path, or the attribute's name.
        path: PathBytes,
        /// The unit and what it counts.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// An attribute in a namespace that images do not carry: drop it, and say so.
    #[error("extended attribute {0}: its namespace cannot be represented")]
    UnsupportedXattr(PathBytes),
    /// An attribute that cannot be stored at all.
    #[error("extended attribute {name}: {why}")]
    BadXattr {
        /// Its name.
        name: PathBytes,
        /// What is wrong with it.
        why: &'static str,
    },
    /// A symlink target that Linux cannot hold.
    #[error("{path}: symlink target: {why}")]
    BadTarget {
        /// The symlink.
        path: PathBytes,
        /// What is wrong with its target.
        why: &'static str,
    },
    /// A device number that Linux cannot hold.
    #[error("{path}: device number {major}:{minor} out of range")]
    BadDevice {
        /// The device's path.
        path: PathBytes,
        /// Major number.
        major: u32,
        /// Minor number.
        minor: u32,
    },
    /// Runs that do not describe a file of that size.
    #[error("content of {path}: {why}")]
    BadRuns {
        /// The file.
        path: PathBytes,
        /// What is wrong.
        why: &'static str,
    },
    /// The node's kind does not have that property.
    #[error("{0}: the wrong kind of file for that")]
    WrongKind(PathBytes),
}
