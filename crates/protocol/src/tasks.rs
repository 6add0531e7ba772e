//! Tasks: claims and reports.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Number, Value};

use crate::code::{CallOptions, ChildOptions, Unwinding};
use crate::error::Failure;
use crate::strict::{object, objects};
use crate::{Span, Timestamp, nullable};

/// `POST /v1/tasks/claim`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimTasks {
    /// From the registration. An unregistered worker can use any name, and then claims from `queues` only.
    #[serde(deserialize_with = "nullable")]
    pub worker_id: String,
    /// Defaults to the queues of the registration.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
    /// How long to wait for the first task.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
    /// Chosen by the worker, 1 to 200 characters. Repeating a claim with the same id returns the same tasks: use it
    /// after a lost response.
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

/// An attempt that a worker has claimed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Task {
    /// New with each attempt.
    pub task_id: String,
    /// Required in every report.
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
    /// The same for every attempt: use it as the idempotency key of side effects. It is `<intent>/<name>`.
    pub key: String,
    /// The id of the run, or for a retry that of the run that it retries. The idempotency key of a step of a code run
    /// is `<intent>/<name>`.
    #[serde(default)]
    pub intent: String,
    pub lease_ms: u64,
    pub deadline: Option<Timestamp>,
    /// When the run began; the time that a code run's function starts with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Timestamp>,
    /// How many attempts the retry policy allows in all; none if it sets no limit. The last attempt of a function is
    /// the one whose `attempt` is this number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempts: Option<u32>,
    /// For a code run: its memo, by name. See [`crate::MemoEntry`].
    pub memo: Option<Map<String, Value>>,
    /// For a code run: `memo` is not all of it. Read the rest with `GET /v1/tasks/{id}/memo?after=` this number, before
    /// anything else; an entry of a later page replaces one of the same name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memo_next: Option<u64>,
    /// For a code run in its last phase: only steps named `undo:…` and one `fail` are accepted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unwind: Option<Unwinding>,
    pub traceparent: Option<String>,
    /// The flow undoes its steps if the run fails or is cancelled. If this task is cancelled, the worker should still
    /// finish and report it, so that its effects are undone too.
    #[serde(default)]
    pub undo: bool,
}

/// `POST /v1/tasks/report`. The server parses each report separately, so that an invalid one does not affect the
/// others.
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

/// A claim sent with reports.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ClaimMore {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<Vec<String>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
    /// How long to wait for the first task after the reports are committed. Defaults to no wait.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wait_ms: Option<u64>,
}

/// A report on one task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub task_id: String,
    pub token: String,
    /// Counts per task from 1; a repeated report gets its first outcome.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seq: Option<u32>,
    /// For a code run: the highest memo `n` that the worker has read; only later entries are sent as news. Defaults to
    /// that of the claim.
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
        /// If false, the attempt is not retried; otherwise the retry policy decides.
        #[serde(default = "yes", deserialize_with = "yes_or_no")]
        retryable: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        retry_after: Option<Span>,
    },
    /// Return the task to its queue without using up an attempt.
    Defer {
        #[serde(default, deserialize_with = "nullable")]
        after: Span,
        /// A limit to slow down as well.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        limit: Option<String>,
    },
    /// An event in the run, durable and visible immediately.
    Emit(Emit),
    /// Return the task at once, without using up an attempt: the worker stops or is replaced.
    Release,
    /// An event in the namespace.
    Publish {
        name: String,
        /// For a code run: the name under which the event is remembered, so that a replay does not publish it again.
        #[serde(default, rename = "as", skip_serializing_if = "Option::is_none")]
        as_name: Option<String>,
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
    /// For a code run: the result of a step that ran in this worker.
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
        /// The retry policy of this step, as in a definition; defaults to the flow's `step_retry`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        retry: Option<Value>,
        /// The function has a way to undo it: a step `undo:<name>`, run while the run unwinds.
        #[serde(default, skip_serializing_if = "is_no", deserialize_with = "nullable")]
        undo: bool,
    },
    /// For a code run: a step that another worker runs.
    Call {
        name: String,
        handler: String,
        #[serde(default)]
        input: Value,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        queue: Option<String>,
        #[serde(flatten)]
        options: CallOptions,
    },
    Sleep {
        name: String,
        #[serde(default, rename = "for", skip_serializing_if = "Option::is_none")]
        span: Option<Span>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        until: Option<Timestamp>,
    },
    /// For a code run: one of `event` (with `key`), `webhook` and `manual`.
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
        /// For an event: how far back it looks, `"run"` (the default: since the start of the run) or a duration.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        since: Option<Since>,
    },
    Child {
        name: String,
        flow: String,
        #[serde(default)]
        input: Value,
        #[serde(default, skip_serializing_if = "is_no", deserialize_with = "nullable")]
        detached: bool,
        #[serde(flatten)]
        options: ChildOptions,
    },
    /// For a code run: this call, sleep, wait, child or retry is no longer needed; it ends cancelled.
    LetGo {
        name: String,
    },
    /// For a code run: the function has failed for good, or was cancelled. The run enters its last phase; only steps
    /// named `undo:…` and one `fail` are accepted from here.
    Unwind {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<Failure>,
    },
    /// For a code run: the function waits for other work only. The task is offered again when there is news beyond
    /// `seen`.
    Suspend,
    /// For a code run: continue as a new run.
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

/// The response to reports, with outcomes in their order.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ReportedTasks {
    pub outcomes: Vec<ReportOutcome>,
    pub tasks: Vec<Task>,
    pub news: News,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub news_next: NewsNext,
}

/// New memo entries of code runs that the worker holds, by task and name. See [`crate::MemoEntry`].
pub type News = BTreeMap<String, Map<String, Value>>;

/// By task, where the news goes on that did not fit: read `GET /v1/tasks/{id}/memo?after=` this number before entries
/// with higher numbers are used.
pub type NewsNext = BTreeMap<String, u64>;

/// How far back a wait for an event looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected \"run\" or a duration such as \"10m\"")]
pub enum Since {
    Run(SinceRun),
    Ago(Span),
}

/// The word `run`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SinceRun {
    Run,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReportOutcome {
    pub task_id: String,
    pub outcome: Verdict,
    /// The report was received before; this is its first outcome.
    #[serde(default, skip_serializing_if = "is_no")]
    pub duplicate: bool,
    /// What is wrong with an `invalid` report.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// The report was applied, but something about it should change, such as a payload near its limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// For a step of a code run: `recorded`, `retry` (with `after_ms`) or `failed`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decision: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub after_ms: Option<u64>,
    /// For `wait` on a webhook or a person: the token and URL that open it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub token: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub url: Option<String>,
    /// For an entry of a code run: the number of its latest change. The response has all news below it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n: Option<u64>,
    /// For an entry of a code run: the store's time of that change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub at: Option<Timestamp>,
}

impl ReportOutcome {
    /// An outcome without details.
    pub fn new(task_id: impl Into<String>, outcome: Verdict) -> ReportOutcome {
        let (message, warning, decision, after_ms, token, url) = (None, None, None, None, None, None);
        ReportOutcome {
            task_id: task_id.into(),
            outcome,
            duplicate: false,
            message,
            warning,
            decision,
            after_ms,
            token,
            url,
            n: None,
            at: None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    Applied,
    /// The fence has moved on: another attempt is in progress.
    Stale,
    /// The run has ended.
    Closed,
    /// The report is wrong; the task, if known, still belongs to the worker.
    Invalid,
    /// An earlier report of the same task in the same request was not applied.
    NotTried,
}
