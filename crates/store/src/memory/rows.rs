//! The rows of the memory store, and reads of them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use eddyline_machine::run::Run;
use eddyline_machine::{ActId, Data, Fence, Message, Millis, Numbered, RunId, Task, TimerKey, ValueId, Version};

use super::tasks::{Row, Tasks};
use super::unique::LineKey;
use crate::commit::{CommandId, Committed};
use crate::document::{Document, DocumentKey};
use crate::holds::{Holds, Item, next_in};
use crate::ids::Namespace;
use crate::query::*;

#[derive(Debug, Default)]
pub(super) struct Rows {
    pub runs: BTreeMap<RunId, KeptRun>,
    pub by_position: BTreeMap<u64, RunId>,
    /// Idempotency keys, by namespace and flow.
    pub keys: HashMap<(Namespace, String, String), (RunId, [u8; 32])>,
    /// Runs that have or wait for a unique key, in order.
    pub lines: BTreeMap<LineKey, Vec<RunId>>,
    pub line_of: HashMap<RunId, LineKey>,
    /// By (wall clock?, due).
    pub timers: BTreeSet<(bool, Millis, RunId, TimerKey)>,
    /// By the order in which they were sent.
    pub messages: BTreeMap<u64, (Namespace, Message)>,
    pub inboxes: BTreeMap<RunId, Inbox>,
    pub tokens: HashMap<String, (RunId, ActId)>,
    pub documents: BTreeMap<(Namespace, DocumentKey), Document>,
    pub document_commands: HashMap<CommandId, Committed>,
    pub revision: u64,
    pub events: BTreeMap<u64, (Namespace, FeedItem)>,
    /// The number of gates an event has opened, by its position.
    pub gates_opened: BTreeMap<u64, u64>,
    pub event_ids: HashMap<(Namespace, String), u64>,
    pub tasks: Tasks,
    pub holds: Holds,
    pub next_position: u64,
    pub next_message: u64,
    pub next_task: u64,
    pub next_gate: u64,
    pub next_event: u64,
    pub changes: Vec<Change>,
}

/// The messages to one run: their places in `Rows::messages`, in the order sent and by id.
#[derive(Debug, Default)]
pub(super) struct Inbox {
    pub places: BTreeSet<u64>,
    pub by_id: HashMap<String, u64>,
}

#[derive(Debug)]
pub(super) struct KeptRun {
    pub ns: Namespace,
    pub position: u64,
    pub rows: Run,
    /// The version that wrote each activation.
    pub written: Vec<Version>,
    pub records: Vec<Numbered>,
    pub values: BTreeMap<ValueId, Data>,
    pub timers: BTreeMap<TimerKey, TimerRow>,
    pub gates: BTreeMap<ActId, GateRow>,
    pub commands: BTreeMap<Version, (CommandId, Committed)>,
    pub key: Option<(String, String)>,
    pub created_at: Millis,
    pub started_at: Option<Millis>,
    pub ended_at: Option<Millis>,
    pub trimmed: bool,
}

impl KeptRun {
    pub fn summary(&self) -> Summary {
        Summary {
            ns: self.ns.clone(),
            run: self.rows.header.run,
            position: self.position,
            version: self.rows.header.version,
            records: self.records.len() as u64,
            created_at: self.created_at,
            started_at: self.started_at,
            ended_at: self.ended_at,
            trimmed: self.trimmed,
            header: self.rows.header.clone(),
        }
    }

    /// The run, of its activations only those that were written since a version.
    pub fn changed(&self, since: Version) -> Loaded {
        let mut rows = self.rows.clone();
        let mut written = self.written.iter();
        rows.activations.retain(|_| written.next().is_some_and(|written| *written > since));
        Loaded { summary: self.summary(), rows }
    }

    pub fn matches(&self, filter: &RunFilter) -> bool {
        let header = &self.rows.header;
        filter.flow.as_ref().is_none_or(|flow| *flow == header.flow)
            && (filter.status.is_empty() || filter.status.contains(&header.status()))
            && filter.tags.iter().all(|tag| header.tags.contains(tag))
            && filter.root.is_none_or(|root| header.root == Some(root))
            && filter.retry_of.is_none_or(|run| header.retry_of == Some(run))
            && filter.external_id.as_ref().is_none_or(|id| Some(id) == header.external_id.as_ref())
            && filter.since.is_none_or(|since| self.created_at >= since)
            && filter.until.is_none_or(|until| self.created_at < until)
            && filter.ended_before.is_none_or(|before| self.ended_at.is_some_and(|ended| ended < before))
            && filter.trimmed.is_none_or(|trimmed| trimmed == self.trimmed)
    }
}

impl Rows {
    pub fn going(&self) -> Vec<GoingRuns> {
        let mut counts: BTreeMap<_, u64> = BTreeMap::new();
        for kept in self.runs.values().filter(|kept| kept.ended_at.is_none()) {
            let header = &kept.rows.header;
            *counts.entry((kept.ns.clone(), header.flow.clone(), header.status())).or_default() += 1;
        }
        counts.into_iter().map(|((ns, flow, status), count)| GoingRuns { ns, flow, status, count }).collect()
    }

    pub fn event(&self, ns: &Namespace, id: &str) -> Option<EventState> {
        let position = *self.event_ids.get(&(ns.clone(), id.to_owned()))?;
        let (_, item) = self.events.get(&position)?;
        let Fed::Event { name, key, .. } = &item.what else { return None };
        let gates_opened = self.gates_opened.get(&position).copied().unwrap_or(0);
        Some(EventState { position, at: item.at, name: name.clone(), key: key.clone(), gates_opened })
    }

    pub fn pending(&self, run: RunId, now: Millis) -> PendingWork {
        let (messages, ..) = self.inbox(run);
        let Some(kept) = self.runs.get(&run) else {
            let place = self.inboxes.get(&run).and_then(|inbox| inbox.places.iter().next());
            let unstored_in = place.and_then(|place| self.messages.get(place)).map(|(ns, _)| ns.clone());
            return PendingWork { messages, unstored_in, ..PendingWork::default() };
        };
        let row = |(fence, row): (Fence, &Row)| TaskRow {
            task: Task::clone(&row.task),
            queued_at: row.queued_at,
            closed: row.closed,
            held: row.held.clone(),
            bound: self.tasks.bound(run, fence, now),
        };
        PendingWork {
            tasks: self.tasks.of(run).map(row).collect(),
            timers: kept.timers.values().copied().collect(),
            gates: kept.gates.values().cloned().collect(),
            messages,
            first_in_line: self.first_in_line(run),
            unstored_in: None,
        }
    }

    /// The oldest messages to a run, their size as JSON, and whether there are more.
    fn inbox(&self, run: RunId) -> (Vec<Message>, usize, bool) {
        let places = self.inboxes.get(&run).into_iter().flat_map(|inbox| &inbox.places);
        let (mut messages, mut bytes) = (Vec::new(), 0);
        for (_, message) in places.filter_map(|place| self.messages.get(place)) {
            let size = serde_json::to_string(&message.body).map_or(0, |text| text.len());
            let fits = messages.len() < MAX_INBOX && bytes + size <= MAX_INBOX_BYTES;
            if !messages.is_empty() && !fits {
                return (messages, bytes, true);
            }
            bytes += size;
            messages.push(message.clone());
        }
        (messages, bytes, false)
    }

    pub fn due_timers(&mut self, now: Millis, wall: Millis, skip: &[Namespace], limit: usize) -> DueBatch {
        let (mut items, mut next) = (Vec::new(), None);
        for (by_wall, clock) in [(false, now), (true, wall)] {
            for (is_wall, due, run, key) in &self.timers {
                let Some(kept) = self.runs.get(run) else { continue };
                if *is_wall != by_wall || (*due <= clock && skip.contains(&kept.ns)) {
                    continue;
                }
                if *due > clock || items.len() >= limit {
                    next = sooner(next, now + (due - clock).max(0));
                    break;
                }
                if self.holds.take(Item::Timer(*run, *key, *due), now) {
                    let timer = TimerRow { key: *key, due: *due, wall: by_wall };
                    items.push(DueItem::Timer { ns: kept.ns.clone(), run: *run, timer });
                }
            }
        }
        DueBatch { items, next_in: next_in(next, now, &self.holds) }
    }

    pub fn due_messages(&mut self, now: Millis, skip: &[Namespace], limit: usize) -> DueBatch {
        let (mut items, mut handed_out, mut more) = (Vec::new(), 0, false);
        let mut seen = BTreeSet::new();
        for (ns, message) in self.messages.values() {
            if skip.contains(ns) || !seen.insert(message.to) || self.holds.messages_held(message.to, now) {
                continue;
            }
            if items.len() >= limit || handed_out >= MAX_INBOX_BYTES {
                more = true;
                break;
            }
            let (messages, bytes, others) = self.inbox(message.to);
            more |= others;
            handed_out += bytes;
            self.holds.take_messages(message.to, &messages, now);
            items.push(DueItem::Messages { ns: ns.clone(), to: message.to, messages, bytes });
        }
        DueBatch { items, next_in: next_in(more.then_some(now), now, &self.holds) }
    }

    pub fn due_documents(&mut self, now: Millis, wall: Millis, skip: &[Namespace], limit: usize) -> DueBatch {
        let mut due: Vec<(Millis, &Document)> =
            self.documents.values().filter_map(|document| Some((document.due?, document))).collect();
        due.sort_by_key(|(at, _)| *at);
        let (mut items, mut next) = (Vec::new(), None);
        for (at, document) in due {
            if at <= wall && skip.contains(&document.ns) {
                continue;
            }
            if at > wall || items.len() >= limit {
                next = sooner(next, now + (at - wall).max(0));
                break;
            }
            let item = Item::Document(document.ns.clone(), document.key.clone(), document.revision);
            if self.holds.take(item, now) {
                items.push(DueItem::Document(document.clone()));
            }
        }
        DueBatch { items, next_in: next_in(next, now, &self.holds) }
    }

    pub fn gates(&self, ns: Option<&Namespace>, filter: &GateFilter, page: Page) -> Vec<GateRow> {
        let mut found: Vec<&GateRow> = match (&filter.token, filter.run) {
            (Some(token), _) => {
                let gate = self.tokens.get(token).and_then(|(run, at)| self.runs.get(run)?.gates.get(at));
                gate.into_iter().collect()
            }
            (None, Some(run)) => self.runs.get(&run).into_iter().flat_map(|kept| kept.gates.values()).collect(),
            (None, None) => self.runs.values().flat_map(|kept| kept.gates.values()).collect(),
        };
        let passed = |gate: &GateRow| page.after.is_some_and(|after| gate.position <= after);
        found.retain(|gate| ns.is_none_or(|ns| gate.ns == *ns) && gate.matches(filter) && !passed(gate));
        found.sort_by_key(|gate| gate.position);
        found.into_iter().take(page.limit.min(MAX_PAGE)).cloned().collect()
    }

    pub fn feed(&self, ns: &Namespace, feed: &Feed, page: Page) -> Vec<FeedItem> {
        let (from, limit) = (page.after.unwrap_or(0).saturating_add(1), page.limit.min(MAX_PAGE));
        match feed {
            Feed::Runs { flow } => {
                let runs = self.by_position.range(from..).filter_map(|(_, run)| self.runs.get(run));
                let of_flow = |kept: &&KeptRun| flow.as_ref().is_none_or(|flow| *flow == kept.rows.header.flow);
                let item = |kept: &KeptRun| FeedItem {
                    position: kept.position,
                    at: kept.created_at,
                    what: Fed::Run { run: kept.rows.header.run, flow: kept.rows.header.flow.clone() },
                };
                runs.filter(|kept| kept.ns == *ns).filter(of_flow).take(limit).map(item).collect()
            }
            Feed::Events { name, key, since } => {
                let wanted = |item: &FeedItem| match &item.what {
                    Fed::Event { name: of, key: by, .. } => {
                        name.as_ref().is_none_or(|name| name == of) && (key.is_none() || key == by)
                    }
                    Fed::Run { .. } => false,
                };
                let is_late = |item: &FeedItem| since.is_none_or(|since| item.at >= since);
                let events =
                    self.events.range(from..).filter(|(_, (of, item))| of == ns && is_late(item) && wanted(item));
                events.take(limit).map(|(_, (_, item))| item.clone()).collect()
            }
        }
    }
}

fn sooner(next: Option<Millis>, at: Millis) -> Option<Millis> {
    Some(next.map_or(at, |next| next.min(at)))
}
