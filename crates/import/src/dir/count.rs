//! How much there is to be read: a walk of its own that looks at attributes only, for those who want to know how long it
//! still takes. It gives up without a word at anything unusual; nothing but a number on a screen depends on it.

use super::walk::{Matched, open_root};
use super::{FileId, read};
use crate::glob::Patterns;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, Statx, StatxFlags};
use std::collections::HashSet;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;

/// Directories inside each other, each of which keeps a descriptor open.
const MAX_DEPTH: usize = 128;

/// What a walk takes in.
#[derive(Debug)]
pub(super) struct Scope<'a> {
    pub(super) path: &'a Path,
    pub(super) store: Option<FileId>,
    pub(super) include: &'a Patterns,
    pub(super) exclude: &'a Patterns,
}

/// An open directory, and its subdirectories that are still to be gone into.
type Open = (OwnedFd, Vec<(Vec<u8>, Matched)>);

/// Bytes of data and entries, the root not counted. `None` when it was stopped or gave up.
pub(super) fn count(scope: &Scope<'_>, stopped: &dyn Fn() -> bool) -> Option<(u64, u64)> {
    let root = open_root(scope.path).ok()?;
    let device = device(&read::stat(&root).ok()?);
    let (mut bytes, mut entries) = (0u64, 0u64);
    let mut several: HashSet<FileId> = HashSet::new();
    let mut stack: Vec<Open> = Vec::new();
    let mut next = Some((root, Matched::start(scope.include, scope.exclude)));
    while let Some((fd, state)) = next.take() {
        let mut dirs = Vec::new();
        let mut buffer = [const { MaybeUninit::uninit() }; 32 << 10];
        let mut listing = RawDir::new(&fd, &mut buffer);
        while let Some(entry) = listing.next() {
            let entry = entry.ok()?;
            let name = entry.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
            let Ok(s) = rustix::fs::statx(&fd, name, flags, StatxFlags::BASIC_STATS) else { continue };
            let kind = FileType::from_raw_mode(s.stx_mode.into());
            let is_dir = kind == FileType::Directory;
            let Some(state) = state.step(scope.include, scope.exclude, name, is_dir) else { continue };
            entries += u64::from(state.included);
            let id = read::file_id(&s);
            if is_dir {
                if device == self::device(&s) && !read::is_mount_root(&s) && scope.store != Some(id) {
                    dirs.push((name.to_vec(), state));
                }
            } else if kind == FileType::RegularFile && state.included && (s.stx_nlink == 1 || several.insert(id)) {
                bytes += s.stx_size.min(s.stx_blocks.saturating_mul(512));
            }
        }
        if stopped() || stack.len() >= MAX_DEPTH {
            return None;
        }
        stack.push((fd, dirs));
        while let Some((fd, dirs)) = stack.last_mut() {
            let Some((name, state)) = dirs.pop() else {
                stack.pop();
                continue;
            };
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            if let Ok(fd) = rustix::fs::openat(&*fd, &name[..], flags, Mode::empty()) {
                next = Some((fd, state));
                break;
            }
        }
    }
    Some((bytes, entries))
}

fn device(s: &Statx) -> (u32, u32) {
    (s.stx_dev_major, s.stx_dev_minor)
}
