//! Registers this instance with the others on the store, and notices when one disappears.
//!
//! Instances send each other hints of their changes, shortly after the commit. An instance that disappears may not have
//! sent hints of its last commits, so the others then check everything once, as after lost hints. Because of that,
//! loops need not poll often on a store that passes hints between processes.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use eddyline_machine::Millis;
use eddyline_store::{Change, InstanceId, InstanceState};
use uuid::Uuid;

use crate::chore::Chore;
use crate::committer::Order;
use crate::engine::Engine;
use crate::error::Result;
use crate::instance::Instance;

/// How often an instance checks in.
const CHECK_IN_MS: Millis = 1_000;
/// How often an instance checks in while no hints of other processes arrive: then changed documents are noticed only by
/// this.
const CHECK_IN_WITHOUT_HINTS_MS: Millis = 400;
/// An instance that has not checked in for this long counts as gone: it ended, or it hangs.
pub const INSTANCE_GONE_MS: Millis = 3_000;

/// The instances, as of the last check-in.
#[derive(Debug)]
pub(crate) struct Instances {
    pub own: InstanceId,
    known: Mutex<LastCheckIn>,
}

#[derive(Debug, Default)]
struct LastCheckIn {
    now: Millis,
    /// When this instance first checked in.
    started_at: Option<Millis>,
    all: Vec<InstanceState>,
    /// Instances whose disappearance was already noticed.
    gone: BTreeSet<InstanceId>,
}

impl Instances {
    pub fn new(chance: [u8; 32]) -> Instances {
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&chance[..16]);
        Instances { own: InstanceId(uuid::Builder::from_random_bytes(bytes).into_uuid()), known: Mutex::default() }
    }

    fn known(&self) -> MutexGuard<'_, LastCheckIn> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the result of a check-in. True if another instance has disappeared since the last one.
    fn note(&self, now: Millis, all: Vec<InstanceState>) -> bool {
        let is_gone = |other: &&InstanceState| other.id != self.own && now - other.seen_at > INSTANCE_GONE_MS;
        let gone: BTreeSet<InstanceId> = all.iter().filter(is_gone).map(|other| other.id).collect();
        let mut known = self.known();
        let any = gone.difference(&known.gone).next().is_some();
        (known.now, known.all, known.gone) = (now, all, gone);
        any
    }
}

impl Engine {
    /// The instances that serve the store, or did until recently, as of the last check-in, and its time.
    pub fn instances(&self) -> (Millis, Vec<InstanceState>) {
        let known = self.instances.known();
        (known.now, known.all.clone())
    }

    pub fn instance_id(&self) -> Uuid {
        self.instances.own.0
    }
}

/// The loop that checks in.
pub(crate) struct Presence {
    instance: Instance,
    instances: Arc<Instances>,
}

impl Presence {
    pub fn new(instance: Instance, instances: Arc<Instances>) -> Presence {
        Presence { instance, instances }
    }
}

impl Chore for Presence {
    const NAME: &'static str = "presence";

    async fn round(&mut self) -> Result<Option<Millis>> {
        let store = &self.instance.store;
        let started_at = self.instances.known().started_at;
        let started_at = match started_at {
            Some(at) => at,
            None => {
                let now = store.now().await?;
                *self.instances.known().started_at.insert(now)
            }
        };
        let present = store.check_in(self.instances.own, &self.instance.config.info, started_at).await?;
        let disappeared = self.instances.note(present.now, present.instances);
        if disappeared {
            let instance = &self.instance.config.instance;
            tracing::warn!(
                instance,
                "another instance has disappeared; checking for work that it may have left undone"
            );
        }
        if disappeared || present.unwatched {
            self.instance.committing.send(Order::Missed).await?;
        }
        Ok(None)
    }

    fn wakes(_: &Change) -> bool {
        false
    }

    fn at_latest_ms(&self) -> Millis {
        if self.instance.store.hears_others() == Some(false) { CHECK_IN_WITHOUT_HINTS_MS } else { CHECK_IN_MS }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_disappearance_is_noticed_once_and_a_return_is_not_one() {
        let instances = Instances::new([7; 32]);
        let at = |id: u128, seen_at| InstanceState {
            id: InstanceId(Uuid::from_u128(id)),
            info: Default::default(),
            started_at: 0,
            seen_at,
        };
        assert!(!instances.note(1_000, vec![at(1, 1_000), at(2, 900)]));
        assert!(!instances.note(4_000, vec![at(1, 4_000), at(2, 1_500)]));
        assert!(instances.note(5_000, vec![at(1, 5_000), at(2, 1_500)]));
        assert!(!instances.note(6_000, vec![at(1, 6_000), at(2, 1_500)]), "already noticed");
        assert!(!instances.note(7_000, vec![at(1, 7_000), at(2, 6_900)]), "it hung and continues");
        assert!(instances.note(17_000, vec![at(1, 17_000), at(2, 6_900)]));
        assert!(!instances.note(18_000, vec![at(1, 18_000)]), "it was dropped from the list");
        let own = InstanceState { id: instances.own, ..at(3, 0) };
        assert!(!instances.note(19_000, vec![own]), "its own entry does not count");
    }
}
