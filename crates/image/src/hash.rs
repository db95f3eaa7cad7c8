//! Perfect hashing: a few bits per key, one probe per lookup. Specified in `doc/format/index.md`, section "Hashes".
//!
//! Keys are 64-bit hashes. A key's upper bits choose a bucket of about four keys; the bucket's *pilot*, 16 bits,
//! is what makes all its keys fall into slots of their own. There are a few per cent more slots than keys; the
//! empty ones cost what a table that renumbers them would cost.
//!
//! Building places the largest buckets first and tries pilots in order; a bucket for which none fits means
//! another seed. The same keys give the same bytes.

use format::index::HashHeader;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// Keys per bucket, on average.
const BUCKET: usize = 4;
/// Honest keys never crowd like this in one bucket.
const CROWD: usize = 48;
/// Spreads a pilot over 64 bits.
const PILOT_MUL: u64 = 0x9e37_79b9_7f4a_7c15;
/// Mixes a key with its pilot.
const MIX_MUL: u64 = 0xd6e8_feb8_6659_fd93;
/// Seeds that are tried; see [`seed`].
pub(crate) const SEEDS: u32 = 8;

/// The seed of the `attempt`th try.
pub(crate) fn seed(attempt: u32) -> u64 {
    0x4c61_7a79_526f_6f74_u64.wrapping_add(u64::from(attempt).wrapping_mul(PILOT_MUL))
}

/// The key of `name` in the directory `parent`.
pub(crate) fn name_key(seed: u64, parent: u32, name: &[u8]) -> u64 {
    xxh3_64_with_seed(name, seed ^ u64::from(parent).wrapping_mul(PILOT_MUL))
}

/// The key of a path: its last name hashed with the key of the path before. The root's key is the seed.
pub(crate) fn path_key(parent: u64, name: &[u8]) -> u64 {
    xxh3_64_with_seed(name, parent)
}

/// `x * n / 2^32` for the upper half of `x`: a number below `n`.
fn reduce(x: u64, n: u32) -> u32 {
    (((x >> 32) * u64::from(n)) >> 32) as u32
}

/// How large a hash is; all that a lookup needs besides the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) slots: u32,
    pub(crate) buckets: u32,
}

impl Shape {
    /// The shape for `keys` keys, at least one.
    pub(crate) fn of(keys: u32) -> Shape {
        Shape { slots: keys + keys.div_ceil(32), buckets: keys.div_ceil(BUCKET as u32) }
    }

    pub(crate) fn bucket(self, key: u64) -> u32 {
        reduce(key, self.buckets)
    }

    pub(crate) fn slot(self, key: u64, pilot: u16) -> u32 {
        reduce((key ^ u64::from(pilot).wrapping_mul(PILOT_MUL)).wrapping_mul(MIX_MUL), self.slots)
    }
}

/// A built hash.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Hash {
    pub(crate) shape: Shape,
    pub(crate) slots: Vec<u32>,
    pub(crate) pilots: Vec<u16>,
}

/// Builds a hash that maps each key to its value; `None` when some bucket cannot be placed, two equal keys for
/// instance. `keys` are put into another order.
pub(crate) fn build(keys: &mut [(u64, u32)]) -> Option<Hash> {
    let shape = Shape::of(u32::try_from(keys.len()).ok()?);
    let starts = sort_by_bucket(keys, shape);
    if starts.windows(2).any(|w| (w[1] - w[0]) as usize > CROWD) {
        return None;
    }
    let order = largest_first(&starts);
    let mut taken = vec![0u64; (shape.slots as usize).div_ceil(64)];
    let mut slots = vec![HashHeader::EMPTY; shape.slots as usize];
    let mut pilots = vec![0u16; shape.buckets as usize];
    let mut place = Vec::new();
    // Far more than honest keys need; dishonest ones shall not cost more.
    let mut tries = (1u64 << 22) + 256 * u64::from(shape.buckets);
    for bucket in order {
        let range = starts[bucket as usize] as usize..starts[bucket as usize + 1] as usize;
        let members = &keys[range];
        let pilot = (0..=u16::MAX).find(|&p| fits(members, shape, p, &mut taken, &mut place))?;
        tries = tries.checked_sub(u64::from(pilot))?;
        pilots[bucket as usize] = pilot;
        for (&slot, &(_, value)) in place.iter().zip(members) {
            slots[slot as usize] = value;
        }
    }
    Some(Hash { shape, slots, pilots })
}

/// Takes the slots of all members under that pilot, or none of them.
fn fits(members: &[(u64, u32)], shape: Shape, pilot: u16, taken: &mut [u64], place: &mut Vec<u32>) -> bool {
    place.clear();
    for &(key, _) in members {
        let slot = shape.slot(key, pilot);
        let (word, bit) = (slot as usize / 64, 1u64 << (slot % 64));
        if taken[word] & bit != 0 {
            for &slot in place.iter() {
                taken[slot as usize / 64] &= !(1 << (slot % 64));
            }
            return false;
        }
        taken[word] |= bit;
        place.push(slot);
    }
    true
}

/// Brings keys of one bucket together; gives where each bucket starts, and the end.
fn sort_by_bucket(keys: &mut [(u64, u32)], shape: Shape) -> Vec<u32> {
    // Buckets are the upper bits of the keys, so sorted keys are sorted by bucket.
    keys.sort_unstable();
    let mut starts = vec![0u32; shape.buckets as usize + 1];
    for &(key, _) in keys.iter() {
        starts[shape.bucket(key) as usize + 1] += 1;
    }
    for i in 1..starts.len() {
        starts[i] += starts[i - 1];
    }
    starts
}

/// The buckets that have keys, the fullest first, equal ones in order.
fn largest_first(starts: &[u32]) -> Vec<u32> {
    let size = |b: usize| (starts[b + 1] - starts[b]) as usize;
    let buckets = starts.len() - 1;
    let largest = (0..buckets).map(size).max().unwrap_or(0);
    let mut ends = vec![0u32; largest + 2];
    for b in 0..buckets {
        ends[largest - size(b) + 1] += 1;
    }
    for i in 1..ends.len() {
        ends[i] += ends[i - 1];
    }
    let mut order = vec![0u32; buckets];
    for b in 0..buckets {
        let at = &mut ends[largest - size(b)];
        order[*at as usize] = b as u32;
        *at += 1;
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Random;
    use proptest::prelude::*;

    fn found(hash: &Hash, key: u64) -> u32 {
        let pilot = hash.pilots[hash.shape.bucket(key) as usize];
        hash.slots[hash.shape.slot(key, pilot) as usize]
    }

    proptest! {
        #[test]
        fn every_key_finds_its_value(seed: u64, count in 1u32..5000) {
            let mut r = Random(seed);
            let keys: Vec<(u64, u32)> = (0..count).map(|n| (r.bits(), n)).collect();
            let hash = build(&mut keys.clone()).unwrap();
            for &(key, value) in &keys {
                prop_assert_eq!(found(&hash, key), value);
            }
            let used = hash.slots.iter().filter(|&&s| s != HashHeader::EMPTY).count();
            prop_assert_eq!(used, keys.len());
            let mut other = keys;
            other.reverse();
            prop_assert_eq!(build(&mut other).unwrap(), hash);
        }
    }

    #[test]
    fn no_keys_and_few_keys_are_placed() {
        assert_eq!(build(&mut []).unwrap().slots.len(), 0);
        for count in 1..100u32 {
            let mut keys: Vec<(u64, u32)> = (0..count).map(|n| (path_key(seed(0), &n.to_le_bytes()), n)).collect();
            assert!(build(&mut keys).is_some(), "{count}");
        }
    }

    #[test]
    fn equal_keys_are_given_up() {
        assert_eq!(build(&mut [(7, 1), (7, 2), (8, 3)]), None);
    }

    /// Keys that all fall into one bucket are given up in bounded time, not sought for ever.
    #[test]
    fn crowded_buckets_are_given_up() {
        let mut keys: Vec<(u64, u32)> = (0..200_000).map(|n| (u64::from(n), n)).collect();
        let start = std::time::Instant::now();
        let _ = build(&mut keys);
        assert!(start.elapsed().as_secs() < 60);
    }

    /// The bytes of the format: fixed for all time.
    #[test]
    fn keys_are_what_the_specification_says() {
        assert_eq!(seed(0), u64::from_be_bytes(*b"LazyRoot"));
        assert_eq!(name_key(0, 0, b""), 0x2d06_8005_38d3_94c2);
        assert_eq!(path_key(seed(0), b"bin"), name_key(seed(0), 0, b"bin"));
    }
}
