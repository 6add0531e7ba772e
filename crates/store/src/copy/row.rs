//! The rows of any kind of store in one form.
//!
//! Bodies are the stored JSON texts, interpreted only as far as a target has to, so nothing is lost or reformatted.
//! Columns that can be derived from a body are left out; a target derives them.

use std::fmt;

use eddyline_machine::{Millis, RunId, TimerKey};
use uuid::Uuid;

use crate::ids::Namespace;
use crate::query::TimerRow;

/// The tables, in the order in which they are copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Table {
    Documents,
    Rates,
    ClosedLimits,
    Commands,
    Lines,
    Messages,
    Events,
    Runs,
    Activations,
    Values,
    Emitted,
    Reuse,
    Cursors,
    Records,
    Logs,
    Tasks,
    Timers,
    Gates,
}

impl Table {
    pub const ALL: [Table; 18] = [
        Table::Documents,
        Table::Rates,
        Table::ClosedLimits,
        Table::Commands,
        Table::Lines,
        Table::Messages,
        Table::Events,
        Table::Runs,
        Table::Activations,
        Table::Values,
        Table::Emitted,
        Table::Reuse,
        Table::Cursors,
        Table::Records,
        Table::Logs,
        Table::Tasks,
        Table::Timers,
        Table::Gates,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Table::Documents => "documents",
            Table::Rates => "rates",
            Table::ClosedLimits => "closed limits",
            Table::Commands => "commands",
            Table::Lines => "unique keys",
            Table::Messages => "messages",
            Table::Events => "events",
            Table::Runs => "runs",
            Table::Activations => "activations",
            Table::Values => "values",
            Table::Emitted => "emitted events",
            Table::Reuse => "reused results",
            Table::Cursors => "event cursors",
            Table::Records => "records",
            Table::Logs => "logs",
            Table::Tasks => "tasks",
            Table::Timers => "timers",
            Table::Gates => "gates",
        }
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// One row.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Row {
    Document(CopiedDocument),
    /// The state of a rate: whole claims left, and the fraction of the next one (see [`crate::Rate`]), at a time.
    Rate {
        ns: Namespace,
        is_limit: bool,
        name: String,
        key: Option<String>,
        whole: u32,
        parts: i64,
        at: Millis,
    },
    /// A limit that is closed because a worker deferred its task.
    ClosedLimit {
        ns: Namespace,
        name: String,
        until: Millis,
    },
    /// The id of a commit of documents, to detect repeats.
    Command {
        id: Uuid,
        at: Millis,
    },
    /// A position in the queue of a unique key.
    Line {
        place: u64,
        ns: Namespace,
        flow: String,
        key: String,
        run: RunId,
    },
    Message(CopiedMessage),
    Event(CopiedEvent),
    Run(Box<CopiedRun>),
    Activation {
        run: RunId,
        id: u64,
        body: String,
    },
    Value {
        run: RunId,
        id: u64,
        body: String,
    },
    Emitted {
        run: RunId,
        scope: u32,
        event: u32,
        body: String,
    },
    Reuse {
        run: RunId,
        activation: String,
        body: String,
    },
    Cursor {
        run: RunId,
        name: String,
        position: u64,
    },
    Records(CopiedRecords),
    /// The records from `first` on include logs of the activation.
    Log {
        run: RunId,
        activation: String,
        first: u64,
    },
    Task(Box<CopiedTask>),
    Timer {
        run: RunId,
        key: TimerKey,
        due: Millis,
        wall: bool,
    },
    Gate(Box<CopiedGate>),
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CopiedDocument {
    pub ns: Namespace,
    pub kind: String,
    pub id: String,
    pub revision: u64,
    pub due: Option<Millis>,
    pub changed_at: Millis,
    pub body: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CopiedMessage {
    pub place: u64,
    pub ns: Namespace,
    pub to: RunId,
    pub id: String,
    pub body: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CopiedEvent {
    pub position: u64,
    pub ns: Namespace,
    pub id: String,
    pub name: String,
    pub key: Option<String>,
    pub at: Millis,
    pub gates_opened: u64,
    pub payload: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CopiedRun {
    pub run: RunId,
    pub ns: Namespace,
    /// Its position in lists.
    pub position: u64,
    /// Its position in feeds.
    pub fed_at: u64,
    pub created_at: Millis,
    pub started_at: Option<Millis>,
    pub ended_at: Option<Millis>,
    pub trimmed: bool,
    /// The number of its records; 0 if they are trimmed.
    pub records: u64,
    pub key: Option<CopiedKey>,
    pub header: String,
}

/// An idempotency key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CopiedKey {
    pub flow: String,
    pub key: String,
    pub fingerprint: [u8; 32],
}

/// Records that were written together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CopiedRecords {
    pub run: RunId,
    pub first: u64,
    pub count: u32,
    pub version: u64,
    pub command: Option<Uuid>,
    pub ts: Millis,
    pub body: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CopiedTask {
    pub run: RunId,
    pub fence: u64,
    /// Its position among all tasks ever queued.
    pub place: u64,
    pub queued_at: Millis,
    pub closed: bool,
    /// When its `start_timeout` ends, if it is not claimed before.
    pub start_by: Option<Millis>,
    pub claim: Option<CopiedClaim>,
    pub body: String,
}

/// The claim of a task, without the end of its lease.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CopiedClaim {
    pub worker: String,
    pub request: Uuid,
    pub since: Millis,
    pub lease_ms: Millis,
    pub deadline: Option<Millis>,
    pub build: Option<String>,
    pub memo: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CopiedGate {
    pub run: RunId,
    pub activation: u32,
    pub token: Option<String>,
    /// Its position in the order of arrival; 0 if the run has not reached it.
    pub position: u64,
    pub closed: bool,
    pub arrival: Option<CopiedArrival>,
}

/// The run has reached the gate.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CopiedArrival {
    pub at: Millis,
    pub deadline: Option<Millis>,
    pub body: String,
}

impl Row {
    pub fn table(&self) -> Table {
        match self {
            Row::Document(_) => Table::Documents,
            Row::Rate { .. } => Table::Rates,
            Row::ClosedLimit { .. } => Table::ClosedLimits,
            Row::Command { .. } => Table::Commands,
            Row::Line { .. } => Table::Lines,
            Row::Message(_) => Table::Messages,
            Row::Event(_) => Table::Events,
            Row::Run(_) => Table::Runs,
            Row::Activation { .. } => Table::Activations,
            Row::Value { .. } => Table::Values,
            Row::Emitted { .. } => Table::Emitted,
            Row::Reuse { .. } => Table::Reuse,
            Row::Cursor { .. } => Table::Cursors,
            Row::Records(_) => Table::Records,
            Row::Log { .. } => Table::Logs,
            Row::Task(_) => Table::Tasks,
            Row::Timer { .. } => Table::Timers,
            Row::Gate(_) => Table::Gates,
        }
    }

    pub(crate) fn timer(run: RunId, timer: TimerRow) -> Row {
        Row::Timer { run, key: timer.key, due: timer.due, wall: timer.wall }
    }

    /// Roughly how much memory the row takes.
    pub(crate) fn bytes(&self) -> usize {
        let body = match self {
            Row::Document(row) => row.body.len(),
            Row::Message(row) => row.body.len(),
            Row::Event(row) => row.payload.len(),
            Row::Run(row) => row.header.len(),
            Row::Activation { body, .. }
            | Row::Value { body, .. }
            | Row::Emitted { body, .. }
            | Row::Reuse { body, .. } => body.len(),
            Row::Records(row) => row.body.len(),
            Row::Task(row) => row.body.len(),
            Row::Gate(row) => row.arrival.as_ref().map_or(0, |arrival| arrival.body.len()),
            Row::Rate { .. }
            | Row::ClosedLimit { .. }
            | Row::Command { .. }
            | Row::Line { .. }
            | Row::Cursor { .. }
            | Row::Log { .. }
            | Row::Timer { .. } => 0,
        };
        body + 128
    }
}
