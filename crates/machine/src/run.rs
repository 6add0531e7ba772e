//! The state of a run: what `decide` reads and a store keeps.

mod reused;

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::decide::Work;
use crate::failure::Failure;
use crate::ids::{ActId, Fence, Millis, RunId, ScopeId, StepId, ValueId, Version};
use crate::record::{Reason, Skipped, TriggeredBy};
use crate::transition::{CallOptions, Start, Transition, Unique};
use eddyline_language::data::Data;
use eddyline_language::flow::{Action, Body, Flow, Graph, Retry};

pub use reused::{Reused, TakenOver};

/// How many tasks of one activation are kept, to recognise duplicate reports.
pub const REMEMBERED_TASKS: usize = 8;
/// How many skipped sequence numbers are kept per task.
pub const REMEMBERED_GAPS: usize = 64;

/// A run as loaded: everything but the payloads, of which only some are loaded.
#[derive(Debug, Clone, Default)]
pub struct Run {
    pub header: Header,
    pub activations: Vec<Activation>,
    /// The first emit of each event, by scope and the event's index in it.
    pub emitted: BTreeMap<(ActId, u32), Emitted>,
    /// Loaded payloads.
    pub values: BTreeMap<ValueId, Data>,
    /// What a retry takes over from another run and has not reached yet, by activation.
    pub reuse: BTreeMap<String, Reused>,
    /// The position of the last event consumed, by name and key, so that a later gate consumes a later event.
    pub cursors: BTreeMap<String, u64>,
    pub(crate) index: Index,
}

/// Rows are written with every transition, so fields with default values are left out.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Lookup tables derived from the activations.
#[derive(Debug, Clone, Default)]
pub(crate) struct Index {
    /// Items and rounds, by spread or loop and index.
    pub parts: BTreeMap<(ActId, u32), ActId>,
    /// The latest memo entry of each name.
    pub memo: BTreeMap<Arc<str>, ActId>,
    /// Completed activations with an `undo`, by order of completion.
    pub undoable: BTreeMap<u32, ActId>,
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Header {
    pub run: RunId,
    pub version: Version,
    pub flow: String,
    pub flow_version: String,
    pub phase: Phase,
    #[serde(default, skip_serializing_if = "is_default")]
    pub paused: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    pub input: Option<Data>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub external_id: Option<String>,
    /// Given at start: a start with the same key is not repeated.
    #[serde(default, skip_serializing_if = "is_default")]
    pub idempotency_key: Option<String>,
    /// A small JSON object given at start. Stored in the header, so that lists show it and it lives as long as the
    /// header.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata: Option<Data>,
    /// Given at start: the queue of steps that name none, or of a code run's function.
    #[serde(default, skip_serializing_if = "is_default")]
    pub queue: Option<String>,
    /// Given at start: only one run of the flow is active under this key at a time.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unique: Option<Unique>,
    /// It waits for its turn in the line for its unique key.
    #[serde(default, skip_serializing_if = "is_default")]
    pub in_line: bool,
    /// Its delay is not over.
    #[serde(default, skip_serializing_if = "is_default")]
    pub awaits_delay: bool,
    /// Delay between creation and start, if given.
    #[serde(default, skip_serializing_if = "is_default")]
    pub delay_ms: Option<Millis>,
    /// Deadline, counted from creation, if given.
    #[serde(default, skip_serializing_if = "is_default")]
    pub deadline_ms: Option<Millis>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub tags: Vec<String>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub priority: i32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub parent: Option<Parent>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub retry_of: Option<RunId>,
    /// The run whose idempotency keys its handlers get, if not itself; see [`Header::key_run`].
    #[serde(default, skip_serializing_if = "is_default")]
    pub key_run: Option<RunId>,
    /// It is a retry or a rerun that has not yet received all values that it takes over.
    #[serde(default, skip_serializing_if = "is_default")]
    pub taking_over: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    pub continued_as: Option<RunId>,
    /// The root of its tree of child runs; none if it is the root itself.
    #[serde(default, skip_serializing_if = "is_default")]
    pub root: Option<RunId>,
    /// Its depth in the tree of child runs.
    #[serde(default, skip_serializing_if = "is_default")]
    pub depth: u32,
    /// Set once the run is ending; final at the end.
    #[serde(default, skip_serializing_if = "is_default")]
    pub outcome: Option<RunOutcome>,
    /// Everything in it is being cancelled.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cancelling: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    pub cancel_reason: Option<String>,
    /// Its first step has been decided.
    #[serde(default, skip_serializing_if = "is_default")]
    pub begun: bool,
    /// Events since this time count for its gates: its start, or that of the run it continues.
    pub events_since: Millis,
    /// It has a deadline that still applies.
    #[serde(default, skip_serializing_if = "is_default")]
    pub deadline: bool,
    /// Tasks queued or claimed.
    #[serde(default, skip_serializing_if = "is_default")]
    pub open_tasks: u32,
    pub step_count: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub completed_steps: u32,
    /// The names of emitted events, each once, in order of first emit. Incomplete for runs that emitted events under an
    /// older build.
    #[serde(default, skip_serializing_if = "is_default")]
    pub emitted_events: Vec<String>,
    /// Work left over from a transition that reached its limits; a message of the run to itself continues it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub agenda: Vec<Work>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub next_value: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub next_fence: u64,
    #[serde(default, skip_serializing_if = "is_default")]
    pub next_end: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub next_publish: u32,
    /// Progress of undo: what completed before this is still to be undone.
    #[serde(default, skip_serializing_if = "is_default")]
    pub undo_below: Option<u32>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub code: Option<CodeHeader>,
    /// The trace that it belongs to, passed to every task.
    #[serde(default, skip_serializing_if = "is_default")]
    pub traceparent: Option<String>,
}

/// Fields that only a code run has.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct CodeHeader {
    /// The number of the latest change of the memo.
    pub n: u64,
    /// The number of the latest change that the function did not make itself.
    pub news: u64,
    /// The number of entries that will change without the function: calls, sleeps, waits, children, retries.
    pub pending: u32,
    /// The latest change when the function's task was enqueued: a lost lease counts as an attempt only if nothing
    /// changed since.
    pub offered_at: u64,
    /// The build of the worker that runs it.
    pub build: Option<String>,
    /// Given at start; overrides the flow's.
    pub retry: Option<Retry>,
    /// When its function could first run, by the store's clock.
    #[serde(default, skip_serializing_if = "is_default")]
    pub began_at: Millis,
    /// The time of the latest change, by the store's clock; it never decreases.
    #[serde(default, skip_serializing_if = "is_default")]
    pub at: Millis,
    /// The current attempt of the function forgets what had failed or been cancelled up to this change.
    #[serde(default, skip_serializing_if = "is_default")]
    pub forgets: u64,
    /// Completed entries that the function can undo and has not undone.
    #[serde(default, skip_serializing_if = "is_default")]
    pub undoable: u32,
    /// Set once the run will not complete, but its function may still undo what it did.
    #[serde(default, skip_serializing_if = "is_default")]
    pub leaving: Option<Leaving>,
    /// It was unpinned: any build may run it, whatever its flow says.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unpinned: bool,
}

/// How a code run ends once its function has undone what it did.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Leaving {
    /// The error that it ends with; none if it was cancelled.
    pub error: Option<Failure>,
    /// The number of the change that began it.
    pub n: u64,
    /// The last phase has begun: only undo steps and one ending are accepted. Before, a worker that had the function's
    /// task when the run was cancelled may still report the steps that it was executing.
    pub unwinding: bool,
    /// When the grace ends, by the store's clock.
    pub until: Option<Millis>,
    /// How many tasks in a row ended without a report that changed the memo.
    #[serde(default, skip_serializing_if = "is_default")]
    pub lost: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Phase {
    /// Nothing has happened yet.
    #[default]
    New,
    /// Waits for its delay, or for its turn if it has a unique key.
    Delayed,
    Going,
    /// Completed steps are being undone.
    Undoing,
    /// `finally` is running.
    Finally,
    Ended,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parent {
    pub run: RunId,
    pub activation: ActId,
}

/// How a run ends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum RunOutcome {
    Completed(Data),
    Failed(Failure),
    /// With failures of undo and `finally`.
    Cancelled(Vec<Failure>),
}

/// The public status of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Pending,
    Running,
    Waiting,
    Paused,
    Completed,
    Failed,
    Cancelled,
}

/// A step in a run, with its iteration path.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Activation {
    pub id: ActId,
    pub place: Place,
    pub state: State,
    /// One token per arm.
    #[serde(default, skip_serializing_if = "is_default")]
    pub arms: Vec<Token>,
    /// The scope whose steps were created inside it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub body: Option<ScopeBody>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub gate: GateState,
    /// The 256-bit secret that opens a webhook or manual gate.
    #[serde(default, skip_serializing_if = "is_default")]
    pub gate_token: Option<String>,
    /// The item, for an item of a spread.
    #[serde(default, skip_serializing_if = "is_default")]
    pub item: Option<Data>,
    /// Set once it has begun.
    #[serde(default, skip_serializing_if = "is_default")]
    pub input: Option<Data>,
    /// The number of the current attempt; 0 before the first.
    #[serde(default, skip_serializing_if = "is_default")]
    pub attempt: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub tasks: Vec<TaskLog>,
    /// Its position in the order of ends, once it has ended.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ended: Option<u32>,
    /// Its failure was handled.
    #[serde(default, skip_serializing_if = "is_default")]
    pub handled: bool,
    /// Its effect was undone.
    #[serde(default, skip_serializing_if = "is_default")]
    pub undone: bool,
}

/// What an activation is, and what it belongs to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Place {
    /// The flow itself: the scope of its steps, or the function of a code run.
    Root,
    Step {
        step: StepId,
        scope: ActId,
    },
    /// `each[3]`
    Item {
        of: ActId,
        index: u32,
    },
    /// `poll[2]`
    Round {
        of: ActId,
        index: u32,
    },
    /// `undo:pay`
    Undo {
        of: ActId,
    },
    Finally,
    /// A memo entry: a step of a code run.
    Memo(Memo),
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Memo {
    pub name: Arc<str>,
    pub kind: MemoKind,
    /// The attempt of the function that created it.
    pub made_by: u32,
    /// An earlier entry of this name failed and was discarded.
    pub again: bool,
    /// The number of its latest change.
    pub n: u64,
    /// The time of that change.
    #[serde(default, skip_serializing_if = "is_default")]
    pub at: Millis,
    /// It will change without the function.
    pub pending: bool,
    /// Its latest change was not made by the function itself.
    #[serde(default, skip_serializing_if = "is_default")]
    pub news: bool,
    /// For a call: the handler and the queue.
    pub call: Option<(String, String)>,
    /// For a call: how it is run.
    #[serde(default, skip_serializing_if = "is_default")]
    pub options: Option<Box<CallOptions>>,
    /// Its function can undo it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub undo: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoKind {
    Step,
    Call,
    Sleep,
    Wait,
    Child,
    /// A published event.
    Publish,
}

impl MemoKind {
    pub fn as_str(self) -> &'static str {
        match self {
            MemoKind::Step => "step",
            MemoKind::Call => "call",
            MemoKind::Sleep => "sleep",
            MemoKind::Wait => "wait",
            MemoKind::Child => "child",
            MemoKind::Publish => "publish",
        }
    }
}

/// The token of an arm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Token {
    Open,
    Live,
    Dead,
    /// Arrived after its activation was decided: recorded, without effect.
    LateLive,
    LateDead,
}

/// The steps of a scope: the one in slot `i` is activation `first + i`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ScopeBody {
    pub scope: ScopeId,
    pub first: ActId,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum State {
    /// Waiting for its arms.
    Waiting,
    /// Its tokens have determined whether it is ready.
    Certain {
        ready: bool,
    },
    /// Waiting at its gate; see [`Activation::gate`].
    Gated,
    /// Its gate is open, and its action has not started yet.
    Ready,
    /// A task is queued or claimed.
    Queued(Fence),
    /// Cancelled, but a worker may have its task; a report is still accepted.
    Draining(Fence),
    /// Waiting for the next attempt, after the one with this fence.
    BackOff {
        after: Fence,
        reason: Reason,
    },
    /// It has open parts inside.
    Open(Inside),
    /// Waiting for a child run.
    Child(RunId),
    /// Waiting for a detached child run to start.
    Starting(RunId),
    /// A step of a code run that its function retries, once `due`.
    Retrying {
        due: bool,
        after_ms: Millis,
    },
    Ended(End),
}

/// The contents of a container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inside {
    /// Parts that have not ended.
    pub open: u32,
    /// The end it gets once nothing in it is open; its open parts are being cancelled.
    #[serde(default, skip_serializing_if = "is_default")]
    pub closing: Option<End>,
    pub what: What,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum What {
    /// The steps of a scope; see [`Activation::body`].
    Scope,
    Spread {
        list: Data,
        items: u32,
        /// The next item to become an activation.
        next: u32,
        failed: u32,
    },
    Repeat {
        round: u32,
        state: Data,
    },
    /// The function of a code run.
    Code(Driver),
}

/// The state of a code run's function.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Driver {
    Queued(Fence),
    BackOff {
        after: Fence,
        reason: Reason,
    },
    /// Resumes at the first change it did not make itself beyond `seen`.
    Suspended {
        seen: u64,
    },
    Done,
}

/// How an activation ends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum End {
    Completed(Data),
    Failed(Failure),
    Skipped(Skipped),
    Cancelled,
}

/// The state of a gate.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub enum GateState {
    #[default]
    None,
    /// Its activation has not reached it yet; an early opening is kept.
    Ahead {
        early: Option<(Data, TriggeredBy)>,
    },
    Waiting {
        /// For an event gate: what it waits for, as a key of [`Run::cursors`].
        event: Option<String>,
        /// The position of the last event consumed under that name and key before it arrived.
        after: Option<u64>,
        /// It has a timer.
        timed: bool,
        /// It is a manual gate, not a webhook gate.
        #[serde(default, skip_serializing_if = "is_default")]
        manual: bool,
    },
    Opened(Data),
    TimedOut,
    Cancelled,
}

/// What is kept of a task, so that a repeated report gets its first answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskLog {
    pub fence: Fence,
    pub attempt: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub seq: u32,
    /// Numbers below `seq` that were not applied.
    #[serde(default, skip_serializing_if = "is_default")]
    pub gaps: Vec<u32>,
    /// It was cancelled before a report or an expiry ended it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub called_off: bool,
    /// How often in a row the attempt was claimed but not delivered, up to this task.
    #[serde(default, skip_serializing_if = "is_default")]
    pub undelivered: u32,
}

impl TaskLog {
    pub fn new(fence: Fence, attempt: u32) -> TaskLog {
        TaskLog { fence, attempt, seq: 0, gaps: Vec::new(), called_off: false, undelivered: 0 }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Emitted {
    pub payload: Data,
    pub by: ActId,
    /// The number of events that the run emitted before.
    #[serde(default, skip_serializing_if = "is_default")]
    pub order: u32,
}

impl Header {
    /// The first part of its handlers' idempotency keys; the second is the activation's name. A retry has the keys of
    /// the run that it retries, so that what was done under a key is not done again. The keys of a child derive from
    /// those of its parent and the activation that started it, so a retry of the parent keeps them too.
    pub fn key_run(&self) -> RunId {
        self.key_run.unwrap_or(self.run)
    }

    /// The public status.
    pub fn status(&self) -> Status {
        match (&self.phase, &self.outcome) {
            (Phase::Ended, Some(outcome)) => outcome.status(),
            _ if self.paused => Status::Paused,
            _ if !self.begun => Status::Pending,
            _ if self.open_tasks == 0 => Status::Waiting,
            _ => Status::Running,
        }
    }

    /// Whether a child that it requested may still start: the step that waits for it must be open. A completed run
    /// still starts its detached children, although none of its steps waits for them any more.
    pub fn wants(&self, child: &Start) -> bool {
        // A later phase has cancelled whatever was open before. For a continued run `asked_in` is `New`.
        let same_phase = child.asked_in == Phase::New || child.asked_in == self.phase;
        (child.parent.is_none() && self.has_completed()) || (self.takes_children() && same_phase)
    }

    /// Whether it has completed; `finally` may still run.
    pub fn has_completed(&self) -> bool {
        matches!(self.outcome, Some(RunOutcome::Completed(_)))
    }

    /// Whether children may start: not after its end, and not while it is being cancelled. Steps of `finally` may still
    /// start children.
    pub fn takes_children(&self) -> bool {
        match self.phase {
            Phase::New | Phase::Delayed | Phase::Going => !self.cancelling,
            Phase::Undoing | Phase::Finally => true,
            Phase::Ended => false,
        }
    }

    /// Whether its tasks are held back: it is paused, or a large container is being cancelled over several transitions
    /// and its tasks must not start meanwhile.
    pub fn holds_tasks(&self) -> bool {
        self.paused || self.agenda.iter().any(|work| matches!(work, Work::Sweep { .. } | Work::Cancel(_)))
    }
}

impl CodeHeader {
    /// Whether the current attempt of the function has forgotten an entry: it had failed or been cancelled before the
    /// attempt began.
    pub fn has_forgotten(&self, memo: &Memo, end: Option<&End>) -> bool {
        memo.n <= self.forgets && matches!(end, Some(End::Failed(_) | End::Cancelled))
    }
}

impl RunOutcome {
    pub fn status(&self) -> Status {
        match self {
            RunOutcome::Completed(_) => Status::Completed,
            RunOutcome::Failed(_) => Status::Failed,
            RunOutcome::Cancelled(_) => Status::Cancelled,
        }
    }
}

impl End {
    pub fn status(&self) -> &'static str {
        match self {
            End::Completed(_) => "completed",
            End::Failed(_) => "failed",
            End::Skipped(_) => "skipped",
            End::Cancelled => "cancelled",
        }
    }
}

impl Status {
    pub const ALL: [Status; 7] = [
        Status::Pending,
        Status::Running,
        Status::Waiting,
        Status::Paused,
        Status::Completed,
        Status::Failed,
        Status::Cancelled,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Status::Pending => "pending",
            Status::Running => "running",
            Status::Waiting => "waiting",
            Status::Paused => "paused",
            Status::Completed => "completed",
            Status::Failed => "failed",
            Status::Cancelled => "cancelled",
        }
    }

    pub fn is_end(self) -> bool {
        matches!(self, Status::Completed | Status::Failed | Status::Cancelled)
    }
}

impl Activation {
    pub(crate) fn new(id: ActId, place: Place) -> Activation {
        let state = if matches!(place, Place::Step { .. }) { State::Waiting } else { State::Ready };
        Activation {
            id,
            place,
            state,
            arms: Vec::new(),
            body: None,
            gate: GateState::None,
            gate_token: None,
            item: None,
            input: None,
            attempt: 0,
            tasks: Vec::new(),
            ended: None,
            handled: false,
            undone: false,
        }
    }

    pub fn end(&self) -> Option<&End> {
        match &self.state {
            State::Ended(end) => Some(end),
            _ => None,
        }
    }

    pub fn is_open(&self) -> bool {
        self.end().is_none()
    }

    pub(crate) fn inside(&self) -> Option<&Inside> {
        match &self.state {
            State::Open(inside) => Some(inside),
            _ => None,
        }
    }

    /// The fence of its current task, if any.
    pub fn fence(&self) -> Option<Fence> {
        match &self.state {
            State::Queued(fence) | State::Draining(fence) => Some(*fence),
            State::Open(Inside { what: What::Code(Driver::Queued(fence)), .. }) => Some(*fence),
            _ => None,
        }
    }

    /// The activation that contains it.
    pub(crate) fn parent(&self) -> Option<ActId> {
        match &self.place {
            Place::Root | Place::Finally | Place::Undo { .. } => None,
            Place::Step { scope, .. } => Some(*scope),
            Place::Item { of, .. } | Place::Round { of, .. } => Some(*of),
            Place::Memo(_) => Some(ActId(0)),
        }
    }
}

/// Lookup of activations by number: in a run, or in a run with a transition on top.
pub(crate) trait Activations {
    fn at(&self, id: ActId) -> &Activation;

    /// Its step in the definition.
    fn step_of(&self, id: ActId) -> Option<StepId> {
        match self.at(id).place {
            Place::Step { step, .. } => Some(step),
            Place::Item { of, .. } | Place::Round { of, .. } | Place::Undo { of } => self.step_of(of),
            Place::Root | Place::Finally | Place::Memo(_) => None,
        }
    }

    /// Its public name: `pay`, `each[3].price`, `poll[2].check`, `undo:pay`.
    fn name(&self, graph: Option<&Graph>, id: ActId) -> String {
        match &self.at(id).place {
            Place::Root => "@run".to_owned(),
            Place::Finally => "finally".to_owned(),
            Place::Step { step, scope } => {
                let name = graph.map_or("?", |graph| &graph.step(*step).name);
                match self.at(*scope).place {
                    Place::Root => name.to_owned(),
                    _ => format!("{}.{name}", self.name(graph, *scope)),
                }
            }
            Place::Item { of, index } | Place::Round { of, index } => format!("{}[{index}]", self.name(graph, *of)),
            Place::Undo { of } => format!("undo:{}", self.name(graph, *of)),
            Place::Memo(memo) if memo.again => format!("{}~{}", memo.name, memo.made_by),
            Place::Memo(memo) => memo.name.to_string(),
        }
    }
}

impl Activations for Run {
    fn at(&self, id: ActId) -> &Activation {
        &self.activations[id.0 as usize]
    }
}

impl Run {
    /// A run that has not started.
    pub fn new(run: RunId) -> Run {
        Run { header: Header { run, ..Header::default() }, ..Run::default() }
    }

    /// Rebuilds the lookup tables of a run loaded from a store.
    pub fn load(mut rows: Run, flow: &Flow) -> Run {
        rows.index = Index::default();
        for activation in std::mem::take(&mut rows.activations) {
            rows.put(activation, flow);
        }
        rows
    }

    /// Brings the run up to a later version. `rows` has the activations that were written since, by id, and everything
    /// else as a whole; loaded payloads stay, as they never change. False if the rows don't fit: then nothing is changed.
    pub fn catch_up(&mut self, rows: Run, flow: &Flow) -> bool {
        let mut next = self.activations.len();
        for activation in &rows.activations {
            match activation.id.0 as usize {
                id if id < next => {}
                id if id == next => next += 1,
                _ => return false,
            }
        }
        let Run { header, activations, emitted, reuse, cursors, .. } = rows;
        activations.into_iter().for_each(|activation| self.put(activation, flow));
        (self.header, self.emitted, self.reuse, self.cursors) = (header, emitted, reuse, cursors);
        true
    }

    /// Applies a committed transition.
    pub fn apply(&mut self, transition: &Transition, flow: &Flow) {
        self.header = transition.header.clone();
        for activation in &transition.activations {
            self.put(activation.clone(), flow);
        }
        for (key, emitted) in &transition.emitted {
            self.emitted.insert(*key, emitted.clone());
        }
        for (id, value) in &transition.values {
            self.values.insert(*id, value.clone());
        }
        self.cursors.extend(transition.cursors.iter().cloned());
        for name in &transition.reuse_done {
            self.reuse.remove(name);
        }
        for reused in &transition.reuse {
            self.reuse.insert(reused.activation.clone(), reused.clone());
        }
    }

    /// The public name of an activation.
    pub fn activation_name(&self, flow: &Flow, id: ActId) -> String {
        self.name(flow.graph(), id)
    }

    /// What an activation does, in the terms of the flow's analysis and of a code run's memo.
    pub fn kind(&self, flow: &Flow, id: ActId) -> &'static str {
        let step = self.step_of(id).and_then(|step| flow.graph().map(|graph| graph.step(step)));
        match (&self.at(id).place, step) {
            (Place::Memo(memo), _) => memo.kind.as_str(),
            (Place::Undo { .. }, _) => "worker",
            (Place::Step { .. }, Some(step)) if step.spread.is_some() => "spread",
            (Place::Step { .. } | Place::Item { .. }, Some(step)) if step.repeat.is_some() => "repeat",
            (Place::Step { .. } | Place::Item { .. }, Some(step)) => step.action.kind(),
            _ => "group",
        }
    }

    /// The queue of an activation's tasks; none if it has no tasks of its own.
    pub fn queue<'a>(&'a self, flow: &'a Flow, id: ActId) -> Option<&'a str> {
        match (&self.at(id).place, self.kind(flow, id)) {
            (Place::Root, _) if flow.graph().is_some() => None,
            (Place::Root, _) | (_, "worker" | "call") => queue_of(self, flow, &self.header, id),
            _ => None,
        }
    }

    /// The activation's step; none for the run itself and for memo entries.
    pub fn step(&self, id: ActId) -> Option<StepId> {
        self.activations.get(id.0 as usize).and_then(|activation| self.step_of(activation.id))
    }

    fn put(&mut self, activation: Activation, flow: &Flow) {
        let id = activation.id;
        match &activation.place {
            Place::Item { of, index } | Place::Round { of, index } => {
                self.index.parts.insert((*of, *index), id);
            }
            Place::Memo(memo) => {
                let latest = self.index.memo.entry(memo.name.clone()).or_insert(id);
                *latest = id.max(*latest);
            }
            _ => {}
        }
        let at = id.0 as usize;
        if at < self.activations.len() {
            self.activations[at] = activation;
        } else {
            self.activations.push(activation);
        }
        if let Body::Graph(graph) = &flow.body
            && graph.has_undo
            && let Some(order) = undo_order(self, graph, id)
        {
            self.index.undoable.insert(order, id);
        }
    }
}

/// The queue of an activation's tasks: that of its step or call, else the one its run was started with, else the
/// flow's. Steps of a code run other than calls are done by its function.
pub(crate) fn queue_of<'a>(
    activations: &'a impl Activations,
    flow: &'a Flow,
    header: &'a Header,
    id: ActId,
) -> Option<&'a str> {
    let given = header.queue.as_deref();
    match (&flow.body, &activations.at(id).place) {
        (_, Place::Memo(Memo { call: Some((_, queue)), .. })) => Some(queue),
        (Body::Code(code), _) => Some(given.unwrap_or(&code.queue)),
        (Body::Graph(graph), _) => match &graph.step(activations.step_of(id)?).action {
            Action::Worker(worker) => Some(worker.queue_or(given)),
            _ => None,
        },
    }
}

/// Its position in the order of completion, if an undo can undo it.
pub(crate) fn undo_order(activations: &impl Activations, graph: &Graph, id: ActId) -> Option<u32> {
    let activation = activations.at(id);
    if !matches!(activation.state, State::Ended(End::Completed(_))) {
        return None;
    }
    let step = match &activation.place {
        Place::Step { step, .. } => graph.step(*step),
        Place::Item { .. } => graph.step(activations.step_of(id)?),
        _ => return None,
    };
    let is_item = matches!(activation.place, Place::Item { .. });
    // The items of a spread did the work, not the spread itself.
    if step.undo.is_none() || step.spread.is_some() != is_item { None } else { activation.ended }
}
