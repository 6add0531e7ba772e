//! From the disk into memory, when a store is opened.
//!
//! Heartbeats are not written down. Instead every lease that is held when the store is opened starts over in full, and
//! the time of an attempt goes on from where somebody last served: a worker that did its part must not lose its task
//! because nobody was there to listen. How long somebody served is known to about [`SERVED_MS`], to the worker's favour.

use eddyline_machine::{Fence, Millis, RunId, Task};
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::Value;
use uuid::Uuid;

use super::body;
use super::claims::{HELD, held, name};
use super::kept::Kept;
use super::schema::number_of;
use super::trouble::Outcome;
use crate::claim::Held;
use crate::document::{DocumentKey, kind};
use crate::ids::Namespace;
use crate::lines::{Bucket, BucketKey, Lines, Queued};

/// While something is held, it is noted this often that somebody serves.
pub(super) const SERVED_MS: Millis = 5_000;

pub(super) fn meta(conn: &Connection, name: &str) -> Outcome<i64> {
    let value = conn.query_row("SELECT value FROM meta WHERE name = ?1", [name], |row| row.get(0)).optional()?;
    Ok(value.unwrap_or(0))
}

/// What the writer goes on from.
pub(super) fn kept(conn: &Connection) -> Outcome<Kept> {
    let last = |sql: &str| -> Outcome<i64> {
        Ok(conn.query_row(sql, [], |row| row.get::<_, Option<i64>>(0)).optional()?.flatten().unwrap_or(0))
    };
    let mut kept = Kept {
        position: last("SELECT seq FROM sqlite_sequence WHERE name = 'runs'")?,
        event: last("SELECT seq FROM sqlite_sequence WHERE name = 'events'")?,
        place: last("SELECT max(place) FROM tasks")?,
        message: last("SELECT max(place) FROM messages")?,
        gate: meta(conn, "gate")?,
        revision: meta(conn, "revision")?,
        ..Kept::default()
    };
    let mut forgotten = conn.prepare("SELECT ns, position FROM forgotten")?;
    let mut rows = forgotten.query([])?;
    while let Some(row) = rows.next()? {
        kept.forgotten.insert(Namespace::new(&row.get::<_, String>(0)?), row.get(1)?);
    }
    Ok(kept)
}

/// A lease as it is when the store is opened at `now`, somebody having served until `served_at`.
pub(super) fn reopened(mut held: Held, served_at: Millis, now: Millis) -> Held {
    let unserved = (now - served_at.max(held.since)).max(0);
    held.lease_until = now + held.lease_ms;
    held.deadline = held.deadline.map(|deadline| deadline + unserved);
    held
}

/// Until when a task may be claimed, likewise: nobody could have claimed it meanwhile.
pub(super) fn still_to_start(start_by: Millis, queued_at: Millis, served_at: Millis, now: Millis) -> Millis {
    start_by + (now - served_at.max(queued_at)).max(0)
}

/// Writes down what the time in which nobody served has added, so that it is not lost when the store is opened once more.
/// The deadline of a task that nobody has is the end of its time to be claimed.
pub(super) fn note_unserved(conn: &Connection, served_at: Millis, now: Millis, deletions_from: Millis) -> Outcome<()> {
    let tx = conn.unchecked_transaction()?;
    tx.execute(
        "UPDATE tasks SET deadline = deadline + max(0, ?2 - max(?1, since)) \
         WHERE worker IS NOT NULL AND deadline IS NOT NULL",
        [served_at, now],
    )?;
    tx.execute(
        "UPDATE tasks SET deadline = coalesce(deadline, queued_at + json_extract(body, '$.start_timeout_ms')) \
         + max(0, ?2 - max(?1, queued_at)) WHERE worker IS NULL AND json_extract(body, '$.start_timeout_ms') IS NOT NULL",
        [served_at, now],
    )?;
    let set = "INSERT OR REPLACE INTO meta (name, value) VALUES (?1, ?2)";
    tx.execute(set, params!["served_at", now])?;
    tx.execute(set, params![super::opening::DELETIONS_FROM, deletions_from])?;
    Ok(tx.commit()?)
}

/// The tasks, with the rules that bound them. `lease` says how a lease that is on disk is now, and `start` until when a
/// task may be claimed that could be until the first, and was queued at the second moment.
pub(super) fn lines(
    conn: &Connection,
    mut lease: impl FnMut(RunId, Fence, Held) -> Held,
    start: impl Fn(Millis, Millis) -> Millis,
) -> Outcome<Lines> {
    let mut lines = Lines::default();
    read_rules(conn, &mut lines)?;
    read_buckets(conn, &mut lines)?;
    let mut statement = conn.prepare(&format!(
        "SELECT runs.id, runs.ns, runs.flow, runs.paused, runs.memo, key, place, queued_at, closed, \
         tasks.crc, tasks.body, {} FROM tasks JOIN runs ON runs.position = tasks.run ORDER BY place",
        HELD.replace("memo", "tasks.memo")
    ))?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let run = RunId(Uuid::from_bytes(row.get(0)?));
        let key: i64 = row.get(5)?;
        let task: Task = body::read(row, 9, &[key], || name(run, key))?;
        if !lines.knows(run) {
            let (ns, flow): (String, String) = (row.get(1)?, row.get(2)?);
            lines.set_run(&Namespace::new(&ns), run, &flow, row.get(3)?, row.get::<_, i64>(4)? as u64);
        }
        let held = held(row, 11)?.map(|held| lease(run, Fence(number_of(key)), held));
        let (queued_at, place, closed) = (row.get(7)?, row.get::<_, i64>(6)? as u64, row.get(8)?);
        let start_by = start_by(&task, queued_at, held.is_some(), row.get("deadline")?);
        let start_by = start_by.map(|by| start(by, queued_at));
        lines.add(run, Queued { task: &task, queued_at, place, start_by, closed, held });
    }
    Ok(lines)
}

/// Until when a task may be claimed. The deadline of one that nobody has is the end of its time to be claimed.
pub(super) fn start_by(task: &Task, queued_at: Millis, is_held: bool, deadline: Option<Millis>) -> Option<Millis> {
    task.start_timeout_ms.map(|ms| deadline.filter(|_| !is_held).unwrap_or(queued_at + ms))
}

/// The rules of one queue or limit.
pub(super) fn rules(conn: &Connection, ns: &Namespace, key: &DocumentKey) -> Outcome<Option<Value>> {
    let mut statement = conn.prepare_cached(
        "SELECT revision, changed_at, crc, body FROM documents WHERE kind = ?1 AND id = ?2 AND ns = ?3",
    )?;
    let mut rows = statement.query(params![key.kind, key.id, ns.as_str()])?;
    let Some(row) = rows.next()? else { return Ok(None) };
    let numbers = [row.get(0)?, row.get(1)?];
    Ok(Some(body::read(row, 2, &numbers, || format!("documents: {} {} of {ns}", key.kind, key.id))?))
}

/// The level of one rate.
pub(super) fn bucket(conn: &Connection, key: &BucketKey) -> Outcome<Option<Bucket>> {
    let mut statement = conn.prepare_cached(
        "SELECT whole, parts, at, closed_until FROM buckets \
         WHERE ns = ?1 AND kind = ?2 AND name = ?3 AND key = ?4 AND keyed = ?5",
    )?;
    let of = params![key.ns.as_str(), key.kind, key.name, key.key.as_deref().unwrap_or_default(), key.key.is_some()];
    let bucket = statement.query_row(of, |row| {
        Ok(Bucket { whole: row.get(0)?, parts: row.get(1)?, at: row.get(2)?, closed_until: row.get(3)? })
    });
    Ok(bucket.optional()?)
}

fn read_rules(conn: &Connection, lines: &mut Lines) -> Outcome<()> {
    let mut statement =
        conn.prepare("SELECT ns, kind, id, revision, changed_at, crc, body FROM documents WHERE kind IN (?1, ?2)")?;
    let mut rows = statement.query([kind::QUEUE, kind::LIMIT])?;
    while let Some(row) = rows.next()? {
        let (ns, kind, id): (String, String, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
        let numbers = [row.get(3)?, row.get(4)?];
        let rules: Value = body::read(row, 5, &numbers, || format!("documents: {kind} {id} of {ns}"))?;
        lines.set_rules(&Namespace::new(&ns), &DocumentKey::new(&kind, id), Some(&rules));
    }
    Ok(())
}

fn read_buckets(conn: &Connection, lines: &mut Lines) -> Outcome<()> {
    let mut statement =
        conn.prepare("SELECT ns, kind, name, key, keyed, whole, parts, at, closed_until FROM buckets")?;
    let mut rows = statement.query([])?;
    while let Some(row) = rows.next()? {
        let keyed: bool = row.get(4)?;
        let key = BucketKey {
            ns: Namespace::new(&row.get::<_, String>(0)?),
            kind: row.get(1)?,
            name: row.get(2)?,
            key: keyed.then_some(row.get(3)?),
        };
        let bucket = Bucket { whole: row.get(5)?, parts: row.get(6)?, at: row.get(7)?, closed_until: row.get(8)? };
        lines.set_bucket(key, bucket);
    }
    Ok(())
}
