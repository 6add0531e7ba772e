//! Connections, statements and time.

use std::borrow::Cow;
use std::collections::HashSet;
use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use deadpool::Runtime;
use deadpool::managed::{Pool, PoolError};
use eddyline_machine::Millis;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_postgres::Row;
use tokio_postgres::types::{ToSql, Type};

use super::clock::DatabaseClock;
use super::connect::{Connector, NotConnected, Object};
use super::listen::{self, Hub, Listener};
use super::low_marks::LowMarks;
use super::pg_error::{PgError, PgResult, is_of_a_proxy};
use super::settings::Settings;
use super::{Migrated, PostgresOptions, proxy, schema};
use crate::clock::StoreTime;
use crate::error::{Result, StoreError};
use crate::ids::Namespace;

/// How long a call waits for a free connection.
const POOL_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the statements of a commit may take. After that its outcome is unknown, until the command is submitted
/// again: if the first attempt was only slow, it counts.
pub(super) const COMMIT_TIMEOUT: Duration = Duration::from_secs(15);
/// How long a read may take.
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// How long a working database may take to respond to a health check.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(2);
/// How many times an operation is tried that fails temporarily: a deadlock, or a read on a closed connection.
pub(super) const TRIES: u32 = 8;
/// The most task classes that are remembered as stored.
const MOST_CLASSES: usize = 10_000;

/// A parameter of a statement with its type, so that types need not be looked up.
pub(super) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

#[derive(Debug)]
pub(super) struct Database {
    connector: Connector,
    pool: Pool<Connector>,
    schema: String,
    /// Whether statements are prepared. False behind a proxy that pools transactions.
    prepare: AtomicBool,
    /// Replaces the database's time in tests.
    time: Option<StoreTime>,
    clock: DatabaseClock,
    pub hub: Arc<Hub>,
    _listener: Option<Listener>,
    /// Bounds the turns at runs that this process holds or waits for, each on a connection of its own.
    pub turns: Arc<Semaphore>,
    /// Task classes that are known to be stored, so they need not be written again.
    classes: Mutex<HashSet<(String, String, i64)>>,
    low_marks: LowMarks,
    /// The format in which bodies are written, by some process at least.
    format: AtomicI64,
}

impl Database {
    pub async fn open(url: &str, options: PostgresOptions) -> Result<Database> {
        let database = Database::open_unfinished(url, options).await?;
        let copying = database.read("SELECT 1 FROM eddyline.meta WHERE name = 'copying'", &[]).await;
        match copying.map_err(PgError::into_error)?.is_empty() {
            true => Ok(database),
            false => Err(StoreError::Unavailable(format!(
                "schema {} has an unfinished copy of another store: repeat `eddy store copy` with --restart",
                database.schema
            ))),
        }
    }

    /// Opens the store even if a copy into it is unfinished.
    pub async fn open_unfinished(url: &str, options: PostgresOptions) -> Result<Database> {
        let (mut database, settings) = Database::connect(url).await?;
        let client = database.client().await.map_err(PgError::into_error)?;
        schema::migrate(&database, client, options.migrate, None).await?;
        database._listener =
            Some(listen::start(&database.connector, &database.pool, &settings.schema, &database.hub).await);
        if let Some(clock) = options.clock {
            let last = "SELECT coalesce(max(changed_at), 0) FROM eddyline.runs";
            let rows = database.read(last, &[]).await.map_err(PgError::into_error)?;
            let last: Millis = rows.first().map_or(0, |row| row.get(0));
            database.time = Some(StoreTime::open(clock, last));
        }
        let format = database.read("SELECT value FROM eddyline.meta WHERE name = 'format'", &[]).await;
        database.learn_format(format.map_err(PgError::into_error)?.first().map_or(1, |row| row.get(0)));
        database.check_format()?;
        let looked = "INSERT INTO eddyline.meta (name, value) \
                      VALUES ('looked_at', coalesce($1, eddyline.wall_ms())) ON CONFLICT DO NOTHING";
        database.read(looked, &[(&database.now_given(), Type::INT8)]).await.map_err(PgError::into_error)?;
        Ok(database)
    }

    /// Creates or updates the tables, to version `to` or the newest one, and does nothing else.
    pub async fn migrate(url: &str, to: Option<usize>) -> Result<Migrated> {
        let (database, _) = Database::connect(url).await?;
        let client = database.client().await.map_err(PgError::into_error)?;
        schema::migrate(&database, client, true, to).await
    }

    /// Connects to a server, checks that it is suitable, and detects a proxy. The tables are not checked.
    pub async fn connect(url: &str) -> Result<(Database, Settings)> {
        let settings = Settings::parse(url)?;
        let connector = Connector::new(settings.clone())?;
        let database = Database {
            pool: pool(&settings, &connector)?,
            connector,
            schema: settings.schema.clone(),
            prepare: AtomicBool::new(settings.prepare != Some(false)),
            time: None,
            clock: DatabaseClock::new(),
            hub: Arc::default(),
            _listener: None,
            turns: Arc::new(Semaphore::new((settings.pool_size / 4).max(1))),
            classes: Mutex::default(),
            low_marks: LowMarks::default(),
            format: AtomicI64::new(0),
        };
        let place = settings.place();
        let failed = |error: PgError| match error.into_error() {
            StoreError::Unavailable(why) => StoreError::Unavailable(format!("PostgreSQL at {place}: {why}")),
            other => other,
        };
        let client = database.client().await.map_err(failed)?;
        let looked = async {
            let found = match settings.prepare {
                None => database.connector.were_options_refused() || proxy::is_between(&client).await?,
                Some(_) => false,
            };
            Ok((found, schema::check_server(&client).await?))
        };
        let (found, fit) = in_time(READ_TIMEOUT, looked).await.map_err(failed)?;
        fit?;
        if found {
            database.stop_preparing("it shares sessions between clients");
        }
        Ok((database, settings))
    }

    pub async fn client(&self) -> PgResult<Object> {
        self.pool.get().await.map_err(|error| {
            PgError::Connect(match error {
                PoolError::Backend(NotConnected(why)) => why,
                PoolError::Timeout(_) => "all connections of the pool were in use for too long".to_owned(),
                other => format!("the connection pool failed: {other:?}"),
            })
        })
    }

    /// Closes a connection after an error: an open transaction is rolled back, and a broken connection is not reused.
    pub fn discard(&self, client: Object, error: &PgError) {
        if matches!(error, PgError::Silent) {
            self.connector.fell_silent();
        }
        drop(Object::take(client));
    }

    /// Sends all further statements without preparing them.
    fn stop_preparing(&self, why: &str) {
        if self.prepare.swap(false, Ordering::Relaxed) {
            tracing::info!(
                "PostgreSQL is behind a proxy ({why}), so statements are not prepared; set prepare=false in the URL, or \
                 prepare=true if the proxy supports prepared statements"
            );
        }
    }

    /// The statement with the name of this store's schema.
    pub fn sql<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self.schema == "eddyline" {
            true => Cow::Borrowed(text),
            false => Cow::Owned(text.replace("eddyline.", &format!("\"{}\".", self.schema))),
        }
    }

    pub fn schema(&self) -> &str {
        &self.schema
    }

    pub async fn query(&self, client: &Object, text: &str, params: &[Param<'_>]) -> PgResult<Vec<Row>> {
        if !self.prepare.load(Ordering::Relaxed) {
            return self.query_unprepared(client, text, params).await;
        }
        let sql = self.sql(text);
        let values: Vec<&(dyn ToSql + Sync)> = params.iter().map(|(value, _)| *value).collect();
        let prepared = async { client.query(&client.prepare_typed_cached(&sql, &types(params)).await?, &values).await };
        prepared.await.map_err(|error| self.of_prepared(error))
    }

    async fn query_unprepared(&self, client: &Object, text: &str, params: &[Param<'_>]) -> PgResult<Vec<Row>> {
        Ok(client.query_typed(&self.sql(text), params).await?)
    }

    /// Classifies an error of a prepared statement, which may be due to an undetected proxy.
    fn of_prepared(&self, error: tokio_postgres::Error) -> PgError {
        if !is_of_a_proxy(&error) {
            return PgError::Postgres(error);
        }
        self.stop_preparing("it dropped a prepared statement");
        PgError::Unprepared(error)
    }

    /// Runs a statement that can be repeated: a read, or a write that is idempotent.
    pub async fn read(&self, text: &str, params: &[Param<'_>]) -> PgResult<Vec<Row>> {
        self.read_with(text, params, true).await
    }

    /// The same, planned for the values of the parameters each time.
    pub async fn read_planned_anew(&self, text: &str, params: &[Param<'_>]) -> PgResult<Vec<Row>> {
        self.read_with(text, params, false).await
    }

    async fn read_with(&self, text: &str, params: &[Param<'_>], prepared: bool) -> PgResult<Vec<Row>> {
        let mut tries = 0;
        loop {
            let client = self.client().await?;
            let query = async {
                match prepared {
                    true => self.query(&client, text, params).await,
                    false => self.query_unprepared(&client, text, params).await,
                }
            };
            match in_time(READ_TIMEOUT, query).await {
                Ok(rows) => return Ok(rows),
                Err(error) => self.before_retry(client, error, &mut tries).await?,
            }
        }
    }

    /// After a failed read: waits if it may be tried again, otherwise returns the error. Its connection is closed, because a
    /// transaction may be open.
    pub async fn before_retry(&self, client: Object, error: PgError, tries: &mut u32) -> PgResult<()> {
        *tries += 1;
        let silent = matches!(error, PgError::Silent);
        if silent {
            self.connector.cancel(&client);
        }
        self.discard(client, &error);
        if silent || *tries >= TRIES || !(error.is_passing() || error.is_cut()) {
            return Err(error);
        }
        pause(*tries).await;
        Ok(())
    }

    /// Whether commits are possible now, as far as can be known without trying one.
    pub async fn health(&self) -> Result<()> {
        self.check_format()?;
        let client = match timeout(HEALTH_TIMEOUT, self.client()).await {
            Ok(client) => client.map_err(PgError::into_error)?,
            Err(_) => return Err(PgError::Silent.into_error()),
        };
        let sql = "SELECT eddyline.wall_ms(), current_setting('transaction_read_only')::bool";
        let rows = match in_time(HEALTH_TIMEOUT, self.query(&client, sql, &[])).await {
            Ok(rows) => rows,
            Err(error) => {
                self.discard(client, &error);
                return Err(error.into_error());
            }
        };
        let Some(row) = rows.first() else { return Ok(()) };
        if row.get(1) {
            return Err(StoreError::Unavailable("PostgreSQL is read-only".to_owned()));
        }
        self.learn_time(row.get(0));
        Ok(())
    }

    /// The test clock's time to pass to a statement; `None` if it uses the database's.
    pub fn now_given(&self) -> Option<Millis> {
        self.time.as_ref().map(StoreTime::now)
    }

    pub fn wall_given(&self) -> Option<Millis> {
        self.time.as_ref().map(StoreTime::wall)
    }

    pub async fn now(&self) -> Result<Millis> {
        match self.now_given().or_else(|| self.clock.now()) {
            Some(now) => Ok(now),
            None => self.ask_time().await,
        }
    }

    pub async fn ask_time(&self) -> Result<Millis> {
        let rows = self.read("SELECT eddyline.wall_ms()", &[]).await.map_err(PgError::into_error)?;
        let asked = self.clock.learn(rows.first().map_or(0, |row| row.get(0)));
        Ok(self.now_given().unwrap_or(asked))
    }

    /// Records the time in a response of the database.
    pub fn learn_time(&self, at: Millis) {
        if self.time.is_none() {
            self.clock.learn(at);
        }
    }

    pub fn learn_format(&self, format: i64) {
        self.format.fetch_max(format, Ordering::Relaxed);
    }

    /// Refuses to go on if there may be bodies that are not known here: what is left out when they are read would be lost
    /// when they are written again.
    pub fn check_format(&self) -> Result<()> {
        let (format, known) = (self.format.load(Ordering::Relaxed), schema::FORMAT);
        if format <= i64::from(known) {
            return Ok(());
        }
        Err(StoreError::Unavailable(format!(
            "schema {} has rows of format {format}, and this Eddyline knows formats up to {known}: replace it by the newer \
             Eddyline that the other instances are",
            self.schema
        )))
    }

    /// The ranks from which a claim has to look at a queue (by its escaped name), by class.
    pub fn low_marks(&self, ns: &Namespace, queue: &str) -> Vec<(i64, Millis)> {
        // Marks trail behind by a time of the database's clock; one that tests set may jump.
        if self.time.is_some() { Vec::new() } else { self.low_marks.of(ns, queue) }
    }

    pub fn learn_low_mark(&self, ns: &Namespace, queue: String, class: i64, rank: Millis) {
        self.low_marks.learn(ns, queue, class, rank);
    }

    pub fn forget_low_marks(&self, ns: &Namespace, queue: &str) {
        self.low_marks.forget(ns, queue);
    }

    /// Whether a task class may not be stored yet.
    pub fn is_new_class(&self, class: &(String, String, i64)) -> bool {
        !self.classes.lock().unwrap_or_else(PoisonError::into_inner).contains(class)
    }

    /// Remembers task classes that were committed.
    pub fn know_classes(&self, classes: impl IntoIterator<Item = (String, String, i64)>) {
        let mut known = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MOST_CLASSES {
            known.clear();
        }
        known.extend(classes);
    }
}

/// Limits the time of an operation. After a timeout the statement may still be running, so the connection must be
/// discarded.
pub(super) async fn in_time<T>(limit: Duration, work: impl Future<Output = PgResult<T>>) -> PgResult<T> {
    timeout(limit, work).await.unwrap_or(Err(PgError::Silent))
}

fn types(params: &[Param<'_>]) -> Vec<Type> {
    params.iter().map(|(_, of)| of.clone()).collect()
}

/// Waits before a retry: exponential back-off with jitter.
pub(super) async fn pause(tries: u32) {
    let most = 1_u64 << tries.min(7);
    let jitter = u64::from(uuid::Uuid::new_v4().as_bytes()[0]) % most;
    tokio::time::sleep(Duration::from_millis(most + jitter)).await;
}

fn pool(settings: &Settings, connector: &Connector) -> Result<Pool<Connector>> {
    let pool = Pool::builder(connector.clone())
        .max_size(settings.pool_size)
        .runtime(Runtime::Tokio1)
        .wait_timeout(Some(POOL_TIMEOUT))
        .create_timeout(Some(POOL_TIMEOUT));
    pool.build().map_err(|error| StoreError::Unavailable(format!("the connection pool can't be created: {error}")))
}
