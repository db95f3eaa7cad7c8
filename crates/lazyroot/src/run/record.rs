//! What stays of a container: its record and its upper directory, below the root directory.
//!
//! A record is one JSON file, replaced atomically. Whether a container that was running still is, is asked of the
//! process table and of the runtime, not believed.

use super::runtime::{self, Way};
use crate::dirs::{Dirs, private_dir};
use crate::failure::Failure;
use crate::mounts::remove_tree;
use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// The record's version.
pub const VERSION: u32 = 1;

/// A container.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// [`VERSION`].
    pub version: u32,
    /// Twelve hexadecimal digits.
    pub id: String,
    /// The user's name for it.
    pub name: String,
    /// Its image, and the digest of that's index.
    pub image: String,
    /// Digest of the index.
    pub index: String,
    /// The command line.
    pub command: Vec<String>,
    /// Seconds since 1970.
    pub created: u64,
    /// How it runs.
    pub way: Way,
    /// Where the runtime is.
    pub runtime: PathBuf,
    /// The state directory that the runtime keeps its own state below.
    pub state: PathBuf,
    /// Whether it is removed when it ends.
    pub rm: bool,
    /// The `lazyroot run` that looks after it: process and start time.
    pub runner: (i32, u64),
    /// Its exit status and when, once it has ended.
    pub ended: Option<(u8, u64)>,
}

/// How a container is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    /// Somebody looks after it.
    Running,
    /// It runs, but its `lazyroot run` was killed.
    Orphaned,
    /// It ended with this status.
    Exited(u8),
    /// It is gone, and nobody saw how.
    Lost,
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Status::Running => f.write_str("running"),
            Status::Orphaned => f.write_str("running, not looked after"),
            Status::Exited(code) => write!(f, "exited ({code})"),
            Status::Lost => f.write_str("lost"),
        }
    }
}

/// When a process started, in clock ticks since the boot: with the pid it names one process. `None` also for one
/// that has ended and only waits to be collected.
pub fn start_time(pid: i32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The command name is in parentheses and may hold anything.
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    if matches!(fields.next()?, "Z" | "X") {
        return None;
    }
    fields.nth(18)?.parse().ok()
}

impl Record {
    /// Where its record and upper directory are.
    pub fn dir(&self, dirs: &Dirs) -> PathBuf {
        dirs.containers().join(&self.id)
    }

    /// Where its bundle is.
    pub fn bundle(&self, dirs: &Dirs) -> PathBuf {
        dirs.bundles().join(&self.id)
    }

    /// Writes the record.
    pub fn write(&self, dirs: &Dirs) -> anyhow::Result<()> {
        let file = self.dir(dirs).join("container.json");
        let tmp = file.with_extension("json.tmp");
        let io = |op| {
            let file = file.clone();
            move |e| store::StoreError::io(op, file, e)
        };
        std::fs::write(&tmp, serde_json::to_vec(self)?).map_err(io("write"))?;
        std::fs::rename(&tmp, &file).map_err(io("replace"))?;
        Ok(())
    }

    /// How it is.
    pub fn status(&self) -> Status {
        if let Some((code, _)) = self.ended {
            return Status::Exited(code);
        }
        if start_time(self.runner.0) == Some(self.runner.1) {
            return Status::Running;
        }
        let output = runtime::command(&self.runtime, self.way, &self.state, None)
            .args(["state", &self.id])
            .stdin(Stdio::null())
            .stderr(Stdio::null())
            .output();
        let running = output.is_ok_and(|o| {
            let value: serde_json::Value = serde_json::from_slice(&o.stdout).unwrap_or_default();
            value["status"] == "running"
        });
        if running { Status::Orphaned } else { Status::Lost }
    }

    /// Makes the runtime forget it, killing what still runs.
    pub fn delete_in_runtime(&self) {
        // It may not know it any more, which is as good.
        let _ = runtime::command(&self.runtime, self.way, &self.state, None)
            .args(["delete", "--force", &self.id])
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status();
    }

    /// Removes everything of it.
    pub fn remove(&self, dirs: &Dirs) -> anyhow::Result<()> {
        self.delete_in_runtime();
        for dir in [self.bundle(dirs), self.dir(dirs)] {
            remove_tree(&dir).with_context(|| format!("removing {}", dir.display()))?;
        }
        Ok(())
    }
}

/// Every container, oldest first. Records that cannot be read are left out: they are no containers of this version.
pub fn all(dirs: &Dirs) -> anyhow::Result<Vec<Record>> {
    let dir = dirs.containers();
    let entries = match std::fs::read_dir(&dir) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(e).with_context(|| dir.display().to_string()),
    };
    let mut records: Vec<Record> = entries.flatten().filter_map(|e| read(&e.path())).collect();
    records.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
    Ok(records)
}

fn read(dir: &Path) -> Option<Record> {
    let text = std::fs::read(dir.join("container.json")).ok()?;
    let record: Record = serde_json::from_slice(&text).ok()?;
    // The identifier becomes part of paths.
    (record.version == VERSION && dir.file_name()?.to_str()? == record.id).then_some(record)
}

/// The container of that name or identifier (or an unambiguous beginning of it).
pub fn find(dirs: &Dirs, text: &str) -> anyhow::Result<Record> {
    let all = all(dirs)?;
    if let Some(record) = all.iter().find(|r| r.id == text || r.name == text) {
        return Ok(record.clone());
    }
    let mut begin = all.iter().filter(|r| text.len() >= 4 && r.id.starts_with(text));
    match (begin.next(), begin.next()) {
        (Some(record), None) => Ok(record.clone()),
        (Some(_), Some(_)) => {
            Err(Failure::usage(format!("{text} begins several containers' identifiers; say more of it")).into())
        }
        _ => Err(Failure::not_found(format!("no container {text}; `lazyroot ps -a` lists what there is")).into()),
    }
}

/// Makes the directories of a new container.
pub fn make_dirs(dirs: &Dirs, id: &str) -> anyhow::Result<(PathBuf, PathBuf)> {
    private_dir(&dirs.containers(), "root")?;
    private_dir(&dirs.bundles(), "state")?;
    Ok((private_dir(&dirs.containers().join(id), "root")?, private_dir(&dirs.bundles().join(id), "state")?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::runtime::WAYS;

    #[test]
    fn records_are_found_by_name_and_by_the_beginning_of_their_identifier() {
        let tmp = tempfile::tempdir().unwrap();
        let dirs = Dirs { root: tmp.path().join("r"), state: tmp.path().join("s") }.prepare().unwrap();
        assert!(all(&dirs).unwrap().is_empty());
        for (id, name) in [("aaaa11112222", "one"), ("aaaa11113333", "two")] {
            make_dirs(&dirs, id).unwrap();
            let record = Record {
                version: VERSION,
                id: id.into(),
                name: name.into(),
                image: "i:latest".into(),
                index: "ab".into(),
                command: vec!["sh".into()],
                created: 1,
                way: WAYS[1],
                runtime: "/nonexistent".into(),
                state: dirs.state.clone(),
                rm: false,
                runner: (std::process::id() as i32, 0),
                ended: Some((3, 2)),
            };
            record.write(&dirs).unwrap();
        }
        assert_eq!(find(&dirs, "two").unwrap().id, "aaaa11113333");
        assert_eq!(find(&dirs, "aaaa11112").unwrap().name, "one");
        assert!(find(&dirs, "aaaa1111").unwrap_err().to_string().contains("several"));
        assert!(find(&dirs, "aaa").is_err() && find(&dirs, "../x").is_err());
        let record = find(&dirs, "one").unwrap();
        assert_eq!(record.status(), Status::Exited(3));
        record.remove(&dirs).unwrap();
        assert!(find(&dirs, "one").is_err());
    }

    #[test]
    fn a_process_has_one_start_time() {
        let me = std::process::id() as i32;
        assert!(start_time(me).is_some());
        assert_eq!(start_time(me), start_time(me));
        assert_eq!(start_time(0), None);
        let mut child = std::process::Command::new("true").spawn().unwrap();
        sys::proc::PidFd::open(child.id() as i32).unwrap().wait(None).unwrap();
        assert_eq!(start_time(child.id() as i32), None, "it has ended");
        child.wait().unwrap();
    }
}
