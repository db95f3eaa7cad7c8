//! The chunk table: where in a store chunks lie, sorted by digest. Normative text: `doc/format/store.md`.
//!
//! A header, the names of the objects that it covers, and rows. Only deduplication reads it: a damaged table may
//! lose duplicates, it must never give a wrong place. So every row has a checksum, and a reader also checks the place
//! against the object's own map. Opening is O(objects); a lookup touches one or two pages, because digests are spread
//! evenly and their position can be interpolated.

use crate::{Digest, FormatError};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first 8 bytes of a chunk table.
pub const MAGIC: [u8; 8] = *b"LRCHUNKS";
/// The version that this code reads and writes.
pub const VERSION: u32 = 1;

/// The header, at byte 0; the objects' names follow at once, then the rows.
#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: U32,
    /// Bits that a reader must know.
    pub incompat: U32,
    /// Bytes of the whole table.
    pub total_len: U64,
    /// Rows.
    pub row_count: U64,
    /// Objects.
    pub object_count: U32,
    /// CRC-32C over the objects' names.
    pub objects_crc: U32,
    /// Reserved, zero.
    pub reserved: [u8; 20],
    /// CRC-32C over the header before this field.
    pub crc: U32,
}
const _: () = assert!(size_of::<Header>() == 64);

impl Header {
    /// A complete header for a table of these objects and so many rows.
    pub fn new(objects: &[Digest], rows: u64) -> Header {
        let total = size_of::<Header>() as u64 + size_of_val(objects) as u64 + rows * size_of::<Row>() as u64;
        let mut header = Header {
            magic: MAGIC,
            version: VERSION.into(),
            incompat: 0.into(),
            total_len: total.into(),
            row_count: rows.into(),
            object_count: (objects.len() as u32).into(),
            objects_crc: crc32c::crc32c(objects.as_bytes()).into(),
            reserved: [0; 20],
            crc: 0.into(),
        };
        header.crc = header.checksum().into();
        header
    }

    fn checksum(&self) -> u32 {
        let bytes = self.as_bytes();
        crc32c::crc32c(&bytes[..bytes.len() - size_of::<U32>()])
    }
}

/// One chunk. Rows are sorted by digest, bytewise, each digest once.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned, PartialEq, Eq)]
#[repr(C)]
pub struct Row {
    /// BLAKE3 of the chunk's bytes.
    pub digest: Digest,
    /// Which of the table's objects.
    pub object: U32,
    /// First block in its space.
    pub block: U32,
    /// CRC-32C over the row before this field.
    pub crc: U32,
}
const _: () = assert!(size_of::<Row>() == 44);

impl Row {
    /// A complete row.
    pub fn new(digest: Digest, object: u32, block: u32) -> Row {
        let mut row = Row { digest, object: object.into(), block: block.into(), crc: 0.into() };
        row.crc = row.checksum().into();
        row
    }

    /// Whether the row is as it was written.
    pub fn is_intact(&self) -> bool {
        self.crc.get() == self.checksum()
    }

    fn checksum(&self) -> u32 {
        let bytes = self.as_bytes();
        crc32c::crc32c(&bytes[..bytes.len() - size_of::<U32>()])
    }
}

/// A table's bytes, seen as what they are.
#[derive(Debug, Clone, Copy)]
pub struct View<'a> {
    objects: &'a [Digest],
    rows: &'a [Row],
}

impl<'a> View<'a> {
    /// Checks header and object names. Rows are checked one by one as they are found.
    ///
    /// # Errors
    /// The first thing that is wrong, and where.
    pub fn open(bytes: &'a [u8]) -> Result<View<'a>, FormatError> {
        let corrupt = |at, why| FormatError::Corrupt { what: "chunk table", at, why };
        let (header, _) = Header::ref_from_prefix(bytes).map_err(|_| corrupt(0, "shorter than its header"))?;
        if header.magic != MAGIC {
            return Err(corrupt(0, "not a chunk table"));
        }
        if header.version.get() != VERSION {
            return Err(FormatError::Unsupported { what: "chunk table version", value: header.version.get().into() });
        }
        if header.crc.get() != header.checksum() {
            return Err(corrupt(60, "header checksum"));
        }
        if header.incompat.get() != 0 {
            return Err(FormatError::Unsupported { what: "chunk table feature", value: header.incompat.get().into() });
        }
        if header.reserved != [0; 20] {
            return Err(corrupt(40, "reserved bytes are not zero"));
        }
        if header.total_len.get() != bytes.len() as u64 {
            return Err(corrupt(16, "length is not the file's"));
        }
        let view = View::split(bytes, header).ok_or(corrupt(24, "length does not fit the counts"))?;
        if crc32c::crc32c(view.objects.as_bytes()) != header.objects_crc.get() {
            return Err(corrupt(36, "checksum of the objects' names"));
        }
        Ok(view)
    }

    /// The view of bytes that [`View::open`] has accepted before. `None` only when they were not.
    pub fn reopen(bytes: &'a [u8]) -> Option<View<'a>> {
        let (header, _) = Header::ref_from_prefix(bytes).ok()?;
        View::split(bytes, header)
    }

    fn split(bytes: &'a [u8], header: &'a Header) -> Option<View<'a>> {
        let body = bytes.get(size_of::<Header>()..)?;
        let (objects, rest) = <[Digest]>::ref_from_prefix_with_elems(body, header.object_count.get() as usize).ok()?;
        let count = usize::try_from(header.row_count.get()).ok()?;
        let rows = <[Row]>::ref_from_bytes_with_elems(rest, count).ok()?;
        Some(View { objects, rows })
    }

    /// The objects that the rows refer to.
    pub fn objects(&self) -> &'a [Digest] {
        self.objects
    }

    /// All rows, unchecked.
    pub fn rows(&self) -> &'a [Row] {
        self.rows
    }

    /// The row of a digest, if there is one and it is intact.
    pub fn find(&self, digest: &Digest) -> Option<&'a Row> {
        let at = search(self.rows.len(), digest, |i| &self.rows[i].digest)?;
        Some(&self.rows[at]).filter(|row| row.is_intact())
    }
}

/// Finds `digest` among `len` sorted, evenly spread ones. Ends for any input, also for unsorted ones.
fn search<'d>(len: usize, digest: &Digest, at: impl Fn(usize) -> &'d Digest) -> Option<usize> {
    // Beyond this many guesses the digests are not evenly spread, and halving is the safe way.
    const GUESSES: u32 = 12;
    let prefix = |d: &Digest| u64::from_be_bytes(d.0[..8].try_into().expect("a digest has 32 bytes"));
    let want = prefix(digest);
    let (mut low, mut high) = (0, len);
    let (mut key_low, mut key_high) = (0u64, u64::MAX);
    for step in 0.. {
        if low >= high {
            break;
        }
        let span = high - low;
        let guess = if step < GUESSES && key_low <= want && want <= key_high {
            let part = u128::from(want - key_low) * span as u128 / (u128::from(key_high - key_low) + 1);
            low + part as usize
        } else {
            low + span / 2
        };
        let have = at(guess);
        match have.cmp(digest) {
            std::cmp::Ordering::Equal => return Some(guess),
            std::cmp::Ordering::Less => {
                low = guess + 1;
                key_low = prefix(have);
            }
            std::cmp::Ordering::Greater => {
                high = guess;
                key_high = prefix(have);
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::HashSet;

    fn digests(n: u32) -> Vec<Digest> {
        let mut all: Vec<Digest> = (0..n).map(|i| Digest::of(&i.to_le_bytes())).collect();
        all.sort();
        all
    }

    fn table(objects: &[Digest], rows: &[Row]) -> Vec<u8> {
        let mut bytes = Header::new(objects, rows.len() as u64).as_bytes().to_vec();
        bytes.extend_from_slice(objects.as_bytes());
        bytes.extend_from_slice(rows.as_bytes());
        bytes
    }

    #[test]
    fn rows_are_found_and_absent_ones_are_not() {
        for n in [0u32, 1, 2, 3, 100, 5000] {
            let all = digests(n);
            let rows: Vec<Row> = all.iter().zip(0..).map(|(d, i)| Row::new(*d, 0, i)).collect();
            let bytes = table(&[Digest::of(b"object")], &rows);
            let view = View::open(&bytes).unwrap();
            for (d, i) in all.iter().zip(0..) {
                assert_eq!(view.find(d).unwrap().block.get(), i);
            }
            for i in 0..1000u32 {
                assert_eq!(view.find(&Digest::of(&(i + 1_000_000).to_le_bytes())), None);
            }
            assert_eq!(view.find(&Digest([0; 32])), None);
            assert_eq!(view.find(&Digest([255; 32])), None);
        }
    }

    #[test]
    fn a_lookup_touches_few_pages() {
        let all = digests(1_000_000);
        let (mut pages, mut lookups) = (0, 0);
        for (i, d) in all.iter().enumerate().step_by(997) {
            let touched = RefCell::new(HashSet::new());
            let at = |i: usize| {
                touched.borrow_mut().insert(i * size_of::<Row>() / 4096);
                &all[i]
            };
            assert_eq!(search(all.len(), d, at), Some(i));
            pages += touched.borrow().len();
            lookups += 1;
        }
        let mean = pages as f64 / f64::from(lookups);
        assert!(mean < 2.6, "{mean} pages a lookup in a million rows");
    }

    #[test]
    fn any_order_and_any_spread_ends() {
        let mut all = digests(1000);
        all.reverse();
        let probes = std::cell::Cell::new(0);
        for d in &all {
            let _ = search(all.len(), d, |i| {
                probes.set(probes.get() + 1);
                &all[i]
            });
        }
        assert!(probes.get() < 1000 * 40);
        let close: Vec<Digest> = (0..1000u32)
            .map(|i| {
                let mut d = [7; 32];
                d[28..].copy_from_slice(&i.to_be_bytes());
                Digest(d)
            })
            .collect();
        for (i, d) in close.iter().enumerate() {
            assert_eq!(search(close.len(), d, |i| &close[i]), Some(i));
        }
    }

    #[test]
    fn every_flipped_bit_is_an_error_or_a_miss() {
        let all = digests(20);
        let rows: Vec<Row> = all.iter().zip(0..).map(|(d, i)| Row::new(*d, i % 2, i)).collect();
        let objects = [Digest::of(b"a"), Digest::of(b"b")];
        let good = table(&objects, &rows);
        for bit in 0..good.len() * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let Ok(view) = View::open(&bytes) else { continue };
            assert_eq!(view.objects(), objects);
            for (d, row) in all.iter().zip(&rows) {
                if let Some(found) = view.find(d) {
                    assert_eq!(found, row, "bit {bit}");
                }
            }
        }
        for len in 0..good.len() {
            assert!(View::open(&good[..len]).is_err(), "{len}");
        }
    }
}
