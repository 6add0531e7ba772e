//! The command line, as a user has it: the binary is run, what it says and its exit code are looked at.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod demo;
mod manage;
mod offline;
mod rig;
mod server;
mod signals;
mod undo;

/// The Rust worker that `eddy init` writes is Rust.
#[allow(dead_code)]
#[path = "../../templates/rust/main.rs"]
mod template;
