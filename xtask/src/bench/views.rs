//! The same tree as several file systems show it: the native one, ours, the kernel's own, and (`peers`) others.

use super::measure::Figures;
use super::peers::{self, Site};
use crate::lab::{Lab, mount_erofs};
use crate::proc;
use crate::scratch::Scratch;
use anyhow::{Context, Result, bail};
use std::ffi::OsStr;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The longest that making an image may take.
pub const LIMIT: Duration = Duration::from_secs(1800);

/// A mounted tree.
#[derive(Debug)]
pub struct View {
    /// What shows it.
    pub name: String,
    /// Where.
    pub point: PathBuf,
    server: Option<Child>,
    /// It was there before, and stays.
    native: bool,
}

impl View {
    /// One that needs no server of ours.
    pub fn mounted(name: &str, point: PathBuf) -> View {
        View { name: name.into(), point, server: None, native: false }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        if self.native {
            return;
        }
        crate::scratch::unmount_below(&self.point);
        if let Some(mut server) = self.server.take() {
            // It ends with its mount; one that does not is killed.
            std::thread::sleep(Duration::from_millis(100));
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}

/// A program's version line, or `None` when it is not in the path.
pub fn version(program: &str) -> Option<String> {
    if !proc::in_path(program) {
        return None;
    }
    let argument = match program {
        "mksquashfs" => "-version",
        "mkfs.erofs" | "mke2fs" => "-V",
        _ => "--version",
    };
    let outcome = proc::catch(Command::new(program).arg(argument), Duration::from_secs(10)).ok()?;
    let said = format!("{}\n{}", outcome.stdout, outcome.stderr);
    Some(said.lines().find(|l| !l.trim().is_empty()).unwrap_or(program).trim().to_owned())
}

/// The native directory, which is the base, then ours, then the kernel's own with the same metadata, then the peers
/// that are here.
pub fn all(site: &Site<'_>, lab: &Lab, figures: &mut Figures) -> Result<Vec<View>> {
    let mut views = ours(site, lab)?;
    let exported = site.scratch.dir().join(format!("{}.exported", site.corpus));
    lab.run(["export", site.corpus, "--as", "erofs"].map(OsStr::new).into_iter().chain([exported.as_os_str()]))?;
    views.push(erofs(site.scratch, "native EROFS, metadata in front", &exported)?);
    views.extend(peers::all(site, figures));
    Ok(views)
}

/// The native directory, and both of our ways to show it.
pub fn ours(site: &Site<'_>, lab: &Lab) -> Result<Vec<View>> {
    let mut views =
        vec![View { name: "native directory".into(), point: site.rootfs.to_owned(), server: None, native: true }];
    for shape in ["erofs", "tree"] {
        let point = point(site.scratch, &format!("{}-{shape}", site.corpus))?;
        lab.run(["mount", "--as", shape, site.corpus].map(OsStr::new).into_iter().chain([point.as_os_str()]))?;
        views.push(View::mounted(&format!("lazyroot {shape}"), point));
    }
    Ok(views)
}

/// A fresh mount point.
pub fn point(scratch: &Scratch, name: &str) -> Result<PathBuf> {
    let point = scratch.dir().join("views").join(name);
    std::fs::create_dir_all(&point)?;
    Ok(point)
}

/// An EROFS image that the kernel mounts by itself.
pub fn erofs(scratch: &Scratch, name: &str, image: &Path) -> Result<View> {
    let stem = image.file_name().unwrap_or_default().to_string_lossy();
    let point = point(scratch, &format!("native-{stem}"))?;
    mount_erofs(image, &point)?;
    Ok(View::mounted(name, point))
}

/// Starts a FUSE server in the foreground and waits for its mount. What it says goes to `log`.
pub fn served(name: &str, point: PathBuf, command: &mut Command, log: &Path) -> Result<View> {
    let said = File::create(log).with_context(|| format!("cannot make {}", log.display()))?;
    command.stdin(Stdio::null()).stdout(said.try_clone()?).stderr(said);
    let mut server = command.spawn().with_context(|| format!("cannot start {name}"))?;
    let began = Instant::now();
    while crate::scratch::mounts_below(&point).is_empty() {
        let ended = server.try_wait()?;
        if ended.is_some() || began.elapsed() > Duration::from_secs(10) {
            let _ = server.kill();
            let _ = server.wait();
            let how = ended.map_or("it mounts nothing".to_owned(), |status| status.to_string());
            let said = std::fs::read_to_string(log).unwrap_or_default();
            bail!("{}: {how}: {}", proc::line(command), said.trim());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(View { name: name.into(), point, server: Some(server), native: false })
}
