//! One queue: whose turn it is.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use eddyline_machine::explain::Bound;
use eddyline_machine::{Fence, Millis, RunId};

use super::Class;
use crate::document::QueueRules;
use crate::ids::Map;
use crate::query::QueueState;

/// Less is earlier: when it was queued less what its priority is worth, then the order of queueing.
pub(super) type Rank = (Millis, u64);

type Key = Option<Arc<str>>;
type At = (RunId, Fence);

#[derive(Debug)]
pub(super) struct Line {
    pub name: Arc<str>,
    pub rules: QueueRules,
    classes: BTreeMap<Arc<Class>, Waiting>,
    keys: Map<Key, Turns>,
    /// The turn of the key that was served last.
    turn: u64,
    ready: usize,
    claimed: u32,
    claimed_of_flow: Map<Arc<str>, u32>,
}

#[derive(Debug)]
struct Turns {
    /// How often the key was served.
    taken: u64,
    waiting: usize,
}

/// The tasks of a class.
#[derive(Debug, Default)]
struct Waiting {
    by_key: Map<Key, BTreeMap<Rank, At>>,
    /// The first of each key, under the turn of the key.
    heads: BTreeSet<(u64, Rank, Key)>,
}

impl Line {
    pub fn new(name: Arc<str>) -> Line {
        Line {
            name,
            rules: QueueRules::default(),
            classes: BTreeMap::new(),
            keys: Map::default(),
            turn: 0,
            ready: 0,
            claimed: 0,
            claimed_of_flow: Map::default(),
        }
    }

    pub fn join(&mut self, class: &Arc<Class>, key: &Key, rank: Rank, at: At) {
        let turns = self.keys.entry(key.clone()).or_insert(Turns { taken: self.turn, waiting: 0 });
        turns.waiting += 1;
        self.ready += 1;
        let waiting = self.classes.entry(class.clone()).or_default();
        let tasks = waiting.by_key.entry(key.clone()).or_default();
        let head = tasks.first_key_value().map(|(rank, _)| *rank);
        tasks.insert(rank, at);
        if head.is_none_or(|head| rank < head) {
            if let Some(head) = head {
                waiting.heads.remove(&(turns.taken, head, key.clone()));
            }
            waiting.heads.insert((turns.taken, rank, key.clone()));
        }
    }

    pub fn leave(&mut self, class: &Arc<Class>, key: &Key, rank: Rank) {
        let (Some(turns), Some(waiting)) = (self.keys.get_mut(key), self.classes.get_mut(class)) else { return };
        let Some(tasks) = waiting.by_key.get_mut(key) else { return };
        if tasks.remove(&rank).is_none() {
            return;
        }
        if waiting.heads.remove(&(turns.taken, rank, key.clone()))
            && let Some((next, _)) = tasks.first_key_value()
        {
            waiting.heads.insert((turns.taken, *next, key.clone()));
        }
        if tasks.is_empty() {
            waiting.by_key.remove(key);
        }
        if waiting.by_key.is_empty() {
            self.classes.remove(class);
        }
        self.ready -= 1;
        turns.waiting -= 1;
        if turns.waiting == 0 {
            self.turn = self.turn.max(turns.taken);
            self.keys.remove(key);
        }
    }

    /// A task of that key was claimed, so the other keys are next.
    pub fn served(&mut self, key: &Key) {
        let Some(turns) = self.keys.get_mut(key) else { return };
        let before = turns.taken;
        turns.taken += 1;
        self.turn = self.turn.max(before);
        for waiting in self.classes.values_mut() {
            if let Some((rank, _)) = waiting.by_key.get(key).and_then(|tasks| tasks.first_key_value()) {
                waiting.heads.remove(&(before, *rank, key.clone()));
                waiting.heads.insert((before + 1, *rank, key.clone()));
            }
        }
    }

    /// The task that is next among the classes that are open.
    pub fn first(&self, mut open: impl FnMut(&Class) -> bool) -> Option<(Rank, At)> {
        let mut best: Option<(u64, Rank, At)> = None;
        for (class, waiting) in &self.classes {
            let Some((turn, rank, key)) = waiting.heads.first() else { continue };
            if best.is_some_and(|(a, b, _)| (a, b) <= (*turn, *rank)) || !open(class) {
                continue;
            }
            let at = waiting.by_key.get(key).and_then(|tasks| tasks.get(rank));
            best = at.map(|at| (*turn, *rank, *at)).or(best);
        }
        best.map(|(_, rank, at)| (rank, at))
    }

    /// What closes it to every task.
    pub fn closed_by(&self) -> Option<Bound> {
        match self.rules.concurrency {
            _ if self.rules.paused => Some(Bound::Paused),
            Some(most) if self.claimed >= most => Some(Bound::Concurrency { most }),
            _ => None,
        }
    }

    pub fn ready(&self) -> usize {
        self.ready
    }

    pub fn offers_anything(&self) -> bool {
        self.ready > 0
    }

    /// What closes it to tasks of a flow.
    pub fn closed_to(&self, flow: &Arc<str>) -> Option<Bound> {
        let most = self.rules.flow_concurrency?;
        let claimed = self.claimed_of_flow.get(flow).copied().unwrap_or(0);
        (claimed >= most).then_some(Bound::FlowConcurrency { most })
    }

    pub fn count(&mut self, flow: &Arc<str>, by: i32) {
        self.claimed = self.claimed.saturating_add_signed(by);
        let of_flow = self.claimed_of_flow.entry(flow.clone()).or_default();
        *of_flow = of_flow.saturating_add_signed(by);
        if *of_flow == 0 {
            self.claimed_of_flow.remove(flow);
        }
    }

    pub fn state(&self) -> QueueState {
        QueueState { name: self.name.to_string(), ready: self.ready, claimed: self.claimed as usize, oldest: None }
    }
}
