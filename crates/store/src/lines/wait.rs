//! Who waits for which bound.

use std::collections::BTreeSet;
use std::sync::Arc;

use eddyline_machine::Millis;

use super::bucket::BucketKey;
use super::line::Learned;
use super::suit::Suit;
use crate::ids::{Map, Namespace};

/// The pools that parked tasks under a bound, each by the line it is in and its suit.
#[derive(Debug, Default)]
pub(super) struct Waiters {
    waiting: Map<Arc<BucketKey>, BTreeSet<(usize, Arc<Suit>)>>,
    /// Bounds that let something pass again by themselves, by when.
    timed: BTreeSet<(Millis, Arc<BucketKey>)>,
}

impl Waiters {
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub fn learn(&mut self, line: usize, learned: Learned) {
        match learned {
            Learned::Parked(suit, blocked) => {
                if let Some(until) = blocked.until {
                    self.timed.insert((until, blocked.by.clone()));
                }
                self.waiting.entry(blocked.by).or_default().insert((line, suit));
            }
            Learned::Unparked(suit, bound) => self.drop(&bound, line, &suit),
        }
    }

    /// No task of the suit waits for the bound any more.
    pub fn drop(&mut self, bound: &Arc<BucketKey>, line: usize, suit: &Arc<Suit>) {
        if let Some(waiting) = self.waiting.get_mut(bound) {
            waiting.remove(&(line, suit.clone()));
            if waiting.is_empty() {
                self.waiting.remove(bound);
            }
        }
    }

    /// Those who wait for a bound, who do not any longer.
    pub fn take(&mut self, bound: &Arc<BucketKey>) -> BTreeSet<(usize, Arc<Suit>)> {
        self.waiting.remove(bound).unwrap_or_default()
    }

    /// The bounds that let something pass by now.
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

    /// The bounds of a limit that anybody waits for: one for each of its keys, and its being slowed down.
    pub fn bounds_of(&self, ns: &Namespace, limit: &str) -> Vec<Arc<BucketKey>> {
        self.waiting.keys().filter(|bound| bound.ns == *ns && bound.name == limit).cloned().collect()
    }
}
