//! End-to-end tests: `eddy serve` as a process, with workers that connect, disconnect and are killed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod acts;
mod bombs;
mod copies;
mod eddy;
mod ends;
mod failed;
mod instances;
mod kills;
mod lost_replies;
mod order;
mod poisoned;
#[path = "../../../store/tests/postgres/server.rs"]
#[allow(dead_code, reason = "the tests of the store use more of it")]
mod postgres;
mod proxy;
mod reports;
mod stops;
mod timeline;
mod working;
