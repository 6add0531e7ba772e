//! Wake-ups. Hints of the store go to those who wait for a run, and to the loops that have work; what is true is always
//! read from the store. The committer alone listens to the store and passes hints on: most of them follow from its own
//! commits, and a task more to wake with each of those would cost more than the rest of a step.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use eddyline_machine::RunId;
use eddyline_machine::run::Header;
use eddyline_store::{Change, Map, Namespace};
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::attention::Attentive;
use crate::events::Published;

/// So many runs are known to be going on.
const MOST_GOING: usize = 10_000;

/// Who waits for which run.
#[derive(Debug, Default)]
pub(crate) struct Bus {
    /// For anything that it records.
    records: Listeners<Notify>,
    /// For its end alone: a run of many steps wakes whoever waits for its result once.
    ends: Listeners<Ending>,
    /// Those who have an eye on many.
    pub attentive: Attentive,
    /// Runs that were started here and have not ended, as far as is known. Not all of them: there is an end to it.
    going: Mutex<Map<RunId, Namespace>>,
    /// Since when the store owes an answer to a commit.
    owed: Mutex<Option<Instant>>,
    chores: Vec<Interest>,
    published: Arc<Published>,
}

impl Bus {
    /// A commit is on its way to the store.
    pub fn sent(&self) {
        self.owed().get_or_insert_with(Instant::now);
    }

    /// One has come back; whether others are on their way.
    pub fn came_back(&self, others: bool) {
        *self.owed() = others.then(Instant::now);
    }

    /// How long the store has been silent, though something is on its way to it.
    pub fn silence(&self) -> Duration {
        self.owed().map_or(Duration::ZERO, |since| since.elapsed())
    }

    fn owed(&self) -> MutexGuard<'_, Option<Instant>> {
        self.owed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end of a run, to those who wait for it.
#[derive(Debug, Default)]
pub(crate) struct Ending {
    notify: Notify,
    /// Whose it is, and its header as it was committed, if that was done here.
    header: OnceLock<Box<(Namespace, Header)>>,
}

impl Ending {
    /// Done when the run may have ended.
    pub fn notified(&self) -> Notified<'_> {
        self.notify.notified()
    }

    /// To others than those of its namespace there is none.
    pub fn header(&self, ns: &Namespace) -> Option<&Header> {
        self.header.get().filter(|ended| ended.0 == *ns).map(|ended| &ended.1)
    }
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

    /// A run has begun, and that is durable.
    pub fn begun(&self, ns: &Namespace, run: RunId) {
        let mut going = self.going();
        if going.len() >= MOST_GOING {
            // Those that are not known to be going on are looked after in the store.
            going.clear();
        }
        going.insert(run, ns.clone());
    }

    /// Whether a run was going on when it was last heard of. That is a reason to wait for its end without looking first,
    /// but no answer to give to anybody: another instance may have ended it.
    pub fn goes_on(&self, ns: &Namespace, run: RunId) -> bool {
        self.going().get(&run) == Some(ns)
    }

    /// A look showed that a run does not go on: the hint that it ended came too early, or not at all.
    pub fn does_not_go_on(&self, run: RunId) {
        self.going().remove(&run);
    }

    fn going(&self) -> MutexGuard<'_, Map<RunId, Namespace>> {
        self.going.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A run has ended by a commit that is durable: those who wait for that need not read it.
    pub fn ended(&self, ns: &Namespace, header: &Header) {
        if let Some(ending) = self.ends.find(header.run) {
            let _ = ending.header.set(Box::new((ns.clone(), header.clone())));
        }
    }

    /// Hints were missed: anything may have changed.
    pub fn wake_all(&self) {
        self.going().clear();
        self.published.missed();
        self.attentive.missed();
        self.records.all().iter().for_each(|listener| listener.notify_waiters());
        self.ends.all().iter().for_each(|ending| ending.notify.notify_waiters());
        self.chores.iter().for_each(|chore| chore.wake.notify_one());
    }

    pub fn pass_on(&self, changes: &[Change]) {
        for change in changes {
            if let Change::Events { ns } = change {
                self.published.note(ns);
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
                    self.going().remove(run);
                    self.ends.find(*run).into_iter().for_each(|ending| ending.notify.notify_waiters());
                }
            }
        }
    }
}
