//! `run`: a command in a container whose root is an image with a writable overlay.
//!
//! [`image_config`], [`user`], [`volume`], [`seccomp`] and [`spec`] decide, without looking at the host, what the
//! container is; [`runtime`] finds out which program can run it here; [`inroot`] writes into its root; [`exec`] looks
//! after it while it runs; [`record`] is what stays of it; [`timeline`] is what it cost.

pub mod exec;
pub mod image_config;
pub mod inroot;
pub mod record;
pub mod runtime;
pub mod seccomp;
pub mod spec;
pub mod timeline;
pub mod user;
pub mod volume;
