//! How a session's device reaches the kernel: as a detached mount made by root, or at a path through fusermount3.

use super::serve::Mounted;
use crate::front::Fault;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use sys::fuse::Device;
use sys::mount::{FsContext, MountAttrFlags};

/// How the mount presents itself.
#[derive(Debug, Clone)]
pub(crate) struct MountOptions {
    /// Shown as the source in mountinfo.
    pub(crate) source: String,
    /// Users other than the one who mounts may use it.
    pub(crate) allow_other: bool,
    /// Set user id bits count.
    pub(crate) suid: bool,
    /// Device nodes work.
    pub(crate) dev: bool,
}

const SUBTYPE: &str = "lazyroot";

fn failed(what: &'static str) -> impl FnOnce(io::Error) -> Fault {
    move |source| Fault::Io { what, source }
}

/// Mounts a new device, attached nowhere.
pub(crate) fn detached(options: &MountOptions) -> Result<Mounted, Fault> {
    let device = Device::open().map_err(failed("opening /dev/fuse"))?;
    let make = || -> io::Result<_> {
        let fs = FsContext::open("fuse")?;
        fs.string("source", &options.source)?;
        fs.string("subtype", SUBTYPE)?;
        fs.string("fd", &device.as_fd().as_raw_fd().to_string())?;
        fs.string("rootmode", "40000")?;
        fs.string("user_id", &sys::proc::euid().to_string())?;
        fs.string("group_id", &sys::proc::egid().to_string())?;
        fs.flag("default_permissions")?;
        if options.allow_other {
            fs.flag("allow_other")?;
        }
        fs.flag("ro")?;
        fs.create()?;
        let mut attrs = MountAttrFlags::MOUNT_ATTR_RDONLY;
        if !options.suid {
            attrs |= MountAttrFlags::MOUNT_ATTR_NOSUID;
        }
        if !options.dev {
            attrs |= MountAttrFlags::MOUNT_ATTR_NODEV;
        }
        fs.mount(attrs)
    };
    let mount = make().map_err(failed("mounting"))?;
    Ok(Mounted { device, mount: Some(mount), place: None })
}

/// Mounts at `place` through fusermount3, as an ordinary user can.
pub(crate) fn through_fusermount(place: &Path, options: &MountOptions) -> Result<Mounted, Fault> {
    let (ours, theirs) = UnixStream::pair().map_err(failed("making a socket for fusermount3"))?;
    // Commas and backslashes separate and escape options.
    let source = options.source.replace('\\', "\\\\").replace(',', "\\,");
    let mut words = format!("ro,default_permissions,fsname={source},subtype={SUBTYPE}");
    // Of a user's mount fusermount3 makes nosuid,nodev anyway.
    words += if options.suid { "" } else { ",nosuid" };
    words += if options.dev { "" } else { ",nodev" };
    if options.allow_other {
        words += ",allow_other";
    }
    let mut command = Command::new("fusermount3");
    command.arg("-o").arg(words).arg("--").arg(place).env("_FUSE_COMMFD", theirs.as_raw_fd().to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    sys::proc::pass_fd(&mut command, theirs.as_fd());
    let child = command.spawn().map_err(failed("starting fusermount3 (Debian package fuse3)"))?;
    drop(theirs);
    let mut byte = [0u8; 1];
    let received = sys::scm::recv_fds(&ours, &mut byte);
    let output = child.wait_with_output().map_err(failed("waiting for fusermount3"))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        let said = said.trim().trim_start_matches("fusermount3: ").to_owned();
        return Err(Fault::Io { what: "fusermount3", source: io::Error::other(said) });
    }
    let (_, mut fds) = received.map_err(failed("receiving the device from fusermount3"))?;
    let fd = fds.pop().ok_or_else(|| Fault::Io {
        what: "receiving the device from fusermount3",
        source: io::ErrorKind::UnexpectedEof.into(),
    })?;
    Ok(Mounted { device: Device::from_fd(fd), mount: None, place: Some(PathBuf::from(place)) })
}

/// Takes a mount away that fusermount3 made, also while it is in use.
pub(crate) fn fusermount_unmount(place: &Path) -> io::Result<()> {
    let output = Command::new("fusermount3").args(["-u", "-z", "--"]).arg(place).stdin(Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(io::Error::other(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
}
