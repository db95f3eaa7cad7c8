//! Running other programs: output caught or passed through, and always an end.
//!
//! Output goes to anonymous files in memory, not to pipes: a daemon that a command leaves behind may hold its
//! standard output open for ever, and nothing here waits for that.

use anyhow::{Context, Result, bail};
use rustix::fs::MemfdFlags;
use rustix::process::{Pid, PidfdFlags, Signal};
use std::fs::File;
use std::io::{Read, Seek};
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How a command ended.
#[derive(Debug)]
pub struct Outcome {
    /// Its status; `None` when its time was up and it was killed.
    pub status: Option<ExitStatus>,
    /// What it wrote.
    pub stdout: String,
    /// What it complained.
    pub stderr: String,
    /// How long it ran.
    pub took: Duration,
}

impl Outcome {
    /// Whether it exited with 0.
    pub fn ok(&self) -> bool {
        self.status.is_some_and(|s| s.success())
    }

    /// How it ended, in words.
    pub fn ending(&self) -> String {
        match self.status {
            None => format!("timed out after {:.0} s", self.took.as_secs_f64()),
            Some(status) => match (status.code(), status.signal()) {
                (Some(code), _) => format!("exit code {code}"),
                (None, Some(signal)) => format!("killed by signal {signal}"),
                (None, None) => status.to_string(),
            },
        }
    }

    /// Both outputs and the ending, for a failure's report.
    pub fn report(&self) -> String {
        let mut text = self.ending();
        for stream in [&self.stdout, &self.stderr] {
            let trimmed = stream.trim_end();
            if !trimmed.is_empty() {
                text.push('\n');
                text.push_str(tail(trimmed, 4000));
            }
        }
        text
    }
}

/// The last `most` bytes of a text, cut at a character.
fn tail(text: &str, most: usize) -> &str {
    let mut from = text.len().saturating_sub(most);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    &text[from..]
}

/// Runs a command with its output caught; kills it, and all that it started, when `limit` is over.
pub fn catch(command: &mut Command, limit: Duration) -> Result<Outcome> {
    let (mut outcome, printed) = caught(command, limit)?;
    outcome.stdout = String::from_utf8_lossy(&printed).into_owned();
    Ok(outcome)
}

/// How a command ended, and the bytes that it printed.
fn caught(command: &mut Command, limit: Duration) -> Result<(Outcome, Vec<u8>)> {
    let mut stdout = memory("stdout")?;
    let mut stderr = memory("stderr")?;
    command.stdout(Stdio::from(stdout.try_clone()?)).stderr(Stdio::from(stderr.try_clone()?));
    let mut outcome = finish(command, limit)?;
    outcome.stderr = String::from_utf8_lossy(&read(&mut stderr)?).into_owned();
    Ok((outcome, read(&mut stdout)?))
}

/// As [`catch`], with the output going where ours goes.
pub fn show(command: &mut Command, limit: Duration) -> Result<Outcome> {
    finish(command, limit)
}

/// Runs a command that has to succeed; an error names it and says what it printed.
pub fn must(command: &mut Command, limit: Duration) -> Result<Outcome> {
    let outcome = catch(command, limit)?;
    if !outcome.ok() {
        bail!("{}: {}", line(command), outcome.report());
    }
    Ok(outcome)
}

/// The bytes that a command prints, which has to succeed.
pub fn bytes(command: &mut Command, limit: Duration) -> Result<Vec<u8>> {
    let (outcome, printed) = caught(command, limit)?;
    if !outcome.ok() {
        bail!("{}: {}", line(command), outcome.report());
    }
    Ok(printed)
}

/// A command as one would type it.
pub fn line(command: &Command) -> String {
    let mut words = vec![command.get_program().to_string_lossy().into_owned()];
    words.extend(command.get_args().map(|a| a.to_string_lossy().into_owned()));
    words.join(" ")
}

/// Whether a program is in the path.
pub fn in_path(program: &str) -> bool {
    std::env::var_os("PATH").is_some_and(|path| {
        std::env::split_paths(&path)
            .any(|dir| rustix::fs::access(dir.join(program), rustix::fs::Access::EXEC_OK).is_ok())
    })
}

fn memory(name: &str) -> Result<File> {
    Ok(File::from(rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC)?))
}

fn read(file: &mut File) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.rewind()?;
    file.read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn finish(command: &mut Command, limit: Duration) -> Result<Outcome> {
    let started = Instant::now();
    if command.get_program() != "cargo" {
        command.stdin(Stdio::null());
    }
    let mut child = command.spawn().with_context(|| format!("cannot start {}", line(command)))?;
    let pid = Pid::from_child(&child);
    let status = if ends_within(pid, limit)? {
        Some(child.wait()?)
    } else {
        kill_tree(pid);
        child.wait()?;
        None
    };
    let took = started.elapsed();
    Ok(Outcome { status, stdout: String::new(), stderr: String::new(), took })
}

/// Waits for the end of a child, without reaping it; false when the time is up first.
fn ends_within(pid: Pid, limit: Duration) -> Result<bool> {
    let handle = rustix::process::pidfd_open(pid, PidfdFlags::empty()).context("pidfd_open")?;
    let deadline = Instant::now() + limit;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = rustix::event::Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut fds = [rustix::event::PollFd::new(&handle, rustix::event::PollFlags::IN)];
        match rustix::event::poll(&mut fds, Some(&timeout)) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e).context("poll"),
        }
    }
}

/// Kills a process and its descendants: by parent numbers, since a group would take Ctrl-C from them.
fn kill_tree(root: Pid) {
    let mut doomed = vec![root.as_raw_nonzero().get()];
    let mut parents = Vec::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|n| n.parse::<i32>().ok()) else { continue };
        let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
        let parent = stat.rsplit_once(')').and_then(|(_, rest)| rest.split_whitespace().nth(1)?.parse::<i32>().ok());
        parents.extend(parent.map(|p| (pid, p)));
    }
    let mut next = 0;
    while let Some(&parent) = doomed.get(next) {
        doomed.extend(parents.iter().filter(|(pid, p)| *p == parent && *pid != parent).map(|(pid, _)| *pid));
        next += 1;
    }
    for pid in doomed.into_iter().filter_map(Pid::from_raw) {
        // One that ended meanwhile is what we want anyway.
        let _ = rustix::process::kill_process(pid, Signal::KILL);
    }
}
