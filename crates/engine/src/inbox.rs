//! What one run says to another, delivered in order, consumed in the commit of the target.

use std::sync::Arc;

use eddyline_machine::{ChildEnd, Failure, Input, Message, MessageBody, Millis, RunId, Start};
use eddyline_store::{Change, Command, DocumentCommit, Due, DueItem, Namespace, Taken};
use futures_util::future::join_all;

use crate::assignment::materialise;
use crate::chore::Chore;
use crate::committer::NewRun;
use crate::error::{EngineError, Result};
use crate::events::looked_back;
use crate::flows::Registered;
use crate::instance::Instance;

/// The kinds of failure that the start of a child can come to.
const NO_FLOW: &str = "FlowNotFound";
const BAD_INPUT: &str = "InvalidInput";

pub(crate) struct Inbox(pub Instance);

impl Chore for Inbox {
    const NAME: &'static str = "inbox";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let due = self.0.store.due(Due::Messages, self.0.config.due_batch).await?;
        let deliveries = due.items.into_iter().filter_map(|item| match item {
            DueItem::Messages { ns, to, messages } => Some(self.deliver(ns, to, messages)),
            _ => None,
        });
        for delivered in join_all(deliveries).await {
            if let Err(error) = delivered {
                tracing::warn!(instance = self.0.config.instance, "messages are delivered again later: {error}");
            }
        }
        Ok(due.next_in)
    }

    fn wakes(change: &Change) -> bool {
        matches!(change, Change::Messages)
    }

    fn at_latest_ms(&self) -> Millis {
        self.0.config.poll_ms
    }
}

impl Inbox {
    /// One run's messages, in the order in which they were sent.
    async fn deliver(&self, ns: Namespace, to: RunId, messages: Vec<Message>) -> Result<()> {
        for message in messages {
            let taken = Some(Taken::Message(message.id.clone()));
            let delivered = match message.body {
                MessageBody::Start { flow, start } => self.start(&ns, to, &message.id, &flow, start).await,
                MessageBody::Input(input) => {
                    let input = self.completed(&ns, to, &message.id, *input).await?;
                    self.0.committing.submit(to, vec![input], taken, None).await.map(|_| ())
                }
            };
            match delivered {
                Err(EngineError::NotFound { .. } | EngineError::Trimmed(_)) => {
                    // Nobody is there to hear it: deleted, or never started because its start was refused.
                    self.drop_message(&ns, to, &message.id, Vec::new()).await?;
                }
                other => other?,
            }
        }
        Ok(())
    }

    /// A message to itself with what its sender could not know: which of its closed tasks workers have, or which event
    /// a new gate has waited for.
    async fn completed(&self, ns: &Namespace, run: RunId, id: &str, input: Input) -> Result<Input> {
        match input {
            Input::Drain { .. } => {}
            Input::Continue => return Ok(looked_back(&*self.0.store, ns, run, id).await?.unwrap_or(input)),
            _ => return Ok(input),
        }
        let beside = self.0.store.beside(run).await?;
        let claimed = beside.tasks.iter().filter(|row| row.held.is_some()).map(|row| row.task.fence).collect();
        Ok(Input::Drain { claimed })
    }

    async fn start(&self, ns: &Namespace, to: RunId, id: &str, flow: &str, start: Box<Start>) -> Result<()> {
        let found = self.0.flows.find(&*self.0.store, ns, flow, None).await?;
        let refusal = match &found {
            None => Some(Failure::new(NO_FLOW, format!("there is no flow {flow}"))),
            Some(found) => self.bad_input(to, found, &start).await?,
        };
        let Some(flow) = found.filter(|_| refusal.is_none()) else {
            return self.refuse(ns, to, id, &start, refusal).await;
        };
        let taken = Some(Taken::Message(id.to_owned()));
        let new = NewRun { ns: ns.clone(), flow, key: None };
        self.0.committing.submit(to, vec![Input::Start(start)], taken, Some(new)).await?;
        Ok(())
    }

    async fn bad_input(&self, run: RunId, flow: &Arc<Registered>, start: &Start) -> Result<Option<Failure>> {
        let input = match &start.input {
            Some(input) => materialise(&*self.0.store, run, input, &mut Vec::new()).await?,
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
    async fn refuse(&self, ns: &Namespace, to: RunId, id: &str, start: &Start, failure: Option<Failure>) -> Result<()> {
        let failure = failure.unwrap_or_else(|| Failure::new(NO_FLOW, "it could not be started"));
        tracing::warn!(instance = self.0.config.instance, run = %to, "not started: {}", failure.message);
        let told = start.parent.map(|parent| Message {
            to: parent.run,
            id: format!("refused:{to}"),
            body: MessageBody::Input(Box::new(Input::ChildEnded {
                activation: parent.activation,
                child: to,
                end: ChildEnd::Failed(failure),
            })),
        });
        self.drop_message(ns, to, id, told.into_iter().collect()).await
    }

    async fn drop_message(&self, ns: &Namespace, to: RunId, id: &str, messages: Vec<Message>) -> Result<()> {
        let commit = DocumentCommit {
            ns: ns.clone(),
            command: self.0.command(),
            documents: Vec::new(),
            messages,
            events: Vec::new(),
            drops: vec![(to, id.to_owned())],
        };
        self.0.store.commit(vec![Command::Documents(commit)], Vec::new()).await?;
        Ok(())
    }
}
