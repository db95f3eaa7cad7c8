//! A root, a state directory, a source tree, and the program.

use serde_json::Value;
use std::ffi::OsStr;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

/// How long one command may take.
const TIMEOUT: Duration = Duration::from_secs(90);

pub struct Lab {
    tmp: Option<tempfile::TempDir>,
    pub dir: PathBuf,
    pub root: PathBuf,
    pub state: PathBuf,
}

/// What a command did.
#[derive(Debug)]
pub struct Done {
    pub code: i32,
    pub out: String,
    pub err: String,
}

impl Done {
    /// It must have succeeded.
    pub fn ok(self) -> Done {
        assert_eq!(self.code, 0, "stdout: {}\nstderr: {}", self.out, self.err);
        self
    }

    /// It must have failed with this code and a message that has all of `words`.
    pub fn fails(self, code: i32, words: &[&str]) -> Done {
        assert_eq!(self.code, code, "stdout: {}\nstderr: {}", self.out, self.err);
        for word in words {
            assert!(self.err.contains(word), "no {word:?} in: {}", self.err);
        }
        self
    }

    /// Standard output, one JSON object a line.
    pub fn json(&self) -> Vec<Value> {
        self.out.lines().map(|l| serde_json::from_str(l).unwrap_or_else(|e| panic!("{e}: {l}"))).collect()
    }
}

/// A reason to skip, when this process may not mount.
pub fn needs_mounts() -> Option<String> {
    (!lazyroot::mounts::may_mount()).then(|| "no right to mount (CAP_SYS_ADMIN)".to_owned())
}

/// A reason to skip, when no container runtime is there.
pub fn needs_runtime() -> Option<String> {
    needs_mounts().or_else(|| {
        let none = ["runc", "crun"].iter().all(|n| lazyroot::run::runtime::in_path(n).is_none());
        none.then(|| "neither runc nor crun is installed".to_owned())
    })
}

/// Leaves the test when there is a reason to.
macro_rules! skip_if {
    ($name:literal, $reason:expr) => {
        if let Some(reason) = $reason {
            println!("SKIP {}: {}", $name, reason);
            return;
        }
    };
}
pub(crate) use skip_if;

impl Lab {
    /// On the build directory's disk: an overlay's upper directory must not be on another overlay or a small tmpfs.
    pub fn new() -> Lab {
        let tmp = tempfile::Builder::new().prefix("cli-").tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let dir = tmp.path().canonicalize().unwrap();
        Lab { tmp: Some(tmp), root: dir.join("root"), state: dir.join("state"), dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    pub fn command<S: AsRef<OsStr>>(&self, args: &[S]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lazyroot"));
        command.arg("--root").arg(&self.root).arg("--state").arg(&self.state).args(args);
        command.stdin(Stdio::null());
        command
    }

    pub fn run<S: AsRef<OsStr>>(&self, args: &[S]) -> Done {
        finish(self.command(args))
    }

    /// A directory to mount at.
    pub fn point(&self, name: &str) -> String {
        let path = self.path(name);
        std::fs::create_dir_all(&path).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// A small tree with one of everything, and an image of it.
    pub fn image(&self, name: &str) -> PathBuf {
        let tree = self.path(&format!("tree-{name}"));
        std::fs::create_dir_all(tree.join("dir/deep")).unwrap();
        std::fs::write(tree.join("small"), b"small\n").unwrap();
        std::fs::write(tree.join("empty"), b"").unwrap();
        // Big enough not to be read along with anything else, and not compressible to nothing.
        let mut big = Vec::new();
        let mut x = 0x1234_5678_u32;
        while big.len() < 6 << 20 {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            big.extend_from_slice(&x.to_le_bytes());
        }
        std::fs::write(tree.join("dir/big"), &big).unwrap();
        std::fs::write(tree.join("dir/deep/file"), vec![7u8; 100_000]).unwrap();
        std::fs::hard_link(tree.join("small"), tree.join("dir/linked")).unwrap();
        std::os::unix::fs::symlink("dir/deep/file", tree.join("link")).unwrap();
        std::os::unix::fs::symlink("/dir", tree.join("absolute")).unwrap();
        std::fs::set_permissions(tree.join("small"), std::fs::Permissions::from_mode(0o4751)).unwrap();
        self.import(&tree, name);
        tree
    }

    pub fn import(&self, tree: &Path, name: &str) {
        self.run(&[OsStr::new("import"), OsStr::new(&format!("dir:{}", tree.display())), OsStr::new(name)]).ok();
    }

    /// An image that commands of this machine run in.
    pub fn system(&self, name: &str) -> PathBuf {
        let tree = self.path(&format!("tree-{name}"));
        for dir in ["etc", "tmp", "proc", "sys", "dev", "var/work"] {
            std::fs::create_dir_all(tree.join(dir)).unwrap();
        }
        for program in ["sh", "cat", "id", "ls", "sleep", "env", "pwd"] {
            let path = lazyroot::run::runtime::in_path(program).unwrap_or_else(|| panic!("no {program}"));
            with_libraries(&tree, &path, &format!("/bin/{program}"));
        }
        let passwd = "root:x:0:0:root:/root:/bin/sh\nweb:x:33:34::/var/work:/bin/sh\n";
        std::fs::write(tree.join("etc/passwd"), passwd).unwrap();
        std::fs::write(tree.join("etc/group"), "root:x:0:\nwww:x:34:\nlogs:x:4:web\n").unwrap();
        self.import(&tree, name);
        tree
    }

    pub fn daemon_pid(&self) -> i32 {
        let done = self.run(&["--json", "daemon", "status"]).ok();
        done.json()[0]["pid"].as_i64().expect("a daemon runs") as i32
    }

    /// Whether a daemon holds the lock.
    pub fn daemon_lives(&self) -> bool {
        lazyroot::lock::Lock::try_take(&self.state.join("daemon.lock")).unwrap().is_none()
    }

    /// What is mounted below this lab's directory in this namespace.
    pub fn mounted(&self) -> Vec<PathBuf> {
        let all = sys::mountinfo::of_self().unwrap();
        all.into_iter().map(|e| e.mount_point).filter(|p| p.starts_with(&self.dir)).collect()
    }

    /// No lease is left, at last: a mount namespace that somebody is just making holds copies of our mounts for a moment,
    /// and those are leases.
    pub fn no_leases(&self) {
        eventually("no leases", || self.leases().is_empty());
    }

    pub fn leases(&self) -> Vec<Value> {
        self.run(&["--json", "ps"]).ok().json()
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // The tests' own assertions say what went wrong; here everything must go, whatever its state.
        let _ = finish(self.command(&["daemon", "stop", "--force"]));
        for _ in 0..3 {
            for point in self.mounted().iter().rev() {
                let _ = sys::mount::unmount(point, sys::mount::UnmountFlags::DETACH);
            }
        }
        if let Some(tmp) = self.tmp.take() {
            if let Err(e) = lazyroot::mounts::remove_tree(&self.dir) {
                eprintln!("{}: {e}", self.dir.display());
            }
            let _ = tmp.keep();
        }
    }
}

/// Runs a command to its end, within the time that it may take.
pub fn finish(mut command: Command) -> Done {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    collect(child)
}

/// Waits for a command that was started with pipes.
pub fn collect(mut child: Child) -> Done {
    let mut out = child.stdout.take().unwrap();
    let mut err = child.stderr.take().unwrap();
    let out = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        out.read_to_end(&mut bytes).map(|_| bytes)
    });
    let err = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        err.read_to_end(&mut bytes).map(|_| bytes)
    });
    let until = Instant::now() + TIMEOUT;
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if Instant::now() > until {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("the command took longer than {TIMEOUT:?}");
        }
        std::thread::sleep(Duration::from_millis(2));
    };
    let text = |bytes: std::io::Result<Vec<u8>>| String::from_utf8_lossy(&bytes.unwrap()).into_owned();
    let code = lazyroot::run::exec::code_of(status).into();
    Done { code, out: text(out.join().unwrap()), err: text(err.join().unwrap()) }
}

/// Waits for something to become true.
pub fn eventually(what: &str, mut f: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(30);
    while !f() {
        assert!(Instant::now() < until, "never: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Copies a program and what it is linked with.
fn with_libraries(tree: &Path, program: &Path, target: &str) {
    let copy = |from: &Path, to: &str| {
        let to = tree.join(to.trim_start_matches('/'));
        std::fs::create_dir_all(to.parent().unwrap()).unwrap();
        std::fs::copy(from, &to).unwrap();
        std::fs::set_permissions(&to, std::fs::Permissions::from_mode(0o755)).unwrap();
    };
    copy(program, target);
    let Output { stdout, .. } = Command::new("ldd").arg(program).output().unwrap();
    for word in String::from_utf8_lossy(&stdout).split_whitespace().filter(|w| w.starts_with('/')) {
        copy(Path::new(word), word);
    }
}
