//! The tests that cargo knows, run one program after the other and counted by name: what was listed has to report.
//!
//! A test is *privileged* when `priv_` is in its path or its program's name; those of a program run one at a time.
//! A test that cannot run here prints `SKIP name: reason`; it counts as skipped then, not as passed.

use crate::proc;
use crate::report::Tally;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// The longest that one test program may run.
const LIMIT: Duration = Duration::from_secs(1200);

/// What a test's name says about where it runs.
const PRIVILEGED: &str = "priv_";

/// A test program.
#[derive(Debug)]
struct Program {
    name: String,
    executable: PathBuf,
    package_dir: PathBuf,
}

/// Which tests to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// Those that anybody can run.
    Plain,
    /// The privileged ones, one at a time.
    Privileged,
}

/// Runs all tests of one sort. `full` tells them (`LAZYROOT_TEST_FULL`) to take their time: more kills, more faults.
pub fn run(which: Which, full: bool, left: Duration, tally: &mut Tally) -> Result<()> {
    for program in programs(left)? {
        let listed: Vec<String> = list(&program)?.into_iter().filter(|test| sort(&program, test) == which).collect();
        if listed.is_empty() {
            continue;
        }
        let mut command = program.command();
        match which {
            Which::Plain => command.args(["--skip", PRIVILEGED]),
            Which::Privileged if program.name.contains(PRIVILEGED) => command.arg("--test-threads=1"),
            Which::Privileged => command.args([PRIVILEGED, "--test-threads=1"]),
        };
        if full {
            command.env("LAZYROOT_TEST_FULL", "1");
        }
        let outcome = proc::catch(command.arg("--show-output"), LIMIT.min(left))?;
        let before = tally.counts();
        judge(&program.name, &listed, &outcome, tally);
        if tally.counts().failed > before.failed {
            println!("{}", failing(&outcome));
        }
        println!("  {:<32} {:>4} tests {:>6.1} s", program.name, listed.len(), outcome.took.as_secs_f64());
    }
    Ok(())
}

/// Runs the examples in the documentation.
pub fn doc_tests(left: Duration, tally: &mut Tally) -> Result<()> {
    let mut command = Command::new("cargo");
    command.args(["test", "--locked", "--quiet", "--workspace", "--doc"]).arg("--").arg("--format=pretty");
    let outcome = proc::catch(&mut command, left)?;
    let results = results(&outcome.stdout);
    let failed = results.values().filter(|r| **r == Verdict::Failed).count();
    tally.pass(results.values().filter(|r| **r == Verdict::Passed).count());
    if failed > 0 || !outcome.ok() {
        bail!("{}", outcome.report());
    }
    Ok(())
}

impl Program {
    fn command(&self) -> Command {
        let mut command = Command::new(&self.executable);
        // As cargo starts it: in the package's directory.
        command.current_dir(&self.package_dir).env("CARGO_MANIFEST_DIR", &self.package_dir);
        command
    }
}

/// All test programs, from cargo itself.
fn programs(left: Duration) -> Result<Vec<Program>> {
    let mut command = Command::new("cargo");
    command.args(["test", "--locked", "--workspace", "--no-run", "--message-format=json-render-diagnostics"]);
    let outcome = proc::must(&mut command, left)?;
    let mut programs = Vec::new();
    for line in outcome.stdout.lines() {
        let message: Value = serde_json::from_str(line).context("cargo's messages")?;
        let (Some(executable), Some(true)) = (message["executable"].as_str(), message["profile"]["test"].as_bool())
        else {
            continue;
        };
        let manifest = Path::new(message["manifest_path"].as_str().context("a message without manifest_path")?);
        let package_dir = manifest.parent().context("a manifest without a directory")?.to_owned();
        let package = package_dir.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let target = message["target"]["name"].as_str().unwrap_or_default().to_owned();
        let unit = message["target"]["kind"].as_array().is_some_and(|k| k.iter().any(|k| k != "test"));
        programs.push(Program {
            name: if unit { package } else { format!("{package}/{target}") },
            executable: PathBuf::from(executable),
            package_dir,
        });
    }
    if programs.is_empty() {
        bail!("cargo named no test program");
    }
    programs.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(programs)
}

fn list(program: &Program) -> Result<Vec<String>> {
    let outcome = proc::must(program.command().args(["--list", "--format=terse"]), Duration::from_secs(60))?;
    Ok(outcome.stdout.lines().filter_map(|line| line.strip_suffix(": test").map(str::to_owned)).collect())
}

fn sort(program: &Program, test: &str) -> Which {
    if test.contains(PRIVILEGED) || program.name.contains(PRIVILEGED) { Which::Privileged } else { Which::Plain }
}

/// How one test ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Passed,
    Failed,
    Ignored,
}

/// The lines `test NAME ... VERDICT` of a test program's output.
fn results(stdout: &str) -> BTreeMap<String, Verdict> {
    let mut results = BTreeMap::new();
    for line in stdout.lines() {
        let Some((name, verdict)) = line.strip_prefix("test ").and_then(|l| l.rsplit_once(" ... ")) else { continue };
        let verdict = match verdict {
            "ok" => Verdict::Passed,
            "FAILED" => Verdict::Failed,
            v if v.starts_with("ignored") => Verdict::Ignored,
            _ => continue,
        };
        let name = name.strip_suffix(" - should panic").unwrap_or(name);
        results.insert(name.to_owned(), verdict);
    }
    results
}

/// The lines `SKIP name: reason`, whatever stands before them.
fn skips(output: &str) -> BTreeMap<String, String> {
    let lines = output.lines().filter_map(|line| line.split_once("SKIP ")?.1.split_once(": "));
    lines.map(|(name, why)| (name.trim().to_owned(), why.to_owned())).collect()
}

/// What a test program said about the tests that failed, or all of it when it did not get that far.
fn failing(outcome: &proc::Outcome) -> String {
    match outcome.stdout.rsplit_once("\nfailures:\n\n----") {
        Some((_, sections)) => format!("----{sections}\n{}", outcome.stderr),
        None => outcome.report(),
    }
}

fn judge(program: &str, listed: &[String], outcome: &proc::Outcome, tally: &mut Tally) {
    let results = results(&outcome.stdout);
    let mut skips = skips(&format!("{}\n{}", outcome.stdout, outcome.stderr));
    for test in listed {
        let name = format!("{program} {test}");
        let short = test.rsplit("::").next().unwrap_or(test);
        match (results.get(test), skips.remove(short).or_else(|| skips.remove(test))) {
            (Some(Verdict::Passed), None) => tally.pass(1),
            (Some(Verdict::Passed), Some(why)) => tally.skip(name, why),
            (Some(Verdict::Failed), _) => tally.fail(name, "see its output above"),
            // An ignored test is a tool, or a part that another test runs.
            (Some(Verdict::Ignored), _) => {}
            (None, _) => tally.fail(name, format!("did not report; its program: {}", outcome.ending())),
        }
    }
    for (name, why) in skips {
        tally.skip(format!("{program} {name}"), why);
    }
    let failed = listed.iter().any(|test| results.get(test) == Some(&Verdict::Failed));
    if !outcome.ok() && !failed {
        tally.fail(program, outcome.ending());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_read_from_a_test_programs_output() {
        let text = "running 4 tests\ntest a::b ... ok\ntest a::c - should panic ... ok\ntest d ... FAILED\n\
                    test e ... ignored, slow\n\ntest result: FAILED. 2 passed;";
        let results = results(text);
        assert_eq!(results["a::b"], Verdict::Passed);
        assert_eq!(results["a::c"], Verdict::Passed);
        assert_eq!(results["d"], Verdict::Failed);
        assert_eq!(results["e"], Verdict::Ignored);
        assert_eq!(results.len(), 4);
    }

    #[test]
    fn what_was_listed_has_to_report() {
        let outcome = proc::Outcome {
            status: None,
            stdout: "test a ... ok\ntest m::b ... ok\n---- m::b stdout ----\nSKIP b: no /dev/fuse\n".into(),
            stderr: String::new(),
            took: Duration::ZERO,
        };
        let mut tally = Tally::default();
        judge("p", &["a".into(), "m::b".into(), "c".into()], &outcome, &mut tally);
        let counts = tally.counts();
        // The program's own end (it timed out) is a failure too.
        assert_eq!((counts.passed, counts.failed, counts.skipped), (1, 2, 1));
    }
}
