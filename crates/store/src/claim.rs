//! Claims: a worker gets tasks, each exclusively for as long as it keeps its lease.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use eddyline_machine::{Claim, Fence, Millis, RunId, Task, TaskKind, TaskRef};
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::ids::Namespace;

/// Chosen by the caller. A repeated request gets the same tasks again, as far as they are still claimed.
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
    /// The most tasks the worker may hold in all, including those from other claims.
    pub most_held: Option<usize>,
    pub lease_ms: Millis,
}

/// What a worker can execute. Without handlers and flows it is offered everything.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Offer {
    pub handlers: BTreeSet<String>,
    /// Code flows by name, each with the build of its function.
    pub flows: BTreeMap<String, Option<String>>,
    pub labels: BTreeSet<String>,
    /// The build of the worker, for everything not named in `flows`.
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

/// A task that a worker holds.
#[derive(Debug, Clone, PartialEq)]
pub struct Claimed {
    pub ns: Namespace,
    pub run: RunId,
    pub flow: String,
    pub task: Arc<Task>,
    pub held: Held,
}

/// Who holds a task, and until when.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Held {
    pub worker: String,
    pub request: RequestId,
    pub since: Millis,
    pub lease_ms: Millis,
    pub lease_until: Millis,
    /// When the `timeout` of the attempt ends.
    pub deadline: Option<Millis>,
    pub claim: Claim,
}

/// The result of one claim.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Claims {
    pub tasks: Vec<Claimed>,
    /// If the claim got fewer tasks than it asked for: when to ask again. No later than the first matching task becomes
    /// claimable among those that wait only for a point in time (a rate, a limit that a worker closed).
    pub retry_at: Option<Millis>,
    /// The claim got fewer tasks than it asked for because its worker reached `most_held`.
    pub full: bool,
    /// The store knows that no task was left that the claim could have got. Callers may look again at once otherwise.
    pub exhausted: bool,
}

/// Identifies a lease.
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
        /// Only its final report is accepted: the run is ending.
        closed: bool,
        /// Of a code run: the newest change in the memo that the worker was given.
        memo: Option<u64>,
    },
    /// The worker does not hold it (any more).
    Lost,
}

/// The state of a lease, from [`crate::Store::leases`].
#[derive(Debug, Clone, PartialEq)]
pub enum LeaseState {
    Held {
        task: TaskRef,
        claim: Claim,
        /// Only its final report is accepted: the run is ending.
        closed: bool,
        /// Of the function of a code run: the newest change in the run's memo now.
        memo: Option<u64>,
    },
    /// The worker does not hold it (any more).
    Lost,
}
