//! Maps of sparse files: the old GNU form in the header, and the text in front of the data (PAX 1.0).

use super::Why;
use super::header::{BLOCK, number};

/// A stored part of a sparse file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// Reads rows of 12 + 12 bytes; a row of NULs ends them.
fn rows(bytes: &[u8], out: &mut Vec<Piece>) -> Result<(), Why> {
    for row in bytes.chunks_exact(24) {
        if row[0] == 0 {
            break;
        }
        let field =
            |f: &[u8]| number(f).and_then(|n| u64::try_from(n).ok()).ok_or(Why::Sparse("a field is not a number"));
        out.push(Piece { offset: field(&row[..12])?, len: field(&row[12..])? });
    }
    Ok(())
}

/// An old GNU sparse header: the real size, and whether extension blocks follow.
pub(super) fn old_header(block: &[u8; BLOCK], out: &mut Vec<Piece>) -> Result<(u64, bool), Why> {
    rows(&block[386..482], out)?;
    let real = number(&block[483..495]).and_then(|n| u64::try_from(n).ok()).ok_or(Why::Number("real size"))?;
    Ok((real, block[482] != 0))
}

/// An extension block: whether another one follows.
pub(super) fn old_extension(block: &[u8; BLOCK], out: &mut Vec<Piece>) -> Result<bool, Why> {
    rows(&block[..504], out)?;
    Ok(block[504] != 0)
}

/// Reads the decimal lines in front of the data: the number of pieces, then offset and length of each.
#[derive(Debug, Default)]
pub(super) struct MapReader {
    value: u64,
    digits: u32,
    count: Option<u64>,
    offset: Option<u64>,
}

impl MapReader {
    /// Takes one block; `true` when the map is complete (the block's rest is padding).
    pub(super) fn block(&mut self, block: &[u8; BLOCK], out: &mut Vec<Piece>, max: u64) -> Result<bool, Why> {
        for &b in block {
            match b {
                b'0'..=b'9' if self.digits < 20 => {
                    let digit = u64::from(b - b'0');
                    let value = self.value.checked_mul(10).and_then(|v| v.checked_add(digit));
                    self.value = value.ok_or(Why::Sparse("a number is too large"))?;
                    self.digits += 1;
                }
                b'\n' if self.digits > 0 => {
                    let value = std::mem::take(&mut self.value);
                    self.digits = 0;
                    if self.line(value, out, max)? {
                        return Ok(true);
                    }
                }
                _ => return Err(Why::Sparse("a line is not a number")),
            }
        }
        Ok(false)
    }

    fn line(&mut self, value: u64, out: &mut Vec<Piece>, max: u64) -> Result<bool, Why> {
        match (self.count, self.offset.take()) {
            (None, _) if value > max => {
                return Err(Why::Limit { what: "the number of pieces of a sparse file", value, limit: max });
            }
            (None, _) => self.count = Some(value),
            (Some(_), None) => self.offset = Some(value),
            (Some(_), Some(offset)) => out.push(Piece { offset, len: value }),
        }
        Ok(self.offset.is_none() && self.count == Some(out.len() as u64))
    }
}

/// Checks a map against the file's size and the bytes that are stored, and drops empty pieces.
pub(super) fn check(pieces: &mut Vec<Piece>, size: u64, stored: u64) -> Result<(), Why> {
    let (mut end, mut sum) = (0u64, 0u64);
    for p in pieces.iter() {
        if p.offset < end {
            return Err(Why::Sparse("pieces overlap or are out of order"));
        }
        end = p
            .offset
            .checked_add(p.len)
            .filter(|&e| e <= size)
            .ok_or(Why::Sparse("a piece lies behind the file's end"))?;
        sum += p.len;
    }
    if sum != stored {
        return Err(Why::Sparse("its pieces are not as long as the data that is stored"));
    }
    pieces.retain(|p| p.len > 0);
    Ok(())
}
