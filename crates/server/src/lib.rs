//! Eddyline's server: the HTTP and WebSocket API on top of an [`eddyline_engine::Engine`], and `eddy serve`.
//!
//! One table, [`routes`], builds the router and decides who may call what; tests compare it with `openapi.json`.

mod api;
mod serve;

pub use api::flows::analysis;
pub use api::routes::{Access, Route, routes};
pub use serve::{KeysMode, ServeArgs, Server, Size, StartError, StoreUrl, logs, serve, start};
