//! `ptr_hash` over the same names: built on one thread, and asked as an index is: from a name to a row number, whose
//! parent and name are then compared where rows and names lie one after the other.

use super::super::measure::Measured;
use super::WIDTH;
use ptr_hash::hash::Xxh3;
use ptr_hash::{DefaultPtrHash, PtrHashParams};
use std::time::Instant;

type Hash = DefaultPtrHash<Xxh3, String>;

/// Adds its building.
pub fn build<'a>(names: &'a [String], targets: &mut Vec<(String, Measured<'a>)>) {
    let measure = move || {
        let began = Instant::now();
        std::hint::black_box(Hash::new(names, PtrHashParams::default()));
        Ok(began.elapsed().as_secs_f64())
    };
    targets.push(("ptr_hash, one hash".into(), Box::new(measure)));
}

/// Adds its lookups.
pub fn lookup<'a>(names: &'a [String], order: &'a [u32], targets: &mut Vec<(String, Measured<'a>)>) -> bool {
    let hash = Hash::new(names, PtrHashParams::default());
    let mut slots = vec![0u32; hash.max_index()];
    let (mut parents, mut starts, mut bytes) = (Vec::new(), vec![0u32], Vec::new());
    for (i, name) in (0u32..).zip(names) {
        slots[hash.index(name)] = i;
        parents.push(i / WIDTH);
        bytes.extend_from_slice(name.as_bytes());
        starts.push(bytes.len() as u32);
    }
    let measure = move || {
        let began = Instant::now();
        for &i in order {
            let name = &names[i as usize];
            let row = slots[hash.index(name)] as usize;
            let found = &bytes[starts[row] as usize..starts[row + 1] as usize];
            anyhow::ensure!(parents[row] == i / WIDTH && found == name.as_bytes(), "name {i} is not found");
        }
        Ok(began.elapsed().as_secs_f64() * 1e9 / order.len() as f64)
    };
    targets.push(("ptr_hash, row compared".into(), Box::new(measure)));
    true
}
