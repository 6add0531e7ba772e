//! An engine in a process: its loops, and everything that can be asked of it.

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
use crate::committer::{self, Committing, Driver, said};
use crate::config::Config;
use crate::error::{EngineError, Result};
use crate::events::{Events, Published, ensure_cursor, keep_events};
use crate::flows::{Flows, Registered, Registration, current_version};
use crate::handled::{self, Handled};
use crate::health::Reports;
use crate::inbox::Inbox;
use crate::instance::Instance;
use crate::lease_reaper::LeaseReaper;
use crate::quarantine::{self, Suspects};
use crate::reconciler::Reconciler;
use crate::report::{ClaimFacts, ClaimTimes};
use crate::retention::Retention;
use crate::shutdown::{self, Shutdown, Stop};
use crate::timers::Timers;
use crate::token::Tokens;
use crate::view_cache::ViewCache;
use crate::workers::Workers;

/// How long a shutdown waits for what is on its way before it lets go.
const SHUTDOWN: Duration = Duration::from_secs(10);

/// The loops of an engine, by name: what errors and panics of them are counted under.
pub const LOOPS: [&str; 7] =
    [Inbox::NAME, Events::NAME, Timers::NAME, LeaseReaper::NAME, Reconciler::NAME, Retention::NAME, Suspects::NAME];

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
    /// Sent to whenever a worker is told to drain.
    pub(crate) drained: watch::Sender<()>,
    running: Arc<Running>,
}

struct Running {
    stop: Stop,
    loops: Mutex<JoinSet<()>>,
    rounds: BTreeMap<&'static str, watch::Receiver<u64>>,
    measures: Measures,
}

/// What is kept for metrics alone.
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
        let (committing, desk) = committer::open(&config);
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
        loops.spawn(Retention);
        loops.spawn(Suspects::new);
        let bus = Arc::new(Bus::new(std::mem::take(&mut loops.interests), published));
        let Instance { store, flows, config, .. } = instance.clone();
        let handled = Arc::new(Handled::new(store.clone()));
        watch_for_hangs(&handled, &config, health.clone());
        let committer = Driver::new(store, flows, config, bus.clone(), health.clone(), handled, desk);
        let (suspecting, asked) = (instance.clone(), stopping.clone());
        let committing = async move {
            let suspects = quarantine::suspects_in_time(suspecting, asked.clone()).await;
            committer.run(suspects, asked).await;
        };
        loops.set.spawn(watched("committer", committing, stopping.clone(), health.clone()));
        let running =
            Running { stop, loops: Mutex::new(loops.set), rounds: loops.rounds, measures: Measures::default() };
        let (facts, tokens) = (Arc::new(ClaimFacts::default()), Arc::new(Tokens::default()));
        let (backlogs, workers, views, drained) =
            (Arc::default(), Arc::default(), Arc::default(), watch::Sender::new(()));
        let running = Arc::new(running);
        Engine { instance, bus, facts, views, tokens, backlogs, stopping, workers, health, drained, running }
    }

    /// No new claims or inputs; what was accepted is committed and answered. Returns when everything has stopped.
    pub async fn shutdown(&self) {
        self.running.stop.now();
        let mut loops = std::mem::take(&mut *self.running.loops.lock().unwrap_or_else(PoisonError::into_inner));
        let all = async { while loops.join_next().await.is_some() {} };
        if tokio::time::timeout(SHUTDOWN, all).await.is_err() {
            tracing::error!("some loops did not stop within {SHUTDOWN:?} and were left");
        }
    }

    pub fn store(&self) -> &Arc<dyn Store> {
        &self.instance.store
    }

    pub fn config(&self) -> &Config {
        &self.instance.config
    }

    /// The rounds that a loop has made, by its name: what a test waits for instead of sleeping.
    pub fn rounds(&self, of: &str) -> Option<watch::Receiver<u64>> {
        self.running.rounds.get(of).cloned()
    }

    /// Registers a definition in YAML or JSON. Nothing is stored unless it has no problems.
    pub async fn register(&self, ns: &Namespace, name: Option<&str>, text: &str) -> Result<Registration> {
        let instance = &self.instance;
        ensure_cursor(instance, ns).await?;
        let registered = instance.flows.register(&*instance.store, instance.command(), ns, name, text).await?;
        let flow = self.flow(ns, &registered.name, Some(&registered.version)).await?;
        keep_events(instance, ns, flow.look_back_ms()).await?;
        Ok(registered)
    }

    /// A flow at a version, or at its current one.
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

    pub(crate) fn committing(&self) -> &Committing {
        &self.instance.committing
    }
}

/// A decision that hangs is the end of the engine: it can't be interrupted.
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
    /// Spawns a loop; `make` makes it anew, should it panic.
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

/// Runs a loop. If it panics, or ends while the engine is not stopping, the engine has failed.
async fn watched(name: &'static str, driven: impl Future<Output = ()>, stopping: Shutdown, health: Reports) {
    match AssertUnwindSafe(driven).catch_unwind().await {
        Ok(()) if stopping.is_now() => {}
        Ok(()) => health.failed(&format!("the loop {name} has ended")),
        Err(panic) => health.failed(&format!("the loop {name} panicked: {}", said(&*panic))),
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
