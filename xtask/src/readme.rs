//! The README's examples, run as they stand: the first `sh` block under "Five minutes".

use crate::proc;
use crate::report::Tally;
use crate::scratch::Scratch;
use anyhow::{Context, Result, ensure};
use std::process::Command;
use std::time::Duration;

/// Runs the block with the program that was built beside this one.
pub fn run(tally: &mut Tally) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        tally.skip("readme", "its examples mount");
        return Ok(());
    }
    let text = std::fs::read_to_string(crate::repository().join("README.md"))?;
    let block = text.split("## Five minutes").nth(1).and_then(|rest| rest.split("```sh\n").nth(1)?.split("```").next());
    let block = block.context("README.md has no sh block under \"Five minutes\"")?;
    let scratch = Scratch::new("readme")?;
    // It builds in release and uses /tmp; here it is what was built, in a place of its own.
    let lines = block.lines().filter(|line| !line.starts_with("cargo build"));
    let script = lines.collect::<Vec<_>>().join("\n").replace("/tmp/", &format!("{}/", scratch.dir().display()));
    let programs = crate::sibling("lazyroot")?;
    let mut path = programs.parent().context("a program without a directory")?.as_os_str().to_owned();
    path.push(":");
    path.push(std::env::var_os("PATH").unwrap_or_default());
    let mut command = Command::new("sh");
    command.args(["-euc", &script]).env("PATH", path);
    command.env("LAZYROOT_ROOT", scratch.dir().join("root")).env("LAZYROOT_STATE", scratch.dir().join("state"));
    let outcome = proc::catch(&mut command, Duration::from_secs(300))?;
    let stopped = proc::catch(command_of(&scratch)?.args(["daemon", "stop", "--force"]), Duration::from_secs(60))?;
    ensure!(outcome.ok(), "{}", outcome.report());
    ensure!(stopped.ok(), "the daemon: {}", stopped.report());
    tally.pass(script.lines().filter(|line| line.starts_with("lazyroot ")).count());
    Ok(())
}

fn command_of(scratch: &Scratch) -> Result<Command> {
    let mut command = Command::new(crate::sibling("lazyroot")?);
    command.arg("--root").arg(scratch.dir().join("root")).arg("--state").arg(scratch.dir().join("state"));
    Ok(command)
}
