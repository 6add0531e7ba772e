//! Time comes in from outside; what a store makes of it never goes back.
//!
//! Store time is the wall's when the store is opened, and from there on what has really passed, as the clock counts it
//! that goes on while the machine is suspended. A virtual machine that is paused has no such clock: only its wall clock is
//! ahead afterwards, and that looks like a wall clock that was set. So the wall clock is believed only after it has been
//! ahead for [`BELIEVED_AFTER`], by less than [`MOST_LAG_MS`], and is then approached at a rate that leaves every wait
//! nearly as long as it was meant ([`StoreTime::catch_up`]).

use std::fmt::Debug;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use eddyline_machine::Millis;

/// The two clocks of a machine.
pub trait Clock: Debug + Send + Sync + 'static {
    /// Milliseconds since the Unix epoch. It may jump.
    fn wall(&self) -> Millis;
    /// How long it has run, time in which the machine was suspended included. It never jumps and never goes back.
    fn running(&self) -> Duration;
}

#[derive(Debug, Default)]
pub struct SystemClock {
    started: Started,
}

impl Clock for SystemClock {
    fn wall(&self) -> Millis {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        since.as_millis() as Millis
    }

    fn running(&self) -> Duration {
        self.started.elapsed()
    }
}

/// Linux has a clock that counts suspended time (`CLOCK_BOOTTIME`).
#[cfg(target_os = "linux")]
#[derive(Debug)]
struct Started(Duration);

#[cfg(target_os = "linux")]
impl Started {
    fn elapsed(&self) -> Duration {
        boot_time().saturating_sub(self.0)
    }
}

#[cfg(target_os = "linux")]
impl Default for Started {
    fn default() -> Started {
        Started(boot_time())
    }
}

#[cfg(target_os = "linux")]
fn boot_time() -> Duration {
    let at = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(at.tv_sec.max(0) as u64, at.tv_nsec as u32)
}

/// Elsewhere suspended time is caught up with by the wall clock.
#[cfg(not(target_os = "linux"))]
#[derive(Debug)]
struct Started(std::time::Instant);

#[cfg(not(target_os = "linux"))]
impl Started {
    fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}

#[cfg(not(target_os = "linux"))]
impl Default for Started {
    fn default() -> Started {
        Started(std::time::Instant::now())
    }
}

/// A clock that a test owns.
#[derive(Debug)]
pub struct ManualClock {
    wall: AtomicI64,
    running: AtomicI64,
}

impl ManualClock {
    pub fn at(wall: Millis) -> Arc<ManualClock> {
        Arc::new(ManualClock { wall: AtomicI64::new(wall), running: AtomicI64::new(0) })
    }

    /// Time passes.
    pub fn advance(&self, ms: Millis) {
        self.wall.fetch_add(ms, Ordering::SeqCst);
        self.running.fetch_add(ms, Ordering::SeqCst);
    }

    /// The wall clock jumps; no time passes.
    pub fn jump(&self, ms: Millis) {
        self.wall.fetch_add(ms, Ordering::SeqCst);
    }
}

impl Clock for ManualClock {
    fn wall(&self) -> Millis {
        self.wall.load(Ordering::SeqCst)
    }

    fn running(&self) -> Duration {
        Duration::from_millis(self.running.load(Ordering::SeqCst).max(0) as u64)
    }
}

/// A lag of less than this is not worth catching up with.
const LEAST_LAG_MS: Millis = 1_000;
/// A wall clock that is ahead by more than this is never believed while the store is open.
const MOST_LAG_MS: Millis = 24 * 60 * 60 * 1_000;
/// How long the wall clock must have been ahead.
const BELIEVED_AFTER: Duration = Duration::from_secs(10 * 60);
/// While it catches up, store time gains one part in so many: a wait that falls into it ends at most a tenth early.
const GAIN: Millis = 10;

/// A store's time.
#[derive(Debug)]
pub(crate) struct StoreTime {
    clock: Arc<dyn Clock>,
    /// Store time less what the clock has run. It only grows.
    base: AtomicI64,
    lag: Mutex<Option<Lag>>,
}

/// The wall clock is ahead, by the clock that runs.
#[derive(Debug, Clone, Copy)]
struct Lag {
    since: Duration,
    looked: Duration,
}

impl StoreTime {
    /// `not_before`: the latest time that is stored already.
    pub(crate) fn open(clock: Arc<dyn Clock>, not_before: Millis) -> StoreTime {
        let base = clock.wall().max(not_before) - clock.running().as_millis() as Millis;
        StoreTime { clock, base: AtomicI64::new(base), lag: Mutex::new(None) }
    }

    pub(crate) fn now(&self) -> Millis {
        self.base.load(Ordering::Relaxed) + self.clock.running().as_millis() as Millis
    }

    /// What moments that people name are compared with.
    pub(crate) fn wall(&self) -> Millis {
        self.clock.wall()
    }

    /// Approaches a wall clock that has been ahead for long. To be called now and then; by one at a time.
    pub(crate) fn catch_up(&self) {
        let (behind, running) = (self.clock.wall() - self.now(), self.clock.running());
        let mut lag = self.lag.lock().unwrap_or_else(PoisonError::into_inner);
        let least = if lag.is_some() { 1 } else { LEAST_LAG_MS };
        if !(least..=MOST_LAG_MS).contains(&behind) {
            *lag = None;
            return;
        }
        let Lag { since, looked } = *lag.get_or_insert(Lag { since: running, looked: running });
        *lag = Some(Lag { since, looked: running });
        // What passed before it was believed gains nothing.
        let from = looked.max(since + BELIEVED_AFTER);
        let gained = running.saturating_sub(from).as_millis() as Millis / GAIN;
        self.base.fetch_add(gained.min(behind), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Millis = 60_000;

    /// Time passes as it does for a store that is open: it looks at the wall clock all the while.
    fn pass(clock: &ManualClock, time: &StoreTime, ms: Millis) {
        for _ in 0..ms / 100 {
            clock.advance(100);
            time.catch_up();
        }
    }

    fn opened() -> (Arc<ManualClock>, StoreTime) {
        let clock = ManualClock::at(1_000_000);
        let time = StoreTime::open(clock.clone(), 0);
        (clock, time)
    }

    #[test]
    fn a_machine_that_was_paused_is_caught_up_with_gently_and_never_beyond_the_wall() {
        let (clock, time) = opened();
        // The machine stood still for ten minutes, and all its clocks but the one on the wall.
        clock.jump(10 * MINUTE);
        time.catch_up();
        pass(&clock, &time, 10 * MINUTE);
        assert_eq!(clock.wall() - time.now(), 10 * MINUTE, "it is not believed yet");
        let before = time.now();
        pass(&clock, &time, 10 * MINUTE);
        assert_eq!(time.now() - before, 11 * MINUTE, "a tenth faster");
        pass(&clock, &time, 200 * MINUTE);
        assert_eq!(time.now(), clock.wall());
    }

    #[test]
    fn a_wall_clock_that_jumps_and_is_set_right_changes_nothing() {
        let (clock, time) = opened();
        for jump in [3 * 60 * MINUTE, -3 * 60 * MINUTE] {
            clock.jump(jump);
            pass(&clock, &time, 9 * MINUTE);
            clock.jump(-jump);
            pass(&clock, &time, 9 * MINUTE);
            assert_eq!(time.now(), clock.wall());
        }
    }

    #[test]
    fn a_wall_clock_that_is_behind_or_a_day_ahead_is_never_followed() {
        for jump in [-5 * MINUTE, MOST_LAG_MS + MINUTE] {
            let (clock, time) = opened();
            clock.jump(jump);
            pass(&clock, &time, 60 * MINUTE);
            assert_eq!(time.now(), 1_000_000 + 60 * MINUTE);
        }
    }

    #[test]
    fn the_systems_clock_counts_from_when_it_was_made() {
        let clock = SystemClock::default();
        let first = clock.running();
        assert!(first < Duration::from_secs(60), "{first:?}");
        assert!(clock.running() >= first);
    }
}
