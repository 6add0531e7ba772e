//! The functions of code runs that a link holds: which of them have news.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use eddyline_engine::{Attention, CodeNews, Engine, EngineError, Holding, Reported, RunChanges, TaskId, TaskToken};
use eddyline_machine::{Answer, RunId};
use eddyline_protocol::{Beat, News, NewsNext, Op, Report};
use eddyline_store::Namespace;

/// The tasks of functions, by run, with the highest number that was sent to the worker.
#[derive(Debug)]
pub(super) struct Functions {
    attention: Attention,
    tasks: BTreeMap<RunId, BTreeMap<TaskId, u64>>,
}

impl Functions {
    pub fn new(attention: Attention) -> Functions {
        Functions { attention, tasks: BTreeMap::new() }
    }

    pub fn add(&mut self, task: TaskId, seen: u64) {
        self.attention.add(task.run);
        self.tasks.entry(task.run).or_default().insert(task, seen);
    }

    pub fn remove(&mut self, task: TaskId) {
        if let Some(of_run) = self.tasks.get_mut(&task.run) {
            of_run.remove(&task);
            if of_run.is_empty() {
                self.tasks.remove(&task.run);
                self.attention.remove(task.run);
            }
        }
    }

    pub fn seen(&self, task: TaskId) -> Option<u64> {
        self.tasks.get(&task.run)?.get(&task).copied()
    }

    pub fn mark_seen(&mut self, task: TaskId, n: u64) {
        if let Some(seen) = self.tasks.get_mut(&task.run).and_then(|of_run| of_run.get_mut(&task)) {
            *seen = n.max(*seen);
        }
    }

    /// The tasks of runs that have changed. Cancel-safe.
    pub async fn changed(&mut self) -> Vec<(TaskId, u64)> {
        let runs: BTreeSet<RunId> = match self.attention.changed().await {
            RunChanges::Changed(runs) => runs.into_keys().collect(),
            RunChanges::Missed => self.tasks.keys().copied().collect(),
        };
        let of_runs = runs.iter().filter_map(|run| self.tasks.get(run));
        of_runs.flatten().map(|(task, seen)| (*task, *seen)).collect()
    }
}

/// Whether the worker still holds these tasks, and what is new in their memos beyond the number that it has seen.
pub(super) async fn look(
    engine: &Engine,
    ns: &Namespace,
    tasks: Vec<(TaskId, Option<u64>)>,
    standing: Vec<Holding>,
) -> Result<Beat, EngineError> {
    let mut beat = Beat::default();
    for ((task, seen), holding) in tasks.into_iter().zip(standing) {
        let id = task.to_string();
        match holding {
            Holding::Held { memo: None } => {}
            Holding::Held { memo: Some(memo) } => {
                let seen = seen.unwrap_or(memo.handed_over);
                let found = engine.news_of(ns, task, Some(seen), &[]).await?;
                let Some(CodeNews { entries, next, told_to_leave }) = found else { continue };
                if told_to_leave {
                    beat.cancel.push(id.clone());
                    beat.unwind.push(id.clone());
                }
                beat.news_next.extend(next.map(|next| (id.clone(), next)));
                if !entries.is_empty() {
                    beat.news.insert(id, entries);
                }
            }
            Holding::Cancelled => beat.cancel.push(id),
            Holding::Lost => beat.lost.push(id),
        }
    }
    Ok(beat)
}

/// The reports on the task of one function.
#[derive(Debug, Default)]
pub(super) struct FunctionReports {
    seen: Option<u64>,
    /// With the position among the answers, whether it is the last one, and the entry that it is about.
    reports: Vec<(usize, bool, Option<String>)>,
}

impl FunctionReports {
    pub fn add(&mut self, place: usize, report: &Arc<Report>) {
        self.seen = self.seen.max(report.seen);
        let name = match &report.op {
            Op::Step { name, .. }
            | Op::Call { name, .. }
            | Op::Sleep { name, .. }
            | Op::Wait { name, .. }
            | Op::Child { name, .. } => Some(name.clone()),
            Op::Publish { as_name, .. } => as_name.clone(),
            _ => None,
        };
        let last = matches!(
            report.op,
            Op::Complete { .. } | Op::Fail { .. } | Op::Defer { .. } | Op::Release | Op::Suspend | Op::Continue { .. }
        );
        self.reports.push((place, last, name));
    }

    /// Whether the worker still holds the task after these answers.
    pub fn is_held(&self, reported: &[Reported]) -> bool {
        self.reports.iter().all(|(place, last, _)| match reported.get(*place) {
            Some(Reported::Answer { answer: Answer::Applied(_) | Answer::Duplicate(_) | Answer::Nothing, .. }) => !last,
            Some(Reported::Answer { answer: Answer::Stale | Answer::Closed, .. }) => false,
            _ => true,
        })
    }

    /// The reported entries that the memo already had.
    fn known<'a>(&'a self, reported: &[Reported]) -> Vec<&'a str> {
        let known = self.reports.iter().filter(|(place, ..)| match reported.get(*place) {
            Some(Reported::Answer { answer: Answer::Applied(result) | Answer::Duplicate(result), .. }) => result.known,
            _ => false,
        });
        known.filter_map(|(.., name)| name.as_deref()).collect()
    }
}

/// The news that goes with the answers to reports.
pub(super) async fn news_of(
    engine: &Engine,
    ns: &Namespace,
    functions: &BTreeMap<TaskToken, FunctionReports>,
    reported: &[Reported],
) -> Result<(News, NewsNext), EngineError> {
    let (mut news, mut next) = (News::new(), NewsNext::new());
    for (token, of_task) in functions.iter().filter(|(_, of_task)| of_task.is_held(reported)) {
        let task = TaskId { run: token.run, fence: token.fence };
        let known = of_task.known(reported);
        let Some(found) = engine.news_of(ns, task, of_task.seen, &known).await? else { continue };
        next.extend(found.next.map(|next| (token.task_id(), next)));
        if !found.entries.is_empty() {
            news.insert(token.task_id(), found.entries);
        }
    }
    Ok((news, next))
}
