//! Events of a namespace meet the gates that wait for them.
//!
//! An event is committed first; then gates are found and sent messages, and a cursor moves on in the commit that sends
//! them. A gate is committed first as well, with a message to its own run that makes it look back over what was published
//! before. Whichever of the two commits later sees the other, so an event and a gate made at the same moment always meet.

use eddyline_machine::{
    ActId, Data, Due as Since, GateChange, Input, Message, MessageBody, Millis, OpenedBy, RunId, Transition,
    canonical_json,
};
use eddyline_store::{
    Change, Command, Document, DocumentChange, DocumentCommit, DocumentFilter, DocumentKey, Expect, Fed, Feed,
    FeedItem, GateFilter, MAX_PAGE, Namespace, NewEvent, Page, Refused, Store,
};
use serde_json::{Value, json};

use crate::chore::Chore;
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::instance::Instance;
use crate::start::payload;

/// How far the events of a namespace have been told to gates.
const CURSOR: &str = "cursor";
const EVENTS: &str = "events";
/// Events that are told in one commit.
const EVENTS_A_ROUND: usize = 100;
/// Events that one call publishes.
pub const MAX_EVENTS: usize = 1_000;
/// What a message is called that makes a new gate look back.
const LOOK: &str = "look:";

/// An event to be published.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PublishRequest {
    pub name: String,
    pub key: Option<Value>,
    pub payload: Value,
    /// The same id again changes nothing, for as long as events are kept.
    pub id: Option<String>,
}

impl Engine {
    /// Publishes events to the namespace. When this returns, every gate that waits for one of them will be opened.
    pub async fn publish(&self, ns: &Namespace, requests: Vec<PublishRequest>) -> Result<()> {
        if requests.len() > MAX_EVENTS {
            let (what, bytes) = ("the number of events in one call", requests.len());
            return Err(EngineError::TooLarge { what, bytes, limit: MAX_EVENTS });
        }
        let mut events = Vec::with_capacity(requests.len());
        for request in requests {
            if request.name.is_empty() {
                return Err(EngineError::invalid("an event has a name"));
            }
            events.push(NewEvent {
                id: request.id.unwrap_or_else(|| self.instance.command().0.to_string()),
                name: request.name,
                key: request.key.map(canonical_json),
                payload: payload("the payload", request.payload)?,
            });
        }
        ensure_cursor(&self.instance, ns).await?;
        commit(&self.instance, ns, Vec::new(), Vec::new(), events).await?;
        Ok(())
    }
}

/// Tells gates of events.
pub(crate) struct Events(pub Instance);

impl Chore for Events {
    const NAME: &'static str = "events";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let filter =
            DocumentFilter { kind: CURSOR.to_owned(), id: Some(EVENTS.to_owned()), ..DocumentFilter::default() };
        let mut more = false;
        for cursor in self.0.store.documents(None, &filter, MAX_PAGE).await? {
            more |= self.tell(cursor).await?;
        }
        Ok(more.then_some(0))
    }

    fn wakes(change: &Change) -> bool {
        matches!(change, Change::Events { .. })
    }

    fn at_latest_ms(&self) -> Millis {
        self.0.config.poll_ms
    }
}

impl Events {
    /// Tells of the next events of a namespace; whether there are more.
    async fn tell(&self, cursor: Document) -> Result<bool> {
        let at = cursor.body["position"].as_u64().unwrap_or(0);
        let feed = Feed::Events { name: None, key: None };
        let page = Page { after: Some(at), limit: EVENTS_A_ROUND };
        let events = self.0.store.feed(&cursor.ns, &feed, page).await?;
        let Some(last) = events.last().map(|event| event.position) else { return Ok(false) };
        let mut messages = Vec::new();
        for event in &events {
            messages.extend(openings(&*self.0.store, &cursor.ns, event).await?);
        }
        let moved = DocumentChange {
            key: cursor.key,
            expect: Expect::Revision(cursor.revision),
            body: Some(json!({"position": last})),
            due: None,
        };
        // Refused if another instance has told of them: then it moved the cursor as well.
        commit(&self.0, &cursor.ns, vec![moved], messages, Vec::new()).await?;
        Ok(true)
    }
}

/// A message for every gate that waits for an event. A gate without a key takes any event of its name.
async fn openings(store: &dyn Store, ns: &Namespace, event: &FeedItem) -> Result<Vec<Message>> {
    let Fed::Event { name, key, payload, .. } = &event.what else { return Ok(Vec::new()) };
    let keys = match key {
        Some(key) => vec![Some(key.clone()), None],
        None => vec![None],
    };
    let mut messages = Vec::new();
    for key in keys {
        let filter = GateFilter { event: Some((name.clone(), key)), ..GateFilter::default() };
        let mut after = None;
        loop {
            let gates = store.gates(ns, &filter, Page { after, limit: MAX_PAGE }).await?;
            let Some(last) = gates.last() else { break };
            after = Some(last.position);
            messages.extend(gates.iter().map(|gate| Message {
                to: gate.id.run,
                id: format!("event:{}:{}", event.position, gate.id.activation),
                body: MessageBody::Input(Box::new(open(gate.id.activation, event.position, payload))),
            }));
        }
    }
    Ok(messages)
}

fn open(activation: ActId, position: u64, payload: &Data) -> Input {
    Input::OpenGate { activation, by: OpenedBy::Event { position }, payload: payload.clone() }
}

/// Messages of a run to itself, one for each event gate that it has come to: to look back over what was published before.
pub(crate) fn look_backs(transition: &Transition) -> impl Iterator<Item = Message> {
    transition.gates.iter().filter_map(|change| match change {
        GateChange::Arrive(gate) if gate.event.is_some() => Some(Message {
            to: gate.id.run,
            id: format!("{LOOK}{}", gate.id.activation),
            body: MessageBody::Input(Box::new(Input::Continue)),
        }),
        _ => None,
    })
}

/// What a message that makes a gate look back comes to: the opening by the oldest event that it waits for, if any.
pub(crate) async fn looked_back(store: &dyn Store, ns: &Namespace, run: RunId, message: &str) -> Result<Option<Input>> {
    let Some(activation) = message.strip_prefix(LOOK).and_then(|id| id.parse().ok()).map(ActId) else {
        return Ok(None);
    };
    let gates = store.beside(run).await?.gates;
    let gate = gates.into_iter().find(|gate| gate.id.activation == activation && !gate.closed);
    let Some((at, wait)) =
        gate.and_then(|gate| gate.arrival).and_then(|arrived| Some((arrived.at, arrived.gate.event?)))
    else {
        return Ok(None);
    };
    let since = match wait.since {
        Since::At(moment) => moment,
        // Before the commit, so it is less than none.
        Since::After(ms) => at + ms,
    };
    let feed = Feed::Events { name: Some(wait.name), key: wait.key };
    let mut after = wait.after;
    loop {
        let events = store.feed(ns, &feed, Page { after, limit: MAX_PAGE }).await?;
        let Some(last) = events.last() else { return Ok(None) };
        after = Some(last.position);
        for event in &events {
            if let Fed::Event { payload, .. } = &event.what
                && event.at >= since
            {
                return Ok(Some(open(activation, event.position, payload)));
            }
        }
    }
}

/// Where the events of a namespace are told from; made before anything can be published there.
pub(crate) async fn ensure_cursor(instance: &Instance, ns: &Namespace) -> Result<()> {
    let filter = DocumentFilter { kind: CURSOR.to_owned(), id: Some(EVENTS.to_owned()), ..DocumentFilter::default() };
    if instance.store.documents(Some(ns), &filter, 1).await?.is_empty() {
        let key = DocumentKey::new(CURSOR, EVENTS);
        let made = DocumentChange { key, expect: Expect::Absent, body: Some(json!({"position": 0})), due: None };
        commit(instance, ns, vec![made], Vec::new(), Vec::new()).await?;
    }
    Ok(())
}

/// Whether it was carried out; not, if somebody else was there first.
async fn commit(
    instance: &Instance,
    ns: &Namespace,
    documents: Vec<DocumentChange>,
    messages: Vec<Message>,
    events: Vec<NewEvent>,
) -> Result<bool> {
    let (ns, command) = (ns.clone(), instance.command());
    let commit = DocumentCommit { ns, command, documents, messages, events, drops: Vec::new() };
    let written = instance.store.commit(vec![Command::Documents(commit)], Vec::new()).await?;
    match written.commands.into_iter().next() {
        Some(Err(Refused::Revision { .. })) => Ok(false),
        Some(Err(refused)) => Err(EngineError::Conflict(refused.to_string())),
        _ => Ok(true),
    }
}
