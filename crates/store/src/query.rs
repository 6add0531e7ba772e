//! The types of reads: filters, pages, rows, due items and changes.

use eddyline_machine::explain::Bound;
use eddyline_machine::run::Run;
use eddyline_machine::{
    ActId, Data, Expiry, GateArrival, Message, Millis, RunId, Status, Task, TaskRef, TimerKey, Version,
};
use eddyline_machine::{Claim, record::GateId};

use crate::claim::Held;
use crate::document::Document;
use crate::ids::Namespace;

/// The most items in a page.
pub const MAX_PAGE: usize = 1_000;
/// The most messages to one run that are handed out together.
pub const MAX_INBOX: usize = 1_000;
/// Their maximum size as JSON, unless it is a single message: in memory they may take a hundred times as much. A batch
/// that reaches this size leaves messages to other runs to the next batch.
pub const MAX_INBOX_BYTES: usize = 1 << 20;

/// A run as stored: everything that `decide` reads except its payloads.
#[derive(Debug, Clone)]
pub struct Loaded {
    pub summary: Summary,
    /// Complete it with [`Run::load`].
    pub rows: Run,
}

/// The result of [`crate::Store::load`].
#[derive(Debug, Clone)]
pub enum Found {
    Nothing,
    /// The run is still at the version that the caller has.
    Same,
    /// Retention deleted its timeline and state after its end; only the header remains.
    Trimmed(Box<Summary>),
    Run(Box<Loaded>),
    /// The run has changed since the version that the caller has. Of its activations only those that were written since
    /// are there; everything else is whole.
    Changed(Box<Loaded>),
}

/// A run in a list.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    pub ns: Namespace,
    pub run: RunId,
    /// Its place among all runs of the store, in the order of creation.
    pub position: u64,
    pub version: Version,
    /// The number of records in its timeline.
    pub records: u64,
    pub created_at: Millis,
    /// When its first step was decided.
    pub started_at: Option<Millis>,
    pub ended_at: Option<Millis>,
    pub trimmed: bool,
    pub header: eddyline_machine::run::Header,
}

/// The number of runs of a flow that have not ended, by status.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct GoingRuns {
    pub ns: Namespace,
    pub flow: String,
    pub status: Status,
    pub count: u64,
}

/// Selects runs; every field that is set must match.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RunFilter {
    pub flow: Option<String>,
    /// Any of these; empty matches all.
    pub status: Vec<Status>,
    /// All of these.
    pub tags: Vec<String>,
    pub external_id: Option<String>,
    /// Descendants of this run: its children, their children and so on. Needs an index by root.
    pub root: Option<RunId>,
    /// Retries and reruns of this run. Needs an index.
    pub retry_of: Option<RunId>,
    /// Created at that time or later.
    pub since: Option<Millis>,
    /// Created before that time.
    pub until: Option<Millis>,
    /// Ended before that time. Needs an index by namespace and end.
    pub ended_before: Option<Millis>,
    pub trimmed: Option<bool>,
}

/// A part of a list: the items after the position of the last item read.
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

/// Everything that belongs to a run and is not read by `decide`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PendingWork {
    pub tasks: Vec<TaskRow>,
    pub timers: Vec<TimerRow>,
    pub gates: Vec<GateRow>,
    /// Messages to the run, oldest first; at most [`MAX_INBOX`] and [`MAX_INBOX_BYTES`].
    pub messages: Vec<Message>,
    /// It is the first in the line of its unique key.
    pub first_in_line: bool,
    /// Of a run that is not stored: the namespace of its messages. One of them may be its start.
    pub unstored_in: Option<Namespace>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct TaskRow {
    pub task: Task,
    pub queued_at: Millis,
    pub closed: bool,
    pub held: Option<Held>,
    /// Which bound keeps it from being claimed now, if no worker holds it.
    pub bound: Option<Bound>,
}

/// A timer: due by the store's clock, or by the wall clock if it was set for an absolute time.
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
    /// Set once its activation has reached the gate.
    pub arrival: Option<Arrived>,
    /// Opened, timed out or cancelled. It can still be found by its token.
    pub closed: bool,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Arrived {
    pub at: Millis,
    pub gate: GateArrival,
    /// When it times out; for a time gate, when it opens.
    pub deadline: Option<Millis>,
}

/// Selects gates. Without `token` only gates that were reached and are open, oldest first.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct GateFilter {
    pub run: Option<RunId>,
    /// An inclusive range of activations of the run.
    pub activations: Option<(ActId, ActId)>,
    pub reason: Option<eddyline_machine::record::GateReason>,
    pub token: Option<String>,
    /// Gates that wait for an event of this name and key, as canonical JSON.
    pub event: Option<(String, Option<String>)>,
}

impl GateRow {
    /// A `token` matches a gate in any state; other fields match only gates that were reached and are open.
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

/// Selects documents of a kind.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DocumentFilter {
    pub kind: String,
    /// Only this one.
    pub id: Option<String>,
    /// Ids with this prefix.
    pub prefix: Option<String>,
    /// Ids after this one.
    pub after: Option<String>,
    /// Also documents with the id `after` in namespaces after this one: for paging through all namespaces.
    pub after_ns: Option<Namespace>,
}

impl DocumentFilter {
    pub(crate) fn is_after(&self, id: &str, ns: &Namespace) -> bool {
        let Some(after) = self.after.as_deref() else { return true };
        id > after || (id == after && self.after_ns.as_ref().is_some_and(|after| ns > after))
    }
}

/// A sequence numbered across runs. A reader that continues after the last position it saw misses no late commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Feed {
    /// Runs in the order of creation, of one flow or of all.
    Runs { flow: Option<String> },
    /// Events; filtered by name, by key (canonical JSON, only with a name) and by time (`since` or later). A store must
    /// find the first match without reading earlier events.
    Events { name: Option<String>, key: Option<String>, since: Option<Millis> },
}

#[derive(Debug, Clone, PartialEq)]
pub struct FeedItem {
    pub position: u64,
    pub at: Millis,
    pub what: Fed,
}

/// A stored event, with the number of gates it opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventState {
    pub position: u64,
    pub at: Millis,
    pub name: String,
    /// As canonical JSON.
    pub key: Option<String>,
    /// Counted in the commits that opened the gates ([`eddyline_machine::Transition::events_taken`]).
    pub gates_opened: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Fed {
    Run { run: RunId, flow: String },
    Event { id: String, name: String, key: Option<String>, payload: Data },
}

/// The kinds of due items.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Due {
    Timers,
    Messages,
    Leases,
    Documents,
}

/// Due items, reserved for the caller for [`crate::HOLD_MS`].
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DueBatch {
    pub items: Vec<DueItem>,
    /// How long until the next item of the kind is due; none if there is no other. Zero: more are due now.
    pub next_in: Option<Millis>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum DueItem {
    Timer {
        ns: Namespace,
        run: RunId,
        timer: TimerRow,
    },
    /// The undelivered messages to one run, oldest first, up to [`MAX_INBOX`] and [`MAX_INBOX_BYTES`].
    Messages {
        ns: Namespace,
        to: RunId,
        messages: Vec<Message>,
        /// Their size as JSON.
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

/// The current state of a queue.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QueueState {
    pub name: String,
    pub ready: usize,
    pub claimed: usize,
    /// When the longest waiting task was queued.
    pub oldest: Option<Millis>,
}

/// A limit that a worker closed for a while, by `defer`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LimitState {
    pub name: String,
    /// No task passes it before.
    pub closed_until: Millis,
}

/// What to delete permanently.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Trim {
    /// Records, activations and values of an ended run; its header remains.
    Timeline(RunId),
    /// An ended run with everything, including its idempotency key.
    Run(RunId),
    /// Events before that time.
    Events { ns: Namespace, before: Millis },
    /// One event, by its id.
    Event { ns: Namespace, id: String },
    /// Temporary rows older than that time: ids of commands, by which repeated commands are recognised, and the states
    /// of rates that were not used since and are full again.
    Traces { before: Millis },
}

/// A hint that something may have changed. It can come twice, late or never; read the store for the state itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// The timeline of a run has grown; `ended`: with its last record.
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
    /// A lease or timeout of a task ends soon. Not sent for those that end later than in [`crate::UNWATCHED_MS`]: a
    /// serving engine checks at least that often.
    Leases,
    Documents {
        ns: Namespace,
        kind: String,
    },
    Events {
        ns: Namespace,
    },
}
