//! The hints that follow from a call: more rather than fewer, since a hint only causes a check.

use std::collections::{BTreeSet, HashSet};

use eddyline_machine::run::Phase;
use eddyline_machine::{Fence, RunId, TaskChange, TimerChange};

use super::body::unescape;
use crate::Written;
use crate::claim::ClaimRequest;
use crate::commit::{Command, Consumed, DocumentCommit, RunCommit};
use crate::ids::Namespace;
use crate::query::Change;
use crate::task_queues::UNWATCHED_MS;

#[derive(Default)]
struct Hints {
    /// Tasks that claims of the call got: no other claim can get them.
    claimed: HashSet<(RunId, Fence)>,
    changes: Vec<Change>,
    queues: BTreeSet<(Namespace, String)>,
    events: BTreeSet<Namespace>,
    timers: bool,
    messages: bool,
    leases: bool,
}

pub(super) fn changes(
    commands: &[Command],
    claims: &[ClaimRequest],
    written: &Written,
    before: &[bool],
    offering: Vec<(String, String)>,
) -> Vec<Change> {
    let claimed = written.claims.iter().flat_map(|claims| &claims.tasks);
    let claimed = claimed.map(|claimed| (claimed.run, claimed.task.fence)).collect();
    let mut hints = Hints { claimed, ..Hints::default() };
    for (command, answer) in commands.iter().zip(&written.commands) {
        if answer.as_ref().is_ok_and(|committed| !committed.before) {
            match command {
                Command::Run(commit) => hints.run(commit),
                Command::Documents(commit) => hints.documents(commit),
            }
        }
    }
    for ((request, claims), _) in claims.iter().zip(&written.claims).zip(before).filter(|(_, before)| !**before) {
        hints.leases |= !claims.tasks.is_empty() && request.lease_ms <= UNWATCHED_MS;
        for claimed in &claims.tasks {
            hints.changes.push(Change::Run { run: claimed.run, ended: false });
            hints.leases |= claimed.task.timeout_ms.is_some_and(|ms| ms <= UNWATCHED_MS);
        }
    }
    for (ns, queue) in offering {
        hints.queues.insert((Namespace::new(&unescape(ns)), unescape(queue)));
    }
    hints.all()
}

impl Hints {
    fn run(&mut self, commit: &RunCommit) {
        let transition = &*commit.transition;
        let header = &transition.header;
        let took = commit.takes.iter().any(|taken| matches!(taken, Consumed::Message(_)));
        self.messages |= took || !commit.messages.is_empty() || header.unique.is_some();
        if !commit.events.is_empty() {
            self.events.insert(commit.ns.clone());
        }
        if transition.is_empty() {
            return;
        }
        self.changes.push(Change::Run { run: header.run, ended: header.phase == Phase::Ended });
        self.timers |= transition.timers.iter().any(|change| matches!(change, TimerChange::Set { .. }));
        for change in &transition.tasks {
            if let TaskChange::Add(task) = change {
                if !self.claimed.contains(&(header.run, task.fence)) {
                    self.queues.insert((commit.ns.clone(), task.queue.clone()));
                }
                self.leases |= task.start_timeout_ms.is_some_and(|ms| ms <= UNWATCHED_MS);
            }
        }
    }

    fn documents(&mut self, commit: &DocumentCommit) {
        self.messages |= !commit.messages.is_empty() || !commit.drops.is_empty();
        if !commit.events.is_empty() {
            self.events.insert(commit.ns.clone());
        }
        let kinds: BTreeSet<&String> = commit.documents.iter().map(|change| &change.key.kind).collect();
        let change = |kind: &String| Change::Documents { ns: commit.ns.clone(), kind: kind.clone() };
        self.changes.extend(kinds.into_iter().map(change));
    }

    fn all(self) -> Vec<Change> {
        let mut changes = self.changes;
        changes.extend(self.queues.into_iter().map(|(ns, queue)| Change::Tasks { ns, queue }));
        changes.extend(self.events.into_iter().map(|ns| Change::Events { ns }));
        changes.extend(self.timers.then_some(Change::Timers));
        changes.extend(self.messages.then_some(Change::Messages));
        changes.extend(self.leases.then_some(Change::Leases));
        changes
    }
}
