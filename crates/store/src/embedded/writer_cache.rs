//! State that the writer caches between groups. All of it can be read from disk again.

use std::sync::Arc;

use eddyline_machine::run::Header;
use eddyline_machine::{Fence, Millis, RunId, Status, Task};
use rusqlite::{Connection, OptionalExtension, params};

use super::sqlite_error::{SqliteError, SqliteResult};
use crate::ids::{Map, Namespace};

/// The most cached heads of runs.
const HEADS: usize = 65_536;
/// The most cached bodies of queued tasks, so that claiming them needs no read.
const BODIES: usize = 65_536;

#[derive(Debug, Default)]
pub(super) struct WriterCache {
    pub heads: Map<RunId, Head>,
    pub bodies: Map<(RunId, Fence), Arc<Task>>,
    /// The last number assigned of each kind.
    pub position: i64,
    pub place: i64,
    pub message: i64,
    pub event: i64,
    pub gate: i64,
    pub revision: i64,
    /// Events up to this position are deleted, by namespace.
    pub forgotten: Map<Namespace, i64>,
}

/// The part of a run that a commit needs.
#[derive(Debug, Clone)]
pub(super) struct Head {
    pub position: i64,
    pub ns: Namespace,
    pub version: u64,
    /// The number of its records.
    pub records: u64,
    pub status: Status,
    pub started_at: Option<Millis>,
    pub ended_at: Option<Millis>,
    pub trimmed: bool,
    pub facts: Facts,
}

/// The searchable properties of a run, set when it starts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Facts {
    pub flow: String,
    pub external_id: Option<String>,
    pub tags: Vec<String>,
}

impl Facts {
    pub fn of(header: &Header) -> Facts {
        let mut tags = header.tags.clone();
        tags.sort();
        tags.dedup();
        Facts { flow: header.flow.clone(), external_id: header.external_id.clone(), tags }
    }

    /// Whether the header has the same properties. Tags are compared as sets.
    pub fn are_of(&self, header: &Header) -> bool {
        self.flow == header.flow
            && self.external_id == header.external_id
            && self.tags.iter().all(|tag| header.tags.contains(tag))
            && header.tags.iter().all(|tag| self.tags.contains(tag))
    }
}

/// The last number assigned of each kind.
#[derive(Debug, Clone, Copy)]
pub(super) struct Numbers([i64; 6]);

impl WriterCache {
    pub fn numbers(&self) -> Numbers {
        Numbers([self.position, self.place, self.message, self.event, self.gate, self.revision])
    }

    /// Resets the numbers after a rollback.
    pub fn set_numbers(&mut self, numbers: Numbers) {
        [self.position, self.place, self.message, self.event, self.gate, self.revision] = numbers.0;
    }

    pub fn head(&mut self, conn: &Connection, run: RunId) -> SqliteResult<Option<&mut Head>> {
        if !self.heads.contains_key(&run) {
            let Some(head) = read_head(conn, run)? else { return Ok(None) };
            self.remember(run, head);
        }
        Ok(self.heads.get_mut(&run))
    }

    pub fn remember(&mut self, run: RunId, head: Head) {
        if self.heads.len() >= HEADS {
            self.heads.clear();
        }
        self.heads.insert(run, head);
    }

    pub fn forget(&mut self, run: RunId) {
        self.heads.remove(&run);
    }

    pub fn keep_body(&mut self, run: RunId, task: &Arc<Task>) {
        if self.bodies.len() < BODIES {
            self.bodies.insert((run, task.fence), task.clone());
        }
    }

    pub fn body(&self, run: RunId, fence: Fence) -> Option<Arc<Task>> {
        self.bodies.get(&(run, fence)).cloned()
    }

    pub fn drop_body(&mut self, run: RunId, fence: Fence) {
        self.bodies.remove(&(run, fence));
    }
}

fn read_head(conn: &Connection, run: RunId) -> SqliteResult<Option<Head>> {
    let mut statement = conn.prepare_cached(
        "SELECT position, ns, version, status, started_at, ended_at, trimmed, flow, external_id FROM runs WHERE id = ?1",
    )?;
    let head = statement.query_row(params![run.0.as_bytes()], |row| {
        let status: String = row.get(3)?;
        let facts = Facts { flow: row.get(7)?, external_id: row.get(8)?, tags: Vec::new() };
        let head = Head {
            position: row.get(0)?,
            ns: Namespace::new(&row.get::<_, String>(1)?),
            version: row.get::<_, i64>(2)? as u64,
            records: 0,
            status: Status::Pending,
            started_at: row.get(4)?,
            ended_at: row.get(5)?,
            trimmed: row.get(6)?,
            facts,
        };
        Ok((head, status))
    });
    let Some((mut head, status)) = head.optional()? else { return Ok(None) };
    head.status = status_of(&status).ok_or_else(|| SqliteError::Corrupt(format!("runs: run {run} is {status:?}")))?;
    head.records = count_records(conn, head.position)?;
    let mut tags = conn.prepare_cached("SELECT tag FROM tags WHERE run = ?1 ORDER BY tag")?;
    head.facts.tags = tags.query_map([head.position], |row| row.get(0))?.collect::<rusqlite::Result<_>>()?;
    Ok(Some(head))
}

/// The number of records of a run, from its last row of records.
pub(super) fn count_records(conn: &Connection, position: i64) -> SqliteResult<u64> {
    let mut statement = conn
        .prepare_cached("SELECT first + count - 1 FROM records WHERE run = ?1 ORDER BY first DESC, row DESC LIMIT 1")?;
    let count: Option<i64> = statement.query_row([position], |row| row.get(0)).optional()?;
    Ok(count.unwrap_or(0) as u64)
}

fn status_of(text: &str) -> Option<Status> {
    Status::ALL.into_iter().find(|status| status.as_str() == text)
}
