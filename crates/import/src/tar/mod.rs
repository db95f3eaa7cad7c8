//! A tar parser without I/O: bytes go in as they come, headers and file data come out.
//!
//! Reads V7, ustar, GNU (long names, base-256 numbers, old sparse files), PAX (all of it that a file system can
//! hold, records taken by their length) and PAX sparse files 0.0, 0.1 and 1.0. Where tools read the same bytes
//! differently this does as Go's `archive/tar`, which most of the OCI world reads layers with; `doc/semantics.md`
//! lists such places.
//!
//! Memory is bounded by [`TarLimits`]; file data passes through as slices of the input. Damaged or hostile input
//! gives a [`TarError`] with the offset, never a panic. It knows nothing of layers, whiteouts or trees, and does
//! not judge paths except that they hold no NUL.

mod header;
mod pax;
mod sparse;
#[cfg(test)]
mod tests;

use header::{BLOCK, Header};
use pax::Pax;
use sparse::Piece;

/// Limits of the parser.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TarLimits {
    /// Bytes of one PAX header or GNU long name.
    pub(crate) header_bytes: u64,
    /// Pieces of a sparse file.
    pub(crate) sparse_pieces: u64,
    /// Size of a file.
    pub(crate) file_bytes: u64,
}

/// What an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum EntryKind {
    #[default]
    File,
    HardLink,
    Symlink,
    Char,
    Block,
    Dir,
    Fifo,
    /// Not part of the tree (a volume label).
    Ignored,
}

/// One entry, with every extended header applied. Reused from entry to entry.
#[derive(Debug, Default)]
pub(crate) struct Entry {
    pub(crate) kind: EntryKind,
    /// As it is written, not normalised.
    pub(crate) path: Vec<u8>,
    /// Target of a hard or symbolic link.
    pub(crate) link: Vec<u8>,
    /// Permission bits, 07777.
    pub(crate) mode: u16,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime_sec: i64,
    pub(crate) mtime_nsec: u32,
    pub(crate) major: u32,
    pub(crate) minor: u32,
    /// Bytes of a regular file, holes included; 0 for all else.
    pub(crate) size: u64,
    /// Names and values of extended attributes, sorted, each name once.
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// PAX records with attributes in forms that are not read (ACLs as text, SELinux labels of GNU tar).
    pub(crate) foreign_attributes: u32,
    /// Where its (first) header lies.
    pub(crate) offset: u64,
}

/// What [`Parser::step`] found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Event<'a> {
    /// The input is used up.
    NeedMore,
    /// [`Parser::entry_mut`] is a new entry. For a regular file its data follows, then `EntryEnd`.
    Entry,
    /// Data of the current regular file, offsets ascending; what is left out is a hole.
    Data { offset: u64, bytes: &'a [u8] },
    /// The current entry is complete.
    EntryEnd,
    /// The archive is complete; all further input is ignored.
    End,
}

/// What is wrong with an archive.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{why} (at byte {offset} of the archive{})", entry.as_ref().map(|p| format!(", entry {p:?}")).unwrap_or_default())]
pub(crate) struct TarError {
    /// Of the header or record at fault.
    pub(crate) offset: u64,
    /// The entry's path, once it is known.
    pub(crate) entry: Option<String>,
    pub(crate) why: Why,
}

/// The kinds of faults.
#[derive(Debug, thiserror::Error, PartialEq, Eq, Clone)]
pub(crate) enum Why {
    #[error("the archive ends in the middle of {0}")]
    Truncated(&'static str),
    #[error("not a tar header (its checksum is wrong)")]
    Checksum,
    #[error("the header's {0} is not a number that it can hold")]
    Number(&'static str),
    #[error("a PAX record is malformed: {0}")]
    Pax(&'static str),
    #[error("a global PAX header sets {0:?}, which would change every entry; write the archive again without it")]
    Global(String),
    #[error("the sparse map is malformed: {0}")]
    Sparse(&'static str),
    #[error("{what} is {value}, the limit is {limit}")]
    Limit { what: &'static str, value: u64, limit: u64 },
    #[error("entries of type {0:?} are not supported")]
    Type(char),
    #[error("a name holds a NUL byte")]
    Nul,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Special {
    Pax,
    Global,
    LongName,
    LongLink,
}

#[derive(Debug)]
enum State {
    /// Between entries.
    Header,
    /// In the body of a header that describes the next entry.
    Special {
        what: Special,
        left: u64,
        pad: u16,
    },
    /// In the extension blocks of an old GNU sparse header.
    OldSparse,
    /// In the map that precedes the data of a PAX 1.0 sparse file.
    SparseMap {
        read: u64,
    },
    /// In the data of a file.
    Data,
    /// In bytes that nobody wants, then padding.
    Skip {
        left: u64,
        pad: u16,
    },
    /// In the padding behind a file's data.
    Pad {
        left: u16,
    },
    End,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Parser {
    limits: TarLimits,
    state: State,
    /// Bytes taken so far.
    pos: u64,
    /// A partly filled block.
    block: [u8; BLOCK],
    filled: usize,
    entry: Entry,
    /// Offset of the first header that belongs to the next entry.
    first_header: Option<u64>,
    body: Vec<u8>,
    pax: Pax,
    global: Pax,
    long_name: Option<Vec<u8>>,
    long_link: Option<Vec<u8>>,
    pieces: Vec<Piece>,
    piece: usize,
    /// Bytes of the current piece already delivered.
    in_piece: u64,
    /// Stored bytes of the current entry not yet taken.
    stored: u64,
    pad: u16,
    sparse_digits: sparse::MapReader,
}

impl Parser {
    pub(crate) fn new(limits: TarLimits) -> Self {
        Parser {
            limits,
            state: State::Header,
            pos: 0,
            block: [0; BLOCK],
            filled: 0,
            entry: Entry::default(),
            first_header: None,
            body: Vec::new(),
            pax: Pax::default(),
            global: Pax::default(),
            long_name: None,
            long_link: None,
            pieces: Vec::new(),
            piece: 0,
            in_piece: 0,
            stored: 0,
            pad: 0,
            sparse_digits: sparse::MapReader::default(),
        }
    }

    /// The entry that the last `Entry` event announced. Its owner may take from it.
    pub(crate) fn entry_mut(&mut self) -> &mut Entry {
        &mut self.entry
    }

    /// Bytes taken so far.
    pub(crate) fn position(&self) -> u64 {
        self.pos
    }

    /// Leaves out what is left of the current file's data, and says how many bytes that is: the next input has to
    /// begin behind them.
    pub(crate) fn skip_data(&mut self) -> u64 {
        if !matches!(self.state, State::Data) {
            return 0;
        }
        let left: u64 =
            self.pieces[self.piece.min(self.pieces.len())..].iter().map(|p| p.len).sum::<u64>() - self.in_piece;
        self.piece = self.pieces.len();
        self.in_piece = 0;
        self.pos += left;
        left
    }

    /// Takes some of `input` and says what it found. Call again until `NeedMore` or `End`.
    pub(crate) fn step<'a>(&mut self, input: &mut &'a [u8]) -> Result<Event<'a>, TarError> {
        loop {
            match &mut self.state {
                State::End => return Ok(Event::End),
                State::Header => {
                    if !self.fill_block(input) {
                        return Ok(Event::NeedMore);
                    }
                    if let Some(event) = self.on_header()? {
                        return Ok(event);
                    }
                }
                State::Special { what, left, pad } => {
                    let (what, n) = (*what, take(left, input.len()));
                    let (head, rest) = input.split_at(n);
                    *input = rest;
                    self.pos += n as u64;
                    let (done, pad) = (*left == 0, *pad);
                    self.body.extend_from_slice(head);
                    if !done {
                        return Ok(Event::NeedMore);
                    }
                    self.state = State::Skip { left: 0, pad };
                    self.on_special(what)?;
                }
                State::OldSparse => {
                    if !self.fill_block(input) {
                        return Ok(Event::NeedMore);
                    }
                    let more = sparse::old_extension(&self.block, &mut self.pieces)
                        .and_then(|more| self.check_pieces().map(|()| more))
                        .map_err(|why| self.fail(why))?;
                    if !more {
                        return self.begin_sparse().map(|()| Event::Entry);
                    }
                }
                State::SparseMap { .. } => {
                    if !self.fill_block(input) {
                        return Ok(Event::NeedMore);
                    }
                    if self.on_map_block()? {
                        return self.begin_sparse().map(|()| Event::Entry);
                    }
                }
                State::Data => return Ok(self.on_data(input)),
                State::Skip { left, pad } => {
                    self.pos += skip(left, input);
                    if *left > 0 {
                        return Ok(Event::NeedMore);
                    }
                    self.state = State::Pad { left: *pad };
                }
                State::Pad { left } => {
                    let mut wide = u64::from(*left);
                    self.pos += skip(&mut wide, input);
                    *left = wide as u16;
                    if wide > 0 {
                        return Ok(Event::NeedMore);
                    }
                    self.state = State::Header;
                }
            }
        }
    }

    /// The input has ended: is that a place where an archive may end?
    pub(crate) fn finish(&self) -> Result<(), TarError> {
        let what = match &self.state {
            State::End => return Ok(()),
            // Archives without an end marker are common, and so is missing padding behind the last file.
            State::Header if self.first_header.is_none() && self.block[..self.filled].iter().all(|&b| b == 0) => {
                return Ok(());
            }
            State::Pad { .. } if self.first_header.is_none() => return Ok(()),
            State::Skip { left: 0, .. } if self.first_header.is_none() => return Ok(()),
            State::Header if self.first_header.is_none() => "a header",
            State::Header | State::Pad { .. } => "an entry: its extended header is there, the entry is not",
            State::Special { .. } => "an extended header",
            State::OldSparse | State::SparseMap { .. } => "a sparse map",
            State::Data | State::Skip { .. } => "an entry's data",
        };
        let mut e = self.fail(Why::Truncated(what));
        e.offset = self.pos;
        if matches!(self.state, State::Header) {
            e.entry = None;
        }
        Err(e)
    }

    fn fail(&self, why: Why) -> TarError {
        let known = !self.entry.path.is_empty() && !matches!(self.state, State::Header);
        TarError {
            offset: self.first_header.unwrap_or(self.entry.offset),
            entry: known.then(|| String::from_utf8_lossy(&self.entry.path).into_owned()),
            why,
        }
    }

    /// Collects one block; `true` when it is there.
    fn fill_block(&mut self, input: &mut &[u8]) -> bool {
        let n = (BLOCK - self.filled).min(input.len());
        self.block[self.filled..self.filled + n].copy_from_slice(&input[..n]);
        *input = &input[n..];
        self.filled += n;
        self.pos += n as u64;
        if self.filled < BLOCK {
            return false;
        }
        self.filled = 0;
        true
    }

    fn on_header<'a>(&mut self) -> Result<Option<Event<'a>>, TarError> {
        let at = self.pos - BLOCK as u64;
        if self.block.iter().all(|&b| b == 0) {
            if self.first_header.is_some() {
                return Err(self.fail(Why::Truncated("an entry: its extended header is there, the entry is not")));
            }
            self.state = State::End;
            return Ok(Some(Event::End));
        }
        if self.first_header.is_none() {
            self.first_header = Some(at);
        }
        let header = Header::parse(&self.block).map_err(|why| TarError { offset: at, entry: None, why })?;
        let special = match header.flag {
            b'x' | b'X' => Some(Special::Pax),
            b'g' => Some(Special::Global),
            b'L' => Some(Special::LongName),
            b'K' => Some(Special::LongLink),
            _ => None,
        };
        if let Some(what) = special {
            let size = header.size().map_err(|why| TarError { offset: at, entry: None, why })?;
            if size > self.limits.header_bytes {
                let why =
                    Why::Limit { what: "the size of an extended header", value: size, limit: self.limits.header_bytes };
                return Err(TarError { offset: at, entry: None, why });
            }
            self.body.clear();
            self.state = State::Special { what, left: size, pad: padding(size) };
            return Ok(None);
        }
        self.on_entry(header)
    }

    fn on_special(&mut self, what: Special) -> Result<(), TarError> {
        let err = |why| TarError { offset: self.first_header.unwrap_or(self.pos), entry: None, why };
        let text = |body: &[u8]| body.split(|&b| b == 0).next().unwrap_or_default().to_vec();
        match what {
            Special::LongName => self.long_name = Some(text(&self.body)),
            Special::LongLink => self.long_link = Some(text(&self.body)),
            Special::Pax => {
                self.pax.clear();
                self.pax.read(&self.body, self.limits.sparse_pieces).map_err(err)?;
            }
            Special::Global => {
                // Global records stay in force until replaced; a global header alone announces no entry.
                let mut add = Pax::default();
                add.read(&self.body, 0).map_err(err)?;
                if let Some(key) = add.changes_meaning() {
                    return Err(err(Why::Global(key.into())));
                }
                self.global.merge_times_and_owners(add);
                if self.long_name.is_none() && self.long_link.is_none() && self.pax.is_empty() {
                    self.first_header = None;
                }
            }
        }
        Ok(())
    }

    /// A header that describes an entry: applies the extended headers to it.
    fn on_entry<'a>(&mut self, header: Header) -> Result<Option<Event<'a>>, TarError> {
        let offset = self.first_header.take().unwrap_or(self.pos);
        let mut entry = std::mem::take(&mut self.entry);
        entry.offset = offset;
        let mut pax = std::mem::take(&mut self.pax);
        let long = (self.long_name.take(), self.long_link.take());
        let result = header.describe(&mut entry, &mut pax, &self.global, long);
        self.entry = entry;
        let name = String::from_utf8_lossy(&self.entry.path).into_owned();
        let fail = |why| TarError { offset, entry: (!name.is_empty()).then(|| name.clone()), why };
        result.map_err(fail)?;

        let stored = match pax.size {
            Some(size) => size,
            None => header.size().map_err(fail)?,
        };
        let limit =
            |what, value, limit| if value > limit { Err(fail(Why::Limit { what, value, limit })) } else { Ok(()) };
        // Padding is computed on it below; no real archive is near this.
        limit("the stored size of an entry", stored, i64::MAX as u64)?;
        self.stored = stored;
        self.pad = padding(stored);
        self.pieces.clear();
        self.piece = 0;
        self.in_piece = 0;

        if header.flag == b'S' {
            let (real, more) = sparse::old_header(&self.block, &mut self.pieces).map_err(fail)?;
            self.entry.size = real;
            limit("the size of a file", real, self.limits.file_bytes)?;
            if more {
                self.state = State::OldSparse;
                return Ok(None);
            }
            return self.begin_sparse().map(|()| Some(Event::Entry));
        }
        match self.entry.kind {
            EntryKind::File => {}
            EntryKind::Dir | EntryKind::Ignored => {
                // GNU's 'D' lists the directory in its data, 'V' has none; others write a size that means nothing.
                let left = if matches!(header.flag, b'D' | b'V' | b'0' | 0 | b'7') { stored } else { 0 };
                self.state = State::Skip { left, pad: padding(left) };
                return Ok((self.entry.kind == EntryKind::Dir).then_some(Event::Entry));
            }
            _ => {
                self.state = State::Header;
                return Ok(Some(Event::Entry));
            }
        }
        if let Some(sparse) = pax.take_sparse().map_err(fail)? {
            self.entry.size = sparse.real_size;
            limit("the size of a file", sparse.real_size, self.limits.file_bytes)?;
            match sparse.pieces {
                Some(pieces) => {
                    self.pieces = pieces;
                    return self.begin_sparse().map(|()| Some(Event::Entry));
                }
                None => {
                    self.sparse_digits = sparse::MapReader::default();
                    self.state = State::SparseMap { read: 0 };
                    return Ok(None);
                }
            }
        }
        self.entry.size = stored;
        limit("the size of a file", stored, self.limits.file_bytes)?;
        self.pieces.push(Piece { offset: 0, len: stored });
        self.state = State::Data;
        Ok(Some(Event::Entry))
    }

    fn check_pieces(&self) -> Result<(), Why> {
        let (value, limit) = (self.pieces.len() as u64, self.limits.sparse_pieces);
        if value > limit {
            Err(Why::Limit { what: "the number of pieces of a sparse file", value, limit })
        } else {
            Ok(())
        }
    }

    /// One block of the map in front of a PAX 1.0 sparse file; `true` when the map is complete.
    fn on_map_block(&mut self) -> Result<bool, TarError> {
        let State::SparseMap { read } = &mut self.state else { return Ok(true) };
        *read += BLOCK as u64;
        if *read > self.stored {
            return Err(self.fail(Why::Sparse("it is longer than the entry")));
        }
        let done = self
            .sparse_digits
            .block(&self.block, &mut self.pieces, self.limits.sparse_pieces)
            .map_err(|why| self.fail(why))?;
        if done {
            let State::SparseMap { read } = self.state else { return Ok(true) };
            self.stored -= read;
        }
        Ok(done)
    }

    /// The map is known: checks it and goes on to the data.
    fn begin_sparse(&mut self) -> Result<(), TarError> {
        self.check_pieces()
            .and_then(|()| sparse::check(&mut self.pieces, self.entry.size, self.stored))
            .map_err(|why| self.fail(why))?;
        self.state = State::Data;
        Ok(())
    }

    fn on_data<'a>(&mut self, input: &mut &'a [u8]) -> Event<'a> {
        while let Some(piece) = self.pieces.get(self.piece) {
            let mut left = piece.len - self.in_piece;
            if left == 0 {
                self.piece += 1;
                self.in_piece = 0;
                continue;
            }
            let n = take(&mut left, input.len());
            if n == 0 {
                return Event::NeedMore;
            }
            let offset = piece.offset + self.in_piece;
            let (bytes, rest) = input.split_at(n);
            *input = rest;
            self.pos += n as u64;
            self.in_piece += n as u64;
            return Event::Data { offset, bytes };
        }
        self.state = State::Pad { left: self.pad };
        Event::EntryEnd
    }
}

/// Takes up to `have` from `left`.
fn take(left: &mut u64, have: usize) -> usize {
    let n = (*left).min(have as u64);
    *left -= n;
    n as usize
}

/// Drops up to `left` bytes from the front of `input` and says how many.
fn skip(left: &mut u64, input: &mut &[u8]) -> u64 {
    let n = take(left, input.len());
    *input = &input[n..];
    n as u64
}

/// Bytes that follow `size` bytes up to the next block.
fn padding(size: u64) -> u16 {
    (size.wrapping_neg() % BLOCK as u64) as u16
}
