//! `doctor`: what this machine has, tried rather than guessed, and what follows.

use super::output::Out;
use crate::daemon::{lost, start};
use crate::dirs::Dirs;
use crate::errors;
use crate::failure::Failure;
use crate::front::{BlockFiles, BlockFilesOptions, Context as FrontContext};
use crate::mounts;
use crate::run::runtime::{self, Found, Name};
use anyhow::Context;
use image::erofs::{Options, Plan, Shape};
use image::index::Index;
use image::tree::Tree;
use serde_json::json;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use store::{BlockSource, Done, Presence, ReadError, Request, Resolution};
use sys::mount::{FsContext, MountAttrFlags};

const FUSE: &str = "/dev/fuse";
const FUSERMOUNT: &str = "fusermount3";

/// How one thing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Good,
    /// Something works less well, or not at all, but not everything.
    Limited,
    /// Nothing useful works without it.
    Bad,
}

#[derive(Debug)]
struct Finding {
    what: &'static str,
    verdict: Verdict,
    detail: String,
    /// What follows, when it is not good.
    follows: String,
}

/// `doctor`
pub fn doctor(out: &Out, dirs: &Dirs) -> anyhow::Result<()> {
    let findings = examine(dirs);
    for f in &findings {
        let (word, follows) = match f.verdict {
            Verdict::Good => ("ok", ""),
            Verdict::Limited => ("limited", f.follows.as_str()),
            Verdict::Bad => ("missing", f.follows.as_str()),
        };
        let value = json!({"what": f.what, "verdict": word, "detail": f.detail, "follows": follows});
        let follows = if follows.is_empty() { String::new() } else { format!("\n{:10}{follows}", "") };
        out.either(&value, format!("{word:9} {}: {}{follows}", f.what, f.detail))?;
    }
    if findings.iter().any(|f| f.verdict == Verdict::Bad) {
        return Err(Failure::unavailable("images cannot be mounted on this machine, see above").into());
    }
    Ok(())
}

fn examine(dirs: &Dirs) -> Vec<Finding> {
    let root = mounts::may_mount();
    let mut all = vec![kernel(), privileges(root), fuse()];
    if root {
        all.push(erofs(dirs));
        all.push(overlay(dirs));
    } else {
        all.push(fusermount());
    }
    all.extend(lost(dirs));
    all.push(directory("root directory", &dirs.root));
    all.push(directory("state directory", &dirs.state));
    all.push(namespaces());
    all.extend(runtimes(dirs, root));
    all.push(fanotify());
    all.extend(newer());
    all
}

fn finding(what: &'static str, result: anyhow::Result<String>, otherwise: Verdict, follows: &'static str) -> Finding {
    let follows = follows.to_owned();
    match result {
        Ok(detail) => Finding { what, verdict: Verdict::Good, detail, follows },
        Err(e) => Finding { what, verdict: otherwise, detail: errors::message(&e), follows },
    }
}

fn release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

/// Major and minor number of a kernel's release.
fn version_of(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

fn kernel() -> Finding {
    let release = release();
    let result = match version_of(&release) {
        Some(version) if version >= (6, 12) => Ok(release),
        Some(version) if version >= (5, 12) => Err(anyhow::anyhow!("{release}, older than 6.12")),
        _ => Err(anyhow::anyhow!("{release}, older than 5.12")),
    };
    finding("kernel", result, Verdict::Limited, "EROFS cannot be mounted from a file; images are mounted as FUSE trees")
}

fn privileges(root: bool) -> Finding {
    let result = if root { Ok("may mount".to_owned()) } else { Err(anyhow::anyhow!("not root (no CAP_SYS_ADMIN)")) };
    finding(
        "privileges",
        result,
        Verdict::Limited,
        "only `mount --as tree` through fusermount3 works; `mount --as erofs`, `--rw` and `run` need root",
    )
}

/// Whether the FUSE device can be used: what is in the way, and what to do about it.
pub fn fuse_device(path: &Path) -> Result<(), (String, &'static str)> {
    let Err(e) = std::fs::OpenOptions::new().read(true).write(true).open(path) else { return Ok(()) };
    let shown = path.display();
    Err(match e.kind() {
        std::io::ErrorKind::PermissionDenied => {
            let who = path.metadata().map_or_else(
                |_| String::new(),
                |m| format!(" (mode {:04o}, user {}, group {})", m.mode() & 0o7777, m.uid(), m.gid()),
            );
            // A device cgroup refuses root as well.
            let advice = if sys::proc::is_root() {
                "this container may not use the device: start it with --device /dev/fuse"
            } else {
                "have the administrator open it to users (chmod 666 /dev/fuse, for good by a udev rule), or run as root"
            };
            (format!("{shown} may not be opened by you{who}"), advice)
        }
        std::io::ErrorKind::NotFound => {
            (format!("no {shown}"), "load the module (modprobe fuse); in a container start it with --device /dev/fuse")
        }
        _ => (format!("{shown}: {e}"), "this kernel has no FUSE (modprobe fuse?)"),
    })
}

/// What an ordinary user needs for a mount.
pub fn user_mounts() -> Result<(), Failure> {
    if let Err((what, advice)) = fuse_device(Path::new(FUSE)) {
        return Err(Failure::unavailable(format!("{what}; {advice}")));
    }
    if runtime::in_path(FUSERMOUNT).is_none() {
        let advice = "an ordinary user mounts through it; install it (apt install fuse3)";
        return Err(Failure::unavailable(format!("{FUSERMOUNT} is not installed; {advice}")));
    }
    Ok(())
}

fn fuse() -> Finding {
    let (result, follows) = match fuse_device(Path::new(FUSE)) {
        Ok(()) => (Ok(format!("{FUSE} opens")), ""),
        Err((what, advice)) => (Err(anyhow::anyhow!(what)), advice),
    };
    Finding { follows: format!("nothing can be mounted; {follows}"), ..finding("FUSE", result, Verdict::Bad, "") }
}

fn fusermount() -> Finding {
    let result =
        runtime::in_path(FUSERMOUNT).map(|p| p.display().to_string()).context("not installed (apt install fuse3)");
    finding(FUSERMOUNT, result, Verdict::Bad, "an ordinary user cannot mount anything without it")
}

/// What a daemon that was killed has left.
fn lost(dirs: &Dirs) -> Option<Finding> {
    let lost = lost::all(dirs);
    let unclean = dirs.leases().exists() && start::holder(dirs).is_ok_and(|h| h.is_none());
    if lost.is_empty() && !unclean {
        return None;
    }
    let mut detail = match lost.len() {
        0 => String::new(),
        1 => "1 mount has lost its daemon: ".to_owned(),
        n => format!("{n} mounts have lost their daemon: "),
    };
    detail += &lost.iter().map(|l| l.lease.target.as_str()).collect::<Vec<_>>().join(", ");
    if unclean {
        detail += if lost.is_empty() { "the daemon was killed" } else { "; another daemon was killed" };
    }
    let follows = if lost.is_empty() {
        "the next command that needs it says which mounts were lost, and takes away those that nobody uses"
    } else {
        "uncached reads fail there; they go when nobody uses them any more, `lazyroot umount --lazy DIR` detaches them"
    };
    Some(finding("mounts", Err(anyhow::anyhow!(detail)), Verdict::Limited, follows))
}

/// A layout whose data is only holes.
struct Metadata {
    index: Index,
    plan: Plan,
}

impl BlockSource for Metadata {
    fn len_bytes(&self) -> u64 {
        self.plan.image_len()
    }

    fn resolve(&self, offset: u64, len: usize, out: &mut Resolution) -> Result<Presence, ReadError> {
        let end = offset.saturating_add(len as u64);
        let meta = self.plan.meta_len().clamp(offset, end);
        let scratch = out.push_scratch((meta - offset) as usize);
        self.plan.emit(&self.index, offset..meta, scratch).map_err(|_| ReadError::Corrupt {
            what: "layout",
            at: offset,
            why: "cannot be emitted",
        })?;
        out.push_zeros((end - meta) as usize);
        Ok(Presence::Ready)
    }

    fn fetch(&self, _offset: u64, _len: usize, _request: Request, done: Done) {
        done(Ok(()));
    }
}

/// An image with nothing in it.
fn empty() -> anyhow::Result<Metadata> {
    let mut file = std::io::Cursor::new(Vec::new());
    image::index::build(&Tree::new(), &mut file)?;
    let index = Index::open(Arc::new(file.into_inner()))?;
    let plan = Plan::new(&index, &Options::new(Shape::Kernel))?;
    Ok(Metadata { index, plan })
}

/// Mounts an empty image the way `mount` does, and a file on the state directory's file system directly.
fn erofs(dirs: &Dirs) -> Finding {
    let mount = |source: &str| -> anyhow::Result<()> {
        let context = FsContext::open("erofs").context("no EROFS in this kernel (modprobe erofs?)")?;
        context.string("source", source)?;
        context.flag("ro")?;
        context.create()?;
        context.mount(MountAttrFlags::MOUNT_ATTR_RDONLY)?;
        Ok(())
    };
    let through_fuse = || -> anyhow::Result<()> {
        let files = BlockFiles::start(&BlockFilesOptions::default(), FrontContext::default())?;
        let file = files.add("doctor", Arc::new(empty()?))?;
        mount(files.path(file).context("no path")?.to_str().context("no path")?)
    };
    let on_disk = || -> anyhow::Result<()> {
        let meta = empty()?;
        let mut bytes = vec![0u8; meta.plan.image_len() as usize];
        meta.plan.emit(&meta.index, 0..meta.plan.meta_len(), &mut bytes[..meta.plan.meta_len() as usize])?;
        let path = existing(&dirs.state).join(format!("lazyroot-doctor-{}", std::process::id()));
        std::fs::write(&path, &bytes).with_context(|| path.display().to_string())?;
        let mounted = mount(path.to_str().context("a path that is not UTF-8")?);
        // Only a trial.
        let _ = std::fs::remove_file(&path);
        mounted
    };
    let result = through_fuse().map(|()| match on_disk() {
        Ok(()) => "mounts from a file, over FUSE and on the state directory's file system".to_owned(),
        Err(e) => format!("mounts from a file over FUSE, which is what is used; not directly from the state directory's file system ({})", errors::message(&e)),
    });
    finding("EROFS", result, Verdict::Limited, "images are mounted as FUSE trees, which walk more slowly")
}

/// The nearest directory that exists.
fn existing(path: &Path) -> &Path {
    path.ancestors().find(|p| p.is_dir()).unwrap_or(Path::new("/"))
}

/// Makes an overlay whose upper directory is on the root directory's file system.
fn overlay(dirs: &Dirs) -> Finding {
    let base = existing(&dirs.root).join(format!("lazyroot-doctor-{}", std::process::id()));
    let attempt = || -> anyhow::Result<String> {
        for name in ["upper", "work", "place"] {
            std::fs::create_dir_all(base.join(name)).with_context(|| base.display().to_string())?;
        }
        let context = FsContext::open("tmpfs")?;
        context.create()?;
        let lower = context.mount(MountAttrFlags::empty())?;
        mounts::overlay(lower, &base.join("upper"), &base.join("work"), &base.join("place"), "doctor")?;
        Ok("works on the root directory's file system".to_owned())
    };
    let result = attempt();
    // Only a trial.
    let _ = mounts::remove_tree(&base);
    finding(
        "overlayfs",
        result,
        Verdict::Limited,
        "`mount --rw` and `run` do not work; use a --root on ext4, xfs or btrfs (`run --upper memory` may work)",
    )
}

fn directory(what: &'static str, path: &Path) -> Finding {
    let attempt = || -> anyhow::Result<String> {
        let there = existing(path);
        let stat =
            rustix::fs::statvfs(there).map_err(std::io::Error::from).with_context(|| there.display().to_string())?;
        let entry = sys::mountinfo::of_self()?
            .into_iter()
            .filter(|m| there.starts_with(&m.mount_point))
            .max_by_key(|m| m.mount_point.components().count());
        let fs = entry.map_or_else(|| "unknown".to_owned(), |m| m.fstype);
        let free = stat.f_bavail.saturating_mul(stat.f_frsize);
        anyhow::ensure!(
            !stat.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY),
            "{} ({fs}) is read-only",
            there.display()
        );
        anyhow::ensure!(fs != "overlay" || what != "root directory", "{} is on overlayfs", there.display());
        Ok(format!("{} on {fs}, {} free", path.display(), super::output::size(free)))
    };
    finding(
        what,
        attempt(),
        Verdict::Limited,
        "name a directory on a writable ext4, xfs or btrfs with --root or --state",
    )
}

fn namespaces() -> Finding {
    let attempt = || -> anyhow::Result<String> {
        let max: u64 = std::fs::read_to_string("/proc/sys/user/max_user_namespaces")
            .context("/proc/sys/user/max_user_namespaces")?
            .trim()
            .parse()?;
        anyhow::ensure!(max > 0, "switched off (user.max_user_namespaces is 0)");
        let clone = std::fs::read_to_string("/proc/sys/kernel/unprivileged_userns_clone").unwrap_or_default();
        anyhow::ensure!(clone.trim() != "0", "for root only (kernel.unprivileged_userns_clone is 0)");
        Ok(format!("up to {max}"))
    };
    finding("user namespaces", attempt(), Verdict::Limited, "nothing here needs them yet")
}

fn runtimes(dirs: &Dirs, root: bool) -> Vec<Finding> {
    let (kind, _) = runtime::hierarchy();
    let groups = Finding { what: "cgroups", verdict: Verdict::Good, detail: kind.to_string(), follows: String::new() };
    let mut all = vec![groups];
    let found = if root && dirs.state.is_dir() { Found::look(&dirs.state) } else { Err(anyhow::anyhow!("not tried")) };
    for name in [Name::Crun, Name::Runc] {
        let what = if name == Name::Crun { "crun" } else { "runc" };
        let path = runtime::in_path(what);
        let result = match (&path, &found) {
            (None, _) => Err(anyhow::anyhow!("not installed")),
            (Some(path), Ok(found)) => {
                let version = runtime::version(path).unwrap_or_else(|| "unknown version".into());
                let mine: Vec<_> = found.tried.iter().filter(|t| t.way.name == name).collect();
                let works = mine.iter().find(|t| t.error.is_none());
                match (works, mine.first()) {
                    (Some(t), _) if t.way.cgroups => Ok(format!("{version}, works")),
                    (Some(_), _) => Ok(format!("{version}, works, but containers get no cgroup of their own")),
                    (None, Some(t)) => Err(anyhow::anyhow!("{version}, refuses: {}", t.error.as_deref().unwrap_or(""))),
                    (None, None) => Err(anyhow::anyhow!("{version}, not tried")),
                }
            }
            (Some(path), Err(_)) => {
                let version = runtime::version(path).unwrap_or_else(|| "unknown version".into());
                Ok(format!("{version}, not tried ({})", if root { "no state directory yet" } else { "needs root" }))
            }
        };
        all.push(finding(what, result, Verdict::Limited, "`run` uses the other runtime, if that works"));
    }
    all
}

/// Pre-content events, for file systems that are filled as they are read: not used yet.
fn fanotify() -> Finding {
    let result = match version_of(&release()) {
        Some(version) if version >= (6, 14) => {
            Ok("the kernel is new enough for pre-content events; not used yet".to_owned())
        }
        _ => Err(anyhow::anyhow!("no pre-content events before Linux 6.14")),
    };
    finding("fanotify", result, Verdict::Limited, "nothing needs it yet")
}

/// What newer kernels have and this one may lack.
fn newer() -> Vec<Finding> {
    let has = |path: &str| Path::new(path).exists();
    let uring = std::fs::read_to_string("/sys/module/fuse/parameters/enable_uring").unwrap_or_default();
    let list = [
        ("FUSE over io_uring", uring.trim() == "Y", "requests cost one system call more each"),
        ("ublk", has("/dev/ublk-control"), "block devices for VMs need another way"),
    ];
    list.into_iter()
        .map(|(what, there, follows)| Finding {
            what,
            verdict: if there { Verdict::Good } else { Verdict::Limited },
            detail: if there { "there; not used yet".into() } else { "not in this kernel, or switched off".into() },
            follows: follows.to_owned(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_read() {
        for (text, want) in [("6.18.44-fc", Some((6, 18))), ("5.10", Some((5, 10))), ("x", None), ("6", None)] {
            assert_eq!(version_of(text), want, "{text}");
        }
    }

    #[test]
    fn everything_is_examined_without_failing() {
        let tmp = tempfile::tempdir().unwrap();
        let dirs = Dirs { root: tmp.path().join("r"), state: tmp.path().join("s") };
        let findings = examine(&dirs);
        assert!(findings.len() >= 10);
        assert!(!dirs.root.exists() && !dirs.state.exists(), "looking makes nothing");
        assert!(findings.iter().all(|f| !f.detail.is_empty()));
    }

    #[test]
    fn a_device_that_cannot_be_used_is_explained() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("fuse");
        let (what, advice) = fuse_device(&path).unwrap_err();
        assert!(what.starts_with("no ") && advice.contains("modprobe"), "{what}; {advice}");
        std::fs::write(&path, b"").unwrap();
        fuse_device(&path).unwrap();
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o000)).unwrap();
        if !sys::proc::is_root() {
            let (what, advice) = fuse_device(&path).unwrap_err();
            assert!(what.contains("mode 0000") && advice.contains("chmod 666"), "{what}; {advice}");
            assert!(!advice.contains("modprobe"));
        }
    }

    #[test]
    fn an_empty_image_can_be_emitted() {
        let meta = empty().unwrap();
        let mut out = Resolution::new();
        let len = meta.len_bytes() as usize;
        assert_eq!(meta.resolve(0, len, &mut out).unwrap(), Presence::Ready);
        assert_eq!(out.len(), len);
    }
}
