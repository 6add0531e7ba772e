//! Several `eddy serve` on one PostgreSQL server of this test's own: undisturbed, and while instances, connections and
//! the server are killed, stopped and cut.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod api;
mod balancer;
mod calm;
mod cluster;
mod cutter;
mod database;
mod disturb;
#[path = "../e2e/eddy.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod eddy;
mod flows;
mod hands;
mod health;
mod ledger;
#[path = "../e2e/proxy.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod proxy;
mod storm;
#[path = "../e2e/timeline.rs"]
mod timeline;
mod verify;
#[path = "../e2e/working.rs"]
#[allow(dead_code, reason = "other tests use more of it")]
mod working;
mod workload;
