//! The ceiling: SQLite alone, on one thread, writing the rows of the hot transition into the tables of the store. No
//! run is decided, but the disk does the same work.

use std::path::Path;
use std::time::{Duration, Instant};

use rusqlite::{Connection, Statement, params};
use tempfile::TempDir;
use tokio::sync::{mpsc, oneshot};

use crate::measure::{Measure, Row, written_bytes};
use crate::stores;

/// The number of commits after which the log has its full length.
const WARM: usize = 500;
/// The time between spaced commits.
const APART: Duration = Duration::from_micros(100);

/// The rows of one transition, as the store wrote them.
#[derive(Clone)]
pub struct Sample {
    header: String,
    /// The root scope, which counts its open steps; the step that ended; the step that was queued.
    activations: [String; 3],
    records: String,
    claim: String,
    task: String,
}

impl Sample {
    /// Reads the rows of a run that is half way through, in a closed store.
    pub fn read(dir: &Path) -> rusqlite::Result<Sample> {
        let conn = open(dir)?;
        let one = |sql: &str| conn.query_row(sql, [], |row| row.get::<_, String>(0));
        let activation =
            |state: &str| one(&format!("SELECT body FROM activations WHERE body GLOB '*{state}*' LIMIT 1"));
        Ok(Sample {
            header: one("SELECT header FROM runs LIMIT 1")?,
            activations: [activation("\"Open\"")?, activation("\"Ended\"")?, activation("\"Queued\"")?],
            records: one("SELECT body FROM records WHERE count > 1 ORDER BY row DESC LIMIT 1")?,
            claim: one("SELECT body FROM records WHERE count = 1 ORDER BY row DESC LIMIT 1")?,
            task: one("SELECT body FROM tasks LIMIT 1")?,
        })
    }

    pub fn bytes(&self) -> usize {
        let [a, b, c] = &self.activations;
        [&self.header, a, b, c, &self.records, &self.claim, &self.task].iter().map(|text| text.len()).sum()
    }
}

/// SQLite on a store with a run half way through, to be measured in turns with a workload.
pub struct Ceiling {
    sample: Sample,
    /// Kept open, so that the log keeps its length.
    conn: Connection,
    dir: TempDir,
}

impl Ceiling {
    pub async fn open() -> Result<Ceiling, Box<dyn std::error::Error>> {
        let dir = tempfile::tempdir()?;
        stores::half_way(dir.path()).await?;
        let ceiling = Ceiling { sample: Sample::read(dir.path())?, conn: open(dir.path())?, dir };
        // Appending to a file takes longer than overwriting it.
        ceiling.grouped(WARM, 1)?;
        Ok(ceiling)
    }

    pub fn bytes(&self) -> usize {
        self.sample.bytes()
    }

    /// `count` transitions, `group` per commit, over `group` runs.
    pub fn grouped(&self, count: usize, group: usize) -> rusqlite::Result<Row> {
        let first = runs(&self.conn, &self.sample, group)?;
        let mut raw = Raw::prepare(&self.conn)?;
        let mut latencies = Vec::new();
        let (measure, written) = (Measure::start(), written_bytes());
        for round in 0..(count / group) as i64 {
            let since = Instant::now();
            raw.begin.execute([])?;
            for run in first..first + group as i64 {
                raw.transition(&self.sample, run, round)?;
            }
            raw.commit.execute([])?;
            latencies.push(since.elapsed());
        }
        let (what, steps) = (format!("raw SQLite, {group} per commit"), (count / group * group) as u64);
        let mut row = measure.row(what, "sqlite", steps, latencies);
        row.commits = (count / group) as u64;
        row.bytes_per_step = (written_bytes() - written) as f64 / steps.max(1) as f64;
        Ok(row)
    }

    /// One transition per commit, with a pause before each, as when other work is done in between: caches, cores and
    /// the disk's queue have gone cold. Only the commits are timed.
    pub fn apart(&self, count: usize) -> rusqlite::Result<Row> {
        let run = runs(&self.conn, &self.sample, 1)?;
        let mut raw = Raw::prepare(&self.conn)?;
        let mut latencies = Vec::with_capacity(count);
        let measure = Measure::start();
        for round in 0..count as i64 {
            std::thread::sleep(APART);
            let since = Instant::now();
            raw.begin.execute([])?;
            raw.transition(&self.sample, run, round)?;
            raw.commit.execute([])?;
            latencies.push(since.elapsed());
        }
        let seconds: f64 = latencies.iter().map(Duration::as_secs_f64).sum();
        let mut row = measure.row("raw SQLite, 1 per commit, spaced", "sqlite", count as u64, latencies);
        (row.seconds, row.per_second, row.commits) = (seconds, count as f64 / seconds, count as u64);
        Ok(row)
    }

    /// Callers with one transition in flight each, which wait until it is durable: one thread writes everything that is
    /// waiting as a group.
    pub async fn called(&self, count: usize, callers: usize) -> Result<Row, Box<dyn std::error::Error>> {
        let conn = open(self.dir.path())?;
        let first = runs(&conn, &self.sample, callers)?;
        let (requests, queue) = mpsc::channel(callers);
        let rows = self.sample.clone();
        let (measure, written) = (Measure::start(), written_bytes());
        let writer = std::thread::spawn(move || write(&conn, &rows, queue));
        let caller = |run: i64| {
            let requests = requests.clone();
            async move {
                let mut latencies: Vec<Duration> = Vec::new();
                for round in 0..(count / callers) as i64 {
                    let (answer, answered) = oneshot::channel();
                    let since = Instant::now();
                    if requests.send((run, round, answer)).await.is_err() || answered.await.is_err() {
                        break;
                    }
                    latencies.push(since.elapsed());
                }
                latencies
            }
        };
        let going: Vec<_> = (first..first + callers as i64).map(|run| tokio::spawn(caller(run))).collect();
        drop(requests);
        let mut latencies = Vec::new();
        for caller in going {
            latencies.extend(caller.await?);
        }
        let steps = latencies.len() as u64;
        let mut row = measure.row(format!("raw SQLite, {callers} callers"), "sqlite", steps, latencies);
        row.commits = writer.join().map_err(|_| "the writer of the ceiling panicked")??;
        row.bytes_per_step = (written_bytes() - written) as f64 / steps.max(1) as f64;
        Ok(row)
    }
}

type Asked = (i64, i64, oneshot::Sender<()>);

fn write(conn: &Connection, sample: &Sample, mut queue: mpsc::Receiver<Asked>) -> rusqlite::Result<u64> {
    let mut raw = Raw::prepare(conn)?;
    let (mut group, mut commits) = (Vec::new(), 0);
    while queue.blocking_recv_many(&mut group, 512) > 0 {
        raw.begin.execute([])?;
        for (run, round, _) in &group {
            raw.transition(sample, *run, *round)?;
        }
        raw.commit.execute([])?;
        commits += 1;
        for (_, _, answer) in group.drain(..) {
            let _ = answer.send(());
        }
    }
    Ok(commits)
}

/// Inserts runs like hot ones; returns the position of the first.
fn runs(conn: &Connection, sample: &Sample, count: usize) -> rusqlite::Result<i64> {
    let last: i64 = conn.query_row("SELECT max(position) FROM runs", [], |row| row.get(0))?;
    for at in 1..=count as i64 {
        conn.execute(
            "INSERT INTO runs (position, id, ns, flow, status, created_at, started_at, paused, memo, version, crc, header) \
             VALUES (?1, ?2, 'default', 'hot', 'running', 1, 1, 0, 0, 1, 0, ?3)",
            params![last + at, (last + at).to_be_bytes(), sample.header],
        )?;
    }
    Ok(last + 1)
}

struct Raw<'c> {
    begin: Statement<'c>,
    commit: Statement<'c>,
    update: Statement<'c>,
    activation: Statement<'c>,
    record: Statement<'c>,
    remove: Statement<'c>,
    add: Statement<'c>,
}

impl<'c> Raw<'c> {
    fn prepare(conn: &'c Connection) -> rusqlite::Result<Raw<'c>> {
        Ok(Raw {
            begin: conn.prepare("BEGIN IMMEDIATE")?,
            commit: conn.prepare("COMMIT")?,
            update: conn.prepare(
                "UPDATE runs SET paused = 0, memo = 0, version = ?2, crc = ?3, header = ?4 WHERE position = ?1",
            )?,
            activation: conn.prepare(
                "INSERT INTO activations (key, crc, body) VALUES (?1, ?2, ?3) \
                 ON CONFLICT (key) DO UPDATE SET crc = excluded.crc, body = excluded.body",
            )?,
            record: conn.prepare(
                "INSERT INTO records (run, first, count, version, command, ts, crc, body) \
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
            )?,
            remove: conn.prepare("DELETE FROM tasks WHERE key = ?1")?,
            add: conn.prepare(
                "INSERT INTO tasks (key, place, queued_at, closed, worker, request, since, lease_ms, lease_until, memo, \
                 crc, body) VALUES (?1, ?2, 1, 0, 'w1', ?3, 1, 30000, 30001, 0, ?4, ?5)",
            )?,
        })
    }

    fn transition(&mut self, sample: &Sample, run: i64, round: i64) -> rusqlite::Result<()> {
        let (id, crc) = ([7u8; 16], round * 7919 + run);
        let key = |number: i64| (run << 26) | number;
        self.update.execute(params![run, round, crc, sample.header])?;
        self.activation.execute(params![key(0), crc, sample.activations[0]])?;
        self.activation.execute(params![key(round + 1), crc, sample.activations[1]])?;
        self.activation.execute(params![key(round + 2), crc, sample.activations[2]])?;
        self.record.execute(params![run, round * 5 + 1, 4, round, id, round, crc, sample.records])?;
        self.record.execute(params![run, round * 5 + 5, 1, round, None::<Vec<u8>>, round, crc, sample.claim])?;
        self.remove.execute(params![key(round)])?;
        self.add.execute(params![key(round + 1), round, id, crc, sample.task])?;
        Ok(())
    }
}

/// Opens with the settings of the store, but with automatic checkpoints by SQLite.
fn open(dir: &Path) -> rusqlite::Result<Connection> {
    let conn = Connection::open(dir.join("eddyline.db"))?;
    conn.pragma_update(None, "journal_mode", "WAL")?;
    conn.pragma_update(None, "synchronous", "FULL")?;
    conn.pragma_update(None, "cache_size", -16_000)?;
    Ok(conn)
}
