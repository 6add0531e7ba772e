//! What tasks are alike in: who can do them, and what bounds them.

use std::sync::Arc;

use eddyline_machine::{Task, TaskKind};

use super::bucket::BucketKey;
use crate::claim::Offer;
use crate::ids::Namespace;

/// What any worker would take or leave together.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Suit {
    pub flow: Arc<str>,
    pub kind: Kind,
    pub handler: String,
    requires: Vec<String>,
    build: Option<String>,
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
        let suit = Suit {
            flow: flow.clone(),
            kind: match task.kind {
                TaskKind::Step => Kind::Step,
                TaskKind::Run => Kind::Run,
            },
            handler: task.handler.clone(),
            requires: task.requires.clone(),
            build: task.build.clone(),
        };
        let limit = |(name, key): &(String, Option<String>)| Arc::new(BucketKey::limit(ns, name, key.as_deref()));
        Class { suit: Arc::new(suit), limits: task.limits.iter().map(limit).collect() }
    }
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
