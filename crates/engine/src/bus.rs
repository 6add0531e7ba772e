//! Wake-ups. The bus passes hints of the store on to callers that wait for a run and to loops that may have work; they
//! then read the store. Only the committer listens to the store: most hints follow from its own commits, and waking
//! another task for each of them would cost more than the rest of a step.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use eddyline_machine::RunId;
use eddyline_machine::run::Header;
use eddyline_store::{Change, Map, Namespace};
use tokio::sync::futures::Notified;
use tokio::sync::{Notify, watch};

use crate::attention::Attentive;
use crate::events::Published;
use crate::keys::KEY;
use crate::namespaces::DISABLED;

/// The most entries of `Bus::running`.
const MAX_RUNNING: usize = 10_000;

/// The waiters of each run, and the loops.
#[derive(Debug, Default)]
pub(crate) struct Bus {
    /// Waiters for any new record.
    records: Listeners<Notify>,
    /// Waiters for the end alone: a run of many steps wakes them once.
    ends: Listeners<Ending>,
    /// Watchers of many runs.
    pub attentive: Attentive,
    /// Runs that this process started and that have not ended as far as it knows; up to [`MAX_RUNNING`].
    running: Mutex<Map<RunId, Namespace>>,
    /// Since when a commit waits for the store, without any other commit finishing.
    waiting_since: Mutex<Option<Instant>>,
    chores: Vec<Interest>,
    published: Arc<Published>,
    /// Counts hints that keys were changed or namespaces disabled or enabled.
    access: watch::Sender<u64>,
}

impl Bus {
    /// Changes when keys were changed, or namespaces disabled or enabled, here or elsewhere.
    pub fn access_changes(&self) -> watch::Receiver<u64> {
        self.access.subscribe()
    }

    /// A commit was sent to the store.
    pub fn commit_sent(&self) {
        self.waiting_since().get_or_insert_with(Instant::now);
    }

    /// A commit has returned; `others` says whether more are in flight.
    pub fn commit_returned(&self, others: bool) {
        *self.waiting_since() = others.then(Instant::now);
    }

    /// How long the store has finished no commit although one is in flight.
    pub fn silence(&self) -> Duration {
        self.waiting_since().map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn waiting_since(&self) -> MutexGuard<'_, Option<Instant>> {
        self.waiting_since.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Notifies those who wait for the end of a run.
#[derive(Debug, Default)]
pub(crate) struct Ending {
    notify: Notify,
    /// The run's namespace and final header, if this process committed it.
    header: OnceLock<Box<(Namespace, Header)>>,
}

impl Ending {
    /// Completes when the run may have ended.
    pub fn notified(&self) -> Notified<'_> {
        self.notify.notified()
    }

    /// The final header, if it is known and the run is in `ns`.
    pub fn header(&self, ns: &Namespace) -> Option<&Header> {
        self.header.get().filter(|ended| ended.0 == *ns).map(|ended| &ended.1)
    }
}

/// Which changes wake a loop.
pub(crate) struct Interest {
    pub wakes: Box<dyn Fn(&Change) -> bool + Send + Sync>,
    pub wake: Arc<Notify>,
}

impl fmt::Debug for Interest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interest").finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Listeners<L>(Mutex<Map<RunId, Weak<L>>>);

impl<L> Default for Listeners<L> {
    fn default() -> Listeners<L> {
        Listeners(Mutex::default())
    }
}

impl<L: Default> Listeners<L> {
    fn listen(&self, run: RunId) -> Arc<L> {
        let mut waiting = self.waiting();
        if let Some(listener) = waiting.get(&run).and_then(Weak::upgrade) {
            return listener;
        }
        let listener = Arc::<L>::default();
        if waiting.len() >= waiting.capacity() {
            waiting.retain(|_, listener| listener.strong_count() > 0);
        }
        waiting.insert(run, Arc::downgrade(&listener));
        listener
    }

    fn find(&self, run: RunId) -> Option<Arc<L>> {
        self.waiting().get(&run).and_then(Weak::upgrade)
    }

    fn all(&self) -> Vec<Arc<L>> {
        self.waiting().values().filter_map(Weak::upgrade).collect()
    }

    fn waiting(&self) -> MutexGuard<'_, Map<RunId, Weak<L>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bus {
    pub fn new(chores: Vec<Interest>, published: Arc<Published>) -> Bus {
        Bus { chores, published, ..Bus::default() }
    }

    /// Notified whenever the timeline of the run may have grown.
    pub fn listen(&self, run: RunId) -> Arc<Notify> {
        self.records.listen(run)
    }

    pub fn listen_for_end(&self, run: RunId) -> Arc<Ending> {
        self.ends.listen(run)
    }

    /// A run has started, and the commit is durable.
    pub fn started(&self, ns: &Namespace, run: RunId) {
        let mut running = self.running();
        if running.len() >= MAX_RUNNING {
            // Waiters for the end of a run that is not listed read the store first.
            running.clear();
        }
        running.insert(run, ns.clone());
    }

    /// Whether a run was running as far as this process knows. If so, a caller may wait for its end without reading the
    /// store first. Never report it to a client: another instance may have ended the run.
    pub fn may_be_running(&self, ns: &Namespace, run: RunId) -> bool {
        self.running().get(&run) == Some(ns)
    }

    /// The store says that a run has ended: the hint of its end came too early or was lost.
    pub fn forget_running(&self, run: RunId) {
        self.running().remove(&run);
    }

    fn running(&self) -> MutexGuard<'_, Map<RunId, Namespace>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A run has ended in a durable commit. Waiters get the header from here and need not read the store.
    pub fn ended(&self, ns: &Namespace, header: &Header) {
        if let Some(ending) = self.ends.find(header.run) {
            let _ = ending.header.set(Box::new((ns.clone(), header.clone())));
        }
    }

    /// Hints were lost: anything may have changed.
    pub fn wake_all(&self) {
        self.running().clear();
        self.access.send_modify(|count| *count += 1);
        self.published.missed();
        self.attentive.missed();
        self.records.all().iter().for_each(|listener| listener.notify_waiters());
        self.ends.all().iter().for_each(|ending| ending.notify.notify_waiters());
        self.chores.iter().for_each(|chore| chore.wake.notify_one());
    }

    pub fn pass_on(&self, changes: &[Change]) {
        for change in changes {
            match change {
                Change::Events { ns } => self.published.note(ns),
                Change::Documents { kind, .. } if kind == KEY || kind == DISABLED => {
                    self.access.send_modify(|count| *count += 1);
                }
                _ => {}
            }
        }
        for chore in &self.chores {
            if changes.iter().any(|change| (chore.wakes)(change)) {
                chore.wake.notify_one();
            }
        }
        for change in changes {
            if let Change::Run { run, ended } = change {
                self.records.find(*run).into_iter().for_each(|listener| listener.notify_waiters());
                self.attentive.changed(*run, *ended);
                if *ended {
                    self.running().remove(run);
                    self.ends.find(*run).into_iter().for_each(|ending| ending.notify.notify_waiters());
                }
            }
        }
    }
}
