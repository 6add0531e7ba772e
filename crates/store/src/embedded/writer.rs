//! The one that writes. A thread takes everything that is waiting and makes it durable with one sync; while it does, the
//! next group gathers. A small request that finds nobody waiting is carried out where it is made ([`Desk::at_once`]): to
//! wake a thread and be woken by it takes longer than the commit itself. Nothing is answered before it is durable.

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
use super::kept::Kept;
use super::options::call;
use super::restore::SERVED_MS;
use super::shared::Shared;
use super::stats::count;
use super::touched::Touched;
use super::trouble::{Gravity, Outcome, Trouble};
use super::watch::{For, Watch};
use crate::Written;
use crate::claim::ClaimRequest;
use crate::error::{Result, StoreError};
use crate::query::Trim;

/// Requests that may wait for the writer; further callers wait for room.
pub(super) const WAITING: usize = 4_096;
/// Groups whose callers are still being woken.
pub(super) const UNANSWERED: usize = 64;
/// A group is closed when it has so many requests, or so many bytes.
const GROUP_REQUESTS: usize = 512;
const GROUP_BYTES: usize = 8 << 20;
/// Callers that the writer itself wakes after a commit; where there are more, another thread does, and it goes on.
const ANSWERED_HERE: usize = 4;
/// While groups are written anyway, it costs next to nothing to note that somebody serves.
const SERVED_WITH_GROUP_MS: Millis = 1_000;
/// What is carried out at once has no more commands, claims and bytes than this: it blocks a thread of the runtime.
const SMALL_COMMANDS: usize = 2;
const SMALL_CLAIMS: usize = 4;
const SMALL_BYTES: usize = 64 << 10;
/// A writer looks at the files before it writes, if the last look is longer ago than this.
const FILES_LOOK: Duration = Duration::from_millis(100);
/// How long the writer waits for readers to let go of the log before it goes on without.
const RESTART_WAIT: Duration = Duration::from_millis(20);

#[derive(Debug)]
pub(super) enum Request {
    /// The commands are shared with the caller, who frees them: that is no work for this thread.
    Commit {
        commands: Arc<[Encoded]>,
        claims: Vec<ClaimRequest>,
        answer: oneshot::Sender<Result<Written>>,
    },
    Trim {
        what: Trim,
        answer: oneshot::Sender<Result<bool>>,
    },
    /// Writes something small, to tell whether anything can be written.
    Probe {
        answer: oneshot::Sender<Result<()>>,
    },
    /// It is time to note that somebody serves.
    Serving,
}

/// What became of requests that are durable. Waking the callers takes a good part of the time of a group, so another
/// thread does it while the next group is written.
pub(super) type Durable = Vec<(Request, Answer)>;

pub(super) fn answer(durable: Receiver<Durable>) {
    for (request, answer) in durable.into_iter().flatten() {
        request.answer(answer);
    }
}

#[derive(Debug)]
pub(super) enum Answer {
    Written(Written),
    More(bool),
    Nothing,
}

#[derive(Debug)]
pub(super) struct Writer {
    conn: Connection,
    kept: Kept,
    shared: Arc<Shared>,
    answers: SyncSender<Durable>,
    /// When it was last looked at the files.
    looked_at_files: Instant,
}

/// Where the writer sits. Whoever holds it writes.
#[derive(Debug)]
pub(super) struct Desk {
    writer: Mutex<Writer>,
    /// Requests that were sent to the thread and are not carried out.
    waiting: AtomicUsize,
    watch: Arc<Watch>,
}

impl Desk {
    pub fn new(writer: Writer, watch: Arc<Watch>) -> Desk {
        Desk { writer: Mutex::new(writer), waiting: AtomicUsize::new(0), watch }
    }

    /// Carries a small request out on this thread, if nobody else writes or waits to. Otherwise it comes back.
    pub fn at_once(&self, request: Request) -> Option<Request> {
        if self.waiting.load(Ordering::Relaxed) > 0 || !request.is_small() {
            return Some(request);
        }
        let Ok(mut writer) = self.writer.try_lock() else { return Some(request) };
        if writer.shared.log_is_long.load(Ordering::Relaxed) {
            return Some(request);
        }
        let Some(_waiting) = self.watch.wait(For::Write) else { return Some(request) };
        // Whoever asks is told by the store, which has closed by then, as on the writer's own thread.
        let _ = catch_unwind(AssertUnwindSafe(|| writer.serve(vec![request])));
        None
    }

    /// A request is on its way to the thread.
    pub fn expect(&self) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
    }

    /// Until the last sender is gone and everything that was sent is done.
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
    pub fn new(conn: Connection, kept: Kept, shared: Arc<Shared>, answers: SyncSender<Durable>) -> Writer {
        Writer { conn, kept, shared, answers, looked_at_files: Instant::now() }
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
            // A few are answered at once: to wake another thread for them would cost them more than it saves here.
            Ok(answers) if group.len() <= ANSWERED_HERE => {
                group.into_iter().zip(answers).for_each(|(request, answer)| request.answer(answer));
            }
            Ok(answers) => {
                let durable = group.into_iter().zip(answers).collect();
                // The thread is there for as long as this one.
                let _ = self.answers.send(durable);
            }
            Err(failed) => {
                let (trouble, touched) = *failed;
                self.recover(group, trouble, touched);
            }
        }
    }

    /// The whole group in one transaction, if there is anything to write.
    fn carry_out(&mut self, requests: &[Request]) -> std::result::Result<Vec<Answer>, Box<(Trouble, Touched)>> {
        let shared = &*self.shared;
        count(&shared.counters.requests, requests.len());
        count(&shared.counters.groups, 1);
        let mut group = Group::new(&self.conn, &mut self.kept, shared);
        let answers = match write(&mut group, requests) {
            Ok(answers) => answers,
            Err(trouble) => return Err(Box::new((trouble, group.touched))),
        };
        if group.documents_moved {
            shared.documents_changed.fetch_add(1, Ordering::Release);
        }
        group.renew_leases();
        group.release(&mut shared.tasks().holds);
        shared.hints.tell(group.take_changes());
        Ok(answers)
    }

    /// Nothing of the group was written. What it changed in memory is taken back, and the store goes on unless the disk
    /// can't be trusted.
    fn recover(&mut self, group: Vec<Request>, trouble: Trouble, touched: Touched) {
        count(&self.shared.counters.rollbacks, 1);
        self.shared.refused.store(true, Ordering::Relaxed);
        let gravity = trouble.gravity();
        let again = match gravity {
            Gravity::Fatal => Err(trouble),
            Gravity::Full | Gravity::Locked | Gravity::Passing => self.take_back(touched).map(|()| trouble),
        };
        let trouble = match again {
            Ok(trouble) => trouble,
            Err(fatal) => {
                // Not rolled back any further: nothing more is to be done to that disk.
                self.shared.disk_failed(&fatal.into_error());
                let closed = self.shared.check().err().unwrap_or(StoreError::Unknown);
                return refuse(group, &closed);
            }
        };
        if gravity == Gravity::Passing && group.len() > 1 {
            // The reason lies in one of them; the others must not suffer for it.
            for request in group {
                self.serve(vec![request]);
            }
            return;
        }
        let error = trouble.into_error();
        tracing::warn!(%error, requests = group.len(), "nothing of a group was written");
        refuse(group, &error);
    }

    fn take_back(&mut self, touched: Touched) -> Outcome<()> {
        if !self.conn.is_autocommit() {
            self.conn.execute_batch("ROLLBACK")?;
        }
        touched.take_back(&self.conn, &mut self.kept, &self.shared)
    }

    fn restart_log(&mut self) {
        let restarted = self.conn.busy_timeout(RESTART_WAIT).map_err(Trouble::from);
        let restarted = restarted.and_then(|()| checkpoint::run(&self.conn, Mode::Restart));
        let settled = self.conn.busy_timeout(super::files::BUSY);
        match restarted.and_then(|done| Ok(settled.map(|()| done)?)) {
            Ok(done) if !done.busy => count(&self.shared.counters.restarts, 1),
            Ok(_) => tracing::debug!("the log is still read and goes on growing"),
            Err(trouble) => checkpoint::failed(&self.shared, trouble),
        }
    }

    /// Leaves everything in one file, and that somebody served until now.
    fn close(&mut self) {
        self.shared.look_at_files();
        if self.shared.check_files().is_err() {
            return;
        }
        let mut group = Group::new(&self.conn, &mut self.kept, &self.shared);
        let noted = group.set_meta("served_at", group.now).and_then(|()| Ok(self.conn.execute_batch("COMMIT")?));
        if let Err(trouble) = noted.and_then(|()| checkpoint::run(&self.conn, Mode::Truncate)) {
            tracing::warn!(error = %trouble.into_error(), "the log was left as it is");
        }
    }
}

/// Carries the requests out and commits them.
fn write(group: &mut Group<'_>, requests: &[Request]) -> Outcome<Vec<Answer>> {
    let mut answers = Vec::with_capacity(requests.len());
    for request in requests {
        answers.push(match request {
            Request::Commit { commands, claims, .. } => Answer::Written(group.commit(commands, claims)?),
            Request::Trim { what, .. } => Answer::More(group.trim(what)?),
            Request::Probe { .. } => {
                // Another number each time: what is there already is not written again.
                let groups = group.shared.counters.groups.load(Ordering::Relaxed);
                group.set_meta("probe", group.now + groups as i64)?;
                Answer::Nothing
            }
            Request::Serving => Answer::Nothing,
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

/// A writer that panics has left memory ahead of the disk: the store gives up instead of hanging.
struct Unexpected(Arc<Shared>);

impl Drop for Unexpected {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.fail("whoever was writing has panicked");
        }
    }
}

impl Request {
    fn answer(self, answer: Answer) {
        match (self, answer) {
            (Request::Commit { answer, commands, .. }, Answer::Written(written)) => {
                drop(commands);
                let _ = answer.send(Ok(written));
            }
            (Request::Trim { answer, .. }, Answer::More(more)) => {
                let _ = answer.send(Ok(more));
            }
            (Request::Probe { answer }, Answer::Nothing) => {
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

/// How many of the requests are taken together; at least one.
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
