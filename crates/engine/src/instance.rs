//! The handles that every loop shares: store, flows, committer, config.

use std::sync::Arc;

use eddyline_machine::{Millis, RunId};
use eddyline_store::{CommandId, Store};
use uuid::Uuid;

use crate::committer::CommitterHandle;
use crate::config::Config;
use crate::events::Published;
use crate::flows::Flows;

#[derive(Clone)]
pub(crate) struct Instance {
    pub store: Arc<dyn Store>,
    pub flows: Arc<Flows>,
    pub committing: CommitterHandle,
    pub config: Arc<Config>,
    pub published: Arc<Published>,
}

/// How often loops poll a store that passes hints between processes. Hints suffice; this only bounds the effect of a
/// bug.
const POLL_WITH_HINTS_MS: Millis = 30_000;

impl Instance {
    /// How often loops look for work without a hint.
    pub fn poll_ms(&self) -> Millis {
        match self.store.hears_others() {
            Some(true) => POLL_WITH_HINTS_MS.max(self.config.poll_ms),
            Some(false) | None => self.config.poll_ms,
        }
    }

    pub fn command(&self) -> CommandId {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&(self.config.chance)()[..16]);
        CommandId(Uuid::from_bytes(bytes))
    }

    /// A new run id (UUIDv7), which sorts by creation time.
    pub fn new_run(&self, now: Millis) -> RunId {
        let mut random = [0; 10];
        random.copy_from_slice(&(self.config.chance)()[..10]);
        RunId(uuid::Builder::from_unix_timestamp_millis(now.max(0) as u64, &random).into_uuid())
    }
}
