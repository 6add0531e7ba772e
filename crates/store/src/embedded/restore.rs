//! Restores the state in memory when a store is opened.
//!
//! Heartbeats are not stored. Instead every lease starts over in full when the store is opened, and the `timeout` of an
//! attempt continues from when the store was last served: a worker must not lose its task because no server was
//! running. The time of last service is known to about [`SERVED_MS`], rounded in the worker's favour.

use eddyline_machine::{Fence, Millis, RunId, Task};
use rusqlite::{Connection, OptionalExtension, params};
use serde_json::Value;
use uuid::Uuid;

use super::body;
use super::claims::{HELD, held, name};
use super::schema::number_of;
use super::sqlite_error::SqliteResult;
use super::writer_cache::WriterCache;
use crate::claim::Held;
use crate::document::{DocumentKey, kind};
use crate::ids::Namespace;
use crate::task_queues::{Bucket, BucketKey, Queued, TaskQueues};

/// While tasks are claimed, `served_at` is written this often.
pub(super) const SERVED_MS: Millis = 5_000;

pub(super) fn meta(conn: &Connection, name: &str) -> SqliteResult<i64> {
    let value = conn.query_row("SELECT value FROM meta WHERE name = ?1", [name], |row| row.get(0)).optional()?;
    Ok(value.unwrap_or(0))
}

/// The initial state of the writer.
pub(super) fn cache(conn: &Connection) -> SqliteResult<WriterCache> {
    let last = |sql: &str| -> SqliteResult<i64> {
        Ok(conn.query_row(sql, [], |row| row.get::<_, Option<i64>>(0)).optional()?.flatten().unwrap_or(0))
    };
    let mut cache = WriterCache {
        position: last("SELECT seq FROM sqlite_sequence WHERE name = 'runs'")?,
        event: last("SELECT seq FROM sqlite_sequence WHERE name = 'events'")?,
        place: last("SELECT max(place) FROM tasks")?,
        message: last("SELECT max(place) FROM messages")?,
        gate: meta(conn, "gate")?,
        revision: meta(conn, "revision")?,
        ..WriterCache::default()
    };
    let mut forgotten = conn.prepare("SELECT ns, position FROM forgotten")?;
    let mut rows = forgotten.query([])?;
    while let Some(row) = rows.next()? {
        cache.forgotten.insert(Namespace::new(&row.get::<_, String>(0)?), row.get(1)?);
    }
    Ok(cache)
}

/// A lease after the store is opened at `now`, having been served until `served_at`.
pub(super) fn reopened(mut held: Held, served_at: Millis, now: Millis) -> Held {
    let unserved = (now - served_at.max(held.since)).max(0);
    held.lease_until = now + held.lease_ms;
    held.deadline = held.deadline.map(|deadline| deadline + unserved);
    held
}

/// The end of a task's `start_timeout`, likewise: it could not be claimed meanwhile.
pub(super) fn still_to_start(start_by: Millis, queued_at: Millis, served_at: Millis, now: Millis) -> Millis {
    start_by + (now - served_at.max(queued_at)).max(0)
}

/// Writes the deadlines extended by the time without service, so that the extension survives the next opening. The
/// `deadline` of an unclaimed task is the end of its `start_timeout`.
pub(super) fn note_unserved(
    conn: &Connection,
    served_at: Millis,
    now: Millis,
    deletions_from: Millis,
) -> SqliteResult<()> {
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

/// Reads the tasks and the rules that bound them. `lease` maps a lease on disk to its current state; `start` maps the
/// end of a `start_timeout` and the time of queueing to the current end.
pub(super) fn queues(
    conn: &Connection,
    mut lease: impl FnMut(RunId, Fence, Held) -> Held,
    start: impl Fn(Millis, Millis) -> Millis,
) -> SqliteResult<TaskQueues> {
    let mut queues = TaskQueues::default();
    read_rules(conn, &mut queues)?;
    read_buckets(conn, &mut queues)?;
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
        if !queues.knows(run) {
            let (ns, flow): (String, String) = (row.get(1)?, row.get(2)?);
            queues.set_run(&Namespace::new(&ns), run, &flow, row.get(3)?, row.get::<_, i64>(4)? as u64);
        }
        let held = held(row, 11)?.map(|held| lease(run, Fence(number_of(key)), held));
        let (queued_at, place, closed) = (row.get(7)?, row.get::<_, i64>(6)? as u64, row.get(8)?);
        let start_by = start_by(&task, queued_at, held.is_some(), row.get("deadline")?);
        let start_by = start_by.map(|by| start(by, queued_at));
        queues.add(run, Queued { task: &task, queued_at, place, start_by, closed, held });
    }
    Ok(queues)
}

/// The end of a task's `start_timeout`: the `deadline` of its row while it is unclaimed.
pub(super) fn start_by(task: &Task, queued_at: Millis, is_held: bool, deadline: Option<Millis>) -> Option<Millis> {
    task.start_timeout_ms.map(|ms| deadline.filter(|_| !is_held).unwrap_or(queued_at + ms))
}

/// The rules of one queue or limit.
pub(super) fn rules(conn: &Connection, ns: &Namespace, key: &DocumentKey) -> SqliteResult<Option<Value>> {
    let mut statement = conn.prepare_cached(
        "SELECT revision, changed_at, crc, body FROM documents WHERE kind = ?1 AND id = ?2 AND ns = ?3",
    )?;
    let mut rows = statement.query(params![key.kind, key.id, ns.as_str()])?;
    let Some(row) = rows.next()? else { return Ok(None) };
    let numbers = [row.get(0)?, row.get(1)?];
    Ok(Some(body::read(row, 2, &numbers, || format!("documents: {} {} of {ns}", key.kind, key.id))?))
}

/// The level of one rate.
pub(super) fn bucket(conn: &Connection, key: &BucketKey) -> SqliteResult<Option<Bucket>> {
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

fn read_rules(conn: &Connection, queues: &mut TaskQueues) -> SqliteResult<()> {
    let mut statement =
        conn.prepare("SELECT ns, kind, id, revision, changed_at, crc, body FROM documents WHERE kind IN (?1, ?2)")?;
    let mut rows = statement.query([kind::QUEUE, kind::LIMIT])?;
    while let Some(row) = rows.next()? {
        let (ns, kind, id): (String, String, String) = (row.get(0)?, row.get(1)?, row.get(2)?);
        let numbers = [row.get(3)?, row.get(4)?];
        let rules: Value = body::read(row, 5, &numbers, || format!("documents: {kind} {id} of {ns}"))?;
        queues.set_rules(&Namespace::new(&ns), &DocumentKey::new(&kind, id), Some(&rules));
    }
    Ok(())
}

fn read_buckets(conn: &Connection, queues: &mut TaskQueues) -> SqliteResult<()> {
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
        queues.set_bucket(key, bucket);
    }
    Ok(())
}
