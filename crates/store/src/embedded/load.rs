//! Reads of one run.

use std::collections::BTreeMap;

use eddyline_machine::record::GateId;
use eddyline_machine::run::{Header, Run};
use eddyline_machine::{ActId, Data, Message, Millis, Numbered, Record, RunId, ValueId, Version};
use rusqlite::{Connection, OptionalExtension, Row, params};
use serde::de::DeserializeOwned;
use uuid::Uuid;

use super::body;
use super::claims::{self, HELD};
use super::schema::{key_of, number_of};
use super::sqlite_error::{SqliteError, SqliteResult};
use super::unique;
use super::write_run::header_numbers;
use crate::ids::Namespace;
use crate::query::*;
use crate::task_queues::TaskQueues;
use crate::timer_columns;

/// The columns of a [`Summary`]. The number of records comes from the last row of records.
pub(super) const SUMMARY: &str = "runs.id, runs.ns, runs.position, runs.created_at, runs.started_at, runs.ended_at, \
     runs.trimmed, CASE runs.trimmed WHEN 0 THEN (SELECT first + count - 1 FROM records WHERE run = runs.position \
     ORDER BY first DESC, row DESC LIMIT 1) END, runs.crc, runs.header";

pub(super) fn summary(row: &Row<'_>) -> SqliteResult<Summary> {
    let run = RunId(Uuid::from_bytes(row.get(0)?));
    let header: Header = body::read(row, 8, &header_numbers(run), || format!("runs: the header of run {run}"))?;
    Ok(Summary {
        ns: Namespace::new(&row.get::<_, String>(1)?),
        run,
        position: row.get::<_, i64>(2)? as u64,
        version: header.version,
        records: row.get::<_, Option<i64>>(7)?.unwrap_or(0) as u64,
        created_at: row.get(3)?,
        started_at: row.get(4)?,
        ended_at: row.get(5)?,
        trimmed: row.get(6)?,
        header,
    })
}

pub(super) fn summary_of(conn: &Connection, run: RunId) -> SqliteResult<Option<Summary>> {
    let mut statement = conn.prepare_cached(&format!("SELECT {SUMMARY} FROM runs WHERE id = ?1"))?;
    let mut rows = statement.query([run.0.as_bytes()])?;
    rows.next()?.map(summary).transpose()
}

pub(super) fn load(conn: &Connection, run: RunId, since: Option<Version>) -> SqliteResult<Found> {
    if let Some(since) = since
        && is_at(conn, run, since)?
    {
        return Ok(Found::Same);
    }
    let Some(summary) = summary_of(conn, run)? else { return Ok(Found::Nothing) };
    if summary.trimmed {
        return Ok(Found::Trimmed(Box::new(summary)));
    }
    let position = summary.position as i64;
    let mut rows = Run::new(run);
    rows.header = summary.header.clone();
    rows.activations = activations(conn, run, position)?;
    rows.emitted = keyed(conn, position, "SELECT crc, body, scope, event FROM emitted WHERE run = ?1", |row| {
        let (scope, event): (u32, u32) = (row.get(2)?, row.get(3)?);
        let name = || format!("emitted: event {event} of scope {scope} of run {run}");
        Ok(((ActId(scope), event), body::read(row, 0, &[position, scope.into(), event.into()], name)?))
    })?;
    rows.reuse = keyed(conn, position, "SELECT crc, body, activation FROM reuse WHERE run = ?1", |row| {
        let activation: String = row.get(2)?;
        let reused = body::read(row, 0, &[position], || format!("reuse: {activation} of run {run}"))?;
        Ok((activation, reused))
    })?;
    rows.cursors = keyed(conn, position, "SELECT name, position FROM cursors WHERE run = ?1", |row| {
        Ok((row.get(0)?, row.get::<_, i64>(1)? as u64))
    })?;
    Ok(Found::Run(Box::new(Loaded { summary, rows })))
}

/// Whether a run is at a version, without reading its header.
fn is_at(conn: &Connection, run: RunId, version: Version) -> SqliteResult<bool> {
    let mut statement = conn.prepare_cached("SELECT 1 FROM runs WHERE id = ?1 AND version = ?2 AND trimmed = 0")?;
    Ok(statement.exists(params![run.0.as_bytes(), version.0 as i64])?)
}

fn activations<T: DeserializeOwned>(conn: &Connection, run: RunId, position: i64) -> SqliteResult<Vec<T>> {
    let mut statement =
        conn.prepare_cached("SELECT crc, body, key FROM activations WHERE key >= ?1 AND key < ?2 ORDER BY key")?;
    let mut rows = statement.query([key_of(position, 0), key_of(position + 1, 0)])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        let key: i64 = row.get(2)?;
        let name = || format!("activations: activation {} of run {run}", number_of(key));
        // Activations are numbered without gaps.
        if number_of(key) != found.len() as u64 {
            return Err(SqliteError::Corrupt(format!(
                "activations: activation {} of run {run} is missing",
                found.len()
            )));
        }
        found.push(body::read(row, 0, &[key], name)?);
    }
    Ok(found)
}

fn keyed<K: Ord, V>(
    conn: &Connection,
    position: i64,
    sql: &str,
    read: impl Fn(&Row<'_>) -> SqliteResult<(K, V)>,
) -> SqliteResult<BTreeMap<K, V>> {
    let mut statement = conn.prepare_cached(sql)?;
    let mut rows = statement.query([position])?;
    let mut found = BTreeMap::new();
    while let Some(row) = rows.next()? {
        let (key, value) = read(row)?;
        found.insert(key, value);
    }
    Ok(found)
}

/// The position of a run, unless its timeline was trimmed.
fn position(conn: &Connection, run: RunId) -> SqliteResult<Option<i64>> {
    let mut statement = conn.prepare_cached("SELECT position FROM runs WHERE id = ?1 AND trimmed = 0")?;
    Ok(statement.query_row([run.0.as_bytes()], |row| row.get(0)).optional()?)
}

/// Up to this many values and bytes are read on the calling thread; reading and parsing more would block it for too
/// long.
pub(super) const FEW_VALUES: usize = 64;
const FEW_BYTES: i64 = 64 << 10;

/// The values, or none if they are larger than [`FEW_BYTES`] in all.
pub(super) fn few_values(conn: &Connection, run: RunId, ids: &[ValueId]) -> SqliteResult<Option<Vec<(ValueId, Data)>>> {
    values_within(conn, run, ids, FEW_BYTES)
}

pub(super) fn values(conn: &Connection, run: RunId, ids: &[ValueId]) -> SqliteResult<Vec<(ValueId, Data)>> {
    Ok(values_within(conn, run, ids, i64::MAX)?.unwrap_or_default())
}

/// The values, or none if they have more than `bytes` in all: of a value that does not fit, only the length is read.
fn values_within(
    conn: &Connection,
    run: RunId,
    ids: &[ValueId],
    bytes: i64,
) -> SqliteResult<Option<Vec<(ValueId, Data)>>> {
    let Some(position) = position(conn, run)? else { return Ok(Some(Vec::new())) };
    let mut statement = conn.prepare_cached(
        "SELECT crc, CASE WHEN octet_length(body) <= ?2 THEN body END, octet_length(body) FROM \"values\" WHERE key = ?1",
    )?;
    let (mut found, mut left) = (Vec::with_capacity(ids.len()), bytes);
    for id in ids {
        let key = key_of(position, id.0.into());
        let mut rows = statement.query([key, left])?;
        if let Some(row) = rows.next()? {
            left -= row.get::<_, i64>(2)?;
            if left < 0 {
                return Ok(None);
            }
            found.push((*id, body::read(row, 0, &[key], || format!("values: value {id} of run {run}"))?));
        }
    }
    Ok(Some(found))
}

pub(super) fn records(conn: &Connection, run: RunId, after: u64, limit: usize) -> SqliteResult<Vec<Numbered>> {
    let limit = limit.min(MAX_PAGE);
    let Some(position) = position(conn, run)? else { return Ok(Vec::new()) };
    let Ok(after) = i64::try_from(after) else { return Ok(Vec::new()) };
    // A row contains several records: the first row may begin before the first record wanted.
    let mut statement = conn.prepare_cached(
        "SELECT crc, body, first, count, ts FROM records WHERE run = ?1 AND count > 0 AND first >= \
         (SELECT coalesce(max(first), 0) FROM records WHERE run = ?1 AND first <= ?2) ORDER BY first",
    )?;
    let mut rows = statement.query([position, after.saturating_add(1)])?;
    let (mut found, mut next) = (Vec::new(), None);
    while found.len() < limit
        && let Some(row) = rows.next()?
    {
        let (first, count, ts, packed) = packed(row, run, position)?;
        let expected = next.replace(first + count).unwrap_or(first.min(after + 1));
        if first != expected {
            return Err(SqliteError::Corrupt(format!("records: record {expected} of run {run} is missing")));
        }
        let numbered = packed.into_iter().zip(first..).filter(|(_, n)| *n > after);
        let room = limit - found.len();
        found.extend(numbered.take(room).map(|(record, n)| Numbered { n: n as u64, ts, record }));
    }
    Ok(found)
}

/// The logs of one activation, found by the table `logs`, which lists the rows of records that contain some.
pub(super) fn logs(
    conn: &Connection,
    run: RunId,
    activation: &str,
    after: u64,
    limit: usize,
) -> SqliteResult<Vec<Numbered>> {
    let limit = limit.min(MAX_PAGE);
    let Some(position) = position(conn, run)? else { return Ok(Vec::new()) };
    let Ok(after) = i64::try_from(after) else { return Ok(Vec::new()) };
    let mut statement = conn.prepare_cached(
        "SELECT crc, body, records.first, count, ts FROM logs CROSS JOIN records \
         ON records.run = logs.run AND records.first = logs.first AND count > 0 \
         WHERE logs.run = ?1 AND activation = ?2 AND logs.first >= \
         (SELECT coalesce(max(first), 0) FROM logs WHERE run = ?1 AND activation = ?2 AND first <= ?3) \
         ORDER BY logs.first",
    )?;
    let mut rows = statement.query(params![position, activation, after.saturating_add(1)])?;
    let mut found = Vec::new();
    while found.len() < limit
        && let Some(row) = rows.next()?
    {
        let (first, _, ts, packed) = packed(row, run, position)?;
        let logs = packed.into_iter().zip(first..).filter(|(record, n)| *n > after && record.is_log_of(activation));
        let room = limit - found.len();
        found.extend(logs.take(room).map(|(record, n)| Numbered { n: n as u64, ts, record }));
    }
    Ok(found)
}

/// A row of records: the number of the first, their count, when they were written, and the records.
fn packed(row: &Row<'_>, run: RunId, position: i64) -> SqliteResult<(i64, i64, i64, Vec<Record>)> {
    let (first, count, ts): (i64, i64, i64) = (row.get(2)?, row.get(3)?, row.get(4)?);
    let name = || format!("records: records {first} to {} of run {run}", first + count - 1);
    let packed: Vec<Record> = body::read(row, 0, &[position, first, count, ts], name)?;
    if packed.len() as i64 != count {
        return Err(SqliteError::Corrupt(format!("{} are {}", name(), packed.len())));
    }
    Ok((first, count, ts, packed))
}

/// The pending work of a run. Leases are as on disk; [`complete`] updates them.
pub(super) fn pending(conn: &Connection, run: RunId) -> SqliteResult<PendingWork> {
    let messages = inbox(conn, run)?.messages;
    let mut statement = conn.prepare_cached("SELECT position, trimmed FROM runs WHERE id = ?1")?;
    let found = statement.query_row([run.0.as_bytes()], |row| Ok((row.get(0)?, row.get(1)?))).optional()?;
    let Some((position, trimmed)) = found else {
        let mut statement = conn.prepare_cached("SELECT ns FROM messages WHERE target = ?1 LIMIT 1")?;
        let ns: Option<String> = statement.query_row([run.0.as_bytes()], |row| row.get(0)).optional()?;
        return Ok(PendingWork { messages, unstored_in: ns.as_deref().map(Namespace::new), ..PendingWork::default() });
    };
    Ok(PendingWork {
        tasks: tasks(conn, run, position)?,
        timers: timers_of(conn, run, position)?,
        gates: if trimmed { Vec::new() } else { gates(conn, run, position)? },
        messages,
        first_in_line: unique::is_first(conn, run)?,
        unstored_in: None,
    })
}

fn tasks(conn: &Connection, run: RunId, position: i64) -> SqliteResult<Vec<TaskRow>> {
    let mut statement = conn.prepare_cached(&format!(
        "SELECT crc, body, key, queued_at, closed, {HELD} FROM tasks WHERE key >= ?1 AND key < ?2 ORDER BY key"
    ))?;
    let mut rows = statement.query([key_of(position, 0), key_of(position + 1, 0)])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        let key: i64 = row.get(2)?;
        let task = body::read(row, 0, &[key], || claims::name(run, key))?;
        found.push(TaskRow {
            task,
            queued_at: row.get(3)?,
            closed: row.get(4)?,
            held: claims::held(row, 5)?,
            bound: None,
        });
    }
    Ok(found)
}

fn timers_of(conn: &Connection, run: RunId, position: i64) -> SqliteResult<Vec<TimerRow>> {
    let mut statement = conn.prepare_cached(
        "SELECT activation, kind, fence, due, wall FROM timers WHERE run = ?1 ORDER BY activation, kind, fence",
    )?;
    let mut rows = statement.query([position])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        found.push(timer(row, run)?);
    }
    Ok(found)
}

/// Columns activation, kind, fence, due and wall, from the first on.
pub(super) fn timer(row: &Row<'_>, run: RunId) -> SqliteResult<TimerRow> {
    let kind: i32 = row.get(1)?;
    let key = timer_columns::key(row.get(0)?, kind, row.get(2)?)
        .ok_or_else(|| SqliteError::Corrupt(format!("timers: a timer of run {run} is of kind {kind}")))?;
    Ok(TimerRow { key, due: row.get(3)?, wall: row.get(4)? })
}

/// The columns of a [`GateRow`] except the id of its run.
pub(super) const GATE: &str = "gates.crc, gates.body, gates.ns, gates.position, gates.activation, gates.token, gates.at, gates.deadline, \
     gates.closed, gates.run";

pub(super) fn gate(row: &Row<'_>, run: RunId) -> SqliteResult<GateRow> {
    let activation: u32 = row.get(4)?;
    let arrival = match row.get::<_, Option<i64>>(6)? {
        None => None,
        Some(at) => {
            let name = || format!("gates: the gate of activation {activation} of run {run}");
            let gate = body::read(row, 0, &[row.get(9)?, activation.into()], name)?;
            Some(Arrived { at, gate, deadline: row.get(7)? })
        }
    };
    Ok(GateRow {
        ns: Namespace::new(&row.get::<_, String>(2)?),
        position: row.get::<_, i64>(3)? as u64,
        id: GateId { run, activation: ActId(activation) },
        token: row.get(5)?,
        arrival,
        closed: row.get(8)?,
    })
}

fn gates(conn: &Connection, run: RunId, position: i64) -> SqliteResult<Vec<GateRow>> {
    let mut statement = conn.prepare_cached(&format!("SELECT {GATE} FROM gates WHERE run = ?1 ORDER BY activation"))?;
    let mut rows = statement.query([position])?;
    let mut found = Vec::new();
    while let Some(row) = rows.next()? {
        found.push(gate(row, run)?);
    }
    Ok(found)
}

/// The oldest messages to a run.
pub(super) struct StoredMessages {
    pub messages: Vec<Message>,
    /// Their size as JSON.
    pub bytes: usize,
    /// There are more.
    pub more: bool,
}

/// Reads up to [`MAX_INBOX`] and [`MAX_INBOX_BYTES`], found in the index alone, so that other messages are not read.
pub(super) fn inbox(conn: &Connection, to: RunId) -> SqliteResult<StoredMessages> {
    let mut statement = conn.prepare_cached(
        "SELECT crc, body, place, id FROM messages WHERE place IN \
         (SELECT place FROM messages WHERE target = ?1 ORDER BY +place LIMIT ?2) ORDER BY place",
    )?;
    let mut rows = statement.query(params![to.0.as_bytes(), MAX_INBOX as i64 + 1])?;
    let mut found = StoredMessages { messages: Vec::new(), bytes: 0, more: false };
    while let Some(row) = rows.next()? {
        let bytes = row.get_ref(1)?.as_bytes().map_or(0, <[u8]>::len);
        let fits = found.messages.len() < MAX_INBOX && found.bytes + bytes <= MAX_INBOX_BYTES;
        if !found.messages.is_empty() && !fits {
            found.more = true;
            break;
        }
        found.bytes += bytes;
        let (place, id): (i64, String) = (row.get(2)?, row.get(3)?);
        let body = body::read(row, 0, &[place], || format!("messages: message {id} to run {to}"))?;
        found.messages.push(Message { to, id, body });
    }
    Ok(found)
}

/// Completes tasks from the mirror. The disk says who holds a task; the mirror, how far the lease was extended or which
/// bound keeps the task from being claimed.
pub(super) fn complete(rows: &mut [TaskRow], run: RunId, queues: &TaskQueues, now: Millis) {
    for row in rows {
        match (&row.held, queues.held(run, row.task.fence)) {
            (Some(held), Some(known)) if (held.request, held.since) == (known.request, known.since) => {
                row.held = Some(known.clone());
            }
            (None, None) => row.bound = queues.bound(run, row.task.fence, now),
            _ => {}
        }
    }
}
