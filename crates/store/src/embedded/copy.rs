//! Copies from and to an embedded store, while no process has it open.
//!
//! A copy is written to a database file with another name, which is renamed when it is complete. Until then the
//! directory has no store, and the file prevents that an empty one is created.

mod fill;
mod read;

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use async_trait::async_trait;
use eddyline_machine::Millis;

use super::files;
use super::lock::Lock;
use super::opening;
use super::options::Options;
use super::restore::meta;
use super::schema;
use super::sqlite_error::{SqliteError, SqliteResult};
use crate::clock::{Clock, SystemClock};
use crate::copy::{CopySource, CopyTarget, Numbers, Origin, Row, Rows};
use crate::error::{Result, StoreError};
use fill::Filler;

/// The highest position of a copied run in feeds; 0 if it is the position in lists.
pub(super) const FED_RUN: &str = "fed_run";

/// An embedded store to copy from. It is locked meanwhile.
#[derive(Debug)]
pub struct EmbeddedSource {
    database: PathBuf,
    _lock: Lock,
}

impl EmbeddedSource {
    pub fn open(dir: &Path) -> Result<EmbeddedSource> {
        files::refuse_unfinished(dir)?;
        let database = files::database(dir);
        if files::bytes(&database) == 0 && files::bytes(&files::log(dir)) == 0 {
            return Err(StoreError::Unavailable(format!("there is no store in {}", dir.display())));
        }
        let lock = Lock::take(dir, SystemClock::default().wall())?;
        files::check(dir)?;
        // Updates tables of an earlier version, as opening the store would.
        let mut conn = files::open_writer(dir, &Options::default()).map_err(|error| damaged(&database, error))?;
        schema::migrate(&mut conn)?;
        Ok(EmbeddedSource { database, _lock: lock })
    }
}

#[async_trait]
impl CopySource for EmbeddedSource {
    async fn origin(&self) -> Result<Origin> {
        read_origin(self.database.clone()).await
    }

    fn rows(&self) -> Rows {
        rows_of(self.database.clone())
    }

    async fn check_unserved(&self) -> Result<()> {
        // The lock kept other processes out.
        Ok(())
    }
}

/// A directory to copy into.
#[derive(Debug)]
pub struct EmbeddedTarget {
    dir: PathBuf,
    _lock: Lock,
    /// A connection belongs to one thread at a time.
    filler: Mutex<Option<Filler>>,
}

impl EmbeddedTarget {
    pub fn open(dir: &Path) -> Result<EmbeddedTarget> {
        files::make_directory(dir)?;
        let lock = Lock::take(dir, SystemClock::default().wall())?;
        Ok(EmbeddedTarget { dir: dir.to_owned(), _lock: lock, filler: Mutex::default() })
    }

    /// Runs blocking work on the database that is filled.
    async fn fill(&mut self, work: impl FnOnce(&mut Filler) -> SqliteResult<()> + Send + 'static) -> Result<()> {
        let not_begun = || StoreError::Unavailable("the copy was not started, or has failed".to_owned());
        let mut filler = self.filler().take().ok_or_else(not_begun)?;
        let worked = tokio::task::spawn_blocking(move || work(&mut filler).map(|()| filler)).await;
        let worked =
            worked.map_err(|failed| StoreError::Unavailable(format!("the copying thread failed: {failed}")))?;
        *self.filler() = Some(worked.map_err(|error| damaged(&files::copying(&self.dir), error))?);
        Ok(())
    }

    fn filler(&mut self) -> &mut Option<Filler> {
        self.filler.get_mut().unwrap_or_else(PoisonError::into_inner)
    }

    fn failed(&self, error: io::Error) -> StoreError {
        StoreError::Unavailable(format!("{} can't be written: {error}", self.dir.display()))
    }
}

#[async_trait]
impl CopySource for EmbeddedTarget {
    async fn origin(&self) -> Result<Origin> {
        read_origin(files::copying(&self.dir)).await
    }

    fn rows(&self) -> Rows {
        rows_of(files::copying(&self.dir))
    }

    async fn check_unserved(&self) -> Result<()> {
        Ok(())
    }
}

#[async_trait]
impl CopyTarget for EmbeddedTarget {
    async fn begin(&mut self, restart: bool) -> Result<()> {
        let (database, copying) = (files::database(&self.dir), files::copying(&self.dir));
        if files::bytes(&database) > 0 || files::bytes(&files::log(&self.dir)) > 0 {
            return Err(StoreError::Unavailable(format!(
                "{} already has a store ({}): copy into a new directory",
                self.dir.display(),
                contents(&database)
            )));
        }
        if copying.exists() {
            if !restart {
                return Err(StoreError::Unavailable(format!(
                    "{} has an unfinished copy: use --restart to delete it and start over",
                    self.dir.display()
                )));
            }
            fs::remove_file(&copying).map_err(|error| self.failed(error))?;
        }
        let opened = files::open_filler(&copying).map_err(|error| damaged(&copying, error))?;
        files::sync_directory(&self.dir).map_err(|error| self.failed(error))?;
        *self.filler() = Some(Filler::begin(opened)?);
        Ok(())
    }

    async fn time(&self) -> Result<Option<Millis>> {
        // It continues from the source's latest time.
        Ok(None)
    }

    async fn write(&mut self, rows: Vec<Row>) -> Result<()> {
        self.fill(move |filler| filler.write(&rows)).await
    }

    async fn finish(&mut self, origin: &Origin) -> Result<()> {
        let origin = origin.clone();
        self.fill(move |filler| filler.finish(&origin)).await
    }

    async fn release(&mut self, _: &Origin) -> Result<()> {
        *self.filler() = None;
        let (copying, database) = (files::copying(&self.dir), files::database(&self.dir));
        File::open(&copying).and_then(|file| file.sync_all()).map_err(|error| self.failed(error))?;
        fs::rename(&copying, &database).map_err(|error| self.failed(error))?;
        files::sync_directory(&self.dir).map_err(|error| self.failed(error))
    }
}

/// What a database contains, in a few words.
fn contents(database: &Path) -> String {
    let count = || -> SqliteResult<(i64, i64)> {
        let conn = files::open_reader_of(database)?;
        let count = |sql: &str| conn.query_row(sql, [], |row| row.get(0));
        Ok((count("SELECT count(*) FROM runs")?, count("SELECT count(*) FROM documents")?))
    };
    match count() {
        Ok((runs, documents)) => format!("with {runs} runs and {documents} documents"),
        Err(_) => "which can't be read".to_owned(),
    }
}

fn rows_of(database: PathBuf) -> Rows {
    Rows::read_blocking(move |out| {
        let read = files::open_reader_of(&database).and_then(|conn| read::all(&conn, out));
        read.map_err(|error| damaged(&database, error))
    })
}

async fn read_origin(database: PathBuf) -> Result<Origin> {
    let read = move || {
        files::open_reader_of(&database).and_then(|conn| origin(&conn)).map_err(|error| damaged(&database, error))
    };
    let read = tokio::task::spawn_blocking(read).await;
    read.map_err(|failed| StoreError::Unavailable(format!("the reading thread failed: {failed}")))?
}

fn origin(conn: &rusqlite::Connection) -> SqliteResult<Origin> {
    let number = |sql: &str| -> SqliteResult<u64> { Ok(conn.query_row(sql, [], |row| row.get::<_, i64>(0))? as u64) };
    let run = number("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'runs'")?;
    let latest = opening::latest(conn)?;
    Ok(Origin {
        run_count: number("SELECT count(*) FROM runs")?,
        latest,
        served_at: latest,
        deletions_from: meta(conn, opening::DELETIONS_FROM)?,
        last: Numbers {
            run,
            fed_run: run.max(meta(conn, FED_RUN)? as u64),
            event: number("SELECT coalesce(max(seq), 0) FROM sqlite_sequence WHERE name = 'events'")?,
            gate: meta(conn, "gate")? as u64,
            revision: meta(conn, "revision")? as u64,
        },
    })
}

/// Adds the path to an error.
fn damaged(database: &Path, error: SqliteError) -> StoreError {
    match error.into_error() {
        StoreError::Corrupt(what) => StoreError::Corrupt(format!("{}: {what}", database.display())),
        StoreError::Unavailable(what) => StoreError::Unavailable(format!("{}: {what}", database.display())),
        StoreError::Full(what) => StoreError::Full(format!("{}: {what}", database.display())),
        other => other,
    }
}
