//! The caller's side of mounting: attaching what the daemon hands out in the caller's own namespace.
//!
//! Invariants: a target is opened once, without following a symlink as its last component, and the mount goes to
//! exactly that directory; what is unmounted is checked to be ours first. An overlay is made in a mount namespace of
//! its own, so that its lower directory is visible to nobody and there is nothing to clean up.

use crate::control::proto::{Dev, Top};
use crate::failure::Failure;
use crate::procscan;
use anyhow::Context;
use image::index::Index;
use rustix::fs::{AtFlags, Mode, OFlags, XattrFlags};
use rustix::io::Errno;
use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use sys::mount::{FsContext, MountAttrFlags, UnmountFlags};
use sys::mountinfo::Entry;

/// A directory that something is going to be attached to.
#[derive(Debug)]
pub struct Target {
    /// Its path, without symlinks.
    pub path: PathBuf,
    fd: OwnedFd,
}

impl Target {
    /// Opens a mount point: a directory, not a symlink, with nothing mounted on it.
    pub fn open(path: &Path) -> anyhow::Result<Target> {
        let shown = path.display();
        let meta = path.symlink_metadata().map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Failure::not_found(format!("no directory {shown}; create it first (mkdir {shown})"))
            }
            _ => Failure::unavailable(format!("mount point {shown}: {e}")),
        })?;
        if meta.file_type().is_symlink() {
            return Err(Failure::usage(format!(
                "{shown} is a symbolic link; name the directory that it leads to, links are not followed"
            ))
            .into());
        }
        if !meta.is_dir() {
            return Err(Failure::usage(format!("{shown} is not a directory")).into());
        }
        let fd = sys::mount::open_target(path).with_context(|| format!("mount point {shown}"))?;
        // What was opened, not what the name may lead to by now.
        let real =
            std::fs::read_link(sys::mount::fd_path(fd.as_fd())).with_context(|| format!("mount point {shown}"))?;
        if real == Path::new("/") {
            return Err(Failure::usage("/ cannot be a mount point").into());
        }
        if let Some(there) = procscan::mounted_at(&real)? {
            let by = if is_ours(&there) { "lazyroot" } else { there.fstype.as_str() };
            return Err(Failure::busy(format!(
                "something ({by}) is mounted at {} already; unmount it or choose another directory",
                real.display()
            ))
            .into());
        }
        Ok(Target { path: real, fd })
    }

    /// Attaches a detached mount there.
    pub fn attach(&self, mount: BorrowedFd<'_>) -> anyhow::Result<()> {
        sys::mount::attach(mount, self.fd.as_fd()).map_err(|e| {
            let what = format!("mounting at {}", self.path.display());
            match Errno::from_io_error(&e) {
                Some(Errno::PERM) => {
                    anyhow::Error::new(Failure::unavailable(format!("{what}: no right to mount here (CAP_SYS_ADMIN)")))
                }
                Some(Errno::BUSY) => anyhow::Error::new(Failure::busy(format!("{what}: the directory is busy"))),
                _ => anyhow::Error::new(e).context(what),
            }
        })
    }
}

/// Whether a mount was made by this program: by type and source.
pub fn is_ours(entry: &Entry) -> bool {
    let source = entry.source.as_bytes();
    let named = |s: &[u8]| s.starts_with(b"lazyroot-");
    match entry.fstype.as_str() {
        "erofs" => source.rsplit(|b| *b == b'/').next().is_some_and(named),
        "fuse.lazyroot" => true,
        "overlay" => source.starts_with(b"lazyroot:"),
        _ => false,
    }
}

/// A mount that was found at a path. It is checked through a descriptor of its own, and what is unmounted is what was
/// checked: whoever owns a directory on its path can put something else there meanwhile.
#[derive(Debug)]
pub struct Mounted {
    /// Where.
    pub path: PathBuf,
    /// What mountinfo says of it.
    pub entry: Entry,
    parent: OwnedFd,
    name: OsString,
    fd: OwnedFd,
}

impl Mounted {
    /// Opens the topmost mount at exactly `path`, which is absolute; none when nothing is mounted there. No symlink is
    /// followed as the last component.
    pub fn open(path: &Path) -> std::io::Result<Option<Mounted>> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(None) };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(parent, flags, Mode::empty()).and_then(|parent| {
            Ok((rustix::fs::openat(&parent, name, flags | OFlags::NOFOLLOW, Mode::empty())?, parent))
        });
        let (fd, parent) = match opened {
            Ok(opened) => opened,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
            Err(e) => return Err(e.into()),
        };
        let entry = procscan::mount_of(fd.as_fd())?.filter(|e| e.mount_point == path);
        Ok(entry.map(|entry| Mounted { path: path.to_owned(), entry, parent, name: name.to_owned(), fd }))
    }

    /// The path by its parent directory as it was opened.
    fn below_parent(parent: &OwnedFd, name: &OsStr) -> PathBuf {
        sys::mount::fd_path(parent.as_fd()).join(name)
    }

    /// Detaches it now, used or not; what somebody mounts on top of it meanwhile goes first.
    pub fn detach(self) -> std::io::Result<()> {
        sys::mount::unmount_fd(self.fd.as_fd(), UnmountFlags::DETACH)
    }

    /// Unmounts it; an error when it is in use.
    pub fn unmount(self) -> std::io::Result<()> {
        // A descriptor is a use.
        drop(self.fd);
        sys::mount::unmount(&Self::below_parent(&self.parent, &self.name), UnmountFlags::NOFOLLOW)
    }

    /// Takes exactly this mount away if nobody uses it; `false`: somebody does, or it is another one by now.
    pub fn unmount_unused(self) -> std::io::Result<bool> {
        let Mounted { path, entry, parent, name, fd } = self;
        drop(fd);
        // The kernel's own check. The first such call unmounts nothing: it leaves a mark that any use takes away.
        let flags = UnmountFlags::EXPIRE | UnmountFlags::NOFOLLOW;
        match sys::mount::unmount(&Self::below_parent(&parent, &name), flags) {
            Ok(()) => return Ok(true),
            Err(e) => match Errno::from_io_error(&e) {
                Some(Errno::AGAIN) => {}
                Some(Errno::BUSY) => return Ok(false),
                _ => return Err(e),
            },
        }
        let now = Mounted::open(&path)?.filter(|now| {
            // Numbers are used again, sources are not.
            let what = |e: &Entry| (e.id, e.dev, e.source.clone(), e.fstype.clone());
            what(&now.entry) == what(&entry)
        });
        let Some(now) = now else { return Ok(false) };
        // Copies of it in other namespaces go with it.
        let me = std::process::id() as i32;
        if !procscan::users_of(procscan::dev_of(&entry), Some(&path), 1, Some(me)).is_empty() {
            return Ok(false);
        }
        now.detach().map(|()| true)
    }
}

/// What became of an unmount.
#[derive(Debug)]
pub struct Unmounted {
    /// The path, without symlinks before its last component.
    pub path: PathBuf,
    /// The upper directory that stays, for a writable mount.
    pub upper: Option<PathBuf>,
}

/// Absolute, without looking at the last component, which may be a mount whose server is dead.
pub fn absolute_but_last(path: &Path) -> anyhow::Result<PathBuf> {
    let absolute = std::path::absolute(path).with_context(|| path.display().to_string())?;
    match (absolute.parent(), absolute.file_name()) {
        (Some(parent), Some(name)) => {
            let parent = parent.canonicalize().map_err(|e| match e.kind() {
                std::io::ErrorKind::NotFound => Failure::not_found(format!("no directory {}", parent.display())).into(),
                _ => anyhow::Error::new(e).context(parent.display().to_string()),
            })?;
            Ok(parent.join(name))
        }
        _ => Ok(absolute.canonicalize()?),
    }
}

/// Unmounts what we mounted at `path`. `daemon` is the daemon's process, which is not named as a user of the mount.
pub fn unmount(path: &Path, lazy: bool, daemon: Option<i32>) -> anyhow::Result<Unmounted> {
    let path = absolute_but_last(path)?;
    let shown = path.display();
    let Some(mounted) = Mounted::open(&path).with_context(|| shown.to_string())? else {
        if path == Path::new("/") {
            return Err(Failure::usage("/ is not lazyroot's").into());
        }
        return Err(Failure::not_found(format!("nothing is mounted at {shown}")).into());
    };
    let entry = mounted.entry.clone();
    if !is_ours(&entry) {
        return Err(Failure::usage(format!(
            "what is mounted at {shown} ({}) is not lazyroot's; use umount(8)",
            entry.fstype
        ))
        .into());
    }
    match if lazy { mounted.detach() } else { mounted.unmount() } {
        Ok(()) => {}
        Err(e) => match Errno::from_io_error(&e) {
            Some(Errno::BUSY) => return Err(busy(&path, &entry, daemon).into()),
            Some(Errno::PERM) if entry.fstype == "fuse.lazyroot" => fusermount(&path, lazy).map_err(|said| {
                if said.contains("busy") { busy(&path, &entry, daemon) } else { Failure::unavailable(said) }
            })?,
            _ => return Err(e).with_context(|| format!("unmounting {shown}")),
        },
    }
    let upper = (entry.fstype == "overlay").then(|| upper_of(&entry)).flatten();
    Ok(Unmounted { path, upper })
}

fn busy(path: &Path, entry: &Entry, daemon: Option<i32>) -> Failure {
    let users = procscan::users_of(procscan::dev_of(entry), Some(path), 8, daemon);
    let users: Vec<String> = users.iter().map(ToString::to_string).collect();
    let below = procscan::mounted_below(path).unwrap_or_default();
    let by = match (users.is_empty(), below.is_empty()) {
        (false, _) => format!(" by {}", users.join(", ")),
        (true, false) => format!(": something is mounted at {}", below[0].display()),
        (true, true) => String::new(),
    };
    Failure::busy(format!("{} is in use{by}; end that first, or detach it with --lazy", path.display()))
}

/// The upper directory of an overlay, from its options.
fn upper_of(entry: &Entry) -> Option<PathBuf> {
    let upper = entry.super_options.split(',').find_map(|o| o.strip_prefix("upperdir="))?;
    Some(PathBuf::from(upper))
}

/// Unmounts through fusermount3, as an ordinary user must.
pub fn fusermount(path: &Path, lazy: bool) -> Result<(), String> {
    let mut command = Command::new("fusermount3");
    command.arg("-u");
    if lazy {
        command.arg("-z");
    }
    let output = command.arg("--").arg(path).stdin(Stdio::null()).output().map_err(|e| format!("fusermount3: {e}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!("fusermount3: {}", said.trim().trim_start_matches("fusermount3: ")))
}

/// An overlay, mounted nowhere yet.
#[derive(Debug)]
pub struct Overlay {
    /// The detached mount.
    pub mount: OwnedFd,
    /// What it is in mountinfo.
    pub top: Top,
}

/// Makes an overlay of `lower` (a detached mount) and the directories `upper` and `work`, labelled `lazyroot:LABEL`.
/// `place` is any directory; in a namespace that ends with this call the lower mount is attached there.
pub fn overlay(lower: OwnedFd, upper: &Path, work: &Path, place: &Path, label: &str) -> anyhow::Result<Overlay> {
    let source = format!("lazyroot:{label}");
    let (upper, work, place) = (upper.to_owned(), work.to_owned(), place.to_owned());
    let name = source.clone();
    let thread = std::thread::Builder::new().name("overlay".into()).spawn(move || -> anyhow::Result<OwnedFd> {
        sys::mount::enter_own_namespace().context("a mount namespace for the overlay")?;
        let target = sys::mount::open_target(&place).with_context(|| place.display().to_string())?;
        sys::mount::attach(lower.as_fd(), target.as_fd()).context("attaching the lower directory")?;
        let context = FsContext::open("overlay").context("this kernel has no overlayfs (modprobe overlay?)")?;
        context.string("source", &name)?;
        context.string("lowerdir", &escape(&place)?).context("overlay: lower directory")?;
        context.string("upperdir", text(&upper)?).context("overlay: upper directory")?;
        // Without it a directory gets another inode number each time the kernel has forgotten it. Where the layers'
        // numbers leave no bits for it the kernel does without.
        context.string("xino", "auto").context("overlay: lasting inode numbers (xino)")?;
        context.string("workdir", text(&work)?).context("overlay: work directory")?;
        context.create().map_err(|e| explain_overlay(e, &upper))?;
        context.mount(MountAttrFlags::empty()).context("mounting the overlay")
    })?;
    let mount = thread.join().map_err(|_| anyhow::anyhow!("the overlay's thread panicked"))??;
    let ids = sys::mount::ids(&mount)?;
    let top = Top { device: Dev { major: ids.dev_major, minor: ids.dev_minor }, source };
    Ok(Overlay { mount, top })
}

fn explain_overlay(error: std::io::Error, upper: &Path) -> anyhow::Error {
    let on = format!("overlay with its upper directory {}", upper.display());
    match sys::mount::raw_errno(&error).map(Errno::from_raw_os_error) {
        Some(Errno::INVAL) => anyhow::Error::new(error).context(format!(
            "{on}: its file system cannot hold one (it must be ext4, xfs, btrfs, tmpfs or the like, not another overlay); use a --root elsewhere"
        )),
        _ => anyhow::Error::new(error).context(on),
    }
}

fn text(path: &Path) -> anyhow::Result<&str> {
    path.to_str().with_context(|| format!("{} is not UTF-8", path.display()))
}

/// A path as one lower directory: colons separate and backslashes escape.
fn escape(path: &Path) -> anyhow::Result<String> {
    Ok(text(path)?.replace('\\', "\\\\").replace(':', "\\:"))
}

/// Makes the two directories of an overlay below `base`: `upper`, with the attributes of the image's root, which the
/// overlay takes from it, and `work`.
pub fn upper_dirs(base: &Path, index: &Index) -> anyhow::Result<(PathBuf, PathBuf)> {
    let (upper, work) = (base.join("upper"), base.join("work"));
    let make = |dir: &Path| match std::fs::DirBuilder::new().mode(0o700).create(dir) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => Ok(false),
        Err(e) => Err(store::StoreError::io("create", dir, e)),
    };
    make(&work)?;
    if !make(&upper)? {
        return Ok((upper, work));
    }
    dress(&upper, index).with_context(|| format!("attributes of {}", upper.display()))?;
    Ok((upper, work))
}

/// Gives a directory the attributes of the image's root.
fn dress(dir: &Path, index: &Index) -> anyhow::Result<()> {
    let root = index.inode(0)?;
    let fd =
        rustix::fs::open(dir, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    rustix::fs::fchown(&fd, Some(rustix::fs::Uid::from_raw(root.uid)), Some(rustix::fs::Gid::from_raw(root.gid)))?;
    rustix::fs::fchmod(&fd, Mode::from_raw_mode(u32::from(root.permissions())))?;
    for entry in index.xattrs(root.xattrs)? {
        let (name, value) = entry?;
        // An upper directory that cannot hold one (an overlay's own names, no privilege) does without.
        let _ = rustix::fs::fsetxattr(&fd, OsStr::from_bytes(name), value, XattrFlags::empty());
    }
    let time = rustix::fs::Timespec { tv_sec: root.mtime_sec, tv_nsec: root.mtime_nsec.into() };
    rustix::fs::futimens(&fd, &rustix::fs::Timestamps { last_access: time, last_modification: time })?;
    Ok(())
}

/// Whether this process may mount: tried, in a namespace that ends at once.
pub fn may_mount() -> bool {
    std::thread::spawn(|| sys::mount::enter_own_namespace().is_ok()).join().unwrap_or(false)
}

/// Removes a directory tree that an overlay has used: its work directory has entries without permissions, and its
/// upper one is as a container left it, maybe deeper than paths and stacks reach. So nothing here recurses or names
/// more than one component: what is deep down is moved up, directly below `path`, and emptied there.
pub fn remove_tree(path: &Path) -> std::io::Result<()> {
    match path.symlink_metadata() {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(e),
        Ok(meta) if !meta.is_dir() => return std::fs::remove_file(path),
        Ok(_) => {}
    }
    let top = open_dir(rustix::fs::CWD, path.as_os_str())?;
    let device = rustix::fs::fstat(&top)?.st_dev;
    let mut moved = 0u64;
    loop {
        let mut any = false;
        for name in names(&top)? {
            any = true;
            if is_removed(&top, &name)? {
                continue;
            }
            let dir = open_dir(top.as_fd(), &name)?;
            // A mount below would be emptied, not removed.
            if rustix::fs::fstat(&dir)?.st_dev != device {
                return Err(std::io::Error::other(format!("{} is a mount point", path.join(&name).display())));
            }
            for below in names(&dir)? {
                if !is_removed(&dir, &below)? {
                    move_up(&dir, &below, &top, &mut moved)?;
                }
            }
            rustix::fs::unlinkat(&top, &*name, AtFlags::REMOVEDIR)?;
        }
        if !any {
            return std::fs::remove_dir(path);
        }
    }
}

fn open_dir(at: BorrowedFd<'_>, name: &OsStr) -> rustix::io::Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::fs::openat(at, name, flags, Mode::empty())
}

/// All names in a directory but its dots.
fn names(dir: &OwnedFd) -> rustix::io::Result<Vec<OsString>> {
    let mut found = Vec::new();
    for entry in rustix::fs::Dir::read_from(dir)? {
        let name = OsStr::from_bytes(entry?.file_name().to_bytes()).to_owned();
        if name != "." && name != ".." {
            found.push(name);
        }
    }
    Ok(found)
}

/// Removes a name; `false` when it is a directory with something in it.
fn is_removed(dir: &OwnedFd, name: &OsStr) -> rustix::io::Result<bool> {
    match rustix::fs::unlinkat(dir, name, AtFlags::empty()) {
        Ok(()) | Err(Errno::NOENT) => return Ok(true),
        // Directories; which of the two is up to the file system.
        Err(Errno::ISDIR | Errno::PERM) => {}
        Err(e) => return Err(e),
    }
    match rustix::fs::unlinkat(dir, name, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(true),
        Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(false),
        Err(e) => Err(e),
    }
}

fn move_up(dir: &OwnedFd, name: &OsStr, top: &OwnedFd, moved: &mut u64) -> rustix::io::Result<()> {
    loop {
        *moved += 1;
        match rustix::fs::renameat(dir, name, top, format!(".removed-{moved}")) {
            // The name is taken.
            Err(Errno::NOTEMPTY | Errno::EXIST | Errno::NOTDIR) => {}
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errors::kind_of;
    use crate::failure::Kind;

    #[test]
    fn bad_mount_points_have_messages() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("file"), b"").unwrap();
        std::os::unix::fs::symlink("/", dir.path().join("link")).unwrap();
        let table = [
            ("missing", Kind::NotFound, "mkdir"),
            ("file", Kind::Usage, "not a directory"),
            ("link", Kind::Usage, "symbolic link"),
        ];
        for (name, kind, text) in table {
            let error = Target::open(&dir.path().join(name)).unwrap_err();
            assert_eq!(kind_of(&error), kind, "{name}");
            assert!(error.to_string().contains(text), "{error}");
        }
        let error = Target::open(Path::new("/")).unwrap_err();
        assert_eq!(kind_of(&error), Kind::Usage);
        let error = Target::open(Path::new("/proc")).unwrap_err();
        assert_eq!(kind_of(&error), Kind::Busy);
        let target = Target::open(dir.path()).unwrap();
        assert_eq!(target.path, dir.path().canonicalize().unwrap());
    }

    #[test]
    fn priv_what_is_unmounted_is_what_was_looked_at() {
        if !may_mount() {
            println!("SKIP priv_what_is_unmounted_is_what_was_looked_at: no right to mount");
            return;
        }
        let tmp = tempfile::tempdir().unwrap();
        let place = tmp.path().canonicalize().unwrap().join("m");
        std::fs::create_dir(&place).unwrap();
        let make = |name: &str| {
            sys::mount::mount_legacy(Path::new(name), &place, "tmpfs", sys::mount::MountFlags::empty(), "size=1m")
                .unwrap();
        };
        let there = || procscan::mounted_at(&place).unwrap().map(|e| e.source);
        let open = || Mounted::open(&place).unwrap().unwrap();
        assert!(Mounted::open(&place).unwrap().is_none());
        // Between the look and the unmounting somebody puts another one in its place, or on top.
        for instead in [true, false] {
            make("first");
            let first = open();
            if instead {
                sys::mount::unmount(&place, UnmountFlags::DETACH).unwrap();
            }
            make("second");
            assert!(!first.unmount_unused().unwrap());
            assert_eq!(there().as_deref(), Some(OsStr::new("second")));
            sys::mount::unmount(&place, UnmountFlags::empty()).unwrap();
        }
        assert_eq!(there().as_deref(), Some(OsStr::new("first")));
        // Only the one that was opened, not a copy of it elsewhere.
        let (elsewhere, first) = (tmp.path().canonicalize().unwrap().join("n"), open());
        std::fs::create_dir(&elsewhere).unwrap();
        sys::mount::bind(&place, &elsewhere, false).unwrap();
        first.detach().unwrap();
        assert_eq!(there(), None);
        assert_eq!(procscan::mounted_at(&elsewhere).unwrap().unwrap().source, "first");
        sys::mount::unmount(&elsewhere, UnmountFlags::empty()).unwrap();
        make("second");
        // In use it stays, unused it goes.
        let file = std::fs::File::create(place.join("f")).unwrap();
        assert!(!open().unmount_unused().unwrap());
        assert!(open().unmount().is_err());
        drop(file);
        assert!(open().unmount_unused().unwrap());
        assert_eq!(there(), None);
    }

    #[test]
    fn trees_deeper_than_any_path_are_removed() {
        let tmp = tempfile::tempdir().unwrap();
        let (tree, outside) = (tmp.path().join("tree"), tmp.path().join("outside"));
        std::fs::create_dir_all(tree.join("a/b")).unwrap();
        std::fs::create_dir_all(tree.join(".removed-1/x/y")).unwrap();
        std::fs::write(tree.join(".removed-2"), b"").unwrap();
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("victim"), b"").unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("a/b/link")).unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("link")).unwrap();
        let mut at = open_dir(rustix::fs::CWD, tree.as_os_str()).unwrap();
        for _ in 0..5000 {
            rustix::fs::mkdirat(&at, "d", Mode::RWXU).unwrap();
            at = open_dir(at.as_fd(), OsStr::new("d")).unwrap();
            rustix::fs::symlinkat("..", &at, "up").unwrap();
        }
        drop(at);
        remove_tree(&tree).unwrap();
        assert!(!tree.exists() && outside.join("victim").exists());
        remove_tree(&tree).unwrap();
    }

    #[test]
    fn only_our_mounts_are_unmounted() {
        let line = |fs: &str, source: &str| {
            sys::mountinfo::parse(format!("1 0 0:50 / /m ro - {fs} {source} ro\n").as_bytes()).remove(0)
        };
        for (fs, source, ours) in [
            ("erofs", "/proc/self/fd/9/lazyroot-ab-1-0", true),
            ("erofs", "/images/a.erofs", false),
            ("fuse.lazyroot", "anything", true),
            ("fuse.sshfs", "host:", false),
            ("overlay", "lazyroot:x", true),
            ("overlay", "overlay", false),
            ("proc", "proc", false),
        ] {
            assert_eq!(is_ours(&line(fs, source)), ours, "{fs} {source}");
        }
        let error = unmount(Path::new("/proc"), false, None).unwrap_err();
        assert_eq!(kind_of(&error), Kind::Usage);
        assert_eq!(kind_of(&unmount(Path::new("/"), false, None).unwrap_err()), Kind::Usage);
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(kind_of(&unmount(dir.path(), false, None).unwrap_err()), Kind::NotFound);
        assert_eq!(kind_of(&unmount(&dir.path().join("a/b"), false, None).unwrap_err()), Kind::NotFound);
    }

    #[test]
    fn lower_directories_are_escaped() {
        assert_eq!(escape(Path::new("/a:b\\c")).unwrap(), "/a\\:b\\\\c");
    }

    #[test]
    fn trees_are_removed_without_following_links() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("f"), b"").unwrap();
        let tree = dir.path().join("tree");
        std::fs::create_dir_all(tree.join("a/b")).unwrap();
        std::os::unix::fs::symlink(&outside, tree.join("a/link")).unwrap();
        remove_tree(&tree).unwrap();
        assert!(!tree.exists() && outside.join("f").exists());
        remove_tree(&tree).unwrap();
    }
}
