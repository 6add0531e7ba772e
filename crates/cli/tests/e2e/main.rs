//! End-to-end tests: `eddy serve` as a process, with workers that connect, disconnect and are killed.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod acts;
mod bombs;
mod eddy;
mod ends;
mod failed;
mod kills;
mod lost_replies;
mod order;
mod poisoned;
mod proxy;
mod reports;
mod stops;
mod timeline;
mod working;
