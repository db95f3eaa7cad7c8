//! Superblocks: one per image and shape, however many mounts of it there are.
//!
//! Job: open images, serve them, mount them in the daemon's own mount namespace, and hand out detached clones.
//! Invariants: a superblock is made once even when several ask at the same time; what is handed out is a clone, so
//! it outlives nothing but the daemon. Mounting waits for serving threads, so it never happens on one. Failure
//! model: what cannot be made is an error for its asker only; half-made things are taken apart.

use super::log::LogFile;
use super::push::Pusher;
use crate::control::proto::{Dev, Shape};
use crate::failure::Failure;
use crate::front::{BlockFile, BlockFiles, BlockFilesOptions, BufferPool, Context as FrontContext, Fault, Session};
use crate::front::{TreeOptions, TreeSession};
use crate::source::{ErofsSource, ImageTree, OpenImage};
use anyhow::Context;
use format::Digest;
use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};
use store::{Cache, LocalStore, Store};
use sys::mount::{MountAttrFlags, Recipe, SetAttrs, UnmountFlags};

/// Threads that read packs.
const STORE_THREADS: usize = 2;
/// How long the kernel is given to say that a superblock is gone.
const GOODBYE: Duration = Duration::from_millis(300);

/// A superblock that is mounted in the daemon's namespace.
#[derive(Debug)]
pub struct Superblock {
    /// Index and shape.
    pub key: (Digest, Shape),
    /// The name of the image when it was first mounted.
    pub image: String,
    /// Its device number.
    pub device: Dev,
    /// What mountinfo shows as its source.
    pub source: String,
    /// When it was made.
    pub since: Instant,
    /// The image behind it.
    pub opened: Arc<OpenImage>,
    /// None once released: an open mount keeps its superblock.
    mount: Mutex<Option<Arc<OwnedFd>>>,
    place: PathBuf,
    served: Mutex<Option<Served>>,
}

#[derive(Debug)]
enum Served {
    File { session: Arc<FileSession>, file: BlockFile, name: String, source: Arc<ErofsSource> },
    Tree(Session),
}

impl Superblock {
    /// A detached clone of the mount.
    pub fn clone_mount(&self, suid: bool, dev: bool) -> anyhow::Result<OwnedFd> {
        let mount = self.mount.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mount = mount.context("the mount has just been released; try again")?;
        let copy = sys::mount::clone_tree(mount.as_fd(), "", false).context("cloning the mount")?;
        let mut set = MountAttrFlags::MOUNT_ATTR_RDONLY;
        if !suid {
            set |= MountAttrFlags::MOUNT_ATTR_NOSUID;
        }
        if !dev {
            set |= MountAttrFlags::MOUNT_ATTR_NODEV;
        }
        sys::mount::set_attrs(copy.as_fd(), SetAttrs { set: set.bits().into(), ..Default::default() })
            .context("restricting the mount (mount_setattr)")?;
        Ok(copy)
    }

    /// Unmounts it here and stops serving it by name. A tree's session comes back, because somebody may still have
    /// a mount of it that no namespace shows; a block file's kernel users are served until they are gone anyway.
    fn release(&self, log: &LogFile) -> Option<Session> {
        let served = self.served.lock().unwrap_or_else(PoisonError::into_inner).take()?;
        drop(self.mount.lock().unwrap_or_else(PoisonError::into_inner).take());
        if let Err(e) = sys::mount::unmount(&self.place, UnmountFlags::DETACH) {
            log.warn(format_args!("{}: unmounting {}: {e}", self.image, self.place.display()));
        }
        if let Err(e) = std::fs::remove_dir(&self.place) {
            log.warn(format_args!("{}: removing {}: {e}", self.image, self.place.display()));
        }
        match served {
            Served::File { session, file, name, .. } => {
                if let Some(pusher) = &session.pusher {
                    pusher.remove(&name);
                }
                session.files.remove(file);
                None
            }
            Served::Tree(session) => Some(session),
        }
    }

    /// Whether it is still served.
    pub fn is_alive(&self) -> bool {
        match &*self.served.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Served::File { session, .. }) => session.files.is_alive(),
            Some(Served::Tree(session)) => session.is_alive(),
            None => false,
        }
    }

    /// Counters: of a tree's session; of a block file, which shares its session with others, what is its own.
    pub fn counters(&self) -> Option<serde_json::Value> {
        match &*self.served.lock().unwrap_or_else(PoisonError::into_inner) {
            Some(Served::Tree(session)) => Some(counters_json(session.counters(), session.parked_now())),
            Some(Served::File { source, .. }) => Some(serde_json::json!({
                "metadata_bytes": source.metadata_bytes(),
                "metadata_reads": source.metadata_reads().count(),
                "metadata_pushed": source.metadata_reads().was_satisfied(),
            })),
            None => None,
        }
    }
}

/// A session's counters.
pub fn counters_json(counters: &crate::front::Counters, parked_now: usize) -> serde_json::Value {
    serde_json::json!({
        "requests": counters.all_requests(),
        "reads": counters.reads(),
        "read_bytes": counters.read_bytes(),
        "parked": counters.parked(),
        "parked_now": parked_now,
        "errors": counters.errors(),
        "refused": counters.refused(),
    })
}

/// The session of block files, and what pushes into them: nothing when that is switched off.
#[derive(Debug)]
struct FileSession {
    // First, for it ends before the session does.
    pusher: Option<Pusher>,
    files: Arc<BlockFiles>,
}

/// What makes superblocks.
pub struct Images {
    store: Store,
    cache: Cache,
    context: FrontContext,
    log: Arc<LogFile>,
    threads: usize,
    /// The directory, in the daemon's own namespace, that mounts are attached below; none without privilege.
    namespace: Option<PathBuf>,
    opened: Mutex<HashMap<Digest, Weak<OpenImage>>>,
    files: Mutex<Option<Arc<FileSession>>>,
    /// Bytes of metadata that are pushed at a time; 0 for none.
    push_bytes: u64,
    /// Sessions of trees that are unmounted here but, it seems, not everywhere.
    leftover: Mutex<Vec<Session>>,
    made: AtomicU64,
}

impl std::fmt::Debug for Images {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Images").field("namespace", &self.namespace).finish_non_exhaustive()
    }
}

impl Images {
    /// Opens the store and its cache. `push_bytes` of metadata are pushed at a time.
    pub fn open(
        root: &Path,
        namespace: Option<PathBuf>,
        threads: usize,
        push_bytes: u64,
        log: Arc<LogFile>,
    ) -> anyhow::Result<Images> {
        let store = Store::open(root)?;
        let objects = LocalStore::new(&store.objects_dir(), STORE_THREADS).context("starting to read objects")?;
        let cache = Cache::open(&store.cache_dir(), Arc::new(objects), store::cache::CacheOptions::default())?;
        let context =
            FrontContext { log: log.clone(), buffers: Arc::new(BufferPool::new(threads.max(2))), ..Default::default() };
        Ok(Images {
            store,
            cache,
            context,
            log,
            threads,
            namespace,
            opened: Mutex::default(),
            files: Mutex::default(),
            push_bytes,
            leftover: Mutex::default(),
            made: AtomicU64::new(0),
        })
    }

    /// Whether kernel mounts can be made.
    pub fn is_privileged(&self) -> bool {
        self.namespace.is_some()
    }

    /// The cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Closes spaces that nobody uses and removes those whose object the store no longer has; the bytes freed.
    pub fn prune(&self) -> anyhow::Result<u64> {
        self.cache.release_unused()?;
        Ok(self.cache.prune(&|id| self.store.has_object(id))?)
    }

    /// Opens an image, or finds it open.
    pub fn image(&self, digest: &Digest) -> anyhow::Result<Arc<OpenImage>> {
        // Held while opening: a second asker for any image waits, which is short, and never opens one twice.
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(image) = opened.get(digest).and_then(Weak::upgrade) {
            return Ok(image);
        }
        let image = Arc::new(OpenImage::open(&self.store, &self.cache, digest)?);
        opened.retain(|_, weak| weak.strong_count() > 0);
        opened.insert(*digest, Arc::downgrade(&image));
        Ok(image)
    }

    /// Makes the superblock of an image in a shape.
    pub fn make(&self, digest: &Digest, shape: Shape, name: &str) -> anyhow::Result<Superblock> {
        let Some(namespace) = &self.namespace else {
            return Err(Failure::unavailable("the daemon has no right to mount (CAP_SYS_ADMIN)").into());
        };
        let opened = self.image(digest)?;
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let label = format!("lazyroot-{}-{}-{number}", &digest.to_hex()[..12], std::process::id());
        let (mount, served, source) = match shape {
            Shape::Erofs => self.make_erofs(&opened, &label)?,
            Shape::Tree => self.make_tree(&opened, &label)?,
        };
        let place = namespace.join(&label);
        let attach = || -> anyhow::Result<Dev> {
            std::fs::create_dir(&place)?;
            sys::mount::attach(mount.as_fd(), sys::mount::open_target(&place)?.as_fd())?;
            let ids = sys::mount::ids(&mount)?;
            Ok(Dev { major: ids.dev_major, minor: ids.dev_minor })
        };
        let attached = attach().with_context(|| format!("attaching {}", place.display()));
        let mut superblock = Superblock {
            key: (*digest, shape),
            image: name.to_owned(),
            device: Dev { major: 0, minor: 0 },
            source,
            since: Instant::now(),
            opened,
            mount: Mutex::new(Some(Arc::new(mount))),
            place,
            served: Mutex::new(Some(served)),
        };
        match attached {
            Ok(device) => {
                superblock.device = device;
                Ok(superblock)
            }
            Err(e) => {
                self.release(&superblock);
                Err(e)
            }
        }
    }

    fn make_erofs(&self, opened: &Arc<OpenImage>, label: &str) -> anyhow::Result<(OwnedFd, Served, String)> {
        let source = Arc::new(ErofsSource::new(Arc::clone(opened))?);
        let session = self.files()?;
        let file = session.files.add(label, source.clone())?;
        let mount = || -> anyhow::Result<(OwnedFd, String)> {
            let path = session.files.path(file).context("the block file is gone")?;
            let path = path.to_str().context("a path that is not UTF-8")?.to_owned();
            let recipe = Recipe {
                fstype: "erofs".to_owned(),
                options: vec![("source".to_owned(), Some(path.clone())), ("ro".to_owned(), None)],
                attrs: MountAttrFlags::MOUNT_ATTR_RDONLY,
            };
            // Apart, for it reads what our own threads serve.
            Ok((recipe.make_apart().map_err(explain_erofs)?, path))
        };
        match mount() {
            Ok((mount, path)) => {
                // Beside whatever comes next; the mount itself has read two pages.
                if let Some(pusher) = &session.pusher {
                    pusher.add(label, source.metadata_reads());
                }
                Ok((mount, Served::File { session, file, name: label.to_owned(), source }, path))
            }
            Err(e) => {
                session.files.remove(file);
                Err(e)
            }
        }
    }

    fn make_tree(&self, opened: &Arc<OpenImage>, label: &str) -> anyhow::Result<(OwnedFd, Served, String)> {
        let mut session = TreeSession::start(tree_of(opened), &self.tree_options(opened, label), self.context.clone())?;
        let mount = session.take_mount().context("the session has no mount")?;
        Ok((mount, Served::Tree(session), label.to_owned()))
    }

    fn tree_options(&self, opened: &OpenImage, label: &str) -> TreeOptions {
        let header = opened.index().header();
        TreeOptions {
            name: label.to_owned(),
            threads: self.threads,
            // What a mount of it honours is decided on the clone.
            suid: self.is_privileged(),
            dev: self.is_privileged(),
            posix_acl: has_acls(opened),
            inodes: header.inode_count.get().into(),
            bytes: header.content_bytes.get(),
            ..Default::default()
        }
    }

    /// Serves a tree at a path of an ordinary user, mounted by fusermount3.
    pub fn serve_at(&self, digest: &Digest, place: &Path) -> anyhow::Result<(Session, Arc<OpenImage>, String)> {
        let opened = self.image(digest)?;
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        let label = format!("lazyroot-{}-{}-{number}", &digest.to_hex()[..12], std::process::id());
        let options = self.tree_options(&opened, &label);
        let session = TreeSession::start_at(tree_of(&opened), place, &options, self.context.clone())
            .with_context(|| format!("mounting at {}", place.display()))?;
        Ok((session, opened, label))
    }

    /// The session of block files, started when it is first needed.
    fn files(&self) -> Result<Arc<FileSession>, Fault> {
        let mut session = self.files.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(session) = session.as_ref().filter(|s| s.files.is_alive()) {
            return Ok(Arc::clone(session));
        }
        let options = BlockFilesOptions { threads: self.threads, ..Default::default() };
        let files = Arc::new(BlockFiles::start(&options, self.context.clone())?);
        let push = || Pusher::start(&files, self.push_bytes);
        let pusher = match (self.push_bytes > 0).then(push).transpose() {
            Ok(pusher) => pusher,
            Err(e) => {
                self.log.warn(format_args!("metadata is not pushed: starting a thread: {e}"));
                None
            }
        };
        let started = Arc::new(FileSession { pusher, files });
        *session = Some(Arc::clone(&started));
        Ok(started)
    }

    /// Unmounts a superblock here. Who still has it mounted out of sight is served on.
    pub fn release(&self, superblock: &Superblock) {
        if let Some(session) = superblock.release(&self.log)
            && !session.wait(Some(GOODBYE))
        {
            self.leftover.lock().unwrap_or_else(PoisonError::into_inner).push(session);
        }
    }

    /// How many superblocks are still in use out of sight: detached mounts, namespaces without processes. Only
    /// right when every superblock has been released.
    pub fn in_use(&self) -> usize {
        let until = Instant::now() + GOODBYE;
        let mut leftover = self.leftover.lock().unwrap_or_else(PoisonError::into_inner);
        leftover.retain(Session::is_alive);
        let trees = leftover.len();
        drop(leftover);
        let session = self.files.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(session) = session else { return trees };
        let files = &session.files;
        // The kernel forgets a file a moment after its last user is gone.
        while !files.is_empty() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        trees + files.len()
    }

    /// Counters of the block files' session.
    pub fn file_counters(&self) -> Option<serde_json::Value> {
        let session = self.files.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        let mut counters = counters_json(session.files.counters(), session.files.parked_now());
        counters["metadata"] = session.pusher.as_ref().map(Pusher::counters).into();
        Some(counters)
    }

    /// Ends every session that is left.
    pub fn stop(&self) {
        self.leftover.lock().unwrap_or_else(PoisonError::into_inner).clear();
        let session = self.files.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(FileSession { pusher, files }) = session.and_then(Arc::into_inner) {
            drop(pusher);
            if let Some(files) = Arc::into_inner(files) {
                files.stop();
            }
        }
    }
}

fn tree_of(opened: &Arc<OpenImage>) -> Arc<ImageTree> {
    Arc::new(ImageTree::new(Arc::clone(opened)))
}

/// What a refused EROFS mount means.
fn explain_erofs(error: std::io::Error) -> anyhow::Error {
    let what = match sys::mount::raw_errno(&error) {
        Some(errno) if errno == rustix::io::Errno::NOTBLK.raw_os_error() => {
            "this kernel mounts EROFS only from block devices (Linux 6.12 with CONFIG_EROFS_FS_BACKED_BY_FILE is needed)"
        }
        Some(errno) if errno == rustix::io::Errno::NODEV.raw_os_error() => "this kernel has no EROFS (modprobe erofs?)",
        Some(errno) if errno == rustix::io::Errno::PERM.raw_os_error() => "no right to mount EROFS",
        _ => "mounting EROFS",
    };
    anyhow::Error::new(error).context(what)
}

/// Whether any inode of the image carries an ACL.
fn has_acls(opened: &OpenImage) -> bool {
    let index = opened.index();
    (0..index.xattr_set_count()).any(|set| {
        index
            .xattrs(set)
            .is_ok_and(|mut all| all.any(|x| x.is_ok_and(|(name, _)| name.starts_with(b"system.posix_acl_"))))
    })
}
