//! `eddy serve` as a process: its signals, its disk, its clock, and what it says at start. Every answer is compared with
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
