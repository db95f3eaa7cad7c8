//! Objects in a directory of this machine: a store's `objects`.
//!
//! A few threads do the reading, most urgent class first and in order within one, so that a slow disk holds up nobody
//! who asks. A request whose deadline has passed when a thread comes to it is answered with
//! [`FetchError::TimedOut`], never with bytes; there is no timer, so while the disk answers nothing, nothing is
//! answered. Dropping the store answers what is queued with [`FetchError::Closed`] and waits for the reads under way, but
//! not for a disk that does not answer: such a read keeps its thread, and is answered should it ever come back.
//! Packs that were read lately stay open, so removing one does not hurt those who read it.
//!
//! At most [`MAX_QUEUED`] requests wait; more are [`FetchError::Overloaded`]. No async runtime.

use crate::layout::Part;
use crate::object_store::{Class, LenDone, ObjectStore, ReadDone, ReadRequest, Request};
use crate::{FetchError, ObjectId, layout};
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The most requests that wait.
pub const MAX_QUEUED: usize = 1 << 16;
/// How long reads under way are waited for when the store is dropped, and how often they are looked at.
const GOODBYE: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(1);
/// Packs that stay open.
const OPEN_PACKS: usize = 64;

/// An [`ObjectStore`] over a directory of packs; see [`crate::Store::objects_dir`].
pub struct LocalStore {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
}

struct Inner {
    dir: PathBuf,
    queue: Mutex<Queue>,
    filled: Condvar,
    packs: Mutex<Packs>,
}

#[derive(Default)]
struct Queue {
    /// By class, most urgent first.
    jobs: [VecDeque<Job>; Class::ALL.len()],
    closed: bool,
}

enum Job {
    Read(ReadRequest, ReadDone),
    Len(ObjectId, Request, LenDone),
}

/// Open packs, with the time (a count of uses) of their last use.
#[derive(Default)]
struct Packs {
    open: HashMap<ObjectId, (Arc<Pack>, u64)>,
    uses: u64,
}

struct Pack {
    file: File,
    len: u64,
}

impl LocalStore {
    /// Serves the packs in `dir` with so many reading threads, at least one.
    ///
    /// # Errors
    /// The threads cannot be started.
    pub fn new(dir: &Path, threads: usize) -> io::Result<LocalStore> {
        let inner = Arc::new(Inner {
            dir: dir.to_path_buf(),
            queue: Mutex::default(),
            filled: Condvar::new(),
            packs: Mutex::default(),
        });
        let mut local = LocalStore { inner, threads: Vec::new() };
        for i in 0..threads.max(1) {
            let inner = local.inner.clone();
            let thread = std::thread::Builder::new().name(format!("local-{i}")).spawn(move || inner.serve())?;
            local.threads.push(thread);
        }
        Ok(local)
    }
}

impl ObjectStore for LocalStore {
    fn read(&self, read: ReadRequest, done: ReadDone) {
        self.inner.submit(Job::Read(read, done));
    }

    fn len(&self, object: &ObjectId, request: Request, done: LenDone) {
        self.inner.submit(Job::Len(*object, request, done));
    }

    fn describe(&self) -> String {
        self.inner.dir.display().to_string()
    }
}

impl Drop for LocalStore {
    fn drop(&mut self) {
        let mut queue = locked(&self.inner.queue);
        queue.closed = true;
        let left: Vec<Job> = queue.jobs.iter_mut().flat_map(std::mem::take).collect();
        drop(queue);
        self.inner.filled.notify_all();
        for job in left {
            job.fail(FetchError::Closed);
        }
        let me = std::thread::current().id();
        let until = Instant::now() + GOODBYE;
        for thread in self.threads.drain(..) {
            // A completion may hold the last handle, and then this runs on one of our own threads.
            if thread.thread().id() == me {
                continue;
            }
            while !thread.is_finished() && Instant::now() < until {
                std::thread::sleep(POLL);
            }
            if thread.is_finished() {
                let _ = thread.join();
            }
        }
    }
}

impl Job {
    fn request(&self) -> &Request {
        match self {
            Job::Read(read, _) => &read.request,
            Job::Len(_, request, _) => request,
        }
    }

    fn fail(self, error: FetchError) {
        match self {
            Job::Read(_, done) => done(Err(error)),
            Job::Len(_, _, done) => done(Err(error)),
        }
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    fn submit(&self, job: Job) {
        let refused = {
            let mut queue = locked(&self.queue);
            if queue.closed {
                Some((job, FetchError::Closed))
            } else if queue.jobs.iter().map(VecDeque::len).sum::<usize>() >= MAX_QUEUED {
                Some((job, FetchError::Overloaded))
            } else {
                queue.jobs[job.request().class as usize].push_back(job);
                None
            }
        };
        match refused {
            Some((job, error)) => job.fail(error),
            None => self.filled.notify_one(),
        }
    }

    fn serve(&self) {
        while let Some(job) = self.next() {
            if Instant::now() >= job.request().deadline {
                job.fail(FetchError::TimedOut);
                continue;
            }
            match job {
                Job::Read(read, done) => done(self.read(read)),
                Job::Len(object, _, done) => done(self.pack(&object).map(|pack| pack.len)),
            }
        }
    }

    fn next(&self) -> Option<Job> {
        let mut queue = locked(&self.queue);
        loop {
            if let Some(job) = queue.jobs.iter_mut().find_map(VecDeque::pop_front) {
                return Some(job);
            }
            if queue.closed {
                return None;
            }
            queue = self.filled.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn read(&self, read: ReadRequest) -> Result<Vec<u8>, FetchError> {
        let ReadRequest { object, range, mut buffer, .. } = read;
        let pack = self.pack(&object)?;
        let len = range.end.checked_sub(range.start).filter(|_| range.end <= pack.len);
        let Some(len) = len.and_then(|len| usize::try_from(len).ok()) else {
            return Err(FetchError::OutOfRange { object, range });
        };
        buffer.resize(len, 0);
        pack.file.read_exact_at(&mut buffer, range.start).map_err(|e| FetchError::io("read a pack", e))?;
        Ok(buffer)
    }

    fn pack(&self, object: &ObjectId) -> Result<Arc<Pack>, FetchError> {
        if let Some(pack) = locked(&self.packs).get(object) {
            return Ok(pack);
        }
        // Not under the lock: opening may wait for the disk. Two threads may both do it.
        let path = self.dir.join(layout::object_name(object, Part::Pack));
        let open = || -> io::Result<Pack> {
            let file = layout::open_read(&path)?;
            let len = file.metadata()?.len();
            Ok(Pack { file, len })
        };
        let pack = match open() {
            Ok(pack) => Arc::new(pack),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(FetchError::NotFound { object: *object }),
            Err(e) => return Err(FetchError::io("open a pack", e)),
        };
        locked(&self.packs).insert(*object, pack.clone());
        Ok(pack)
    }
}

impl Packs {
    fn get(&mut self, object: &ObjectId) -> Option<Arc<Pack>> {
        self.uses += 1;
        let (pack, used) = self.open.get_mut(object)?;
        *used = self.uses;
        Some(pack.clone())
    }

    fn insert(&mut self, object: ObjectId, pack: Arc<Pack>) {
        if self.open.len() >= OPEN_PACKS {
            let oldest = self.open.iter().min_by_key(|(_, (_, used))| *used).map(|(id, _)| *id);
            oldest.map(|id| self.open.remove(&id));
        }
        self.open.insert(object, (pack, self.uses));
    }
}

impl fmt::Debug for LocalStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalStore").field("dir", &self.inner.dir).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance;
    use format::Digest;
    use std::sync::mpsc;

    fn seed(dir: &Path, bytes: &[u8]) -> ObjectId {
        let id = Digest::of(bytes);
        std::fs::write(dir.join(layout::object_name(&id, Part::Pack)), bytes).unwrap();
        id
    }

    fn soon(class: Class) -> Request {
        Request { id: 1, class, deadline: Instant::now() + Duration::from_secs(60) }
    }

    #[test]
    fn it_conforms() {
        for threads in [1, 3] {
            let dir = tempfile::tempdir().unwrap();
            let store = LocalStore::new(dir.path(), threads).unwrap();
            conformance::all(&store, &|bytes| seed(dir.path(), bytes));
            let id = seed(dir.path(), &[5; 10_000]);
            conformance::dropping_completes_what_is_outstanding(Box::new(store), id, 10_000);
        }
    }

    /// Keeps the only thread busy until the sender is dropped.
    fn block(store: &LocalStore, id: ObjectId) -> mpsc::Sender<()> {
        let (go, wait) = mpsc::channel::<()>();
        let (started, running) = mpsc::channel();
        let done = Box::new(move |_| {
            started.send(()).unwrap();
            let _ = wait.recv();
        });
        store.len(&id, soon(Class::Scrub), done);
        running.recv().unwrap();
        go
    }

    #[test]
    fn demand_comes_first_and_order_is_kept_within_a_class() {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalStore::new(dir.path(), 1).unwrap();
        let id = seed(dir.path(), b"x");
        let go = block(&store, id);
        let (sender, order) = mpsc::channel();
        for (n, class) in
            [Class::Scrub, Class::Prefetch, Class::Demand, Class::Prefetch, Class::Demand].iter().enumerate()
        {
            let sender = sender.clone();
            store.len(&id, soon(*class), Box::new(move |_| sender.send(n).unwrap()));
        }
        drop((go, sender));
        assert_eq!(order.iter().collect::<Vec<_>>(), [2, 4, 1, 3, 0]);
    }

    #[test]
    fn a_queue_that_is_full_refuses_at_once() {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalStore::new(dir.path(), 1).unwrap();
        let id = seed(dir.path(), b"x");
        let go = block(&store, id);
        let (sender, results) = mpsc::channel();
        for _ in 0..MAX_QUEUED + 5 {
            let sender = sender.clone();
            store.len(&id, soon(Class::Demand), Box::new(move |r| sender.send(r.is_ok()).unwrap()));
        }
        let refused: Vec<bool> = results.try_iter().collect();
        assert_eq!(refused, [false; 5]);
        drop((go, sender));
        assert_eq!(results.iter().filter(|ok| *ok).count(), MAX_QUEUED);
    }

    #[test]
    fn a_removed_pack_stays_readable_for_whoever_read_it() {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalStore::new(dir.path(), 1).unwrap();
        let ids: Vec<ObjectId> = (0..OPEN_PACKS as u32 + 10).map(|i| seed(dir.path(), &i.to_le_bytes())).collect();
        let (sender, lens) = mpsc::channel();
        for id in &ids {
            let sender = sender.clone();
            store.len(id, soon(Class::Demand), Box::new(move |r| sender.send(r.unwrap()).unwrap()));
            assert_eq!(lens.recv().unwrap(), 4);
        }
        assert_eq!(locked(&store.inner.packs).open.len(), OPEN_PACKS);
        let last = *ids.last().unwrap();
        std::fs::remove_file(dir.path().join(layout::object_name(&last, Part::Pack))).unwrap();
        store.len(&last, soon(Class::Demand), Box::new(move |r| sender.send(r.unwrap()).unwrap()));
        assert_eq!(lens.recv().unwrap(), 4);
    }

    #[test]
    fn a_disk_that_does_not_answer_does_not_keep_the_store() {
        let dir = tempfile::tempdir().unwrap();
        let store = LocalStore::new(dir.path(), 1).unwrap();
        let id = Digest::of(b"x");
        // Opening a pipe waits for somebody who writes to it.
        let path = dir.path().join(layout::object_name(&id, Part::Pack));
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, mode, 0).unwrap();
        let (sender, results) = mpsc::channel();
        let ask = || {
            let sender = sender.clone();
            store.len(&id, soon(Class::Demand), Box::new(move |r| sender.send(r).unwrap()));
        };
        ask();
        while locked(&store.inner.queue).jobs.iter().any(|jobs| !jobs.is_empty()) {
            std::thread::yield_now();
        }
        ask();
        drop(store);
        assert!(matches!(results.try_recv(), Ok(Err(FetchError::Closed))), "the one that waited in the queue");
        assert!(results.try_recv().is_err());
        // It answers after all.
        drop(File::options().write(true).open(&path).unwrap());
        assert!(results.recv_timeout(Duration::from_secs(30)).unwrap().is_ok());
    }

    #[test]
    fn the_last_handle_may_go_in_a_completion() {
        let dir = tempfile::tempdir().unwrap();
        let id = seed(dir.path(), b"x");
        let store = Arc::new(LocalStore::new(dir.path(), 1).unwrap());
        let (sender, done) = mpsc::channel();
        let (go, wait) = mpsc::channel::<()>();
        let held = store.clone();
        store.len(
            &id,
            soon(Class::Demand),
            Box::new(move |_| {
                let _ = wait.recv();
                drop(held);
                sender.send(()).unwrap();
            }),
        );
        drop(store);
        drop(go);
        done.recv_timeout(Duration::from_secs(30)).unwrap();
    }
}
