//! Makes random trees on the host: every kind of node, names of any bytes, owners beyond 16 bits, attributes, times
//! before 1970 and behind 2106, hard links, holes. What a tree is follows from its seed and its limit alone.

use anyhow::{Context, Result};
use image::testing::Random;
use rustix::fs::{AtFlags, FileType, Mode, Timespec, Timestamps, XattrFlags};
use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// Fills an empty directory with at most `names` names.
pub fn fill(dir: &Path, seed: u64, names: u32) -> Result<()> {
    Maker { random: Random(seed), made: Vec::new(), left: names }.fill(dir, 0)
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
                0 => *self.random.pick(b".-_ +\n\\"),
                1 => *self.random.pick(&[0xff, 0xc3, 0xa4, 1, 127]),
                _ => b'a' + self.random.below(26) as u8,
            })
            .collect();
        if name == b"." || name == b".." {
            name.push(b'x');
        }
        // An archive is read as a layer, where these hide others.
        if name.starts_with(b".wh.") {
            name[0] = b'x';
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
                let most = *self.random.pick(&[70, 70, 70, 70, 4000]);
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
            *self.random.pick(&[FileType::CharacterDevice, FileType::BlockDevice, FileType::Fifo, FileType::Socket]);
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
            1 => *self.random.pick(&[1, 4095, 4096, 4097, 65535, 65536, 65537, 131_072]),
            2 => self.random.below(300_000),
            _ => self.random.below(9000),
        };
        if self.random.below(5) == 0 {
            // Islands of data between holes.
            file.set_len(size)?;
            for _ in 0..self.random.below(4) {
                let at = self.random.below(size + 1);
                let len = self.random.below(6000).min(size - at);
                file.write_all_at(&self.bytes(len), at)?;
            }
        } else if self.random.below(6) == 0 {
            // The same content as some other file has.
            file.write_all_at(&vec![b'=' + (size % 3) as u8; size as usize], 0)?;
        } else {
            file.write_all_at(&self.bytes(size), 0)?;
        }
        Ok(())
    }

    fn bytes(&mut self, len: u64) -> Vec<u8> {
        (0..len).map(|_| self.random.bits() as u8).collect()
    }

    /// Owner, attributes, mode, time.
    fn dress(&mut self, path: &Path, follows: bool) -> Result<()> {
        let id = |random: &mut Random| match random.below(4) {
            0 => *random.pick(&[65_535, 65_536, 70_000, u32::MAX - 1]),
            _ => random.below(3) as u32,
        };
        let (uid, gid) = (id(&mut self.random), id(&mut self.random));
        std::os::unix::fs::lchown(path, Some(uid), Some(gid))?;
        if self.random.below(4) == 0 {
            for _ in 0..=self.random.below(3) {
                self.attribute(path, follows)?;
            }
        }
        if follows {
            let mode = self.random.below(0o10000) as u32 & *self.random.pick(&[0o777, 0o777, 0o7777]);
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

    /// One extended attribute: `user.*` is for files and directories only.
    fn attribute(&mut self, path: &Path, follows: bool) -> Result<()> {
        let plain = follows && (path.is_file() || path.is_dir());
        let (name, value): (String, Vec<u8>) = match self.random.below(8) {
            0 if path.is_dir() => ("system.posix_acl_default".into(), self.acl()),
            0 if plain => ("system.posix_acl_access".into(), self.acl()),
            1 if plain => ("security.capability".into(), self.capability()),
            kind => {
                let prefix = match kind {
                    2 => "security.",
                    3 => "trusted.",
                    _ if plain => "user.",
                    _ => "trusted.",
                };
                let most = *self.random.pick(&[12, 12, 700]);
                let len = self.random.below(most);
                (format!("{prefix}k{}", self.random.below(20)), self.bytes(len))
            }
        };
        rustix::fs::lsetxattr(path, name.as_str(), &value, XattrFlags::empty()).context(name)
    }

    /// An access control list as the kernel takes it: owner, one user, group, mask, others.
    fn acl(&mut self) -> Vec<u8> {
        let user = *self.random.pick(&[1, 1000, 70_000]);
        let mut bits = || self.random.below(8) as u16;
        let entries = [
            (1u16, bits(), u32::MAX),
            (2, bits(), user),
            (4, bits(), u32::MAX),
            (16, bits(), u32::MAX),
            (32, bits(), u32::MAX),
        ];
        let mut value = 2u32.to_le_bytes().to_vec();
        for (tag, bits, id) in entries {
            value.extend(tag.to_le_bytes().into_iter().chain(bits.to_le_bytes()).chain(id.to_le_bytes()));
        }
        value
    }

    /// Permitted capabilities, revision 2.
    fn capability(&mut self) -> Vec<u8> {
        let bits = 1u64 << self.random.below(41);
        let words = [0x0200_0001, bits as u32, 0, (bits >> 32) as u32, 0];
        words.iter().flat_map(|word| word.to_le_bytes()).collect()
    }
}
