//! From the mount command to the first listing, and what the daemon's memory is then.

use super::measure::{Figures, Measured, Series, in_turn};
use super::walk::Work;
use crate::lab::Lab;
use crate::scratch::Scratch;
use crate::{corpus, proc};
use anyhow::{Context, Result};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

/// Mount to first `ls`: caches cold, then again at once.
pub fn first_listing(scratch: &Scratch, corpora: &[String], rounds: usize, figures: &mut Figures) -> Result<()> {
    let lab = Lab::new(scratch.dir())?;
    let point = scratch.dir().join("point");
    std::fs::create_dir(&point)?;
    let most_cold = |name: &str| if name == "debian" { 10.0 } else { 30.0 };
    for name in corpora {
        let dir = corpus::build(name)?;
        lab.import(&Lab::source("oci", &dir.join("oci")), name)?;
        lab.run(["daemon", "start"])?;
        for shape in ["erofs", "tree"] {
            let (mut cold, mut warm) = (Vec::new(), Vec::new());
            for _ in 0..rounds.max(1) {
                lab.drop_caches(None)?;
                cold.push(mount_ls(&lab, name, shape, &point)?);
                unmount(&lab, &point)?;
                // A later mount, as of the next container: the image is known, and its first mount is still there.
                let first = scratch.dir().join("first");
                std::fs::create_dir_all(&first)?;
                mount_ls(&lab, name, shape, &first)?;
                warm.push(mount_ls(&lab, name, shape, &point)?);
                unmount(&lab, &point)?;
                unmount(&lab, &first)?;
            }
            let series = |what: &str, values| Series {
                values,
                ..Series::new(format!("mount to first ls, {what}, {name}"), shape, "ms")
            };
            let (cold, warm) = (series("cold", cold), series("again", warm));
            figures.add(std::slice::from_ref(&cold));
            figures.add(std::slice::from_ref(&warm));
            figures.goal(format!("{name} as {shape}, first, ms"), cold.median(), most_cold(name));
            figures.goal(format!("{name} as {shape}, later, ms"), warm.median(), 5.0);
        }
        native(scratch, name, &dir.join("rootfs"), &point, rounds, figures)?;
    }
    Ok(())
}

fn mount_ls(lab: &Lab, name: &str, shape: &str, point: &Path) -> Result<f64> {
    let mut command = lab.command(["mount", "--as", shape, name]);
    command.arg(point);
    let began = Instant::now();
    proc::must(&mut command, Duration::from_secs(60))?;
    let listed = std::fs::read_dir(point)?.count();
    let took = began.elapsed();
    anyhow::ensure!(listed > 0, "{} is empty", point.display());
    Ok(took.as_secs_f64() * 1e3)
}

fn unmount(lab: &Lab, point: &Path) -> Result<()> {
    lab.run(["umount".as_ref(), point.as_os_str()]).map(drop)
}

/// The same with an image of mkfs.erofs and no LazyRoot at all.
fn native(
    scratch: &Scratch,
    name: &str,
    rootfs: &Path,
    point: &Path,
    rounds: usize,
    figures: &mut Figures,
) -> Result<()> {
    let version = super::views::version("mkfs.erofs");
    figures.peer("mkfs.erofs", version.clone());
    if version.is_none() {
        return Ok(());
    }
    let image = scratch.dir().join("native.erofs");
    proc::must(Command::new("mkfs.erofs").args(["--quiet"]).arg(&image).arg(rootfs), Duration::from_secs(600))?;
    let once = || -> Result<f64> {
        let began = Instant::now();
        crate::lab::mount_erofs(&image, point)?;
        anyhow::ensure!(std::fs::read_dir(point)?.count() > 0, "{} is empty", point.display());
        let took = began.elapsed().as_secs_f64() * 1e3;
        crate::scratch::unmount_below(point);
        Ok(took)
    };
    let cold = || {
        crate::drop_kernel_caches()?;
        once()
    };
    let targets: Vec<(String, Measured<'_>)> =
        vec![("native EROFS, cold".into(), Box::new(cold)), ("native EROFS, again".into(), Box::new(once))];
    figures.add(&in_turn(&format!("mount to first ls, {name}"), "ms", rounds, targets)?);
    std::fs::remove_file(&image)?;
    Ok(())
}

/// The daemon's memory with one image mounted and walked, and with more of them.
pub fn memory(scratch: &Scratch, corpora: &[String], figures: &mut Figures) -> Result<()> {
    let lab = Lab::new(scratch.dir())?;
    for name in corpora {
        let dir = corpus::build(name)?;
        lab.import(&Lab::source("oci", &dir.join("oci")), name)?;
    }
    let first = corpora.first().context("no corpus")?;
    for shape in ["erofs", "tree"] {
        let mut held = Vec::new();
        let mut values = Vec::new();
        for round in 0..6 {
            let point = scratch.dir().join(format!("memory-{shape}-{round}"));
            std::fs::create_dir_all(&point)?;
            // The first mount is of the first corpus, the others alternate: further mounts and further images.
            let name = if round == 0 { first } else { &corpora[round % corpora.len()] };
            mount_ls(&lab, name, shape, &point)?;
            held.push(point);
            values.push(Memory::of_daemon(&lab, scratch)?);
        }
        let row = |what: &str, value: f64| Series { values: vec![value], ..Series::new(what, shape, "MiB") };
        let one = &values[0];
        figures.add(&[row("RssAnon, one mount", one.anon)]);
        figures.add(&[row("VmRSS besides the mapped index, one mount", one.resident)]);
        let more = (values[5].anon - one.anon) / 5.0;
        figures.add(&[row("RssAnon for each further mount", more)]);
        Work::StatAll.take(&held[0])?;
        let walked = Memory::of_daemon(&lab, scratch)?;
        figures.add(&[row("RssAnon, after a walk", walked.anon)]);
        figures.goal(format!("{shape}: RssAnon, MiB"), one.anon, 8.0);
        figures.goal(format!("{shape}: VmRSS besides the mapped index, MiB"), one.resident, 15.0);
        figures.goal(format!("{shape}: each further mount, MiB"), more, 1.0);
        for point in &held {
            unmount(&lab, point)?;
        }
        lab.stop()?;
    }
    Ok(())
}

/// A process's memory, MiB.
#[derive(Debug)]
struct Memory {
    anon: f64,
    resident: f64,
}

impl Memory {
    fn of_daemon(lab: &Lab, scratch: &Scratch) -> Result<Memory> {
        let status = lab.json(["daemon", "status"])?;
        let pid = status.iter().find_map(|s| s["pid"].as_u64()).with_context(|| format!("no pid in {status:?}"))?;
        let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
        let field = |name: &str| -> Result<f64> {
            let line = status.lines().find_map(|l| l.strip_prefix(name)).with_context(|| format!("no {name}"))?;
            let number = line.split_whitespace().nth(0).context("no number")?;
            Ok(number.parse::<f64>()? / 1024.0)
        };
        let mapped = mapped_indexes(pid, &scratch.dir().join("root"))?;
        Ok(Memory { anon: field("RssAnon:")?, resident: field("VmRSS:")? - mapped })
    }
}

/// MiB of a process's resident pages that map files of a store.
fn mapped_indexes(pid: u64, root: &Path) -> Result<f64> {
    let root = root.to_string_lossy().into_owned();
    let (mut ours, mut total) = (false, 0.0);
    for line in std::fs::read_to_string(format!("/proc/{pid}/smaps"))?.lines() {
        if let Some(kib) = line.strip_prefix("Rss:") {
            if ours {
                total += kib.trim().trim_end_matches(" kB").parse::<f64>()? / 1024.0;
            }
        } else if line.contains('-') && line.split_whitespace().count() >= 5 {
            ours = line.contains(&root);
        }
    }
    Ok(total)
}
