//! A set of frames that many threads read and change at once.

use std::sync::atomic::{AtomicU64, Ordering};

/// One bit per frame. Reading is an acquire and changing a sequentially consistent read-modify-write, so that what
/// was written to the file before a bit was set is there for whoever sees it set, and so that clearing takes its
/// place in the one order that [`super::guard`] needs.
#[derive(Debug)]
pub(crate) struct Bits {
    words: Box<[AtomicU64]>,
    len: u32,
}

impl Bits {
    /// `len` bits, none set.
    pub(crate) fn new(len: u32) -> Self {
        Bits { words: (0..len.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(), len }
    }

    /// `len` bits, set as in `words`.
    pub(crate) fn from_words(len: u32, words: &[u64]) -> Self {
        let bits = Bits::new(len);
        for (to, from) in bits.words.iter().zip(words) {
            to.store(*from, Ordering::Relaxed);
        }
        bits
    }

    fn at(&self, i: u32) -> (&AtomicU64, u64) {
        assert!(i < self.len, "frame {i} of {}", self.len);
        (&self.words[i as usize / 64], 1 << (i % 64))
    }

    pub(crate) fn get(&self, i: u32) -> bool {
        let (word, bit) = self.at(i);
        word.load(Ordering::Acquire) & bit != 0
    }

    /// Sets bit `i`; whether it was set before.
    pub(crate) fn set(&self, i: u32) -> bool {
        let (word, bit) = self.at(i);
        word.fetch_or(bit, Ordering::SeqCst) & bit != 0
    }

    /// Clears bit `i`; whether it was set before.
    pub(crate) fn clear(&self, i: u32) -> bool {
        let (word, bit) = self.at(i);
        word.fetch_and(!bit, Ordering::SeqCst) & bit != 0
    }

    /// Takes all bits out, word by word.
    pub(crate) fn take(&self) -> Vec<u64> {
        self.words.iter().map(|w| w.swap(0, Ordering::SeqCst)).collect()
    }

    /// The words as they are, one after the other.
    pub(crate) fn words(&self) -> impl Iterator<Item = u64> {
        self.words.iter().map(|w| w.load(Ordering::SeqCst))
    }

    /// Bits set.
    #[cfg(test)]
    pub(crate) fn count(&self) -> u32 {
        self.words().map(u64::count_ones).sum()
    }
}

/// The positions of the bits set in `words`.
pub(crate) fn ones(words: &[u64]) -> impl Iterator<Item = u32> {
    words.iter().enumerate().flat_map(|(i, word)| {
        let mut rest = *word;
        std::iter::from_fn(move || {
            (rest != 0).then(|| {
                let bit = rest.trailing_zeros();
                rest &= rest - 1;
                i as u32 * 64 + bit
            })
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_set_cleared_counted_and_taken() {
        let bits = Bits::new(130);
        for i in [0, 63, 64, 129] {
            assert!(!bits.set(i));
            assert!(bits.set(i) && bits.get(i));
        }
        assert!(bits.clear(63) && !bits.clear(63) && !bits.get(63));
        assert_eq!(bits.count(), 3);
        assert_eq!(ones(&bits.take()).collect::<Vec<_>>(), [0, 64, 129]);
        assert_eq!(bits.count(), 0);
        assert!(Bits::from_words(130, &[0, 0, 2]).get(129));
    }
}
