//! Signs of life: leases go on, and a worker is told which of its tasks it need not go on with.

use std::collections::BTreeMap;

use eddyline_machine::memo::MemoEntry;
use eddyline_machine::run::State;
use eddyline_machine::{Expiry, Fence, Input, RunId, TaskKind, TaskRef};
use eddyline_store::{Extended, Found, Lease, Namespace, Taken};
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
    /// It is somebody else's now, or nobody's.
    Lost,
    /// Nobody wants its result any more: its run or its step has ended, or is being cancelled.
    Cancelled,
}

impl Engine {
    /// A worker is alive and has these tasks: their leases run from now on, each for as long as it was claimed for. Tasks
    /// of another namespace are lost to it.
    pub async fn beat(&self, ns: &Namespace, worker: &str, tasks: &[TaskId]) -> Result<Vec<Holding>> {
        let leases: Vec<Lease> = tasks.iter().map(|task| Lease { run: task.run, fence: task.fence }).collect();
        let extended = self.instance.store.extend(ns, Some(worker), &leases).await?;
        let mut standing = Vec::with_capacity(tasks.len());
        for (task, extended) in tasks.iter().zip(extended) {
            standing.push(match extended {
                Extended::Until { closed: false, memo, .. } => Holding::Held { memo },
                Extended::Until { closed: true, .. } => Holding::Cancelled,
                Extended::Lost if self.is_over(ns, task).await? => Holding::Cancelled,
                Extended::Lost => Holding::Lost,
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
        let mut standing = Vec::with_capacity(tasks.len());
        for task in tasks {
            if !self.is_of(ns, task.run).await? {
                standing.push(Holding::Lost);
                continue;
            }
            let rows = self.instance.store.beside(task.run).await?.tasks;
            let row = rows.iter().find(|row| row.task.fence == task.fence);
            let held = row.filter(|row| row.held.as_ref().is_some_and(|held| held.worker == worker));
            standing.push(match held {
                Some(row) if row.closed => Holding::Cancelled,
                Some(row) => Holding::Held {
                    memo: row.held.as_ref().filter(|_| row.task.kind == TaskKind::Run).map(|held| held.claim.memo),
                },
                None if self.is_over(ns, task).await? => Holding::Cancelled,
                None => Holding::Lost,
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

    async fn is_of(&self, ns: &Namespace, run: RunId) -> Result<bool> {
        Ok(self.instance.store.summary(run).await?.is_some_and(|summary| summary.ns == *ns))
    }

    /// Whether the step of a task that the worker no longer has came to its end.
    async fn is_over(&self, ns: &Namespace, task: &TaskId) -> Result<bool> {
        let loaded = match self.instance.store.load(task.run, None).await? {
            Found::Run(loaded) => loaded,
            Found::Trimmed(summary) => return Ok(summary.ns == *ns),
            Found::Nothing | Found::Same => return Ok(false),
        };
        if loaded.summary.ns != *ns {
            return Ok(false);
        }
        if loaded.summary.ended_at.is_some() {
            return Ok(true);
        }
        let activations = &loaded.rows.activations;
        let of_task = activations.iter().find(|activation| activation.tasks.iter().any(|log| log.fence == task.fence));
        Ok(of_task.is_some_and(|activation| matches!(activation.state, State::Ended(_))))
    }
}
