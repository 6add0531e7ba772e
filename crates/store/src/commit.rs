//! Commands: one transition of a run, or a change of documents. Each is written as a whole or not at all.

use std::sync::Arc;

use eddyline_machine::{Data, Expiry, Fence, Input, Message, Millis, RunId, TimerKey, Transition};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::document::DocumentChange;
use crate::ids::Namespace;

/// Chosen by the caller. A command submitted again under the same id (after an unknown outcome) is applied only once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct CommandId(pub Uuid);

#[derive(Debug, Clone)]
pub enum Command {
    Run(RunCommit),
    Documents(DocumentCommit),
}

/// One transition of one run.
#[derive(Debug, Clone)]
pub struct RunCommit {
    pub ns: Namespace,
    pub command: CommandId,
    /// Refused unless the run is at its `base`; base 0 creates the run. Its messages and publishes are ignored: they
    /// refer to values of the run; `messages` and `events` below carry them with their payloads.
    pub transition: Arc<Transition>,
    pub messages: Vec<Message>,
    pub events: Vec<NewEvent>,
    /// The due items it was decided from. The commit deletes them; it is refused if one no longer exists.
    pub takes: Vec<Consumed>,
    /// Of a start: its idempotency key.
    pub key: Option<StartKey>,
    /// Of a start with a unique key: an input sent to every run ahead of it in line; see [`LINE_LIMIT`].
    pub tells_line: Option<Box<Input>>,
}

/// The most runs of a flow that have or wait for one unique key at a time.
///
/// The runs with the same `Header::unique` key, flow and namespace that have not ended stand in a line, in the order of
/// their commits. The store ensures that only the first in line executes:
///
/// - A start joins the line in the commit that creates its run. One that was decided to begin at once is refused unless
///   the line is empty. One that was decided to wait (`Header::in_line`) always joins.
/// - A run leaves the line in the commit that ends it. If it is continued as another run, that run takes its place,
///   even before its start is delivered; it leaves the line if its start is dropped.
/// - The commit that makes a waiting run the first in line, by a join or by a leave, writes a message to it
///   ([`Message::turn`]), which the commit that begins the run consumes. So each run in line begins exactly once, even
///   if processes die in between, and no two run at the same time.
pub const LINE_LIMIT: usize = 1_000;

/// A due item that a commit consumes.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Consumed {
    /// A message to the run. Its id is unique per target for as long as the run is stored.
    Message(String),
    /// The timer, if it is still set for that time.
    Timer(TimerKey, Millis),
    /// The end of a lease, of an attempt's `timeout` or of a `start_timeout`, if it has passed by the store's clock.
    /// The transition removes the task itself.
    Expiry(Fence, Expiry),
}

/// An idempotency key of a flow, with a fingerprint of the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartKey {
    pub flow: String,
    pub key: String,
    pub fingerprint: [u8; 32],
}

/// Documents, messages and events that are written together and belong to no run.
#[derive(Debug, Clone)]
pub struct DocumentCommit {
    pub ns: Namespace,
    pub command: CommandId,
    pub documents: Vec<DocumentChange>,
    pub messages: Vec<Message>,
    pub events: Vec<NewEvent>,
    /// Undeliverable messages to delete, by target and id.
    pub drops: Vec<(RunId, String)>,
}

/// An event for the namespace. It is ignored if one with its id is already stored.
#[derive(Debug, Clone, PartialEq)]
pub struct NewEvent {
    pub id: String,
    pub name: String,
    /// As canonical JSON.
    pub key: Option<String>,
    pub payload: Data,
}

/// A command that was applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// The store's time of the commit.
    pub at: Millis,
    /// The number of its first record, if it has any.
    pub first: u64,
    /// It had already been applied, by an earlier submission.
    pub before: bool,
    /// How many of its events were already stored under the same id. Not stored itself: 0 if `before`.
    pub repeats: u32,
}
