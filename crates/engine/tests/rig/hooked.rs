//! A store with injected faults and hooks: it answers late, returns unknown outcomes, or runs code at the worst moment.
//! Everything else is forwarded.

#![allow(dead_code)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use eddyline_machine::{Data, Millis, Numbered, RunId, ValueId, Version};
use eddyline_store::*;
use futures_util::future::BoxFuture;
use tokio::sync::watch;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing was written, but the outcome is reported as unknown.
    UnknownBefore,
    /// The commit was written, but the outcome is reported as unknown.
    UnknownAfter,
    /// Nothing was written, and the store reports that it is unavailable.
    Unavailable,
}

pub type Tampering = Box<dyn Fn(&mut Found) + Send + Sync>;
type Fate = Box<dyn Fn(usize) -> Option<Fault> + Send + Sync>;

pub struct Hooked {
    pub inner: Arc<dyn Store>,
    /// The fault of the n-th commit.
    pub fate: Fate,
    pub commits: AtomicUsize,
    /// How often a run's summary was read.
    pub summaries: AtomicUsize,
    /// The most messages that one command had.
    pub most_messages: AtomicUsize,
    /// How often a run was read, except for its summary.
    pub reads: AtomicUsize,
    /// How often due messages were requested.
    pub message_polls: AtomicUsize,
    /// The namespaces whose events were read for delivery, in order.
    pub event_reads: Mutex<Vec<Namespace>>,
    /// Reads of a run's pending work and gates wait while this is false.
    pub pending_open: watch::Sender<bool>,
    /// Reads of events for delivery wait while this is false.
    pub events_open: watch::Sender<bool>,
    /// Commits wait while this is false.
    pub committing: watch::Sender<bool>,
    /// Reads of payloads fail while this is true.
    pub damaged: std::sync::atomic::AtomicBool,
    pub after_pending: Mutex<Option<BoxFuture<'static, ()>>>,
    /// Runs after the next load has read, before it returns.
    pub after_load: Mutex<Option<BoxFuture<'static, ()>>>,
    /// Changes the result of a load.
    pub tampering: Option<Tampering>,
    /// Loads of this run wait until the value changes.
    pub stuck: watch::Sender<Option<RunId>>,
    /// Overrides the note of the previous process.
    pub before: Option<Handling>,
    /// Called when due items are requested.
    pub on_due: Box<dyn Fn(Due) + Send + Sync>,
    /// Called when the note of handled runs is written.
    pub on_note: Box<dyn Fn() + Send + Sync>,
    /// Whoever has a turn at a run holds this. None if the store has no turns.
    pub turns: Option<Arc<tokio::sync::Mutex<()>>>,
    /// How many turns were given.
    pub turns_given: Arc<AtomicUsize>,
    /// How many bytes of payloads were read, in total and at most by one call.
    pub read: AtomicUsize,
    pub most_read: AtomicUsize,
}

impl std::fmt::Debug for Hooked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hooked").finish_non_exhaustive()
    }
}

impl Hooked {
    pub fn new(inner: Arc<dyn Store>) -> Hooked {
        Hooked {
            inner,
            fate: Box::new(|_| None),
            commits: AtomicUsize::new(0),
            summaries: AtomicUsize::new(0),
            most_messages: AtomicUsize::new(0),
            reads: AtomicUsize::new(0),
            message_polls: AtomicUsize::new(0),
            event_reads: Mutex::default(),
            pending_open: watch::Sender::new(true),
            events_open: watch::Sender::new(true),
            committing: watch::Sender::new(true),
            damaged: false.into(),
            after_pending: Mutex::new(None),
            after_load: Mutex::new(None),
            tampering: None,
            stuck: watch::Sender::new(None),
            before: None,
            on_due: Box::new(|_| {}),
            on_note: Box::new(|| {}),
            turns: None,
            turns_given: Arc::default(),
            read: AtomicUsize::new(0),
            most_read: AtomicUsize::new(0),
        }
    }
}

async fn open(gate: &watch::Sender<bool>) {
    let _ = gate.subscribe().wait_for(|open| *open).await;
}

#[async_trait]
impl Store for Hooked {
    async fn now(&self) -> Result<Millis> {
        self.inner.now().await
    }

    async fn turn(&self, _run: RunId) -> Option<Turn> {
        let turn = self.turns.clone()?.lock_owned().await;
        self.turns_given.fetch_add(1, Ordering::SeqCst);
        Some(Turn::new(turn))
    }

    async fn load(&self, run: RunId, since: Option<Version>) -> Result<Found> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        let _ = self.stuck.subscribe().wait_for(|stuck| *stuck != Some(run)).await;
        let mut found = self.inner.load(run, since).await?;
        if let Some(tamper) = &self.tampering {
            tamper(&mut found);
        }
        let then = self.after_load.lock().unwrap().take();
        if let Some(then) = then {
            then.await;
        }
        Ok(found)
    }

    async fn summary(&self, run: RunId) -> Result<Option<Summary>> {
        self.summaries.fetch_add(1, Ordering::SeqCst);
        self.inner.summary(run).await
    }

    async fn values(&self, run: RunId, ids: &[ValueId]) -> Result<Vec<(ValueId, Data)>> {
        if self.damaged.load(Ordering::SeqCst) {
            return Err(StoreError::Corrupt(format!("values: the checksum of {} of run {run} is wrong", ids[0])));
        }
        let found = self.inner.values(run, ids).await?;
        let bytes = found.iter().map(|(_, value)| value.own_bytes(1 << 30)).sum();
        self.read.fetch_add(bytes, Ordering::SeqCst);
        self.most_read.fetch_max(bytes, Ordering::SeqCst);
        Ok(found)
    }

    async fn pending(&self, run: RunId) -> Result<PendingWork> {
        self.reads.fetch_add(1, Ordering::SeqCst);
        open(&self.pending_open).await;
        let pending = self.inner.pending(run).await;
        let then = self.after_pending.lock().unwrap().take();
        if let Some(then) = then {
            then.await;
        }
        pending
    }

    async fn commit(&self, commands: Vec<Command>, claims: Vec<ClaimRequest>) -> Result<Written> {
        open(&self.committing).await;
        for command in &commands {
            let messages = match command {
                Command::Run(commit) => commit.messages.len(),
                Command::Documents(commit) => commit.messages.len(),
            };
            self.most_messages.fetch_max(messages, Ordering::SeqCst);
        }
        match (self.fate)(self.commits.fetch_add(1, Ordering::SeqCst)) {
            Some(Fault::UnknownBefore) => return Err(StoreError::Unknown),
            Some(Fault::Unavailable) => return Err(StoreError::Unavailable("injected fault".to_owned())),
            Some(Fault::UnknownAfter) => {
                self.inner.commit(commands, claims).await?;
                return Err(StoreError::Unknown);
            }
            None => {}
        }
        self.inner.commit(commands, claims).await
    }

    async fn extend(&self, ns: &Namespace, worker: Option<&str>, leases: &[Lease]) -> Result<Vec<Extended>> {
        self.inner.extend(ns, worker, leases).await
    }

    async fn leases(&self, ns: &Namespace, worker: Option<&str>, leases: &[Lease]) -> Result<Vec<LeaseState>> {
        self.inner.leases(ns, worker, leases).await
    }

    async fn due(&self, what: Due, skip: &[Namespace], limit: usize) -> Result<DueBatch> {
        if what == Due::Messages {
            self.message_polls.fetch_add(1, Ordering::SeqCst);
        }
        (self.on_due)(what);
        self.inner.due(what, skip, limit).await
    }

    async fn records(&self, run: RunId, after: u64, limit: usize) -> Result<Vec<Numbered>> {
        self.inner.records(run, after, limit).await
    }

    async fn logs(&self, run: RunId, activation: &str, after: u64, limit: usize) -> Result<Vec<Numbered>> {
        self.inner.logs(run, activation, after, limit).await
    }

    async fn runs(&self, ns: Option<&Namespace>, filter: &RunFilter, page: Page) -> Result<Vec<Summary>> {
        self.inner.runs(ns, filter, page).await
    }

    async fn count_runs(&self, ns: &Namespace, filter: &RunFilter) -> Result<u64> {
        self.inner.count_runs(ns, filter).await
    }

    async fn gates(&self, ns: Option<&Namespace>, filter: &GateFilter, page: Page) -> Result<Vec<GateRow>> {
        if filter.run.is_some() {
            self.reads.fetch_add(1, Ordering::SeqCst);
            open(&self.pending_open).await;
        }
        self.inner.gates(ns, filter, page).await
    }

    async fn documents(&self, ns: Option<&Namespace>, filter: &DocumentFilter, limit: usize) -> Result<Vec<Document>> {
        self.inner.documents(ns, filter, limit).await
    }

    async fn feed(&self, ns: &Namespace, feed: &Feed, page: Page) -> Result<Vec<FeedItem>> {
        if matches!(feed, Feed::Events { name: None, .. }) {
            open(&self.events_open).await;
            self.event_reads.lock().unwrap().push(ns.clone());
        }
        self.inner.feed(ns, feed, page).await
    }

    async fn going(&self) -> Result<Vec<GoingRuns>> {
        self.inner.going().await
    }

    async fn event(&self, ns: &Namespace, id: &str) -> Result<Option<EventState>> {
        self.inner.event(ns, id).await
    }

    async fn queues(&self, ns: &Namespace) -> Result<Vec<QueueState>> {
        self.inner.queues(ns).await
    }

    async fn limits(&self, ns: &Namespace) -> Result<Vec<LimitState>> {
        self.inner.limits(ns).await
    }

    async fn held_by(&self, ns: &Namespace, worker: &str) -> Result<usize> {
        self.inner.held_by(ns, worker).await
    }

    async fn backlog(&self, ns: &Namespace) -> Result<usize> {
        self.inner.backlog(ns).await
    }

    async fn trim(&self, what: &Trim) -> Result<bool> {
        self.inner.trim(what).await
    }

    fn note_handling(&self, handling: &Handling) {
        (self.on_note)();
        self.inner.note_handling(handling);
    }

    fn handled_before(&self) -> Handling {
        self.before.clone().unwrap_or_else(|| self.inner.handled_before())
    }

    fn watch(&self) -> Hints {
        self.inner.watch()
    }
}
