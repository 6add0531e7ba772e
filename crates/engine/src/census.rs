//! Counts of queues, workers and unfinished runs for metrics, refreshed every few seconds at most.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use eddyline_machine::Millis;
use eddyline_store::{GoingRuns, Namespace, QueueState};
use tokio::sync::Mutex;
use tokio::time::Instant;

use crate::engine::Engine;
use crate::error::Result;
use crate::events::kept_events;
use crate::workers::WorkerStatus;

/// How long a census is valid.
const FRESH: Duration = Duration::from_secs(5);
/// Counting takes at most 1/20 of the time.
const SHARE: u32 = 20;

/// Counts at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Census {
    /// By the store's clock.
    pub at: Millis,
    pub queues: Vec<(Namespace, QueueState)>,
    pub workers: BTreeMap<(Namespace, WorkerStatus), u64>,
    /// Runs that have not ended.
    pub runs: Vec<GoingRuns>,
}

/// The last census, and until when it is valid.
#[derive(Debug, Default)]
pub(crate) struct LastCensus(Mutex<Option<(Instant, Arc<Census>)>>);

impl Engine {
    /// Counts over all namespaces, at most 5 seconds old, or older if counting takes long.
    pub async fn census(&self) -> Result<Arc<Census>> {
        let mut last = self.measures().census.0.lock().await;
        if let Some((until, census)) = &*last
            && Instant::now() < *until
        {
            return Ok(census.clone());
        }
        let began = Instant::now();
        let census = Arc::new(self.take_census().await?);
        *last = Some((Instant::now() + FRESH.max(began.elapsed() * SHARE), census.clone()));
        Ok(census)
    }

    async fn take_census(&self) -> Result<Census> {
        let store = &self.instance.store;
        let at = store.now().await?;
        let mut queues = Vec::new();
        for (ns, _) in kept_events(&**store).await? {
            queues.extend(store.queues(&ns).await?.into_iter().map(|queue| (ns.clone(), queue)));
        }
        let mut workers = BTreeMap::new();
        for (ns, record) in self.all_workers().await? {
            *workers.entry((ns, self.worker_status(&record, at))).or_default() += 1;
        }
        Ok(Census { at, queues, workers, runs: store.going().await? })
    }
}
