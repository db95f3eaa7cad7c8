use super::*;
use crate::digest::FrameHasher;

/// The map of the specification's example: two frames with a gap between them.
fn example() -> Vec<u8> {
    let lens = [5u32, 65536, 4097];
    let digest = |lens: &[u32], fill: u8| {
        let mut h = FrameHasher::default();
        for len in lens {
            h.chunk(&Digest::of(&vec![fill; *len as usize]), *len);
        }
        h.finish()
    };
    let frames = [
        Frame {
            offset: 0.into(),
            stored_len: 300.into(),
            codec: (Codec::Zstd as u32).into(),
            space_block: 0.into(),
            blocks: 17.into(),
            first_chunk: 0.into(),
            chunks: 2.into(),
            digest: digest(&lens[..2], b'a'),
        },
        Frame {
            offset: 300.into(),
            stored_len: 8192.into(),
            codec: (Codec::Raw as u32).into(),
            space_block: 256.into(),
            blocks: 2.into(),
            first_chunk: 2.into(),
            chunks: 1.into(),
            digest: digest(&lens[2..], b'b'),
        },
    ];
    build(8492, 258, &frames, &lens)
}

fn build(object_len: u64, space_blocks: u64, frames: &[Frame], lens: &[u32]) -> Vec<u8> {
    let mut out = Header::new(object_len, space_blocks, frames.len() as u32, lens.len() as u32).as_bytes().to_vec();
    out.extend_from_slice(frames.as_bytes());
    for len in lens {
        out.extend_from_slice(&len.to_le_bytes());
    }
    out
}

/// Reads the `OFFSET  xx xx …` lines of a fenced block that starts with ```` ```hexdump ````.
fn hexdump(text: &str) -> Vec<u8> {
    let body = text.split("```hexdump\n").nth(1).expect("a hexdump block").split("```").next().expect("its end");
    let mut out = Vec::new();
    for line in body.lines() {
        let mut words = line.split('|').next().expect("always one part").split_whitespace();
        let offset = usize::from_str_radix(words.next().expect("an offset"), 16).expect("an offset in hex");
        assert_eq!(offset, out.len(), "{line}");
        out.extend(words.map(|w| u8::from_str_radix(w, 16).expect("a byte in hex")));
    }
    out
}

#[test]
fn the_specifications_example_is_what_the_code_writes() {
    let doc = include_str!("../../../../doc/format/object-map.md");
    assert_eq!(hexdump(doc), example(), "write it anew with the ignored test `print_example`");
}

#[test]
#[ignore = "prints the example for the specification"]
fn print_example() {
    for (i, row) in example().chunks(16).enumerate() {
        let hex: Vec<String> = row.iter().map(|b| format!("{b:02x}")).collect();
        let text: String = row.iter().map(|b| if b.is_ascii_graphic() { char::from(*b) } else { '.' }).collect();
        println!("{:04x}  {:<47}  |{text}|", i * 16, hex.join(" "));
    }
    println!("id {}", Digest::of(&example()));
}

#[test]
fn blocks_lead_to_frames_and_chunks() {
    let bytes = example();
    let view = View::open(&bytes).unwrap();
    assert_eq!(view.frames().len(), 2);
    let table: [(u32, Option<u32>, Option<u32>); 9] = [
        (0, Some(0), Some(5)),
        (1, Some(0), Some(65536)),
        (2, Some(0), None),
        (16, Some(0), None),
        (17, None, None),
        (255, None, None),
        (256, Some(1), Some(4097)),
        (257, Some(1), None),
        (258, None, None),
    ];
    for (block, frame, chunk) in table {
        assert_eq!(view.frame_of_block(block), frame, "{block}");
        assert_eq!(view.chunk_at(block), chunk, "{block}");
    }
    assert_eq!(view.frame_of_block(u32::MAX), None);
    let empty = build(0, 0, &[], &[]);
    assert_eq!(View::open(&empty).unwrap().frame_of_block(0), None);
}

#[test]
fn the_last_block_of_the_largest_space_can_be_used() {
    let frame = Frame {
        offset: 0.into(),
        stored_len: 4096.into(),
        codec: 0.into(),
        space_block: u32::MAX.into(),
        blocks: 1.into(),
        first_chunk: 0.into(),
        chunks: 1.into(),
        digest: Digest::default(),
    };
    let bytes = build(4096, MAX_SPACE_BLOCKS, &[frame], &[1]);
    let view = View::open(&bytes).unwrap();
    assert_eq!(view.frame_of_block(u32::MAX), Some(0));
    assert_eq!(view.chunk_at(u32::MAX), Some(1));
    assert!(View::open(&build(4096, MAX_SPACE_BLOCKS + 1, &[frame], &[1])).is_err());
    assert!(View::open(&build(4096, MAX_SPACE_BLOCKS - 1, &[frame], &[1])).is_err());
}

#[test]
fn what_the_specification_forbids_is_refused() {
    let good = example();
    let frame_at = |i: usize| size_of::<Header>() + i * size_of::<Frame>();
    let chunk_at = |i: usize| frame_at(2) + i * 4;
    let table: &[(&str, usize, u32)] = &[
        ("no blocks", frame_at(0) + 20, 0),
        ("too many blocks", frame_at(0) + 20, 257),
        ("overlap", frame_at(1) + 16, 16),
        ("beyond the space", frame_at(1) + 16, 257),
        ("beyond the object", frame_at(1), 301),
        ("offset overflows", frame_at(1) + 4, u32::MAX),
        ("raw of another length", frame_at(1) + 8, 8191),
        ("empty zstd", frame_at(0) + 8, 0),
        ("zstd larger than raw", frame_at(0) + 8, 17 * 4096 + 1),
        ("unknown codec", frame_at(0) + 12, 2),
        ("chunks out of order", frame_at(1) + 24, 1),
        ("chunks beyond the table", frame_at(1) + 28, u32::MAX),
        ("chunks left over", frame_at(1) + 28, 0),
        ("empty chunk", chunk_at(0), 0),
        ("large chunk", chunk_at(0), 65537),
        ("chunks do not fill the frame", chunk_at(1), 4096),
    ];
    for (what, at, value) in table {
        let mut bytes = good.clone();
        bytes[*at..*at + 4].copy_from_slice(&value.to_le_bytes());
        assert!(View::open(&bytes).is_err(), "{what}");
    }
    // In the header, below the checksum.
    for (what, at, value) in
        [("newer version", 8, 2u32), ("feature", 12, 1), ("reserved", 48, 1), ("frames", 40, u32::MAX)]
    {
        let mut bytes = good.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..60]);
        bytes[60..64].copy_from_slice(&crc.to_le_bytes());
        assert!(View::open(&bytes).is_err(), "{what}");
    }
    let mut newer = good.clone();
    newer[8] = 2;
    assert!(matches!(View::open(&newer), Err(FormatError::Unsupported { value: 2, .. })));
}

#[test]
fn flips_and_cuts_never_panic() {
    let good = example();
    for len in 0..good.len() {
        assert!(View::open(&good[..len]).is_err());
        let _ = View::reopen(&good[..len]);
    }
    for bit in 0..good.len() * 8 {
        let mut bytes = good.clone();
        bytes[bit / 8] ^= 1 << (bit % 8);
        // Digests and some lengths can change and still be a map, under another name.
        for view in View::open(&bytes).ok().into_iter().chain(View::reopen(&bytes)) {
            for block in [0, 1, 17, 256, u32::MAX] {
                let _ = (view.frame_of_block(block), view.chunk_at(block));
            }
        }
    }
}

proptest::proptest! {
    #[test]
    fn arbitrary_bytes_never_panic(mut bytes in proptest::collection::vec(proptest::num::u8::ANY, 64..400)) {
        let _ = View::open(&bytes);
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..16].copy_from_slice(&[1, 0, 0, 0, 0, 0, 0, 0]);
        let len = bytes.len() as u64;
        bytes[16..24].copy_from_slice(&len.to_le_bytes());
        bytes[48..60].fill(0);
        let frames = (len - 64) / 64;
        bytes[40..44].copy_from_slice(&(frames as u32).to_le_bytes());
        bytes[44..48].copy_from_slice(&(((len - 64 - frames * 64) / 4) as u32).to_le_bytes());
        let crc = crc32c::crc32c(&bytes[..60]);
        bytes[60..64].copy_from_slice(&crc.to_le_bytes());
        let _ = View::open(&bytes);
        if let Some(view) = View::reopen(&bytes) {
            let _ = (view.frame_of_block(7), view.chunk_at(7));
        }
    }
}
