//! Faults, end to end, through the built program: kill -9 of an import, of the daemon and of its clients, disks that fill
//! up or cannot be written, bits that flip in every file of a store, packs that are gone.
//!
//! The rule under test is always the same: a reader gets the right bytes or an error, the store is as it was before or
//! after, and the next command works. When a fault strikes is spread over what happens (bytes written, files
//! made), or over the time that the same thing took without a fault; nothing depends on how fast this machine is.

mod daemon_kills;
mod flips;
mod full_disks;
mod import_kills;
#[allow(dead_code, reason = "shared with the tests of the command line")]
#[path = "../priv_cli/lab.rs"]
mod lab;
mod mount_kills;
mod places;
mod silent_store;
mod support;
