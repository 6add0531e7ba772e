//! An engine in a process: its loops, and everything that can be asked of it.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use eddyline_store::{Namespace, Store};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use crate::backlog::Backlogs;
use crate::bus::{Bus, Interest};
use crate::chore::{Chore, drive};
use crate::committer::{self, Committing, Driver};
use crate::config::Config;
use crate::error::{EngineError, Result};
use crate::events::{Events, Published, ensure_cursor, keep_events};
use crate::flows::{Flows, Registered, Registration, current_version};
use crate::inbox::Inbox;
use crate::instance::Instance;
use crate::lease_reaper::LeaseReaper;
use crate::reconciler::Reconciler;
use crate::report::ClaimFacts;
use crate::retention::Retention;
use crate::shutdown::{self, Shutdown, Stop};
use crate::timers::Timers;
use crate::token::Tokens;
use crate::workers::Workers;

/// How long a shutdown waits for what is on its way before it lets go.
const SHUTDOWN: Duration = Duration::from_secs(10);

/// Drives flows on a store, in this process. Cheap to clone; the loops run until [`Engine::shutdown`].
#[derive(Clone)]
pub struct Engine {
    pub(crate) instance: Instance,
    pub(crate) bus: Arc<Bus>,
    pub(crate) facts: Arc<ClaimFacts>,
    pub(crate) tokens: Arc<Tokens>,
    pub(crate) backlogs: Arc<Backlogs>,
    pub(crate) stopping: Shutdown,
    pub(crate) workers: Arc<Workers>,
    /// Sent to whenever a worker is told to drain.
    pub(crate) drained: watch::Sender<()>,
    running: Arc<Running>,
}

struct Running {
    stop: Stop,
    loops: Mutex<JoinSet<()>>,
    rounds: BTreeMap<&'static str, watch::Receiver<u64>>,
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
        let (set, rounds) = (JoinSet::new(), BTreeMap::new());
        let mut loops = Loops { set, rounds, interests: Vec::new(), stopping: stopping.clone() };
        loops.spawn(Inbox::new(instance.clone()));
        loops.spawn(Events::new(instance.clone()));
        loops.spawn(Timers(instance.clone()));
        loops.spawn(LeaseReaper(instance.clone()));
        loops.spawn(Reconciler { instance: instance.clone(), at: None });
        loops.spawn(Retention(instance.clone()));
        let bus = Arc::new(Bus::new(loops.interests, published));
        let Instance { store, flows, config, .. } = instance.clone();
        loops.set.spawn(Driver::new(store, flows, config, bus.clone(), desk).run(stopping.clone()));
        let running = Running { stop, loops: Mutex::new(loops.set), rounds: loops.rounds };
        let (facts, tokens) = (Arc::new(ClaimFacts::default()), Arc::new(Tokens::default()));
        let (backlogs, workers, drained) = (Arc::default(), Arc::default(), watch::Sender::new(()));
        Engine { instance, bus, facts, tokens, backlogs, stopping, workers, drained, running: Arc::new(running) }
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

    pub(crate) fn committing(&self) -> &Committing {
        &self.instance.committing
    }
}

struct Loops {
    set: JoinSet<()>,
    rounds: BTreeMap<&'static str, watch::Receiver<u64>>,
    interests: Vec<Interest>,
    stopping: Shutdown,
}

impl Loops {
    fn spawn<C: Chore + 'static>(&mut self, chore: C) {
        let (rounds, seen) = watch::channel(0);
        self.rounds.insert(C::NAME, seen);
        let wake = Arc::new(Notify::new());
        self.interests.push(Interest { wakes: Box::new(C::wakes), wake: wake.clone() });
        self.set.spawn(drive(chore, wake, rounds, self.stopping.clone()));
    }
}
