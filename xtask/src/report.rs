//! What a run found: phases, counts, failures, and the time that it may take.

use std::fmt;
use std::time::{Duration, Instant};

/// Numbers of checks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Held.
    pub passed: usize,
    /// Did not hold.
    pub failed: usize,
    /// Did not run.
    pub skipped: usize,
}

impl Counts {
    fn add(&mut self, other: Counts) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed, {} skipped", self.passed, self.failed, self.skipped)
    }
}

/// The checks of one phase.
#[derive(Debug, Default)]
pub struct Tally {
    counts: Counts,
    failures: Vec<(String, String)>,
    skips: Vec<(String, String)>,
    absent: Vec<(String, String)>,
}

impl Tally {
    /// `count` checks held.
    pub fn pass(&mut self, count: usize) {
        self.counts.passed += count;
    }

    /// One did not.
    pub fn fail(&mut self, name: impl Into<String>, why: impl Into<String>) {
        self.counts.failed += 1;
        self.failures.push((name.into(), why.into()));
    }

    /// One did not run.
    pub fn skip(&mut self, name: impl Into<String>, why: impl Into<String>) {
        self.counts.skipped += 1;
        self.skips.push((name.into(), why.into()));
    }

    /// One did not run because of something that nobody has to have; it counts as skipped, and fails nowhere.
    pub fn absent(&mut self, name: impl Into<String>, why: impl Into<String>) {
        self.counts.skipped += 1;
        self.absent.push((name.into(), why.into()));
    }

    /// One that holds or not.
    pub fn check(&mut self, name: impl Into<String>, result: anyhow::Result<()>) {
        match result {
            Ok(()) => self.pass(1),
            Err(e) => self.fail(name, format!("{e:#}")),
        }
    }

    /// Takes in another tally, for instance of another thread.
    pub fn merge(&mut self, other: Tally) {
        self.counts.add(other.counts);
        self.failures.extend(other.failures);
        self.skips.extend(other.skips);
        self.absent.extend(other.absent);
    }

    /// The numbers so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }
}

/// A whole run.
#[derive(Debug)]
pub struct Report {
    started: Instant,
    budget: Duration,
    /// Whether what was skipped counts as failed: this machine can run everything.
    strict: bool,
    phases: Vec<(String, Duration, Option<Counts>)>,
    totals: Tally,
}

impl Report {
    /// A run that began `before` ago and may take `budget`.
    pub fn new(before: Duration, budget: Duration, strict: bool) -> Self {
        let now = Instant::now();
        Report {
            started: now.checked_sub(before).unwrap_or(now),
            budget,
            strict,
            phases: Vec::new(),
            totals: Tally::default(),
        }
    }

    /// The time left.
    pub fn left(&self) -> Duration {
        self.budget.saturating_sub(self.started.elapsed())
    }

    /// Notes a phase that is over and had no checks of its own.
    pub fn note(&mut self, name: &str, took: Duration) {
        self.finish(name, took, None);
    }

    /// Runs one phase; an error is one failed check of that name.
    pub fn phase(&mut self, name: &str, body: impl FnOnce(&mut Tally, Duration) -> anyhow::Result<()>) {
        println!("--- {name}");
        let began = Instant::now();
        let mut tally = Tally::default();
        if let Err(e) = body(&mut tally, self.left()) {
            tally.fail(name, format!("{e:#}"));
        }
        for (test, why) in &tally.failures {
            println!("FAILED {test}: {}", why.replace('\n', "\n    "));
        }
        self.finish(name, began.elapsed(), Some(tally.counts));
        self.totals.merge(tally);
    }

    fn finish(&mut self, name: &str, took: Duration, counts: Option<Counts>) {
        println!("{}", phase_line(name, took, counts));
        self.phases.push((name.to_owned(), took, counts));
    }

    /// Prints what there is to say; the line with the counts is the last one. True when all is well.
    pub fn close(mut self) -> bool {
        let took = self.started.elapsed();
        if took > self.budget {
            let why = format!("{:.1} minutes, the most is {:.0}", minutes(took), minutes(self.budget));
            self.totals.fail("time", why);
        }
        println!("\n--- phases");
        for (name, took, counts) in &self.phases {
            println!("{}", phase_line(name, *took, *counts));
        }
        println!("{}", phase_line("all", took, None));
        for (name, why) in &self.totals.skips {
            println!("SKIPPED {name}: {why}");
        }
        for (name, why) in &self.totals.absent {
            println!("ABSENT {name}: {why}");
        }
        if self.strict && !self.totals.skips.is_empty() {
            let why = format!("{} did not run, and this machine can run everything", self.totals.skips.len());
            self.totals.fail("skipped", why);
        }
        for (name, why) in &self.totals.failures {
            println!("FAILED {name}: {}", why.lines().next().unwrap_or_default());
        }
        println!("{}", self.totals.counts);
        self.totals.counts.failed == 0
    }
}

fn minutes(time: Duration) -> f64 {
    time.as_secs_f64() / 60.0
}

fn phase_line(name: &str, took: Duration, counts: Option<Counts>) -> String {
    let counts = counts.map(|c| format!("  {c}")).unwrap_or_default();
    format!("{name:<14} {:>5.1} min{counts}", minutes(took))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_a_phase_is_one_failure() {
        let mut report = Report::new(Duration::ZERO, Duration::from_secs(60), false);
        report.phase("one", |tally, _| {
            tally.pass(3);
            anyhow::bail!("broken")
        });
        assert_eq!(report.totals.counts(), Counts { passed: 3, failed: 1, skipped: 0 });
        assert!(!report.close());
    }

    #[test]
    fn skips_fail_only_where_everything_can_run() {
        for strict in [false, true] {
            let mut report = Report::new(Duration::ZERO, Duration::from_secs(60), strict);
            report.phase("one", |tally, _| {
                tally.skip("a", "no device");
                Ok(())
            });
            assert_eq!(report.close(), !strict);
        }
    }

    #[test]
    fn what_nobody_has_to_have_is_counted_and_fails_nowhere() {
        let mut report = Report::new(Duration::ZERO, Duration::from_secs(60), true);
        report.phase("one", |tally, _| {
            tally.absent("a", "not in the path");
            Ok(())
        });
        assert_eq!(report.totals.counts().skipped, 1);
        assert!(report.close());
    }

    #[test]
    fn a_run_over_its_time_fails() {
        assert!(!Report::new(Duration::from_secs(61), Duration::from_secs(60), false).close());
    }
}
