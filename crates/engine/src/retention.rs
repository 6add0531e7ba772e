//! Deletes what is old enough: timelines first, headers and with them the run index later; each namespace by its own settings.

use eddyline_language::time;
use eddyline_machine::Millis;
use eddyline_store::{Change, Namespace, Page, RunFilter, Summary, Trim};

use crate::chore::Chore;
use crate::config::Retention as Keep;
use crate::error::Result;
use crate::events::kept_events;
use crate::instance::Instance;
use crate::namespaces::{NAMESPACE, namespace_settings};

/// Runs of a namespace that are trimmed in one round, of each kind.
const RUNS_A_ROUND: usize = 100;

/// How long a repeat of a command is told from a new one; whoever does not know what came of one asks at once.
const TRACES_MS: Millis = 24 * 60 * 60 * 1_000;

/// What is kept for a short time is looked at more often, though not more often than this.
const SHORTEST_PAUSE_MS: Millis = 500;

pub(crate) struct Retention(pub Instance);

/// What a round has done.
#[derive(Debug, Default)]
struct Trimmed {
    timelines: usize,
    headers: usize,
    /// There is more to do in some namespace.
    more: bool,
}

impl Retention {
    /// Trims some runs of a namespace, and its events.
    async fn trim(&self, ns: &Namespace, keep: Keep, look_back_ms: Millis, now: Millis) -> Result<Trimmed> {
        let store = &self.0.store;
        // A timeline goes with its run at the latest.
        let timelines = self.ended_before(ns, now - keep.timelines_ms.min(keep.runs_ms), false).await?;
        for summary in &timelines {
            while store.trim(&Trim::Timeline(summary.run)).await? {}
        }
        let headers = self.ended_before(ns, now - keep.runs_ms, true).await?;
        for summary in &headers {
            while store.trim(&Trim::Run(summary.run)).await? {}
        }
        // A gate may still look back at what is older.
        let events = Trim::Events { ns: ns.clone(), before: now - keep.events_ms.max(look_back_ms) };
        while store.trim(&events).await? {}
        let more = timelines.len() == RUNS_A_ROUND || headers.len() == RUNS_A_ROUND;
        Ok(Trimmed { timelines: timelines.len(), headers: headers.len(), more })
    }

    async fn ended_before(&self, ns: &Namespace, before: Millis, trimmed: bool) -> Result<Vec<Summary>> {
        let filter = RunFilter { ended_before: Some(before), trimmed: Some(trimmed), ..RunFilter::default() };
        Ok(self.0.store.runs(Some(ns), &filter, Page { after: None, limit: RUNS_A_ROUND }).await?)
    }
}

impl Chore for Retention {
    const NAME: &'static str = "retention";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let (store, server) = (&self.0.store, self.0.config.retention);
        let now = store.now().await?;
        if let Some(until) = store.deletion_waits().await? {
            // The store has said so when it was opened.
            tracing::debug!(instance = self.0.config.instance, until = %time::iso(until), "nothing is deleted yet");
            return Ok(Some(until - now));
        }
        let settings = namespace_settings(&self.0).await?;
        let (mut all, mut pause) = (Trimmed::default(), server.every_ms);
        // A namespace without a cursor of events has no flow, so no run.
        for (ns, look_back_ms) in kept_events(&**store).await? {
            let keep = settings.get(&ns).copied().unwrap_or_default().retention.over(server);
            let shortest = keep.timelines_ms.min(keep.runs_ms).min(keep.events_ms);
            pause = pause.min((shortest / 2).max(SHORTEST_PAUSE_MS));
            let trimmed = self.trim(&ns, keep, look_back_ms, now).await?;
            all.timelines += trimmed.timelines;
            all.headers += trimmed.headers;
            all.more |= trimmed.more;
        }
        while store.trim(&Trim::Traces { before: now - TRACES_MS }).await? {}
        if all.timelines + all.headers > 0 {
            metrics::counter!("eddyline_runs_trimmed_total").increment((all.timelines + all.headers) as u64);
            let Trimmed { timelines, headers, .. } = all;
            tracing::info!(instance = self.0.config.instance, timelines, headers, "trimmed");
        }
        Ok(Some(if all.more { 0 } else { pause }))
    }

    /// The settings of a namespace may have changed.
    fn wakes(change: &Change) -> bool {
        matches!(change, Change::Documents { kind, .. } if kind == NAMESPACE)
    }

    fn at_latest_ms(&self) -> Millis {
        self.0.config.retention.every_ms
    }
}
