//! Finds stuck runs and resumes them. A stuck run is always a bug somewhere else, so each one is logged as an error.

use std::collections::BTreeSet;

use eddyline_machine::run::{Driver, GateState, Inside, RunOutcome, State, What};
use eddyline_machine::{
    ChildEnd, Due, Entry, Expiry, Fence, Input, Millis, Numbered, RunId, Status, TaskRef, TimerKey, TimerKind, run::Run,
};
use eddyline_store::{Change, Found, MAX_PAGE, Page, PendingWork, RunFilter};
use serde_json::json;

use crate::assignment::{Values, materialise};
use crate::chore::Chore;
use crate::error::Result;
use crate::instance::Instance;
use crate::one_at_a_time::Round;

/// How long something may be overdue before it counts as late: until then it may still be in progress.
const LATE_MS: Millis = 30_000;

pub(crate) struct Reconciler {
    pub instance: Instance,
    /// Where the sweep over unfinished runs continues: the index into [`GOING`], and the position within that status.
    pub at: Option<(usize, Option<u64>)>,
}

/// The statuses of unfinished runs.
const GOING: [Status; 4] = [Status::Running, Status::Waiting, Status::Pending, Status::Paused];

impl Chore for Reconciler {
    const NAME: &'static str = "reconciler";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let every = self.instance.config.reconcile_ms;
        match self.instance.take_round(Self::NAME, every).await? {
            Round::DueIn(ms) => return Ok(Some(ms)),
            Round::Mine(Some(left)) => self.at = serde_json::from_value(left).unwrap_or_default(),
            Round::Mine(None) => {}
        }
        let from = self.at;
        let mut room = self.instance.config.reconcile_batch;
        let (mut which, mut after) = self.at.unwrap_or((0, None));
        self.at = loop {
            let Some(status) = GOING.get(which) else { break None };
            let page = Page { after, limit: room };
            let filter = RunFilter { status: vec![*status], ..RunFilter::default() };
            let runs = self.instance.store.runs(None, &filter, page).await?;
            for summary in &runs {
                // A run that cannot be checked must not block the others.
                if let Err(error) = self.look_at(summary.run).await {
                    let instance = &self.instance.config.instance;
                    tracing::warn!(instance, run = %summary.run, "could not check the run: {error}");
                }
            }
            room -= runs.len();
            match (room, runs.last()) {
                (0, Some(last)) => break Some((which, Some(last.position))),
                _ => (which, after) = (which + 1, None),
            }
        };
        // Sweeps in small parts, so that 100,000 waiting runs are not checked at once.
        let pause = every / if self.at.is_some() { 10 } else { 1 };
        if (from, self.at) != (None, None) {
            self.instance.finish_round(Self::NAME, pause, json!(self.at)).await?;
        }
        Ok(Some(pause))
    }

    fn wakes(_: &Change) -> bool {
        false
    }

    fn at_latest_ms(&self) -> Millis {
        self.instance.config.reconcile_ms
    }
}

impl Reconciler {
    async fn look_at(&self, run: RunId) -> Result<()> {
        let store = &self.instance.store;
        let Found::Run(loaded) = store.load(run, None).await? else { return Ok(()) };
        let pending = store.pending(run).await?;
        let now = store.now().await?;
        if !pending.messages.is_empty() || loaded.rows.header.status().is_end() {
            return Ok(());
        }
        let (mut inputs, lost) = stuck(&loaded.rows, &pending, now);
        for lost in lost {
            inputs.push(self.rearm(run, lost, now).await?);
        }
        for activation in &loaded.rows.activations {
            if let State::Child(child) = activation.state
                && let Some(end) = self.ended(child, now).await?
            {
                inputs.push(Input::ChildEnded { activation: activation.id, child, end });
            }
            if let State::Starting(child) = activation.state
                && self.started(child, now).await?
            {
                inputs.push(Input::ChildStarted { activation: activation.id, child });
            }
        }
        if inputs.is_empty() {
            return Ok(());
        }
        // The run did not change while its pending work was read, so the two are consistent.
        let still = matches!(store.load(run, Some(loaded.rows.header.version)).await?, Found::Same);
        if still && store.pending(run).await?.messages.is_empty() {
            metrics::counter!("eddyline_reconciled_total").increment(inputs.len() as u64);
            tracing::error!(instance = self.instance.config.instance, %run, ?inputs, "the run is stuck; resuming it");
            for input in inputs {
                self.instance.committing.submit(run, vec![input], None, None).await?;
            }
        }
        Ok(())
    }

    /// Replaces a lost timer: sets it again for the time that the timeline says, or makes it due at once if that has
    /// passed or is unknown.
    async fn rearm(&self, run: RunId, lost: LostTimer, now: Millis) -> Result<Input> {
        let (mut after, mut due) = (0, None);
        loop {
            let page = self.instance.store.records(run, after, MAX_PAGE).await?;
            due = page.iter().rev().find_map(|record| lost.due_by(record)).or(due);
            match page.last() {
                Some(last) if page.len() == MAX_PAGE => after = last.n,
                _ => break,
            }
        }
        Ok(match due {
            Some(Due::After(at)) if at > now => Input::Rearm { timer: lost.timer, due: Due::After(at - now) },
            Some(Due::At(at)) => Input::Rearm { timer: lost.timer, due: Due::At(at) },
            _ => Input::Due(lost.timer),
        })
    }

    /// Whether a detached child was started long enough ago that its parent should know.
    async fn started(&self, child: RunId, now: Millis) -> Result<bool> {
        let summary = self.instance.store.summary(child).await?;
        Ok(summary.is_some_and(|summary| now - summary.created_at >= LATE_MS))
    }

    /// How a child ended, if it ended long enough ago that its parent should know.
    async fn ended(&self, child: RunId, now: Millis) -> Result<Option<ChildEnd>> {
        let Some(summary) = self.instance.store.summary(child).await? else { return Ok(None) };
        let header = summary.header;
        if summary.ended_at.is_none_or(|at| now - at < LATE_MS) || header.continued_as.is_some() {
            return Ok(None);
        }
        Ok(match header.outcome {
            Some(RunOutcome::Completed(output)) => {
                let json = materialise(&*self.instance.store, child, &output, &mut Values::new()).await?;
                Some(ChildEnd::Completed(json.into()))
            }
            Some(RunOutcome::Failed(failure)) => Some(ChildEnd::Failed(failure)),
            Some(RunOutcome::Cancelled(_)) => Some(ChildEnd::Cancelled),
            None => None,
        })
    }
}

/// A timer that a run waits for and that is not in the store.
#[derive(Debug, Clone, Copy)]
struct LostTimer {
    timer: TimerKey,
    /// Of a code run's step: the length of its back-off. Several steps may back off from the same task.
    backoff_ms: Option<Millis>,
}

impl LostTimer {
    /// When the timer is due, if this is the record that set it. Here, `After` holds an absolute time of the store's
    /// clock, and `At` one of the wall clock.
    fn due_by(&self, record: &Numbered) -> Option<Due> {
        match (&record.record.entry, self.timer.kind) {
            (Entry::RetryScheduled { backoff_ms, .. }, TimerKind::BackOff(fence)) => {
                let own = record.record.attempt.as_ref().is_some_and(|attempt| attempt.fence == fence)
                    && self.backoff_ms.is_none_or(|ms| ms == *backoff_ms);
                own.then_some(Due::After(record.ts + backoff_ms))
            }
            (Entry::AwaitScheduled { token, for_ms, until_ms, .. }, TimerKind::Gate) => {
                let due = for_ms.map(|ms| Due::After(record.ts + ms)).or(until_ms.map(Due::At));
                due.filter(|_| token.activation == self.timer.activation)
            }
            _ => None,
        }
    }
}

/// What a run waits for in vain: the inputs that resume it, and its lost timers.
fn stuck(run: &Run, pending: &PendingWork, now: Millis) -> (Vec<Input>, Vec<LostTimer>) {
    let tasks: BTreeSet<Fence> = pending.tasks.iter().map(|row| row.task.fence).collect();
    let timers: BTreeSet<TimerKey> = pending.timers.iter().map(|row| row.key).collect();
    let (mut inputs, mut lost) = (Vec::new(), Vec::new());
    if !run.header.agenda.is_empty() {
        inputs.push(Input::Continue);
    }
    if run.header.in_line && pending.first_in_line {
        inputs.push(Input::Turn);
    }
    for activation in &run.activations {
        let id = activation.id;
        if let Some(fence) = activation.fence()
            && !tasks.contains(&fence)
        {
            let task = TaskRef { activation: id, fence };
            inputs.push(Input::Expired { task, why: Expiry::Released, claim: Default::default() });
        }
        let waits_for = match (&activation.state, &activation.gate) {
            (State::BackOff { after, .. }, _) => Some(TimerKind::BackOff(*after)),
            (State::Open(Inside { what: What::Code(Driver::BackOff { after, .. }), .. }), _) => {
                Some(TimerKind::BackOff(*after))
            }
            (State::Retrying { due: false, .. }, _) => {
                activation.tasks.last().map(|task| TimerKind::BackOff(task.fence))
            }
            (State::Gated, GateState::Waiting { timed: true, .. }) => Some(TimerKind::Gate),
            _ => None,
        };
        if let Some(kind) = waits_for {
            let key = TimerKey { activation: id, kind };
            let backoff_ms = match activation.state {
                State::Retrying { after_ms, .. } => Some(after_ms),
                _ => None,
            };
            if !timers.contains(&key) {
                lost.push(LostTimer { timer: key, backoff_ms });
            }
        }
    }
    let late = pending.timers.iter().filter(|timer| !timer.wall && now - timer.due > LATE_MS).count();
    if late > 0 {
        metrics::counter!("eddyline_timers_late_total").increment(late as u64);
        tracing::error!(run = %run.header.run, late, "timers are late");
    }
    (inputs, lost)
}
