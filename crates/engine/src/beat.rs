//! Heartbeats, which extend the leases of a worker's tasks.

use eddyline_machine::{Expiry, Input};
use eddyline_store::{Consumed, Extended, Lease, LeaseState, Namespace};

use crate::engine::Engine;
use crate::error::Result;
use crate::task_status::{CalledOff, Holding, TaskId};

impl Engine {
    /// Extends the leases of a worker's tasks: each is renewed for the time it was claimed with. Tasks of another
    /// namespace are reported as lost.
    pub async fn beat(&self, ns: &Namespace, worker: &str, tasks: &[TaskId]) -> Result<Vec<Holding>> {
        let leases: Vec<Lease> = tasks.iter().map(|task| Lease::from(*task)).collect();
        let extended = self.instance.store.extend(ns, Some(worker), &leases).await?;
        // Only code runs have a memo, so only their leases are read again for its newest change.
        let is_code = |extended: &Extended| matches!(extended, Extended::Until { memo: Some(_), .. });
        let code = leases.iter().zip(&extended).filter(|(_, extended)| is_code(extended)).map(|(lease, _)| *lease);
        let code: Vec<Lease> = code.collect();
        let mut newest = Vec::new();
        if !code.is_empty() {
            newest = self.instance.store.leases(ns, Some(worker), &code).await?;
        }
        let (mut newest, mut called_off) = (newest.into_iter(), CalledOff::new(self, ns));
        let mut standing = Vec::with_capacity(tasks.len());
        for (task, extended) in tasks.iter().zip(extended) {
            let lease = if is_code(&extended) { newest.next() } else { None };
            standing.push(match (extended, lease) {
                (Extended::Until { closed: true, .. }, _) => Holding::Cancelled,
                (Extended::Until { .. }, None) => Holding::Held { memo: None },
                (Extended::Until { .. }, Some(lease)) => self.holding(task, lease, &mut called_off).await?,
                (Extended::Lost, _) => called_off.gone(task).await?,
            });
        }
        Ok(standing)
    }

    /// Releases tasks that were assigned to a worker but never reached it. This does not use up an attempt.
    pub async fn release(&self, ns: &Namespace, worker: &str, tasks: &[TaskId]) -> Result<()> {
        for (task, lease) in tasks.iter().zip(self.leases(ns, Some(worker), tasks).await?) {
            let LeaseState::Held { task: held, claim, .. } = lease else { continue };
            let input = Input::Expired { task: held, why: Expiry::Released, claim };
            let taken = Some(Consumed::Expiry(task.fence, Expiry::Released));
            self.committing().submit(task.run, vec![input], taken, None).await?;
        }
        Ok(())
    }
}
