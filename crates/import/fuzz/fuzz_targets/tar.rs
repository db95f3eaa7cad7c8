//! Any bytes as an archive: as they are (compressed or not), and with every header's checksum made right, so that what
//! is behind it is reached. `cargo +nightly fuzz run tar` in `crates/import`; what it finds goes into `corpus/tar`,
//! which an ordinary test replays.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| import::fuzz_archive(bytes));
