//! When nothing can run: only then does the clock jump.

use std::time::{Duration, Instant};

use eddyline_machine::Millis;

use super::{LOOK, PATIENCE, TestEngine};

/// A due item that makes no progress for so long, such as a message to a quarantined run, no longer counts.
const STUCK_AFTER: Duration = Duration::from_secs(2);
/// A task that is claimed, while no handler or function is at work, is on its way to the worker or back.
const WAY_HAS: Duration = Duration::from_secs(1);
/// The same after a worker has died: its tasks come back when their leases end.
const DEATH_HAS: Duration = Duration::from_millis(30);
/// How long a queued task has to find a worker.
const WORKERS_HAVE: Duration = Duration::from_millis(200);

impl TestEngine {
    /// Waits until nothing can run at this time of the clock. Returns when something is next due.
    pub(super) async fn settle(&self) -> Option<Millis> {
        let (began, mut last, mut since) = (Instant::now(), self.store.activity(), Instant::now());
        loop {
            let now = self.store.activity();
            if now != last || self.faults.is_busy() {
                (last, since) = (now, Instant::now());
            }
            let enough = match (now.unhandled, now.claimed, now.queued) {
                (0, 0, 0) => {
                    self.faults.recovered();
                    Duration::ZERO
                }
                (0, 0, _) => WORKERS_HAVE,
                (0, ..) if self.faults.has_lost_tasks() => DEATH_HAS,
                (0, ..) => WAY_HAS,
                _ => STUCK_AFTER,
            };
            if !self.faults.is_busy() && since.elapsed() >= enough {
                self.faults.check_shaken();
                return if now.is_idle() { now.next_timer } else { now.next_due };
            }
            if began.elapsed() > PATIENCE {
                let at_work = self.faults.at_work();
                panic!("still running after {PATIENCE:?} at one moment of the clock: {at_work:?}, {now:?}");
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}
