//! The bounds on claims: the rates of queues, and limits across queues.

use std::collections::BTreeSet;
use std::sync::Arc;

use eddyline_machine::Millis;

use super::bucket::{Bucket, BucketKey};
use super::suit::Class;
use crate::document::{LimitRules, Rate};
use crate::ids::{Map, Namespace};
use crate::query::LimitState;

#[derive(Debug, Default)]
pub(super) struct Bounds {
    limits: Map<Namespace, Map<String, LimitRules>>,
    /// The number of claimed tasks under each limit and key.
    passing: Map<Arc<BucketKey>, u32>,
    buckets: Map<BucketKey, Bucket>,
    /// Until when workers closed limits, from the buckets of kind `slow`.
    closed_until: Map<Namespace, Map<String, Millis>>,
    /// Buckets that changed since the last `take_spent`.
    spent: BTreeSet<BucketKey>,
    /// The number of calls of `blocked`, as a measure of the cost of a claim.
    #[cfg(test)]
    pub looked: std::cell::Cell<usize>,
}

/// The limit that blocks a class.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Blocked {
    pub by: Arc<BucketKey>,
    /// The concurrency, if that is exhausted.
    pub most: Option<u32>,
    /// When it opens by time alone.
    pub until: Option<Millis>,
}

impl Bounds {
    pub fn limit(&self, ns: &Namespace, name: &str) -> Option<&LimitRules> {
        self.limits.get(ns)?.get(name)
    }

    pub fn set_limit(&mut self, ns: &Namespace, name: &str, rules: Option<LimitRules>) {
        let of_ns = self.limits.entry(ns.clone()).or_default();
        match rules {
            Some(rules) => of_ns.insert(name.to_owned(), rules),
            None => of_ns.remove(name),
        };
    }

    /// The first limit that blocks the tasks of a class.
    pub fn blocked(&self, class: &Class, now: Millis) -> Option<Blocked> {
        #[cfg(test)]
        self.looked.set(self.looked.get() + 1);
        class.limits.iter().find_map(|limit| {
            if let Some(until) = self.closed_until(&limit.ns, &limit.name).filter(|until| *until > now) {
                let slow = BucketKey::slow(&limit.ns, &limit.name);
                return Some(Blocked { by: Arc::new(slow), most: None, until: Some(until) });
            }
            let rules = self.limit(&limit.ns, &limit.name)?;
            let passing = self.passing.get(limit).copied().unwrap_or(0);
            match rules.concurrency {
                Some(most) if passing >= most => Some(Blocked { by: limit.clone(), most: Some(most), until: None }),
                _ => {
                    let until = self.held_until(limit, rules.rate, now)?;
                    Some(Blocked { by: limit.clone(), most: None, until: Some(until) })
                }
            }
        })
    }

    /// Until when a rate allows no claim; none if it allows one now.
    pub fn held_until(&self, at: &BucketKey, rate: Option<Rate>, now: Millis) -> Option<Millis> {
        let ready_at = self.buckets.get(at)?.ready_at(rate?, now);
        (ready_at > now).then_some(ready_at)
    }

    /// Charges the rates of a class for a claimed task.
    pub fn spend(&mut self, class: &Class, now: Millis) {
        for limit in &class.limits {
            let rate = self.limit(&limit.ns, &limit.name).and_then(|rules| rules.rate);
            if let Some(rate) = rate {
                self.spend_rate(limit, rate, now);
            }
        }
    }

    pub fn spend_rate(&mut self, at: &BucketKey, rate: Rate, now: Millis) {
        self.buckets.entry(at.clone()).or_insert(Bucket::full(rate.burst, now)).spend(rate, now);
        self.spent.insert(at.clone());
    }

    /// Adds `by` claimed tasks of a class.
    pub fn count(&mut self, class: &Class, by: i32) {
        for limit in &class.limits {
            let passing = self.passing.entry(limit.clone()).or_default();
            *passing = passing.saturating_add_signed(by);
            if *passing == 0 {
                self.passing.remove(limit);
            }
        }
    }

    /// Closes the limit until then, or longer if it already is.
    pub fn slow(&mut self, ns: &Namespace, limit: &str, until: Millis) {
        let closed_until = self.closed_until(ns, limit).unwrap_or(0).max(until);
        let key = BucketKey::slow(ns, limit);
        self.spent.insert(key.clone());
        self.set_bucket(key, Bucket { closed_until, ..Bucket::full(1, until) });
    }

    /// Opens a limit that a worker closed.
    pub fn lift(&mut self, ns: &Namespace, limit: &str) {
        if self.closed_until(ns, limit).is_some() {
            let key = BucketKey::slow(ns, limit);
            self.spent.insert(key.clone());
            self.set_bucket(key, Bucket::full(1, 0));
        }
    }

    /// The limits of a namespace that workers closed for a while, by name.
    pub fn closed(&self, ns: &Namespace, now: Millis) -> Vec<LimitState> {
        let closed = self.closed_until.get(ns).into_iter().flatten().filter(|(_, until)| **until > now);
        let mut closed: Vec<LimitState> =
            closed.map(|(name, until)| LimitState { name: name.clone(), closed_until: *until }).collect();
        closed.sort_by(|a, b| a.name.cmp(&b.name));
        closed
    }

    pub fn set_bucket(&mut self, key: BucketKey, bucket: Bucket) {
        if key.kind == BucketKey::SLOW {
            self.closed_until.entry(key.ns.clone()).or_default().insert(key.name.clone(), bucket.closed_until);
        }
        self.buckets.insert(key, bucket);
    }

    fn closed_until(&self, ns: &Namespace, limit: &str) -> Option<Millis> {
        self.closed_until.get(ns)?.get(limit).copied()
    }

    /// The buckets that changed since the last call.
    pub fn take_spent(&mut self) -> Vec<(BucketKey, Bucket)> {
        let spent = std::mem::take(&mut self.spent);
        spent.into_iter().filter_map(|key| self.buckets.get(&key).map(|bucket| (key.clone(), *bucket))).collect()
    }

    /// Drops the buckets of rates that have been full since before that time.
    pub fn forget_full(&mut self, before: Millis, queue_rate: impl Fn(&BucketKey) -> Option<Rate>) -> Vec<BucketKey> {
        let rate = |key: &BucketKey| match key.kind.as_str() {
            BucketKey::QUEUE => queue_rate(key),
            BucketKey::LIMIT => self.limit(&key.ns, &key.name)?.rate,
            _ => None,
        };
        let full = |(key, bucket): &(&BucketKey, &Bucket)| {
            bucket.at < before
                && bucket.closed_until < before
                && rate(key).is_none_or(|rate| bucket.is_full(rate, before))
        };
        let found: Vec<BucketKey> = self.buckets.iter().filter(full).map(|(key, _)| key.clone()).collect();
        found.iter().for_each(|key| self.drop_bucket(key));
        found
    }

    pub fn drop_bucket(&mut self, key: &BucketKey) {
        self.buckets.remove(key);
        if let Some(of_ns) = self.closed_until.get_mut(&key.ns).filter(|_| key.kind == BucketKey::SLOW) {
            of_ns.remove(&key.name);
        }
        self.spent.remove(key);
    }
}
