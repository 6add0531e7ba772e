//! The reference store: everything in memory, one lock, no indexes. Tests compare the other backends with it.

mod copy;
mod leases;
mod rates;
mod rows;
pub(crate) mod tasks;
pub(crate) mod test_clock;
mod unique;
mod write;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use eddyline_machine::{Data, Millis, Numbered, RunId, ValueId, Version};

use crate::claim::{ClaimRequest, Extended, Lease, LeaseState};
use crate::clock::{Clock, StoreTime, SystemClock};
use crate::commit::Command;
use crate::document::Document;
use crate::error::Result;
use crate::hints::{Hints, Teller};
use crate::holds::{Item, next_in};
use crate::ids::Namespace;
use crate::query::*;
use crate::{Store, Written};
use rows::Rows;

/// A store in the memory of its process.
#[derive(Debug)]
pub struct Memory {
    rows: Mutex<Rows>,
    time: StoreTime,
    hints: Teller,
}

impl Memory {
    pub fn new() -> Memory {
        Memory::with_clock(Arc::new(SystemClock::default()))
    }

    pub fn with_clock(clock: Arc<dyn Clock>) -> Memory {
        let (time, mut rows) = (StoreTime::open(clock, 0), Rows::default());
        rows.tasks.opened(time.now());
        Memory { rows: Mutex::new(rows), time, hints: Teller::default() }
    }

    fn rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Memory {
    fn default() -> Memory {
        Memory::new()
    }
}

#[async_trait]
impl Store for Memory {
    async fn now(&self) -> Result<Millis> {
        Ok(self.time.now())
    }

    async fn load(&self, run: RunId, since: Option<Version>) -> Result<Found> {
        let rows = self.rows();
        Ok(match rows.runs.get(&run) {
            None => Found::Nothing,
            Some(kept) if kept.trimmed => Found::Trimmed(Box::new(kept.summary())),
            Some(kept) if since == Some(kept.rows.header.version) => Found::Same,
            Some(kept) => match since.filter(|since| (Version(1)..kept.rows.header.version).contains(since)) {
                Some(since) => Found::Changed(Box::new(kept.changed(since))),
                None => Found::Run(Box::new(Loaded { summary: kept.summary(), rows: kept.rows.clone() })),
            },
        })
    }

    async fn summary(&self, run: RunId) -> Result<Option<Summary>> {
        Ok(self.rows().runs.get(&run).map(|kept| kept.summary()))
    }

    async fn values(&self, run: RunId, ids: &[ValueId]) -> Result<Vec<(ValueId, Data)>> {
        let rows = self.rows();
        let Some(kept) = rows.runs.get(&run) else { return Ok(Vec::new()) };
        Ok(ids.iter().filter_map(|id| kept.values.get(id).map(|value| (*id, value.clone()))).collect())
    }

    async fn pending(&self, run: RunId) -> Result<PendingWork> {
        Ok(self.rows().pending(run, self.time.now()))
    }

    async fn commit(&self, commands: Vec<Command>, claims: Vec<ClaimRequest>) -> Result<Written> {
        let mut rows = self.rows();
        let now = self.time.now();
        let commands = commands.into_iter().map(|command| rows.carry_out(command, now)).collect();
        let claims = claims.iter().map(|request| rows.claim(request, now)).collect();
        let changes = rows.take_changes(now);
        drop(rows);
        self.hints.tell(changes);
        Ok(Written { commands, claims })
    }

    async fn extend(&self, ns: &Namespace, worker: Option<&str>, leases: &[Lease]) -> Result<Vec<Extended>> {
        let mut rows = self.rows();
        let now = self.time.now();
        Ok(leases.iter().map(|lease| rows.tasks.extend(ns, worker, *lease, now)).collect())
    }

    async fn leases(&self, ns: &Namespace, worker: Option<&str>, leases: &[Lease]) -> Result<Vec<LeaseState>> {
        let rows = self.rows();
        Ok(leases.iter().map(|lease| rows.tasks.lease(ns, worker, *lease)).collect())
    }

    async fn due(&self, what: Due, skip: &[Namespace], limit: usize) -> Result<DueBatch> {
        let rows = &mut *self.rows();
        let (now, wall) = (self.time.now(), self.time.wall());
        rows.holds.expire(now);
        Ok(match what {
            Due::Timers => rows.due_timers(now, wall, skip, limit),
            Due::Messages => rows.due_messages(now, skip, limit),
            Due::Leases => rows.due_leases(now, skip, limit),
            Due::Documents => rows.due_documents(now, wall, skip, limit),
        })
    }

    async fn records(&self, run: RunId, after: u64, limit: usize) -> Result<Vec<Numbered>> {
        let rows = self.rows();
        let Some(kept) = rows.runs.get(&run) else { return Ok(Vec::new()) };
        Ok(kept.records.iter().skip(after as usize).take(limit.min(MAX_PAGE)).cloned().collect())
    }

    async fn logs(&self, run: RunId, activation: &str, after: u64, limit: usize) -> Result<Vec<Numbered>> {
        let rows = self.rows();
        let Some(kept) = rows.runs.get(&run) else { return Ok(Vec::new()) };
        let logs = kept.records.iter().skip(after as usize).filter(|record| record.record.is_log_of(activation));
        Ok(logs.take(limit.min(MAX_PAGE)).cloned().collect())
    }

    async fn runs(&self, ns: Option<&Namespace>, filter: &RunFilter, page: Page) -> Result<Vec<Summary>> {
        let rows = self.rows();
        let before = page.after.unwrap_or(u64::MAX);
        let newest_first = rows.by_position.range(..before).rev().filter_map(|(_, run)| rows.runs.get(run));
        let found = newest_first.filter(|kept| ns.is_none_or(|ns| *ns == kept.ns) && kept.matches(filter));
        Ok(found.take(page.limit.min(MAX_PAGE)).map(|kept| kept.summary()).collect())
    }

    async fn count_runs(&self, ns: &Namespace, filter: &RunFilter) -> Result<u64> {
        let rows = self.rows();
        Ok(rows.runs.values().filter(|kept| kept.ns == *ns && kept.matches(filter)).count() as u64)
    }

    async fn gates(&self, ns: Option<&Namespace>, filter: &GateFilter, page: Page) -> Result<Vec<GateRow>> {
        Ok(self.rows().gates(ns, filter, page))
    }

    async fn documents(&self, ns: Option<&Namespace>, filter: &DocumentFilter, limit: usize) -> Result<Vec<Document>> {
        let rows = self.rows();
        let wanted = |document: &&Document| {
            let id = &document.key.id;
            ns.is_none_or(|ns| *ns == document.ns)
                && document.key.kind == filter.kind
                && filter.id.as_ref().is_none_or(|wanted| wanted == id)
                && filter.prefix.as_ref().is_none_or(|prefix| id.starts_with(prefix.as_str()))
                && filter.is_after(id, &document.ns)
        };
        let mut found: Vec<Document> = rows.documents.values().filter(wanted).cloned().collect();
        found.sort_by(|a, b| (&a.key.id, &a.ns).cmp(&(&b.key.id, &b.ns)));
        found.truncate(limit.min(MAX_PAGE));
        Ok(found)
    }

    async fn feed(&self, ns: &Namespace, feed: &Feed, page: Page) -> Result<Vec<FeedItem>> {
        Ok(self.rows().feed(ns, feed, page))
    }

    async fn going(&self) -> Result<Vec<GoingRuns>> {
        Ok(self.rows().going())
    }

    async fn event(&self, ns: &Namespace, id: &str) -> Result<Option<EventState>> {
        Ok(self.rows().event(ns, id))
    }

    async fn queues(&self, ns: &Namespace) -> Result<Vec<QueueState>> {
        Ok(self.rows().tasks.states(ns))
    }

    async fn limits(&self, ns: &Namespace) -> Result<Vec<LimitState>> {
        Ok(self.rows().tasks.closed_limits(ns, self.time.now()))
    }

    async fn held_by(&self, ns: &Namespace, worker: &str) -> Result<usize> {
        Ok(self.rows().tasks.held_by(ns, worker))
    }

    async fn backlog(&self, ns: &Namespace) -> Result<usize> {
        Ok(self.rows().tasks.ready(ns))
    }

    async fn trim(&self, what: &Trim) -> Result<bool> {
        self.rows().trim(what);
        Ok(false)
    }

    fn watch(&self) -> Hints {
        self.hints.listen()
    }
}

impl Rows {
    fn due_leases(&mut self, now: Millis, skip: &[Namespace], limit: usize) -> DueBatch {
        let holds = &mut self.holds;
        let items = self.tasks.time_up(now, skip, limit, |run, fence| holds.take(Item::Lease(run, fence), now));
        // Expired tasks that are not in `items` are held by another caller, unless `limit` cut them off.
        let next = if items.len() >= limit { Some(now) } else { self.tasks.next_expiry(now) };
        DueBatch { items, next_in: next_in(next, now, &self.holds) }
    }
}
