//! Reads the rows of an embedded store, and verifies their checksums.

use std::collections::HashMap;

use eddyline_machine::{RunId, Task};
use rusqlite::{Connection, Params, Row as Found};
use uuid::Uuid;

use crate::copy::*;
use crate::document::{LimitRules, QueueRules, kind};
use crate::embedded::body::{self, read_text};
use crate::embedded::claims::{self, HELD};
use crate::embedded::load::timer;
use crate::embedded::restore;
use crate::embedded::schema::{key_of, number_of};
use crate::embedded::sqlite_error::{SqliteError, SqliteResult};
use crate::embedded::write_run::header_numbers;
use crate::ids::Namespace;
use crate::task_queues::BucketKey;

pub(super) fn all(conn: &Connection, out: &mut Chunks) -> SqliteResult<()> {
    documents(conn, out)?;
    buckets(conn, out)?;
    each(conn, "SELECT id, at FROM commands ORDER BY row", [], out, |row| {
        Ok(Some(Row::Command { id: Uuid::from_bytes(row.get(0)?), at: row.get(1)? }))
    })?;
    each(conn, "SELECT place, ns, flow, key, run FROM lines ORDER BY place", [], out, |row| {
        let run = RunId(Uuid::from_bytes(row.get(4)?));
        let (ns, flow, key) = (namespace(row, 1)?, row.get(2)?, row.get(3)?);
        Ok(Some(Row::Line { place: number(row, 0)?, ns, flow, key, run }))
    })?;
    messages(conn, out)?;
    events(conn, out)?;
    let mut after = 0;
    while let Some(batch) = Batch::next(conn, after, out)? {
        after = batch.to;
        batch.rows(conn, out)?;
        if out.is_closed() {
            break;
        }
    }
    Ok(())
}

fn each(
    conn: &Connection,
    sql: &str,
    params: impl Params,
    out: &mut Chunks,
    read: impl Fn(&Found<'_>) -> SqliteResult<Option<Row>>,
) -> SqliteResult<()> {
    let mut statement = conn.prepare_cached(sql)?;
    let mut rows = statement.query(params)?;
    while let Some(row) = rows.next()? {
        if let Some(row) = read(row)? {
            out.put_blocking(row);
        }
    }
    Ok(())
}

fn namespace(row: &Found<'_>, at: usize) -> SqliteResult<Namespace> {
    Ok(Namespace::new(row.get_ref(at)?.as_str().map_err(rusqlite::Error::from)?))
}

fn number(row: &Found<'_>, at: usize) -> SqliteResult<u64> {
    Ok(row.get::<_, i64>(at)? as u64)
}

fn documents(conn: &Connection, out: &mut Chunks) -> SqliteResult<()> {
    let sql = "SELECT ns, kind, id, revision, due, changed_at, crc, body FROM documents ORDER BY kind, id, ns";
    each(conn, sql, [], out, |row| {
        let (ns, kind, id): (_, String, String) = (namespace(row, 0)?, row.get(1)?, row.get(2)?);
        let body = read_text(row, 6, &[row.get(3)?, row.get(5)?], || format!("documents: {kind} {id} of {ns}"))?;
        let (revision, due, changed_at) = (number(row, 3)?, row.get(4)?, row.get(5)?);
        Ok(Some(Row::Document(CopiedDocument { ns, kind, id, revision, due, changed_at, body })))
    })
}

/// Only the rates that a rule still has; the rest of a bucket is unused.
fn buckets(conn: &Connection, out: &mut Chunks) -> SqliteResult<()> {
    let sql = "SELECT ns, kind, name, key, keyed, whole, parts, at, closed_until FROM buckets";
    each(conn, sql, [], out, |row| {
        let (ns, of, name): (_, String, String) = (namespace(row, 0)?, row.get(1)?, row.get(2)?);
        let is_limit = match of.as_str() {
            BucketKey::SLOW => {
                let until = row.get(8)?;
                return Ok((until > 0).then_some(Row::ClosedLimit { ns, name, until }));
            }
            BucketKey::LIMIT => true,
            _ => false,
        };
        let rules = restore::rules(
            conn,
            &ns,
            &crate::DocumentKey::new(if is_limit { kind::LIMIT } else { kind::QUEUE }, name.as_str()),
        )?;
        let rate = rules.and_then(|rules| match is_limit {
            true => LimitRules::read(&rules).rate,
            false => QueueRules::read(&rules).rate,
        });
        if rate.is_none() {
            return Ok(None);
        }
        let key = row.get::<_, bool>(4)?.then_some(row.get(3)?);
        Ok(Some(Row::Rate { ns, is_limit, name, key, whole: row.get(5)?, parts: row.get(6)?, at: row.get(7)? }))
    })
}

fn messages(conn: &Connection, out: &mut Chunks) -> SqliteResult<()> {
    each(conn, "SELECT place, ns, target, id, crc, body FROM messages ORDER BY place", [], out, |row| {
        let (to, id): (_, String) = (RunId(Uuid::from_bytes(row.get(2)?)), row.get(3)?);
        let body = read_text(row, 4, &[row.get(0)?], || format!("messages: message {id} to run {to}"))?;
        Ok(Some(Row::Message(CopiedMessage { place: number(row, 0)?, ns: namespace(row, 1)?, to, id, body })))
    })
}

/// Deleted events may still have rows.
fn events(conn: &Connection, out: &mut Chunks) -> SqliteResult<()> {
    let sql = "SELECT events.position, events.ns, id, name, key, at, gates_opened, crc, body FROM events \
               LEFT JOIN forgotten ON forgotten.ns = events.ns \
               WHERE events.position > coalesce(forgotten.position, 0) ORDER BY events.position";
    each(conn, sql, [], out, |row| {
        let (ns, id): (_, String) = (namespace(row, 1)?, row.get(2)?);
        let payload = read_text(row, 7, &[row.get(0)?, row.get(5)?], || format!("events: event {id} of {ns}"))?;
        let (position, name, key, at) = (number(row, 0)?, row.get(3)?, row.get(4)?, row.get(5)?);
        let gates_opened = number(row, 6)?;
        Ok(Some(Row::Event(CopiedEvent { position, ns, id, name, key, at, gates_opened, payload })))
    })
}

/// Consecutive runs and their rows, which are found by the position of the run.
struct Batch {
    from: i64,
    to: i64,
    /// The id, and whether the run is trimmed.
    runs: HashMap<i64, (RunId, bool)>,
}

impl Batch {
    fn next(conn: &Connection, after: i64, out: &mut Chunks) -> SqliteResult<Option<Batch>> {
        let sql = "SELECT runs.position, id, runs.ns, coalesce(fed_runs.position, runs.position), created_at, started_at, \
                   ended_at, trimmed, (SELECT first + count - 1 FROM records WHERE run = runs.position AND trimmed = 0 \
                   ORDER BY first DESC, row DESC LIMIT 1), crc, header, keys.flow, keys.key, keys.fingerprint \
                   FROM runs LEFT JOIN fed_runs ON fed_runs.run = runs.position LEFT JOIN keys ON keys.run = runs.position \
                   WHERE runs.position > ?1 ORDER BY runs.position LIMIT ?2";
        let mut statement = conn.prepare_cached(sql)?;
        let mut rows = statement.query([after, RUNS_TOGETHER as i64])?;
        let mut runs = HashMap::new();
        let (mut from, mut to) = (i64::MAX, 0);
        while let Some(row) = rows.next()? {
            let (position, run) = (row.get(0)?, RunId(Uuid::from_bytes(row.get(1)?)));
            let trimmed = row.get(7)?;
            from = from.min(position);
            to = to.max(position);
            runs.insert(position, (run, trimmed));
            let header = read_text(row, 9, &header_numbers(run), || format!("runs: the header of run {run}"))?;
            let key = match row.get::<_, Option<String>>(11)? {
                Some(flow) => Some(CopiedKey { flow, key: row.get(12)?, fingerprint: row.get(13)? }),
                None => None,
            };
            out.put_blocking(Row::Run(Box::new(CopiedRun {
                run,
                ns: namespace(row, 2)?,
                position: position as u64,
                fed_at: number(row, 3)?,
                created_at: row.get(4)?,
                started_at: row.get(5)?,
                ended_at: row.get(6)?,
                trimmed,
                records: row.get::<_, Option<i64>>(8)?.unwrap_or(0) as u64,
                key,
                header,
            })));
        }
        Ok((!runs.is_empty()).then_some(Batch { from, to, runs }))
    }

    /// The run at a position, unless only its header is kept.
    fn kept(&self, position: i64) -> Option<RunId> {
        self.runs.get(&position).filter(|(_, trimmed)| !trimmed).map(|(run, _)| *run)
    }

    fn any(&self, position: i64) -> Option<RunId> {
        self.runs.get(&position).map(|(run, _)| *run)
    }

    fn positions(&self) -> [i64; 2] {
        [self.from, self.to]
    }

    fn keys(&self) -> [i64; 2] {
        [key_of(self.from, 0), key_of(self.to + 1, 0)]
    }

    fn rows(&self, conn: &Connection, out: &mut Chunks) -> SqliteResult<()> {
        let numbered = |what: &str, row: &Found<'_>| -> SqliteResult<Option<(RunId, u64, String)>> {
            let key: i64 = row.get(0)?;
            let (Some(run), id) = (self.kept(row.get(1)?), number_of(key)) else { return Ok(None) };
            Ok(Some((run, id, read_text(row, 2, &[key], || format!("{what} {id} of run {run}"))?)))
        };
        let sql = "SELECT key, run, crc, body FROM activations WHERE key >= ?1 AND key < ?2 ORDER BY key";
        each(conn, sql, self.keys(), out, |row| {
            let found = numbered("activations: activation", row)?;
            Ok(found.map(|(run, id, body)| Row::Activation { run, id, body }))
        })?;
        let sql = "SELECT key, run, crc, body FROM \"values\" WHERE key >= ?1 AND key < ?2 ORDER BY key";
        each(conn, sql, self.keys(), out, |row| {
            let found = numbered("values: value", row)?;
            Ok(found.map(|(run, id, body)| Row::Value { run, id, body }))
        })?;
        self.state(conn, out)?;
        self.records(conn, out)?;
        self.tasks(conn, out)?;
        self.pending(conn, out)
    }

    fn state(&self, conn: &Connection, out: &mut Chunks) -> SqliteResult<()> {
        let sql = "SELECT run, scope, event, crc, body FROM emitted WHERE run BETWEEN ?1 AND ?2";
        each(conn, sql, self.positions(), out, |row| {
            let (position, scope, event): (i64, u32, u32) = (row.get(0)?, row.get(1)?, row.get(2)?);
            let Some(run) = self.kept(position) else { return Ok(None) };
            let name = || format!("emitted: event {event} of scope {scope} of run {run}");
            let body = read_text(row, 3, &[position, scope.into(), event.into()], name)?;
            Ok(Some(Row::Emitted { run, scope, event, body }))
        })?;
        let sql = "SELECT run, activation, crc, body FROM reuse WHERE run BETWEEN ?1 AND ?2";
        each(conn, sql, self.positions(), out, |row| {
            let (position, activation): (i64, String) = (row.get(0)?, row.get(1)?);
            let Some(run) = self.kept(position) else { return Ok(None) };
            let body = read_text(row, 2, &[position], || format!("reuse: {activation} of run {run}"))?;
            Ok(Some(Row::Reuse { run, activation, body }))
        })?;
        let sql = "SELECT run, name, position FROM cursors WHERE run BETWEEN ?1 AND ?2";
        each(conn, sql, self.positions(), out, |row| {
            let Some(run) = self.kept(row.get(0)?) else { return Ok(None) };
            Ok(Some(Row::Cursor { run, name: row.get(1)?, position: number(row, 2)? }))
        })
    }

    fn records(&self, conn: &Connection, out: &mut Chunks) -> SqliteResult<()> {
        let sql = "SELECT run, first, count, version, command, ts, crc, body FROM records WHERE run BETWEEN ?1 AND ?2 \
                   ORDER BY run, first, row";
        each(conn, sql, self.positions(), out, |row| {
            let (position, first, count, ts): (i64, i64, i64, i64) =
                (row.get(0)?, row.get(1)?, row.get(2)?, row.get(5)?);
            let Some(run) = self.kept(position) else { return Ok(None) };
            let name = || format!("records: records {first} to {} of run {run}", first + count - 1);
            let body = read_text(row, 6, &[position, first, count, ts], name)?;
            let command = row.get::<_, Option<_>>(4)?.map(Uuid::from_bytes);
            let (first, count, version) = (first as u64, count as u32, number(row, 3)?);
            Ok(Some(Row::Records(CopiedRecords { run, first, count, version, command, ts, body })))
        })?;
        let sql = "SELECT run, activation, first FROM logs WHERE run BETWEEN ?1 AND ?2";
        each(conn, sql, self.positions(), out, |row| {
            let Some(run) = self.kept(row.get(0)?) else { return Ok(None) };
            Ok(Some(Row::Log { run, activation: row.get(1)?, first: number(row, 2)? }))
        })
    }

    fn tasks(&self, conn: &Connection, out: &mut Chunks) -> SqliteResult<()> {
        let sql = format!(
            "SELECT key, run, crc, body, place, queued_at, closed, {HELD} FROM tasks WHERE key >= ?1 AND key < ?2 ORDER BY key"
        );
        each(conn, &sql, self.keys(), out, |row| {
            let key: i64 = row.get(0)?;
            let Some(run) = self.any(row.get(1)?) else { return Ok(None) };
            let body = read_text(row, 2, &[key], || claims::name(run, key))?;
            let held = claims::held(row, 7)?;
            let queued_at = row.get(5)?;
            let start_by = match held {
                Some(_) => None,
                None => {
                    let task: Task = body::parse(body.as_bytes()).map_err(|error| {
                        SqliteError::Corrupt(format!("{} can't be read: {error}", claims::name(run, key)))
                    })?;
                    restore::start_by(&task, queued_at, false, row.get("deadline")?)
                }
            };
            let claim = held.map(|held| CopiedClaim {
                worker: held.worker,
                request: held.request.0,
                since: held.since,
                lease_ms: held.lease_ms,
                deadline: held.deadline,
                build: held.claim.build,
                memo: held.claim.memo,
            });
            let (fence, place, closed) = (number_of(key), number(row, 4)?, row.get(6)?);
            Ok(Some(Row::Task(Box::new(CopiedTask { run, fence, place, queued_at, closed, start_by, claim, body }))))
        })
    }

    fn pending(&self, conn: &Connection, out: &mut Chunks) -> SqliteResult<()> {
        let sql = "SELECT activation, kind, fence, due, wall, run FROM timers WHERE run BETWEEN ?1 AND ?2";
        each(conn, sql, self.positions(), out, |row| {
            let Some(run) = self.any(row.get(5)?) else { return Ok(None) };
            Ok(Some(Row::timer(run, timer(row, run)?)))
        })?;
        let sql = "SELECT run, activation, token, position, closed, at, deadline, crc, body FROM gates \
                   WHERE run BETWEEN ?1 AND ?2";
        each(conn, sql, self.positions(), out, |row| {
            let (place, activation): (i64, u32) = (row.get(0)?, row.get(1)?);
            let Some(run) = self.kept(place) else { return Ok(None) };
            let arrival = match row.get::<_, Option<i64>>(5)? {
                None => None,
                Some(at) => {
                    let name = || format!("gates: the gate of activation {activation} of run {run}");
                    let body = read_text(row, 7, &[place, activation.into()], name)?;
                    Some(CopiedArrival { at, deadline: row.get(6)?, body })
                }
            };
            let (token, position, closed) = (row.get(2)?, number(row, 3)?, row.get(4)?);
            Ok(Some(Row::Gate(Box::new(CopiedGate { run, activation, token, position, closed, arrival }))))
        })
    }
}
