//! Limits how many of something are open at the same time, in total and per namespace.

use std::sync::Arc;

use eddyline_store::Namespace;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::shares::Shares;

#[derive(Debug)]
pub(crate) struct Slots {
    most: usize,
    all: Arc<Semaphore>,
    shares: Shares,
}

/// A slot in use; released on drop.
#[derive(Debug)]
pub(crate) struct Slot {
    _share: OwnedSemaphorePermit,
    _all: OwnedSemaphorePermit,
}

/// Why there is no free slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoSlot {
    /// All are in use.
    All,
    /// The namespace uses its whole share, which has this many slots.
    Share(usize),
}

impl Slots {
    /// A namespace can use half of the slots, and at least one.
    pub fn new(most: usize) -> Slots {
        Slots { most, all: Arc::new(Semaphore::new(most)), shares: Shares::new((most / 2).max(1)) }
    }

    /// The number of slots in use.
    pub fn taken(&self) -> usize {
        self.most - self.all.available_permits()
    }

    pub fn take(&self, ns: &Namespace) -> Result<Slot, NoSlot> {
        let share = self.shares.of(ns).try_acquire_owned().map_err(|_| NoSlot::Share(self.shares.permits()))?;
        let all = self.all.clone().try_acquire_owned().map_err(|_| NoSlot::All)?;
        Ok(Slot { _share: share, _all: all })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_gets_half_of_the_slots() {
        let slots = Slots::new(4);
        let [one, two, three] = ["one", "two", "three"].map(Namespace::new);
        let of_one = [slots.take(&one).unwrap(), slots.take(&one).unwrap()];
        assert_eq!(slots.take(&one).unwrap_err(), NoSlot::Share(2));
        let _of_two = [slots.take(&two).unwrap(), slots.take(&two).unwrap()];
        assert_eq!(slots.take(&three).unwrap_err(), NoSlot::All);
        drop(of_one);
        let _of_three = slots.take(&three).unwrap();
        slots.take(&one).unwrap();
        assert_eq!(Slots::new(0).take(&one).unwrap_err(), NoSlot::All);
        Slots::new(1).take(&one).unwrap();
    }
}
