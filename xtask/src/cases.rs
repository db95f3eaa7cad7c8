//! The cases of `tests/cases`, each from every source that it has and through every way of mounting, on one daemon.

use crate::lab::{Lab, Way};
use crate::proc;
use crate::report::Tally;
use crate::scratch::Scratch;
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;
use std::time::Duration;

/// The longest that a comparison may take.
const LIMIT: Duration = Duration::from_secs(300);

/// What the runner needs of `expected.json`.
#[derive(Debug, Deserialize)]
struct Expected {
    expect: String,
    kind: String,
    inputs: BTreeMap<String, String>,
    #[serde(default)]
    not_through: BTreeMap<String, String>,
}

/// One case from one source.
#[derive(Debug)]
struct Job {
    case: String,
    folder: PathBuf,
    scheme: &'static str,
    input: PathBuf,
    expect: String,
    not_through: BTreeMap<String, String>,
}

/// The sources that a case can have: key in `inputs`, scheme of `import`.
const SOURCES: [(&str, &str); 4] =
    [("oci", "oci"), ("tar", "tar"), ("dir", "dir"), ("docker-archive", "docker-archive")];

/// Runs the cases whose names are given, or all.
pub fn run(names: &[String], jobs: usize, keep: bool, tally: &mut Tally) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        tally.skip("cases", "they need root: owners, devices, trusted.* attributes");
        return Ok(());
    }
    let mut scratch = Scratch::new("cases")?;
    if keep {
        scratch.keep();
    }
    let generated = scratch.dir().join("cases");
    generate(names, &generated)?;
    let queue = Mutex::new(plan(&generated, tally)?);
    let lab = Lab::new(scratch.dir())?;
    let shared = Mutex::new(Tally::default());
    std::thread::scope(|scope| {
        for worker in 0..jobs {
            let (queue, lab, shared) = (&queue, &lab, &shared);
            scope.spawn(move || {
                let mut own = Tally::default();
                while let Some(job) = queue.lock().expect("no worker panics holding it").pop_front() {
                    one(lab, &job, worker, &mut own);
                }
                shared.lock().expect("no worker panics holding it").merge(own);
            });
        }
    });
    tally.merge(shared.into_inner().expect("no worker panics holding it"));
    tally.check("cases: the daemon ends", lab.stop());
    Ok(())
}

fn script(name: &str) -> PathBuf {
    crate::repository().join("tests/cases").join(name)
}

fn generate(names: &[String], out: &Path) -> Result<()> {
    let calls = match names {
        [] => vec![vec!["--all"]],
        _ => names.iter().map(|name| vec!["--case", name.as_str()]).collect(),
    };
    for call in calls {
        let mut command = Command::new("python3");
        command.arg(script("gen.py")).args(call).arg("--out").arg(out);
        proc::must(&mut command, LIMIT)?;
    }
    Ok(())
}

/// All jobs; the large directories first, so that no worker is left with one at the end.
fn plan(generated: &Path, tally: &mut Tally) -> Result<VecDeque<Job>> {
    let mut plan = Vec::new();
    for entry in std::fs::read_dir(generated)? {
        let folder = entry?.path();
        let case = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let text = std::fs::read(folder.join("expected.json")).with_context(|| format!("case {case}"))?;
        let weight = text.len() + if case.contains("100k") || case.contains("16_bits") { 1 << 30 } else { 0 };
        let expected: Expected =
            serde_json::from_slice(&text).with_context(|| format!("case {case}: expected.json"))?;
        let before = plan.len();
        for (key, scheme) in SOURCES {
            let Some(input) = expected.inputs.get(key) else { continue };
            plan.push((
                weight,
                Job {
                    case: case.clone(),
                    input: folder.join(input),
                    folder: folder.clone(),
                    scheme,
                    expect: expected.expect.clone(),
                    not_through: expected.not_through.clone(),
                },
            ));
        }
        if plan.len() == before {
            tally.fail(&case, format!("kind {} without an input", expected.kind));
        }
    }
    plan.sort_by(|(a, x), (b, y)| b.cmp(a).then_with(|| x.case.cmp(&y.case)));
    Ok(plan.into_iter().map(|(_, job)| job).collect())
}

/// One case from one source: the import, then each way.
fn one(lab: &Lab, job: &Job, worker: usize, tally: &mut Tally) {
    let name = format!("{}/{}", job.case, job.scheme);
    // Image names allow no underscores in a row and the like; the case's number of letters is not worth a rule.
    let image = format!("{}-{}", job.case.replace('_', "-"), job.scheme);
    let expected = job.folder.join("expected.json");
    let imported = match lab.try_run([
        "import".as_ref(),
        "--quiet".as_ref(),
        Lab::source(job.scheme, &job.input).as_os_str(),
        image.as_ref(),
    ]) {
        Ok(outcome) => outcome,
        Err(e) => return tally.fail(name, format!("{e:#}")),
    };
    if !imported.ok() {
        return tally.check(format!("{name}/import"), refused(&expected, &imported));
    }
    if job.expect == "reject" {
        return tally.fail(format!("{name}/import"), "the input had to be refused and was taken");
    }
    for way in Way::ALL {
        if job.not_through.contains_key(way.name()) {
            continue;
        }
        let slot = format!("{worker}-{}", way.name());
        let looked = lab.shown(&image, way, &slot, |point| compare(point, &expected, way));
        tally.check(format!("{name}/{}", way.name()), looked);
    }
}

/// The importer refused: it must have said so itself, and it must have been right.
fn refused(expected: &Path, imported: &proc::Outcome) -> Result<()> {
    let code = imported.status.and_then(|s| s.code());
    if !matches!(code, Some(1..=99)) || imported.stderr.trim().is_empty() || imported.stderr.contains("panicked") {
        bail!("no clean refusal: {}", imported.report());
    }
    let mut command = Command::new("python3");
    command.arg(script("check.py")).arg("--rejected").arg(expected);
    let outcome = proc::catch(&mut command, LIMIT)?;
    if !outcome.ok() {
        bail!("{}\nthe importer said: {}", outcome.report(), imported.stderr.trim());
    }
    Ok(())
}

fn compare(point: &Path, expected: &Path, way: Way) -> Result<()> {
    let mut command = Command::new("python3");
    command.arg(script("check.py")).arg(point).arg(expected).args(["--fs", way.file_system(), "--probe"]);
    let outcome = proc::catch(&mut command, LIMIT)?;
    ensure!(
        outcome.ok(),
        "{}",
        outcome.stdout.trim_end().lines().chain(outcome.stderr.lines()).collect::<Vec<_>>().join("\n")
    );
    Ok(())
}
