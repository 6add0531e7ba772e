//! Whether a worker still holds a task, and if not, whether the task was cancelled.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use eddyline_machine::{Fence, RunId};
use eddyline_store::{Found, Lease, LeaseState, Namespace};
use uuid::Uuid;

use crate::engine::Engine;
use crate::error::Result;

/// To distinguish cancelled tasks from lost ones, a heartbeat loads their runs, up to these numbers of runs and tasks.
/// A run is loaded as a whole, and a worker may list any tasks, so tasks of further runs are reported as lost. Neither
/// kind accepts reports.
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

/// The state of a task that a worker claims to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holding {
    Held {
        /// Of the function of a code run: the state of its memo.
        memo: Option<MemoAt>,
    },
    /// The worker no longer holds it: its lease expired, it timed out, or its final report was applied.
    Lost,
    /// Its result is no longer needed: its run or step has ended or is being cancelled.
    Cancelled,
}

/// Change numbers of the memo of a code run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoAt {
    /// The newest change that came with the task.
    pub handed_over: u64,
    /// The newest change. If the worker has it, there is no news.
    pub newest: u64,
}

impl Engine {
    /// The state of a worker's tasks. Unlike a heartbeat, this extends no lease.
    pub async fn standing(&self, ns: &Namespace, worker: &str, tasks: &[TaskId]) -> Result<Vec<Holding>> {
        let mut called_off = CalledOff::new(self, ns);
        let mut standing = Vec::with_capacity(tasks.len());
        for (task, lease) in tasks.iter().zip(self.leases(ns, Some(worker), tasks).await?) {
            standing.push(self.holding(task, lease, &mut called_off).await?);
        }
        Ok(standing)
    }

    pub(crate) async fn holding(
        &self,
        task: &TaskId,
        lease: LeaseState,
        called_off: &mut CalledOff<'_>,
    ) -> Result<Holding> {
        Ok(match lease {
            LeaseState::Held { closed: true, .. } => Holding::Cancelled,
            LeaseState::Held { claim, memo, .. } => {
                Holding::Held { memo: memo.map(|newest| MemoAt { handed_over: claim.memo, newest }) }
            }
            LeaseState::Lost => called_off.gone(task).await?,
        })
    }

    pub(crate) async fn leases(
        &self,
        ns: &Namespace,
        worker: Option<&str>,
        tasks: &[TaskId],
    ) -> Result<Vec<LeaseState>> {
        let leases: Vec<Lease> = tasks.iter().map(|task| Lease::from(*task)).collect();
        Ok(self.instance.store.leases(ns, worker, &leases).await?)
    }

    async fn called_off(&self, ns: &Namespace, run: RunId, left: &mut u64) -> Result<BTreeSet<Fence>> {
        // Every task of a run had its own fence.
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

/// The cancelled tasks, by run. Each run is loaded once.
pub(crate) struct CalledOff<'a> {
    engine: &'a Engine,
    ns: &'a Namespace,
    runs: BTreeMap<RunId, BTreeSet<Fence>>,
    /// How many more tasks may be loaded.
    left: u64,
}

impl<'a> CalledOff<'a> {
    pub fn new(engine: &'a Engine, ns: &'a Namespace) -> CalledOff<'a> {
        CalledOff { engine, ns, runs: BTreeMap::new(), left: MAX_TASKS_LOOKED_INTO }
    }

    /// Whether a task that the worker no longer holds was cancelled or lost.
    pub async fn gone(&mut self, task: &TaskId) -> Result<Holding> {
        let full = self.runs.len() >= MAX_RUNS_LOOKED_INTO;
        let fences = match self.runs.entry(task.run) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(_) if full => return Ok(Holding::Lost),
            Entry::Vacant(place) => place.insert(self.engine.called_off(self.ns, task.run, &mut self.left).await?),
        };
        Ok(if fences.contains(&task.fence) { Holding::Cancelled } else { Holding::Lost })
    }
}
