//! An allocator that counts, for tests that promise not to allocate.
//!
//! Declare it as the test program's global allocator:
//! `#[global_allocator] static ALLOCATOR: sys::alloc::Counting = sys::alloc::Counting::new();`

#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// The system's allocator, with a count of what was asked of it.
#[derive(Debug, Default)]
pub struct Counting {
    calls: AtomicU64,
}

impl Counting {
    /// A counter at zero.
    pub const fn new() -> Counting {
        Counting { calls: AtomicU64::new(0) }
    }

    /// How often memory was asked for, by any thread, growing what is there included.
    pub fn calls(&self) -> u64 {
        self.calls.load(Relaxed)
    }
}

// SAFETY: every call is handed to the system's allocator unchanged, which keeps GlobalAlloc's contract; counting
// neither allocates nor unwinds.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        self.calls.fetch_add(1, Relaxed);
        // SAFETY: the caller's promises about `layout` are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        self.calls.fetch_add(1, Relaxed);
        // SAFETY: the caller's promises about `layout` are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        self.calls.fetch_add(1, Relaxed);
        // SAFETY: `ptr` came from this allocator, which means from the system's, with the same layout.
        unsafe { System.realloc(ptr, layout, new_size) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from this allocator, which means from the system's, with the same layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_asked_is_counted_and_works() {
        let counting = Counting::new();
        let layout = Layout::from_size_align(64, 8).unwrap();
        // SAFETY: the layout has a size; the block is given back once, with the layout that it has by then.
        unsafe {
            let block = counting.alloc_zeroed(layout);
            assert_eq!(*block.add(63), 0);
            let block = counting.realloc(block, layout, 128);
            *block.add(127) = 1;
            counting.dealloc(block, Layout::from_size_align(128, 8).unwrap());
        }
        assert_eq!(counting.calls(), 2);
    }
}
