//! How long to wait before the next try.

use std::time::Duration;

use uuid::Uuid;

/// Waits that double from `first` up to `most`, each with half of it left to chance, so that many who were cut off at the
/// same moment do not come back at the same moment.
#[derive(Debug, Clone)]
pub(crate) struct Backoff {
    first: Duration,
    most: Duration,
    tries: u32,
}

/// Beyond this many doublings every wait is the longest one.
const MAX_DOUBLINGS: u32 = 20;

impl Backoff {
    pub fn new(first: Duration, most: Duration) -> Backoff {
        Backoff { first, most, tries: 0 }
    }

    /// How many waits there have been.
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

/// A number from 0 up to 1.
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
