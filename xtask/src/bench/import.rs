//! Imports, against the work that they cannot avoid: decompressing, SHA-256, BLAKE3, zstd, each alone.

use super::measure::{Figures, Measured, Series, in_turn};
use crate::lab::Lab;
use crate::scratch::Scratch;
use crate::{corpus, proc};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(1800);

pub fn run(scratch: &Scratch, corpora: &[String], rounds: usize, figures: &mut Figures) -> Result<()> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from) as f64;
    let squashfs = super::views::version("mksquashfs");
    figures.peer("mksquashfs", squashfs.clone());
    for name in corpora {
        let dir = corpus::build(name)?;
        let (rootfs, oci) = (dir.join("rootfs"), dir.join("oci"));
        let store = scratch.dir().join("import");
        let lab = Lab::new(&store)?;
        let into_fresh = |scheme: &'static str, path: PathBuf| {
            let (lab, root) = (&lab, store.join("root"));
            move || -> Result<f64> {
                std::fs::remove_dir_all(&root)?;
                std::fs::create_dir(&root)?;
                warm(&path)?;
                Ok(lab.import(&Lab::source(scheme, &path), "image")?.took.as_secs_f64())
            }
        };
        let floor = Floor::of(&rootfs, &oci)?;
        let image = scratch.dir().join("image.sqfs");
        let mut targets: Vec<(String, Measured<'_>)> = vec![
            ("oci".into(), Box::new(into_fresh("oci", oci.clone()))),
            ("dir".into(), Box::new(into_fresh("dir", rootfs.clone()))),
            ("work of oci ÷ cores".into(), Box::new(|| Ok(floor.layers()? / cores))),
            ("work of dir ÷ cores".into(), Box::new(|| Ok(floor.tree()? / cores))),
            // No goal: how far from that division the cores themselves are, when all of them work.
            ("work of dir, on all cores at once".into(), Box::new(|| floor.tree_at_once(cores as usize))),
        ];
        if squashfs.is_some() {
            targets.push(("mksquashfs zstd 3".into(), Box::new(|| squash(&rootfs, &image))));
        }
        let ext4 = super::views::version("mke2fs");
        figures.peer("mke2fs", ext4.clone());
        if ext4.is_some() {
            targets.push((
                "mke2fs -d, uncompressed".into(),
                Box::new(|| fill_ext4(&rootfs, &scratch.dir().join("image.ext4"))),
            ));
        }
        let series = in_turn(&format!("import, {name}"), "s", rounds, targets)?;
        figures.add(&series);
        figures.goal(format!("{name} from oci: ratio to its work ÷ cores"), series[0].ratio(&series[2]), 1.15);
        figures.goal(format!("{name} from dir: ratio to its work ÷ cores"), series[1].ratio(&series[3]), 1.15);
        if let Some(peer) = series.iter().find(|s| s.target == "mksquashfs zstd 3") {
            figures.goal(format!("{name} from dir: ratio to mksquashfs"), series[1].ratio(peer), 1.0);
            let ours = lab.disk_use("objects")? + lab.disk_use("indexes")?;
            let theirs = std::fs::metadata(&image)?.len();
            let size = |target: &str, bytes: u64| Series {
                values: vec![bytes as f64 / 1e6],
                ..Series::new(format!("size, {name}"), target, "MB")
            };
            let sizes = [size("store", ours), size("mksquashfs zstd 3", theirs)];
            figures.add(&sizes);
            figures.goal(format!("{name}: size, ratio to mksquashfs"), sizes[0].ratio(&sizes[1]), 1.05);
        }
    }
    Ok(())
}

/// Reads every file below a path once, so that no import waits for the disk.
fn warm(path: &Path) -> Result<()> {
    let mut command = Command::new("sh");
    command.args(["-c", r#"find "$1" -type f -print0 | xargs -0 cat > /dev/null"#, "sh"]).arg(path);
    proc::must(&mut command, LIMIT).map(drop)
}

/// How squashfs images are made wherever they are compared with: our own compression and level.
pub(super) fn mksquashfs(rootfs: &Path, image: &Path) -> Command {
    let mut command = Command::new("mksquashfs");
    command.arg(rootfs).arg(image).args(["-noappend", "-quiet", "-no-progress"]);
    command.args(["-comp", "zstd", "-Xcompression-level", "3"]);
    command
}

fn squash(rootfs: &Path, image: &Path) -> Result<f64> {
    warm(rootfs)?;
    Ok(proc::must(&mut mksquashfs(rootfs, image), LIMIT)?.took.as_secs_f64())
}

/// An ext4 image of the tree: no goal, but what images were made with before.
fn fill_ext4(rootfs: &Path, image: &Path) -> Result<f64> {
    warm(rootfs)?;
    let took = proc::must(&mut super::peers::mke2fs(rootfs, image)?, LIMIT)?.took.as_secs_f64();
    std::fs::remove_file(image)?;
    Ok(took)
}

/// Bytes that are compressed together.
const FRAME: usize = 1 << 20;

fn hash_and_pack(content: &[u8]) -> Result<()> {
    std::hint::black_box(blake3::hash(content));
    let mut packer = zstd::bulk::Compressor::new(3)?;
    for frame in content.chunks(FRAME) {
        std::hint::black_box(packer.compress(frame)?);
    }
    Ok(())
}

/// The work that an import consists of, for one corpus.
#[derive(Debug)]
struct Floor {
    /// Content of every file.
    content: Vec<u8>,
    /// The layers as they are stored.
    layers: Vec<Vec<u8>>,
}

impl Floor {
    fn of(rootfs: &Path, oci: &Path) -> Result<Floor> {
        let mut content = Vec::new();
        let mut stack = vec![rootfs.to_owned()];
        while let Some(dir) = stack.pop() {
            for entry in std::fs::read_dir(&dir)? {
                let entry = entry?;
                if entry.file_type()?.is_dir() {
                    stack.push(entry.path());
                } else if entry.file_type()?.is_file() {
                    content.extend(std::fs::read(entry.path())?);
                }
            }
        }
        let read = |digest: &str| -> Result<Vec<u8>> {
            let name = digest.split_once(':').context("a digest without an algorithm")?.1;
            Ok(std::fs::read(oci.join("blobs/sha256").join(name))?)
        };
        let index: serde_json::Value = serde_json::from_slice(&std::fs::read(oci.join("index.json"))?)?;
        let manifest = read(index["manifests"][0]["digest"].as_str().context("no manifest")?)?;
        let manifest: serde_json::Value = serde_json::from_slice(&manifest)?;
        let descriptors = manifest["layers"].as_array().context("no layers")?;
        let layers =
            descriptors.iter().map(|l| read(l["digest"].as_str().context("no digest")?)).collect::<Result<_>>()?;
        Ok(Floor { content, layers })
    }

    /// From a directory: BLAKE3 and zstd over the content, once.
    fn tree(&self) -> Result<f64> {
        let began = Instant::now();
        hash_and_pack(&self.content)?;
        Ok(began.elapsed().as_secs_f64())
    }

    /// The same in as many equal parts as there are cores, all at the same time.
    fn tree_at_once(&self, cores: usize) -> Result<f64> {
        let frames = self.content.len().div_ceil(FRAME).div_ceil(cores.max(1)).max(1);
        let began = Instant::now();
        std::thread::scope(|scope| {
            let parts: Vec<_> =
                self.content.chunks(frames * FRAME).map(|part| scope.spawn(|| hash_and_pack(part))).collect();
            parts.into_iter().try_for_each(|part| part.join().unwrap_or_else(|_| anyhow::bail!("a thread panicked")))
        })?;
        Ok(began.elapsed().as_secs_f64())
    }

    /// From layers: SHA-256 over what is stored and what it unpacks to, unpacking, and what a tree takes.
    fn layers(&self) -> Result<f64> {
        use sha2::Digest as _;
        use std::io::Read as _;
        let began = Instant::now();
        for stored in &self.layers {
            std::hint::black_box(sha2::Sha256::digest(stored));
            let mut plain = Vec::new();
            flate2::read::MultiGzDecoder::new(stored.as_slice()).read_to_end(&mut plain)?;
            std::hint::black_box(sha2::Sha256::digest(&plain));
        }
        Ok(began.elapsed().as_secs_f64() + self.tree()?)
    }
}
