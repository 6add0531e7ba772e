//! Clients that mean harm, or know no better. While they are at it, somebody else is served as if they were not there, and
//! the server's memory stays within a bound.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "abuse/bodies.rs"]
mod bodies;
#[path = "abuse/bystander.rs"]
mod bystander;
#[path = "abuse/crowd.rs"]
mod crowd;
#[path = "e2e/eddy.rs"]
#[allow(dead_code, reason = "shared with the tests that kill and restart it")]
mod eddy;
#[path = "abuse/garbage.rs"]
mod garbage;
#[path = "abuse/large.rs"]
mod large;
#[path = "abuse/raw.rs"]
mod raw;
#[path = "abuse/slow.rs"]
mod slow;
#[path = "abuse/sockets.rs"]
mod sockets;
