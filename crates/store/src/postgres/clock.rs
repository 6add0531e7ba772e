//! The database's time, without a round trip for each reading.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use eddyline_machine::Millis;

/// How long a reading of the database's clock is extrapolated before it is read again. A serving process checks in
/// every second, which also returns the time.
const MAX_AGE: Duration = Duration::from_secs(3);

/// The database's time, computed from the last reading and the time that has passed locally since. It never goes back.
#[derive(Debug)]
pub(super) struct DatabaseClock {
    opened: Instant,
    /// The database's time minus the local time since the store was opened.
    offset: AtomicI64,
    /// When the offset was last updated, in milliseconds since the store was opened; negative: never.
    learned: AtomicI64,
    shown: AtomicI64,
}

impl DatabaseClock {
    pub fn new() -> DatabaseClock {
        DatabaseClock {
            opened: Instant::now(),
            offset: AtomicI64::new(0),
            learned: AtomicI64::new(-1),
            shown: AtomicI64::new(0),
        }
    }

    fn passed(&self) -> Millis {
        self.opened.elapsed().as_millis() as Millis
    }

    /// Records the time in a response that just arrived.
    pub fn learn(&self, at: Millis) -> Millis {
        let passed = self.passed();
        self.offset.store(at - passed, Ordering::Relaxed);
        self.learned.store(passed, Ordering::Relaxed);
        self.show(at)
    }

    /// The current time; `None` if the last reading is too old.
    pub fn now(&self) -> Option<Millis> {
        let (passed, learned) = (self.passed(), self.learned.load(Ordering::Relaxed));
        let believed = learned >= 0 && passed - learned <= MAX_AGE.as_millis() as Millis;
        believed.then(|| self.show(self.offset.load(Ordering::Relaxed) + passed))
    }

    fn show(&self, now: Millis) -> Millis {
        self.shown.fetch_max(now, Ordering::Relaxed).max(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_continues_from_the_last_reading_and_never_goes_back() {
        let clock = DatabaseClock::new();
        assert_eq!(clock.now(), None);
        assert_eq!(clock.learn(1_000_000), 1_000_000);
        assert!(clock.now().is_some_and(|now| (1_000_000..1_001_001).contains(&now)));
        assert!(clock.learn(900_000) >= 1_000_000);
        assert!(clock.now().is_some_and(|now| now >= 1_000_000));
    }
}
