//! What a test that owns the clock asks and tells a store in memory.

use eddyline_machine::Millis;

use super::Memory;
use super::rows::Rows;
use crate::clock::ManualClock;

/// What goes on in a store, and when something is next due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Activity {
    /// The number of tasks that workers hold.
    pub claimed: usize,
    /// The number of tasks that a worker may claim now.
    pub queued: usize,
    /// Messages to deliver, and due items that are not handled yet.
    pub unhandled: usize,
    /// When a timer of a run is next due, or a rate lets a task through.
    pub next_timer: Option<Millis>,
    /// The same, or the end of a lease, of an attempt's `timeout` or of a `start_timeout`.
    pub next_due: Option<Millis>,
}

impl Activity {
    /// Whether nothing happens before time goes on.
    pub fn is_idle(&self) -> bool {
        self.claimed == 0 && self.queued == 0 && self.unhandled == 0
    }
}

impl Memory {
    pub fn activity(&self) -> Activity {
        self.rows().activity(self.time.now())
    }

    /// Moves the clock that the store was opened with. Leases and timeouts end on the way: unlike time in which nobody
    /// served, this time counts.
    pub fn advance(&self, clock: &ManualClock, ms: Millis) {
        let mut rows = self.rows();
        clock.advance(ms.max(0));
        rows.tasks.opened(self.time.now());
    }

    /// Moves the clock to the next timer if nothing else can happen. Returns the new time, or why it did not move.
    pub fn advance_if_idle(&self, clock: &ManualClock) -> Result<Millis, Activity> {
        let mut rows = self.rows();
        let activity = rows.activity(self.time.now());
        match activity.next_timer.filter(|_| activity.is_idle()) {
            Some(at) => {
                clock.advance((at - self.time.now()).max(0));
                rows.tasks.opened(self.time.now());
                Ok(self.time.now())
            }
            None => Err(activity),
        }
    }
}

impl Rows {
    fn activity(&self, now: Millis) -> Activity {
        let timers = self.timers.iter().filter(|(_, _, run, _)| self.runs.contains_key(run)).map(|(_, due, ..)| *due);
        let due_timers = timers.clone().filter(|due| *due <= now).count();
        let documents = self.documents.values().filter(|document| document.due.is_some_and(|due| due <= now)).count();
        let (queued, next_claim) = self.tasks.claimable(now);
        let next_timer = timers.filter(|due| *due > now).chain(next_claim).min();
        let up = usize::from(self.tasks.any_ends_by(now));
        Activity {
            claimed: self.tasks.count_held(),
            queued,
            unhandled: self.messages.len() + self.holds.len() + due_timers + documents + up,
            next_timer,
            next_due: next_timer.into_iter().chain(self.tasks.next_expiry(now)).min(),
        }
    }
}
