//! Documents: everything that is neither a run nor an event. Definitions, queues, limits, schedules, workers, keys.

use eddyline_machine::Millis;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::ids::Namespace;

/// The kinds that a store interprets; it only keeps all others.
pub mod kind {
    /// The rules of a queue: [`super::QueueRules`].
    pub const QUEUE: &str = "queue";
    /// The rules of a limit: [`super::LimitRules`].
    pub const LIMIT: &str = "limit";
}

#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DocumentKey {
    pub kind: String,
    pub id: String,
}

impl DocumentKey {
    pub fn new(kind: &str, id: impl Into<String>) -> DocumentKey {
        DocumentKey { kind: kind.to_owned(), id: id.into() }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub struct Document {
    pub ns: Namespace,
    pub key: DocumentKey,
    /// Grows with every change, from 1, also across a deletion: a key never gets an old revision again.
    pub revision: u64,
    pub body: Value,
    /// When it becomes due, by the wall clock: a schedule's next slot.
    pub due: Option<Millis>,
    pub changed_at: Millis,
}

/// The new state of a document.
#[derive(Debug, Clone, PartialEq)]
pub struct DocumentChange {
    pub key: DocumentKey,
    pub expect: Expect,
    /// None deletes it.
    pub body: Option<Value>,
    pub due: Option<Millis>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expect {
    Any,
    /// It must not exist.
    Absent,
    Revision(u64),
}

/// `count` claims per `per_ms`, and `burst` at once after a pause.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rate {
    pub count: u32,
    pub per_ms: Millis,
    pub burst: u32,
}

/// How a queue is claimed. A queue without rules has no bounds.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct QueueRules {
    pub paused: bool,
    pub concurrency: Option<u32>,
    /// The most tasks of one flow that are claimed at once.
    pub flow_concurrency: Option<u32>,
    pub rate: Option<Rate>,
}

impl QueueRules {
    /// Parses the rules in a document. If they are unreadable, their bounds are unknown, so the queue counts as paused.
    pub fn read(body: &Value) -> QueueRules {
        QueueRules::deserialize(body).unwrap_or(QueueRules { paused: true, ..QueueRules::default() })
    }

    /// Why the rules in a document are unreadable.
    pub fn fault(body: &Value) -> Option<String> {
        QueueRules::deserialize(body).err().map(|error| format!("its rules can't be read: {error}"))
    }
}

impl LimitRules {
    /// Parses the rules in a document. If they are unreadable, their bounds are unknown, so no task passes the limit.
    pub fn read(body: &Value) -> LimitRules {
        LimitRules::deserialize(body).unwrap_or(LimitRules { concurrency: Some(0), rate: None })
    }

    /// Why the rules in a document are unreadable.
    pub fn fault(body: &Value) -> Option<String> {
        LimitRules::deserialize(body).err().map(|error| format!("its rules can't be read: {error}"))
    }
}

/// The bounds of a limit; they apply to each key that tasks name with it.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct LimitRules {
    pub concurrency: Option<u32>,
    pub rate: Option<Rate>,
}
