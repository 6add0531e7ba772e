//! Flows seen through to their end by the real server, `eddy serve`, as a process, with workers that come and go.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "e2e/acts.rs"]
mod acts;
#[path = "e2e/bombs.rs"]
mod bombs;
#[path = "e2e/eddy.rs"]
mod eddy;
#[path = "e2e/ends.rs"]
mod ends;
#[path = "e2e/failed.rs"]
mod failed;
#[path = "e2e/kills.rs"]
mod kills;
#[path = "e2e/lost_replies.rs"]
mod lost_replies;
#[path = "e2e/order.rs"]
mod order;
#[path = "e2e/poisoned.rs"]
mod poisoned;
#[path = "e2e/proxy.rs"]
mod proxy;
#[path = "e2e/reports.rs"]
mod reports;
#[path = "e2e/stops.rs"]
mod stops;
#[path = "e2e/timeline.rs"]
mod timeline;
#[path = "e2e/working.rs"]
mod working;
