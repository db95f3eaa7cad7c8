//! An image's layers: decoded concurrently, merged in order.
//!
//! A few threads take the next layer each, from the top down, so that it is known what upper layers hide when the lower
//! ones are packed; see [`crate::hidden`]. Small layers go first: most whiteouts are in those, and none of them waits
//! for a large one. A layer that stands several times in an image is decoded once. The calling thread merges each layer
//! as soon as it and all below it are there. Memory does not depend on the number of layers: what waits is spooled.

use crate::chunker::{ChunkWriter, Frames, LocalRun, OWN_PACK, lock};
use crate::context::Context;
use crate::error::ImportError;
use crate::hidden::{Covers, Marker};
use crate::layer::{LayerSource, Pass, decode};
use crate::spool::{Record, RecordKind, Spool};
use image::merge::{Body, Entry, MergeError, Merger, Outcome};
use image::tree::{Attrs, NodeId, Run, Tree, TreeError};
use std::collections::HashMap;
use std::sync::{Condvar, Mutex, PoisonError, mpsc};

/// Layers decoded at a time, however many threads there are: each needs up to about 12 MiB.
const MAX_CONCURRENT: usize = 8;

/// Bytes of a layer, as stored, that it takes no time to decode.
const SMALL: u64 = 1 << 20;

/// What the merge saw on the way.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct MergeCounts {
    pub(crate) idle_whiteouts: u64,
    pub(crate) ignored: u64,
}

/// Decodes and merges `layers`, lowest first.
pub(crate) fn import_layers<'a>(
    context: &'a Context<'a>,
    tree: Tree,
    layers: &[LayerSource<'_>],
) -> Result<(TreeAndPack, MergeCounts), ImportError> {
    let order = unique(layers);
    let schedule = Schedule::new(layers, &order);
    let covers = Covers::default();
    let (tx, results) = mpsc::channel();
    let workers = context.options.threads.clamp(1, MAX_CONCURRENT).min(schedule.order.len().max(1));
    std::thread::scope(|scope| {
        for _ in 0..workers {
            let (tx, schedule, covers) = (tx.clone(), &schedule, &covers);
            let work = move || work(context, layers, schedule, covers, &tx);
            let started = std::thread::Builder::new().name("layer".into()).spawn_scoped(scope, work);
            if let Err(e) = started {
                context.stop();
                return Err(ImportError::io("start a thread for", "a layer", e));
            }
        }
        drop(tx);
        let merged = merge(context, tree, layers, &order, &results).and_then(|(mut merging, counts)| {
            merging.show(context, layers)?;
            Ok((TreeAndPack { tree: merging.merger.finish(), pack: merging.objects[OWN_PACK as usize] }, counts))
        });
        if merged.is_err() {
            context.stop();
        }
        merged
    })
}

/// Which layer is decoded next.
struct Schedule {
    /// Each different layer by its highest place: small ones from the top down, then the others.
    order: Vec<usize>,
    small: usize,
    state: Mutex<Progressed>,
    /// A small layer is done.
    done: Condvar,
}

#[derive(Default)]
struct Progressed {
    next: usize,
    small_done: usize,
}

impl Schedule {
    fn new(layers: &[LayerSource<'_>], same: &[usize]) -> Schedule {
        let highest = (0..layers.len()).rev().filter(|&i| !same[i + 1..].contains(&same[i]));
        let is_small = |i: &usize| layers[*i].promise.size.is_some_and(|n| n <= SMALL);
        let (mut order, large): (Vec<usize>, Vec<usize>) = highest.partition(is_small);
        let small = order.len();
        order.extend(large);
        Schedule { order, small, state: Mutex::default(), done: Condvar::new() }
    }

    /// The next layer. A large one is given out when all small ones are done.
    fn next(&self) -> Option<usize> {
        let mut state = lock(&self.state);
        let n = state.next;
        state.next += 1;
        while n >= self.small && state.small_done < self.small {
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        self.order.get(n).copied()
    }

    /// A layer is decoded, or has failed.
    fn decoded(&self, layer: usize) {
        if self.order[..self.small].contains(&layer) {
            lock(&self.state).small_done += 1;
            self.done.notify_all();
        }
    }
}

/// What a worker says.
enum Message<'a> {
    Layer(usize, Result<Spool<'a>, ImportError>),
    /// It is done, and its stream is flushed or not.
    Closed(Result<(), ImportError>),
}

/// For each layer a number that equal ones share.
fn unique(layers: &[LayerSource<'_>]) -> Vec<usize> {
    let mut seen = HashMap::new();
    let same = |(i, l): (usize, &LayerSource<'_>)| match &l.promise.digest {
        Some(digest) => *seen.entry((digest.clone(), l.diff_id.clone())).or_insert(i),
        None => i,
    };
    layers.iter().enumerate().map(same).collect()
}

fn work<'a>(
    context: &'a Context<'a>,
    layers: &[LayerSource<'_>],
    schedule: &Schedule,
    covers: &Covers,
    results: &mpsc::Sender<Message<'a>>,
) {
    let mut writer = ChunkWriter::new(context, Frames::HandedOver);
    while let Some(i) = schedule.next() {
        let result = if context.stopped() {
            Err(ImportError::Stopped)
        } else {
            decode(context, &layers[i], &mut writer, Pass::First(i, covers))
        };
        if result.is_err() {
            context.stop();
        }
        schedule.decoded(i);
        // The receiver goes on to the end.
        let _ = results.send(Message::Layer(i, result));
    }
    let _ = results.send(Message::Closed(writer.close()));
}

/// A tree whose own pack has no name yet, and that pack's number in it.
#[derive(Debug)]
pub(crate) struct TreeAndPack {
    pub(crate) tree: Tree,
    pub(crate) pack: u32,
}

fn merge<'a>(
    context: &'a Context<'a>,
    mut tree: Tree,
    layers: &[LayerSource<'_>],
    same: &[usize],
    results: &mpsc::Receiver<Message<'a>>,
) -> Result<(Merging, MergeCounts), ImportError> {
    let pack = tree.object_placeholder();
    let mut merging = Merging { merger: Merger::new(tree), objects: vec![pack], counts: MergeCounts::default() };
    // By the number that equal layers share.
    let mut spools: Vec<Option<Spool<'a>>> = layers.iter().map(|_| None).collect();
    let mut done = 0;
    let mut failure: Option<ImportError> = None;
    let mut fail = |e: ImportError| {
        context.stop();
        // The first real one counts: the others only follow from it.
        if failure.as_ref().is_none_or(|f| matches!(f, ImportError::Stopped)) {
            failure = Some(e);
        }
    };
    for message in results {
        match message {
            Message::Closed(Ok(())) => {}
            Message::Closed(Err(e)) | Message::Layer(_, Err(e)) => fail(e),
            Message::Layer(i, Ok(spool)) => spools[same[i]] = Some(spool),
        }
        while done < layers.len() && !context.stopped() {
            let Some(spool) = &spools[same[done]] else { break };
            if let Err(e) = merging.layer(context, &layers[done].place, spool) {
                fail(e);
                break;
            }
            if !same[done + 1..].contains(&same[done]) {
                spools[same[done]] = None;
            }
            done += 1;
        }
    }
    match failure {
        Some(e) => Err(e),
        None => {
            let counts = merging.counts;
            Ok((merging, counts))
        }
    }
}

struct Merging {
    merger: Merger,
    /// Ordinals in the tree of the import's objects by number.
    objects: Vec<u32>,
    counts: MergeCounts,
}

impl Merging {
    fn learn_objects(&mut self, context: &Context<'_>) {
        for (id, space_blocks) in context.objects.list().into_iter().skip(self.objects.len() - 1) {
            let n = self.merger.tree_mut().object(id, space_blocks);
            self.objects.push(n);
        }
    }

    /// Gives files whose content was taken for hidden but is not what they should have: their layers are read again.
    fn show<'a>(&mut self, context: &'a Context<'a>, layers: &[LayerSource<'_>]) -> Result<(), ImportError> {
        if context.totals().hidden_bytes == 0 {
            return Ok(());
        }
        let marked = self.merger.tree().files().filter_map(|(node, c)| Some((Marker::of(&c.digest)?, node)));
        let mut marked: Vec<(Marker, NodeId)> = marked.collect();
        marked.sort_unstable();
        let mut writer = ChunkWriter::new(context, Frames::HandedOver);
        for of_layer in marked.chunk_by(|a, b| a.0.layer == b.0.layer) {
            let layer = &layers[of_layer[0].0.layer as usize];
            let mut wanted: Vec<Marker> = of_layer.iter().map(|(marker, _)| *marker).collect();
            wanted.dedup();
            let spool = decode(context, layer, &mut writer, Pass::Again(&wanted))?;
            self.learn_objects(context);
            let mut reader = spool.reader();
            let mut record = Record::default();
            for files in of_layer.chunk_by(|a, b| a.0 == b.0) {
                if !reader.next(&mut record).map_err(|e| e.at(&layer.place))? {
                    return Err(ImportError::corrupt(&layer.place, "it was different when it was read again"));
                }
                context.shown(record.head.size);
                let runs: Vec<Run> = record.runs.iter().map(|r| self.run(r)).collect();
                for (_, node) in files {
                    let tree = self.merger.tree_mut();
                    let set = tree.set_content(*node, record.head.size, record.head.digest, &runs);
                    let entry = || image::tree::PathBytes::of(&record.path);
                    set.map_err(|source| merge_error(&layer.place, MergeError::Tree { entry: entry(), source }))?;
                }
            }
        }
        writer.close()
    }

    fn layer(&mut self, context: &Context<'_>, place: &str, spool: &Spool<'_>) -> Result<(), ImportError> {
        self.learn_objects(context);
        self.merger.begin_layer().map_err(|e| merge_error(place, e))?;
        let mut reader = spool.reader();
        let mut record = Record::default();
        let mut runs = Vec::new();
        while reader.next(&mut record).map_err(|e| e.at(place))? {
            self.record(&record, &mut runs).map_err(|e| merge_error(place, e))?;
        }
        self.merger.end_layer();
        Ok(())
    }

    fn record(&mut self, record: &Record, runs: &mut Vec<Run>) -> Result<(), MergeError> {
        let h = &record.head;
        let xattrs: Vec<(&[u8], &[u8])> = record.xattrs.iter().map(|(n, v)| (&n[..], &v[..])).collect();
        let set = self.merger.tree_mut().xattr_set(&xattrs);
        let set = set.map_err(|source| MergeError::Tree { entry: image::tree::PathBytes::of(&record.path), source })?;
        let body = match h.kind {
            RecordKind::File => {
                runs.clear();
                runs.extend(record.runs.iter().map(|r| self.run(r)));
                Body::File { size: h.size, digest: h.digest, runs }
            }
            RecordKind::HardLink => Body::Hardlink { target: &record.link },
            RecordKind::Symlink => Body::Symlink { target: &record.link },
            RecordKind::Dir => Body::Dir,
            RecordKind::Fifo => Body::Fifo,
            RecordKind::Char { major, minor } => Body::Char { major, minor },
            RecordKind::Block { major, minor } => Body::Block { major, minor },
        };
        let attrs = Attrs {
            mode: h.mode,
            uid: h.uid,
            gid: h.gid,
            mtime_sec: h.mtime_sec,
            mtime_nsec: h.mtime_nsec,
            xattrs: set,
        };
        match self.merger.entry(&record.path, Entry { body, attrs })? {
            Outcome::Whiteout(false) => self.counts.idle_whiteouts += 1,
            Outcome::Ignored => self.counts.ignored += 1,
            _ => {}
        }
        Ok(())
    }

    fn run(&self, r: &LocalRun) -> Run {
        debug_assert_eq!(OWN_PACK, 0);
        let object = self.objects[r.object as usize];
        Run { file_block: r.file_block, count: r.count, object, space_block: r.space_block }
    }
}

fn merge_error(place: &str, e: MergeError) -> ImportError {
    let place = place.to_owned();
    // The entry and the reason in one line.
    let what = match &e {
        MergeError::Tree { source, .. } => format!("{e}: {source}"),
        _ => e.to_string(),
    };
    match e {
        MergeError::Tree { source: TreeError::Limit { .. }, .. } | MergeError::Layers(_) => {
            ImportError::Limit { place, what }
        }
        _ => ImportError::Corrupt { place, what },
    }
}
