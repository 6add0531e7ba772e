//! Clocks are injected; the time a store derives from them never goes back.
//!
//! Store time starts at the wall clock when the store is opened and then advances with a monotonic clock that also
//! counts while the machine is suspended. A paused virtual machine has no such clock: afterwards only its wall clock is
//! ahead, which looks the same as a wall clock that somebody set. So store time follows the wall clock only after it
//! has been ahead for [`BELIEVED_AFTER`], by at most [`MOST_LAG_MS`], and then approaches it slowly, so that waits are
//! hardly shortened ([`StoreTime::catch_up`]).

use std::fmt::Debug;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use eddyline_machine::Millis;

/// The two clocks of a machine.
pub trait Clock: Debug + Send + Sync + 'static {
    /// Milliseconds since the Unix epoch. It may jump.
    fn wall(&self) -> Millis;
    /// Monotonic time since the clock was created, including time in which the machine was suspended.
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

/// Elsewhere store time catches up with suspended time by the wall clock.
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

    /// Advances both clocks.
    pub fn advance(&self, ms: Millis) {
        self.wall.fetch_add(ms, Ordering::SeqCst);
        self.running.fetch_add(ms, Ordering::SeqCst);
    }

    /// Moves the wall clock only.
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

/// A smaller lag is ignored.
const LEAST_LAG_MS: Millis = 1_000;
/// A wall clock that is ahead by more than this is ignored while the store is open.
const MOST_LAG_MS: Millis = 24 * 60 * 60 * 1_000;
/// How long the wall clock must have been ahead.
const BELIEVED_AFTER: Duration = Duration::from_secs(10 * 60);
/// While it catches up, store time runs faster by 1/`GAIN`: a wait ends at most a tenth early.
const GAIN: Millis = 10;

/// A store's time.
#[derive(Debug)]
pub(crate) struct StoreTime {
    clock: Arc<dyn Clock>,
    /// Store time minus `Clock::running`. It only grows.
    base: AtomicI64,
    lag: Mutex<Option<Lag>>,
}

/// Since when the wall clock has been ahead, and when that was last checked, by `Clock::running`.
#[derive(Debug, Clone, Copy)]
struct Lag {
    since: Duration,
    looked: Duration,
}

impl StoreTime {
    /// `not_before`: the latest time already stored.
    pub(crate) fn open(clock: Arc<dyn Clock>, not_before: Millis) -> StoreTime {
        let base = clock.wall().max(not_before) - clock.running().as_millis() as Millis;
        StoreTime { clock, base: AtomicI64::new(base), lag: Mutex::new(None) }
    }

    pub(crate) fn now(&self) -> Millis {
        self.base.load(Ordering::Relaxed) + self.clock.running().as_millis() as Millis
    }

    /// For comparison with absolute times that users give.
    pub(crate) fn wall(&self) -> Millis {
        self.clock.wall()
    }

    /// Approaches a wall clock that has been ahead for a while. Call it periodically, from one thread.
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
        // Time before `BELIEVED_AFTER` had passed gains nothing.
        let from = looked.max(since + BELIEVED_AFTER);
        let gained = running.saturating_sub(from).as_millis() as Millis / GAIN;
        self.base.fetch_add(gained.min(behind), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Millis = 60_000;

    /// Advances time in small steps, checking the wall clock at each, as an open store does.
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
        // The machine was paused for ten minutes, with all its clocks except the wall clock.
        clock.jump(10 * MINUTE);
        time.catch_up();
        pass(&clock, &time, 10 * MINUTE);
        assert_eq!(clock.wall() - time.now(), 10 * MINUTE, "not followed yet");
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
