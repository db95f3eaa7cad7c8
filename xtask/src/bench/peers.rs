//! The same tree as others show it: images of what Debian packages, and nydusd where it is in the path.
//!
//! A peer that is here and does not work is noted with the reason, and the bench goes on without it.

use super::measure::Figures;
use super::views::{self, LIMIT, View};
use crate::proc;
use crate::scratch::Scratch;
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A tree, and where its images go.
#[derive(Debug)]
pub struct Site<'a> {
    /// Files of the bench.
    pub scratch: &'a Scratch,
    /// The tree's name.
    pub corpus: &'a str,
    /// Where it lies.
    pub rootfs: &'a Path,
}

type Make = fn(&Site<'_>) -> Result<View>;

/// The program that has to be in the path, and what is made with it.
const PEERS: [(&str, Make); 7] = [
    ("mkfs.erofs", |site| site.erofs("native EROFS, mkfs.erofs", &[])),
    ("mkfs.erofs", |site| site.erofs("native EROFS, mkfs.erofs noinline_data", &["-Enoinline_data"])),
    ("mke2fs", |site| site.ext4_on_loop()),
    ("mksquashfs", |site| site.squashfs_on_loop()),
    ("squashfuse_ll", |site| site.squashfuse()),
    ("fuse-overlayfs", |site| site.fuse_overlayfs()),
    ("nydusd", |site| site.nydusd()),
];

/// All peers that are here.
pub fn all(site: &Site<'_>, figures: &mut Figures) -> Vec<View> {
    PEERS.iter().filter_map(|(program, make)| one(site, program, *make, figures)).collect()
}

/// nydusd, where it is here.
pub fn nydusd(site: &Site<'_>, figures: &mut Figures) -> Option<View> {
    one(site, "nydusd", |site| site.nydusd(), figures)
}

/// A pass-through FUSE tree over a directory: what every lookup costs when a daemon asks the kernel again.
pub fn pass_through(site: &Site<'_>, figures: &mut Figures) -> Option<View> {
    one(site, "bindfs", |site| site.bindfs(), figures)
}

fn one(site: &Site<'_>, program: &str, make: Make, figures: &mut Figures) -> Option<View> {
    let version = views::version(program);
    figures.peer(program, version.clone());
    version?;
    let shown = make(site).and_then(|view| {
        ensure!(std::fs::read_dir(&view.point)?.next().is_some(), "it shows an empty tree");
        Ok(view)
    });
    match shown {
        Ok(view) => Some(view),
        Err(e) => {
            figures.unmeasured(program, &e);
            None
        }
    }
}

impl Site<'_> {
    fn image(&self, extension: &str) -> PathBuf {
        self.scratch.dir().join(format!("{}.{extension}", self.corpus))
    }

    fn point(&self, name: &str) -> Result<PathBuf> {
        views::point(self.scratch, &format!("{}-{name}", self.corpus))
    }

    fn erofs(&self, name: &str, options: &[&str]) -> Result<View> {
        let image = self.image(&format!("{}.erofs", options.len()));
        proc::must(Command::new("mkfs.erofs").arg("--quiet").args(options).arg(&image).arg(self.rootfs), LIMIT)?;
        views::erofs(self.scratch, name, &image)
    }

    fn ext4_on_loop(&self) -> Result<View> {
        let image = self.image("ext4");
        proc::must(&mut mke2fs(self.rootfs, &image)?, LIMIT)?;
        self.on_loop("ext4 on loop", "ext4", "ro,loop", &image)
    }

    fn squashfs_on_loop(&self) -> Result<View> {
        self.on_loop("squashfs on loop, zstd 3", "squashfs", "ro,loop", &self.squashed()?)
    }

    fn on_loop(&self, name: &str, kind: &str, options: &str, image: &Path) -> Result<View> {
        let point = self.point(kind)?;
        let mut command = Command::new("mount");
        command.args(["-t", kind, "-o", options]).arg(image).arg(&point);
        proc::must(&mut command, LIMIT)?;
        Ok(View::mounted(name, point))
    }

    /// The squashfs image, made by whoever needs it first.
    fn squashed(&self) -> Result<PathBuf> {
        let image = self.image("sqfs");
        if !image.exists() {
            ensure!(proc::in_path("mksquashfs"), "no mksquashfs to make its image with");
            proc::must(&mut super::import::mksquashfs(self.rootfs, &image), LIMIT)?;
        }
        Ok(image)
    }

    fn squashfuse(&self) -> Result<View> {
        self.served("squashfuse_ll", &["-f".into(), self.squashed()?.into(), POINT.into()])
    }

    fn fuse_overlayfs(&self) -> Result<View> {
        let mut lower = OsString::from("lowerdir=");
        lower.push(self.rootfs);
        self.served("fuse-overlayfs", &["-f".into(), "-o".into(), lower, POINT.into()])
    }

    fn bindfs(&self) -> Result<View> {
        self.served("bindfs", &["-f".into(), "-o".into(), "ro".into(), self.rootfs.into(), POINT.into()])
    }

    /// RAFS v6 with zstd, from a local directory through a local cache, as its own measurements take it.
    fn nydusd(&self) -> Result<View> {
        ensure!(proc::in_path("nydus-image"), "no nydus-image to make its image with");
        let dir = self.image("nydus");
        let (blobs, cache) = (dir.join("blobs"), dir.join("cache"));
        for made in [&blobs, &cache] {
            std::fs::create_dir_all(made).with_context(|| format!("cannot make {}", made.display()))?;
        }
        let (bootstrap, config) = (dir.join("bootstrap"), dir.join("config.json"));
        let mut command = Command::new("nydus-image");
        command.args(["create", "-t", "dir-rafs", "--fs-version", "6", "-D"]).arg(&blobs);
        proc::must(command.arg("-B").arg(&bootstrap).arg(self.rootfs), LIMIT)?;
        let settings = json!({
            "device": {
                "backend": {"type": "localfs", "config": {"dir": blobs}},
                "cache": {"type": "blobcache", "config": {"work_dir": cache}},
            },
            "mode": "direct", "digest_validate": false, "iostats_files": false, "enable_xattr": true,
            "fs_prefetch": {"enable": false},
        });
        std::fs::write(&config, settings.to_string())?;
        let words = ["fuse", "--thread-num", "2", "--rlimit-nofile", "0", "--log-level", "error"];
        let mut arguments: Vec<OsString> = words.iter().map(Into::into).collect();
        for (option, value) in
            [("--config", config.into()), ("--bootstrap", bootstrap.into()), ("--mountpoint", POINT.into())]
        {
            arguments.extend([option.into(), value]);
        }
        self.served("nydusd", &arguments)
    }

    /// A FUSE server in the foreground; among its arguments [`POINT`] stands for the mount point.
    fn served(&self, program: &str, arguments: &[OsString]) -> Result<View> {
        let point = self.point(program)?;
        let mut command = Command::new(program);
        command.args(arguments.iter().map(|a| if a == POINT { point.as_os_str() } else { a }));
        views::served(program, point.clone(), &mut command, &self.image(&format!("{program}.log")))
    }
}

/// Stands for the mount point in a server's arguments.
const POINT: &str = "MOUNT POINT";

/// How ext4 images are made wherever they are compared with: without a journal, half as large again as the content.
pub fn mke2fs(rootfs: &Path, image: &Path) -> Result<Command> {
    let outcome = proc::must(Command::new("du").args(["-s", "--inodes"]).arg(rootfs), LIMIT)?;
    let count = |text: &str| -> Result<u64> { Ok(text.split_whitespace().next().context("du said nothing")?.parse()?) };
    let inodes = count(&outcome.stdout)?;
    let outcome = proc::must(Command::new("du").args(["-s", "--block-size=1M"]).arg(rootfs), LIMIT)?;
    let megabytes = count(&outcome.stdout)? * 3 / 2 + 64;
    let mut command = Command::new("mke2fs");
    command.args(["-q", "-F", "-t", "ext4", "-O", "^has_journal", "-N", &(inodes + inodes / 4 + 1000).to_string()]);
    command.arg("-d").arg(rootfs).arg(image).arg(format!("{megabytes}M"));
    Ok(command)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_fails_is_noted_and_left_out() {
        let scratch = Scratch::new("peers-test").unwrap();
        let site = Site { scratch: &scratch, corpus: "none", rootfs: scratch.dir() };
        let mut figures = Figures::new("test");
        // A server that says why it does not serve, and one that shows nothing.
        let refuses: Make = |site| {
            let mut command = Command::new("sh");
            command.args(["-c", "echo not on Mondays >&2; exit 3"]);
            views::served("sh", site.point("sh")?, &mut command, &site.image("log"))
        };
        assert!(one(&site, "sh", refuses, &mut figures).is_none());
        let noted = figures.json()["peers"]["sh"].as_str().unwrap().to_owned();
        assert!(noted.starts_with("could not be measured: "), "{noted}");
        assert!(noted.contains("not on Mondays") && noted.contains("exit status: 3"), "{noted}");
        let empty: Make = |site| Ok(View::mounted("sh", site.point("empty")?));
        assert!(one(&site, "sh", empty, &mut figures).is_none());
        assert!(one(&site, "no such program", empty, &mut figures).is_none());
        assert_eq!(figures.json()["peers"]["no such program"], "absent");
    }
}
