//! The command line: runs the binary, and checks its output and exit code.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod demo;
mod manage;
mod offline;
mod rig;
mod server;
mod signals;
mod undo;

/// Compiles the Rust worker that `eddy init` writes.
#[allow(dead_code)]
#[path = "../../templates/rust/main.rs"]
mod template;
