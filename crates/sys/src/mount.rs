//! Mounts through the descriptor-based calls: a mount is made detached, handed over as a descriptor and attached by
//! whoever wants it, in their own namespace.
//!
//! Nothing here decides on flags or names. Most calls need CAP_SYS_ADMIN in the user namespace that owns the mount
//! namespace.

#![allow(unsafe_code)]

use rustix::fs::{self, AtFlags, CWD, Mode, OFlags, StatxFlags};
use rustix::mount::{self, FsMountFlags, FsOpenFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags};
pub use rustix::mount::{MountAttrFlags, MountFlags, UnmountFlags};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// A file system that is being configured (fsopen(2)).
#[derive(Debug)]
pub struct FsContext {
    fd: OwnedFd,
}

impl FsContext {
    /// Starts to configure a file system of type `name`.
    pub fn open(name: &str) -> io::Result<FsContext> {
        Ok(FsContext { fd: mount::fsopen(name, FsOpenFlags::FSOPEN_CLOEXEC)? })
    }

    /// Sets an option without a value, such as `ro`.
    pub fn flag(&self, key: &str) -> io::Result<()> {
        mount::fsconfig_set_flag(&self.fd, key).map_err(|e| self.explain(e, key))
    }

    /// Sets an option with a value.
    pub fn string(&self, key: &str, value: &str) -> io::Result<()> {
        mount::fsconfig_set_string(&self.fd, key, value).map_err(|e| self.explain(e, key))
    }

    /// Makes the superblock.
    pub fn create(&self) -> io::Result<()> {
        mount::fsconfig_create(&self.fd).map_err(|e| self.explain(e, "create"))
    }

    /// Makes a detached mount of the superblock. It lives as long as the descriptor, or as it is attached.
    pub fn mount(&self, attrs: MountAttrFlags) -> io::Result<OwnedFd> {
        mount::fsmount(&self.fd, FsMountFlags::FSMOUNT_CLOEXEC, attrs).map_err(|e| self.explain(e, "mount"))
    }

    /// What the file system had to say so far: one line per message, each with its level (`e`, `w` or `i`).
    pub fn messages(&self) -> Vec<String> {
        let mut lines = Vec::new();
        let mut buf = [0u8; 1024];
        while let Ok(n) = rustix::io::read(&self.fd, &mut buf) {
            lines.push(String::from_utf8_lossy(&buf[..n]).trim_end().to_owned());
            if n == 0 || lines.len() > 64 {
                break;
            }
        }
        lines
    }

    fn explain(&self, errno: rustix::io::Errno, step: &str) -> io::Error {
        let messages = self.messages();
        let plain = io::Error::from(errno);
        if messages.is_empty() {
            return plain;
        }
        io::Error::new(plain.kind(), Explained { errno, step: step.to_owned(), messages })
    }
}

/// An errno with what the file system said about it.
#[derive(Debug)]
struct Explained {
    errno: rustix::io::Errno,
    step: String,
    messages: Vec<String>,
}

impl std::fmt::Display for Explained {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({}): {}", self.errno, self.step, self.messages.join("; "))
    }
}

impl std::error::Error for Explained {}

/// The errno inside an error of this module, also where the file system's own words were added.
pub fn raw_errno(error: &io::Error) -> Option<i32> {
    error.raw_os_error().or_else(|| {
        let inner = error.get_ref()?.downcast_ref::<Explained>()?;
        Some(inner.errno.raw_os_error())
    })
}

/// A mount to be made: what [`FsContext`] does, in one piece.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Recipe {
    /// Type of the file system.
    pub fstype: String,
    /// Options: a key, and a value where it takes one.
    pub options: Vec<(String, Option<String>)>,
    /// Attributes of the mount.
    pub attrs: MountAttrFlags,
}

impl Recipe {
    /// Makes the detached mount.
    pub fn make(&self) -> io::Result<OwnedFd> {
        let context = FsContext::open(&self.fstype)?;
        for (key, value) in &self.options {
            match value {
                Some(value) => context.string(key, value)?,
                None => context.flag(key)?,
            }
        }
        context.create()?;
        context.mount(self.attrs)
    }

    /// Makes the detached mount of something that this very process serves, an image file on its own FUSE session
    /// for one.
    ///
    /// A thread that waits for a FUSE answer cannot be killed, and while it lives, so do the descriptors that it
    /// shares with its process; were it to share the device of the session, then killing the process at that moment
    /// would leave it for ever, as the answer never comes and the device never closes. So the mount is made by a
    /// thread with a descriptor table of its own, in which nothing of the process's is left.
    pub fn make_apart(&self) -> io::Result<OwnedFd> {
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        let made = std::thread::scope(|scope| {
            let theirs = theirs.as_fd();
            let thread = scope.spawn(move || -> io::Result<()> {
                crate::proc::leave_descriptors_but(theirs)?;
                let mount = self.make()?;
                crate::scm::send_fds(theirs, b"m", &[mount.as_fd()]).map(|_| ())
            });
            thread.join().unwrap_or_else(|_| Err(io::Error::other("the mounting thread panicked")))
        });
        made?;
        let (_, mut fds) = crate::scm::recv_fds(&ours, &mut [0u8; 1])?;
        fds.pop().ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }
}

/// Opens a directory to attach a mount to. A symlink as the last component is refused, so nobody redirects it.
pub fn open_target(path: &Path) -> io::Result<OwnedFd> {
    Ok(fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?)
}

/// A detached copy of the mount at `path` below `dir` (an empty path: of what `dir` itself refers to). With
/// `recursive`, of everything mounted below too.
pub fn clone_tree(dir: BorrowedFd<'_>, path: &str, recursive: bool) -> io::Result<OwnedFd> {
    let mut flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    if path.is_empty() {
        flags |= OpenTreeFlags::AT_EMPTY_PATH;
    }
    if recursive {
        flags |= OpenTreeFlags::AT_RECURSIVE;
    }
    Ok(mount::open_tree(dir, path, flags)?)
}

/// Attaches a detached mount to an open directory (see [`open_target`]), in the caller's mount namespace.
pub fn attach(mount: BorrowedFd<'_>, target: BorrowedFd<'_>) -> io::Result<()> {
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    Ok(mount::move_mount(mount, "", target, "", flags)?)
}

/// A bind mount of one directory on another, in the caller's namespace.
pub fn bind(source: &Path, target: &Path, recursive: bool) -> io::Result<()> {
    if recursive { mount::mount_bind_recursive(source, target) } else { mount::mount_bind(source, target) }
        .map_err(Into::into)
}

/// mount(2) as it always was.
pub fn mount_legacy(source: &Path, target: &Path, fstype: &str, flags: MountFlags, data: &str) -> io::Result<()> {
    let data = std::ffi::CString::new(data).map_err(|_| io::ErrorKind::InvalidInput)?;
    Ok(mount::mount(source, target, fstype, flags, Some(data.as_c_str()))?)
}

/// Unmounts what is mounted at `path`.
pub fn unmount(path: &Path, flags: UnmountFlags) -> io::Result<()> {
    Ok(mount::unmount(path, flags)?)
}

/// Unmounts the attached mount whose root `fd` is open.
pub fn unmount_fd(fd: BorrowedFd<'_>, flags: UnmountFlags) -> io::Result<()> {
    Ok(mount::unmount(fd_path(fd), flags)?)
}

/// The path through which this process reaches what `fd` refers to.
pub fn fd_path(fd: BorrowedFd<'_>) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_raw_fd()))
}

/// How a mount spreads to the copies of its namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Propagation {
    /// Not at all.
    Private,
    /// In, but not out.
    Slave,
    /// Both ways.
    Shared,
}

/// Changes the propagation of everything mounted at and below `path`.
pub fn set_propagation(path: &Path, kind: Propagation) -> io::Result<()> {
    let flags = match kind {
        Propagation::Private => MountPropagationFlags::PRIVATE,
        Propagation::Slave => MountPropagationFlags::DOWNSTREAM,
        Propagation::Shared => MountPropagationFlags::SHARED,
    };
    Ok(mount::mount_change(path, flags | MountPropagationFlags::REC)?)
}

/// Gives the calling thread a mount namespace of its own, whose mounts follow those of the old one but not the other
/// way round. Threads started afterwards share it; call it before any other thread exists.
pub fn enter_own_namespace() -> io::Result<()> {
    // SAFETY: the call is unsafe for CLONE_FILES only, which is not asked for.
    unsafe { rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::NEWNS)? };
    set_propagation(Path::new("/"), Propagation::Slave)
}

/// What [`set_attrs`] changes.
#[derive(Debug, Default, Clone, Copy)]
pub struct SetAttrs<'a> {
    /// Attributes to set.
    pub set: u64,
    /// Attributes to clear.
    pub clear: u64,
    /// The new propagation.
    pub propagation: Option<Propagation>,
    /// The user namespace whose id mapping the mount gets.
    pub idmap: Option<BorrowedFd<'a>>,
    /// Also everything mounted below.
    pub recursive: bool,
}

/// mount_setattr(2) on the mount that `mount` refers to. ENOSYS before Linux 5.12.
pub fn set_attrs(mount: BorrowedFd<'_>, change: SetAttrs<'_>) -> io::Result<()> {
    let mut attr = libc::mount_attr {
        attr_set: change.set,
        attr_clr: change.clear,
        propagation: match change.propagation {
            None => 0,
            Some(Propagation::Private) => libc::MS_PRIVATE,
            Some(Propagation::Slave) => libc::MS_SLAVE,
            Some(Propagation::Shared) => libc::MS_SHARED,
        },
        userns_fd: 0,
    };
    if let Some(ns) = change.idmap {
        attr.attr_set |= u64::from(MountAttrFlags::MOUNT_ATTR_IDMAP.bits());
        attr.userns_fd = u64::try_from(ns.as_raw_fd()).expect("an open descriptor is not negative");
    }
    let mut flags = libc::AT_EMPTY_PATH;
    if change.recursive {
        flags |= libc::AT_RECURSIVE;
    }
    // SAFETY: the path is a static NUL-terminated string, `attr` is a live struct mount_attr of the size passed, both
    // descriptors are borrowed for the call, and the kernel only reads them.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const attr,
            size_of::<libc::mount_attr>(),
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Which mount and which superblock an open file is on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MountIds {
    /// As in the first column of mountinfo.
    pub mount_id: u64,
    /// Device of the superblock.
    pub dev_major: u32,
    /// Device of the superblock; for FUSE also the number of its connection.
    pub dev_minor: u32,
}

/// The ids of the mount that `fd` is on. Asks the file system nothing, so it does not block on a FUSE server.
pub fn ids(fd: impl AsFd) -> io::Result<MountIds> {
    let flags = AtFlags::EMPTY_PATH | AtFlags::STATX_DONT_SYNC;
    let st = fs::statx(fd, "", flags, StatxFlags::MNT_ID)?;
    Ok(MountIds { mount_id: st.stx_mnt_id, dev_major: st.stx_dev_major, dev_minor: st.stx_dev_minor })
}

/// [`ids`] of what `path` names.
pub fn ids_at(path: &Path) -> io::Result<MountIds> {
    let fd = fs::openat(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?;
    ids(fd)
}

/// The readahead of the file system on a device, in KiB (`/sys/class/bdi/MAJ:MIN/read_ahead_kb`). Applies to files
/// that are opened afterwards.
pub fn set_read_ahead_kb(ids: MountIds, kb: u32) -> io::Result<()> {
    std::fs::write(format!("/sys/class/bdi/{}:{}/read_ahead_kb", ids.dev_major, ids.dev_minor), kb.to_string())
}

/// The readahead of the file system on a device, in KiB.
pub fn read_ahead_kb(ids: MountIds) -> io::Result<u32> {
    let path = format!("/sys/class/bdi/{}:{}/read_ahead_kb", ids.dev_major, ids.dev_minor);
    std::fs::read_to_string(path)?.trim().parse().map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> bool {
        rustix::process::geteuid().is_root()
    }

    /// Runs `f` on a thread with a mount namespace of its own.
    fn in_namespace(f: impl FnOnce() + Send + 'static) {
        let joined = std::thread::spawn(move || {
            enter_own_namespace().unwrap();
            f();
        })
        .join();
        if let Err(panic) = joined {
            std::panic::resume_unwind(panic);
        }
    }

    #[test]
    fn priv_a_detached_mount_is_attached_cloned_and_changed() {
        if !root() {
            println!("SKIP priv_a_detached_mount_is_attached_cloned_and_changed: not root");
            return;
        }
        in_namespace(|| {
            let dir = tempfile::tempdir().unwrap();
            let ctx = FsContext::open("tmpfs").unwrap();
            ctx.string("size", "1m").unwrap();
            ctx.create().unwrap();
            let made = ctx.mount(MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV).unwrap();
            let before = ids(&made).unwrap();
            let target = open_target(dir.path()).unwrap();
            attach(made.as_fd(), target.as_fd()).unwrap();
            std::fs::write(dir.path().join("f"), b"x").unwrap();
            assert_eq!(ids_at(dir.path()).unwrap(), before);

            let copy = clone_tree(made.as_fd(), "", false).unwrap();
            set_attrs(
                copy.as_fd(),
                SetAttrs {
                    set: u64::from(MountAttrFlags::MOUNT_ATTR_RDONLY.bits()),
                    propagation: Some(Propagation::Private),
                    ..Default::default()
                },
            )
            .unwrap();
            let there = dir.path().join("sub");
            std::fs::create_dir(&there).unwrap();
            attach(copy.as_fd(), open_target(&there).unwrap().as_fd()).unwrap();
            assert_eq!(std::fs::read(there.join("f")).unwrap(), b"x");
            assert_eq!(std::fs::write(there.join("g"), b"").unwrap_err().raw_os_error(), Some(libc::EROFS));
            let twin = ids_at(&there).unwrap();
            assert_eq!((twin.dev_major, twin.dev_minor), (before.dev_major, before.dev_minor));
            assert_ne!(twin.mount_id, before.mount_id);

            drop(copy);
            unmount(&there, UnmountFlags::empty()).unwrap();
            drop(made);
            drop(target);
            unmount(dir.path(), UnmountFlags::empty()).unwrap();
        });
    }

    #[test]
    fn priv_a_bad_option_is_explained_and_keeps_its_errno() {
        if !root() {
            println!("SKIP priv_a_bad_option_is_explained_and_keeps_its_errno: not root");
            return;
        }
        let e = FsContext::open("tmpfs").unwrap().string("nonsense", "1").unwrap_err();
        assert_eq!(raw_errno(&e), Some(libc::EINVAL));
        assert!(e.to_string().contains("nonsense"), "{e}");
    }

    #[test]
    fn priv_a_mount_made_apart_arrives_and_leaves_nothing_behind() {
        if !root() {
            println!("SKIP priv_a_mount_made_apart_arrives_and_leaves_nothing_behind: not root");
            return;
        }
        let recipe = |key: &str| Recipe {
            fstype: "tmpfs".to_owned(),
            options: vec![(key.to_owned(), Some("1m".to_owned())), ("ro".to_owned(), None)],
            attrs: MountAttrFlags::MOUNT_ATTR_NODEV,
        };
        let marker = tempfile::tempfile().unwrap();
        let mount = recipe("size").make_apart().unwrap();
        assert_eq!(fs::fstatfs(&mount).unwrap().f_blocks, 256);
        // What was open is open still, here.
        marker.metadata().unwrap();
        assert_eq!(raw_errno(&recipe("nonsense").make_apart().unwrap_err()), Some(libc::EINVAL));
    }

    #[test]
    fn a_symlink_is_no_target() {
        let dir = tempfile::tempdir().unwrap();
        let link = dir.path().join("l");
        std::os::unix::fs::symlink("/", &link).unwrap();
        assert!(open_target(&link).is_err());
        assert!(open_target(dir.path()).is_ok());
    }
}
