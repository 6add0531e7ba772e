//! The command line: runs the binary, and checks its output and exit code.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod demo;
mod manage;
mod migrate;
mod offline;
#[path = "../../../store/tests/postgres/server.rs"]
#[allow(dead_code, reason = "the tests of the store use more of it")]
mod postgres;
mod rig;
mod server;
mod signals;
mod undo;

/// Compiles the Rust worker that `eddy init` writes.
#[allow(dead_code)]
#[path = "../../templates/rust/main.rs"]
mod template;
