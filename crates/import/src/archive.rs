//! A tar archive as a table of its files, for reading them in any order.
//!
//! One pass over the headers, data skipped. Links inside the archive are followed (docker wrote a repeated layer
//! as one), but only inside the table.

use crate::blobs::BlobFile;
use crate::error::ImportError;
use crate::tar::{EntryKind, Event, Parser, TarLimits};
use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

/// Entries of an archive that holds an image, far above what any has.
const MAX_MEMBERS: usize = 100_000;
/// Bytes of their names together.
const MAX_NAME_BYTES: usize = 16 << 20;
/// Links followed for one name.
const MAX_LINKS: usize = 8;

#[derive(Debug)]
enum Member {
    File { at: u64, len: u64 },
    Link(String),
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Archive {
    file: Arc<File>,
    members: HashMap<String, Member>,
}

impl Archive {
    /// Reads the headers of the archive in `file`.
    pub(crate) fn scan(file: File, place: &str) -> Result<Archive, ImportError> {
        let limits = TarLimits { header_bytes: 1 << 20, sparse_pieces: 0, file_bytes: i64::MAX as u64 };
        let len = file.metadata().map_err(|e| ImportError::io("stat", place, e))?.len();
        let mut parser = Parser::new(limits);
        let mut members = HashMap::new();
        let mut name_bytes = 0;
        let mut buffer = vec![0; 64 << 10];
        'read: loop {
            let at = parser.position();
            if at > len {
                let what =
                    format!("the archive ends in the middle of an entry: it has {len} bytes, the entry ends at {at}");
                return Err(ImportError::corrupt(place, what));
            }
            let n = match file.read_at(&mut buffer, at) {
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                other => other.map_err(|e| ImportError::io("read", place, e))?,
            };
            let mut input = &buffer[..n];
            loop {
                match parser.step(&mut input).map_err(|e| ImportError::corrupt(place, e.to_string()))? {
                    Event::NeedMore if n == 0 => break 'read,
                    Event::NeedMore => break,
                    Event::End => break 'read,
                    // A part of the data that came before it could be skipped; the pass below takes care of the rest.
                    Event::Data { .. } | Event::EntryEnd => {}
                    Event::Entry => {
                        let at = parser.position();
                        let entry = parser.entry_mut();
                        let name = normal(&String::from_utf8_lossy(&entry.path));
                        let member = match entry.kind {
                            EntryKind::File => Member::File { at, len: entry.size },
                            EntryKind::Symlink => {
                                let dir = name.rsplit_once('/').map_or("", |(dir, _)| dir);
                                Member::Link(normal(&format!("{dir}/{}", String::from_utf8_lossy(&entry.link))))
                            }
                            EntryKind::HardLink => Member::Link(normal(&String::from_utf8_lossy(&entry.link))),
                            _ => continue,
                        };
                        name_bytes += name.len();
                        members.insert(name, member);
                        if members.len() > MAX_MEMBERS || name_bytes > MAX_NAME_BYTES {
                            let what = format!("more than {MAX_MEMBERS} entries or {MAX_NAME_BYTES} bytes of names");
                            return Err(ImportError::Limit { place: place.into(), what });
                        }
                        if parser.skip_data() > 0 {
                            // Read on behind the data.
                            continue 'read;
                        }
                    }
                }
            }
        }
        parser.finish().map_err(|e| ImportError::corrupt(place, e.to_string()))?;
        Ok(Archive { file: Arc::new(file), members })
    }

    /// The file of that name, links followed.
    pub(crate) fn find(&self, name: &str) -> Option<BlobFile> {
        let mut name = normal(name);
        for _ in 0..=MAX_LINKS {
            match self.members.get(&name)? {
                Member::File { at, len } => return Some(BlobFile::new(self.file.clone(), *at, *len)),
                Member::Link(to) => name.clone_from(to),
            }
        }
        None
    }
}

/// A path inside the archive without `.`, `..` and doubled slashes.
fn normal(path: &str) -> String {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop();
            }
            other => parts.push(other),
        }
    }
    parts.join("/")
}
