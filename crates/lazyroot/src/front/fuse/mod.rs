//! The FUSE transport: [`wire`] (bytes) → [`decide`] (pure choices) → [`reply`] (exactly once) → [`serve`] (threads),
//! with [`read`] for the one operation that may have to wait, and [`mount`] for how a session reaches the kernel.
//!
//! `doc/format/fuse.md` says which operations and flags are spoken and why.

pub mod decide;
pub mod mount;
pub(crate) mod parked;
pub mod read;
pub mod reply;
pub mod serve;
pub mod wire;
