//! Which task a claim gets next: the tasks of a store in memory, indexed in the order in which they are claimed, with
//! every bound on them. For backends with one writer.
//!
//! Within a queue the keys of tasks take turns; tasks of one key are ordered by priority, where a step of priority is
//! worth [`AGE_MS`] of waiting, so that nothing starves. The cost of a claim does not depend on the number of waiting
//! tasks, keys, limits or queues: tasks blocked by a limit are parked under it (`pool.rs`) until it may let one pass.

mod bounds;
mod bucket;
mod held_by;
mod leases;
mod pool;
mod ring;
mod suit;
mod task_queue;
#[cfg(all(test, feature = "conformance"))]
mod tests;
mod wait;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde_json::Value;

use eddyline_machine::explain::Bound;
use eddyline_machine::{ActId, Claim, Fence, Millis, RunId, Task};

use bounds::Bounds;
pub(crate) use bucket::{Bucket, BucketKey};
use held_by::HeldBy;
pub use leases::UNWATCHED_MS;
use suit::Class;
use task_queue::{Offered, Place, TaskQueue};
use wait::Waiters;

use crate::claim::{ClaimRequest, Held, RequestId};
use crate::document::{DocumentKey, LimitRules, QueueRules, kind};
use crate::ids::{Map, Namespace};
use crate::query::{Change, LimitState, QueueState};

/// The waiting time that a step of priority is worth.
pub const AGE_MS: Millis = 60_000;

/// The most classes that one claim parks. A changed limit may have opened all classes that waited for it; later claims
/// examine the rest, so that no claim blocks the queues for long.
const MOST_PARKS: usize = 1_000;

#[derive(Debug, Default)]
pub(crate) struct TaskQueues {
    /// Never removed, so that an index identifies a queue.
    queues: Vec<TaskQueue>,
    places: Map<Namespace, Map<Arc<str>, usize>>,
    runs: Map<RunId, OfRun>,
    bounds: Bounds,
    /// Which pools wait for which bound.
    waiters: Waiters,
    /// The number of tasks of each class.
    classes: Map<Arc<Class>, usize>,
    expiries: BTreeSet<(Millis, RunId, Fence)>,
    requests: Map<RequestId, Vec<(RunId, Fence)>>,
    /// The number of tasks each worker holds.
    held_by: HeldBy,
    looked_at: Option<Millis>,
}

/// The tasks of a run.
#[derive(Debug)]
struct OfRun {
    ns: Namespace,
    flow: Arc<str>,
    paused: bool,
    /// The newest change in a code run's memo.
    memo: u64,
    tasks: BTreeMap<Fence, Entry>,
}

#[derive(Debug, Clone)]
struct Entry {
    /// Its index in [`TaskQueues::queues`].
    queue: usize,
    place: Place,
    activation: ActId,
    timeout_ms: Option<Millis>,
    /// When its `start_timeout` ends.
    start_by: Option<Millis>,
    closed: bool,
    held: Option<Held>,
    /// Its time in `expiries`.
    expiry: Option<Millis>,
}

/// A task to add.
#[derive(Debug)]
pub(crate) struct Queued<'a> {
    pub task: &'a Task,
    pub queued_at: Millis,
    /// Its position among all tasks ever queued.
    pub place: u64,
    /// When its `start_timeout` ends.
    pub start_by: Option<Millis>,
    pub closed: bool,
    pub held: Option<Held>,
}

/// The next task for a claim.
#[derive(Debug)]
struct Next {
    /// The index of its queue among the claim's queues, and of its pool there.
    queue: usize,
    pool: usize,
    at: (RunId, Fence),
}

/// A task that a claim got.
#[derive(Debug, Clone)]
pub(crate) struct Picked {
    pub run: RunId,
    pub fence: Fence,
    pub held: Held,
    /// It was claimed by the same request before.
    pub before: bool,
}

impl TaskQueues {
    /// Applies the rules in a changed document, if it has any. Returns the queues whose order may have changed.
    pub fn set_rules(&mut self, ns: &Namespace, key: &DocumentKey, body: Option<&Value>) -> Vec<String> {
        match key.kind.as_str() {
            kind::QUEUE => {
                if let Some(fault) = body.and_then(QueueRules::fault) {
                    tracing::error!(%ns, queue = key.id, "the queue is paused: {fault}");
                }
                let queue = self.queue_index(ns, &key.id);
                self.queues[queue].rules = body.map(QueueRules::read).unwrap_or_default();
                vec![key.id.clone()]
            }
            kind::LIMIT => {
                if let Some(fault) = body.and_then(LimitRules::fault) {
                    tracing::error!(%ns, limit = key.id, "the limit lets no task pass: {fault}");
                }
                self.bounds.set_limit(ns, &key.id, body.map(LimitRules::read));
                self.bounds.lift(ns, &key.id);
                for bound in self.waiters.bounds_of(ns, &key.id) {
                    self.open(&bound);
                }
                self.of(ns).map(|queue| queue.name.to_string()).collect()
            }
            _ => Vec::new(),
        }
    }

    pub fn set_bucket(&mut self, key: BucketKey, bucket: Bucket) {
        let bound = Arc::new(key.clone());
        self.bounds.set_bucket(key, bucket);
        self.open(&bound);
    }

    pub fn drop_bucket(&mut self, key: &BucketKey) {
        self.bounds.drop_bucket(key);
        self.open(&Arc::new(key.clone()));
    }

    /// The buckets that changed since the last call.
    pub fn take_spent(&mut self) -> Vec<(BucketKey, Bucket)> {
        self.bounds.take_spent()
    }

    /// Closes a limit until then, for a worker that asked to slow down.
    pub fn slow(&mut self, ns: &Namespace, limit: &str, until: Millis) {
        self.bounds.slow(ns, limit, until);
    }

    /// The limits of a namespace that workers closed for a while.
    pub fn closed_limits(&self, ns: &Namespace, now: Millis) -> Vec<LimitState> {
        self.bounds.closed(ns, now)
    }

    /// Drops the buckets of rates that have been full since before that time.
    pub fn forget_full(&mut self, before: Millis) -> Vec<BucketKey> {
        let TaskQueues { queues, places, bounds, .. } = self;
        let queue = |key: &BucketKey| places.get(&key.ns)?.get(key.name.as_str()).map(|at| &queues[*at]);
        bounds.forget_full(before, |key| queue(key)?.rules.rate)
    }

    /// Sets the properties of a run that its claims depend on; kept for as long as it has tasks. Returns the queues
    /// that offer more tasks now, because the run was resumed.
    pub fn set_run(&mut self, ns: &Namespace, run: RunId, flow: &str, paused: bool, memo: u64) -> Vec<String> {
        let of_run = self.runs.entry(run).or_insert_with(|| OfRun {
            ns: ns.clone(),
            flow: Arc::from(flow),
            paused,
            memo,
            tasks: BTreeMap::new(),
        });
        of_run.memo = memo;
        if of_run.paused == paused {
            return Vec::new();
        }
        of_run.paused = paused;
        let waiting: Vec<(Fence, Entry)> = of_run.waiting().map(|(fence, entry)| (*fence, entry.clone())).collect();
        let mut resumed = BTreeSet::new();
        for (fence, entry) in waiting {
            if paused {
                self.leave(&entry);
            } else {
                self.queues[entry.queue].join(&entry.place, (run, fence));
                resumed.insert(self.queues[entry.queue].name.to_string());
            }
        }
        resumed.into_iter().collect()
    }

    /// Drops the properties of a run that has no tasks.
    pub fn forget_idle(&mut self, run: RunId) {
        if self.runs.get(&run).is_some_and(|of_run| of_run.tasks.is_empty()) {
            self.runs.remove(&run);
        }
    }

    pub fn knows(&self, run: RunId) -> bool {
        self.runs.contains_key(&run)
    }

    /// Adds a task, waiting or claimed. Its run must be known.
    pub fn add(&mut self, run: RunId, queued: Queued<'_>) {
        let Some(of_run) = self.runs.get(&run) else { return };
        let (task, ns) = (queued.task, of_run.ns.clone());
        let class = Class::of(&ns, &of_run.flow, task);
        let class = self.classes.get_key_value(&class).map_or_else(|| Arc::new(class), |(known, _)| known.clone());
        let age = Millis::from(task.priority).saturating_mul(AGE_MS);
        let place = Place {
            class,
            key: task.key.as_deref().map(Arc::from),
            rank: (queued.queued_at.saturating_sub(age), queued.place),
            queued_at: queued.queued_at,
        };
        let entry = Entry {
            queue: self.queue_index(&ns, &task.queue),
            place,
            activation: task.activation,
            timeout_ms: task.timeout_ms,
            start_by: queued.start_by,
            closed: queued.closed,
            held: queued.held,
            expiry: None,
        };
        self.link(run, task.fence, entry);
    }

    /// Stops offering a task; a worker that holds it keeps it.
    pub fn close(&mut self, run: RunId, fence: Fence) {
        if let Some((entry, _)) = self.unlink(run, fence) {
            self.link(run, fence, Entry { closed: true, ..entry });
        }
    }

    /// Returns the queues in which other tasks may have become claimable, because a bound has room again.
    pub fn remove(&mut self, run: RunId, fence: Fence) -> Vec<String> {
        let Some((_, roomier)) = self.unlink(run, fence) else { return Vec::new() };
        roomier.into_iter().map(|queue| self.queues[queue].name.to_string()).collect()
    }

    /// Grants a claim: the tasks it gets, and when to retry for more.
    pub fn claim(&mut self, request: &ClaimRequest, now: Millis) -> (Vec<Picked>, Option<Millis>) {
        if let Some(before) = self.requests.get(&request.request) {
            let before = before.clone();
            let again = |(run, fence): (RunId, Fence)| {
                let of_run = self.runs.get(&run).filter(|of_run| of_run.ns == request.ns)?;
                let held = of_run.tasks.get(&fence)?.held.clone()?;
                (held.worker == request.worker).then_some(Picked { run, fence, held, before: true })
            };
            return (before.into_iter().filter_map(again).collect(), None);
        }
        for bound in self.waiters.take_due(now) {
            self.open(&bound);
        }
        let wanted = request.queues.iter().filter_map(|queue| self.places.get(&request.ns)?.get(queue.as_str()));
        let wanted: Vec<usize> = wanted.copied().collect();
        let mut queues: Vec<(usize, Offered)> = Vec::with_capacity(wanted.len());
        for index in wanted {
            // A queue may be named twice.
            if queues.iter().all(|(known, _)| *known != index) {
                queues.push((index, self.queues[index].offered(&request.offer)));
            }
        }
        queues.retain(|(_, offered)| !offered.suits.is_empty());
        let (mut picked, mut parks) = (Vec::new(), MOST_PARKS);
        while picked.len() < request.max && !self.is_full(request) {
            let Some(Next { queue, pool, at: (run, fence) }) = self.best(&mut queues, now, &mut parks) else {
                let retry_at = if parks == 0 { Some(now) } else { self.retry_at(&queues, now) };
                return (picked, retry_at);
            };
            let Some(held) = self.hand_over(run, fence, request, now) else { break };
            picked.push(Picked { run, fence, held, before: false });
            let (index, offered) = &mut queues[queue];
            self.queues[*index].place(offered, pool);
        }
        (picked, None)
    }

    /// Whether the worker of a claim holds `most_held` tasks.
    pub fn is_full(&self, request: &ClaimRequest) -> bool {
        request.most_held.is_some_and(|most| self.held_by(&request.ns, &request.worker) >= most)
    }

    pub fn held_by(&self, ns: &Namespace, worker: &str) -> usize {
        self.held_by.count(ns, worker)
    }

    /// Which bound keeps a waiting task from being claimed by any worker.
    pub fn bound(&self, run: RunId, fence: Fence, now: Millis) -> Option<Bound> {
        let entry = self.runs.get(&run)?.tasks.get(&fence).filter(|entry| entry.held.is_none() && !entry.closed)?;
        let queue = &self.queues[entry.queue];
        queue
            .closed_by()
            .or_else(|| self.held_until(queue, now).map(|_| Bound::Rate))
            .or_else(|| queue.closed_to(&entry.place.class.suit.flow))
            .or_else(|| {
                let blocked = self.bounds.blocked(&entry.place.class, now)?;
                Some(Bound::Limit { name: blocked.by.name.clone(), most: blocked.most })
            })
    }

    pub fn states(&self, ns: &Namespace) -> Vec<QueueState> {
        let mut states: Vec<QueueState> = self.of(ns).map(TaskQueue::state).collect();
        states.sort_by(|a, b| a.name.cmp(&b.name));
        states
    }

    /// The number of waiting tasks of a namespace.
    pub fn ready(&self, ns: &Namespace) -> usize {
        self.of(ns).map(TaskQueue::ready).sum()
    }

    /// Whether to send a hint: a queue only if it offers tasks, leases only if one ends before the next periodic check.
    pub fn is_worth(&self, change: &Change, now: Millis) -> bool {
        match change {
            Change::Tasks { ns, queue } => self.find(ns, queue).is_some_and(TaskQueue::offers_anything),
            Change::Leases => self.expiries.first().is_some_and(|(at, ..)| *at <= now + UNWATCHED_MS),
            _ => true,
        }
    }

    /// The next task that the queues offer. None if there is none, or if `parks` is used up before one is found.
    fn best(&mut self, queues: &mut [(usize, Offered)], now: Millis, parks: &mut usize) -> Option<Next> {
        let (mut best, mut learned) = (None, Vec::new());
        for (queue, (index, offered)) in queues.iter_mut().enumerate() {
            if !self.is_open(&self.queues[*index], now) {
                continue;
            }
            let bounds = &self.bounds;
            let found = self.queues[*index].first(offered, |class| bounds.blocked(class, now), &mut learned, parks);
            for learned in learned.drain(..) {
                self.waiters.learn(*index, learned);
            }
            if *parks == 0 {
                // A task not examined yet may come before those found so far.
                return None;
            }
            if let Some((rank, at, pool)) = found
                && best.as_ref().is_none_or(|(better, _)| rank < *better)
            {
                best = Some((rank, Next { queue, pool, at }));
            }
        }
        best.map(|(_, next)| next)
    }

    /// When a claim that got all claimable tasks should be retried.
    fn retry_at(&self, queues: &[(usize, Offered)], now: Millis) -> Option<Millis> {
        let at = |(at, offered): &(usize, Offered)| {
            let queue = &self.queues[*at];
            if queue.closed_by().is_some() || !queue.offers_anything() {
                return None;
            }
            self.held_until(queue, now).or_else(|| queue.opens_at(&offered.suits))
        };
        queues.iter().filter_map(at).min()
    }

    fn is_open(&self, queue: &TaskQueue, now: Millis) -> bool {
        queue.offers_anything() && queue.closed_by().is_none() && self.held_until(queue, now).is_none()
    }

    /// Until when the rate of a queue blocks all its tasks.
    fn held_until(&self, queue: &TaskQueue, now: Millis) -> Option<Millis> {
        let rate = queue.rules.rate?;
        self.bounds.held_until(&BucketKey::queue(&queue.ns, &queue.name), Some(rate), now)
    }

    /// Gives an offered task to a worker. Changes the entry in place, because every task takes this path.
    fn hand_over(&mut self, run: RunId, fence: Fence, request: &ClaimRequest, now: Millis) -> Option<Held> {
        let TaskQueues { queues, runs, waiters, bounds, requests, expiries, held_by, .. } = self;
        let of_run = runs.get_mut(&run)?;
        let memo = of_run.memo;
        let entry = of_run.tasks.get_mut(&fence)?;
        let (queue, class) = (&mut queues[entry.queue], &entry.place.class);
        // Count the turn before the task leaves: a key that returns after its last task was claimed has had its turn.
        queue.served(&entry.place.key);
        if let Some(bound) = queue.leave(&entry.place) {
            waiters.drop(&bound, entry.queue, &class.suit);
        }
        if let Some(rate) = queue.rules.rate {
            bounds.spend_rate(&BucketKey::queue(&queue.ns, &queue.name), rate, now);
        }
        bounds.spend(class, now);
        queue.count(&class.suit.flow, 1);
        bounds.count(class, 1);
        let build = request.offer.build_of(&class.suit.handler).map(str::to_owned);
        let held = Held {
            worker: request.worker.clone(),
            request: request.request,
            since: now,
            lease_ms: request.lease_ms,
            lease_until: now + request.lease_ms,
            deadline: entry.timeout_ms.map(|ms| now + ms),
            claim: Claim { build, memo },
        };
        requests.entry(request.request).or_default().push((run, fence));
        held_by.add(&of_run.ns, &held.worker);
        entry.held = Some(held.clone());
        if let Some(at) = entry.expiry {
            expiries.remove(&(at, run, fence));
        }
        entry.expiry = entry.expires_at();
        expiries.extend(entry.expiry.map(|at| (at, run, fence)));
        Some(held)
    }

    /// Adds an entry to all indexes: as claimed, or to its queue if it is offered.
    fn link(&mut self, run: RunId, fence: Fence, mut entry: Entry) {
        let Some(of_run) = self.runs.get(&run) else { return };
        *self.classes.entry(entry.place.class.clone()).or_default() += 1;
        if let Some(held) = &entry.held {
            self.requests.entry(held.request).or_default().push((run, fence));
            self.held_by.add(&of_run.ns, &held.worker);
            self.queues[entry.queue].count(&entry.place.class.suit.flow, 1);
            self.bounds.count(&entry.place.class, 1);
        } else if !of_run.paused && !entry.closed {
            self.queues[entry.queue].join(&entry.place, (run, fence));
        }
        self.schedule(run, fence, &mut entry);
        self.put_back(run, fence, entry);
    }

    /// Removes an entry from all indexes; also returns the queues in which other tasks may have become claimable.
    fn unlink(&mut self, run: RunId, fence: Fence) -> Option<(Entry, BTreeSet<usize>)> {
        let paused = self.runs.get(&run)?.paused;
        let (ns, entry) = self.lift(run, fence)?;
        let class = &entry.place.class;
        let mut roomier = BTreeSet::new();
        if let Some(held) = &entry.held {
            self.held_by.remove(&ns, &held.worker);
            if let Some(claimed) = self.requests.get_mut(&held.request) {
                claimed.retain(|at| *at != (run, fence));
                if claimed.is_empty() {
                    self.requests.remove(&held.request);
                }
            }
            let queue = &mut self.queues[entry.queue];
            queue.count(&class.suit.flow, -1);
            if queue.rules.concurrency.is_some() || queue.rules.flow_concurrency.is_some() {
                roomier.insert(entry.queue);
            }
            self.bounds.count(class, -1);
            for limit in &class.limits {
                if self.bounds.limit(&limit.ns, &limit.name).is_some_and(|rules| rules.concurrency.is_some()) {
                    roomier.extend(self.open(limit));
                }
            }
        } else if !paused && !entry.closed {
            self.leave(&entry);
        }
        if let Some(count) = self.classes.get_mut(class) {
            *count -= 1;
            if *count == 0 {
                self.classes.remove(class);
            }
        }
        Some((entry, roomier))
    }

    fn leave(&mut self, entry: &Entry) {
        if let Some(bound) = self.queues[entry.queue].leave(&entry.place) {
            self.waiters.drop(&bound, entry.queue, &entry.place.class.suit);
        }
    }

    /// Marks a bound as possibly open; returns the queues with tasks parked under it.
    fn open(&mut self, bound: &Arc<BucketKey>) -> BTreeSet<usize> {
        let mut opened = BTreeSet::new();
        for (queue, suit) in self.waiters.of(bound) {
            self.queues[*queue].open(suit, bound);
            opened.insert(*queue);
        }
        opened
    }

    fn find(&self, ns: &Namespace, queue: &str) -> Option<&TaskQueue> {
        self.places.get(ns)?.get(queue).map(|queue| &self.queues[*queue])
    }

    /// The queues of a namespace.
    fn of(&self, ns: &Namespace) -> impl Iterator<Item = &TaskQueue> {
        self.places.get(ns).into_iter().flat_map(Map::values).map(|queue| &self.queues[*queue])
    }

    /// The index of a queue, which is created if necessary.
    fn queue_index(&mut self, ns: &Namespace, queue: &str) -> usize {
        if let Some(queue) = self.places.get(ns).and_then(|of_ns| of_ns.get(queue)) {
            return *queue;
        }
        let name: Arc<str> = Arc::from(queue);
        self.queues.push(TaskQueue::new(ns, name.clone()));
        self.places.entry(ns.clone()).or_default().insert(name, self.queues.len() - 1);
        self.queues.len() - 1
    }

    /// Removes an entry in order to change it; [`TaskQueues::put_back`] puts it back.
    fn lift(&mut self, run: RunId, fence: Fence) -> Option<(Namespace, Entry)> {
        let of_run = self.runs.get_mut(&run)?;
        let entry = of_run.tasks.remove(&fence)?;
        if let Some(at) = entry.expiry {
            self.expiries.remove(&(at, run, fence));
        }
        Some((of_run.ns.clone(), entry))
    }

    fn put_back(&mut self, run: RunId, fence: Fence, entry: Entry) {
        if let Some(of_run) = self.runs.get_mut(&run) {
            of_run.tasks.insert(fence, entry);
        }
    }
}

impl OfRun {
    fn waiting(&self) -> impl Iterator<Item = (&Fence, &Entry)> {
        self.tasks.iter().filter(|(_, entry)| entry.held.is_none() && !entry.closed)
    }
}
