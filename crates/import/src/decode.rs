//! Compressed streams: gzip, zstd or neither, told apart by their first bytes.
//!
//! A gzip stream may have several members and a zstd stream several frames, skippable ones included; their
//! contents are joined. Behind the last one only zeros may follow (padding of tapes and pipes): anything else is
//! an error, since other tools would not agree on what it means. An empty stream is an empty archive.
//!
//! A decoder holds 32 KiB (gzip) or 8 MiB (zstd) of window. zstd frames may ask for up to 128 MiB; then only one
//! decoder of an import at a time has such a window.

use crate::blob::BlobReader;
use crate::chunker::lock;
use flate2::{Decompress, FlushDecompress, Status};
use std::io;
use std::sync::{Mutex, MutexGuard};
use zstd::stream::raw::{DParameter, Decoder as ZstdDecoder, InBuffer, Operation, OutBuffer};

/// The largest window of a zstd frame that is decoded, as a power of 2.
const MAX_WINDOW_LOG: u32 = 27;
/// Windows up to this size every decoder may have.
const SMALL_WINDOW: u64 = 8 << 20;

/// Why a stream could not be decoded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DecodeError {
    /// The bytes could not be read.
    #[error("read: {0}")]
    Read(#[from] io::Error),
    #[error("damaged {format} stream at byte {at}: {why}")]
    Corrupt { format: &'static str, at: u64, why: String },
    #[error("the {format} stream ends too early, at byte {at}")]
    Truncated { format: &'static str, at: u64 },
    #[error("bytes that do not belong to it follow the {format} stream, from byte {at}")]
    Garbage { format: &'static str, at: u64 },
    #[error(
        "a zstd frame at byte {at} needs a window of {window} bytes, the limit is {limit}; compress it again without --long"
    )]
    Window { at: u64, window: u64, limit: u64 },
}

enum Codec<'a> {
    Plain,
    Gzip(Option<Decompress>),
    Zstd { decoder: ZstdDecoder<'static>, in_frame: bool, wide: Option<MutexGuard<'a, ()>> },
    End,
}

/// See the module.
pub(crate) struct Decoder<'a> {
    reader: BlobReader<'a>,
    codec: Codec<'a>,
    wide_window: &'a Mutex<()>,
    /// What went wrong at the start.
    early: Option<DecodeError>,
    format: &'static str,
}

impl<'a> Decoder<'a> {
    /// Looks at the first bytes of `reader` and sets out to decode it. `wide_window` is shared by the import's
    /// decoders.
    pub(crate) fn new(mut reader: BlobReader<'a>, wide_window: &'a Mutex<()>) -> Self {
        let (codec, format, early) = match Self::detect(&mut reader) {
            Ok((codec, format)) => (codec, format, None),
            Err(e) => (Codec::End, "tar", Some(e)),
        };
        Decoder { reader, codec, format, wide_window, early }
    }

    fn detect(reader: &mut BlobReader<'a>) -> Result<(Codec<'a>, &'static str), DecodeError> {
        let head = reader.peek(Self::HEAD)?;
        if is_gzip(head) {
            return Ok((Codec::Gzip(None), "gzip"));
        }
        if is_zstd(head) {
            let mut decoder = ZstdDecoder::new()?;
            decoder.set_parameter(DParameter::WindowLogMax(MAX_WINDOW_LOG))?;
            return Ok((Codec::Zstd { decoder, in_frame: false, wide: None }, "zstd"));
        }
        Ok((Codec::Plain, "tar"))
    }

    /// Bytes that tell the formats apart.
    pub(crate) const HEAD: usize = 6;

    /// Whether a stream that begins so is compressed.
    pub(crate) fn is_compressed(head: &[u8]) -> bool {
        is_gzip(head) || is_zstd(head)
    }

    /// The blob, to check it.
    pub(crate) fn into_reader(self) -> BlobReader<'a> {
        self.reader
    }

    /// Bytes of the blob taken in so far.
    pub(crate) fn position(&self) -> u64 {
        self.reader.position()
    }

    /// Fills `out` as far as the stream goes: less than all of it at the end only.
    pub(crate) fn fill(&mut self, out: &mut [u8]) -> Result<usize, DecodeError> {
        if let Some(e) = self.early.take() {
            return Err(e);
        }
        let mut filled = 0;
        while filled < out.len() {
            let n = match &mut self.codec {
                Codec::End => break,
                Codec::Plain => {
                    let n = self.reader.read_into(&mut out[filled..])?;
                    if n == 0 {
                        self.codec = Codec::End;
                    }
                    n
                }
                Codec::Gzip(_) => self.gzip(&mut out[filled..])?,
                Codec::Zstd { .. } => self.zstd(&mut out[filled..])?,
            };
            filled += n;
        }
        Ok(filled)
    }

    /// Between members or frames: whether another one follows. Zeros up to the end are padding.
    fn more(&mut self, starts: fn(&[u8]) -> bool) -> Result<bool, DecodeError> {
        if starts(self.reader.peek(Self::HEAD)?) {
            return Ok(true);
        }
        loop {
            let at = self.reader.position();
            let bytes = self.reader.available()?;
            if bytes.is_empty() {
                return Ok(false);
            }
            if let Some(p) = bytes.iter().position(|&b| b != 0) {
                return Err(DecodeError::Garbage { format: self.format, at: at + p as u64 });
            }
            let n = bytes.len();
            self.reader.consume(n);
        }
    }

    fn gzip(&mut self, out: &mut [u8]) -> Result<usize, DecodeError> {
        if matches!(self.codec, Codec::Gzip(None)) {
            self.codec = if self.more(is_gzip)? { Codec::Gzip(Some(Decompress::new_gzip(15))) } else { Codec::End };
        }
        let Codec::Gzip(Some(inflate)) = &mut self.codec else { return Ok(0) };
        let at = self.reader.position();
        // The input may be used up while output still waits in the decoder.
        let input = self.reader.available()?;
        let ended = input.is_empty();
        let before = (inflate.total_in(), inflate.total_out());
        let status = inflate.decompress(input, out, FlushDecompress::None);
        let (took, gave) = (inflate.total_in() - before.0, inflate.total_out() - before.1);
        let fail = |why: String| DecodeError::Corrupt { format: "gzip", at: at + took, why };
        match status {
            Ok(Status::StreamEnd) => self.codec = Codec::Gzip(None),
            Ok(_) if took == 0 && gave == 0 && ended => return Err(DecodeError::Truncated { format: "gzip", at }),
            Ok(_) if took == 0 && gave == 0 => return Err(fail("no progress".into())),
            Ok(_) => {}
            Err(_) if ended => return Err(DecodeError::Truncated { format: "gzip", at }),
            Err(e) => return Err(fail(e.message().unwrap_or("not a deflate stream").into())),
        }
        self.reader.consume(took as usize);
        Ok(gave as usize)
    }

    fn zstd(&mut self, out: &mut [u8]) -> Result<usize, DecodeError> {
        let between = matches!(self.codec, Codec::Zstd { in_frame: false, .. });
        if between && !self.more(is_zstd)? {
            self.codec = Codec::End;
            return Ok(0);
        }
        let at = self.reader.position();
        let window = if between { window_size(self.reader.peek(18)?) } else { 0 };
        let Codec::Zstd { decoder, in_frame, wide } = &mut self.codec else { return Ok(0) };
        if between {
            if window > 1 << MAX_WINDOW_LOG {
                return Err(DecodeError::Window { at, window, limit: 1 << MAX_WINDOW_LOG });
            }
            if window > SMALL_WINDOW && wide.is_none() {
                *wide = Some(lock(self.wide_window));
            }
            *in_frame = true;
        }
        let input = self.reader.available()?;
        let ended = input.is_empty();
        let mut input = InBuffer::around(input);
        let mut output = OutBuffer::around(out);
        let hint = decoder.run(&mut input, &mut output);
        let (took, gave) = (input.pos(), output.pos());
        let fail = |why: String| DecodeError::Corrupt { format: "zstd", at: at + took as u64, why };
        match hint {
            Ok(0) => *in_frame = false,
            Ok(_) if took == 0 && gave == 0 && ended => return Err(DecodeError::Truncated { format: "zstd", at }),
            Ok(_) if took == 0 && gave == 0 => return Err(fail("no progress".into())),
            Ok(_) => {}
            Err(e) => return Err(fail(e.to_string())),
        }
        self.reader.consume(took);
        Ok(gave)
    }
}

fn is_gzip(head: &[u8]) -> bool {
    head.starts_with(&[0x1f, 0x8b, 8])
}

fn is_zstd(head: &[u8]) -> bool {
    head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd])
        || (head.len() >= 4 && head[0] & 0xf0 == 0x50 && head[1..4] == [0x2a, 0x4d, 0x18])
}

/// The window that a frame's header asks for (RFC 8878, 3.1.1.1); 0 for anything else.
fn window_size(head: &[u8]) -> u64 {
    let Some(&descriptor) = head.get(4).filter(|_| head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd])) else { return 0 };
    let single = descriptor & 0x20 != 0;
    if !single {
        let Some(&b) = head.get(5) else { return 0 };
        let base = 1u64 << (10 + (b >> 3));
        return base + (base / 8) * u64::from(b & 7);
    }
    let at = 5 + [0, 1, 2, 4][usize::from(descriptor & 3)];
    let len = [1, 2, 4, 8][usize::from(descriptor >> 6)];
    let Some(field) = head.get(at..at + len) else { return 0 };
    let value = field.iter().rev().fold(0, |n, &b| n << 8 | u64::from(b));
    if len == 2 { value + 256 } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::blob::Promise;
    use std::io::{Read, Write};

    /// Gives a few bytes at a time.
    struct Dribble<'a>(&'a [u8], usize);

    impl Read for Dribble<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            let n = self.1.min(out.len()).min(self.0.len());
            out[..n].copy_from_slice(&self.0[..n]);
            self.0 = &self.0[n..];
            Ok(n)
        }
    }

    fn decode(bytes: &[u8], step: usize) -> Result<Vec<u8>, DecodeError> {
        let promise = Promise { digest: None, size: None };
        let wide = Mutex::new(());
        let reader = BlobReader::new(Box::new(Dribble(bytes, step)), &promise, &|_| {});
        let mut d = Decoder::new(reader, &wide);
        let mut out = Vec::new();
        let mut buf = [0; 1000];
        loop {
            let n = d.fill(&mut buf)?;
            out.extend_from_slice(&buf[..n]);
            if n < buf.len() {
                return Ok(out);
            }
        }
    }

    fn gz(bytes: &[u8]) -> Vec<u8> {
        let mut e =
            flate2::GzBuilder::new().filename("n").comment("c").extra(*b"xx").write(Vec::new(), Default::default());
        e.write_all(bytes).unwrap();
        e.finish().unwrap()
    }

    fn skippable(n: u8, bytes: &[u8]) -> Vec<u8> {
        [&[0x50 + n, 0x2a, 0x4d, 0x18][..], &(bytes.len() as u32).to_le_bytes(), bytes].concat()
    }

    #[test]
    fn members_and_frames_are_joined_whatever_the_steps() {
        let text: Vec<u8> = (0..20_000u32).flat_map(|i| (i * i).to_le_bytes()).collect();
        let (a, b) = text.split_at(7_001);
        let zst = |b: &[u8]| zstd::encode_all(b, 3).unwrap();
        let streams = [
            text.clone(),
            [gz(a), gz(b""), gz(b), gz(b"")].concat(),
            [gz(&text), vec![0; 700]].concat(),
            [skippable(3, b"toc"), zst(a), skippable(0, b""), zst(b""), zst(b), skippable(15, &[7; 5000])].concat(),
            [zst(&text), vec![0; 3]].concat(),
        ];
        for (i, s) in streams.iter().enumerate() {
            for step in [1, 7, 1 << 20] {
                assert!(decode(s, step).unwrap() == text, "stream {i}, step {step}");
            }
        }
        assert_eq!(decode(b"", 1).unwrap(), b"");
    }

    #[test]
    fn damage_is_named() {
        let text = vec![b'x'; 100_000];
        for (name, whole) in [("gzip", gz(&text)), ("zstd", zstd::encode_all(&text[..], 3).unwrap())] {
            let cut = decode(&whole[..whole.len() - 5], 64).unwrap_err();
            assert!(matches!(cut, DecodeError::Truncated { format, .. } if format == name), "{cut}");
            let garbage = decode(&[&whole[..], b"\0\0junk"].concat(), 64).unwrap_err();
            let at = whole.len() as u64 + 2;
            assert!(matches!(garbage, DecodeError::Garbage { at: a, .. } if a == at), "{garbage}");
            let mut bad = whole.clone();
            let middle = bad.len() - 10;
            bad[middle] ^= 0x55;
            let bad = decode(&bad, 64).unwrap_err();
            assert!(matches!(bad, DecodeError::Corrupt { .. } | DecodeError::Truncated { .. }), "{name}: {bad}");
        }
    }

    #[test]
    fn wide_windows_are_refused() {
        let head = [0x28, 0xb5, 0x2f, 0xfd, 0, (28 - 10) << 3, 1, 0, 0];
        assert!(matches!(decode(&head, 64).unwrap_err(), DecodeError::Window { window, .. } if window == 1 << 28));
        let text = vec![b'x'; 3 << 20];
        let mut e = zstd::stream::Encoder::new(Vec::new(), 3).unwrap();
        e.window_log(25).unwrap();
        e.write_all(&text).unwrap();
        assert!(decode(&e.finish().unwrap(), 1 << 16).unwrap() == text);
    }
}
