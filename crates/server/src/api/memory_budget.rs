//! A memory budget for all things of one kind (bodies being read, responses being written, tasks on their way to
//! sockets), with a share per namespace.

use std::sync::Arc;
use std::time::Duration;

use eddyline_store::Namespace;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::shares::Shares;

/// Smaller things are not counted, so that heartbeats and small reports get through next to large ones. The limit on
/// connections bounds them: 4,096 times this is 64 MiB.
const SMALL_BYTES: usize = 16 << 10;
#[derive(Debug)]
pub(crate) struct MemoryBudget {
    all: Arc<Semaphore>,
    share_kib: u32,
    shares: Shares,
}

impl MemoryBudget {
    /// A namespace can use one of `parts` equal parts of `bytes`.
    pub fn new(bytes: usize, parts: u32) -> MemoryBudget {
        let kib = kib(bytes).clamp(parts, u32::MAX >> 3);
        let all = Arc::new(Semaphore::new(kib as usize));
        MemoryBudget { all, share_kib: kib / parts, shares: Shares::new((kib / parts) as usize) }
    }

    /// An empty reservation for something of this namespace.
    pub fn reservation(&self, ns: &Namespace) -> Reservation {
        let share = self.shares.of(ns);
        Reservation { all: self.all.clone(), share, most_kib: self.share_kib, held_kib: 0, held: Vec::new() }
    }
}

/// A part of the budget; released on drop.
#[derive(Debug)]
pub(crate) struct Reservation {
    all: Arc<Semaphore>,
    share: Arc<Semaphore>,
    most_kib: u32,
    held_kib: u32,
    held: Vec<OwnedSemaphorePermit>,
}

impl Reservation {
    /// Grows to at least `bytes`, waiting for others to release theirs. A request larger than the namespace's share
    /// gets the whole share.
    pub async fn grow_to(&mut self, bytes: usize) {
        let Some((wanted, more)) = self.lacks(bytes) else { return };
        // The share first: a task that waits for its share must not hold what other namespaces could use.
        let share = self.share.clone().acquire_many_owned(more).await;
        let all = self.all.clone().acquire_many_owned(more).await;
        self.hold(wanted, [share.ok(), all.ok()]);
    }

    /// Like `grow_to`, but gives up after `wait` and keeps what it has.
    pub async fn grow_within(&mut self, bytes: usize, wait: Duration) -> Result<(), Full> {
        match wait.is_zero() {
            true => self.try_grow_to(bytes),
            false => tokio::time::timeout(wait, self.grow_to(bytes)).await.map_err(|_| Full),
        }
    }

    /// Like `grow_to`, but without waiting.
    pub fn try_grow_to(&mut self, bytes: usize) -> Result<(), Full> {
        let Some((wanted, more)) = self.lacks(bytes) else { return Ok(()) };
        let share = self.share.clone().try_acquire_many_owned(more).map_err(|_| Full)?;
        let all = self.all.clone().try_acquire_many_owned(more).map_err(|_| Full)?;
        self.hold(wanted, [Some(share), Some(all)]);
        Ok(())
    }

    /// Moves everything to a new reservation and leaves this one empty.
    pub fn hand_over(&mut self) -> Reservation {
        let (all, share, held) = (self.all.clone(), self.share.clone(), std::mem::take(&mut self.held));
        let held_kib = std::mem::take(&mut self.held_kib);
        Reservation { all, share, most_kib: self.most_kib, held_kib, held }
    }

    /// Whether anything is reserved.
    pub fn is_counted(&self) -> bool {
        self.held_kib > 0
    }

    /// The wanted size and the missing part of it, in KiB.
    fn lacks(&self, bytes: usize) -> Option<(u32, u32)> {
        let wanted = kib(bytes).min(self.most_kib);
        (bytes > SMALL_BYTES && wanted > self.held_kib).then(|| (wanted, wanted - self.held_kib))
    }

    /// The semaphores are never closed, so both permits exist.
    fn hold(&mut self, wanted: u32, permits: [Option<OwnedSemaphorePermit>; 2]) {
        self.held.extend(permits.into_iter().flatten());
        self.held_kib = wanted;
    }
}

/// The budget is used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Full;

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_namespace_that_uses_up_its_share_leaves_the_rest_to_others() {
        let budget = MemoryBudget::new(400 << 10, 4);
        let (one, other) = (Namespace::new("one"), Namespace::new("other"));
        let (now, soon) = (Duration::ZERO, Duration::from_millis(1));
        let mut first = budget.reservation(&one);
        first.grow_within(60 << 10, now).await.unwrap();
        // Growing to less needs no more, and small sizes need nothing.
        first.grow_within(50 << 10, now).await.unwrap();
        budget.reservation(&one).grow_within(SMALL_BYTES, now).await.unwrap();
        for wait in [now, soon] {
            assert_eq!(budget.reservation(&one).grow_within(60 << 10, wait).await, Err(Full));
        }
        budget.reservation(&other).grow_within(1 << 20, now).await.unwrap();
        drop(first);
        budget.reservation(&one).grow_within(1 << 20, now).await.unwrap();
    }

    #[tokio::test]
    async fn a_waiting_reservation_is_granted_when_another_is_released() {
        let budget = MemoryBudget::new(400 << 10, 4);
        let ns = Namespace::default();
        let mut first = budget.reservation(&ns);
        first.grow_to(100 << 10).await;
        let mut second = budget.reservation(&ns);
        tokio::join!(second.grow_to(100 << 10), async {
            tokio::task::yield_now().await;
            drop(first);
        });
    }
}
