//! Time comes in from outside; what a store makes of it never goes back.

use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use eddyline_machine::Millis;

/// The two clocks of a machine.
pub trait Clock: Debug + Send + Sync + 'static {
    /// Milliseconds since the Unix epoch. It may jump.
    fn wall(&self) -> Millis;
    /// How long it has run. It never jumps.
    fn running(&self) -> Duration;
}

#[derive(Debug)]
pub struct SystemClock {
    started: Instant,
}

impl Default for SystemClock {
    fn default() -> SystemClock {
        SystemClock { started: Instant::now() }
    }
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

/// A store's time: the wall's when it was opened, and from there on what has really passed.
#[derive(Debug)]
pub(crate) struct StoreTime {
    clock: Arc<dyn Clock>,
    base: Millis,
}

impl StoreTime {
    /// `not_before`: the latest time that is stored already.
    pub(crate) fn open(clock: Arc<dyn Clock>, not_before: Millis) -> StoreTime {
        let base = clock.wall().max(not_before) - clock.running().as_millis() as Millis;
        StoreTime { clock, base }
    }

    pub(crate) fn now(&self) -> Millis {
        self.base + self.clock.running().as_millis() as Millis
    }

    /// What moments that people name are compared with.
    pub(crate) fn wall(&self) -> Millis {
        self.clock.wall()
    }
}
