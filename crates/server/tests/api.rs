//! The API over real connections. Every answer that a test gets is compared with `openapi.json`, so that it cannot lie.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "api/bounds.rs"]
mod bounds;
#[path = "api/claims.rs"]
mod claims;
#[path = "api/client.rs"]
mod client;
#[path = "api/disk.rs"]
mod disk;
#[path = "api/document.rs"]
mod document;
#[path = "api/gates.rs"]
mod gates;
#[path = "api/keys.rs"]
mod keys;
#[path = "api/lists.rs"]
mod lists;
#[path = "api/manage.rs"]
mod manage;
#[path = "api/process.rs"]
mod process;
#[path = "api/revoked.rs"]
mod revoked;
#[path = "api/runs.rs"]
mod runs;
#[path = "../../store/tests/shim/mod.rs"]
mod shim;
#[path = "api/socket.rs"]
mod socket;
#[path = "api/starts.rs"]
mod starts;
#[path = "api/streams.rs"]
mod streams;
#[path = "api/tasks.rs"]
mod tasks;
#[path = "api/workers.rs"]
mod workers;
