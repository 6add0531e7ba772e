//! The ceiling: SQLite itself, one thread, writing the rows of the hot transition in the tables of the store, with
//! nothing around it. No run could be decided, no caller answered, but the disk does the same work.

use std::path::Path;
use std::time::{Duration, Instant};

use rusqlite::{Connection, params};

use crate::measure::{Measure, Row};

/// The rows of one transition, as the store wrote them.
pub struct Sample {
    header: String,
    activations: [String; 2],
    records: String,
    claim: String,
    task: String,
}

impl Sample {
    /// Takes the rows of a run that is half way through, in a store that was closed.
    pub fn read(dir: &Path) -> rusqlite::Result<Sample> {
        let conn = open(dir)?;
        let one = |sql: &str| conn.query_row(sql, [], |row| row.get::<_, String>(0));
        Ok(Sample {
            header: one("SELECT header FROM runs LIMIT 1")?,
            activations: [
                one("SELECT body FROM activations WHERE body LIKE '%Ended%' LIMIT 1")?,
                one("SELECT body FROM activations WHERE body LIKE '%Queued%' LIMIT 1")?,
            ],
            records: one("SELECT body FROM records WHERE count > 1 ORDER BY row DESC LIMIT 1")?,
            claim: one("SELECT body FROM records WHERE count = 1 ORDER BY row DESC LIMIT 1")?,
            task: one("SELECT body FROM tasks LIMIT 1")?,
        })
    }

    pub fn bytes(&self) -> usize {
        let [a, b] = &self.activations;
        [&self.header, a, b, &self.records, &self.claim, &self.task].iter().map(|text| text.len()).sum()
    }
}

/// So many transitions, so many to a commit, over as many runs. `dir` holds a closed store with at least one run.
pub fn transitions(dir: &Path, sample: &Sample, count: usize, group: usize) -> rusqlite::Result<(Row, Vec<Duration>)> {
    let conn = open(dir)?;
    // Each group works on runs that are there, as hot runs are.
    let first: i64 = conn.query_row("SELECT max(position) FROM runs", [], |row| row.get(0))?;
    for at in 1..=group as i64 {
        conn.execute(
            "INSERT INTO runs (position, id, ns, flow, status, created_at, started_at, paused, memo, version, crc, header) \
             VALUES (?1, ?2, 'default', 'hot', 'running', 1, 1, 0, 0, 1, 0, ?3)",
            params![first + at, (first + at).to_be_bytes(), sample.header],
        )?;
    }
    let mut update =
        conn.prepare("UPDATE runs SET paused = 0, memo = 0, version = ?2, crc = ?3, header = ?4 WHERE position = ?1")?;
    let mut activation = conn.prepare(
        "INSERT INTO activations (key, crc, body) VALUES (?1, ?2, ?3) \
         ON CONFLICT (key) DO UPDATE SET crc = excluded.crc, body = excluded.body",
    )?;
    let mut record = conn.prepare(
        "INSERT INTO records (run, first, count, version, command, ts, crc, body) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
    )?;
    let mut remove = conn.prepare("DELETE FROM tasks WHERE key = ?1")?;
    let mut add = conn.prepare(
        "INSERT INTO tasks (key, place, queued_at, closed, worker, request, since, lease_ms, lease_until, memo, crc, body) \
         VALUES (?1, ?2, 1, 0, 'w1', ?3, 1, 30000, 30001, 0, ?4, ?5)",
    )?;
    let (mut begin, mut commit) = (conn.prepare("BEGIN IMMEDIATE")?, conn.prepare("COMMIT")?);
    let mut latencies = Vec::new();
    let measure = Measure::start();
    let id = [7u8; 16];
    for round in 0..(count / group) as i64 {
        let since = Instant::now();
        begin.execute([])?;
        for at in 1..=group as i64 {
            let (run, crc) = (first + at, round * 7919 + at);
            let key = |number: i64| (run << 26) | number;
            update.execute(params![run, round, crc, sample.header])?;
            activation.execute(params![key(round), crc, sample.activations[0]])?;
            activation.execute(params![key(round + 1), crc, sample.activations[1]])?;
            record.execute(params![run, round * 5 + 1, 4, round, id, round, crc, sample.records])?;
            record.execute(params![run, round * 5 + 5, 1, round, None::<Vec<u8>>, round, crc, sample.claim])?;
            remove.execute(params![key(round)])?;
            add.execute(params![key(round + 1), round, id, crc, sample.task])?;
        }
        commit.execute([])?;
        latencies.push(since.elapsed());
    }
    let what = format!("raw SQLite, {group} to a commit");
    let mut row = measure.row(what, "sqlite", (count / group * group) as u64, latencies.clone());
    row.commits = (count / group) as u64;
    Ok((row, latencies))
}

/// The settings of the store; checkpoints by SQLite itself.
fn open(dir: &Path) -> rusqlite::Result<Connection> {
    let conn = Connection::open(dir.join("eddyline.db"))?;
    conn.pragma_update(None, "journal_mode", "WAL")?;
    conn.pragma_update(None, "synchronous", "FULL")?;
    conn.pragma_update(None, "cache_size", -64_000)?;
    Ok(conn)
}
