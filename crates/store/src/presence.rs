//! What is durable of a space, and the thread that makes it so.
//!
//! Job: `PresenceFile` is a space's presence file (`doc/format/space.md`) and the claims it makes; `Syncer`
//! collects the spaces with news and has them written in batches.
//!
//! Invariants: a claim is written only after the frame's bytes were synced; it is taken back, durably and in both
//! slots, before they are punched. A write that failed leaves the older slot alone, so the file never says more than
//! one of the two states before and after.
//!
//! Failure model: any page may be torn, lost or flipped; it then counts as absent and its frames are fetched again. A
//! claim is a hint all the same: frames are verified again at their first use in a process.
//!
//! It does not know: what frames are, who reads them.

use crate::disk::{Disk, DiskFile, Open};
use crate::space::Space;
use format::Digest;
use format::presence::{self, Place, WORDS_PER_PAGE};
use std::io::{self, Read};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A presence file and what it says.
#[derive(Debug)]
pub(crate) struct PresenceFile {
    disk: Arc<dyn Disk>,
    file: DiskFile,
    object: Digest,
    frame_count: u32,
    /// What the newest good generation of each page says.
    claims: Vec<u64>,
    /// What the other slot of each page may say.
    older: Vec<u64>,
    generations: Vec<u64>,
}

impl PresenceFile {
    /// Opens or makes the file. Pages that do not check out claim nothing.
    pub(crate) fn open(disk: Arc<dyn Disk>, path: &Path, object: Digest, frame_count: u32) -> io::Result<Self> {
        let file = disk.open(path, Open::Either)?;
        let mut bytes = Vec::new();
        file.file().take(presence::file_len(frame_count)).read_to_end(&mut bytes)?;
        let have = bytes.len() as u64;
        let missing = usize::try_from(presence::file_len(frame_count) - have).unwrap_or(0);
        // So that claims can be taken back when the disk is full. Should it be full now, `revoke` has another way.
        let _ = disk.write_at(&file, &vec![0; missing], have);
        let words = frame_count.div_ceil(64) as usize;
        let (mut claims, mut older) = (vec![0; words], vec![0; words]);
        let mut generations = Vec::new();
        for page in 0..presence::page_count(frame_count) {
            let [newest, other] = presence::slots(&bytes, &Place { object, frame_count, page });
            generations.push(newest.as_ref().map_or(0, |p| p.generation));
            for (to, from) in [(&mut claims, newest), (&mut older, other)] {
                let mine = to.chunks_mut(WORDS_PER_PAGE).nth(page as usize).unwrap_or_default();
                for (to, from) in mine.iter_mut().zip(from.iter().flat_map(|p| &p.words)) {
                    *to = *from;
                }
            }
        }
        Ok(PresenceFile { disk, file, object, frame_count, claims, older, generations })
    }

    /// The frames that are claimed to be on disk.
    pub(crate) fn claims(&self) -> &[u64] {
        &self.claims
    }

    /// Claims the frames in `add`, whose bytes are on disk, and no longer those in `remove`.
    pub(crate) fn update(&mut self, add: &[u64], remove: &[u64]) -> io::Result<()> {
        let words = self.claims.iter().zip(add).zip(remove).map(|((old, add), remove)| (old | add) & !remove).collect();
        self.write(words, |old, _, new| old != new)
    }

    /// Takes the claims on `remove` back for good: no slot on disk makes them after this. Their bytes may be punched
    /// then.
    pub(crate) fn revoke(&mut self, remove: &[u64]) -> io::Result<Revoked> {
        if self.clear(remove).is_ok() {
            return Ok(Revoked::These);
        }
        // A full disk may refuse the page. Claiming nothing at all needs no room.
        self.disk.resize(&self.file, 0)?;
        self.disk.sync(&self.file)?;
        self.claims.fill(0);
        self.older.fill(0);
        Ok(Revoked::All)
    }

    fn clear(&mut self, remove: &[u64]) -> io::Result<()> {
        // Once for each slot; a slot that does not make the claims is left alone.
        for _ in 0..2 {
            let words: Vec<u64> = self.claims.iter().zip(remove).map(|(old, remove)| old & !remove).collect();
            let bad = |old: &[u64], new: &[u64]| old.iter().zip(new).any(|(old, new)| old & !new != 0);
            let stale: Vec<u64> = self.older.iter().zip(remove).map(|(old, remove)| old & remove).collect();
            if !bad(&self.claims, &words) && stale.iter().all(|w| *w == 0) {
                break;
            }
            let stale: Vec<bool> = stale.chunks(WORDS_PER_PAGE).map(|page| page.iter().any(|w| *w != 0)).collect();
            self.write(words, |old, page, new| old != new || stale[page])?;
        }
        Ok(())
    }

    /// Makes `words` the claims; writes and syncs those pages that `which(old words, page, new words)` picks.
    fn write(&mut self, words: Vec<u64>, which: impl Fn(&[u64], usize, &[u64]) -> bool) -> io::Result<()> {
        let pages = self.claims.chunks(WORDS_PER_PAGE).zip(words.chunks(WORDS_PER_PAGE)).enumerate();
        let picked: Vec<usize> =
            pages.filter(|(page, (old, new))| which(old, *page, new)).map(|(page, _)| page).collect();
        let result = picked.iter().try_for_each(|&page| {
            let generation = self.generations[page] + 1;
            let place = Place { object: self.object, frame_count: self.frame_count, page: page as u32 };
            let new = words.chunks(WORDS_PER_PAGE).nth(page).unwrap_or_default();
            let bytes = presence::encode(&place, generation, new);
            self.disk.write_at(&self.file, &bytes[..], presence::offset(page as u32, generation))
        });
        let result = result.and_then(|()| if picked.is_empty() { Ok(()) } else { self.disk.sync(&self.file) });
        if let Err(e) = result {
            // The next write goes to the same slots again and leaves the others whole. What these hold until then
            // nobody knows.
            self.older.iter_mut().zip(&words).for_each(|(older, new)| *older |= new);
            return Err(e);
        }
        for page in picked {
            self.generations[page] += 1;
            let at = page * WORDS_PER_PAGE..self.claims.len().min((page + 1) * WORDS_PER_PAGE);
            self.older[at.clone()].copy_from_slice(&self.claims[at]);
        }
        self.claims = words;
        Ok(())
    }
}

/// What [`PresenceFile::revoke`] took back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Revoked {
    /// What it was to take back.
    These,
    /// All claims: what is there must be claimed anew.
    All,
}

/// The spaces that have frames which are not durable yet.
#[derive(Debug, Default)]
pub(crate) struct Syncer {
    state: Mutex<State>,
    news: Condvar,
    /// Held by whoever works on a batch, so that [`Syncer::run`] returns only when earlier ones are done too.
    batch: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    spaces: Vec<Arc<Space>>,
    woken: bool,
    closed: bool,
}

impl Syncer {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A space has news; the caller sees to it that it is put in once.
    pub(crate) fn add(&self, space: Arc<Space>) {
        self.lock().spaces.push(space);
        self.news.notify_one();
    }

    /// Makes everything durable that was filled before this call.
    pub(crate) fn run(&self) -> io::Result<()> {
        let _batch = self.batch.lock().unwrap_or_else(PoisonError::into_inner);
        let spaces = std::mem::take(&mut self.lock().spaces);
        let mut result = Ok(());
        for space in spaces {
            if let Err(e) = space.persist()
                && result.is_ok()
            {
                result = Err(e);
            }
        }
        result
    }

    /// Forgets what is left. It would keep the spaces for ever.
    pub(crate) fn clear(&self) {
        let spaces = std::mem::take(&mut self.lock().spaces);
        drop(spaces);
    }

    /// There is something else to look after.
    pub(crate) fn wake(&self) {
        self.lock().woken = true;
        self.news.notify_one();
    }

    /// Waits for news, no longer than `at_most`, then for `interval`, in which more of them come together. `false` once
    /// closed.
    pub(crate) fn wait(&self, interval: Duration, at_most: Option<Duration>) -> bool {
        let until = at_most.map(|at_most| Instant::now() + at_most);
        let state = self.wait_while(until, |state| state.spaces.is_empty() && !state.woken);
        drop(state);
        let mut state = self.wait_while(Some(Instant::now() + interval), |_| true);
        state.woken = false;
        !state.closed
    }

    fn wait_while(&self, until: Option<Instant>, holds: impl Fn(&State) -> bool) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        while !state.closed && holds(&state) {
            let Some(until) = until else {
                state = self.news.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            state = self.news.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state
    }

    /// Lets the waiting thread go.
    pub(crate) fn close(&self) {
        self.lock().closed = true;
        self.news.notify_all();
    }
}
