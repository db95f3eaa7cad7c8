//! The built program, end to end, as a user drives it: mounts, the daemon's life and death, containers, messages and
//! exit codes. Needs root and kernel features; a test that cannot run says `SKIP name: reason`.
//!
//! Every test has a root and a state directory of its own, and ends its daemon whatever happens.

mod containers;
mod daemon;
mod errors;
mod files;
mod lab;
mod mounts;
mod nobody;
mod push;
