//! A progress line on a terminal, JSON lines for scripts, nothing otherwise.

use super::output::{size, span};
use import::{Counts, Progress};
use serde_json::json;
use std::io::{IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How often a terminal is written to.
const TERMINAL_EVERY: Duration = Duration::from_millis(100);
/// How often a script hears something.
const JSON_EVERY: Duration = Duration::from_secs(1);

/// Who listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Listener {
    Terminal { columns: usize },
    Script,
    Nobody,
}

/// Shows how far an import is.
#[derive(Debug)]
pub struct Line {
    listener: Listener,
    began: Instant,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    shown: Option<Instant>,
    last: Counts,
    drawn: bool,
}

impl Line {
    /// For a terminal when standard error is one, for scripts with `json`, silent with `quiet`.
    pub fn new(json: bool, quiet: bool) -> Line {
        let stderr = std::io::stderr();
        let listener = match (quiet, json, stderr.is_terminal()) {
            (true, _, _) => Listener::Nobody,
            (_, true, _) => Listener::Script,
            (_, _, true) => {
                let columns = rustix::termios::tcgetwinsize(&stderr).map_or(80, |w| usize::from(w.ws_col).max(20));
                Listener::Terminal { columns }
            }
            _ => Listener::Nobody,
        };
        let state = State { shown: None, last: Counts::default(), drawn: false };
        Line { listener, began: Instant::now(), state: Mutex::new(state) }
    }

    /// Takes the line away.
    pub fn finish(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.drawn {
            // Nothing depends on it.
            let _ = write!(std::io::stderr().lock(), "\r\x1b[K");
            state.drawn = false;
        }
    }
}

/// The line's text: bytes, files, rate, time left.
fn text(counts: &Counts, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64().max(1e-3);
    let rate = counts.bytes as f64 / seconds;
    let mut text = match counts.total_bytes {
        Some(total) if total > 0 => {
            let percent = (counts.bytes.min(total) as f64 / total as f64 * 100.0).floor();
            format!("{percent:3.0}%  {} of {}", size(counts.bytes), size(total))
        }
        _ => size(counts.bytes),
    };
    match counts.total_files {
        Some(total) => text += &format!("  {} of {total} files", counts.files),
        None => text += &format!("  {} files", counts.files),
    }
    text += &format!("  {}/s", size(rate as u64));
    if let Some(total) = counts.total_bytes
        && counts.bytes > 0
        && elapsed >= Duration::from_secs(1)
    {
        let left = total.saturating_sub(counts.bytes) as f64 / rate.max(1.0);
        text += &format!("  {} left", span(Duration::from_secs(left.min(1e9) as u64)));
    }
    text
}

impl Progress for Line {
    fn wants_totals(&self) -> bool {
        self.listener != Listener::Nobody
    }

    fn progress(&self, counts: &Counts) {
        let every = match self.listener {
            Listener::Nobody => return,
            Listener::Terminal { .. } => TERMINAL_EVERY,
            Listener::Script => JSON_EVERY,
        };
        // Whoever comes while another thread draws is not worth waiting for.
        let Ok(mut state) = self.state.try_lock() else { return };
        let now = Instant::now();
        state.last = *counts;
        if state.shown.is_some_and(|s| now - s < every) {
            return;
        }
        state.shown = Some(now);
        match self.listener {
            Listener::Terminal { columns } => {
                let line: String = text(counts, now - self.began).chars().take(columns - 1).collect();
                // A terminal that went away must not end the import.
                state.drawn = write!(std::io::stderr().lock(), "\r\x1b[K{line}").is_ok();
            }
            Listener::Script => {
                let line = json!({"event": "progress", "bytes": counts.bytes, "total_bytes": counts.total_bytes,
                    "files": counts.files, "total_files": counts.total_files,
                    "seconds": (now - self.began).as_secs_f64()});
                let _ = writeln!(std::io::stdout().lock(), "{line}");
            }
            Listener::Nobody => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_says_how_far_how_fast_and_how_long() {
        let counts = Counts { bytes: 50 << 20, total_bytes: Some(200 << 20), files: 7, total_files: Some(70) };
        assert_eq!(
            text(&counts, Duration::from_secs(5)),
            " 25%  50 MiB of 200 MiB  7 of 70 files  10 MiB/s  15.0 s left"
        );
        let counts = Counts { bytes: 2048, total_bytes: None, files: 1, total_files: None };
        assert_eq!(text(&counts, Duration::from_secs(1)), "2.0 KiB  1 files  2.0 KiB/s");
        let over = Counts { bytes: 300, total_bytes: Some(200), files: 1, total_files: None };
        assert!(text(&over, Duration::ZERO).starts_with("100%"));
    }
}
