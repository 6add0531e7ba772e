//! Tasks: claimed and reported on.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Number, Value};

use crate::error::Failure;
use crate::strict::{object, objects};
use crate::{Span, Timestamp, nullable};

/// `POST /v1/tasks/claim`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimTasks {
    /// As given at registration. A worker that did not register is taken by this name as well, for its `queues` alone.
    #[serde(deserialize_with = "nullable")]
    pub worker_id: String,
    /// Those of the registration where it is left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
    /// How long to wait for the first task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
    /// A text of the worker's own, of 1 to 200 characters. The same again gets the same tasks again: what to send after a
    /// lost reply.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ClaimedTasks {
    pub tasks: Vec<Task>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskKind {
    Step,
    Run,
}

/// An attempt, handed to a worker.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// New with each attempt.
    pub task_id: String,
    /// Goes with every report.
    pub token: String,
    pub run_id: String,
    pub flow: String,
    pub version: String,
    pub step: String,
    pub activation: String,
    pub handler: String,
    pub attempt: u32,
    pub kind: TaskKind,
    pub input: Value,
    pub run_input: Value,
    /// What opened the gate before this step.
    pub gate: Value,
    /// The same for every attempt: what a handler makes its effects idempotent by.
    pub key: String,
    pub lease_ms: u64,
    pub deadline: Option<Timestamp>,
    /// Of a code run: what it remembers, by name.
    pub memo: Option<Map<String, Value>>,
    pub traceparent: Option<String>,
    /// The flow undoes what its steps did if the run fails or is cancelled: a task that is called off is best finished and
    /// reported on, so that what it did is undone too.
    #[serde(default)]
    pub undo: bool,
}

/// `POST /v1/tasks/report`. The server reads each report for itself, so that a bad one does not sink the others.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportTasks<R = Report> {
    #[serde(default, deserialize_with = "nullable")]
    pub worker_id: String,
    #[serde(default = "Vec::new")]
    pub reports: Vec<R>,
    /// Claims further tasks in the same commit.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "object")]
    pub claim: Option<ClaimMore>,
}

/// A claim that comes with reports.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimMore {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// How long to wait for the first task once the reports are done. Without it, not at all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
}

/// What a worker says of one of its tasks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub task_id: String,
    pub token: String,
    /// Counts per task from 1; a repeat gets its first outcome.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<u32>,
    /// Of a code run: the highest `n` of the memo that was read. News is what comes after it; without it, what came after
    /// the claim.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen: Option<u64>,
    #[serde(flatten)]
    pub op: Op,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Op {
    Complete {
        #[serde(default)]
        output: Value,
        #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "objects")]
        emits: Vec<Emit>,
        #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "objects")]
        logs: Vec<Log>,
    },
    Fail {
        #[serde(default)]
        error: Failure,
        /// Without it the retry policy decides.
        #[serde(default = "yes", deserialize_with = "yes_or_no")]
        retryable: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        retry_after: Option<Span>,
    },
    /// Not now, and no attempt used up.
    Defer {
        #[serde(default, deserialize_with = "nullable")]
        after: Span,
        /// A limit to slow down as well.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limit: Option<String>,
    },
    /// An event of the run, durable and visible at once.
    Emit(Emit),
    /// An event of the namespace.
    Publish {
        name: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<Value>,
        #[serde(default)]
        payload: Value,
    },
    Log(Log),
    Progress {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        done: Option<Number>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        total: Option<Number>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        msg: Option<String>,
    },
    /// Of a code run: a step ran here, and came to `output`, or to `error`.
    Step {
        name: String,
        #[serde(default)]
        output: Value,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<Failure>,
        #[serde(default = "yes", deserialize_with = "yes_or_no")]
        retryable: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        retry_after: Option<Span>,
    },
    /// Of a code run: a step that another worker runs.
    Call {
        name: String,
        handler: String,
        #[serde(default)]
        input: Value,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        queue: Option<String>,
    },
    Sleep {
        name: String,
        #[serde(default, rename = "for", skip_serializing_if = "Option::is_none")]
        span: Option<Span>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        until: Option<Timestamp>,
    },
    /// Of a code run: one of `event` (with `key`), `webhook` and `manual`.
    Wait {
        name: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        event: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<Value>,
        #[serde(default, skip_serializing_if = "is_no", deserialize_with = "nullable")]
        webhook: bool,
        #[serde(default, skip_serializing_if = "is_no", deserialize_with = "nullable")]
        manual: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        timeout: Option<Span>,
    },
    Child {
        name: String,
        flow: String,
        #[serde(default)]
        input: Value,
        #[serde(default, skip_serializing_if = "is_no", deserialize_with = "nullable")]
        detached: bool,
    },
    /// Of a code run: all that is left hangs on others. The task is offered again when there is news beyond `seen`.
    Suspend,
    /// Of a code run: it goes on as a new run.
    Continue {
        #[serde(default)]
        input: Value,
    },
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Emit {
    pub event: String,
    #[serde(default)]
    pub payload: Value,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Log {
    #[serde(default = "info", deserialize_with = "info_or_another")]
    pub level: String,
    pub msg: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub meta: Option<Value>,
}

fn info() -> String {
    "info".to_owned()
}

fn info_or_another<'de, D: Deserializer<'de>>(written: D) -> Result<String, D::Error> {
    Ok(Option::deserialize(written)?.unwrap_or_else(info))
}

fn yes_or_no<'de, D: Deserializer<'de>>(written: D) -> Result<bool, D::Error> {
    Ok(Option::deserialize(written)?.unwrap_or(yes()))
}

fn yes() -> bool {
    true
}

fn is_no(value: &bool) -> bool {
    !*value
}

/// The answer to reports: outcomes in their order.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ReportedTasks {
    pub outcomes: Vec<Outcome>,
    pub tasks: Vec<Task>,
    pub news: News,
}

/// What code runs that the worker has have come to remember, by task and by name.
pub type News = BTreeMap<String, Map<String, Value>>;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub task_id: String,
    pub outcome: Verdict,
    /// It was said before, and this was its outcome.
    #[serde(default, skip_serializing_if = "is_no")]
    pub duplicate: bool,
    /// What is wrong, of an `invalid` one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// It was applied, and something about it is better done otherwise, such as a payload near its limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// Of a code step: `recorded`, `retry` (with `after_ms`) or `failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_ms: Option<u64>,
    /// Of `wait` for a webhook or a person: what opens it, and where.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
}

impl Outcome {
    /// One that has nothing more to say.
    pub fn new(task_id: impl Into<String>, outcome: Verdict) -> Outcome {
        let (message, warning, decision, after_ms, token, url) = (None, None, None, None, None, None);
        Outcome { task_id: task_id.into(), outcome, duplicate: false, message, warning, decision, after_ms, token, url }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Applied,
    /// The fence has moved on: another attempt has the step.
    Stale,
    /// The run has ended.
    Closed,
    /// Something is wrong with the report; the task, if it is known, is still the worker's.
    Invalid,
    /// An earlier report of the same task in the same request was not applied.
    NotTried,
}
