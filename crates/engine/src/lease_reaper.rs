//! Expires attempts whose worker went silent, that timed out, or that no worker claimed in time.

use eddyline_machine::{Expiry, Fence, Input, Millis};
use eddyline_store::{Change, Consumed, Due, DueItem};

use crate::chore::Chore;
use crate::error::Result;
use crate::in_flight::InFlight;
use crate::instance::Instance;

/// The store counts lease time only while it is polled, so this is well below [`eddyline_store::UNWATCHED_MS`].
const LOOK_MS: Millis = 1_000;
/// There are no hints of leases that end later than in [`eddyline_store::UNWATCHED_MS`].
const LOOK_SHARED_MS: Millis = eddyline_store::UNWATCHED_MS;

pub(crate) struct LeaseReaper {
    instance: Instance,
    in_flight: InFlight<(Fence, Expiry)>,
}

impl LeaseReaper {
    pub fn new(instance: Instance) -> LeaseReaper {
        let in_flight = InFlight::new(&instance);
        LeaseReaper { instance, in_flight }
    }
}

impl Chore for LeaseReaper {
    const NAME: &'static str = "lease_reaper";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let due = self.in_flight.due(&self.instance, Due::Leases).await?;
        for item in due.items {
            if let DueItem::Lease { ns, run, task, why, claim } = item {
                metrics::counter!("eddyline_attempts_expired_total").increment(1);
                let instance = &self.instance.config.instance;
                tracing::info!(instance, %run, fence = %task.fence, ?why, "attempt expired");
                let input = Input::Expired { task, why, claim };
                let taken = Consumed::Expiry(task.fence, why);
                self.in_flight.hand_in(&self.instance, ns, (run, (task.fence, why)), input, taken).await?;
            }
        }
        Ok(due.next_in)
    }

    fn wakes(change: &Change) -> bool {
        matches!(change, Change::Leases)
    }

    async fn work_between_rounds(&mut self) {
        self.in_flight.until_more(&self.instance).await;
    }

    fn at_latest_ms(&self) -> Millis {
        match self.instance.store.hears_others() {
            // Checking in counts as watching, and hints tell of the leases of other instances.
            Some(true) => LOOK_SHARED_MS,
            Some(false) | None => LOOK_MS,
        }
    }
}
