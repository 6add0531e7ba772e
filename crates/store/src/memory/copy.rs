//! The rows of a memory store, to copy them.

use async_trait::async_trait;
use eddyline_machine::{Entry, Numbered, Record, RunId, Version};
use serde::Serialize;

use super::Memory;
use super::rates::Spender;
use super::rows::{KeptRun, Rows};
use crate::copy::*;
use crate::error::{Result, StoreError};
use crate::query::Fed;

#[async_trait]
impl CopySource for Memory {
    async fn origin(&self) -> Result<Origin> {
        let (rows, now) = (self.rows(), self.time.now());
        Ok(Origin {
            run_count: rows.runs.len() as u64,
            latest: now,
            served_at: rows.tasks.looked_at.unwrap_or(now),
            deletions_from: 0,
            last: Numbers {
                run: rows.next_position,
                fed_run: rows.next_position,
                event: rows.next_event,
                gate: rows.next_gate,
                revision: rows.revision,
            },
        })
    }

    fn rows(&self) -> crate::copy::Rows {
        let all = Memory::rows(self).copied(self.time.now());
        crate::copy::Rows::read_blocking(move |out| {
            all?.into_iter().for_each(|row| out.put_blocking(row));
            Ok(())
        })
    }

    async fn check_unserved(&self) -> Result<()> {
        Ok(())
    }
}

fn text(value: &(impl Serialize + ?Sized)) -> Result<String> {
    serde_json::to_string(value)
        .map_err(|error| StoreError::Unavailable(format!("cannot serialise a row to JSON: {error}")))
}

impl Rows {
    fn copied(&self, now: eddyline_machine::Millis) -> Result<Vec<Row>> {
        let mut all = Vec::new();
        for document in self.documents.values() {
            all.push(Row::Document(CopiedDocument {
                ns: document.ns.clone(),
                kind: document.key.kind.clone(),
                id: document.key.id.clone(),
                revision: document.revision,
                due: document.due,
                changed_at: document.changed_at,
                body: text(&document.body)?,
            }));
        }
        for (spender, whole, parts) in self.tasks.levels(now) {
            let (ns, is_limit, name, key) = match spender {
                Spender::Queue((ns, name)) => (ns, false, name, None),
                Spender::Limit(ns, name, key) => (ns, true, name, key),
            };
            all.push(Row::Rate { ns, is_limit, name, key, whole, parts, at: now });
        }
        let closed = self.tasks.all_closed_limits();
        all.extend(closed.map(|(ns, name, until)| Row::ClosedLimit { ns: ns.clone(), name: name.to_owned(), until }));
        let mut commands: Vec<_> = self.document_commands.iter().map(|(id, done)| (done.at, id.0)).collect();
        commands.sort();
        all.extend(commands.into_iter().map(|(at, id)| Row::Command { id, at }));
        let mut place = 0;
        for ((ns, flow, key), line) in &self.lines {
            for run in line {
                place += 1;
                all.push(Row::Line { place, ns: ns.clone(), flow: flow.clone(), key: key.clone(), run: *run });
            }
        }
        for (place, (ns, message)) in &self.messages {
            let (ns, body, id) = (ns.clone(), text(&message.body)?, message.id.clone());
            all.push(Row::Message(CopiedMessage { place: *place, ns, to: message.to, id, body }));
        }
        self.copied_events(&mut all)?;
        for run in self.by_position.values() {
            if let Some(kept) = self.runs.get(run) {
                self.copied_run(*run, kept, &mut all)?;
            }
        }
        Ok(all)
    }

    fn copied_events(&self, all: &mut Vec<Row>) -> Result<()> {
        for (position, (ns, item)) in &self.events {
            let Fed::Event { id, name, key, payload } = &item.what else { continue };
            all.push(Row::Event(CopiedEvent {
                position: *position,
                ns: ns.clone(),
                id: id.clone(),
                name: name.clone(),
                key: key.clone(),
                at: item.at,
                gates_opened: self.gates_opened.get(position).copied().unwrap_or(0),
                payload: text(payload)?,
            }));
        }
        Ok(())
    }

    fn copied_run(&self, run: RunId, kept: &KeptRun, all: &mut Vec<Row>) -> Result<()> {
        let id = |(flow, key): &(String, String)| (kept.ns.clone(), flow.clone(), key.clone());
        let key = kept.key.as_ref().and_then(|key| {
            let (_, fingerprint) = self.keys.get(&id(key))?;
            Some(CopiedKey { flow: key.0.clone(), key: key.1.clone(), fingerprint: *fingerprint })
        });
        all.push(Row::Run(Box::new(CopiedRun {
            run,
            ns: kept.ns.clone(),
            position: kept.position,
            fed_at: kept.position,
            created_at: kept.created_at,
            started_at: kept.started_at,
            ended_at: kept.ended_at,
            trimmed: kept.trimmed,
            records: kept.records.len() as u64,
            key,
            header: text(&kept.rows.header)?,
        })));
        for activation in &kept.rows.activations {
            all.push(Row::Activation { run, id: activation.id.0.into(), body: text(activation)? });
        }
        for (id, value) in &kept.values {
            all.push(Row::Value { run, id: id.0.into(), body: text(value)? });
        }
        for ((scope, event), emitted) in &kept.rows.emitted {
            all.push(Row::Emitted { run, scope: scope.0, event: *event, body: text(emitted)? });
        }
        for (activation, reused) in &kept.rows.reuse {
            all.push(Row::Reuse { run, activation: activation.clone(), body: text(reused)? });
        }
        for (name, position) in &kept.rows.cursors {
            all.push(Row::Cursor { run, name: name.clone(), position: *position });
        }
        copied_records(run, kept, all)?;
        for (fence, row) in self.tasks.of(run) {
            all.push(Row::Task(Box::new(CopiedTask {
                run,
                fence: fence.0,
                place: row.place(),
                queued_at: row.queued_at,
                closed: row.closed,
                start_by: row.start_by.filter(|_| row.held.is_none()),
                claim: row.held.as_ref().map(|held| CopiedClaim {
                    worker: held.worker.clone(),
                    request: held.request.0,
                    since: held.since,
                    lease_ms: held.lease_ms,
                    deadline: held.deadline,
                    build: held.claim.build.clone(),
                    memo: held.claim.memo,
                }),
                body: text(&*row.task)?,
            })));
        }
        all.extend(kept.timers.values().map(|timer| Row::timer(run, *timer)));
        for gate in kept.gates.values() {
            let arrival = gate.arrival.as_ref().map(|arrived| {
                let body = text(&arrived.gate)?;
                Ok::<_, StoreError>(CopiedArrival { at: arrived.at, deadline: arrived.deadline, body })
            });
            all.push(Row::Gate(Box::new(CopiedGate {
                run,
                activation: gate.id.activation.0,
                token: gate.token.clone(),
                position: gate.position,
                closed: gate.closed,
                arrival: arrival.transpose()?,
            })));
        }
        Ok(())
    }
}

/// Records as the other stores keep them: those of a commit in one row, with its command, even if there are none; those of
/// claims, which follow it, in rows without one.
fn copied_records(run: RunId, kept: &KeptRun, all: &mut Vec<Row>) -> Result<()> {
    let commits: Vec<_> = kept.commands.iter().collect();
    for (at, (version, (command, committed))) in commits.iter().enumerate() {
        let end = commits.get(at + 1).map_or(kept.records.len() as u64 + 1, |(_, (_, next))| next.first);
        let records = slice(&kept.records, committed.first, end);
        let own = records.iter().take_while(|record| record.ts == committed.at).count();
        put(run, **version, Some(command.0), committed.first, committed.at, &records[..own], all)?;
        for (record, n) in records[own..].iter().zip(committed.first + own as u64..) {
            put(run, **version, None, n, record.ts, std::slice::from_ref(record), all)?;
        }
    }
    Ok(())
}

fn slice(records: &[Numbered], from: u64, to: u64) -> &[Numbered] {
    let (from, to) = (from.saturating_sub(1) as usize, to.saturating_sub(1) as usize);
    records.get(from..to.max(from)).unwrap_or_default()
}

fn put(
    run: RunId,
    version: Version,
    command: Option<uuid::Uuid>,
    first: u64,
    ts: eddyline_machine::Millis,
    records: &[Numbered],
    all: &mut Vec<Row>,
) -> Result<()> {
    let packed: Vec<&Record> = records.iter().map(|numbered| &numbered.record).collect();
    let (count, body) = (packed.len() as u32, text(&packed)?);
    all.push(Row::Records(CopiedRecords { run, first, count, version: version.0, command, ts, body }));
    let mut logged: Vec<&str> = Vec::new();
    for record in packed {
        if let Entry::Log { step_key, .. } = &record.entry
            && !logged.contains(&step_key.as_str())
        {
            logged.push(step_key);
        }
    }
    all.extend(logged.into_iter().map(|name| Row::Log { run, activation: name.to_owned(), first }));
    Ok(())
}
