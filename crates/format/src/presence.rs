//! The presence file of a space: which frames are on disk. Normative text: `doc/format/space.md`.
//!
//! Pages of 4 KiB that stand by themselves: each says which space, which page and which generation it is, and
//! carries its own checksum. Every page has two slots, written in turn, so that a torn write costs only what it
//! would have added. A page that does not check out is *absent*: its frames count as not present.

use crate::{Digest, FormatError};
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first 8 bytes of each page.
pub const MAGIC: [u8; 8] = *b"LRPRESNC";
/// The version that this code reads and writes.
pub const VERSION: u32 = 1;
/// Bytes of a page.
pub const PAGE: usize = 4096;
/// Bytes of a page's bitmap.
const BITMAP: usize = PAGE - size_of::<Header>();
/// Words of a page's bitmap.
pub const WORDS_PER_PAGE: usize = BITMAP / 8;
/// Frames that one page describes (31 GiB of content when frames are full).
pub const FRAMES_PER_PAGE: u32 = BITMAP as u32 * 8;

/// The head of a page; the bitmap follows, frame `n` of the page being bit `n % 8` of byte `n / 8`.
#[derive(Debug, Clone, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: U32,
    /// CRC-32C over the whole page, this field taken as zero.
    pub crc: U32,
    /// Which page of the space: it begins at frame `page * FRAMES_PER_PAGE`.
    pub page: U32,
    /// Frames of the whole space.
    pub frame_count: U32,
    /// Counts the page's writes; the slot is its lowest bit.
    pub generation: U64,
    /// The object that the space unpacks.
    pub object: Digest,
}
const _: () = assert!(size_of::<Header>() == 64);
const _: () = assert!(BITMAP.is_multiple_of(8));

/// What a page must say to be believed.
#[derive(Debug, Clone, Copy)]
pub struct Place {
    /// The object that the space unpacks.
    pub object: Digest,
    /// Frames of the whole space.
    pub frame_count: u32,
    /// Which page.
    pub page: u32,
}

impl Place {
    /// Frames that this page describes.
    pub fn frames(&self) -> u32 {
        let first = u64::from(self.page) * u64::from(FRAMES_PER_PAGE);
        u64::from(self.frame_count).saturating_sub(first).min(u64::from(FRAMES_PER_PAGE)) as u32
    }
}

/// A page that checked out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page {
    /// Its generation.
    pub generation: u64,
    /// Its bitmap, frame `n` of the page being bit `n % 64` of word `n / 64`.
    pub words: Vec<u64>,
}

/// Pages that a space of `frame_count` frames has.
pub fn page_count(frame_count: u32) -> u32 {
    frame_count.div_ceil(FRAMES_PER_PAGE)
}

/// Bytes of the presence file of a space of `frame_count` frames.
pub fn file_len(frame_count: u32) -> u64 {
    u64::from(page_count(frame_count)) * 2 * PAGE as u64
}

/// Where generation `generation` of a page lies in the file.
pub fn offset(page: u32, generation: u64) -> u64 {
    (u64::from(page) * 2 + (generation & 1)) * PAGE as u64
}

/// One page's bytes. Words beyond those of the page, and missing ones, are taken as zero.
pub fn encode(place: &Place, generation: u64, words: &[u64]) -> Box<[u8; PAGE]> {
    let mut bytes = Box::new([0u8; PAGE]);
    let header = Header {
        magic: MAGIC,
        version: VERSION.into(),
        crc: 0.into(),
        page: place.page.into(),
        frame_count: place.frame_count.into(),
        generation: generation.into(),
        object: place.object,
    };
    let (head, bitmap) = bytes.split_at_mut(size_of::<Header>());
    head.copy_from_slice(header.as_bytes());
    for (i, (chunk, word)) in bitmap.chunks_exact_mut(8).zip(words).enumerate() {
        chunk.copy_from_slice(&(word & mask(place.frames(), i)).to_le_bytes());
    }
    let crc = crc32c::crc32c(&bytes[..]);
    bytes[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    bytes
}

const CRC_AT: usize = std::mem::offset_of!(Header, crc);

/// Which bits of word `i` stand for frames when a page has `frames` of them.
fn mask(frames: u32, i: usize) -> u64 {
    match (frames as usize).saturating_sub(i * 64) {
        0 => 0,
        n if n >= 64 => u64::MAX,
        n => (1 << n) - 1,
    }
}

/// Reads one page; it must be the one that `place` says.
pub fn decode(bytes: &[u8], place: &Place) -> Result<Page, FormatError> {
    let corrupt = |at: usize, why| FormatError::Corrupt { what: "presence page", at: at as u64, why };
    let (header, bitmap) = Header::ref_from_prefix(bytes).map_err(|_| corrupt(0, "too short"))?;
    if bytes.len() != PAGE {
        return Err(corrupt(0, "not of a page's length"));
    }
    if header.magic != MAGIC {
        return Err(corrupt(0, "no magic"));
    }
    if header.version.get() != VERSION {
        return Err(FormatError::Unsupported { what: "presence version", value: header.version.get().into() });
    }
    let crc = crc32c::crc32c(&bytes[..CRC_AT]);
    let crc = crc32c::crc32c_append(crc, &[0; 4]);
    let crc = crc32c::crc32c_append(crc, &bytes[CRC_AT + 4..]);
    if header.crc.get() != crc {
        return Err(corrupt(CRC_AT, "checksum"));
    }
    if header.page.get() != place.page {
        return Err(corrupt(std::mem::offset_of!(Header, page), "another page"));
    }
    if header.frame_count.get() != place.frame_count {
        return Err(corrupt(std::mem::offset_of!(Header, frame_count), "another number of frames"));
    }
    if header.object != place.object {
        return Err(corrupt(std::mem::offset_of!(Header, object), "another object"));
    }
    let mut words = Vec::with_capacity(WORDS_PER_PAGE);
    for (i, chunk) in bitmap.as_chunks::<8>().0.iter().enumerate() {
        let word = u64::from_le_bytes(*chunk);
        if word & !mask(place.frames(), i) != 0 {
            return Err(corrupt(size_of::<Header>() + i * 8, "a bit beyond the last frame"));
        }
        words.push(word);
    }
    Ok(Page { generation: header.generation.get(), words })
}

/// Reads both slots of a page from `file` (the whole presence file, or what there is of it): the newer of those that
/// check out, which is the page, then the other one, if it checks out too. The first is `None`: absent.
pub fn slots(file: &[u8], place: &Place) -> [Option<Page>; 2] {
    let slot = |generation: u64| {
        let at = usize::try_from(offset(place.page, generation)).ok()?;
        let page = decode(file.get(at..at.checked_add(PAGE)?)?, place).ok()?;
        // A page of the wrong parity was copied from the other slot, and might be an old one.
        (page.generation & 1 == generation).then_some(page)
    };
    match (slot(0), slot(1)) {
        (Some(a), Some(b)) if a.generation > b.generation => [Some(a), Some(b)],
        (Some(a), Some(b)) => [Some(b), Some(a)],
        (a, b) => [a.or(b), None],
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn newest(file: &[u8], place: &Place) -> Option<Page> {
        let [newest, _] = slots(file, place);
        newest
    }

    fn place(frame_count: u32, page: u32) -> Place {
        Place { object: Digest::of(b"object"), frame_count, page }
    }

    #[test]
    fn worked_example_is_what_the_document_shows() {
        let place = place(10, 0);
        let page = encode(&place, 3, &[0b10_0000_0101]);
        let doc = include_str!("../../../doc/format/space.md");
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(" ");
        let rows = page[..80].chunks(16).enumerate();
        let dump: String =
            rows.map(|(i, row)| format!("    {:04x}  {}  {}\n", i * 16, hex(&row[..8]), hex(&row[8..]))).collect();
        assert!(doc.contains(&dump), "doc/format/space.md lacks these lines:\n{dump}");
        assert!(page[80..].iter().all(|b| *b == 0));
        assert_eq!(offset(0, 3), 4096);
    }

    #[test]
    fn every_flipped_bit_makes_a_page_absent() {
        let place = place(100, 0);
        let good = encode(&place, 7, &[u64::MAX, 5]);
        assert_eq!(decode(&good[..], &place).unwrap().words[..2], [u64::MAX, 5]);
        for bit in 0..PAGE * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&bad[..], &place).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn pages_of_other_places_are_refused() {
        let mine = place(FRAMES_PER_PAGE + 10, 1);
        let page = encode(&mine, 2, &[3]);
        assert!(decode(&page[..], &mine).is_ok());
        assert!(decode(&page[..], &Place { page: 0, ..mine }).is_err());
        assert!(decode(&page[..], &Place { frame_count: FRAMES_PER_PAGE + 11, ..mine }).is_err());
        assert!(decode(&page[..], &Place { object: Digest::of(b"other"), ..mine }).is_err());
        assert!(decode(&page[..PAGE - 1], &mine).is_err());
        assert!(decode(&[], &mine).is_err());
    }

    #[test]
    fn a_page_in_the_other_slot_is_refused() {
        let place = place(10, 0);
        let mut file = vec![0u8; file_len(10) as usize];
        file[..PAGE].copy_from_slice(&encode(&place, 5, &[1])[..]);
        assert_eq!(newest(&file, &place), None);
        file[PAGE..].copy_from_slice(&encode(&place, 5, &[1])[..]);
        assert_eq!(newest(&file, &place).unwrap().generation, 5);
    }

    #[test]
    fn the_newer_good_slot_wins_and_a_torn_one_falls_back() {
        let place = place(200, 0);
        let mut file = vec![0u8; file_len(200) as usize];
        assert_eq!(newest(&file, &place), None);
        assert_eq!(newest(&[], &place), None);
        for generation in 1..6u64 {
            let at = offset(0, generation) as usize;
            file[at..at + PAGE].copy_from_slice(&encode(&place, generation, &[generation])[..]);
            assert_eq!(newest(&file, &place).unwrap().words[0], generation);
        }
        let at = offset(0, 5) as usize;
        file[at + 512..at + 1024].fill(0xee);
        assert_eq!(newest(&file, &place).unwrap().generation, 4);
        assert_eq!(newest(&file[..PAGE], &place).unwrap().generation, 4);
    }

    #[test]
    fn every_page_of_a_large_space_has_its_own_frames() {
        let frames = FRAMES_PER_PAGE * 2 + 1;
        assert_eq!(page_count(frames), 3);
        assert_eq!(page_count(0), 0);
        assert_eq!(place(frames, 0).frames(), FRAMES_PER_PAGE);
        assert_eq!(place(frames, 2).frames(), 1);
        assert_eq!(place(frames, 3).frames(), 0);
        assert_eq!(place(u32::MAX, u32::MAX).frames(), 0);
        let page = encode(&place(frames, 2), 1, &[u64::MAX; 600]);
        assert_eq!(decode(&page[..], &place(frames, 2)).unwrap().words.iter().map(|w| w.count_ones()).sum::<u32>(), 1);
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..9000), frames in any::<u32>(), page in any::<u32>()) {
            let place = Place { object: Digest::of(b"object"), frame_count: frames, page };
            let _ = decode(&bytes, &place);
            let _ = slots(&bytes, &place);
        }

        #[test]
        fn pages_round_trip(frames in 1u32..40_000, words in proptest::collection::vec(any::<u64>(), 0..520), generation in any::<u64>()) {
            let place = place(frames, 0);
            let page = decode(&encode(&place, generation, &words)[..], &place).unwrap();
            prop_assert_eq!(page.generation, generation);
            for (i, word) in page.words.iter().enumerate() {
                prop_assert_eq!(*word, words.get(i).copied().unwrap_or(0) & mask(place.frames(), i));
            }
        }
    }
}
