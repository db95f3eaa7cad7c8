//! Source trees whose every byte is known, readers that accept nothing else, and looks into a store's files.

use crate::lab::{Lab, eventually, finish};
use rustix::io::Errno;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use sys::proc::PidFd;

/// So many rounds, and many more in the full test.
pub fn rounds(few: u64) -> u64 {
    if std::env::var_os("LAZYROOT_TEST_FULL").is_some() { few * 10 } else { few }
}

/// A source of numbers that is the same in every run.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }

    /// Bytes that cannot be compressed.
    pub fn noise(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 8);
        while bytes.len() < len {
            bytes.extend_from_slice(&self.next().to_le_bytes());
        }
        bytes.truncate(len);
        bytes
    }

    /// Bytes that can, no two pieces alike, and never zero: what reads as zeros is wrong.
    pub fn text(&mut self, len: usize) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(len + 32);
        while bytes.len() < len {
            bytes.extend_from_slice(format!("the number after is {:x}\n", self.below(1 << 20)).as_bytes());
        }
        bytes.truncate(len);
        bytes
    }
}

/// A tree on disk, with its content in memory to compare with.
pub struct Source {
    pub dir: PathBuf,
    pub files: BTreeMap<String, Vec<u8>>,
}

impl Source {
    pub fn new(dir: PathBuf) -> Source {
        std::fs::create_dir_all(&dir).unwrap();
        Source { dir, files: BTreeMap::new() }
    }

    pub fn add(&mut self, name: &str, bytes: Vec<u8>) {
        let path = self.dir.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, &bytes).unwrap();
        self.files.insert(name.to_owned(), bytes);
    }

    /// A few thousand small files and a few larger ones, some 25 MB.
    pub fn medium(lab: &Lab) -> Source {
        let mut source = Source::new(lab.path("medium"));
        let mut random = Random(0x5eed);
        for i in 0..2500u32 {
            let len = match i % 5 {
                0 => random.below(300),
                1 => 4096 * random.below(4),
                _ => random.below(12_000),
            };
            let bytes = if i % 2 == 0 { random.noise(len as usize) } else { random.text(len as usize) };
            source.add(&format!("d{:02}/s{}/f{i}", i % 40, i % 3), bytes);
        }
        for i in 0..5u32 {
            let bytes = if i == 4 { random.text(3 << 20) } else { random.noise(2 << 20) };
            source.add(&format!("large/f{i}"), bytes);
        }
        source
    }

    /// A dozen files, some 7 MB in a handful of frames.
    pub fn small(lab: &Lab, name: &str, seed: u64) -> Source {
        let mut source = Source::new(lab.path(name));
        let mut random = Random(seed);
        for i in 0..8 {
            let len = random.below(20_000) as usize;
            source.add(&format!("dir{}/f{i}", i % 3), random.text(len));
        }
        for i in 0..3 {
            source.add(&format!("noise{i}"), random.noise((1 << 20) + 77 * i));
        }
        source.add("text", random.text(3 << 20));
        source
    }

    pub fn bytes(&self) -> u64 {
        self.files.values().map(|f| f.len() as u64).sum()
    }

    /// Reads every file below `mount`: its own bytes or an error that may be. Panics on any other byte and on any other
    /// length.
    pub fn read(&self, mount: &Path) -> Reading {
        let mut reading = Reading::default();
        for (name, bytes) in &self.files {
            reading.add(name, read_file(&mount.join(name), bytes, &AtomicU64::new(0)));
        }
        reading
    }

    /// The same by many readers at once.
    pub fn is_right_for(&self, mount: &Path, readers: u64) {
        std::thread::scope(|s| {
            for reader in 0..readers {
                s.spawn(move || {
                    let mut order: Vec<_> = self.files.iter().collect();
                    Random(reader + 1).shuffle(&mut order);
                    for (name, bytes) in order {
                        let result = read_file(&mount.join(name), bytes, &AtomicU64::new(0));
                        result.unwrap_or_else(|errno| panic!("{name}: {errno}"));
                    }
                });
            }
        });
    }

    /// Everything below `mount` is there and right.
    pub fn is_right(&self, mount: &Path) {
        let reading = self.read(mount);
        assert!(reading.failed.is_empty(), "{:?}", reading.failed);
    }
}

/// What reading a tree gave.
#[derive(Debug, Default)]
pub struct Reading {
    pub right: usize,
    pub failed: Vec<(String, Errno)>,
}

impl Reading {
    pub fn add(&mut self, name: &str, result: Result<(), Errno>) {
        match result {
            Ok(()) => self.right += 1,
            Err(errno) => self.failed.push((name.to_owned(), errno)),
        }
    }
}

/// What a reader may get when bytes cannot be had: EIO; and of a server that is dead ENOTCONN, or ECONNABORTED for what
/// was just in its hands.
const ALLOWED: [Errno; 3] = [Errno::IO, Errno::NOTCONN, Errno::CONNABORTED];

/// Reads one file piece by piece, counting the bytes that were right.
pub fn read_file(path: &Path, want: &[u8], right: &AtomicU64) -> Result<(), Errno> {
    let errno = |e: std::io::Error| {
        let errno = Errno::from_io_error(&e).unwrap_or(Errno::INVAL);
        assert!(ALLOWED.contains(&errno), "{}: {e}", path.display());
        errno
    };
    let mut file = File::open(path).map_err(errno)?;
    let mut buffer = vec![0u8; 96 << 10];
    let mut at = 0;
    loop {
        let n = file.read(&mut buffer).map_err(errno)?;
        assert!(at + n <= want.len(), "{}: longer than it should be", path.display());
        if buffer[..n] != want[at..at + n] {
            let i = (0..n).find(|i| buffer[*i] != want[at + i]).unwrap();
            let zeros = buffer[i..n].iter().all(|b| *b == 0);
            panic!("{}: a wrong byte at {}, zeros from there: {zeros}", path.display(), at + i);
        }
        right.fetch_add(n as u64, Ordering::Relaxed);
        at += n;
        if n == 0 {
            assert_eq!(at, want.len(), "{}: cut short", path.display());
            return Ok(());
        }
    }
}

/// Kills a process and waits for its end.
pub fn kill(pid: i32) {
    let process = PidFd::open(pid).unwrap();
    process.signal(rustix::process::Signal::KILL).unwrap();
    assert!(process.wait(Some(Duration::from_secs(30))).unwrap(), "killed, it goes on");
}

/// The files of a store that its images are made of: names, lengths and digests. Not the cache, and not the merged
/// chunk table, which is rebuilt at any time.
pub fn files_of(root: &Path) -> BTreeMap<PathBuf, (u64, blake3::Hash)> {
    let mut found = BTreeMap::new();
    for part in ["refs", "indexes", "objects", "tmp", "version"] {
        visit(&root.join(part), &mut |path| {
            let bytes = std::fs::read(path).unwrap();
            found.insert(path.to_owned(), (bytes.len() as u64, blake3::hash(&bytes)));
        });
    }
    found
}

/// Every file at or below a path; what vanishes meanwhile is left out.
pub fn visit(path: &Path, each: &mut dyn FnMut(&Path)) {
    match std::fs::read_dir(path) {
        Ok(entries) => entries.flatten().for_each(|e| visit(&e.path(), each)),
        Err(_) if path.is_file() => each(path),
        Err(_) => {}
    }
}

/// The files below a part of the root whose names end so.
pub fn find(root: &Path, part: &str, ending: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    visit(&root.join(part), &mut |path| {
        if path.to_string_lossy().ends_with(ending) {
            found.push(path.to_owned());
        }
    });
    found.sort();
    found
}

/// The one file there.
pub fn the(root: &Path, part: &str, ending: &str) -> PathBuf {
    let mut found = find(root, part, ending);
    assert_eq!(found.len(), 1, "{found:?}");
    found.remove(0)
}

/// Bytes that the spaces take on disk.
pub fn filled(root: &Path) -> u64 {
    let mut sum = 0;
    visit(&root.join("cache/spaces"), &mut |path| {
        if path.ends_with("data") {
            sum += std::fs::metadata(path).map_or(0, |m| m.blocks() * 512);
        }
    });
    sum
}

/// Whether any frame is claimed to be on disk for good.
pub fn has_claims(root: &Path) -> bool {
    let is_page = |p: &[u8]| p.starts_with(&format::presence::MAGIC);
    find(root, "cache/spaces", "presence").iter().any(|path| {
        let bytes = std::fs::read(path).unwrap_or_default();
        bytes.chunks(format::presence::PAGE).any(is_page)
    })
}

/// Flips one bit in a file, in place.
pub fn flip(path: &Path, at: u64, bit: u8) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0u8];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1 << bit], at).unwrap();
}

impl Lab {
    /// Serious and other problems that fsck finds.
    pub fn problems(&self) -> (u64, u64) {
        let done = self.run(&["--json", "fsck"]);
        let last = done.json().pop().unwrap_or_else(|| panic!("fsck said nothing: {}", done.err));
        let (all, serious) = (last["problems"].as_u64().unwrap(), last["serious"].as_u64().unwrap());
        assert_eq!(done.code, if serious > 0 { 5 } else { 0 }, "{}", done.err);
        (serious, all - serious)
    }

    pub fn images(&self) -> Vec<Value> {
        self.run(&["--json", "images"]).ok().json()
    }

    /// A counter of the daemon's cache.
    pub fn counter(&self, name: &str) -> u64 {
        let stats = self.run(&["--json", "stats"]).ok().json().remove(0);
        stats["cache"][name].as_u64().unwrap_or_else(|| panic!("no counter {name} in {stats}"))
    }

    pub fn import_command(&self, source: &Source, name: &str) -> Command {
        self.command(&["import", "-q", &format!("dir:{}", source.dir.display()), name])
    }

    pub fn take(&self, source: &Source, name: &str) {
        finish(self.import_command(source, name)).ok();
    }

    pub fn mount(&self, name: &str, shape: &str, point: &str) -> PathBuf {
        let point = self.point(point);
        self.run(&["mount", name, &point, "--as", shape]).ok();
        PathBuf::from(point)
    }

    pub fn umount(&self, point: &Path) {
        self.run(&["umount", point.to_str().unwrap()]).ok();
    }

    pub fn stop(&self) {
        // Whoever makes a mount namespace just now (another daemon, a container) has our mounts in it for a moment.
        eventually("the daemon stops", || self.run(&["daemon", "stop"]).code == 0);
        eventually("the daemon is gone", || !self.daemon_lives());
    }

    /// Everything that the node knows is gone. No daemon may run.
    pub fn cold(&self) {
        assert!(!self.daemon_lives());
        let cache = self.root.join("cache/spaces");
        if cache.exists() {
            std::fs::remove_dir_all(cache).unwrap();
        }
    }
}
