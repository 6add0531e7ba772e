//! Which task a claim gets next: a direct transcription of the rules, without any index. Every question is answered by
//! examining all tasks. Tests compare the faster backends with this, so it shares no code with them.
//!
//! A task is claimable if it is offered (unclaimed, not closed, its run not paused), it matches the worker's offer, and
//! neither its queue nor any of its limits is exhausted. Within a queue, the task whose key was served least comes
//! first, then the one of lowest rank: its queueing time minus [`AGE_MS`] per step of priority. Among several queues,
//! the lowest rank comes first.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use eddyline_machine::explain::Bound;
use eddyline_machine::{Claim, Fence, Millis, RunId, Task};
use serde_json::Value;

use super::rates::{Rates, Spender};
use crate::claim::{ClaimRequest, Held, RequestId};
use crate::document::{DocumentKey, LimitRules, QueueRules, kind};
use crate::ids::Namespace;
use crate::query::{LimitState, QueueState};
use crate::task_queues::AGE_MS;

#[derive(Debug, Default)]
pub(crate) struct Tasks {
    pub(super) rows: BTreeMap<(RunId, Fence), Row>,
    /// For each run that has or had tasks: whether it is paused, and the number of the newest change in its memo.
    pub(super) runs: BTreeMap<RunId, (bool, u64)>,
    /// Every queue that has or had tasks or rules.
    queues: BTreeMap<QueueId, Queue>,
    limits: BTreeMap<(Namespace, String), LimitRules>,
    /// Limits closed by workers, and until when.
    closed_until: BTreeMap<(Namespace, String), Millis>,
    rates: Rates,
    next_claim: u64,
    pub(super) looked_at: Option<Millis>,
}

pub(super) type QueueId = (Namespace, String);

#[derive(Debug, Default)]
struct Queue {
    rules: QueueRules,
    /// How often each key with waiting tasks was served. A new key starts at the count of the key served last.
    served: BTreeMap<Option<String>, u64>,
    last: u64,
}

#[derive(Debug)]
pub(super) struct Row {
    pub ns: Namespace,
    flow: String,
    pub task: Arc<Task>,
    pub queued_at: Millis,
    /// Its position among all tasks ever queued.
    place: u64,
    /// When its `start_timeout` ends.
    pub start_by: Option<Millis>,
    pub closed: bool,
    pub held: Option<Held>,
    /// Its position among all claims.
    claimed: u64,
}

impl Row {
    fn queue(&self) -> QueueId {
        (self.ns.clone(), self.task.queue.clone())
    }

    fn is_in(&self, (ns, queue): &QueueId) -> bool {
        self.ns == *ns && self.task.queue == *queue
    }

    pub fn place(&self) -> u64 {
        self.place
    }

    fn rank(&self) -> (Millis, u64) {
        let age = Millis::from(self.task.priority).saturating_mul(AGE_MS);
        (self.queued_at.saturating_sub(age), self.place)
    }

    fn passes(&self, ns: &Namespace, limit: &(String, Option<String>)) -> bool {
        self.ns == *ns && self.task.limits.contains(limit)
    }
}

/// A bound that keeps a task from being claimed, and until when, if it lifts by time alone.
#[derive(Debug)]
struct Obstacle {
    bound: Bound,
    until: Option<Millis>,
}

impl Tasks {
    pub fn set_rules(&mut self, ns: &Namespace, key: &DocumentKey, body: Option<&Value>) {
        let id = (ns.clone(), key.id.clone());
        match (key.kind.as_str(), body) {
            (kind::QUEUE, body) => {
                self.queues.entry(id).or_default().rules = body.map(QueueRules::read).unwrap_or_default();
            }
            (kind::LIMIT, body) => {
                self.closed_until.remove(&id);
                match body {
                    Some(body) => self.limits.insert(id, LimitRules::read(body)),
                    None => self.limits.remove(&id),
                };
            }
            _ => {}
        }
    }

    /// Closes a limit until then, for a worker that asked to slow down.
    pub fn slow(&mut self, ns: &Namespace, limit: &str, until: Millis) {
        let closed_until = self.closed_until.entry((ns.clone(), limit.to_owned())).or_default();
        *closed_until = until.max(*closed_until);
    }

    pub fn closed_limits(&self, ns: &Namespace, now: Millis) -> Vec<LimitState> {
        let closed = self.closed_until.iter().filter(|((of, _), until)| of == ns && **until > now);
        closed.map(|((_, name), until)| LimitState { name: name.clone(), closed_until: *until }).collect()
    }

    /// Every limit that was closed, with the end.
    pub fn all_closed_limits(&self) -> impl Iterator<Item = (&Namespace, &str, Millis)> {
        self.closed_until.iter().map(|((ns, name), until)| (ns, name.as_str(), *until))
    }

    /// What is left of each rate: whole claims, and parts of another.
    pub(in crate::memory) fn levels(&self, now: Millis) -> Vec<(Spender, u32, i64)> {
        let rate = |who: &Spender| match who {
            Spender::Queue(id) => self.queues.get(id).and_then(|queue| queue.rules.rate),
            Spender::Limit(ns, name, _) => self.limits.get(&(ns.clone(), name.clone())).and_then(|rules| rules.rate),
        };
        self.rates.levels(now, rate)
    }

    pub fn set_run(&mut self, run: RunId, paused: bool, memo: u64) {
        let before = self.runs.insert(run, (paused, memo));
        if before.is_some_and(|(before, _)| before != paused) {
            let keys: Vec<_> = self.of(run).map(|(_, row)| (row.queue(), row.task.key.clone())).collect();
            keys.into_iter().for_each(|(queue, key)| self.look_at_key(&queue, &key));
        }
    }

    pub fn is_paused(&self, run: RunId) -> bool {
        self.runs.get(&run).is_some_and(|(paused, _)| *paused)
    }

    pub fn add(&mut self, ns: &Namespace, run: RunId, flow: &str, task: Arc<Task>, place: u64, now: Millis) {
        let start_by = task.start_timeout_ms.map(|ms| now + ms);
        let (fence, ns, flow) = (task.fence, ns.clone(), flow.to_owned());
        let row = Row { ns, flow, task, queued_at: now, place, start_by, closed: false, held: None, claimed: 0 };
        let (id, key) = (row.queue(), row.task.key.clone());
        self.queues.entry(id.clone()).or_default();
        self.rows.insert((run, fence), row);
        self.look_at_key(&id, &key);
    }

    /// Stops offering a task; a worker that holds it keeps it.
    pub fn close(&mut self, run: RunId, fence: Fence) {
        if let Some(row) = self.rows.get_mut(&(run, fence)) {
            row.closed = true;
            let (id, key) = (row.queue(), row.task.key.clone());
            self.look_at_key(&id, &key);
        }
    }

    /// Returns whether other tasks may have become claimable: the task was claimed and there are rules that bound
    /// something.
    pub fn remove(&mut self, run: RunId, fence: Fence) -> bool {
        let Some(row) = self.rows.remove(&(run, fence)) else { return false };
        self.look_at_key(&row.queue(), &row.task.key);
        let ruled = self.queues.get(&row.queue()).is_some_and(|queue| queue.rules != QueueRules::default());
        row.held.is_some() && (ruled || !self.limits.is_empty())
    }

    /// The run was deleted.
    pub fn forget(&mut self, run: RunId) {
        self.runs.remove(&run);
    }

    /// Grants a claim: the tasks it gets, and when to retry for more.
    pub fn claim(&mut self, request: &ClaimRequest, now: Millis) -> (Vec<(RunId, Fence)>, Option<Millis>) {
        let mut got = Vec::new();
        while got.len() < request.max && !self.is_full(request) {
            let Some(at) = self.next(request, now) else { return (got, self.retry_at(request, now)) };
            self.hand_over(at, request, now);
            got.push(at);
        }
        (got, None)
    }

    /// Whether the worker of a claim holds `most_held` tasks.
    pub fn is_full(&self, request: &ClaimRequest) -> bool {
        request.most_held.is_some_and(|most| self.held_by(&request.ns, &request.worker) >= most)
    }

    pub fn held_by(&self, ns: &Namespace, worker: &str) -> usize {
        let has = |row: &&Row| row.ns == *ns && row.held.as_ref().is_some_and(|held| held.worker == worker);
        self.rows.values().filter(has).count()
    }

    /// The tasks that this request got before and that are still claimed; none if the request is new.
    pub fn claimed_before(&self, request: &ClaimRequest) -> Option<Vec<(RunId, Fence)>> {
        let by = |row: &Row, id: RequestId| row.held.as_ref().is_some_and(|held| held.request == id);
        let mut before: Vec<_> = self.rows.iter().filter(|(_, row)| by(row, request.request)).collect();
        if before.is_empty() {
            return None;
        }
        before.sort_by_key(|(_, row)| row.claimed);
        let own =
            |row: &Row| row.ns == request.ns && row.held.as_ref().is_some_and(|held| held.worker == request.worker);
        Some(before.into_iter().filter(|(_, row)| own(row)).map(|(at, _)| *at).collect())
    }

    /// Which bound keeps a waiting task from being claimed by any worker.
    pub fn bound(&self, run: RunId, fence: Fence, now: Millis) -> Option<Bound> {
        let row = self.rows.get(&(run, fence)).filter(|row| row.held.is_none() && !row.closed)?;
        self.obstacles(row, now).into_iter().next().map(|obstacle| obstacle.bound)
    }

    pub(super) fn of(&self, run: RunId) -> impl Iterator<Item = (Fence, &Row)> {
        self.rows.range((run, Fence(0))..=(run, Fence(u64::MAX))).map(|((_, fence), row)| (*fence, row))
    }

    /// A claimed task and its holder.
    pub fn held(&self, run: RunId, fence: Fence) -> Option<(Arc<Task>, Held)> {
        let row = self.rows.get(&(run, fence))?;
        Some((row.task.clone(), row.held.clone()?))
    }

    pub fn states(&self, ns: &Namespace) -> Vec<QueueState> {
        let of_ns = self.queues.keys().filter(|(of, _)| of == ns);
        let state = |id: &QueueId| {
            let offered: Vec<&Row> = self.offered().filter(|(_, row)| row.is_in(id)).map(|(_, row)| row).collect();
            QueueState {
                name: id.1.clone(),
                ready: offered.len(),
                claimed: self.claimed().filter(|row| row.is_in(id)).count(),
                oldest: offered.iter().map(|row| row.queued_at).min(),
            }
        };
        of_ns.map(state).collect()
    }

    /// The queues of a namespace that offer tasks.
    pub fn offering(&self, ns: &Namespace) -> BTreeSet<String> {
        self.offered().filter(|(_, row)| row.ns == *ns).map(|(_, row)| row.task.queue.clone()).collect()
    }

    pub fn offers(&self, queue: &QueueId) -> bool {
        self.offered().any(|(_, row)| row.is_in(queue))
    }

    pub fn ready(&self, ns: &Namespace) -> usize {
        self.offered().filter(|(_, row)| row.ns == *ns).count()
    }

    /// The task that the claim gets next.
    fn next(&self, request: &ClaimRequest, now: Millis) -> Option<(RunId, Fence)> {
        let free: Vec<_> = self.wanted(request).filter(|(_, row)| self.obstacles(row, now).is_empty()).collect();
        let of_queue = |queue: &String| {
            let own = free.iter().filter(|(_, row)| row.task.queue == *queue);
            own.min_by_key(|(_, row)| (self.turn(row), row.rank()))
        };
        let firsts = request.queues.iter().filter_map(of_queue);
        firsts.min_by_key(|(_, row)| row.rank()).map(|(at, _)| **at)
    }

    /// When the first task becomes claimable among those that wait only for a point in time.
    fn retry_at(&self, request: &ClaimRequest, now: Millis) -> Option<Millis> {
        let free_at = |row: &Row| match self.obstacles(row, now) {
            obstacles if obstacles.iter().any(|obstacle| obstacle.until.is_none()) => None,
            obstacles => obstacles.into_iter().filter_map(|obstacle| obstacle.until).max(),
        };
        self.wanted(request).filter_map(|(_, row)| free_at(row)).min()
    }

    fn hand_over(&mut self, at: (RunId, Fence), request: &ClaimRequest, now: Millis) {
        let memo = self.runs.get(&at.0).map_or(0, |(_, memo)| *memo);
        let Some(row) = self.rows.get_mut(&at) else { return };
        self.next_claim += 1;
        row.claimed = self.next_claim;
        row.held = Some(Held {
            worker: request.worker.clone(),
            request: request.request,
            since: now,
            lease_ms: request.lease_ms,
            lease_until: now + request.lease_ms,
            deadline: row.task.timeout_ms.map(|ms| now + ms),
            claim: Claim { build: request.offer.build_of(&row.task.handler).map(str::to_owned), memo },
        });
        let (id, ns, limits, key) = (row.queue(), row.ns.clone(), row.task.limits.clone(), row.task.key.clone());
        if let Some(queue) = self.queues.get_mut(&id) {
            let served = queue.served.entry(key.clone()).or_insert(queue.last);
            queue.last = queue.last.max(*served);
            *served += 1;
            if let Some(rate) = queue.rules.rate {
                self.rates.spend(Spender::Queue(id.clone()), rate, now);
            }
        }
        self.look_at_key(&id, &key);
        for (name, key) in limits {
            if let Some(rate) = self.limits.get(&(ns.clone(), name.clone())).and_then(|rules| rules.rate) {
                self.rates.spend(Spender::Limit(ns.clone(), name, key), rate, now);
            }
        }
    }

    /// The number of tasks that workers hold.
    pub fn count_held(&self) -> usize {
        self.claimed().count()
    }

    /// The number of offered tasks that no bound keeps from being claimed, and when a rate lets the next one through.
    pub fn claimable(&self, now: Millis) -> (usize, Option<Millis>) {
        let (mut free, mut next) = (0, None);
        for (_, row) in self.offered() {
            let obstacles = self.obstacles(row, now);
            if obstacles.is_empty() {
                free += 1;
            } else if let Some(until) = obstacles.iter().map(|obstacle| obstacle.until).collect::<Option<Vec<_>>>() {
                next = next.into_iter().chain(until.into_iter().max()).min();
            }
        }
        (free, next)
    }

    /// All bounds that keep a task from being claimed, in the order in which they are reported.
    fn obstacles(&self, row: &Row, now: Millis) -> Vec<Obstacle> {
        let (id, mut found) = (row.queue(), Vec::new());
        let rules = self.queues.get(&id).map(|queue| queue.rules.clone()).unwrap_or_default();
        let in_queue = self.claimed().filter(|other| other.is_in(&id));
        let of_flow = self.claimed().filter(|other| other.is_in(&id) && other.flow == row.flow);
        if rules.paused {
            found.push(Obstacle { bound: Bound::Paused, until: None });
        }
        if let Some(most) = rules.concurrency.filter(|most| in_queue.count() >= *most as usize) {
            found.push(Obstacle { bound: Bound::Concurrency { most }, until: None });
        }
        if let Some(until) = rules.rate.and_then(|rate| self.rates.held_until(&Spender::Queue(id.clone()), rate, now)) {
            found.push(Obstacle { bound: Bound::Rate, until: Some(until) });
        }
        if let Some(most) = rules.flow_concurrency.filter(|most| of_flow.count() >= *most as usize) {
            found.push(Obstacle { bound: Bound::FlowConcurrency { most }, until: None });
        }
        for limit in &row.task.limits {
            found.extend(self.limit_obstacles(row, limit, now));
        }
        found
    }

    fn limit_obstacles(&self, row: &Row, limit: &(String, Option<String>), now: Millis) -> Vec<Obstacle> {
        let (name, key) = limit;
        let (at, mut found) = ((row.ns.clone(), name.clone()), Vec::new());
        let bound = |most| Bound::Limit { name: name.clone(), most };
        if let Some(until) = self.closed_until.get(&at).filter(|until| **until > now) {
            found.push(Obstacle { bound: bound(None), until: Some(*until) });
        }
        let Some(rules) = self.limits.get(&at) else { return found };
        let passing = self.claimed().filter(|other| other.passes(&row.ns, limit)).count();
        if let Some(most) = rules.concurrency.filter(|most| passing >= *most as usize) {
            found.push(Obstacle { bound: bound(Some(most)), until: None });
        }
        let spender = Spender::Limit(row.ns.clone(), name.clone(), key.clone());
        if let Some(until) = rules.rate.and_then(|rate| self.rates.held_until(&spender, rate, now)) {
            found.push(Obstacle { bound: bound(None), until: Some(until) });
        }
        found
    }

    /// The offered tasks that match the claim.
    fn wanted(&self, request: &ClaimRequest) -> impl Iterator<Item = (&(RunId, Fence), &Row)> {
        self.offered().filter(|(_, row)| {
            let task = &row.task;
            row.ns == request.ns
                && request.queues.contains(&task.queue)
                && request.offer.takes(task.kind, &task.handler, &task.requires, task.build.as_deref())
        })
    }

    fn offered(&self) -> impl Iterator<Item = (&(RunId, Fence), &Row)> {
        self.rows.iter().filter(|((run, _), row)| row.held.is_none() && !row.closed && !self.is_paused(*run))
    }

    fn claimed(&self) -> impl Iterator<Item = &Row> {
        self.rows.values().filter(|row| row.held.is_some())
    }

    fn turn(&self, row: &Row) -> u64 {
        let queue = self.queues.get(&row.queue());
        queue.map_or(0, |queue| queue.served.get(&row.task.key).copied().unwrap_or(queue.last))
    }

    /// Drops the count of a key without waiting tasks; a new key starts at the current count.
    fn look_at_key(&mut self, id: &QueueId, key: &Option<String>) {
        let waits = self.offered().any(|(_, row)| row.is_in(id) && row.task.key == *key);
        let Some(queue) = self.queues.get_mut(id) else { return };
        match waits {
            true => {
                queue.served.entry(key.clone()).or_insert(queue.last);
            }
            false => {
                let served = queue.served.remove(key).unwrap_or(0);
                queue.last = queue.last.max(served);
            }
        }
    }
}
