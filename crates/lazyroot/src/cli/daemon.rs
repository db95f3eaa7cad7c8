//! `daemon`, `stats`, `logs`.

use super::Context;
use super::args::{DaemonCommand, DaemonOptions};
use super::output::{count, moment};
use crate::control::proto::{Reply, Request};
use crate::daemon::log::older;
use crate::daemon::serve::{Begun, Ground, serve};
use crate::daemon::start;
use crate::dirs::Dirs;
use crate::errors;
use crate::failure::Failure;
use crate::reader;
use anyhow::Context as _;
use serde_json::json;
use std::io::Write;
use std::time::Duration;

/// How long `stop` waits for the daemon to be gone.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);

fn unexpected(reply: &Reply) -> anyhow::Error {
    anyhow::anyhow!("the daemon answered with something else: {reply:?}")
}

/// `daemon …`
pub fn command(context: &Context, command: &DaemonCommand) -> anyhow::Result<()> {
    match command {
        DaemonCommand::Start(options) => {
            let client = start::connect_or_start(&context.dirs, options, &|r| context.tell(r))?;
            let socket = context.dirs.socket();
            context.out.either(
                &json!({"pid": client.pid, "socket": socket}),
                format!("the daemon runs (process {}) and listens at {}", client.pid, socket.display()),
            )?;
            Ok(())
        }
        DaemonCommand::Stop { force } => stop(context, *force),
        DaemonCommand::Status => status(context),
        DaemonCommand::Run(options) => loop {
            context.retry_lost()?;
            if let Some(recovered) = crate::daemon::recover::recover(&context.dirs)? {
                context.tell(&recovered);
            }
            match serve(&context.dirs, options, Ground::Foreground)? {
                Begun::Ended => return Ok(()),
                Begun::Other(note) => return Err(Failure::busy(format!("a daemon runs already: {note}")).into()),
                Begun::Unclean => {}
            }
        },
        DaemonCommand::DropCaches { name } => {
            let store = context.store()?;
            let index = match name {
                Some(name) => Some(reader::find(&store, name)?.1.index.to_hex()),
                None => None,
            };
            context.daemon()?.ask(&Request::DropCaches { index })?;
            context.out.note("evicted from the cache; what the kernel has in memory of mounted images stays");
            Ok(())
        }
        DaemonCommand::Serve(_) => Err(Failure::usage("handled before").into()),
    }
}

/// What `start` runs in the background: errors go to whoever started it, through standard output.
pub fn serve_in_background(dirs: Dirs, options: &DaemonOptions) -> anyhow::Result<()> {
    let line = match serve(&dirs, options, Ground::Background) {
        Ok(Begun::Ended) => return Ok(()),
        Ok(Begun::Other(note)) => format!("other {note}"),
        Ok(Begun::Unclean) => "other a daemon that was killed".to_owned(),
        Err(e) => format!("error {} {}", errors::kind_of(&e).code(), errors::message(&e).replace('\n', " ")),
    };
    // After `ready` this is the log.
    writeln!(std::io::stdout(), "{line}")?;
    Ok(())
}

fn stop(context: &Context, force: bool) -> anyhow::Result<()> {
    let Some(mut client) = context.running_daemon()? else {
        context.out.either(&json!({"running": false}), "no daemon runs")?;
        return Ok(());
    };
    let pid = client.pid;
    let Reply::Stopping { leases } = client.ask(&Request::Stop { force })? else {
        anyhow::bail!("the daemon answered with something else");
    };
    drop(client);
    if !leases.is_empty() {
        let mut message = format!("the daemon (process {pid}) ends when the last of these is unmounted:");
        for lease in &leases {
            message += &format!("\n  {} ({}, {})", lease.target, lease.image, lease.r#use);
        }
        message += "\n`lazyroot daemon stop --force` unmounts them";
        return Err(Failure::busy(message).into());
    }
    if !start::wait_until_gone(&context.dirs, STOP_TIMEOUT)? {
        return Err(Failure::busy(format!("the daemon (process {pid}) is still ending; see `lazyroot logs`")).into());
    }
    context.out.either(&json!({"running": false, "stopped": pid}), format!("stopped (process {pid})"))?;
    Ok(())
}

fn status(context: &Context) -> anyhow::Result<()> {
    let Some(mut client) = context.running_daemon()? else {
        if let Some(note) = start::holder(&context.dirs)? {
            return Err(Failure::unavailable(format!("a daemon ({note}) holds its lock but does not answer")).into());
        }
        context.out.either(&json!({"running": false}), "no daemon runs; it is started when it is needed")?;
        return Ok(());
    };
    let reply = client.ask(&Request::Status)?;
    let Reply::Status(status) = reply else { return Err(unexpected(&reply)) };
    let mut value = serde_json::to_value(&status)?;
    value["running"] = json!(true);
    let text = format!(
        "running: process {}, version {}, since {}\nroot: {}\n{} on {}{}\n{}{}",
        status.pid,
        status.version,
        moment(status.since),
        status.root,
        count(status.leases as u64, "lease"),
        count(status.superblocks as u64, "superblock"),
        if status.privileged { "" } else { " (user mounts only: no right to mount)" },
        if status.idle == 0 { "stays".to_owned() } else { format!("ends {} s after the last lease", status.idle) },
        if status.stopping { "; told to end with the last lease" } else { "" },
    );
    context.out.either(&value, text)?;
    Ok(())
}

/// `stats`
pub fn stats(context: &Context) -> anyhow::Result<()> {
    let Some(mut client) = context.running_daemon()? else {
        return Err(Failure::unavailable("no daemon runs, so there is nothing to count; mount something first").into());
    };
    let reply = client.ask(&Request::Stats)?;
    let Reply::Stats { stats } = reply else { return Err(unexpected(&reply)) };
    if context.out.json {
        context.out.object(&stats)?;
    } else {
        context.out.line(serde_json::to_string_pretty(&stats)?)?;
    }
    Ok(())
}

/// `logs`
pub fn logs(context: &Context, lines: Option<usize>) -> anyhow::Result<()> {
    let path = context.dirs.log();
    let mut text = Vec::new();
    for file in [older(&path), path.clone()] {
        match std::fs::read(&file) {
            Ok(bytes) => text.extend(bytes),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => {}
            Err(e) => return Err(e).with_context(|| file.display().to_string()),
        }
    }
    if text.is_empty() {
        return Err(Failure::not_found(format!("no log at {}; no daemon has run here", path.display())).into());
    }
    let start = match lines {
        Some(count) => {
            let all: Vec<&[u8]> = text.split_inclusive(|b| *b == b'\n').collect();
            text.len() - all.iter().rev().take(count).map(|l| l.len()).sum::<usize>()
        }
        None => 0,
    };
    std::io::stdout().write_all(&text[start..])?;
    Ok(())
}
