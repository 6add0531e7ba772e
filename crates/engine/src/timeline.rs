//! Reads timelines in pages, and waits for new records.

use std::time::Duration;

use eddyline_machine::wire::reference;
use eddyline_machine::{ActId, Body, Data, Millis, Numbered, RunId, ValueId};
use eddyline_store::{Fed, Feed, Namespace, Page, Summary};
use serde_json::Value;

use crate::engine::Engine;
use crate::error::{EngineError, Result};

/// How often a waiting reader polls the store, even without a hint.
const LOOK_AGAIN: Duration = Duration::from_secs(2);

/// A stored payload.
#[derive(Debug, Clone, PartialEq)]
pub enum Stored {
    Whole(Value),
    /// An aggregate that is too large to be shown as a whole; its elements can be shown.
    Parts(Data),
}

/// A part of a run's timeline, with facts about the run that its records do not contain.
#[derive(Debug, Clone)]
pub struct Timeline {
    pub flow: String,
    /// See [`Engine::run_queue`].
    pub queue: Option<String>,
    pub tags: Vec<String>,
    /// When the run started, or was created if it has not started.
    pub started_at: Millis,
    pub records: Vec<Numbered>,
}

impl Engine {
    /// Records with numbers above `after`; if there are none, waits up to `wait` for new ones.
    pub async fn timeline(
        &self,
        ns: &Namespace,
        run: RunId,
        after: u64,
        limit: usize,
        wait: Duration,
    ) -> Result<Timeline> {
        self.read_timeline(ns, run, None, after, limit, wait).await
    }

    /// The same for the logs of one activation.
    pub async fn logs(
        &self,
        ns: &Namespace,
        run: RunId,
        activation: &str,
        after: u64,
        limit: usize,
        wait: Duration,
    ) -> Result<Timeline> {
        self.read_timeline(ns, run, Some(activation), after, limit, wait).await
    }

    async fn read_timeline(
        &self,
        ns: &Namespace,
        run: RunId,
        logs_of: Option<&str>,
        after: u64,
        limit: usize,
        wait: Duration,
    ) -> Result<Timeline> {
        let until = tokio::time::Instant::now() + wait;
        loop {
            let notify = self.bus.listen(run);
            let notified = notify.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            let summary = self.summary(ns, run).await?;
            if summary.trimmed {
                return Err(EngineError::Trimmed(run));
            }
            let records = match logs_of {
                Some(activation) => self.instance.store.logs(run, activation, after, limit).await?,
                None => self.instance.store.records(run, after, limit).await?,
            };
            let now = tokio::time::Instant::now();
            if !records.is_empty() || now >= until || summary.ended_at.is_some() || self.stopping.is_now() {
                // The run may have started after its summary was read.
                let summary = match summary.started_at.is_none() && !records.is_empty() {
                    true => self.summary(ns, run).await?,
                    false => summary,
                };
                let queue = self.run_queue(ns, &summary).await?;
                let started_at = summary.started_at.unwrap_or(summary.created_at);
                let header = summary.header;
                return Ok(Timeline { flow: header.flow, queue, tags: header.tags, started_at, records });
            }
            let _ = tokio::time::timeout(LOOK_AGAIN.min(until - now), notified).await;
        }
    }

    /// The queue that a run was started with, or else that of the function of a code flow. The steps of a graph each
    /// have their own.
    pub async fn run_queue(&self, ns: &Namespace, summary: &Summary) -> Result<Option<String>> {
        let header = &summary.header;
        if header.queue.is_some() {
            return Ok(header.queue.clone());
        }
        let flow = self.flow(ns, &header.flow, Some(&header.flow_version)).await?;
        Ok(match &flow.flow.body {
            Body::Code(code) => Some(code.queue.clone()),
            Body::Graph(_) => None,
        })
    }

    /// A payload as JSON, if it is still stored and has at most `limit` bytes.
    pub async fn small_payload(&self, run: RunId, data: &Data, limit: usize) -> Result<Option<Value>> {
        if data.bytes(limit + 1) > limit {
            return Ok(None);
        }
        match self.payload(run, data).await {
            Ok(value) => Ok(Some(value)),
            Err(EngineError::Trimmed(_)) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A payload as JSON; if it exceeds [`Config::max_shown_bytes`](crate::Config::max_shown_bytes), a reference to it
    /// or references to its elements.
    pub(crate) async fn shown(&self, run: RunId, data: &Data) -> Result<Value> {
        let most = self.config().max_shown_bytes();
        match data.bytes(most + 1) > most {
            true => Ok(reference(run, data)),
            false => self.payload(run, data).await,
        }
    }

    /// A stored payload, by the key in references to it.
    pub async fn value(&self, ns: &Namespace, run: RunId, key: &str) -> Result<Stored> {
        if self.summary(ns, run).await?.trimmed {
            return Err(EngineError::Trimmed(run));
        }
        let unknown = || EngineError::NotFound { what: "value", id: key.chars().take(120).collect() };
        let id = key.parse().map(ValueId).map_err(|_| unknown())?;
        let (_, data) = self.instance.store.values(run, &[id]).await?.pop().ok_or_else(unknown)?;
        let most = self.config().max_shown_bytes();
        // A payload stored in one piece is already in memory; it may be larger if the limit was higher when it was
        // written.
        match !matches!(data, Data::Json(_)) && data.bytes(most + 1) > most {
            true => Ok(Stored::Parts(data)),
            false => Ok(Stored::Whole(self.payload(run, &data).await?)),
        }
    }

    /// A page of the runs of a flow in the order of creation.
    pub async fn run_feed(&self, ns: &Namespace, flow: &str, page: Page) -> Result<Vec<Summary>> {
        let feed = Feed::Runs { flow: Some(flow.to_owned()) };
        let mut runs = Vec::new();
        for item in self.instance.store.feed(ns, &feed, page).await? {
            let Fed::Run { run, .. } = item.what else { continue };
            runs.extend(self.instance.store.summary(run).await?);
        }
        Ok(runs)
    }

    /// The public names of activations, or their numbers if the run is no longer kept.
    pub async fn activation_names(&self, ns: &Namespace, run: RunId, activations: &[ActId]) -> Result<Vec<String>> {
        let whole = match self.whole(ns, run).await {
            Ok((flow, rows, _)) => Some((flow, rows)),
            Err(EngineError::Trimmed(_) | EngineError::NotFound { .. }) => None,
            Err(error) => return Err(error),
        };
        let name = |id: &ActId| match &whole {
            Some((flow, rows)) if (id.0 as usize) < rows.activations.len() => rows.activation_name(&flow.flow, *id),
            _ => id.to_string(),
        };
        Ok(activations.iter().map(name).collect())
    }

    /// A run's header, trimmed or not.
    pub async fn header(&self, ns: &Namespace, run: RunId) -> Result<Summary> {
        self.summary(ns, run).await
    }
}
