//! The stores under measurement.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use eddyline_engine::{ClaimTasks, StartRequest, TaskReport};
use eddyline_machine::{Data, Op};
use eddyline_store::{Embedded, Memory, Namespace, Offer, Options, Postgres, PostgresOptions, Store, StoreError};
use serde_json::json;
use tempfile::TempDir;

use crate::measure::written_bytes;
use crate::workloads::engine;

/// A store and its counters of writes.
pub struct Opened {
    pub name: &'static str,
    pub store: Arc<dyn Store>,
    embedded: Option<(Arc<Embedded>, TempDir)>,
}

impl Opened {
    pub fn memory() -> Opened {
        Opened { name: "memory", store: Arc::new(Memory::new()), embedded: None }
    }

    pub fn embedded() -> Result<Opened, StoreError> {
        let dir = tempfile::tempdir().map_err(|error| StoreError::Unavailable(error.to_string()))?;
        let store = Arc::new(Embedded::open(dir.path(), Options::default())?);
        Ok(Opened { name: "embedded", store: store.clone(), embedded: Some((store, dir)) })
    }

    /// What it writes is counted by its server.
    pub async fn postgres(url: &str) -> Result<Opened, StoreError> {
        let store = Postgres::open(url, PostgresOptions::default()).await?;
        Ok(Opened { name: "postgres", store: Arc::new(store), embedded: None })
    }

    /// Closes the store; returns its directory.
    pub fn close(self) -> Option<TempDir> {
        let (store, dir) = self.embedded?;
        drop((self.store, store));
        Some(dir)
    }

    /// Durable commits and bytes written so far.
    pub fn counts(&self) -> (u64, u64) {
        self.embedded.as_ref().map_or((0, 0), |(store, _)| {
            let stats = store.stats();
            (stats.commits, written_bytes())
        })
    }
}

/// Creates a closed store with one run half way through a chain.
pub async fn half_way(dir: &Path) -> Result<(), Box<dyn std::error::Error>> {
    let store = Arc::new(Embedded::open(dir, Options::default())?);
    leave_half_way(&Opened { name: "embedded", store, embedded: None }).await
}

/// Leaves one run half way through a chain: its rows are those of a hot transition.
pub async fn leave_half_way(opened: &Opened) -> Result<(), Box<dyn std::error::Error>> {
    let engine = engine(opened, "name: chain\nsteps: {s0: {}, s1: {after: [s0]}, s2: {after: [s1]}}").await;
    let ns = Namespace::default();
    let input = json!({"order": 1, "note": "a payload like those of every day"});
    engine.start_run(&ns, StartRequest { flow: "chain".to_owned(), input, ..StartRequest::default() }).await?;
    let claim = || ClaimTasks {
        worker: "w1".to_owned(),
        queues: vec!["default".to_owned()],
        offer: Arc::new(Offer::default()),
        max: 1,
        most_held: None,
        request: None,
        lease_ms: None,
    };
    let wait = Duration::from_secs(10);
    let mut tasks = engine.claim(&ns, claim(), wait).await?;
    if let Some(task) = tasks.pop() {
        let output = Data::from(json!({"ok": true, "step": task.activation}));
        let op = Op::Complete { output, emits: Vec::new(), logs: Vec::new() };
        let report = TaskReport { token: task.token, seq: Some(1), op };
        let (_, next) = engine.report_and_ask(&ns, vec![report], Some(claim())).await?;
        if let Some(next) = next {
            next.tasks(wait).await?;
        }
    }
    engine.shutdown().await;
    Ok(())
}
