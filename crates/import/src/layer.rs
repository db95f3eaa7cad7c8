//! One layer: read, checked, decompressed, hashed, parsed and packed by threads that overlap.
//!
//! ```text
//! reader thread: blob → digest → inflate ─┬─► hasher thread: diff_id
//!                                         └─► this thread: tar → chunks → pack; entries → spool
//! ```
//!
//! Buffers go round between them: at most [`BUFFERS`] of [`BUFFER`] bytes a layer. The layer counts only when all
//! three agree: the blob has its digest and size, the archive is sound, the unpacked bytes have the diff_id. When
//! the archive makes no sense because the blob is damaged, the error says that the blob is damaged.

use crate::blob::{BlobDigest, BlobReader, Hasher, Promise, read_error};
use crate::chunker::{ChunkWriter, lock};
use crate::context::Context;
use crate::decode::{DecodeError, Decoder};
use crate::error::ImportError;
use crate::hidden::{Covers, Marker};
use crate::spool::{Head, RecordKind, Spool, SpoolWriter};
use crate::tar::{Entry, EntryKind, Event, Parser, TarError, TarLimits, Why};
use format::Digest;
use std::io::Read;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};

/// Bytes of a buffer between the threads.
const BUFFER: usize = 256 << 10;
/// Buffers that wait for one thread.
const BUFFERS: usize = 6;

/// Opens a layer's bytes.
pub(crate) type Open<'a> = Box<dyn Fn() -> Result<Box<dyn Read + Send + 'a>, ImportError> + Send + Sync + 'a>;

/// A layer to be decoded.
pub(crate) struct LayerSource<'a> {
    /// For messages: "layer 2 of 5 (sha256:0123…)".
    pub(crate) place: String,
    /// Of the blob.
    pub(crate) promise: Promise,
    /// Of the unpacked archive.
    pub(crate) diff_id: Option<BlobDigest>,
    pub(crate) open: Open<'a>,
}

/// Which content of a layer is wanted.
#[derive(Clone, Copy)]
pub(crate) enum Pass<'p> {
    /// All that no upper layer is known to hide. The layer's number and what is known; it is noted what this one hides.
    First(usize, &'p Covers),
    /// Only that of these records, in order; what was counted the first time is not counted again.
    Again(&'p [Marker]),
}

impl Pass<'_> {
    fn is_first(self) -> bool {
        matches!(self, Pass::First(..))
    }
}

/// A filled buffer, shared by hasher and parser; goes back to the pool when both are done with it.
struct Shared {
    bytes: Vec<u8>,
    pool: Arc<Mutex<Vec<Vec<u8>>>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        lock(&self.pool).push(std::mem::take(&mut self.bytes));
    }
}

/// Why the reader thread stopped.
enum Stopped {
    /// At the end of the stream.
    Complete,
    /// The parser did not want more.
    Unwanted,
    Failed(DecodeError),
    /// Beyond a limit.
    Limit(ImportError),
}

/// Decodes one layer: its entries.
pub(crate) fn decode<'a>(
    context: &'a Context<'a>,
    layer: &LayerSource<'_>,
    writer: &mut ChunkWriter<'a>,
    pass: Pass<'_>,
) -> Result<Spool<'a>, ImportError> {
    let place = &layer.place;
    let took = |n| {
        if pass.is_first() {
            context.took(n);
        }
    };
    let mut reader = BlobReader::new((layer.open)()?, &layer.promise, &took);
    // A plain layer's diff_id is the digest of the blob itself.
    let head = reader.peek(Decoder::HEAD).map_err(|e| read_error(e, &layer.promise, place))?;
    let plain = !Decoder::is_compressed(head)
        && layer
            .diff_id
            .as_ref()
            .is_some_and(|d| layer.promise.digest.as_ref().is_some_and(|b| b.algorithm() == d.algorithm()));
    let hash = layer.diff_id.as_ref().filter(|_| !plain).map(|d| Hasher::new(d.algorithm()));

    std::thread::scope(|scope| {
        let (to_parser, from_reader) = sync_channel::<Arc<Shared>>(BUFFERS);
        let (to_hasher, hasher) = match hash {
            Some(hash) => {
                let (tx, rx) = sync_channel::<Arc<Shared>>(BUFFERS);
                (Some(tx), Some(spawn(scope, "diff_id", move || hash_all(hash, &rx))?))
            }
            None => (None, None),
        };
        let reader = spawn(scope, "inflate", move || {
            let mut decoder = Decoder::new(reader, &context.wide_window);
            let stopped = read_all(context, place, &mut decoder, &to_parser, to_hasher.as_ref());
            drop((to_parser, to_hasher));
            // Whatever happened here: is the blob what it should be? When another layer failed, nobody asks.
            let checked = match context.stopped() {
                true => Ok(()),
                false => decoder.into_reader().check(&layer.promise, place),
            };
            (stopped, checked)
        })?;
        let parsed = parse(context, place, &from_reader, writer, pass);
        drop(from_reader);
        let (stopped, checked) = join(reader);
        let have = hasher.map(join);
        checked?;
        match stopped {
            Stopped::Failed(DecodeError::Read(e)) => return Err(read_error(e, &layer.promise, place)),
            Stopped::Failed(e @ DecodeError::Window { .. }) => {
                return Err(ImportError::Unsupported { place: place.clone(), what: e.to_string() });
            }
            Stopped::Failed(e) => return Err(ImportError::corrupt(place, e.to_string())),
            Stopped::Limit(e) => return Err(e),
            Stopped::Complete | Stopped::Unwanted => {}
        }
        let spool = parsed?;
        if context.stopped() {
            return Err(ImportError::Stopped);
        }
        let have = if plain { layer.promise.digest.clone() } else { have };
        match (&layer.diff_id, have) {
            (Some(want), Some(have)) if *want != have => Err(ImportError::mismatch(place, "diff_id", want, have)),
            _ => Ok(spool),
        }
    })
}

/// Starts a scoped thread with a name.
fn spawn<'scope, T: Send + 'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    name: &str,
    body: impl FnOnce() -> T + Send + 'scope,
) -> Result<std::thread::ScopedJoinHandle<'scope, T>, ImportError> {
    let builder = std::thread::Builder::new().name(name.into());
    builder.spawn_scoped(scope, body).map_err(|e| ImportError::io("start a thread for", name, e))
}

/// Waits for a thread; its panic goes on here.
fn join<T>(handle: std::thread::ScopedJoinHandle<'_, T>) -> T {
    handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn hash_all(mut hash: Hasher, buffers: &Receiver<Arc<Shared>>) -> BlobDigest {
    for buffer in buffers {
        hash.update(&buffer.bytes);
    }
    hash.finish()
}

/// Decodes to the end, or until nobody listens.
fn read_all(
    context: &Context<'_>,
    place: &str,
    decoder: &mut Decoder<'_>,
    to_parser: &SyncSender<Arc<Shared>>,
    to_hasher: Option<&SyncSender<Arc<Shared>>>,
) -> Stopped {
    let pool = Arc::new(Mutex::new(Vec::new()));
    let mut total = 0u64;
    loop {
        let mut bytes: Vec<u8> = lock(&pool).pop().unwrap_or_default();
        bytes.resize(BUFFER, 0);
        let n = match decoder.fill(&mut bytes) {
            Ok(n) => n,
            Err(e) => return Stopped::Failed(e),
        };
        bytes.truncate(n);
        total += n as u64;
        if let Err(e) = context.check_ratio(place, total, decoder.position()) {
            return Stopped::Limit(e);
        }
        let last = n < BUFFER;
        let shared = Arc::new(Shared { bytes, pool: pool.clone() });
        if let Some(tx) = to_hasher {
            // The hasher never stops before the end.
            let _ = tx.send(shared.clone());
        }
        if to_parser.send(shared).is_err() || context.stopped() {
            return Stopped::Unwanted;
        }
        if last {
            return Stopped::Complete;
        }
    }
}

/// Parses the archive, packs its files and writes down its entries.
fn parse<'a>(
    context: &'a Context<'a>,
    place: &str,
    buffers: &Receiver<Arc<Shared>>,
    writer: &mut ChunkWriter<'a>,
    pass: Pass<'_>,
) -> Result<Spool<'a>, ImportError> {
    let limits = &context.options.limits;
    let mut parser = Parser::new(TarLimits {
        header_bytes: limits.header_bytes,
        sparse_pieces: limits.sparse_pieces,
        file_bytes: limits.file_bytes,
    });
    let spool = SpoolWriter::new(context.session, &context.budget);
    let mut sink = Sink { context, place, writer, spool, entries: 0, records: 0, pass, skipped: false };
    for buffer in buffers {
        let mut input = &buffer.bytes[..];
        let before = sink.entries;
        loop {
            match parser.step(&mut input).map_err(|e| tar_error(place, e))? {
                Event::NeedMore | Event::End => break,
                Event::Data { bytes, .. } if sink.skipped => sink.writer.pass(bytes.len() as u64)?,
                Event::Data { offset, bytes } => sink.writer.data(offset, bytes)?,
                Event::Entry => sink.entry(parser.entry_mut())?,
                Event::EntryEnd => sink.file(parser.entry_mut())?,
            }
        }
        if pass.is_first() {
            context.entries(sink.entries - before);
        }
    }
    parser.finish().map_err(|e| tar_error(place, e))?;
    sink.spool.finish().map_err(|e| e.at(place))
}

/// Where entries go.
struct Sink<'s, 'a> {
    context: &'a Context<'a>,
    place: &'s str,
    writer: &'s mut ChunkWriter<'a>,
    spool: SpoolWriter<'a>,
    entries: u64,
    /// Records so far, or that there would be.
    records: u32,
    pass: Pass<'s>,
    /// The current file's content is not wanted.
    skipped: bool,
}

impl Sink<'_, '_> {
    /// A new entry: a file's record is written when its data is in.
    fn entry(&mut self, entry: &mut Entry) -> Result<(), ImportError> {
        self.entries += 1;
        let limit = self.context.options.limits.layer_entries;
        if self.entries > limit {
            return Err(ImportError::Limit { place: self.place.into(), what: format!("more than {limit} entries") });
        }
        if entry.kind == EntryKind::Ignored {
            return Ok(());
        }
        let Pass::First(layer, covers) = self.pass else {
            self.again(entry);
            return Ok(());
        };
        let had = entry.xattrs.len();
        entry.xattrs.retain(|(name, _)| image::tree::xattr_is_supported(name));
        let dropped = (had - entry.xattrs.len()) as u64 + u64::from(entry.foreign_attributes);
        if dropped > 0 {
            self.context.dropped_xattrs(dropped);
        }
        if layer > 0 {
            covers.note(layer, entry);
        }
        let kind = match entry.kind {
            EntryKind::File => {
                self.context.file_size(entry.size)?;
                self.skipped = entry.size > 0 && covers.hides(layer, &entry.path);
                self.writer.begin(entry.size);
                return Ok(());
            }
            EntryKind::HardLink => RecordKind::HardLink,
            EntryKind::Symlink => RecordKind::Symlink,
            EntryKind::Dir => RecordKind::Dir,
            EntryKind::Fifo => RecordKind::Fifo,
            EntryKind::Char => RecordKind::Char { major: entry.major, minor: entry.minor },
            EntryKind::Block => RecordKind::Block { major: entry.major, minor: entry.minor },
            EntryKind::Ignored => return Ok(()),
        };
        self.records += 1;
        let head = head(entry, kind, Digest::default());
        self.spool.push(&head, &entry.path, &entry.link, &entry.xattrs, &[]).map_err(|e| e.at(self.place))
    }

    /// The same of a layer that was read before.
    fn again(&mut self, entry: &Entry) {
        if entry.kind != EntryKind::File {
            self.records += 1;
            return;
        }
        let Pass::Again(wanted) = self.pass else { return };
        self.skipped = wanted.binary_search_by_key(&self.records, |m| m.record).is_err();
        self.writer.begin(entry.size);
    }

    /// A file is complete.
    fn file(&mut self, entry: &Entry) -> Result<(), ImportError> {
        let record = self.records;
        self.records += 1;
        let skipped = std::mem::take(&mut self.skipped);
        let (digest, runs) = match self.pass {
            Pass::First(layer, _) if skipped => {
                self.context.hidden(entry.size);
                (Marker { layer: layer as u32, record }.digest(), &[][..])
            }
            Pass::Again(_) if skipped => return Ok(()),
            _ => self.writer.finish()?,
        };
        let head = head(entry, RecordKind::File, digest);
        self.spool.push(&head, &entry.path, &[], &entry.xattrs, runs).map_err(|e| e.at(self.place))
    }
}

fn head(entry: &Entry, kind: RecordKind, digest: Digest) -> Head {
    Head {
        kind,
        mode: entry.mode,
        uid: entry.uid,
        gid: entry.gid,
        mtime_sec: entry.mtime_sec,
        mtime_nsec: entry.mtime_nsec,
        size: entry.size,
        digest,
    }
}

fn tar_error(place: &str, e: TarError) -> ImportError {
    let (place, what) = (place.to_owned(), e.to_string());
    match e.why {
        Why::Limit { .. } => ImportError::Limit { place, what },
        Why::Type(_) | Why::Global(_) => ImportError::Unsupported { place, what },
        _ => ImportError::Corrupt { place, what },
    }
}

/// Reads `bytes` as an archive in every way there is and throws away what it finds: for fuzzing.
pub(crate) fn fuzz_archive(bytes: &[u8]) {
    let wide = Mutex::new(());
    let nothing = Promise { digest: None, size: None };
    let mut decoder = Decoder::new(BlobReader::new(Box::new(bytes), &nothing, &|_| {}), &wide);
    let mut buffer = vec![0; 64 << 10];
    let mut unpacked = Vec::new();
    while let Ok(n) = decoder.fill(&mut buffer) {
        unpacked.extend_from_slice(&buffer[..n]);
        // What a few bytes can unpack to is bounded elsewhere.
        if n < buffer.len() || unpacked.len() > 8 << 20 {
            break;
        }
    }
    let mut sealed = unpacked.clone();
    for block in sealed.chunks_exact_mut(512) {
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|&b| u32::from(b)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
    for (archive, step) in [(&unpacked, 1000), (&sealed, usize::MAX)] {
        let mut parser = Parser::new(TarLimits { header_bytes: 1 << 16, sparse_pieces: 1000, file_bytes: 1 << 44 });
        'archive: for mut input in archive.chunks(step) {
            let mut end = 0;
            loop {
                match parser.step(&mut input) {
                    Ok(Event::NeedMore) => break,
                    Ok(Event::Entry) => {
                        end = 0;
                        assert!(parser.entry_mut().size <= 1 << 44);
                    }
                    Ok(Event::Data { offset, bytes }) => {
                        assert!(offset >= end && !bytes.is_empty());
                        end = offset + bytes.len() as u64;
                        assert!(end <= parser.entry_mut().size);
                    }
                    Ok(Event::EntryEnd) => {}
                    Ok(Event::End) | Err(_) => break 'archive,
                }
            }
        }
        let _ = parser.finish();
    }
}
