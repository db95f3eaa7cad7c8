//! Opening an index: header, section table, and the sections as rows.

use super::IndexError;
use crate::hash::{self, Shape};
use format::index::{
    Dirent, Extent, HashHeader, Header, Inode, MAGIC, MAX_DIRENTS, Object, Owner, Place, Section, SectionKind, VERSION,
    XattrEntry,
};
use format::{Digest, FormatError};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

const HEADER_LEN: usize = size_of::<Header>();
const ROW_LEN: usize = size_of::<Section>();
const SECTIONS: usize = SectionKind::ALL.len();

/// An index, read in place. Cloning is cheap.
#[derive(Clone)]
pub struct Index(pub(super) Arc<Inner>);

pub(super) struct Inner {
    bytes: Arc<dyn AsRef<[u8]> + Send + Sync>,
    pub(super) header: Header,
    digest: Digest,
    /// By position in [`SectionKind::ALL`].
    sections: [Range<usize>; SECTIONS],
    pub(super) names: Option<HashPlace>,
    pub(super) paths: Option<HashPlace>,
    /// Where the extents of the files that were read last end: first row and number of rows. See
    /// [`Index::extents_from`].
    pub(super) ends: [AtomicU64; ENDS],
}

/// Files whose number of extents is remembered.
pub(super) const ENDS: usize = 64;

/// A hash section's head.
#[derive(Debug, Clone, Copy)]
pub(super) struct HashPlace {
    pub(super) seed: u64,
    shape: Shape,
    pub(super) min_entries: u32,
}

impl fmt::Debug for Index {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Index").field("digest", &self.0.digest).field("header", &self.0.header).finish()
    }
}

impl Index {
    /// Opens an index. Fails when header, section table or the sections' lengths are not right; the sections'
    /// content is not looked at.
    pub fn open(bytes: Arc<dyn AsRef<[u8]> + Send + Sync>) -> Result<Index, IndexError> {
        let all = (*bytes).as_ref();
        let header = read_header(all)?;
        let table_len = SECTIONS * ROW_LEN;
        let table = all.get(HEADER_LEN..HEADER_LEN + table_len).ok_or(corrupt("index header", 0, "cut short"))?;
        let rows = <[Section]>::ref_from_bytes(table).map_err(|_| corrupt("section table", 256, "cut short"))?;
        let crc = crc32c::crc32c_append(crc32c::crc32c(&header.as_bytes()[..HEADER_LEN - 4]), table);
        if crc != header.crc.get() {
            return Err(corrupt("index header", HEADER_LEN as u64 - 4, "checksum mismatch").into());
        }
        if header.total_len.get() != all.len() as u64 {
            return Err(corrupt("index header", 24, "the file is shorter or longer than it says").into());
        }
        let sections = read_sections(rows, &header)?;
        let digest = Digest::of(&all[..HEADER_LEN + table_len]);
        let ends = [const { AtomicU64::new(0) }; ENDS];
        let mut inner = Inner { bytes: bytes.clone(), header, digest, sections, names: None, paths: None, ends };
        inner.names = inner.read_hash(SectionKind::NameHash)?;
        inner.paths = inner.read_hash(SectionKind::PathHash)?;
        Ok(Index(Arc::new(inner)))
    }

    /// The index's own digest: over header and section table, which hold the digests of everything else.
    pub fn digest(&self) -> Digest {
        self.0.digest
    }

    /// The image's identity: the same for the same tree, wherever its bytes lie.
    pub fn identity(&self) -> Digest {
        self.0.header.identity
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.0.header
    }

    /// Inodes.
    pub fn inode_count(&self) -> u32 {
        self.0.header.inode_count.get()
    }

    /// The length of a section's bytes, for reports.
    pub fn section_len(&self, kind: SectionKind) -> usize {
        self.0.sections[position(kind)].len()
    }

    pub(super) fn bytes(&self) -> &[u8] {
        (*self.0.bytes).as_ref()
    }

    pub(crate) fn section(&self, kind: SectionKind) -> &[u8] {
        self.0.section(kind)
    }

    pub(super) fn section_start(&self, kind: SectionKind) -> u64 {
        self.0.sections[position(kind)].start as u64
    }

    pub(crate) fn rows<T: FromBytes + Immutable + KnownLayout + Unaligned>(&self, kind: SectionKind) -> &[T] {
        self.0.rows(kind)
    }

    /// An error about a row of a section.
    pub(super) fn bad<T>(&self, kind: SectionKind, row: u64, what: &'static str, why: &'static str) -> IndexError {
        corrupt(what, self.section_start(kind).saturating_add(row.saturating_mul(size_of::<T>() as u64)), why).into()
    }

    /// What the hash over names has for `name`, right or wrong.
    pub(super) fn probe_name(&self, parent: u32, name: &[u8]) -> Option<u32> {
        let hash = self.0.names?;
        self.0.probe(SectionKind::NameHash, hash.shape, hash::name_key(hash.seed, parent, name))
    }

    /// What the hash over paths has for a path's key, right or wrong.
    pub(super) fn probe_path(&self, key: u64) -> Option<u32> {
        self.0.probe(SectionKind::PathHash, self.0.paths?.shape, key)
    }

    pub(super) fn hash_header(&self, kind: SectionKind) -> Option<&HashHeader> {
        HashHeader::ref_from_prefix(self.section(kind)).ok().map(|(head, _)| head)
    }

    pub(super) fn hash_slots(&self, kind: SectionKind) -> &[U32] {
        let slots = self.hash_header(kind).map_or(0, |head| head.slots.get()) as usize;
        let rest = self.section(kind).get(size_of::<HashHeader>()..).unwrap_or(&[]);
        <[U32]>::ref_from_prefix_with_elems(rest, slots).map_or(&[], |(slots, _)| slots)
    }
}

impl Inner {
    fn section(&self, kind: SectionKind) -> &[u8] {
        (*self.bytes).as_ref().get(self.sections[position(kind)].clone()).unwrap_or(&[])
    }

    fn rows<T: FromBytes + Immutable + KnownLayout + Unaligned>(&self, kind: SectionKind) -> &[T] {
        <[T]>::ref_from_bytes(self.section(kind)).unwrap_or(&[])
    }

    fn read_hash(&self, kind: SectionKind) -> Result<Option<HashPlace>, IndexError> {
        let section = self.section(kind);
        if section.is_empty() {
            return Ok(None);
        }
        let at = self.sections[position(kind)].start as u64;
        let (head, rest) =
            HashHeader::ref_from_prefix(section).map_err(|_| corrupt("hash", at, "shorter than its header"))?;
        let shape = Shape { slots: head.slots.get(), buckets: head.buckets.get() };
        let want = u64::from(shape.slots) * 4 + u64::from(shape.buckets) * 2;
        if want != rest.len() as u64 || shape.buckets == 0 || head.keys > head.slots || head.reserved.get() != 0 {
            return Err(corrupt("hash", at, "counts and length disagree").into());
        }
        Ok(Some(HashPlace { seed: head.seed.get(), shape, min_entries: head.min_entries.get() }))
    }

    /// What a hash has in the key's slot.
    fn probe(&self, kind: SectionKind, shape: Shape, key: u64) -> Option<u32> {
        let rest = self.section(kind).get(size_of::<HashHeader>()..)?;
        let (slots, pilots) = rest.split_at_checked(shape.slots as usize * 4)?;
        let pilot = <[U16]>::ref_from_bytes(pilots).ok()?.get(shape.bucket(key) as usize)?.get();
        let found = <[U32]>::ref_from_bytes(slots).ok()?.get(shape.slot(key, pilot) as usize)?.get();
        (found != HashHeader::EMPTY).then_some(found)
    }
}

fn corrupt(what: &'static str, at: u64, why: &'static str) -> FormatError {
    FormatError::Corrupt { what, at, why }
}

fn position(kind: SectionKind) -> usize {
    // Tags 1 to 8, then 16 to 21.
    let tag = kind as usize;
    if kind.is_tree() { tag - 1 } else { tag - 8 }
}

fn read_header(all: &[u8]) -> Result<Header, FormatError> {
    const WHAT: &str = "index header";
    if all.get(..8) != Some(&MAGIC) {
        return Err(corrupt(WHAT, 0, "not an index"));
    }
    // The version is readable without knowing the rest.
    let version = all.get(8..12).and_then(|v| U32::read_from_bytes(v).ok()).ok_or(corrupt(WHAT, 8, "cut short"))?;
    if version.get() != VERSION {
        return Err(FormatError::Unsupported { what: "index version", value: version.get().into() });
    }
    let (header, _) = Header::read_from_prefix(all).map_err(|_| corrupt(WHAT, 12, "cut short"))?;
    if header.incompat.get() != 0 {
        return Err(FormatError::Unsupported { what: "index features", value: header.incompat.get().into() });
    }
    if header.header_len.get() as usize != HEADER_LEN || header.section_count.get() as usize != SECTIONS {
        return Err(corrupt(WHAT, 12, "wrong header length or number of sections"));
    }
    if header.reserved0.get() != 0 || header.reserved != [0; 60] {
        return Err(corrupt(WHAT, 44, "reserved bytes are not zero"));
    }
    let (inodes, dirents) = (header.inode_count.get(), header.dirent_count.get());
    if inodes == 0 || inodes > dirents || dirents > MAX_DIRENTS {
        return Err(corrupt(WHAT, 36, "impossible numbers of inodes and dirents"));
    }
    Ok(header)
}

/// Reads the section table: every section once, in order, each right behind the one before, of a length that the
/// counts allow.
fn read_sections(rows: &[Section], header: &Header) -> Result<[Range<usize>; SECTIONS], FormatError> {
    let mut sections = [const { 0..0 }; SECTIONS];
    let mut expected = (HEADER_LEN + SECTIONS * ROW_LEN) as u64;
    for (n, (row, kind)) in rows.iter().zip(SectionKind::ALL).enumerate() {
        let at = (HEADER_LEN + n * ROW_LEN) as u64;
        let bad = |why| Err(corrupt("section table", at, why));
        if row.kind.get() != kind as u32 {
            return bad("a section is missing or out of order");
        }
        if row.reserved.get() != 0 || row.reserved1.get() != 0 {
            return bad("reserved bytes are not zero");
        }
        if row.offset.get() != expected {
            return bad("a section does not follow the one before");
        }
        let len = row.len.get();
        let Some(end) = expected.checked_add(len).filter(|&end| end <= header.total_len.get()) else {
            return bad("a section reaches past the end");
        };
        if !length_fits(kind, len, header) {
            return bad("a section's length does not fit what it holds");
        }
        sections[n] = usize::try_from(expected).unwrap_or(usize::MAX)..usize::try_from(end).unwrap_or(usize::MAX);
        expected = end.next_multiple_of(8);
    }
    if expected != header.total_len.get() {
        return Err(corrupt("section table", HEADER_LEN as u64, "the file goes on behind the last section"));
    }
    Ok(sections)
}

fn length_fits(kind: SectionKind, len: u64, header: &Header) -> bool {
    let (inodes, dirents) = (u64::from(header.inode_count.get()), u64::from(header.dirent_count.get()));
    match kind {
        SectionKind::Inodes => len == inodes * size_of::<Inode>() as u64,
        SectionKind::Owners => len > 0 && len.is_multiple_of(size_of::<Owner>() as u64),
        SectionKind::Dirents => len == (dirents + 1) * size_of::<Dirent>() as u64,
        SectionKind::Names | SectionKind::Links | SectionKind::XattrData => len <= u32::MAX.into(),
        SectionKind::XattrSets => len >= 8 && len.is_multiple_of(4),
        SectionKind::XattrEntries => len.is_multiple_of(size_of::<XattrEntry>() as u64),
        SectionKind::Objects => len.is_multiple_of(size_of::<Object>() as u64),
        SectionKind::Places => len == inodes * size_of::<Place>() as u64,
        SectionKind::Extents => len.is_multiple_of(size_of::<Extent>() as u64),
        SectionKind::Parents => len == dirents * 4,
        SectionKind::NameHash | SectionKind::PathHash => len <= u32::MAX.into(),
    }
}
