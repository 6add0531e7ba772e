//! Code flows: workflows that are written as an ordinary async function and survive restarts, because what they ask
//! their context for is remembered by name.
//!
//! The rule that makes every combinator of futures work: whenever the function cannot move by itself (an idle point), the
//! driver delivers the known result with the lowest number, alone, and polls again. Only when there is nothing left to
//! deliver does it start what was asked for. So results arrive in the order of their numbers, live and replayed.

mod core;
mod ctx;
pub(crate) mod driver;
mod entries;
mod error;
mod flow;
mod map;
pub(crate) mod memo;
mod name;
pub(crate) mod probe;
mod retry;
mod state;
mod step;
pub(crate) mod time;
mod undo;

use serde::de::DeserializeOwned;
use serde_json::Value;

pub use ctx::RunCtx;
pub use entries::{Call, Child, Gate, Inbox, OrNone, Publish, Receive, Sleep, Spawn, Wait, Webhook};
pub use error::{ChildFailed, CtxError, FlowError, StepFailed};
pub use flow::FlowOptions;
pub(crate) use flow::{CodeFlow, erase};
pub use map::{Map, Settled};
pub use name::Name;
pub use retry::Retry;
pub use step::{Attempt, Bare, OfItem, Step, With};

/// A recorded value as the type that the code expects.
fn decode<T: DeserializeOwned>(name: &str, value: Value) -> Result<T, CtxError> {
    serde_json::from_value(value)
        .map_err(|error| CtxError::Decode { name: name.to_owned(), problem: error.to_string() })
}
