//! `eddy`: the command line and the server in one binary.

mod cli;

use std::process::ExitCode;

/// What one thread allocates another one often frees: a transition is decided here, written there, answered elsewhere.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    cli::main()
}
