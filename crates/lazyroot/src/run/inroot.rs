//! Files below a container's root, reached so that no symlink of the image leads out of it.
//!
//! Every path is opened by openat2 with RESOLVE_IN_ROOT: an absolute symlink means the container's root, `..` stops
//! there. What is written replaces a name, never what a symlink of that name points at.

use anyhow::Context;
use rustix::fs::{AtFlags, Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use std::ffi::OsStr;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path};

/// A container's root, open.
#[derive(Debug)]
pub struct Root {
    fd: OwnedFd,
}

impl Root {
    /// Opens the directory `path` as a root.
    pub fn open(path: &Path) -> anyhow::Result<Root> {
        let fd = sys::mount::open_target(path).with_context(|| path.display().to_string())?;
        Ok(Root { fd })
    }

    fn open_dir(&self, path: &Path) -> rustix::io::Result<OwnedFd> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(&self.fd, path, flags, Mode::empty(), resolve)
    }

    /// Opens a directory of the container, making what is missing of it with mode 0755.
    pub fn make_dir(&self, path: &Path) -> anyhow::Result<OwnedFd> {
        let mut so_far = std::path::PathBuf::from("/");
        let mut at = self.open_dir(&so_far).context("the container's root")?;
        for component in path.components() {
            match component {
                Component::RootDir | Component::CurDir => continue,
                Component::Normal(name) => so_far.push(name),
                Component::ParentDir | Component::Prefix(_) => {
                    anyhow::bail!("{}: .. is not allowed here", path.display())
                }
            }
            let name = so_far.file_name().unwrap_or(OsStr::new("/")).to_owned();
            let shown = so_far.display().to_string();
            at = match self.open_dir(&so_far) {
                Ok(fd) => fd,
                Err(Errno::NOENT) => {
                    match rustix::fs::mkdirat(&at, &name, Mode::from_raw_mode(0o755)) {
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(e) => {
                            return Err(std::io::Error::from(e))
                                .with_context(|| format!("creating {shown} in the container"));
                        }
                    }
                    self.open_dir(&so_far)
                        .map_err(std::io::Error::from)
                        .with_context(|| format!("{shown} in the container is a dangling symbolic link"))?
                }
                Err(e) => return Err(std::io::Error::from(e)).with_context(|| format!("{shown} in the container")),
            };
        }
        Ok(at)
    }

    /// Writes a file of mode 0644, replacing what has its name, symlinks themselves included.
    pub fn replace(&self, path: &Path, content: &[u8]) -> anyhow::Result<()> {
        let shown = path.display();
        let parent = self.make_dir(path.parent().unwrap_or(Path::new("/")))?;
        let name = path.file_name().with_context(|| format!("{shown} is no file name"))?;
        match rustix::fs::unlinkat(parent.as_fd(), name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(e) => {
                return Err(std::io::Error::from(e)).with_context(|| format!("replacing {shown} in the container"));
            }
        }
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(parent.as_fd(), name, flags, Mode::from_raw_mode(0o644))
            .map_err(std::io::Error::from)
            .with_context(|| format!("creating {shown} in the container"))?;
        let mut file = std::fs::File::from(fd);
        file.write_all(content).with_context(|| format!("writing {shown} in the container"))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn nothing_is_written_outside_of_the_root() {
        let tmp = tempfile::tempdir().unwrap();
        let root_path = tmp.path().join("root");
        let outside = tmp.path().join("outside");
        std::fs::create_dir_all(root_path.join("real")).unwrap();
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("victim"), b"untouched").unwrap();
        symlink(&outside, root_path.join("etc")).unwrap();
        symlink("../../../outside", root_path.join("up")).unwrap();
        symlink("/real", root_path.join("abs")).unwrap();
        let root = Root::open(&root_path).unwrap();
        // An absolute link to somewhere that does not exist below the root is a dangling one.
        assert!(root.replace(Path::new("/etc/resolv.conf"), b"x").is_err());
        assert!(root.replace(Path::new("/up/resolv.conf"), b"x").is_err());
        assert!(root.make_dir(Path::new("/a/../../b")).is_err());
        root.replace(Path::new("/abs/sub/file"), b"inside").unwrap();
        assert_eq!(std::fs::read(root_path.join("real/sub/file")).unwrap(), b"inside");
        symlink(outside.join("victim"), root_path.join("real/link")).unwrap();
        root.replace(Path::new("/real/link"), b"new").unwrap();
        assert_eq!(std::fs::read(outside.join("victim")).unwrap(), b"untouched");
        assert_eq!(std::fs::read(root_path.join("real/link")).unwrap(), b"new");
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
        assert!(root.replace(Path::new("/real"), b"x").is_err(), "a directory is not replaced");
    }
}
