//! Planning an EROFS image and writing its metadata, from the index alone; and how that grows with the tree.

use super::measure::{Figures, Measured, in_turn};
use crate::lab::Lab;
use crate::scratch::Scratch;
use crate::{corpus, proc};
use anyhow::Result;
use image::erofs::{Options, Plan};
use image::index::Index;
use image::tree::{Attrs, Kind, Tree};
use std::io::Cursor;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How many bytes of metadata are written at a time, as a reader asks for them.
const PIECE: usize = 1 << 20;

pub fn run(scratch: &Scratch, corpora: &[String], rounds: usize, figures: &mut Figures) -> Result<()> {
    let lab = Lab::new(scratch.dir())?;
    for name in corpora {
        let dir = corpus::build(name)?;
        lab.import(&Lab::source("oci", &dir.join("oci")), name)?;
        let index = lab.index(name)?;
        let tar_mode = proc::in_path("mkfs.erofs") && takes_tar();
        figures.peer("mkfs.erofs with --tar=i", tar_mode.then(|| super::views::version("mkfs.erofs")).flatten());
        let archive = scratch.dir().join("tree.tar");
        let names = f64::from(index.inode_count());
        let mut targets: Vec<(String, Measured<'_>)> = vec![(name.clone(), Box::new(|| per_inode(&index)))];
        if tar_mode {
            archive_of(&dir.join("rootfs"), &archive)?;
            let measure = || Ok(headers_only(&archive, &scratch.dir().join("tree.erofs"))? / names * 1e9);
            targets.push(("mkfs.erofs --tar=i".into(), Box::new(measure)));
        }
        let series = in_turn(&format!("plan and emit, {name}, {names} inodes"), "ns an inode", rounds, targets)?;
        figures.add(&series);
        figures.goal(format!("plan and emit of {name}, ns an inode"), series[0].median(), 150.0);
    }
    growth(rounds, figures)
}

/// Trees of three sizes, spread over directories and in one: the time for an inode has to stay the same.
fn growth(rounds: usize, figures: &mut Figures) -> Result<()> {
    for (shape, width) in [("spread over directories of 100", 100), ("in one directory", u32::MAX)] {
        let indexes = [10_000, 100_000, 1_000_000].map(|names| (names, tree(names, width)));
        let mut targets: Vec<(String, Measured<'_>)> = Vec::new();
        for (names, index) in indexes {
            let index = index?;
            targets.push((format!("{names} names"), Box::new(move || per_inode(&index))));
        }
        let series = in_turn(&format!("plan and emit, {shape}"), "ns an inode", rounds, targets)?;
        figures.add(&series);
        // From what fits into the processor's caches to what does not.
        figures.goal(format!("growth from 10,000 to 1,000,000 names {shape}"), series[2].ratio(&series[0]), 3.0);
    }
    Ok(())
}

fn per_inode(index: &Index) -> Result<f64> {
    let mut piece = vec![0u8; PIECE];
    let began = Instant::now();
    let plan = Plan::new(index, &Options::default())?;
    let mut at = 0;
    while at < plan.meta_len() {
        let end = plan.meta_len().min(at + PIECE as u64);
        plan.emit(index, at..end, &mut piece[..(end - at) as usize])?;
        at = end;
    }
    Ok(began.elapsed().as_secs_f64() * 1e9 / f64::from(index.inode_count()))
}

/// An index of `names` empty files, `width` to a directory.
fn tree(names: u32, width: u32) -> Result<Index> {
    let mut tree = Tree::new();
    let attrs = Attrs { mode: 0o644, ..Attrs::default() };
    let mut dir = Tree::ROOT;
    for i in 0..names {
        if width < names && i % width == 0 {
            dir = tree.create(Tree::ROOT, format!("d{:06}", i / width).as_bytes(), Kind::Dir, attrs)?;
        }
        tree.create(dir, format!("file-{i:07}").as_bytes(), Kind::File, attrs)?;
    }
    let mut bytes = Cursor::new(Vec::new());
    image::index::build(&tree, &mut bytes)?;
    Ok(Index::open(Arc::new(bytes.into_inner()))?)
}

fn takes_tar() -> bool {
    let help = proc::catch(Command::new("mkfs.erofs").arg("--help"), Duration::from_secs(10));
    help.is_ok_and(|o| format!("{}{}", o.stdout, o.stderr).contains("--tar"))
}

fn archive_of(rootfs: &Path, archive: &Path) -> Result<()> {
    let mut command = Command::new("tar");
    command.args([
        "--xattrs",
        "--format=pax",
        "--pax-option=delete=atime,delete=ctime",
        "--numeric-owner",
        "--sort=name",
        "-C",
    ]);
    command.arg(rootfs).arg("-cf").arg(archive).arg(".");
    proc::must(&mut command, Duration::from_secs(600)).map(drop)
}

/// Seconds that mkfs.erofs takes for the metadata of an archive.
fn headers_only(archive: &Path, out: &Path) -> Result<f64> {
    let outcome = proc::must(
        Command::new("mkfs.erofs").args(["--quiet", "--tar=i"]).arg(out).arg(archive),
        Duration::from_secs(600),
    )?;
    Ok(outcome.took.as_secs_f64())
}
