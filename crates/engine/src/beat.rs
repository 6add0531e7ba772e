//! Signs of life: leases go on, and a worker is told which of its tasks it need not go on with.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use eddyline_machine::memo::MemoEntry;
use eddyline_machine::{Expiry, Fence, Input, RunId};
use eddyline_store::{Extended, Found, Lease, LeaseState, Namespace, Taken};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::assignment::memo;
use crate::engine::Engine;
use crate::error::{EngineError, Result};

/// To tell cancelled tasks from lost ones, a heartbeat loads their runs: up to so many, with so many tasks in all. A run is
/// loaded as a whole, and a worker may list any tasks it likes, so tasks of further runs are reported as lost. Neither kind
/// accepts reports.
const MAX_RUNS_LOOKED_INTO: usize = 100;
const MAX_TASKS_LOOKED_INTO: u64 = 20_000;

/// A task by its id, `<run>.<fence>`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId {
    pub run: RunId,
    pub fence: Fence,
}

impl TaskId {
    pub fn parse(text: &str) -> Option<TaskId> {
        let (run, fence) = text.split_once('.')?;
        Some(TaskId { run: RunId(Uuid::try_parse(run).ok()?), fence: Fence(fence.parse().ok()?) })
    }
}

impl std::fmt::Display for TaskId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.run, self.fence)
    }
}

impl From<TaskId> for Lease {
    fn from(TaskId { run, fence }: TaskId) -> Lease {
        Lease { run, fence }
    }
}

/// How it stands with a task that a worker says it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holding {
    Held {
        /// Of the function of a code run: how far its memo has come.
        memo: Option<MemoAt>,
    },
    /// It is somebody else's now, or nobody's: its lease or its time ended, or its worker has said the last of it.
    Lost,
    /// Nobody wants its result any more: its run or its step was cancelled or ended otherwise, or is being cancelled.
    Cancelled,
}

/// Changes of the memo of a code run, by their numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoAt {
    /// The newest that came with the task.
    pub handed_over: u64,
    /// The newest there is. Without one beyond what the worker has there is no news.
    pub newest: u64,
}

impl Engine {
    /// A worker is alive and has these tasks: their leases run from now on, each for as long as it was claimed for. Tasks
    /// of another namespace are lost to it.
    pub async fn beat(&self, ns: &Namespace, worker: &str, tasks: &[TaskId]) -> Result<Vec<Holding>> {
        let leases: Vec<Lease> = tasks.iter().map(|task| Lease::from(*task)).collect();
        let extended = self.instance.store.extend(ns, Some(worker), &leases).await?;
        // How far the memos of code runs have come is asked for those alone.
        let is_code = |extended: &Extended| matches!(extended, Extended::Until { memo: Some(_), .. });
        let code = leases.iter().zip(&extended).filter(|(_, extended)| is_code(extended)).map(|(lease, _)| *lease);
        let code: Vec<Lease> = code.collect();
        let mut newest = Vec::new();
        if !code.is_empty() {
            newest = self.instance.store.leases(ns, Some(worker), &code).await?;
        }
        let (mut newest, mut called_off) = (newest.into_iter(), CalledOff::new(self, ns));
        let mut standing = Vec::with_capacity(tasks.len());
        for (task, extended) in tasks.iter().zip(extended) {
            let lease = if is_code(&extended) { newest.next() } else { None };
            standing.push(match (extended, lease) {
                (Extended::Until { closed: true, .. }, _) => Holding::Cancelled,
                (Extended::Until { .. }, None) => Holding::Held { memo: None },
                (Extended::Until { .. }, Some(lease)) => self.holding(task, lease, &mut called_off).await?,
                (Extended::Lost, _) => called_off.gone(task).await?,
            });
        }
        Ok(standing)
    }

    /// Gives tasks back that a worker was handed but never got, which costs no attempt.
    pub async fn release(&self, ns: &Namespace, worker: &str, tasks: &[TaskId]) -> Result<()> {
        for (task, lease) in tasks.iter().zip(self.leases(ns, Some(worker), tasks).await?) {
            let LeaseState::Held { task: held, claim, .. } = lease else { continue };
            let input = Input::Expired { task: held, why: Expiry::Released, claim };
            let taken = Some(Taken::Expiry(task.fence, Expiry::Released));
            self.committing().submit(task.run, vec![input], taken, None).await?;
        }
        Ok(())
    }

    /// How it stands with tasks of a worker, without a word of the worker's: no lease goes on by it.
    pub async fn standing(&self, ns: &Namespace, worker: &str, tasks: &[TaskId]) -> Result<Vec<Holding>> {
        let mut called_off = CalledOff::new(self, ns);
        let mut standing = Vec::with_capacity(tasks.len());
        for (task, lease) in tasks.iter().zip(self.leases(ns, Some(worker), tasks).await?) {
            standing.push(self.holding(task, lease, &mut called_off).await?);
        }
        Ok(standing)
    }

    async fn holding(&self, task: &TaskId, lease: LeaseState, called_off: &mut CalledOff<'_>) -> Result<Holding> {
        Ok(match lease {
            LeaseState::Held { closed: true, .. } => Holding::Cancelled,
            LeaseState::Held { claim, memo, .. } => {
                Holding::Held { memo: memo.map(|newest| MemoAt { handed_over: claim.memo, newest }) }
            }
            LeaseState::Lost => called_off.gone(task).await?,
        })
    }

    async fn leases(&self, ns: &Namespace, worker: Option<&str>, tasks: &[TaskId]) -> Result<Vec<LeaseState>> {
        let leases: Vec<Lease> = tasks.iter().map(|task| Lease::from(*task)).collect();
        Ok(self.instance.store.leases(ns, worker, &leases).await?)
    }

    /// What the code run of a task remembers beyond the change numbered `after`. None if no worker has such a task.
    pub async fn memo_of(&self, ns: &Namespace, task: TaskId, after: u64) -> Result<Option<Map<String, Value>>> {
        match self.leases(ns, None, &[task]).await?.as_slice() {
            [LeaseState::Held { .. }] => self.remembered(ns, task, |entry| entry.n > after).await,
            _ => Ok(None),
        }
    }

    /// What has come to the code run of a task beyond the change numbered `seen`, or since the task was claimed: what its
    /// worker said itself since then is left out, but for entries of these names. None if there is no such run.
    pub async fn news_of(
        &self,
        ns: &Namespace,
        task: TaskId,
        seen: Option<u64>,
        names: &[&str],
    ) -> Result<Option<Map<String, Value>>> {
        let handed_over = self.facts.of(&*self.instance.store, ns, task).await?.memo;
        let seen = seen.unwrap_or(handed_over);
        // The header knows the newest change that its worker did not bring about; only then is the run loaded.
        let summary = self.instance.store.summary(task.run).await?.filter(|summary| summary.ns == *ns);
        let Some(summary) = summary else { return Ok(None) };
        let news = summary.header.code.as_ref().map_or(0, |code| code.news);
        if names.is_empty() && news.max(handed_over) <= seen {
            return Ok(Some(Map::new()));
        }
        let is_others = |entry: &MemoEntry<'_>| entry.news || entry.n <= handed_over;
        self.remembered(ns, task, |entry| entry.n > seen && (is_others(entry) || names.contains(&entry.name))).await
    }

    async fn remembered(
        &self,
        ns: &Namespace,
        task: TaskId,
        wanted: impl Fn(&MemoEntry<'_>) -> bool,
    ) -> Result<Option<Map<String, Value>>> {
        match memo(&*self.instance.store, &self.instance.flows, ns, task.run, wanted).await {
            Ok(entries) => Ok(Some(entries)),
            Err(EngineError::NotFound { .. } | EngineError::Trimmed(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn called_off(&self, ns: &Namespace, run: RunId, left: &mut u64) -> Result<BTreeSet<Fence>> {
        // Every task of a run has had a fence.
        let tasks = self.instance.store.summary(run).await?.map_or(0, |summary| summary.header.next_fence);
        if tasks > *left {
            return Ok(BTreeSet::new());
        }
        *left -= tasks;
        let loaded = match self.instance.store.load(run, None).await? {
            Found::Run(loaded) if loaded.summary.ns == *ns => loaded,
            _ => return Ok(BTreeSet::new()),
        };
        let tasks = loaded.rows.activations.iter().flat_map(|activation| &activation.tasks);
        Ok(tasks.filter(|task| task.called_off).map(|task| task.fence).collect())
    }
}

/// The tasks that were called off, by run: a run is read once, however many of its tasks are asked for.
struct CalledOff<'a> {
    engine: &'a Engine,
    ns: &'a Namespace,
    runs: BTreeMap<RunId, BTreeSet<Fence>>,
    /// How many tasks may still be looked into.
    left: u64,
}

impl<'a> CalledOff<'a> {
    fn new(engine: &'a Engine, ns: &'a Namespace) -> CalledOff<'a> {
        CalledOff { engine, ns, runs: BTreeMap::new(), left: MAX_TASKS_LOOKED_INTO }
    }

    /// How it stands with a task that the worker no longer has.
    async fn gone(&mut self, task: &TaskId) -> Result<Holding> {
        let full = self.runs.len() >= MAX_RUNS_LOOKED_INTO;
        let fences = match self.runs.entry(task.run) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(_) if full => return Ok(Holding::Lost),
            Entry::Vacant(place) => place.insert(self.engine.called_off(self.ns, task.run, &mut self.left).await?),
        };
        Ok(if fences.contains(&task.fence) { Holding::Cancelled } else { Holding::Lost })
    }
}
