//! As much of an index file as the store needs: its digest, its identity, and which objects it refers to.

use crate::{ObjectId, StoreError};
use format::index::{Header, MAGIC, Object, Section, SectionKind, VERSION};
use format::{Digest, FormatError};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// More sections than any version will have.
const MAX_SECTIONS: u32 = 1024;
/// More objects than any image refers to.
const MAX_OBJECTS: usize = 1 << 20;

/// What the head of an index says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Summary {
    /// The index's own digest.
    pub(crate) digest: Digest,
    pub(crate) identity: Digest,
    pub(crate) objects: Vec<ObjectId>,
    /// Offset, length and digest of every section.
    pub(crate) sections: Vec<(u64, u64, Digest)>,
}

/// Reads header, section table and object table. The object table is verified, the other sections are not.
pub(crate) fn read(file: &File, path: &Path) -> Result<Summary, StoreError> {
    let io = |e| StoreError::io("read", path, e);
    let corrupt = |at: u64, why| StoreError::format(path, FormatError::Corrupt { what: "index", at, why });
    let len = file.metadata().map_err(io)?.len();
    let mut header = Header::new_zeroed();
    read_at(file, header.as_mut_bytes(), 0).map_err(io)?.then_some(()).ok_or(corrupt(0, "shorter than its header"))?;
    if header.magic != MAGIC {
        return Err(corrupt(0, "not an index"));
    }
    if header.version.get() != VERSION {
        let source = FormatError::Unsupported { what: "index version", value: header.version.get().into() };
        return Err(StoreError::format(path, source));
    }
    let count = header.section_count.get();
    if header.total_len.get() != len || count > MAX_SECTIONS {
        return Err(corrupt(24, "length or number of sections"));
    }
    let mut table = vec![0; count as usize * size_of::<Section>()];
    let at = size_of::<Header>() as u64;
    read_at(file, &mut table, at).map_err(io)?.then_some(()).ok_or(corrupt(at, "cut in its section table"))?;
    let bytes = header.as_bytes();
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes[..bytes.len() - 4]), &table);
    if crc != header.crc.get() {
        return Err(corrupt(252, "header checksum"));
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(bytes).update(&table);
    let table = <[Section]>::ref_from_bytes(&table).map_err(|_| corrupt(at, "section table"))?;
    let mut summary = Summary {
        digest: Digest(*hasher.finalize().as_bytes()),
        identity: header.identity,
        objects: Vec::new(),
        sections: Vec::new(),
    };
    for (i, section) in table.iter().enumerate() {
        let at = at + (i * size_of::<Section>()) as u64;
        let (offset, length) = (section.offset.get(), section.len.get());
        if offset.checked_add(length).is_none_or(|end| end > len) {
            return Err(corrupt(at, "section beyond the end"));
        }
        summary.sections.push((offset, length, section.digest));
        if section.kind.get() == SectionKind::Objects as u32 {
            let length = usize::try_from(length).ok().filter(|l| l / size_of::<Object>() <= MAX_OBJECTS);
            let mut rows = vec![0; length.ok_or(corrupt(at, "too many objects"))?];
            if !read_at(file, &mut rows, offset).map_err(io)? {
                return Err(corrupt(offset, "cut object table"));
            }
            if Digest::of(&rows) != section.digest {
                return Err(corrupt(offset, "digest of the object table"));
            }
            let rows = <[Object]>::ref_from_bytes(&rows).map_err(|_| corrupt(offset, "cut object table"))?;
            summary.objects.extend(rows.iter().map(|o| o.id));
        }
    }
    Ok(summary)
}

/// Fills `out` from an offset; `false` when the file ends before.
fn read_at(file: &File, out: &mut [u8], at: u64) -> io::Result<bool> {
    match file.read_exact_at(out, at) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(e) => Err(e),
    }
}

/// A small index file for tests: header, section table and object table, nothing else.
#[cfg(test)]
pub(crate) fn example(objects: &[(ObjectId, u64)], salt: &str) -> Vec<u8> {
    let rows: Vec<u8> = objects
        .iter()
        .flat_map(|(id, blocks)| Object { id: *id, space_blocks: (*blocks).into() }.as_bytes().to_vec())
        .collect();
    let mut section = Section::new_zeroed();
    section.kind = (SectionKind::Objects as u32).into();
    section.offset = ((size_of::<Header>() + size_of::<Section>()) as u64).into();
    section.len = (rows.len() as u64).into();
    section.digest = Digest::of(&rows);
    let mut header = Header::new_zeroed();
    header.magic = MAGIC;
    header.version = VERSION.into();
    header.header_len = (size_of::<Header>() as u32).into();
    header.total_len = ((size_of::<Header>() + size_of::<Section>() + rows.len()) as u64).into();
    header.section_count = 1.into();
    header.identity = Digest::of(salt.as_bytes());
    let crc = crc32c::crc32c_append(crc32c::crc32c(&header.as_bytes()[..252]), section.as_bytes());
    header.crc = crc.into();
    [header.as_bytes(), section.as_bytes(), &rows].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn summary(bytes: &[u8]) -> Result<Summary, StoreError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), bytes).unwrap();
        read(file.as_file(), file.path())
    }

    #[test]
    fn the_head_of_an_index_is_read_and_damage_is_an_error() {
        let objects = [(Digest::of(b"a"), 5), (Digest::of(b"b"), 6)];
        let good = example(&objects, "x");
        let s = summary(&good).unwrap();
        assert_eq!(s.objects, [objects[0].0, objects[1].0]);
        assert_eq!(s.identity, Digest::of(b"x"));
        assert_eq!(s.digest, Digest::of(&good[..320]));
        for len in 0..good.len() {
            assert!(summary(&good[..len]).is_err(), "{len}");
        }
        for bit in 0..good.len() * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(summary(&bytes).is_err(), "bit {bit}");
        }
    }
}
