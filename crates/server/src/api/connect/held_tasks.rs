//! The tasks that a connection has pushed and that have no final report yet.

use std::collections::{BTreeMap, BTreeSet};

use eddyline_engine::{Assignment, Attention, RunChanges, TaskId};
use eddyline_machine::{Fence, RunId, TaskKind};

#[derive(Debug)]
pub(super) struct HeldTasks {
    attention: Attention,
    runs: BTreeMap<RunId, BTreeMap<Fence, TaskState>>,
    /// Runs that have changed since their last check.
    changed: BTreeSet<RunId>,
    /// Runs that have ended.
    ended: BTreeSet<RunId>,
}

/// The state of a task.
#[derive(Debug, Clone, Copy, Default)]
struct TaskState {
    /// For a code run: the highest memo number sent to the worker.
    seen: Option<u64>,
    /// The memo number up to which news was checked.
    looked: u64,
}

impl HeldTasks {
    pub fn new(attention: Attention) -> HeldTasks {
        HeldTasks { attention, runs: BTreeMap::new(), changed: BTreeSet::new(), ended: BTreeSet::new() }
    }

    pub fn add(&mut self, task: &Assignment) {
        let seen = match task.kind {
            TaskKind::Step => None,
            TaskKind::Run => Some(highest(task.memo.as_ref())),
        };
        self.of_run(task.run).insert(task.token.fence, TaskState { seen, looked: seen.unwrap_or(0) });
    }

    /// Adds a task from an earlier connection.
    pub fn add_again(&mut self, task: TaskId) {
        self.of_run(task.run).entry(task.fence).or_default();
    }

    /// Subscribes to the run. Marks it as changed, because it may have changed between the claim and now.
    fn of_run(&mut self, run: RunId) -> &mut BTreeMap<Fence, TaskState> {
        self.attention.add(run);
        self.changed.insert(run);
        self.runs.entry(run).or_default()
    }

    pub fn remove(&mut self, task: TaskId) {
        if let Some(of_run) = self.runs.get_mut(&task.run) {
            of_run.remove(&task.fence);
            if of_run.is_empty() {
                self.runs.remove(&task.run);
                self.attention.remove(task.run);
                self.changed.remove(&task.run);
            }
        }
    }

    pub fn all(&self) -> Vec<TaskId> {
        self.runs.keys().flat_map(|run| self.of(*run)).collect()
    }

    /// Waits for changes of the runs and records them.
    pub async fn notice(&mut self) {
        match self.attention.changed().await {
            RunChanges::Changed(runs) => {
                self.ended.extend(runs.iter().filter(|(_, ended)| **ended).map(|(run, _)| *run));
                self.changed.extend(runs.into_keys());
            }
            RunChanges::Missed => self.changed.extend(self.runs.keys()),
        }
    }

    pub fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Removes and returns the tasks of runs that have ended: their results are no longer needed.
    pub fn take_ended(&mut self) -> Vec<TaskId> {
        let ended = std::mem::take(&mut self.ended);
        let tasks: Vec<TaskId> = ended.into_iter().flat_map(|run| self.of(run)).collect();
        tasks.iter().for_each(|task| self.remove(*task));
        tasks
    }

    /// Takes up to `most` changed runs and returns their tasks.
    pub fn take_changed(&mut self, most: usize) -> Vec<TaskId> {
        let mut tasks = Vec::new();
        for _ in 0..most {
            let Some(run) = self.changed.pop_first() else { break };
            tasks.extend(self.of(run));
        }
        tasks
    }

    /// For a code run: the highest memo number sent to the worker.
    pub fn seen(&self, task: TaskId) -> Option<u64> {
        self.runs.get(&task.run)?.get(&task.fence)?.seen
    }

    /// Marks the memo as checked up to `newest`; returns whether it had unchecked changes.
    pub fn look(&mut self, task: TaskId, newest: u64) -> bool {
        let of = self.runs.get_mut(&task.run).and_then(|of_run| of_run.get_mut(&task.fence));
        of.is_some_and(|of| newest > std::mem::replace(&mut of.looked, newest))
    }

    /// For a code run: memo entries up to `n` were sent to the worker.
    pub fn mark_seen(&mut self, task: TaskId, n: u64) {
        if let Some(of) = self.runs.get_mut(&task.run).and_then(|of_run| of_run.get_mut(&task.fence)) {
            of.seen = of.seen.max(Some(n));
        }
    }

    fn of(&self, run: RunId) -> Vec<TaskId> {
        let fences = self.runs.get(&run).into_iter().flat_map(BTreeMap::keys);
        fences.map(|fence| TaskId { run, fence: *fence }).collect()
    }
}

fn highest(memo: Option<&serde_json::Map<String, serde_json::Value>>) -> u64 {
    memo.into_iter().flat_map(|memo| memo.values()).filter_map(|entry| entry["n"].as_u64()).max().unwrap_or(0)
}
