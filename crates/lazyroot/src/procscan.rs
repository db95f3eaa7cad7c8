//! What `/proc` tells about mounts: which namespaces see a superblock, and which processes keep it busy.
//!
//! Everything is read from link texts and tables; no path below a mount of ours is ever touched, so a file system
//! whose server is gone (or is this process) cannot block the scan. A namespace that no process is in (kept by a
//! bind mount or a descriptor only) is not seen.

use crate::control::proto::Dev;
use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::{Path, PathBuf};
use sys::mountinfo::{self, Entry};

/// One mount namespace.
#[derive(Debug, Clone)]
pub struct Namespace {
    /// `mnt:[NUMBER]`.
    pub id: OsString,
    /// A process in it.
    pub pid: i32,
    /// Its mounts.
    pub mounts: Vec<Entry>,
}

/// The device number of an entry.
pub fn dev_of(entry: &Entry) -> Dev {
    Dev { major: entry.dev.0, minor: entry.dev.1 }
}

/// The name of a process's mount namespace.
pub fn namespace_of(pid: &str) -> Option<OsString> {
    Some(std::fs::read_link(format!("/proc/{pid}/ns/mnt")).ok()?.into_os_string())
}

fn pids() -> impl Iterator<Item = i32> {
    std::fs::read_dir("/proc").into_iter().flatten().flatten().filter_map(|e| e.file_name().to_str()?.parse().ok())
}

/// Every mount namespace that some process is in, but for `skip`.
pub fn namespaces(skip: Option<&OsString>) -> Vec<Namespace> {
    let mut seen = HashSet::new();
    let mut found = Vec::new();
    for pid in pids() {
        let Some(id) = namespace_of(&pid.to_string()) else { continue };
        if Some(&id) == skip || seen.contains(&id) {
            continue;
        }
        // A process that ends between the two reads: another one of its namespace will do.
        if let Ok(mounts) = mountinfo::of(pid)
            && !mounts.is_empty()
        {
            seen.insert(id.clone());
            found.push(Namespace { id, pid, mounts });
        }
    }
    found
}

/// A process that keeps a mount busy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct User {
    /// Process.
    pub pid: i32,
    /// Its command name.
    pub command: String,
    /// How: `cwd`, `root`, `exe`, `fd`, `map`.
    pub how: &'static str,
}

impl std::fmt::Display for User {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({}, {})", self.pid, self.command, self.how)
    }
}

/// The processes that keep the superblock `dev` busy, at most `limit`: any mount of it, or those `at` a path, in every
/// namespace. Not `skip`, the daemon, which holds its own mounts.
pub fn users_of(dev: Dev, at: Option<&Path>, limit: usize, skip: Option<i32>) -> Vec<User> {
    let mut users = Vec::new();
    let mut tables: BTreeMap<OsString, Vec<Entry>> = BTreeMap::new();
    for pid in pids() {
        if users.len() >= limit {
            break;
        }
        if Some(pid) == skip {
            continue;
        }
        let Some(ns) = namespace_of(&pid.to_string()) else { continue };
        let table = tables.entry(ns).or_insert_with(|| mountinfo::of(pid).unwrap_or_default());
        let mounts: Vec<&Entry> = table.iter().filter(|e| dev_of(e) == dev).collect();
        let mounts: Vec<&Entry> = mounts.into_iter().filter(|e| at.is_none_or(|at| e.mount_point == at)).collect();
        if let Some(how) = how_it_uses(pid, dev, at, &mounts) {
            let command = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            users.push(User { pid, command: command.trim().to_owned(), how });
        }
    }
    users
}

fn how_it_uses(pid: i32, dev: Dev, at: Option<&Path>, mounts: &[&Entry]) -> Option<&'static str> {
    let below = |link: &Path| mounts.iter().any(|m| link.starts_with(&m.mount_point));
    for how in ["cwd", "root", "exe"] {
        if let Ok(link) = std::fs::read_link(format!("/proc/{pid}/{how}"))
            && link != Path::new("/")
            && below(&link)
        {
            return Some(how);
        }
    }
    if !mounts.is_empty() {
        for entry in std::fs::read_dir(format!("/proc/{pid}/fdinfo")).into_iter().flatten().flatten() {
            if let Ok(text) = std::fs::read_to_string(entry.path())
                && mount_id(&text).is_some_and(|id| mounts.iter().any(|m| m.id == id))
            {
                return Some("fd");
            }
        }
    }
    // Maps name the superblock itself, whatever the namespace.
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let there = |line: &str| at.and_then(Path::to_str).is_none_or(|at| line.contains(&format!(" {at}/")));
    maps.lines().any(|l| map_dev(l) == Some(dev) && there(l)).then_some("map")
}

/// The `mnt_id` of an fdinfo file.
fn mount_id(fdinfo: &str) -> Option<u64> {
    fdinfo.lines().find_map(|l| l.strip_prefix("mnt_id:"))?.trim().parse().ok()
}

/// The device of a line of a maps file (two hexadecimal numbers).
fn map_dev(line: &str) -> Option<Dev> {
    let (major, minor) = line.split_ascii_whitespace().nth(3)?.split_once(':')?;
    let number = |s| u32::from_str_radix(s, 16).ok();
    Some(Dev { major: number(major)?, minor: number(minor)? }).filter(|d| (d.major, d.minor) != (0, 0))
}

/// The mount that an open file is on, in this process's namespace. Asks its file system nothing, so a dead server does
/// not matter.
pub fn mount_of(fd: BorrowedFd<'_>) -> std::io::Result<Option<Entry>> {
    let text = std::fs::read_to_string(format!("/proc/thread-self/fdinfo/{}", fd.as_raw_fd()))?;
    let id = mount_id(&text);
    Ok(mountinfo::of_thread()?.into_iter().find(|e| Some(e.id) == id))
}

/// The topmost mount at exactly `target` in this process's namespace.
pub fn mounted_at(target: &Path) -> std::io::Result<Option<Entry>> {
    Ok(mountinfo::of_self()?.into_iter().rfind(|e| e.mount_point == target))
}

/// Mounts below `target`, deepest first.
pub fn mounted_below(target: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut below: Vec<PathBuf> = mountinfo::of_self()?
        .into_iter()
        .map(|e| e.mount_point)
        .filter(|m| m != target && m.starts_with(target))
        .collect();
    below.sort_by_key(|p| std::cmp::Reverse(p.components().count()));
    Ok(below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_the_kernel_are_read() {
        assert_eq!(mount_id("pos:\t0\nflags:\t0100000\nmnt_id:\t29\n"), Some(29));
        assert_eq!(mount_id("pos:\t0\n"), None);
        assert_eq!(map_dev("7f00-7f01 r-xp 00000000 fe:0a 1234 /bin/x"), Some(Dev { major: 0xfe, minor: 10 }));
        assert_eq!(map_dev("7f00-7f01 rw-p 00000000 00:00 0"), None);
        assert_eq!(map_dev(""), None);
    }

    #[test]
    fn this_process_is_found_in_its_namespace() {
        let own = namespace_of("self").unwrap();
        let all = namespaces(None);
        assert!(all.iter().any(|n| n.id == own && n.mounts.iter().any(|m| m.mount_point == Path::new("/"))));
        assert!(namespaces(Some(&own)).iter().all(|n| n.id != own));
    }

    #[test]
    fn an_open_file_is_a_use() {
        let dir = tempfile::tempdir().unwrap();
        let _open = std::fs::File::create(dir.path().join("f")).unwrap();
        let dev = Dev::from_st(std::os::unix::fs::MetadataExt::dev(&dir.path().metadata().unwrap()));
        let me = std::process::id() as i32;
        let mounts = mountinfo::of_self().unwrap();
        let here = mounts.iter().filter(|m| dir.path().starts_with(&m.mount_point));
        let point = here.max_by_key(|m| m.mount_point.components().count()).unwrap().mount_point.as_path();
        for (at, skip, found) in [
            (None, None, true),
            (None, Some(me), false),
            (Some(point), None, true),
            // Another mount of the same superblock.
            (Some(Path::new("/no/such/mount")), None, false),
        ] {
            assert_eq!(users_of(dev, at, usize::MAX, skip).iter().any(|u| u.pid == me), found, "{at:?} {skip:?}");
        }
    }
}
