//! `eddy`: the command line and the server in one binary.

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
