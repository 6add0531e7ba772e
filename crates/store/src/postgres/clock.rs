//! The database's time, without a round trip for each look at it.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant};

use eddyline_machine::Millis;

/// What the database said is believed for so long; then it is asked again. A process that serves checks in every second,
/// which brings the time.
const BELIEVED: Duration = Duration::from_secs(3);

/// What the database's clock shows, from what it showed last and what has passed here since. It never goes back.
#[derive(Debug)]
pub(super) struct DatabaseClock {
    opened: Instant,
    /// The database's time less what has passed here since the store was opened.
    offset: AtomicI64,
    /// When that was learned, in milliseconds since the store was opened; negative: never.
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

    /// An answer of the database was given at that moment.
    pub fn learn(&self, at: Millis) -> Millis {
        let passed = self.passed();
        self.offset.store(at - passed, Ordering::Relaxed);
        self.learned.store(passed, Ordering::Relaxed);
        self.show(at)
    }

    /// None if the database must be asked.
    pub fn now(&self) -> Option<Millis> {
        let (passed, learned) = (self.passed(), self.learned.load(Ordering::Relaxed));
        let believed = learned >= 0 && passed - learned <= BELIEVED.as_millis() as Millis;
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
    fn it_goes_on_from_what_was_learned_and_never_back() {
        let clock = DatabaseClock::new();
        assert_eq!(clock.now(), None);
        assert_eq!(clock.learn(1_000_000), 1_000_000);
        assert!(clock.now().is_some_and(|now| (1_000_000..1_001_001).contains(&now)));
        assert!(clock.learn(900_000) >= 1_000_000);
        assert!(clock.now().is_some_and(|now| now >= 1_000_000));
    }
}
