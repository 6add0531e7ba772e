//! Compares [`TaskQueues`] with the tasks of the memory store, which have no index: in every random history both must
//! hand out the same tasks in the same order.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use eddyline_machine::{Data, Fence, Millis, RunId, Task, TaskKind};
use proptest::collection::vec;
use proptest::prelude::*;
use serde_json::json;
use uuid::Uuid;

use super::*;
use crate::claim::Offer;
use crate::memory::tasks::Tasks;

const QUEUES: [&str; 2] = ["red", "green"];
const LIMITS: [&str; 3] = ["api", "tenant", "region"];

/// Both implementations, and the expected state.
struct Both {
    queues: TaskQueues,
    naive: Tasks,
    now: Millis,
    /// All tasks, with their runs: two per run.
    tasks: Vec<(RunId, Fence)>,
    paused: Vec<RunId>,
    requests: u128,
    /// By queue: a worker that takes everything got less than it asked for and waits for a hint, or until that time.
    idle: BTreeMap<&'static str, Option<Millis>>,
}

/// Choices, one byte each.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn below(&mut self, n: usize) -> usize {
        let (first, rest) = self.0.split_first().unwrap_or((&0, &[]));
        self.0 = rest;
        usize::from(*first) % n
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

impl Both {
    fn new() -> Both {
        let (queues, naive) = (TaskQueues::default(), Tasks::default());
        Both {
            queues,
            naive,
            now: 1_000_000,
            tasks: Vec::new(),
            paused: Vec::new(),
            requests: 0,
            idle: BTreeMap::new(),
        }
    }

    fn happen(&mut self, c: &mut Choices<'_>) {
        match c.below(16) {
            0..=5 => self.add(c),
            6..=9 => self.claim(c),
            10..=11 => self.remove(c),
            12 => self.pause_or_close(c),
            13 => self.now += [1, 10, 400, 5_000][c.below(4)],
            14 => self.rule(c),
            _ => {
                let (limit, until) = (c.pick(&LIMITS), self.now + 300);
                self.queues.slow(&Namespace::default(), limit, until);
                self.naive.slow(&Namespace::default(), limit, until);
            }
        }
    }

    fn add(&mut self, c: &mut Choices<'_>) {
        let ns = Namespace::default();
        let place = self.tasks.len() as u64 + 1;
        let (run, fence) = (RunId(Uuid::from_u128(u128::from(place / 2))), Fence(place));
        let mut limits = Vec::new();
        for name in LIMITS {
            let key = c.pick(&[None, Some("x"), Some("y"), Some("z")]);
            if c.below(2) == 0 {
                limits.push((name.to_owned(), key.map(str::to_owned)));
            }
        }
        let task = Task {
            fence,
            activation: ActId(0),
            name: "work".to_owned(),
            step: "work".to_owned(),
            handler: c.pick(&["pay", "mail"]).to_owned(),
            queue: c.pick(&QUEUES).to_owned(),
            kind: TaskKind::Step,
            attempt: 1,
            input: Data::null(),
            gate: None,
            priority: c.below(3) as i32 - 1,
            limits,
            requires: if c.below(4) == 0 { vec!["gpu".to_owned()] } else { Vec::new() },
            key: c.pick(&[None, Some("a"), Some("b"), Some("c")]).map(str::to_owned),
            timeout_ms: None,
            start_timeout_ms: None,
            build: None,
            attempts: None,
        };
        let flow = ["f", "g"][(place / 2) as usize % 2];
        let paused = self.paused.contains(&run);
        self.queues.set_run(&ns, run, flow, paused, 0);
        self.naive.set_run(run, paused, 0);
        let queued = Queued { task: &task, queued_at: self.now, place, start_by: None, closed: false, held: None };
        self.queues.add(run, queued);
        self.told(std::slice::from_ref(&task.queue));
        self.naive.add(&ns, run, flow, Arc::new(task), place, self.now);
        self.tasks.push((run, fence));
    }

    fn claim(&mut self, c: &mut Choices<'_>) {
        self.requests += 1;
        let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect();
        let offer = match c.below(4) {
            0 | 1 => Offer { labels: names(&["gpu"]), ..Offer::default() },
            2 => Offer { handlers: names(&["pay"]), labels: names(&["gpu"]), ..Offer::default() },
            _ => Offer::default(),
        };
        let queues: &[&str] = [&["red"][..], &["green"], &["green", "red"]][c.below(3)];
        let request = ClaimRequest {
            ns: Namespace::default(),
            request: RequestId(Uuid::from_u128(self.requests)),
            worker: "w".to_owned(),
            queues: queues.iter().map(|name| name.to_string()).collect(),
            offer: Arc::new(offer),
            max: 1 + c.below(5),
            most_held: None,
            lease_ms: 1_000,
        };
        let does_everything = request.offer.handlers.is_empty() && !request.offer.labels.is_empty();
        let (picked, retry_at) = self.queues.claim(&request, self.now);
        if does_everything && picked.len() < request.max {
            self.idle.extend(queues.iter().map(|queue| (*queue, retry_at)));
        }
        let picked: Vec<_> = picked.into_iter().map(|picked| (picked.run, picked.fence)).collect();
        let (expected, expected_retry) = self.naive.claim(&request, self.now);
        assert_eq!(picked, expected, "the tasks of a claim at {}", self.now);
        assert!(retry_at.is_none_or(|at| at > self.now), "{retry_at:?} is not in the future");
        if let Some(expected) = expected_retry {
            assert!(
                retry_at.is_some_and(|at| at <= expected),
                "retry at {retry_at:?}, but there is more at {expected}"
            );
        }
    }

    fn remove(&mut self, c: &mut Choices<'_>) {
        if self.tasks.is_empty() {
            return;
        }
        let (run, fence) = self.tasks[c.below(self.tasks.len())];
        let roomier = self.queues.remove(run, fence);
        self.told(&roomier);
        self.naive.remove(run, fence);
    }

    /// Workers that wait for tasks of these queues are woken.
    fn told(&mut self, queues: &[String]) {
        self.idle.retain(|queue, _| queues.iter().all(|told| told != queue));
    }

    /// A worker that waits and got no hint has no claimable task in its queue.
    fn nobody_is_forgotten(&self) {
        for (run, of_run) in self.queues.runs.iter().filter(|(_, of_run)| !of_run.paused) {
            for (fence, entry) in of_run.waiting() {
                let queue = &*self.queues.queues[entry.queue].name;
                let waits = self.idle.get(queue).is_some_and(|until| until.is_none_or(|until| self.now < until));
                let free = self.queues.bound(*run, *fence, self.now).is_none();
                assert!(!waits || !free, "task {fence} of {queue} is claimable, but no hint was sent");
            }
        }
    }

    fn pause_or_close(&mut self, c: &mut Choices<'_>) {
        if self.tasks.is_empty() {
            return;
        }
        let (run, fence) = self.tasks[c.below(self.tasks.len())];
        if c.below(3) == 0 {
            self.queues.close(run, fence);
            self.naive.close(run, fence);
            return;
        }
        match self.paused.iter().position(|paused| *paused == run) {
            Some(at) => drop(self.paused.remove(at)),
            None => self.paused.push(run),
        }
        let paused = self.paused.contains(&run);
        let resumed = self.queues.set_run(&Namespace::default(), run, "f", paused, 0);
        self.told(&resumed);
        self.naive.set_run(run, paused, 0);
    }

    fn rule(&mut self, c: &mut Choices<'_>) {
        let rates = [json!(null), json!({"count": 2, "per_ms": 700, "burst": 2})];
        let rate = rates[c.below(2)].clone();
        let most = c.pick(&[None, Some(1), Some(2), Some(4)]);
        // The effect of changing a rate while part of it is spent is not specified.
        let (kind, id, body) = match c.below(3) {
            0 => {
                let paused = c.below(5) == 0;
                let body = json!({"paused": paused, "concurrency": most, "flow_concurrency": c.pick(&[None, Some(2)])});
                (kind::QUEUE, c.pick(&QUEUES), body)
            }
            1 => (kind::LIMIT, c.pick(&LIMITS[1..]), json!({"concurrency": most})),
            _ if self.requests == 0 => (kind::LIMIT, "api", json!({"rate": rate, "concurrency": most})),
            _ => (kind::LIMIT, "region", json!("unreadable")),
        };
        let key = DocumentKey::new(kind, id);
        let body = (c.below(4) != 0).then_some(body);
        let changed = self.queues.set_rules(&Namespace::default(), &key, body.as_ref());
        self.told(&changed);
        self.naive.set_rules(&Namespace::default(), &key, body.as_ref());
    }

    fn compare(&self) {
        let ns = Namespace::default();
        let busy = |states: Vec<QueueState>| {
            states.into_iter().filter(|state| state.ready + state.claimed > 0).collect::<Vec<_>>()
        };
        assert_eq!(busy(self.queues.states(&ns)), busy(self.naive.states(&ns)));
        assert_eq!(self.queues.ready(&ns), self.naive.ready(&ns));
        for (run, fence) in &self.tasks {
            let why = (self.queues.bound(*run, *fence, self.now), self.naive.bound(*run, *fence, self.now));
            assert_eq!(why.0, why.1, "the bound of task {fence} at {}", self.now);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn they_give_out_the_tasks_that_the_reference_gives_out(history in vec(any::<[u8; 16]>(), 1..200)) {
        let mut both = Both::new();
        for bytes in &history {
            both.happen(&mut Choices(bytes));
            both.compare();
            both.nobody_is_forgotten();
        }
    }
}

/// A step of a tenant with a concurrency of 1.
fn of_tenant(fence: u64, tenant: usize) -> Task {
    Task {
        fence: Fence(fence),
        activation: ActId(0),
        name: "work".to_owned(),
        step: "work".to_owned(),
        handler: "work".to_owned(),
        queue: "red".to_owned(),
        kind: TaskKind::Step,
        attempt: 1,
        input: Data::null(),
        gate: None,
        priority: 0,
        limits: vec![("tenant".to_owned(), Some(tenant.to_string()))],
        requires: Vec::new(),
        key: None,
        timeout_ms: None,
        start_timeout_ms: None,
        build: None,
        attempts: None,
    }
}

#[test]
fn a_claim_looks_at_few_classes_however_many_tenants_are_at_their_limits() {
    let (ns, run) = (Namespace::default(), RunId(Uuid::from_u128(1)));
    for tenants in [10, 1_000, 10_000] {
        let mut queues = TaskQueues::default();
        queues.set_rules(&ns, &DocumentKey::new(kind::LIMIT, "tenant"), Some(&json!({"concurrency": 1})));
        queues.set_run(&ns, run, "f", false, 0);
        for at in 0..2 * tenants {
            let (task, place) = (of_tenant(at as u64 + 1, at % tenants), at as u64);
            queues.add(run, Queued { task: &task, queued_at: 0, place, start_by: None, closed: false, held: None });
        }
        let mut requests = 0;
        let mut claim = |queues: &mut TaskQueues, max: usize| {
            requests += 1;
            let request = ClaimRequest {
                ns: ns.clone(),
                request: RequestId(Uuid::from_u128(requests)),
                worker: "w".to_owned(),
                queues: vec!["red".to_owned()],
                offer: Arc::new(Offer::default()),
                max,
                most_held: None,
                lease_ms: 1_000,
            };
            queues.claim(&request, 0).0
        };
        let held = claim(&mut queues, 2 * tenants);
        assert_eq!(held.len(), tenants, "one of each tenant");
        // Later claims park what the first did not.
        let mut settled = 1_000_000;
        while queues.claim(&ask(settled, 1, Offer::default()), 0).1.is_some() {
            settled += 1;
        }
        for (at, picked) in held.iter().take(10).enumerate() {
            queues.remove(run, picked.fence);
            let before = queues.bounds.looked.get();
            assert_eq!(claim(&mut queues, 5).len(), 1, "the one task of the tenant that has room");
            let looked = queues.bounds.looked.get() - before;
            assert!(looked <= 3, "{looked} looks in round {at} with {tenants} tenants");
        }
    }
}

fn ask(request: u128, max: usize, offer: Offer) -> ClaimRequest {
    ClaimRequest {
        ns: Namespace::default(),
        request: RequestId(Uuid::from_u128(request)),
        worker: "w".to_owned(),
        queues: vec!["red".to_owned()],
        offer: Arc::new(offer),
        max,
        most_held: None,
        lease_ms: 1_000,
    }
}

fn queue(queues: &mut TaskQueues, run: RunId, task: &Task) {
    let place = task.fence.0;
    queues.add(run, Queued { task, queued_at: 0, place, start_by: None, closed: false, held: None });
}

#[test]
fn a_claim_looks_at_each_suit_once_however_many_it_gets() {
    let (ns, run) = (Namespace::default(), RunId(Uuid::from_u128(1)));
    // The tasks of a few suits have different keys: these are checked again when it is the turn of another key.
    let (suits, mixed, max) = (3_000, 10, 500);
    let mut queues = TaskQueues::default();
    queues.set_run(&ns, run, "f", false, 0);
    for at in 0..suits {
        for (of_suit, key) in [None, Some("a")].into_iter().enumerate() {
            let fence = (2 * at + of_suit) as u64 + 1;
            let key = key.filter(|_| at % (suits / mixed) == 0).map(str::to_owned);
            queue(
                &mut queues,
                run,
                &Task { handler: format!("h{at}"), limits: Vec::new(), key, ..of_tenant(fence, 0) },
            );
        }
    }
    assert_eq!(queues.claim(&ask(1, max, Offer::default()), 0).0.len(), max);
    let looked = queues.queues[0].looked;
    assert!(looked <= suits + (2 + mixed) * max, "{looked} looks for {max} tasks of {suits} suits");
    let narrow = Offer { handlers: ["h2001".to_owned(), "h2002".to_owned()].into(), ..Offer::default() };
    queues.queues[0].looked = 0;
    assert_eq!(queues.claim(&ask(2, max, narrow), 0).0.len(), 4);
    let looked = queues.queues[0].looked;
    assert!(looked <= 10, "{looked} looks for two handlers");
}

#[test]
fn a_claim_after_a_limit_was_changed_leaves_most_of_the_parking_to_the_next() {
    let (ns, run) = (Namespace::default(), RunId(Uuid::from_u128(1)));
    let (limit, tenants) = (DocumentKey::new(kind::LIMIT, "tenant"), 2_500);
    let mut queues = TaskQueues::default();
    queues.set_rules(&ns, &limit, Some(&json!({"concurrency": 0})));
    queues.set_run(&ns, run, "f", false, 0);
    (0..tenants).for_each(|at| queue(&mut queues, run, &of_tenant(at as u64 + 1, at)));
    for round in 0..3 {
        let mut claims = 0;
        loop {
            claims += 1;
            let before = queues.bounds.looked.get();
            let (picked, retry_at) = queues.claim(&ask(100 * round + claims, 5, Offer::default()), 7);
            let looked = queues.bounds.looked.get() - before;
            assert!(picked.is_empty() && looked <= MOST_PARKS + 1, "{looked} looks in one claim");
            match retry_at {
                Some(at) => assert_eq!(at, 7, "there is more to examine now"),
                None => break,
            }
        }
        assert_eq!(claims, 3, "claims until all is parked");
        queues.set_rules(&ns, &limit, Some(&json!({"concurrency": 0})));
    }
    // Claimable tasks are found in the end.
    queues.set_rules(&ns, &limit, Some(&json!({"concurrency": 1})));
    assert_eq!(queues.claim(&ask(1_000, tenants, Offer::default()), 7).0.len(), tenants);
}

#[test]
fn closing_a_held_task_does_not_make_its_limit_forget_who_waits() {
    let (ns, run) = (Namespace::default(), RunId(Uuid::from_u128(1)));
    let mut queues = TaskQueues::default();
    queues.set_rules(&ns, &DocumentKey::new(kind::LIMIT, "tenant"), Some(&json!({"concurrency": 1})));
    queues.set_run(&ns, run, "f", false, 0);
    (1..=2).for_each(|fence| queue(&mut queues, run, &of_tenant(fence, 0)));
    let (picked, _) = queues.claim(&ask(1, 5, Offer::default()), 0);
    assert_eq!(picked.len(), 1, "the other waits for the limit");
    queues.close(run, picked[0].fence);
    assert_eq!(queues.remove(run, picked[0].fence), ["red"], "the waiting queue must be returned");
}

#[test]
fn what_nobody_waits_for_any_more_is_forgotten() {
    let mut both = Both::new();
    let ns = Namespace::default();
    for limit in LIMITS {
        let rules = json!({"concurrency": 1});
        both.queues.set_rules(&ns, &DocumentKey::new(kind::LIMIT, limit), Some(&rules));
        both.naive.set_rules(&ns, &DocumentKey::new(kind::LIMIT, limit), Some(&rules));
    }
    for byte in 0..=255u8 {
        both.add(&mut Choices(&[byte, 0, byte / 3, 0, byte / 5, 0, 0, byte]));
        both.claim(&mut Choices(&[0, 2, byte]));
    }
    for (run, fence) in std::mem::take(&mut both.tasks) {
        both.queues.remove(run, fence);
        both.queues.forget_idle(run);
    }
    let TaskQueues { runs, waiters, classes, expiries, requests, queues, .. } = &both.queues;
    assert!(runs.is_empty() && classes.is_empty() && expiries.is_empty() && requests.is_empty());
    assert!(waiters.is_empty(), "{waiters:?}");
    assert!(queues.iter().all(TaskQueue::is_empty), "{queues:?}");
}
