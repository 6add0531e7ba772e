//! Connections, statements and time.

use std::borrow::Cow;
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, RecyclingMethod, Runtime};
use eddyline_machine::Millis;
use tokio::sync::Semaphore;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{NoTls, Row};

use super::PostgresOptions;
use super::clock::DatabaseClock;
use super::listen::{self, Hub, Listener};
use super::pg_error::{PgError, PgResult, describe};
use super::settings::Settings;
use super::{schema, tls};
use crate::clock::StoreTime;
use crate::error::{Result, StoreError};

/// How long a call waits for a free connection.
const POOL_TIMEOUT: Duration = Duration::from_secs(30);
/// How often something is tried that fails in passing: a deadlock, or a read on a connection that was cut.
pub(super) const TRIES: u32 = 8;
/// Classes of tasks that are known to be stored, at most.
const MOST_CLASSES: usize = 10_000;

/// A parameter of a statement with its type, so that none has to be looked up.
pub(super) type Param<'a> = (&'a (dyn ToSql + Sync), Type);

#[derive(Debug)]
pub(super) struct Database {
    pool: Pool,
    schema: String,
    prepare: bool,
    /// In place of the database's, in tests.
    time: Option<StoreTime>,
    clock: DatabaseClock,
    pub hub: Arc<Hub>,
    /// None behind a proxy.
    _listener: Option<Listener>,
    /// How many turns at runs this process may wait for or have at a time, each on a connection of its own.
    pub turns: Arc<Semaphore>,
    /// Classes of tasks that were stored: they need not be written again.
    classes: Mutex<HashSet<(String, String, i64)>>,
}

impl Database {
    pub async fn open(url: &str, options: PostgresOptions) -> Result<Database> {
        let settings = Settings::parse(url)?;
        let mut database = Database {
            pool: pool(&settings)?,
            schema: settings.schema.clone(),
            prepare: settings.prepare,
            time: None,
            clock: DatabaseClock::new(),
            hub: Arc::default(),
            _listener: None,
            turns: Arc::new(Semaphore::new((settings.pool_size / 4).max(1))),
            classes: Mutex::default(),
        };
        let place = settings.place();
        let failed = |error: PgError| match error.into_error() {
            StoreError::Unavailable(why) => StoreError::Unavailable(format!("PostgreSQL at {place}: {why}")),
            other => other,
        };
        let client = database.client().await.map_err(failed)?;
        schema::check_server(&client).await?;
        schema::migrate(&database, client, options.migrate).await?;
        if settings.prepare {
            database._listener = Some(listen::start(&settings, tls::connector(&settings)?, &database.hub).await);
        }
        if let Some(clock) = options.clock {
            let last = "SELECT coalesce(max(changed_at), 0) FROM eddyline.runs";
            let rows = database.read(last, &[]).await.map_err(PgError::into_error)?;
            let last: Millis = rows.first().map_or(0, |row| row.get(0));
            database.time = Some(StoreTime::open(clock, last));
        }
        let looked = "INSERT INTO eddyline.meta (name, value) \
                      VALUES ('looked_at', coalesce($1, eddyline.wall_ms())) ON CONFLICT DO NOTHING";
        database.read(looked, &[(&database.now_given(), Type::INT8)]).await.map_err(PgError::into_error)?;
        Ok(database)
    }

    pub async fn client(&self) -> PgResult<Object> {
        self.pool.get().await.map_err(|error| {
            PgError::Connect(match error {
                deadpool_postgres::PoolError::Backend(error) => describe(&error),
                deadpool_postgres::PoolError::Timeout(_) => "no connection was free in time".to_owned(),
                other => other.to_string(),
            })
        })
    }

    /// A statement, in the schema that is used.
    pub fn sql<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self.schema == "eddyline" {
            true => Cow::Borrowed(text),
            false => Cow::Owned(text.replace("eddyline.", &format!("{}.", self.schema))),
        }
    }

    pub fn schema(&self) -> &str {
        &self.schema
    }

    pub async fn query(&self, client: &Object, text: &str, params: &[Param<'_>]) -> PgResult<Vec<Row>> {
        let sql = self.sql(text);
        if !self.prepare {
            return Ok(client.query_typed(&sql, params).await?);
        }
        let types: Vec<Type> = params.iter().map(|(_, of)| of.clone()).collect();
        let statement = client.prepare_typed_cached(&sql, &types).await?;
        let values: Vec<&(dyn ToSql + Sync)> = params.iter().map(|(value, _)| *value).collect();
        Ok(client.query(&statement, &values).await?)
    }

    /// Makes sure that a statement is prepared, so that it can be sent behind others without waiting.
    pub async fn prepare(&self, client: &Object, text: &str, params: &[Param<'_>]) -> PgResult<()> {
        if self.prepare {
            let types: Vec<Type> = params.iter().map(|(_, of)| of.clone()).collect();
            client.prepare_typed_cached(&self.sql(text), &types).await?;
        }
        Ok(())
    }

    /// One statement that can be made again: a read, or a write that changes nothing the second time.
    pub async fn read(&self, text: &str, params: &[Param<'_>]) -> PgResult<Vec<Row>> {
        let mut tries = 0;
        loop {
            tries += 1;
            let client = self.client().await?;
            let read = self.query(&client, text, params).await;
            if read.as_ref().is_err_and(PgError::is_cut) {
                drop(Object::take(client));
            }
            match read {
                Err(error) if tries < TRIES && (error.is_passing() || error.is_cut()) => pause(tries).await,
                read => return read,
            }
        }
    }

    /// The time that a statement is given; none if it is to take the database's.
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

    /// An answer of the database carried its time.
    pub fn learn_time(&self, at: Millis) {
        if self.time.is_none() {
            self.clock.learn(at);
        }
    }

    /// Whether a class of tasks may not be stored yet.
    pub fn is_new_class(&self, class: &(String, String, i64)) -> bool {
        !self.classes.lock().unwrap_or_else(PoisonError::into_inner).contains(class)
    }

    /// Classes that were committed.
    pub fn know_classes(&self, classes: impl IntoIterator<Item = (String, String, i64)>) {
        let mut known = self.classes.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MOST_CLASSES {
            known.clear();
        }
        known.extend(classes);
    }
}

/// Before something is tried again: a little longer each time, and never the same for two.
pub(super) async fn pause(tries: u32) {
    let most = 1_u64 << tries.min(7);
    let jitter = u64::from(uuid::Uuid::new_v4().as_bytes()[0]) % most;
    tokio::time::sleep(Duration::from_millis(most + jitter)).await;
}

fn pool(settings: &Settings) -> Result<Pool> {
    let config = ManagerConfig { recycling_method: RecyclingMethod::Fast };
    let manager = match tls::connector(settings)? {
        Some(tls) => Manager::from_config(settings.config.clone(), tls, config),
        None => Manager::from_config(settings.config.clone(), NoTls, config),
    };
    let pool = Pool::builder(manager)
        .max_size(settings.pool_size)
        .runtime(Runtime::Tokio1)
        .wait_timeout(Some(POOL_TIMEOUT))
        .create_timeout(Some(POOL_TIMEOUT));
    pool.build().map_err(|error| StoreError::Unavailable(format!("the pool of connections: {error}")))
}
