//! What goes into `decide` and what comes out of it: one atomic commit.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Number;

use crate::decide::child::child_id;
use crate::failure::Failure;
use crate::ids::{ActId, Fence, Millis, RunId, ValueId, Version};
use crate::record::{Attempt, Entry, GateId, GateReason, Record, TriggeredBy};
use crate::run::{Activation, Emitted, Header, MemoKind, Parent, Phase, Reused, is_default};
use eddyline_language::data::Data;
use eddyline_language::flow::Retry;

/// One thing that happens to a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Input {
    Start(Box<Start>),
    /// Values that a retry or a rerun takes over, beyond those that it started with.
    TakeOver {
        values: Vec<(ValueId, Data)>,
        /// More of them come.
        more: bool,
    },
    Report(Report),
    /// A task's time is up, by the store's clock.
    Expired {
        task: TaskRef,
        why: Expiry,
        claim: Claim,
    },
    /// A claimed task could not be handed over to its worker.
    Undelivered {
        task: TaskRef,
        claim: Claim,
        /// What went wrong, for people.
        why: String,
    },
    /// A timer is due.
    Due(TimerKey),
    /// A timer that the run waits for was lost: it is set again, for its own time.
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
    /// An act on one activation, by its public name.
    Act {
        activation: String,
        by: String,
        act: StepAct,
    },
    /// The run goes on with what one transition left over.
    Continue,
    /// A run that waits in line for its unique key is the first of that line now.
    Turn,
    /// Which of the closed tasks no worker has. Sent to itself by a run that is ending; the engine adds the facts, which
    /// stay true because closed tasks are not claimed.
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
    /// A small JSON object, kept and given back.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Data>,
    /// The queue of steps that name none; of a code flow, of its function.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<String>,
    /// One run of the flow goes on under this key at a time.
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
    /// Of a detached run: the activation that completes when this run has started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_by: Option<Parent>,
    /// Of a child, attached or detached: the phase in which its parent asked for it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub asked_in: Phase,
    /// The run at the top of the tree of children that it is part of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub root: Option<RunId>,
    pub depth: u32,
    /// Of a code flow: attempts of the whole function.
    pub retry: Option<Retry>,
    pub retry_of: Option<RunId>,
    /// Whose idempotency keys its handlers get: of a retry, those of the run it retries. See [`Header::key_run`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_run: Option<RunId>,
    /// Of a retry or a rerun: who asked for it.
    pub again: Option<Again>,
    /// What a retry or a rerun takes over from `retry_of`. References in it, and in its input, are to values of that run,
    /// which get the same ids in this one.
    pub reuse: Vec<Reused>,
    /// Of a retry or a rerun: values of `retry_of` that are referred to.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub values: Vec<(ValueId, Data)>,
    /// More of them come as [`Input::TakeOver`], and the run does not begin before it has all.
    #[serde(default, skip_serializing_if = "is_default")]
    pub more_values: bool,
    /// The first id of a value that is free.
    #[serde(default, skip_serializing_if = "is_default")]
    pub next_value: u32,
    /// Of a continued run: the events its forerunner took.
    pub cursors: BTreeMap<String, u64>,
    /// Of a continued run: since when events count.
    pub events_since: Option<Millis>,
    /// The trace that it is part of, as W3C writes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceparent: Option<String>,
}

impl Start {
    /// The activation that asked for the run and waits to hear of it: a detached one only until the run has started.
    pub fn asked_by(&self) -> Option<Parent> {
        self.parent.or(self.started_by)
    }

    /// What is said to the activation that waits for a run, if the run cannot be started.
    pub fn refused(&self, run: RunId, failure: Failure) -> Option<Message> {
        let waits = self.asked_by()?;
        let (activation, end) = (waits.activation, ChildEnd::Refused(failure));
        // A run that was continued is still the child that its parent started.
        let child = child_id(waits.run, activation);
        let body = MessageBody::Input(Box::new(Input::ChildEnded { activation, child, end }));
        Some(Message { to: waits.run, id: format!("refused:{run}"), body })
    }
}

/// A key under which one run of a flow goes on at a time, and what becomes of a start while another run has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unique {
    pub key: String,
    pub on_conflict: OnConflict,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OnConflict {
    /// The run that has the key is given back.
    Return,
    Reject,
    /// Every run that has the key or waits for it is cancelled, and the new one begins when they have ended.
    Replace,
    /// The new run waits until all runs before it have ended.
    Queue,
}

/// How a run that has ended is run again, and who asked for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Again {
    Retry {
        by: String,
    },
    Rerun {
        by: String,
        /// The step from which on it runs again; without one, from the start.
        from: Option<String>,
    },
}

/// A task, as a worker names it. The engine checks the token that binds these.
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

/// What is known of the claim of a task when something is said about the task.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Claim {
    pub build: Option<String>,
    /// Of a code run: the newest change in the memo that was handed over.
    pub memo: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Op {
    Complete { output: Data, emits: Vec<(String, Data)>, logs: Vec<Log> },
    Fail { error: Failure, retryable: bool, retry_after_ms: Option<Millis> },
    Defer { after_ms: Millis, limit: Option<String> },
    Emit { event: String, payload: Data },
    Publish { name: String, key: Option<Data>, payload: Data },
    Log(Log),
    Progress { done: Option<Number>, total: Option<Number>, msg: Option<String> },
    Code { name: String, op: CodeOp },
    Suspend { seen: Option<u64> },
    ContinueAs { input: Data },
}

/// What the function of a code run says of a step with a name.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum CodeOp {
    Done { output: Data },
    Failed { error: Failure, retryable: bool, retry_after_ms: Option<Millis> },
    Call { handler: String, input: Data, queue: Option<String> },
    Sleep { due: Due },
    Wait { wait: CodeWait, timeout_ms: Option<Millis> },
    Child { flow: String, input: Data, detached: bool },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum CodeWait {
    Event { name: String, key: Option<Data> },
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
    /// No worker took it within `start_timeout`.
    StartTimeout,
    /// Claimed, but never delivered.
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

/// A timer of a run; setting one again replaces it.
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

/// When: by the store's clock from the commit on, or at a moment of the wall clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Due {
    After(Millis),
    At(Millis),
}

/// What an input came to, in the order of the inputs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// Done. A code step's answer says more.
    Applied(Said),
    /// Said before; this was its answer.
    Duplicate(Said),
    /// The fence has moved on.
    Stale,
    /// The run has ended, or is past the point where this could matter.
    Closed,
    /// What is wrong with it; nothing changed.
    Invalid(String),
    /// It can't be done in this state; nothing changed.
    Conflict(String),
    /// There was nothing to do.
    Nothing,
}

/// What an applied report has to say.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Said {
    pub decision: Option<Decision>,
    /// The secret that opens a code run's gate.
    pub token: Option<String>,
    /// Of a code step: the name was known, and this is what it has come to.
    pub known: bool,
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
    /// The version it was decided on: the commit is refused at any other.
    pub base: Version,
    pub header: Header,
    /// Those that changed or are new, by number.
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
    /// The positions of events that opened a gate of the run, one for each gate.
    pub events_taken: Vec<u64>,
    /// Limits that a worker asked to slow down, and for how long.
    pub slow_limits: Vec<(String, Millis)>,
    pub records: Vec<Record>,
    /// One for each input that was taken.
    pub answers: Vec<Answer>,
}

impl Transition {
    /// There is nothing to commit: the inputs were refused, repeated or without effect.
    pub fn is_empty(&self) -> bool {
        self.header.version == self.base
    }

    /// How many of the inputs it took; the rest are for the next one.
    pub fn taken(&self) -> usize {
        self.answers.len()
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum TaskChange {
    Add(Box<Task>),
    /// No longer offered; if a worker has it, its report is still wanted.
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
    /// The step as the definition names it; of a code run, the flow.
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
    /// Names, each with its key as canonical JSON where it has one.
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: Vec<(String, Option<String>)>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub requires: Vec<String>,
    /// Tasks of a queue take turns by this, as canonical JSON.
    #[serde(default, skip_serializing_if = "is_default")]
    pub key: Option<String>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub timeout_ms: Option<Millis>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub start_timeout_ms: Option<Millis>,
    /// Only workers of this build are offered it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub build: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TaskKind {
    Step,
    Run,
}

impl Task {
    /// The record of its claim, which the store appends when a worker takes it.
    pub fn started(&self, worker: Option<String>) -> Record {
        Record {
            entry: Entry::AttemptStarted { step_key: self.name.clone(), worker },
            attempt: Some(Attempt { number: self.attempt, fence: self.fence, queue: self.queue.clone() }),
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum GateChange {
    /// Its token is known from now on; it is not listed before its activation gets there.
    Add { id: GateId, token: String },
    /// Its activation has got there.
    Arrive(Box<GateArrival>),
    /// No longer listed; its token still finds it, so that a late opening is told what became of it.
    Close { id: GateId },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GateArrival {
    pub id: GateId,
    pub name: String,
    pub token: Option<String>,
    pub reason: GateReason,
    pub event: Option<EventWait>,
    /// How long it is waited for; of a time gate, until it opens.
    pub timeout_ms: Option<Millis>,
}

/// What an event gate waits for. It looks back over events since `since` (a moment, or so long before the commit), later
/// than `after`, oldest first.
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

/// What one run says to another, or to itself: written in the sender's commit, consumed in the target's.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Message {
    pub to: RunId,
    /// Unique for the target, so that a message is consumed once.
    pub id: String,
    pub body: MessageBody,
}

impl Message {
    /// Tells a run that waits in line that it is the first now. A run hears it once.
    pub fn turn(to: RunId) -> Message {
        Message { to, id: "turn".to_owned(), body: MessageBody::Input(Box::new(Input::Turn)) }
    }

    /// Tells a run that has a unique key, or waits for it, that `by` takes its place.
    pub fn replaced(to: RunId, by: RunId, cancel: Input) -> Message {
        Message { to, id: format!("replaced:{by}"), body: MessageBody::Input(Box::new(cancel)) }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum MessageBody {
    /// Start that run. References in it are to values of the sender.
    Start { flow: String, start: Box<Start> },
    /// An input of the target; references in it are to values of the sender.
    Input(Box<Input>),
}

/// An event for the namespace.
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
