//! The seam's recording form: does everything for real below one directory, remembers it, and rebuilds each directory
//! that a crash could leave.
//!
//! What may be lost: writes, lengths and holes of a file since its last sync, each by itself, whole, in 512-byte
//! sectors, or only its length; names since the last sync of their directory, each by itself. A rename is there whole
//! or not at all. What was synced stays. That is weaker than what any journaling file system promises.

use super::{Disk, DiskFile, Open, RealDisk};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

/// Names a file or directory through all its renames.
type Node = u64;

#[derive(Debug, Clone)]
enum Op {
    Write(Node, u64, Arc<[u8]>),
    Resize(Node, u64),
    Punch(Node, u64, u64),
    Sync(Node),
    /// Entries that change together: a path and what it leads to afterwards. The first one's directory counts.
    Names(Vec<(PathBuf, Option<Node>)>),
    SyncDir(PathBuf),
    Mark(String),
}

#[derive(Debug, Default)]
struct Log {
    /// What was there at the start, durable. Directories have no content.
    base: BTreeMap<PathBuf, (Node, Option<Vec<u8>>)>,
    ops: Vec<Op>,
    /// The names now.
    names: HashMap<PathBuf, Node>,
    dirs: HashSet<Node>,
    next: Node,
}

/// Records below one directory; anything else is an error.
#[derive(Debug)]
pub(crate) struct Recording {
    root: PathBuf,
    log: Mutex<Log>,
}

impl Recording {
    /// Records below `root`, which exists; what it holds now counts as durable.
    pub(crate) fn new(root: &Path) -> Recording {
        let mut log = Log::default();
        let mut todo = vec![root.to_path_buf()];
        while let Some(dir) = todo.pop() {
            for entry in std::fs::read_dir(&dir).unwrap() {
                let entry = entry.unwrap();
                let path = entry.path().strip_prefix(root).unwrap().to_path_buf();
                let is_dir = entry.file_type().unwrap().is_dir();
                let content = (!is_dir).then(|| std::fs::read(entry.path()).unwrap());
                log.next += 1;
                let node = log.next;
                if is_dir {
                    log.dirs.insert(node);
                    todo.push(entry.path());
                }
                log.names.insert(path.clone(), node);
                log.base.insert(path, (node, content));
            }
        }
        Recording { root: root.to_path_buf(), log: Mutex::new(log) }
    }

    /// Notes that something is promised from here on; checkers are told which marks lie before the crash.
    pub(crate) fn mark(&self, what: &str) {
        self.log.lock().unwrap().ops.push(Op::Mark(what.to_owned()));
    }

    /// How many operations were recorded.
    pub(crate) fn len(&self) -> usize {
        self.log.lock().unwrap().ops.len()
    }

    fn relative(&self, path: &Path) -> io::Result<PathBuf> {
        match path.strip_prefix(&self.root) {
            Ok(p) => Ok(p.to_path_buf()),
            Err(_) => Err(io::Error::other(format!("{} is outside of what is recorded", path.display()))),
        }
    }

    /// Rebuilds states that a crash could leave, at most about `limit`, and calls `check` with each: its directory,
    /// the marks before the crash, and a name to find it again. Every crash point is visited with everything and with
    /// nothing unsynced there; the rest is all subsets while they are few, and sampled by `seed` when not.
    pub(crate) fn crashes(&self, limit: usize, seed: u64, mut check: impl FnMut(&Path, &[String], &str)) -> usize {
        let log = self.log.lock().unwrap();
        let mut rng = Rng(seed);
        let points = log.ops.len() + 1;
        let each = (limit / points).max(2);
        let mut seen = HashSet::new();
        let mut count = 0;
        for at in 0..points {
            let pending = pending(&log.ops[..at]);
            // How many fates each has: names are there or not, the rest can also be half there.
            let fates_of = |i: &usize| if matches!(log.ops[*i], Op::Names(_)) { 2 } else { 4 };
            let all = pending.iter().map(fates_of).try_fold(1usize, usize::checked_mul);
            let exhaustive = all.is_some_and(|n| n <= each);
            for mut plan in 0..all.filter(|_| exhaustive).unwrap_or(each) {
                let name = plan;
                let fates: Vec<Fate> = pending
                    .iter()
                    .enumerate()
                    .map(|(i, op)| {
                        if exhaustive {
                            let fate = plan % fates_of(op);
                            plan /= fates_of(op);
                            return [Fate::Lost, Fate::Done, Fate::Length, Fate::Torn(rng.next())][fate];
                        }
                        match plan {
                            0 => Fate::Lost,
                            1 => Fate::Done,
                            // What was done first is there, the rest is not.
                            2 => [Fate::Lost, Fate::Done][usize::from(i < (at * 7) % (pending.len() + 1))],
                            _ => Fate::random(&mut rng),
                        }
                    })
                    .collect();
                if !seen.insert((pending.clone(), fates.clone(), durable_ops(&log.ops[..at]))) {
                    continue;
                }
                let marks: Vec<String> = log.ops[..at]
                    .iter()
                    .filter_map(|op| if let Op::Mark(m) = op { Some(m.clone()) } else { None })
                    .collect();
                let dir = tempfile::tempdir().unwrap();
                let fate_of: HashMap<usize, Fate> = pending.iter().copied().zip(fates).collect();
                log.rebuild(at, &fate_of, dir.path());
                check(dir.path(), &marks, &format!("crash at operation {at}, plan {name}, seed {seed}"));
                count += 1;
            }
        }
        count
    }
}

/// How many operations are promised, for telling states apart.
fn durable_ops(ops: &[Op]) -> usize {
    ops.iter().filter(|op| matches!(op, Op::Sync(_) | Op::SyncDir(_) | Op::Mark(_))).count()
}

/// The operations whose effect no sync has made durable.
fn pending(ops: &[Op]) -> Vec<usize> {
    let mut synced: HashSet<Node> = HashSet::new();
    let mut synced_dirs: HashSet<&Path> = HashSet::new();
    let mut out = Vec::new();
    for (i, op) in ops.iter().enumerate().rev() {
        match op {
            Op::Sync(node) => {
                synced.insert(*node);
            }
            Op::SyncDir(dir) => {
                synced_dirs.insert(dir);
            }
            Op::Write(node, ..) | Op::Resize(node, _) | Op::Punch(node, ..) if !synced.contains(node) => out.push(i),
            Op::Names(changes) => {
                let dir = changes[0].0.parent().unwrap_or(Path::new(""));
                if !synced_dirs.contains(dir) {
                    out.push(i);
                }
            }
            _ => {}
        }
    }
    out.reverse();
    out
}

/// What a crash made of one operation that was not synced.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Fate {
    Lost,
    Done,
    /// The file is as long as if it had been done, but the bytes are not there.
    Length,
    /// Only some sectors; the number chooses which.
    Torn(u64),
}

impl Fate {
    fn random(rng: &mut Rng) -> Fate {
        match rng.next() % 8 {
            0..3 => Fate::Lost,
            3..6 => Fate::Done,
            6 => Fate::Length,
            _ => Fate::Torn(rng.next()),
        }
    }
}

impl Log {
    fn rebuild(&self, at: usize, fate_of: &HashMap<usize, Fate>, dir: &Path) {
        let mut names: BTreeMap<PathBuf, Node> = self.base.iter().map(|(p, (n, _))| (p.clone(), *n)).collect();
        let mut content: HashMap<Node, Vec<u8>> =
            self.base.values().filter_map(|(n, c)| Some((*n, c.clone()?))).collect();
        for (i, op) in self.ops[..at].iter().enumerate() {
            let fate = fate_of.get(&i).copied().unwrap_or(Fate::Done);
            if fate == Fate::Lost {
                continue;
            }
            match op {
                Op::Write(node, offset, bytes) => {
                    let file = content.entry(*node).or_default();
                    let start = *offset as usize;
                    file.resize(file.len().max(start + bytes.len()), 0);
                    for (k, sector) in bytes.chunks(512).enumerate() {
                        let keep = match fate {
                            Fate::Torn(which) => Rng(which ^ k as u64).next() & 1 == 0,
                            fate => fate == Fate::Done,
                        };
                        if keep {
                            file[start + k * 512..][..sector.len()].copy_from_slice(sector);
                        }
                    }
                }
                Op::Resize(node, len) => content.entry(*node).or_default().resize(*len as usize, 0),
                Op::Punch(node, offset, len) => {
                    let file = content.entry(*node).or_default();
                    let end = (*offset + *len).min(file.len() as u64) as usize;
                    if let Some(range) = file.get_mut(*offset as usize..end) {
                        range.fill(0);
                    }
                }
                Op::Names(changes) => {
                    for (path, node) in changes {
                        match node {
                            Some(node) => names.insert(path.clone(), *node),
                            None => names.remove(path),
                        };
                    }
                }
                Op::Sync(_) | Op::SyncDir(_) | Op::Mark(_) => {}
            }
        }
        // Parents sort before what they hold; what has lost its parent is out of reach.
        for (path, node) in names {
            let to = dir.join(&path);
            if !to.parent().is_some_and(Path::is_dir) {
                continue;
            }
            if self.dirs.contains(&node) {
                RealDisk.make_dir(&to).unwrap();
            } else {
                std::fs::write(&to, content.get(&node).map_or(&[][..], Vec::as_slice)).unwrap();
            }
        }
    }
}

impl Disk for Recording {
    fn open(&self, path: &Path, how: Open) -> io::Result<DiskFile> {
        let relative = self.relative(path)?;
        let mut log = self.log.lock().unwrap();
        let mut file = RealDisk.open(path, how)?;
        file.id = match log.names.get(&relative) {
            Some(node) => *node,
            None => log.make(relative, false),
        };
        Ok(file)
    }

    fn write_at(&self, file: &DiskFile, bytes: &[u8], offset: u64) -> io::Result<()> {
        let mut log = self.log.lock().unwrap();
        RealDisk.write_at(file, bytes, offset)?;
        log.ops.push(Op::Write(file.id, offset, bytes.into()));
        Ok(())
    }

    fn resize(&self, file: &DiskFile, len: u64) -> io::Result<()> {
        let mut log = self.log.lock().unwrap();
        RealDisk.resize(file, len)?;
        log.ops.push(Op::Resize(file.id, len));
        Ok(())
    }

    fn punch(&self, file: &DiskFile, offset: u64, len: u64) -> io::Result<()> {
        let mut log = self.log.lock().unwrap();
        RealDisk.punch(file, offset, len)?;
        log.ops.push(Op::Punch(file.id, offset, len));
        Ok(())
    }

    fn sync(&self, file: &DiskFile) -> io::Result<()> {
        // Not for real: the rebuilt states do not depend on it, and tests would wait for the disk.
        self.log.lock().unwrap().ops.push(Op::Sync(file.id));
        Ok(())
    }

    fn make_dir(&self, path: &Path) -> io::Result<()> {
        let relative = self.relative(path)?;
        let mut log = self.log.lock().unwrap();
        RealDisk.make_dir(path)?;
        log.make(relative, true);
        Ok(())
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        let (from_relative, to_relative) = (self.relative(from)?, self.relative(to)?);
        let mut log = self.log.lock().unwrap();
        RealDisk.rename(from, to)?;
        let node = log.names.remove(&from_relative).expect("every file was made or found");
        assert!(!log.dirs.contains(&node), "directories are not renamed");
        log.names.insert(to_relative.clone(), node);
        log.ops.push(Op::Names(vec![(to_relative, Some(node)), (from_relative, None)]));
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        let relative = self.relative(path)?;
        let mut log = self.log.lock().unwrap();
        RealDisk.remove(path)?;
        log.names.remove(&relative);
        log.ops.push(Op::Names(vec![(relative, None)]));
        Ok(())
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        let relative = self.relative(path)?;
        self.log.lock().unwrap().ops.push(Op::SyncDir(relative));
        Ok(())
    }
}

impl Log {
    fn make(&mut self, path: PathBuf, dir: bool) -> Node {
        self.next += 1;
        let node = self.next;
        if dir {
            self.dirs.insert(node);
        }
        self.names.insert(path.clone(), node);
        self.ops.push(Op::Names(vec![(path, Some(node))]));
        node
    }
}

/// SplitMix64: enough to choose states, the same everywhere.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Replaces `value` the right way, or without one of the syncs.
    fn replace(disk: &dyn Disk, root: &Path, sync: bool, sync_dir: bool) -> io::Result<()> {
        let file = disk.open(&root.join("tmp"), Open::New)?;
        disk.write_at(&file, &[b'n'; 1500], 0)?;
        if sync {
            disk.sync(&file)?;
        }
        disk.rename(&root.join("tmp"), &root.join("value"))?;
        if sync_dir {
            disk.sync_dir(root)?;
        }
        Ok(())
    }

    fn outcomes(sync: bool, sync_dir: bool) -> (HashSet<Vec<u8>>, HashSet<Vec<u8>>, usize) {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("value"), b"old").unwrap();
        let disk = Recording::new(dir.path());
        replace(&disk, dir.path(), sync, sync_dir).unwrap();
        disk.mark("replaced");
        let (mut before, mut after) = (HashSet::new(), HashSet::new());
        let n = disk.crashes(400, 1, |dir, marks, _| {
            let value = std::fs::read(dir.join("value")).unwrap();
            if marks.is_empty() {
                before.insert(value)
            } else {
                after.insert(value)
            };
        });
        (before, after, n)
    }

    #[test]
    fn a_careful_replacement_is_old_or_new_and_then_new() {
        let (before, after, n) = outcomes(true, true);
        let new = vec![b'n'; 1500];
        assert_eq!(before, HashSet::from([b"old".to_vec(), new.clone()]));
        assert_eq!(after, HashSet::from([new]));
        assert!(n > 10, "{n}");
    }

    #[test]
    fn missing_syncs_are_found() {
        let (before, after, _) = outcomes(false, true);
        assert!(before.len() > 2 && after.len() > 1, "half-written values turn up");
        assert!(after.contains(&Vec::new()) && after.contains(&vec![0; 1500]));
        let (before, after, _) = outcomes(true, false);
        assert_eq!((before.len(), after.len()), (2, 2), "the rename may be lost after the promise");
    }

    #[test]
    fn the_number_of_states_is_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let disk = Recording::new(dir.path());
        let file = disk.open(&dir.path().join("f"), Open::Either).unwrap();
        for i in 0..50 {
            disk.write_at(&file, &[1; 4096], i * 4096).unwrap();
        }
        disk.punch(&file, 0, 8192).unwrap();
        disk.resize(&file, 4096).unwrap();
        assert_eq!(disk.len(), 53);
        let n = disk.crashes(500, 3, |dir, _, _| {
            assert!(dir.exists());
        });
        assert!((100..=600).contains(&n), "{n}");
    }
}
