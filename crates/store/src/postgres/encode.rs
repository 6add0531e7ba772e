//! Transitions as rows.

use std::collections::{BTreeMap, HashSet};

use eddyline_machine::run::Phase;
use eddyline_machine::{
    Due, Entry, Expiry, GateChange, Message, Record, RunId, Task, TaskChange, TaskKind, TimerChange, Transition,
};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::body::{escaped, seal, text};
use super::claims::ClaimRows;
use super::columns::*;
use super::database::{Database, Param};
use super::pending::seal_message;
use crate::commit::{Consumed, NewEvent, RunCommit};
use crate::conditions::reason_text;
use crate::error::Result;
use crate::ids::Namespace;
use crate::task_queues::AGE_MS;
use crate::timer_columns;

/// Separates the elements of a text column that holds a list.
pub(super) const BETWEEN: &str = "\u{1e}";
/// Separates the name of a limit from its key.
pub(super) const BEFORE_KEY: char = '\u{1f}';

/// The transitions of different runs as the parameters of `commit_v1`.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub commits: Commits,
    taken_messages: TakenMessages,
    taken_timers: TakenTimers,
    taken_expiries: TakenExpiries,
    activations: Bodies,
    values: Bodies,
    pub tasks: Tasks,
    dropped_tasks: DroppedTasks,
    timers: Timers,
    messages: Messages,
    events: Events,
    more: Map<String, Value>,
    more_text: Option<String>,
    /// Task classes that are written with the batch.
    pub classes: HashSet<(String, String, i64)>,
}

impl Batch {
    /// Everything but the time and the locks.
    pub fn params<'a>(&'a self, claims: &'a ClaimRows) -> Vec<Param<'a>> {
        let mut params = Vec::with_capacity(96);
        self.commits.params(&mut params);
        self.taken_messages.params(&mut params);
        self.taken_timers.params(&mut params);
        self.taken_expiries.params(&mut params);
        self.activations.params(&mut params);
        self.values.params(&mut params);
        self.tasks.params(&mut params);
        self.dropped_tasks.params(&mut params);
        self.timers.params(&mut params);
        self.messages.params(&mut params);
        self.events.params(&mut params);
        claims.params(&mut params);
        params.push((&self.more_text, tokio_postgres::types::Type::TEXT));
        params
    }

    /// Must be called once everything is added.
    pub fn close(&mut self) -> Result<()> {
        if !self.more.is_empty() {
            self.more_text = Some(text(&self.more)?);
        }
        Ok(())
    }

    fn add_more(&mut self, name: &str, row: Value) {
        if let Value::Array(rows) = self.more.entry(name).or_insert_with(|| Value::Array(Vec::new())) {
            rows.push(row);
        }
    }

    pub fn add(&mut self, database: &Database, commit: &RunCommit) -> Result<()> {
        let transition = &*commit.transition;
        let run = transition.header.run;
        let c = self.commits.run.len() as i32 + 1;
        self.add_commit(commit)?;
        self.add_takes(c, commit);
        for message in &commit.messages {
            add_message(&mut self.messages, c, message)?;
        }
        for event in &commit.events {
            add_event(&mut self.events, c, &commit.ns, event)?;
        }
        for position in &transition.events_taken {
            self.add_more("events_taken", json!({"c": c, "position": *position as i64}));
        }
        if transition.is_empty() {
            return Ok(());
        }
        self.add_start(c, commit)?;
        self.add_state(c, run, transition)?;
        self.add_tasks(c, database, commit)?;
        self.add_timers(c, transition);
        self.add_gates(c, run, transition)
    }

    fn add_commit(&mut self, commit: &RunCommit) -> Result<()> {
        let (transition, columns) = (&*commit.transition, &mut self.commits);
        let header = &transition.header;
        let (head, records) = (text(header)?, text(&transition.records)?);
        let (id, version) = (header.run.0.into_bytes(), header.version.0.to_le_bytes());
        columns.run.push(header.run.0);
        columns.ns.push(escaped(commit.ns.as_str()));
        columns.base.push(transition.base.0 as i64);
        columns.version.push(header.version.0 as i64);
        columns.command.push(commit.command.0);
        columns.flow.push(escaped(&header.flow));
        columns.status.push(header.status().as_str());
        columns.external_id.push(header.external_id.as_deref().map(escaped));
        columns.root.push(header.root.map(|run| run.0));
        columns.retry_of.push(header.retry_of.map(|run| run.0));
        columns.paused.push(header.holds_tasks());
        columns.memo.push(header.code.as_ref().map_or(0, |code| code.n as i64));
        columns.begun.push(header.begun);
        columns.ended.push(header.phase == Phase::Ended);
        columns.crc.push(seal(&head, &[&id, &version]));
        columns.header.push(head);
        columns.count.push(transition.records.len() as i32);
        columns.records_crc.push(seal(&records, &[&id, &version]));
        columns.records.push(records);
        Ok(())
    }

    fn add_takes(&mut self, c: i32, commit: &RunCommit) {
        for (taken, at) in commit.takes.iter().zip(0..) {
            match taken {
                Consumed::Message(id) => {
                    let columns = &mut self.taken_messages;
                    columns.c.push(c);
                    columns.at.push(at);
                    columns.id.push(escaped(id));
                }
                Consumed::Timer(key, due) => {
                    let ((activation, kind, fence), columns) = (timer_columns::columns(*key), &mut self.taken_timers);
                    columns.c.push(c);
                    columns.at.push(at);
                    columns.activation.push(activation);
                    columns.kind.push(kind);
                    columns.fence.push(fence);
                    columns.due.push(*due);
                }
                Consumed::Expiry(fence, why) => {
                    let columns = &mut self.taken_expiries;
                    columns.c.push(c);
                    columns.at.push(at);
                    columns.fence.push(fence.0 as i64);
                    columns.why.push(match why {
                        Expiry::LeaseLost => 0,
                        Expiry::Timeout => 1,
                        Expiry::StartTimeout => 2,
                        Expiry::Released => 3,
                    });
                }
            }
        }
    }

    /// The keys, tags and queue position of a new run.
    fn add_start(&mut self, c: i32, commit: &RunCommit) -> Result<()> {
        let transition = &*commit.transition;
        let header = &transition.header;
        let starts = transition.base.0 == 0;
        if let Some(key) = &commit.key {
            let hex: String = key.fingerprint.iter().map(|byte| format!("{byte:02x}")).collect();
            let (flow, key) = (escaped(&key.flow), escaped(&key.key));
            self.add_more("keys", json!({"c": c, "flow": flow, "key": key, "fingerprint": hex}));
        }
        if starts {
            for tag in &header.tags {
                self.add_more("tags", json!({"c": c, "tag": escaped(tag)}));
            }
        }
        if let Some(unique) = header.unique.as_ref().filter(|_| starts || header.phase == Phase::Ended) {
            let mut line = json!({"c": c, "key": escaped(&unique.key), "in_line": header.in_line});
            let (turn_crc, turn) = turn()?;
            line["turn_crc"] = turn_crc.into();
            line["turn"] = turn.into();
            line["continued"] = json!(header.continued_as.map(|run| run.0));
            if let Some(input) = &commit.tells_line {
                let message = Message::replaced(header.run, header.run, (**input).clone());
                let body = text(&message.body)?;
                line["tells_crc"] = seal(&body, &[message.id.as_bytes()]).into();
                line["tells_id"] = message.id.into();
                line["tells"] = body.into();
            }
            self.add_more("lines", line);
        }
        Ok(())
    }

    /// Everything that `decide` reads except the header.
    fn add_state(&mut self, c: i32, run: RunId, transition: &Transition) -> Result<()> {
        let (id, version) = (run.0.into_bytes(), transition.header.version.0.to_le_bytes());
        for activation in &transition.activations {
            let (body, number) = (text(activation)?, i64::from(activation.id.0));
            let crc = seal(&body, &[&id, &number.to_le_bytes(), &version]);
            push_body(&mut self.activations, c, number, crc, body);
        }
        for (value_id, value) in &transition.values {
            let (body, number) = (text(value)?, i64::from(value_id.0));
            let crc = seal(&body, &[&id, &number.to_le_bytes()]);
            push_body(&mut self.values, c, number, crc, body);
        }
        let emitted: BTreeMap<_, _> = transition.emitted.iter().map(|(key, emitted)| (*key, emitted)).collect();
        for ((scope, event), emitted) in emitted {
            let body = text(emitted)?;
            let crc = seal(&body, &[&id, &scope.0.to_le_bytes(), &event.to_le_bytes()]);
            self.add_more("emitted", json!({"c": c, "scope": scope.0, "event": event, "crc": crc, "body": body}));
        }
        for name in &transition.reuse_done {
            self.add_more("reuse_done", json!({"c": c, "activation": escaped(name)}));
        }
        let reuse: BTreeMap<_, _> = transition.reuse.iter().map(|reused| (&reused.activation, reused)).collect();
        for (name, reused) in reuse {
            let body = text(reused)?;
            let crc = seal(&body, &[&id, name.as_bytes()]);
            self.add_more("reuse", json!({"c": c, "activation": escaped(name), "crc": crc, "body": body}));
        }
        let cursors: BTreeMap<_, _> = transition.cursors.iter().map(|(name, position)| (name, *position)).collect();
        for (name, position) in cursors {
            self.add_more("cursors", json!({"c": c, "name": escaped(name), "position": position as i64}));
        }
        for name in logged(&transition.records) {
            self.add_more("logs", json!({"c": c, "activation": escaped(name)}));
        }
        Ok(())
    }

    fn add_tasks(&mut self, c: i32, database: &Database, commit: &RunCommit) -> Result<()> {
        let run = commit.transition.header.run;
        let mut added: BTreeMap<u64, (&Task, bool)> = BTreeMap::new();
        let mut order = Vec::new();
        for change in &commit.transition.tasks {
            let (fence, remove) = match change {
                TaskChange::Add(task) => {
                    added.insert(task.fence.0, (task, false));
                    order.push(task.fence.0);
                    continue;
                }
                TaskChange::Close(fence) => (fence, false),
                TaskChange::Remove(fence) => (fence, true),
            };
            match (added.get_mut(&fence.0), remove) {
                (Some((_, closed)), false) => *closed = true,
                (Some(_), true) => _ = added.remove(&fence.0),
                (None, _) => {
                    self.dropped_tasks.c.push(c);
                    self.dropped_tasks.fence.push(fence.0 as i64);
                    self.dropped_tasks.remove.push(remove);
                }
            }
        }
        for fence in order {
            if let Some((task, closed)) = added.remove(&fence) {
                self.add_task(c, database, &commit.ns, run, task, closed)?;
            }
        }
        Ok(())
    }

    fn add_task(
        &mut self,
        c: i32,
        database: &Database,
        ns: &Namespace,
        run: RunId,
        task: &Task,
        closed: bool,
    ) -> Result<()> {
        let (body, started) = (text(task)?, text(&[task.started(None)])?);
        let (id, fence) = (run.0.into_bytes(), task.fence.0.to_le_bytes());
        let ns = escaped(ns.as_str());
        let (class, row) = class_of(&ns, task);
        let known = (ns, escaped(&task.queue), class);
        if database.is_new_class(&known) && self.classes.insert(known) {
            self.add_more("classes", row);
        }
        let columns = &mut self.tasks;
        columns.c.push(c);
        columns.fence.push(task.fence.0 as i64);
        columns.activation.push(task.activation.0.into());
        columns.queue.push(escaped(&task.queue));
        columns.class.push(class);
        columns.key.push(task.key.as_ref().map_or_else(String::new, |key| format!("={}", escaped(key))));
        columns.age_ms.push(i64::from(task.priority).saturating_mul(AGE_MS));
        columns.limits.push(task.limits.iter().map(limit_of).collect::<Vec<_>>().join(BETWEEN));
        columns.handler.push(escaped(&task.handler));
        columns.is_run.push(task.kind == TaskKind::Run);
        columns.start_ms.push(task.start_timeout_ms);
        columns.timeout_ms.push(task.timeout_ms);
        columns.closed.push(closed);
        columns.crc.push(seal(&body, &[&id, &fence]));
        columns.body.push(body);
        columns.started_crc.push(seal(&started, &[&id, &fence]));
        columns.started.push(started);
        columns.group.push(0);
        columns.build.push(None);
        Ok(())
    }

    fn add_timers(&mut self, c: i32, transition: &Transition) {
        let mut changes = BTreeMap::new();
        for change in &transition.timers {
            match change {
                TimerChange::Set { key, due } => changes.insert(timer_columns::columns(*key), Some(*due)),
                TimerChange::Clear(key) => changes.insert(timer_columns::columns(*key), None),
            };
        }
        let columns = &mut self.timers;
        for ((activation, kind, fence), due) in changes {
            columns.c.push(c);
            columns.activation.push(activation);
            columns.kind.push(kind);
            columns.fence.push(fence);
            columns.set.push(due.is_some());
            columns.after.push(due.and_then(|due| if let Due::After(ms) = due { Some(ms) } else { None }));
            columns.at.push(due.and_then(|due| if let Due::At(at) = due { Some(at) } else { None }));
        }
    }

    fn add_gates(&mut self, c: i32, run: RunId, transition: &Transition) -> Result<()> {
        let mut rows: BTreeMap<u32, Value> = BTreeMap::new();
        for change in &transition.gates {
            match change {
                GateChange::Add { id, token } => {
                    let at = id.activation.0;
                    let row =
                        json!({"c": c, "activation": at, "token": escaped(token), "arrived": false, "closed": false});
                    rows.insert(at, row);
                }
                GateChange::Arrive(gate) => {
                    let (at, body) = (gate.id.activation.0, text(gate)?);
                    let event = gate.event.as_ref();
                    let row = json!({
                        "c": c, "activation": at, "token": gate.token.as_deref().map(escaped), "arrived": true,
                        "closed": false, "timeout_ms": gate.timeout_ms, "reason": reason_text(gate.reason),
                        "event": event.map(|event| escaped(&event.name)),
                        "event_key": event.and_then(|event| event.key.as_deref().map(escaped)),
                        "crc": seal(&body, &[&run.0.into_bytes(), &at.to_le_bytes()]), "body": body,
                    });
                    rows.insert(at, row);
                }
                GateChange::Close { id } => match rows.get_mut(&id.activation.0) {
                    Some(row) => row["closed"] = true.into(),
                    None => self.add_more("gates_closed", json!({"c": c, "activation": id.activation.0})),
                },
            }
        }
        for row in rows.into_values() {
            self.add_more("gates", row);
        }
        for (name, ms) in &transition.slow_limits {
            self.add_more("slow_limits", json!({"c": c, "name": escaped(name), "ms": ms}));
        }
        Ok(())
    }
}

fn push_body(columns: &mut Bodies, c: i32, id: i64, crc: i32, body: String) {
    columns.c.push(c);
    columns.id.push(id);
    columns.crc.push(crc);
    columns.body.push(body);
}

pub(super) fn add_message(columns: &mut Messages, c: i32, message: &Message) -> Result<()> {
    let body = text(&message.body)?;
    columns.c.push(c);
    columns.target.push(message.to.0);
    columns.crc.push(seal_message(message.to, &message.id, &body));
    columns.id.push(escaped(&message.id));
    columns.body.push(body);
    Ok(())
}

pub(super) fn add_event(columns: &mut Events, c: i32, ns: &Namespace, event: &NewEvent) -> Result<()> {
    let body = text(&event.payload)?;
    columns.c.push(c);
    columns.crc.push(seal(&body, &[ns.as_str().as_bytes(), event.id.as_bytes()]));
    columns.id.push(escaped(&event.id));
    columns.name.push(escaped(&event.name));
    columns.key.push(event.key.as_deref().map(escaped));
    columns.body.push(body);
    Ok(())
}

/// The message that tells a run that it is first in the queue of its unique key: its checksum and body are the same for
/// every run.
pub(super) fn turn() -> Result<(i32, String)> {
    let message = Message::turn(RunId(Uuid::nil()));
    let body = text(&message.body)?;
    Ok((seal(&body, &[message.id.as_bytes()]), body))
}

/// The activations that the records have logs of.
fn logged(records: &[Record]) -> HashSet<&str> {
    let mut names = HashSet::new();
    for record in records {
        if let Entry::Log { step_key, .. } = &record.entry {
            names.insert(step_key.as_str());
        }
    }
    names
}

/// A limit that applies to a task, with its key.
pub(super) fn limit_of((name, key): &(String, Option<String>)) -> String {
    match key {
        Some(key) => format!("{}{BEFORE_KEY}{}", escaped(name), escaped(key)),
        None => escaped(name),
    }
}

/// The class of a task, as a row, and its number. The namespace is escaped.
pub(super) fn class_of(ns: &str, task: &Task) -> (i64, Value) {
    let (is_run, keyed) = (task.kind == TaskKind::Run, task.key.is_some());
    let mut limits: Vec<String> = task.limits.iter().map(|(name, _)| escaped(name)).collect();
    limits.sort();
    limits.dedup();
    let mut requires: Vec<String> = task.requires.iter().map(|label| escaped(label)).collect();
    requires.sort();
    requires.dedup();
    let (handler, build) = (escaped(&task.handler), task.build.as_deref().map(escaped));
    // With the priority, so that ranks grow within a class: low marks rely on it.
    let what = json!([is_run, handler, requires, build, keyed, limits, task.priority]);
    let digest = Sha256::digest(what.to_string().as_bytes());
    let class = i64::from_le_bytes(std::array::from_fn(|at| digest[at]));
    let row = json!({
        "ns": ns, "queue": escaped(&task.queue), "class": class, "is_run": is_run, "handler": handler,
        "requires": requires, "build": build, "keyed": keyed, "limits": limits,
    });
    (class, row)
}
