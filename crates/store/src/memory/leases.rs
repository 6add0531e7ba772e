//! Expired leases and timeouts, found by examining every task.

use eddyline_machine::{Claim, Expiry, Fence, Millis, RunId, TaskKind, TaskRef};

use super::tasks::{Row, Tasks};
use crate::claim::{Extended, Lease, LeaseState};
use crate::ids::Namespace;
use crate::query::DueItem;
use crate::task_queues::UNWATCHED_MS;

impl Tasks {
    /// The store was opened: from now on, time without a call of `time_up` is credited.
    pub fn opened(&mut self, now: Millis) {
        self.looked_at = Some(now);
    }

    pub fn extend(&mut self, ns: &Namespace, worker: Option<&str>, lease: Lease, now: Millis) -> Extended {
        let Some(row) = self.rows.get_mut(&(lease.run, lease.fence)).filter(|row| row.ns == *ns) else {
            return Extended::Lost;
        };
        let (kind, closed) = (row.task.kind, row.closed);
        let Some(held) = row.held.as_mut().filter(|held| worker.is_none_or(|worker| held.worker == worker)) else {
            return Extended::Lost;
        };
        held.lease_until = held.lease_until.max(now + held.lease_ms);
        let memo = (kind == TaskKind::Run).then_some(held.claim.memo);
        Extended::Until { lease_until: held.lease_until, deadline: held.deadline, closed, memo }
    }

    pub fn lease(&self, ns: &Namespace, worker: Option<&str>, lease: Lease) -> LeaseState {
        let Some(row) = self.rows.get(&(lease.run, lease.fence)).filter(|row| row.ns == *ns) else {
            return LeaseState::Lost;
        };
        let Some(held) = row.held.as_ref().filter(|held| worker.is_none_or(|worker| held.worker == worker)) else {
            return LeaseState::Lost;
        };
        let memo = self.runs.get(&lease.run).map_or(0, |(_, memo)| *memo);
        LeaseState::Held {
            task: TaskRef { activation: row.task.activation, fence: lease.fence },
            claim: held.claim.clone(),
            closed: row.closed,
            memo: (row.task.kind == TaskKind::Run).then_some(memo),
        }
    }

    /// Tasks whose lease or timeout has ended, earliest first. If nobody called it for longer than `UNWATCHED_MS`, all
    /// tasks are credited that time first.
    pub fn time_up(
        &mut self,
        now: Millis,
        skip: &[Namespace],
        limit: usize,
        mut wanted: impl FnMut(RunId, Fence) -> bool,
    ) -> Vec<DueItem> {
        if let Some(looked_at) = self.looked_at.replace(now)
            && now - looked_at > UNWATCHED_MS
        {
            self.rows.values_mut().for_each(|row| row.credit(looked_at, now));
        }
        let mut up: Vec<_> = self.rows.iter().filter(|(_, row)| row.ends_at().is_some_and(|at| at <= now)).collect();
        up.sort_by_key(|(at, row)| (row.ends_at(), **at));
        let mut items = Vec::new();
        for (&(run, fence), row) in up {
            let Some(why) = row.why(now) else { continue };
            if items.len() < limit && !skip.contains(&row.ns) && wanted(run, fence) {
                let claim = row.held.as_ref().map_or_else(Claim::default, |held| held.claim.clone());
                let task = TaskRef { activation: row.task.activation, fence };
                items.push(DueItem::Lease { ns: row.ns.clone(), run, task, why, claim });
            }
        }
        items
    }

    /// When the next lease or timeout ends, of those that have not ended yet.
    pub fn next_expiry(&self, now: Millis) -> Option<Millis> {
        self.rows.values().filter_map(Row::ends_at).filter(|at| *at > now).min()
    }

    /// Whether any lease or timeout ends by then.
    pub fn any_ends_by(&self, at: Millis) -> bool {
        self.rows.values().filter_map(Row::ends_at).any(|ends_at| ends_at <= at)
    }

    /// Whether a task has expired for this reason.
    pub fn is_up(&self, run: RunId, fence: Fence, why: Expiry, now: Millis) -> bool {
        let Some(row) = self.rows.get(&(run, fence)) else { return false };
        match (why, &row.held) {
            (Expiry::LeaseLost, Some(held)) => held.lease_until <= now,
            (Expiry::Timeout, Some(held)) => held.deadline.is_some_and(|deadline| deadline <= now),
            (Expiry::Released, Some(_)) => true,
            (Expiry::StartTimeout, None) => row.start_by.is_some_and(|by| by <= now),
            _ => false,
        }
    }
}

impl Row {
    fn ends_at(&self) -> Option<Millis> {
        match &self.held {
            Some(held) => Some(held.lease_until.min(held.deadline.unwrap_or(Millis::MAX))),
            None => self.start_by.filter(|_| !self.closed),
        }
    }

    fn why(&self, now: Millis) -> Option<Expiry> {
        match &self.held {
            None => Some(Expiry::StartTimeout),
            Some(held) if held.deadline.is_some_and(|deadline| deadline <= now) => Some(Expiry::Timeout),
            Some(held) => (held.lease_until <= now).then_some(Expiry::LeaseLost),
        }
    }

    /// No engine served between `from` and `now`: extends the lease and deadline by that time, counted from the claim
    /// or the last extension. An unclaimed task's `start_by` is extended likewise, counted from when it was queued.
    fn credit(&mut self, from: Millis, now: Millis) {
        let Some(held) = &mut self.held else {
            let unserved = (now - from.max(self.queued_at)).max(0);
            self.start_by = self.start_by.map(|by| by + unserved);
            return;
        };
        let kept_at = (held.lease_until - held.lease_ms).max(held.since);
        let unserved = (now - from.max(kept_at)).max(0);
        held.lease_until += unserved;
        held.deadline = held.deadline.map(|deadline| deadline + unserved);
    }
}
