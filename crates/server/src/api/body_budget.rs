//! The memory budget of request bodies: what all bodies that are being read or handled may take together, and what those
//! of one namespace may.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use eddyline_protocol::Code;
use eddyline_store::Namespace;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::failure::Failure;

/// Smaller bodies are not counted, so that heartbeats and small reports get through beside large ones. The limit on
/// connections bounds them: 4,096 of them are 64 MiB.
const SMALL_BYTES: usize = 16 << 10;
/// A namespace may use one of so many parts of the budget.
const SHARES: usize = 4;
/// A body that finds the budget used up waits this long before it is refused.
const WAIT: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct BodyBudget {
    all: Arc<Semaphore>,
    share_kib: u32,
    /// By namespace, as long as bodies of it are in memory.
    shares: Mutex<HashMap<Namespace, Weak<Semaphore>>>,
}

impl BodyBudget {
    pub fn new(bytes: usize) -> BodyBudget {
        let kib = kib(bytes).clamp(SHARES as u32, u32::MAX >> 3);
        let all = Arc::new(Semaphore::new(kib as usize));
        BodyBudget { all, share_kib: kib / SHARES as u32, shares: Mutex::default() }
    }

    /// Nothing yet, for a body of this namespace.
    pub fn reservation(&self, ns: &Namespace) -> Reservation {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let share = shares.get(ns).and_then(Weak::upgrade).unwrap_or_else(|| {
            shares.retain(|_, share| share.strong_count() > 0);
            let share = Arc::new(Semaphore::new(self.share_kib as usize));
            shares.insert(ns.clone(), Arc::downgrade(&share));
            share
        });
        Reservation { all: self.all.clone(), share, most_kib: self.share_kib, held_kib: 0, held: Vec::new() }
    }
}

/// What one body has of the budget. It is given back when this is dropped.
#[derive(Debug)]
pub(crate) struct Reservation {
    all: Arc<Semaphore>,
    share: Arc<Semaphore>,
    most_kib: u32,
    held_kib: u32,
    held: Vec<OwnedSemaphorePermit>,
}

impl Reservation {
    /// Has at least so many bytes from now on. A body larger than its namespace's share has all of the share.
    pub async fn grow_to(&mut self, bytes: usize) -> Result<(), Failure> {
        let wanted = kib(bytes).min(self.most_kib);
        if bytes <= SMALL_BYTES || wanted <= self.held_kib {
            return Ok(());
        }
        let more = wanted - self.held_kib;
        let acquired = async {
            // The share first: whoever waits for it keeps nothing that others could use.
            let share = self.share.clone().acquire_many_owned(more).await?;
            Ok::<_, tokio::sync::AcquireError>([share, self.all.clone().acquire_many_owned(more).await?])
        };
        match tokio::time::timeout(WAIT, acquired).await {
            Ok(Ok(permits)) => {
                self.held.extend(permits);
                self.held_kib = wanted;
                Ok(())
            }
            _ => {
                metrics::counter!("eddyline_bodies_refused_total").increment(1);
                let message = "too many large bodies are being read; send it again in a second";
                Err(Failure::new(Code::Unavailable, message))
            }
        }
    }
}

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1 << 10)).unwrap_or(u32::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_namespace_that_uses_up_its_share_leaves_the_rest_to_others() {
        let budget = BodyBudget::new(400 << 10);
        let (one, other) = (Namespace::new("one"), Namespace::new("other"));
        let mut first = budget.reservation(&one);
        first.grow_to(60 << 10).await.unwrap();
        // The same body again needs no more, and a small one nothing.
        first.grow_to(50 << 10).await.unwrap();
        budget.reservation(&one).grow_to(SMALL_BYTES).await.unwrap();
        let refused = budget.reservation(&one).grow_to(60 << 10).await.unwrap_err();
        assert_eq!(refused.0.code, Code::Unavailable);
        budget.reservation(&other).grow_to(1 << 20).await.unwrap();
        drop(first);
        budget.reservation(&one).grow_to(1 << 20).await.unwrap();
    }

    #[tokio::test]
    async fn whoever_waits_gets_in_when_another_is_done() {
        let budget = BodyBudget::new(400 << 10);
        let ns = Namespace::default();
        let mut first = budget.reservation(&ns);
        first.grow_to(100 << 10).await.unwrap();
        let mut second = budget.reservation(&ns);
        let (waited, ()) = tokio::join!(second.grow_to(100 << 10), async {
            tokio::task::yield_now().await;
            drop(first);
        });
        waited.unwrap();
    }
}
