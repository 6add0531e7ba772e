//! The worker's tasks and their reports.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use eddyline_protocol::{Failure, Heartbeat, News, NewsNext, Op, Report, ReportOutcome, Task, Verdict};
use serde_json::{Map, Value};
use tokio::sync::{mpsc, oneshot};
use tokio::task::{AbortHandle, Id};

use super::ctx::BAD_REPORT;
use super::outbox::{Outbox, Pending};
use super::shift::OnOutcome;
use super::task::{TaskId, TaskState};
use crate::code::driver::ToDriver;

/// The kind of failure of a handler that was aborted.
const CANCELLED: &str = "Cancelled";

#[derive(Default)]
pub(super) struct HeldTasks {
    held: HashMap<TaskId, HeldTask>,
    pub outbox: Outbox,
    completed: u64,
    failed: u64,
    on_outcome: Option<OnOutcome>,
}

pub(super) struct HeldTask {
    shared: Arc<TaskState>,
    /// The sequence number of the next report.
    seq: u32,
    state: Doing,
    function: Option<Function>,
    /// It uses up a slot.
    at_work: bool,
}

/// The function of a code run.
struct Function {
    driver: mpsc::UnboundedSender<ToDriver>,
    /// The highest number of an entry that was passed on to the driver.
    seen: u64,
}

pub(super) enum Doing {
    Running {
        stop: AbortHandle,
        why: Option<Why>,
    },
    /// Its final report is in the outbox.
    Ended,
}

/// Why a handler should stop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    Lost,
    Cancelled,
}

/// What a reply has for the driver of a code run.
#[derive(Default)]
struct ForDriver {
    outcomes: Vec<ReportOutcome>,
    /// Kept here, because the last report ends the task.
    driver: Option<mpsc::UnboundedSender<ToDriver>>,
}

impl HeldTask {
    pub fn new(shared: Arc<TaskState>, state: Doing, driver: Option<mpsc::UnboundedSender<ToDriver>>) -> HeldTask {
        let at_work = matches!(state, Doing::Running { .. });
        let function = driver.map(|driver| Function { driver, seen: 0 });
        HeldTask { shared, seq: 1, state, function, at_work }
    }
}

impl HeldTasks {
    pub fn new(on_outcome: Option<OnOutcome>) -> HeldTasks {
        HeldTasks { on_outcome, ..HeldTasks::default() }
    }

    pub fn add(&mut self, id: TaskId, task: HeldTask) {
        self.held.insert(id, task);
    }

    pub fn has(&self, id: &str) -> bool {
        self.held.contains_key(id)
    }

    /// Whether there are neither tasks nor unacknowledged reports.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty() && self.outbox.is_empty()
    }

    pub fn ids(&self) -> Vec<String> {
        self.held.keys().map(|id| id.to_string()).collect()
    }

    pub fn heartbeat(&self) -> Heartbeat {
        let (completed, failed) = (Some(self.completed), Some(self.failed));
        let seen = self.held.iter().filter_map(|(id, held)| Some((id.to_string(), held.function.as_ref()?.seen)));
        // Zero: nothing was passed on yet, and the server knows what came with the task.
        let seen = seen.filter(|(_, n)| *n > 0).collect();
        Heartbeat { tasks: self.ids(), completed, failed, seen }
    }

    /// Adds a report to the outbox, with its sequence number.
    pub fn say(&mut self, task: &TaskId, op: Op, last: bool, answer: Option<oneshot::Sender<ReportOutcome>>) {
        if let Some(pending) = self.pending(task, None, op, last, answer) {
            self.outbox.push(pending);
        }
    }

    fn pending(
        &mut self,
        task: &TaskId,
        seen: Option<u64>,
        op: Op,
        last: bool,
        answer: Option<oneshot::Sender<ReportOutcome>>,
    ) -> Option<Pending> {
        let held = self.held.get_mut(task)?;
        let about = &held.shared.task;
        let (task_id, token) = (about.task_id.clone(), about.token.clone());
        let report = Report { task_id, token, seq: Some(held.seq), seen, op };
        held.seq += 1;
        Some(Pending::new(task.clone(), report, last, answer))
    }

    pub fn say_notes(&mut self, task: &TaskId) {
        if let Some(HeldTask { shared, state: Doing::Running { .. }, .. }) = self.held.get(task) {
            for op in shared.clone().take_notes() {
                self.say(task, op, false, None);
            }
        }
    }

    /// Adds the reports of a driver. Returns whether the task is still held.
    pub fn say_frame(&mut self, task: &TaskId, seen: u64, ops: Vec<Op>, last: bool) -> bool {
        let mut left = ops.len();
        for op in ops {
            left -= 1;
            match self.pending(task, Some(seen), op, last && left == 0, None) {
                Some(pending) => self.outbox.push(pending.of_driver()),
                None => return false,
            }
        }
        true
    }

    /// Call it when the handler has ended by itself. Returns whether a slot became free.
    pub fn end(&mut self, task: &TaskId) -> bool {
        let Some(held) = self.held.get_mut(task) else { return false };
        let was_running = matches!(std::mem::replace(&mut held.state, Doing::Ended), Doing::Running { .. });
        was_running && std::mem::replace(&mut held.at_work, false)
    }

    /// Whether its handler has not ended and was not aborted.
    pub fn is_running(&self, task: &TaskId) -> bool {
        self.held.get(task).is_some_and(|held| matches!(held.state, Doing::Running { .. }))
    }

    /// The task whose handler is this tokio task.
    pub fn running_as(&self, id: Id) -> Option<TaskId> {
        let runs = |held: &&HeldTask| matches!(&held.state, Doing::Running { stop, .. } if stop.id() == id);
        self.held.values().find(runs).map(|held| held.shared.id.clone())
    }

    /// Tells all handlers that nobody needs their results.
    pub fn cancel_all(&self) {
        self.held.values().for_each(|held| held.shared.cancel());
    }

    /// Cancels the handler: once, and once more when a cancelled task is lost as well.
    pub fn cancel(&mut self, id: &str, because: Why) -> Option<TaskId> {
        let held = self.held.get_mut(id)?;
        let Doing::Running { why, .. } = &mut held.state else { return None };
        if *why == Some(Why::Lost) || *why == Some(because) {
            return None;
        }
        *why = Some(because);
        match because {
            Why::Lost => held.shared.lose(),
            Why::Cancelled => held.shared.cancel(),
        }
        Some(held.shared.id.clone())
    }

    /// Cancels the function of a code run. Returns false if the task is that of a handler.
    pub fn cancel_function(&mut self, id: &str, because: Why, unwind: bool) -> bool {
        let driver = self.held.get(id).and_then(|held| held.function.as_ref()).map(|function| function.driver.clone());
        let Some(driver) = driver else { return false };
        if self.cancel(id, because).is_some() {
            let message = match because {
                Why::Lost => ToDriver::Lost,
                Why::Cancelled => ToDriver::Cancelled { unwind },
            };
            // If the driver is gone, so is its task.
            let _ = driver.send(message);
        }
        true
    }

    pub fn tell_functions(&self, message: impl Fn() -> ToDriver) {
        for function in self.held.values().filter_map(|held| held.function.as_ref()) {
            let _ = function.driver.send(message());
        }
    }

    pub fn tell_function(&self, task: &TaskId, message: ToDriver) {
        if let Some(function) = self.held.get(task).and_then(|held| held.function.as_ref()) {
            let _ = function.driver.send(message);
        }
    }

    /// Records whether a function is at work; returns whether that is a change.
    pub fn set_at_work(&mut self, task: &TaskId, at_work: bool) -> bool {
        let Some(held) = self.held.get_mut(task) else { return false };
        std::mem::replace(&mut held.at_work, at_work) != at_work
    }

    /// Whether the function only waits for others.
    pub fn waits(&self, task: &TaskId) -> bool {
        self.held.get(task).is_some_and(|held| !held.at_work && matches!(held.state, Doing::Running { .. }))
    }

    /// Forgets a task that is no longer held by this worker.
    pub fn drop_task(&mut self, task: &TaskId) {
        self.held.remove(task);
    }

    /// Whether a cancelled handler may finish, because its result is needed for undo.
    pub fn may_finish(&self, task: &TaskId) -> bool {
        let of = self.held.get(task);
        of.is_some_and(|held| {
            held.shared.task.undo && matches!(held.state, Doing::Running { why: Some(Why::Cancelled), .. })
        })
    }

    /// Aborts a handler that ignored its cancellation. Returns false if it has ended meanwhile.
    pub fn stop(&mut self, task: &TaskId) -> bool {
        let Some(held) = self.held.get_mut(task) else { return false };
        let Doing::Running { stop, why } = &held.state else { return false };
        stop.abort();
        let (activation, lost) = (&held.shared.task.activation, *why == Some(Why::Lost));
        tracing::warn!(activation, "the handler ignored its cancellation and was aborted");
        held.state = Doing::Ended;
        held.at_work = false;
        if lost {
            self.held.remove(task);
        } else {
            // The run may wait for the end of the attempt before it undoes other steps.
            self.say(task, fail(CANCELLED, "aborted because the run was cancelled".to_owned(), false), true, None);
        }
        true
    }

    /// Call it when the server rejected the last message: a batch of one report counts as answered with `invalid`.
    pub fn refused(&mut self, why: &str) {
        if let Some(pending) = self.outbox.refused() {
            let outcome = ReportOutcome::new(&*pending.report.task_id, Verdict::Invalid);
            let outcome = ReportOutcome { message: Some(why.to_owned()), ..outcome };
            let mut for_drivers = BTreeMap::new();
            self.settle(pending, outcome, &mut for_drivers);
            self.pass_on(for_drivers, News::new(), NewsNext::new());
        }
    }

    pub fn reported(&mut self, id: u64, outcomes: Vec<ReportOutcome>, news: News, next: NewsNext) {
        let mut for_drivers = BTreeMap::new();
        for (pending, outcome) in self.outbox.answered(id, outcomes) {
            self.settle(pending, outcome, &mut for_drivers);
        }
        self.pass_on(for_drivers, news, next);
    }

    /// News that came without outcomes.
    pub fn news(&mut self, news: News, next: NewsNext) {
        self.pass_on(BTreeMap::new(), news, next);
    }

    /// Passes outcomes on together with their news: an outcome promises that all news below its number is there.
    fn pass_on(&mut self, for_drivers: BTreeMap<TaskId, ForDriver>, mut news: News, mut next: NewsNext) {
        for (task, ForDriver { outcomes, driver }) in for_drivers {
            let (entries, next) = (news.remove(&*task).unwrap_or_default(), next.remove(&*task));
            let outcomes_up_to = outcomes.iter().filter_map(|outcome| outcome.n).max();
            self.mark_seen(&task, outcomes_up_to.max(newest(&entries)));
            if let Some(driver) = driver {
                let _ = driver.send(ToDriver::Answered { outcomes, news: entries, next });
            }
        }
        for (task, entries) in news {
            let next = next.remove(&task);
            let Some((task, held)) = self.held.get_key_value(task.as_str()) else { continue };
            if let Some(function) = &held.function {
                let (task, up_to) = (task.clone(), newest(&entries));
                let _ = function.driver.send(ToDriver::News { entries, next });
                self.mark_seen(&task, up_to);
            }
        }
    }

    fn mark_seen(&mut self, task: &TaskId, up_to: Option<u64>) {
        if let Some(function) = self.held.get_mut(task).and_then(|held| held.function.as_mut()) {
            function.seen = function.seen.max(up_to.unwrap_or(0));
        }
    }

    fn settle(&mut self, pending: Pending, outcome: ReportOutcome, for_drivers: &mut BTreeMap<TaskId, ForDriver>) {
        let Pending { task, report, last, answer, of_driver, .. } = pending;
        let invalid = outcome.outcome == Verdict::Invalid;
        let message = || outcome.message.clone().unwrap_or_else(|| "the server gave no reason".to_owned());
        if invalid {
            tracing::warn!(task = &*task, "the server rejected a report: {}", message());
        }
        if of_driver {
            let function = self.held.get(&task).and_then(|held| held.function.as_ref());
            let driver = function.map(|function| function.driver.clone());
            let of_task = for_drivers.entry(task.clone()).or_default();
            of_task.driver = driver.or(of_task.driver.take());
            of_task.outcomes.push(outcome.clone());
        }
        match (last, invalid, &report.op) {
            (false, ..) => {}
            // The driver knows what to do.
            (true, true, _) if of_driver => {}
            // The worker still holds the task, so it fails the task with the reason.
            (true, true, Op::Complete { .. } | Op::Defer { .. }) => {
                self.say(&task, fail(BAD_REPORT, message(), false), true, None);
            }
            (true, _, op) => self.task_ended(&task, op, &outcome),
        }
        if let Some(answer) = answer {
            // The handler that waits for it may have been aborted.
            let _ = answer.send(outcome);
        }
    }

    fn task_ended(&mut self, task: &TaskId, op: &Op, outcome: &ReportOutcome) {
        let applied = outcome.outcome == Verdict::Applied;
        self.completed += u64::from(applied && matches!(op, Op::Complete { .. } | Op::Continue { .. }));
        self.failed += u64::from(applied && matches!(op, Op::Fail { .. }));
        if let (Some(held), Some(on_outcome)) = (self.held.remove(task), &self.on_outcome) {
            let task: &Task = &held.shared.task;
            on_outcome(task, op, outcome);
        }
    }
}

fn newest(entries: &Map<String, Value>) -> Option<u64> {
    entries.values().filter_map(|entry| entry["n"].as_u64()).max()
}

pub(super) fn fail(kind: &str, message: String, retryable: bool) -> Op {
    Op::Fail { error: Failure::new(kind, message), retryable, retry_after: None }
}
