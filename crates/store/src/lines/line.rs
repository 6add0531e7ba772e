//! One queue: its rules, and whose turn it is.

use std::collections::BTreeMap;
use std::sync::Arc;

use eddyline_machine::Millis;
use eddyline_machine::explain::Bound;

use super::bounds::Blocked;
use super::bucket::BucketKey;
use super::pool::{At, First, Pool};
use super::ring::{Key, Rank, Turns};
use super::suit::{Class, Suit};
use crate::claim::Offer;
use crate::document::QueueRules;
use crate::ids::{Map, Namespace};
use crate::query::QueueState;

#[derive(Debug)]
pub(super) struct Line {
    pub ns: Namespace,
    pub name: Arc<str>,
    pub rules: QueueRules,
    pools: Map<Arc<Suit>, Pool>,
    turns: Turns,
    /// How many tasks wait, by when they were queued.
    ages: BTreeMap<Millis, usize>,
    ready: usize,
    claimed: u32,
    claimed_of_flow: Map<Arc<str>, u32>,
}

/// A task that waits, as far as its queue needs to know it.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub class: Arc<Class>,
    pub key: Key,
    pub rank: Rank,
    pub queued_at: Millis,
}

/// What was found out about pools while looking for the first task.
#[derive(Debug)]
pub(super) enum Learned {
    /// Tasks of the suit wait for the bound.
    Parked(Arc<Suit>, Blocked),
    /// No task of the suit waits for the bound any more.
    Unparked(Arc<Suit>, Arc<BucketKey>),
}

impl Line {
    pub fn new(ns: &Namespace, name: Arc<str>) -> Line {
        Line {
            ns: ns.clone(),
            name,
            rules: QueueRules::default(),
            pools: Map::default(),
            turns: Turns::default(),
            ages: BTreeMap::new(),
            ready: 0,
            claimed: 0,
            claimed_of_flow: Map::default(),
        }
    }

    pub fn join(&mut self, place: &Place, at: At) {
        self.ready += 1;
        *self.ages.entry(place.queued_at).or_default() += 1;
        self.turns.join(&place.key);
        let pool = self.pools.entry(place.class.suit.clone()).or_default();
        pool.join(&self.turns, &place.class, &place.key, place.rank, at);
    }

    /// The bound that no task of its suit waits for any more, if it was the last.
    pub fn leave(&mut self, place: &Place) -> Option<Arc<BucketKey>> {
        let suit = &place.class.suit;
        let pool = self.pools.get_mut(suit)?;
        let unparked = pool.leave(&self.turns, &place.class, &place.key, place.rank);
        if pool.is_empty() {
            self.pools.remove(suit);
        }
        self.turns.leave(&place.key);
        self.ready -= 1;
        if let Some(count) = self.ages.get_mut(&place.queued_at) {
            *count -= 1;
            if *count == 0 {
                self.ages.remove(&place.queued_at);
            }
        }
        unparked
    }

    /// A task of that key was claimed, so the other keys are next.
    pub fn served(&mut self, key: &Key) {
        self.turns.served(key);
    }

    /// The suits of waiting tasks that a worker can do.
    pub fn suits(&self, offer: &Offer) -> Vec<Arc<Suit>> {
        self.pools.keys().filter(|suit| suit.suits(offer)).cloned().collect()
    }

    /// The task that is next among those of these suits that nothing blocks.
    pub fn first(
        &mut self,
        suits: &[Arc<Suit>],
        blocked: impl Fn(&Class) -> Option<Blocked>,
        learned: &mut Vec<Learned>,
    ) -> Option<(Rank, At)> {
        let mut best: Option<(u64, Rank, At)> = None;
        for suit in suits {
            if self.closed_to(&suit.flow).is_some() {
                continue;
            }
            let Some(pool) = self.pools.get_mut(suit) else { continue };
            while let Some(First { turn, rank, at, class }) = pool.first(&self.turns)
                && best.is_none_or(|(a, b, _)| (turn, rank) < (a, b))
            {
                let Some(blocked) = blocked(&class) else {
                    best = Some((turn, rank, at));
                    break;
                };
                let unparked = pool.park(&self.turns, &class, &blocked);
                learned.push(Learned::Parked(suit.clone(), blocked));
                learned.extend(unparked.map(|bound| Learned::Unparked(suit.clone(), bound)));
            }
        }
        best.map(|(_, rank, at)| (rank, at))
    }

    /// What blocked tasks of the suit may let something pass.
    pub fn open(&mut self, suit: &Arc<Suit>, bound: &Arc<BucketKey>) {
        if let Some(pool) = self.pools.get_mut(suit) {
            pool.open(&self.turns, bound);
        }
    }

    /// When the first of the tasks of these suits that wait for a moment may be claimed.
    pub fn opens_at(&self, suits: &[Arc<Suit>]) -> Option<Millis> {
        let open = suits.iter().filter(|suit| self.closed_to(&suit.flow).is_none());
        open.filter_map(|suit| self.pools.get(suit)?.opens_at()).min()
    }

    /// What closes it to every task.
    pub fn closed_by(&self) -> Option<Bound> {
        match self.rules.concurrency {
            _ if self.rules.paused => Some(Bound::Paused),
            Some(most) if self.claimed >= most => Some(Bound::Concurrency { most }),
            _ => None,
        }
    }

    /// Nothing is left of the tasks it had.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.pools.is_empty() && self.ages.is_empty() && self.claimed_of_flow.is_empty() && self.claimed == 0
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
        QueueState {
            name: self.name.to_string(),
            ready: self.ready,
            claimed: self.claimed as usize,
            oldest: self.ages.first_key_value().map(|(at, _)| *at),
        }
    }
}
