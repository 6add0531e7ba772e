//! Who gets which task next. The tasks of a store in memory, in the order in which they are claimed, with every bound on
//! them; used by each backend that has one writer.
//!
//! Within a queue the keys of tasks take turns; tasks of one key go by priority, where a step of priority is worth
//! [`AGE_MS`] of waiting, so that nothing starves. Tasks that any worker would take or leave together form a class, so a
//! claim looks at the heads of classes and never scans tasks.

mod bucket;
mod leases;
mod order;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::Deserialize;
use serde_json::Value;

use eddyline_machine::explain::Bound;
use eddyline_machine::{ActId, Claim, Fence, Millis, RunId, Task, TaskKind};

pub(crate) use bucket::{Bucket, BucketKey};
pub use leases::UNWATCHED_MS;
use order::{Line, Rank};

use crate::claim::{ClaimRequest, Held, Offer, RequestId};
use crate::document::{DocumentKey, LimitRules, QueueRules, Rate, kind};
use crate::ids::{Map, Namespace};
use crate::query::{Change, QueueState};

/// A step of priority is worth so much waiting.
pub const AGE_MS: Millis = 60_000;
/// What any worker would take or leave together.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Class {
    flow: Arc<str>,
    kind: Kind,
    handler: String,
    requires: Vec<String>,
    build: Option<String>,
    limits: Vec<(String, Option<String>)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Kind {
    Step,
    Run,
}

impl Class {
    fn of(flow: &Arc<str>, task: &Task) -> Class {
        Class {
            flow: flow.clone(),
            kind: match task.kind {
                TaskKind::Step => Kind::Step,
                TaskKind::Run => Kind::Run,
            },
            handler: task.handler.clone(),
            requires: task.requires.clone(),
            build: task.build.clone(),
            limits: task.limits.clone(),
        }
    }

    fn suits(&self, offer: &Offer) -> bool {
        let kind = match self.kind {
            Kind::Step => TaskKind::Step,
            Kind::Run => TaskKind::Run,
        };
        offer.takes(kind, &self.handler, &self.requires, self.build.as_deref())
    }
}

#[derive(Debug, Default)]
pub(crate) struct Lines {
    /// They are never taken away, so that a place among them says which one it is.
    lines: Vec<Line>,
    places: Map<Namespace, Map<Arc<str>, usize>>,
    runs: Map<RunId, OfRun>,
    limits: Map<(Namespace, String), LimitRules>,
    /// Claimed tasks by limit and key.
    passing: Map<BucketKey, u32>,
    buckets: Map<BucketKey, Bucket>,
    /// Buckets that changed since they were last asked for.
    spent: BTreeSet<BucketKey>,
    classes: BTreeSet<Arc<Class>>,
    expiries: BTreeSet<(Millis, RunId, Fence)>,
    requests: Map<RequestId, Vec<(RunId, Fence)>>,
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
    /// The place of its line.
    line: usize,
    class: Arc<Class>,
    key: Option<Arc<str>>,
    rank: Rank,
    queued_at: Millis,
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
                let rules = body.and_then(|body| QueueRules::deserialize(body).ok()).unwrap_or_default();
                let line = self.line(ns, &key.id);
                self.lines[line].rules = rules;
                vec![key.id.clone()]
            }
            kind::LIMIT => {
                let at = (ns.clone(), key.id.clone());
                match body.and_then(|body| LimitRules::deserialize(body).ok()) {
                    Some(rules) => self.limits.insert(at, rules),
                    None => self.limits.remove(&at),
                };
                self.of(ns).map(|line| line.name.to_string()).collect()
            }
            _ => Vec::new(),
        }
    }

    pub fn set_bucket(&mut self, key: BucketKey, bucket: Bucket) {
        self.buckets.insert(key, bucket);
    }

    pub fn drop_bucket(&mut self, key: &BucketKey) {
        self.buckets.remove(key);
    }

    /// What changed of the buckets since the last time.
    pub fn take_spent(&mut self) -> Vec<(BucketKey, Bucket)> {
        let spent = std::mem::take(&mut self.spent);
        spent.into_iter().filter_map(|key| self.buckets.get(&key).map(|bucket| (key.clone(), *bucket))).collect()
    }

    /// A worker asked to slow a limit down: nothing passes it until then.
    pub fn slow(&mut self, ns: &Namespace, limit: &str, until: Millis) {
        let key = BucketKey::slow(ns, limit);
        let bucket = self.buckets.entry(key.clone()).or_insert(Bucket::full(1, until));
        bucket.closed_until = bucket.closed_until.max(until);
        self.spent.insert(key);
    }

    /// Forgets rates that are as if nothing had ever been claimed, and were so before that moment already.
    pub fn forget_full(&mut self, before: Millis) -> Vec<BucketKey> {
        let rate = |key: &BucketKey| match key.kind.as_str() {
            BucketKey::QUEUE => self.find(&key.ns, &key.name)?.rules.rate,
            BucketKey::LIMIT => self.limits.get(&(key.ns.clone(), key.name.clone()))?.rate,
            _ => None,
        };
        let full = |key: &BucketKey, bucket: &Bucket| {
            bucket.at < before
                && bucket.closed_until < before
                && rate(key).is_none_or(|rate| bucket.is_full(rate, before))
        };
        let found: Vec<BucketKey> =
            self.buckets.iter().filter(|(key, bucket)| full(key, bucket)).map(|(key, _)| key.clone()).collect();
        for key in &found {
            self.buckets.remove(key);
            self.spent.remove(key);
        }
        found
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
            let line = &mut self.lines[entry.line];
            if paused {
                line.leave(&entry.class, &entry.key, entry.rank);
            } else {
                line.join(&entry.class, &entry.key, entry.rank, (run, fence));
                resumed.insert(line.name.to_string());
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
        let (task, ns, paused) = (queued.task, of_run.ns.clone(), of_run.paused);
        let class = Class::of(&of_run.flow, task);
        let class = match self.classes.get(&class) {
            Some(known) => known.clone(),
            None => {
                let class = Arc::new(class);
                self.classes.insert(class.clone());
                class
            }
        };
        let line = self.line(&ns, &task.queue);
        let age = Millis::from(task.priority).saturating_mul(AGE_MS);
        let mut entry = Entry {
            line,
            class,
            key: task.key.as_deref().map(Arc::from),
            rank: (queued.queued_at.saturating_sub(age), queued.place),
            queued_at: queued.queued_at,
            activation: task.activation,
            timeout_ms: task.timeout_ms,
            start_by: queued.start_by,
            closed: queued.closed,
            held: None,
            expiry: None,
        };
        if let Some(held) = queued.held {
            entry.held = Some(held.clone());
            self.requests.entry(held.request).or_default().push((run, task.fence));
            self.count(&ns, &entry, 1);
        } else if !paused && !queued.closed {
            self.lines[line].join(&entry.class, &entry.key, entry.rank, (run, task.fence));
        }
        self.schedule(run, task.fence, &mut entry);
        if let Some(of_run) = self.runs.get_mut(&run) {
            of_run.tasks.insert(task.fence, entry);
        }
    }

    /// No longer offered; a worker that has it keeps it.
    pub fn close(&mut self, run: RunId, fence: Fence) {
        let Some((_, mut entry)) = self.lift(run, fence) else { return };
        if entry.held.is_none() && !entry.closed && !self.is_paused(run) {
            self.lines[entry.line].leave(&entry.class, &entry.key, entry.rank);
        }
        entry.closed = true;
        self.schedule(run, fence, &mut entry);
        self.put_back(run, fence, entry);
    }

    /// The queues in which others may be claimed now, because a bound has room again.
    pub fn remove(&mut self, run: RunId, fence: Fence) -> Vec<String> {
        let Some((ns, entry)) = self.lift(run, fence) else { return Vec::new() };
        let roomier = match &entry.held {
            Some(held) => {
                if let Some(claimed) = self.requests.get_mut(&held.request) {
                    claimed.retain(|at| *at != (run, fence));
                    if claimed.is_empty() {
                        self.requests.remove(&held.request);
                    }
                }
                self.count(&ns, &entry, -1);
                self.bounded_with(&ns, &entry)
            }
            None => {
                if !entry.closed && !self.is_paused(run) {
                    self.lines[entry.line].leave(&entry.class, &entry.key, entry.rank);
                }
                Vec::new()
            }
        };
        // This one and the set are the last to know it: keys of limits come and go, and their classes with them.
        if Arc::strong_count(&entry.class) == 2 {
            self.classes.remove(&entry.class);
        }
        roomier
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
        let (mut picked, mut retry_at) = (Vec::new(), None);
        while picked.len() < request.max {
            let Some((run, fence)) = self.best(request, now, &mut retry_at) else { break };
            match self.hand_over(run, fence, request, now) {
                Some(held) => picked.push(Picked { run, fence, held, before: false }),
                None => break,
            }
        }
        (picked, retry_at)
    }

    /// What keeps a task that waits from being claimed, whoever asks for it.
    pub fn bound(&self, run: RunId, fence: Fence, now: Millis) -> Option<Bound> {
        let of_run = self.runs.get(&run)?;
        let entry = of_run.tasks.get(&fence).filter(|entry| entry.held.is_none() && !entry.closed)?;
        let (line, mut later) = (&self.lines[entry.line], None);
        line.closed_by()
            .or_else(|| (!self.rate_lets_pass(&of_run.ns, line, now, &mut later)).then_some(Bound::Rate))
            .or_else(|| line.closed_to(&entry.class.flow))
            .or_else(|| {
                let (name, most) = self.limit_in_the_way(&of_run.ns, &entry.class, now, &mut later)?;
                Some(Bound::Limit { name: name.to_owned(), most })
            })
    }

    pub fn states(&self, ns: &Namespace) -> Vec<QueueState> {
        let mut states: Vec<QueueState> = self.of(ns).map(Line::state).collect();
        let offering = self.runs.values().filter(|of_run| of_run.ns == *ns && !of_run.paused);
        for (_, entry) in offering.flat_map(|of_run| of_run.waiting()) {
            if let Some(state) = states.iter_mut().find(|state| *state.name == *self.lines[entry.line].name) {
                state.oldest = Some(state.oldest.map_or(entry.queued_at, |oldest| oldest.min(entry.queued_at)));
            }
        }
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

    fn best(&mut self, request: &ClaimRequest, now: Millis, retry_at: &mut Option<Millis>) -> Option<(RunId, Fence)> {
        let mut best: Option<(Rank, (RunId, Fence))> = None;
        for queue in &request.queues {
            let Some(line) = self.find(&request.ns, queue) else { continue };
            if line.closed_by().is_some() || !line.offers_anything() {
                continue;
            }
            if !self.rate_lets_pass(&request.ns, line, now, retry_at) {
                continue;
            }
            let open = |class: &Class| {
                class.suits(&request.offer)
                    && line.closed_to(&class.flow).is_none()
                    && self.limit_in_the_way(&request.ns, class, now, retry_at).is_none()
            };
            if let Some((rank, task)) = line.first(open)
                && best.is_none_or(|(better, _)| rank < better)
            {
                best = Some((rank, task));
            }
        }
        best.map(|(_, task)| task)
    }

    fn hand_over(&mut self, run: RunId, fence: Fence, request: &ClaimRequest, now: Millis) -> Option<Held> {
        let memo = self.runs.get(&run)?.memo;
        let (ns, mut entry) = self.lift(run, fence)?;
        let claim = Claim { build: request.offer.build_of(&entry.class.handler).map(str::to_owned), memo };
        let held = Held {
            worker: request.worker.clone(),
            request: request.request,
            since: now,
            lease_ms: request.lease_ms,
            lease_until: now + request.lease_ms,
            deadline: entry.timeout_ms.map(|ms| now + ms),
            claim,
        };
        let line = &mut self.lines[entry.line];
        // Served first: a key that comes back after its last task was claimed has had its turn.
        line.served(&entry.key);
        line.leave(&entry.class, &entry.key, entry.rank);
        let queue_rate = line.rules.rate;
        if queue_rate.is_some() {
            let queue = BucketKey::queue(&ns, &line.name);
            self.spend(queue, queue_rate, now);
        }
        for (name, key) in &entry.class.limits {
            let rate = self.limits.get(&(ns.clone(), name.clone())).and_then(|rules| rules.rate);
            self.spend(BucketKey::limit(&ns, name, key.as_deref()), rate, now);
        }
        self.count(&ns, &entry, 1);
        self.requests.entry(request.request).or_default().push((run, fence));
        entry.held = Some(held.clone());
        self.schedule(run, fence, &mut entry);
        self.put_back(run, fence, entry);
        Some(held)
    }

    /// The first of its limits that lets no task of a class pass, and its concurrency if that is what is used up.
    fn limit_in_the_way<'a>(
        &self,
        ns: &Namespace,
        class: &'a Class,
        now: Millis,
        retry_at: &mut Option<Millis>,
    ) -> Option<(&'a str, Option<u32>)> {
        class.limits.iter().find_map(|(name, key)| {
            let at = BucketKey::limit(ns, name, key.as_deref());
            if let Some(slow) = self.buckets.get(&BucketKey::slow(ns, name))
                && slow.closed_until > now
            {
                earlier(retry_at, slow.closed_until);
                return Some((name.as_str(), None));
            }
            let rules = self.limits.get(&(ns.clone(), name.clone()))?;
            let passing = self.passing.get(&at).copied().unwrap_or(0);
            match rules.concurrency {
                Some(most) if passing >= most => Some((name.as_str(), Some(most))),
                _ => (!self.bucket_lets_pass(&at, rules.rate, now, retry_at)).then_some((name.as_str(), None)),
            }
        })
    }

    fn rate_lets_pass(&self, ns: &Namespace, line: &Line, now: Millis, retry_at: &mut Option<Millis>) -> bool {
        let rate = line.rules.rate;
        rate.is_none() || self.bucket_lets_pass(&BucketKey::queue(ns, &line.name), rate, now, retry_at)
    }

    fn bucket_lets_pass(&self, at: &BucketKey, rate: Option<Rate>, now: Millis, retry_at: &mut Option<Millis>) -> bool {
        let Some(rate) = rate else { return true };
        let ready_at = self.buckets.get(at).map_or(now, |bucket| bucket.ready_at(rate, now));
        if ready_at > now {
            earlier(retry_at, ready_at);
        }
        ready_at <= now
    }

    fn spend(&mut self, at: BucketKey, rate: Option<Rate>, now: Millis) {
        let Some(rate) = rate else { return };
        self.buckets.entry(at.clone()).or_insert(Bucket::full(rate.burst, now)).spend(rate, now);
        self.spent.insert(at);
    }

    /// Counts a claimed task in or out.
    fn count(&mut self, ns: &Namespace, entry: &Entry, by: i32) {
        self.lines[entry.line].count(&entry.class.flow, by);
        for (name, key) in &entry.class.limits {
            let at = BucketKey::limit(ns, name, key.as_deref());
            let passing = self.passing.entry(at.clone()).or_default();
            *passing = passing.saturating_add_signed(by);
            if *passing == 0 {
                self.passing.remove(&at);
            }
        }
    }

    /// The queues whose tasks share a bound with this one: a limit holds across queues.
    fn bounded_with(&self, ns: &Namespace, entry: &Entry) -> Vec<String> {
        let bounds = |(name, _): &(String, Option<String>)| {
            self.limits.get(&(ns.clone(), name.clone())).is_some_and(|rules| rules.concurrency.is_some())
        };
        if entry.class.limits.iter().any(bounds) {
            return self.of(ns).filter(|line| line.offers_anything()).map(|line| line.name.to_string()).collect();
        }
        let line = &self.lines[entry.line];
        let own = line.rules.concurrency.is_some() || line.rules.flow_concurrency.is_some();
        if own { vec![line.name.to_string()] } else { Vec::new() }
    }

    fn is_paused(&self, run: RunId) -> bool {
        self.runs.get(&run).is_some_and(|of_run| of_run.paused)
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
        self.lines.push(Line::new(name.clone()));
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

fn earlier(at: &mut Option<Millis>, other: Millis) {
    *at = Some(at.map_or(other, |at| at.min(other)));
}
