//! The daemon's log: lines with a time, in a file that is turned over when it has grown, so that two files of
//! bounded size are kept. Standard output and error go to the same file, for panics.

use crate::front::{Level, Log};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

/// Bytes after which the log is turned over.
pub const MAX_BYTES: u64 = 1 << 20;

/// Where lines go.
#[derive(Debug)]
pub struct LogFile {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    /// None: standard error (in the foreground).
    file: Option<(File, PathBuf)>,
    bytes: u64,
    max: u64,
    /// Whether standard streams follow the file.
    streams: bool,
}

impl LogFile {
    /// Appends to `path`.
    pub fn open(path: &Path) -> std::io::Result<LogFile> {
        Self::open_with(path, MAX_BYTES)
    }

    fn open_with(path: &Path, max: u64) -> std::io::Result<LogFile> {
        let file = append(path)?;
        let bytes = file.metadata()?.len();
        Ok(LogFile { inner: Mutex::new(Inner { file: Some((file, path.to_owned())), bytes, max, streams: false }) })
    }

    /// Writes to standard error.
    pub fn stderr() -> LogFile {
        LogFile { inner: Mutex::new(Inner { file: None, bytes: 0, max: MAX_BYTES, streams: false }) }
    }

    /// Makes standard output and error follow the file.
    pub fn take_streams(&self) -> std::io::Result<()> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.streams = true;
        inner.redirect()
    }

    /// Writes one line.
    pub fn write(&self, level: Level, text: fmt::Arguments<'_>) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let level = match level {
            Level::Error => "error",
            Level::Warn => "warn",
            Level::Info => "info",
        };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        // Control characters of hostile names must not forge lines.
        let text: String = text.to_string().chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
        let line = format!("{} {level}: {text}\n", timestamp(now.as_secs(), now.subsec_millis()));
        // A log that cannot be written must not stop what is logged about.
        let _ = inner.put(&line);
    }

    /// An ordinary line.
    pub fn info(&self, text: fmt::Arguments<'_>) {
        self.write(Level::Info, text);
    }

    /// A line about something odd.
    pub fn warn(&self, text: fmt::Arguments<'_>) {
        self.write(Level::Warn, text);
    }
}

impl Log for LogFile {
    fn line(&self, level: Level, text: fmt::Arguments<'_>) {
        self.write(level, text);
    }
}

impl Inner {
    fn put(&mut self, line: &str) -> std::io::Result<()> {
        let Some((file, path)) = &mut self.file else { return std::io::stderr().write_all(line.as_bytes()) };
        if self.bytes > 0 && self.bytes + line.len() as u64 > self.max {
            std::fs::rename(&*path, older(path))?;
            *file = append(path)?;
            self.bytes = 0;
            if self.streams {
                self.redirect()?;
            }
        }
        if let Some((file, _)) = &mut self.file {
            file.write_all(line.as_bytes())?;
            self.bytes += line.len() as u64;
        }
        Ok(())
    }

    fn redirect(&self) -> std::io::Result<()> {
        if let Some((file, _)) = &self.file {
            rustix::stdio::dup2_stdout(file)?;
            rustix::stdio::dup2_stderr(file)?;
        }
        Ok(())
    }
}

/// The file that the log was before it was turned over.
pub fn older(path: &Path) -> PathBuf {
    path.with_extension("log.1")
}

fn append(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().create(true).append(true).mode(0o600).open(path)
}

/// Seconds since 1970 as `2026-11-30T12:00:00.000Z`.
pub fn timestamp(secs: u64, millis: u32) -> String {
    let (days, rest) = (secs / 86_400, secs % 86_400);
    let (year, month, day) = civil(days);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}.{millis:03}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

/// Days since 1970 as a date of the Gregorian calendar: years of 400 have a fixed number of days, and a year that
/// starts in March has its leap day at the end.
fn civil(days: u64) -> (u64, u64, u64) {
    let z = days + 719_468;
    let era = z / 146_097;
    let doe = z % 146_097;
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let day = doy - (153 * mp + 2) / 5 + 1;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    (yoe + era * 400 + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_right() {
        assert_eq!(timestamp(0, 0), "1970-01-01T00:00:00.000Z");
        assert_eq!(timestamp(951_827_696, 7), "2000-02-29T12:34:56.007Z");
        assert_eq!(timestamp(1_796_083_199, 999), "2026-11-30T23:59:59.999Z");
    }

    #[test]
    fn the_log_is_turned_over_and_lines_cannot_be_forged() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("daemon.log");
        let log = LogFile::open_with(&path, 200).unwrap();
        for i in 0..20 {
            log.info(format_args!("line {i}\nforged"));
        }
        let now = std::fs::read_to_string(&path).unwrap();
        let before = std::fs::read_to_string(older(&path)).unwrap();
        assert!(now.len() <= 200 && before.len() <= 200);
        assert!(now.lines().last().unwrap().ends_with("info: line 19\u{fffd}forged"), "{now}");
        assert!(now.lines().chain(before.lines()).all(|l| l.contains(" info: line ")));
    }
}
