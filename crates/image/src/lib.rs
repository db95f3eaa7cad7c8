//! Trees, the layer merge, the index with its perfect hashes, and the layouts planned from it.
//!
//! - [`tree`]: the mutable tree that importers fill.
//! - [`merge`]: OCI layers applied to a tree, entry by entry.
//! - [`index`]: a tree compiled to one mappable file, and that file read.
//! - [`snapshot`]: what a tree looks like from outside, for comparing.
//! - [`erofs`]: an index laid out as an EROFS image.
//!
//! Knows neither where bytes come from nor any front end, and does no input or output but writing an index to
//! a given writer.

#![forbid(unsafe_code)]

pub mod erofs;
mod hash;
pub mod index;
pub mod merge;
pub mod snapshot;
#[doc(hidden)]
pub mod testing;
pub mod tree;
