//! Claims: a worker gets tasks, each at most once, for as long as it keeps its lease.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use eddyline_machine::{Claim, Fence, Millis, RunId, Task, TaskKind, TaskRef};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::ids::Namespace;

/// Given by whoever claims; the same again gets the same tasks again, as far as they are still held.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct RequestId(pub Uuid);

#[derive(Debug, Clone)]
pub struct ClaimRequest {
    pub ns: Namespace,
    pub request: RequestId,
    pub worker: String,
    pub queues: Vec<String>,
    pub offer: Arc<Offer>,
    pub max: usize,
    /// How many tasks the worker may have in all, with those it got by other claims.
    pub most_held: Option<usize>,
    pub lease_ms: Millis,
}

/// What a worker can do. With neither handlers nor flows it is offered everything.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Offer {
    pub handlers: BTreeSet<String>,
    /// Code flows by name, each with the build of its function.
    pub flows: BTreeMap<String, Option<String>>,
    pub labels: BTreeSet<String>,
    /// The build of the worker, for what `flows` does not name.
    pub build: Option<String>,
}

impl Offer {
    pub fn takes(&self, kind: TaskKind, handler: &str, requires: &[String], build: Option<&str>) -> bool {
        let anything = self.handlers.is_empty() && self.flows.is_empty();
        let named = match kind {
            TaskKind::Step => self.handlers.contains(handler),
            TaskKind::Run => self.flows.contains_key(handler),
        };
        (anything || named)
            && requires.iter().all(|label| self.labels.contains(label))
            && build.is_none_or(|build| self.build_of(handler) == Some(build))
    }

    /// The build that runs a handler or a flow.
    pub fn build_of(&self, handler: &str) -> Option<&str> {
        self.flows.get(handler).and_then(Option::as_deref).or(self.build.as_deref())
    }
}

/// A task that a worker has.
#[derive(Debug, Clone, PartialEq)]
pub struct Claimed {
    pub ns: Namespace,
    pub run: RunId,
    pub flow: String,
    pub task: Arc<Task>,
    pub held: Held,
}

/// How a worker has a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Held {
    pub worker: String,
    pub request: RequestId,
    pub since: Millis,
    pub lease_ms: Millis,
    pub lease_until: Millis,
    /// The end of the attempt's time.
    pub deadline: Option<Millis>,
    pub claim: Claim,
}

/// What came of one claim.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Claims {
    pub tasks: Vec<Claimed>,
    /// Of a claim that got less than it asked for: when to ask again. No later than the first of the tasks it suits, and
    /// that wait for nothing but a moment (a rate, a limit that a worker closed), may be claimed.
    pub retry_at: Option<Millis>,
    /// It got less than it asked for because its worker has as many tasks as it may have.
    pub full: bool,
}

/// A lease to be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Lease {
    pub run: RunId,
    pub fence: Fence,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extended {
    Until {
        lease_until: Millis,
        deadline: Option<Millis>,
        /// Only its last report is wanted: the run is on its way to its end.
        closed: bool,
        /// Of a code run: the newest change in the memo that was handed over.
        memo: Option<u64>,
    },
    /// The worker does not have it (any more).
    Lost,
}

/// How it stands with a lease, as [`crate::Store::leases`] tells it.
#[derive(Debug, Clone, PartialEq)]
pub enum LeaseState {
    Held {
        task: TaskRef,
        claim: Claim,
        /// Only its last report is wanted: the run is on its way to its end.
        closed: bool,
        /// Of the function of a code run: the newest change of the run's memo by now.
        memo: Option<u64>,
    },
    /// The worker does not have it (any more).
    Lost,
}
