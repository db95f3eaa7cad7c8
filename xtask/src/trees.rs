//! Random trees, end to end: made on the host, imported as a directory and as an archive, and read back through the
//! index, an exported image, the kernel's EROFS and the FUSE tree. All have to give the snapshot of the source.
//!
//! A failure names its seed; `xtask trees --seed N --rounds 1` makes the same tree again.

use crate::lab::{Lab, Way};
use crate::proc;
use crate::report::Tally;
use crate::scratch::Scratch;
use crate::snapshot;
use anyhow::{Context, Result};
use image::snapshot::Snapshot;
use rustix::fs::{AtFlags, FileType, Mode, Timespec, Timestamps, XattrFlags};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Runs `rounds` trees, the seeds counted up from `seed`.
pub fn run(seed: u64, rounds: u64, tally: &mut Tally) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        tally.skip("trees", "they need root: owners, devices, trusted.* attributes");
        return Ok(());
    }
    let scratch = Scratch::new("trees")?;
    let lab = Lab::new(scratch.dir())?;
    for seed in seed..seed + rounds {
        let source = scratch.dir().join(format!("source-{seed}"));
        std::fs::create_dir(&source)?;
        Maker { random: Random(seed), made: Vec::new(), left: 150 }.fill(&source, 0)?;
        let want = snapshot::of_directory(&source, 1)?;
        for scheme in ["dir", "tar"] {
            let name = format!("tree-{seed}-{scheme}");
            match import(&lab, scheme, &source, scratch.dir(), &name) {
                Ok(()) => views(&lab, &name, &want, scheme, tally),
                Err(e) => tally.fail(format!("tree of seed {seed}, {scheme}: import"), format!("{e:#}")),
            }
        }
        std::fs::remove_dir_all(&source)?;
    }
    tally.check("trees: the daemon ends", lab.stop());
    Ok(())
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
    let from_index = || -> Result<()> {
        let have = Snapshot::from_index(&lab.index(name)?, |_, _| Ok(None))?;
        snapshot::same(want, &have)
    };
    tally.check(format!("{name}/index"), from_index());
    for way in Way::ALL {
        let looked = lab.shown(name, way, "tree", |point| {
            let have = snapshot::of_directory(point, 1)?;
            match way {
                Way::Overlay => snapshot::same(&snapshot::for_overlay(want.clone()), &snapshot::for_overlay(have)),
                _ => snapshot::same(want, &have),
            }
        });
        tally.check(format!("{name}/{}", way.name()), looked);
    }
}

fn without_sockets(snapshot: &Snapshot) -> Snapshot {
    let mut snapshot = snapshot.clone();
    snapshot.records.retain(|_, record| record.kind != image::snapshot::RecordKind::Socket);
    snapshot
}

/// Numbers that a seed determines (splitmix64).
#[derive(Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    fn bytes(&mut self, len: usize) -> Vec<u8> {
        let mut bytes: Vec<u8> = (0..len.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).collect();
        bytes.truncate(len);
        bytes
    }
}

/// Makes one tree.
#[derive(Debug)]
struct Maker {
    random: Random,
    /// Names that can be linked to.
    made: Vec<PathBuf>,
    /// Names that may still be made.
    left: u32,
}

impl Maker {
    fn fill(&mut self, dir: &Path, depth: u32) -> Result<()> {
        let names = match self.random.below(8) {
            0 => 0,
            1 => 60,
            _ => 1 + self.random.below(12),
        };
        for _ in 0..names {
            if self.left == 0 {
                break;
            }
            let path = dir.join(self.name());
            if path.symlink_metadata().is_ok() {
                continue;
            }
            self.left -= 1;
            self.node(&path, depth).with_context(|| path.display().to_string())?;
        }
        self.dress(dir, true)
    }

    fn name(&mut self) -> OsString {
        let len = if self.random.below(10) == 0 { 1 + self.random.below(255) } else { 1 + self.random.below(14) };
        let mut name: Vec<u8> = (0..len)
            .map(|_| match self.random.below(9) {
                0 => self.random.pick(b".-_ +\n\\"),
                1 => self.random.pick(&[0xff, 0xc3, 0xa4, 1, 127]),
                _ => b'a' + self.random.below(26) as u8,
            })
            .collect();
        if name == b"." || name == b".." {
            name.push(b'x');
        }
        OsString::from_vec(name)
    }

    fn node(&mut self, path: &Path, depth: u32) -> Result<()> {
        match self.random.below(12) {
            0 | 1 if depth < 8 => {
                std::fs::create_dir(path)?;
                return self.fill(path, depth + 1);
            }
            2 => {
                let most = self.random.pick(&[70, 70, 70, 70, 4000]);
                let len = 1 + self.random.below(most);
                let target: Vec<u8> =
                    (0..len).map(|i| if i % 40 == 39 { b'/' } else { b'a' + (i % 26) as u8 }).collect();
                std::os::unix::fs::symlink(OsString::from_vec(target), path)?;
            }
            3 => {
                // Never linked to: GNU tar stores each name of a device or FIFO by itself.
                self.special(path)?;
                return self.dress(path, true);
            }
            4 if !self.made.is_empty() => {
                let at = self.random.below(self.made.len() as u64) as usize;
                return Ok(std::fs::hard_link(&self.made[at], path)?);
            }
            _ => self.file(path)?,
        }
        self.made.push(path.to_owned());
        let follows = !path.is_symlink();
        self.dress(path, follows)
    }

    fn special(&mut self, path: &Path) -> Result<()> {
        let kind =
            self.random.pick(&[FileType::CharacterDevice, FileType::BlockDevice, FileType::Fifo, FileType::Socket]);
        // Not 0:0: an overlay takes that for a whiteout.
        let device = rustix::fs::makedev(1 + self.random.below(4095) as u32, self.random.below(1 << 20) as u32);
        let device = if matches!(kind, FileType::Fifo | FileType::Socket) { 0 } else { device };
        Ok(rustix::fs::mknodat(rustix::fs::CWD, path, kind, Mode::from_raw_mode(0o600), device)?)
    }

    fn file(&mut self, path: &Path) -> Result<()> {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::create(path)?;
        let size = match self.random.below(6) {
            0 => 0,
            1 => self.random.pick(&[1, 4095, 4096, 4097, 65535, 65536, 65537, 131_072]),
            2 => self.random.below(300_000),
            _ => self.random.below(9000),
        };
        if self.random.below(5) == 0 {
            // Islands of data between holes.
            file.set_len(size)?;
            for _ in 0..self.random.below(4) {
                let at = self.random.below(size + 1);
                let len = self.random.below(6000).min(size - at);
                file.write_all_at(&self.random.bytes(len as usize), at)?;
            }
        } else if self.random.below(6) == 0 {
            // The same content as some other file has.
            file.write_all_at(&vec![b'=' + (size % 3) as u8; size as usize], 0)?;
        } else {
            file.write_all_at(&self.random.bytes(size as usize), 0)?;
        }
        Ok(())
    }

    /// Owner, attributes, mode, time.
    fn dress(&mut self, path: &Path, follows: bool) -> Result<()> {
        let id = |random: &mut Random| match random.below(4) {
            0 => random.pick(&[65_535, 65_536, 70_000, u32::MAX - 1]),
            _ => random.below(3) as u32,
        };
        let (uid, gid) = (id(&mut self.random), id(&mut self.random));
        std::os::unix::fs::lchown(path, Some(uid), Some(gid))?;
        if self.random.below(4) == 0 {
            for _ in 0..=self.random.below(3) {
                // user.* is for files and directories only.
                let prefix = if follows && (path.is_file() || path.is_dir()) { "user." } else { "trusted." };
                let name = format!("{prefix}k{}", self.random.below(20));
                let most = self.random.pick(&[12, 12, 700]);
                let len = self.random.below(most) as usize;
                let value = self.random.bytes(len);
                rustix::fs::lsetxattr(path, name, &value, XattrFlags::empty())?;
            }
        }
        if follows {
            let mode = self.random.below(0o10000) as u32 & self.random.pick(&[0o777, 0o777, 0o7777]);
            rustix::fs::chmodat(rustix::fs::CWD, path, Mode::from_raw_mode(mode), AtFlags::empty())?;
        }
        let seconds = match self.random.below(5) {
            0 => -(self.random.below(1 << 31) as i64),
            1 => (1 << 32) + self.random.below(1 << 32) as i64,
            _ => 1_700_000_000 + self.random.below(1000) as i64,
        };
        let time = Timespec { tv_sec: seconds, tv_nsec: self.random.below(1_000_000_000) as i64 };
        let times = Timestamps { last_access: time, last_modification: time };
        Ok(rustix::fs::utimensat(rustix::fs::CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?)
    }
}
