//! Paths inside an image, resolved as the image's own processes would: symlinks lead on within the image's root,
//! `..` of the root is the root, and nothing on the host is looked at.

use crate::failure::Failure;
use image::index::{Index, InodeKind};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// How many symlinks may lie on one path, as in the kernel.
const MAX_LINKS: u32 = 40;
/// The longest path that is walked, links included.
const MAX_PATH: usize = 1 << 16;

/// Whether a symlink as the last component is followed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Last {
    /// It is.
    Follow,
    /// It is the result.
    Keep,
}

/// The inode at `path`; `None` when there is none.
pub fn walk(index: &Index, path: &[u8], last: Last) -> anyhow::Result<Option<u32>> {
    // Components still to go, the next one at the end.
    let mut todo: Vec<Vec<u8>> = Vec::new();
    push(&mut todo, path);
    let trailing = path.last() == Some(&b'/');
    let mut links = 0;
    let mut at = 0u32;
    let mut length = path.len();
    while let Some(part) = todo.pop() {
        match part.as_slice() {
            b"" | b"." => {
                if !index.inode(at)?.is_dir() {
                    return Ok(None);
                }
                continue;
            }
            b".." => {
                if !index.inode(at)?.is_dir() {
                    return Ok(None);
                }
                at = index.parent(at)?;
                continue;
            }
            _ => {}
        }
        if !index.inode(at)?.is_dir() {
            return Ok(None);
        }
        let Some(next) = index.lookup(at, &part)? else { return Ok(None) };
        let follow = !todo.is_empty() || last == Last::Follow || trailing;
        match index.inode(next)?.kind {
            InodeKind::Symlink { .. } if follow => {
                links += 1;
                let target = index.link_target(next)?;
                length += target.len();
                if links > MAX_LINKS || length > MAX_PATH {
                    return Err(Failure::not_found(format!("{}: too many levels of symbolic links", show(path))).into());
                }
                if target.first() == Some(&b'/') {
                    at = 0;
                }
                push(&mut todo, target);
            }
            _ => at = next,
        }
    }
    Ok(Some(at))
}

fn push(todo: &mut Vec<Vec<u8>>, path: &[u8]) {
    todo.extend(path.split(|b| *b == b'/').filter(|p| !p.is_empty()).rev().map(<[u8]>::to_vec));
}

/// The inode at `path`, or an error that names image and path.
pub fn find(index: &Index, image: &str, path: &Path, last: Last) -> anyhow::Result<u32> {
    let bytes = path.as_os_str().as_bytes();
    match walk(index, bytes, last)? {
        Some(ino) => Ok(ino),
        None => Err(Failure::not_found(format!("{image}: no {} in the image", show(bytes))).into()),
    }
}

/// Bytes of a name for a terminal: what is not printable is escaped, so that a name cannot write control sequences.
pub fn show(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() || c == '\\' { out.extend(c.escape_default()) } else { out.push(c) }
        }
        for b in chunk.invalid() {
            out.push_str(&format!("\\x{b:02x}"));
        }
    }
    out
}

/// Whether `name` matches a glob of `*`, `?`, `[…]` and `\x`; byte by byte, in time linear in both but for stars.
pub fn glob(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        let step = match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
                continue;
            }
            Some(b'?') => Some(1),
            Some(b'[') => class(&pattern[p..], name[n]),
            Some(b'\\') if p + 1 < pattern.len() => (pattern[p + 1] == name[n]).then_some(2),
            Some(c) => (*c == name[n]).then_some(1),
            None => None,
        };
        match (step, star) {
            (Some(len), _) => {
                p += len;
                n += 1;
            }
            (None, Some((at, from))) => {
                star = Some((at, from + 1));
                p = at + 1;
                n = from + 1;
            }
            (None, None) => return false,
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

/// Whether the class at the start of `pattern` holds `byte`: its length when it does. An unclosed bracket is itself.
fn class(pattern: &[u8], byte: u8) -> Option<usize> {
    let negated = matches!(pattern.get(1), Some(b'!' | b'^'));
    let first = if negated { 2 } else { 1 };
    let mut at = first;
    let mut hit = false;
    loop {
        match pattern.get(at) {
            None => return (byte == b'[').then_some(1),
            Some(b']') if at > first => break,
            Some(&low) => {
                if let (Some(b'-'), Some(&high)) = (pattern.get(at + 1), pattern.get(at + 2))
                    && high != b']'
                {
                    hit |= (low..=high).contains(&byte);
                    at += 3;
                } else {
                    hit |= low == byte;
                    at += 1;
                }
            }
        }
    }
    (hit != negated).then_some(at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use image::tree::{Attrs, Kind, Tree};
    use std::sync::Arc;

    fn index() -> Index {
        let mut tree = Tree::new();
        let attrs = Attrs { mode: 0o755, ..Default::default() };
        let root = Tree::ROOT;
        let etc = tree.create(root, b"etc", Kind::Dir, attrs).unwrap();
        tree.create(etc, b"passwd", Kind::File, attrs).unwrap();
        for (name, target) in [
            ("abs", "/etc/passwd"),
            ("rel", "etc"),
            ("up", "../../../etc"),
            ("loop", "loop"),
            ("dangling", "/no/such"),
            ("dot", "etc/./../etc/passwd"),
        ] {
            let link = tree.create(root, name.as_bytes(), Kind::Symlink, attrs).unwrap();
            tree.set_target(link, target.as_bytes()).unwrap();
        }
        let mut out = std::io::Cursor::new(Vec::new());
        image::index::build(&tree, &mut out).unwrap();
        Index::open(Arc::new(out.into_inner())).unwrap()
    }

    #[test]
    fn paths_stay_inside_the_image() {
        let index = index();
        let passwd = index.resolve(b"/etc/passwd").unwrap();
        let etc = index.resolve(b"/etc").unwrap();
        assert!(passwd.is_some() && etc.is_some());
        let table: &[(&str, Last, Option<u32>)] = &[
            ("/", Last::Follow, Some(0)),
            ("", Last::Follow, Some(0)),
            ("/etc/passwd", Last::Follow, passwd),
            ("etc/passwd", Last::Follow, passwd),
            ("/../../etc/passwd", Last::Follow, passwd),
            ("/abs", Last::Follow, passwd),
            ("/abs", Last::Keep, index.resolve(b"/abs").unwrap()),
            ("/rel/passwd", Last::Keep, passwd),
            ("/rel/", Last::Keep, etc),
            ("/up/passwd", Last::Follow, passwd),
            ("/dot", Last::Follow, passwd),
            ("/dangling", Last::Follow, None),
            ("/etc/passwd/..", Last::Follow, None),
            ("/etc/passwd/x", Last::Follow, None),
            ("/nothing", Last::Follow, None),
        ];
        for (path, last, want) in table {
            assert_eq!(walk(&index, path.as_bytes(), *last).unwrap(), *want, "{path}");
        }
        assert!(walk(&index, b"/loop", Last::Follow).is_err());
    }

    #[test]
    fn names_cannot_write_control_sequences() {
        assert_eq!(show(b"a\x1b[2Jb\n\xff\\\xc3\xa4"), "a\\u{1b}[2Jb\\n\\xff\\\\\u{e4}");
    }

    #[test]
    fn globs_match() {
        let table = [
            ("*.so", "a.so", true),
            ("*.so", "a.so.1", false),
            ("*.so*", "a.so.1", true),
            ("?", "", false),
            ("a?c", "abc", true),
            ("[a-c]x", "bx", true),
            ("[!a-c]x", "bx", false),
            ("[^a]", "b", true),
            ("[]]", "]", true),
            ("[", "[", true),
            ("\\*", "*", true),
            ("\\*", "x", false),
            ("**a*b", "xxaxxb", true),
            ("", "", true),
            ("", "x", false),
        ];
        for (pattern, name, want) in table {
            assert_eq!(glob(pattern.as_bytes(), name.as_bytes()), want, "{pattern} {name}");
        }
        let stars = "*a".repeat(30);
        assert!(!glob(stars.as_bytes(), "a".repeat(29).as_bytes()));
    }
}
