//! The API over real connections. Every response that a test gets is compared with `openapi.json`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod again;
mod bounds;
mod claims;
mod client;
mod code_runs;
mod costs;
mod document;
mod gates;
mod given_back;
mod keys;
mod lists;
mod manage;
mod namespaces;
mod openapi;
mod revoked;
mod runs;
mod socket;
mod starts;
mod streams;
mod tasks;
mod test_clock;
mod unique;
mod unknown;
mod values;
mod workers;
