//! Attempts whose worker went silent, whose time is over, or that no worker took in time.

use eddyline_machine::{Input, Millis};
use eddyline_store::{Change, Due, DueItem, Taken};

use crate::chore::Chore;
use crate::error::Result;
use crate::instance::Instance;

/// The store counts time only while somebody looks, so this is well below [`eddyline_store::UNWATCHED_MS`].
const LOOK_MS: Millis = 1_000;

pub(crate) struct LeaseReaper(pub Instance);

impl Chore for LeaseReaper {
    const NAME: &'static str = "lease_reaper";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let due = self.0.store.due(Due::Leases, self.0.config.due_batch).await?;
        let mut answers = Vec::with_capacity(due.items.len());
        for item in due.items {
            if let DueItem::Lease { run, task, why, claim, .. } = item {
                metrics::counter!("eddyline_attempts_expired_total").increment(1);
                tracing::info!(instance = self.0.config.instance, %run, fence = %task.fence, ?why, "attempt expired");
                let input = Input::Expired { task, why, claim };
                let taken = Some(Taken::Expiry(task.fence, why));
                answers.push(self.0.committing.hand_in(run, vec![input], taken, None).await?);
            }
        }
        self.0.wait_for(answers).await;
        Ok(due.next_in)
    }

    fn wakes(change: &Change) -> bool {
        matches!(change, Change::Leases)
    }

    fn at_latest_ms(&self) -> Millis {
        LOOK_MS
    }
}
