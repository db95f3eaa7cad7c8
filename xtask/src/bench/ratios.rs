//! What the tree has to beat: nydusd's ratios to the native ext4 directory, and nydusd itself where it is here.

use super::measure::{Figures, Measured, Series, in_turn};
use super::views::View;
use super::walk::{self, Work};
use crate::proc;
use anyhow::{Context, Result, ensure};
use image::testing::Random;
use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Instant;

/// What is done, and its ratio to the native directory through nydusd 2.4 (FUSE, RAFS v6), cold and warm; of zstd and
/// uncompressed images the better one. Times: less is better.
type Row = (Done, f64, f64);

#[derive(Debug, Clone, Copy)]
enum Done {
    Tree(Work),
    Big(Reads),
}

/// How one big file is read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reads {
    /// 8,192 times 4 KiB, here and there.
    Random,
    /// From front to back, 1 MiB at a time.
    Sequential,
}

/// Measured once on Debian 12, Linux 6.18, two cores, ext4 on virtio; medians of ratios in one run.
fn rows(corpus: &str) -> &'static [Row] {
    use Done::{Big, Tree};
    match corpus {
        "debian" => &[(Tree(Work::Find), 0.96, 1.46), (Tree(Work::StatAll), 0.76, 0.99), (Tree(Work::Cat), 0.71, 1.22)],
        "linux" => {
            &[(Tree(Work::Find), 1.23, 2.35), (Tree(Work::StatAll), 1.37, 0.88), (Tree(Work::Search), 1.28, 2.04)]
        }
        "node" => &[(Tree(Work::Find), 3.97, 1.98), (Tree(Work::StatAll), 2.24, 0.94)],
        // Rates of 0.65, 0.74, 0.74 and 0.51 of the native file's, as times.
        "python-ml" => &[
            (Tree(Work::Find), 1.23, 1.92),
            (Tree(Work::StatAll), 1.42, 1.16),
            (Big(Reads::Random), 1.54, 1.35),
            (Big(Reads::Sequential), 1.35, 1.96),
        ],
        _ => &[],
    }
}

/// Measures every row that there is for a corpus: the tree against the native directory, which comes first among the
/// views, and against nydusd where that is one of them.
pub fn compare(views: &[View], corpus: &str, rootfs: &Path, rounds: usize, figures: &mut Figures) -> Result<()> {
    for (done, cold, warm) in rows(corpus) {
        if matches!(done, Done::Tree(Work::Search)) && !proc::in_path("rg") {
            figures.peer("ripgrep", None);
            continue;
        }
        // Cold first: its first round fills what a daemon keeps of content; medians are without it.
        for (cold, most) in [(true, *cold), (false, *warm)] {
            let series = match done {
                Done::Tree(work) => walk::measured(views, corpus, *work, cold, rounds)?,
                Done::Big(reads) => big(views, corpus, rootfs, *reads, cold, rounds)?,
            };
            figures.add(&series);
            let tree = walk::of(&series, "lazyroot tree")?;
            let what = format!("{}: tree, ratio to", series[0].what);
            figures.goal(format!("{what} the native directory (nydusd's)"), tree.ratio(&series[0]), most);
            if let Ok(nydusd) = walk::of(&series, "nydusd") {
                figures.goal(format!("{what} nydusd"), tree.ratio(nydusd), 1.0);
            }
        }
    }
    Ok(())
}

/// The corpus's largest file, read in one way through all views.
fn big(views: &[View], corpus: &str, rootfs: &Path, reads: Reads, cold: bool, rounds: usize) -> Result<Vec<Series>> {
    let (path, len) = largest(rootfs)?;
    let mut targets: Vec<(String, Measured<'_>)> = Vec::new();
    for view in views {
        let file = view.point.join(&path);
        if !cold {
            read(&file, len, reads)?;
        }
        let measure = move || {
            if cold {
                crate::drop_kernel_caches()?;
            }
            read(&file, len, reads)
        };
        targets.push((view.name.clone(), Box::new(measure)));
    }
    let how = if reads == Reads::Random { "8,192 random reads of" } else { "reading" };
    let what = format!("{how} {} MB {}, {corpus}", len / 1_000_000, if cold { "cold" } else { "warm" });
    in_turn(&what, "s", rounds, targets)
}

/// Seconds that reading takes.
fn read(file: &Path, len: u64, reads: Reads) -> Result<f64> {
    let began = Instant::now();
    let file = File::open(file).with_context(|| format!("cannot open {}", file.display()))?;
    // The same places every time.
    let mut random = Random(1);
    let mut piece = vec![0u8; if reads == Reads::Random { 4096 } else { 1 << 20 }];
    let count = if reads == Reads::Random { 8192 } else { len / piece.len() as u64 };
    for n in 0..count {
        let at = match reads {
            Reads::Random => random.below(len / 4096) * 4096,
            Reads::Sequential => n * piece.len() as u64,
        };
        file.read_exact_at(&mut piece, at)?;
    }
    Ok(began.elapsed().as_secs_f64())
}

/// The largest file below a directory: its path from there, and its size.
fn largest(root: &Path) -> Result<(PathBuf, u64)> {
    let mut largest = (PathBuf::new(), 0);
    let mut stack = vec![root.to_owned()];
    while let Some(dir) = stack.pop() {
        for entry in std::fs::read_dir(&dir)? {
            let (entry, meta) = entry.and_then(|e| e.metadata().map(|m| (e, m)))?;
            if meta.is_dir() {
                stack.push(entry.path());
            } else if meta.is_file() && meta.size() > largest.1 {
                largest = (entry.path(), meta.size());
            }
        }
    }
    ensure!(largest.1 >= 1 << 20, "no big file below {}", root.display());
    Ok((largest.0.strip_prefix(root)?.to_owned(), largest.1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_corpus_has_its_rows() {
        for corpus in crate::corpus::ALL.iter().filter(|corpus| **corpus != "linux-20k") {
            let done: Vec<_> = rows(corpus).iter().map(|row| format!("{:?}", row.0)).collect();
            assert!(done.contains(&"Tree(Find)".to_owned()) && done.contains(&"Tree(StatAll)".to_owned()), "{corpus}");
        }
    }

    #[test]
    fn the_largest_file_is_read_in_both_ways() {
        let scratch = crate::scratch::Scratch::new("big-test").unwrap();
        std::fs::create_dir(scratch.dir().join("d")).unwrap();
        std::fs::write(scratch.dir().join("small"), [1; 5000]).unwrap();
        std::fs::write(scratch.dir().join("d/big"), vec![2; (3 << 20) + 7]).unwrap();
        let (path, len) = largest(scratch.dir()).unwrap();
        assert_eq!((path.to_str(), len), (Some("d/big"), (3 << 20) + 7));
        for reads in [Reads::Random, Reads::Sequential] {
            assert!(read(&scratch.dir().join(&path), len, reads).unwrap() > 0.0);
        }
        assert!(read(scratch.dir().join("small").as_path(), 1 << 20, Reads::Sequential).is_err());
    }
}
