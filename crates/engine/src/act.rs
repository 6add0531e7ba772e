//! Acts of operators on runs: cancel, pause, resume, retry, rerun, delete, and acts on single steps and gates.

use std::collections::BTreeSet;

use eddyline_machine::run::{Activation, End, Header, Phase, Place, Reused, Run};
use eddyline_machine::{
    ActId, Again, Answer, Data, Failure, Input, OpenedBy, RunId, Start, Status, StepAct, TaskKind, TimerKey, TimerKind,
    ValueId, ValueRef, decide,
};
use eddyline_store::{GateFilter, GateRow, Namespace, Page, RunFilter, Store, TaskRow, Trim};
use serde_json::Value;

use crate::committer::{InputOutcome, NewRun};
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::schema::Allowance;
use crate::start::{StartOutcome, order_new, payload, weighed};
use crate::unique::taken;

/// How many bytes (approximately) and how many values a retry or rerun copies with one commit.
const PIECE_BYTES: u64 = 2 << 20;
const PIECE_VALUES: usize = 500;
/// The most retries and reruns that are listed when a run is deleted.
const NAMED_RUNS: usize = 100;

/// What remains after a run was deleted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Remains {
    /// Events that it published; they are kept until their retention ends.
    pub events: u32,
    /// Runs below it in its tree.
    pub children: u64,
    /// Runs that refer to it: its parent, its retries and reruns.
    pub referring: Vec<RunId>,
}

/// A manual act on one activation.
#[derive(Debug, Clone, PartialEq)]
pub enum StepActRequest {
    Complete {
        output: Value,
    },
    Fail {
        error: Failure,
    },
    Skip,
    /// Starts the next attempt now instead of at the end of the back-off.
    Retry,
}

impl Engine {
    /// Cancels a run; for a continued run, the last run of its chain.
    pub async fn cancel(&self, ns: &Namespace, run: RunId, by: &str, reason: Option<String>) -> Result<()> {
        // A run that is being continued right now passes the cancel on itself.
        let last = self.last_of_chain(ns, run).await?;
        let cancel = Input::Cancel { by: by.to_owned(), reason };
        match self.act(ns, last, cancel.clone()).await {
            Err(EngineError::Quarantined(_)) if self.release_from_quarantine(ns, last).await? => {
                self.act(ns, last, cancel).await
            }
            done => done,
        }
    }

    pub async fn pause(&self, ns: &Namespace, run: RunId, by: &str) -> Result<()> {
        self.act(ns, run, Input::Pause { by: by.to_owned() }).await
    }

    /// Resumes a paused run, or releases a quarantined one; a run that is both stays paused.
    pub async fn resume(&self, ns: &Namespace, run: RunId, by: &str) -> Result<()> {
        // Reads the store, since the committer may not know yet what another process has quarantined.
        if self.release_from_quarantine(ns, run).await? {
            tracing::info!(%run, by, "released from quarantine");
            return Ok(());
        }
        self.act(ns, run, Input::Resume { by: by.to_owned() }).await
    }

    /// Lets workers of any build run a code run whose flow pins runs to the build that began them.
    pub async fn unpin(&self, ns: &Namespace, run: RunId, by: &str) -> Result<()> {
        self.header(ns, run).await?;
        let tasks = self.instance.store.pending(run).await?.tasks;
        let function = |row: &&TaskRow| row.task.kind == TaskKind::Run && row.held.is_none();
        let unclaimed = tasks.iter().find(function).map(|row| row.task.fence);
        self.act(ns, run, Input::Unpin { by: by.to_owned(), unclaimed }).await
    }

    /// Acts on one activation, given its public name.
    pub async fn act_on_step(
        &self,
        ns: &Namespace,
        run: RunId,
        activation: &str,
        by: &str,
        act: StepActRequest,
    ) -> Result<()> {
        let act = match act {
            StepActRequest::Complete { output } => {
                StepAct::Complete { output: payload(self.config(), "the output", output)? }
            }
            StepActRequest::Fail { error } => StepAct::Fail { error },
            StepActRequest::Skip => StepAct::Skip,
            StepActRequest::Retry => StepAct::Retry,
        };
        let input = Input::Act { activation: activation.to_owned(), by: by.to_owned(), act };
        self.act(ns, run, input).await.map_err(|error| match error {
            // At this point, an unknown name is the only thing that can be invalid.
            EngineError::Invalid { .. } => EngineError::NotFound { what: "activation", id: activation.to_owned() },
            other => other,
        })
    }

    /// Starts a new run that takes over completed steps and runs the rest again. A run that completed without a failed
    /// step is not retried.
    pub async fn retry(&self, ns: &Namespace, run: RunId, by: &str) -> Result<RunId> {
        let (flow, old) = self.ended(ns, run).await?;
        // An entry of a memo may be cancelled because its function let it go.
        let failed = |activation: &Activation| match activation.end() {
            Some(End::Failed(_)) => true,
            Some(End::Cancelled) => !matches!(activation.place, Place::Memo(_)),
            _ => false,
        };
        if old.header.status() == Status::Completed && !old.activations.iter().any(failed) {
            let message = format!("run {run} completed and none of its steps failed; use rerun to run it again");
            return Err(EngineError::Conflict(message));
        }
        let reuse = decide::retry(&flow.flow, &old);
        self.again(ns, &old, flow, Again::Retry { by: by.to_owned() }, reuse, None).await
    }

    /// Starts a new run that repeats the flow from a top-level step on, optionally with another input.
    pub async fn rerun(
        &self,
        ns: &Namespace,
        run: RunId,
        by: &str,
        from: Option<&str>,
        input: Option<Value>,
    ) -> Result<RunId> {
        let (flow, old) = self.ended(ns, run).await?;
        let mut reuse = match from {
            Some(from) => decide::rerun(&flow.flow, &old, from).map_err(EngineError::invalid)?,
            None => Vec::new(),
        };
        if input.is_some() {
            // Items of an unfinished spread are identified by index alone, and the list may differ with the new input.
            reuse.retain(|reused| reused.memo.is_some() || !reused.activation.contains('['));
        }
        let again = Again::Rerun { by: by.to_owned(), from: from.map(str::to_owned) };
        self.again(ns, &old, flow, again, reuse, input).await
    }

    /// Deletes an ended run permanently, and returns which of its data is kept elsewhere.
    pub async fn delete(&self, ns: &Namespace, run: RunId) -> Result<Remains> {
        let summary = self.summary(ns, run).await?;
        if summary.ended_at.is_none() {
            return Err(EngineError::Conflict(format!("run {run} has not ended; cancel it first")));
        }
        let remains = self.remains(ns, &summary.header).await?;
        while self.instance.store.trim(&Trim::Run(run)).await? {}
        Ok(remains)
    }

    async fn remains(&self, ns: &Namespace, header: &Header) -> Result<Remains> {
        let store = &self.instance.store;
        let retries = RunFilter { retry_of: Some(header.run), ..RunFilter::default() };
        let retries = store.runs(Some(ns), &retries, Page { after: None, limit: NAMED_RUNS }).await?;
        let parent = match &header.parent {
            Some(parent) => store.summary(parent.run).await?.map(|_| parent.run),
            None => None,
        };
        let referring = parent.into_iter().chain(retries.iter().map(|retry| retry.run)).collect();
        Ok(Remains { events: header.next_publish, children: self.count_children(ns, header).await?, referring })
    }

    /// How many runs are below this one in its tree: for the root all, for others those linked by `parent`.
    async fn count_children(&self, ns: &Namespace, header: &Header) -> Result<u64> {
        let store = &self.instance.store;
        let Some(top) = header.root else {
            let below = RunFilter { root: Some(header.run), ..RunFilter::default() };
            return Ok(store.count_runs(ns, &below).await?);
        };
        let (tree, mut page) = (RunFilter { root: Some(top), ..RunFilter::default() }, Page::default());
        let mut runs: Vec<(RunId, RunId)> = Vec::new();
        loop {
            let found = store.runs(Some(ns), &tree, page).await?;
            let Some(last) = found.last() else { break };
            page.after = Some(last.position);
            runs.extend(found.iter().filter_map(|run| Some((run.run, run.header.parent.as_ref()?.run))));
        }
        // The list is newest first, so in reverse every parent comes before its children.
        let mut below = BTreeSet::from([header.run]);
        for (run, parent) in runs.into_iter().rev() {
            if below.contains(&parent) {
                below.insert(run);
            }
        }
        Ok(below.len() as u64 - 1)
    }

    /// Opens the gate with this token.
    pub async fn open_gate(&self, ns: &Namespace, token: &str, by: OpenedBy, body: Value) -> Result<()> {
        let gate = self.gate_of(ns, token).await?;
        let payload = payload(self.config(), "the payload", body)?;
        let input = Input::OpenGate { activation: gate.id.activation, by, payload };
        self.act(ns, gate.id.run, input).await
    }

    /// Cancels a gate, which fails its activation.
    pub async fn cancel_gate(&self, ns: &Namespace, run: RunId, activation: ActId, by: &str) -> Result<()> {
        self.act(ns, run, Input::CancelGate { activation, by: by.to_owned() }).await
    }

    async fn gate_of(&self, ns: &Namespace, token: &str) -> Result<GateRow> {
        let filter = GateFilter { token: Some(token.to_owned()), ..GateFilter::default() };
        let gate = self.instance.store.gates(Some(ns), &filter, Page { after: None, limit: 1 }).await?.pop();
        gate.ok_or_else(|| EngineError::NotFound { what: "gate", id: "with this token".to_owned() })
    }

    async fn act(&self, ns: &Namespace, run: RunId, input: Input) -> Result<()> {
        let outcome = self.committing().submit_in(ns, run, vec![input]).await?.pop();
        let Some(InputOutcome::Answered { answer, .. }) = outcome else {
            return Err(EngineError::Bug(format!("unexpected outcome of an act on run {run}: {outcome:?}")));
        };
        match answer {
            Answer::Applied(_) | Answer::Duplicate(_) | Answer::Nothing => Ok(()),
            Answer::Closed | Answer::Stale => Err(EngineError::Conflict(format!("run {run} has ended"))),
            Answer::Invalid(message) => Err(EngineError::invalid(message)),
            Answer::Conflict(message) => Err(EngineError::Conflict(message)),
        }
    }

    async fn ended(&self, ns: &Namespace, run: RunId) -> Result<(std::sync::Arc<crate::Registered>, Run)> {
        let (flow, old, _) = self.whole(ns, run).await?;
        if old.header.phase != Phase::Ended {
            return Err(EngineError::Conflict(format!("run {run} has not ended")));
        }
        Ok((flow, old))
    }

    async fn again(
        &self,
        ns: &Namespace,
        old: &Run,
        flow: std::sync::Arc<crate::Registered>,
        again: Again,
        reuse: Vec<Reused>,
        input: Option<Value>,
    ) -> Result<RunId> {
        let (store, header) = (&*self.instance.store, &old.header);
        let input = match input {
            Some(input) => {
                let (input, bytes) = weighed(self.config(), "the input", input)?;
                self.check_input(ns, &flow, &input, bytes, &mut Allowance::of_starts()).await?;
                input
            }
            None => header.input.clone().unwrap_or_else(Data::null),
        };
        let payloads = reuse.iter().flat_map(Reused::payloads).chain([&input]);
        let mut taken_over = TakenOver::new(header.run, payloads);
        let values = taken_over.next(store).await?;
        let start = Start {
            input: Some(input),
            external_id: header.external_id.clone(),
            metadata: header.metadata.clone(),
            queue: header.queue.clone(),
            // Refused while another run holds the key, whatever `on_conflict` of the first start was.
            unique: header.unique.clone(),
            tags: header.tags.clone(),
            priority: header.priority,
            retry: header.code.as_ref().and_then(|code| code.retry.clone()),
            traceparent: header.traceparent.clone(),
            retry_of: Some(header.run),
            // A retry keeps the idempotency keys of its steps; a rerun gets new ones.
            key_run: matches!(again, Again::Retry { .. }).then(|| header.key_run()),
            again: Some(again),
            reuse,
            values,
            more_values: !taken_over.is_complete(),
            next_value: header.next_value,
            ..Start::default()
        };
        let new = self.instance.new_run(self.instance.store.now().await?);
        let new_run = NewRun { ns: ns.clone(), flow, key: None, tells_line: None };
        let (order, starting) = order_new(new, start, new_run);
        self.committing().ask(order).await?;
        let new = match starting.started().await? {
            StartOutcome::Started(started) => started.run,
            StartOutcome::UniqueTaken(by) => {
                let key = header.unique.as_ref().map_or("", |unique| &unique.key);
                return Err(taken(key, by));
            }
        };
        if let Err(error) = self.take_over_rest(ns, new, taken_over).await {
            // The rest of the values will not arrive: expire the timer that fails the new run, instead of waiting for
            // it.
            let timer = TimerKey { activation: ActId(0), kind: TimerKind::Delay };
            let _ = self.act(ns, new, Input::Due(timer)).await;
            return Err(error);
        }
        Ok(new)
    }

    async fn take_over_rest(&self, ns: &Namespace, new: RunId, mut taken_over: TakenOver) -> Result<()> {
        while !taken_over.is_complete() {
            let values = taken_over.next(&*self.instance.store).await?;
            self.act(ns, new, Input::TakeOver { values, more: !taken_over.is_complete() }).await?;
        }
        Ok(())
    }
}

/// The values that a retry or rerun copies, a piece at a time: all of them may not fit into memory.
struct TakenOver {
    from: RunId,
    left: Vec<ValueRef>,
    found: BTreeSet<ValueId>,
}

impl TakenOver {
    fn new<'a>(from: RunId, payloads: impl Iterator<Item = &'a Data>) -> TakenOver {
        let mut taken_over = TakenOver { from, left: Vec::new(), found: BTreeSet::new() };
        payloads.for_each(|payload| taken_over.follow(payload));
        taken_over
    }

    fn follow(&mut self, payload: &Data) {
        payload.each_ref(&mut |stored| {
            if self.found.insert(stored.id) {
                self.left.push(stored);
            }
        });
    }

    fn is_complete(&self) -> bool {
        self.left.is_empty()
    }

    async fn next(&mut self, store: &dyn Store) -> Result<Vec<(ValueId, Data)>> {
        let (mut ids, mut bytes) = (Vec::new(), 0);
        while ids.len() < PIECE_VALUES
            && let Some(stored) =
                self.left.pop_if(|stored| ids.is_empty() || bytes + stored.read_bytes() <= PIECE_BYTES)
        {
            bytes += stored.read_bytes();
            ids.push(stored.id);
        }
        let values = store.values(self.from, &ids).await?;
        if values.len() < ids.len() {
            return Err(EngineError::Trimmed(self.from));
        }
        values.iter().for_each(|(_, value)| self.follow(value));
        Ok(values)
    }
}
