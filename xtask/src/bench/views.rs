//! The same tree as several file systems show it: ours, the kernel's own, and what others offer.

use super::measure::Figures;
use crate::lab::{Lab, mount_erofs};
use crate::proc;
use crate::scratch::Scratch;
use anyhow::{Context, Result, bail};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(1800);

/// A mounted tree.
#[derive(Debug)]
pub struct View {
    /// What shows it.
    pub name: String,
    /// Where.
    pub point: PathBuf,
    server: Option<Child>,
}

impl Drop for View {
    fn drop(&mut self) {
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
        "mkfs.erofs" => "-V",
        _ => "--version",
    };
    let outcome = proc::catch(Command::new(program).arg(argument), Duration::from_secs(10)).ok()?;
    let said = format!("{}\n{}", outcome.stdout, outcome.stderr);
    Some(said.lines().find(|l| !l.trim().is_empty()).unwrap_or(program).trim().to_owned())
}

/// The native directory, which is the base, then ours, then the peers that are here.
pub fn all(scratch: &Scratch, lab: &Lab, corpus: &str, rootfs: &Path, figures: &mut Figures) -> Result<Vec<View>> {
    let mut views = vec![View { name: "native directory".into(), point: rootfs.to_owned(), server: None }];
    for shape in ["erofs", "tree"] {
        let point = point(scratch, &format!("{corpus}-{shape}"))?;
        lab.run([
            "mount".as_ref(),
            "--as".as_ref(),
            shape.as_ref(),
            AsRef::<std::ffi::OsStr>::as_ref(corpus),
            point.as_os_str(),
        ])?;
        views.push(View { name: format!("lazyroot {shape}"), point, server: None });
    }
    let exported = scratch.dir().join(format!("{corpus}.exported"));
    lab.run([
        "export".as_ref(),
        AsRef::<std::ffi::OsStr>::as_ref(corpus),
        "--as".as_ref(),
        "erofs".as_ref(),
        exported.as_os_str(),
    ])?;
    views.push(erofs_view(scratch, "native EROFS, metadata in front", &exported)?);
    peers(scratch, corpus, rootfs, figures, &mut views)?;
    Ok(views)
}

fn peers(scratch: &Scratch, corpus: &str, rootfs: &Path, figures: &mut Figures, views: &mut Vec<View>) -> Result<()> {
    let mkfs = version("mkfs.erofs");
    figures.peer("mkfs.erofs", mkfs.clone());
    if mkfs.is_some() {
        for (name, options) in
            [("native EROFS, mkfs.erofs", vec![]), ("native EROFS, mkfs.erofs noinline_data", vec!["-Enoinline_data"])]
        {
            let image = scratch.dir().join(format!("{corpus}-{}.erofs", views.len()));
            proc::must(Command::new("mkfs.erofs").arg("--quiet").args(options).arg(&image).arg(rootfs), LIMIT)?;
            views.push(erofs_view(scratch, name, &image)?);
        }
    }
    let mksquashfs = version("mksquashfs");
    figures.peer("mksquashfs", mksquashfs.clone());
    let squashed = scratch.dir().join(format!("{corpus}.sqfs"));
    if mksquashfs.is_some() {
        proc::must(&mut super::import::mksquashfs(rootfs, &squashed), LIMIT)?;
        let point = point(scratch, &format!("{corpus}-squashfs"))?;
        let mut command = Command::new("mount");
        command.args(["-t", "squashfs", "-o", "ro,loop"]).arg(&squashed).arg(&point);
        match proc::must(&mut command, LIMIT) {
            Ok(_) => views.push(View { name: "squashfs on loop, zstd 3".into(), point, server: None }),
            Err(e) => println!("  absent: squashfs in this kernel ({e:#})"),
        }
    }
    for (program, arguments, needs) in [
        ("squashfuse_ll", vec!["-f".into(), squashed.into_os_string()], mksquashfs.is_some()),
        ("fuse-overlayfs", vec!["-f".into(), "-o".into(), lower(rootfs)], true),
    ] {
        let here = proc::in_path(program);
        figures.peer(program, here.then(|| version(program)).flatten());
        if here && needs {
            views.push(served(scratch, corpus, program, arguments)?);
        }
    }
    figures.peer("nydusd", version("nydusd"));
    Ok(())
}

/// A pass-through FUSE tree over a directory: what every lookup costs when a daemon asks the kernel again.
pub fn pass_through(scratch: &Scratch, corpus: &str, rootfs: &Path, figures: &mut Figures) -> Result<Option<View>> {
    let here = proc::in_path("bindfs");
    figures.peer("bindfs", here.then(|| version("bindfs")).flatten());
    let arguments = vec!["-f".into(), "-o".into(), "ro".into(), rootfs.as_os_str().to_owned()];
    here.then(|| served(scratch, corpus, "bindfs", arguments)).transpose()
}

fn lower(rootfs: &Path) -> std::ffi::OsString {
    let mut option = std::ffi::OsString::from("lowerdir=");
    option.push(rootfs);
    option
}

fn point(scratch: &Scratch, name: &str) -> Result<PathBuf> {
    let point = scratch.dir().join("views").join(name);
    std::fs::create_dir_all(&point)?;
    Ok(point)
}

fn erofs_view(scratch: &Scratch, name: &str, image: &Path) -> Result<View> {
    let stem = image.file_name().unwrap_or_default().to_string_lossy();
    let point = point(scratch, &format!("native-{stem}"))?;
    mount_erofs(image, &point)?;
    Ok(View { name: name.into(), point, server: None })
}

/// Starts a FUSE server in the foreground and waits for its mount.
fn served(scratch: &Scratch, corpus: &str, program: &str, arguments: Vec<std::ffi::OsString>) -> Result<View> {
    let point = point(scratch, &format!("{corpus}-{program}"))?;
    let mut command = Command::new(program);
    command.args(arguments).arg(&point).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let mut server = command.spawn().with_context(|| format!("cannot start {program}"))?;
    let began = Instant::now();
    while crate::scratch::mounts_below(&point).is_empty() {
        if server.try_wait()?.is_some() || began.elapsed() > Duration::from_secs(10) {
            let _ = server.kill();
            bail!("{program} did not mount {}", point.display());
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(View { name: program.into(), point, server: Some(server) })
}
