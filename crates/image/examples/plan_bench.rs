//! How long planning and emitting an EROFS image takes for the names of a directory.
//!
//! `plan_bench DIR` or `plan_bench wide:N` (one directory of N files); `once` as the second argument plans and emits
//! once only, for counting instructions: `valgrind --tool=callgrind --toggle-collect='*plan_bench::measured*'`.

extern crate lazyroot_image as image;

use format::{BLOCK, Digest};
use image::erofs::{Options, Plan};
use image::index::{Index, build};
use image::tree::{Attrs, Kind, NodeId, Run, Tree};
use std::collections::HashMap;
use std::io::Cursor;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let mut args = std::env::args().skip(1);
    let source = args.next().ok_or("which directory?")?;
    let once = args.next().as_deref() == Some("once");
    let mut tree = Tree::new();
    let pack = tree.object_placeholder();
    let mut space = 0;
    match source.strip_prefix("wide:") {
        Some(count) => {
            for n in 0..count.parse::<u32>()? {
                let node = tree.create(Tree::ROOT, format!("file{n:07}").as_bytes(), Kind::File, Attrs::default())?;
                place(&mut tree, node, pack, &mut space, 5000)?;
            }
        }
        None => walk(&mut tree, Path::new(&source), Tree::ROOT, pack, &mut space, &mut HashMap::new())?,
    }
    tree.name_object(pack, Digest::of(b"pack"), space);
    let mut bytes = Cursor::new(Vec::new());
    let built = build(&tree, &mut bytes)?;
    drop(tree);
    let index = Index::open(Arc::new(bytes.into_inner()))?;

    let mut out = vec![0; Plan::new(&index, &Options::default())?.meta_len() as usize];
    if once {
        measured(&index, &mut out)?;
        return Ok(());
    }
    let (mut plans, mut emits) = (Vec::new(), Vec::new());
    for _ in 0..21 {
        let (plan, emit) = measured(&index, &mut out)?;
        plans.push(plan);
        emits.push(emit);
    }
    let inodes = f64::from(built.inode_count);
    let each = |what: &str, mut times: Vec<Duration>| {
        times.sort();
        let per_inode = |time: Duration| time.as_nanos() as f64 / inodes;
        println!("{what}: {:.1} ns an inode (fastest {:.1})", per_inode(times[times.len() / 2]), per_inode(times[0]));
    };
    println!("{} inodes, {} names, {} bytes of metadata", built.inode_count, built.name_count, out.len());
    let both = plans.iter().zip(&emits).map(|(a, b)| *a + *b).collect();
    each("plan", plans);
    each("emit", emits);
    each("both", both);
    Ok(())
}

#[inline(never)]
fn measured(index: &Index, out: &mut [u8]) -> Result<(Duration, Duration), Failure> {
    let start = Instant::now();
    let plan = Plan::new(index, &Options::default())?;
    let planned = start.elapsed();
    plan.emit(index, 0..plan.meta_len(), out)?;
    Ok((planned, start.elapsed() - planned))
}

fn place(tree: &mut Tree, node: NodeId, object: u32, space: &mut u64, size: u64) -> Result<(), Failure> {
    let count = size.div_ceil(BLOCK);
    let runs = [Run { file_block: 0, count: count as u32, object, space_block: *space as u32 }];
    tree.set_content(node, size, Digest::default(), &runs[..usize::from(count > 0)])?;
    *space += count;
    Ok(())
}

fn walk(
    tree: &mut Tree,
    path: &Path,
    dir: NodeId,
    object: u32,
    space: &mut u64,
    links: &mut HashMap<u64, NodeId>,
) -> Result<(), Failure> {
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        let (name, full) = (entry.file_name(), entry.path());
        let meta = full.symlink_metadata()?;
        let file_type = meta.file_type();
        if let Some(node) = links.get(&meta.ino()) {
            tree.link(dir, name.as_bytes(), *node)?;
            continue;
        }
        let (major, minor) = ((meta.rdev() >> 8) as u32 & 0xFFF, meta.rdev() as u32 & 0xFF);
        let kind = match file_type {
            t if t.is_dir() => Kind::Dir,
            t if t.is_symlink() => Kind::Symlink,
            t if t.is_file() => Kind::File,
            t if t.is_char_device() => Kind::Char { major, minor },
            t if t.is_block_device() => Kind::Block { major, minor },
            t if t.is_fifo() => Kind::Fifo,
            _ => Kind::Socket,
        };
        let attrs = Attrs {
            mode: (meta.mode() & 0o7777) as u16,
            uid: meta.uid(),
            gid: meta.gid(),
            mtime_sec: meta.mtime(),
            mtime_nsec: meta.mtime_nsec() as u32,
            ..Attrs::default()
        };
        let node = tree.create(dir, name.as_bytes(), kind, attrs)?;
        match kind {
            Kind::Dir => walk(tree, &full, node, object, space, links)?,
            Kind::Symlink => tree.set_target(node, std::fs::read_link(&full)?.as_os_str().as_bytes())?,
            Kind::File => place(tree, node, object, space, meta.len())?,
            _ => {}
        }
        if meta.nlink() > 1 && kind != Kind::Dir {
            links.insert(meta.ino(), node);
        }
    }
    Ok(())
}
