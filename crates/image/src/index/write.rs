//! Writing the sections of an index in order, with their digests, and the header at last.

use super::IndexError;
use format::Digest;
use format::index::{Header, Section, SectionKind, SectionSum};
use std::io::{Seek, SeekFrom, Write};
use zerocopy::{Immutable, IntoBytes};

const BUFFER: usize = 128 << 10;
const HEAD: usize = size_of::<Header>() + SectionKind::ALL.len() * size_of::<Section>();

/// Where sections go. Each is written in pieces and then ended; the next one begins at a multiple of 8.
pub(super) struct SectionWriter<'a, W> {
    out: &'a mut W,
    buffer: Vec<u8>,
    hasher: blake3::Hasher,
    /// Bytes of the section that have left the buffer.
    flushed: u64,
    /// Where the section began.
    start: u64,
    done: Vec<(SectionKind, u64, u64, Digest)>,
}

impl<'a, W: Write + Seek> SectionWriter<'a, W> {
    pub(super) fn new(out: &'a mut W) -> Result<Self, IndexError> {
        out.seek(SeekFrom::Start(0))?;
        out.write_all(&[0; HEAD])?;
        let buffer = Vec::with_capacity(BUFFER + (4 << 10));
        Ok(SectionWriter { out, buffer, hasher: blake3::Hasher::new(), flushed: 0, start: HEAD as u64, done: vec![] })
    }

    pub(super) fn put<T: IntoBytes + Immutable>(&mut self, row: &T) -> Result<(), IndexError> {
        self.bytes(row.as_bytes())
    }

    pub(super) fn bytes(&mut self, bytes: &[u8]) -> Result<(), IndexError> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= BUFFER {
            self.flush()?;
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<(), IndexError> {
        self.hasher.update(&self.buffer);
        self.out.write_all(&self.buffer)?;
        self.flushed += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    /// Ends the section.
    pub(super) fn end(&mut self, kind: SectionKind) -> Result<(), IndexError> {
        self.flush()?;
        let len = std::mem::take(&mut self.flushed);
        let digest = Digest(*self.hasher.finalize().as_bytes());
        self.hasher.reset();
        self.done.push((kind, self.start, len, digest));
        let padded = len.next_multiple_of(8);
        self.out.write_all(&[0; 8][..(padded - len) as usize])?;
        self.start += padded;
        Ok(())
    }

    /// The sections that have ended.
    pub(super) fn sums(&self) -> Vec<SectionSum> {
        self.done.iter().map(|&(kind, _, len, digest)| (kind, len, digest)).collect()
    }

    /// Bytes of the file so far.
    pub(super) fn len(&self) -> u64 {
        self.start
    }

    /// Writes `header`, with its checksum, and the section table; gives the index's digest.
    pub(super) fn finish(self, mut header: Header) -> Result<Digest, IndexError> {
        let mut table = Vec::with_capacity(HEAD);
        for (kind, offset, len, digest) in self.done {
            let row = Section {
                kind: (kind as u32).into(),
                reserved: 0.into(),
                offset: offset.into(),
                len: len.into(),
                digest,
                reserved1: 0.into(),
            };
            table.extend_from_slice(row.as_bytes());
        }
        let fields = &header.as_bytes()[..size_of::<Header>() - 4];
        header.crc = crc32c::crc32c_append(crc32c::crc32c(fields), &table).into();
        let mut head = header.as_bytes().to_vec();
        head.extend_from_slice(&table);
        self.out.seek(SeekFrom::Start(0))?;
        self.out.write_all(&head)?;
        self.out.seek(SeekFrom::Start(self.start))?;
        self.out.flush()?;
        Ok(Digest::of(&head))
    }
}
