//! Benchmarks of the whole program, in ratios: the targets run in turn within each round, each is compared with the
//! base of the same round, and medians are reported. Peers that Debian packages are installed by `make bench`; others
//! are taken from the path; one that is absent is named as absent.

mod hash;
mod import;
mod measure;
mod mount;
mod pages;
mod peers;
mod plan;
mod ratios;
mod views;
mod walk;

use crate::proc;
use crate::scratch::Scratch;
use anyhow::{Context, Result, bail};
use measure::Figures;
pub use plan::emit;
use serde_json::json;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// The benchmarks.
pub const NAMES: [&str; 8] = ["plan-emit", "import", "mount-ls", "walk", "rg", "hash", "tree", "memory"];

/// Arguments of `bench`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// plan-emit, import, mount-ls, walk, rg, hash, tree or memory
    #[arg(value_parser = clap::builder::PossibleValuesParser::new(NAMES))]
    name: String,
    /// Write the figures there as JSON too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Rounds
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// The corpora [default: those that the goal names]
    #[arg(long)]
    corpus: Vec<String>,
}

/// Runs one benchmark.
pub fn run(args: &Args) -> Result<()> {
    if std::env::var_os(BUILT).is_none() {
        return again_in_release(args);
    }
    let mut figures = Figures::new(&args.name);
    let scratch = Scratch::new("bench")?;
    let corpora = |default: &[&str]| -> Vec<String> {
        if args.corpus.is_empty() { default.iter().map(|&s| s.to_owned()).collect() } else { args.corpus.clone() }
    };
    match args.name.as_str() {
        "plan-emit" => plan::run(&scratch, &corpora(&["linux"]), args.rounds, &mut figures)?,
        "import" => import::run(&scratch, &corpora(&["debian", "linux"]), args.rounds, &mut figures)?,
        "mount-ls" => mount::first_listing(&scratch, &corpora(&["debian", "linux"]), args.rounds, &mut figures)?,
        "memory" => mount::memory(&scratch, &corpora(&["debian", "linux"]), &mut figures)?,
        "walk" => walk::walks(&scratch, &corpora(&["linux"]), args.rounds, &mut figures)?,
        "rg" => walk::searches(&scratch, &corpora(&["linux"]), args.rounds, &mut figures)?,
        "tree" => walk::tree(&scratch, &corpora(&["linux"]), args.rounds, &mut figures)?,
        "hash" => hash::run(args.rounds, &mut figures)?,
        other => bail!("no benchmark {other}"),
    }
    let report = figures.json();
    if let Some(path) = &args.json {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// Set for the program that was built for measuring.
const BUILT: &str = "LAZYROOT_BENCH_BUILT";

/// Builds program and benchmark as releases are, together, and runs the same command there.
fn again_in_release(args: &Args) -> Result<()> {
    let mut command = Command::new("cargo");
    command.args(["build", "--release", "--locked", "--quiet", "-p", "lazyroot", "-p", "xtask"]);
    if args.name == "hash" {
        command.args(["--features", "xtask/yardstick"]);
    }
    proc::must(command.current_dir(crate::repository()), Duration::from_secs(3600))?;
    let mut command = Command::new(crate::target_dir()?.join("release/xtask"));
    command.args(std::env::args_os().skip(1)).env(BUILT, "1");
    let outcome = proc::show(&mut command, Duration::from_secs(6 * 3600))?;
    if !outcome.ok() {
        bail!("{}: {}", proc::line(&command), outcome.ending());
    }
    Ok(())
}

/// What the figures were taken on.
fn surroundings() -> serde_json::Value {
    let git = |args: &[&str]| {
        let outcome =
            proc::catch(Command::new("git").args(args).current_dir(crate::repository()), Duration::from_secs(10));
        outcome.ok().filter(proc::Outcome::ok).map(|o| o.stdout.trim().to_owned())
    };
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    let processor = read("/proc/cpuinfo");
    let processor =
        processor.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':')).map(|(_, name)| name.trim());
    json!({
        "commit": git(&["rev-parse", "HEAD"]),
        "changed_files": git(&["status", "--porcelain"]).map(|s| s.lines().count()),
        "kernel": read("/proc/sys/kernel/osrelease"),
        "processor": processor,
        "processors": std::thread::available_parallelism().map_or(0, usize::from),
        "load": read("/proc/loadavg"),
        "command": std::env::args().collect::<Vec<_>>().join(" "),
    })
}
