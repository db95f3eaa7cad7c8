//! A read-only mapping of a whole file.
//!
//! Map only files that are complete and that nobody truncates while they are mapped: a published index or object
//! map, which is written under a temporary name and renamed. A page that lies behind the end of a file that was cut
//! after it was mapped raises SIGBUS. Spaces are never mapped: they have holes and are punched.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::path::Path;

/// A whole file, mapped read-only and shared.
///
/// The length is taken when it is mapped. An empty file gives an empty slice.
#[derive(Debug)]
pub struct Map {
    // None for an empty file: the kernel maps no zero bytes.
    map: Option<memmap2::Mmap>,
}

/// How the pages of a [`Map`] will be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Single pages here and there: no readahead.
    Random,
    /// From front to back.
    Sequential,
    /// All of it, soon.
    WillNeed,
    /// Not again: the process's page table entries go, the page cache stays.
    DontNeed,
}

impl Map {
    /// Opens and maps `path`.
    pub fn open(path: &Path) -> io::Result<Map> {
        Map::of(&File::open(path)?)
    }

    /// Maps all of `file`. The file may be closed afterwards.
    pub fn of(file: &File) -> io::Result<Map> {
        if file.metadata()?.len() == 0 {
            return Ok(Map { map: None });
        }
        // SAFETY: the mapping is private to this value and read-only, so no Rust reference aliases it mutably. That
        // the bytes do not change or vanish underneath is the caller's duty, stated in the module's head: only
        // published files, which are never written or truncated again, are mapped.
        let map = unsafe { memmap2::Mmap::map(file)? };
        Ok(Map { map: Some(map) })
    }

    /// Tells the kernel how the pages will be read. Only a hint.
    pub fn advise(&self, access: Access) -> io::Result<()> {
        let Some(map) = &self.map else { return Ok(()) };
        match access {
            Access::Random => map.advise(memmap2::Advice::Random),
            Access::Sequential => map.advise(memmap2::Advice::Sequential),
            Access::WillNeed => map.advise(memmap2::Advice::WillNeed),
            // SAFETY: MADV_DONTNEED on a read-only file mapping drops page table entries; the next access reads the
            // same bytes from the page cache, so no reference sees different contents.
            Access::DontNeed => unsafe { map.unchecked_advise(memmap2::UncheckedAdvice::DontNeed) },
        }
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }

    /// How many bytes of the mapping are resident in memory, in whole pages; for tests and statistics.
    pub fn resident(&self) -> io::Result<usize> {
        let Some(map) = &self.map else { return Ok(0) };
        // SAFETY: sysconf only reads a constant of the system.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096);
        let mut seen = vec![0u8; map.len().div_ceil(page)];
        // SAFETY: the range is exactly the live mapping, and `seen` has one byte per page of it, as mincore asks.
        let rc = unsafe { libc::mincore(map.as_ptr().cast_mut().cast(), map.len(), seen.as_mut_ptr()) };
        if rc != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(seen.iter().filter(|b| **b & 1 == 1).count() * page)
    }
}

impl AsRef<[u8]> for Map {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl std::ops::Deref for Map {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.as_slice()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn a_whole_file_and_an_empty_one() {
        let mut f = tempfile::NamedTempFile::new().unwrap();
        assert_eq!(Map::open(f.path()).unwrap().as_slice(), b"");
        f.write_all(&[7u8; 10_000]).unwrap();
        let map = Map::open(f.path()).unwrap();
        assert_eq!(map.len(), 10_000);
        assert!(map.iter().all(|b| *b == 7));
        for access in [Access::Random, Access::Sequential, Access::WillNeed, Access::DontNeed] {
            map.advise(access).unwrap();
        }
        assert_eq!(map[9_999], 7);
        assert!(map.resident().unwrap() >= 4096);
    }
}
