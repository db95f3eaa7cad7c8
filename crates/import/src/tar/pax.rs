//! PAX records: "LENGTH KEY=VALUE\n", each as long as its length says, values being any bytes.

use super::Why;
use super::sparse::Piece;

/// The records of one extended header that mean something here.
#[derive(Debug, Default)]
pub(super) struct Pax {
    any: bool,
    pub(super) path: Option<Vec<u8>>,
    pub(super) linkpath: Option<Vec<u8>>,
    pub(super) size: Option<u64>,
    pub(super) uid: Option<i64>,
    pub(super) gid: Option<i64>,
    pub(super) mtime: Option<(i64, u32)>,
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    pub(super) foreign_attributes: u32,
    sparse: Sparse,
}

/// The GNU.sparse records, as they come.
#[derive(Debug, Default)]
struct Sparse {
    any: bool,
    major: Option<u64>,
    minor: Option<u64>,
    name: Option<Vec<u8>>,
    real_size: Option<u64>,
    /// From `map` (0.1) or from pairs of `offset` and `numbytes` (0.0).
    pieces: Vec<Piece>,
    offset: Option<u64>,
}

/// What the sparse records say altogether.
#[derive(Debug)]
pub(super) struct SparseFile {
    pub(super) real_size: u64,
    /// `None`: the map precedes the data.
    pub(super) pieces: Option<Vec<Piece>>,
}

impl Pax {
    pub(super) fn clear(&mut self) {
        *self = Pax::default();
    }

    pub(super) fn is_empty(&self) -> bool {
        !self.any
    }

    /// Adds the records of one header's body.
    pub(super) fn read(&mut self, mut body: &[u8], max_pieces: u64) -> Result<(), Why> {
        self.any = true;
        while !body.is_empty() {
            let (key, value, rest) = record(body)?;
            body = rest;
            self.add(key, value, max_pieces)?;
        }
        // The last record of a name counts.
        self.xattrs.reverse();
        self.xattrs.sort_by(|(a, _), (b, _)| a.cmp(b));
        self.xattrs.dedup_by(|(a, _), (b, _)| a == b);
        Ok(())
    }

    fn add(&mut self, key: &[u8], value: &[u8], max_pieces: u64) -> Result<(), Why> {
        if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
            if name.is_empty() {
                return Err(Why::Pax("an extended attribute has no name"));
            }
            // An empty value is a value.
            self.xattrs.push((name.to_vec(), value.to_vec()));
            return Ok(());
        }
        if key.starts_with(b"SCHILY.acl.") || key.starts_with(b"RHT.security.") {
            self.foreign_attributes += 1;
            return Ok(());
        }
        if let Some(name) = key.strip_prefix(b"GNU.sparse.") {
            return self.sparse.add(name, value, max_pieces);
        }
        // An empty value takes the record back: the header's own field counts.
        let some = |v: &[u8]| (!v.is_empty()).then(|| v.to_vec());
        match key {
            b"path" => self.path = some(value),
            b"linkpath" => self.linkpath = some(value),
            b"size" => self.size = optional(value, decimal).ok_or(Why::Pax("size is not a number"))?,
            b"uid" => self.uid = optional(value, signed).ok_or(Why::Pax("uid is not a number"))?,
            b"gid" => self.gid = optional(value, signed).ok_or(Why::Pax("gid is not a number"))?,
            b"mtime" => self.mtime = optional(value, time).ok_or(Why::Pax("mtime is not a time"))?,
            _ => {}
        }
        Ok(())
    }

    /// A record that must not stand in a global header, if there is one.
    pub(super) fn changes_meaning(&self) -> Option<&'static str> {
        let table = [
            (self.path.is_some(), "path"),
            (self.linkpath.is_some(), "linkpath"),
            (self.size.is_some(), "size"),
            (!self.xattrs.is_empty(), "SCHILY.xattr"),
            (self.sparse.any, "GNU.sparse"),
        ];
        table.iter().find(|(there, _)| *there).map(|(_, key)| *key)
    }

    /// Takes over what a later global header sets.
    pub(super) fn merge_times_and_owners(&mut self, later: Pax) {
        self.uid = later.uid.or(self.uid);
        self.gid = later.gid.or(self.gid);
        self.mtime = later.mtime.or(self.mtime);
    }

    /// The real name of a sparse file, whose header carries a made-up one.
    pub(super) fn sparse_name(&mut self) -> Option<Vec<u8>> {
        self.sparse.name.take()
    }

    /// What the sparse records say, if there are any.
    pub(super) fn take_sparse(&mut self) -> Result<Option<SparseFile>, Why> {
        let s = std::mem::take(&mut self.sparse);
        if !s.any {
            return Ok(None);
        }
        let real_size = match (s.real_size, s.major, s.minor) {
            (Some(size), _, _) => size,
            // GNU.sparse records without a size describe nothing (a writer's leftovers).
            (None, None, None) if s.pieces.is_empty() => return Ok(None),
            _ => return Err(Why::Sparse("the real size is missing")),
        };
        if s.offset.is_some() {
            return Err(Why::Sparse("an offset without its length"));
        }
        match (s.major, s.minor) {
            (Some(1), Some(0)) => Ok(Some(SparseFile { real_size, pieces: None })),
            (None, None) | (Some(0), Some(0 | 1)) => Ok(Some(SparseFile { real_size, pieces: Some(s.pieces) })),
            _ => Err(Why::Sparse("its version is not known")),
        }
    }
}

impl Sparse {
    fn add(&mut self, name: &[u8], value: &[u8], max_pieces: u64) -> Result<(), Why> {
        self.any = true;
        let number = || decimal(value).ok_or(Why::Sparse("a field is not a number"));
        let limit = |n: usize| match n as u64 {
            value if value > max_pieces => {
                Err(Why::Limit { what: "the number of pieces of a sparse file", value, limit: max_pieces })
            }
            _ => Ok(()),
        };
        match name {
            b"major" => self.major = Some(number()?),
            b"minor" => self.minor = Some(number()?),
            b"name" => self.name = (!value.is_empty()).then(|| value.to_vec()),
            b"size" | b"realsize" => self.real_size = Some(number()?),
            b"numblocks" => {}
            b"offset" => match self.offset.replace(number()?) {
                None => {}
                Some(_) => return Err(Why::Sparse("an offset without its length")),
            },
            b"numbytes" => {
                let offset = self.offset.take().ok_or(Why::Sparse("a length without its offset"))?;
                self.pieces.push(Piece { offset, len: number()? });
                limit(self.pieces.len())?;
            }
            b"map" => {
                self.pieces.clear();
                let mut fields = value.split(|&b| b == b',').filter(|_| !value.is_empty());
                while let Some(offset) = fields.next() {
                    let len = fields.next().ok_or(Why::Sparse("an offset without its length"))?;
                    match (decimal(offset), decimal(len)) {
                        (Some(offset), Some(len)) => self.pieces.push(Piece { offset, len }),
                        _ => return Err(Why::Sparse("a field is not a number")),
                    }
                    limit(self.pieces.len())?;
                }
            }
            _ => {}
        }
        Ok(())
    }
}

/// A key, its value, and what follows the record.
type Split<'a> = (&'a [u8], &'a [u8], &'a [u8]);

/// Splits the first record off.
fn record(body: &[u8]) -> Result<Split<'_>, Why> {
    let space = body.iter().take(21).position(|&b| b == b' ').ok_or(Why::Pax("it does not begin with its length"))?;
    let len = decimal(&body[..space]).ok_or(Why::Pax("its length is not a number"))?;
    let len = usize::try_from(len).ok().filter(|&n| n <= body.len()).ok_or(Why::Pax("it is longer than its header"))?;
    if len < space + 3 || body[len - 1] != b'\n' {
        return Err(Why::Pax("it does not end where its length says"));
    }
    let pair = &body[space + 1..len - 1];
    let equals = pair.iter().position(|&b| b == b'=').ok_or(Why::Pax("it has no '='"))?;
    let (key, value) = (&pair[..equals], &pair[equals + 1..]);
    if key.is_empty() || key.contains(&0) {
        return Err(Why::Pax("its key is empty or holds a NUL"));
    }
    Ok((key, value, &body[len..]))
}

fn optional<T>(value: &[u8], parse: fn(&[u8]) -> Option<T>) -> Option<Option<T>> {
    if value.is_empty() { Some(None) } else { parse(value).map(Some) }
}

/// Decimal digits and nothing else.
pub(super) fn decimal(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    digits.iter().try_fold(0u64, |value, &b| {
        if !b.is_ascii_digit() {
            return None;
        }
        value.checked_mul(10)?.checked_add(u64::from(b - b'0'))
    })
}

fn signed(text: &[u8]) -> Option<i64> {
    match text.strip_prefix(b"-") {
        Some(digits) => decimal(digits).and_then(|n| i64::try_from(n).ok()).map(|n| -n),
        None => decimal(text).and_then(|n| i64::try_from(n).ok()),
    }
}

/// Decimal seconds with a fraction; digits beyond nanoseconds are cut off.
fn time(text: &[u8]) -> Option<(i64, u32)> {
    let (negative, text) = match text.strip_prefix(b"-") {
        Some(rest) => (true, rest),
        None => (false, text),
    };
    let (whole, fraction) = match text.iter().position(|&b| b == b'.') {
        Some(dot) => (&text[..dot], &text[dot + 1..]),
        None => (text, &b""[..]),
    };
    let seconds = i64::try_from(if whole.is_empty() && !fraction.is_empty() { 0 } else { decimal(whole)? }).ok()?;
    if !fraction.iter().all(u8::is_ascii_digit) {
        return None;
    }
    let nanos = (0..9).fold(0u32, |n, i| n * 10 + fraction.get(i).map_or(0, |b| u32::from(b - b'0')));
    Some(match (negative, nanos) {
        (false, n) => (seconds, n),
        (true, 0) => (-seconds, 0),
        (true, n) => (-seconds - 1, 1_000_000_000 - n),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        let table: [(&str, Option<(i64, u32)>); 14] = [
            ("0", Some((0, 0))),
            ("1.5", Some((1, 500_000_000))),
            ("1.", Some((1, 0))),
            (".5", Some((0, 500_000_000))),
            ("-1.5", Some((-2, 500_000_000))),
            ("-0.000000001", Some((-1, 999_999_999))),
            ("-100", Some((-100, 0))),
            ("1.0000000019", Some((1, 1))),
            ("4294967296.000000005", Some((4294967296, 5))),
            ("", None),
            (".", None),
            ("-", None),
            ("1.x", None),
            ("99999999999999999999", None),
        ];
        for (text, want) in table {
            assert_eq!(time(text.as_bytes()), want, "{text}");
        }
    }

    #[test]
    fn records_end_where_their_length_says() {
        assert_eq!(record(b"6 a=b\nrest").unwrap(), (&b"a"[..], &b"b"[..], &b"rest"[..]));
        assert_eq!(record(b"7 a=\n=\n").unwrap().1, b"\n=");
        assert_eq!(record(b"5 a=\n").unwrap().1, b"");
        for bad in [
            &b"99 path=short\n"[..],
            b"6 a=bX",
            b"6 abc\n",
            b"a=b\n",
            b"5 =b\n",
            b"3 \n",
            b"0 \n",
            b" 6 a=b\n",
            b"-6 a=b\n",
            b"7 a\0=b\n",
            b"6",
        ] {
            assert!(record(bad).is_err(), "{:?}", String::from_utf8_lossy(bad));
        }
    }
}
