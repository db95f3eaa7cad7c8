//! What took how long until a container's first instruction, and how much of its image was loaded for it.

use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Moments since the program began.
#[derive(Debug)]
pub struct Timeline {
    began: Instant,
    marks: Vec<(&'static str, Duration, String)>,
}

/// How much of an image there is, and how much was loaded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Loaded {
    /// Files in the image.
    pub files: u64,
    /// Bytes of content in the image.
    pub bytes: u64,
    /// Files that were read, in part at least.
    pub files_read: u64,
    /// Bytes of those that were read.
    pub bytes_read: u64,
    /// Bytes that were unpacked into the cache during the run.
    pub bytes_filled: u64,
}

impl Timeline {
    /// Begins now.
    pub fn begin() -> Timeline {
        Timeline { began: Instant::now(), marks: Vec::new() }
    }

    /// Something is done.
    pub fn mark(&mut self, what: &'static str, detail: impl Into<String>) {
        self.mark_at(what, self.began.elapsed(), detail);
    }

    /// Something was done then.
    pub fn mark_at(&mut self, what: &'static str, at: Duration, detail: impl Into<String>) {
        self.marks.push((what, at, detail.into()));
    }

    /// Time since the beginning.
    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    /// For people.
    pub fn text(&self, loaded: Option<&Loaded>) -> String {
        use crate::cli::output::size;
        let mut text = String::new();
        let mut before = Duration::ZERO;
        for (what, at, detail) in &self.marks {
            let took = at.saturating_sub(before);
            before = *at;
            let detail = if detail.is_empty() { String::new() } else { format!("  ({detail})") };
            text += &format!("{:>9.1} ms  +{:>8.1} ms  {what}{detail}\n", millis(*at), millis(took));
        }
        if let Some(l) = loaded {
            let percent = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 };
            text += &format!(
                "the image has {} files, {}; read were {} files ({:.1} %), {} ({:.1} %); {} were unpacked for that\n",
                l.files,
                size(l.bytes),
                l.files_read,
                percent(l.files_read, l.files),
                size(l.bytes_read),
                percent(l.bytes_read, l.bytes),
                size(l.bytes_filled)
            );
        }
        text
    }

    /// For scripts.
    pub fn json(&self, loaded: Option<&Loaded>) -> Value {
        let marks: Vec<Value> = self
            .marks
            .iter()
            .map(|(what, at, detail)| json!({"what": what, "seconds": at.as_secs_f64(), "detail": detail}))
            .collect();
        json!({
            "event": "timeline",
            "marks": marks,
            "loaded": loaded.map(|l| json!({
                "files": l.files, "bytes": l.bytes, "files_read": l.files_read, "bytes_read": l.bytes_read,
                "bytes_filled": l.bytes_filled,
            })),
        })
    }
}

fn millis(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_timeline_reads_like_one() {
        let mut line = Timeline::begin();
        line.mark_at("image mounted", Duration::from_millis(10), "erofs");
        line.mark_at("first instruction", Duration::from_micros(55_500), "");
        let loaded = Loaded { files: 200, bytes: 1 << 20, files_read: 10, bytes_read: 1 << 19, bytes_filled: 1 << 18 };
        let text = line.text(Some(&loaded));
        assert!(text.contains("     10.0 ms  +    10.0 ms  image mounted  (erofs)\n"), "{text}");
        assert!(text.contains("     55.5 ms  +    45.5 ms  first instruction\n"), "{text}");
        assert!(
            text.contains("200 files, 1.0 MiB; read were 10 files (5.0 %), 512 KiB (50.0 %); 256 KiB were unpacked"),
            "{text}"
        );
        assert_eq!(line.json(None)["marks"][1]["what"], "first instruction");
    }
}
