//! Checkpoints: copying the log back into the database, concurrently with the writer.
//!
//! A passive checkpoint neither waits nor blocks, so it runs while groups are committed. It cannot restart the log
//! while it is written to; the writer does that between two groups, when the log has become long. Most of the log is
//! copied by then, so the restart is quick.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tokio::sync::mpsc::WeakSender;

use super::files;
use super::restore::SERVED_MS;
use super::shared::Shared;
use super::sqlite_error::{Severity, SqliteError, SqliteResult};
use super::stats::count;
use super::writer::Request;

/// How often the log is checked.
const LOOK: Duration = Duration::from_millis(100);
/// The files are checked every `FILES_EVERY` rounds.
const FILES_EVERY: u32 = 5;
/// The most checkpoints in a row while the log keeps growing.
const ROUNDS: usize = 4;
/// The delay before the next try after a checkpoint or a note failed for lack of space.
const RETRY: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy)]
pub(super) enum Mode {
    /// Only measures the log.
    Look,
    Passive,
    Restart,
    Truncate,
}

/// Lengths in frames: pages with their headers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Done {
    /// A reader or writer kept it from finishing.
    pub busy: bool,
    pub log: i64,
    pub copied: i64,
}

pub(super) fn run(conn: &Connection, mode: Mode) -> SqliteResult<Done> {
    let sql = match mode {
        Mode::Look => "PRAGMA wal_checkpoint(NOOP)",
        Mode::Passive => "PRAGMA wal_checkpoint(PASSIVE)",
        Mode::Restart => "PRAGMA wal_checkpoint(RESTART)",
        Mode::Truncate => "PRAGMA wal_checkpoint(TRUNCATE)",
    };
    let row = |row: &rusqlite::Row<'_>| Ok(Done { busy: row.get(0)?, log: row.get(1)?, copied: row.get(2)? });
    Ok(conn.prepare_cached(sql)?.query_row([], row)?)
}

/// A checkpoint that fails for lack of space or a lock is retried later: the log still has everything. After any other
/// disk error the disk cannot be trusted.
pub(super) fn failed(shared: &Shared, error: SqliteError) {
    match error.severity() {
        Severity::Fatal => shared.disk_failed(&error.into_error()),
        Severity::Full | Severity::Locked | Severity::Passing => {
            tracing::warn!(error = %error.into_error(), "the log checkpoint failed; it will be retried");
        }
    }
}

/// The background thread: checkpoints the log, checks the files, adjusts store time and notes that the store is served.
#[derive(Debug)]
pub(super) struct Keeper {
    conn: Connection,
    shared: Arc<Shared>,
    writer: WeakSender<Request>,
    page_bytes: u64,
}

/// Stops the keeper.
#[derive(Debug, Default)]
pub(super) struct Stop {
    ended: Mutex<bool>,
    woken: Condvar,
}

impl Stop {
    pub fn ask(&self) {
        *self.ended.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.woken.notify_all();
    }

    /// Waits; true if the keeper should stop.
    fn wait(&self, time: Duration) -> bool {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let (ended, _) =
            self.woken.wait_timeout_while(ended, time, |ended| !*ended).unwrap_or_else(PoisonError::into_inner);
        *ended
    }
}

impl Keeper {
    pub fn new(conn: Connection, shared: Arc<Shared>, writer: WeakSender<Request>) -> SqliteResult<Keeper> {
        let page_bytes: i64 = conn.pragma_query_value(None, "page_size", |row| row.get(0))?;
        Ok(Keeper { conn, shared, writer, page_bytes: page_bytes as u64 })
    }

    pub fn run(self, stop: &Stop) {
        let (mut seen, mut pause, mut looks, mut noted) = (0, LOOK, 0_u32, None);
        while !stop.wait(std::mem::replace(&mut pause, LOOK)) {
            if self.shared.check().is_err() {
                return;
            }
            looks = looks.wrapping_add(1);
            if looks % FILES_EVERY == 0 {
                self.shared.look_at_files();
            }
            self.shared.time.catch_up();
            self.note_service(&mut noted);
            let commits = self.shared.counters.commits.load(Ordering::Relaxed);
            if commits == std::mem::replace(&mut seen, commits) {
                continue;
            }
            if let Err(error) = self.look() {
                failed(&self.shared, error);
                pause = RETRY;
                // Retry even if there are no further commits.
                seen = 0;
            }
        }
    }

    fn look(&self) -> SqliteResult<()> {
        let bytes = |frames: i64| frames.max(0) as u64 * self.page_bytes;
        let mut is_long = false;
        // Under load the log grows during a checkpoint. The writer must copy what is left before it restarts the log,
        // and all callers wait for that.
        for _ in 0..ROUNDS {
            let found = run(&self.conn, Mode::Look)?;
            if bytes(found.log - found.copied) < self.shared.options.checkpoint_bytes {
                break;
            }
            let done = run(&self.conn, Mode::Passive)?;
            count(&self.shared.counters.checkpoints, 1);
            let file = files::bytes(&files::log(&self.shared.dir));
            tracing::debug!(busy = done.busy, log = done.log, copied = done.copied, file, "checkpointed the log");
            is_long = bytes(done.log) > self.shared.options.restart_bytes;
        }
        if is_long {
            self.shared.log_is_long.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// While tasks are claimed and nothing is written, has the writer record periodically that the store is served.
    /// `noted`: when the writer was last asked to.
    fn note_service(&self, noted: &mut Option<Instant>) {
        let refused = self.shared.refused.load(Ordering::Relaxed);
        if refused && noted.is_some_and(|at| at.elapsed() < RETRY) {
            return;
        }
        let unnoted = self.shared.time.now() - self.shared.served_at.load(Ordering::Relaxed);
        if unnoted >= SERVED_MS
            && self.shared.tasks().queues.any_held()
            && let Some(writer) = self.writer.upgrade()
        {
            let _ = writer.try_send(Request::Serving);
            *noted = Some(Instant::now());
        }
    }
}
