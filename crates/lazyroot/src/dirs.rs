//! Where things are: the root directory (the store and the cache, kept) and the state directory (socket, locks,
//! leases and log, gone with a reboot). Made with mode 0700; directories of somebody else are refused, to root as well:
//! their owner could put other files in the place of what is trusted here.

use crate::failure::Failure;
use anyhow::Context;
use rustix::fs::{Mode, OFlags};
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// The two directories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Dirs {
    /// The store and the cache.
    pub root: PathBuf,
    /// Socket, locks, leases, log.
    pub state: PathBuf,
}

/// What decides the defaults; values, so that it can be tested.
#[derive(Debug, Clone, Default)]
pub struct Surroundings {
    /// Effective user.
    pub uid: u32,
    /// `LAZYROOT_ROOT`.
    pub root: Option<OsString>,
    /// `LAZYROOT_STATE`.
    pub state: Option<OsString>,
    /// `HOME`.
    pub home: Option<OsString>,
    /// `XDG_DATA_HOME`.
    pub data_home: Option<OsString>,
    /// `XDG_RUNTIME_DIR`.
    pub runtime_dir: Option<OsString>,
}

impl Surroundings {
    /// This process's.
    pub fn of_process() -> Surroundings {
        let var = |name| std::env::var_os(name).filter(|v| !v.is_empty());
        Surroundings {
            uid: rustix::process::geteuid().as_raw(),
            root: var("LAZYROOT_ROOT"),
            state: var("LAZYROOT_STATE"),
            home: var("HOME"),
            data_home: var("XDG_DATA_HOME"),
            runtime_dir: var("XDG_RUNTIME_DIR"),
        }
    }
}

/// Chooses the directories, without touching the disk. A root that was named gets a state directory of its own,
/// so that two roots never share a daemon.
pub fn choose(root: Option<PathBuf>, state: Option<PathBuf>, s: &Surroundings) -> Result<Dirs, Failure> {
    let named = root.or_else(|| s.root.clone().map(PathBuf::from));
    let absolute = |p: &OsString| Some(PathBuf::from(p)).filter(|p| p.is_absolute());
    let default_root = || {
        if s.uid == 0 {
            return Ok(PathBuf::from("/var/lib/lazyroot"));
        }
        let base = s.data_home.as_ref().and_then(absolute);
        let base = base.or_else(|| s.home.as_ref().and_then(absolute).map(|h| h.join(".local/share")));
        base.map(|b| b.join("lazyroot"))
            .ok_or_else(|| Failure::usage("no home directory is known; say --root DIR or set LAZYROOT_ROOT"))
    };
    let base = match (s.uid, s.runtime_dir.as_ref().and_then(absolute)) {
        (0, _) => PathBuf::from("/run/lazyroot"),
        (_, Some(dir)) => dir.join("lazyroot"),
        (uid, None) => PathBuf::from(format!("/tmp/lazyroot-{uid}")),
    };
    let state = state.or_else(|| s.state.clone().map(PathBuf::from));
    // Runtimes are run in other directories, and the daemon is another process.
    let full = |what: &str, path: PathBuf| {
        std::path::absolute(&path).map_err(|e| Failure::usage(format!("--{what} {}: {e}", path.display())))
    };
    let named = named.map(|p| full("root", p)).transpose()?;
    let state = state.map(|p| full("state", p)).transpose()?;
    Ok(match (named, state) {
        (None, state) => Dirs { root: default_root()?, state: state.unwrap_or(base) },
        (Some(root), Some(state)) => Dirs { root, state },
        (Some(root), None) => {
            let name = &blake3::hash(root.as_os_str().as_bytes()).to_hex()[..16];
            let state = match base.parent() {
                // Not deeper in there: whether a directory is its user's own is only asked of the last one.
                Some(tmp) if tmp == Path::new("/tmp") => tmp.join(format!("lazyroot-{}-{name}", s.uid)),
                _ => base.join("roots").join(name),
            };
            Dirs { state, root }
        }
    })
}

impl Dirs {
    /// Makes both directories absolute and creates them where they are missing.
    pub fn prepare(self) -> anyhow::Result<Dirs> {
        Ok(Dirs { root: private_dir(&self.root, "root")?, state: private_dir(&self.state, "state")? })
    }

    /// The control socket.
    pub fn socket(&self) -> PathBuf {
        self.state.join("control.sock")
    }

    /// Held by the daemon for as long as it lives.
    pub fn daemon_lock(&self) -> PathBuf {
        self.state.join("daemon.lock")
    }

    /// Held by the daemon too: one daemon for a root, whatever state directories there are.
    pub fn root_lock(&self) -> PathBuf {
        self.root.join("daemon.lock")
    }

    /// Mounts of daemons that were killed, which could not be taken away yet.
    pub fn lost(&self) -> PathBuf {
        self.state.join("lost.json")
    }

    /// The leases.
    pub fn leases(&self) -> PathBuf {
        self.state.join("leases.json")
    }

    /// The daemon's log.
    pub fn log(&self) -> PathBuf {
        self.state.join("daemon.log")
    }

    /// What a container needs while it runs.
    pub fn bundles(&self) -> PathBuf {
        self.state.join("containers")
    }

    /// What stays of containers.
    pub fn containers(&self) -> PathBuf {
        self.root.join("containers")
    }

    /// Upper directories of `mount --rw`.
    pub fn uppers(&self) -> PathBuf {
        self.root.join("upper")
    }
}

/// Creates a directory with mode 0700 (parents as the umask says) and checks that it is ours.
pub fn private_dir(path: &Path, what: &str) -> anyhow::Result<PathBuf> {
    if !path.is_dir() {
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)
                .with_context(|| format!("{what} directory: cannot create {}", parent.display()))?;
        }
        match std::fs::DirBuilder::new().mode(0o700).create(path) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => {
                return Err(e).with_context(|| format!("cannot create the {what} directory {}", path.display()));
            }
            _ => {}
        }
    }
    let path = path.canonicalize().with_context(|| format!("{what} directory {}", path.display()))?;
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::RDONLY;
    let dir = rustix::fs::open(&path, flags, Mode::empty())
        .with_context(|| format!("{what} directory {}", path.display()))?;
    let dir = std::fs::File::from(dir);
    let meta = dir.metadata()?;
    let me = rustix::process::geteuid().as_raw();
    if meta.uid() != me {
        return Err(Failure::unavailable(format!(
            "{what} directory {} belongs to user {}, not to you (user {me}); name another one with --{what}",
            path.display(),
            meta.uid()
        ))
        .into());
    }
    if what == "state" && meta.mode() & 0o077 != 0 {
        if let Some(other) = foreign_name(&path)? {
            return Err(Failure::usage(format!(
                "state directory {} is open to others and holds other things ({other:?}); name one that is lazyroot's alone with --state, or chmod 700 it",
                path.display()
            ))
            .into());
        }
        dir.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o700))
            .with_context(|| format!("cannot make {} private", path.display()))?;
    }
    Ok(path)
}

/// A name in a directory that shows that it is no state directory of ours; none when it is empty or is one.
fn foreign_name(dir: &Path) -> anyhow::Result<Option<OsString>> {
    let mut foreign = None;
    for entry in std::fs::read_dir(dir).with_context(|| dir.display().to_string())? {
        let name = entry?.file_name();
        if ["daemon.lock", "roots"].iter().any(|ours| name == *ours) {
            return Ok(None);
        }
        foreign.get_or_insert(name);
    }
    Ok(foreign)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_follow_the_user_and_the_environment() {
        let os = |s: &str| Some(OsString::from(s));
        let root = Surroundings::default();
        let user = Surroundings { uid: 1000, home: os("/home/u"), ..Default::default() };
        let xdg = Surroundings { data_home: os("/data"), runtime_dir: os("/run/user/1000"), ..user.clone() };
        let get = |r: Option<&str>, st: Option<&str>, s: &Surroundings| {
            let d = choose(r.map(Into::into), st.map(Into::into), s).unwrap();
            (d.root.to_str().unwrap().to_owned(), d.state.to_str().unwrap().to_owned())
        };
        assert_eq!(get(None, None, &root), ("/var/lib/lazyroot".into(), "/run/lazyroot".into()));
        assert_eq!(get(None, None, &user), ("/home/u/.local/share/lazyroot".into(), "/tmp/lazyroot-1000".into()));
        assert_eq!(get(None, None, &xdg), ("/data/lazyroot".into(), "/run/user/1000/lazyroot".into()));
        assert_eq!(get(Some("/r"), Some("/s"), &root), ("/r".into(), "/s".into()));
        let (_, s) = get(Some("/r"), None, &user);
        assert!(s.starts_with("/tmp/lazyroot-1000-") && s.matches('/').count() == 2, "{s}");
        let (r, s) = get(Some("/r"), None, &root);
        assert_eq!(r, "/r");
        assert!(s.starts_with("/run/lazyroot/roots/") && s.len() == "/run/lazyroot/roots/".len() + 16, "{s}");
        assert_ne!(get(Some("/r2"), None, &root).1, s);
        let env = Surroundings { root: os("/er"), state: os("/es"), ..Default::default() };
        assert_eq!(get(None, None, &env), ("/er".into(), "/es".into()));
        assert_eq!(get(Some("/r"), Some("/s"), &env), ("/r".into(), "/s".into()));
        let here = std::env::current_dir().unwrap().display().to_string();
        assert_eq!(get(Some("r"), Some("s"), &root), (format!("{here}/r"), format!("{here}/s")));
        assert!(choose(None, None, &Surroundings { uid: 7, ..Default::default() }).is_err());
    }

    #[test]
    fn directories_are_private() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = private_dir(&tmp.path().join("a/b"), "state").unwrap();
        assert_eq!(std::fs::metadata(&dir).unwrap().mode() & 0o777, 0o700);
        std::fs::set_permissions(&dir, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        private_dir(&dir, "state").unwrap();
        assert_eq!(std::fs::metadata(&dir).unwrap().mode() & 0o777, 0o700);
    }

    #[test]
    fn a_directory_that_others_use_is_not_closed_to_them() {
        let tmp = tempfile::tempdir().unwrap();
        let set = |mode| std::fs::set_permissions(tmp.path(), std::os::unix::fs::PermissionsExt::from_mode(mode));
        let mode = || std::fs::metadata(tmp.path()).unwrap().mode() & 0o7777;
        std::fs::write(tmp.path().join("somebody's"), b"").unwrap();
        set(0o1777).unwrap();
        let error = private_dir(tmp.path(), "state").unwrap_err();
        assert!(error.to_string().contains("somebody's") && error.to_string().contains("--state"), "{error}");
        assert_eq!(mode(), 0o1777);
        // One that a daemon has had is a state directory.
        std::fs::write(tmp.path().join("daemon.lock"), b"").unwrap();
        private_dir(tmp.path(), "state").unwrap();
        assert_eq!(mode() & 0o777, 0o700);
    }

    #[test]
    fn priv_directories_of_others_are_refused_to_root_as_well() {
        if rustix::process::geteuid().as_raw() != 0 {
            println!("SKIP priv_directories_of_others_are_refused_to_root_as_well: not root");
            return;
        }
        for what in ["root", "state"] {
            let tmp = tempfile::tempdir().unwrap();
            private_dir(tmp.path(), what).unwrap();
            std::os::unix::fs::chown(tmp.path(), Some(65534), Some(65534)).unwrap();
            let error = private_dir(tmp.path(), what).unwrap_err();
            assert!(error.to_string().contains("belongs to user 65534"), "{error}");
            assert_eq!(crate::errors::kind_of(&error), crate::failure::Kind::Unavailable);
        }
    }
}
