//! A layer's entries between decoding and merging: compact records in memory, on disk beyond a budget.
//!
//! Layers are decoded concurrently but merged in order, so any of them may have to wait. All spools of an import
//! share one [`Budget`]; what goes beyond it is written to a scratch file of the session. A spool is written
//! once and can be read several times.

use crate::chunker::LocalRun;
use crate::error::ImportError;
use format::Digest;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use store::{ImportSession, StoreError, TmpFile};

/// Bytes that grow at a time.
const SEGMENT: usize = 256 << 10;

/// Bytes of memory that the spools of one import may still take.
#[derive(Debug)]
pub(crate) struct Budget(AtomicU64);

impl Budget {
    pub(crate) fn new(bytes: u64) -> Self {
        Budget(AtomicU64::new(bytes))
    }

    fn take(&self, bytes: u64) -> bool {
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(bytes)).is_ok()
    }

    fn give(&self, bytes: u64) {
        self.0.fetch_add(bytes, Ordering::Relaxed);
    }
}

/// What an entry is, in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RecordKind {
    File,
    HardLink,
    Symlink,
    Dir,
    Fifo,
    Char { major: u32, minor: u32 },
    Block { major: u32, minor: u32 },
}

/// One entry of a layer. The buffers are reused from record to record.
#[derive(Debug, Default)]
pub(crate) struct Record {
    pub(crate) head: Head,
    pub(crate) path: Vec<u8>,
    /// Target of a symlink or hard link.
    pub(crate) link: Vec<u8>,
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub(crate) runs: Vec<LocalRun>,
}

/// The fixed part of a record.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head {
    pub(crate) kind: RecordKind,
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime_sec: i64,
    pub(crate) mtime_nsec: u32,
    pub(crate) size: u64,
    /// Of a file's content.
    pub(crate) digest: Digest,
}

impl Default for Head {
    fn default() -> Self {
        Head {
            kind: RecordKind::Fifo,
            mode: 0,
            uid: 0,
            gid: 0,
            mtime_sec: 0,
            mtime_nsec: 0,
            size: 0,
            digest: Digest::default(),
        }
    }
}

/// Written record by record.
#[derive(Debug)]
pub(crate) struct SpoolWriter<'a> {
    session: &'a ImportSession,
    budget: &'a Budget,
    spool: Spool<'a>,
    current: Vec<u8>,
}

/// A written spool.
#[derive(Debug)]
pub(crate) struct Spool<'a> {
    budget: &'a Budget,
    /// The front part, when the budget was used up.
    file: Option<(TmpFile, u64)>,
    /// What follows.
    segments: Vec<Vec<u8>>,
    reserved: u64,
    records: u64,
}

impl<'a> SpoolWriter<'a> {
    pub(crate) fn new(session: &'a ImportSession, budget: &'a Budget) -> Self {
        let spool = Spool { budget, file: None, segments: Vec::new(), reserved: 0, records: 0 };
        SpoolWriter { session, budget, spool, current: Vec::new() }
    }

    /// Adds a record. `link` for links, `runs` for files; both empty otherwise.
    pub(crate) fn push(
        &mut self,
        head: &Head,
        path: &[u8],
        link: &[u8],
        xattrs: &[(Vec<u8>, Vec<u8>)],
        runs: &[LocalRun],
    ) -> Result<(), SpoolError> {
        let out = &mut self.current;
        let (tag, a, b) = match head.kind {
            RecordKind::File => (0u8, 0, 0),
            RecordKind::HardLink => (1, 0, 0),
            RecordKind::Symlink => (2, 0, 0),
            RecordKind::Dir => (3, 0, 0),
            RecordKind::Fifo => (4, 0, 0),
            RecordKind::Char { major, minor } => (5, major, minor),
            RecordKind::Block { major, minor } => (6, major, minor),
        };
        out.push(tag);
        out.extend_from_slice(&head.mode.to_le_bytes());
        out.extend_from_slice(&head.uid.to_le_bytes());
        out.extend_from_slice(&head.gid.to_le_bytes());
        out.extend_from_slice(&head.mtime_sec.to_le_bytes());
        out.extend_from_slice(&head.mtime_nsec.to_le_bytes());
        put_bytes(out, path);
        out.extend_from_slice(&(xattrs.len() as u32).to_le_bytes());
        for (name, value) in xattrs {
            put_bytes(out, name);
            put_bytes(out, value);
        }
        match head.kind {
            RecordKind::File => {
                out.extend_from_slice(&head.size.to_le_bytes());
                out.extend_from_slice(&head.digest.0);
                out.extend_from_slice(&(runs.len() as u32).to_le_bytes());
                for r in runs {
                    for n in [r.file_block, r.count, r.object, r.space_block] {
                        out.extend_from_slice(&n.to_le_bytes());
                    }
                }
            }
            RecordKind::HardLink | RecordKind::Symlink => put_bytes(out, link),
            RecordKind::Char { .. } | RecordKind::Block { .. } => {
                out.extend_from_slice(&a.to_le_bytes());
                out.extend_from_slice(&b.to_le_bytes());
            }
            RecordKind::Dir | RecordKind::Fifo => {}
        }
        self.spool.records += 1;
        if self.current.len() >= SEGMENT {
            self.seal()?;
        }
        Ok(())
    }

    /// Ends the spool.
    pub(crate) fn finish(mut self) -> Result<Spool<'a>, SpoolError> {
        if !self.current.is_empty() {
            self.current.shrink_to_fit();
            self.seal()?;
        }
        Ok(self.spool)
    }

    /// Keeps the current segment in memory, or sends everything to disk.
    fn seal(&mut self) -> Result<(), SpoolError> {
        let segment = std::mem::take(&mut self.current);
        let size = segment.capacity() as u64;
        if self.spool.file.is_none() && self.budget.take(size) {
            self.spool.reserved += size;
            self.spool.segments.push(segment);
            self.current = Vec::with_capacity(if self.spool.segments.len() > 1 { SEGMENT + SEGMENT / 4 } else { 0 });
            return Ok(());
        }
        if self.spool.file.is_none() {
            self.spool.file = Some((self.session.tmp_file("layer-entries")?, 0));
        }
        if let Some((file, len)) = &mut self.spool.file {
            for s in self.spool.segments.drain(..).chain([segment]) {
                file.write_all(&s)?;
                *len += s.len() as u64;
                self.current = s;
            }
        }
        self.current.clear();
        self.budget.give(std::mem::take(&mut self.spool.reserved));
        Ok(())
    }
}

impl Spool<'_> {
    /// Reads it from the start.
    pub(crate) fn reader(&self) -> SpoolReader<'_> {
        let file = self.file.as_ref().map(|(file, len)| FileRange { file: file.file(), at: 0, end: *len });
        let chained = Segments { spool: self, segment: 0, at: 0 };
        SpoolReader { left: self.records, file: file.map(|f| BufReader::with_capacity(64 << 10, f)), memory: chained }
    }
}

impl Drop for Spool<'_> {
    fn drop(&mut self) {
        self.budget.give(self.reserved);
    }
}

/// Reads records in the order in which they were written.
#[derive(Debug)]
pub(crate) struct SpoolReader<'a> {
    left: u64,
    file: Option<BufReader<FileRange<'a>>>,
    memory: Segments<'a>,
}

impl SpoolReader<'_> {
    /// The next record into `out`; `false` at the end.
    pub(crate) fn next(&mut self, out: &mut Record) -> Result<bool, SpoolError> {
        if self.left == 0 {
            return Ok(false);
        }
        self.left -= 1;
        if let Some(file) = &mut self.file {
            if !file.fill_buf()?.is_empty() {
                read_record(file, out)?;
                return Ok(true);
            }
            self.file = None;
        }
        read_record(&mut self.memory, out)?;
        Ok(true)
    }
}

/// Part of a scratch file, read at offsets of its own.
#[derive(Debug)]
struct FileRange<'a> {
    file: &'a std::fs::File,
    at: u64,
    end: u64,
}

impl Read for FileRange<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let want = out.len().min((self.end - self.at) as usize);
        let n = self.file.read_at(&mut out[..want], self.at)?;
        self.at += n as u64;
        Ok(n)
    }
}

#[derive(Debug)]
struct Segments<'a> {
    spool: &'a Spool<'a>,
    segment: usize,
    at: usize,
}

impl Read for Segments<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        while let Some(segment) = self.spool.segments.get(self.segment) {
            let rest = &segment[self.at..];
            if rest.is_empty() {
                (self.segment, self.at) = (self.segment + 1, 0);
                continue;
            }
            let n = rest.len().min(out.len());
            out[..n].copy_from_slice(&rest[..n]);
            self.at += n;
            return Ok(n);
        }
        Ok(0)
    }
}

/// Why a spool could not be written or read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpoolError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("scratch file: {0}")]
    Io(#[from] io::Error),
}

impl SpoolError {
    /// As an error of the import, while at `place`.
    pub(crate) fn at(self, place: &str) -> ImportError {
        match self {
            SpoolError::Store(e) => e.into(),
            SpoolError::Io(e) => ImportError::io("keep the entries of", place, e),
        }
    }
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    out.extend_from_slice(&(bytes.len() as u32).to_le_bytes());
    out.extend_from_slice(bytes);
}

fn array<const N: usize>(r: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    r.read_exact(&mut bytes)?;
    Ok(bytes)
}

fn u32_of(r: &mut impl Read) -> io::Result<u32> {
    array(r).map(u32::from_le_bytes)
}

fn bytes_into(r: &mut impl Read, out: &mut Vec<u8>) -> io::Result<()> {
    let len = u32_of(r)? as usize;
    out.clear();
    out.resize(len, 0);
    r.read_exact(out)
}

fn read_record(r: &mut impl Read, out: &mut Record) -> io::Result<()> {
    let [tag] = array::<1>(r)?;
    let h = &mut out.head;
    h.mode = u16::from_le_bytes(array(r)?);
    h.uid = u32_of(r)?;
    h.gid = u32_of(r)?;
    h.mtime_sec = i64::from_le_bytes(array(r)?);
    h.mtime_nsec = u32_of(r)?;
    h.size = 0;
    h.digest = Digest::default();
    out.link.clear();
    out.runs.clear();
    bytes_into(r, &mut out.path)?;
    out.xattrs.resize(u32_of(r)? as usize, Default::default());
    for (name, value) in &mut out.xattrs {
        bytes_into(r, name)?;
        bytes_into(r, value)?;
    }
    h.kind = match tag {
        0 => {
            h.size = u64::from_le_bytes(array(r)?);
            h.digest = Digest(array(r)?);
            for _ in 0..u32_of(r)? {
                let mut n = [0u32; 4];
                for x in &mut n {
                    *x = u32_of(r)?;
                }
                let [file_block, count, object, space_block] = n;
                out.runs.push(LocalRun { file_block, count, object, space_block });
            }
            RecordKind::File
        }
        1 | 2 => {
            bytes_into(r, &mut out.link)?;
            if tag == 1 { RecordKind::HardLink } else { RecordKind::Symlink }
        }
        3 => RecordKind::Dir,
        4 => RecordKind::Fifo,
        _ => {
            let (major, minor) = (u32_of(r)?, u32_of(r)?);
            if tag == 5 { RecordKind::Char { major, minor } } else { RecordKind::Block { major, minor } }
        }
    };
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use store::Store;

    #[test]
    fn what_goes_in_comes_out_in_memory_and_on_disk() {
        let dir = tempfile::tempdir().unwrap();
        let session = Store::open(&dir.path().join("root")).unwrap().import().unwrap();
        for budget in [0, 600 << 10, 1 << 30] {
            let shared = Budget::new(budget);
            let mut writer = SpoolWriter::new(&session, &shared);
            let kind = |i: u32| match i % 7 {
                0 => RecordKind::File,
                1 => RecordKind::HardLink,
                2 => RecordKind::Symlink,
                3 => RecordKind::Dir,
                4 => RecordKind::Fifo,
                5 => RecordKind::Char { major: i, minor: 2 },
                _ => RecordKind::Block { major: 3, minor: i },
            };
            let make = |i: u32| {
                let mut r = Record { path: vec![b'p'; i as usize % 500], ..Record::default() };
                r.head = Head { kind: kind(i), mode: 7, uid: i, gid: 9, mtime_sec: -5, mtime_nsec: i, ..r.head };
                match r.head.kind {
                    RecordKind::File => {
                        (r.head.size, r.head.digest) = (u64::from(i) << 20, Digest::of(&i.to_le_bytes()));
                        let run = LocalRun { file_block: i, count: 2, object: 3, space_block: 4 };
                        r.runs = vec![run; i as usize % 5];
                    }
                    RecordKind::HardLink | RecordKind::Symlink => r.link = vec![b'l'; 33],
                    _ => {}
                }
                r.xattrs = vec![(b"user.x".to_vec(), vec![1; i as usize % 90]); i as usize % 3];
                r
            };
            let text = |r: &Record| format!("{r:?}");
            for i in 0..4000 {
                let r = make(i);
                writer.push(&r.head, &r.path, &r.link, &r.xattrs, &r.runs).unwrap();
            }
            let spool = writer.finish().unwrap();
            assert_eq!(spool.file.is_some(), budget < 1 << 30);
            for _ in 0..2 {
                let mut reader = spool.reader();
                let mut record = Record::default();
                for i in 0..4000 {
                    assert!(reader.next(&mut record).unwrap());
                    assert_eq!(text(&record), text(&make(i)));
                }
                assert!(!reader.next(&mut record).unwrap());
            }
            drop(spool);
            assert_eq!(shared.0.load(Ordering::Relaxed), budget);
        }
    }
}
