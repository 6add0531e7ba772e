//! Copying the log back into the database, beside the writer.
//!
//! A passive checkpoint waits for nobody and stops nobody, so it runs while groups are committed. It can't make the log
//! start over while it is written to; that is left to the writer, between two groups, when the log has become long. Most
//! of it is copied back by then, so that takes little.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rusqlite::Connection;
use tokio::sync::mpsc::WeakSender;

use super::files;
use super::restore::SERVED_MS;
use super::shared::Shared;
use super::stats::count;
use super::trouble::{Gravity, Outcome, Trouble};
use super::writer::Request;

/// How often it is looked after the log.
const LOOK: Duration = Duration::from_millis(100);
/// It is looked at the files every so many times, if nobody writes.
const FILES_EVERY: u32 = 5;
/// How often it is copied back in a row, if there is much again.
const ROUNDS: usize = 4;
/// After a checkpoint or a note found no space, the next is tried so much later.
const RETRY: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy)]
pub(super) enum Mode {
    /// Only says how long the log is.
    Look,
    Passive,
    Restart,
    Truncate,
}

/// In frames: pages with their headers.
#[derive(Debug, Clone, Copy)]
pub(super) struct Done {
    /// It could not do all of it, since somebody reads or writes.
    pub busy: bool,
    pub log: i64,
    pub copied: i64,
}

pub(super) fn run(conn: &Connection, mode: Mode) -> Outcome<Done> {
    let sql = match mode {
        Mode::Look => "PRAGMA wal_checkpoint(NOOP)",
        Mode::Passive => "PRAGMA wal_checkpoint(PASSIVE)",
        Mode::Restart => "PRAGMA wal_checkpoint(RESTART)",
        Mode::Truncate => "PRAGMA wal_checkpoint(TRUNCATE)",
    };
    let row = |row: &rusqlite::Row<'_>| Ok(Done { busy: row.get(0)?, log: row.get(1)?, copied: row.get(2)? });
    Ok(conn.prepare_cached(sql)?.query_row([], row)?)
}

/// A checkpoint that finds no space is tried again later: the log still has everything. Anything else the disk says
/// means that it can't be trusted.
pub(super) fn failed(shared: &Shared, trouble: Trouble) {
    match trouble.gravity() {
        Gravity::Fatal => shared.disk_failed(&trouble.into_error()),
        Gravity::Full | Gravity::Locked | Gravity::Passing => {
            tracing::warn!(error = %trouble.into_error(), "the log could not be copied back yet");
        }
    }
}

/// The thread that looks after the log, and after the clock while nothing is written.
#[derive(Debug)]
pub(super) struct Keeper {
    conn: Connection,
    shared: Arc<Shared>,
    writer: WeakSender<Request>,
    page_bytes: u64,
}

/// Tells the keeper to end.
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

    /// Waits; true if it is time to end.
    fn wait(&self, time: Duration) -> bool {
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        let (ended, _) =
            self.woken.wait_timeout_while(ended, time, |ended| !*ended).unwrap_or_else(PoisonError::into_inner);
        *ended
    }
}

impl Keeper {
    pub fn new(conn: Connection, shared: Arc<Shared>, writer: WeakSender<Request>) -> Outcome<Keeper> {
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
            if let Err(trouble) = self.look() {
                failed(&self.shared, trouble);
                pause = RETRY;
                // It is still to be done, even if nothing is committed any more.
                seen = 0;
            }
        }
    }

    fn look(&self) -> Outcome<()> {
        let bytes = |frames: i64| frames.max(0) as u64 * self.page_bytes;
        let mut is_long = false;
        // Under load much is written while it copies. What is left when the log starts over is copied by the writer, and
        // everybody waits for that.
        for _ in 0..ROUNDS {
            let found = run(&self.conn, Mode::Look)?;
            if bytes(found.log - found.copied) < self.shared.options.checkpoint_bytes {
                break;
            }
            let done = run(&self.conn, Mode::Passive)?;
            count(&self.shared.counters.checkpoints, 1);
            let file = files::bytes(&files::log(&self.shared.dir));
            tracing::debug!(busy = done.busy, log = done.log, copied = done.copied, file, "copied the log back");
            is_long = bytes(done.log) > self.shared.options.restart_bytes;
        }
        if is_long {
            self.shared.log_is_long.store(true, Ordering::Relaxed);
        }
        Ok(())
    }

    /// While somebody has a task and nobody writes, it is noted every now and then that somebody serves. `noted`: when the
    /// writer was last asked to.
    fn note_service(&self, noted: &mut Option<Instant>) {
        let refused = self.shared.refused.load(Ordering::Relaxed);
        if refused && noted.is_some_and(|at| at.elapsed() < RETRY) {
            return;
        }
        let unnoted = self.shared.time.now() - self.shared.served_at.load(Ordering::Relaxed);
        if unnoted >= SERVED_MS
            && self.shared.tasks().lines.any_held()
            && let Some(writer) = self.writer.upgrade()
        {
            let _ = writer.try_send(Request::Serving);
            *noted = Some(Instant::now());
        }
    }
}
