//! Everything that needs unsafe code or speaks raw system calls.
//!
//! Job: safe wrappers around what the rest needs from Linux: a read-only mapping, mounts, descriptor passing,
//! process helpers, pipes and the FUSE device. Invariants: descriptors are `OwnedFd`/`BorrowedFd`, never integers;
//! every unsafe block names the invariant that it relies on. Failure model: every wrapper returns `io::Result` with
//! the kernel's errno; nothing here logs, retries (but for EINTR where it says so) or exits. It does not know images,
//! stores, or the FUSE protocol beyond moving whole messages.
//!
//! rustix does the work wherever it has a safe wrapper.

pub mod alloc;
pub mod file;
pub mod fuse;
pub mod map;
pub mod memory;
pub mod mount;
pub mod mountinfo;
pub mod pipe;
pub mod proc;
pub mod scm;
pub mod signal;

pub use map::Map;
