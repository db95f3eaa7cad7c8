//! The messages of the control socket, version [`VERSION`]. Normative text: `doc/format/control.md`.
//!
//! A connection starts with `hello` in both directions; then each request gets one reply, in order. Unknown fields
//! are ignored, unknown requests are answered with an error, so either side may be the newer one within a version.

use crate::failure::{Failure, Kind};
use serde::{Deserialize, Serialize};
use std::fmt;

/// The protocol's version: both sides must agree.
pub const VERSION: u32 = 1;

/// How an image is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Shape {
    /// The kernel's EROFS, over one file that the daemon serves.
    Erofs,
    /// A FUSE file system of the whole tree.
    Tree,
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Shape::Erofs => "erofs",
            Shape::Tree => "tree",
        })
    }
}

/// What a lease is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Use {
    /// `mount`.
    Mount,
    /// `mount --rw`: below an overlay.
    Rw,
    /// `run`: below a container's overlay.
    Run,
    /// A tree whose kernel mount fusermount3 made.
    User,
}

impl fmt::Display for Use {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Use::Mount => "mount",
            Use::Rw => "mount --rw",
            Use::Run => "run",
            Use::User => "user mount",
        })
    }
}

/// A device number as mountinfo prints it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dev {
    /// Major number.
    pub major: u32,
    /// Minor number.
    pub minor: u32,
}

impl Dev {
    /// From an `st_dev`.
    pub fn from_st(dev: u64) -> Dev {
        Dev { major: rustix::fs::major(dev), minor: rustix::fs::minor(dev) }
    }

    /// Reads `MAJOR:MINOR`.
    pub fn parse(text: &str) -> Option<Dev> {
        let (major, minor) = text.split_once(':')?;
        Some(Dev { major: major.parse().ok()?, minor: minor.parse().ok()? })
    }
}

impl fmt::Display for Dev {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

impl Serialize for Dev {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Dev {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Dev, D::Error> {
        let text = String::deserialize(d)?;
        Dev::parse(&text).ok_or_else(|| serde::de::Error::custom("not MAJOR:MINOR"))
    }
}

/// A file system on top of an image's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Top {
    /// Its superblock.
    pub device: Dev,
    /// The source that mountinfo shows for it; unique, because device numbers are used again.
    pub source: String,
}

/// One claim on a mounted image, as `ps` shows it and `leases.json` keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Its number, unique within one daemon's life.
    pub id: u64,
    /// The image's name when it was mounted.
    pub image: String,
    /// The digest of its index.
    pub index: String,
    /// How it is mounted.
    pub shape: Shape,
    /// What for.
    pub r#use: Use,
    /// Where the user sees it.
    pub target: String,
    /// The superblock that serves it.
    pub device: Dev,
    /// The source that mountinfo shows for it.
    pub source: String,
    /// What the user sees mounted, where that is another file system on top (an overlay).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub top: Option<Top>,
    /// Process that asked for it.
    pub pid: i32,
    /// Seconds since 1970.
    pub since: u64,
    /// The upper directory of `--rw`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upper: Option<String>,
    /// The container of `run`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
}

/// What a client asks for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Request {
    /// First message of a connection.
    Hello {
        /// [`VERSION`].
        version: u32,
    },
    /// Who the daemon is and what it does.
    Status,
    /// A detached mount of an image; the reply carries its descriptor.
    Mount(MountRequest),
    /// The mount of a lease is where the user sees it; before this the lease ends with the connection.
    Attached {
        /// The lease.
        lease: u64,
        /// Where.
        target: String,
        /// The file system on top, if there is one.
        #[serde(default)]
        top: Option<Top>,
        /// The upper directory of `--rw`.
        #[serde(default)]
        upper: Option<String>,
        /// The container of `run`.
        #[serde(default)]
        container: Option<String>,
    },
    /// Serve the tree of an image on the FUSE device that comes with this message; the lease starts at once.
    Serve {
        /// Digest of the index.
        index: String,
        /// Name, for people.
        image: String,
        /// Where fusermount3 mounted it.
        target: String,
    },
    /// Look again which leases still live: something was unmounted.
    Rescan,
    /// All leases.
    Leases,
    /// Counters.
    Stats,
    /// Evict every frame of an image's objects (all images': without `index`) from the cache.
    DropCaches {
        /// Digest of the index.
        #[serde(default)]
        index: Option<String>,
    },
    /// Remove the spaces of objects that the store no longer has, and close those that nobody uses.
    Prune,
    /// End: at once when nothing is mounted, otherwise with the last lease; with `force` unmount everything first.
    Stop {
        /// Unmount what can be unmounted and end now.
        force: bool,
    },
}

/// Asks for a detached mount.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountRequest {
    /// Digest of the index.
    pub index: String,
    /// Name, for people.
    pub image: String,
    /// The shape; without it the daemon chooses.
    #[serde(default)]
    pub shape: Option<Shape>,
    /// What for.
    pub r#use: Use,
    /// Where the caller is going to attach it.
    pub target: String,
    /// Honour set-user-ID bits and file capabilities.
    #[serde(default)]
    pub suid: bool,
    /// Honour device nodes.
    #[serde(default)]
    pub dev: bool,
}

/// What the daemon answers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Reply {
    /// To `hello`.
    Hello {
        /// [`VERSION`].
        version: u32,
        /// The daemon's process.
        pid: i32,
        /// The root directory that it serves.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        root: Option<String>,
    },
    /// To `status`.
    Status(Status),
    /// To `mount`; one descriptor comes with it.
    Mounted {
        /// Its lease, pending until `attached`.
        lease: u64,
        /// The shape that was taken.
        shape: Shape,
        /// Why, when the daemon chose.
        why: String,
        /// The superblock's device number.
        device: Dev,
        /// What mountinfo shows as its source.
        source: String,
        /// Whether this is another mount of a superblock that was there already.
        shared: bool,
        /// Microseconds that the daemon took.
        micros: u64,
    },
    /// To `prune`.
    Pruned {
        /// Bytes that it freed.
        bytes: u64,
    },
    /// To `serve`.
    Serving {
        /// Its lease.
        lease: u64,
    },
    /// To `leases`.
    Leases {
        /// In order of their numbers.
        leases: Vec<Lease>,
    },
    /// To `stats`: free-form JSON, described in `doc/cli.md`.
    Stats {
        /// The counters.
        stats: serde_json::Value,
    },
    /// Done, nothing to say.
    Done,
    /// To `stop`: what is still mounted (empty: the daemon ends now).
    Stopping {
        /// Leases that keep it.
        leases: Vec<Lease>,
    },
    /// It failed.
    Error {
        /// Exit code of its kind.
        code: u8,
        /// What, where and what to do.
        message: String,
    },
}

/// Who a daemon is and what it does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// Its process.
    pub pid: i32,
    /// LazyRoot's version.
    pub version: String,
    /// The root directory it serves.
    pub root: String,
    /// Seconds since 1970.
    pub since: u64,
    /// Seconds without leases after which it ends; 0 never.
    pub idle: u64,
    /// Whether it holds mounts in a mount namespace of its own (else: user trees only).
    pub privileged: bool,
    /// Leases.
    pub leases: usize,
    /// Superblocks.
    pub superblocks: usize,
    /// Whether it ends with the last lease.
    pub stopping: bool,
}

impl Reply {
    /// An error reply.
    pub fn error(kind: Kind, message: impl Into<String>) -> Reply {
        Reply::Error { code: kind.code(), message: message.into() }
    }

    /// The failure in an error reply, or the reply.
    pub fn ok(self) -> Result<Reply, Failure> {
        match self {
            Reply::Error { code, message } => Err(Failure::new(Kind::from_code(code), message)),
            other => Ok(other),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_form_that_the_specification_shows() {
        let table = [
            (Request::Hello { version: 1 }, r#"{"type":"hello","version":1}"#),
            (Request::Status, r#"{"type":"status"}"#),
            (
                Request::Mount(MountRequest {
                    index: "ab".into(),
                    image: "debian:latest".into(),
                    shape: Some(Shape::Erofs),
                    r#use: Use::Mount,
                    target: "/mnt".into(),
                    suid: false,
                    dev: false,
                }),
                r#"{"type":"mount","index":"ab","image":"debian:latest","shape":"erofs","use":"mount","target":"/mnt","suid":false,"dev":false}"#,
            ),
            (Request::Stop { force: true }, r#"{"type":"stop","force":true}"#),
        ];
        for (request, text) in table {
            assert_eq!(serde_json::to_string(&request).unwrap(), text);
            assert_eq!(serde_json::from_str::<Request>(text).unwrap(), request);
        }
        let reply = Reply::error(Kind::Busy, "in use");
        assert_eq!(serde_json::to_string(&reply).unwrap(), r#"{"type":"error","code":4,"message":"in use"}"#);
        assert_eq!(reply.ok().unwrap_err().kind(), Kind::Busy);
    }

    #[test]
    fn unknown_fields_are_ignored_and_unknown_requests_refused() {
        assert!(serde_json::from_str::<Request>(r#"{"type":"status","new":1}"#).is_ok());
        assert!(serde_json::from_str::<Request>(r#"{"type":"fly"}"#).is_err());
    }

    #[test]
    fn devices_print_as_mountinfo_does() {
        assert_eq!(Dev::parse("0:45"), Some(Dev { major: 0, minor: 45 }));
        assert_eq!(Dev::parse("x"), None);
        assert_eq!(serde_json::to_string(&Dev { major: 8, minor: 1 }).unwrap(), "\"8:1\"");
    }
}
