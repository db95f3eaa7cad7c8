//! The control socket: framing, messages, and the client's side.
//!
//! Normative text: `doc/format/control.md`. The daemon's side is in [`crate::daemon`].

pub mod client;
pub mod proto;
pub mod wire;
