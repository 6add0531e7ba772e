//! What is read.

use eddyline_machine::explain::Bound;
use eddyline_machine::run::Run;
use eddyline_machine::{
    ActId, Data, Expiry, GateArrival, Message, Millis, RunId, Status, Task, TaskRef, TimerKey, Version,
};
use eddyline_machine::{Claim, record::GateId};

use crate::claim::Held;
use crate::document::Document;
use crate::ids::Namespace;

/// Pages hold at most this many items.
pub const MAX_PAGE: usize = 1_000;
/// Messages of one run that are handed out together, at most.
pub const MAX_INBOX: usize = 1_000;
/// And how large they are at most as JSON, unless it is a single one: in memory they may take a hundred times as much. When
/// so much is handed out, messages to other runs are left to the next batch.
pub const MAX_INBOX_BYTES: usize = 1 << 20;

/// A run as it is stored: everything that `decide` reads but its payloads.
#[derive(Debug, Clone)]
pub struct Loaded {
    pub summary: Summary,
    /// To be completed by [`Run::load`].
    pub rows: Run,
}

/// What [`crate::Store::load`] found.
#[derive(Debug, Clone)]
pub enum Found {
    Nothing,
    /// The run is still at the version that the caller has.
    Same,
    /// Its timeline and state were deleted after its end; the header is left.
    Trimmed(Box<Summary>),
    Run(Box<Loaded>),
}

/// A run in a list.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    pub ns: Namespace,
    pub run: RunId,
    /// Its place among all runs of the store, in the order of creation.
    pub position: u64,
    pub version: Version,
    /// How many records its timeline has.
    pub records: u64,
    pub created_at: Millis,
    /// When its first step was decided.
    pub started_at: Option<Millis>,
    pub ended_at: Option<Millis>,
    pub trimmed: bool,
    pub header: eddyline_machine::run::Header,
}

/// Runs of a flow that have not ended and have the same status.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GoingRuns {
    pub ns: Namespace,
    pub flow: String,
    pub status: Status,
    pub count: u64,
}

/// Which runs; every field that is set must match.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RunFilter {
    pub flow: Option<String>,
    /// Any of these; all without one.
    pub status: Vec<Status>,
    /// All of these.
    pub tags: Vec<String>,
    pub external_id: Option<String>,
    /// Those that descend from this run: its children, their children and so on. A store finds and counts them by an
    /// index of their roots.
    pub root: Option<RunId>,
    /// Retries and reruns of this run. A store finds them by an index.
    pub retry_of: Option<RunId>,
    /// Created at that moment or later.
    pub since: Option<Millis>,
    /// Created before that moment.
    pub until: Option<Millis>,
    /// Ended before that moment. A store finds those of one namespace by an index of their ends.
    pub ended_before: Option<Millis>,
    pub trimmed: Option<bool>,
}

/// A part of a list: what comes after the position of the last item that was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Page {
    pub after: Option<u64>,
    pub limit: usize,
}

impl Default for Page {
    fn default() -> Page {
        Page { after: None, limit: MAX_PAGE }
    }
}

/// Everything that hangs on a run and is not read by `decide`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Beside {
    pub tasks: Vec<TaskRow>,
    pub timers: Vec<TimerRow>,
    pub gates: Vec<GateRow>,
    /// To the run, oldest first; at most [`MAX_INBOX`] and [`MAX_INBOX_BYTES`].
    pub messages: Vec<Message>,
    /// It is the first of those that have or want its unique key.
    pub first_in_line: bool,
    /// Of a run that is not stored: the namespace that these messages are of. One of them may be its start.
    pub unstored_in: Option<Namespace>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct TaskRow {
    pub task: Task,
    pub queued_at: Millis,
    pub closed: bool,
    pub held: Option<Held>,
    /// What keeps it from being claimed at the moment, if nobody has it.
    pub bound: Option<Bound>,
}

/// A timer: due by the store's clock, or by the wall clock where a moment was given.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TimerRow {
    pub key: TimerKey,
    pub due: Millis,
    pub wall: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct GateRow {
    pub ns: Namespace,
    pub position: u64,
    pub id: GateId,
    pub token: Option<String>,
    /// Once its activation has got there.
    pub arrival: Option<Arrived>,
    /// Opened, timed out or cancelled; its token still finds it.
    pub closed: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Arrived {
    pub at: Millis,
    pub gate: GateArrival,
    /// When it times out; of a time gate, when it opens.
    pub deadline: Option<Millis>,
}

/// Which gates. Without `token` only those are listed that were arrived at and are open, oldest first.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GateFilter {
    pub run: Option<RunId>,
    /// From this activation of the run to that one.
    pub activations: Option<(ActId, ActId)>,
    pub reason: Option<eddyline_machine::record::GateReason>,
    pub token: Option<String>,
    /// Gates that wait for an event of this name and key, as canonical JSON.
    pub event: Option<(String, Option<String>)>,
}

impl GateRow {
    /// `token` finds a gate in any state, anything else only one that is arrived at and open.
    pub(crate) fn matches(&self, filter: &GateFilter) -> bool {
        if let Some(token) = &filter.token {
            return self.token.as_ref() == Some(token);
        }
        let Some(arrived) = &self.arrival else { return false };
        !self.closed
            && filter.run.is_none_or(|run| run == self.id.run)
            && filter.activations.is_none_or(|(from, to)| (from..=to).contains(&self.id.activation))
            && filter.reason.is_none_or(|reason| reason == arrived.gate.reason)
            && filter.event.as_ref().is_none_or(|(name, key)| {
                arrived.gate.event.as_ref().is_some_and(|event| event.name == *name && event.key == *key)
            })
    }
}

/// Which documents of a kind.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DocumentFilter {
    pub kind: String,
    /// Only this one.
    pub id: Option<String>,
    /// Ids that begin so.
    pub prefix: Option<String>,
    /// Ids after this one.
    pub after: Option<String>,
    /// Those with the id `after`, too, of namespaces after this one: the last document of a page, where all namespaces are
    /// listed.
    pub after_ns: Option<Namespace>,
}

impl DocumentFilter {
    pub(crate) fn is_after(&self, id: &str, ns: &Namespace) -> bool {
        let Some(after) = self.after.as_deref() else { return true };
        id > after || (id == after && self.after_ns.as_ref().is_some_and(|after| ns > after))
    }
}

/// What is numbered across runs. A reader that goes on after the last position it saw misses nothing that commits late.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Feed {
    /// Runs in the order of creation, of one flow or of all.
    Runs { flow: Option<String> },
    /// Events, all or those of a name, and then of a key as canonical JSON; those of a moment or later. A store finds the
    /// first of them without reading those before it.
    Events { name: Option<String>, key: Option<String>, since: Option<Millis> },
}

#[derive(Debug, Clone, PartialEq)]
pub struct FeedItem {
    pub position: u64,
    pub at: Millis,
    pub what: Fed,
}

/// An event and what became of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventState {
    pub position: u64,
    pub at: Millis,
    pub name: String,
    /// As canonical JSON.
    pub key: Option<String>,
    /// How many gates it has opened: counted in the commits that opened them ([`eddyline_machine::Transition::events_taken`]).
    pub gates_opened: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Fed {
    Run { run: RunId, flow: String },
    Event { id: String, name: String, key: Option<String>, payload: Data },
}

/// What can be due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Due {
    Timers,
    Messages,
    Leases,
    Documents,
}

/// What is due now, handed out to nobody else for [`crate::HOLD_MS`].
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DueBatch {
    pub items: Vec<DueItem>,
    /// How long until something of the kind is due; none if nothing is in sight. Zero: there is more.
    pub next_in: Option<Millis>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum DueItem {
    Timer {
        ns: Namespace,
        run: RunId,
        timer: TimerRow,
    },
    /// The messages that wait for one run, oldest first, up to [`MAX_INBOX`] and [`MAX_INBOX_BYTES`].
    Messages {
        ns: Namespace,
        to: RunId,
        messages: Vec<Message>,
        /// How large they are as JSON.
        bytes: usize,
    },
    Lease {
        ns: Namespace,
        run: RunId,
        task: TaskRef,
        why: Expiry,
        claim: Claim,
    },
    Document(Document),
}

/// A queue as it is now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QueueState {
    pub name: String,
    pub ready: usize,
    pub claimed: usize,
    /// Of the task that has waited longest.
    pub oldest: Option<Millis>,
}

/// A limit that a worker asked to slow down, by `defer`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitState {
    pub name: String,
    /// Until then nothing passes it.
    pub closed_until: Millis,
}

/// What is deleted for good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trim {
    /// Records, activations and values of an ended run; its header is left.
    Timeline(RunId),
    /// An ended run altogether, with its idempotency key.
    Run(RunId),
    /// Events from before that moment.
    Events { ns: Namespace, before: Millis },
    /// One event, by its id.
    Event { ns: Namespace, id: String },
    /// What was only kept for a while: ids of commands from before that moment, which tell a repeat after an unknown
    /// outcome, and rates that nothing was claimed under since and that have filled up again.
    Traces { before: Millis },
}

/// Something may have changed. A hint, which can come twice, late or not at all; what is true is read from the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The timeline of a run has grown; `ended` says that this was its last record.
    Run {
        run: RunId,
        ended: bool,
    },
    /// There are tasks to claim.
    Tasks {
        ns: Namespace,
        queue: String,
    },
    Timers,
    Messages,
    /// The time of a task is up soon. Of those that have longer than [`crate::UNWATCHED_MS`] nobody is told: whoever serves
    /// looks at least that often.
    Leases,
    Documents {
        ns: Namespace,
        kind: String,
    },
    Events {
        ns: Namespace,
    },
}
