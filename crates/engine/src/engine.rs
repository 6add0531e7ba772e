//! The engine: its loops, and the handle that callers use. The methods of [`Engine`] are spread over files by topic:
//!
//! | file | methods |
//! |---|---|
//! | `engine.rs` | start and shut down the engine, register and find flows |
//! | `start.rs`, `unique.rs` | start runs; unique keys |
//! | `act.rs` | cancel, pause, resume, retry, rerun, delete |
//! | `gates.rs`, `events.rs` | open gates; publish, read and delete events |
//! | `claim.rs`, `report.rs`, `beat.rs` | claims, reports and heartbeats of workers |
//! | `task_status.rs`, `memo_news.rs` | whether a worker still holds a task; new memo entries of a code run |
//! | `workers.rs`, `missing_worker.rs` | workers; tasks that no worker can take |
//! | `read.rs`, `timeline.rs`, `attention.rs` | read runs, steps and timelines; wait for changes |
//! | `flow_list.rs`, `queues.rs`, `namespaces.rs`, `keys.rs` | lists and settings |
//! | `presence.rs` | the instances that serve from the store |
//! | `quarantine.rs`, `health.rs`, `census.rs` | quarantined items; health; counts for metrics |

use std::collections::BTreeMap;
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use eddyline_store::{Namespace, Store};
use futures_util::FutureExt;
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use crate::backlog::Backlogs;
use crate::bus::{Bus, Interest};
use crate::census::LastCensus;
use crate::chore::{Chore, drive};
use crate::claim::{ClaimFacts, ClaimTimes};
use crate::committer::{self, CommitterHandle, Driver, panic_message};
use crate::config::Config;
use crate::error::{EngineError, Result};
use crate::events::{Events, Published, ensure_cursor, keep_events};
use crate::flows::{Flows, Registered, Registration, current_version};
use crate::handled::{self, Handled};
use crate::health::Reports;
use crate::inbox::Inbox;
use crate::instance::Instance;
use crate::lease_reaper::LeaseReaper;
use crate::presence::{Instances, Presence};
use crate::quarantine::{self, Suspects};
use crate::reconciler::Reconciler;
use crate::retention::RetentionLoop;
use crate::shutdown::{self, Shutdown, Stop};
use crate::timers::Timers;
use crate::token::Tokens;
use crate::view_cache::ViewCache;
use crate::worker_notices::WorkerNotices;
use crate::workers::Workers;

/// How long a shutdown waits for the loops before it abandons them.
const SHUTDOWN: Duration = Duration::from_secs(10);
/// How long it waits for the store to note that this instance no longer serves.
const CHECK_OUT: Duration = Duration::from_secs(1);

/// The names of the engine's loops: the label `loop` of the metrics that count their errors and panics.
pub const LOOPS: [&str; 9] = [
    Inbox::NAME,
    Events::NAME,
    Timers::NAME,
    LeaseReaper::NAME,
    Reconciler::NAME,
    RetentionLoop::NAME,
    Suspects::NAME,
    WorkerNotices::NAME,
    Presence::NAME,
];

/// Drives flows on a store, in this process. Cheap to clone; the loops run until [`Engine::shutdown`].
#[derive(Clone)]
pub struct Engine {
    pub(crate) instance: Instance,
    pub(crate) bus: Arc<Bus>,
    pub(crate) facts: Arc<ClaimFacts>,
    pub(crate) views: Arc<ViewCache>,
    pub(crate) tokens: Arc<Tokens>,
    pub(crate) backlogs: Arc<Backlogs>,
    pub(crate) stopping: Shutdown,
    pub(crate) workers: Arc<Workers>,
    pub(crate) health: Reports,
    /// Notified whenever a worker must drain.
    pub(crate) drained: watch::Sender<()>,
    pub(crate) instances: Arc<Instances>,
    running: Arc<Running>,
}

struct Running {
    stop: Stop,
    loops: Mutex<JoinSet<()>>,
    rounds: BTreeMap<&'static str, watch::Receiver<u64>>,
    measures: Measures,
}

/// State that only metrics need.
#[derive(Debug, Default)]
pub(crate) struct Measures {
    pub census: LastCensus,
    pub claim_times: ClaimTimes,
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("instance", &self.instance.config.instance).finish_non_exhaustive()
    }
}

impl Engine {
    /// Starts the loops. Must be called inside a tokio runtime.
    pub fn start(store: Arc<dyn Store>, config: Config) -> Engine {
        let config = Arc::new(config);
        let flows = Arc::new(Flows::default());
        let (stop, stopping) = shutdown::channel();
        let (committing, slot) = committer::open(&config);
        let published = Arc::<Published>::default();
        let instance = Instance { store, flows, committing, config, published: published.clone() };
        let health = Reports::default();
        let mut loops = Loops {
            set: JoinSet::new(),
            rounds: BTreeMap::new(),
            interests: Vec::new(),
            stopping: stopping.clone(),
            health: health.clone(),
            instance: instance.clone(),
        };
        loops.spawn(Inbox::new);
        loops.spawn(Events::new);
        loops.spawn(Timers::new);
        loops.spawn(LeaseReaper::new);
        loops.spawn(|instance| Reconciler { instance, at: None });
        loops.spawn(RetentionLoop);
        loops.spawn(Suspects::new);
        let (workers, drained) = (Arc::<Workers>::default(), watch::Sender::new(()));
        let (of_workers, of_drained) = (workers.clone(), drained.clone());
        loops.spawn(move |instance| WorkerNotices::new(instance, of_workers.clone(), of_drained.clone()));
        let instances = Arc::new(Instances::new((instance.config.chance)()));
        let present = instances.clone();
        loops.spawn(move |instance| Presence::new(instance, present.clone()));
        let bus = Arc::new(Bus::new(std::mem::take(&mut loops.interests), published));
        let Instance { store, flows, config, .. } = instance.clone();
        let handled = Arc::new(Handled::new(store.clone()));
        watch_for_hangs(&handled, &config, health.clone());
        let committer = Driver::new(store, flows, config, bus.clone(), health.clone(), handled, slot);
        let (suspecting, asked) = (instance.clone(), stopping.clone());
        let committing = async move {
            let suspects = quarantine::suspects_in_time(suspecting, asked.clone()).await;
            committer.run(suspects, asked).await;
        };
        loops.set.spawn(watched("committer", committing, stopping.clone(), health.clone()));
        let running =
            Running { stop, loops: Mutex::new(loops.set), rounds: loops.rounds, measures: Measures::default() };
        let (facts, tokens) = (Arc::new(ClaimFacts::default()), Arc::new(Tokens::default()));
        let (backlogs, views, running) = (Arc::default(), Arc::default(), Arc::new(running));
        Engine { instance, bus, facts, views, tokens, backlogs, stopping, workers, health, drained, instances, running }
    }

    /// Stops accepting claims and inputs, commits and answers what was accepted, and returns when all loops have
    /// stopped.
    pub async fn shutdown(&self) {
        self.running.stop.now();
        let mut loops = std::mem::take(&mut *self.running.loops.lock().unwrap_or_else(PoisonError::into_inner));
        let all = async { while loops.join_next().await.is_some() {} };
        if tokio::time::timeout(SHUTDOWN, all).await.is_err() {
            tracing::error!("some loops did not stop within {SHUTDOWN:?}; abandoning them");
        }
        // Without it, others look at everything once, as after a crash.
        let _ = tokio::time::timeout(CHECK_OUT, self.instance.store.check_out(self.instances.own)).await;
    }

    pub fn store(&self) -> &Arc<dyn Store> {
        &self.instance.store
    }

    pub fn config(&self) -> &Config {
        &self.instance.config
    }

    /// Wakes all loops: the clock has moved.
    pub(crate) fn wake_loops(&self) {
        self.bus.wake_all();
    }

    /// Counts the rounds of the named loop, so that tests can wait for a round instead of sleeping.
    pub fn rounds(&self, of: &str) -> Option<watch::Receiver<u64>> {
        self.running.rounds.get(of).cloned()
    }

    /// Registers a definition in YAML or JSON. A definition with problems is not stored.
    pub async fn register(&self, ns: &Namespace, name: Option<&str>, text: &str) -> Result<Registration> {
        let instance = &self.instance;
        ensure_cursor(instance, ns).await?;
        let registered = instance.flows.register(&*instance.store, instance.command(), ns, name, text).await?;
        let flow = self.flow(ns, &registered.name, Some(&registered.version)).await?;
        keep_events(instance, ns, flow.look_back_ms()).await?;
        Ok(registered)
    }

    /// A flow at the given version, or at its current one.
    pub async fn flow(&self, ns: &Namespace, name: &str, version: Option<&str>) -> Result<Arc<Registered>> {
        let found = self.instance.flows.find(&*self.instance.store, ns, name, version).await?;
        match (found, version) {
            (Some(found), _) => Ok(found),
            (None, Some(version)) if current_version(&*self.instance.store, ns, name).await?.is_some() => {
                Err(EngineError::no_version(name, version))
            }
            (None, _) => Err(EngineError::no_flow(name)),
        }
    }

    pub(crate) fn measures(&self) -> &Measures {
        &self.running.measures
    }

    pub(crate) fn committing(&self) -> &CommitterHandle {
        &self.instance.committing
    }
}

/// A hanging decision cannot be interrupted, so it fails the engine.
fn watch_for_hangs(handled: &Arc<Handled>, config: &Config, health: Reports) {
    let on_hang = config.on_hang.clone();
    handled::watch(handled, config.hang_s, move |hang| match on_hang {
        Some(on_hang) => on_hang(hang),
        None => health.failed(hang),
    });
}

struct Loops {
    set: JoinSet<()>,
    rounds: BTreeMap<&'static str, watch::Receiver<u64>>,
    interests: Vec<Interest>,
    stopping: Shutdown,
    health: Reports,
    instance: Instance,
}

impl Loops {
    /// Spawns a loop; `make` recreates it after a panic.
    fn spawn<C: Chore + 'static>(&mut self, make: impl Fn(Instance) -> C + Send + 'static) {
        let (rounds, seen) = watch::channel(0);
        self.rounds.insert(C::NAME, seen);
        let wake = Arc::new(Notify::new());
        self.interests.push(Interest { wakes: Box::new(C::wakes), wake: wake.clone() });
        let instance = self.instance.clone();
        let make = move || make(instance.clone());
        let driven = drive(make, wake, rounds, self.stopping.clone(), self.health.clone());
        self.set.spawn(watched(C::NAME, driven, self.stopping.clone(), self.health.clone()));
    }
}

/// Runs a loop. If it panics, or ends while the engine is not stopping, the engine fails.
async fn watched(name: &'static str, driven: impl Future<Output = ()>, stopping: Shutdown, health: Reports) {
    match AssertUnwindSafe(driven).catch_unwind().await {
        Ok(()) if stopping.is_now() => {}
        Ok(()) => health.failed(&format!("the loop {name} ended unexpectedly")),
        Err(panic) => health.failed(&format!("the loop {name} panicked: {}", panic_message(&*panic))),
    }
}

#[cfg(test)]
mod tests {
    use eddyline_store::Memory;

    use super::*;

    #[tokio::test]
    async fn every_loop_is_named() {
        let engine = Engine::start(Arc::new(Memory::new()), Config::default());
        let mut named = LOOPS;
        named.sort_unstable();
        assert_eq!(engine.running.rounds.keys().copied().collect::<Vec<_>>(), named);
        engine.shutdown().await;
    }
}
