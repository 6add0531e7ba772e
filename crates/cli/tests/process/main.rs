//! `eddy serve` as a process: signals, disk, clock, and its output at the start. Every response is checked against
//! `openapi.json`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../../../server/tests/api/client.rs"]
#[allow(dead_code, reason = "shared with the tests of the API")]
mod client;
mod disk;
#[path = "../../../server/tests/api/document.rs"]
mod document;
mod serve;
#[path = "../../../store/tests/shim/mod.rs"]
mod shim;
