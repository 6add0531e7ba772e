//! What is written: one transition of a run, or a change of documents, each as a whole or not at all.

use std::sync::Arc;

use eddyline_machine::{Data, Expiry, Fence, Input, Message, Millis, RunId, TimerKey, Transition};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::document::DocumentChange;
use crate::ids::Namespace;

/// Given by whoever submits a command, so that submitting it again after an unknown outcome does it at most once.
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
    /// Refused unless the run is at its `base`; base 0 makes the run. Its messages and publishes are not looked at: they
    /// refer to values of the run, and are given below with their payloads instead.
    pub transition: Arc<Transition>,
    pub messages: Vec<Message>,
    pub events: Vec<NewEvent>,
    /// What it was decided from. All of it goes with the commit; what is gone already refuses it.
    pub takes: Vec<Taken>,
    /// Of a start: the key under which it happens once.
    pub key: Option<StartKey>,
    /// Of a start with a unique key: what every run is told that is before it in line; see [`LINE_LIMIT`].
    pub tells_line: Option<Box<Input>>,
}

/// How many runs of a flow have or want one unique key at a time.
///
/// The runs with the same `Header::unique` key, flow and namespace that have not ended stand in a line, in the order of
/// their commits. The store enforces that only the first of a line goes on:
///
/// - A start joins the line in the commit that makes its run. One that was decided to begin at once is refused unless the
///   line is empty. One that was decided to wait (`Header::in_line`) always joins.
/// - A run leaves the line in the commit that ends it. If it is continued as another run, that run has its place, even
///   before its start is delivered; it leaves the line if its start is dropped.
/// - The commit that makes a waiting run the first of its line, by a join or by a leave, writes a message to it
///   ([`Message::turn`]), which the commit that sets the run going consumes. So each run in line is set going exactly
///   once, whichever process dies in between, and never beside another.
pub const LINE_LIMIT: usize = 1_000;

/// A due item that a commit uses up.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Taken {
    /// A message to the run. Its id is unique for its target, for as long as the run is kept.
    Message(String),
    /// The timer, if it is still set for that moment.
    Timer(TimerKey, Millis),
    /// The end of a lease, of an attempt's time or of the time to be claimed: only if it has passed by the store's clock.
    /// The task itself goes by the transition.
    Expiry(Fence, Expiry),
}

/// An idempotency key of a flow, with a fingerprint of what was asked for under it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StartKey {
    pub flow: String,
    pub key: String,
    pub fingerprint: [u8; 32],
}

/// Documents, messages and events that belong together and to no run.
#[derive(Debug, Clone)]
pub struct DocumentCommit {
    pub ns: Namespace,
    pub command: CommandId,
    pub documents: Vec<DocumentChange>,
    pub messages: Vec<Message>,
    pub events: Vec<NewEvent>,
    /// Messages that cannot be delivered, by target and id.
    pub drops: Vec<(RunId, String)>,
}

/// An event for the namespace. One with an id that is kept already changes nothing.
#[derive(Debug, Clone, PartialEq)]
pub struct NewEvent {
    pub id: String,
    pub name: String,
    /// As canonical JSON.
    pub key: Option<String>,
    pub payload: Data,
}

/// A command that was carried out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// The store's time of the commit.
    pub at: Millis,
    /// The number of its first record, if it has any.
    pub first: u64,
    /// It was carried out before, when it was submitted the first time.
    pub before: bool,
    /// Events of it that were kept already under the same id. Not remembered: none of a command that was carried out
    /// before.
    pub repeats: u32,
}
