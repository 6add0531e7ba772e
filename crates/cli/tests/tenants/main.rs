//! One tenant attacks a server with everything that can be registered and sent. Another tenant must not be slowed down,
//! neither during the attack nor after the server was killed in the middle of it and restarted.
//!
//! These tests measure time, so they run alone (`.config/nextest.toml`).

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
