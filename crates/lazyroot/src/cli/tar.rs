//! An image as a tar archive: POSIX pax, in path order, hard links as links, so that importing it gives the same
//! identity. Sockets, which tar does not know, are left out.
//!
//! Holes are written as zeros, which every tar reads, or on demand left out as GNU tar does it (PAX sparse format 1.0):
//! the file's data begins with a map in decimal lines, and its real name and size stand in the pax header.

use crate::reader::{ImageReader, Piece};
use anyhow::Context;
use format::BLOCK as IMAGE_BLOCK;
use image::index::{Index, InodeKind, InodeView};
use std::collections::HashMap;
use std::io::Write;

const BLOCK: usize = 512;
/// The largest number that a field of 12 octal digits holds.
const MAX_OCTAL: u64 = 0o77_777_777_777;
const MAX_ID: u32 = 0o7_777_777;
/// As many pieces of one sparse file are written; our own import reads no more. Files of more are written whole.
const MAX_PIECES: usize = 400_000 - 1;

/// Writes the archive; with `sparse`, files with holes as sparse files.
pub fn write(reader: &mut ImageReader, sparse: bool, out: &mut dyn Write) -> anyhow::Result<()> {
    let index = reader.index().clone();
    let mut linked: HashMap<u32, Vec<u8>> = HashMap::new();
    let mut stack = vec![(Vec::new(), 0u32, 0u32)];
    while let Some((path, ino, depth)) = stack.pop() {
        let inode = index.inode(ino)?;
        if inode.is_dir() {
            anyhow::ensure!(depth <= format::index::MAX_DEPTH, "deeper than an image can be");
            let from = stack.len();
            for entry in index.entries(ino)? {
                let entry = entry?;
                let mut below = path.clone();
                if !below.is_empty() {
                    below.push(b'/');
                }
                below.extend_from_slice(entry.name);
                stack.push((below, entry.ino, depth + 1));
            }
            stack[from..].reverse();
        }
        let mut name = if path.is_empty() { b"./".to_vec() } else { path };
        if inode.is_dir() && !name.ends_with(b"/") {
            name.push(b'/');
        }
        if let Some(first) = linked.get(&ino) {
            header(out, &name, &inode, b'1', first, Size::Whole(0), &[])?;
            continue;
        }
        if inode.nlink > 1 && !inode.is_dir() {
            linked.insert(ino, name.clone());
        }
        let xattrs: Vec<(Vec<u8>, Vec<u8>)> =
            index.xattrs(inode.xattrs)?.map(|x| x.map(|(n, v)| (n.to_vec(), v.to_vec()))).collect::<Result<_, _>>()?;
        let (kind, target, size) = match inode.kind {
            InodeKind::File { size } => (b'0', Vec::new(), size),
            InodeKind::Dir { .. } => (b'5', Vec::new(), 0),
            InodeKind::Symlink { .. } => (b'2', index.link_target(ino)?.to_vec(), 0),
            InodeKind::Char { .. } => (b'3', Vec::new(), 0),
            InodeKind::Block { .. } => (b'4', Vec::new(), 0),
            InodeKind::Fifo => (b'6', Vec::new(), 0),
            InodeKind::Socket => continue,
        };
        let map = if sparse && kind == b'0' { sparse_map(&index, ino, size)? } else { None };
        let shown = || crate::paths::show(&name);
        match map {
            Some(map) => {
                let stored = map.text.len() as u64 + map.data;
                header(out, &name, &inode, kind, &target, Size::Sparse { stored, real: size }, &xattrs)?;
                out.write_all(&map.text)?;
                let mut data = |piece: Piece<'_>| match piece {
                    Piece::Hole(_) => Ok(()),
                    Piece::Bytes(bytes) => Ok(out.write_all(bytes)?),
                };
                reader.pieces(ino, &mut data).with_context(shown)?;
                pad(out, stored)?;
            }
            None => {
                header(out, &name, &inode, kind, &target, Size::Whole(size), &xattrs)?;
                if kind == b'0' {
                    reader.copy(ino, out).with_context(shown)?;
                    pad(out, size)?;
                }
            }
        }
    }
    out.write_all(&[0; 2 * BLOCK])?;
    Ok(())
}

/// What stands in front of a sparse file's data, and how much data there is.
struct SparseMap {
    text: Vec<u8>,
    data: u64,
}

/// The map of a file; none when it has no holes, or so many that it is better written whole.
fn sparse_map(index: &Index, ino: u32, size: u64) -> anyhow::Result<Option<SparseMap>> {
    let mut pieces: Vec<(u64, u64)> = Vec::new();
    for extent in index.extents(ino)? {
        let extent = extent?;
        let start = u64::from(extent.file_block) * IMAGE_BLOCK;
        let stop = (start + u64::from(extent.count) * IMAGE_BLOCK).min(size);
        match pieces.last_mut() {
            Some((_, end)) if *end == start => *end = stop,
            _ => pieces.push((start, stop)),
        }
    }
    let data: u64 = pieces.iter().map(|(start, stop)| stop - start).sum();
    if data == size || pieces.len() > MAX_PIECES {
        return Ok(None);
    }
    // A hole at the end is an empty piece there.
    if pieces.last().is_none_or(|(_, stop)| *stop < size) {
        pieces.push((size, size));
    }
    let mut text = format!("{}\n", pieces.len()).into_bytes();
    for (start, stop) in pieces {
        text.extend_from_slice(format!("{start}\n{}\n", stop - start).as_bytes());
    }
    text.resize(text.len().next_multiple_of(BLOCK), 0);
    Ok(Some(SparseMap { text, data }))
}

/// How many bytes follow a header, and how long the file is.
#[derive(Clone, Copy)]
enum Size {
    Whole(u64),
    Sparse { stored: u64, real: u64 },
}

fn pad(out: &mut dyn Write, size: u64) -> std::io::Result<()> {
    let rest = (size % BLOCK as u64) as usize;
    if rest > 0 {
        out.write_all(&[0; BLOCK][rest..])?;
    }
    Ok(())
}

/// One pax record: `LENGTH KEY=VALUE\n`, where the length counts itself.
fn record(out: &mut Vec<u8>, key: &[u8], value: &[u8]) {
    let rest = key.len() + value.len() + 3;
    let mut len = rest + 1;
    while len != rest + len.to_string().len() {
        len = rest + len.to_string().len();
    }
    out.extend_from_slice(len.to_string().as_bytes());
    out.push(b' ');
    out.extend_from_slice(key);
    out.push(b'=');
    out.extend_from_slice(value);
    out.push(b'\n');
}

fn header(
    out: &mut dyn Write,
    name: &[u8],
    inode: &InodeView,
    kind: u8,
    target: &[u8],
    size: Size,
    xattrs: &[(Vec<u8>, Vec<u8>)],
) -> anyhow::Result<()> {
    let mut pax = Vec::new();
    let (size, placeholder) = match size {
        Size::Whole(size) => (size, None),
        Size::Sparse { stored, real } => {
            record(&mut pax, b"GNU.sparse.major", b"1");
            record(&mut pax, b"GNU.sparse.minor", b"0");
            record(&mut pax, b"GNU.sparse.name", name);
            record(&mut pax, b"GNU.sparse.realsize", real.to_string().as_bytes());
            // Who does not know the format makes a file of this name, and not one with the map in it of the real name.
            (stored, Some(placeholder(name)))
        }
    };
    let name = placeholder.as_deref().unwrap_or(name);
    if name.len() > 100 || !name.is_ascii() {
        record(&mut pax, b"path", name);
    }
    if target.len() > 100 || !target.is_ascii() {
        record(&mut pax, b"linkpath", target);
    }
    if size > MAX_OCTAL {
        record(&mut pax, b"size", size.to_string().as_bytes());
    }
    for (key, id) in [(&b"uid"[..], inode.uid), (b"gid", inode.gid)] {
        if id > MAX_ID {
            record(&mut pax, key, id.to_string().as_bytes());
        }
    }
    if inode.mtime_nsec != 0 || inode.mtime_sec < 0 || inode.mtime_sec as u64 > MAX_OCTAL {
        record(&mut pax, b"mtime", time(inode.mtime_sec, inode.mtime_nsec).as_bytes());
    }
    for (name, value) in xattrs {
        record(&mut pax, &[b"SCHILY.xattr.", name.as_slice()].concat(), value);
    }
    if !pax.is_empty() {
        block(out, b"pax", 0o644, 0, 0, pax.len() as u64, 0, b'x', b"", (0, 0))?;
        out.write_all(&pax)?;
        pad(out, pax.len() as u64)?;
    }
    let device = match inode.kind {
        InodeKind::Char { major, minor } | InodeKind::Block { major, minor } => (major, minor),
        _ => (0, 0),
    };
    let mtime = u64::try_from(inode.mtime_sec).unwrap_or(0).min(MAX_OCTAL);
    let permissions = inode.permissions();
    block(out, name, permissions, inode.uid, inode.gid, size, mtime, kind, target, device)?;
    Ok(())
}

/// The name that a sparse file has for those who do not know the format: as GNU tar makes it.
fn placeholder(name: &[u8]) -> Vec<u8> {
    let at = name.iter().rposition(|b| *b == b'/').map_or(0, |i| i + 1);
    [&name[..at], b"GNUSparseFile.0/", &name[at..]].concat()
}

/// Seconds with a fraction, negative ones too: `-1.5` is half a second before `-1`.
fn time(sec: i64, nsec: u32) -> String {
    if nsec == 0 {
        return sec.to_string();
    }
    let (sign, whole, part) =
        if sec < 0 { ("-", (sec + 1).unsigned_abs(), 1_000_000_000 - nsec) } else { ("", sec as u64, nsec) };
    format!("{sign}{whole}.{part:09}")
}

#[allow(clippy::too_many_arguments)]
fn block(
    out: &mut dyn Write,
    name: &[u8],
    mode: u16,
    uid: u32,
    gid: u32,
    size: u64,
    mtime: u64,
    kind: u8,
    target: &[u8],
    device: (u32, u32),
) -> std::io::Result<()> {
    let mut b = [0u8; BLOCK];
    let mut put = |at: usize, bytes: &[u8]| b[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &name[..name.len().min(100)]);
    put(100, format!("{mode:07o}").as_bytes());
    // What does not fit stands in the pax header.
    put(108, format!("{:07o}", uid.min(MAX_ID)).as_bytes());
    put(116, format!("{:07o}", gid.min(MAX_ID)).as_bytes());
    put(124, format!("{:011o}", if size > MAX_OCTAL { 0 } else { size }).as_bytes());
    put(136, format!("{mtime:011o}").as_bytes());
    put(148, b"        ");
    put(156, &[kind]);
    put(157, &target[..target.len().min(100)]);
    put(257, b"ustar\x0000");
    put(329, format!("{:07o}", device.0.min(MAX_ID)).as_bytes());
    put(337, format!("{:07o}", device.1.min(MAX_ID)).as_bytes());
    let sum: u32 = b.iter().map(|x| u32::from(*x)).sum();
    b[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    out.write_all(&b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_count_themselves() {
        for len in [1usize, 3, 4, 80, 90, 91, 92, 93, 980, 990, 995] {
            let mut out = Vec::new();
            record(&mut out, b"path", &vec![b'x'; len]);
            let text = String::from_utf8(out).unwrap();
            let stated: usize = text.split(' ').next().unwrap().parse().unwrap();
            assert_eq!(stated, text.len());
        }
    }

    #[test]
    fn times_before_1970_have_the_right_fraction() {
        assert_eq!(time(5, 250_000_000), "5.250000000");
        assert_eq!(time(-2, 500_000_000), "-1.500000000");
        assert_eq!(time(-1, 1), "-0.999999999");
        assert_eq!(time(-3, 0), "-3");
    }
}
