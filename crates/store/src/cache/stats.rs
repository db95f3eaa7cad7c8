//! What a cache counts.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident,)+) => {
        /// The counters, changed by all threads.
        #[derive(Debug, Default)]
        pub(crate) struct Stats {
            $(pub(crate) $name: AtomicU64,)+
        }

        /// A copy of a cache's counters. Bytes are stored ones (compressed) unless said otherwise.
        #[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        #[serde(default)]
        #[non_exhaustive]
        pub struct StatsSnapshot {
            $($(#[doc = $doc])+ pub $name: u64,)+
        }

        impl Stats {
            pub(crate) fn snapshot(&self) -> StatsSnapshot {
                StatsSnapshot { $($name: self.$name.load(Ordering::Relaxed),)+ }
            }
        }
    };
}

counters! {
    /// Fetches that had to wait for something.
    fetches,
    /// Of these, the ones that wait now.
    reads_pending,
    /// Times that a fetch joined a frame that was on its way already.
    coalesced,
    /// Fetches that ended because their deadline passed.
    timeouts,
    /// Fetches that ended with any other error.
    failures,
    /// Reads sent to the store.
    store_reads,
    /// Bytes that came from it.
    fetched_bytes,
    /// Bytes that are on their way or wait for being unpacked now.
    in_flight_bytes,
    /// Reads that the store failed.
    store_errors,
    /// Reads that the store did not answer in time.
    store_timeouts,
    /// Answers of the store to reads that had been given up.
    late_answers,
    /// Frames that were asked for once more.
    retries,
    /// Frames from the store that were not what the object map promises.
    corrupt_fetched,
    /// Frames on this disk that were not what the object map promises.
    corrupt_on_disk,
    /// Frames unpacked, verified and written.
    frames_filled,
    /// Their unpacked bytes.
    filled_bytes,
    /// Frames found on disk from before and verified again.
    frames_verified,
    /// Frames that the disk refused; they were served from memory.
    disk_refused,
    /// Unpacked bytes that are kept in memory because the disk refuses them now.
    overlay_bytes,
    /// Batches made durable.
    syncs,
    /// Batches that the disk failed to make durable; their frames are fetched again.
    sync_errors,
    /// Frames evicted.
    frames_evicted,
    /// Their unpacked bytes.
    evicted_bytes,
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

pub(crate) fn sub(counter: &AtomicU64, n: u64) {
    counter.fetch_sub(n, Ordering::Relaxed);
}
