//! Who is reading a space right now: what eviction waits for before it punches.
//!
//! Two halves of striped counters, as in the kernel's sleepable RCU. A reader counts itself into the current half
//! *before* it looks at any presence bit, and out of the same counter when its reply has been written. An
//! evictor clears bits, then waits until it has seen every counter of both halves at zero once; new readers are
//! led to the other half meanwhile, so that it does not wait for those that keep coming.
//!
//! Why that is enough. `enter` is a read-modify-write and a full fence, before the bits are loaded; `drain` is a
//! full fence between the clearing of the bits and the loading of the counters. So for each reader one of two
//! things holds: the evictor sees its count, or the reader sees the bits cleared. A reader that the evictor counted
//! left through the very counter it came in by, so a counter that was seen at zero after the clearing has no reader
//! of before the clearing. Leaving is a release and the evictor's load an acquire: the reader's reads of the file
//! are over before the hole is punched. A reader that took the number of a half, was delayed, and counts itself into
//! it after the flip saw the cleared bits and does no harm; it can only make the evictor wait for it.

use std::sync::atomic::{AtomicU32, Ordering, fence};
use std::time::{Duration, Instant};

/// Enough that the cores of a usual machine rarely share one.
const STRIPES: usize = 8;

#[derive(Debug, Default)]
#[repr(align(64))]
struct Stripe([AtomicU32; 2]);

/// The counters of one space.
#[derive(Debug, Default)]
pub(crate) struct Readers {
    half: AtomicU32,
    stripes: [Stripe; STRIPES],
}

/// Which counter a reader is in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    stripe: u8,
    half: u8,
}

/// A stripe for the calling thread: any spread will do, so the address of something of its own.
fn my_stripe() -> usize {
    thread_local!(static OWN: u8 = const { 0 });
    let at = OWN.with(|own| std::ptr::from_ref(own) as usize);
    // Threads' areas lie megabytes or at least pages apart; mix the bits above those.
    (at >> 12).wrapping_mul(0x9e37_79b9) >> 16 & (STRIPES - 1)
}

impl Readers {
    /// Counts a reader in. To be called before looking at any presence bit.
    pub(crate) fn enter(&self) -> Slot {
        let half = self.half.load(Ordering::Relaxed) & 1;
        let stripe = my_stripe();
        self.stripes[stripe].0[half as usize].fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        Slot { stripe: stripe as u8, half: half as u8 }
    }

    /// Counts it out; may be another thread.
    pub(crate) fn leave(&self, slot: Slot) {
        self.stripes[slot.stripe as usize].0[slot.half as usize].fetch_sub(1, Ordering::Release);
    }

    /// Waits until all readers that may have seen bits set that are clear now have left. `false` when some are
    /// still there at `until`. One caller at a time.
    #[must_use]
    pub(crate) fn drain(&self, until: Instant) -> bool {
        fence(Ordering::SeqCst);
        let half = self.half.load(Ordering::Relaxed) & 1;
        // First the half that is not in use, which may have readers of before the last flip; then lead new readers
        // to it and wait for the other.
        if !self.wait_zero(half ^ 1, until) {
            return false;
        }
        self.half.store(half ^ 1, Ordering::SeqCst);
        self.wait_zero(half, until)
    }

    fn wait_zero(&self, half: u32, until: Instant) -> bool {
        let mut pause = Duration::from_micros(20);
        for stripe in &self.stripes {
            while stripe.0[half as usize].load(Ordering::Acquire) != 0 {
                if Instant::now() >= until {
                    return false;
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(Duration::from_millis(2));
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    fn soon() -> Instant {
        Instant::now() + Duration::from_millis(30)
    }

    #[test]
    fn an_old_reader_holds_the_evictor_and_a_new_one_does_not() {
        let readers = Readers::default();
        assert!(readers.drain(soon()));
        let old = readers.enter();
        assert!(!readers.drain(soon()));
        // The half was flipped: this one is led elsewhere, but the old one still holds.
        let new = readers.enter();
        assert_ne!(old.half, new.half);
        assert!(!readers.drain(soon()));
        readers.leave(old);
        // What was new became old by then.
        assert!(!readers.drain(soon()));
        readers.leave(new);
        assert!(readers.drain(soon()) && readers.drain(soon()));
    }

    #[test]
    fn a_stream_of_readers_does_not_starve_the_evictor() {
        let readers = Readers::default();
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let mut held = readers.enter();
                    while !stop.load(Ordering::Relaxed) {
                        // Always at least one counted in.
                        let next = readers.enter();
                        readers.leave(held);
                        held = next;
                    }
                    readers.leave(held);
                });
            }
            for _ in 0..200 {
                assert!(readers.drain(Instant::now() + Duration::from_secs(60)));
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}
