//! A root directory, a state directory and a daemon of a test's own, driven through the command line as a user
//! would.

use crate::proc::{self, Outcome};
use anyhow::{Context, Result, bail, ensure};
use image::index::Index;
use serde_json::Value;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

/// The longest that any single command of a test may take.
const LIMIT: Duration = Duration::from_secs(300);

/// How a tree is looked at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Kernel EROFS over the served file.
    Erofs,
    /// FUSE tree.
    Tree,
    /// Kernel EROFS below a writable overlay.
    Overlay,
    /// The image written out as a stand-alone file and mounted without LazyRoot.
    Export,
}

impl Way {
    /// Every way.
    pub const ALL: [Way; 4] = [Way::Erofs, Way::Tree, Way::Overlay, Way::Export];

    /// Its name, as `not_through` and reports have it.
    pub fn name(self) -> &'static str {
        match self {
            Way::Erofs => "erofs",
            Way::Tree => "tree",
            Way::Overlay => "overlay",
            Way::Export => "export",
        }
    }

    /// What check.py's `--fs` has to be told.
    pub fn file_system(self) -> &'static str {
        match self {
            Way::Erofs | Way::Export => "erofs",
            Way::Tree => "fuse",
            Way::Overlay => "overlay",
        }
    }
}

/// The directories, and the program that is tested.
#[derive(Debug)]
pub struct Lab {
    program: PathBuf,
    dir: PathBuf,
    root: PathBuf,
    state: PathBuf,
}

impl Lab {
    /// A lab below `dir`, with the `lazyroot` that was built beside this program.
    pub fn new(dir: &Path) -> Result<Lab> {
        Lab::with_program(dir, crate::sibling("lazyroot")?)
    }

    /// A lab that tests a given program.
    pub fn with_program(dir: &Path, program: PathBuf) -> Result<Lab> {
        let (root, state) = (dir.join("root"), dir.join("state"));
        for made in [&root, &state, &dir.join("mnt")] {
            std::fs::create_dir_all(made).with_context(|| format!("cannot make {}", made.display()))?;
        }
        Ok(Lab { program, dir: dir.to_owned(), root, state })
    }

    /// The command `lazyroot ARGS`.
    pub fn command<I: IntoIterator<Item = A>, A: AsRef<OsStr>>(&self, args: I) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("--root").arg(&self.root).arg("--state").arg(&self.state).args(args);
        command
    }

    /// Runs `lazyroot ARGS`, however it ends.
    pub fn try_run<I: IntoIterator<Item = A>, A: AsRef<OsStr>>(&self, args: I) -> Result<Outcome> {
        proc::catch(&mut self.command(args), LIMIT)
    }

    /// Runs `lazyroot ARGS`, which has to succeed.
    pub fn run<I: IntoIterator<Item = A>, A: AsRef<OsStr>>(&self, args: I) -> Result<Outcome> {
        proc::must(&mut self.command(args), LIMIT)
    }

    /// Runs `lazyroot --json ARGS` and reads the lines that it prints.
    pub fn json<I: IntoIterator<Item = A>, A: AsRef<OsStr>>(&self, args: I) -> Result<Vec<Value>> {
        let mut command = self.command(["--json"]);
        command.args(args);
        let outcome = proc::must(&mut command, LIMIT)?;
        let parsed = serde_json::Deserializer::from_str(&outcome.stdout).into_iter().collect::<Result<Vec<Value>, _>>();
        parsed.with_context(|| format!("{}: not JSON: {}", proc::line(&command), outcome.stdout))
    }

    /// `SCHEME:PATH` as import takes it.
    pub fn source(scheme: &str, path: &Path) -> OsString {
        let mut source = OsString::from(format!("{scheme}:"));
        source.push(path);
        source
    }

    /// Imports, which has to succeed.
    pub fn import(&self, source: &OsStr, name: &str) -> Result<Outcome> {
        self.run([OsStr::new("import"), OsStr::new("--quiet"), source, OsStr::new(name)])
    }

    /// What `images` says about one image.
    pub fn image(&self, name: &str) -> Result<Value> {
        let (repository, tag) = name.split_once(':').unwrap_or((name, "latest"));
        let full = format!("{repository}:{tag}");
        let images = self.json(["images"])?;
        let listed = images.iter().flat_map(|v| v.as_array().cloned().unwrap_or_else(|| vec![v.clone()]));
        let mut found = listed.filter(|i| i["name"] == full.as_str() || i["name"] == repository);
        found.next().with_context(|| format!("images does not list {full}: {images:?}"))
    }

    /// An image's identity.
    pub fn identity(&self, name: &str) -> Result<String> {
        let image = self.image(name)?;
        let identity = image["identity"].as_str().with_context(|| format!("no identity in {image}"))?;
        Ok(identity.to_owned())
    }

    /// The file in the store that is an image's index.
    pub fn index_file(&self, name: &str) -> Result<PathBuf> {
        let image = self.image(name)?;
        let digest = image["index"].as_str().with_context(|| format!("no index in {image}"))?;
        Ok(self.root.join("indexes").join(digest))
    }

    /// The index of an image, from the store.
    pub fn index(&self, name: &str) -> Result<Index> {
        Ok(Index::open(Arc::new(std::fs::read(self.index_file(name)?)?))?)
    }

    /// Bytes of everything that a node needs to mount an image and to find its content: index and object maps; and how
    /// many inodes it has.
    pub fn metadata_size(&self, name: &str) -> Result<(u64, u64)> {
        let image = self.json(["inspect", name])?.pop().context("inspect printed nothing")?;
        let number = |field: &str| image[field].as_u64().with_context(|| format!("no {field} in {image}"));
        let mut bytes = number("index_bytes")?;
        for object in image["objects"].as_array().context("no objects")? {
            let map = format!("objects/{}.map", object.as_str().context("no digest")?);
            bytes += std::fs::metadata(self.root.join(&map)).with_context(|| map.clone())?.len();
        }
        Ok((bytes, number("inodes")?))
    }

    /// Shows an image at a fresh mount point in one way, and puts it away again after `look`.
    pub fn shown<T>(&self, name: &str, way: Way, slot: &str, look: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
        let point = self.dir.join("mnt").join(slot);
        std::fs::create_dir_all(&point)?;
        let result = match way {
            Way::Export => self.export_shown(name, slot, &point, look),
            _ => self.mount_shown(name, way, &point, look),
        };
        if crate::scratch::mounts_below(&point).is_empty() {
            std::fs::remove_dir(&point).with_context(|| format!("cannot remove {}", point.display()))?;
        } else {
            crate::scratch::unmount_below(&point);
            result?;
            bail!("{} was still mounted after umount", point.display());
        }
        result
    }

    fn mount_shown<T>(&self, name: &str, way: Way, point: &Path, look: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
        let shape = if way == Way::Tree { "tree" } else { "erofs" };
        let mut args = vec![OsStr::new("mount"), OsStr::new("--as"), OsStr::new(shape)];
        if way == Way::Overlay {
            args.push(OsStr::new("--rw"));
        }
        args.extend([OsStr::new(name), point.as_os_str()]);
        self.run(args)?;
        let result = look(point);
        let unmounted = self.run([OsStr::new("umount"), point.as_os_str()]);
        let value = result?;
        unmounted?;
        Ok(value)
    }

    /// Mounts an exported image with the kernel alone.
    fn export_shown<T>(
        &self,
        name: &str,
        slot: &str,
        point: &Path,
        look: impl FnOnce(&Path) -> Result<T>,
    ) -> Result<T> {
        let result = self.exported(name, slot, |file| {
            mount_erofs(file, point)?;
            look(point)
        });
        crate::scratch::unmount_below(point);
        result
    }

    /// Exports an image to a file for the time of `look`; fsck.erofs judges it first.
    pub fn exported<T>(&self, name: &str, slot: &str, look: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
        let file = self.dir.join(format!("{slot}.erofs"));
        self.run([OsStr::new("export"), OsStr::new(name), OsStr::new("--as"), OsStr::new("erofs"), file.as_os_str()])?;
        let result = judge(&file).and_then(|()| look(&file));
        std::fs::remove_file(&file)?;
        result
    }

    /// Evicts an image's content (of all images without a name) from the node's cache and the kernel's.
    pub fn drop_caches(&self, name: Option<&str>) -> Result<()> {
        self.run(["daemon", "drop-caches"].into_iter().chain(name))?;
        crate::drop_kernel_caches()
    }

    /// Ends the daemon, whatever is mounted.
    pub fn stop(&self) -> Result<()> {
        self.run(["daemon", "stop", "--force"]).map(drop)
    }

    /// Bytes on disk below the root directory's `what`.
    pub fn disk_use(&self, what: &str) -> Result<u64> {
        let outcome = proc::must(Command::new("du").arg("-s").arg("--block-size=1").arg(self.root.join(what)), LIMIT)?;
        let field = outcome.stdout.split_whitespace().next().context("du printed nothing")?;
        Ok(field.parse()?)
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // A lab that was stopped already says so; a daemon that does not answer is named by the scratch directory
        // that cannot be removed.
        let _ = self.try_run(["daemon", "stop", "--force"]);
    }
}

/// fsck.erofs has to find nothing.
pub fn judge(file: &Path) -> Result<()> {
    let outcome = proc::catch(Command::new("fsck.erofs").arg(file), LIMIT)?;
    let said = format!("{}{}", outcome.stdout, outcome.stderr).to_lowercase();
    ensure!(outcome.ok() && !said.contains("error") && !said.contains("corrupt"), "fsck.erofs: {}", outcome.report());
    Ok(())
}

/// Mounts an EROFS file directly, or through a loop device where the kernel is older than that.
pub fn mount_erofs(file: &Path, point: &Path) -> Result<()> {
    let flags = rustix::mount::MountFlags::RDONLY;
    match rustix::mount::mount(file, point, "erofs", flags, None) {
        Ok(()) => Ok(()),
        Err(rustix::io::Errno::NOTBLK) => {
            let mut command = Command::new("mount");
            command.args(["-t", "erofs", "-o", "ro,loop"]).arg(file).arg(point);
            proc::must(&mut command, LIMIT).map(drop)
        }
        Err(e) => Err(e).with_context(|| format!("cannot mount {}", file.display())),
    }
}
