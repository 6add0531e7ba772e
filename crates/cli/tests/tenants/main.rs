//! One tenant attacks a server with everything that can be registered and sent; another one works beside it and must not
//! feel it: not while the attack goes on, and not after the server was killed in the middle of it and started again.
//!
//! What is measured is time, so these tests want the machine for themselves (`.config/nextest.toml`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod aggregates;
mod bodies;
mod children;
#[path = "../e2e/eddy.rs"]
#[allow(dead_code, reason = "shared with the tests that kill and restart it")]
mod eddy;
mod expressions;
mod large_runs;
mod memory;
#[allow(dead_code, reason = "shared with the random definitions")]
mod rig;
mod schemas;
mod stored_values;
mod tenant;
#[allow(dead_code, reason = "shared with the random definitions")]
mod watch;
