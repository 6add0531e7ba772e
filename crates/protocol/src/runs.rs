//! Runs: starts, headers, steps and acts.

use std::convert::Infallible;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::error::{ApiError, Failure, by_hand};
use crate::{Span, Timestamp, nullable};

/// `POST /v1/flows/{name}/runs`, and an item of `POST /v1/runs/batch`, which also names the flow.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StartRun {
    /// Only in an item of a batch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flow: Option<String>,
    pub input: Value,
    /// A label.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub external_id: Option<String>,
    /// A start with the same key returns the existing run while that is kept; with another input it is a conflict.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idempotency_key: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "nullable")]
    pub tags: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub delay: Option<Span>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deadline: Option<Deadline>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// A small JSON object, stored and returned; at most 16 KiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Map<String, Value>>,
    /// The queue of steps that name none; for a code flow, the queue of its function.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// For a code flow: the retry policy of the whole function.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retry: Option<Value>,
    /// At most one run of the flow is active under this key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unique: Option<Unique>,
    /// The W3C trace that the run is part of: passed to every task and to child runs. It takes precedence over the
    /// header of the same name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
}

/// A key under which at most one run of a flow is active.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unique {
    pub key: String,
    #[serde(default)]
    pub on_conflict: OnConflict,
}

/// What a start does while another run holds its unique key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnConflict {
    /// Return the run that holds the key.
    #[default]
    Return,
    /// Refuse the start.
    Reject,
    /// Cancel the runs that hold the key or wait for it; the new run begins when they have ended.
    Replace,
    /// The new run begins when the runs before it have ended.
    Queue,
}

/// When a run must have ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a duration, such as \"1h\" or a number of milliseconds, or a time in RFC 3339")]
pub enum Deadline {
    /// This long after its start.
    After(Span),
    At(Timestamp),
}

impl From<Span> for Deadline {
    fn from(span: Span) -> Deadline {
        Deadline::After(span)
    }
}

impl From<Duration> for Deadline {
    fn from(duration: Duration) -> Deadline {
        Deadline::After(duration.into())
    }
}

/// For a flag: what is not a duration is passed on as a timestamp for the server to parse.
impl FromStr for Deadline {
    type Err = Infallible;

    fn from_str(text: &str) -> Result<Deadline, Infallible> {
        Ok(Span::from_text(text).map_or_else(|_| Deadline::At(text.to_owned()), Deadline::After))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunStarted {
    pub run_id: String,
    /// A run with the same idempotency key or unique key already existed.
    pub existing: bool,
    /// Things that are legal, but probably a mistake.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// `POST /v1/runs/batch`; the server also accepts a bare list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StartBatch {
    pub runs: Vec<StartRun>,
}

/// The result of each start, in order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BatchStarted {
    pub items: Vec<BatchItem>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum BatchItem {
    Started(RunStarted),
    Refused { error: ApiError },
}

/// A run's header.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunInfo {
    pub run_id: String,
    pub flow: String,
    pub version: String,
    /// `pending`, `running`, `waiting`, `paused`, `completed`, `failed` or `cancelled`.
    pub status: String,
    pub input: Value,
    pub output: Value,
    pub error: Option<Failure>,
    pub created_at: Timestamp,
    pub started_at: Option<Timestamp>,
    pub completed_at: Option<Timestamp>,
    pub step_count: u32,
    pub completed_steps: u32,
    /// Names without duplicates, in the order of their first emit.
    pub emitted_events: Vec<String>,
    /// From its start to its end, once it has ended.
    #[serde(default)]
    pub duration_ms: Option<i64>,
    pub tags: Vec<String>,
    pub external_id: Option<String>,
    #[serde(default)]
    pub idempotency_key: Option<String>,
    #[serde(default)]
    pub namespace: String,
    /// As given at the start, or `null`.
    #[serde(default)]
    pub metadata: Option<Map<String, Value>>,
    /// As given at the start, or `null`.
    #[serde(default)]
    pub queue: Option<String>,
    /// As given at the start, without default values, or `null`.
    #[serde(default)]
    pub retry: Option<Value>,
    /// As given at the start, or `null`.
    #[serde(default)]
    pub unique: Option<Unique>,
    /// When its delay ends or ended.
    #[serde(default)]
    pub delay_until: Option<Timestamp>,
    /// When it must have ended.
    #[serde(default)]
    pub deadline: Option<Timestamp>,
    /// For a code run: the attempts of its function.
    #[serde(default)]
    pub attempts: Vec<AttemptInfo>,
    /// The reason given with its cancel.
    #[serde(default)]
    pub reason: Option<String>,
    /// For a code run: the build of the worker that runs its function. A flow with `builds: pinned` offers it only to
    /// that build, until it is unpinned.
    #[serde(default)]
    pub build: Option<String>,
    pub priority: i32,
    /// The activations that have not ended, with what they wait for.
    pub waiting_for: Vec<WaitingActivation>,
    pub parent: Option<ParentInfo>,
    /// The run that this is a retry or a rerun of.
    pub retry_of: Option<String>,
    /// The run that continues this one.
    pub continued_as: Option<String>,
    /// Its timeline and payloads have been deleted.
    pub trimmed: bool,
}

/// A run in a list: its header without payloads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunSummary {
    pub run_id: String,
    pub flow: String,
    pub version: String,
    pub status: String,
    pub created_at: Timestamp,
    pub started_at: Option<Timestamp>,
    pub completed_at: Option<Timestamp>,
    pub step_count: u32,
    pub completed_steps: u32,
    /// Names without duplicates, in the order of their first emit.
    #[serde(default)]
    pub emitted_events: Vec<String>,
    /// From its start to its end, once it has ended.
    #[serde(default)]
    pub duration_ms: Option<i64>,
    pub tags: Vec<String>,
    pub external_id: Option<String>,
    #[serde(default)]
    pub metadata: Option<Map<String, Value>>,
    pub error: Option<Failure>,
    pub parent: Option<ParentInfo>,
    pub retry_of: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ParentInfo {
    pub run_id: String,
    pub activation: String,
}

/// `waits_for` is an object; its `what` is `delay`, `gate` or `back_off` (each with `until`, if a time is set), `arms`,
/// `worker`, `child`, `inside`, …
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct WaitingActivation {
    pub activation: String,
    pub waits_for: Value,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StepInfo {
    pub activation: String,
    pub step: String,
    /// `worker`, `set`, `fail`, `return`, `group`, `child`, `gate`, `spread` or `repeat`; in a code run `step`, `call`,
    /// `sleep`, `wait`, `child` or `publish`.
    #[serde(default)]
    pub kind: String,
    /// `pending`, `waiting`, `running`, `completed`, `failed`, `skipped` or `cancelled`.
    pub status: String,
    pub attempts: Vec<AttemptInfo>,
    pub input: Value,
    pub output: Value,
    pub error: Option<Failure>,
    pub started_at: Option<Timestamp>,
    pub ended_at: Option<Timestamp>,
    pub waits_for: Option<Value>,
    /// The run that it started.
    #[serde(default)]
    pub child_run_id: Option<String>,
    /// When its next attempt starts.
    #[serde(default)]
    pub retry_at: Option<Timestamp>,
    /// The queue of its tasks.
    #[serde(default)]
    pub queue: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct AttemptInfo {
    pub attempt: u32,
    /// `running`, `completed` or `failed`.
    pub status: String,
    pub worker: Option<String>,
    pub started_at: Option<Timestamp>,
    pub ended_at: Option<Timestamp>,
    pub error: Option<Failure>,
}

/// Replaces a payload that is too large to be shown inline. `GET /v1/runs/{id}/values/{key}` reads it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reference {
    /// `<run>/<key>`
    #[serde(rename = "$value")]
    pub value: String,
    pub bytes: u64,
}

impl Reference {
    /// Parses `value` if it is a reference.
    pub fn read(value: &Value) -> Option<Reference> {
        let reference = Reference::deserialize(value.as_object().filter(|fields| fields.len() == 2).map(|_| value)?);
        reference.ok().filter(|reference| reference.parts().is_some())
    }

    /// The first reference in `value`, at any depth.
    pub fn find(value: &Value) -> Option<Reference> {
        match value {
            Value::Array(items) => items.iter().find_map(Reference::find),
            Value::Object(fields) => Reference::read(value).or_else(|| fields.values().find_map(Reference::find)),
            _ => None,
        }
    }

    /// The run id, and the key of the value in that run.
    pub fn parts(&self) -> Option<(&str, &str)> {
        let (run, key) = self.value.split_once('/')?;
        let is_key = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_digit());
        (run.len() == 36 && is_key).then_some((run, key))
    }
}

/// Returned with 200 when the run has ended, with 202 and only `status` before. For a continued run it describes the
/// last run, and `run_id` is that run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    pub run_id: String,
    pub status: String,
    /// If larger than 2 MiB: a [`Reference`], or a list or object of references.
    #[serde(default)]
    pub output: Value,
    #[serde(default)]
    pub error: Option<Failure>,
}

/// The optional body of `POST /v1/runs/{id}/cancel`.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CancelRun {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// The optional body of `POST /v1/runs/{id}/rerun`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RerunRun {
    /// A top-level step; without it the whole run is repeated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Replaces the old run's input. `null` is an input; leave it out to keep the old one.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "present")]
    pub input: Option<Value>,
}

fn present<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(deserializer).map(Some)
}

/// The response to `retry` and `rerun`: the new run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewRun {
    pub run_id: String,
}

/// The response to `cancel`, `pause`, `resume` and the acts on a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Acted {
    /// For the cancel of a continued run: the last run, which was cancelled.
    pub run_id: String,
    /// The run's status after the act.
    pub status: String,
}

/// The body of `complete` on a step.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CompleteStep {
    #[serde(skip_serializing_if = "Value::is_null")]
    pub output: Value,
}

/// The body of `fail` on a step.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct FailStep {
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "by_hand")]
    pub error: Option<Failure>,
}

/// `DELETE /v1/runs/{id}`: what remains of the run elsewhere.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RunDeleted {
    pub deleted: bool,
    pub run_id: String,
    pub stays: Remains,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Remains {
    /// Events that the run published; they have their own retention.
    pub events: u64,
    /// Descendant runs; each must be deleted by its own id.
    pub children: u64,
    /// Runs that refer to it, as their child or as the run they retry; at most 101 are listed.
    pub referred_to_by: Vec<String>,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_reference_is_told_from_data_that_looks_like_one() {
        let key = "01a1dff7-abb0-74f5-88e2-53de1b9a8247/12";
        let reference = json!({"$value": key, "bytes": 3_000_000});
        let found = Reference::read(&reference);
        assert_eq!(found.as_ref().and_then(Reference::parts), Some((&key[..36], "12")));
        assert_eq!(Reference::find(&json!([1, {"a": reference}])), found);
        for other in [
            json!({"$value": key}),
            json!({"$value": key, "bytes": 1, "more": 1}),
            json!({"$value": "x/1", "bytes": 1}),
            json!({"$value": null, "bytes": 1}),
            json!(["$value", "bytes"]),
        ] {
            assert_eq!(Reference::find(&other), None, "{other}");
        }
    }
}
