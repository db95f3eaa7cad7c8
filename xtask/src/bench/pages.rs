//! Pages of the index that a lookup brings into memory: what it costs where the index is not cached at all.

use super::measure::{Figures, Series};
use crate::lab::Lab;
use crate::scratch::Scratch;
use anyhow::{Context, Result, ensure};
use image::index::Index;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use sys::Map;
use sys::map::Access;

/// A page of memory, and of the index.
const PAGE: usize = 4096;

/// Notes how many pages lookups of the picked paths' last names bring in, or why that could not be seen.
pub fn run(scratch: &Scratch, lab: &Lab, corpus: &str, picked: &[String], figures: &mut Figures) {
    if let Err(e) = measure(scratch, lab, corpus, picked, figures) {
        figures.unmeasured("index pages", &e);
    }
}

fn measure(scratch: &Scratch, lab: &Lab, corpus: &str, picked: &[String], figures: &mut Figures) -> Result<()> {
    // A copy: the daemon has the index mapped, and pages that somebody maps are not let go.
    let copy = scratch.dir().join(format!("{corpus}.index"));
    std::fs::copy(lab.index_file(corpus)?, &copy)?;
    let cold = Cold::open(&copy)?;
    let mut names = Vec::new();
    for path in picked {
        let (dir, name) = path.rsplit_once('/').unwrap_or(("", path));
        if name != "." {
            let dir = dir.strip_prefix('.').unwrap_or(dir);
            let parent = cold.index.resolve(dir.as_bytes())?.with_context(|| format!("{dir} is not in the index"))?;
            names.push((parent, name.as_bytes()));
        }
    }
    let lookup = |&(parent, name): &(u32, &[u8])| -> Result<()> {
        let found = cold.index.lookup(parent, name)?.context("a name is not in the index")?;
        // What a reply to the kernel holds.
        cold.index.inode(found)?;
        Ok(())
    };
    let count = names.len() as f64;
    cold.forget()?;
    names.iter().try_for_each(&lookup)?;
    let in_a_row = cold.pages()? as f64 / count;
    let mut alone = 0;
    for name in &names {
        cold.forget()?;
        lookup(name)?;
        alone += cold.pages()?;
    }
    let what =
        format!("index pages touched by a cold lookup, {corpus} ({count} names, {} pages)", cold.map.len() / PAGE);
    let row = |target: &str, value: f64| Series { values: vec![value], ..Series::new(what.as_str(), target, "pages") };
    figures.add(&[
        row("from a cold index on, one after the other", in_a_row),
        row("each on a cold index", alone as f64 / count),
    ]);
    let goal = format!("{corpus}: index pages touched by a cold lookup");
    figures.goal(format!("{goal}, on average of many"), in_a_row, 1.2);
    figures.goal(format!("{goal}, each on a cold index"), alone as f64 / count, 1.2);
    Ok(())
}

/// An index whose pages can be let go.
#[derive(Debug)]
struct Cold {
    file: File,
    map: Arc<Map>,
    index: Index,
}

impl Cold {
    fn open(path: &Path) -> Result<Cold> {
        let file = File::open(path)?;
        // Pages that are not written yet stay.
        file.sync_all()?;
        let map = Arc::new(Map::of(&file)?);
        map.advise(Access::Random)?;
        let index = Index::open(map.clone())?;
        Ok(Cold { file, map, index })
    }

    /// Lets all pages go, of this file only, and sees that they went.
    fn forget(&self) -> Result<()> {
        self.map.advise(Access::DontNeed)?;
        sys::file::fadvise_dontneed(&self.file, 0, 0)?;
        let left = self.pages()?;
        ensure!(left == 0, "{left} pages of the index stay in memory");
        Ok(())
    }

    fn pages(&self) -> Result<usize> {
        Ok(self.map.resident()? / PAGE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_a_lookup_are_counted() {
        let scratch = Scratch::new("pages-test").unwrap();
        let path = scratch.dir().join("index");
        let mut file = File::create(&path).unwrap();
        image::index::build(&crate::bench::plan::tree(20_000, 1000).unwrap(), &mut file).unwrap();
        let cold = Cold::open(&path).unwrap();
        let parent = cold.index.resolve(b"/d000007").unwrap().unwrap();
        if let Err(e) = cold.forget() {
            // On tmpfs for one.
            println!("SKIP pages_of_a_lookup_are_counted: {e}");
            return;
        }
        assert!(cold.index.lookup(parent, b"file-0007123").unwrap().is_some());
        let first = cold.pages().unwrap();
        assert!((1..=8).contains(&first), "{first} pages");
        // Once more, nothing has to come in.
        assert!(cold.index.lookup(parent, b"file-0007123").unwrap().is_some());
        assert_eq!(cold.pages().unwrap(), first);
    }
}
