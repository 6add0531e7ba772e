//! Derives the columns of copied rows.

use std::collections::{HashMap, HashSet};

use eddyline_machine::run::Header;
use eddyline_machine::{GateArrival, RunId, Task, TaskKind};
use serde::de::DeserializeOwned;

use super::inserts::Inserts;
use crate::conditions::reason_text;
use crate::copy::*;
use crate::document::{LimitRules, QueueRules, Rate, kind};
use crate::error::{Result, StoreError};
use crate::ids::Namespace;
use crate::postgres::body::{escaped, parse, seal, text};
use crate::postgres::encode::{BEFORE_KEY, BETWEEN, class_of, limit_of};
use crate::postgres::pending::seal_message;
use crate::task_queues::AGE_MS;
use crate::timer_columns;

/// State from earlier rows that later rows need.
#[derive(Debug, Default)]
pub(super) struct Fill {
    runs: LatestRuns<OfRun>,
    /// The rates of queues, and of limits.
    rates: HashMap<(Namespace, bool, String), Rate>,
    classes: HashSet<(String, String, i64)>,
}

#[derive(Debug)]
struct OfRun {
    ns: String,
    flow: String,
    paused: bool,
    version: i64,
}

impl Fill {
    pub fn inserts(&mut self, rows: Vec<Row>) -> Result<Inserts> {
        let mut inserts = Inserts::default();
        for row in rows {
            self.add(&mut inserts, row)?;
        }
        Ok(inserts)
    }

    fn run(&self, run: RunId) -> Result<&OfRun> {
        let missing = || StoreError::Corrupt(format!("a row precedes its run {run}"));
        self.runs.get(run).ok_or_else(missing)
    }

    fn add(&mut self, to: &mut Inserts, row: Row) -> Result<()> {
        match row {
            Row::Document(row) => return self.document(to, row),
            Row::Run(row) => return self.copied_run(to, *row),
            Row::Task(row) => return self.task(to, *row),
            Row::Gate(row) => return self.gate(to, *row),
            Row::Records(row) => {
                let (id, version) = (row.run.0.into_bytes(), row.version.to_le_bytes());
                to.records.run.push(row.run.0);
                to.records.first.push(row.first as i64);
                to.records.version.push(row.version as i64);
                to.records.count.push(row.count as i32);
                to.records.ts.push(row.ts);
                to.records.command.push(row.command);
                to.records.crc.push(seal(&row.body, &[&id, &version]));
                to.records.body.push(row.body);
            }
            Row::Log { run, activation, first } => {
                to.logs.run.push(run.0);
                to.logs.activation.push(escaped(&activation));
                to.logs.first.push(first as i64);
            }
            Row::Timer { run, key, due, wall } => {
                let (activation, kind, fence) = timer_columns::columns(key);
                to.timers.ns.push(self.run(run)?.ns.clone());
                to.timers.run.push(run.0);
                to.timers.activation.push(activation);
                to.timers.kind.push(kind);
                to.timers.fence.push(fence);
                to.timers.due.push(due);
                to.timers.wall.push(wall);
            }
            row @ (Row::Activation { .. }
            | Row::Value { .. }
            | Row::Emitted { .. }
            | Row::Reuse { .. }
            | Row::Cursor { .. }) => return self.state(to, row),
            row => self.outside_runs(to, row),
        }
        Ok(())
    }

    fn outside_runs(&self, to: &mut Inserts, row: Row) {
        match row {
            Row::Rate { ns, is_limit, name, key, whole, parts, at } => {
                let Some(rate) = self.rates.get(&(ns.clone(), is_limit, name.clone())) else { return };
                let name = match key {
                    Some(key) => format!("{}{BEFORE_KEY}{}", escaped(&name), escaped(&key)),
                    None => escaped(&name),
                };
                to.buckets.ns.push(escaped(ns.as_str()));
                to.buckets.is_limit.push(is_limit);
                to.buckets.name.push(name);
                to.buckets.level.push(i64::from(whole).saturating_mul(rate.per_ms.max(1)).saturating_add(parts));
                to.buckets.at.push(at);
            }
            Row::ClosedLimit { ns, name, until } => {
                to.closed_limits.ns.push(escaped(ns.as_str()));
                to.closed_limits.name.push(escaped(&name));
                to.closed_limits.closed_until.push(until);
            }
            Row::Command { id, at } => {
                to.commands.id.push(id);
                to.commands.at.push(at);
            }
            Row::Line { place, ns, flow, key, run } => {
                to.lines.place.push(place as i64);
                to.lines.ns.push(escaped(ns.as_str()));
                to.lines.flow.push(escaped(&flow));
                to.lines.key.push(escaped(&key));
                to.lines.run.push(run.0);
            }
            Row::Message(row) => {
                to.messages.place.push(row.place as i64);
                to.messages.ns.push(escaped(row.ns.as_str()));
                to.messages.target.push(row.to.0);
                to.messages.crc.push(seal_message(row.to, &row.id, &row.body));
                to.messages.id.push(escaped(&row.id));
                to.messages.body.push(row.body);
            }
            Row::Event(row) => {
                to.events.crc.push(seal(&row.payload, &[row.ns.as_str().as_bytes(), row.id.as_bytes()]));
                to.events.ns.push(escaped(row.ns.as_str()));
                to.events.id.push(escaped(&row.id));
                to.events.name.push(escaped(&row.name));
                to.events.key.push(row.key.as_deref().map(escaped));
                to.events.at.push(row.at);
                to.events.position.push(row.position as i64);
                to.events.gates_opened.push(row.gates_opened as i64);
                to.events.body.push(row.payload);
            }
            _ => {}
        }
    }

    /// The state that `decide` reads, except the header.
    fn state(&self, to: &mut Inserts, row: Row) -> Result<()> {
        match row {
            Row::Activation { run, id, body } => {
                let (version, id) = (self.run(run)?.version, id as i64);
                let key: [&[u8]; 3] = [&run.0.into_bytes(), &id.to_le_bytes(), &version.to_le_bytes()];
                to.activations.run.push(run.0);
                to.activations.id.push(id);
                to.activations.version.push(version);
                to.activations.crc.push(seal(&body, &key));
                to.activations.body.push(body);
            }
            Row::Value { run, id, body } => {
                let id = id as i64;
                to.values.run.push(run.0);
                to.values.id.push(id);
                to.values.crc.push(seal(&body, &[&run.0.into_bytes(), &id.to_le_bytes()]));
                to.values.body.push(body);
            }
            Row::Emitted { run, scope, event, body } => {
                let key: [&[u8]; 3] = [&run.0.into_bytes(), &scope.to_le_bytes(), &event.to_le_bytes()];
                to.emitted.run.push(run.0);
                to.emitted.scope.push(scope.into());
                to.emitted.event.push(event.into());
                to.emitted.crc.push(seal(&body, &key));
                to.emitted.body.push(body);
            }
            Row::Reuse { run, activation, body } => {
                to.reuse.run.push(run.0);
                to.reuse.crc.push(seal(&body, &[&run.0.into_bytes(), activation.as_bytes()]));
                to.reuse.activation.push(escaped(&activation));
                to.reuse.body.push(body);
            }
            Row::Cursor { run, name, position } => {
                to.cursors.run.push(run.0);
                to.cursors.name.push(escaped(&name));
                to.cursors.position.push(position as i64);
            }
            _ => {}
        }
        Ok(())
    }

    fn document(&mut self, to: &mut Inserts, row: CopiedDocument) -> Result<()> {
        let name = || format!("{} {} of {}", row.kind, row.id, row.ns);
        let numbers = |rate: Option<Rate>| {
            let rate = rate.map(|rate| (i64::from(rate.count), rate.per_ms, i64::from(rate.burst)));
            (rate.map(|rate| rate.0), rate.map(|rate| rate.1), rate.map(|rate| rate.2))
        };
        let (ns, id) = (escaped(row.ns.as_str()), escaped(&row.id));
        match row.kind.as_str() {
            kind::QUEUE => {
                let rules = QueueRules::read(&parsed(&row.body, name)?);
                let (count, per_ms, burst) = numbers(rules.rate);
                to.queues.ns.push(ns.clone());
                to.queues.name.push(id.clone());
                to.queues.ruled.push(rules != QueueRules::default());
                to.queues.paused.push(rules.paused);
                to.queues.concurrency.push(rules.concurrency.map(i64::from));
                to.queues.flow_concurrency.push(rules.flow_concurrency.map(i64::from));
                to.queues.rate_count.push(count);
                to.queues.rate_per_ms.push(per_ms);
                to.queues.rate_burst.push(burst);
                self.rates.extend(rules.rate.map(|rate| ((row.ns.clone(), false, row.id.clone()), rate)));
            }
            kind::LIMIT => {
                let rules = LimitRules::read(&parsed(&row.body, name)?);
                let (count, per_ms, burst) = numbers(rules.rate);
                to.limits.ns.push(ns.clone());
                to.limits.name.push(id.clone());
                to.limits.ruled.push(true);
                to.limits.concurrency.push(rules.concurrency.map(i64::from));
                to.limits.rate_count.push(count);
                to.limits.rate_per_ms.push(per_ms);
                to.limits.rate_burst.push(burst);
                self.rates.extend(rules.rate.map(|rate| ((row.ns.clone(), true, row.id.clone()), rate)));
            }
            _ => {}
        }
        let key: [&[u8]; 3] = [row.ns.as_str().as_bytes(), row.kind.as_bytes(), row.id.as_bytes()];
        to.documents.crc.push(seal(&row.body, &key));
        to.documents.ns.push(ns);
        to.documents.kind.push(escaped(&row.kind));
        to.documents.id.push(id);
        to.documents.revision.push(row.revision as i64);
        to.documents.due.push(row.due);
        to.documents.changed_at.push(row.changed_at);
        to.documents.body.push(row.body);
        Ok(())
    }

    fn copied_run(&mut self, to: &mut Inserts, row: CopiedRun) -> Result<()> {
        let header: Header = parsed(&row.header, || format!("the header of run {}", row.run))?;
        let (id, ns, flow) = (row.run.0, escaped(row.ns.as_str()), escaped(&header.flow));
        let runs = &mut to.runs;
        runs.id.push(id);
        runs.position.push(row.position as i64);
        runs.ns.push(ns.clone());
        runs.flow.push(flow.clone());
        runs.status.push(header.status().as_str());
        runs.external_id.push(header.external_id.as_deref().map(escaped));
        runs.root.push(header.root.map(|run| run.0));
        runs.retry_of.push(header.retry_of.map(|run| run.0));
        runs.created_at.push(row.created_at);
        runs.started_at.push(row.started_at);
        runs.ended_at.push(row.ended_at);
        // The target is served only once its time has passed every time of the source.
        runs.changed_at.push(row.ended_at.or(row.started_at).unwrap_or(row.created_at));
        runs.trimmed.push(row.trimmed);
        runs.paused.push(header.holds_tasks());
        runs.memo.push(header.code.as_ref().map_or(0, |code| code.n as i64));
        runs.version.push(header.version.0 as i64);
        runs.records.push(row.records as i64);
        runs.crc.push(seal(&row.header, &[&id.into_bytes(), &header.version.0.to_le_bytes()]));
        runs.header.push(row.header);
        to.fed_runs.ns.push(ns.clone());
        to.fed_runs.run.push(id);
        to.fed_runs.flow.push(flow.clone());
        to.fed_runs.at.push(row.created_at);
        to.fed_runs.position.push(row.fed_at as i64);
        let tags: HashSet<&String> = header.tags.iter().collect();
        for tag in tags {
            to.tags.run.push(id);
            to.tags.tag.push(escaped(tag));
        }
        if let Some(key) = row.key {
            to.keys.ns.push(ns.clone());
            to.keys.flow.push(escaped(&key.flow));
            to.keys.key.push(escaped(&key.key));
            to.keys.run.push(id);
            to.keys.fingerprint.push(key.fingerprint.to_vec());
        }
        let of_run = OfRun { ns, flow, paused: header.holds_tasks(), version: header.version.0 as i64 };
        self.runs.insert(row.run, of_run);
        Ok(())
    }

    fn task(&mut self, to: &mut Inserts, row: CopiedTask) -> Result<()> {
        let task: Task = parsed(&row.body, || format!("task {} of run {}", row.fence, row.run))?;
        let of_run = self.run(row.run)?;
        let (ns, id, fence) = (of_run.ns.clone(), row.run.0.into_bytes(), row.fence.to_le_bytes());
        let (class, class_row) = class_of(&ns, &task);
        let (started, claim) = (text(&[task.started(None)])?, row.claim);
        let limits: Vec<String> = task.limits.iter().map(limit_of).collect();
        if claim.is_some() {
            let distinct: HashSet<&String> = limits.iter().collect();
            for limit in distinct {
                to.passing.ns.push(ns.clone());
                to.passing.limit.push(limit.clone());
                to.passing.run.push(row.run.0);
                to.passing.fence.push(row.fence as i64);
            }
        }
        let tasks = &mut to.tasks;
        tasks.run.push(row.run.0);
        tasks.fence.push(row.fence as i64);
        tasks.activation.push(task.activation.0.into());
        tasks.ns.push(ns.clone());
        tasks.queue.push(escaped(&task.queue));
        tasks.flow.push(of_run.flow.clone());
        tasks.class.push(class);
        tasks.key.push(task.key.as_ref().map_or_else(String::new, |key| format!("={}", escaped(key))));
        tasks.rank.push(row.queued_at.saturating_sub(i64::from(task.priority).saturating_mul(AGE_MS)));
        tasks.place.push(row.place as i64);
        tasks.limits.push(limits.join(BETWEEN));
        tasks.handler.push(escaped(&task.handler));
        tasks.is_run.push(task.kind == TaskKind::Run);
        tasks.queued_at.push(row.queued_at);
        tasks.start_by.push(row.start_by);
        tasks.timeout_ms.push(task.timeout_ms);
        tasks.closed.push(row.closed);
        tasks.paused.push(of_run.paused);
        tasks.worker.push(claim.as_ref().map(|claim| escaped(&claim.worker)));
        tasks.request.push(claim.as_ref().map(|claim| claim.request));
        // The order within a repeated claim, which is not specified.
        tasks.claimed.push(claim.as_ref().map(|_| row.place as i64));
        tasks.since.push(claim.as_ref().map(|claim| claim.since));
        tasks.lease_ms.push(claim.as_ref().map(|claim| claim.lease_ms));
        tasks.lease_until.push(claim.as_ref().map(|claim| claim.since + claim.lease_ms));
        tasks.deadline.push(claim.as_ref().and_then(|claim| claim.deadline));
        tasks.build.push(claim.as_ref().and_then(|claim| claim.build.as_deref().map(escaped)));
        tasks.memo.push(claim.as_ref().map(|claim| claim.memo as i64));
        tasks.crc.push(seal(&row.body, &[&id, &fence]));
        tasks.started_crc.push(seal(&started, &[&id, &fence]));
        tasks.started.push(started);
        tasks.body.push(row.body);
        if self.classes.insert((ns, task.queue, class)) {
            to.classes.push(class_row);
        }
        Ok(())
    }

    fn gate(&mut self, to: &mut Inserts, row: CopiedGate) -> Result<()> {
        let name = || format!("the gate of activation {} of run {}", row.activation, row.run);
        let gate: Option<GateArrival> = row.arrival.as_ref().map(|arrival| parsed(&arrival.body, name)).transpose()?;
        let event = gate.as_ref().and_then(|gate| gate.event.as_ref());
        let key: [&[u8]; 2] = [&row.run.0.into_bytes(), &row.activation.to_le_bytes()];
        let gates = &mut to.gates;
        gates.run.push(row.run.0);
        gates.activation.push(row.activation.into());
        gates.ns.push(self.run(row.run)?.ns.clone());
        gates.token.push(row.token.as_deref().map(escaped));
        gates.position.push(row.position as i64);
        gates.at.push(row.arrival.as_ref().map(|arrival| arrival.at));
        gates.deadline.push(row.arrival.as_ref().and_then(|arrival| arrival.deadline));
        gates.reason.push(gate.as_ref().map(|gate| reason_text(gate.reason)));
        gates.event.push(event.map(|event| escaped(&event.name)));
        gates.event_key.push(event.and_then(|event| event.key.as_deref().map(escaped)));
        gates.closed.push(row.closed);
        gates.crc.push(row.arrival.as_ref().map(|arrival| seal(&arrival.body, &key)));
        gates.body.push(row.arrival.map(|arrival| arrival.body));
        Ok(())
    }
}

fn parsed<T: DeserializeOwned>(body: &str, name: impl Fn() -> String) -> Result<T> {
    parse(body).map_err(|error| StoreError::Corrupt(format!("{} can't be read: {error}", name())))
}
