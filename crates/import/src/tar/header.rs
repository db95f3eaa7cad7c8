//! The 512-byte header: fields, numbers, and what it means together with extended headers.

use super::pax::Pax;
use super::{Entry, EntryKind, Why};

pub(super) const BLOCK: usize = 512;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dialect {
    V7,
    Ustar,
    /// Ustar with room for times behind a shorter prefix.
    Star,
    Gnu,
}

/// A header whose checksum is right.
#[derive(Debug)]
pub(super) struct Header {
    bytes: [u8; BLOCK],
    pub(super) flag: u8,
    dialect: Dialect,
}

impl Header {
    pub(super) fn parse(bytes: &[u8; BLOCK]) -> Result<Header, Why> {
        let want = octal(&bytes[148..156]).ok_or(Why::Checksum)?;
        let around = || bytes[..148].iter().chain(&[b' '; 8]).chain(&bytes[156..]);
        let unsigned: u64 = around().map(|&b| u64::from(b)).sum();
        // Some old writers summed signed characters.
        let signed: i64 = around().map(|&b| i64::from(b as i8)).sum();
        if want != unsigned && i64::try_from(want) != Ok(signed) {
            return Err(Why::Checksum);
        }
        let dialect = match &bytes[257..265] {
            b"ustar  \0" => Dialect::Gnu,
            [b'u', b's', b't', b'a', b'r', 0, ..] if &bytes[508..512] == b"tar\0" => Dialect::Star,
            [b'u', b's', b't', b'a', b'r', 0, ..] => Dialect::Ustar,
            _ => Dialect::V7,
        };
        Ok(Header { bytes: *bytes, flag: bytes[156], dialect })
    }

    pub(super) fn size(&self) -> Result<u64, Why> {
        number(&self.bytes[124..136]).and_then(|n| u64::try_from(n).ok()).ok_or(Why::Number("size"))
    }

    fn kind(&self) -> Result<EntryKind, Why> {
        Ok(match self.flag {
            0 | b'0' | b'7' | b'S' => EntryKind::File,
            b'1' => EntryKind::HardLink,
            b'2' => EntryKind::Symlink,
            b'3' => EntryKind::Char,
            b'4' => EntryKind::Block,
            b'5' | b'D' => EntryKind::Dir,
            b'6' => EntryKind::Fifo,
            b'V' => EntryKind::Ignored,
            other => return Err(Why::Type(other as char)),
        })
    }

    /// Fills `entry` from the header, the records that precede it and the global ones.
    pub(super) fn describe(
        &self,
        entry: &mut Entry,
        pax: &mut Pax,
        global: &Pax,
        (long_name, long_link): (Option<Vec<u8>>, Option<Vec<u8>>),
    ) -> Result<(), Why> {
        // The path first: whatever else is wrong can then be named.
        entry.path.clear();
        match long_name.or_else(|| pax.path.take()) {
            Some(name) => entry.path = name,
            None => self.path(&mut entry.path),
        }
        if let Some(name) = pax.sparse_name() {
            entry.path = name;
        }
        entry.link.clear();
        match long_link.or_else(|| pax.linkpath.take()) {
            Some(link) => entry.link = link,
            None => entry.link.extend_from_slice(text(&self.bytes[157..257])),
        }
        if entry.path.contains(&0) || entry.link.contains(&0) {
            return Err(Why::Nul);
        }
        entry.kind = self.kind()?;
        if entry.kind == EntryKind::File && self.flag != b'S' && entry.path.ends_with(b"/") {
            entry.kind = EntryKind::Dir;
        }
        if !matches!(entry.kind, EntryKind::HardLink | EntryKind::Symlink) {
            entry.link.clear();
        }
        entry.size = 0;
        // Writers put the file type into the upper bits; the type flag is what counts.
        entry.mode = (number(&self.bytes[100..108]).ok_or(Why::Number("mode"))? & 0o7777) as u16;
        entry.uid = owner(pax.uid.or(global.uid), &self.bytes[108..116]).ok_or(Why::Number("uid"))?;
        entry.gid = owner(pax.gid.or(global.gid), &self.bytes[116..124]).ok_or(Why::Number("gid"))?;
        (entry.mtime_sec, entry.mtime_nsec) = match pax.mtime.or(global.mtime) {
            Some(time) => time,
            None => (number(&self.bytes[136..148]).ok_or(Why::Number("mtime"))?, 0),
        };
        (entry.major, entry.minor) = (0, 0);
        if matches!(entry.kind, EntryKind::Char | EntryKind::Block) && self.dialect != Dialect::V7 {
            entry.major = device(&self.bytes[329..337], 12).ok_or(Why::Number("device's major number"))?;
            entry.minor = device(&self.bytes[337..345], 20).ok_or(Why::Number("device's minor number"))?;
        }
        entry.xattrs = std::mem::take(&mut pax.xattrs);
        entry.foreign_attributes = pax.foreign_attributes;
        Ok(())
    }

    fn path(&self, out: &mut Vec<u8>) {
        let prefix = match self.dialect {
            Dialect::Ustar => text(&self.bytes[345..500]),
            Dialect::Star => text(&self.bytes[345..476]),
            Dialect::V7 | Dialect::Gnu => b"",
        };
        if !prefix.is_empty() {
            out.extend_from_slice(prefix);
            out.push(b'/');
        }
        out.extend_from_slice(text(&self.bytes[..100]));
    }
}

/// A field up to its first NUL.
fn text(field: &[u8]) -> &[u8] {
    field.split(|&b| b == 0).next().unwrap_or_default()
}

fn owner(pax: Option<i64>, field: &[u8]) -> Option<u32> {
    let value = match pax {
        Some(v) => v,
        None => number(field)?,
    };
    // -2 is how some systems write 4294967294; 4294967295 means "nobody at all" to the kernel.
    let id = if value < 0 { i32::try_from(value).ok()? as u32 } else { u32::try_from(value).ok()? };
    (id != u32::MAX).then_some(id)
}

fn device(field: &[u8], bits: u32) -> Option<u32> {
    number(field).and_then(|n| u32::try_from(n).ok()).filter(|n| n >> bits == 0)
}

/// An octal number, or a base-256 one (which may be negative).
pub(super) fn number(field: &[u8]) -> Option<i64> {
    match field.first() {
        Some(b) if b & 0x80 != 0 => base256(field),
        _ => octal(field).and_then(|n| i64::try_from(n).ok()),
    }
}

fn base256(field: &[u8]) -> Option<i64> {
    let negative = field[0] & 0x40 != 0;
    let mut value: i128 = if negative { -1 } else { 0 };
    for (i, &b) in field.iter().enumerate() {
        let b = match (i, negative) {
            (0, false) => b & 0x7f,
            _ => b,
        };
        value = value.checked_mul(256)? | i128::from(b);
        // Leading sign bytes keep the value small; anything else soon leaves the range.
        if value > i128::from(i64::MAX) || value < i128::from(i64::MIN) {
            return None;
        }
    }
    i64::try_from(value).ok()
}

/// Octal digits between spaces and NULs; nothing at all is 0.
fn octal(field: &[u8]) -> Option<u64> {
    let start = field.iter().position(|b| !matches!(b, b' ' | 0)).unwrap_or(field.len());
    let rest = &field[start..];
    let end = rest.iter().position(|b| matches!(b, b' ' | 0)).unwrap_or(rest.len());
    let mut value: u64 = 0;
    for &b in &rest[..end] {
        if !(b'0'..=b'7').contains(&b) {
            return None;
        }
        value = value.checked_mul(8)?.checked_add(u64::from(b - b'0'))?;
    }
    Some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        let table: [(&[u8], Option<i64>); 13] = [
            (b"0000644\0", Some(0o644)),
            (b"   644 \0", Some(0o644)),
            (b"\0\0\0\0\0\0\0\0", Some(0)),
            (b"        ", Some(0)),
            (b"77777777", Some(0o77777777)),
            (b"644\0junk", Some(0o644)),
            (b"0000648\0", None),
            (b"-000644\0", None),
            (&[0x80, 0, 0, 0, 0, 0, 1, 0], Some(256)),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xfe], Some(-2)),
            (&[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xcf, 0xc7], Some(-12345)),
            (&[0x80, 0, 0, 0, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], Some(0x7fff_ffff_ffff_ffff)),
            (&[0x80, 0, 0, 0, 0x80, 0, 0, 0, 0, 0, 0, 0], None),
        ];
        for (field, want) in table {
            assert_eq!(number(field), want, "{field:?}");
        }
        assert_eq!(owner(Some(-2), b""), Some(4294967294));
        assert_eq!(owner(Some(-1), b""), None);
        assert_eq!(owner(Some(4294967295), b""), None);
        assert_eq!(owner(Some(1 << 32), b""), None);
    }
}
