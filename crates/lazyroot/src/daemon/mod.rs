//! The daemon: one per root directory, started when it is needed, gone when it is not.
//!
//! It owns the cache, serves images, and holds every superblock in a mount namespace of its own; whoever asks gets a
//! detached mount and attaches it. The control socket has its own threads: a slow client costs nobody a read, and a
//! slow read costs no client an answer.
//!
//! Failure model: killed, it leaves mounts whose uncached parts fail (ENOTCONN, EIO) and a lease file; [`recover`]
//! cleans up with it, and [`lost`] keeps what could not be cleaned up. Asked to end while something is mounted, it goes on until that is gone.

pub mod force;
pub mod images;
pub mod leases;
pub mod log;
pub mod lost;
pub mod push;
pub mod recover;
pub mod serve;
pub mod start;
pub mod state;

/// Seconds without leases after which a daemon ends.
pub const IDLE_DEFAULT: u64 = 60;
/// MiB of an image's metadata that are pushed at a time.
pub const PUSH_DEFAULT: u32 = 64;
