//! Events of a namespace meet the gates that wait for them.
//!
//! An event is committed first; then gates are found and sent messages, and a cursor moves on in the commit that sends
//! them. A gate is committed first as well, with a message to its own run that makes it look back over what was published
//! before. Whichever of the two commits later sees the other, so an event and a gate made at the same moment always meet.

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

use crate::chore::Chore;
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::instance::Instance;
use crate::start::payload;

/// How far the events of a namespace have been told to gates.
pub(crate) const CURSOR: &str = "cursor";
pub(crate) const EVENTS: &str = "events";
/// Events that are told in one commit.
const EVENTS_A_ROUND: usize = 100;
/// What the messages of one commit weigh at most, and a message with a small payload: one event may open 100,000 gates.
const BYTES_A_COMMIT: usize = 4 << 20;
const MESSAGE_BYTES: usize = 2 << 10;
/// How often it is tried to note how long events are kept, while others move the cursor.
const KEEP_TRIES: usize = 100;
/// Namespaces that hints are kept of; beyond that all are looked at.
const HINTED: usize = 10_000;
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
    pub async fn publish(&self, ns: &Namespace, requests: Vec<PublishRequest>) -> Result<PublishedEvents> {
        if requests.len() > MAX_EVENTS {
            let (what, bytes) = ("the number of events in one call", requests.len());
            return Err(EngineError::TooLarge { what, bytes, limit: MAX_EVENTS });
        }
        let mut events = Vec::with_capacity(requests.len());
        for request in requests {
            if let Some(wrong) = wrong_name(&request.name) {
                return Err(EngineError::invalid(format!("an event cannot have this name: {wrong}")));
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

    /// What became of an event that is kept.
    pub async fn event(&self, ns: &Namespace, id: &str) -> Result<EventOutcome> {
        // Read before the event: as long as that is kept, the cursor only moves on.
        let told = cursor(&*self.instance.store, ns).await?.map_or_else(Told::default, |cursor| Told::of(&cursor));
        let event = self.instance.store.event(ns, id).await?.ok_or_else(|| unknown(id))?;
        let EventState { position, at, name, key, gates_opened } = event;
        Ok(EventOutcome { name, key, published_at: at, delivered: told.position >= position, gates_opened })
    }

    /// Deletes an event: gates that come later do not find it, and its id can be used again. Gates that got it keep it.
    pub async fn delete_event(&self, ns: &Namespace, id: &str) -> Result<()> {
        self.instance.store.event(ns, id).await?.ok_or_else(|| unknown(id))?;
        while self.instance.store.trim(&Trim::Event { ns: ns.clone(), id: id.to_owned() }).await? {}
        Ok(())
    }
}

/// Events that were published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedEvents {
    /// In the order in which they were given.
    pub ids: Vec<String>,
    /// How many of them had been published before, under the same id.
    pub existing: u32,
}

/// What became of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EventOutcome {
    pub name: String,
    /// As canonical JSON.
    pub key: Option<String>,
    pub published_at: Millis,
    /// All gates that waited for it have been sent a message.
    pub delivered: bool,
    /// Counted when the run of the gate has taken the event.
    pub gates_opened: u64,
}

fn unknown(id: &str) -> EngineError {
    EngineError::NotFound { what: "event", id: id.chars().take(120).collect() }
}

/// Tells gates of events: of those namespaces that hints name, and now and then of the others.
pub(crate) struct Events {
    instance: Instance,
    /// When others were looked at last, and up to which.
    swept_at: Option<Instant>,
    swept: Option<Namespace>,
    /// Hints were missed: the others are looked at without a pause.
    hurry: bool,
}

impl Chore for Events {
    const NAME: &'static str = "events";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let mut more = false;
        match self.instance.published.take() {
            Hinted::In(namespaces) => more |= self.tell_hinted(namespaces).await?,
            Hinted::Anywhere => (self.swept, self.hurry) = (None, true),
        }
        let due = Duration::from_millis(self.instance.config.poll_ms.max(0) as u64);
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
        self.instance.config.poll_ms
    }
}

impl Events {
    pub fn new(instance: Instance) -> Events {
        Events { instance, swept_at: None, swept: None, hurry: true }
    }

    async fn tell_hinted(&self, namespaces: BTreeSet<Namespace>) -> Result<bool> {
        let mut cursors = Vec::with_capacity(namespaces.len());
        for ns in &namespaces {
            cursors.extend(cursor(&*self.instance.store, ns).await?);
        }
        self.tell_all(cursors).await
    }

    /// Looks at some of the namespaces without a hint, and at the next ones in the next round.
    async fn sweep(&mut self) -> Result<bool> {
        let after = self.swept.take();
        let mut filter = the_cursor();
        filter.after = after.is_some().then(|| EVENTS.to_owned());
        filter.after_ns = after;
        let page = self.instance.store.documents(None, &filter, MAX_PAGE).await?;
        self.swept = page.last().filter(|_| page.len() == MAX_PAGE).map(|last| last.ns.clone());
        self.hurry &= self.swept.is_some();
        self.tell_all(page).await
    }

    /// Tells of some events of each; whether there are more.
    async fn tell_all(&self, cursors: Vec<Document>) -> Result<bool> {
        let (mut more, mut failed) = (false, None);
        for cursor in cursors {
            let ns = cursor.ns.clone();
            // What is wrong in one namespace keeps no other from its events.
            match self.tell(cursor).await {
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

    /// Tells of the next events of a namespace, as much as goes into one commit; whether there is more.
    async fn tell(&self, cursor: Document) -> Result<bool> {
        let mut told = Told::of(&cursor);
        let feed = Feed::Events { name: None, key: None, since: None };
        let page = Page { after: Some(told.position), limit: EVENTS_A_ROUND };
        let events = self.instance.store.feed(&cursor.ns, &feed, page).await?;
        if events.is_empty() {
            return Ok(false);
        }
        let (mut messages, mut room) = (Vec::new(), BYTES_A_COMMIT);
        for event in &events {
            // If the event that was being told of was deleted meanwhile, the next one begins with its first gate.
            let from = told.gates.filter(|gates| gates.event.is_none_or(|of| of == event.position));
            told.gates = openings(&*self.instance.store, &cursor.ns, event, from, &mut room, &mut messages).await?;
            if told.gates.is_some() {
                break;
            }
            told.position = event.position;
        }
        let moved = DocumentChange {
            key: cursor.key,
            expect: Expect::Revision(cursor.revision),
            body: Some(json!(told)),
            due: None,
        };
        // Refused if another instance has told of them: then it moved the cursor as well.
        commit(&self.instance, &cursor.ns, vec![moved], messages, Vec::new()).await?;
        Ok(true)
    }
}

/// Namespaces in which events were published, as far as hints say. What is true is read from the store.
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

    /// Hints were missed.
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

/// How far the events of a namespace have been told.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
struct Told {
    /// Up to here to all gates.
    position: u64,
    /// Of the next event: up to which gates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gates: Option<Gates>,
    /// Events are kept at least as long as some gate may look back.
    #[serde(default)]
    keep_ms: Millis,
}

/// Those with the event's key come first, then those that take any.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
struct Gates {
    any_key: bool,
    after: Option<u64>,
    /// The position of that event; what older builds wrote does not name it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    event: Option<u64>,
}

impl Told {
    fn of(cursor: &Document) -> Told {
        Told::deserialize(&cursor.body).unwrap_or_default()
    }
}

/// A message for every gate that waits for an event, as far as there is room; where to go on, if there was not enough. A
/// gate without a key takes any event of its name.
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

/// Whether a gate looks back far enough. It may have come after the event that is only told of now.
fn reaches(gate: &GateRow, event: &FeedItem) -> bool {
    let arrived = gate.arrival.as_ref();
    arrived.and_then(|arrived| Some(since(arrived.at, arrived.gate.event.as_ref()?))).is_some_and(|at| event.at >= at)
}

fn since(arrived_at: Millis, wait: &EventWait) -> Millis {
    match wait.since {
        // A run that was started while the store's clock was ahead, before it was reset, began later than its gate.
        Since::At(moment) => moment.min(arrived_at),
        // Before the commit, so it is less than none.
        Since::After(ms) => arrived_at + ms,
    }
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

/// What new gates of a run wait for that look back, by the messages that make them.
pub(crate) struct LookBack<'a> {
    store: &'a dyn Store,
    ns: &'a Namespace,
    waits: BTreeMap<ActId, Wait>,
    /// What was found last: many gates of a run wait for the same.
    found: Option<(Wait, Option<(u64, Data)>)>,
}

/// For which event a gate waits, from which moment on.
type Wait = (EventWait, Millis);

impl<'a> LookBack<'a> {
    /// Reads the gates that the messages are for, once for all of them.
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

    /// What a message comes to: the opening of its gate by the oldest event that it waits for, if any.
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

/// The activation whose gate a message makes look back.
fn looks(message: &str) -> Option<ActId> {
    message.strip_prefix(LOOK)?.parse().ok().map(ActId)
}

/// Where the events of a namespace are told from; made before anything can be published there.
pub(crate) async fn ensure_cursor(instance: &Instance, ns: &Namespace) -> Result<()> {
    if cursor(&*instance.store, ns).await?.is_none() {
        let key = DocumentKey::new(CURSOR, EVENTS);
        let made = DocumentChange { key, expect: Expect::Absent, body: Some(json!(Told::default())), due: None };
        commit(instance, ns, vec![made], Vec::new(), Vec::new()).await?;
    }
    Ok(())
}

/// Whether a namespace was ever used: something was registered or published there.
pub(crate) async fn has_cursor(instance: &Instance, ns: &Namespace) -> Result<bool> {
    Ok(cursor(&*instance.store, ns).await?.is_some())
}

/// Has events of a namespace kept for at least so long.
pub(crate) async fn keep_events(instance: &Instance, ns: &Namespace, keep_ms: Millis) -> Result<()> {
    for _ in 0..KEEP_TRIES {
        let Some(cursor) = cursor(&*instance.store, ns).await? else { return Ok(()) };
        let told = Told::of(&cursor);
        if told.keep_ms >= keep_ms {
            return Ok(());
        }
        let (expect, body) = (Expect::Revision(cursor.revision), Some(json!(Told { keep_ms, ..told })));
        let change = DocumentChange { key: cursor.key, expect, body, due: None };
        if commit(instance, ns, vec![change], Vec::new(), Vec::new()).await?.is_some() {
            return Ok(());
        }
    }
    Err(EngineError::Conflict("events are published too fast to change how long they are kept; try again".to_owned()))
}

/// The namespaces that may have events, each with how long its gates need them.
pub(crate) async fn kept_events(store: &dyn Store) -> Result<Vec<(Namespace, Millis)>> {
    let cursors = cursors(store).await?;
    Ok(cursors.into_iter().map(|cursor| (cursor.ns.clone(), Told::of(&cursor).keep_ms)).collect())
}

fn the_cursor() -> DocumentFilter {
    DocumentFilter { kind: CURSOR.to_owned(), id: Some(EVENTS.to_owned()), ..DocumentFilter::default() }
}

async fn cursor(store: &dyn Store, ns: &Namespace) -> Result<Option<Document>> {
    Ok(store.documents(Some(ns), &the_cursor(), 1).await?.pop())
}

/// Of every namespace.
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

/// Whether it was carried out; not, if somebody else was there first.
async fn commit(
    instance: &Instance,
    ns: &Namespace,
    documents: Vec<DocumentChange>,
    messages: Vec<Message>,
    events: Vec<NewEvent>,
) -> Result<Option<Committed>> {
    let (ns, command) = (ns.clone(), instance.command());
    let commit = DocumentCommit { ns, command, documents, messages, events, drops: Vec::new() };
    let written = instance.store.commit(vec![Command::Documents(commit)], Vec::new()).await?;
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
