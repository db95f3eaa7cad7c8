//! LazyRoot's modules; the program in `main.rs` is a thin shell around them, so that tests can use them.
//!
//! - [`cli`]: the command line; the only place that looks at arguments, environment and terminal.
//! - [`control`]: the daemon's socket; [`daemon`]: what listens there.
//! - [`front`]: how the kernel reaches an image; [`source`]: an image as front ends see it.
//! - [`mounts`]: attaching mounts in the caller's namespace; [`run`]: containers.
//! - [`reader`], [`paths`], [`hostsnap`]: looking into images and directories without mounting.

#![forbid(unsafe_code)]

pub mod cli;
pub mod control;
pub mod daemon;
pub mod dirs;
pub mod errors;
pub mod failure;
pub mod front;
pub mod hostsnap;
pub mod lock;
pub mod mounts;
pub mod paths;
pub mod procscan;
pub mod reader;
pub mod run;
pub mod source;
