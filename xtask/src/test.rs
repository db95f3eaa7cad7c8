//! `xtask test`: everything that decides whether a change is good, in one run, with its counts.

use crate::proc;
use crate::report::{Report, Tally};
use crate::units::{self, Which};
use crate::{cases, corpus, trees};
use anyhow::{Result, bail, ensure};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The most that `make test` may take.
const BUDGET: Duration = Duration::from_secs(55 * 60);
/// The most that `make test-full` may take.
const BUDGET_FULL: Duration = Duration::from_secs(8 * 3600);

/// Runs everything; true when all of it held.
pub fn run(full: bool) -> Result<bool> {
    let before = phases_before();
    let spent = before.iter().map(|(_, took)| *took).sum();
    let mut report = Report::new(spent, if full { BUDGET_FULL } else { BUDGET }, strict());
    for (name, took) in before {
        report.note(&name, took);
    }
    report.phase("fmt", |tally, left| cargo(&["fmt", "--all", "--", "--check"], &[], left, tally));
    report.phase("clippy", |tally, left| {
        let args = ["clippy", "--locked", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"];
        cargo(&args, &[], left, tally)
    });
    report.phase("rustdoc", |tally, left| {
        let args = ["doc", "--locked", "--quiet", "--workspace", "--no-deps"];
        cargo(&args, &[("RUSTDOCFLAGS", "-D warnings")], left, tally)
    });
    report.phase("links", |tally, _| crate::links::run(tally));
    report.phase("tests", |tally, left| units::run(Which::Plain, full, left, tally));
    report.phase("doc tests", |tally, left| units::doc_tests(left, tally));
    report.phase("privileged", |tally, left| units::run(Which::Privileged, full, left, tally));
    report.phase("readme", |tally, _| crate::readme::run(tally));
    report.phase("cases", |tally, _| cases::run(&[], 2, false, tally));
    report.phase("trees", |tally, _| trees::run(1, if full { 300 } else { 40 }, trees::NAMES, tally));
    report.phase("corpora", |tally, _| corpus::run(if full { &corpus::ALL } else { &corpus::SMALL }, false, tally));
    if full {
        report.phase("deny", |tally, left| deny(left, tally));
        report.phase("figures", |tally, _| figures(tally));
    }
    Ok(report.close())
}

/// What cargo-deny says of the licences, sources and versions of all that comes into the build; and of the advisories
/// about it, where their list can be had.
pub fn deny(left: Duration, tally: &mut Tally) -> Result<()> {
    if !proc::in_path("cargo-deny") {
        tally.absent("deny", "no cargo-deny in the path (cargo install cargo-deny --locked)");
        return Ok(());
    }
    let check = ["deny", "--locked", "check", "--hide-inclusion-graph"];
    cargo(&[&check[..], &["bans", "licenses", "sources"]].concat(), &[], left, tally)?;
    let mut command = Command::new("cargo");
    command.args(check).arg("advisories").current_dir(crate::repository());
    let outcome = proc::catch(&mut command, left)?;
    if outcome.stderr.contains("advisory database") && !outcome.ok() {
        tally.absent("deny: advisories", "their list could not be fetched");
    } else {
        ensure!(outcome.ok(), "{}", outcome.report());
        tally.pass(1);
    }
    Ok(())
}

/// Benchmarks that say something about every corpus; the others keep to those that their goals name.
const OF_WHOLE_TREES: [&str; 3] = ["walk", "rg", "tree"];

/// Every benchmark, each into a file.
fn figures(tally: &mut Tally) -> Result<()> {
    let dir = crate::target_dir()?.join("figures");
    std::fs::create_dir_all(&dir)?;
    for name in crate::bench::NAMES {
        let file = dir.join(format!("{name}.json"));
        let mut command = Command::new("cargo");
        command.args(["xtask", "bench", name, "--json"]).arg(&file).current_dir(crate::repository());
        if OF_WHOLE_TREES.contains(&name) {
            // The part of a tree that is itself a corpus says nothing more.
            for corpus in corpus::ALL.iter().filter(|corpus| **corpus != "linux-20k") {
                command.args(["--corpus", corpus]);
            }
        }
        let outcome = proc::show(&mut command, Duration::from_secs(2 * 3600))?;
        let result = if outcome.ok() { Ok(()) } else { Err(anyhow::anyhow!("{}", outcome.ending())) };
        tally.check(format!("bench {name}"), result);
    }
    println!("figures in {}", dir.display());
    Ok(())
}

/// What ran before this program could: `packages=12 build=170`, in seconds.
fn phases_before() -> Vec<(String, Duration)> {
    let text = std::env::var("LAZYROOT_TEST_BEFORE").unwrap_or_default();
    let pairs = text.split_whitespace().filter_map(|pair| pair.split_once('='));
    pairs.filter_map(|(name, s)| Some((name.to_owned(), Duration::from_secs(s.parse().ok()?)))).collect()
}

/// Whether everything has to run: CI says so, or this machine has all that it takes.
fn strict() -> bool {
    let ci = std::env::var_os("CI").is_some_and(|v| !v.is_empty() && v != "false" && v != "0");
    ci || (rustix::process::geteuid().is_root() && Path::new("/dev/fuse").exists())
}

/// One cargo command that holds or not.
fn cargo(args: &[&str], env: &[(&str, &str)], left: Duration, tally: &mut Tally) -> Result<()> {
    let mut command = Command::new("cargo");
    command.args(args).envs(env.iter().copied()).current_dir(crate::repository());
    let outcome = proc::show(&mut command, left)?;
    if !outcome.ok() {
        bail!("{}: {}", proc::line(&command), outcome.ending());
    }
    tally.pass(1);
    Ok(())
}
