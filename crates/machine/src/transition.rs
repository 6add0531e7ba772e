//! The inputs of `decide` and its result: one atomic commit.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Number;

use crate::decide::child::child_id;
use crate::failure::Failure;
use crate::ids::{ActId, Fence, Millis, RunId, ValueId, Version};
use crate::record::{Attempt, Entry, GateId, GateReason, Record, TriggeredBy};
use crate::run::{Activation, Emitted, Header, MemoKind, Parent, Phase, Reused, is_default};
use eddyline_language::data::Data;
use eddyline_language::flow::{Retry, Since};

/// One thing that happens to a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Input {
    Start(Box<Start>),
    /// Values that a retry or a rerun takes over, beyond those it started with.
    TakeOver {
        values: Vec<(ValueId, Data)>,
        /// More will follow.
        more: bool,
    },
    Report(Report),
    /// A task expired, by the store's clock.
    Expired {
        task: TaskRef,
        why: Expiry,
        claim: Claim,
    },
    /// A claimed task could not be delivered to its worker.
    Undelivered {
        task: TaskRef,
        claim: Claim,
        /// The reason, for people.
        why: String,
    },
    /// A timer is due.
    Due(TimerKey),
    /// A timer that the run waits for was lost: set it again, for its original time.
    Rearm {
        timer: TimerKey,
        due: Due,
    },
    OpenGate {
        activation: ActId,
        by: OpenedBy,
        payload: Data,
    },
    CancelGate {
        activation: ActId,
        by: String,
    },
    /// A detached child has started.
    ChildStarted {
        activation: ActId,
        child: RunId,
    },
    ChildEnded {
        activation: ActId,
        child: RunId,
        end: ChildEnd,
    },
    Cancel {
        by: String,
        reason: Option<String>,
    },
    Pause {
        by: String,
    },
    Resume {
        by: String,
    },
    /// A code run may be given to workers of any build.
    Unpin {
        by: String,
        /// The function's task, if no worker has it. The engine adds the fact.
        #[serde(default)]
        unclaimed: Option<Fence>,
    },
    /// An act on one activation, by its public name.
    Act {
        activation: String,
        by: String,
        act: StepAct,
    },
    /// Continue with the work that one transition left over.
    Continue,
    /// The run is now the first in the line for its unique key.
    Turn,
    /// Which of the closed tasks no worker has. An ending run sends this to itself; the engine adds the facts, which
    /// stay true because closed tasks cannot be claimed.
    Drain {
        #[serde(default)]
        unclaimed: Vec<Fence>,
    },
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Start {
    pub input: Option<Data>,
    pub external_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idempotency_key: Option<String>,
    /// A small JSON object, stored and returned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Data>,
    /// The queue of steps that name none, or of a code flow's function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// Only one run of the flow is active under this key at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unique: Option<Unique>,
    /// It waits for [`Input::Turn`] before it begins.
    #[serde(default, skip_serializing_if = "is_default")]
    pub in_line: bool,
    pub tags: Vec<String>,
    pub priority: i32,
    pub delay_ms: Option<Millis>,
    pub deadline_ms: Option<Millis>,
    pub parent: Option<Parent>,
    /// For a detached run: the activation that completes when this run has started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_by: Option<Parent>,
    /// For a child, attached or detached: the phase in which its parent requested it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub asked_in: Phase,
    /// The root of its tree of child runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<RunId>,
    pub depth: u32,
    /// For a code flow: the retry policy of the whole function.
    pub retry: Option<Retry>,
    pub retry_of: Option<RunId>,
    /// The run whose idempotency keys its handlers get: for a retry, the run it retries. See [`Header::key_run`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_run: Option<RunId>,
    /// For a retry or a rerun: who requested it.
    pub again: Option<Again>,
    /// What a retry or a rerun takes over from `retry_of`. References in it, and in its input, are to values of that
    /// run, which keep their ids in this one.
    pub reuse: Vec<Reused>,
    /// For a retry or a rerun: the referenced values of `retry_of`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<(ValueId, Data)>,
    /// More values follow as [`Input::TakeOver`]; the run does not begin before it has all.
    #[serde(default, skip_serializing_if = "is_default")]
    pub more_values: bool,
    /// The first free value id.
    #[serde(default, skip_serializing_if = "is_default")]
    pub next_value: u32,
    /// For a continued run: the events its predecessor consumed.
    pub cursors: BTreeMap<String, u64>,
    /// For a continued run: events since this time count.
    pub events_since: Option<Millis>,
    /// The trace that it belongs to, in W3C format.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
}

impl Start {
    /// The activation that requested the run and waits for it; for a detached run, only until it has started.
    pub fn asked_by(&self) -> Option<Parent> {
        self.parent.or(self.started_by)
    }

    /// The message to the waiting activation if the run cannot be started.
    pub fn refused(&self, run: RunId, failure: Failure) -> Option<Message> {
        let waits = self.asked_by()?;
        let (activation, end) = (waits.activation, ChildEnd::Refused(failure));
        // A continued run is still the child that its parent started.
        let child = child_id(waits.run, activation);
        let body = MessageBody::Input(Box::new(Input::ChildEnded { activation, child, end }));
        Some(Message { to: waits.run, id: format!("refused:{run}"), body })
    }
}

/// A key under which only one run of a flow is active at a time, and what happens to a start while another run holds
/// it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unique {
    pub key: String,
    pub on_conflict: OnConflict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnConflict {
    /// Return the run that holds the key.
    Return,
    Reject,
    /// Cancel every run that holds the key or waits for it; the new run begins when they have ended.
    Replace,
    /// The new run waits until all runs before it have ended.
    Queue,
}

/// How an ended run is run again, and who requested it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Again {
    Retry {
        by: String,
    },
    Rerun {
        by: String,
        /// The step to rerun from; none for the start.
        from: Option<String>,
    },
}

/// A task, as named by a worker. The engine checks the token that binds these fields.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskRef {
    pub activation: ActId,
    pub fence: Fence,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Report {
    pub task: TaskRef,
    pub seq: Option<u32>,
    pub op: Op,
    pub claim: Claim,
}

/// What is known of a task's claim when a report or an expiry arrives.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Claim {
    pub build: Option<String>,
    /// For a code run: the latest change in the memo that the worker received.
    pub memo: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Op {
    Complete {
        output: Data,
        emits: Vec<(String, Data)>,
        logs: Vec<Log>,
    },
    Fail {
        error: Failure,
        retryable: bool,
        retry_after_ms: Option<Millis>,
    },
    Defer {
        after_ms: Millis,
        limit: Option<String>,
    },
    /// Back to its queue at once, without using up an attempt.
    Release,
    Emit {
        event: String,
        payload: Data,
    },
    /// In a code run, `as_name` is the name of the memo entry that keeps a replay from publishing again.
    Publish {
        name: String,
        as_name: Option<String>,
        key: Option<Data>,
        payload: Data,
    },
    Log(Log),
    Progress {
        done: Option<Number>,
        total: Option<Number>,
        msg: Option<String>,
    },
    Code {
        name: String,
        op: CodeOp,
    },
    /// The result of this memo entry is no longer needed.
    LetGo {
        name: String,
    },
    /// The function has failed for the last time, or reacts to a cancel: from now on it only runs undo steps.
    Unwind {
        error: Failure,
    },
    Suspend {
        seen: Option<u64>,
    },
    ContinueAs {
        input: Data,
    },
}

/// A report of a code run's function on a named step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum CodeOp {
    Done { output: Data, undo: bool },
    Failed { error: Failure, retryable: bool, retry_after_ms: Option<Millis>, retry: Option<Retry> },
    Call { handler: String, input: Data, queue: Option<String>, options: Option<Box<CallOptions>> },
    Sleep { due: Due },
    Wait { wait: CodeWait, timeout_ms: Option<Millis> },
    Child { flow: String, input: Data, detached: bool, options: Option<Box<ChildOptions>> },
}

/// How a call of a code run is run.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CallOptions {
    /// Defaults to the flow's `step_retry`.
    #[serde(skip_serializing_if = "is_default")]
    pub retry: Option<Retry>,
    #[serde(skip_serializing_if = "is_default")]
    pub timeout_ms: Option<Millis>,
    #[serde(skip_serializing_if = "is_default")]
    pub start_timeout_ms: Option<Millis>,
    /// Added to the run's priority.
    #[serde(skip_serializing_if = "is_default")]
    pub priority: i32,
    /// Names of limits, each with its key, if any, as canonical JSON.
    #[serde(skip_serializing_if = "is_default")]
    pub limits: Vec<(String, Option<String>)>,
    #[serde(skip_serializing_if = "is_default")]
    pub requires: Vec<String>,
    /// As canonical JSON.
    #[serde(skip_serializing_if = "is_default")]
    pub key: Option<String>,
}

/// How a child of a code run is started.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ChildOptions {
    pub external_id: Option<String>,
    pub tags: Vec<String>,
    pub metadata: Option<Data>,
    pub queue: Option<String>,
    pub priority: Option<i32>,
    pub delay_ms: Option<Millis>,
    pub deadline_ms: Option<Millis>,
    pub retry: Option<Retry>,
    pub unique: Option<Unique>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum CodeWait {
    Event { name: String, key: Option<Data>, since: Since },
    Webhook,
    Manual,
}

impl CodeOp {
    pub fn kind(&self) -> MemoKind {
        match self {
            CodeOp::Done { .. } | CodeOp::Failed { .. } => MemoKind::Step,
            CodeOp::Call { .. } => MemoKind::Call,
            CodeOp::Sleep { .. } => MemoKind::Sleep,
            CodeOp::Wait { .. } => MemoKind::Wait,
            CodeOp::Child { .. } => MemoKind::Child,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Log {
    pub level: String,
    pub msg: String,
    pub meta: Option<Data>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Expiry {
    LeaseLost,
    /// The attempt's `timeout`.
    Timeout,
    /// No worker claimed it within `start_timeout`.
    StartTimeout,
    /// Claimed, but not delivered.
    Released,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum OpenedBy {
    Webhook,
    Manual,
    /// The event's position among the events of the namespace.
    Event {
        position: u64,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ChildEnd {
    Completed(Data),
    Failed(Failure),
    Cancelled,
    /// It was never started.
    Refused(Failure),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum StepAct {
    Complete { output: Data },
    Fail { error: Failure },
    Skip,
    Retry,
}

/// A timer of a run; setting it again replaces it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct TimerKey {
    pub activation: ActId,
    pub kind: TimerKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum TimerKind {
    /// A run's delay is over.
    Delay,
    /// A run's deadline has passed.
    Deadline,
    /// A gate opens by time, or times out.
    Gate,
    /// The next attempt, after the one with this fence.
    BackOff(Fence),
    /// `finally` took too long.
    Finally,
}

/// When something is due: relative to the commit, by the store's clock, or at a wall-clock time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Due {
    After(Millis),
    At(Millis),
}

/// The result of an input.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// Applied. Details are set for code steps.
    Applied(ReportResult),
    /// A repeated report; this was its first answer.
    Duplicate(ReportResult),
    /// The fence is not current any more.
    Stale,
    /// The run has ended, or this can no longer matter to it.
    Closed,
    /// The input is invalid, for this reason; nothing changed.
    Invalid(String),
    /// Not possible in the current state; nothing changed.
    Conflict(String),
    /// There was nothing to do.
    Nothing,
}

/// Details of an applied report.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ReportResult {
    pub decision: Option<Decision>,
    /// The secret that opens the gate of a code run.
    pub token: Option<String>,
    /// For a code step: the name was known, and this is its current result.
    pub known: bool,
    /// For a memo entry: the number of its latest change, and its time.
    pub n: Option<u64>,
    pub at: Option<Millis>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Decision {
    Recorded,
    Retry { after_ms: Millis },
    Failed,
}

/// One atomic commit: nothing else changes a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Transition {
    /// The version it was decided on; at any other version the commit is rejected.
    pub base: Version,
    pub header: Header,
    /// Changed and new ones, by number.
    pub activations: Vec<Activation>,
    pub emitted: Vec<((ActId, u32), Emitted)>,
    pub values: Vec<(ValueId, Data)>,
    pub reuse: Vec<Reused>,
    pub reuse_done: Vec<String>,
    /// See [`crate::Run::cursors`].
    pub cursors: Vec<(String, u64)>,
    pub tasks: Vec<TaskChange>,
    pub gates: Vec<GateChange>,
    pub timers: Vec<TimerChange>,
    pub messages: Vec<Message>,
    pub publishes: Vec<Publish>,
    /// The positions of consumed events, one for each gate opened.
    pub events_taken: Vec<u64>,
    /// Limits that a worker asked to close, and for how long.
    pub slow_limits: Vec<(String, Millis)>,
    pub records: Vec<Record>,
    /// One per consumed input.
    pub answers: Vec<Answer>,
}

impl Transition {
    /// Whether there is nothing to commit: the inputs were rejected, repeated or without effect.
    pub fn is_empty(&self) -> bool {
        self.header.version == self.base
    }

    /// The number of inputs consumed; the rest are for the next transition.
    pub fn taken(&self) -> usize {
        self.answers.len()
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum TaskChange {
    Add(Box<Task>),
    /// No longer claimable; if a worker has it, its report is still accepted.
    Close(Fence),
    Remove(Fence),
}

/// An attempt offered to workers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Task {
    pub fence: Fence,
    pub activation: ActId,
    /// Its public name.
    pub name: String,
    /// The step's name in the definition; for a code run's function, the flow's name.
    pub step: String,
    pub handler: String,
    pub queue: String,
    pub kind: TaskKind,
    pub attempt: u32,
    pub input: Data,
    #[serde(default, skip_serializing_if = "is_default")]
    pub gate: Option<Data>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub priority: i32,
    /// Names of limits, each with its key, if any, as canonical JSON.
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: Vec<(String, Option<String>)>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub requires: Vec<String>,
    /// Tasks of a queue are served round-robin by this key (canonical JSON).
    #[serde(default, skip_serializing_if = "is_default")]
    pub key: Option<String>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub timeout_ms: Option<Millis>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub start_timeout_ms: Option<Millis>,
    /// Only workers of this build can claim it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub build: Option<String>,
    /// How many attempts its retry policy allows; none if it sets no limit.
    #[serde(default, skip_serializing_if = "is_default")]
    pub attempts: Option<u32>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskKind {
    Step,
    Run,
}

impl Task {
    /// The record of its claim, which the store appends when a worker claims it.
    pub fn started(&self, worker: Option<String>) -> Record {
        Record {
            entry: Entry::AttemptStarted { step_key: self.name.clone(), worker },
            attempt: Some(Attempt { number: self.attempt, fence: self.fence, queue: self.queue.clone() }),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum GateChange {
    /// Makes its token known; it is not listed before its activation arrives.
    Add { id: GateId, token: String },
    /// Its activation has arrived.
    Arrive(Box<GateArrival>),
    /// No longer listed; its token still resolves, so that a late opening is answered with the reason.
    Close { id: GateId },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GateArrival {
    pub id: GateId,
    pub name: String,
    pub token: Option<String>,
    pub reason: GateReason,
    pub event: Option<EventWait>,
    /// Its timeout; for a time gate, the time until it opens.
    pub timeout_ms: Option<Millis>,
}

/// What an event gate waits for. It considers events since `since` (a time, or a duration before the commit) and after
/// position `after`, oldest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct EventWait {
    pub name: String,
    /// As canonical JSON.
    pub key: Option<String>,
    pub since: Due,
    pub after: Option<u64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TimerChange {
    Set { key: TimerKey, due: Due },
    Clear(TimerKey),
}

/// A message from one run to another or to itself: written in the sender's commit, consumed in the target's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    pub to: RunId,
    /// Unique for the target, so that a message is consumed once.
    pub id: String,
    pub body: MessageBody,
}

impl Message {
    /// Tells a waiting run that it is now the first in line. Delivered once.
    pub fn turn(to: RunId) -> Message {
        Message { to, id: "turn".to_owned(), body: MessageBody::Input(Box::new(Input::Turn)) }
    }

    /// Cancels a run that holds a unique key or waits for it, because `by` replaces it.
    pub fn replaced(to: RunId, by: RunId, cancel: Input) -> Message {
        Message { to, id: format!("replaced:{by}"), body: MessageBody::Input(Box::new(cancel)) }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum MessageBody {
    /// Start the target run. References are to values of the sender.
    Start { flow: String, start: Box<Start> },
    /// An input for the target. References are to values of the sender.
    Input(Box<Input>),
}

/// An event published to the namespace.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Publish {
    pub id: String,
    pub name: String,
    pub key: Option<Data>,
    pub payload: Data,
}

impl OpenedBy {
    pub(crate) fn recorded(&self) -> TriggeredBy {
        match self {
            OpenedBy::Webhook => TriggeredBy::Webhook,
            OpenedBy::Manual => TriggeredBy::Manual,
            OpenedBy::Event { .. } => TriggeredBy::Event,
        }
    }
}
