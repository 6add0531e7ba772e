//! What people do to a run.

use eddyline_machine::run::{Activation, End, Phase, Reused, Run};
use eddyline_machine::{ActId, Again, Answer, Data, Failure, Input, OpenedBy, RunId, Start, Status, StepAct, decide};
use eddyline_store::{GateFilter, GateRow, Namespace, Page, Store, Trim};
use serde_json::Value;

use crate::assignment::{Values, materialise};
use crate::committer::{NewRun, Outcome};
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::schema::Allowance;
use crate::start::{order_new, payload, weighed};

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
            StepActRequest::Complete { output } => StepAct::Complete { output: payload("the output", output)? },
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

    /// Deletes a run that has ended, for good.
    pub async fn delete(&self, ns: &Namespace, run: RunId) -> Result<()> {
        let summary = self.summary(ns, run).await?;
        if summary.ended_at.is_none() {
            return Err(EngineError::Conflict(format!("run {run} has not ended; cancel it first")));
        }
        while self.instance.store.trim(&Trim::Run(run)).await? {}
        Ok(())
    }

    /// Opens the gate of that token.
    pub async fn open_gate(&self, ns: &Namespace, token: &str, by: OpenedBy, body: Value) -> Result<()> {
        let gate = self.gate_of(ns, token).await?;
        let input = Input::OpenGate { activation: gate.id.activation, by, payload: payload("the payload", body)? };
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
        let (store, run) = (&*self.instance.store, old.header.run);
        let mut values = Values::new();
        let input = match input {
            Some(input) => {
                let (input, bytes) = weighed("the input", input)?;
                self.check_input(ns, &flow, &input, bytes, &mut Allowance::of_starts()).await?;
                input
            }
            None => {
                let input = old.header.input.clone().unwrap_or_else(Data::null);
                materialise(store, run, &input, &mut values).await?.into()
            }
        };
        let reuse = taken_over(store, run, reuse, &mut values).await?;
        let header = &old.header;
        let start = Start {
            input: Some(input),
            external_id: header.external_id.clone(),
            tags: header.tags.clone(),
            priority: header.priority,
            retry: header.code.as_ref().and_then(|code| code.retry.clone()),
            traceparent: header.traceparent.clone(),
            retry_of: Some(run),
            // A retry is the same intent, a rerun a new one.
            key_run: matches!(again, Again::Retry { .. }).then(|| header.key_run()),
            again: Some(again),
            reuse,
            ..Start::default()
        };
        let new = self.instance.new_run(self.instance.store.now().await?);
        let (order, starting) = order_new(new, start, NewRun { ns: ns.clone(), flow, key: None });
        self.committing().ask(order).await?;
        Ok(starting.started().await?.run)
    }
}

/// Payloads of the old run become payloads of the new one: everything it takes over is loaded first.
async fn taken_over(store: &dyn Store, run: RunId, reuse: Vec<Reused>, values: &mut Values) -> Result<Vec<Reused>> {
    let mut wanted = Vec::new();
    for reused in &reuse {
        let _ = reused.clone().carried(|data| {
            wanted.push(data.clone());
            Data::null()
        });
    }
    for data in &wanted {
        materialise(store, run, data, values).await?;
    }
    let find = |data: &Data| {
        let found = data.materialise(&|id| values.get(&id));
        found.map_or_else(|_| Data::null(), Data::from)
    };
    Ok(reuse.into_iter().map(|reused| reused.carried(find)).collect())
}
