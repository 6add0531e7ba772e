//! Wake-ups. Hints of the store go to those who wait for a run, and to the loops that have work; what is true is always
//! read from the store. The committer alone listens to the store and passes hints on: most of them follow from its own
//! commits, and a task more to wake with each of those would cost more than the rest of a step.

use eddyline_machine::RunId;
use eddyline_store::Change;
use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use tokio::sync::Notify;

/// Who waits for which run.
#[derive(Debug, Default)]
pub(crate) struct Bus {
    /// For anything that it records.
    records: Listeners,
    /// For its end alone: a run of many steps wakes whoever waits for its result once.
    ends: Listeners,
    chores: Vec<Interest>,
}

/// What wakes a loop: a commit does not wake loops it has no work for.
pub(crate) struct Interest {
    pub wakes: Box<dyn Fn(&Change) -> bool + Send + Sync>,
    pub wake: Arc<Notify>,
}

impl fmt::Debug for Interest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interest").finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Listeners(Mutex<HashMap<RunId, Weak<Notify>>>);

impl Listeners {
    fn listen(&self, run: RunId) -> Arc<Notify> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(notify) = waiting.get(&run).and_then(Weak::upgrade) {
            return notify;
        }
        let notify = Arc::new(Notify::new());
        if waiting.len() >= waiting.capacity() {
            waiting.retain(|_, listener| listener.strong_count() > 0);
        }
        waiting.insert(run, Arc::downgrade(&notify));
        notify
    }

    fn wake(&self, run: RunId) {
        let waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(notify) = waiting.get(&run).and_then(Weak::upgrade) {
            notify.notify_waiters();
        }
    }

    fn wake_all(&self) {
        let waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.values().filter_map(Weak::upgrade).for_each(|notify| notify.notify_waiters());
    }
}

impl Bus {
    pub fn new(chores: Vec<Interest>) -> Bus {
        Bus { chores, ..Bus::default() }
    }

    /// Notified whenever the timeline of the run may have grown.
    pub fn listen(&self, run: RunId) -> Arc<Notify> {
        self.records.listen(run)
    }

    /// Notified when the run may have ended.
    pub fn listen_for_end(&self, run: RunId) -> Arc<Notify> {
        self.ends.listen(run)
    }

    pub fn wake_all(&self) {
        self.records.wake_all();
        self.ends.wake_all();
        self.chores.iter().for_each(|chore| chore.wake.notify_one());
    }

    pub fn pass_on(&self, changes: &[Change]) {
        for chore in &self.chores {
            if changes.iter().any(|change| (chore.wakes)(change)) {
                chore.wake.notify_one();
            }
        }
        for change in changes {
            if let Change::Run { run, ended } = change {
                self.records.wake(*run);
                if *ended {
                    self.ends.wake(*run);
                }
            }
        }
    }
}
