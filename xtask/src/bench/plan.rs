//! Planning an EROFS image and writing its metadata, from the index alone; and how that grows with the tree.

use super::measure::{Figures, Measured, Series, in_turn};
use crate::lab::Lab;
use crate::scratch::Scratch;
use crate::{corpus, proc};
use anyhow::{Context, Result, ensure};
use image::erofs::{Options, Plan};
use image::index::Index;
use image::tree::{Attrs, Kind, Tree};
use std::ffi::OsString;
use std::io::Cursor;
use std::path::{Path, PathBuf};
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
        let file = scratch.dir().join(format!("{name}.index"));
        std::fs::copy(lab.index_file(name)?, &file)?;
        instructions("plan and emit", &[(name.clone(), file)], figures)?;
    }
    growth(rounds, scratch.dir(), figures)
}

/// Instructions for an inode that planning and emitting may take: 784 for linux, 731 for a million names in one
/// directory when this was written.
const INSTRUCTIONS: f64 = 900.0;

/// Trees of three sizes, spread over directories and in one: the time for an inode has to stay the same.
fn growth(rounds: usize, indexes: &Path, figures: &mut Figures) -> Result<()> {
    for (shape, width) in [("spread over directories of 100", 100), ("in one directory", u32::MAX)] {
        let trees = [10_000, 100_000, 1_000_000].map(|names| (names, tree(names, width)));
        let mut targets: Vec<(String, Measured<'_>)> = Vec::new();
        let mut files = Vec::new();
        for (names, tree) in trees {
            let mut bytes = Cursor::new(Vec::new());
            image::index::build(&tree?, &mut bytes)?;
            let bytes = bytes.into_inner();
            let file = indexes.join(format!("{names}-{width}.index"));
            std::fs::write(&file, &bytes)?;
            files.push((format!("{names} names"), file));
            let index = Index::open(Arc::new(bytes))?;
            targets.push((format!("{names} names"), Box::new(move || per_inode(&index))));
        }
        let series = in_turn(&format!("plan and emit, {shape}"), "ns an inode", rounds, targets)?;
        figures.add(&series);
        // From what fits into the processor's caches to what does not.
        figures.goal(format!("growth from 10,000 to 1,000,000 names {shape}"), series[2].ratio(&series[0]), 3.0);
        let counted = instructions(&format!("plan and emit, {shape}"), &files, figures)?;
        if let [small, .., large] = counted.as_slice() {
            let growth = large.ratio(small);
            figures.goal(format!("growth of instructions from 10,000 to 1,000,000 names {shape}"), growth, 1.1);
        }
    }
    Ok(())
}

/// Instructions for an inode of each index, counted by callgrind, which does not depend on the machine's load; none
/// where valgrind is absent.
fn instructions(what: &str, files: &[(String, PathBuf)], figures: &mut Figures) -> Result<Vec<Series>> {
    let valgrind = super::views::version("valgrind");
    figures.peer("valgrind", valgrind.clone());
    let mut counted = Vec::new();
    for (target, file) in files.iter().filter(|_| valgrind.is_some()) {
        let mut series = Series::new(what, target, "instructions an inode");
        series.values.push(count(file)?);
        counted.push(series);
    }
    figures.add(&counted);
    for one in &counted {
        figures.goal(format!("{what}, {}: instructions an inode", one.target), one.median(), INSTRUCTIONS);
    }
    Ok(counted)
}

/// Has callgrind count what [`emit_all`] executes for one index, in this very program.
fn count(file: &Path) -> Result<f64> {
    let profile = file.with_extension("callgrind");
    let mut out = OsString::from("--callgrind-out-file=");
    out.push(&profile);
    let mut command = Command::new("valgrind");
    command.args(["--tool=callgrind", "--toggle-collect=*bench::plan::emit_all*"]).arg(out);
    command.arg(std::env::current_exe()?).arg("emit").arg(file);
    proc::must(&mut command, Duration::from_secs(1800))?;
    let profile = std::fs::read_to_string(&profile)?;
    let total = profile.lines().find_map(|line| line.strip_prefix("totals:")).context("callgrind gave no totals")?;
    let total: f64 = total.trim().parse().context("callgrind's totals")?;
    ensure!(total > 0.0, "callgrind did not see the function that plans and emits");
    Ok(total / f64::from(Index::open(Arc::new(std::fs::read(file)?))?.inode_count()))
}

/// Plans and emits the image of one index, once: what [`count`] has counted.
pub fn emit(file: &Path) -> Result<()> {
    emit_all(&Index::open(Arc::new(std::fs::read(file)?))?, &mut vec![0u8; PIECE])
}

fn per_inode(index: &Index) -> Result<f64> {
    let mut piece = vec![0u8; PIECE];
    let began = Instant::now();
    emit_all(index, &mut piece)?;
    Ok(began.elapsed().as_secs_f64() * 1e9 / f64::from(index.inode_count()))
}

/// A function of its own in the program, so that callgrind can tell it from the rest.
#[inline(never)]
fn emit_all(index: &Index, piece: &mut [u8]) -> Result<()> {
    let plan = Plan::new(index, &Options::default())?;
    let mut at = 0;
    while at < plan.meta_len() {
        let end = plan.meta_len().min(at + piece.len() as u64);
        plan.emit(index, at..end, &mut piece[..(end - at) as usize])?;
        at = end;
    }
    Ok(())
}

/// `names` empty files called `file-0000000` and so on, `width` to a directory called `d000000` and so on, or all in
/// the root where that is wide enough.
pub fn tree(names: u32, width: u32) -> Result<Tree> {
    let mut tree = Tree::new();
    let attrs = Attrs { mode: 0o644, ..Attrs::default() };
    let mut dir = Tree::ROOT;
    for i in 0..names {
        if width < names && i % width == 0 {
            dir = tree.create(Tree::ROOT, format!("d{:06}", i / width).as_bytes(), Kind::Dir, attrs)?;
        }
        tree.create(dir, format!("file-{i:07}").as_bytes(), Kind::File, attrs)?;
    }
    Ok(tree)
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
