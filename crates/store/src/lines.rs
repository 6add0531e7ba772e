//! Who gets which task next. The tasks of a store in memory, in the order in which they are claimed, with every bound on
//! them; used by each backend that has one writer.
//!
//! Within a queue the keys of tasks take turns; tasks of one key go by priority, where a step of priority is worth
//! [`AGE_MS`] of waiting, so that nothing starves. What a claim costs does not depend on how many tasks, keys, limits or
//! queues wait: tasks that a limit keeps back are parked under it (`pool.rs`) and woken when it lets something pass.

mod bounds;
mod bucket;
mod held_by;
mod leases;
mod line;
mod pool;
mod ring;
mod suit;
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
use line::{Line, Offered, Place};
use suit::Class;
use wait::Waiters;

use crate::claim::{ClaimRequest, Held, RequestId};
use crate::document::{DocumentKey, LimitRules, QueueRules, kind};
use crate::ids::{Map, Namespace};
use crate::query::{Change, LimitState, QueueState};

/// A step of priority is worth so much waiting.
pub const AGE_MS: Millis = 60_000;

/// So many classes one claim parks at most. A limit that was changed may have opened all that waited for it; the rest is
/// looked at by the next claims, so that none of them keeps the lines for long.
const MOST_PARKS: usize = 1_000;

#[derive(Debug, Default)]
pub(crate) struct Lines {
    /// They are never taken away, so that a place among them says which one it is.
    lines: Vec<Line>,
    places: Map<Namespace, Map<Arc<str>, usize>>,
    runs: Map<RunId, OfRun>,
    bounds: Bounds,
    /// Who waits for which bound.
    waiters: Waiters,
    /// How many tasks there are of each class.
    classes: Map<Arc<Class>, usize>,
    expiries: BTreeSet<(Millis, RunId, Fence)>,
    requests: Map<RequestId, Vec<(RunId, Fence)>>,
    /// How many tasks each worker has.
    held_by: HeldBy,
    looked_at: Option<Millis>,
}

/// The tasks of a run.
#[derive(Debug)]
struct OfRun {
    ns: Namespace,
    flow: Arc<str>,
    paused: bool,
    /// The newest change of a code run's memo.
    memo: u64,
    tasks: BTreeMap<Fence, Entry>,
}

#[derive(Debug, Clone)]
struct Entry {
    /// Which of the lines it is in.
    line: usize,
    place: Place,
    activation: ActId,
    timeout_ms: Option<Millis>,
    /// When it is too late to be claimed.
    start_by: Option<Millis>,
    closed: bool,
    held: Option<Held>,
    /// Where it is in `expiries`.
    expiry: Option<Millis>,
}

/// A task as it is put in line.
#[derive(Debug)]
pub(crate) struct Queued<'a> {
    pub task: &'a Task,
    pub queued_at: Millis,
    /// Its place among all tasks that were ever queued.
    pub place: u64,
    /// When it is too late to be claimed.
    pub start_by: Option<Millis>,
    pub closed: bool,
    pub held: Option<Held>,
}

/// The task that is next for a claim.
#[derive(Debug)]
struct Next {
    /// Which of the claim's queues it is in, and which of the pools there.
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

impl Lines {
    /// A document changed; if it holds rules, they hold from now on. The queues in which others may be next because of it.
    pub fn set_rules(&mut self, ns: &Namespace, key: &DocumentKey, body: Option<&Value>) -> Vec<String> {
        match key.kind.as_str() {
            kind::QUEUE => {
                if let Some(fault) = body.and_then(QueueRules::fault) {
                    tracing::error!(%ns, queue = key.id, "the queue is paused: {fault}");
                }
                let line = self.line(ns, &key.id);
                self.lines[line].rules = body.map(QueueRules::read).unwrap_or_default();
                vec![key.id.clone()]
            }
            kind::LIMIT => {
                if let Some(fault) = body.and_then(LimitRules::fault) {
                    tracing::error!(%ns, limit = key.id, "nothing passes the limit: {fault}");
                }
                self.bounds.set_limit(ns, &key.id, body.map(LimitRules::read));
                self.bounds.lift(ns, &key.id);
                for bound in self.waiters.bounds_of(ns, &key.id) {
                    self.open(&bound);
                }
                self.of(ns).map(|line| line.name.to_string()).collect()
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

    /// What changed of the buckets since the last time.
    pub fn take_spent(&mut self) -> Vec<(BucketKey, Bucket)> {
        self.bounds.take_spent()
    }

    /// A worker asked to slow a limit down: nothing passes it until then.
    pub fn slow(&mut self, ns: &Namespace, limit: &str, until: Millis) {
        self.bounds.slow(ns, limit, until);
    }

    /// The limits of a namespace that workers closed for a while.
    pub fn closed_limits(&self, ns: &Namespace, now: Millis) -> Vec<LimitState> {
        self.bounds.closed(ns, now)
    }

    /// Forgets rates that are as if nothing had ever been claimed, and were so before that moment already.
    pub fn forget_full(&mut self, before: Millis) -> Vec<BucketKey> {
        let Lines { lines, places, bounds, .. } = self;
        let line = |key: &BucketKey| places.get(&key.ns)?.get(key.name.as_str()).map(|at| &lines[*at]);
        bounds.forget_full(before, |key| line(key)?.rules.rate)
    }

    /// Facts of a run that its claims depend on, known for as long as it has tasks. The queues that have more to offer
    /// now, because it was resumed.
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
                self.lines[entry.line].join(&entry.place, (run, fence));
                resumed.insert(self.lines[entry.line].name.to_string());
            }
        }
        resumed.into_iter().collect()
    }

    /// Forgets the facts of a run that has no tasks.
    pub fn forget_idle(&mut self, run: RunId) {
        if self.runs.get(&run).is_some_and(|of_run| of_run.tasks.is_empty()) {
            self.runs.remove(&run);
        }
    }

    pub fn knows(&self, run: RunId) -> bool {
        self.runs.contains_key(&run)
    }

    /// Puts a task in line, or among those that are held. Its run must be known.
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
            line: self.line(&ns, &task.queue),
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

    /// No longer offered; a worker that has it keeps it.
    pub fn close(&mut self, run: RunId, fence: Fence) {
        if let Some((entry, _)) = self.unlink(run, fence) {
            self.link(run, fence, Entry { closed: true, ..entry });
        }
    }

    /// The queues in which others may be claimed now, because a bound has room again.
    pub fn remove(&mut self, run: RunId, fence: Fence) -> Vec<String> {
        let Some((_, roomier)) = self.unlink(run, fence) else { return Vec::new() };
        roomier.into_iter().map(|line| self.lines[line].name.to_string()).collect()
    }

    /// Gives out tasks.
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
        let lines = request.queues.iter().filter_map(|queue| self.places.get(&request.ns)?.get(queue.as_str()));
        let lines: Vec<usize> = lines.copied().collect();
        let mut queues: Vec<(usize, Offered)> = Vec::with_capacity(lines.len());
        for line in lines {
            // One that is named twice is looked at once.
            if queues.iter().all(|(known, _)| *known != line) {
                queues.push((line, self.lines[line].offered(&request.offer)));
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
            let (line, offered) = &mut queues[queue];
            self.lines[*line].place(offered, pool);
        }
        (picked, None)
    }

    /// Whether the worker of a claim has as many tasks as it may have.
    pub fn is_full(&self, request: &ClaimRequest) -> bool {
        request.most_held.is_some_and(|most| self.held_by(&request.ns, &request.worker) >= most)
    }

    pub fn held_by(&self, ns: &Namespace, worker: &str) -> usize {
        self.held_by.count(ns, worker)
    }

    /// What keeps a task that waits from being claimed, whoever asks for it.
    pub fn bound(&self, run: RunId, fence: Fence, now: Millis) -> Option<Bound> {
        let entry = self.runs.get(&run)?.tasks.get(&fence).filter(|entry| entry.held.is_none() && !entry.closed)?;
        let line = &self.lines[entry.line];
        line.closed_by()
            .or_else(|| self.held_until(line, now).map(|_| Bound::Rate))
            .or_else(|| line.closed_to(&entry.place.class.suit.flow))
            .or_else(|| {
                let blocked = self.bounds.blocked(&entry.place.class, now)?;
                Some(Bound::Limit { name: blocked.by.name.clone(), most: blocked.most })
            })
    }

    pub fn states(&self, ns: &Namespace) -> Vec<QueueState> {
        let mut states: Vec<QueueState> = self.of(ns).map(Line::state).collect();
        states.sort_by(|a, b| a.name.cmp(&b.name));
        states
    }

    /// How many tasks of a namespace wait in its lines.
    pub fn ready(&self, ns: &Namespace) -> usize {
        self.of(ns).map(Line::ready).sum()
    }

    /// Whether anybody need be told: of a queue only if there is something left in it to claim, of leases only if one ends
    /// before whoever serves looks after them anyway.
    pub fn is_worth(&self, change: &Change, now: Millis) -> bool {
        match change {
            Change::Tasks { ns, queue } => self.find(ns, queue).is_some_and(Line::offers_anything),
            Change::Leases => self.expiries.first().is_some_and(|(at, ..)| *at <= now + UNWATCHED_MS),
            _ => true,
        }
    }

    /// The task that is next among those that the queues offer. None if there is none, or if it would take more parks to
    /// find it.
    fn best(&mut self, queues: &mut [(usize, Offered)], now: Millis, parks: &mut usize) -> Option<Next> {
        let (mut best, mut learned) = (None, Vec::new());
        for (queue, (line, offered)) in queues.iter_mut().enumerate() {
            if !self.is_open(&self.lines[*line], now) {
                continue;
            }
            let bounds = &self.bounds;
            let found = self.lines[*line].first(offered, |class| bounds.blocked(class, now), &mut learned, parks);
            for learned in learned.drain(..) {
                self.waiters.learn(*line, learned);
            }
            if *parks == 0 {
                // Another queue may have one that comes before what was found so far.
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

    /// When there may be more for a claim that got all there is now.
    fn retry_at(&self, queues: &[(usize, Offered)], now: Millis) -> Option<Millis> {
        let at = |(at, offered): &(usize, Offered)| {
            let line = &self.lines[*at];
            if line.closed_by().is_some() || !line.offers_anything() {
                return None;
            }
            self.held_until(line, now).or_else(|| line.opens_at(&offered.suits))
        };
        queues.iter().filter_map(at).min()
    }

    fn is_open(&self, line: &Line, now: Millis) -> bool {
        line.offers_anything() && line.closed_by().is_none() && self.held_until(line, now).is_none()
    }

    /// Until when the rate of a queue keeps all its tasks back.
    fn held_until(&self, line: &Line, now: Millis) -> Option<Millis> {
        let rate = line.rules.rate?;
        self.bounds.held_until(&BucketKey::queue(&line.ns, &line.name), Some(rate), now)
    }

    /// Gives a task that is offered to a worker. In place: this happens to every task.
    fn hand_over(&mut self, run: RunId, fence: Fence, request: &ClaimRequest, now: Millis) -> Option<Held> {
        let Lines { lines, runs, waiters, bounds, requests, expiries, held_by, .. } = self;
        let of_run = runs.get_mut(&run)?;
        let memo = of_run.memo;
        let entry = of_run.tasks.get_mut(&fence)?;
        let (line, class) = (&mut lines[entry.line], &entry.place.class);
        // Served first: a key that comes back after its last task was claimed has had its turn.
        line.served(&entry.place.key);
        if let Some(bound) = line.leave(&entry.place) {
            waiters.drop(&bound, entry.line, &class.suit);
        }
        if let Some(rate) = line.rules.rate {
            bounds.spend_rate(&BucketKey::queue(&line.ns, &line.name), rate, now);
        }
        bounds.spend(class, now);
        line.count(&class.suit.flow, 1);
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

    /// Puts an entry where it belongs: among those that are held, or in line if it is offered.
    fn link(&mut self, run: RunId, fence: Fence, mut entry: Entry) {
        let Some(of_run) = self.runs.get(&run) else { return };
        *self.classes.entry(entry.place.class.clone()).or_default() += 1;
        if let Some(held) = &entry.held {
            self.requests.entry(held.request).or_default().push((run, fence));
            self.held_by.add(&of_run.ns, &held.worker);
            self.lines[entry.line].count(&entry.place.class.suit.flow, 1);
            self.bounds.count(&entry.place.class, 1);
        } else if !of_run.paused && !entry.closed {
            self.lines[entry.line].join(&entry.place, (run, fence));
        }
        self.schedule(run, fence, &mut entry);
        self.put_back(run, fence, entry);
    }

    /// Takes an entry out of everything, with the lines in which others may be claimed now because of it.
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
            let line = &mut self.lines[entry.line];
            line.count(&class.suit.flow, -1);
            if line.rules.concurrency.is_some() || line.rules.flow_concurrency.is_some() {
                roomier.insert(entry.line);
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
        if let Some(bound) = self.lines[entry.line].leave(&entry.place) {
            self.waiters.drop(&bound, entry.line, &entry.place.class.suit);
        }
    }

    /// A bound may let something pass. The lines of those who wait for it.
    fn open(&mut self, bound: &Arc<BucketKey>) -> BTreeSet<usize> {
        let mut opened = BTreeSet::new();
        for (line, suit) in self.waiters.of(bound) {
            self.lines[*line].open(suit, bound);
            opened.insert(*line);
        }
        opened
    }

    fn find(&self, ns: &Namespace, queue: &str) -> Option<&Line> {
        self.places.get(ns)?.get(queue).map(|line| &self.lines[*line])
    }

    /// Those of a namespace.
    fn of(&self, ns: &Namespace) -> impl Iterator<Item = &Line> {
        self.places.get(ns).into_iter().flat_map(Map::values).map(|line| &self.lines[*line])
    }

    /// The place of a line, which is made if there is none.
    fn line(&mut self, ns: &Namespace, queue: &str) -> usize {
        if let Some(line) = self.places.get(ns).and_then(|of_ns| of_ns.get(queue)) {
            return *line;
        }
        let name: Arc<str> = Arc::from(queue);
        self.lines.push(Line::new(ns, name.clone()));
        self.places.entry(ns.clone()).or_default().insert(name, self.lines.len() - 1);
        self.lines.len() - 1
    }

    /// Takes an entry out to change it; [`Lines::put_back`] puts it back.
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
