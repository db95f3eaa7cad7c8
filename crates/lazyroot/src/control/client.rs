//! The client's side of the control socket.
//!
//! A path longer than a socket address allows is reached through `/proc/self/fd`. Every call has a timeout; a
//! daemon that does not answer is an error, never a hang.

use super::proto::{Reply, Request, VERSION};
use super::wire::{self, WireError};
use crate::dirs::Dirs;
use crate::failure::{Failure, Kind};
use anyhow::Context;
use rustix::fs::{Mode, OFlags};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a reply may take.
pub const TIMEOUT: Duration = Duration::from_secs(60);
/// The longest path that fits a socket address, with its terminator.
const SUN_PATH: usize = 107;

/// A connection that has said hello.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    /// The daemon's process.
    pub pid: i32,
    /// The root directory that it serves, where it says so.
    root: Option<String>,
}

/// Does something with a socket path that is short enough.
fn with_short_path<T>(path: &Path, f: impl FnOnce(&Path) -> io::Result<T>) -> io::Result<T> {
    if path.as_os_str().len() <= SUN_PATH {
        return f(path);
    }
    let parent = path.parent().unwrap_or(Path::new("/"));
    let name = path.file_name().ok_or_else(|| io::Error::from(io::ErrorKind::InvalidInput))?;
    let dir = rustix::fs::open(parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    f(&PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd())).join(name))
}

/// Listens on `path`.
pub fn listen(path: &Path) -> io::Result<UnixListener> {
    with_short_path(path, |p| UnixListener::bind(p))
}

impl Client {
    /// Connects; `None` when nobody listens there.
    pub fn connect(socket: &Path) -> anyhow::Result<Option<Client>> {
        let stream = match with_short_path(socket, |p| UnixStream::connect(p)) {
            Ok(stream) => stream,
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) => {
                return Ok(None);
            }
            Err(e) => return Err(e).with_context(|| format!("control socket {}", socket.display())),
        };
        stream.set_read_timeout(Some(TIMEOUT))?;
        stream.set_write_timeout(Some(TIMEOUT))?;
        let mut client = Client { stream, pid: 0, root: None };
        match client.exchange(&Request::Hello { version: VERSION }, &[]) {
            Ok((Reply::Hello { version, pid, root }, _)) if version == VERSION => {
                client.pid = pid;
                client.root = root;
                Ok(Some(client))
            }
            Ok((Reply::Hello { version, pid, .. }, _)) => Err(Failure::unavailable(format!(
                "the daemon (process {pid}) speaks protocol {version}, this program {VERSION}; stop it with the program that started it, then try again"
            ))
            .into()),
            Ok((reply, _)) => {
                reply.ok()?;
                Err(Failure::unavailable("the daemon answered hello with something else").into())
            }
            // It is just ending: as good as not there.
            Err(e) if is_closed(&e) => Ok(None),
            Err(e) => Err(client.failure(e)),
        }
    }

    /// Connects to the daemon of these directories; one that serves another root is refused.
    pub fn connect_to(dirs: &Dirs) -> anyhow::Result<Option<Client>> {
        let client = Client::connect(&dirs.socket())?;
        if let Some(Client { pid, root: Some(served), .. }) = &client {
            let root = dirs.root.canonicalize().unwrap_or_else(|_| dirs.root.clone()).display().to_string();
            if *served != root {
                return Err(Failure::busy(format!(
                    "the daemon at {} (process {pid}) serves the root {served}, not {root}; name another --state, or stop it with --root {served}",
                    dirs.state.display()
                ))
                .into());
            }
        }
        Ok(client)
    }

    fn exchange(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> Result<(Reply, Vec<OwnedFd>), WireError> {
        wire::send(&self.stream, request, fds).and_then(|()| wire::recv::<Reply>(&self.stream))
    }

    fn failure(&self, error: WireError) -> anyhow::Error {
        let said = match &error {
            WireError::Io(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {
                format!("the daemon did not answer within {} s; see `lazyroot logs`", TIMEOUT.as_secs())
            }
            // Not the error itself: a broken pipe of ours is not that of standard output, which is nothing to talk about.
            _ if is_closed(&error) => format!(
                "the daemon (process {}) ended before it answered; see `lazyroot logs`, and try again",
                self.pid
            ),
            _ => return anyhow::Error::new(error).context("talking to the daemon"),
        };
        Failure::new(Kind::Unavailable, said).into()
    }

    /// One request and its reply; an error reply is an error.
    pub fn call(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> anyhow::Result<(Reply, Vec<OwnedFd>)> {
        let (reply, fds) = self.exchange(request, fds).map_err(|e| self.failure(e))?;
        Ok((reply.ok()?, fds))
    }

    /// One request whose reply has no descriptors.
    pub fn ask(&mut self, request: &Request) -> anyhow::Result<Reply> {
        Ok(self.call(request, &[])?.0)
    }
}

/// Whether an error is the connection's end.
fn is_closed(error: &WireError) -> bool {
    match error {
        WireError::Closed => true,
        WireError::Io(e) => matches!(
            e.kind(),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset | io::ErrorKind::UnexpectedEof
        ),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Something that is greeted once at `path`, answers with `version`, and goes away.
    fn daemon_of_version(path: &Path, version: u32) -> std::thread::JoinHandle<()> {
        daemon_that_says(path, version, None)
    }

    fn daemon_that_says(path: &Path, version: u32, root: Option<String>) -> std::thread::JoinHandle<()> {
        let listener = listen(path).unwrap();
        std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            let (request, _): (Request, _) = wire::recv(&stream).unwrap();
            assert_eq!(request, Request::Hello { version: VERSION });
            wire::send(&stream, &Reply::Hello { version, pid: 42, root }, &[]).unwrap();
        })
    }

    #[test]
    fn long_socket_paths_work() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = tmp.path().join("d".repeat(120));
        std::fs::create_dir(&dir).unwrap();
        let path = dir.join("control.sock");
        assert!(Client::connect(&path).unwrap().is_none());
        let server = daemon_of_version(&path, VERSION);
        assert_eq!(Client::connect(&path).unwrap().unwrap().pid, 42);
        server.join().unwrap();
    }

    #[test]
    fn a_daemon_that_dies_is_told_from_a_reader_that_went_away() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("s");
        let server = daemon_of_version(&path, VERSION);
        let mut client = Client::connect(&path).unwrap().unwrap();
        server.join().unwrap();
        for _ in 0..2 {
            let error = client.ask(&Request::Leases).unwrap_err();
            assert!(error.to_string().contains("process 42"), "{error}");
            assert!(!crate::errors::is_broken_pipe(&error));
            assert_eq!(crate::errors::kind_of(&error), Kind::Unavailable);
        }
    }

    #[test]
    fn a_daemon_of_another_root_is_refused_with_a_message() {
        let tmp = tempfile::tempdir().unwrap();
        let dirs = Dirs { root: tmp.path().join("mine"), state: tmp.path().to_owned() };
        std::fs::create_dir(&dirs.root).unwrap();
        let mine = dirs.root.canonicalize().unwrap().display().to_string();
        for (served, refused) in [(Some("/theirs".to_owned()), true), (Some(mine), false), (None, false)] {
            let _ = std::fs::remove_file(dirs.socket());
            let server = daemon_that_says(&dirs.socket(), VERSION, served.clone());
            match Client::connect_to(&dirs) {
                Ok(client) => assert!(client.is_some() && !refused, "{served:?}"),
                Err(e) => {
                    assert!(refused, "{e}");
                    assert_eq!(crate::errors::kind_of(&e), Kind::Busy);
                    for word in ["process 42", "/theirs", dirs.root.to_str().unwrap(), "--state"] {
                        assert!(e.to_string().contains(word), "no {word} in {e}");
                    }
                }
            }
            server.join().unwrap();
        }
    }

    #[test]
    fn another_version_is_refused_with_a_message() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("s");
        let server = daemon_of_version(&path, 99);
        let error = Client::connect(&path).unwrap_err().to_string();
        assert!(error.contains("protocol 99"), "{error}");
        server.join().unwrap();
    }
}
