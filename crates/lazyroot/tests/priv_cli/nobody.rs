//! An ordinary user without rights: its own home, its own copy of the program, and a `/dev/fuse` that it may open, or not.

use crate::lab::{Done, finish, needs_mounts};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The user's number.
const ID: &str = "65534";

pub struct Nobody {
    home: tempfile::TempDir,
    program: PathBuf,
    /// A process that holds a mount namespace with the device.
    namespace: Child,
}

impl Drop for Nobody {
    fn drop(&mut self) {
        let _ = self.namespace.kill();
        let _ = self.namespace.wait();
    }
}

impl Nobody {
    /// A reason to skip, where there can be none.
    pub fn missing() -> Option<String> {
        let tools = ["fusermount3", "setpriv", "nsenter", "unshare"];
        let missing = tools.iter().find(|n| lazyroot::run::runtime::in_path(n).is_none());
        needs_mounts().or(missing.map(|n| format!("{n} is not installed")))
    }

    /// With directories `m` and `tree` (which holds the file `f`) in its home, and a device of that mode.
    pub fn new(device_mode: &str) -> Nobody {
        // A copy that the user can reach and run, in a directory of the user's own.
        let home = tempfile::Builder::new().prefix("lazyroot-user-").tempdir_in("/var/tmp").unwrap();
        let program = home.path().join("lazyroot");
        std::fs::copy(env!("CARGO_BIN_EXE_lazyroot"), &program).unwrap();
        for dir in ["m", "tree"] {
            std::fs::create_dir(home.path().join(dir)).unwrap();
        }
        std::fs::write(home.path().join("tree/f"), b"content").unwrap();
        let chown = Command::new("chown").args(["-R", &format!("{ID}:{ID}")]).arg(home.path()).status().unwrap();
        assert!(chown.success());
        // In a mount namespace of the test's own, whatever this machine's device is like.
        let script = format!(
            "mknod -m {device_mode} \"$0\" c 10 229 && mount --bind \"$0\" /dev/fuse && echo ready && exec sleep 600"
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "slave", "sh", "-c", &script]).arg(home.path().join("fuse"));
        let mut namespace = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut ready = String::new();
        BufReader::new(namespace.stdout.take().unwrap()).read_line(&mut ready).unwrap();
        assert_eq!(ready, "ready\n");
        Nobody { home, program, namespace }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// The same as text, for command lines: absolute, for entering a namespace changes the directory.
    pub fn text(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--mount", "--target", &self.namespace.id().to_string(), "--", "setpriv"]);
        command.args([&format!("--reuid={ID}"), &format!("--regid={ID}"), "--clear-groups", "--"]).arg(program);
        command
    }

    /// Another program, as this user.
    pub fn other(&self, program: &str, args: &[&str]) -> Done {
        let mut command = self.command(Path::new(program));
        command.args(args);
        finish(command)
    }

    /// The program, as this user.
    pub fn run(&self, args: &[&str]) -> Done {
        let mut command = self.command(&self.program);
        for (option, dir) in [("--root", "root"), ("--state", "state")] {
            command.arg(option).arg(self.path(dir));
        }
        command.args(args).env("HOME", self.home.path());
        finish(command)
    }
}
