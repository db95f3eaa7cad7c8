//! Looks after a container's runtime process: passes signals on, sees its first instruction, takes its status.

use super::runtime::plain;
use crate::failure::Failure;
use anyhow::Context;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::Signal;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};
use std::time::Duration;
use sys::proc::PidFd;
use sys::signal::SignalFd;

/// How often a container that has not begun yet is looked at, when somebody wants to know when it does.
const WATCH_EVERY: Duration = Duration::from_micros(200);

/// Signals that are passed on.
const PASSED: [Signal; 8] =
    [Signal::TERM, Signal::INT, Signal::QUIT, Signal::HUP, Signal::USR1, Signal::USR2, Signal::WINCH, Signal::CONT];

/// The signals of this process, from now on read instead of acted on. Before any thread is started.
pub fn take_signals() -> anyhow::Result<SignalFd> {
    SignalFd::block(&PASSED).context("signals")
}

/// Waits for the runtime to end, passing signals on. `began` is called once, when the container's first instruction
/// runs; without it nobody looks.
pub fn supervise(
    child: &mut Child,
    signals: &SignalFd,
    mut began: Option<&mut dyn FnMut()>,
) -> anyhow::Result<ExitStatus> {
    let pid = child.id();
    let process = PidFd::open(pid as i32).context("watching the runtime")?;
    let runtime = exe(pid);
    loop {
        let timeout = began.as_ref().map(|_| rustix::time::Timespec::try_from(WATCH_EVERY)).transpose()?;
        let mut fds = [signals.as_fd(), process.as_fd()].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(std::io::Error::from(e)).context("waiting for the runtime"),
        }
        let ended = !fds[1].revents().is_empty();
        while let Some(signal) = signals.next()? {
            // What the terminal sends, the runtime got itself: it is in the same group.
            if !signal.by_kernel
                && let Some(named) = Signal::from_named_raw(signal.number)
            {
                // It may just have ended.
                let _ = process.signal(named);
            }
        }
        if let Some(tell) = began.as_mut()
            && (ended || runs_something_else(pid, runtime.as_deref()))
        {
            tell();
            began = None;
        }
        if ended {
            return child.wait().context("the runtime's status");
        }
    }
}

fn exe(pid: u32) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{pid}/exe")).ok()
}

/// Whether a child of the runtime has become something else than the runtime.
fn runs_something_else(pid: u32, runtime: Option<&Path>) -> bool {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    for task in tasks.flatten() {
        let children = std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
        for child in children.split_ascii_whitespace() {
            let Some(link) = child.parse().ok().and_then(exe) else { continue };
            if Some(link.as_path()) != runtime && !is_copy(&link) {
                return true;
            }
        }
    }
    false
}

/// Whether a program runs from memory or has been unlinked: runtimes run from a copy of themselves, so that a
/// container cannot overwrite them.
fn is_copy(link: &Path) -> bool {
    let link = link.as_os_str().as_bytes();
    link.starts_with(b"/memfd:") || link.ends_with(b" (deleted)")
}

/// What a runtime's log says about a container that did not start: 127 when its command is not there, 126 when it
/// may not be run, 125 for everything else. `None`: it started.
pub fn failure_in_log(log: &Path) -> Option<Failure> {
    let text = std::fs::read_to_string(log).ok()?;
    let error = text.lines().rev().map(|l| (l, plain(l))).find(|(line, _)| is_error(line))?.1;
    let text = error.to_ascii_lowercase();
    let has = |words: &str| text.contains(words);
    let code = if (has("executable file") && has("not found")) || (has("no such file or directory") && has("exec")) {
        127
    } else if has("permission denied") && has("exec") {
        126
    } else {
        125
    };
    Some(Failure::status(code, format!("the container did not start: {error}")))
}

/// Whether a line of a log is an error: text without a level (crun's) is.
fn is_error(line: &str) -> bool {
    if line.trim().is_empty() {
        return false;
    }
    match serde_json::from_str::<serde_json::Value>(line) {
        Ok(value) => value["level"] == "error" || value["level"] == "fatal",
        Err(_) => !line.contains("level=") || line.contains("level=error") || line.contains("level=fatal"),
    }
}

/// The status that a command's caller sees: its own, or 128 and the signal that ended it.
pub fn code_of(status: ExitStatus) -> u8 {
    use std::os::unix::process::ExitStatusExt;
    let code = status.code().or_else(|| status.signal().map(|s| 128 + s)).unwrap_or(255);
    u8::try_from(code).unwrap_or(255)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn logs_tell_why_a_container_did_not_start() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let table = [
            (
                r#"{"level":"error","msg":"runc run failed: unable to start container process: exec: \"x\": executable file not found in $PATH"}"#,
                Some(127),
            ),
            (
                r#"{"level":"error","msg":"runc run failed: unable to start container process: exec: \"/x\": stat /x: no such file or directory"}"#,
                Some(127),
            ),
            (
                r#"{"level":"error","msg":"unable to start container process: exec: \"/x\": permission denied"}"#,
                Some(126),
            ),
            (r#"{"level":"error","msg":"mkdir /sys/fs/cgroup: read-only file system"}"#, Some(125)),
            (r#"{"level":"warning","msg":"something"}"#, None),
            ("2026-01-01T00:00:00Z: executable file `x` not found in $PATH: No such file or directory", Some(127)),
            ("2026-01-01T00:00:00Z: open executable: Permission denied", Some(126)),
            ("", None),
        ];
        for (text, want) in table {
            std::fs::write(&log, text).unwrap();
            let got = failure_in_log(&log).map(|f| f.kind().code());
            assert_eq!(got, want, "{text}");
        }
        assert!(failure_in_log(&dir.path().join("none")).is_none());
    }

    #[test]
    fn statuses_are_passed_on() {
        let status = |script: &str| Command::new("sh").args(["-c", script]).status().unwrap();
        assert_eq!(code_of(status("exit 42")), 42);
        assert_eq!(code_of(status("kill -9 $$")), 137);
    }

    #[test]
    fn a_process_is_seen_to_become_another() {
        let dir = tempfile::tempdir().unwrap();
        let go = dir.path().join("go");
        // The outer shell stands for the runtime: its child is a shell like itself, then becomes sleep.
        let script = format!("while ! test -e {0}; do :; done & wait", go.display());
        let mut child = Command::new("sh").args(["-c", &script]).spawn().unwrap();
        let runtime = exe(child.id());
        let until = std::time::Instant::now() + Duration::from_secs(5);
        while exe(child.id()).is_none() && std::time::Instant::now() < until {}
        assert!(!runs_something_else(child.id(), runtime.as_deref()));
        std::fs::write(&go, b"").unwrap();
        child.wait().unwrap();
        let mut child = Command::new("sh")
            .args(["-c", "sleep 1000 & echo $!; wait"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        std::io::BufRead::read_line(&mut std::io::BufReader::new(child.stdout.take().unwrap()), &mut line).unwrap();
        let runtime = exe(child.id());
        let until = std::time::Instant::now() + Duration::from_secs(10);
        while !runs_something_else(child.id(), runtime.as_deref()) {
            assert!(std::time::Instant::now() < until, "not seen");
        }
        let sleeper = PidFd::open(line.trim().parse().unwrap()).unwrap();
        sleeper.signal(Signal::KILL).unwrap();
        child.wait().unwrap();
    }
}
