//! Which container runtime, and how: whatever works on this host's cgroups, found out by trying.
//!
//! Debian's crun refuses hosts with both cgroup versions, runc does not; where groups cannot be created, both can do
//! without. Each way is tried by creating and deleting a container that runs nothing; the outcome is kept in the
//! state directory for as long as programs and cgroup mounts stay the same.

use super::spec::{self, Cgroups, Decided};
use super::user::User;
use crate::failure::Failure;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::fmt;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// A runtime's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Name {
    /// crun
    Crun,
    /// runc
    Runc,
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Name::Crun => "crun",
            Name::Runc => "runc",
        })
    }
}

/// A way of running containers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Way {
    /// The runtime.
    pub name: Name,
    /// Whether containers get a cgroup of their own.
    pub cgroups: bool,
}

/// Every way, the best first: with a group of its own, then the faster runtime.
pub const WAYS: [Way; 4] = [
    Way { name: Name::Crun, cgroups: true },
    Way { name: Name::Runc, cgroups: true },
    Way { name: Name::Crun, cgroups: false },
    Way { name: Name::Runc, cgroups: false },
];

impl Way {
    /// Arguments before the command.
    fn global_args(self) -> &'static [&'static str] {
        match (self.name, self.cgroups) {
            (_, true) => &[],
            (Name::Crun, false) => &["--cgroup-manager=disabled"],
            // Does not change whom it runs as; groups that cannot be made are then no error.
            (Name::Runc, false) => &["--rootless=true"],
        }
    }

    /// What a container with that identifier is told about cgroups.
    pub fn cgroups_of(self, id: &str) -> Cgroups {
        Cgroups { path: self.cgroups.then(|| format!("/lazyroot/{id}")), mount: self.cgroups }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.name, if self.cgroups { "" } else { " without cgroups" })
    }
}

/// What trying a way gave.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tried {
    /// The way.
    pub way: Way,
    /// Why it does not work; none: it does.
    pub error: Option<String>,
}

/// The runtimes of this host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Found {
    /// What must stay the same for this to hold.
    key: String,
    /// Where crun is.
    pub crun: Option<PathBuf>,
    /// Where runc is.
    pub runc: Option<PathBuf>,
    /// What was tried, in the order of [`WAYS`]; ways of absent programs are left out.
    pub tried: Vec<Tried>,
    /// Whether it was tried just now.
    #[serde(skip)]
    pub fresh: bool,
}

/// How this host's cgroups are mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hierarchy {
    /// Version 2 only.
    Unified,
    /// Version 1, with version 2 beside it.
    Hybrid,
    /// Version 1 only.
    Legacy,
    /// Nothing at `/sys/fs/cgroup`.
    Absent,
}

impl fmt::Display for Hierarchy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Hierarchy::Unified => "version 2",
            Hierarchy::Hybrid => "hybrid: version 1 with version 2 beside it",
            Hierarchy::Legacy => "version 1",
            Hierarchy::Absent => "not mounted",
        })
    }
}

/// The cgroup mounts of this process's namespace: how, and a text that changes when they do.
pub fn hierarchy() -> (Hierarchy, String) {
    let mounts = sys::mountinfo::of_self().unwrap_or_default();
    let groups: Vec<_> = mounts.iter().filter(|m| m.mount_point.starts_with("/sys/fs/cgroup")).collect();
    let is = |fs: &str| groups.iter().any(|m| m.fstype == fs);
    let top = groups.iter().rev().find(|m| m.mount_point == Path::new("/sys/fs/cgroup"));
    let kind = match (top.is_some_and(|m| m.fstype == "cgroup2"), is("cgroup"), is("cgroup2")) {
        (true, _, _) => Hierarchy::Unified,
        (false, true, true) => Hierarchy::Hybrid,
        (false, true, false) => Hierarchy::Legacy,
        (false, false, _) => Hierarchy::Absent,
    };
    let texts: Vec<String> =
        groups.iter().map(|m| format!("{}:{}:{}", m.mount_point.display(), m.fstype, m.options)).collect();
    (kind, texts.join(" "))
}

/// An executable in the search path.
pub fn in_path(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| spec::DEFAULT_PATH.into());
    // Also where an ordinary user's path does not reach.
    let dirs = std::env::split_paths(&path).chain(["/usr/sbin", "/usr/local/sbin", "/sbin"].map(PathBuf::from));
    dirs.map(|d| d.join(name)).find(|p| p.metadata().is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0))
}

impl Found {
    /// Where a runtime is.
    pub fn path(&self, name: Name) -> Option<&Path> {
        match name {
            Name::Crun => self.crun.as_deref(),
            Name::Runc => self.runc.as_deref(),
        }
    }

    /// Looks for runtimes, and tries them where that has not been done. `state` keeps the outcome.
    pub fn look(state: &Path) -> anyhow::Result<Found> {
        let (crun, runc) = (in_path("crun"), in_path("runc"));
        let stamp = |p: &Option<PathBuf>| match p.as_ref().and_then(|p| Some((p, p.metadata().ok()?))) {
            Some((p, m)) => format!("{}:{}:{}:{}", p.display(), m.len(), m.mtime(), m.ino()),
            None => "absent".to_owned(),
        };
        let boot = crate::daemon::leases::boot_id();
        let key = format!("{} {} {} {boot} {}", stamp(&crun), stamp(&runc), env!("CARGO_PKG_VERSION"), hierarchy().1);
        let file = state.join("runtimes.json");
        if let Some(found) = Found::kept(&file, &key) {
            return Ok(found);
        }
        let mut found = Found { key, crun, runc, tried: Vec::new(), fresh: true };
        for way in WAYS {
            let Some(path) = found.path(way.name) else { continue };
            let error = probe(state, path, way).err().map(|e| crate::errors::message(&e));
            found.tried.push(Tried { way, error });
        }
        found.keep(&file);
        Ok(found)
    }

    /// Whether some way works.
    fn any_works(&self) -> bool {
        self.tried.iter().any(|t| t.error.is_none())
    }

    /// What was found before, if that still holds. Where nothing worked, it is tried again: what was in the way may be
    /// gone.
    fn kept(file: &Path, key: &str) -> Option<Found> {
        let found: Found = serde_json::from_slice(&std::fs::read(file).ok()?).ok()?;
        (found.key == key && found.any_works()).then_some(found)
    }

    /// Keeps what was found, when it is of use to the next one.
    fn keep(&self, file: &Path) {
        if self.any_works()
            && let Ok(text) = serde_json::to_vec(self)
        {
            // Only to save the next one the trying.
            let _ = std::fs::write(file, text);
        }
    }

    /// The best way that works, of the runtime that is wanted; and why, when that is not the first choice.
    pub fn choose(&self, wanted: Option<Name>) -> Result<(Way, PathBuf, Option<String>), Failure> {
        let fits = |way: &Way| wanted.is_none_or(|w| w == way.name);
        let mut refused = Vec::new();
        for way in WAYS.iter().filter(|w| fits(w)) {
            let Some(path) = self.path(way.name) else { continue };
            match self.tried.iter().find(|t| t.way == *way) {
                Some(Tried { error: None, .. }) => {
                    let why = (!refused.is_empty()).then(|| format!("{way}: {}", refused.join("; ")));
                    return Ok((*way, path.to_owned(), why));
                }
                Some(Tried { error: Some(e), .. }) => refused.push(format!("{way} does not work here ({e})")),
                None => {}
            }
        }
        let what = match wanted {
            Some(name) if self.path(name).is_none() => {
                format!("{name} is not installed; install it (apt install {name}) or choose another --runtime")
            }
            _ if refused.is_empty() => "neither crun nor runc is installed (apt install runc)".to_owned(),
            _ => format!("no container runtime works here: {}", refused.join("; ")),
        };
        Err(Failure::unavailable(what))
    }
}

/// A runtime's command line, up to the subcommand.
pub fn command(path: &Path, way: Way, state: &Path, log: Option<&Path>) -> Command {
    let mut command = Command::new(path);
    command.arg("--root").arg(state.join("runtime"));
    if let Some(log) = log {
        command.arg("--log").arg(log);
        if way.name == Name::Runc {
            command.args(["--log-format", "json"]);
        }
    }
    command.args(way.global_args());
    command
}

/// Creates and deletes a container that runs nothing.
fn probe(state: &Path, path: &Path, way: Way) -> anyhow::Result<()> {
    let id = format!("probe-{}-{}", std::process::id(), way.name);
    let bundle = state.join(&id);
    let result = try_create(state, path, way, &id, &bundle);
    // What is left of a failed one must not be in the way of the next.
    let _ = command(path, way, state, None)
        .args(["delete", "--force", &id])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    let _ = crate::mounts::remove_tree(&bundle);
    result
}

fn try_create(state: &Path, path: &Path, way: Way, id: &str, bundle: &Path) -> anyhow::Result<()> {
    let rootfs = bundle.join("rootfs");
    std::fs::create_dir_all(rootfs.join("proc")).context("a bundle to try the runtime with")?;
    let program = rootfs.join("program");
    std::fs::write(&program, b"")?;
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755))?;
    let capabilities: Vec<String> = spec::DEFAULT_CAPABILITIES.map(str::to_owned).to_vec();
    let decided = Decided {
        hostname: "probe".into(),
        rootfs: rootfs.display().to_string(),
        args: vec!["/program".into()],
        env: vec![format!("PATH={}", spec::DEFAULT_PATH)],
        cwd: "/".into(),
        user: User { uid: 0, gid: 0, groups: Vec::new(), home: "/".into() },
        terminal: false,
        host_network: false,
        volumes: Vec::new(),
        seccomp: super::seccomp::profile(std::env::consts::ARCH, &capabilities),
        capabilities,
        annotations: BTreeMap::new(),
        cgroups: way.cgroups_of(id),
    };
    std::fs::write(bundle.join("config.json"), json!(spec::config(&decided)).to_string())?;
    let output = command(path, way, state, None)
        .args(["create", "--bundle"])
        .arg(bundle)
        .arg(id)
        .stdin(Stdio::null())
        // The container's own streams are the runtime's: a pipe would stay open as long as it waits.
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(bundle.join("stderr"))?)
        .status()
        .with_context(|| format!("starting {}", path.display()))?;
    if output.success() {
        return Ok(());
    }
    let said = std::fs::read_to_string(bundle.join("stderr")).unwrap_or_default();
    let line = said.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("it said nothing");
    anyhow::bail!("{}", plain(line))
}

/// The message in a line of a runtime's log, text or JSON.
pub fn plain(line: &str) -> String {
    if let Ok(value) = serde_json::from_str::<serde_json::Value>(line)
        && let Some(text) = value["msg"].as_str()
    {
        return text.to_owned();
    }
    match line.split_once("msg=\"") {
        Some((_, rest)) => rest.strip_suffix('"').unwrap_or(rest).replace("\\\"", "\""),
        None => line.trim().to_owned(),
    }
}

/// A runtime's version, first line.
pub fn version(path: &Path) -> Option<String> {
    let output = Command::new(path).arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).output().ok()?;
    Some(String::from_utf8_lossy(&output.stdout).lines().next()?.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(tried: &[(Way, Option<&str>)]) -> Found {
        Found {
            key: String::new(),
            crun: Some("/c".into()),
            runc: Some("/r".into()),
            tried: tried.iter().map(|(way, e)| Tried { way: *way, error: e.map(str::to_owned) }).collect(),
            fresh: false,
        }
    }

    #[test]
    fn the_best_way_that_works_is_taken_and_explained() {
        let hybrid = Some("cgroups in hybrid mode not supported");
        let host = found(&[(WAYS[0], hybrid), (WAYS[1], None), (WAYS[2], hybrid), (WAYS[3], None)]);
        let (way, path, why) = host.choose(None).unwrap();
        assert_eq!((way, path), (WAYS[1], PathBuf::from("/r")));
        assert!(why.unwrap().contains("hybrid"));
        let error = host.choose(Some(Name::Crun)).unwrap_err().to_string();
        assert!(error.contains("hybrid"), "{error}");
        let all = found(&[(WAYS[0], None), (WAYS[1], None)]);
        assert_eq!(all.choose(None).unwrap().0, WAYS[0]);
        assert_eq!(all.choose(None).unwrap().2, None);
        let mut none = found(&[]);
        (none.crun, none.runc) = (None, None);
        assert!(none.choose(None).unwrap_err().to_string().contains("apt install"));
        assert!(none.choose(Some(Name::Crun)).unwrap_err().to_string().contains("crun is not installed"));
    }

    #[test]
    fn what_failed_altogether_is_tried_again() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("runtimes.json");
        let failed = found(&[(WAYS[0], Some("no")), (WAYS[1], Some("no"))]);
        failed.keep(&file);
        assert!(!file.exists());
        // As a version before this one kept it.
        std::fs::write(&file, serde_json::to_vec(&failed).unwrap()).unwrap();
        assert_eq!(Found::kept(&file, ""), None);
        let works = found(&[(WAYS[0], Some("no")), (WAYS[1], None)]);
        works.keep(&file);
        assert_eq!(Found::kept(&file, ""), Some(works));
        assert_eq!(Found::kept(&file, "another"), None);
    }

    #[test]
    fn log_lines_are_made_plain() {
        for (line, want) in [
            ("time=\"x\" level=error msg=\"runc run failed: exec: \\\"a\\\"\"", "runc run failed: exec: \"a\""),
            ("{\"level\":\"error\",\"msg\":\"boom\"}", "boom"),
            ("plain words\n", "plain words"),
        ] {
            assert_eq!(plain(line), want);
        }
    }
}
