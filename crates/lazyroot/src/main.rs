//! The `lazyroot` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    lazyroot::cli::main()
}
