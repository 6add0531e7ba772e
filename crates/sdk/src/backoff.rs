//! Exponential backoff with jitter.

use std::time::Duration;

use uuid::Uuid;

/// Waits that double from `first` up to `most`. Half of each wait is random, so that clients disconnected at the same
/// moment do not reconnect at the same moment.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    first: Duration,
    most: Duration,
    tries: u32,
}

/// After this many doublings every wait is the longest.
const MAX_DOUBLINGS: u32 = 20;

impl Backoff {
    pub fn new(first: Duration, most: Duration) -> Backoff {
        Backoff { first, most, tries: 0 }
    }

    /// The number of waits so far.
    pub fn tries(&self) -> u32 {
        self.tries
    }

    pub fn reset(&mut self) {
        self.tries = 0;
    }

    pub fn next(&mut self) -> Duration {
        let whole = self.first.saturating_mul(1 << self.tries.min(MAX_DOUBLINGS)).min(self.most);
        self.tries = self.tries.saturating_add(1);
        whole.mul_f64(0.5 + chance() / 2.0)
    }
}

/// A random number in 0..1.
fn chance() -> f64 {
    let bits = Uuid::new_v4().as_u128() as u32;
    f64::from(bits) / (f64::from(u32::MAX) + 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_up_to_a_bound_and_begin_anew_after_a_success() {
        let (first, most) = (Duration::from_millis(100), Duration::from_secs(5));
        let mut backoff = Backoff::new(first, most);
        for whole in [100, 200, 400, 800, 1_600, 3_200, 5_000, 5_000] {
            let wait = backoff.next();
            let whole = Duration::from_millis(whole);
            assert!(wait >= whole / 2 && wait <= whole, "{wait:?} of {whole:?}");
        }
        backoff.reset();
        assert!(backoff.next() <= first);
    }
}
