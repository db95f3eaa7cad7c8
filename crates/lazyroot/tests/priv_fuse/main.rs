//! The FUSE front ends against the running kernel.

mod blockfiles;
mod common;
#[path = "../fuse_support/mod.rs"]
mod fuse_support;
mod life;
mod names;
mod reads;
mod waiting;
mod xattrs;
