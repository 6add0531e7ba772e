//! Reads runs, steps and results from the store.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use eddyline_language::time::iso;
use eddyline_machine::explain::{Bound, Explanation, Lack, WaitsFor, explain};
use eddyline_machine::run::{Activation, End, Header, Run, RunOutcome};
use eddyline_machine::view::{AttemptView, RunView, StepView};
use eddyline_machine::{ActId, Data, Failure, Fence, Millis, Numbered, RunId, Status, TimerKind};
use eddyline_store::{Found, MAX_PAGE, Namespace, Page, RunFilter, Summary, TaskRow, TimerRow};
use serde_json::Value;
use tokio::time::Instant;

use crate::assignment::{Values, materialise};
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::flows::Registered;

/// How often a waiting reader polls the store, even without a hint.
const LOOK_AGAIN: Duration = Duration::from_secs(2);
/// The most runs of a chain of continued runs that are followed.
const MAX_CHAIN: usize = 10_000;
/// A page of steps ends when its payloads have this many bytes.
const MAX_PAGE_BYTES: usize = 4 << 20;

/// A run with its payloads and what it waits for.
#[derive(Debug, Clone, PartialEq)]
pub struct RunInfo {
    pub summary: Summary,
    pub status: Status,
    /// None once its payloads are no longer kept.
    pub input: Option<Value>,
    pub output: Option<Value>,
    pub error: Option<Failure>,
    /// The names of the events that it emitted, in the order of their first emit.
    pub emitted_events: Vec<String>,
    /// The activations that have not ended, with what they wait for.
    pub waiting_for: Vec<(String, WaitsFor)>,
    /// Of a code run: the attempts of its function.
    pub attempts: Vec<AttemptView>,
}

/// A step of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct StepInfo {
    pub activation: String,
    /// The step's name in the definition.
    pub step: String,
    /// The kind of the step in the flow, or of the memo entry of a code run.
    pub kind: &'static str,
    pub status: &'static str,
    pub attempts: Vec<AttemptView>,
    pub input: Option<Value>,
    pub output: Option<Value>,
    pub error: Option<Failure>,
    pub started_at: Option<Millis>,
    pub ended_at: Option<Millis>,
    pub waits_for: Option<WaitsFor>,
    /// The run that it started.
    pub child: Option<RunId>,
    /// When its next attempt begins.
    pub retry_at: Option<String>,
    /// The queue of its tasks.
    pub queue: Option<String>,
}

/// How a run ended.
#[derive(Debug, Clone, PartialEq)]
pub struct RunResult {
    /// The run that ended: the last of the chain if the run was continued.
    pub run: RunId,
    pub status: Status,
    pub output: Option<Value>,
    pub error: Option<Failure>,
}

/// The status of a run, or of the last run of its chain.
#[derive(Debug, Clone, PartialEq)]
pub enum Standing {
    Ended(RunResult),
    GoesOn { run: RunId, status: Status },
}

/// A run as of its last read.
enum Watched {
    Ended(Box<Header>),
    Running(Status),
}

impl Engine {
    pub async fn run(&self, ns: &Namespace, run: RunId) -> Result<RunInfo> {
        let (flow, rows, summary) = match self.whole(ns, run).await {
            Ok(whole) => whole,
            Err(EngineError::Trimmed(_)) => return Ok(trimmed(self.summary(ns, run).await?)),
            Err(error) => return Err(error),
        };
        let input = rows.header.input.clone().unwrap_or_else(Data::null);
        let input = Some(self.shown(run, &input).await?);
        let (output, error) = match &rows.header.outcome {
            Some(outcome) if rows.header.status().is_end() => self.outcome(run, outcome).await?,
            _ => (None, None),
        };
        let waiting_for = self.explained(ns, &flow, run, &rows).await?;
        let emitted_events = emitted(&flow, &rows);
        let attempts = match flow.flow.graph() {
            Some(_) => Vec::new(),
            None => self.view(run).await?.driver().map_or_else(Vec::new, |driver| driver.attempts.clone()),
        };
        let status = rows.header.status();
        Ok(RunInfo { status, summary, input, output, error, emitted_events, waiting_for, attempts })
    }

    /// Runs, newest first. The next page begins after the position of the last one.
    pub async fn list(&self, ns: &Namespace, filter: &RunFilter, page: Page) -> Result<Vec<Summary>> {
        Ok(self.instance.store.runs(Some(ns), filter, page).await?)
    }

    /// All activations in order of creation, with what they wait for.
    pub async fn steps(&self, ns: &Namespace, run: RunId) -> Result<Vec<StepInfo>> {
        Ok(self.steps_within(ns, run, 0, usize::MAX, usize::MAX).await?.0)
    }

    /// A page of them beginning at index `from`: up to `limit`, fewer if their payloads are large. Also returns the
    /// total.
    pub async fn steps_from(
        &self,
        ns: &Namespace,
        run: RunId,
        from: usize,
        limit: usize,
    ) -> Result<(Vec<StepInfo>, usize)> {
        self.steps_within(ns, run, from, limit, MAX_PAGE_BYTES).await
    }

    async fn steps_within(
        &self,
        ns: &Namespace,
        run: RunId,
        from: usize,
        limit: usize,
        most_bytes: usize,
    ) -> Result<(Vec<StepInfo>, usize)> {
        let (flow, rows, _) = self.whole(ns, run).await?;
        let view = self.view(run).await?;
        let mut waits: BTreeMap<String, WaitsFor> = self.explained(ns, &flow, run, &rows).await?.into_iter().collect();
        let total = rows.activations.len().saturating_sub(1);
        let (mut steps, mut bytes) = (Vec::new(), 0usize);
        for activation in rows.activations.iter().skip(1).skip(from).take(limit) {
            if bytes >= most_bytes {
                break;
            }
            let name = rows.activation_name(&flow.flow, activation.id);
            let step = rows.step(activation.id).and_then(|step| flow.flow.graph().map(|graph| graph.step(step)));
            let (input, output) = self.payloads(run, activation, &mut bytes).await?;
            let seen = view.steps().get(&name);
            let waits_for = waits.remove(&name);
            steps.push(StepInfo {
                kind: rows.kind(&flow.flow, activation.id),
                child: seen.and_then(|seen| seen.child),
                retry_at: match &waits_for {
                    Some(WaitsFor::BackOff { until, .. } | WaitsFor::Function { until }) => until.clone(),
                    _ => None,
                },
                queue: rows.queue(&flow.flow, activation.id).map(str::to_owned),
                step: step.map_or_else(|| name.clone(), |step| step.name.clone()),
                status: activation.end().map_or_else(|| seen.map_or("pending", StepView::status), End::status),
                attempts: seen.map_or_else(Vec::new, |seen| seen.attempts.clone()),
                input,
                output,
                error: match activation.end() {
                    Some(End::Failed(failure)) => Some(failure.clone()),
                    _ => None,
                },
                started_at: seen.and_then(|seen| seen.started_at),
                ended_at: seen.and_then(StepView::ended_at),
                waits_for,
                activation: name,
            });
        }
        Ok((steps, total))
    }

    /// The input and output of an activation; large payloads are shown as references.
    async fn payloads(
        &self,
        run: RunId,
        activation: &Activation,
        bytes: &mut usize,
    ) -> Result<(Option<Value>, Option<Value>)> {
        let output = match activation.end() {
            Some(End::Completed(output)) => Some(output),
            _ => None,
        };
        let (mut shown, most) = ([None, None], self.config().max_shown_bytes());
        for (shown, data) in shown.iter_mut().zip([activation.input.as_ref(), output]) {
            let Some(data) = data else { continue };
            *shown = match self.shown(run, data).await {
                Ok(value) => Some(value),
                Err(EngineError::Trimmed(_)) => None,
                Err(error) => return Err(error),
            };
            *bytes = bytes.saturating_add(data.bytes(most).min(most));
        }
        let [input, output] = shown;
        Ok((input, output))
    }

    /// The result of a run, if it ends within `wait`. Follows a continued run to the last run of its chain.
    pub async fn result(&self, ns: &Namespace, run: RunId, wait: Duration) -> Result<Option<RunResult>> {
        Ok(match self.wait_for_end(ns, run, wait).await? {
            Standing::Ended(result) => Some(result),
            Standing::GoesOn { .. } => None,
        })
    }

    /// The same, with the status of the run if it does not end in time.
    pub async fn wait_for_end(&self, ns: &Namespace, run: RunId, wait: Duration) -> Result<Standing> {
        let until = Instant::now() + wait;
        let mut at = run;
        for _ in 0..MAX_CHAIN {
            let header = match self.watch_for_end(ns, at, at != run, until).await? {
                Watched::Ended(header) => header,
                Watched::Running(status) => return Ok(Standing::GoesOn { run: at, status }),
            };
            if let Some(next) = header.continued_as {
                at = next;
                continue;
            }
            let (output, error) = match &header.outcome {
                Some(outcome) => self.outcome(at, outcome).await?,
                None => (None, None),
            };
            return Ok(Standing::Ended(RunResult { run: at, status: header.status(), output, error }));
        }
        Err(continued_too_often(run))
    }

    /// The last stored run of the chain that a run was continued as.
    pub(crate) async fn last_of_chain(&self, ns: &Namespace, run: RunId) -> Result<RunId> {
        let (mut last, mut header) = (run, self.summary(ns, run).await?.header);
        for _ in 0..MAX_CHAIN {
            let Some(next) = header.continued_as else { return Ok(last) };
            header = match self.summary(ns, next).await {
                Ok(summary) => summary.header,
                // Its start message is not delivered yet.
                Err(EngineError::NotFound { .. }) => return Ok(last),
                Err(error) => return Err(error),
            };
            last = next;
        }
        Err(continued_too_often(run))
    }

    /// Waits for the end of a run. With `continues`, the run may not be stored yet, because the message that starts it
    /// is not delivered; that is waited for as well.
    async fn watch_for_end(&self, ns: &Namespace, run: RunId, continues: bool, until: Instant) -> Result<Watched> {
        let ending = self.bus.listen_for_end(run);
        let mut first = true;
        loop {
            let notified = ending.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if let Some(header) = ending.header(ns) {
                return Ok(Watched::Ended(Box::new(header.clone())));
            }
            // If the run was just seen running, wait for its end without reading the store. Always read the store
            // before answering that it has not ended.
            let over = Instant::now() >= until || self.stopping.is_now();
            if over || !first || !self.bus.may_be_running(ns, run) {
                let status = match self.summary(ns, run).await {
                    Ok(summary) if summary.ended_at.is_some() => {
                        self.bus.forget_running(run);
                        return Ok(Watched::Ended(Box::new(summary.header)));
                    }
                    Ok(summary) => summary.header.status(),
                    Err(EngineError::NotFound { .. }) if continues => Status::Pending,
                    Err(error) => return Err(error),
                };
                if over || Instant::now() >= until || self.stopping.is_now() {
                    return Ok(Watched::Running(status));
                }
            }
            first = false;
            let now = Instant::now();
            let _ = tokio::time::timeout(LOOK_AGAIN.min(until.saturating_duration_since(now)), notified).await;
        }
    }

    /// Records with numbers above `after`.
    pub async fn records(&self, ns: &Namespace, run: RunId, after: u64, limit: usize) -> Result<Vec<Numbered>> {
        let summary = self.summary(ns, run).await?;
        if summary.trimmed {
            return Err(EngineError::Trimmed(run));
        }
        Ok(self.instance.store.records(run, after, limit).await?)
    }

    /// Follows a timeline from record number `after` to its end.
    pub async fn follow(&self, ns: &Namespace, run: RunId, after: u64) -> Result<Follower> {
        self.summary(ns, run).await?;
        Ok(Follower { engine: self.clone(), run, after, ended: false })
    }

    /// A payload of a run as JSON.
    pub async fn payload(&self, run: RunId, data: &Data) -> Result<Value> {
        materialise(&*self.instance.store, run, data, &mut Values::new()).await
    }

    pub(crate) async fn whole(&self, ns: &Namespace, run: RunId) -> Result<(Arc<Registered>, Run, Summary)> {
        let loaded = match self.instance.store.load(run, None).await? {
            Found::Run(loaded) if loaded.summary.ns == *ns => loaded,
            Found::Trimmed(summary) if summary.ns == *ns => return Err(EngineError::Trimmed(run)),
            _ => return Err(EngineError::no_run(run)),
        };
        let header = &loaded.rows.header;
        let flow = self.flow(ns, &header.flow, Some(&header.flow_version)).await?;
        let rows = Run::load(loaded.rows, &flow.flow);
        Ok((flow, rows, loaded.summary))
    }

    pub(crate) async fn summary(&self, ns: &Namespace, run: RunId) -> Result<Summary> {
        let summary = self.instance.store.summary(run).await?.filter(|summary| summary.ns == *ns);
        summary.ok_or_else(|| EngineError::no_run(run))
    }

    /// What the activations of a run wait for, completed with facts from its timers, its queued tasks and the workers.
    async fn explained(
        &self,
        ns: &Namespace,
        flow: &Registered,
        run: RunId,
        rows: &Run,
    ) -> Result<Vec<(String, WaitsFor)>> {
        let mut open = explain(&flow.flow, rows);
        let timed = |waits: &WaitsFor| {
            matches!(
                waits,
                WaitsFor::Delay { .. } | WaitsFor::Gate { .. } | WaitsFor::BackOff { .. } | WaitsFor::Function { .. }
            )
        };
        let needs_store = |waits: &WaitsFor| timed(waits) || matches!(waits, WaitsFor::Worker { .. });
        if !open.iter().any(|open| needs_store(&open.waits_for)) {
            return Ok(open.into_iter().map(|open| (open.activation, open.waits_for)).collect());
        }
        let pending = self.instance.store.pending(run).await?;
        let in_line: Vec<TaskRow> = pending.tasks.into_iter().filter(|row| row.held.is_none() && !row.closed).collect();
        let mut lacks: BTreeMap<Fence, Lack> = self.lacks(ns, in_line.iter().map(|row| &row.task)).await?;
        let mut bounds: BTreeMap<Fence, Bound> =
            in_line.into_iter().filter_map(|row| Some((row.task.fence, row.bound?))).collect();
        let due = |timer: &TimerRow| (timer.key.activation, iso(timer.due));
        // A waiting activation has at most one of these timers.
        let waited_for = |kind: TimerKind| matches!(kind, TimerKind::Delay | TimerKind::Gate | TimerKind::BackOff(_));
        let mut dues: BTreeMap<ActId, String> =
            pending.timers.iter().filter(|timer| waited_for(timer.key.kind)).map(due).collect();
        for Explanation { id, waits_for, .. } in &mut open {
            match waits_for {
                WaitsFor::Delay { until }
                | WaitsFor::Gate { until, .. }
                | WaitsFor::BackOff { until, .. }
                | WaitsFor::Function { until } => *until = dues.remove(id),
                WaitsFor::Worker { fence, bound, lack, .. } => {
                    (*bound, *lack) = (bounds.remove(fence), lacks.remove(fence));
                }
                _ => {}
            }
        }
        Ok(open.into_iter().map(|open| (open.activation, open.waits_for)).collect())
    }

    /// The fold of a run's timeline.
    async fn view(&self, run: RunId) -> Result<Arc<RunView>> {
        let (mut view, mut after) = self.views.find(run);
        loop {
            let records = self.instance.store.records(run, after, MAX_PAGE).await?;
            let Some(last) = records.last() else { break };
            metrics::counter!("eddyline_records_folded_total").increment(records.len() as u64);
            after = last.n;
            let view = Arc::make_mut(&mut view);
            records.iter().for_each(|record| view.apply(record));
        }
        self.views.keep(run, &view, after);
        Ok(view)
    }

    async fn outcome(&self, run: RunId, outcome: &RunOutcome) -> Result<(Option<Value>, Option<Failure>)> {
        Ok(match outcome {
            RunOutcome::Completed(output) => (Some(self.shown(run, output).await?), None),
            RunOutcome::Failed(_) | RunOutcome::Cancelled(_) => (None, failure(outcome)),
        })
    }
}

fn continued_too_often(run: RunId) -> EngineError {
    EngineError::invalid(format!("run {run} was continued more than {MAX_CHAIN} times"))
}

/// The error of a run. A cancelled run has one only if something failed while it ended, such as an undo; the first
/// failure then lists the others.
fn failure(outcome: &RunOutcome) -> Option<Failure> {
    match outcome {
        RunOutcome::Completed(_) => None,
        RunOutcome::Failed(failure) => Some(failure.clone()),
        RunOutcome::Cancelled(failures) => {
            let (first, others) = failures.split_first()?;
            let mut first = first.clone();
            first.also.extend(others.iter().cloned());
            Some(first)
        }
    }
}

fn trimmed(summary: Summary) -> RunInfo {
    let (status, error) = (summary.header.status(), summary.header.outcome.as_ref().and_then(failure));
    let emitted_events = summary.header.emitted_events.clone();
    let (waiting_for, attempts) = (Vec::new(), Vec::new());
    RunInfo { summary, status, input: None, output: None, error, emitted_events, waiting_for, attempts }
}

fn emitted(flow: &Registered, run: &Run) -> Vec<String> {
    let Some(graph) = flow.flow.graph() else { return Vec::new() };
    let mut emitted: Vec<_> = run.emitted.iter().collect();
    emitted.sort_by_key(|(_, emitted)| emitted.order);
    let mut names = Vec::new();
    for ((scope, event), _) in emitted {
        let body = run.activations.get(scope.0 as usize).and_then(|activation| activation.body);
        let Some(event) = body.and_then(|body| graph.scope(body.scope).events.get(*event as usize)) else { continue };
        if !names.contains(&event.name) {
            names.push(event.name.clone());
        }
    }
    names
}

/// Reads a growing timeline: each record once, in order, without gaps.
#[derive(Debug)]
pub struct Follower {
    engine: Engine,
    run: RunId,
    after: u64,
    ended: bool,
}

impl Follower {
    /// Waits for the next records, at least one. None after the last record of the run.
    pub async fn next(&mut self) -> Result<Option<Vec<Numbered>>> {
        loop {
            if self.ended || self.engine.stopping.is_now() {
                return Ok(None);
            }
            let notify = self.engine.bus.listen(self.run);
            let notified = notify.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            let records = self.engine.instance.store.records(self.run, self.after, MAX_PAGE).await?;
            if let Some(last) = records.last() {
                self.after = last.n;
                self.ended = last.record.entry.is_terminal();
                return Ok(Some(records));
            }
            match self.engine.instance.store.summary(self.run).await?.filter(|summary| !summary.trimmed) {
                None => return Err(EngineError::Trimmed(self.run)),
                // A follower that begins at or after the last record has nothing to wait for.
                Some(summary) if summary.ended_at.is_some() && summary.records <= self.after => self.ended = true,
                Some(_) => {
                    let _ = tokio::time::timeout(LOOK_AGAIN, notified).await;
                }
            }
        }
    }
}
