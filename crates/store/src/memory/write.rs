//! Writes to the memory store.

use std::collections::BTreeSet;
use std::sync::Arc;

use eddyline_machine::run::{Phase, Run};
use eddyline_machine::{
    Due, Fence, GateChange, Message, Millis, Numbered, RunId, TaskChange, TimerChange, Transition, Version,
};

use super::rows::{KeptRun, Rows};
use crate::claim::{ClaimRequest, Claimed, Claims};
use crate::commit::{Command, Committed, Consumed, DocumentCommit, NewEvent, RunCommit, StartKey};
use crate::document::{Document, DocumentChange, Expect, kind};
use crate::error::Refused;
use crate::holds::Item;
use crate::ids::Namespace;
use crate::query::*;
use crate::task_queues::UNWATCHED_MS;

impl Rows {
    pub fn carry_out(&mut self, command: Command, now: Millis) -> Result<Committed, Refused> {
        match command {
            Command::Run(commit) => self.commit_run(commit, now),
            Command::Documents(commit) => self.commit_documents(commit, now),
        }
    }

    fn commit_run(&mut self, commit: RunCommit, now: Millis) -> Result<Committed, Refused> {
        if let Some(answer) = self.answer_without(&commit, now) {
            return answer;
        }
        let transition = &*commit.transition;
        let run = transition.header.run;
        for taken in &commit.takes {
            self.use_up(run, taken);
        }
        for message in commit.messages {
            self.send(&commit.ns, message);
        }
        let repeats = self.publish(&commit.ns, commit.events, now);
        for position in &transition.events_taken {
            if self.events.contains_key(position) {
                *self.gates_opened.entry(*position).or_default() += 1;
            }
        }
        if transition.is_empty() {
            return Ok(Committed { at: now, first: 0, before: false, repeats });
        }
        if transition.base == Version(0) {
            self.create(&commit.ns, run, commit.key, now);
            self.join_line(&commit.ns, &transition.header, commit.tells_line.as_deref());
        }
        self.end_in_line(&commit.ns, &transition.header);
        let committed = Committed { at: now, first: self.apply(transition, now), before: false, repeats };
        if let Some(kept) = self.runs.get_mut(&run) {
            kept.commands.insert(transition.header.version, (commit.command, committed));
        }
        for (limit, ms) in &transition.slow_limits {
            self.tasks.slow(&commit.ns, limit, now + ms);
        }
        self.changes.push(Change::Run { run, ended: transition.header.phase == Phase::Ended });
        Ok(committed)
    }

    /// The response to a commit that is refused or was applied before; none if it is to be applied.
    fn answer_without(&self, commit: &RunCommit, now: Millis) -> Option<Result<Committed, Refused>> {
        let transition = &*commit.transition;
        let run = transition.header.run;
        let kept = self.runs.get(&run);
        let current = kept.map(|kept| kept.rows.header.version);
        if current.unwrap_or_default() != transition.base {
            let done = kept.and_then(|kept| kept.commands.get(&Version(transition.base.0 + 1)));
            return Some(match done {
                Some((command, committed)) if *command == commit.command => {
                    Ok(Committed { before: true, repeats: 0, ..*committed })
                }
                _ => Err(Refused::Conflict { current }),
            });
        }
        if kept.is_some_and(|kept| kept.ns != commit.ns) {
            return Some(Err(Refused::Conflict { current: None }));
        }
        if let Some(key) = &commit.key
            && let Some((run, fingerprint)) = self.keys.get(&(commit.ns.clone(), key.flow.clone(), key.key.clone()))
        {
            return Some(Err(Refused::KeyTaken { run: *run, fingerprint: *fingerprint }));
        }
        if transition.base == Version(0)
            && let Some(refused) = self.refused_by_line(commit)
        {
            return Some(Err(refused));
        }
        let gone: Vec<Consumed> =
            commit.takes.iter().filter(|taken| !self.is_there(run, taken, now)).cloned().collect();
        (!gone.is_empty()).then_some(Err(Refused::Gone(gone)))
    }

    fn is_there(&self, run: RunId, taken: &Consumed, now: Millis) -> bool {
        match taken {
            Consumed::Message(id) => self.inboxes.get(&run).is_some_and(|inbox| inbox.by_id.contains_key(id)),
            Consumed::Timer(key, due) => {
                let timer = self.runs.get(&run).and_then(|kept| kept.timers.get(key));
                timer.is_some_and(|timer| timer.due == *due)
            }
            Consumed::Expiry(fence, why) => self.tasks.is_up(run, *fence, *why, now),
        }
    }

    fn use_up(&mut self, run: RunId, taken: &Consumed) {
        match taken {
            Consumed::Message(id) => self.drop_message(run, id),
            Consumed::Timer(key, due) => {
                let timer = self.runs.get_mut(&run).and_then(|kept| kept.timers.remove(key));
                if let Some(timer) = timer {
                    self.timers.remove(&(timer.wall, timer.due, run, *key));
                }
                self.holds.drop_item(&Item::Timer(run, *key, *due));
            }
            Consumed::Expiry(fence, _) => self.holds.drop_item(&Item::Lease(run, *fence)),
        }
    }

    fn drop_message(&mut self, to: RunId, id: &str) {
        if let Some(inbox) = self.inboxes.get_mut(&to) {
            if let Some(place) = inbox.by_id.remove(id) {
                inbox.places.remove(&place);
                self.messages.remove(&place);
            }
            if inbox.places.is_empty() {
                self.inboxes.remove(&to);
            }
        }
        self.holds.drop_message(to, id);
        // Later messages to the same run may have waited for this one.
        if self.inboxes.contains_key(&to) {
            self.changes.push(Change::Messages);
        }
    }

    pub(super) fn send(&mut self, ns: &Namespace, message: Message) {
        let inbox = self.inboxes.entry(message.to).or_default();
        if inbox.by_id.contains_key(&message.id) {
            return;
        }
        self.next_message += 1;
        inbox.places.insert(self.next_message);
        inbox.by_id.insert(message.id.clone(), self.next_message);
        self.messages.insert(self.next_message, (ns.clone(), message));
        self.changes.push(Change::Messages);
    }

    /// Returns how many of the events were already stored.
    fn publish(&mut self, ns: &Namespace, events: Vec<NewEvent>, now: Millis) -> u32 {
        let mut repeats = 0;
        for event in events {
            let id = (ns.clone(), event.id.clone());
            if self.event_ids.contains_key(&id) {
                repeats += 1;
                continue;
            }
            self.next_event += 1;
            self.event_ids.insert(id, self.next_event);
            let what = Fed::Event { id: event.id, name: event.name, key: event.key, payload: event.payload };
            self.events.insert(self.next_event, (ns.clone(), FeedItem { position: self.next_event, at: now, what }));
            self.changes.push(Change::Events { ns: ns.clone() });
        }
        repeats
    }

    fn create(&mut self, ns: &Namespace, run: RunId, key: Option<StartKey>, now: Millis) {
        self.next_position += 1;
        self.by_position.insert(self.next_position, run);
        if let Some(key) = &key {
            self.keys.insert((ns.clone(), key.flow.clone(), key.key.clone()), (run, key.fingerprint));
        }
        let kept = KeptRun {
            ns: ns.clone(),
            position: self.next_position,
            rows: Run::new(run),
            written: Vec::new(),
            records: Vec::new(),
            values: Default::default(),
            timers: Default::default(),
            gates: Default::default(),
            commands: Default::default(),
            key: key.map(|key| (key.flow, key.key)),
            created_at: now,
            started_at: None,
            ended_at: None,
            trimmed: false,
        };
        self.runs.insert(run, kept);
    }

    /// Writes the rows of a transition; returns the number of its first record.
    fn apply(&mut self, transition: &Transition, now: Millis) -> u64 {
        let header = &transition.header;
        let run = header.run;
        let Some(kept) = self.runs.get_mut(&run) else { return 0 };
        let ns = kept.ns.clone();
        kept.rows.header = header.clone();
        for activation in &transition.activations {
            let at = activation.id.0 as usize;
            match kept.rows.activations.get_mut(at) {
                Some(row) => (*row, kept.written[at]) = (activation.clone(), header.version),
                None => {
                    kept.rows.activations.push(activation.clone());
                    kept.written.push(header.version);
                }
            }
        }
        kept.rows.emitted.extend(transition.emitted.iter().cloned());
        kept.rows.cursors.extend(transition.cursors.iter().cloned());
        for name in &transition.reuse_done {
            kept.rows.reuse.remove(name);
        }
        let reuse = transition.reuse.iter().map(|reused| (reused.activation.clone(), reused.clone()));
        kept.rows.reuse.extend(reuse);
        for (id, value) in &transition.values {
            kept.values.entry(*id).or_insert_with(|| value.clone());
        }
        let first = kept.records.len() as u64 + 1;
        for (record, n) in transition.records.iter().zip(first..) {
            kept.records.push(Numbered { n, ts: now, record: record.clone() });
        }
        if header.begun {
            kept.started_at.get_or_insert(now);
        }
        if header.phase == Phase::Ended {
            kept.ended_at.get_or_insert(now);
        }
        self.apply_tasks(&ns, transition, now);
        self.apply_timers(transition, now);
        self.apply_gates(&ns, transition, now);
        first
    }

    fn apply_tasks(&mut self, ns: &Namespace, transition: &Transition, now: Millis) {
        let header = &transition.header;
        let run = header.run;
        let was_paused = self.tasks.is_paused(run);
        self.tasks.set_run(run, header.holds_tasks(), header.code.as_ref().map_or(0, |code| code.n));
        if was_paused && !header.holds_tasks() {
            self.hint_tasks(ns);
        }
        for change in &transition.tasks {
            match change {
                TaskChange::Add(task) => {
                    self.next_task += 1;
                    self.tasks.add(ns, run, &header.flow, Arc::new((**task).clone()), self.next_task, now);
                    self.changes.push(Change::Tasks { ns: ns.clone(), queue: task.queue.clone() });
                    if task.start_timeout_ms.is_some() {
                        self.changes.push(Change::Leases);
                    }
                }
                TaskChange::Close(fence) => self.tasks.close(run, *fence),
                TaskChange::Remove(fence) => {
                    let made_room = self.tasks.remove(run, *fence);
                    if made_room {
                        self.hint_tasks(ns);
                    }
                }
            }
        }
    }

    /// Hints every queue of the namespace that offers tasks, since a bound changed.
    fn hint_tasks(&mut self, ns: &Namespace) {
        let queues = self.tasks.offering(ns);
        self.changes.extend(queues.into_iter().map(|queue| Change::Tasks { ns: ns.clone(), queue }));
    }

    fn apply_timers(&mut self, transition: &Transition, now: Millis) {
        let run = transition.header.run;
        let Some(kept) = self.runs.get_mut(&run) else { return };
        for change in &transition.timers {
            let key = match change {
                TimerChange::Set { key, .. } | TimerChange::Clear(key) => *key,
            };
            if let Some(old) = kept.timers.remove(&key) {
                self.timers.remove(&(old.wall, old.due, run, key));
            }
            if let TimerChange::Set { due, .. } = change {
                let timer = match *due {
                    Due::After(ms) => TimerRow { key, due: now + ms, wall: false },
                    Due::At(at) => TimerRow { key, due: at, wall: true },
                };
                kept.timers.insert(key, timer);
                self.timers.insert((timer.wall, timer.due, run, key));
                self.changes.push(Change::Timers);
            }
        }
    }

    fn apply_gates(&mut self, ns: &Namespace, transition: &Transition, now: Millis) {
        let run = transition.header.run;
        let Some(kept) = self.runs.get_mut(&run) else { return };
        for change in &transition.gates {
            match change {
                GateChange::Add { id, token } => {
                    self.tokens.insert(token.clone(), (run, id.activation));
                    let (ns, token) = (ns.clone(), Some(token.clone()));
                    let row = GateRow { ns, position: 0, id: *id, token, arrival: None, closed: false };
                    kept.gates.insert(id.activation, row);
                }
                GateChange::Arrive(gate) => {
                    if let Some(token) = &gate.token {
                        self.tokens.insert(token.clone(), (run, gate.id.activation));
                    }
                    self.next_gate += 1;
                    let deadline = gate.timeout_ms.map(|ms| now + ms);
                    let row = GateRow {
                        ns: ns.clone(),
                        position: self.next_gate,
                        id: gate.id,
                        token: gate.token.clone(),
                        arrival: Some(Arrived { at: now, gate: (**gate).clone(), deadline }),
                        closed: false,
                    };
                    kept.gates.insert(gate.id.activation, row);
                }
                GateChange::Close { id } => {
                    if let Some(gate) = kept.gates.get_mut(&id.activation) {
                        gate.closed = true;
                    }
                }
            }
        }
    }

    /// Grants a claim and records the started attempts.
    pub fn claim(&mut self, request: &ClaimRequest, now: Millis) -> Claims {
        if let Some(before) = self.tasks.claimed_before(request) {
            let tasks = before.into_iter().filter_map(|(run, fence)| self.claimed(run, fence)).collect();
            return Claims { tasks, ..Claims::default() };
        }
        let (got, retry_at) = self.tasks.claim(request, now);
        let full = got.len() < request.max && self.tasks.is_full(request);
        let tasks: Vec<Claimed> = got.into_iter().filter_map(|(run, fence)| self.claimed(run, fence)).collect();
        for Claimed { run, task, held, .. } in &tasks {
            let Some(kept) = self.runs.get_mut(run) else { continue };
            let n = kept.records.len() as u64 + 1;
            kept.records.push(Numbered { n, ts: now, record: task.started(Some(held.worker.clone())) });
            self.changes.push(Change::Run { run: *run, ended: false });
            self.changes.push(Change::Leases);
        }
        Claims { tasks, retry_at, full, exhausted: false }
    }

    fn claimed(&self, run: RunId, fence: Fence) -> Option<Claimed> {
        let (kept, (task, held)) = (self.runs.get(&run)?, self.tasks.held(run, fence)?);
        Some(Claimed { ns: kept.ns.clone(), run, flow: kept.rows.header.flow.clone(), task, held })
    }

    /// The hints of a commit: a queue only if it offers tasks, leases only if one ends soon.
    pub fn take_changes(&mut self, now: Millis) -> Vec<Change> {
        let mut queues = BTreeSet::new();
        let (tasks, mut changes): (Vec<Change>, Vec<Change>) =
            std::mem::take(&mut self.changes).into_iter().partition(|change| matches!(change, Change::Tasks { .. }));
        for change in tasks {
            if let Change::Tasks { ns, queue } = change {
                queues.insert((ns, queue));
            }
        }
        let soon = self.tasks.any_ends_by(now + UNWATCHED_MS);
        changes.retain(|change| *change != Change::Leases || soon);
        let offering = queues.into_iter().filter(|queue| self.tasks.offers(queue));
        changes.extend(offering.map(|(ns, queue)| Change::Tasks { ns, queue }));
        changes
    }

    fn commit_documents(&mut self, commit: DocumentCommit, now: Millis) -> Result<Committed, Refused> {
        if let Some(committed) = self.document_commands.get(&commit.command) {
            return Ok(Committed { before: true, repeats: 0, ..*committed });
        }
        for change in &commit.documents {
            let current = self.documents.get(&(commit.ns.clone(), change.key.clone())).map(|found| found.revision);
            let expected = match change.expect {
                Expect::Any => true,
                Expect::Absent => current.is_none(),
                Expect::Revision(revision) => current == Some(revision),
            };
            if !expected {
                return Err(Refused::Revision { key: change.key.clone(), current });
            }
        }
        for change in commit.documents {
            self.change_document(&commit.ns, change, now);
        }
        for message in commit.messages {
            self.send(&commit.ns, message);
        }
        let repeats = self.publish(&commit.ns, commit.events, now);
        for (to, id) in &commit.drops {
            self.drop_message(*to, id);
            // A continued run whose start is dropped is never stored.
            if !self.runs.contains_key(to) {
                self.leave_line(&commit.ns, *to);
            }
        }
        let committed = Committed { at: now, first: 0, before: false, repeats };
        self.document_commands.insert(commit.command, committed);
        Ok(committed)
    }

    fn change_document(&mut self, ns: &Namespace, change: DocumentChange, now: Millis) {
        let at = (ns.clone(), change.key.clone());
        if let Some(old) = self.documents.get(&at) {
            self.holds.drop_item(&Item::Document(ns.clone(), change.key.clone(), old.revision));
        }
        self.tasks.set_rules(ns, &change.key, change.body.as_ref());
        if matches!(change.key.kind.as_str(), kind::QUEUE | kind::LIMIT) {
            self.hint_tasks(ns);
        }
        self.changes.push(Change::Documents { ns: ns.clone(), kind: change.key.kind.clone() });
        match change.body {
            Some(body) => {
                self.revision += 1;
                let (revision, due) = (self.revision, change.due);
                let document = Document { ns: ns.clone(), key: change.key, revision, body, due, changed_at: now };
                self.documents.insert(at, document);
            }
            None => {
                self.documents.remove(&at);
            }
        }
    }

    pub fn trim(&mut self, what: &Trim) {
        match what {
            Trim::Timeline(run) => {
                if let Some(kept) = self.runs.get_mut(run).filter(|kept| kept.ended_at.is_some()) {
                    kept.trimmed = true;
                    kept.records.clear();
                    kept.values.clear();
                    kept.commands.clear();
                    kept.gates.clear();
                    let header = std::mem::take(&mut kept.rows.header);
                    kept.rows = Run::new(*run);
                    kept.rows.header = header;
                    self.tokens.retain(|_, (of, _)| of != run);
                }
            }
            Trim::Run(run) => {
                let Some(kept) = self.runs.get(run).filter(|kept| kept.ended_at.is_some()) else { return };
                if let Some((flow, key)) = &kept.key {
                    self.keys.remove(&(kept.ns.clone(), flow.clone(), key.clone()));
                }
                self.by_position.remove(&kept.position);
                self.tokens.retain(|_, (of, _)| of != run);
                self.tasks.forget(*run);
                self.runs.remove(run);
            }
            Trim::Events { ns, before } => {
                let old = |(_, (of, item)): &(&u64, &(Namespace, FeedItem))| of == ns && item.at < *before;
                let old: Vec<u64> = self.events.iter().filter(old).map(|(at, _)| *at).collect();
                for at in old {
                    self.events.remove(&at);
                    self.gates_opened.remove(&at);
                }
                let events = &self.events;
                self.event_ids.retain(|_, at| events.contains_key(at));
            }
            Trim::Event { ns, id } => {
                if let Some(at) = self.event_ids.remove(&(ns.clone(), id.clone())) {
                    self.events.remove(&at);
                    self.gates_opened.remove(&at);
                }
            }
            Trim::Traces { before } => {
                self.document_commands.retain(|_, committed| committed.at >= *before);
            }
        }
    }
}
