//! An imported image read back through the store: index, object maps, frames.

#![allow(dead_code)]

pub mod make;

use image::index::{Index, InodeKind, InodeView};
use lazyroot_import::{ImportError, Imported, Options, Platform, Source, import};
use sha2::{Digest as _, Sha256};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use store::{
    Class, FrameDecoder, ImageName, LocalStore, ObjectId, ObjectMap, ObjectStore, ReadRequest, Request, Store,
};

pub fn platform() -> Platform {
    Platform::parse("linux/amd64").unwrap()
}

pub fn options() -> Options<'static> {
    Options::new(platform())
}

/// A store in a directory that goes away.
pub struct Home {
    pub dir: tempfile::TempDir,
    pub store: Store,
}

impl Home {
    pub fn new() -> Home {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("root")).unwrap();
        Home { dir, store }
    }

    pub fn import(&self, source: &str) -> Result<Imported, ImportError> {
        self.import_with(source, &options())
    }

    pub fn import_with(&self, source: &str, options: &Options<'_>) -> Result<Imported, ImportError> {
        import(&self.store, &Source::parse(source).unwrap(), &name("test"), options)
    }

    pub fn opened(&self) -> Opened {
        Opened::new(&self.store, &name("test"))
    }

    /// What a failed import must leave: nothing.
    pub fn assert_untouched(&self) {
        assert!(self.store.images().unwrap().is_empty(), "a failed import left a name");
        let mut left = Vec::new();
        walk(self.store.root(), &mut left);
        let data = |p: &PathBuf| {
            let parts: Vec<_> = p.strip_prefix(self.store.root()).unwrap().components().collect();
            parts.len() > 1 && ["objects", "indexes", "refs", "tmp"].iter().any(|d| parts[0].as_os_str() == *d)
        };
        left.retain(data);
        assert!(left.is_empty(), "a failed import left {left:?}");
    }
}

pub fn walk(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            walk(&path, out);
        } else {
            out.push(path);
        }
    }
}

pub fn name(text: &str) -> ImageName {
    ImageName::parse(text).unwrap()
}

/// An image as a reader sees it.
pub struct Opened {
    pub index: Index,
    maps: Vec<ObjectMap>,
    objects: LocalStore,
    frames: RefCell<HashMap<(usize, u32), Vec<u8>>>,
}

impl Opened {
    pub fn new(store: &Store, name: &ImageName) -> Opened {
        let record = store.image(name).unwrap();
        let file = store.index_file(&record.index).unwrap();
        let index = Index::open(file.map().unwrap()).unwrap();
        index.verify().unwrap();
        index.check().unwrap();
        assert_eq!(index.identity(), record.identity);
        let maps: Vec<ObjectMap> = index.objects().map(|(id, _)| store.object_map(&id).unwrap()).collect();
        for ((id, blocks), map) in index.objects().zip(&maps) {
            assert_eq!((id, blocks), (map.id(), map.space_blocks()));
            assert!(record.objects.contains(&id));
        }
        let objects = LocalStore::new(&store.objects_dir(), 1).unwrap();
        Opened { index, maps, objects, frames: RefCell::default() }
    }

    fn fetch(&self, object: ObjectId, range: std::ops::Range<u64>) -> Vec<u8> {
        let (tx, rx) = mpsc::channel();
        let deadline = Instant::now() + Duration::from_secs(60);
        let request = Request { id: 1, class: Class::Demand, deadline };
        let request = ReadRequest { object, range, request, buffer: Vec::new() };
        self.objects.read(request, Box::new(move |result| tx.send(result).unwrap()));
        rx.recv().unwrap().unwrap()
    }

    fn block(&self, object: usize, block: u32, out: &mut Vec<u8>) {
        let map = &self.maps[object];
        let number = map.frame_of_block(block).expect("a block of some frame");
        let frame = map.frame(number).unwrap();
        let mut frames = self.frames.borrow_mut();
        if frames.len() > 64 {
            frames.clear();
        }
        let content = frames.entry((object, number)).or_insert_with(|| {
            let start = frame.offset.get();
            let stored = self.fetch(map.id(), start..start + u64::from(frame.stored_len.get()));
            let mut content = Vec::new();
            FrameDecoder::new().decode(map, number, &stored, &mut content).unwrap();
            content
        });
        let at = (block - frame.space_block.get()) as usize * 4096;
        out.extend_from_slice(&content[at..at + 4096]);
    }

    /// Bytes of a file; zeros where there is a hole.
    pub fn read(&self, ino: u32, offset: u64, len: u64) -> Vec<u8> {
        let InodeKind::File { size } = self.index.inode(ino).unwrap().kind else { panic!("not a file") };
        let end = (offset + len).min(size);
        let extents: Vec<_> = self.index.extents(ino).unwrap().map(|e| e.unwrap()).collect();
        let mut out = Vec::new();
        let mut block = offset / 4096;
        while block * 4096 < end {
            let at = extents.partition_point(|e| u64::from(e.file_block) + u64::from(e.count) <= block);
            match extents.get(at).filter(|e| u64::from(e.file_block) <= block) {
                Some(e) => {
                    self.block(e.object as usize, e.space_block + (block - u64::from(e.file_block)) as u32, &mut out)
                }
                None => out.resize(out.len() + 4096, 0),
            }
            block += 1;
        }
        let skip = (offset % 4096) as usize;
        out[skip.min(out.len())..(skip + end.saturating_sub(offset) as usize).min(out.len())].to_vec()
    }

    pub fn sha256(&self, ino: u32, size: u64) -> String {
        let mut h = Sha256::new();
        let mut at = 0;
        while at < size {
            let bytes = self.read(ino, at, 1 << 20);
            h.update(&bytes);
            at += bytes.len() as u64;
        }
        hex(&h.finalize())
    }

    pub fn find(&self, path: &str) -> Option<InodeView> {
        self.index.resolve(path.as_bytes()).unwrap().map(|ino| self.index.inode(ino).unwrap())
    }

    pub fn content(&self, path: &str) -> Vec<u8> {
        let inode = self.find(path).unwrap_or_else(|| panic!("{path} is not there"));
        self.read(inode.ino, 0, inode.size())
    }

    /// Blocks of a file that lie in objects.
    pub fn data_blocks(&self, path: &str) -> u64 {
        let ino = self.find(path).unwrap().ino;
        self.index.extents(ino).unwrap().map(|e| u64::from(e.unwrap().count)).sum()
    }

    /// Every path and its inode.
    pub fn paths(&self) -> BTreeMap<Vec<u8>, u32> {
        let mut out = BTreeMap::new();
        let mut stack = vec![(Vec::new(), 0)];
        while let Some((path, ino)) = stack.pop() {
            if self.index.inode(ino).unwrap().is_dir() {
                for e in self.index.entries(ino).unwrap() {
                    let e = e.unwrap();
                    stack.push(([&path[..], b"/", e.name].concat(), e.ino));
                }
            }
            out.insert(if path.is_empty() { b"/".to_vec() } else { path }, ino);
        }
        out
    }

    pub fn xattrs(&self, inode: &InodeView) -> BTreeMap<Vec<u8>, Vec<u8>> {
        let list = self.index.xattrs(inode.xattrs).unwrap();
        list.map(|x| x.unwrap()).map(|(n, v)| (n.to_vec(), v.to_vec())).collect()
    }
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

pub fn sha256(bytes: &[u8]) -> String {
    hex(&Sha256::digest(bytes))
}
