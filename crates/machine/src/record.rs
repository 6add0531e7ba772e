//! The records of a timeline. The store numbers them and stamps them with its time.

use serde::{Deserialize, Serialize};
use serde_json::Number;

use crate::failure::Failure;
use crate::ids::{ActId, Fence, Millis, RunId};
use eddyline_language::data::Data;

/// A record, not yet numbered by the store.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    #[serde(flatten)]
    pub entry: Entry,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub attempt: Option<Attempt>,
}

impl Record {
    /// Whether it is a log line of this activation.
    pub fn is_log_of(&self, activation: &str) -> bool {
        matches!(&self.entry, Entry::Log { step_key, .. } if step_key == activation)
    }
}

/// The attempt that a record belongs to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Attempt {
    pub number: u32,
    pub fence: Fence,
    pub queue: String,
}

/// A record of a timeline: its number (dense, from 1), the store's time, and the entry.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Numbered {
    pub n: u64,
    pub ts: Millis,
    #[serde(flatten)]
    pub record: Record,
}

/// What happened. The names (`kind`, the fields of `data`) are part of the public contract.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", content = "data", rename_all_fields = "camelCase")]
pub enum Entry {
    #[serde(rename = "flow.start")]
    FlowStart {
        flow_name: String,
        version: String,
        step_count: u32,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        queue: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        delay_ms: Option<Millis>,
        /// It waits for its unique key.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        in_line: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        parent: Option<RunId>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        retry_of: Option<RunId>,
    },
    #[serde(rename = "flow.completed")]
    FlowCompleted {
        output: Data,
        /// Absent in records of older builds. The duration is derived from record times; see [`crate::wire`].
        #[serde(default, skip_serializing_if = "Option::is_none")]
        step_count: Option<u32>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        continued_as: Option<RunId>,
    },
    #[serde(rename = "flow.failed")]
    FlowFailed { error: Failure },
    #[serde(rename = "flow.cancelled")]
    FlowCancelled {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
        /// Failures of undo and `finally`.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        also: Vec<Failure>,
    },
    #[serde(rename = "flow.paused")]
    FlowPaused {},
    #[serde(rename = "flow.resumed")]
    FlowResumed {},
    #[serde(rename = "step.scheduled")]
    StepScheduled {
        step_key: String,
        #[serde(flatten)]
        work: Scheduled,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<Reason>,
    },
    #[serde(rename = "step.completed")]
    StepCompleted {
        step_key: String,
        result: Data,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reused_from: Option<RunId>,
    },
    #[serde(rename = "step.failed")]
    StepFailed { step_key: String, error: Failure },
    #[serde(rename = "step.skipped")]
    StepSkipped {
        step_key: String,
        reason: Skipped,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reused_from: Option<RunId>,
    },
    #[serde(rename = "step.cancelled")]
    StepCancelled { step_key: String },
    #[serde(rename = "step.progress")]
    StepProgress {
        step_key: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        done: Option<Number>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        total: Option<Number>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        msg: Option<String>,
    },
    #[serde(rename = "step.attempt.started")]
    AttemptStarted {
        step_key: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        worker: Option<String>,
    },
    #[serde(rename = "step.attempt.completed")]
    AttemptCompleted {
        step_key: String,
        result: Data,
        /// The function of a code run suspended; it resumes at the next change.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        suspended: bool,
    },
    #[serde(rename = "step.attempt.failed")]
    AttemptFailed { step_key: String, error: Failure },
    #[serde(rename = "step.retry.scheduled")]
    RetryScheduled { step_key: String, reason: Reason, backoff_ms: Millis },
    #[serde(rename = "step.await.scheduled")]
    AwaitScheduled {
        step_key: String,
        reason: GateReason,
        /// The id of the gate, not the secret that opens it.
        token: GateId,
        /// Relative to the record's time.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        for_ms: Option<Millis>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        until_ms: Option<Millis>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        channel: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<String>,
    },
    #[serde(rename = "step.await.triggered")]
    AwaitTriggered { step_key: String, by: TriggeredBy, token: GateId },
    #[serde(rename = "step.await.timeout")]
    AwaitTimeout { step_key: String, token: GateId },
    #[serde(rename = "step.await.cancelled")]
    AwaitCancelled { step_key: String, token: GateId },
    #[serde(rename = "emit")]
    Emit {
        event: String,
        payload: Data,
        /// The activation that emitted it.
        step_key: String,
        /// Not the first of its name in its scope, so without effect.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        repeat: bool,
    },
    #[serde(rename = "runner.log")]
    Log {
        step_key: String,
        level: String,
        /// Empty if it is in `long`.
        msg: String,
        /// A message too long for a record, as a stored value. On the wire it replaces `msg`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        long: Option<Data>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        meta: Option<Data>,
    },
    #[serde(rename = "act")]
    Act {
        act: ActName,
        by: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        step_key: Option<String>,
        /// For a rerun: the step it starts from.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        from: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
}

/// What was scheduled.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "as", rename_all = "lowercase", rename_all_fields = "camelCase")]
pub enum Scheduled {
    Task { handler: String, queue: String },
    Group {},
    Spread { items: u32 },
    Repeat {},
    Round {},
    Child { flow: String, run_id: RunId },
}

/// Why a task is enqueued again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Reason {
    /// An attempt failed.
    Retry,
    /// The worker deferred it; this uses no attempt.
    Deferred,
    /// It was claimed but not delivered; this uses no attempt.
    Released,
    /// A code run resumes because of a change.
    Resumed,
    /// Requested through the API.
    Act,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Skipped {
    /// Its arms can no longer make it ready.
    Arms,
    /// Its `if` was false.
    If,
    /// Its gate timed out, with `on_timeout: skip`.
    Timeout,
    /// Requested through the API.
    Act,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GateReason {
    Time,
    Webhook,
    Event,
    Manual,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TriggeredBy {
    Webhook,
    Event,
    Manual,
    Timeout,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ActName {
    Cancel,
    #[serde(rename = "cancel_gate")]
    CancelGate,
    Pause,
    Resume,
    Complete,
    Fail,
    Skip,
    /// On an activation: start its next attempt now. On a run: this run retries another.
    Retry,
    Rerun,
    /// On a code run: workers of any build may have it.
    Unpin,
}

/// A gate, identified by its run and activation. Public, unlike the secret that opens it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GateId {
    pub run: RunId,
    pub activation: ActId,
}

impl Entry {
    /// The activation it belongs to.
    pub fn step_key(&self) -> Option<&str> {
        use Entry::*;
        match self {
            FlowStart { .. } | FlowCompleted { .. } | FlowFailed { .. } | FlowCancelled { .. } => None,
            FlowPaused {} | FlowResumed {} => None,
            StepScheduled { step_key, .. }
            | StepCompleted { step_key, .. }
            | StepFailed { step_key, .. }
            | StepSkipped { step_key, .. }
            | StepCancelled { step_key }
            | StepProgress { step_key, .. }
            | AttemptStarted { step_key, .. }
            | AttemptCompleted { step_key, .. }
            | AttemptFailed { step_key, .. }
            | RetryScheduled { step_key, .. }
            | AwaitScheduled { step_key, .. }
            | AwaitTriggered { step_key, .. }
            | AwaitTimeout { step_key, .. }
            | AwaitCancelled { step_key, .. }
            | Emit { step_key, .. }
            | Log { step_key, .. } => Some(step_key),
            Act { step_key, .. } => step_key.as_deref(),
        }
    }

    /// Whether it ends the run; nothing follows it.
    pub fn is_terminal(&self) -> bool {
        matches!(self, Entry::FlowCompleted { .. } | Entry::FlowFailed { .. } | Entry::FlowCancelled { .. })
    }
}
