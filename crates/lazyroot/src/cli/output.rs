//! What commands print: tables for people, one JSON object a line for scripts.

use serde_json::Value;
use std::io::{self, Write};

/// Standard output of one command.
#[derive(Debug)]
pub struct Out {
    /// Whether scripts read it.
    pub json: bool,
}

impl Out {
    /// One JSON object, one line.
    pub fn object(&self, value: &Value) -> io::Result<()> {
        let mut out = io::stdout().lock();
        serde_json::to_writer(&mut out, value)?;
        out.write_all(b"\n")
    }

    /// One line of text.
    pub fn line(&self, text: impl AsRef<str>) -> io::Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(text.as_ref().as_bytes())?;
        out.write_all(b"\n")
    }

    /// The object for scripts, or the text for people.
    pub fn either(&self, value: &Value, text: impl AsRef<str>) -> io::Result<()> {
        if self.json { self.object(value) } else { self.line(text) }
    }

    /// Something that people should know and scripts do not read.
    pub fn note(&self, text: impl AsRef<str>) {
        if !self.json {
            // Nothing depends on it.
            let _ = writeln!(io::stderr().lock(), "{}", text.as_ref());
        }
    }

    /// Rows under a heading, in columns; the last column is not padded.
    pub fn table(&self, heading: &[&str], rows: &[Vec<String>]) -> io::Result<()> {
        let mut widths: Vec<usize> = heading.iter().map(|h| h.chars().count()).collect();
        for row in rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        let mut out = io::stdout().lock();
        let heading: Vec<String> = heading.iter().map(|h| (*h).to_owned()).collect();
        for row in std::iter::once(&heading).chain(rows) {
            let mut line = String::new();
            for (i, (width, cell)) in widths.iter().zip(row).enumerate() {
                if i + 1 == row.len() {
                    line.push_str(cell);
                } else {
                    line.push_str(&format!("{cell:width$}  "));
                }
            }
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Bytes for people.
pub fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["KiB", "MiB", "GiB", "TiB", "PiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64;
    let mut unit = "B";
    for next in UNITS {
        if value < 1024.0 {
            break;
        }
        value /= 1024.0;
        unit = next;
    }
    if value < 10.0 { format!("{value:.1} {unit}") } else { format!("{value:.0} {unit}") }
}

/// So many of something: `1 image`, `2 images`, `1 index`, `2 indexes`.
pub fn count(number: impl Into<u64>, what: &str) -> String {
    let number = number.into();
    let ending = match number {
        1 => "",
        _ if what.ends_with('x') => "es",
        _ => "s",
    };
    format!("{number} {what}{ending}")
}

/// A span for people.
pub fn span(time: std::time::Duration) -> String {
    let seconds = time.as_secs_f64();
    match seconds {
        s if s < 1e-3 => format!("{:.0} µs", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s if s < 100.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

/// A moment for people, from seconds since 1970.
pub fn moment(secs: u64) -> String {
    let text = crate::daemon::log::timestamp(secs, 0);
    text.replace('T', " ").replace(".000Z", "Z")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn numbers_are_short() {
        for (bytes, want) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (10 << 20, "10 MiB"),
            (1_298_227_730, "1.2 GiB"),
            (u64::MAX, "16384 PiB"),
        ] {
            assert_eq!(size(bytes), want);
        }
        assert_eq!((count(1u64, "image"), count(0u64, "file")), ("1 image".into(), "0 files".into()));
        assert_eq!((count(1u64, "index"), count(2u64, "index")), ("1 index".into(), "2 indexes".into()));
        assert_eq!(span(Duration::from_micros(12)), "12 µs");
        assert_eq!(span(Duration::from_micros(12_340)), "12.3 ms");
        assert_eq!(span(Duration::from_millis(1_500)), "1.5 s");
        assert_eq!(moment(951_827_696), "2000-02-29 12:34:56Z");
    }
}
