//! Deletes what is old enough: timelines first, headers and with them the run index later.

use eddyline_language::time;
use eddyline_machine::Millis;
use eddyline_store::{Change, Page, RunFilter, Trim};

use crate::chore::Chore;
use crate::error::Result;
use crate::events::kept_events;
use crate::instance::Instance;

/// Runs that are trimmed in one round.
const RUNS_A_ROUND: usize = 100;

/// How long a repeat of a command is told from a new one; whoever does not know what came of one asks at once.
const TRACES_MS: Millis = 24 * 60 * 60 * 1_000;

pub(crate) struct Retention(pub Instance);

impl Retention {
    /// Events go by their age, in every namespace, unless a gate may still look back at them.
    async fn trim_events(&self, now: Millis) -> Result<()> {
        for (ns, keep_ms) in kept_events(&*self.0.store).await? {
            let before = now - keep_ms.max(self.0.config.retention.events_ms);
            let what = Trim::Events { ns, before };
            while self.0.store.trim(&what).await? {}
        }
        Ok(())
    }
}

impl Chore for Retention {
    const NAME: &'static str = "retention";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let (store, keep) = (&self.0.store, self.0.config.retention);
        let now = store.now().await?;
        if let Some(until) = store.deletion_waits().await? {
            // The store has said so when it was opened.
            tracing::debug!(instance = self.0.config.instance, until = %time::iso(until), "nothing is deleted yet");
            return Ok(Some(until - now));
        }
        let page = Page { after: None, limit: RUNS_A_ROUND };
        let old = |before: Millis, trimmed| RunFilter { ended_before: Some(before), trimmed, ..RunFilter::default() };
        let timelines = store.runs(None, &old(now - keep.timelines_ms, Some(false)), page).await?;
        for summary in &timelines {
            while store.trim(&Trim::Timeline(summary.run)).await? {}
        }
        let headers = store.runs(None, &old(now - keep.headers_ms, Some(true)), page).await?;
        for summary in &headers {
            while store.trim(&Trim::Run(summary.run)).await? {}
        }
        self.trim_events(now).await?;
        while store.trim(&Trim::Traces { before: now - TRACES_MS }).await? {}
        let trimmed = timelines.len() + headers.len();
        if trimmed > 0 {
            metrics::counter!("eddyline_runs_trimmed_total").increment(trimmed as u64);
            tracing::info!(
                instance = self.0.config.instance,
                timelines = timelines.len(),
                headers = headers.len(),
                "trimmed"
            );
        }
        let more = timelines.len() == RUNS_A_ROUND || headers.len() == RUNS_A_ROUND;
        Ok(Some(if more { 0 } else { keep.every_ms }))
    }

    fn wakes(_: &Change) -> bool {
        false
    }

    fn at_latest_ms(&self) -> Millis {
        self.0.config.retention.every_ms
    }
}
