//! The suite against one database that is used through several handles in turn, as several processes would: nothing may
//! depend on what a process remembers.
//!
//! Three by default: a call that follows one by the same handle, and one that follows two by others, are both common.
//! `EDDYLINE_TEST_HANDLES` sets another number.

#![allow(clippy::unwrap_used, clippy::expect_used)]

#[path = "postgres/server.rs"]
mod server;

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use eddyline_machine::{Data, Millis, Numbered, RunId, ValueId, Version};
use eddyline_store::conformance::Backend;
use eddyline_store::*;

/// Every call goes to the next handle. Hints are heard at the first.
#[derive(Debug)]
struct InTurn {
    handles: Vec<Postgres>,
    calls: AtomicUsize,
}

impl InTurn {
    fn next(&self) -> &Postgres {
        &self.handles[self.calls.fetch_add(1, Ordering::Relaxed) % self.handles.len()]
    }
}

#[async_trait]
impl Store for InTurn {
    async fn now(&self) -> Result<Millis> {
        self.next().now().await
    }

    async fn load(&self, run: RunId, since: Option<Version>) -> Result<Found> {
        self.next().load(run, since).await
    }

    async fn summary(&self, run: RunId) -> Result<Option<Summary>> {
        self.next().summary(run).await
    }

    async fn values(&self, run: RunId, ids: &[ValueId]) -> Result<Vec<(ValueId, Data)>> {
        self.next().values(run, ids).await
    }

    async fn pending(&self, run: RunId) -> Result<PendingWork> {
        self.next().pending(run).await
    }

    async fn commit(&self, commands: Vec<Command>, claims: Vec<ClaimRequest>) -> Result<Written> {
        self.next().commit(commands, claims).await
    }

    async fn extend(&self, ns: &Namespace, worker: Option<&str>, leases: &[Lease]) -> Result<Vec<Extended>> {
        self.next().extend(ns, worker, leases).await
    }

    async fn leases(&self, ns: &Namespace, worker: Option<&str>, leases: &[Lease]) -> Result<Vec<LeaseState>> {
        self.next().leases(ns, worker, leases).await
    }

    async fn due(&self, what: Due, skip: &[Namespace], limit: usize) -> Result<DueBatch> {
        self.next().due(what, skip, limit).await
    }

    async fn records(&self, run: RunId, after: u64, limit: usize) -> Result<Vec<Numbered>> {
        self.next().records(run, after, limit).await
    }

    async fn logs(&self, run: RunId, activation: &str, after: u64, limit: usize) -> Result<Vec<Numbered>> {
        self.next().logs(run, activation, after, limit).await
    }

    async fn runs(&self, ns: Option<&Namespace>, filter: &RunFilter, page: Page) -> Result<Vec<Summary>> {
        self.next().runs(ns, filter, page).await
    }

    async fn count_runs(&self, ns: &Namespace, filter: &RunFilter) -> Result<u64> {
        self.next().count_runs(ns, filter).await
    }

    async fn going(&self) -> Result<Vec<GoingRuns>> {
        self.next().going().await
    }

    async fn gates(&self, ns: Option<&Namespace>, filter: &GateFilter, page: Page) -> Result<Vec<GateRow>> {
        self.next().gates(ns, filter, page).await
    }

    async fn documents(&self, ns: Option<&Namespace>, filter: &DocumentFilter, limit: usize) -> Result<Vec<Document>> {
        self.next().documents(ns, filter, limit).await
    }

    async fn feed(&self, ns: &Namespace, feed: &Feed, page: Page) -> Result<Vec<FeedItem>> {
        self.next().feed(ns, feed, page).await
    }

    async fn event(&self, ns: &Namespace, id: &str) -> Result<Option<EventState>> {
        self.next().event(ns, id).await
    }

    async fn queues(&self, ns: &Namespace) -> Result<Vec<QueueState>> {
        self.next().queues(ns).await
    }

    async fn limits(&self, ns: &Namespace) -> Result<Vec<LimitState>> {
        self.next().limits(ns).await
    }

    async fn held_by(&self, ns: &Namespace, worker: &str) -> Result<usize> {
        self.next().held_by(ns, worker).await
    }

    async fn backlog(&self, ns: &Namespace) -> Result<usize> {
        self.next().backlog(ns).await
    }

    async fn trim(&self, what: &Trim) -> Result<bool> {
        self.next().trim(what).await
    }

    fn watch(&self) -> Hints {
        self.handles[0].watch()
    }
}

#[derive(Default)]
struct SeveralHandles {
    urls: Mutex<HashMap<usize, String>>,
    /// All that were made and not deleted.
    made: Mutex<Vec<String>>,
}

fn address(store: &Arc<dyn Store>) -> usize {
    Arc::as_ptr(store).cast::<()>() as usize
}

impl SeveralHandles {
    async fn open_at(&self, url: String, clock: Arc<ManualClock>) -> Arc<dyn Store> {
        let options = PostgresOptions { clock: Some(clock), ..PostgresOptions::default() };
        let count = std::env::var("EDDYLINE_TEST_HANDLES").map_or(3, |count| count.parse().unwrap());
        let mut handles = Vec::new();
        for _ in 0..count {
            handles.push(Postgres::open(&url, options.clone()).await.unwrap());
        }
        let store: Arc<dyn Store> = Arc::new(InTurn { handles, calls: AtomicUsize::new(0) });
        self.urls.lock().unwrap().insert(address(&store), url);
        store
    }
}

impl Drop for SeveralHandles {
    fn drop(&mut self) {
        server::drop_schemas_now(std::mem::take(&mut *self.made.lock().unwrap()));
    }
}

#[async_trait]
impl Backend for SeveralHandles {
    async fn open(&self, clock: Arc<ManualClock>) -> Arc<dyn Store> {
        // Histories come one after the other, each with a store of its own.
        let old = std::mem::take(&mut *self.made.lock().unwrap());
        if !old.is_empty() {
            server::drop_schemas(old).await;
        }
        let url = server::fresh_url();
        self.made.lock().unwrap().push(url.clone());
        self.open_at(url, clock).await
    }

    async fn reopen(&self, store: Arc<dyn Store>, clock: Arc<ManualClock>) -> Option<Arc<dyn Store>> {
        let url = self.urls.lock().unwrap().remove(&address(&store)).unwrap();
        drop(store);
        Some(self.open_at(url, clock).await)
    }

    fn keeps_leases(&self) -> bool {
        true
    }
}

eddyline_store::conformance_tests!(SeveralHandles::default());
