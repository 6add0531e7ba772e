//! Code runs: the entries of a memo, and the options with which a function asks for them.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::Failure;
use crate::runs::{Deadline, Unique};
use crate::strict::object;
use crate::{Span, Timestamp, nullable};

/// An entry of a memo, as sent in `memo` and `news`. Every change of an entry gives it a new number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MemoEntry {
    pub kind: EntryKind,
    /// The number of its latest change: the order in which the function sees results, live and replayed.
    pub n: u64,
    /// The store's time of that change. It never decreases as `n` grows.
    #[serde(default)]
    pub at: Timestamp,
    #[serde(default)]
    pub attempt: u32,
    pub status: EntryStatus,
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub output: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Failure>,
    /// Of a step to be retried: whether its back-off is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub due: Option<bool>,
    /// Of a completed step: it was reported with `undo`.
    #[serde(default, skip_serializing_if = "is_no")]
    pub undo: bool,
    /// Of a pending wait for a webhook or a person: what opens it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryKind {
    Step,
    Call,
    Sleep,
    Wait,
    Child,
    /// An event that the function published with `as`.
    Publish,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EntryStatus {
    Pending,
    /// A step that its function retries once `due`.
    Retry,
    Completed,
    Failed,
    /// Let go, or cancelled because the run unwinds.
    Cancelled,
    /// Taken over from an earlier run, where it was skipped.
    Skipped,
}

/// The last phase of a code run: its function only undoes steps, then fails.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Unwinding {
    /// The error that the run will end with; none if it was cancelled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Failure>,
    /// The reason given with the cancel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// When the run ends even if the function has not finished; none if nothing limits it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub until: Option<Timestamp>,
}

/// How a `call` is run, as in the definition of a step. Without `retry`, the flow's `step_retry` applies.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CallOptions {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry: Option<Value>,
    /// For one attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout: Option<Span>,
    /// Until a worker takes it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_timeout: Option<Span>,
    /// Added to the run's priority.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// Names of limits, or `{name: key}`, with any JSON value as the key.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "nullable")]
    pub limits: Vec<Value>,
    /// Labels that the worker must have.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "nullable")]
    pub requires: Vec<String>,
    /// Calls on one queue are served in turn by this key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<Value>,
}

/// How a child run is started, as in `POST /v1/flows/{name}/runs`. Without `priority`, it has that of its parent.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ChildOptions {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub external_id: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "nullable")]
    pub tags: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Map<String, Value>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delay: Option<Span>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Deadline>,
    /// The retry policy of the child's function, if it is a code flow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "object")]
    pub unique: Option<Unique>,
}

fn is_no(value: &bool) -> bool {
    !*value
}
