//! The registered workers of a namespace, and when they were last seen.
//!
//! Workers are stored as documents, so that every instance knows them. Heartbeats are kept in memory and written at
//! most three times per lease, since not each of them may cost a commit. Several instances write the document of a
//! worker: each reads it, changes its part and writes it only if nobody else did meanwhile.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use eddyline_language::definition::Problems;
use eddyline_machine::Millis;
use eddyline_store::{DocumentChange, DocumentFilter, DocumentKey, Expect, MAX_PAGE, Namespace, Offer};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::committer::Order;
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::worker_notices::{NOTICE, Notice};

const WORKER: &str = "worker";
/// The queue of flows and steps that name none.
const DEFAULT_QUEUE: &str = "default";
/// How often a change is retried while others write the worker's document.
const CHANGE_ATTEMPTS: usize = 20;
/// Workers that were silent for this long are deleted.
const FORGET_MS: Millis = 24 * 60 * 60 * 1_000;
/// The most cached workers.
const MAX_CACHED_WORKERS: usize = 100_000;

/// What a worker reports about itself when it registers.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WorkerSpec {
    pub queues: Vec<String>,
    pub offer: Offer,
    pub max_concurrent: Option<u32>,
    pub host: Option<String>,
    pub pid: Option<u32>,
}

/// A worker's counters, as last reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct WorkerCounts {
    pub tasks: u32,
    pub completed: u64,
    pub failed: u64,
}

/// The counters in a heartbeat. Those that are left out keep their value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WorkerSays {
    pub tasks: u32,
    pub completed: Option<u64>,
    pub failed: Option<u64>,
}

/// A code flow whose function a worker has.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct BroughtFlow {
    pub name: String,
    /// The definition that the worker sends. If it is empty, an existing flow is left unchanged.
    pub definition: Map<String, Value>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerRecord {
    pub id: String,
    pub spec: Arc<WorkerSpec>,
    pub started_at: Millis,
    pub seen_at: Millis,
    pub draining: bool,
    /// Its connection has ended, and it was not seen since.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub gone: bool,
    pub counts: WorkerCounts,
}

/// Selects workers.
#[derive(Debug, Clone, Default)]
pub struct WorkerFilter {
    pub queue: Option<String>,
    /// Any of these statuses; all if empty.
    pub status: Vec<WorkerStatus>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WorkerStatus {
    Online,
    Draining,
    Offline,
}

impl WorkerStatus {
    pub const ALL: [WorkerStatus; 3] = [WorkerStatus::Online, WorkerStatus::Draining, WorkerStatus::Offline];

    pub fn as_str(self) -> &'static str {
        match self {
            WorkerStatus::Online => "online",
            WorkerStatus::Draining => "draining",
            WorkerStatus::Offline => "offline",
        }
    }
}

/// The cache of workers that this instance has seen or read.
#[derive(Debug, Default)]
pub(crate) struct Workers {
    known: Mutex<HashMap<(Namespace, String), CachedWorker>>,
}

#[derive(Debug, Clone)]
struct CachedWorker {
    record: WorkerRecord,
    written_at: Millis,
}

impl Engine {
    /// Registers a worker. The same `instance` is the same worker, which stays draining if it was; without an instance,
    /// each call registers a new worker. Host and pid are not used to identify workers: in containers they are often
    /// equal.
    pub async fn register_worker(
        &self,
        ns: &Namespace,
        instance: Option<&str>,
        spec: WorkerSpec,
    ) -> Result<WorkerRecord> {
        let now = self.now().await?;
        // The id is visible to readers and must not reveal the instance.
        let id = instance.map_or_else(Uuid::new_v4, |instance| derived(&json!(["worker", ns.as_str(), instance])));
        let (id, spec) = (id.to_string(), Arc::new(spec));
        let registered = |before: Option<WorkerRecord>| {
            Some(WorkerRecord {
                id: id.clone(),
                spec: spec.clone(),
                started_at: before.as_ref().map_or(now, |before| before.started_at),
                seen_at: now,
                draining: before.as_ref().is_some_and(|before| before.draining),
                gone: false,
                counts: before.map_or_else(WorkerCounts::default, |before| before.counts),
            })
        };
        // An instance that has seen the worker before caches what it said then.
        let notices = if instance.is_some() { vec![Notice::Registered.about(&id)] } else { Vec::new() };
        let record = self.change_worker(ns, &id, notices, registered).await?.ok_or_else(|| unknown(&id))?;
        self.forget_silent(ns, now).await?;
        Ok(record)
    }

    /// Changes a worker as stored and writes it together with other documents, all or none. `change` may be called
    /// several times. Nothing is written if it returns none.
    async fn change_worker(
        &self,
        ns: &Namespace,
        id: &str,
        others: Vec<DocumentChange>,
        change: impl Fn(Option<WorkerRecord>) -> Option<WorkerRecord>,
    ) -> Result<Option<WorkerRecord>> {
        for _ in 0..CHANGE_ATTEMPTS {
            let stored = self.instance.document(Some(ns), WORKER, id).await?;
            let expect = stored.as_ref().map_or(Expect::Absent, |stored| Expect::Revision(stored.revision));
            let stored = stored.map(|stored| self.latest(ns, stored.body)).transpose()?;
            let Some(record) = change(stored) else { return Ok(None) };
            let key = DocumentKey::new(WORKER, id);
            let mut documents = vec![DocumentChange { key, expect, body: Some(json!(record)), due: None }];
            documents.extend(others.iter().cloned());
            if self.instance.put_all(ns, documents).await? {
                self.workers.keep(ns, CachedWorker { record: record.clone(), written_at: record.seen_at });
                return Ok(Some(record));
            }
        }
        Err(EngineError::Conflict(format!("the worker {id} is being changed by others; try again")))
    }

    /// Registers the code flows of a worker that serves these queues. A flow without a definition leaves an existing
    /// one unchanged, and a graph is never replaced. The problems of all flows are returned together.
    pub async fn bring_flows(&self, ns: &Namespace, queues: &[String], flows: Vec<BroughtFlow>) -> Result<()> {
        let mut to_register = Vec::new();
        for BroughtFlow { name, definition } in flows {
            match self.flow(ns, &name, None).await {
                Ok(_) if definition.is_empty() => continue,
                Ok(there) if there.flow.graph().is_some() => {
                    let message = format!("the flow {name} is a graph; a worker cannot replace it with a code flow");
                    return Err(EngineError::Conflict(message));
                }
                Ok(_) | Err(EngineError::NotFound { .. }) => to_register.push((name, definition)),
                Err(error) => return Err(error),
            }
        }
        let mut problems = Vec::new();
        for (name, mut definition) in to_register {
            definition.insert("code".to_owned(), json!(true));
            // A queue that the worker serves.
            if let [first, ..] = queues
                && !queues.iter().any(|queue| queue == DEFAULT_QUEUE)
            {
                definition.entry("queue").or_insert_with(|| json!(first));
            }
            match self.register(ns, Some(&name), &Value::Object(definition).to_string()).await {
                Ok(_) => {}
                Err(EngineError::Definition(of_flow)) => problems.extend(of_flow.0.into_iter().map(|mut problem| {
                    problem.path = format!("flows.{name}.{}", problem.path).trim_end_matches('.').to_owned();
                    problem
                })),
                Err(error) => return Err(error),
            }
        }
        if problems.is_empty() { Ok(()) } else { Err(EngineError::Definition(Problems(problems))) }
    }

    pub async fn worker(&self, ns: &Namespace, id: &str) -> Result<Option<WorkerRecord>> {
        if let Some(known) = self.workers.get(ns, id) {
            return Ok(Some(known.record));
        }
        let Some(document) = self.instance.document(Some(ns), WORKER, id).await? else { return Ok(None) };
        let record: WorkerRecord = serde_json::from_value(document.body).map_err(damaged)?;
        self.workers.keep(ns, CachedWorker { written_at: record.seen_at, record: record.clone() });
        Ok(Some(record))
    }

    /// Records a heartbeat. None if there is no such worker.
    pub async fn seen(&self, ns: &Namespace, id: &str, says: Option<WorkerSays>) -> Result<Option<WorkerRecord>> {
        let Some(mut record) = self.worker(ns, id).await? else { return Ok(None) };
        let was_gone = record.gone;
        record.seen_at = self.now().await?;
        if let Some(says) = says {
            let WorkerCounts { completed, failed, .. } = record.counts;
            record.counts = WorkerCounts {
                tasks: says.tasks,
                completed: says.completed.unwrap_or(completed),
                failed: says.failed.unwrap_or(failed),
            };
        }
        let Some((known, written_at)) = self.workers.note_seen(ns, record) else {
            // It was dropped from the cache meanwhile, perhaps because it was removed.
            return self.worker(ns, id).await;
        };
        record = known;
        if !was_gone && record.seen_at - written_at < self.instance.config.heartbeat_ms() {
            return Ok(Some(record));
        }
        // Keep what other instances changed meanwhile.
        let Some(document) = self.instance.document(Some(ns), WORKER, id).await? else {
            self.workers.forget(ns, id);
            return Ok(None);
        };
        let expect = Expect::Revision(document.revision);
        let stored: WorkerRecord = serde_json::from_value(document.body).map_err(damaged)?;
        let seen_at = record.seen_at.max(stored.seen_at);
        record = WorkerRecord { seen_at, counts: record.counts, gone: false, ..stored };
        if self.instance.put(ns, WORKER, id, expect, Some(json!(record))).await? {
            self.workers.note_written(ns, &record);
        } else {
            // Another instance wrote it just now. Read that; the next heartbeat is written.
            self.workers.forget(ns, id);
            return self.worker(ns, id).await;
        }
        Ok(Some(record))
    }

    /// The connection of a worker has ended: it counts as offline until it is seen again, even while its leases last.
    pub async fn worker_gone(&self, ns: &Namespace, id: &str) -> Result<()> {
        // The worker may be removed concurrently, and this must not create it again.
        self.change_worker(ns, id, Vec::new(), |worker| Some(WorkerRecord { gone: true, ..worker? })).await?;
        Ok(())
    }

    /// Drains a worker: it finishes its tasks and gets no more.
    pub async fn drain_worker(&self, ns: &Namespace, id: &str) -> Result<WorkerRecord> {
        let drained = |worker: Option<WorkerRecord>| Some(WorkerRecord { draining: true, ..worker? });
        let record =
            self.change_worker(ns, id, vec![Notice::Drained.about(id)], drained).await?.ok_or_else(|| unknown(id))?;
        self.dismiss(ns, id).await;
        Ok(record)
    }

    pub async fn remove_worker(&self, ns: &Namespace, id: &str) -> Result<()> {
        if self.instance.document(Some(ns), WORKER, id).await?.is_none() {
            return Err(unknown(id));
        }
        let key = DocumentKey::new(WORKER, id);
        let removed = DocumentChange { key, expect: Expect::Any, body: None, due: None };
        self.instance.put_all(ns, vec![removed, Notice::Removed.about(id)]).await?;
        self.workers.forget(ns, id);
        self.dismiss(ns, id).await;
        Ok(())
    }

    /// Answers the worker's waiting claims without tasks. A claim in a batch that is being written may still get some.
    async fn dismiss(&self, ns: &Namespace, id: &str) {
        self.drained.send_replace(());
        if let Err(error) = self.committing().ask(Order::Dismiss(ns.clone(), id.to_owned())).await {
            tracing::debug!("could not dismiss the worker's claims: {error}");
        }
    }

    /// Workers by id, after the given one, including heartbeats that this instance has not written yet.
    pub async fn list_workers(&self, ns: &Namespace, after: Option<String>, limit: usize) -> Result<Vec<WorkerRecord>> {
        let documents = self.instance.documents(ns, WORKER, after, limit).await?;
        documents.into_iter().map(|document| self.latest(ns, document.body)).collect()
    }

    /// The workers of all namespaces.
    pub(crate) async fn all_workers(&self) -> Result<Vec<(Namespace, WorkerRecord)>> {
        let (mut filter, mut all) =
            (DocumentFilter { kind: WORKER.to_owned(), ..DocumentFilter::default() }, Vec::new());
        loop {
            let page = self.instance.store.documents(None, &filter, MAX_PAGE).await?;
            let Some(last) = page.last() else { return Ok(all) };
            (filter.after, filter.after_ns) = (Some(last.key.id.clone()), Some(last.ns.clone()));
            for document in page {
                let record = self.latest(&document.ns, document.body)?;
                all.push((document.ns, record));
            }
        }
    }

    /// A worker as stored, or as cached if this instance has seen it later.
    fn latest(&self, ns: &Namespace, written: Value) -> Result<WorkerRecord> {
        let written: WorkerRecord = serde_json::from_value(written).map_err(damaged)?;
        let known = self.workers.get(ns, &written.id).map(|known| known.record);
        Ok(match known {
            // Only when it was seen and its counters may be newer here.
            Some(WorkerRecord { seen_at, counts, gone, .. }) if seen_at > written.seen_at => {
                WorkerRecord { seen_at, counts, gone, ..written }
            }
            _ => written,
        })
    }

    /// Workers that match a filter, by id, after the given one; and where the next page begins, if there may be more.
    pub async fn find_workers(
        &self,
        ns: &Namespace,
        filter: &WorkerFilter,
        mut after: Option<String>,
        limit: usize,
    ) -> Result<(Vec<WorkerRecord>, Option<String>)> {
        let (mut found, now) = (Vec::new(), self.now().await?);
        loop {
            let page = self.list_workers(ns, after.take(), MAX_PAGE).await?;
            let more = page.len() == MAX_PAGE;
            for record in page {
                after = Some(record.id.clone());
                if self.is_wanted(filter, &record, now) {
                    found.push(record);
                }
                if found.len() == limit {
                    return Ok((found, after));
                }
            }
            if !more {
                return Ok((found, None));
            }
        }
    }

    /// How many workers match a filter.
    pub async fn count_workers(&self, ns: &Namespace, filter: &WorkerFilter) -> Result<u64> {
        if filter.queue.is_none() && filter.status.is_empty() {
            return self.instance.count_documents(ns, WORKER).await;
        }
        Ok(self.find_workers(ns, filter, None, usize::MAX).await?.0.len() as u64)
    }

    fn is_wanted(&self, filter: &WorkerFilter, record: &WorkerRecord, now: Millis) -> bool {
        filter.queue.as_ref().is_none_or(|queue| record.spec.queues.contains(queue))
            && (filter.status.is_empty() || filter.status.contains(&self.worker_status(record, now)))
    }

    /// How many tasks a worker holds.
    pub async fn tasks_held(&self, ns: &Namespace, id: &str) -> Result<usize> {
        Ok(self.instance.store.held_by(ns, id).await?)
    }

    pub fn worker_status(&self, record: &WorkerRecord, now: Millis) -> WorkerStatus {
        if record.gone || now - record.seen_at > self.instance.config.offline_after_ms() {
            WorkerStatus::Offline
        } else if record.draining {
            WorkerStatus::Draining
        } else {
            WorkerStatus::Online
        }
    }

    /// Notified when a worker is drained or removed.
    pub fn drains(&self) -> tokio::sync::watch::Receiver<()> {
        self.drained.subscribe()
    }

    /// Deletes workers that went away without being removed, and old notes of workers that were.
    async fn forget_silent(&self, ns: &Namespace, now: Millis) -> Result<()> {
        if self.instance.store.deletion_waits().await?.is_some() {
            return Ok(());
        }
        for record in self.list_workers(ns, None, MAX_PAGE).await? {
            if now - record.seen_at > FORGET_MS {
                let key = DocumentKey::new(WORKER, record.id.as_str());
                let removed = DocumentChange { key, expect: Expect::Any, body: None, due: None };
                self.instance.put_all(ns, vec![removed, Notice::forget(&record.id)]).await?;
                self.workers.forget(ns, &record.id);
            }
        }
        for notice in self.instance.documents(ns, NOTICE, None, MAX_PAGE).await? {
            if now - notice.changed_at > FORGET_MS {
                self.instance.put_all(ns, vec![Notice::forget(&notice.key.id)]).await?;
            }
        }
        Ok(())
    }
}

impl Workers {
    fn get(&self, ns: &Namespace, id: &str) -> Option<CachedWorker> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).get(&(ns.clone(), id.to_owned())).cloned()
    }

    fn keep(&self, ns: &Namespace, known: CachedWorker) {
        let mut all = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() >= MAX_CACHED_WORKERS {
            all.clear();
        }
        all.insert((ns.clone(), known.record.id.clone()), known);
    }

    /// Updates only when a worker was seen and its counters, since others may have changed the rest of the record.
    /// Returns the cached record and when it was last written; None if the worker is not cached.
    fn note_seen(&self, ns: &Namespace, seen: WorkerRecord) -> Option<(WorkerRecord, Millis)> {
        let mut all = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let known = all.get_mut(&(ns.clone(), seen.id))?;
        known.record.seen_at = known.record.seen_at.max(seen.seen_at);
        known.record.counts = seen.counts;
        known.record.gone = false;
        Some((known.record.clone(), known.written_at))
    }

    /// A heartbeat was written to the store, with everything else as it was there.
    fn note_written(&self, ns: &Namespace, record: &WorkerRecord) {
        let mut all = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = all.get_mut(&(ns.clone(), record.id.clone())) {
            (known.record.spec, known.record.draining) = (record.spec.clone(), record.draining);
            known.written_at = known.written_at.max(record.seen_at);
        }
    }

    pub fn forget(&self, ns: &Namespace, id: &str) {
        self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(&(ns.clone(), id.to_owned()));
    }
}

/// Derives an id from a value: equal values give equal ids.
pub(crate) fn derived(of: &Value) -> Uuid {
    let hash = Sha256::digest(of.to_string());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}

fn unknown(id: &str) -> EngineError {
    EngineError::NotFound { what: "worker", id: id.chars().take(120).collect() }
}

fn damaged(error: serde_json::Error) -> EngineError {
    EngineError::Bug(format!("a worker's document is damaged: {error}"))
}
