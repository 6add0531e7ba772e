//! The tasks that a connection has pushed and that have not been reported on for good.

use std::collections::{BTreeMap, BTreeSet};

use eddyline_engine::{Assignment, Attention, Seen, TaskId};
use eddyline_machine::{Fence, RunId, TaskKind};

#[derive(Debug)]
pub(super) struct Held {
    attention: Attention,
    runs: BTreeMap<RunId, BTreeMap<Fence, Of>>,
    /// Runs of which something has changed since they were looked at.
    changed: BTreeSet<RunId>,
    /// Those that have ended.
    ended: BTreeSet<RunId>,
}

/// What is known of a task.
#[derive(Debug, Clone, Copy, Default)]
struct Of {
    /// Of the function of a code run: the highest number of its memo that it was told.
    seen: Option<u64>,
    /// The number up to which its memo was looked through for news.
    looked: u64,
}

impl Held {
    pub fn new(attention: Attention) -> Held {
        Held { attention, runs: BTreeMap::new(), changed: BTreeSet::new(), ended: BTreeSet::new() }
    }

    pub fn add(&mut self, task: &Assignment) {
        let seen = match task.kind {
            TaskKind::Step => None,
            TaskKind::Run => Some(highest(task.memo.as_ref())),
        };
        self.of_run(task.run).insert(task.token.fence, Of { seen, looked: seen.unwrap_or(0) });
    }

    /// A task from an earlier connection.
    pub fn add_again(&mut self, task: TaskId) {
        self.of_run(task.run).entry(task.fence).or_default();
    }

    /// It is looked after a run from now on. What became of it before, since the task was claimed, is not known.
    fn of_run(&mut self, run: RunId) -> &mut BTreeMap<Fence, Of> {
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

    /// Takes note of what becomes of the runs, as soon as something does.
    pub async fn notice(&mut self) {
        match self.attention.changed().await {
            Seen::Changed(runs) => {
                self.ended.extend(runs.iter().filter(|(_, ended)| **ended).map(|(run, _)| *run));
                self.changed.extend(runs.into_keys());
            }
            Seen::Missed => self.changed.extend(self.runs.keys()),
        }
    }

    pub fn has_changed(&self) -> bool {
        !self.changed.is_empty()
    }

    /// Takes the tasks of runs that have ended: nobody wants their results.
    pub fn take_ended(&mut self) -> Vec<TaskId> {
        let ended = std::mem::take(&mut self.ended);
        let tasks: Vec<TaskId> = ended.into_iter().flat_map(|run| self.of(run)).collect();
        tasks.iter().for_each(|task| self.remove(*task));
        tasks
    }

    /// Takes note of up to `most` runs that changed, and gives their tasks.
    pub fn take_changed(&mut self, most: usize) -> Vec<TaskId> {
        let mut tasks = Vec::new();
        for _ in 0..most {
            let Some(run) = self.changed.pop_first() else { break };
            tasks.extend(self.of(run));
        }
        tasks
    }

    /// What the function of a code run was told, if the task is one.
    pub fn seen(&self, task: TaskId) -> Option<u64> {
        self.runs.get(&task.run)?.get(&task.fence)?.seen
    }

    /// Whether the memo has changes that were not looked through yet. They are now, up to `newest`.
    pub fn look(&mut self, task: TaskId, newest: u64) -> bool {
        let of = self.runs.get_mut(&task.run).and_then(|of_run| of_run.get_mut(&task.fence));
        of.is_some_and(|of| newest > std::mem::replace(&mut of.looked, newest))
    }

    /// The function of a code run is told what is numbered up to `n`.
    pub fn told(&mut self, task: TaskId, n: u64) {
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
