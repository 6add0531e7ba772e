//! Delivers messages between runs, in order; the commit of the receiving run consumes them.
//!
//! The messages to a run are submitted together, so that they are decided together. Deliveries continue between rounds,
//! so a slow or failing one does not delay other runs.

use std::any::Any;
use std::collections::{BTreeMap, btree_map};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use eddyline_machine::{ChildEnd, Data, Failure, Input, Message, MessageBody, Millis, OnConflict, RunId, Start};
use eddyline_store::{
    Change, Command, Consumed, DocumentChange, DocumentCommit, Due, DueBatch, DueItem, LINE_LIMIT, Namespace,
};
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::assignment::{Values, materialise};
use crate::certain;
use crate::chore::Chore;
use crate::committer::{Answered, InputOutcome, NewRun, Order};
use crate::error::{EngineError, Result};
use crate::events::LookBack;
use crate::flows::Registered;
use crate::instance::Instance;
use crate::lineage::{Lineage, StartRefusal};
use crate::quarantine;
use crate::schema::{Allowance, Mismatch};
use crate::shares::Shares;

/// The kinds of failure of a child that cannot start.
const NO_FLOW: &str = "FlowNotFound";
const BAD_INPUT: &str = "InvalidInput";
const BAD_FLOW: &str = "InvalidFlow";
const UNIQUE_TAKEN: &str = "UniqueTaken";
/// The most bytes of messages that are submitted together, unless it is a single one.
const BYTES_AT_ONCE: usize = 4 << 20;
/// The most deliveries in progress, as a multiple of `due_batch`, so that slow ones leave room for others.
const BATCHES: usize = 8;
/// The most runs whose messages are taken at a time, and the share of a namespace: it gets no more while it has as many
/// deliveries in progress, or messages of the same weight. A delivery holds up to 1,000 messages in memory, each
/// several times as large as its text.
const RUNS_AT_ONCE: usize = 64;
/// This many bytes of messages count as one more delivery.
const BYTES_A_RUN: usize = 16 << 10;

pub(crate) struct Inbox {
    instance: Instance,
    lineage: Arc<Lineage>,
    deliveries: FuturesUnordered<BoxFuture<'static, Delivery>>,
    shares: Shares,
    /// The runs with a delivery in progress, each with the messages that arrived for it meanwhile.
    under_way: BTreeMap<RunId, Option<MessageBatch>>,
    /// There was no room for more deliveries: take more messages when one is done.
    full: bool,
}

/// Messages that are delivered to one run together.
struct MessageBatch {
    ns: Namespace,
    to: RunId,
    messages: Vec<Message>,
    bytes: usize,
}

/// A finished delivery, with its error or panic.
struct Delivery {
    ns: Namespace,
    to: RunId,
    weight: usize,
    result: std::result::Result<Result<()>, Box<dyn Any + Send>>,
}

impl Chore for Inbox {
    const NAME: &'static str = "inbox";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let batch = self.instance.config.due_batch.max(1);
        let room = (BATCHES * batch).saturating_sub(self.deliveries.len()).min(batch).min(RUNS_AT_ONCE);
        self.full = room == 0;
        if self.full {
            return Ok(None);
        }
        let (due, mut more) = self.due(room).await?;
        for item in due.items {
            if let DueItem::Messages { ns, to, messages, bytes } = item {
                self.begin(MessageBatch { ns, to, messages, bytes });
            }
        }
        // Most deliveries reach the committer without waiting.
        while let Some(Some(delivered)) = self.deliveries.next().now_or_never() {
            more |= self.end(delivered);
        }
        Ok(if more { Some(0) } else { due.next_in })
    }

    fn wakes(change: &Change) -> bool {
        matches!(change, Change::Messages)
    }

    fn at_latest_ms(&self) -> Millis {
        self.instance.poll_ms()
    }

    /// Drives the deliveries; completes when there is room for more messages.
    async fn work_between_rounds(&mut self) {
        while let Some(delivered) = self.deliveries.next().await {
            if self.end(delivered) || self.full {
                return;
            }
        }
        // Nothing is left to deliver until the next round.
        std::future::pending().await
    }
}

impl Inbox {
    pub fn new(instance: Instance) -> Inbox {
        let shares = Shares::of(instance.config.due_batch.min(RUNS_AT_ONCE));
        Inbox {
            instance,
            lineage: Arc::default(),
            deliveries: FuturesUnordered::new(),
            shares,
            under_way: BTreeMap::new(),
            full: false,
        }
    }

    /// Asks for due messages, while deliveries go on: one that reads holds a connection to the store, and if there were no
    /// other, this would wait for it. The second value is true if the store may have more messages of a skipped namespace.
    async fn due(&mut self, room: usize) -> Result<(DueBatch, bool)> {
        let (store, skip) = (self.instance.store.clone(), self.shares.skip().to_vec());
        let mut due = store.due(Due::Messages, &skip, room);
        let mut more = false;
        loop {
            tokio::select! {
                due = &mut due => return Ok((due?, more)),
                Some(delivered) = self.deliveries.next() => more |= self.end(delivered),
            }
        }
    }

    /// Begins a delivery, or queues it after the one in progress to the same run.
    fn begin(&mut self, batch: MessageBatch) {
        match self.under_way.entry(batch.to) {
            btree_map::Entry::Occupied(mut before) => *before.get_mut() = Some(batch),
            btree_map::Entry::Vacant(free) => {
                free.insert(None);
                let MessageBatch { ns, to, messages, bytes } = batch;
                let weight = 1 + bytes / BYTES_A_RUN;
                self.shares.begin(&ns, weight);
                let (instance, lineage) = (self.instance.clone(), self.lineage.clone());
                let target = Target { instance, lineage, ns: ns.clone(), to };
                // A panic affects only the messages of this run.
                let delivered = AssertUnwindSafe(async move { target.deliver(messages).await }).catch_unwind();
                self.deliveries.push(Box::pin(delivered.map(move |result| Delivery { ns, to, weight, result })));
            }
        }
    }

    /// Finishes a delivery. True if the store may have more messages of a skipped namespace.
    fn end(&mut self, delivery: Delivery) -> bool {
        let Delivery { ns, to, weight, result } = delivery;
        let more = self.shares.end(&ns, weight);
        if let Some(Some(next)) = self.under_way.remove(&to) {
            self.begin(next);
        }
        let instance = &self.instance.config.instance;
        match result {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(instance, run = %to, "could not deliver messages; will retry: {error}"),
            Err(_) => {
                metrics::counter!("eddyline_bugs_total").increment(1);
                tracing::error!(instance, run = %to, "delivering messages panicked; will retry");
            }
        }
        more
    }
}

/// The run that messages are delivered to.
struct Target {
    instance: Instance,
    lineage: Arc<Lineage>,
    ns: Namespace,
    to: RunId,
}

impl Target {
    /// Delivers messages in the order in which they were sent.
    async fn deliver(&self, messages: Vec<Message>) -> Result<()> {
        let mut looking = LookBack::of(&*self.instance.store, &self.ns, self.to, &messages).await?;
        let (mut together, mut bytes) = (Vec::new(), 0);
        for message in messages {
            match message.body {
                MessageBody::Start { flow, start } => {
                    self.hand_in(std::mem::take(&mut together)).await?;
                    self.start(&message.id, &flow, start).await?;
                }
                MessageBody::Input(input) => {
                    let input = self.completed(&message.id, *input, &mut looking).await?;
                    bytes += weight(&input);
                    if bytes > BYTES_AT_ONCE {
                        self.hand_in(std::mem::take(&mut together)).await?;
                        bytes = weight(&input);
                    }
                    together.push((message.id, input));
                }
            }
        }
        self.hand_in(together).await
    }

    /// Submits messages together, so that they share transitions as far as they fit, and waits until all are decided.
    async fn hand_in(&self, messages: Vec<(String, Input)>) -> Result<()> {
        if messages.is_empty() {
            return Ok(());
        }
        let (mut orders, mut answers) = (Vec::new(), Vec::new());
        for (id, input) in messages {
            let (order, answer) = Order::submit(self.to, vec![input], Some(Consumed::Message(id.clone())), None);
            orders.push(order);
            answers.push((id, answer));
        }
        self.instance.committing.send(Order::All(orders)).await?;
        self.await_answers(answers).await
    }

    /// Waits for the answers. Drops messages whose run does not exist: it was deleted, or its start was refused.
    async fn await_answers(&self, answers: Vec<(String, Answered)>) -> Result<()> {
        let (mut undeliverable, mut failed) = (Vec::new(), None);
        for (id, answer) in answers {
            match answer.await.map_err(|_| EngineError::Stopped)? {
                Ok(_) => {}
                Err(EngineError::NotFound { .. } | EngineError::Trimmed(_)) => undeliverable.push(id),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if !undeliverable.is_empty() {
            self.drop_messages(undeliverable, Vec::new()).await?;
        }
        failed.map_or(Ok(()), Err)
    }

    /// Completes a message of a run to itself with facts from the store: which of its closed tasks are unclaimed, or
    /// which earlier event opens a new gate.
    async fn completed(&self, id: &str, input: Input, looking: &mut LookBack<'_>) -> Result<Input> {
        match input {
            Input::Drain { .. } => {}
            Input::Continue => return Ok(looking.opening(id).await?.unwrap_or(input)),
            _ => return Ok(input),
        }
        let pending = self.instance.store.pending(self.to).await?;
        let unclaimed = pending.tasks.iter().filter(|row| row.closed && row.held.is_none());
        Ok(Input::Drain { unclaimed: unclaimed.map(|row| row.task.fence).collect() })
    }

    async fn start(&self, id: &str, flow: &str, start: Box<Start>) -> Result<()> {
        let Instance { store, config, flows, .. } = &self.instance;
        match self.lineage.obstacle(&**store, &self.ns, &start, config.max_descendants).await? {
            None => {}
            // An attached child would be cancelled as soon as it started.
            Some(StartRefusal::Orphan) => return self.drop_messages(vec![id.to_owned()], Vec::new()).await,
            Some(StartRefusal::Refused(failure)) => return self.refuse(id, &start, failure).await,
        }
        let flow = match flows.find(&**store, &self.ns, flow, None).await {
            Ok(Some(flow)) => flow,
            Ok(None) => {
                return self.refuse(id, &start, Failure::new(NO_FLOW, format!("there is no flow {flow}"))).await;
            }
            // The stored definition is unreadable, and a retry would not help.
            Err(EngineError::Bug(why)) => return self.refuse(id, &start, Failure::new(BAD_FLOW, why)).await,
            Err(error) => return Err(error),
        };
        if let Some(failure) = self.bad_input(&flow, &start).await? {
            return self.refuse(id, &start, failure).await;
        }
        let new = NewRun { ns: self.ns.clone(), flow, key: None, tells_line: None };
        let started = match self.submit_start(id, &start, new.clone()).await {
            // A run that continues another stays in the inbox until the key is free again.
            Ok(StartOutcome::UniqueTaken { .. } | StartOutcome::LineFull) if start.events_since.is_some() => Ok(()),
            Ok(StartOutcome::UniqueTaken { by }) => self.contend(id, &start, new, by).await,
            Ok(StartOutcome::LineFull) => self.refuse(id, &start, line_full(&start)).await,
            Ok(StartOutcome::Done) => Ok(()),
            Err(error) => Err(error),
        };
        match started {
            // If no step waits for it, the start stays in the store until an operator releases it.
            Err(EngineError::Quarantined(why)) if start.parent.or(start.started_by).is_some() => {
                let failure = Failure::new(quarantine::NOT_STARTED, why);
                let refusal = self.refusal(&start, failure);
                self.commit(vec![id.to_owned()], refusal, vec![quarantine::forget(self.to)]).await
            }
            other => other,
        }
    }

    async fn submit_start(&self, id: &str, start: &Start, new: NewRun) -> Result<StartOutcome> {
        let taken = Some(Consumed::Message(id.to_owned()));
        let inputs = vec![Input::Start(Box::new(start.clone()))];
        let answer = self.instance.committing.hand_in(self.to, inputs, taken, Some(new)).await?;
        match answer.await.map_err(|_| EngineError::Stopped)? {
            Ok(outcomes) => Ok(match outcomes.last() {
                Some(InputOutcome::UniqueTaken { run }) => StartOutcome::UniqueTaken { by: *run },
                Some(InputOutcome::LineFull) => StartOutcome::LineFull,
                _ => StartOutcome::Done,
            }),
            Err(EngineError::NotFound { .. } | EngineError::Trimmed(_)) => {
                self.drop_messages(vec![id.to_owned()], Vec::new()).await.map(|()| StartOutcome::Done)
            }
            Err(error) => Err(error),
        }
    }

    /// Another run holds the unique key of this one, a child: it waits in line or is refused. The parent waits for this
    /// very run, so with `return` it cannot get the other one instead.
    async fn contend(&self, id: &str, start: &Start, mut new: NewRun, by: RunId) -> Result<()> {
        let Some(unique) = &start.unique else {
            return Err(EngineError::Bug(format!("run {} has no unique key", self.to)));
        };
        match unique.on_conflict {
            OnConflict::Return | OnConflict::Reject => {
                let message = format!("run {by} holds the unique key `{}` and has not ended", unique.key);
                return self.refuse(id, start, Failure::new(UNIQUE_TAKEN, message)).await;
            }
            OnConflict::Queue => {}
            OnConflict::Replace => {
                let reason = Some(format!("replaced by run {}, which has the same unique key", self.to));
                let by = start.asked_by().map_or_else(|| self.to.to_string(), |parent| parent.run.to_string());
                new.tells_line = Some(Box::new(Input::Cancel { by: format!("run:{by}"), reason }));
            }
        }
        let waiting = Start { in_line: true, ..start.clone() };
        match self.submit_start(id, &waiting, new).await? {
            StartOutcome::Done => Ok(()),
            StartOutcome::LineFull => self.refuse(id, start, line_full(start)).await,
            StartOutcome::UniqueTaken { by } => {
                Err(EngineError::Bug(format!("run {} waits in line and was refused for run {by}", self.to)))
            }
        }
    }

    async fn bad_input(&self, flow: &Arc<Registered>, start: &Start) -> Result<Option<Failure>> {
        let input = match &start.input {
            Some(Data::Json(input)) => input.clone(),
            Some(input) => Arc::new(materialise(&*self.instance.store, self.to, input, &mut Values::new()).await?),
            None => Arc::default(),
        };
        let bytes = start.input.as_ref().map_or(0, |input| input.bytes(self.instance.config.max_shown_bytes()));
        // Each child has its own allowance: they are checked one at a time, and namespaces take turns.
        let mut allowance = Allowance::of_starts();
        let verdict = self.instance.flows.check_input(&self.ns, flow, &input, bytes, &mut allowance).await?;
        Ok(verdict.err().map(|mismatch| {
            let problems = match mismatch {
                Mismatch::Invalid(problems) => problems,
                Mismatch::Exhausted(limit) => vec![limit],
            };
            let (name, problems) = (&flow.flow.name, problems.join("; "));
            Failure::new(BAD_INPUT, format!("the input does not match the input_schema of {name}: {problems}"))
        }))
    }

    /// Refuses the start; the same commit sends the failure to the step that waits for it.
    async fn refuse(&self, id: &str, start: &Start, failure: Failure) -> Result<()> {
        self.drop_messages(vec![id.to_owned()], self.refusal(start, failure)).await
    }

    fn refusal(&self, start: &Start, failure: Failure) -> Vec<Message> {
        tracing::warn!(instance = self.instance.config.instance, run = %self.to, "not started: {}", failure.message);
        start.refused(self.to, failure).into_iter().collect()
    }

    async fn drop_messages(&self, ids: Vec<String>, messages: Vec<Message>) -> Result<()> {
        self.commit(ids, messages, Vec::new()).await
    }

    /// Drops messages to this run, sends messages and changes documents, in one commit.
    async fn commit(&self, ids: Vec<String>, messages: Vec<Message>, documents: Vec<DocumentChange>) -> Result<()> {
        let commit = DocumentCommit {
            ns: self.ns.clone(),
            command: self.instance.command(),
            documents,
            messages,
            events: Vec::new(),
            drops: ids.into_iter().map(|id| (self.to, id)).collect(),
        };
        certain::commit_one(&*self.instance.store, Command::Documents(commit)).await?;
        Ok(())
    }
}

/// The result of a start that a message asked for.
enum StartOutcome {
    Done,
    UniqueTaken { by: RunId },
    LineFull,
}

fn line_full(start: &Start) -> Failure {
    let key = start.unique.as_ref().map_or("", |unique| unique.key.as_str());
    let message = format!("{LINE_LIMIT} runs hold or wait for the unique key `{key}`, which is the limit");
    Failure::new(UNIQUE_TAKEN, message)
}

/// The size of an input's payload.
fn weight(input: &Input) -> usize {
    let bytes = |data: &Data| data.bytes(BYTES_AT_ONCE);
    match input {
        Input::OpenGate { payload, .. } => bytes(payload),
        Input::ChildEnded { end: ChildEnd::Completed(output), .. } => bytes(output),
        _ => 0,
    }
}
