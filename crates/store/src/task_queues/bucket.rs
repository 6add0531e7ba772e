//! Rates: token buckets that fill with time; each claim takes a token.

use eddyline_machine::Millis;

use crate::document::Rate;
use crate::ids::Namespace;

/// The queue or limit that a bucket belongs to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BucketKey {
    pub ns: Namespace,
    /// `queue`, `limit`, or `slow` for a limit that a worker asked to slow down.
    pub kind: String,
    pub name: String,
    pub key: Option<String>,
}

impl BucketKey {
    pub const QUEUE: &str = "queue";
    pub const LIMIT: &str = "limit";
    pub const SLOW: &str = "slow";

    pub fn queue(ns: &Namespace, name: &str) -> BucketKey {
        BucketKey { ns: ns.clone(), kind: Self::QUEUE.to_owned(), name: name.to_owned(), key: None }
    }

    pub fn limit(ns: &Namespace, name: &str, key: Option<&str>) -> BucketKey {
        BucketKey { ns: ns.clone(), kind: Self::LIMIT.to_owned(), name: name.to_owned(), key: key.map(str::to_owned) }
    }

    pub fn slow(ns: &Namespace, name: &str) -> BucketKey {
        BucketKey { ns: ns.clone(), kind: Self::SLOW.to_owned(), name: name.to_owned(), key: None }
    }
}

/// The level is counted in parts of a claim: a claim is `per_ms` parts, and each millisecond adds `count` parts, so
/// that nothing is lost to rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bucket {
    /// The claims left at `at`, and the parts of another.
    pub whole: u32,
    pub parts: i64,
    pub at: Millis,
    pub closed_until: Millis,
}

impl Bucket {
    pub fn full(burst: u32, at: Millis) -> Bucket {
        Bucket { whole: burst.max(1), parts: 0, at, closed_until: 0 }
    }

    /// When the next claim may be made.
    pub fn ready_at(&self, rate: Rate, now: Millis) -> Millis {
        let filled = self.filled(rate, now);
        if filled.whole > 0 {
            return now;
        }
        let missing = (rate.per_ms.max(1) - filled.parts).max(1);
        let gained = i64::from(rate.count.max(1));
        now + (missing - 1).div_euclid(gained) + 1
    }

    pub fn is_full(&self, rate: Rate, now: Millis) -> bool {
        self.filled(rate, now).whole >= rate.burst.max(1)
    }

    pub fn spend(&mut self, rate: Rate, now: Millis) {
        *self = self.filled(rate, now);
        self.whole = self.whole.saturating_sub(1);
    }

    fn filled(&self, rate: Rate, now: Millis) -> Bucket {
        let (per, burst) = (rate.per_ms.max(1), rate.burst.max(1));
        let parts = self.parts.saturating_add((now - self.at).max(0).saturating_mul(i64::from(rate.count)));
        let whole = i64::from(self.whole).saturating_add(parts / per);
        match whole >= i64::from(burst) {
            true => Bucket { whole: burst, parts: 0, at: now.max(self.at), ..*self },
            false => Bucket { whole: whole as u32, parts: parts % per, at: now.max(self.at), ..*self },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_lets_its_burst_pass_and_then_its_rate() {
        let rate = Rate { count: 3, per_ms: 1_000, burst: 2 };
        let mut bucket = Bucket::full(rate.burst, 0);
        let mut passed = Vec::new();
        for now in 0..3_000 {
            while bucket.ready_at(rate, now) <= now {
                bucket.spend(rate, now);
                passed.push(now);
            }
        }
        assert_eq!(passed, [0, 0, 334, 667, 1000, 1334, 1667, 2000, 2334, 2667]);
    }

    #[test]
    fn it_says_when_to_come_back() {
        let rate = Rate { count: 1, per_ms: 60_000, burst: 1 };
        let mut bucket = Bucket::full(1, 0);
        bucket.spend(rate, 0);
        assert_eq!(bucket.ready_at(rate, 10), 60_000);
    }
}
