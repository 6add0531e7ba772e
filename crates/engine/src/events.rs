//! Delivers published events to the gates that wait for them.
//!
//! An event is committed first. Then its gates are found and sent messages, in a commit that also advances the cursor
//! of the namespace. A gate is committed first as well, with a message to its own run that makes it look back at
//! earlier events. Whichever of the two is committed later sees the other, so an event never misses a gate created
//! concurrently.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use eddyline_language::definition::wrong_name;
use eddyline_machine::{
    ActId, Data, Due as Since, EventWait, GateChange, Input, Message, MessageBody, Millis, OpenedBy, RunId, Transition,
    canonical_json,
};
use eddyline_store::{
    Change, Command, Committed, Document, DocumentChange, DocumentCommit, DocumentFilter, DocumentKey, EventState,
    Expect, Fed, Feed, FeedItem, GateFilter, GateRow, MAX_PAGE, Namespace, NewEvent, Page, Refused, Store, Trim,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::certain;
use crate::chore::Chore;
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::instance::Instance;
use crate::start::payload;

/// The kind and id of the document that records how far the events of a namespace have been delivered to gates.
pub(crate) const CURSOR: &str = "cursor";
pub(crate) const EVENTS: &str = "events";
/// The most events that are delivered in one commit.
const EVENTS_A_ROUND: usize = 100;
/// The most bytes of messages in one commit, and what a message counts at least: one event may open 100,000 gates.
const BYTES_A_COMMIT: usize = 4 << 20;
const MESSAGE_BYTES: usize = 2 << 10;
/// How often [`keep_events`] retries while others advance the cursor.
const KEEP_TRIES: usize = 100;
/// The most namespaces with a pending hint; beyond that all namespaces are checked.
const HINTED: usize = 10_000;
/// The most events that one call publishes.
pub const MAX_EVENTS: usize = 1_000;
/// The prefix of the ids of messages that make a new gate look back.
const LOOK: &str = "look:";

/// An event to be published.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PublishRequest {
    pub name: String,
    pub key: Option<Value>,
    pub payload: Value,
    /// A repeated id changes nothing while the first event is kept.
    pub id: Option<String>,
}

impl Engine {
    /// Publishes events to the namespace. When this returns, every gate that waits for one of them will be opened.
    pub async fn publish(&self, ns: &Namespace, requests: Vec<PublishRequest>) -> Result<PublishedEvents> {
        if requests.len() > MAX_EVENTS {
            let (what, bytes) = ("the number of events in one call", requests.len());
            return Err(EngineError::TooLarge { what, bytes, limit: MAX_EVENTS });
        }
        let mut events = Vec::with_capacity(requests.len());
        for request in requests {
            if let Some(wrong) = wrong_name(&request.name) {
                return Err(EngineError::invalid(format!("invalid event name: {wrong}")));
            }
            events.push(NewEvent {
                id: request.id.unwrap_or_else(|| self.instance.command().0.to_string()),
                name: request.name,
                key: request.key.map(canonical_json),
                payload: payload(self.config(), "the payload", request.payload)?,
            });
        }
        ensure_cursor(&self.instance, ns).await?;
        let ids = events.iter().map(|event| event.id.clone()).collect();
        let committed = commit(&self.instance, ns, Vec::new(), Vec::new(), events).await?;
        Ok(PublishedEvents { ids, existing: committed.map_or(0, |committed| committed.repeats) })
    }

    /// The delivery state of an event that is still kept.
    pub async fn event(&self, ns: &Namespace, id: &str) -> Result<EventOutcome> {
        // Read before the event: the cursor only advances, so `delivered` may be late but never wrong.
        let fan_out = cursor(&*self.instance.store, ns)
            .await?
            .map_or_else(FanOutCursor::default, |cursor| FanOutCursor::of(&cursor));
        let event = self.instance.store.event(ns, id).await?.ok_or_else(|| unknown(id))?;
        let EventState { position, at, name, key, gates_opened } = event;
        Ok(EventOutcome { name, key, published_at: at, delivered: fan_out.position >= position, gates_opened })
    }

    /// Deletes an event: later gates do not find it, and its id can be used again. Gates that it opened are not
    /// affected.
    pub async fn delete_event(&self, ns: &Namespace, id: &str) -> Result<()> {
        self.instance.store.event(ns, id).await?.ok_or_else(|| unknown(id))?;
        while self.instance.store.trim(&Trim::Event { ns: ns.clone(), id: id.to_owned() }).await? {}
        Ok(())
    }
}

/// The result of publishing events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedEvents {
    /// In the order of the request.
    pub ids: Vec<String>,
    /// How many of them were published before with the same id.
    pub existing: u32,
}

/// The delivery state of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventOutcome {
    pub name: String,
    /// As canonical JSON.
    pub key: Option<String>,
    pub published_at: Millis,
    /// Messages to all gates that waited for it were sent.
    pub delivered: bool,
    /// Counted when the gate's run has consumed the event.
    pub gates_opened: u64,
}

fn unknown(id: &str) -> EngineError {
    EngineError::NotFound { what: "event", id: id.chars().take(120).collect() }
}

/// The loop that delivers events to gates: in namespaces with hints at once, in all others every `poll_ms`.
pub(crate) struct Events {
    instance: Instance,
    /// When the last sweep over all namespaces was made, and the namespace where it continues.
    swept_at: Option<Instant>,
    swept: Option<Namespace>,
    /// Hints were lost: sweep all namespaces without a pause.
    hurry: bool,
}

impl Chore for Events {
    const NAME: &'static str = "events";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let mut more = false;
        match self.instance.published.take() {
            Hinted::In(namespaces) => more |= self.deliver_hinted(namespaces).await?,
            Hinted::Anywhere => (self.swept, self.hurry) = (None, true),
        }
        let due = Duration::from_millis(self.instance.poll_ms().max(0) as u64);
        if self.hurry || self.swept_at.is_none_or(|at| at.elapsed() >= due) {
            self.swept_at = Some(Instant::now());
            more |= self.sweep().await?;
        }
        Ok((more || self.hurry).then_some(0))
    }

    fn wakes(change: &Change) -> bool {
        matches!(change, Change::Events { .. })
    }

    fn at_latest_ms(&self) -> Millis {
        self.instance.poll_ms()
    }
}

impl Events {
    pub fn new(instance: Instance) -> Events {
        Events { instance, swept_at: None, swept: None, hurry: true }
    }

    async fn deliver_hinted(&self, namespaces: BTreeSet<Namespace>) -> Result<bool> {
        let mut cursors = Vec::with_capacity(namespaces.len());
        for ns in &namespaces {
            cursors.extend(cursor(&*self.instance.store, ns).await?);
        }
        self.deliver_all(cursors).await
    }

    /// Sweeps one page of namespaces; the next round continues with the next page.
    async fn sweep(&mut self) -> Result<bool> {
        let after = self.swept.take();
        let mut filter = the_cursor();
        filter.after = after.is_some().then(|| EVENTS.to_owned());
        filter.after_ns = after;
        let page = self.instance.store.documents(None, &filter, MAX_PAGE).await?;
        self.swept = page.last().filter(|_| page.len() == MAX_PAGE).map(|last| last.ns.clone());
        self.hurry &= self.swept.is_some();
        self.deliver_all(page).await
    }

    /// Delivers some events of each namespace. True if there are more.
    async fn deliver_all(&self, cursors: Vec<Document>) -> Result<bool> {
        let (mut more, mut failed) = (false, None);
        for cursor in cursors {
            let ns = cursor.ns.clone();
            // An error in one namespace must not block the others.
            match self.deliver(cursor).await {
                Ok(false) => {}
                Ok(true) => {
                    more = true;
                    self.instance.published.note(&ns);
                }
                Err(error) => {
                    self.instance.published.note(&ns);
                    failed = Some(error);
                }
            }
        }
        match failed {
            Some(error) if !more => Err(error),
            _ => Ok(more),
        }
    }

    /// Delivers the next events of a namespace, as many as fit into one commit. True if there may be more.
    async fn deliver(&self, cursor: Document) -> Result<bool> {
        let mut fan_out = FanOutCursor::of(&cursor);
        let feed = Feed::Events { name: None, key: None, since: None };
        let page = Page { after: Some(fan_out.position), limit: EVENTS_A_ROUND };
        let events = self.instance.store.feed(&cursor.ns, &feed, page).await?;
        if events.is_empty() {
            return Ok(false);
        }
        let (mut messages, mut room) = (Vec::new(), BYTES_A_COMMIT);
        for event in &events {
            // If a partly delivered event was deleted meanwhile, the next one begins with its first gate.
            let from = fan_out.gates.filter(|gates| gates.event.is_none_or(|of| of == event.position));
            fan_out.gates = openings(&*self.instance.store, &cursor.ns, event, from, &mut room, &mut messages).await?;
            if fan_out.gates.is_some() {
                break;
            }
            fan_out.position = event.position;
        }
        let moved = DocumentChange {
            key: cursor.key,
            expect: Expect::Revision(cursor.revision),
            body: Some(json!(fan_out)),
            due: None,
        };
        // Refused if another instance has delivered them, since that advanced the cursor.
        commit(&self.instance, &cursor.ns, vec![moved], messages, Vec::new()).await?;
        Ok(true)
    }
}

/// Namespaces in which events were published, according to hints.
#[derive(Debug, Default)]
pub(crate) struct Published(Mutex<Hinted>);

#[derive(Debug)]
enum Hinted {
    In(BTreeSet<Namespace>),
    Anywhere,
}

impl Default for Hinted {
    fn default() -> Hinted {
        Hinted::In(BTreeSet::new())
    }
}

impl Published {
    pub fn note(&self, ns: &Namespace) {
        let mut hinted = self.hinted();
        if let Hinted::In(namespaces) = &mut *hinted {
            if namespaces.len() >= HINTED {
                *hinted = Hinted::Anywhere;
            } else if !namespaces.contains(ns) {
                namespaces.insert(ns.clone());
            }
        }
    }

    /// Hints were lost.
    pub fn missed(&self) {
        *self.hinted() = Hinted::Anywhere;
    }

    fn take(&self) -> Hinted {
        std::mem::take(&mut *self.hinted())
    }

    fn hinted(&self) -> MutexGuard<'_, Hinted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How far the events of a namespace have been delivered.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
struct FanOutCursor {
    /// Events up to this position are delivered to all gates.
    position: u64,
    /// How far the next event is delivered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gates: Option<Gates>,
    /// Events are kept at least this long: the longest `since` of a flow.
    #[serde(default)]
    keep_ms: Millis,
}

/// Gates with the event's key come first, then those that take any key.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Gates {
    any_key: bool,
    after: Option<u64>,
    /// The position of the event; older builds did not write it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    event: Option<u64>,
}

impl FanOutCursor {
    fn of(cursor: &Document) -> FanOutCursor {
        FanOutCursor::deserialize(&cursor.body).unwrap_or_default()
    }
}

/// Adds a message for every gate that waits for an event, while there is room. Returns where to continue if there was
/// not enough. A gate without a key takes any event of its name.
async fn openings(
    store: &dyn Store,
    ns: &Namespace,
    event: &FeedItem,
    from: Option<Gates>,
    room: &mut usize,
    messages: &mut Vec<Message>,
) -> Result<Option<Gates>> {
    let Fed::Event { name, key, payload, .. } = &event.what else { return Ok(None) };
    let weight = payload.bytes(BYTES_A_COMMIT).max(MESSAGE_BYTES);
    let mut gates = from.unwrap_or(Gates { any_key: key.is_none(), after: None, event: None });
    gates.event = Some(event.position);
    loop {
        if *room < weight && !messages.is_empty() {
            return Ok(Some(gates));
        }
        let wanted = key.clone().filter(|_| !gates.any_key);
        let filter = GateFilter { event: Some((name.clone(), wanted)), ..GateFilter::default() };
        let page = Page { after: gates.after, limit: (*room / weight).clamp(1, MAX_PAGE) };
        let found = store.gates(Some(ns), &filter, page).await?;
        match found.last() {
            Some(last) => gates.after = Some(last.position),
            None if gates.any_key => return Ok(None),
            None => (gates.any_key, gates.after) = (true, None),
        }
        *room = room.saturating_sub(found.len() * weight);
        messages.extend(found.iter().filter(|gate| reaches(gate, event)).map(|gate| Message {
            to: gate.id.run,
            id: format!("event:{}:{}", event.position, gate.id.activation),
            body: MessageBody::Input(Box::new(open(gate.id.activation, event.position, payload))),
        }));
    }
}

/// Whether a gate looks back far enough. It may have been created after the event.
fn reaches(gate: &GateRow, event: &FeedItem) -> bool {
    let arrived = gate.arrival.as_ref();
    arrived.and_then(|arrived| Some(since(arrived.at, arrived.gate.event.as_ref()?))).is_some_and(|at| event.at >= at)
}

fn since(arrived_at: Millis, wait: &EventWait) -> Millis {
    match wait.since {
        // A run that started while the store's clock was ahead, before it was reset, seems to begin after its gate.
        Since::At(moment) => moment.min(arrived_at),
        // Relative to the commit and in the past, so `ms` is negative.
        Since::After(ms) => arrived_at + ms,
    }
}

fn open(activation: ActId, position: u64, payload: &Data) -> Input {
    Input::OpenGate { activation, by: OpenedBy::Event { position }, payload: payload.clone() }
}

/// Messages of a run to itself, one for each new event gate, which make it look back at earlier events.
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

/// Finds earlier events for the new gates of a run, when the messages from [`look_backs`] are delivered.
pub(crate) struct LookBack<'a> {
    store: &'a dyn Store,
    ns: &'a Namespace,
    waits: BTreeMap<ActId, Wait>,
    /// The last result: many gates of a run wait for the same event.
    found: Option<(Wait, Option<(u64, Data)>)>,
}

/// The event that a gate waits for, and since when.
type Wait = (EventWait, Millis);

impl<'a> LookBack<'a> {
    /// Reads the gates of all messages at once.
    pub async fn of(store: &'a dyn Store, ns: &'a Namespace, run: RunId, messages: &[Message]) -> Result<LookBack<'a>> {
        let look: BTreeSet<ActId> = messages.iter().filter_map(|message| looks(&message.id)).collect();
        let mut all = LookBack { store, ns, waits: BTreeMap::new(), found: None };
        let (Some(first), Some(last)) = (look.first(), look.last()) else { return Ok(all) };
        let filter = GateFilter { run: Some(run), activations: Some((*first, *last)), ..GateFilter::default() };
        let mut page = Page::default();
        loop {
            let gates = store.gates(Some(ns), &filter, page).await?;
            let Some(last) = gates.last() else { return Ok(all) };
            page.after = Some(last.position);
            for gate in gates {
                if let (true, Some(arrived)) = (look.contains(&gate.id.activation), gate.arrival)
                    && let Some(wait) = arrived.gate.event
                {
                    let since = since(arrived.at, &wait);
                    all.waits.insert(gate.id.activation, (wait, since));
                }
            }
        }
    }

    /// The input that opens the message's gate with the oldest matching event, if there is one.
    pub async fn opening(&mut self, message: &str) -> Result<Option<Input>> {
        let Some((activation, wait)) = looks(message).and_then(|id| Some((id, self.waits.remove(&id)?))) else {
            return Ok(None);
        };
        let event = match self.found.take() {
            Some((known, event)) if known == wait => event,
            _ => self.oldest(&wait).await?,
        };
        let opening = event.as_ref().map(|(position, payload)| open(activation, *position, payload));
        self.found = Some((wait, event));
        Ok(opening)
    }

    async fn oldest(&self, (wait, since): &Wait) -> Result<Option<(u64, Data)>> {
        let feed = Feed::Events { name: Some(wait.name.clone()), key: wait.key.clone(), since: Some(*since) };
        let found = self.store.feed(self.ns, &feed, Page { after: wait.after, limit: 1 }).await?;
        Ok(found.into_iter().find_map(|event| match event.what {
            Fed::Event { payload, .. } => Some((event.position, payload)),
            Fed::Run { .. } => None,
        }))
    }
}

/// The activation of the gate, if this is a look-back message.
fn looks(message: &str) -> Option<ActId> {
    message.strip_prefix(LOOK)?.parse().ok().map(ActId)
}

/// Creates the event cursor of a namespace if it has none. Called before anything is published there.
pub(crate) async fn ensure_cursor(instance: &Instance, ns: &Namespace) -> Result<()> {
    if cursor(&*instance.store, ns).await?.is_none() {
        let key = DocumentKey::new(CURSOR, EVENTS);
        let made =
            DocumentChange { key, expect: Expect::Absent, body: Some(json!(FanOutCursor::default())), due: None };
        commit(instance, ns, vec![made], Vec::new(), Vec::new()).await?;
    }
    Ok(())
}

/// Whether a flow was ever registered or an event published in a namespace.
pub(crate) async fn has_cursor(instance: &Instance, ns: &Namespace) -> Result<bool> {
    Ok(cursor(&*instance.store, ns).await?.is_some())
}

/// Makes retention keep the events of a namespace for at least `keep_ms`.
pub(crate) async fn keep_events(instance: &Instance, ns: &Namespace, keep_ms: Millis) -> Result<()> {
    for _ in 0..KEEP_TRIES {
        let Some(cursor) = cursor(&*instance.store, ns).await? else { return Ok(()) };
        let fan_out = FanOutCursor::of(&cursor);
        if fan_out.keep_ms >= keep_ms {
            return Ok(());
        }
        let (expect, body) = (Expect::Revision(cursor.revision), Some(json!(FanOutCursor { keep_ms, ..fan_out })));
        let change = DocumentChange { key: cursor.key, expect, body, due: None };
        if commit(instance, ns, vec![change], Vec::new(), Vec::new()).await?.is_some() {
            return Ok(());
        }
    }
    let message = "could not update how long events are kept while events are being delivered; try again";
    Err(EngineError::Conflict(message.to_owned()))
}

/// The namespaces that have a cursor, each with how long its gates need events.
pub(crate) async fn kept_events(store: &dyn Store) -> Result<Vec<(Namespace, Millis)>> {
    let cursors = cursors(store).await?;
    Ok(cursors.into_iter().map(|cursor| (cursor.ns.clone(), FanOutCursor::of(&cursor).keep_ms)).collect())
}

fn the_cursor() -> DocumentFilter {
    DocumentFilter { kind: CURSOR.to_owned(), id: Some(EVENTS.to_owned()), ..DocumentFilter::default() }
}

async fn cursor(store: &dyn Store, ns: &Namespace) -> Result<Option<Document>> {
    Ok(store.documents(Some(ns), &the_cursor(), 1).await?.pop())
}

/// The cursors of all namespaces.
async fn cursors(store: &dyn Store) -> Result<Vec<Document>> {
    let (mut filter, mut all) = (the_cursor(), Vec::new());
    loop {
        let page = store.documents(None, &filter, MAX_PAGE).await?;
        let Some(last) = page.last() else { return Ok(all) };
        filter.after = Some(last.key.id.clone());
        filter.after_ns = Some(last.ns.clone());
        all.extend(page);
    }
}

/// None if another instance changed one of the documents first.
async fn commit(
    instance: &Instance,
    ns: &Namespace,
    documents: Vec<DocumentChange>,
    messages: Vec<Message>,
    events: Vec<NewEvent>,
) -> Result<Option<Committed>> {
    let (ns, command) = (ns.clone(), instance.command());
    let commit = DocumentCommit { ns, command, documents, messages, events, drops: Vec::new() };
    let written = certain::commit_one(&*instance.store, Command::Documents(commit)).await?;
    match written.commands.into_iter().next().transpose() {
        Err(Refused::Revision { .. }) => Ok(None),
        Err(refused) => Err(EngineError::Conflict(refused.to_string())),
        Ok(committed) => Ok(committed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_looks_back_at_least_to_its_own_arrival() {
        let wait = |since| EventWait { name: "paid".to_owned(), key: None, since, after: None };
        assert_eq!(since(700, &wait(Since::At(500))), 500, "its run began before it");
        assert_eq!(since(700, &wait(Since::At(9_000))), 700, "its run began while the clock was ahead");
        assert_eq!(since(700, &wait(Since::After(-300))), 400);
    }
}
