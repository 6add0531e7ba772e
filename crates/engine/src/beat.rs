//! Signs of life: leases go on, and a worker is told which of its tasks it need not go on with.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};

use eddyline_machine::memo::MemoEntry;
use eddyline_machine::{Expiry, Fence, Input, RunId, TaskKind, TaskRef};
use eddyline_store::{Extended, Found, Lease, Namespace, Taken, TaskRow};
use serde_json::{Map, Value};
use uuid::Uuid;

use crate::assignment::memo;
use crate::engine::Engine;
use crate::error::{EngineError, Result};

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

/// How it stands with a task that a worker says it has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holding {
    Held {
        /// Of a code run: the newest change in the memo that was handed over.
        memo: Option<u64>,
    },
    /// It is somebody else's now, or nobody's: its lease or its time ended, or its worker has said the last of it.
    Lost,
    /// Nobody wants its result any more: its run or its step was cancelled or ended otherwise, or is being cancelled.
    Cancelled,
}

impl Engine {
    /// A worker is alive and has these tasks: their leases run from now on, each for as long as it was claimed for. Tasks
    /// of another namespace are lost to it.
    pub async fn beat(&self, ns: &Namespace, worker: &str, tasks: &[TaskId]) -> Result<Vec<Holding>> {
        let leases: Vec<Lease> = tasks.iter().map(|task| Lease { run: task.run, fence: task.fence }).collect();
        let extended = self.instance.store.extend(ns, Some(worker), &leases).await?;
        let mut called_off = CalledOff { engine: self, ns, runs: BTreeMap::new() };
        let mut standing = Vec::with_capacity(tasks.len());
        for (task, extended) in tasks.iter().zip(extended) {
            standing.push(match extended {
                Extended::Until { closed: false, memo, .. } => Holding::Held { memo },
                Extended::Until { closed: true, .. } => Holding::Cancelled,
                Extended::Lost => called_off.gone(task).await?,
            });
        }
        Ok(standing)
    }

    /// Gives tasks back that a worker was handed but never got, which costs no attempt.
    pub async fn release(&self, ns: &Namespace, worker: &str, tasks: &[TaskId]) -> Result<()> {
        let mut by_run: BTreeMap<RunId, Vec<Fence>> = BTreeMap::new();
        for task in tasks {
            by_run.entry(task.run).or_default().push(task.fence);
        }
        for (run, fences) in by_run {
            if !self.is_of(ns, run).await? {
                continue;
            }
            for row in self.instance.store.beside(run).await?.tasks {
                let Some(held) = row.held.filter(|held| held.worker == worker) else { continue };
                if !fences.contains(&row.task.fence) {
                    continue;
                }
                let task = TaskRef { activation: row.task.activation, fence: row.task.fence };
                let input = Input::Expired { task, why: Expiry::Released, claim: held.claim };
                let taken = Some(Taken::Expiry(task.fence, Expiry::Released));
                self.committing().submit(run, vec![input], taken, None).await?;
            }
        }
        Ok(())
    }

    /// How it stands with tasks of a worker, without a word of the worker's: no lease goes on by it.
    pub async fn standing(&self, ns: &Namespace, worker: &str, tasks: &[TaskId]) -> Result<Vec<Holding>> {
        let mut called_off = CalledOff { engine: self, ns, runs: BTreeMap::new() };
        let mut rows: BTreeMap<RunId, Vec<TaskRow>> = BTreeMap::new();
        let mut standing = Vec::with_capacity(tasks.len());
        for task in tasks {
            let rows = match rows.entry(task.run) {
                Entry::Occupied(known) => known.into_mut(),
                Entry::Vacant(place) => place.insert(self.tasks_of(ns, task.run).await?),
            };
            let row = rows.iter().find(|row| row.task.fence == task.fence);
            let held = row.filter(|row| row.held.as_ref().is_some_and(|held| held.worker == worker));
            standing.push(match held {
                Some(row) if row.closed => Holding::Cancelled,
                Some(row) => Holding::Held {
                    memo: row.held.as_ref().filter(|_| row.task.kind == TaskKind::Run).map(|held| held.claim.memo),
                },
                None => called_off.gone(task).await?,
            });
        }
        Ok(standing)
    }

    /// What the code run of a task remembers beyond the change numbered `after`. None if there is no such run.
    pub async fn memo_of(&self, ns: &Namespace, task: TaskId, after: u64) -> Result<Option<Map<String, Value>>> {
        self.remembered(ns, task, |entry| entry.n > after).await
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
        let handed_over = self.facts.of(&*self.instance.store, task.run, task.fence).await?.memo;
        let seen = seen.unwrap_or(handed_over);
        let is_others = |entry: &MemoEntry<'_>| entry.news || entry.n <= handed_over;
        self.remembered(ns, task, |entry| entry.n > seen && (is_others(entry) || names.contains(&entry.name))).await
    }

    async fn remembered(
        &self,
        ns: &Namespace,
        task: TaskId,
        wanted: impl Fn(&MemoEntry<'_>) -> bool,
    ) -> Result<Option<Map<String, Value>>> {
        if !self.is_of(ns, task.run).await? {
            return Ok(None);
        }
        match memo(&*self.instance.store, &self.instance.flows, task.run, wanted).await {
            Ok(entries) => Ok(Some(entries)),
            Err(EngineError::NotFound { .. } | EngineError::Trimmed(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The tasks of a run that are queued or claimed.
    async fn tasks_of(&self, ns: &Namespace, run: RunId) -> Result<Vec<TaskRow>> {
        match self.is_of(ns, run).await? {
            true => Ok(self.instance.store.beside(run).await?.tasks),
            false => Ok(Vec::new()),
        }
    }

    async fn is_of(&self, ns: &Namespace, run: RunId) -> Result<bool> {
        Ok(self.instance.store.summary(run).await?.is_some_and(|summary| summary.ns == *ns))
    }

    async fn called_off(&self, ns: &Namespace, run: RunId) -> Result<BTreeSet<Fence>> {
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
}

impl CalledOff<'_> {
    /// How it stands with a task that the worker no longer has.
    async fn gone(&mut self, task: &TaskId) -> Result<Holding> {
        let fences = match self.runs.entry(task.run) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(self.engine.called_off(self.ns, task.run).await?),
        };
        Ok(if fences.contains(&task.fence) { Holding::Cancelled } else { Holding::Lost })
    }
}
