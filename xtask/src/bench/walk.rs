//! Walking, statting and searching whole trees, warm and cold.

use super::measure::{Figures, Measured, Series, in_turn};
use super::peers::{self, Site};
use super::views::{self, View};
use super::{pages, ratios};
use crate::lab::Lab;
use crate::scratch::Scratch;
use crate::{corpus, proc};
use anyhow::{Context, Result, ensure};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// What is done to a tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Every name.
    Find,
    /// Every name with its attributes.
    StatAll,
    /// Every file's content, searched.
    Search,
    /// Every file's content, printed.
    Cat,
}

impl Work {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Work::Find => "find",
            Work::StatAll => "stat-all",
            Work::Search => "rg",
            Work::Cat => "cat",
        }
    }

    /// Seconds that it takes.
    pub fn take(self, point: &Path) -> Result<f64> {
        let mut command = match self {
            Work::Find | Work::StatAll => Command::new("find"),
            Work::Search => Command::new("rg"),
            Work::Cat => Command::new("sh"),
        };
        match self {
            Work::Find => command.arg(point).arg("-xdev"),
            Work::StatAll => command.arg(point).args(["-xdev", "-printf", r"%s %m %U %T@ %i\n"]),
            Work::Search => command.args(["-j2", "-uu", "-F", "zzz_not_there_q"]).arg(point),
            Work::Cat => {
                command.args(["-c", r#"find "$1" -xdev -type f -print0 | xargs -0 -n 500 cat"#, "sh"]).arg(point)
            }
        };
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let began = Instant::now();
        let status = command.status().with_context(|| proc::line(&command))?;
        let took = began.elapsed().as_secs_f64();
        // rg says 1 when it found nothing, which is what it has to find.
        let right = if self == Work::Search { Some(1) } else { Some(0) };
        ensure!(status.code() == right, "{}: {status}", proc::line(&command));
        Ok(took)
    }
}

/// All views through one kind of work, each in turn.
pub fn measured(views: &[View], corpus: &str, work: Work, cold: bool, rounds: usize) -> Result<Vec<Series>> {
    let what = format!("{} {}, {corpus}", work.name(), if cold { "cold" } else { "warm" });
    if !cold {
        return warm(views, &what, work, rounds);
    }
    let mut targets: Vec<(String, Measured<'_>)> = Vec::new();
    for view in views {
        let measure = move || {
            crate::drop_kernel_caches()?;
            work.take(&view.point)
        };
        targets.push((view.name.clone(), Box::new(measure)));
    }
    in_turn(&what, "s", rounds, targets)
}

/// A walk over names and inodes that the kernel has is up to a fifth faster or slower by where in memory they happen
/// to lie, for as long as they stay there. So each round has them made anew, and in another order. A search is about
/// content, which would go with them: it has them made once.
fn warm(views: &[View], what: &str, work: Work, rounds: usize) -> Result<Vec<Series>> {
    let mut series: Vec<Series> = views.iter().map(|view| Series::new(what, &view.name, "s")).collect();
    for round in 0..rounds.max(1) {
        let order = (0..views.len()).map(|n| (n + round) % views.len());
        if round == 0 || work != Work::Search {
            rustix::fs::sync();
            std::fs::write("/proc/sys/vm/drop_caches", "2").context("dropping names and inodes")?;
            for n in order.clone() {
                work.take(&views[n].point)?;
            }
        }
        for n in order {
            series[n].values.push(work.take(&views[n].point)?);
        }
    }
    Ok(series)
}

fn lab_with(scratch: &Scratch, names: &[String]) -> Result<Lab> {
    let lab = Lab::new(scratch.dir())?;
    for name in names {
        lab.import(&Lab::source("oci", &corpus::build(name)?.join("oci")), name)?;
    }
    Ok(lab)
}

/// The series of one target.
pub fn of<'a>(series: &'a [Series], target: &str) -> Result<&'a Series> {
    series.iter().find(|s| s.target == target).with_context(|| format!("no target {target}"))
}

/// find and stat-all.
pub fn walks(scratch: &Scratch, names: &[String], rounds: usize, figures: &mut Figures) -> Result<()> {
    let lab = lab_with(scratch, names)?;
    for name in names {
        let rootfs = corpus::cache()?.join(name).join("rootfs");
        let views = views::all(&Site { scratch, corpus: name, rootfs: &rootfs }, &lab, figures)?;
        for work in [Work::Find, Work::StatAll] {
            let warm = measured(&views, name, work, false, rounds)?;
            figures.add(&warm);
            let native = of(&warm, "native EROFS, metadata in front")?;
            let ratio = of(&warm, "lazyroot erofs")?.ratio(native);
            figures.goal(format!("{} warm, {name}: ratio to native EROFS", work.name()), ratio, 1.05);
            let cold = measured(&views, name, work, true, rounds)?;
            figures.add(&cold);
            let ratio = of(&cold, "lazyroot erofs")?.ratio(of(&cold, "native directory")?);
            let most = if work == Work::Find { 0.2 } else { 0.5 };
            figures.goal(format!("{} cold, {name}: ratio to the native directory", work.name()), ratio, most);
        }
    }
    Ok(())
}

/// rg over everything.
pub fn searches(scratch: &Scratch, names: &[String], rounds: usize, figures: &mut Figures) -> Result<()> {
    let here = views::version("rg");
    figures.peer("ripgrep", here.clone());
    here.context("ripgrep is not here; `make bench NAME=rg` installs it")?;
    let lab = lab_with(scratch, names)?;
    for name in names {
        let rootfs = corpus::cache()?.join(name).join("rootfs");
        let views = views::all(&Site { scratch, corpus: name, rootfs: &rootfs }, &lab, figures)?;
        let warm = measured(&views, name, Work::Search, false, rounds)?;
        figures.add(&warm);
        let native = of(&warm, "native EROFS, metadata in front")?;
        figures.goal(
            format!("rg warm, {name}: ratio to native EROFS"),
            of(&warm, "lazyroot erofs")?.ratio(native),
            1.1,
        );
        figures.add(&measured(&views, name, Work::Search, true, rounds.min(3))?);
    }
    Ok(())
}

/// The FUSE tree: walks against the ratios of another daemon, single lookups against a pass-through one.
pub fn tree(scratch: &Scratch, names: &[String], rounds: usize, figures: &mut Figures) -> Result<()> {
    let lab = lab_with(scratch, names)?;
    for name in names {
        let rootfs = corpus::cache()?.join(name).join("rootfs");
        let site = Site { scratch, corpus: name, rootfs: &rootfs };
        let mut views = views::ours(&site, &lab)?;
        views.extend(peers::nydusd(&site, figures));
        ratios::compare(&views, name, &rootfs, rounds, figures)?;
        views.retain(|view| view.name != "nydusd");
        views.extend(peers::pass_through(&site, figures));
        let picked = picked(&rootfs)?;
        pages::run(scratch, &lab, name, &picked, figures);
        lookups(&views, name, &picked, rounds, figures)?;
    }
    Ok(())
}

/// Names that are looked up in one go.
const LOOKUPS: usize = 2000;
/// Longer than libfuse lets the kernel believe what a pass-through tree said, which is a second.
const PAUSE: Duration = Duration::from_millis(1200);

/// What the kernel knows when names are looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Known {
    /// Nothing: caches were dropped, pages and all.
    Nothing,
    /// What it was told a while ago, about each of the names.
    Told,
    /// No names and inodes; but daemons and disks have everything in memory.
    Pages,
}

impl Known {
    fn name(self) -> &'static str {
        match self {
            Known::Nothing => "lookup cold",
            Known::Told => "lookup warm",
            Known::Pages => "lookup, names dropped",
        }
    }

    fn prepare(self, look: impl Fn() -> Result<()>) -> Result<()> {
        rustix::fs::sync();
        match self {
            Known::Nothing => std::fs::write("/proc/sys/vm/drop_caches", "3")?,
            Known::Pages => std::fs::write("/proc/sys/vm/drop_caches", "2")?,
            Known::Told => {
                look()?;
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }
}

/// Paths picked over the whole tree, as `find .` names them.
fn picked(rootfs: &Path) -> Result<Vec<String>> {
    let mut command = Command::new("find");
    command.arg(".").arg("-xdev").current_dir(rootfs);
    let outcome = proc::must(&mut command, Duration::from_secs(600))?;
    let all: Vec<&str> = outcome.stdout.lines().collect();
    Ok(all.iter().step_by((all.len() / LOOKUPS).max(1)).map(|&path| path.to_owned()).collect())
}

/// stat(2) of names picked over the whole tree, each looked up once.
fn lookups(views: &[View], name: &str, picked: &[String], rounds: usize, figures: &mut Figures) -> Result<()> {
    for known in [Known::Nothing, Known::Told, Known::Pages] {
        let mut targets: Vec<(String, Measured<'_>)> = Vec::new();
        for view in views {
            let look = move || -> Result<()> {
                for path in picked {
                    std::fs::symlink_metadata(view.point.join(path))
                        .with_context(|| format!("{}: {path}", view.name))?;
                }
                Ok(())
            };
            let measure = move || -> Result<f64> {
                known.prepare(look)?;
                let began = Instant::now();
                look()?;
                Ok(began.elapsed().as_secs_f64() * 1e6 / picked.len() as f64)
            };
            targets.push((view.name.clone(), Box::new(measure)));
        }
        let what = format!("{}, {name}", known.name());
        let series = in_turn(&what, "µs a path", rounds, targets)?;
        figures.add(&series);
        if let Ok(peer) = of(&series, "bindfs") {
            figures.goal(
                format!("{what}: ratio to a pass-through FUSE tree"),
                of(&series, "lazyroot tree")?.ratio(peer),
                0.27,
            );
        }
    }
    Ok(())
}
