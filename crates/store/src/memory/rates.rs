//! Rates: the times of all claims are kept, and what is left is computed anew each time.

use std::collections::BTreeMap;

use eddyline_machine::Millis;

use crate::document::Rate;
use crate::ids::Namespace;

/// The owner of a rate.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::memory) enum Spender {
    Queue((Namespace, String)),
    Limit(Namespace, String, Option<String>),
}

#[derive(Debug, Default)]
pub(super) struct Rates(BTreeMap<Spender, Vec<Millis>>);

impl Rates {
    pub fn spend(&mut self, who: Spender, rate: Rate, now: Millis) {
        let spent = self.0.entry(who).or_default();
        // Once the rate is full again, earlier claims no longer matter.
        if left(spent, rate, now) >= full(rate) {
            spent.clear();
        }
        spent.push(now);
    }

    /// What is left of each rate that still exists: whole claims, and parts of another.
    pub fn levels(&self, now: Millis, rate: impl Fn(&Spender) -> Option<Rate>) -> Vec<(Spender, u32, i64)> {
        let level = |(who, spent): (&Spender, &Vec<Millis>)| {
            let rate = rate(who)?;
            let left = left(spent, rate, now);
            Some((who.clone(), (left / one(rate)) as u32, (left % one(rate)) as i64))
        };
        self.0.iter().filter_map(level).collect()
    }

    /// Until when the rate allows no claim; none if it allows one now.
    pub fn held_until(&self, who: &Spender, rate: Rate, now: Millis) -> Option<Millis> {
        let missing = one(rate) - left(self.0.get(who)?, rate, now);
        let gained = i128::from(rate.count.max(1));
        (missing > 0).then(|| now + ((missing + gained - 1) / gained) as Millis)
    }
}

/// The remaining parts: a claim costs `per_ms` parts, and each millisecond adds `count`.
fn left(spent: &[Millis], rate: Rate, now: Millis) -> i128 {
    let Some(mut at) = spent.first().copied() else { return full(rate) };
    let mut level = full(rate);
    for moment in spent.iter().copied().map(Some).chain([None]) {
        let until = moment.unwrap_or(now);
        level = (level + i128::from(until - at) * i128::from(rate.count)).min(full(rate));
        at = until;
        if moment.is_some() {
            level = (level - one(rate)).max(0);
        }
    }
    level
}

fn one(rate: Rate) -> i128 {
    i128::from(rate.per_ms.max(1))
}

fn full(rate: Rate) -> i128 {
    one(rate) * i128::from(rate.burst.max(1))
}
