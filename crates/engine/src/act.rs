//! What people do to a run.

use std::collections::BTreeSet;

use eddyline_machine::run::{Activation, End, Header, Phase, Reused, Run};
use eddyline_machine::{
    ActId, Again, Answer, Data, Failure, Input, OpenedBy, RunId, Start, Status, StepAct, TimerKey, TimerKind, ValueId,
    ValueRef, decide,
};
use eddyline_store::{GateFilter, GateRow, Namespace, Page, RunFilter, Store, Trim};
use serde_json::Value;

use crate::committer::{NewRun, Outcome};
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::schema::Allowance;
use crate::start::{Came, order_new, payload, weighed};
use crate::unique::taken;

/// Values that a retry or a rerun takes over with one commit: about so many bytes and at most so many values.
const PIECE_BYTES: u64 = 2 << 20;
const PIECE_VALUES: usize = 500;
/// Runs that refer to a deleted one and are named, at most, besides its parent.
const NAMED_RUNS: usize = 100;

/// What stays of a run that was deleted.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Remains {
    /// Events that it published stay until they are old enough.
    pub events: u32,
    /// Runs below it in its tree.
    pub children: u64,
    /// Runs that name it: the one that waited for it, its retries and reruns.
    pub referring: Vec<RunId>,
}

/// Something done to one activation by hand.
#[derive(Debug, Clone, PartialEq)]
pub enum StepActRequest {
    Complete {
        output: Value,
    },
    Fail {
        error: Failure,
    },
    Skip,
    /// Its next attempt now, instead of at the end of its back-off.
    Retry,
}

impl Engine {
    /// Cancels a run; of one that was continued, the last of those that it was continued as.
    pub async fn cancel(&self, ns: &Namespace, run: RunId, by: &str, reason: Option<String>) -> Result<()> {
        // One that is continued at this moment passes it on by itself.
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

    /// A run that is paused goes on. So does one that is quarantined, paused or not.
    pub async fn resume(&self, ns: &Namespace, run: RunId, by: &str) -> Result<()> {
        // The store is asked, since the committer may not know yet what another process has found.
        if self.release_from_quarantine(ns, run).await? {
            tracing::info!(%run, by, "released from quarantine");
            return Ok(());
        }
        self.act(ns, run, Input::Resume { by: by.to_owned() }).await
    }

    /// An act on one activation, by its public name.
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
            // The one thing that can be wrong with it by now.
            EngineError::Invalid { .. } => EngineError::NotFound { what: "activation", id: activation.to_owned() },
            other => other,
        })
    }

    /// A new run that takes over what completed and runs the rest again. There must be a rest: a run that completed without
    /// a failed step is not retried.
    pub async fn retry(&self, ns: &Namespace, run: RunId, by: &str) -> Result<RunId> {
        let (flow, old) = self.ended(ns, run).await?;
        let failed = |activation: &Activation| matches!(activation.end(), Some(End::Failed(_) | End::Cancelled));
        if old.header.status() == Status::Completed && !old.activations.iter().any(failed) {
            let message = format!("run {run} has completed, and nothing in it failed: rerun it to run it again");
            return Err(EngineError::Conflict(message));
        }
        let reuse = decide::retry(&flow.flow, &old);
        self.again(ns, &old, flow, Again::Retry { by: by.to_owned() }, reuse, None).await
    }

    /// A new run that runs again from a top-level step on, with another input where one is given.
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
            // Items of an unfinished spread are known by their index alone, and the list may be another one now.
            reuse.retain(|reused| !reused.activation.contains('['));
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

    /// Runs below one in its tree: of one at the top all, of another those that wait for each other.
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
        // Newest first, so from the end on every parent comes before its children.
        let mut below = BTreeSet::from([header.run]);
        for (run, parent) in runs.into_iter().rev() {
            if below.contains(&parent) {
                below.insert(run);
            }
        }
        Ok(below.len() as u64 - 1)
    }

    /// Opens the gate of that token.
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
        let Some(Outcome::Answered { answer, .. }) = outcome else {
            return Err(EngineError::Bug(format!("an act on run {run} came to {outcome:?}")));
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
            // Refused while another run has the key, whatever the first start said.
            unique: header.unique.clone(),
            tags: header.tags.clone(),
            priority: header.priority,
            retry: header.code.as_ref().and_then(|code| code.retry.clone()),
            traceparent: header.traceparent.clone(),
            retry_of: Some(header.run),
            // A retry is the same intent, a rerun a new one.
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
            Came::Started(started) => started.run,
            Came::UniqueTaken(by) => {
                let key = header.unique.as_ref().map_or("", |unique| &unique.key);
                return Err(taken(key, by));
            }
        };
        if let Err(error) = self.take_over_rest(ns, new, taken_over).await {
            // Nothing more will come: the run need not wait for it.
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

/// The values that a retry or a rerun takes over, a piece at a time: all of them can be more than fits into memory.
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
