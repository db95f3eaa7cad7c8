//! Any bytes as an index, as they are and with their digests made right, so that what is behind them is reached.
//! `cargo +nightly fuzz run index` in `crates/image`; what it finds goes into `corpus/index`, which an ordinary test
//! replays.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    image::index::fuzz_index(bytes);
    let mut sealed = bytes.to_vec();
    image::testing::reseal(&mut sealed);
    image::index::fuzz_index(&sealed);
});
