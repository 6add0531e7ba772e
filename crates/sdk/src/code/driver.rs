//! Drives the function of a code run: applies the rule of idle points, reports, suspends, undoes and ends.

#[cfg(test)]
mod fake_server;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use async_trait::async_trait;
use eddyline_protocol::{EntryKind, Failure, Op, ReportOutcome, Verdict};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde_json::{Map, Value};
use tokio::sync::mpsc;
use tokio::task::coop::unconstrained;
use tokio::time::Instant;

use super::core::Core;
use super::ctx::RunCtx;
use super::error::{CtxError, FlowEnd, FlowError};
use super::flow::{CodeFlow, FlowFuture};
use super::memo::{Ended, EntryName, Known, Opener, Status, parse};
use super::probe::Probe;
use super::state::{Delivered, Sent, Started};
use super::step::not_recorded;
use super::time::millis;
use super::undo::undo_all;
use crate::backoff::Backoff;
use crate::error::Error;
use crate::worker::{HandlerMessage, PANIC, TaskState, panic_message};

/// After this many polls in a row the driver lets other tasks of its thread run.
const POLLS_IN_A_ROW: u32 = 64;
/// Waits between attempts to read a memo page.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// Kinds of failure that a driver reports.
const STUCK: &str = "Stuck";
const CANCELLED: &str = "Cancelled";

/// What the worker's loop tells a driver.
#[derive(Debug)]
pub(crate) enum ToDriver {
    /// The outcomes of reports, in their order, with all news below them. With `next`, the news continues at that number.
    Answered {
        outcomes: Vec<ReportOutcome>,
        news: Map<String, Value>,
        next: Option<u64>,
    },
    News {
        entries: Map<String, Value>,
        next: Option<u64>,
    },
    /// The run was cancelled. With `unwind`, the function may undo its steps first.
    Cancelled {
        unwind: bool,
    },
    /// The worker no longer holds the task.
    Lost,
    /// The worker stops: finish the steps in progress and hand the run over.
    Drain,
    /// Too many functions wait on this worker.
    MakeRoom,
}

/// Reads memo pages.
#[async_trait]
pub(crate) trait MemoPages: Send + Sync {
    async fn page(&self, task_id: &str, after: u64) -> Result<MemoPage, Error>;
}

#[derive(Debug, Default)]
pub(crate) struct MemoPage {
    pub memo: Map<String, Value>,
    pub next: Option<u64>,
}

/// The connection of a driver to the worker's loop.
pub(crate) struct Port {
    pub voice: mpsc::Sender<HandlerMessage>,
    pub inbox: mpsc::UnboundedReceiver<ToDriver>,
    pub pages: Arc<dyn MemoPages>,
}

/// How long drivers wait.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Patience {
    /// How long a function that only waits for others stays in memory.
    pub hold: Duration,
    /// How long steps in progress may take to finish after a cancel.
    pub cancel_grace: Duration,
}

/// Runs the function of a task until it ends, suspends or is no longer wanted.
pub(crate) async fn drive(flow: CodeFlow, task: Arc<TaskState>, port: Port, patience: Patience) {
    let id = task.id.clone();
    let voice = port.voice.clone();
    let _at_work = task.probe.clone().map(|probe| AtWork::new(probe, &task.task.flow));
    let mut driver = Driver::new(flow, task, port, patience);
    // If it was ended by its last report, the loop knows.
    if driver.run().await.is_err() {
        driver.give_up();
        let _ = voice.send(HandlerMessage::Gone { task: id }).await;
    }
    driver.give_up();
}

/// In a test: a function in progress.
struct AtWork {
    probe: Arc<dyn Probe>,
    flow: String,
}

impl AtWork {
    fn new(probe: Arc<dyn Probe>, flow: &str) -> AtWork {
        probe.at_work(flow, true);
        AtWork { probe, flow: flow.to_owned() }
    }
}

impl Drop for AtWork {
    fn drop(&mut self) {
        self.probe.at_work(&self.flow, false);
    }
}

/// The task is gone: lost, cancelled, or answered with `stale` or `closed`.
#[derive(Debug)]
struct Gone;

type Going<T = ()> = Result<T, Gone>;

/// What the function does.
enum Phase {
    Running,
    /// A later task of a run that unwinds: the function is replayed, so that it says how its steps are undone. It starts
    /// nothing.
    Recollecting,
    /// Its steps are being undone.
    Undoing(Undoing),
}

struct Undoing {
    error: Failure,
    failed: Arc<Mutex<Vec<CtxError>>>,
}

/// What a function returned, or what it panicked with.
type FunctionEnd = Result<Result<Value, FlowError>, Box<dyn Any + Send>>;

struct Driver {
    flow: CodeFlow,
    task: Arc<TaskState>,
    core: Arc<Core>,
    port: Port,
    patience: Patience,
    function: Option<BoxFuture<'static, FunctionEnd>>,
    phase: Phase,
    /// Reports without an answer, oldest first.
    unanswered: VecDeque<Sent>,
    /// The highest number in an answer: the answers had all entries up to it.
    horizon: u64,
    /// The highest number in the memo that came with the task.
    claimed_up_to: u64,
    /// Since when it has only waited for others.
    held_since: Option<Instant>,
    /// The loop was told that it only waits.
    said_held: bool,
    draining: bool,
    make_room: bool,
    /// The run was cancelled, and the function may undo; until then, steps in progress may finish.
    cancelled: Option<Instant>,
    /// The verdict on the last report.
    last: Option<ReportOutcome>,
    polls: u32,
}

/// What an idle point came to.
enum Next {
    /// Poll the function.
    Poll,
    /// Wait for a message, a body, or this moment.
    Wait(Option<Instant>),
    /// The task was ended by its last report.
    Done,
}

impl Driver {
    fn new(flow: CodeFlow, task: Arc<TaskState>, port: Port, patience: Patience) -> Driver {
        let started_at = task.task.started_at.as_deref().and_then(millis).unwrap_or(0);
        let core = Arc::new(Core::new(task.clone(), started_at));
        let phase = if task.task.unwind.is_some() { Phase::Recollecting } else { Phase::Running };
        Driver {
            flow,
            task,
            core,
            port,
            patience,
            function: None,
            phase,
            unanswered: VecDeque::new(),
            horizon: 0,
            claimed_up_to: 0,
            held_since: None,
            said_held: false,
            draining: false,
            make_room: false,
            cancelled: None,
            last: None,
            polls: 0,
        }
    }

    async fn run(&mut self) -> Going {
        self.read_memo().await?;
        if let Some(probe) = &self.task.probe {
            match self.phase {
                Phase::Running => probe.begun(&self.task.task.run_id, self.task.task.attempt),
                _ => probe.unwinds(&self.task.task.run_id),
            }
        }
        let ctx = RunCtx::new(self.core.clone());
        let input = self.task.task.input.clone();
        let run = self.flow.run.clone();
        // Called inside the future, because the function may panic before its first await.
        self.begin(Box::pin(async move { run(ctx, input).await }));
        loop {
            self.hear_now().await?;
            if let Poll::Ready(result) = self.poll() {
                self.function = None;
                match self.ended(result).await? {
                    true => return Ok(()),
                    false => continue,
                }
            }
            if self.core.flow.woken.load(Ordering::Acquire) {
                self.give_way().await;
                continue;
            }
            match self.idle().await? {
                Next::Poll => self.give_way().await,
                Next::Wait(until) => self.wait(until).await?,
                Next::Done => return Ok(()),
            }
        }
    }

    /// The whole memo, before anything is delivered or starts.
    async fn read_memo(&mut self) -> Going {
        let memo = self.task.take_memo();
        self.learn(memo).await?;
        self.read_pages(self.task.task.memo_next).await?;
        self.horizon = self.core.state().seen();
        self.claimed_up_to = self.horizon;
        Ok(())
    }

    fn begin(&mut self, function: FlowFuture) {
        self.core.flow.woken.store(true, Ordering::Release);
        // Without tokio's budget: an exhausted budget looks like an idle point.
        self.function = Some(Box::pin(unconstrained(AssertUnwindSafe(function).catch_unwind())));
    }

    fn poll(&mut self) -> Poll<Result<Value, FlowError>> {
        let Some(function) = &mut self.function else { return Poll::Pending };
        if !self.core.flow.woken.swap(false, Ordering::AcqRel) {
            return Poll::Pending;
        }
        let waker = Waker::from(self.core.flow.clone());
        self.core.polling.store(true, Ordering::Release);
        let polled = function.as_mut().poll(&mut Context::from_waker(&waker));
        self.core.polling.store(false, Ordering::Release);
        polled.map(|end| {
            end.unwrap_or_else(|panic| Err(FlowError::failed(Failure::new(PANIC, panic_message(&*panic)), true)))
        })
    }

    async fn give_way(&mut self) {
        self.polls = self.polls.wrapping_add(1);
        if self.polls.is_multiple_of(POLLS_IN_A_ROW) {
            tokio::task::yield_now().await;
        }
    }

    /// The function cannot move by itself.
    async fn idle(&mut self) -> Going<Next> {
        let kind_changed = self.core.state().take_kind_changed();
        if let Some(failure) = kind_changed {
            return self.fail_for_good(failure).await;
        }
        let started = self.core.state().open(self.may_start());
        if self.begin_all(started).await? {
            return Ok(Next::Poll);
        }
        if self.is_to_shake() {
            return self.hand_over(Op::Release).await;
        }
        if !self.core.state().is_opening() {
            let horizon = if self.unanswered.is_empty() { u64::MAX } else { self.horizon };
            let delivered = self.core.state().deliver(horizon);
            if let Some(Delivered { waker, n, name }) = delivered {
                self.held_since = None;
                if let Some(probe) = &self.task.probe {
                    probe.delivered(&self.task.task.run_id, n, &name);
                }
                waker.into_iter().for_each(Waker::wake);
                return Ok(Next::Poll);
            }
        }
        let started = self.core.state().collect(self.may_start());
        if self.begin_all(started).await? {
            return Ok(Next::Poll);
        }
        self.held().await
    }

    /// In a test: whether something is known that did not come with the task, so that the function is replayed.
    fn is_to_shake(&self) -> bool {
        let shakes = self.task.probe.as_ref().is_some_and(|probe| probe.shakes());
        if !shakes || !matches!(self.phase, Phase::Running) || !self.unanswered.is_empty() {
            return false;
        }
        let state = self.core.state();
        state.has_ready_after(self.claimed_up_to) && !state.is_in_progress()
    }

    /// Whether new work may begin.
    fn may_start(&self) -> bool {
        !self.draining && self.cancelled.is_none() && !matches!(self.phase, Phase::Recollecting)
    }

    /// Sends the reports of an idle point and wakes what can go on. Returns whether the function is to be polled.
    async fn begin_all(&mut self, started: Started) -> Going<bool> {
        let Started { ops, wake } = started;
        let (mut reports, mut sent) = (Vec::with_capacity(ops.len()), Vec::with_capacity(ops.len()));
        for (op, of) in ops {
            reports.push(op);
            sent.push(of);
        }
        self.report(reports, sent, false).await?;
        let woken = !wake.is_empty();
        wake.into_iter().for_each(Waker::wake);
        Ok(woken)
    }

    /// Reports steps whose bodies have ended in the last poll of the function: what they did is to be kept, or undone.
    async fn report_finished(&mut self) -> Going {
        let finished = self.core.state().finished();
        self.begin_all(finished).await.map(drop)
    }

    async fn report(&mut self, ops: Vec<Op>, sent: Vec<Sent>, last: bool) -> Going {
        if ops.is_empty() {
            return Ok(());
        }
        self.unanswered.extend(sent);
        self.may_die(true).await;
        let seen = self.core.state().seen();
        let frame = HandlerMessage::Frame { task: self.task.id.clone(), seen, ops, last };
        self.port.voice.send(frame).await.map_err(|_| Gone)
    }

    /// Nothing is left to deliver or to start: waits for bodies, answers or news, or ends the task.
    async fn held(&mut self) -> Going<Next> {
        let (at_work, waiting) = {
            let state = self.core.state();
            (state.is_at_work(), state.is_waiting())
        };
        if let Some(until) = self.cancelled
            && (!at_work || Instant::now() >= until)
        {
            return self.unwind(None).await;
        }
        if at_work || !self.unanswered.is_empty() {
            self.held_since = None;
            return Ok(Next::Wait(self.cancelled));
        }
        if matches!(self.phase, Phase::Recollecting) {
            self.function = None;
            self.begin_undoing();
            return Ok(Next::Poll);
        }
        if self.draining || (self.make_room && waiting) {
            // Another worker starts what this one did not; a suspended function would first wait for the rest.
            let suspends = waiting && !self.core.state().has_unstarted();
            let op = if suspends { Op::Suspend } else { Op::Release };
            return self.hand_over(op).await;
        }
        if !waiting {
            // It waits for something that the server does not know of: it is at work.
            return Ok(Next::Wait(None));
        }
        let until = *self.held_since.get_or_insert_with(Instant::now) + self.patience.hold;
        if Instant::now() >= until {
            return self.hand_over(Op::Suspend).await;
        }
        self.say_held(true).await?;
        Ok(Next::Wait(Some(until)))
    }

    /// Ends the task, and drops the function when the server has taken it.
    async fn hand_over(&mut self, op: Op) -> Going<Next> {
        let suspends = matches!(op, Op::Suspend);
        let outcome = self.last_report(Vec::new(), op).await?;
        if outcome.outcome == Verdict::Applied {
            return Ok(Next::Done);
        }
        // What the function waits for can never come.
        let why = outcome.message.unwrap_or_else(|| "the server gave no reason".to_owned());
        let what = if suspends { "suspend" } else { "release" };
        let failure = Failure::new(STUCK, format!("cannot {what} the function: {why}"));
        self.end();
        self.fail(failure, true, None).await
    }

    /// Sends the last report and waits for its outcome.
    async fn last_report(&mut self, lines: Vec<Op>, op: Op) -> Going<ReportOutcome> {
        let mut sent: Vec<Sent> = lines.iter().map(|_| Sent::Other).collect();
        sent.push(Sent::Last);
        let mut ops = lines;
        ops.push(op);
        self.report(ops, sent, true).await?;
        loop {
            if let Some(outcome) = self.last.take() {
                return Ok(outcome);
            }
            self.hear().await?;
        }
    }

    /// The function has returned. Returns whether that was the end of the task.
    async fn ended(&mut self, result: Result<Value, FlowError>) -> Going<bool> {
        let kind_changed = self.core.state().take_kind_changed();
        if let Some(failure) = kind_changed {
            return Ok(matches!(self.fail_for_good(failure).await?, Next::Done));
        }
        match &self.phase {
            Phase::Running => {}
            Phase::Recollecting => {
                self.begin_undoing();
                return Ok(false);
            }
            Phase::Undoing(undoing) => {
                let mut error = undoing.error.clone();
                let failed = std::mem::take(&mut *undoing.failed.lock().unwrap_or_else(PoisonError::into_inner));
                error.also.extend(failed.into_iter().filter_map(|failed| failed.failure().cloned()));
                self.end();
                return Ok(matches!(self.fail(error, false, None).await?, Next::Done));
            }
        }
        self.end();
        if result.is_err() {
            self.report_finished().await?;
        }
        let op = match result.map_err(FlowError::into_end) {
            Ok(output) => Op::Complete { output, emits: Vec::new(), logs: Vec::new() },
            Err(FlowEnd::Continue(input)) => Op::Continue { input },
            Err(FlowEnd::Fail { failure, retryable, retry_after }) => {
                let next = if retryable && self.may_retry(&failure) {
                    self.fail(failure, true, retry_after).await?
                } else {
                    self.unwind(Some(failure)).await?
                };
                return Ok(matches!(next, Next::Done));
            }
        };
        let lines = self.lines();
        let outcome = self.last_report(lines, op).await?;
        if outcome.outcome == Verdict::Applied {
            return Ok(true);
        }
        let message = outcome.message.unwrap_or_else(|| "the server gave no reason".to_owned());
        let failure = Failure::new(crate::worker::BAD_REPORT, message);
        Ok(matches!(self.unwind(Some(failure)).await?, Next::Done))
    }

    /// Whether the flow's retry policy allows another attempt after this failure.
    fn may_retry(&self, failure: &Failure) -> bool {
        let task = &self.task.task;
        let more = task.attempts.is_none_or(|attempts| task.attempt < attempts);
        more && self.flow.retry.as_ref().is_none_or(|retry| retry.retries(&failure.kind))
    }

    async fn fail_for_good(&mut self, failure: Failure) -> Going<Next> {
        if matches!(self.phase, Phase::Recollecting) {
            self.begin_undoing();
            return Ok(Next::Poll);
        }
        self.unwind(Some(failure)).await
    }

    /// Reports the failure of the attempt.
    async fn fail(&mut self, error: Failure, retryable: bool, retry_after: Option<Duration>) -> Going<Next> {
        let lines = self.lines();
        let retry_after = retry_after.map(super::retry::span);
        let outcome = self.last_report(lines, Op::Fail { error, retryable, retry_after }).await?;
        match outcome.outcome {
            Verdict::Applied => Ok(Next::Done),
            // There is nothing else to say; the lease ends by itself.
            _ => Err(Gone),
        }
    }

    /// The function has failed for good, or was cancelled: undoes its steps, then fails. Without an error, it was
    /// cancelled.
    async fn unwind(&mut self, error: Option<Failure>) -> Going<Next> {
        self.end();
        self.function = None;
        self.cancelled = None;
        self.report_finished().await?;
        // Reports of steps may be on their way, which are to be undone as well.
        while !self.unanswered.is_empty() {
            self.hear().await?;
        }
        let failure = error.clone().unwrap_or_else(|| Failure::new(CANCELLED, "the run was cancelled"));
        let nothing_to_undo = matches!(self.phase, Phase::Undoing(_)) || !self.core.state().has_undoable();
        if nothing_to_undo && error.is_some() {
            return self.fail(failure, false, None).await;
        }
        let lines = self.lines();
        let mut sent: Vec<Sent> = lines.iter().map(|_| Sent::Other).collect();
        sent.push(Sent::Unwind);
        let mut ops = lines;
        ops.push(Op::Unwind { error });
        self.report(ops, sent, false).await?;
        while !self.unanswered.is_empty() {
            self.hear().await?;
        }
        self.phase = Phase::Undoing(Undoing { error: failure, failed: Arc::default() });
        self.begin_undoing();
        Ok(Next::Poll)
    }

    /// Continues with the steps that undo others.
    fn begin_undoing(&mut self) {
        if let Some(probe) = &self.task.probe {
            probe.ended(&self.task.task.run_id);
        }
        self.end();
        self.function = None;
        self.core.state().begin_anew();
        let error = match &self.phase {
            Phase::Undoing(undoing) => undoing.error.clone(),
            _ => {
                let of_run = self.task.task.unwind.as_ref().and_then(|unwind| unwind.error.clone());
                of_run.unwrap_or_else(|| Failure::new(CANCELLED, "the run was cancelled"))
            }
        };
        let failed = Arc::<Mutex<Vec<CtxError>>>::default();
        self.phase = Phase::Undoing(Undoing { error, failed: failed.clone() });
        let ctx = RunCtx::new(self.core.clone());
        self.begin(Box::pin(async move {
            let errors = undo_all(&ctx, false).await;
            *failed.lock().unwrap_or_else(PoisonError::into_inner) = errors;
            Ok(Value::Null)
        }));
    }

    fn lines(&self) -> Vec<Op> {
        self.core.state().take_lines().into_iter().map(Op::Log).collect()
    }

    /// What the function drops from now on is not let go.
    fn end(&self) {
        self.core.state().end();
    }

    /// Drops the function and everything that may refer to its context.
    fn give_up(&mut self) {
        if let Some(probe) = &self.task.probe {
            probe.ended(&self.task.task.run_id);
        }
        self.end();
        self.function = None;
        let undos = self.core.state().take_undos();
        drop(undos);
    }

    /// In a test: the worker may die at a message.
    async fn may_die(&mut self, before: bool) {
        if self.task.probe.as_ref().is_some_and(|probe| probe.dies_at_message(before)) {
            std::future::pending::<()>().await;
        }
    }

    async fn say_held(&mut self, held: bool) -> Going {
        if std::mem::replace(&mut self.said_held, held) == held {
            return Ok(());
        }
        let message = HandlerMessage::AtWork { task: self.task.id.clone(), at_work: !held };
        self.port.voice.send(message).await.map_err(|_| Gone)
    }

    /// Waits for a message, a body or the moment.
    async fn wait(&mut self, until: Option<Instant>) -> Going {
        let core = self.core.clone();
        tokio::select! {
            biased;
            message = self.port.inbox.recv() => self.take(message.ok_or(Gone)?).await?,
            () = core.flow.notify.notified() => {}
            () = sleep_until(until) => return Ok(()),
        }
        self.say_held(false).await
    }

    async fn hear(&mut self) -> Going {
        let message = self.port.inbox.recv().await.ok_or(Gone)?;
        self.take(message).await
    }

    async fn hear_now(&mut self) -> Going {
        while let Ok(message) = self.port.inbox.try_recv() {
            self.take(message).await?;
        }
        Ok(())
    }

    async fn take(&mut self, message: ToDriver) -> Going {
        match message {
            ToDriver::Answered { outcomes, news, next } => {
                self.may_die(false).await;
                self.learn(news).await?;
                self.read_pages(next).await?;
                for outcome in outcomes {
                    self.answered(outcome).await?;
                }
            }
            ToDriver::News { entries, next } => {
                self.learn(entries).await?;
                self.read_pages(next).await?;
            }
            ToDriver::Cancelled { unwind: true } => {
                let until = Instant::now() + self.patience.cancel_grace;
                if !matches!(self.phase, Phase::Undoing(_) | Phase::Recollecting) {
                    self.cancelled.get_or_insert(until);
                }
            }
            ToDriver::Cancelled { unwind: false } | ToDriver::Lost => return Err(Gone),
            ToDriver::Drain => self.draining = true,
            ToDriver::MakeRoom => self.make_room = true,
        }
        Ok(())
    }

    async fn answered(&mut self, outcome: ReportOutcome) -> Going {
        let Some(sent) = self.unanswered.pop_front() else { return Ok(()) };
        if matches!(outcome.outcome, Verdict::Stale | Verdict::Closed) {
            return Err(Gone);
        }
        let invalid = (outcome.outcome == Verdict::Invalid)
            .then(|| outcome.message.clone().unwrap_or_else(|| "the server gave no reason".to_owned()));
        if let Some(n) = outcome.n {
            self.horizon = self.horizon.max(n);
        }
        match sent {
            Sent::Other | Sent::Unwind => {}
            Sent::Last => self.last = Some(outcome),
            Sent::Step { name, result } => match invalid {
                // It is recorded as failed before the function sees it, or a replay would see something else.
                Some(message) if result.is_ok() => {
                    let op = Op::Step {
                        name: name.to_string(),
                        output: Value::Null,
                        error: None,
                        retryable: false,
                        retry_after: None,
                        retry: None,
                        undo: false,
                    };
                    let (failure, ..) = not_recorded(message).into_parts();
                    let sent = Sent::Step { name, result: Err(failure.clone()) };
                    self.report(vec![with_error(op, failure)], vec![sent], false).await?;
                }
                Some(message) => self.core.state().refuse(&name, message, false),
                None => self.step_answered(name, result, &outcome),
            },
            Sent::Ask { name, kind, opening } => match invalid {
                Some(message) => self.core.state().refuse(&name, message, opening),
                None => self.ask_answered(&name, kind, opening, outcome),
            },
        }
        Ok(())
    }

    fn step_answered(&mut self, name: EntryName, result: Result<Value, Failure>, outcome: &ReportOutcome) {
        let mut state = self.core.state();
        // What is recorded counts, if it came with the answer: this may not be the first report on the step.
        let recorded = outcome.duplicate && state.known(&name).is_some_and(Known::is_ended);
        if recorded {
            return;
        }
        let n = outcome.n.unwrap_or_else(|| state.seen() + 1);
        let at_ms = outcome.at.as_deref().and_then(millis);
        let attempt = state.known(&name).map_or(1, |known| known.attempt + 1);
        let retries = outcome.decision.as_deref() == Some("retry");
        let status = match result {
            _ if retries => Status::BackOff { due: false },
            Ok(output) => Status::Ended(Ended::Completed(output)),
            Err(failure) => Status::Ended(Ended::Failed(failure)),
        };
        let entry = Known { kind: EntryKind::Step, n, at_ms, attempt, status, undo: false, opener: None };
        state.learn(name.clone(), entry);
        if retries {
            state.backs_off(&name);
        }
    }

    fn ask_answered(&mut self, name: &EntryName, kind: EntryKind, opening: bool, outcome: ReportOutcome) {
        let mut state = self.core.state();
        let n = outcome.n.unwrap_or_else(|| state.seen() + 1);
        let at_ms = outcome.at.as_deref().and_then(millis);
        let opener = outcome.token.map(|token| Opener { token, url: outcome.url.unwrap_or_default() });
        let ends = kind == EntryKind::Publish;
        let status = if ends { Status::Ended(Ended::Completed(Value::Null)) } else { Status::Pending };
        // If it has ended since, the news with this answer had that, with a higher number.
        state.learn(name.clone(), Known { kind, n, at_ms, attempt: 0, status, undo: false, opener: opener.clone() });
        let waker = if opening { state.opened(name, opener) } else { None };
        drop(state);
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    async fn learn(&mut self, entries: Map<String, Value>) -> Going {
        match parse(entries) {
            Ok(entries) => {
                let mut state = self.core.state();
                entries.into_iter().for_each(|(name, entry)| state.learn(name, entry));
                Ok(())
            }
            // A server of another version. Another worker may understand it.
            Err(problem) => {
                tracing::error!(run = self.task.task.run_id, "{problem}");
                Err(Gone)
            }
        }
    }

    /// The rest of a memo or of news.
    async fn read_pages(&mut self, next: Option<u64>) -> Going {
        let (mut next, mut backoff) = (next, Backoff::new(FIRST_PAUSE, LONGEST_PAUSE));
        while let Some(after) = next {
            match self.port.pages.page(&self.task.task.task_id, after).await {
                Ok(page) => {
                    self.learn(page.memo).await?;
                    next = page.next.filter(|next| *next > after);
                    backoff.reset();
                }
                Err(error) if error.is_not_found() => return Err(Gone),
                Err(error) => {
                    tracing::warn!(run = self.task.task.run_id, "cannot read the memo, and will try again: {error}");
                    let pause = backoff.next();
                    tokio::select! {
                        () = tokio::time::sleep(pause) => {}
                        () = self.task.until_lost() => return Err(Gone),
                    }
                }
            }
        }
        Ok(())
    }
}

fn with_error(op: Op, failure: Failure) -> Op {
    match op {
        Op::Step { name, output, retryable, retry_after, retry, undo, .. } => {
            Op::Step { name, output, error: Some(failure), retryable, retry_after, retry, undo }
        }
        other => other,
    }
}

async fn sleep_until(until: Option<Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until).await,
        None => std::future::pending().await,
    }
}
