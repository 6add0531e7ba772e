//! The writer. Its thread takes all waiting requests and makes them durable with one sync; meanwhile the next group
//! gathers. A small request that finds the writer idle is executed on the caller's thread ([`WriterHandle::at_once`]):
//! waking a thread and being woken by it takes longer than the commit itself. Callers get a response only after the
//! group is durable.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use eddyline_machine::Millis;
use rusqlite::Connection;
use tokio::sync::{mpsc, oneshot};

use super::checkpoint::{self, Mode};
use super::encode::Encoded;
use super::group::Group;
use super::options::call;
use super::restore::SERVED_MS;
use super::shared::Shared;
use super::sqlite_error::{Severity, SqliteError, SqliteResult};
use super::stats::count;
use super::touched::Touched;
use super::watch::{For, Watch};
use super::writer_cache::WriterCache;
use crate::Written;
use crate::claim::ClaimRequest;
use crate::error::{Result, StoreError};
use crate::query::Trim;

/// The capacity of the request queue; further callers wait for room.
pub(super) const WAITING: usize = 4_096;
/// The most groups whose callers are still being woken.
pub(super) const UNANSWERED: usize = 64;
/// The most requests and bytes in a group.
const GROUP_REQUESTS: usize = 512;
const GROUP_BYTES: usize = 8 << 20;
/// The writer itself wakes up to this many callers after a commit; more are woken by another thread.
const ANSWERED_HERE: usize = 4;
/// How often `served_at` is written along with a group, where it costs almost nothing.
const SERVED_WITH_GROUP_MS: Millis = 1_000;
/// Larger requests are not executed on the caller's thread: that blocks a runtime thread.
const SMALL_COMMANDS: usize = 2;
const SMALL_CLAIMS: usize = 4;
const SMALL_BYTES: usize = 64 << 10;
/// The writer checks the files before it writes, if the last check is longer ago than this.
const FILES_LOOK: Duration = Duration::from_millis(100);
/// How long the writer waits for readers to release the log before it gives up restarting it.
const RESTART_WAIT: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) enum Request {
    /// The commands are shared with the caller, who frees them: that keeps the work off the writer.
    Commit {
        commands: Arc<[Encoded]>,
        claims: Vec<ClaimRequest>,
        answer: oneshot::Sender<Result<Written>>,
    },
    Trim {
        what: Trim,
        answer: oneshot::Sender<Result<bool>>,
    },
    /// Writes something small, to find out whether writes succeed.
    Probe {
        answer: oneshot::Sender<Result<()>>,
    },
    /// Writes `served_at`.
    Serving,
}

/// Durable requests with their replies. Waking the callers takes a good part of the time of a group, so another thread
/// does it while the next group is written.
pub(super) type Durable = Vec<(Request, WriterReply)>;

pub(super) fn answer(durable: Receiver<Durable>) {
    for (request, answer) in durable.into_iter().flatten() {
        request.answer(answer);
    }
}

#[derive(Debug)]
pub(super) enum WriterReply {
    Written(Written),
    More(bool),
    Nothing,
}

#[derive(Debug)]
pub(super) struct Writer {
    conn: Connection,
    cache: WriterCache,
    shared: Arc<Shared>,
    answers: SyncSender<Durable>,
    /// When the files were last checked.
    looked_at_files: Instant,
}

/// Gives the writer to one thread at a time: its own, or a caller's.
#[derive(Debug)]
pub(super) struct WriterHandle {
    writer: Mutex<Writer>,
    /// Requests sent to the thread and not executed yet.
    waiting: AtomicUsize,
    watch: Arc<Watch>,
}

impl WriterHandle {
    pub fn new(writer: Writer, watch: Arc<Watch>) -> WriterHandle {
        WriterHandle { writer: Mutex::new(writer), waiting: AtomicUsize::new(0), watch }
    }

    /// Executes a small request on this thread if the writer is idle; otherwise returns the request.
    pub fn at_once(&self, request: Request) -> Option<Request> {
        if self.waiting.load(Ordering::Relaxed) > 0 || !request.is_small() {
            return Some(request);
        }
        let Ok(mut writer) = self.writer.try_lock() else { return Some(request) };
        if writer.shared.log_is_long.load(Ordering::Relaxed) {
            return Some(request);
        }
        let Some(_waiting) = self.watch.wait(For::Write) else { return Some(request) };
        // After a panic the store is closed, and the caller gets that error, as on the writer's own thread.
        let _ = catch_unwind(AssertUnwindSafe(|| writer.serve(vec![request])));
        None
    }

    /// Announces a request that will be sent to the thread.
    pub fn expect(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }

    /// Runs until the last sender is dropped and all requests are done.
    pub fn run(&self, mut requests: mpsc::Receiver<Request>) {
        let mut waiting = Vec::with_capacity(GROUP_REQUESTS);
        loop {
            if waiting.is_empty() && requests.blocking_recv_many(&mut waiting, GROUP_REQUESTS) == 0 {
                break;
            }
            let group: Vec<Request> = waiting.drain(..group_end(&waiting)).collect();
            let count = group.iter().filter(|request| !matches!(request, Request::Serving)).count();
            let mut writer = self.writer();
            writer.serve(group);
            if writer.shared.log_is_long.swap(false, Ordering::Relaxed) {
                writer.restart_log();
            }
            drop(writer);
            self.waiting.fetch_sub(count, Ordering::Relaxed);
        }
        self.writer().close();
    }

    fn writer(&self) -> MutexGuard<'_, Writer> {
        self.writer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Writer {
    pub fn new(conn: Connection, cache: WriterCache, shared: Arc<Shared>, answers: SyncSender<Durable>) -> Writer {
        Writer { conn, cache, shared, answers, looked_at_files: Instant::now() }
    }

    fn serve(&mut self, group: Vec<Request>) {
        let _unexpected = Unexpected(self.shared.clone());
        if self.looked_at_files.elapsed() > FILES_LOOK {
            self.shared.look_at_files();
            self.looked_at_files = Instant::now();
        }
        if let Err(closed) = self.shared.check_files() {
            return refuse(group, &closed);
        }
        match self.carry_out(&group) {
            // For few callers, waking another thread would cost more than it saves.
            Ok(answers) if group.len() <= ANSWERED_HERE => {
                group.into_iter().zip(answers).for_each(|(request, answer)| request.answer(answer));
            }
            Ok(answers) => {
                let durable = group.into_iter().zip(answers).collect();
                // The receiving thread outlives this one.
                let _ = self.answers.send(durable);
            }
            Err(failed) => {
                let (error, touched) = *failed;
                self.recover(group, error, touched);
            }
        }
    }

    /// Executes the group in one transaction, if there is anything to write.
    fn carry_out(
        &mut self,
        requests: &[Request],
    ) -> std::result::Result<Vec<WriterReply>, Box<(SqliteError, Touched)>> {
        let shared = &*self.shared;
        count(&shared.counters.requests, requests.len());
        count(&shared.counters.groups, 1);
        let mut group = Group::new(&self.conn, &mut self.cache, shared);
        let answers = match write(&mut group, requests) {
            Ok(answers) => answers,
            Err(error) => return Err(Box::new((error, group.touched))),
        };
        if group.documents_moved {
            shared.documents_changed.fetch_add(1, Ordering::Release);
        }
        group.renew_leases();
        group.release(&mut shared.tasks().holds);
        shared.hints.tell(group.take_changes());
        Ok(answers)
    }

    /// Handles a group of which nothing was written: undoes its changes in memory, or closes the store if the disk can
    /// no longer be trusted.
    fn recover(&mut self, group: Vec<Request>, error: SqliteError, touched: Touched) {
        count(&self.shared.counters.rollbacks, 1);
        self.shared.refused.store(true, Ordering::Relaxed);
        let severity = error.severity();
        let again = match severity {
            Severity::Fatal => Err(error),
            Severity::Full | Severity::Locked | Severity::Passing => self.take_back(touched).map(|()| error),
        };
        let error = match again {
            Ok(error) => error,
            Err(fatal) => {
                // No rollback: do not touch that disk again.
                self.shared.disk_failed(&fatal.into_error());
                let closed = self.shared.check().err().unwrap_or(StoreError::Unknown);
                return refuse(group, &closed);
            }
        };
        if severity == Severity::Passing && group.len() > 1 {
            // One of the requests may be the cause: retry each alone, so that the others succeed.
            for request in group {
                self.serve(vec![request]);
            }
            return;
        }
        let error = error.into_error();
        tracing::warn!(%error, requests = group.len(), "a group was rolled back");
        refuse(group, &error);
    }

    fn take_back(&mut self, touched: Touched) -> SqliteResult<()> {
        if !self.conn.is_autocommit() {
            self.conn.execute_batch("ROLLBACK")?;
        }
        touched.take_back(&self.conn, &mut self.cache, &self.shared)
    }

    fn restart_log(&mut self) {
        let restarted = self.conn.busy_timeout(RESTART_WAIT).map_err(SqliteError::from);
        let restarted = restarted.and_then(|()| checkpoint::run(&self.conn, Mode::Restart));
        let settled = self.conn.busy_timeout(super::files::BUSY);
        match restarted.and_then(|done| Ok(settled.map(|()| done)?)) {
            Ok(done) if !done.busy => count(&self.shared.counters.restarts, 1),
            Ok(_) => tracing::debug!("readers keep the log from being restarted; it keeps growing"),
            Err(error) => checkpoint::failed(&self.shared, error),
        }
    }

    /// Writes `served_at` and checkpoints the whole log into the database file.
    fn close(&mut self) {
        self.shared.look_at_files();
        if self.shared.check_files().is_err() {
            return;
        }
        let mut group = Group::new(&self.conn, &mut self.cache, &self.shared);
        let noted = group.set_meta("served_at", group.now).and_then(|()| Ok(self.conn.execute_batch("COMMIT")?));
        if let Err(error) = noted.and_then(|()| checkpoint::run(&self.conn, Mode::Truncate)) {
            tracing::warn!(error = %error.into_error(), "the log could not be truncated on close");
        }
    }
}

/// Executes the requests and commits them.
fn write(group: &mut Group<'_>, requests: &[Request]) -> SqliteResult<Vec<WriterReply>> {
    let mut answers = Vec::with_capacity(requests.len());
    for request in requests {
        answers.push(match request {
            Request::Commit { commands, claims, .. } => WriterReply::Written(group.commit(commands, claims)?),
            Request::Trim { what, .. } => WriterReply::More(group.trim(what)?),
            Request::Probe { .. } => {
                // A different number each time: SQLite would not write an unchanged page.
                let groups = group.shared.counters.groups.load(Ordering::Relaxed);
                group.set_meta("probe", group.now + groups as i64)?;
                WriterReply::Nothing
            }
            Request::Serving => WriterReply::Nothing,
        });
    }
    group.finish()?;
    let shared = group.shared;
    let served_at = shared.served_at.load(Ordering::Relaxed);
    let overdue = if group.begun { SERVED_WITH_GROUP_MS } else { SERVED_MS };
    let asked = group.begun || requests.iter().any(|request| matches!(request, Request::Serving));
    let (now, note) = (group.now, asked && group.now - served_at >= overdue);
    if note {
        group.set_meta("served_at", now)?;
    }
    if group.begun {
        call(&shared.options.before_commit);
        group.conn.prepare_cached("COMMIT")?.execute([])?;
        call(&shared.options.after_commit);
        count(&shared.counters.commits, 1);
        shared.refused.store(false, Ordering::Relaxed);
    }
    if note {
        shared.served_at.store(now, Ordering::Relaxed);
    }
    Ok(answers)
}

/// A writer that panics leaves memory ahead of the disk: the store fails instead of hanging.
struct Unexpected(Arc<Shared>);

impl Drop for Unexpected {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail("the writer panicked");
        }
    }
}

impl Request {
    fn answer(self, answer: WriterReply) {
        match (self, answer) {
            (Request::Commit { answer, commands, .. }, WriterReply::Written(written)) => {
                drop(commands);
                let _ = answer.send(Ok(written));
            }
            (Request::Trim { answer, .. }, WriterReply::More(more)) => {
                let _ = answer.send(Ok(more));
            }
            (Request::Probe { answer }, WriterReply::Nothing) => {
                let _ = answer.send(Ok(()));
            }
            _ => {}
        }
    }

    fn is_small(&self) -> bool {
        match self {
            Request::Commit { commands, claims, .. } => {
                commands.len() <= SMALL_COMMANDS && claims.len() <= SMALL_CLAIMS && self.bytes() <= SMALL_BYTES
            }
            Request::Trim { .. } | Request::Probe { .. } | Request::Serving => false,
        }
    }

    fn bytes(&self) -> usize {
        match self {
            Request::Commit { commands, .. } => commands.iter().map(Encoded::bytes).sum(),
            Request::Trim { .. } | Request::Probe { .. } | Request::Serving => 0,
        }
    }
}

/// The number of requests in the next group; at least one.
fn group_end(waiting: &[Request]) -> usize {
    let mut bytes = 0;
    let within = waiting.iter().take_while(|request| {
        bytes += request.bytes();
        bytes <= GROUP_BYTES
    });
    within.count().max(1).min(waiting.len())
}

fn refuse(group: Vec<Request>, error: &StoreError) {
    for request in group {
        match request {
            Request::Commit { answer, .. } => {
                let _ = answer.send(Err(error.clone()));
            }
            Request::Trim { answer, .. } => {
                let _ = answer.send(Err(error.clone()));
            }
            Request::Probe { answer } => {
                let _ = answer.send(Err(error.clone()));
            }
            Request::Serving => {}
        }
    }
}
