//! Deletes old data by the retention of each namespace: first timelines, later headers with the run index, and events.

use eddyline_language::time;
use eddyline_machine::Millis;
use eddyline_store::{Change, Namespace, Page, RunFilter, Summary, Trim};
use serde_json::Value;

use crate::chore::Chore;
use crate::config::Retention as Keep;
use crate::error::Result;
use crate::events::kept_events;
use crate::instance::Instance;
use crate::namespaces::{NAMESPACE, namespace_settings};
use crate::one_at_a_time::Round;

/// The most timelines, and the most headers, that are deleted per namespace and round.
const RUNS_A_ROUND: usize = 100;

/// How long repeated commands are recognised. A caller that does not know the outcome of a command repeats it soon.
const TRACES_MS: Millis = 24 * 60 * 60 * 1_000;

/// Short retentions are checked more often, but never more often than this.
const SHORTEST_PAUSE_MS: Millis = 500;

pub(crate) struct RetentionLoop(pub Instance);

/// The result of a round.
#[derive(Debug, Default)]
struct Trimmed {
    timelines: usize,
    headers: usize,
    /// Some namespace has more to delete.
    more: bool,
}

impl RetentionLoop {
    /// Trims some runs of a namespace, and its events.
    async fn trim(&self, ns: &Namespace, keep: Keep, look_back_ms: Millis, now: Millis) -> Result<Trimmed> {
        let store = &self.0.store;
        // A timeline is never kept longer than its run.
        let timelines = self.ended_before(ns, now - keep.timelines_ms.min(keep.runs_ms), false).await?;
        for summary in &timelines {
            while store.trim(&Trim::Timeline(summary.run)).await? {}
        }
        let headers = self.ended_before(ns, now - keep.runs_ms, true).await?;
        for summary in &headers {
            while store.trim(&Trim::Run(summary.run)).await? {}
        }
        // Gates may look back further than the retention of events.
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

impl Chore for RetentionLoop {
    const NAME: &'static str = "retention";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let (store, server) = (&self.0.store, self.0.config.retention);
        if let Round::DueIn(ms) = self.0.take_round(Self::NAME, server.every_ms).await? {
            return Ok(Some(ms));
        }
        let now = store.now().await?;
        if let Some(until) = store.deletion_waits().await? {
            tracing::warn!(
                instance = self.0.config.instance,
                until = %time::iso(until),
                "the store's clock has jumped: nothing is deleted by age until then"
            );
            return Ok(Some(until - now));
        }
        let settings = namespace_settings(&self.0).await?;
        let (mut all, mut pause) = (Trimmed::default(), server.every_ms);
        // A namespace without an event cursor has no flows, so it has no runs.
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
        let pause = if all.more { 0 } else { pause };
        if pause != server.every_ms {
            self.0.finish_round(Self::NAME, pause, Value::Null).await?;
        }
        Ok(Some(pause))
    }

    /// The settings of a namespace may have changed.
    fn wakes(change: &Change) -> bool {
        matches!(change, Change::Documents { kind, .. } if kind == NAMESPACE)
    }

    fn at_latest_ms(&self) -> Millis {
        self.0.config.retention.every_ms
    }
}
