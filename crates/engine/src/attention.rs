//! Watches a set of runs for changes, for a session that holds tasks of these runs.

use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

use eddyline_machine::RunId;
use eddyline_store::Map;

use crate::bus::Bus;
use crate::engine::Engine;

/// Receives the changes of the runs that were added to it.
#[derive(Debug)]
pub struct Attention {
    bus: Arc<Bus>,
    runs: BTreeSet<RunId>,
    noted: Arc<Mutex<Noted>>,
}

/// Changes of watched runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunChanges {
    /// The runs that have changed; true for those that have ended.
    Changed(BTreeMap<RunId, bool>),
    /// Some hints were lost: any of the runs may have changed.
    Missed,
}

#[derive(Debug, Default)]
struct Noted {
    changed: BTreeMap<RunId, bool>,
    missed: bool,
    waiting: Option<Waker>,
}

/// The watchers of each run.
#[derive(Debug, Default)]
pub(crate) struct Attentive(Mutex<Map<RunId, Vec<Arc<Mutex<Noted>>>>>);

impl Engine {
    /// Creates a watcher without runs.
    pub fn attention(&self) -> Attention {
        Attention { bus: self.bus.clone(), runs: BTreeSet::new(), noted: Arc::default() }
    }
}

impl Attention {
    pub fn add(&mut self, run: RunId) {
        if self.runs.insert(run) {
            lock(&self.bus.attentive.0).entry(run).or_default().push(self.noted.clone());
        }
    }

    pub fn remove(&mut self, run: RunId) {
        if self.runs.remove(&run) {
            self.bus.attentive.forget(run, &self.noted);
            lock(&self.noted).changed.remove(&run);
        }
    }

    /// Waits for changes since the last call.
    pub async fn changed(&mut self) -> RunChanges {
        let _listening = Listening(&self.noted);
        poll_fn(|cx| {
            let mut noted = lock(&self.noted);
            if std::mem::take(&mut noted.missed) {
                noted.changed.clear();
                return Poll::Ready(RunChanges::Missed);
            }
            if noted.changed.is_empty() {
                noted.waiting = Some(cx.waker().clone());
                return Poll::Pending;
            }
            Poll::Ready(RunChanges::Changed(std::mem::take(&mut noted.changed)))
        })
        .await
    }
}

/// Removes the waker when the caller stops waiting, so that its own commits do not wake it.
struct Listening<'a>(&'a Mutex<Noted>);

impl Drop for Listening<'_> {
    fn drop(&mut self) {
        lock(self.0).waiting = None;
    }
}

impl Drop for Attention {
    fn drop(&mut self) {
        for run in std::mem::take(&mut self.runs) {
            self.bus.attentive.forget(run, &self.noted);
        }
    }
}

impl Attentive {
    pub fn changed(&self, run: RunId, ended: bool) {
        for noted in lock(&self.0).get(&run).into_iter().flatten() {
            note(noted, |noted| *noted.changed.entry(run).or_default() |= ended);
        }
    }

    pub fn missed(&self) {
        for noted in lock(&self.0).values().flatten() {
            note(noted, |noted| noted.missed = true);
        }
    }

    fn forget(&self, run: RunId, noted: &Arc<Mutex<Noted>>) {
        let mut attentive = lock(&self.0);
        if let Some(of_run) = attentive.get_mut(&run) {
            of_run.retain(|other| !Arc::ptr_eq(other, noted));
            if of_run.is_empty() {
                attentive.remove(&run);
            }
        }
    }
}

fn note(noted: &Mutex<Noted>, change: impl FnOnce(&mut Noted)) {
    let mut noted = lock(noted);
    change(&mut noted);
    let waiting = noted.waiting.take();
    drop(noted);
    waiting.into_iter().for_each(Waker::wake);
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
