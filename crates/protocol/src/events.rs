//! Events and gates.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::Timestamp;

/// An event to publish to the namespace.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct PublishEvent {
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<Value>,
    #[serde(default)]
    pub payload: Value,
    /// Publishing the same id again has no effect.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
}

/// The result of publishing events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// How many events the request contained.
    pub published: usize,
    /// How many of them had already been published under the same id; those are unchanged.
    #[serde(default, skip_serializing_if = "is_none")]
    pub existing: u32,
    /// Their ids, in the order of the request.
    #[serde(default)]
    pub ids: Vec<String>,
}

/// `GET /v1/events/{id}`: an event and its effects.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventInfo {
    pub id: String,
    pub name: String,
    pub key: Option<Value>,
    pub published_at: Timestamp,
    /// All gates and triggers have received it.
    pub delivered: bool,
    /// Gates that it opened; each is counted when its run has received the event.
    pub gates_opened: u64,
    pub runs_started: u64,
}

fn is_none(count: &u32) -> bool {
    *count == 0
}

/// An open gate. `token` and `url` are shown to scope `signal` only, and only webhook and manual gates have them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GateInfo {
    pub gate_id: String,
    pub token: Option<String>,
    pub url: Option<String>,
    pub run_id: String,
    pub activation: String,
    /// `time`, `webhook`, `event` or `manual`.
    pub reason: String,
    /// For an event gate: the name of the event.
    #[serde(default)]
    pub event: Option<String>,
    /// For an event gate: the key that the event must have; `null` for any.
    #[serde(default)]
    pub key: Value,
    pub deadline: Option<Timestamp>,
}
