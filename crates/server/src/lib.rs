//! Eddyline as a server: the HTTP and WebSocket API over an [`eddyline_engine::Engine`], and what `eddy serve` does.
//!
//! Everything is said in one table, [`routes`]: it builds the router, decides who may call what, and is what the tests
//! and `openapi.json` are compared with.

mod api;
mod serve;

pub use api::flows::analysis;
pub use api::routes::{Access, Route, routes};
pub use serve::{KeysMode, ServeArgs, Server, Size, StartError, logs, serve, start};
