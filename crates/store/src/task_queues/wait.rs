//! Which pools wait for which bound.

use std::collections::BTreeSet;
use std::sync::Arc;

use eddyline_machine::Millis;

use super::bucket::BucketKey;
use super::suit::Suit;
use super::task_queue::Learned;
use crate::ids::{Map, Namespace};

/// The pools with tasks parked under a bound, each by the index of its queue and its suit.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    waiting: Map<Arc<BucketKey>, BTreeSet<(usize, Arc<Suit>)>>,
    /// The bounds with waiting pools, by limit.
    of_limit: Map<Namespace, Map<String, BTreeSet<Arc<BucketKey>>>>,
    /// Bounds that open by time alone, by when.
    timed: BTreeSet<(Millis, Arc<BucketKey>)>,
}

impl Waiters {
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.of_limit.is_empty()
    }

    pub fn learn(&mut self, queue: usize, learned: Learned) {
        match learned {
            Learned::Parked(suit, blocked) => {
                if let Some(until) = blocked.until {
                    self.timed.insert((until, blocked.by.clone()));
                }
                let of_ns = self.of_limit.entry(blocked.by.ns.clone()).or_default();
                match of_ns.get_mut(&blocked.by.name) {
                    Some(bounds) => _ = bounds.insert(blocked.by.clone()),
                    None => _ = of_ns.insert(blocked.by.name.clone(), BTreeSet::from([blocked.by.clone()])),
                }
                self.waiting.entry(blocked.by).or_default().insert((queue, suit));
            }
            Learned::Unparked(suit, bound) => self.drop(&bound, queue, &suit),
        }
    }

    /// No task of the suit waits for the bound any more.
    pub fn drop(&mut self, bound: &Arc<BucketKey>, queue: usize, suit: &Arc<Suit>) {
        let Some(waiting) = self.waiting.get_mut(bound) else { return };
        waiting.remove(&(queue, suit.clone()));
        if !waiting.is_empty() {
            return;
        }
        self.waiting.remove(bound);
        let Some(of_ns) = self.of_limit.get_mut(&bound.ns) else { return };
        let Some(bounds) = of_ns.get_mut(&bound.name) else { return };
        bounds.remove(bound);
        if bounds.is_empty() {
            of_ns.remove(&bound.name);
        }
        if of_ns.is_empty() {
            self.of_limit.remove(&bound.ns);
        }
    }

    /// The pools that wait for a bound. They stay registered when it opens, for as long as they have tasks parked under
    /// it: a bound that opens and closes again before any claim must still open them the next time.
    pub fn of(&self, bound: &Arc<BucketKey>) -> impl Iterator<Item = &(usize, Arc<Suit>)> {
        self.waiting.get(bound).into_iter().flatten()
    }

    /// The bounds that have opened by now.
    pub fn take_due(&mut self, now: Millis) -> Vec<Arc<BucketKey>> {
        let mut due = Vec::new();
        while let Some((at, _)) = self.timed.first()
            && *at <= now
            && let Some((_, bound)) = self.timed.pop_first()
        {
            due.push(bound);
        }
        due
    }

    /// The bounds of a limit that pools wait for: one per key, and the `slow` bucket.
    pub fn bounds_of(&self, ns: &Namespace, limit: &str) -> Vec<Arc<BucketKey>> {
        self.of_limit.get(ns).and_then(|of_ns| of_ns.get(limit)).into_iter().flatten().cloned().collect()
    }
}
