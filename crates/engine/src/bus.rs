//! Wake-ups. Hints of the store go to those who wait for a run, and tell the committer where there may be tasks; what is
//! true is always read from the store.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use eddyline_machine::RunId;
use eddyline_store::Change;
use tokio::sync::{Notify, broadcast};

use crate::committer::{Committing, Order};
use crate::shutdown::Shutdown;

pub(crate) type Hints = broadcast::Receiver<Arc<[Change]>>;

/// Who waits for which run.
#[derive(Debug, Default)]
pub(crate) struct Bus {
    waiting: Mutex<HashMap<RunId, Weak<Notify>>>,
}

impl Bus {
    /// Notified whenever the run may have changed.
    pub fn listen(&self, run: RunId) -> Arc<Notify> {
        let mut waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(notify) = waiting.get(&run).and_then(Weak::upgrade) {
            return notify;
        }
        let notify = Arc::new(Notify::new());
        waiting.retain(|_, listener| listener.strong_count() > 0);
        waiting.insert(run, Arc::downgrade(&notify));
        notify
    }

    fn wake(&self, run: RunId) {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(notify) = waiting.get(&run).and_then(Weak::upgrade) {
            notify.notify_waiters();
        }
    }

    fn wake_all(&self) {
        let waiting = self.waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.values().filter_map(Weak::upgrade).for_each(|notify| notify.notify_waiters());
    }

    pub async fn run(self: Arc<Bus>, mut hints: Hints, committing: Committing, mut shutdown: Shutdown) {
        loop {
            let changes = tokio::select! {
                changes = hints.recv() => changes,
                () = shutdown.wait() => return self.wake_all(),
            };
            match changes {
                Ok(changes) => {
                    for change in changes.iter() {
                        match change {
                            Change::Run { run } => self.wake(*run),
                            Change::Tasks { ns, queue } => {
                                let _ = committing.send(Order::Hint(ns.clone(), queue.clone())).await;
                            }
                            _ => {}
                        }
                    }
                }
                Err(broadcast::error::RecvError::Lagged(_)) => self.wake_all(),
                Err(broadcast::error::RecvError::Closed) => return,
            }
        }
    }
}
