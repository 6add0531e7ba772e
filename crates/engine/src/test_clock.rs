//! A clock for tests: it stands still, and moves when the test says so, or by itself to the next due item when nothing
//! can happen before.
//!
//! The store is one in memory, opened with the same [`ManualClock`]. All times of a run come from it; only waits for
//! the network and for handlers take real time.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use eddyline_machine::Millis;
use eddyline_store::{Activity, ManualClock, Memory};
use tokio::sync::{Mutex, watch};
use tokio::time::Instant;

use crate::engine::Engine;

/// How often the store is looked at while something goes on.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// How often it is looked at while nothing goes on.
const LOOK_AGAIN_IDLE: Duration = Duration::from_millis(5);
/// A due item that makes no progress for so long, such as a message to a quarantined run, no longer counts.
const STUCK_AFTER: Duration = Duration::from_secs(2);
/// While the clock is advanced, handlers that are at work have so long before time goes on; and so long has a queued
/// task to find a worker.
const HANDLERS_HAVE: Duration = Duration::from_secs(1);
const WORKERS_HAVE: Duration = Duration::from_millis(200);

/// Moves the clock of an engine. Cheap to clone.
#[derive(Clone)]
pub struct TestClock {
    engine: Engine,
    store: Arc<Memory>,
    clock: Arc<ManualClock>,
    auto: watch::Sender<bool>,
    /// Only one caller moves the clock at a time.
    moving: Arc<Mutex<()>>,
}

impl fmt::Debug for TestClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TestClock").field("now", &self.now()).field("auto", &self.is_auto()).finish_non_exhaustive()
    }
}

impl TestClock {
    /// `store` is the engine's, and was opened with `clock`.
    pub fn new(engine: Engine, store: Arc<Memory>, clock: Arc<ManualClock>) -> TestClock {
        TestClock { engine, store, clock, auto: watch::Sender::new(false), moving: Arc::default() }
    }

    pub fn now(&self) -> Millis {
        use eddyline_store::Clock;
        self.clock.wall()
    }

    pub fn is_auto(&self) -> bool {
        *self.auto.borrow()
    }

    /// Whether the clock jumps by itself; [`TestClock::run`] does it.
    pub fn set_auto(&self, auto: bool) {
        self.auto.send_replace(auto);
    }

    /// Moves the clock by that much. Stops at everything that is due on the way, in order, until it was handled and
    /// what followed from it was done, as far as workers do it in time. Returns the new time.
    pub async fn advance(&self, by: Millis) -> Millis {
        let _turn = self.moving.lock().await;
        let end = self.now().saturating_add(by.max(0));
        loop {
            let next = self.settled().await.next_due.filter(|next| *next <= end);
            let now = self.now();
            self.store.advance(&self.clock, next.unwrap_or(end) - now);
            self.engine.wake_loops();
            if next.is_none() {
                self.settled().await;
                return self.now();
            }
        }
    }

    /// Jumps to the next due item if no task is queued or claimed and nothing is due. Returns the new time, or none if
    /// it did not move.
    pub async fn jump(&self) -> Option<Millis> {
        let _turn = self.moving.lock().await;
        self.handled().await;
        let moved = self.store.advance_if_idle(&self.clock).ok()?;
        self.engine.wake_loops();
        Some(moved)
    }

    /// What goes on in the store.
    pub fn activity(&self) -> Activity {
        self.store.activity()
    }

    /// Jumps whenever it is [`TestClock::set_auto`]; ends only with its caller.
    pub async fn run(&self) {
        let mut auto = self.auto.subscribe();
        loop {
            if auto.wait_for(|auto| *auto).await.is_err() {
                return;
            }
            if self.jump().await.is_none() {
                tokio::time::sleep(LOOK_AGAIN_IDLE).await;
            }
        }
    }

    /// Waits until everything due is handled, and handlers are done or had their time.
    async fn settled(&self) -> Activity {
        let (since, mut idle_since) = (Instant::now(), None);
        loop {
            let activity = self.handled().await;
            let had_time = match (activity.claimed, activity.queued) {
                (0, 0) => return activity,
                (0, _) => idle_since.get_or_insert_with(Instant::now).elapsed() >= WORKERS_HAVE,
                _ => {
                    idle_since = None;
                    since.elapsed() >= HANDLERS_HAVE
                }
            };
            if had_time {
                return activity;
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Waits until everything due is handled.
    async fn handled(&self) -> Activity {
        let (mut last, mut since) = (self.store.activity(), Instant::now());
        while last.unhandled > 0 && since.elapsed() < STUCK_AFTER {
            tokio::time::sleep(LOOK_AGAIN).await;
            let now = self.store.activity();
            if now != last {
                (last, since) = (now, Instant::now());
            }
        }
        last
    }
}
