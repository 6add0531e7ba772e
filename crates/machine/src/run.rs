//! The state of a run: what `decide` reads and a store keeps. States are enums that cannot be wrong.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::decide::Work;
use crate::failure::Failure;
use crate::ids::{ActId, Fence, Millis, RunId, ScopeId, StepId, ValueId, Version};
use crate::record::{Reason, Skipped, TriggeredBy};
use crate::transition::{Start, Transition, Unique};
use eddyline_language::data::Data;
use eddyline_language::flow::{Action, Body, Flow, Graph, Retry};

/// How many tasks of one activation are remembered, for reports that come twice.
pub const REMEMBERED_TASKS: usize = 8;
/// How many sequence numbers that were left out are remembered per task.
pub const REMEMBERED_GAPS: usize = 64;

/// A run, as far as it is loaded: everything but the payloads, of which it has those at hand.
#[derive(Debug, Clone, Default)]
pub struct Run {
    pub header: Header,
    pub activations: Vec<Activation>,
    /// The first emit of each event, by scope and the event's place in it.
    pub emitted: BTreeMap<(ActId, u32), Emitted>,
    /// Payloads at hand.
    pub values: BTreeMap<ValueId, Data>,
    /// What a retry took over from another run and has not reached yet, by activation.
    pub reuse: BTreeMap<String, Reused>,
    /// The position of the last event taken, by name and key, so that a later gate takes a later one.
    pub cursors: BTreeMap<String, u64>,
    pub(crate) index: Index,
}

/// Rows are written with every transition; what a field says by default is left out of them.
pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// What can be looked up by more than a number; derived from the activations.
#[derive(Debug, Clone, Default)]
pub(crate) struct Index {
    /// Items and rounds, by what they are of.
    pub parts: BTreeMap<(ActId, u32), ActId>,
    /// Memo entries of a code run by name, the latest.
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
    /// Given at start, where it happens once under a key.
    #[serde(default, skip_serializing_if = "is_default")]
    pub idempotency_key: Option<String>,
    /// A small JSON object given at start. It is part of the header, so that lists show it and it is kept as long as that.
    #[serde(default, skip_serializing_if = "is_default")]
    pub metadata: Option<Data>,
    /// Given at start: the queue of the steps that name none, or of the function of a code run.
    #[serde(default, skip_serializing_if = "is_default")]
    pub queue: Option<String>,
    /// Given at start: one run of the flow goes on under this key at a time.
    #[serde(default, skip_serializing_if = "is_default")]
    pub unique: Option<Unique>,
    /// It waits until it is the first of those that want its unique key.
    #[serde(default, skip_serializing_if = "is_default")]
    pub in_line: bool,
    /// Its delay is not over.
    #[serde(default, skip_serializing_if = "is_default")]
    pub awaits_delay: bool,
    /// How long after its creation it begins, if that was given.
    #[serde(default, skip_serializing_if = "is_default")]
    pub delay_ms: Option<Millis>,
    /// How long after its creation it must have ended, if that was given.
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
    /// The run whose idempotency keys its handlers get, if it is another; see [`Header::key_run`].
    #[serde(default, skip_serializing_if = "is_default")]
    pub key_run: Option<RunId>,
    /// It is a retry or a rerun that has not got everything yet that it takes over.
    #[serde(default, skip_serializing_if = "is_default")]
    pub taking_over: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    pub continued_as: Option<RunId>,
    /// The run at the top of the tree of children that it is part of; none if it is at the top itself.
    #[serde(default, skip_serializing_if = "is_default")]
    pub root: Option<RunId>,
    /// How many runs are above it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub depth: u32,
    /// Set once the run is on its way to its end; final at the end.
    #[serde(default, skip_serializing_if = "is_default")]
    pub outcome: Option<Outcome>,
    /// Everything in it is being cancelled.
    #[serde(default, skip_serializing_if = "is_default")]
    pub cancelling: bool,
    #[serde(default, skip_serializing_if = "is_default")]
    pub cancel_reason: Option<String>,
    /// Its first step has been decided.
    #[serde(default, skip_serializing_if = "is_default")]
    pub begun: bool,
    /// Since when events count for its gates: its start, or that of the run it goes on from.
    pub events_since: Millis,
    /// It has a deadline that still binds it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub deadline: bool,
    /// Tasks queued or claimed.
    #[serde(default, skip_serializing_if = "is_default")]
    pub open_tasks: u32,
    pub step_count: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub completed_steps: u32,
    /// The names of the events that it emitted, each once, in the order of their first emits. A run that emitted some under
    /// an older build has only the later ones.
    #[serde(default, skip_serializing_if = "is_default")]
    pub emitted_events: Vec<String>,
    /// What is left of a transition that touched too much; a message of the run to itself goes on with it.
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
    /// Where undo has got to: what completed before this is still to be undone.
    #[serde(default, skip_serializing_if = "is_default")]
    pub undo_below: Option<u32>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub code: Option<CodeHeader>,
    /// The trace that it is part of, handed to every task.
    #[serde(default, skip_serializing_if = "is_default")]
    pub traceparent: Option<String>,
}

/// What only a code run has.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct CodeHeader {
    /// The number of the newest change of the memo.
    pub n: u64,
    /// The number of the newest change that the function did not bring about itself.
    pub news: u64,
    /// Entries that will bring news by themselves.
    pub pending: u32,
    /// The newest change when the function's task was offered: a lost lease counts only if there was none since.
    pub offered_at: u64,
    /// The build of the worker that runs it.
    pub build: Option<String>,
    /// Given at start instead of the flow's.
    pub retry: Option<Retry>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Phase {
    /// Nothing has happened yet.
    #[default]
    New,
    /// Until its delay is over, and it is the first in line if it waits for a unique key.
    Delayed,
    Going,
    /// What completed is being undone.
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
pub enum Outcome {
    Completed(Data),
    Failed(Failure),
    /// With what went wrong on the way out.
    Cancelled(Vec<Failure>),
}

/// The status of a run, as everybody sees it.
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
    /// One token an arm.
    #[serde(default, skip_serializing_if = "is_default")]
    pub arms: Vec<Token>,
    /// The scope whose steps were made inside it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub body: Option<ScopeBody>,
    #[serde(default, skip_serializing_if = "is_default")]
    pub gate: GateState,
    /// The secret of 256 bits that opens the gate, where a webhook or a person does.
    #[serde(default, skip_serializing_if = "is_default")]
    pub gate_token: Option<String>,
    /// Of a spread's item: the item.
    #[serde(default, skip_serializing_if = "is_default")]
    pub item: Option<Data>,
    /// Once it has begun.
    #[serde(default, skip_serializing_if = "is_default")]
    pub input: Option<Data>,
    /// The number of the newest attempt; 0 before the first.
    #[serde(default, skip_serializing_if = "is_default")]
    pub attempt: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub tasks: Vec<TaskLog>,
    /// Its place in the order of ends, once it has ended.
    #[serde(default, skip_serializing_if = "is_default")]
    pub ended: Option<u32>,
    /// Its failure was handled.
    #[serde(default, skip_serializing_if = "is_default")]
    pub handled: bool,
    /// Its effect was undone.
    #[serde(default, skip_serializing_if = "is_default")]
    pub undone: bool,
}

/// Where an activation stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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
    /// A remembered step of a code run.
    Memo(Memo),
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memo {
    pub name: Arc<str>,
    pub kind: MemoKind,
    /// The attempt of the function that made it.
    pub made_by: u32,
    /// An earlier entry of the name failed and was forgotten.
    pub again: bool,
    /// The number of its newest change.
    pub n: u64,
    /// It will bring news by itself.
    pub pending: bool,
    /// Its newest change is not the function's own doing.
    #[serde(default, skip_serializing_if = "is_default")]
    pub news: bool,
    /// Of a call: the handler and the queue.
    pub call: Option<(String, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoKind {
    Step,
    Call,
    Sleep,
    Wait,
    Child,
}

impl MemoKind {
    pub fn as_str(self) -> &'static str {
        match self {
            MemoKind::Step => "step",
            MemoKind::Call => "call",
            MemoKind::Sleep => "sleep",
            MemoKind::Wait => "wait",
            MemoKind::Child => "child",
        }
    }
}

/// What an arm has been told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Token {
    Open,
    Live,
    Dead,
    /// After its activation was decided: kept, without effect.
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
    /// For its arms.
    Waiting,
    /// Its tokens have made the answer certain; `ready` is the answer.
    Certain {
        ready: bool,
    },
    /// At its gate; see [`Activation::gate`].
    Gated,
    /// Nothing stands before it any more, and nothing has come of it yet.
    Ready,
    /// A task is queued or claimed.
    Queued(Fence),
    /// Cancelled, but its task may be with a worker, whose report is still taken.
    Draining(Fence),
    /// Until the next attempt, after the one with this fence.
    BackOff {
        after: Fence,
        reason: Reason,
    },
    /// Something goes on inside it.
    Open(Inside),
    /// A child run.
    Child(RunId),
    /// A detached child run, until it has started.
    Starting(RunId),
    /// A step of a code run that its function tries again by itself, from `due` on.
    Retrying {
        due: bool,
        after_ms: Millis,
    },
    Ended(End),
}

/// A container: what goes on in it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Inside {
    /// Parts that have not ended.
    pub open: u32,
    /// It is to end like this as soon as nothing in it is open; what is undecided in it is being cancelled.
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

/// Where the function of a code run is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Driver {
    Queued(Fence),
    BackOff {
        after: Fence,
        reason: Reason,
    },
    /// It goes on at the first news beyond `seen`.
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

/// A gate's life.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub enum GateState {
    #[default]
    None,
    /// Its activation has not got there; an opening is kept.
    Ahead {
        early: Option<(Data, TriggeredBy)>,
    },
    Waiting {
        /// Of an event gate: what it waits for, as a key of [`Run::cursors`].
        event: Option<String>,
        /// The position of the last event taken under that name and key before it got here.
        after: Option<u64>,
        /// A timer is set for it.
        timed: bool,
        /// A person opens it, where a webhook could as well.
        #[serde(default, skip_serializing_if = "is_default")]
        manual: bool,
    },
    Opened(Data),
    TimedOut,
    Cancelled,
}

/// What is remembered of a task, so that a repeated report gets its first answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TaskLog {
    pub fence: Fence,
    pub attempt: u32,
    #[serde(default, skip_serializing_if = "is_default")]
    pub seq: u32,
    /// Numbers below `seq` that were never applied.
    #[serde(default, skip_serializing_if = "is_default")]
    pub gaps: Vec<u32>,
    /// It did not come to its end by itself, by a report or for lack of one: nobody wanted it any more.
    #[serde(default, skip_serializing_if = "is_default")]
    pub called_off: bool,
    /// How often in a row the attempt was claimed and did not get to its worker, up to this task.
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
    /// How many events the run had emitted before.
    #[serde(default, skip_serializing_if = "is_default")]
    pub order: u32,
}

/// What a retry or a rerun takes over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reused {
    pub activation: String,
    pub how: Taken,
    pub input: Option<Data>,
    /// Events it emitted, by name.
    pub emits: Vec<(String, Data)>,
    /// Of a memo entry.
    pub memo: Option<MemoKind>,
}

/// How much of an activation is taken over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Taken {
    /// All of it: `Completed` or `Skipped`.
    Whole(End),
    /// What is inside it, since that may have to be undone; it passes its gate with what opened it before.
    Inside { gate: Option<Data> },
}

impl Reused {
    pub fn payloads(&self) -> impl Iterator<Item = &Data> {
        let own = match &self.how {
            Taken::Whole(End::Completed(output)) => Some(output),
            Taken::Whole(_) => None,
            Taken::Inside { gate } => gate.as_ref(),
        };
        own.into_iter().chain(&self.input).chain(self.emits.iter().map(|(_, payload)| payload))
    }
}

impl Header {
    /// The first part of the idempotency keys of its handlers; the second is the activation's name. A retry has the keys of
    /// the run that it retries, so that what was done under one of them is not done again. The keys of a child come from
    /// those of its parent and the activation that started it, so a retry of the parent keeps them too.
    pub fn key_run(&self) -> RunId {
        self.key_run.unwrap_or(self.run)
    }

    /// As everybody sees it.
    pub fn status(&self) -> Status {
        match (&self.phase, &self.outcome) {
            (Phase::Ended, Some(outcome)) => outcome.status(),
            _ if self.paused => Status::Paused,
            _ if !self.begun => Status::Pending,
            _ if self.open_tasks == 0 => Status::Waiting,
            _ => Status::Running,
        }
    }

    /// Whether a child that it asked for may start: the step that waits for it is still open. A run that has completed
    /// wants its detached children, though none of its steps waits for them any more.
    pub fn wants(&self, child: &Start) -> bool {
        // A later phase has cancelled whatever was open before. A continued run is not asked for in any phase.
        let same_phase = child.asked_in == Phase::New || child.asked_in == self.phase;
        (child.parent.is_none() && self.has_completed()) || (self.takes_children() && same_phase)
    }

    /// Whether it has completed, except that `finally` may still run.
    pub fn has_completed(&self) -> bool {
        matches!(self.outcome, Some(Outcome::Completed(_)))
    }

    /// Whether children may start below it: not after its end, and not while it is being cancelled. Steps of `finally` may
    /// have children after that.
    pub fn takes_children(&self) -> bool {
        match self.phase {
            Phase::New | Phase::Delayed | Phase::Going => !self.cancelling,
            Phase::Undoing | Phase::Finally => true,
            Phase::Ended => false,
        }
    }

    /// Whether none of its tasks is given out: it is paused, or something with much in it is being cancelled, one
    /// transition after the other, and what is to be cancelled must not begin meanwhile.
    pub fn holds_tasks(&self) -> bool {
        self.paused || self.agenda.iter().any(|work| matches!(work, Work::Sweep { .. } | Work::Cancel(_)))
    }
}

impl Outcome {
    pub fn status(&self) -> Status {
        match self {
            Outcome::Completed(_) => Status::Completed,
            Outcome::Failed(_) => Status::Failed,
            Outcome::Cancelled(_) => Status::Cancelled,
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

    /// The fence of the task it has out, if any.
    pub fn fence(&self) -> Option<Fence> {
        match &self.state {
            State::Queued(fence) | State::Draining(fence) => Some(*fence),
            State::Open(Inside { what: What::Code(Driver::Queued(fence)), .. }) => Some(*fence),
            _ => None,
        }
    }

    /// What it is a part of.
    pub(crate) fn parent(&self) -> Option<ActId> {
        match &self.place {
            Place::Root | Place::Finally | Place::Undo { .. } => None,
            Place::Step { scope, .. } => Some(*scope),
            Place::Item { of, .. } | Place::Round { of, .. } => Some(*of),
            Place::Memo(_) => Some(ActId(0)),
        }
    }
}

/// What can look activations up by number: a run, or a run with a transition on top.
pub(crate) trait Activations {
    fn at(&self, id: ActId) -> &Activation;

    /// The step it is an activation of.
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

    /// A run as a store has it: `rows`, with what can be derived from its activations.
    pub fn load(mut rows: Run, flow: &Flow) -> Run {
        rows.index = Index::default();
        for activation in std::mem::take(&mut rows.activations) {
            rows.put(activation, flow);
        }
        rows
    }

    /// The run after a transition that was committed.
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

    /// Its public name.
    pub fn activation_name(&self, flow: &Flow, id: ActId) -> String {
        self.name(flow.graph(), id)
    }

    /// What an activation does, as the analysis of a flow and the memo of a code run call it.
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

    /// The queue that the tasks of an activation are offered on; none if it has no tasks of its own.
    pub fn queue<'a>(&'a self, flow: &'a Flow, id: ActId) -> Option<&'a str> {
        match (&self.at(id).place, self.kind(flow, id)) {
            (Place::Root, _) if flow.graph().is_some() => None,
            (Place::Root, _) | (_, "worker" | "call") => queue_of(self, flow, &self.header, id),
            _ => None,
        }
    }

    /// The step that it is an activation of; none for the run itself and for what a code run remembers.
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
                self.index.memo.insert(memo.name.clone(), id);
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

/// The queue of an activation's tasks: the one that its step or call names, else the one that its run was started with,
/// else the flow's. Steps of a code run that are no calls are done by its function.
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

/// Its place in the order of completion, if it is something that an undo can undo.
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
    // The items of a spread are what was done; the spread itself did nothing.
    if step.undo.is_none() || step.spread.is_some() != is_item { None } else { activation.ended }
}
