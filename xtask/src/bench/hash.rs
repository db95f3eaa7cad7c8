//! The perfect hashes of an index: built in its writing, asked by its lookups; beside them another implementation.

use super::measure::{Figures, Measured, in_turn};
use anyhow::{Result, ensure};
use image::index::Index;
use image::testing::Random;
use std::io::Cursor;
use std::sync::Arc;
use std::time::Instant;

/// Names in the tree.
const NAMES: u32 = 1_000_000;
/// Names to a directory.
const WIDTH: u32 = 1000;

pub fn run(rounds: usize, figures: &mut Figures) -> Result<()> {
    let names: Vec<String> = (0..NAMES).map(|i| format!("file-{i:07}")).collect();
    let tree = super::plan::tree(NAMES, WIDTH)?;
    let built = || -> Result<f64> {
        let mut bytes = Cursor::new(Vec::new());
        let began = Instant::now();
        image::index::build(&tree, &mut bytes)?;
        Ok(began.elapsed().as_secs_f64())
    };
    let mut targets: Vec<(String, Measured<'_>)> = vec![("whole index, both hashes in it".into(), Box::new(built))];
    yardstick::build(&names, &mut targets);
    let series = in_turn(&format!("building, {NAMES} names"), "s", rounds, targets)?;
    figures.add(&series);
    // 0.7 s for each of the two hashes; the rest of the index comes on top and is not much.
    figures.goal("building an index with two hashes, s", series[0].median(), 1.4);

    let mut bytes = Cursor::new(Vec::new());
    image::index::build(&tree, &mut bytes)?;
    let index = Index::open(Arc::new(bytes.into_inner()))?;
    let order = shuffled();
    let parents: Vec<u32> = (0..NAMES / WIDTH).map(|d| parent(&index, d)).collect::<Result<_>>()?;
    let asked = || -> Result<f64> {
        let began = Instant::now();
        for &i in &order {
            let found = index.lookup(parents[(i / WIDTH) as usize], names[i as usize].as_bytes())?;
            ensure!(found.is_some(), "name {i} is not found");
        }
        Ok(began.elapsed().as_secs_f64() * 1e9 / f64::from(NAMES))
    };
    let mut targets: Vec<(String, Measured<'_>)> = vec![("lookup, row compared".into(), Box::new(asked))];
    let compared = yardstick::lookup(&names, &order, &mut targets);
    let series = in_turn("lookups in random order", "ns each", rounds, targets)?;
    figures.add(&series);
    figures.peer("ptr_hash", compared.then(|| "2".to_owned()));
    if let Some(peer) = series.get(1) {
        figures.goal("lookup, ratio to ptr_hash with the same comparing", series[0].ratio(peer), 1.3);
    }
    Ok(())
}

fn parent(index: &Index, dir: u32) -> Result<u32> {
    let found = index.resolve(format!("/d{dir:06}").as_bytes())?;
    found.ok_or_else(|| anyhow::anyhow!("directory {dir} is not found"))
}

/// All numbers of names, shuffled; the same order every time.
fn shuffled() -> Vec<u32> {
    let mut order: Vec<u32> = (0..NAMES).collect();
    let mut random = Random(1);
    for i in (1..order.len()).rev() {
        order.swap(i, random.below(i as u64 + 1) as usize);
    }
    order
}

/// What `ptr_hash` does with the same names, where it was built in.
#[cfg(feature = "yardstick")]
mod yardstick;

/// It was not.
#[cfg(not(feature = "yardstick"))]
mod yardstick {
    use super::super::measure::Measured;

    pub fn build<'a>(_: &'a [String], _: &mut Vec<(String, Measured<'a>)>) {}

    pub fn lookup<'a>(_: &'a [String], _: &'a [u32], _: &mut Vec<(String, Measured<'a>)>) -> bool {
        false
    }
}
