//! What Eddyline's server, workers and clients say to each other: JSON over HTTP, and the same messages over a WebSocket.
//!
//! Types only. Unknown fields are ignored and absent ones have a meaning, so that old and new parties understand each
//! other; a change that they could not bear goes into another [`VERSION`].

mod error;
mod events;
mod flows;
mod manage;
mod runs;
mod socket;
mod span;
mod tasks;
mod workers;

pub use error::*;
pub use events::*;
pub use flows::*;
pub use manage::*;
pub use runs::*;
pub use socket::*;
pub use span::{NotASpan, Span};
pub use tasks::*;
pub use workers::*;

use serde::{Deserialize, Serialize};

/// The version of what is said here; `/v1` of every path.
pub const VERSION: u32 = 1;
/// The namespace of a request where keys are off.
pub const NAMESPACE_HEADER: &str = "eddyline-namespace";

/// A moment, RFC 3339 in UTC with milliseconds: `2026-01-02T03:04:05.678Z`.
pub type Timestamp = String;

/// A part of a list. `next` goes into `cursor` of the next request (of streams: into `after`); a short page with a `next`
/// is not the last one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Page<T> {
    pub items: Vec<T>,
    pub next: Option<String>,
    /// How many there are in all, with `?count=true`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
}
