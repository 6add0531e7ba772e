//! Malicious or broken clients. Meanwhile other clients must be served as usual, and the server's memory must stay
//! within a bound.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod bodies;
mod bystander;
mod crowd;
#[path = "../e2e/eddy.rs"]
#[allow(dead_code, reason = "shared with the tests that kill and restart it")]
mod eddy;
mod garbage;
mod large;
mod raw;
mod slow;
mod sockets;
