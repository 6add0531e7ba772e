//! The two stores, and the state that the operations need.

use std::collections::BTreeMap;
use std::sync::Arc;

use eddyline_machine::{Input, Millis, RunId, TaskRef};
use serde_json::json;

use super::super::drive::Drive;
use super::super::everything::{Everything, Looked, everything};
use super::super::{BEGINNING, Backend};
use super::{Reached, Same};
use crate::*;

pub const FLOWS: [&str; 10] = [
    "{name: chain, steps: {a: {}, b: {after: [a], retry: {attempts: 3, initial: 500}}, c: {after: [b]}}}",
    "{name: diamond, steps: {a: {emits: [x]}, b: {after: [a], priority: 2}, c: {subscribes: [x]}, \
     d: {after: [b, c], join: some, start_timeout: 30s}}}",
    "{name: spread, steps: {each: {spread: 'input.items', run: item, max_parallel: 3, on_item_failure: collect}, \
     sum: {after: [each]}}}",
    "{name: gates, steps: {a: {}, hook: {after: [a], await: {webhook: true, timeout: 5s, on_timeout: skip}}, \
     person: {await: {manual: true}}, ping: {await: {event: ping, key: input.k}}, nap: {await: {time: 3s}}, \
     until: {await: {until: 'input.at'}}}}",
    "{name: parent, steps: {kid: {flow: chain}, job: {flow: job, detached: true}, z: {after: [kid]}}}",
    "{name: undo, steps: {a: {undo: {run: u}}, b: {after: [a], undo: {run: u}}, c: {after: [a]}}}",
    "{name: job, code: true, builds: pinned, cancel_grace: 2s, retry: {attempts: 3, initial: 200}}",
    "{name: bounded, steps: {work: {queue: bounded, limits: [api, {tenant: '${input.k}'}], timeout: 8s, \
     start_timeout: 20s, retry: {attempts: 2, initial: 0}}}}",
    "{name: fair, steps: {work: {queue: fair, key: input.k}}}",
    "{name: picky, steps: {a: {requires: [gpu], priority: 1}, b: {run: pay}, c: {requires: [gpu, eu], queue: default}}}",
];
pub const NAMES: [&str; 10] =
    ["chain", "diamond", "spread", "gates", "parent", "undo", "job", "bounded", "fair", "picky"];

/// Everything is compared after this many operations.
const COMPARED_EVERY: usize = 12;

pub struct World<'a> {
    pub backend: &'a dyn Backend,
    /// The store under test.
    pub subject: Arc<dyn Store>,
    /// The reference store, on which decisions are made.
    pub drive: Drive,
    /// Whether the store under test is sometimes closed and opened again.
    pub reopens: bool,
    pub namespaces: [Namespace; 2],
    pub runs: Vec<RunId>,
    pub claimed: Vec<Claimed>,
    pub requests: Vec<ClaimRequest>,
    /// Commits that were submitted, to submit again.
    pub done: Vec<RunCommit>,
    /// Commits that were decided and not submitted, to submit too late.
    pub kept_back: Vec<RunCommit>,
    /// Until when nothing of a kind is due, according to the store under test.
    pub promised: BTreeMap<String, Millis>,
    pub sent: usize,
    pub happened: usize,
    pub story: Vec<String>,
    pub reached: Reached,
}

impl<'a> World<'a> {
    pub async fn open(backend: &'a dyn Backend, reopens: bool, reached: Reached) -> World<'a> {
        let clock = ManualClock::at(BEGINNING);
        let subject = backend.open(clock.clone()).await;
        let drive = Drive::new(Arc::new(Memory::with_clock(clock.clone())), clock);
        for flow in FLOWS {
            drive.flow(flow);
        }
        let mut world = World {
            backend,
            subject,
            drive,
            reopens,
            namespaces: [Namespace::default(), Namespace::new("other")],
            runs: Vec::new(),
            claimed: Vec::new(),
            requests: Vec::new(),
            done: Vec::new(),
            kept_back: Vec::new(),
            promised: BTreeMap::new(),
            sent: 0,
            happened: 0,
            story: Vec::new(),
            reached,
        };
        // Rates do not change: the effect of changing a rate is not specified.
        let rules = [
            (kind::QUEUE, "bounded", json!({"concurrency": 4, "rate": {"count": 3, "per_ms": 1_000, "burst": 3}})),
            (kind::LIMIT, "api", json!({"rate": {"count": 2, "per_ms": 1_500, "burst": 4}})),
            (kind::LIMIT, "tenant", json!({"concurrency": 2})),
        ];
        for (kind, id, body) in rules {
            let key = DocumentKey::new(kind, id);
            let change = DocumentChange { key, expect: Expect::Any, body: Some(body), due: None };
            world.change_documents(vec![change]).await.unwrap();
        }
        world
    }

    pub fn tell(&mut self, what: String) {
        self.story.push(what);
    }

    pub fn reach(&self, what: &str) {
        self.reached.lock().unwrap().insert(what.to_owned());
    }

    pub fn references(&self) -> Arc<dyn Store> {
        self.drive.store.clone()
    }

    /// Whether the run is stored and not trimmed.
    pub async fn is_there(&self, run: RunId) -> bool {
        matches!(self.drive.store.load(run, None).await.unwrap(), Found::Run(_))
    }

    pub async fn after_each(&mut self) -> Same {
        self.happened += 1;
        if self.happened.is_multiple_of(COMPARED_EVERY) { self.compare().await } else { Ok(()) }
    }

    /// Compares everything that can be read.
    pub async fn compare(&mut self) -> Same {
        let looked = Looked { numbers: false, leases: true };
        let expected = everything(&*self.drive.store, &self.namespaces, &self.runs, looked).await;
        let found = everything(&*self.subject, &self.namespaces, &self.runs, looked).await;
        difference(&expected, &found)?;
        let listed = self.drive.store.runs(None, &RunFilter::default(), Page::default()).await.unwrap();
        for summary in &listed {
            self.reach(summary.header.status().as_str());
            if summary.trimmed {
                self.reach("trimmed");
            }
        }
        Ok(())
    }

    /// Closes the store under test and opens it again, after removing all state that a store may forget: leases, holds
    /// and the difference between its clock and the wall clock. See [`World::pass`] for the rest.
    pub async fn reopen(&mut self) -> Same {
        self.tell("reopen the store".to_owned());
        for run in self.runs.clone() {
            self.release_all(run).await?;
        }
        self.pass(HOLD_MS).await?;
        let ahead = self.drive.now().await - Clock::wall(&*self.drive.clock);
        self.drive.clock.jump(ahead);
        let nothing = self.references();
        let closed = std::mem::replace(&mut self.subject, nothing);
        let opened = self.backend.reopen(closed, self.drive.clock.clone()).await;
        self.subject = opened.ok_or("the store did not open again")?;
        self.drive.clock.jump(-ahead);
        self.promised.clear();
        self.due(crate::Due::Leases, 0).await?;
        self.compare().await
    }

    /// Lets time pass. A reopened store may forget the credit of tasks for time in which nobody asked for expired
    /// leases; so in histories with reopenings they are asked for all along.
    pub async fn pass(&mut self, ms: Millis) -> Same {
        if !self.reopens {
            self.drive.advance(ms);
            return Ok(());
        }
        let mut left = ms;
        while left > 0 {
            let step = left.min(UNWATCHED_MS);
            self.drive.advance(step);
            self.due(crate::Due::Leases, 0).await?;
            left -= step;
        }
        Ok(())
    }

    async fn release_all(&mut self, run: RunId) -> Same {
        if !self.is_there(run).await {
            return Ok(());
        }
        let ns = self.drive.summary(run).await.ns;
        for row in self.drive.pending(run).await.tasks {
            let Some(held) = row.held else { continue };
            let why = eddyline_machine::Expiry::Released;
            let task = TaskRef { activation: row.task.activation, fence: row.task.fence };
            let input = Input::Expired { task, why, claim: held.claim };
            let mut commit = self.drive.prepare(run, &[input]).await;
            (commit.ns, commit.takes) = (ns.clone(), vec![Consumed::Expiry(row.task.fence, why)]);
            self.commit(commit).await?.map_err(|refused| format!("a release was refused: {refused:?}"))?;
        }
        Ok(())
    }
}

fn difference(expected: &Everything, found: &Everything) -> Same {
    for (key, value) in expected {
        let other = found.get(key);
        if other != Some(value) {
            return Err(format!("{key} differs\n  expected {value}\n  found    {}", other.map_or("nothing", |it| it)));
        }
    }
    match found.keys().find(|key| !expected.contains_key(*key)) {
        Some(key) => Err(format!("{key} was found unexpectedly")),
        None => Ok(()),
    }
}
