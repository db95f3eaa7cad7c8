//! Development tasks: the test runner, the cases and corpora, benchmarks.
//!
//! Drives the built `lazyroot` from outside, as a user would; what it links of the workspace is the snapshot type
//! for comparisons and the pieces that benchmarks measure by themselves.

#![forbid(unsafe_code)]

mod bench;
mod cases;
mod corpus;
mod lab;
mod links;
mod proc;
mod readme;
mod report;
mod scratch;
mod snapshot;
mod test;
mod trees;
mod units;

use anyhow::{Context, Result, bail, ensure};
use clap::{Parser, Subcommand};
use report::{Report, Tally};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

/// Development tasks of LazyRoot.
#[derive(Debug, Parser)]
#[command(name = "xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Everything that `make test` runs behind the build
    Test {
        /// All corpora, more kills and faults, the figures
        #[arg(long)]
        full: bool,
    },
    /// The cases, through every way of mounting
    Cases {
        /// Only these
        names: Vec<String>,
        /// How many at a time
        #[arg(long, short, default_value_t = 2)]
        jobs: usize,
        /// Leave inputs and store where they are
        #[arg(long)]
        keep: bool,
    },
    /// Corpora, end to end
    Corpus {
        /// Which; the small ones without
        names: Vec<String>,
        /// Leave the store where it is
        #[arg(long)]
        keep: bool,
    },
    /// The README's examples
    Readme,
    /// What may come into the build, by cargo-deny
    Deny,
    /// Random trees, end to end
    Trees {
        /// The first tree's seed
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// How many
        #[arg(long, default_value_t = 8)]
        rounds: u64,
        /// How many names a tree has at most
        #[arg(long, default_value_t = trees::NAMES)]
        names: u32,
    },
    /// A benchmark
    Bench(bench::Args),
    /// Plan and emit one index, for counting instructions
    #[command(hide = true)]
    Emit {
        /// The index
        file: PathBuf,
    },
    /// Unmount and remove what interrupted runs left
    Clean,
}

fn main() -> ExitCode {
    match run(Cli::parse().task) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("xtask: {e:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(task: Task) -> Result<bool> {
    match task {
        Task::Test { full } => test::run(full),
        Task::Cases { names, jobs, keep } => Ok(alone("cases", |tally| cases::run(&names, jobs, keep, tally))),
        Task::Corpus { names, keep } => {
            let names: Vec<&str> =
                if names.is_empty() { corpus::SMALL.to_vec() } else { names.iter().map(String::as_str).collect() };
            Ok(alone("corpora", |tally| corpus::run(&names, keep, tally)))
        }
        Task::Readme => Ok(alone("readme", readme::run)),
        Task::Deny => Ok(alone("deny", |tally| test::deny(Duration::from_secs(600), tally))),
        Task::Trees { seed, rounds, names } => Ok(alone("trees", |tally| trees::run(seed, rounds, names, tally))),
        Task::Bench(args) => bench::run(&args).map(|()| true),
        Task::Emit { file } => bench::emit(&file).map(|()| true),
        Task::Clean => scratch::clean().map(|()| true),
    }
}

/// One phase by itself.
fn alone(name: &str, body: impl FnOnce(&mut Tally) -> Result<()>) -> bool {
    let mut report = Report::new(Duration::ZERO, Duration::from_secs(24 * 3600), false);
    report.phase(name, |tally, _| body(tally));
    report.close()
}

/// The repository that this program was built from.
fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new("."))
}

/// The directory that cargo builds into: this program lies in its `debug` or `release`.
fn target_dir() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let dir = program.ancestors().nth(2).context("this program lies in no target directory")?;
    // A test program lies one deeper.
    Ok(if dir.ends_with("debug") || dir.ends_with("release") { dir.join("..").canonicalize()? } else { dir.to_owned() })
}

/// Another program of the workspace, of the same profile.
fn sibling(name: &str) -> Result<PathBuf> {
    let path = std::env::current_exe()?.with_file_name(name);
    ensure!(path.exists(), "{} is not there; build the workspace first", path.display());
    Ok(path)
}

/// Drops the kernel's page, inode and name caches.
fn drop_kernel_caches() -> Result<()> {
    rustix::fs::sync();
    match std::fs::write("/proc/sys/vm/drop_caches", "3") {
        Ok(()) => Ok(()),
        Err(e) => bail!("cannot drop the kernel's caches: {e}"),
    }
}
