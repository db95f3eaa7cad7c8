//! The property test: random trees, end to end. Made on the host, imported as a directory and as an archive, and read
//! back through the index, the exported image (by an independent EROFS reader, and mounted by the kernel alone), the
//! kernel's EROFS over the served file, an overlay on it, and the FUSE tree. All give one type of snapshot, content
//! digests included, and all have to give the one of the source.
//!
//! A failure names its seed, and the fewest names that a tree of that seed may have to show it.

mod maker;
#[path = "../../crates/image/tests/erofs_support/reader.rs"]
mod reader;

use crate::lab::{Lab, Way};
use crate::proc;
use crate::report::Tally;
use crate::scratch::Scratch;
use crate::snapshot;
use anyhow::{Context, Result, anyhow, ensure};
use image::snapshot::{RecordKind, Snapshot, hash_content};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// How many names a tree has at most, unless told otherwise.
pub const NAMES: u32 = 150;

/// What a tree is imported from.
const SCHEMES: [&str; 2] = ["dir", "tar"];

/// Runs `rounds` trees of at most `names` names, the seeds counted up from `seed`.
pub fn run(seed: u64, rounds: u64, names: u32, tally: &mut Tally) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        tally.skip("trees", "they need root: owners, devices, trusted.* attributes");
        return Ok(());
    }
    let scratch = Scratch::new("trees")?;
    let lab = Lab::new(scratch.dir())?;
    println!("seeds {seed} to {}, at most {names} names each", seed + rounds.saturating_sub(1));
    for seed in seed..seed + rounds {
        let mut found = Tally::default();
        one(&lab, &scratch, seed, names, &mut found)?;
        if found.counts().failed > 0 {
            let fails = |names| -> Result<bool> {
                let mut again = Tally::default();
                one(&lab, &scratch, seed, names, &mut again)?;
                Ok(again.counts().failed > 0)
            };
            let fewest = fewest(names, fails)?;
            let again = format!("cargo xtask trees --seed {seed} --rounds 1 --names {fewest}");
            found.fail(format!("tree of seed {seed}"), format!("again, with the fewest names: {again}"));
        }
        tally.merge(found);
    }
    tally.check("trees: the daemon ends", lab.stop());
    Ok(())
}

/// The fewest names with which something still fails, knowing that `most` do: by halving, as if more names failed
/// whenever fewer do.
fn fewest(most: u32, mut fails: impl FnMut(u32) -> Result<bool>) -> Result<u32> {
    let (mut holds, mut failing) = (0, most);
    while failing - holds > 1 {
        let middle = holds + (failing - holds) / 2;
        if fails(middle)? {
            failing = middle;
        } else {
            holds = middle;
        }
    }
    Ok(failing)
}

/// One tree: made, imported in both forms, seen in every way, and put away.
fn one(lab: &Lab, scratch: &Scratch, seed: u64, names: u32, tally: &mut Tally) -> Result<()> {
    let source = scratch.dir().join("source");
    std::fs::create_dir(&source)?;
    maker::fill(&source, seed, names).with_context(|| format!("making the tree of seed {seed}"))?;
    let want = snapshot::of_directory(&source, 1)?;
    for scheme in SCHEMES {
        let name = format!("tree-{seed}-{names}-{scheme}");
        match import(lab, scheme, &source, scratch.dir(), &name) {
            Ok(()) => views(lab, &name, &want, scheme, tally),
            Err(e) => tally.fail(format!("{name}/import"), format!("{e:#}")),
        }
    }
    Ok(std::fs::remove_dir_all(&source)?)
}

fn import(lab: &Lab, scheme: &str, source: &Path, dir: &Path, name: &str) -> Result<()> {
    if scheme == "dir" {
        return lab.import(&Lab::source("dir", source), name).map(drop);
    }
    let archive = dir.join("source.tar");
    let mut command = Command::new("tar");
    command.args(["--xattrs", "--xattrs-include=*", "--format=pax", "--numeric-owner", "--sparse", "-C"]);
    command.arg(source).arg("-cf").arg(&archive).arg(".");
    proc::must(&mut command, Duration::from_secs(60))?;
    lab.import(&Lab::source("tar", &archive), name).map(drop)
}

fn views(lab: &Lab, name: &str, want: &Snapshot, scheme: &str, tally: &mut Tally) {
    // Archives hold no sockets.
    let want = if scheme == "tar" { &without_sockets(want) } else { want };
    tally.check(format!("{name}/index"), through_index(lab, name).and_then(|have| snapshot::same(want, &have)));
    let read = lab.exported(name, "tree", |file| {
        let image = std::fs::read(file)?;
        reader::snapshot(&image, true).map_err(|e| anyhow!("erofs-rs: {e}"))
    });
    tally.check(format!("{name}/reader"), read.and_then(|have| snapshot::same(want, &have)));
    for way in Way::ALL {
        let looked = lab.shown(name, way, "tree", |point| snapshot::same_through(want, point, way, 1));
        tally.check(format!("{name}/{}", way.name()), looked);
    }
}

/// The tree as the index has it, and each file's content as `cat` finds it through that: no mount, no daemon.
fn through_index(lab: &Lab, name: &str) -> Result<Snapshot> {
    let mut snapshot = Snapshot::from_index(&lab.index(name)?, |_, _| Ok(None))?;
    let mut command = lab.command(["cat", name]);
    let mut files = Vec::new();
    for (path, record) in &mut snapshot.records {
        if let RecordKind::File { size, digest } = &mut record.kind {
            command.arg(OsString::from_vec(path.clone()));
            files.push((*size, digest));
        }
    }
    if files.is_empty() {
        return Ok(snapshot);
    }
    let content = proc::bytes(&mut command, Duration::from_secs(60))?;
    let mut rest = content.as_slice();
    for (size, digest) in files {
        let (mut file, behind) = rest.split_at_checked(size as usize).context("cat printed too little")?;
        *digest = Some(hash_content(&mut file)?);
        rest = behind;
    }
    ensure!(rest.is_empty(), "cat printed {} bytes too many", rest.len());
    Ok(snapshot)
}

fn without_sockets(snapshot: &Snapshot) -> Snapshot {
    let mut snapshot = snapshot.clone();
    snapshot.records.retain(|_, record| record.kind != RecordKind::Socket);
    snapshot
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fewest_names_that_fail_are_found() {
        for limit in 1..=150 {
            assert_eq!(fewest(150, |names| Ok(names >= limit)).unwrap(), limit);
        }
    }

    /// What the snapshots of the views are compared by: a reader that is wrong anywhere is a difference.
    #[test]
    fn content_of_one_file_is_a_difference() {
        let mut tree = image::tree::Tree::new();
        let attrs = image::tree::Attrs { mode: 0o644, ..Default::default() };
        tree.create(image::tree::Tree::ROOT, b"f", image::tree::Kind::File, attrs).unwrap();
        let want = Snapshot::from_tree(&tree);
        let mut have = want.clone();
        snapshot::same(&want, &have).unwrap();
        let kind = &mut have.records.get_mut(&b"/f"[..]).unwrap().kind;
        *kind = RecordKind::File { size: 0, digest: Some(hash_content(&mut &b"x"[..]).unwrap()) };
        assert!(snapshot::same(&want, &have).unwrap_err().to_string().contains("content"));
    }
}
