//! What one run says to another, delivered in order, consumed in the commit of the target.
//!
//! The messages of a run are handed in together, so that they are decided together. Runs do not wait for each other: the
//! deliveries go on between the rounds, and a slow one, or one that fails, is in nobody's way.

use std::any::Any;
use std::collections::{BTreeMap, btree_map};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use eddyline_machine::{ChildEnd, Data, Failure, Input, Message, MessageBody, Millis, RunId, Start};
use eddyline_store::{Change, Command, DocumentChange, DocumentCommit, Due, DueItem, Namespace, Taken};
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::assignment::{Values, materialise};
use crate::chore::Chore;
use crate::committer::{Answered, NewRun, Order};
use crate::error::{EngineError, Result};
use crate::events::LookBack;
use crate::flows::Registered;
use crate::instance::Instance;
use crate::lineage::{Lineage, Obstacle};
use crate::quarantine;
use crate::schema::{Allowance, Mismatch};
use crate::shares::Shares;

/// The kinds of failure that the start of a child can come to.
const NO_FLOW: &str = "FlowNotFound";
const BAD_INPUT: &str = "InvalidInput";
const BAD_FLOW: &str = "InvalidFlow";
/// What messages that are handed in together weigh, at most, unless it is a single one.
const BYTES_AT_ONCE: usize = 4 << 20;
/// Deliveries that are under way at most, as a multiple of the messages' batch. Slow ones leave room for others.
const BATCHES: usize = 8;
/// Runs to which messages are handed out at a time. A namespace gets no more while it has as many under way, or messages
/// of as much weight: a delivery holds up to a thousand messages in memory, and what one of them takes there is several
/// times its text.
const RUNS_AT_ONCE: usize = 64;
/// Messages of this size weigh as much as a delivery.
const BYTES_A_RUN: usize = 16 << 10;

pub(crate) struct Inbox {
    instance: Instance,
    lineage: Arc<Lineage>,
    deliveries: FuturesUnordered<BoxFuture<'static, Delivery>>,
    shares: Shares,
    /// The runs of these deliveries, each of another one, and what has come for them meanwhile.
    under_way: BTreeMap<RunId, Option<Letter>>,
    /// There was no room for more deliveries: when one is done, more messages are taken.
    full: bool,
}

/// The messages that one run gets together.
struct Letter {
    ns: Namespace,
    to: RunId,
    messages: Vec<Message>,
    bytes: usize,
}

/// A delivery that is over: whose it was, and an error of its own, or a panic.
struct Delivery {
    ns: Namespace,
    to: RunId,
    weight: usize,
    came_to: std::result::Result<Result<()>, Box<dyn Any + Send>>,
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
        let due = self.instance.store.due(Due::Messages, self.shares.skip(), room).await?;
        for item in due.items {
            if let DueItem::Messages { ns, to, messages, bytes } = item {
                self.begin(Letter { ns, to, messages, bytes });
            }
        }
        // Most deliveries get as far as the committer without waiting for anything.
        let mut more = false;
        while let Some(Some(delivered)) = self.deliveries.next().now_or_never() {
            more |= self.end(delivered);
        }
        Ok(if more { Some(0) } else { due.next_in })
    }

    fn wakes(change: &Change) -> bool {
        matches!(change, Change::Messages)
    }

    fn at_latest_ms(&self) -> Millis {
        self.instance.config.poll_ms
    }

    /// Goes on with the deliveries; done when there is room for more messages.
    async fn work_between_rounds(&mut self) {
        while let Some(delivered) = self.deliveries.next().await {
            if self.end(delivered) || self.full {
                return;
            }
        }
        // Nothing is left to deliver until there is a round.
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

    /// Begins to deliver, after what is on its way to the same run.
    fn begin(&mut self, letter: Letter) {
        match self.under_way.entry(letter.to) {
            btree_map::Entry::Occupied(mut before) => *before.get_mut() = Some(letter),
            btree_map::Entry::Vacant(free) => {
                free.insert(None);
                let Letter { ns, to, messages, bytes } = letter;
                let weight = 1 + bytes / BYTES_A_RUN;
                self.shares.begin(&ns, weight);
                let (instance, lineage) = (self.instance.clone(), self.lineage.clone());
                let target = Target { instance, lineage, ns: ns.clone(), to };
                // A panic on the way concerns the messages of this run alone.
                let delivered = AssertUnwindSafe(async move { target.deliver(messages).await }).catch_unwind();
                self.deliveries.push(Box::pin(delivered.map(move |came_to| Delivery { ns, to, weight, came_to })));
            }
        }
    }

    /// True if the store may have more messages of a namespace that was skipped.
    fn end(&mut self, delivery: Delivery) -> bool {
        let Delivery { ns, to, weight, came_to } = delivery;
        let more = self.shares.end(&ns, weight);
        if let Some(Some(next)) = self.under_way.remove(&to) {
            self.begin(next);
        }
        let instance = &self.instance.config.instance;
        match came_to {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::warn!(instance, run = %to, "messages are delivered again later: {error}"),
            Err(_) => {
                metrics::counter!("eddyline_bugs_total").increment(1);
                tracing::error!(instance, run = %to, "the delivery of messages panicked; they are delivered again later");
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
    /// In the order in which they were sent.
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

    /// Hands messages in, to be decided together as far as that fits into one transition, and waits until all are.
    async fn hand_in(&self, messages: Vec<(String, Input)>) -> Result<()> {
        if messages.is_empty() {
            return Ok(());
        }
        let (mut orders, mut answers) = (Vec::new(), Vec::new());
        for (id, input) in messages {
            let (order, answer) = Order::submit(self.to, vec![input], Some(Taken::Message(id.clone())), None);
            orders.push(order);
            answers.push((id, answer));
        }
        self.instance.committing.send(Order::All(orders)).await?;
        self.heard(answers).await
    }

    /// Those that nobody is there to hear are dropped: the run is deleted, or was never started because its start was
    /// refused.
    async fn heard(&self, answers: Vec<(String, Answered)>) -> Result<()> {
        let (mut unheard, mut failed) = (Vec::new(), None);
        for (id, answer) in answers {
            match answer.await.map_err(|_| EngineError::Stopped)? {
                Ok(_) => {}
                Err(EngineError::NotFound { .. } | EngineError::Trimmed(_)) => unheard.push(id),
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        if !unheard.is_empty() {
            self.drop_messages(unheard, Vec::new()).await?;
        }
        failed.map_or(Ok(()), Err)
    }

    /// A message to itself with what its sender could not know: which of its closed tasks no worker has, or which event
    /// a new gate has waited for.
    async fn completed(&self, id: &str, input: Input, looking: &mut LookBack<'_>) -> Result<Input> {
        match input {
            Input::Drain { .. } => {}
            Input::Continue => return Ok(looking.opening(id).await?.unwrap_or(input)),
            _ => return Ok(input),
        }
        let beside = self.instance.store.beside(self.to).await?;
        let unclaimed = beside.tasks.iter().filter(|row| row.closed && row.held.is_none());
        Ok(Input::Drain { unclaimed: unclaimed.map(|row| row.task.fence).collect() })
    }

    async fn start(&self, id: &str, flow: &str, start: Box<Start>) -> Result<()> {
        let Instance { store, config, flows, .. } = &self.instance;
        match self.lineage.obstacle(&**store, &self.ns, &start, config.max_descendants).await? {
            None => {}
            // An attached one would be cancelled as soon as it had started.
            Some(Obstacle::Orphan) => return self.drop_messages(vec![id.to_owned()], Vec::new()).await,
            Some(Obstacle::Refused(failure)) => return self.refuse(id, &start, failure).await,
        }
        let flow = match flows.find(&**store, &self.ns, flow, None).await {
            Ok(Some(flow)) => flow,
            Ok(None) => {
                return self.refuse(id, &start, Failure::new(NO_FLOW, format!("there is no flow {flow}"))).await;
            }
            // Its definition cannot be read, and will not be next time.
            Err(EngineError::Bug(why)) => return self.refuse(id, &start, Failure::new(BAD_FLOW, why)).await,
            Err(error) => return Err(error),
        };
        if let Some(failure) = self.bad_input(&flow, &start).await? {
            return self.refuse(id, &start, failure).await;
        }
        let taken = Some(Taken::Message(id.to_owned()));
        let new = NewRun { ns: self.ns.clone(), flow, key: None, tells_line: None };
        let inputs = vec![Input::Start(start.clone())];
        let answer = self.instance.committing.hand_in(self.to, inputs, taken, Some(new)).await?;
        match self.heard(vec![(id.to_owned(), answer)]).await {
            // If no step waits for it, the start stays in the store until an operator releases it.
            Err(EngineError::Quarantined(why)) if start.parent.or(start.started_by).is_some() => {
                let failure = Failure::new(quarantine::NOT_STARTED, why);
                let told = self.refusal(&start, failure);
                self.commit(vec![id.to_owned()], told, vec![quarantine::forget(self.to)]).await
            }
            heard => heard,
        }
    }

    async fn bad_input(&self, flow: &Arc<Registered>, start: &Start) -> Result<Option<Failure>> {
        let input = match &start.input {
            Some(Data::Json(input)) => input.clone(),
            Some(input) => Arc::new(materialise(&*self.instance.store, self.to, input, &mut Values::new()).await?),
            None => Arc::default(),
        };
        let bytes = start.input.as_ref().map_or(0, |input| input.bytes(self.instance.config.max_shown_bytes()));
        // Each child has its own: they are checked one at a time, and namespaces take turns.
        let mut allowance = Allowance::of_starts();
        let verdict = self.instance.flows.check_input(&self.ns, flow, &input, bytes, &mut allowance).await?;
        Ok(verdict.err().map(|mismatch| {
            let problems = match mismatch {
                Mismatch::Invalid(problems) => problems,
                Mismatch::Exhausted(limit) => vec![limit],
            };
            let message = format!("the input is not what {} asks for: {}", flow.flow.name, problems.join("; "));
            Failure::new(BAD_INPUT, message)
        }))
    }

    /// It does not start; whoever waits for it is told in the same commit.
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

    /// Drops messages to this run, sends others, and changes documents.
    async fn commit(&self, ids: Vec<String>, messages: Vec<Message>, documents: Vec<DocumentChange>) -> Result<()> {
        let commit = DocumentCommit {
            ns: self.ns.clone(),
            command: self.instance.command(),
            documents,
            messages,
            events: Vec::new(),
            drops: ids.into_iter().map(|id| (self.to, id)).collect(),
        };
        self.instance.store.commit(vec![Command::Documents(commit)], Vec::new()).await?;
        Ok(())
    }
}

/// What an input carries with it, as far as that is counted.
fn weight(input: &Input) -> usize {
    let bytes = |data: &Data| data.bytes(BYTES_AT_ONCE);
    match input {
        Input::OpenGate { payload, .. } => bytes(payload),
        Input::ChildEnded { end: ChildEnd::Completed(output), .. } => bytes(output),
        _ => 0,
    }
}
