//! Groups of equivalent tasks: by the workers that can execute them (suit), and also by their limits (class).

use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::{Arc, OnceLock};

use eddyline_machine::{Task, TaskKind};
use foldhash::fast::RandomState;

use super::bucket::BucketKey;
use crate::claim::Offer;
use crate::ids::Namespace;

/// The properties of a task that decide whether a worker's offer matches it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Suit {
    pub flow: Arc<str>,
    pub kind: Kind,
    pub handler: String,
    requires: Vec<String>,
    build: Option<String>,
    /// The hash of all the above, precomputed: a suit is looked up several times for each task.
    hash: u64,
}

impl Hash for Suit {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(self.hash);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Kind {
    Step,
    Run,
}

/// Tasks that suit the same workers and pass the same limits.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Class {
    pub suit: Arc<Suit>,
    pub limits: Vec<Arc<BucketKey>>,
}

impl Class {
    pub fn of(ns: &Namespace, flow: &Arc<str>, task: &Task) -> Class {
        let kind = match task.kind {
            TaskKind::Step => Kind::Step,
            TaskKind::Run => Kind::Run,
        };
        let hash = hasher().hash_one((flow, kind, &task.handler, &task.requires, &task.build));
        let suit = Suit {
            flow: flow.clone(),
            kind,
            handler: task.handler.clone(),
            requires: task.requires.clone(),
            build: task.build.clone(),
            hash,
        };
        let limit = |(name, key): &(String, Option<String>)| Arc::new(BucketKey::limit(ns, name, key.as_deref()));
        Class { suit: Arc::new(suit), limits: task.limits.iter().map(limit).collect() }
    }
}

/// One hasher for the whole process, so that equal suits have equal hashes.
fn hasher() -> &'static RandomState {
    static HASHER: OnceLock<RandomState> = OnceLock::new();
    HASHER.get_or_init(RandomState::default)
}

impl Suit {
    pub fn suits(&self, offer: &Offer) -> bool {
        let kind = match self.kind {
            Kind::Step => TaskKind::Step,
            Kind::Run => TaskKind::Run,
        };
        offer.takes(kind, &self.handler, &self.requires, self.build.as_deref())
    }
}
