//! The tables and their migrations.
//!
//! Other tables refer to a run by its position, an integer. Rows that belong to a run and a number within it have one
//! integer key made of both ([`key_of`]): the table needs no other index, and the rows of a run are adjacent. Records
//! are only appended, so they have their own row number and a small index.

use rusqlite::Connection;

use super::sqlite_error::{SqliteError, SqliteResult};
use crate::error::StoreError;

/// The `application_id` in the database header: `Eddy`.
const APPLICATION: i64 = 0x4564_6479;

/// The bits of a key for the number within the run. The other 37 are for the run.
const NUMBER_BITS: u32 = 26;
/// Numbers of activations, values and fences of a run stay below this. A run with this many would not fit in memory.
pub(super) const MOST_NUMBERS: u64 = 1 << NUMBER_BITS;

/// The key of a row that belongs to a run and a number.
pub(super) fn key_of(position: i64, number: u64) -> i64 {
    (position << NUMBER_BITS) | number as i64
}

pub(super) fn number_of(key: i64) -> u64 {
    key as u64 & (MOST_NUMBERS - 1)
}

/// The migrations, one per version. Released steps never change; append new ones.
const STEPS: &[&str] = &[
    "
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;

CREATE TABLE runs (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    id BLOB NOT NULL,
    ns TEXT NOT NULL,
    flow TEXT NOT NULL,
    status TEXT NOT NULL,
    external_id TEXT,
    created_at INTEGER NOT NULL,
    started_at INTEGER,
    ended_at INTEGER,
    trimmed INTEGER NOT NULL DEFAULT 0,
    paused INTEGER NOT NULL,
    memo INTEGER NOT NULL,
    version INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    header TEXT NOT NULL
);
CREATE UNIQUE INDEX runs_by_id ON runs (id);
CREATE INDEX runs_by_flow ON runs (ns, flow);
CREATE INDEX runs_by_status ON runs (ns, status);
CREATE INDEX runs_by_external_id ON runs (ns, external_id) WHERE external_id IS NOT NULL;
CREATE INDEX runs_by_end ON runs (ended_at) WHERE ended_at IS NOT NULL AND trimmed = 0;
CREATE TABLE tags (tag TEXT NOT NULL, run INTEGER NOT NULL, PRIMARY KEY (tag, run)) WITHOUT ROWID;
CREATE INDEX tags_by_run ON tags (run);
CREATE TABLE keys (
    run INTEGER PRIMARY KEY,
    ns TEXT NOT NULL,
    flow TEXT NOT NULL,
    key TEXT NOT NULL,
    fingerprint BLOB NOT NULL,
    UNIQUE (ns, flow, key)
);

CREATE TABLE activations (
    key INTEGER PRIMARY KEY,
    run INTEGER GENERATED ALWAYS AS (key >> 26) VIRTUAL,
    id INTEGER GENERATED ALWAYS AS (key & 67108863) VIRTUAL,
    crc INTEGER NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE \"values\" (
    key INTEGER PRIMARY KEY,
    run INTEGER GENERATED ALWAYS AS (key >> 26) VIRTUAL,
    id INTEGER GENERATED ALWAYS AS (key & 67108863) VIRTUAL,
    crc INTEGER NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE emitted (
    run INTEGER NOT NULL,
    scope INTEGER NOT NULL,
    event INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    body TEXT NOT NULL,
    UNIQUE (run, scope, event)
);
CREATE TABLE reuse (
    run INTEGER NOT NULL,
    activation TEXT NOT NULL,
    crc INTEGER NOT NULL,
    body TEXT NOT NULL,
    UNIQUE (run, activation)
);
CREATE TABLE cursors (
    run INTEGER NOT NULL,
    name TEXT NOT NULL,
    position INTEGER NOT NULL,
    PRIMARY KEY (run, name)
) WITHOUT ROWID;

CREATE TABLE records (
    row INTEGER PRIMARY KEY,
    run INTEGER NOT NULL,
    first INTEGER NOT NULL,
    count INTEGER NOT NULL,
    version INTEGER NOT NULL,
    command BLOB,
    ts INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    body TEXT NOT NULL
);
CREATE INDEX records_by_run ON records (run, first);

CREATE TABLE tasks (
    key INTEGER PRIMARY KEY,
    run INTEGER GENERATED ALWAYS AS (key >> 26) VIRTUAL,
    fence INTEGER GENERATED ALWAYS AS (key & 67108863) VIRTUAL,
    place INTEGER NOT NULL,
    queued_at INTEGER NOT NULL,
    closed INTEGER NOT NULL,
    worker TEXT,
    request BLOB,
    since INTEGER,
    lease_ms INTEGER,
    lease_until INTEGER,
    deadline INTEGER,
    build TEXT,
    memo INTEGER,
    crc INTEGER NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE timers (
    run INTEGER NOT NULL,
    activation INTEGER NOT NULL,
    kind INTEGER NOT NULL,
    fence INTEGER NOT NULL,
    due INTEGER NOT NULL,
    wall INTEGER NOT NULL,
    UNIQUE (run, activation, kind, fence)
);
CREATE INDEX timers_by_due ON timers (wall, due);
CREATE TABLE gates (
    run INTEGER NOT NULL,
    activation INTEGER NOT NULL,
    ns TEXT NOT NULL,
    token TEXT,
    position INTEGER NOT NULL,
    at INTEGER,
    deadline INTEGER,
    reason TEXT,
    event TEXT,
    event_key TEXT,
    closed INTEGER NOT NULL,
    crc INTEGER,
    body TEXT,
    UNIQUE (run, activation)
);
CREATE INDEX gates_by_token ON gates (token) WHERE token IS NOT NULL;
CREATE INDEX gates_open ON gates (ns, position) WHERE at IS NOT NULL AND closed = 0;
CREATE INDEX gates_by_event ON gates (ns, event, event_key, position)
    WHERE event IS NOT NULL AND at IS NOT NULL AND closed = 0;

CREATE TABLE messages (
    place INTEGER PRIMARY KEY,
    ns TEXT NOT NULL,
    target BLOB NOT NULL,
    id TEXT NOT NULL,
    crc INTEGER NOT NULL,
    body TEXT NOT NULL,
    UNIQUE (target, id)
);
CREATE TABLE events (
    position INTEGER PRIMARY KEY AUTOINCREMENT,
    ns TEXT NOT NULL,
    id TEXT NOT NULL,
    name TEXT NOT NULL,
    key TEXT,
    at INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    body TEXT NOT NULL,
    UNIQUE (ns, id)
);
CREATE INDEX events_by_ns ON events (ns);
CREATE INDEX events_by_name ON events (ns, name);
CREATE INDEX events_by_key ON events (ns, name, key) WHERE key IS NOT NULL;

CREATE TABLE documents (
    ns TEXT NOT NULL,
    kind TEXT NOT NULL,
    id TEXT NOT NULL,
    revision INTEGER NOT NULL,
    due INTEGER,
    changed_at INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    body TEXT NOT NULL,
    UNIQUE (kind, id, ns)
);
CREATE INDEX documents_by_due ON documents (due, ns, kind, id) WHERE due IS NOT NULL;
CREATE TABLE commands (row INTEGER PRIMARY KEY, id BLOB NOT NULL, at INTEGER NOT NULL);
CREATE UNIQUE INDEX commands_by_id ON commands (id);
CREATE TABLE buckets (
    ns TEXT NOT NULL,
    kind TEXT NOT NULL,
    name TEXT NOT NULL,
    key TEXT NOT NULL,
    keyed INTEGER NOT NULL,
    whole INTEGER NOT NULL,
    parts INTEGER NOT NULL,
    at INTEGER NOT NULL,
    closed_until INTEGER NOT NULL,
    PRIMARY KEY (ns, kind, name, key, keyed)
) WITHOUT ROWID;

-- Runs whose header is deleted and whose other rows are still being deleted.
CREATE TABLE leaving (run INTEGER PRIMARY KEY, id BLOB NOT NULL);
-- Events of a namespace up to this position are deleted, even if their rows still exist.
CREATE TABLE forgotten (ns TEXT PRIMARY KEY, position INTEGER NOT NULL) WITHOUT ROWID;
",
    "
-- Runs that have not ended, in all namespaces; and trimmed runs, whose headers are kept longer than the rest.
CREATE INDEX runs_going ON runs (status) WHERE ended_at IS NULL;
CREATE INDEX runs_trimmed ON runs (ended_at) WHERE ended_at IS NOT NULL AND trimmed = 1;
",
    "
-- The run at the top of the tree that a child is part of. Only its descendants are counted.
ALTER TABLE runs ADD COLUMN root BLOB;
CREATE INDEX runs_by_root ON runs (root, ns) WHERE root IS NOT NULL;
-- To find the first event at a time: times grow with positions.
CREATE INDEX events_by_time ON events (ns, at);
",
    "
-- The rows of records that have logs of an activation. Most commits have none, and write nothing here.
CREATE TABLE logs (
    run INTEGER NOT NULL,
    activation TEXT NOT NULL,
    first INTEGER NOT NULL,
    PRIMARY KEY (run, activation, first)
) WITHOUT ROWID;
INSERT OR IGNORE INTO logs (run, activation, first)
    SELECT records.run, record.value ->> '$.data.stepKey', records.first
    FROM records, json_each(CASE WHEN json_valid(records.body) THEN records.body ELSE '[]' END) AS record
    WHERE instr(records.body, '\"runner.log\"') > 0
        AND record.value ->> '$.kind' = 'runner.log' AND record.value ->> '$.data.stepKey' IS NOT NULL;
",
    "
-- Runs that have or wait for a unique key: the first in line executes, the others wait. A run can be in line before it
-- is stored, so it is identified by its id.
CREATE TABLE lines (
    place INTEGER PRIMARY KEY,
    ns TEXT NOT NULL,
    flow TEXT NOT NULL,
    key TEXT NOT NULL,
    run BLOB NOT NULL
);
CREATE UNIQUE INDEX lines_by_run ON lines (run);
CREATE INDEX lines_by_key ON lines (ns, flow, key);
",
    "
-- Retention is set per namespace.
DROP INDEX runs_by_end;
DROP INDEX runs_trimmed;
CREATE INDEX runs_by_end ON runs (ns, ended_at) WHERE ended_at IS NOT NULL AND trimmed = 0;
CREATE INDEX runs_trimmed ON runs (ns, ended_at) WHERE ended_at IS NOT NULL AND trimmed = 1;
-- The number of gates an event opened.
ALTER TABLE events ADD COLUMN gates_opened INTEGER NOT NULL DEFAULT 0;
-- The run that this one is a retry or rerun of.
ALTER TABLE runs ADD COLUMN retry_of BLOB;
UPDATE runs SET retry_of = unhex(replace(header ->> '$.retry_of', '-', ''))
    WHERE json_valid(header) AND header ->> '$.retry_of' IS NOT NULL;
CREATE INDEX runs_by_retry_of ON runs (retry_of, ns) WHERE retry_of IS NOT NULL;
",
    "
-- The places in feeds of runs that were copied from a store where they differ from `position`. Later runs have higher
-- positions than all of these.
CREATE TABLE fed_runs (ns TEXT NOT NULL, position INTEGER NOT NULL, run INTEGER NOT NULL, PRIMARY KEY (ns, position))
    WITHOUT ROWID;
CREATE UNIQUE INDEX fed_runs_by_run ON fed_runs (run);
",
];

/// Migrates the tables to the current version, all steps or none. Refuses a database of a newer version.
pub(super) fn migrate(conn: &mut Connection) -> Result<(), StoreError> {
    let version = check_version(conn)?;
    if version == STEPS.len() {
        return Ok(());
    }
    run_steps(conn, version).map_err(SqliteError::into_error)
}

fn check_version(conn: &Connection) -> Result<usize, StoreError> {
    let pragma = |name: &str| conn.pragma_query_value(None, name, |row| row.get::<_, i64>(0));
    let read = || -> SqliteResult<(i64, i64, i64)> {
        let tables = conn.query_row("SELECT count(*) FROM sqlite_schema", [], |row| row.get(0))?;
        Ok((pragma("application_id")?, pragma("user_version")?, tables))
    };
    let (application, version, tables) = read().map_err(SqliteError::into_error)?;
    let path = conn.path().unwrap_or_default();
    if application != APPLICATION && (application != 0 || version != 0 || tables != 0) {
        return Err(StoreError::Corrupt(format!("{path} is the database of another program, not an Eddyline store")));
    }
    match usize::try_from(version) {
        Ok(version) if version <= STEPS.len() => Ok(version),
        _ => Err(StoreError::Unavailable(format!(
            "{path} has schema version {version}, but this Eddyline supports versions up to {}: start the newer \
             Eddyline that wrote it, or restore an older backup",
            STEPS.len()
        ))),
    }
}

fn run_steps(conn: &mut Connection, from: usize) -> SqliteResult<()> {
    let tx = conn.transaction_with_behavior(rusqlite::TransactionBehavior::Immediate)?;
    for step in STEPS.iter().skip(from) {
        tx.execute_batch(step)?;
    }
    tx.pragma_update(None, "application_id", APPLICATION)?;
    tx.pragma_update(None, "user_version", STEPS.len() as i64)?;
    Ok(tx.commit()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_made_of_a_run_and_a_number_and_gives_both_back() {
        for (position, number) in [(1, 0), (7, MOST_NUMBERS - 1), ((1 << 36) - 1, 12)] {
            let key = key_of(position, number);
            assert_eq!((key >> NUMBER_BITS, number_of(key)), (position, number));
            assert!(key > key_of(position - 1, MOST_NUMBERS - 1));
        }
    }
}
