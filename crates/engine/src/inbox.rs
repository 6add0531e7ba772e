//! What one run says to another, delivered in order, consumed in the commit of the target.
//!
//! The messages of a run are handed in together, so that they are decided together. Runs do not wait for each other: one
//! with a long line of messages keeps no other from its own.

use std::collections::{BTreeMap, btree_map};
use std::sync::Arc;
use std::time::Duration;

use eddyline_machine::{ChildEnd, Data, Failure, Input, Message, MessageBody, Millis, RunId, Start};
use eddyline_store::{Change, Command, DocumentCommit, Due, DueBatch, DueItem, Namespace, Taken};
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};

use crate::assignment::{Values, materialise};
use crate::chore::Chore;
use crate::committer::{Answered, NewRun, Order};
use crate::error::{EngineError, Result};
use crate::events::LookBack;
use crate::flows::Registered;
use crate::instance::Instance;

/// The kinds of failure that the start of a child can come to.
const NO_FLOW: &str = "FlowNotFound";
const BAD_INPUT: &str = "InvalidInput";
/// How long a round waits for its deliveries. Most are done by then; the others go on beside the next round.
const PATIENCE: Duration = Duration::from_millis(10);
/// What messages that are handed in together weigh, at most, unless it is a single one.
const BYTES_AT_ONCE: usize = 4 << 20;

pub(crate) struct Inbox {
    instance: Instance,
    deliveries: FuturesUnordered<BoxFuture<'static, (RunId, Result<()>)>>,
    /// The runs of these deliveries, each of another one, and what has come for them meanwhile.
    under_way: BTreeMap<RunId, Option<(Namespace, Vec<Message>)>>,
}

impl Chore for Inbox {
    const NAME: &'static str = "inbox";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let room = self.instance.config.due_batch.saturating_sub(self.deliveries.len());
        let due = match room {
            0 => DueBatch { next_in: Some(0), ..DueBatch::default() },
            room => self.instance.store.due(Due::Messages, room).await?,
        };
        for item in due.items {
            if let DueItem::Messages { ns, to, messages } = item {
                self.begin(ns, to, messages);
            }
        }
        let all_done = tokio::time::timeout(PATIENCE, self.finish()).await.is_ok();
        Ok(if all_done { due.next_in } else { Some(0) })
    }

    fn wakes(change: &Change) -> bool {
        matches!(change, Change::Messages)
    }

    fn at_latest_ms(&self) -> Millis {
        self.instance.config.poll_ms
    }
}

impl Inbox {
    pub fn new(instance: Instance) -> Inbox {
        Inbox { instance, deliveries: FuturesUnordered::new(), under_way: BTreeMap::new() }
    }

    /// Begins to deliver, after what is on its way to the same run.
    fn begin(&mut self, ns: Namespace, to: RunId, messages: Vec<Message>) {
        match self.under_way.entry(to) {
            btree_map::Entry::Occupied(mut before) => *before.get_mut() = Some((ns, messages)),
            btree_map::Entry::Vacant(free) => {
                free.insert(None);
                let delivery = Delivery { instance: self.instance.clone(), ns, to };
                self.deliveries.push(Box::pin(async move { (to, delivery.deliver(messages).await) }));
            }
        }
    }

    /// Until everything on its way is delivered.
    async fn finish(&mut self) {
        while let Some((to, delivered)) = self.deliveries.next().await {
            if let Some(Some((ns, messages))) = self.under_way.remove(&to) {
                self.begin(ns, to, messages);
            }
            if let Err(error) = delivered {
                tracing::warn!(instance = self.instance.config.instance, "messages are delivered again later: {error}");
            }
        }
    }
}

/// To one run.
struct Delivery {
    instance: Instance,
    ns: Namespace,
    to: RunId,
}

impl Delivery {
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
        let found = self.instance.flows.find(&*self.instance.store, &self.ns, flow, None).await?;
        let refusal = match &found {
            None => Some(Failure::new(NO_FLOW, format!("there is no flow {flow}"))),
            Some(found) => self.bad_input(found, &start).await?,
        };
        let Some(flow) = found.filter(|_| refusal.is_none()) else {
            return self.refuse(id, &start, refusal).await;
        };
        let taken = Some(Taken::Message(id.to_owned()));
        let new = NewRun { ns: self.ns.clone(), flow, key: None };
        let answer = self.instance.committing.hand_in(self.to, vec![Input::Start(start)], taken, Some(new)).await?;
        self.heard(vec![(id.to_owned(), answer)]).await
    }

    async fn bad_input(&self, flow: &Arc<Registered>, start: &Start) -> Result<Option<Failure>> {
        let input = match &start.input {
            Some(input) => materialise(&*self.instance.store, self.to, input, &mut Values::new()).await?,
            None => serde_json::Value::Null,
        };
        let problems = flow.check_input(&input).err();
        Ok(problems.map(|problems| {
            Failure::new(
                BAD_INPUT,
                format!("the input is not what {} asks for: {}", flow.flow.name, problems.join("; ")),
            )
        }))
    }

    /// It does not start; whoever waits for it is told in the same commit.
    async fn refuse(&self, id: &str, start: &Start, failure: Option<Failure>) -> Result<()> {
        let failure = failure.unwrap_or_else(|| Failure::new(NO_FLOW, "it could not be started"));
        tracing::warn!(instance = self.instance.config.instance, run = %self.to, "not started: {}", failure.message);
        let told = start.parent.map(|parent| Message {
            to: parent.run,
            id: format!("refused:{}", self.to),
            body: MessageBody::Input(Box::new(Input::ChildEnded {
                activation: parent.activation,
                child: self.to,
                end: ChildEnd::Failed(failure),
            })),
        });
        self.drop_messages(vec![id.to_owned()], told.into_iter().collect()).await
    }

    async fn drop_messages(&self, ids: Vec<String>, messages: Vec<Message>) -> Result<()> {
        let commit = DocumentCommit {
            ns: self.ns.clone(),
            command: self.instance.command(),
            documents: Vec::new(),
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
