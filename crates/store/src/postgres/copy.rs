//! Copies from and to a PostgreSQL store, while no process serves it.
//!
//! A row of `meta` marks an unfinished copy, and the store cannot be opened while it exists. Nothing prevents a process
//! from serving the source during the copy: that is detected at the end, because every serving process watches leases.

mod fill;
mod inserts;
mod read;

use std::sync::Arc;
use std::time::Duration;

use super::connect::Object;
use async_trait::async_trait;
use eddyline_machine::Millis;
use tokio_postgres::types::Type;

use super::PostgresOptions;
use super::database::{Database, Param};
use super::list;
use super::pg_error::{PgError, PgResult};
use crate::copy::{CopySource, CopyTarget, Numbers, Origin, Row, Rows};
use crate::error::{Result, StoreError};
use crate::ids::Namespace;
use crate::presence::InstanceInfo;
use fill::Fill;

/// A serving process checks in every second. One that was killed without checking out stops counting after this time.
const GONE_MS: Millis = 60_000;

/// A PostgreSQL store to copy from.
#[derive(Debug)]
pub struct PostgresSource {
    database: Arc<Database>,
    /// When leases were last watched.
    watched_at: Millis,
}

impl PostgresSource {
    /// The tables must be up to date. `options` is for tests that control the clock.
    pub async fn open(url: &str, options: PostgresOptions) -> Result<PostgresSource> {
        let database = Arc::new(Database::open(url, PostgresOptions { migrate: false, ..options }).await?);
        refuse_instances(&database).await?;
        // Rows are numbered in their feed when the feed is read: number all of them now.
        let rows = database.read("SELECT ns FROM eddyline.runs UNION SELECT ns FROM eddyline.events", &[]).await;
        for row in rows.map_err(PgError::into_error)? {
            let ns = super::body::unescape(row.get(0));
            list::number(&database, &Namespace::new(&ns)).await?;
        }
        let watched_at = watched_at(&database).await?;
        Ok(PostgresSource { database, watched_at })
    }
}

#[async_trait]
impl CopySource for PostgresSource {
    async fn origin(&self) -> Result<Origin> {
        origin(&self.database).await
    }

    fn rows(&self) -> Rows {
        rows_of(&self.database)
    }

    async fn check_unserved(&self) -> Result<()> {
        refuse_instances(&self.database).await?;
        match watched_at(&self.database).await? == self.watched_at {
            true => Ok(()),
            false => Err(StoreError::Unavailable(
                "a process served the source while it was copied, so the copy lacks what it did: stop all processes and \
                 copy again with --restart"
                    .to_owned(),
            )),
        }
    }
}

/// A schema to copy into.
#[derive(Debug)]
pub struct PostgresTarget {
    database: Arc<Database>,
    fill: Fill,
    /// Identifies this copy, so that a copy that another process began later is detected.
    mark: i64,
}

impl PostgresTarget {
    /// Creates the tables if they are missing.
    pub async fn open(url: &str, options: PostgresOptions) -> Result<PostgresTarget> {
        let database = Arc::new(Database::open_unfinished(url, options).await?);
        let mark = uuid::Uuid::new_v4().as_u128() as i64;
        Ok(PostgresTarget { database, fill: Fill::default(), mark })
    }

    /// Runs `work` in a transaction.
    async fn transaction<T>(&self, work: impl AsyncFnOnce(&Object) -> PgResult<Result<T>>) -> Result<T> {
        let client = self.database.client().await.map_err(PgError::into_error)?;
        let worked = async {
            client.batch_execute("BEGIN").await?;
            let done = work(&client).await?;
            client.batch_execute(if done.is_ok() { "COMMIT" } else { "ROLLBACK" }).await?;
            Ok(done)
        };
        match worked.await {
            Ok(done) => done,
            Err(error) => {
                drop(Object::take(client));
                Err(PgError::into_write_error(error))
            }
        }
    }

    /// Fails if another copy into the same schema began after this one.
    async fn check_mark(&self, client: &Object) -> PgResult<Result<()>> {
        let sql = "SELECT 1 FROM eddyline.meta WHERE name = 'copying' AND value = $1 FOR SHARE";
        let found = self.database.query(client, sql, &[(&self.mark, Type::INT8)]).await?;
        Ok(match found.is_empty() {
            false => Ok(()),
            true => Err(StoreError::Unavailable("another copy into the same schema has begun".to_owned())),
        })
    }
}

#[async_trait]
impl CopySource for PostgresTarget {
    async fn origin(&self) -> Result<Origin> {
        origin(&self.database).await
    }

    fn rows(&self) -> Rows {
        rows_of(&self.database)
    }

    async fn check_unserved(&self) -> Result<()> {
        refuse_instances(&self.database).await
    }
}

#[async_trait]
impl CopyTarget for PostgresTarget {
    async fn begin(&mut self, restart: bool) -> Result<()> {
        refuse_instances(&self.database).await?;
        self.transaction(async |client| begin(&self.database, client, restart, self.mark).await).await
    }

    async fn time(&self) -> Result<Option<Millis>> {
        self.database.ask_time().await.map(Some)
    }

    async fn write(&mut self, rows: Vec<Row>) -> Result<()> {
        let inserts = self.fill.inserts(rows)?;
        self.transaction(async |client| {
            if let Err(error) = self.check_mark(client).await? {
                return Ok(Err(error));
            }
            inserts.send(&self.database, client).await?;
            Ok(Ok(()))
        })
        .await
    }

    async fn finish(&mut self, origin: &Origin) -> Result<()> {
        self.transaction(async |client| {
            if let Err(error) = self.check_mark(client).await? {
                return Ok(Err(error));
            }
            finish(&self.database, client, origin).await?;
            Ok(Ok(()))
        })
        .await
    }

    async fn release(&mut self, origin: &Origin) -> Result<()> {
        self.check_unserved().await?;
        // If the clock is slightly behind, wait until it passes the latest time of the source.
        while let Some(behind) = self.time().await?.map(|time| origin.latest - time).filter(|behind| *behind > 0) {
            tokio::time::sleep(Duration::from_millis(behind as u64)).await;
        }
        self.transaction(async |client| {
            if let Err(error) = self.check_mark(client).await? {
                return Ok(Err(error));
            }
            let now = self.database.now_given();
            let params: [Param<'_>; 2] = [(&now, Type::INT8), (&origin.served_at, Type::INT8)];
            for sql in RELEASE {
                self.database.query(client, sql, &params).await?;
            }
            Ok(Ok(()))
        })
        .await
    }
}

/// Restarts all leases, and adds the time without a serving process to timeouts, as when a store is opened again.
const RELEASE: [&str; 3] = [
    "UPDATE eddyline.tasks t SET lease_until = n.now + t.lease_ms, by_worker = false, \
         deadline = t.deadline + greatest(n.now - greatest($2, t.since), 0) \
         FROM (SELECT coalesce($1, eddyline.wall_ms()) AS now) n WHERE t.worker IS NOT NULL",
    "UPDATE eddyline.tasks t SET start_by = t.start_by + greatest(n.now - greatest($2, t.queued_at), 0) \
         FROM (SELECT coalesce($1, eddyline.wall_ms()) AS now) n WHERE t.worker IS NULL AND t.start_by IS NOT NULL",
    "WITH gone AS (DELETE FROM eddyline.meta WHERE name = 'copying') \
         INSERT INTO eddyline.meta (name, value) SELECT 'looked_at', coalesce($1, eddyline.wall_ms()) WHERE $2 IS NOT NULL \
         ON CONFLICT (name) DO UPDATE SET value = excluded.value",
];

async fn begin(database: &Database, client: &Object, restart: bool, mark: i64) -> PgResult<Result<()>> {
    let lock = "SELECT pg_advisory_xact_lock(hashtextextended($1, 3))";
    database.query(client, lock, &[(&database.schema(), Type::TEXT)]).await?;
    let marked = "SELECT 1 FROM eddyline.meta WHERE name = 'copying'";
    let unfinished = !database.query(client, marked, &[]).await?.is_empty();
    if unfinished && !restart {
        return Ok(Err(StoreError::Unavailable(format!(
            "schema {} has an unfinished copy: use --restart to delete it and start over",
            database.schema()
        ))));
    }
    if unfinished {
        empty(database, client).await?;
    }
    let counted = "SELECT (SELECT count(*) FROM eddyline.runs), (SELECT count(*) FROM eddyline.documents), \
                   (SELECT count(*) FROM eddyline.events), (SELECT count(*) FROM eddyline.messages)";
    let row = database.query(client, counted, &[]).await?;
    let counts: Vec<i64> = row.first().map(|row| (0..4).map(|at| row.get(at)).collect()).unwrap_or_default();
    if let [runs, documents, events, messages] = counts[..]
        && runs + documents + events + messages > 0
    {
        return Ok(Err(StoreError::Unavailable(format!(
            "schema {} is not empty: it has {runs} runs, {documents} documents, {events} events and {messages} messages. \
             Copy into a new schema (?schema=NAME), or drop this one",
            database.schema()
        ))));
    }
    let mark_it = "INSERT INTO eddyline.meta (name, value) VALUES ('copying', $1) \
                   ON CONFLICT (name) DO UPDATE SET value = excluded.value";
    database.query(client, mark_it, &[(&mark, Type::INT8)]).await?;
    Ok(Ok(()))
}

/// All tables of the store except those that describe the schema itself.
async fn tables(database: &Database, client: &Object) -> PgResult<Vec<String>> {
    let sql = "SELECT format('%I.%I', schemaname, tablename) FROM pg_tables WHERE schemaname = $1 \
               AND tablename NOT IN ('versions', 'meta', 'instances') ORDER BY 1";
    let rows = database.query(client, sql, &[(&database.schema(), Type::TEXT)]).await?;
    Ok(rows.iter().map(|row| row.get(0)).collect())
}

async fn empty(database: &Database, client: &Object) -> PgResult<()> {
    let tables = tables(database, client).await?.join(", ");
    Ok(client.batch_execute(&format!("TRUNCATE {tables} RESTART IDENTITY")).await?)
}

async fn finish(database: &Database, client: &Object, origin: &Origin) -> PgResult<()> {
    // The turns of keys are not copied: each key with waiting tasks must have one.
    for sql in [
        "INSERT INTO eddyline.queues (ns, name) SELECT DISTINCT ns, queue FROM eddyline.tasks WHERE key <> '' \
             ON CONFLICT DO NOTHING",
        "INSERT INTO eddyline.turns (ns, queue, key, served) SELECT DISTINCT ns, queue, key, 0 FROM eddyline.tasks \
             WHERE worker IS NULL AND NOT closed AND NOT paused AND key <> '' ON CONFLICT DO NOTHING",
        "UPDATE eddyline.events e SET noted = x.noted FROM (SELECT row, max(at) OVER (PARTITION BY ns ORDER BY position) AS noted \
             FROM eddyline.events) x WHERE e.row = x.row",
        "SELECT setval(pg_get_serial_sequence('eddyline.tasks', 'place'), max(place)) FROM eddyline.tasks",
        "SELECT setval(pg_get_serial_sequence('eddyline.messages', 'place'), max(place)) FROM eddyline.messages",
        "SELECT setval(pg_get_serial_sequence('eddyline.lines', 'place'), max(place)) FROM eddyline.lines",
    ] {
        database.query(client, sql, &[]).await?;
    }
    let last = origin.last;
    for (sequence, last) in [
        ("pg_get_serial_sequence('eddyline.runs', 'position')", last.run),
        ("'eddyline.feed_order'", last.event.max(last.fed_run)),
        ("'eddyline.gate_order'", last.gate),
    ] {
        if last > 0 {
            let sql = format!("SELECT setval({sequence}, $1)");
            database.query(client, &sql, &[(&(last as i64), Type::INT8)]).await?;
        }
    }
    let revision = "UPDATE eddyline.meta SET value = $1 WHERE name = 'revision'";
    database.query(client, revision, &[(&(last.revision as i64), Type::INT8)]).await?;
    // Without statistics, the first statements would get bad plans.
    let tables = tables(database, client).await?.join(", ");
    Ok(client.batch_execute(&format!("ANALYZE {tables}")).await?)
}

fn rows_of(database: &Arc<Database>) -> Rows {
    let database = database.clone();
    Rows::read(|out| async move { read::all(&database, out).await.map_err(PgError::into_error) })
}

async fn origin(database: &Database) -> Result<Origin> {
    let sql = "SELECT (SELECT count(*) FROM eddyline.runs), \
         greatest((SELECT max(changed_at) FROM eddyline.runs), (SELECT max(at) FROM eddyline.events), \
             (SELECT max(changed_at) FROM eddyline.documents), m.watched, 0), m.watched, m.revision, \
         coalesce(pg_sequence_last_value(pg_get_serial_sequence('eddyline.runs', 'position')::regclass), 0), \
         coalesce(pg_sequence_last_value('eddyline.feed_order'::regclass), 0), \
         coalesce(pg_sequence_last_value('eddyline.gate_order'::regclass), 0) \
         FROM (SELECT coalesce(max(value) FILTER (WHERE name = 'looked_at'), 0) AS watched, \
             coalesce(max(value) FILTER (WHERE name = 'revision'), 0) AS revision FROM eddyline.meta) m";
    let rows = database.read(sql, &[]).await.map_err(PgError::into_error)?;
    let numbers: Vec<i64> = rows.first().map(|row| (0..7).map(|at| row.get(at)).collect()).unwrap_or_default();
    let [run_count, latest, served_at, revision, run, fed, gate] = numbers[..] else {
        return Err(StoreError::Corrupt("meta: a value can't be read".to_owned()));
    };
    Ok(Origin {
        run_count: run_count as u64,
        latest,
        served_at,
        deletions_from: 0,
        last: Numbers {
            run: run as u64,
            fed_run: fed as u64,
            event: fed as u64,
            gate: gate as u64,
            revision: revision as u64,
        },
    })
}

async fn watched_at(database: &Database) -> Result<Millis> {
    let sql = "SELECT value FROM eddyline.meta WHERE name = 'looked_at'";
    let rows = database.read(sql, &[]).await.map_err(PgError::into_error)?;
    Ok(rows.first().map_or(0, |row| row.get(0)))
}

/// Refuses a store that a process serves.
async fn refuse_instances(database: &Database) -> Result<()> {
    let sql = "SELECT i.body, n.now - i.seen FROM eddyline.instances i, \
               (SELECT coalesce($1, eddyline.wall_ms()) AS now) n WHERE i.seen > n.now - $2 ORDER BY i.seen DESC LIMIT 1";
    let now = database.now_given();
    let params: [Param<'_>; 2] = [(&now, Type::INT8), (&GONE_MS, Type::INT8)];
    let rows = database.read(sql, &params).await.map_err(PgError::into_error)?;
    let Some(row) = rows.first() else { return Ok(()) };
    let (body, ago): (String, Millis) = (row.get(0), row.get(1));
    let info: InstanceInfo = serde_json::from_str(&body).unwrap_or_default();
    let host = info.host.map(|host| format!(" on {host}")).unwrap_or_default();
    Err(StoreError::Unavailable(format!(
        "schema {} is served by {}{host}, which checked in {} s ago: stop all instances first. One that was killed counts \
         as serving for a minute",
        database.schema(),
        info.name,
        ago.max(0) / 1_000
    )))
}
