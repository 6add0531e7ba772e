//! Expiries: leases that are not extended, attempts that exceed their `timeout`, tasks that exceed their
//! `start_timeout`.

use eddyline_machine::{Claim, Expiry, Fence, Millis, RunId, TaskRef};

use super::suit::Kind;
use super::{Entry, TaskQueues};
use crate::claim::{Extended, Held, Lease, LeaseState};
use crate::ids::Namespace;

/// If nobody asked for expired leases for longer than this, no engine was serving, and workers are credited that time.
pub const UNWATCHED_MS: Millis = 5_000;

/// A task whose lease or timeout has ended.
#[derive(Debug, Clone)]
pub(crate) struct TimeUp {
    pub ns: Namespace,
    pub run: RunId,
    pub task: TaskRef,
    pub why: Expiry,
    pub claim: Claim,
}

impl TaskQueues {
    /// The store was opened: from now on, time without a call of `time_up` is credited.
    pub fn opened(&mut self, now: Millis) {
        self.looked_at = Some(now);
    }

    /// Extends the lease from now on, even if it has run out: only a commit ends it.
    pub fn extend(&mut self, ns: &Namespace, worker: Option<&str>, lease: Lease, now: Millis) -> Extended {
        let Lease { run, fence } = lease;
        // In place, because a worker extends all its leases with each heartbeat.
        let of_run = self.runs.get_mut(&run).filter(|of_run| of_run.ns == *ns);
        let Some(entry) = of_run.and_then(|of_run| of_run.tasks.get_mut(&fence)) else { return Extended::Lost };
        let (closed, kind) = (entry.closed, entry.place.class.suit.kind);
        let Some(held) = entry.held.as_mut().filter(|held| worker.is_none_or(|worker| held.worker == worker)) else {
            return Extended::Lost;
        };
        held.lease_until = held.lease_until.max(now + held.lease_ms);
        let memo = (kind == Kind::Run).then_some(held.claim.memo);
        let extended = Extended::Until { lease_until: held.lease_until, deadline: held.deadline, closed, memo };
        let (before, expiry) = (entry.expiry, entry.expires_at());
        if before != expiry {
            entry.expiry = expiry;
            before.map(|at| self.expiries.remove(&(at, run, fence)));
            self.expiries.extend(expiry.map(|at| (at, run, fence)));
        }
        extended
    }

    /// The state of a lease.
    pub fn lease(&self, ns: &Namespace, worker: Option<&str>, Lease { run, fence }: Lease) -> LeaseState {
        let Some(of_run) = self.runs.get(&run).filter(|of_run| of_run.ns == *ns) else { return LeaseState::Lost };
        let Some(entry) = of_run.tasks.get(&fence) else { return LeaseState::Lost };
        match &entry.held {
            Some(held) if worker.is_none_or(|worker| held.worker == worker) => LeaseState::Held {
                task: TaskRef { activation: entry.activation, fence },
                claim: held.claim.clone(),
                closed: entry.closed,
                memo: (entry.place.class.suit.kind == Kind::Run).then_some(of_run.memo),
            },
            _ => LeaseState::Lost,
        }
    }

    /// Tasks whose lease or timeout has ended. If nobody called it for longer than `UNWATCHED_MS`, all tasks are
    /// credited that time first.
    pub fn time_up(
        &mut self,
        now: Millis,
        skip: &[Namespace],
        limit: usize,
        mut wanted: impl FnMut(RunId, Fence) -> bool,
    ) -> Vec<TimeUp> {
        if let Some(looked_at) = self.looked_at.replace(now)
            && now - looked_at > UNWATCHED_MS
        {
            self.credit(looked_at, now);
        }
        let mut up = Vec::new();
        for (at, run, fence) in &self.expiries {
            if *at > now || up.len() >= limit {
                break;
            }
            let Some(of_run) = self.runs.get(run) else { continue };
            let Some(entry) = of_run.tasks.get(fence) else { continue };
            let Some(why) = entry.why(now) else { continue };
            if !skip.contains(&of_run.ns) && wanted(*run, *fence) {
                let claim = entry.held.as_ref().map_or_else(Claim::default, |held| held.claim.clone());
                let task = TaskRef { activation: entry.activation, fence: *fence };
                up.push(TimeUp { ns: of_run.ns.clone(), run: *run, task, why, claim });
            }
        }
        up
    }

    /// When the next lease or timeout ends, of those that have not ended yet.
    pub fn next_expiry(&self, now: Millis) -> Option<Millis> {
        self.expiries.range((now + 1, RunId::default(), Fence(0))..).next().map(|(at, _, _)| *at)
    }

    /// Extends every lease, `timeout` and `start_timeout` by the time in which no engine served.
    pub fn credit(&mut self, from: Millis, now: Millis) {
        let held: Vec<(RunId, Fence)> = self.expiries.iter().map(|(_, run, fence)| (*run, *fence)).collect();
        for (run, fence) in held {
            let Some((_, mut entry)) = self.lift(run, fence) else { continue };
            if let Some(held) = &mut entry.held {
                let granted = (held.lease_until - held.lease_ms).max(held.since);
                let unserved = now - from.max(granted);
                if unserved > 0 {
                    held.lease_until += unserved;
                    held.deadline = held.deadline.map(|deadline| deadline + unserved);
                }
            } else {
                let unserved = (now - from.max(entry.place.queued_at)).max(0);
                entry.start_by = entry.start_by.map(|by| by + unserved);
            }
            self.schedule(run, fence, &mut entry);
            self.put_back(run, fence, entry);
        }
    }

    /// Whether a task has expired for this reason.
    pub fn is_up(&self, run: RunId, fence: Fence, why: Expiry, now: Millis) -> bool {
        let Some(entry) = self.runs.get(&run).and_then(|of_run| of_run.tasks.get(&fence)) else { return false };
        match (why, &entry.held) {
            (Expiry::LeaseLost, Some(held)) => held.lease_until <= now,
            (Expiry::Timeout, Some(held)) => held.deadline.is_some_and(|deadline| deadline <= now),
            (Expiry::Released, Some(_)) => true,
            (Expiry::StartTimeout, None) => entry.start_by.is_some_and(|by| by <= now),
            _ => false,
        }
    }

    pub fn held(&self, run: RunId, fence: Fence) -> Option<&Held> {
        self.runs.get(&run)?.tasks.get(&fence)?.held.as_ref()
    }

    /// When the `start_timeout` of a task ends.
    pub fn start_by(&self, run: RunId, fence: Fence) -> Option<Millis> {
        self.runs.get(&run)?.tasks.get(&fence)?.start_by
    }

    /// Whether any task is claimed, so that `served_at` must be kept up to date.
    pub fn any_held(&self) -> bool {
        !self.requests.is_empty()
    }

    pub(super) fn schedule(&mut self, run: RunId, fence: Fence, entry: &mut Entry) {
        entry.expiry = entry.expires_at();
        if let Some(at) = entry.expiry {
            self.expiries.insert((at, run, fence));
        }
    }
}

impl Entry {
    pub(super) fn expires_at(&self) -> Option<Millis> {
        match &self.held {
            Some(held) => Some(held.deadline.map_or(held.lease_until, |deadline| deadline.min(held.lease_until))),
            None if self.closed => None,
            None => self.start_by,
        }
    }

    fn why(&self, now: Millis) -> Option<Expiry> {
        match &self.held {
            Some(held) if held.deadline.is_some_and(|deadline| deadline <= now) => Some(Expiry::Timeout),
            Some(held) if held.lease_until <= now => Some(Expiry::LeaseLost),
            Some(_) => None,
            None => self.start_by.filter(|by| *by <= now).map(|_| Expiry::StartTimeout),
        }
    }
}
