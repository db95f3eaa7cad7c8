//! Finds the daemon, or starts it: the program runs itself again, in a session of its own, and hears `ready`.

use super::recover;
use crate::cli::args::DaemonOptions;
use crate::control::client::Client;
use crate::dirs::Dirs;
use crate::failure::{Failure, Kind};
use crate::lock::{Lock, note_of};
use anyhow::Context;
use rustix::event::{PollFd, PollFlags, poll};
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a daemon may take to become ready.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a daemon that holds the lock may take to answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// How long one that holds the lock but does not listen is given to come up or to be gone.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(2);

impl Default for DaemonOptions {
    fn default() -> Self {
        DaemonOptions { idle: super::IDLE_DEFAULT, threads: 2, push_metadata: super::PUSH_DEFAULT }
    }
}

/// The daemon, started when there is none. What happened to a dead one is told to `tell`.
pub fn connect_or_start(
    dirs: &Dirs,
    options: &DaemonOptions,
    tell: &dyn Fn(&recover::Recovered),
) -> anyhow::Result<Client> {
    let until = Instant::now() + ANSWER_TIMEOUT;
    loop {
        if let Some(client) = Client::connect_to(dirs)? {
            return Ok(client);
        }
        if let Some(recovered) = recover::recover(dirs)? {
            tell(&recovered);
        }
        match start(dirs, options)? {
            Started::Ready => {}
            // It is starting, or ending: either way soon one can connect or start.
            Started::Other(note) if Instant::now() >= until => {
                return Err(Failure::unavailable(format!(
                    "the daemon ({note}) holds its lock but does not answer at {}; see `lazyroot logs`, or kill it",
                    dirs.socket().display()
                ))
                .into());
            }
            Started::Other(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    }
}

/// The daemon if it runs. A dead one is cleaned up after.
pub fn connect(dirs: &Dirs, tell: &dyn Fn(&recover::Recovered)) -> anyhow::Result<Option<Client>> {
    let until = Instant::now() + SETTLE_TIMEOUT;
    loop {
        if let Some(client) = Client::connect_to(dirs)? {
            return Ok(Some(client));
        }
        if let Some(recovered) = recover::recover(dirs)? {
            tell(&recovered);
            // Another one may have come up in between.
            return Client::connect_to(dirs);
        }
        // Without the record nothing was killed. With it, and the lock held: a daemon starts, ends, or is just dying.
        if !dirs.leases().exists() || Instant::now() >= until {
            return Ok(None);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

enum Started {
    Ready,
    Other(String),
}

fn start(dirs: &Dirs, options: &DaemonOptions) -> anyhow::Result<Started> {
    let log = OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(dirs.log())
        .with_context(|| format!("the log {}", dirs.log().display()))?;
    let mut command = Command::new("/proc/self/exe");
    command.arg0("lazyroot").arg("--root").arg(&dirs.root).arg("--state").arg(&dirs.state);
    command.args(["daemon", "serve", "--idle", &options.idle.to_string(), "--threads", &options.threads.to_string()]);
    command.args(["--push-metadata", &options.push_metadata.to_string()]);
    // One arena: the daemon allocates little, and each further one costs memory for ever.
    command.env_clear().env("MALLOC_ARENA_MAX", "1").env("RUST_BACKTRACE", "1");
    for name in ["PATH", "HOME", "XDG_RUNTIME_DIR", "XDG_DATA_HOME"] {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::from(log));
    sys::signal::close_on_exec_from(3).context("keeping descriptors to ourselves")?;
    let mut child = sys::proc::spawn_detached(&mut command).context("starting the daemon")?;
    let stdout = child.stdout.take().context("the daemon's standard output")?;
    let timeout = rustix::time::Timespec::try_from(START_TIMEOUT)?;
    if poll(&mut [PollFd::new(&stdout, PollFlags::IN)], Some(&timeout))? == 0 {
        return Err(Failure::unavailable(format!(
            "the daemon (process {}) is not ready after {} s; see `lazyroot logs`",
            child.id(),
            START_TIMEOUT.as_secs()
        ))
        .into());
    }
    let mut line = String::new();
    BufReader::new(stdout).read_line(&mut line)?;
    if line == "ready\n" {
        return Ok(Started::Ready);
    }
    // It is about to end; nobody else will collect it.
    let status = child.wait()?;
    if let Some(note) = line.strip_prefix("other ") {
        return Ok(Started::Other(note.trim().to_owned()));
    }
    match line.strip_prefix("error ").and_then(|l| l.split_once(' ')) {
        Some((code, message)) => {
            let kind = code.parse().map_or(Kind::Failed, Kind::from_code);
            Err(Failure::new(kind, format!("the daemon could not start: {}", message.trim())).into())
        }
        None => Err(Failure::unavailable(format!("the daemon ended at once ({status}); see `lazyroot logs`")).into()),
    }
}

/// Waits until the daemon has let go of its lock; false when `timeout` passed first.
pub fn wait_until_gone(dirs: &Dirs, timeout: Duration) -> anyhow::Result<bool> {
    let until = Instant::now() + timeout;
    loop {
        if let Some(lock) = Lock::try_take(&dirs.daemon_lock())? {
            drop(lock);
            return Ok(true);
        }
        if Instant::now() >= until {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a daemon holds the lock, and what it noted there.
pub fn holder(dirs: &Dirs) -> anyhow::Result<Option<String>> {
    match Lock::try_take(&dirs.daemon_lock())? {
        Some(_) => Ok(None),
        None => Ok(Some(note_of(&dirs.daemon_lock()))),
    }
}

/// The process of the daemon that holds the lock, from its note.
pub fn holder_pid(dirs: &Dirs) -> Option<i32> {
    holder(dirs).ok()??.strip_prefix("process ")?.split(',').next()?.parse().ok()
}
