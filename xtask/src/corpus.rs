//! Whole trees, end to end: imported from both of their forms, shown in every way, compared with the source.

use crate::lab::{Lab, Way};
use crate::proc;
use crate::report::Tally;
use crate::scratch::Scratch;
use crate::snapshot;
use anyhow::{Context, Result, ensure};
use image::snapshot::Snapshot;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// What `make test` takes.
pub const SMALL: [&str; 2] = ["debian", "linux-20k"];
/// What `make test-full` takes.
pub const ALL: [&str; 5] = ["debian", "linux-20k", "linux", "node", "python-ml"];

/// The longest that building one corpus may take.
const BUILD_LIMIT: Duration = Duration::from_secs(1800);

/// Bytes for an inode in index and object maps together: names, hashes, extents, digests.
const MOST_PER_INODE: u64 = 100;

/// Where built corpora are kept, outside the repository.
pub fn cache() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("LAZYROOT_CACHE") {
        return Ok(PathBuf::from(dir));
    }
    let home = std::env::var_os("HOME").context("neither LAZYROOT_CACHE nor HOME is set")?;
    Ok(PathBuf::from(home).join(".cache/lazyroot-tests"))
}

/// Builds a corpus unless it is there; its directory.
pub fn build(name: &str) -> Result<PathBuf> {
    ensure!(ALL.contains(&name), "no corpus {name}; there are: {}", ALL.join(" "));
    let (script, out) = (crate::repository().join(format!("tests/corpus/build-{name}.sh")), cache()?);
    let mut command = Command::new("bash");
    command.arg(script).arg(&out);
    let outcome = proc::must(&mut command, BUILD_LIMIT)?;
    if !outcome.stdout.contains("already built") {
        println!("corpus {name}: built in {:.0} s", outcome.took.as_secs_f64());
    }
    Ok(out.join(name))
}

/// Tests the corpora of these names on one daemon.
pub fn run(names: &[&str], keep: bool, tally: &mut Tally) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        tally.skip("corpora", "they need root: owners, devices, chroot");
        return Ok(());
    }
    let mut scratch = Scratch::new("corpora")?;
    if keep {
        scratch.keep();
    }
    let lab = Lab::new(scratch.dir())?;
    for name in names {
        match build(name) {
            Ok(dir) => one(&lab, name, &dir, tally),
            Err(e) => tally.fail(*name, format!("cannot be built: {e:#}")),
        }
    }
    tally.check("corpora: the daemon ends", lab.stop());
    Ok(())
}

fn one(lab: &Lab, name: &str, dir: &Path, tally: &mut Tally) {
    let (rootfs, oci) = (dir.join("rootfs"), dir.join("oci"));
    let want = match snapshot::of_directory(&rootfs, 2) {
        Ok(snapshot) => snapshot,
        Err(e) => return tally.fail(name, format!("source: {e:#}")),
    };
    let names = want.records.len();
    let (from_oci, from_dir) = (format!("{name}-oci"), format!("{name}-dir"));

    let imported = lab.import(&Lab::source("oci", &oci), &from_oci);
    let first = lab.disk_use("objects").unwrap_or(0);
    tally.check(format!("{name}: import of the layers"), imported.map(drop));
    let imported = lab.import(&Lab::source("dir", &rootfs), &from_dir);
    let second = lab.disk_use("objects").unwrap_or(u64::MAX);
    tally.check(format!("{name}: import of the directory"), imported.map(drop));
    tally.check(format!("{name}: the second import adds nothing"), added(first, second));
    tally.check(format!("{name}: one identity from both"), one_identity(lab, &from_oci, &from_dir));
    tally.check(format!("{name}: at most {MOST_PER_INODE} bytes an inode"), small(lab, &from_oci));
    tally.check(format!("{name}: find lists all {names} names"), found(lab, &from_oci, &want));

    for image in [&from_oci, &from_dir] {
        for way in Way::ALL {
            // Nothing cached: what is compared was fetched, unpacked and verified for this mount.
            let looked = lab.drop_caches(Some(image)).and_then(|()| {
                lab.shown(image, way, &format!("{name}-{}", way.name()), |point| {
                    snapshot::same_through(&want, point, way, 2)
                })
            });
            tally.check(format!("{image}/{}: {names} names", way.name()), looked);
        }
    }
    tally.check(format!("{name}: fsck finds nothing"), lab.run(["fsck", &from_oci, &from_dir]).map(drop));
}

/// A second import of the same content may add an index's worth of bookkeeping, not content.
fn added(first: u64, second: u64) -> Result<()> {
    let added = second.saturating_sub(first);
    ensure!(added <= first / 100 + (256 << 10), "objects grew from {first} to {second} bytes");
    Ok(())
}

/// What a node needs to mount an image has a limit for each of its inodes.
fn small(lab: &Lab, image: &str) -> Result<()> {
    let (bytes, inodes) = lab.metadata_size(image)?;
    println!("  {image}: {:.1} bytes an inode, {inodes} inodes", bytes as f64 / inodes as f64);
    within(bytes, inodes)
}

fn within(bytes: u64, inodes: u64) -> Result<()> {
    ensure!(bytes <= inodes * MOST_PER_INODE, "{bytes} bytes of index and object maps for {inodes} inodes");
    Ok(())
}

fn one_identity(lab: &Lab, a: &str, b: &str) -> Result<()> {
    let (one, other) = (lab.identity(a)?, lab.identity(b)?);
    ensure!(one == other, "{a} is {one}, {b} is {other}: {}", lab.try_run(["diff", a, b])?.stdout);
    Ok(())
}

fn found(lab: &Lab, image: &str, want: &Snapshot) -> Result<()> {
    let outcome = lab.run(["find", image])?;
    let mut have: Vec<&[u8]> = outcome.stdout.split_terminator('\n').map(str::as_bytes).collect();
    have.sort_unstable();
    let want: Vec<&[u8]> = want.records.keys().map(Vec::as_slice).collect();
    let missing = want.iter().find(|p| have.binary_search(p).is_err());
    let more = have.iter().find(|p| want.binary_search(p).is_err());
    let show = |path: Option<&&[u8]>| path.map(|p| String::from_utf8_lossy(p).into_owned());
    ensure!(
        have == want,
        "{} names, want {}; missing {:?}, too many {:?}",
        have.len(),
        want.len(),
        show(missing),
        show(more)
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_byte_too_many_is_found() {
        within(100 * 7, 7).unwrap();
        assert!(within(100 * 7 + 1, 7).unwrap_err().to_string().contains("701 bytes"));
    }
}
