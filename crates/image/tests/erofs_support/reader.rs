//! An EROFS image as erofs-rs reads it, which knows nothing of us: for these tests and for `xtask trees`.

use erofs_rs::EroFS;
use erofs_rs::backend::SliceImage;
use erofs_rs::types::Inode;
use image::snapshot::{Record, RecordKind, Snapshot, SnapshotBuilder, hash_content};
use std::os::unix::fs::PermissionsExt;

type Failure = Box<dyn std::error::Error>;

/// Files beyond this size are not read: they are holes for the most part.
const MOST: u64 = 1 << 30;

/// The tree in an image; without the files' content where that is not asked for, or is not in it.
pub fn snapshot(image: &[u8], content: bool) -> Result<Snapshot, Failure> {
    let fs = EroFS::new(SliceImage::new(image))?;
    let mut builder = SnapshotBuilder::default();
    let root = fs.get_inode(fs.super_block().root_inode_id())?;
    builder.add(b"/".to_vec(), record(&fs, root, content)?, Some((0, root.id())));
    for entry in fs.walk_dir("/")? {
        let entry = entry?;
        let name = entry.dir_entry.file_name();
        if name != b"." && name != b".." {
            let path = entry.dir_entry.path().into_vec();
            builder.add(path, record(&fs, entry.inode, content)?, Some((0, entry.inode.id())));
        }
    }
    Ok(builder.finish())
}

fn record(fs: &EroFS<SliceImage<'_>>, inode: Inode, content: bool) -> Result<Record, Failure> {
    let device = || inode.device().ok_or("a device without numbers");
    let kind = match inode.file_type() {
        t if t.is_dir() => RecordKind::Dir,
        t if t.is_file() => {
            let size = inode.data_size();
            let digest = match content && size <= MOST {
                true => Some(hash_content(&mut fs.open_inode_file(inode)?)?),
                false => None,
            };
            RecordKind::File { size, digest }
        }
        t if t.is_symlink() => RecordKind::Symlink(fs.read_link_inode(inode)?.into_vec()),
        t if t.is_char_device() => {
            let (major, minor) = device()?;
            RecordKind::Char(major, minor)
        }
        t if t.is_block_device() => {
            let (major, minor) = device()?;
            RecordKind::Block(major, minor)
        }
        t if t.is_fifo() => RecordKind::Fifo,
        t if t.is_socket() => RecordKind::Socket,
        t => return Err(format!("unknown type {t:?}").into()),
    };
    Ok(Record {
        kind,
        mode: (inode.permissions().mode() & 0o7777) as u16,
        uid: inode.uid(),
        gid: inode.gid(),
        mtime: inode.modified_unix(),
        nlink: inode.nlink(),
        xattrs: fs.xattrs_inode(inode)?.into_iter().collect(),
        link_group: 0,
    })
}
