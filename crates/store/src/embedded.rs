//! The embedded store: SQLite in one directory, for one process.
//!
//! One thread at a time writes ([`writer`]), in groups; each group is durable, with one sync, before its callers get a
//! response. Reader threads have a connection each ([`readers`]), and one thread checkpoints the log ([`checkpoint`]).
//! Tasks are mirrored in memory, in the order in which they are claimed ([`shared`]); everything else is only on disk.

mod backup;
mod body;
mod checkpoint;
mod claims;
mod copy;
mod documents;
mod due;
mod encode;
mod files;
mod group;
mod handling;
mod intact;
mod list;
mod load;
mod lock;
mod opening;
mod options;
mod readers;
mod restore;
mod schema;
mod shared;
mod sqlite_error;
mod stats;
mod threads;
mod touched;
mod trim;
mod unique;
mod watch;
mod write_run;
mod writer;
mod writer_cache;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use async_trait::async_trait;
use eddyline_machine::{Data, Millis, Numbered, RunId, ValueId, Version};
use serde_json::Value;
use tokio::sync::{mpsc, oneshot};

use crate::claim::{ClaimRequest, Extended, Lease, LeaseState};
use crate::clock::{Clock, StoreTime, SystemClock};
use crate::commit::Command;
use crate::document::Document;
use crate::error::{Result, StoreError};
use crate::handling::Handling;
use crate::hints::Hints;
use crate::ids::Namespace;
use crate::query::*;
use crate::{Store, Written};
use checkpoint::{Keeper, Stop};
pub use copy::{EmbeddedSource, EmbeddedTarget};
use handling::Note;
use intact::Intact;
use lock::Lock;
use readers::Readers;
use shared::Shared;
use sqlite_error::{Severity, SqliteError, SqliteResult};
use threads::{spawn, spawn_essential};
use watch::{For, Watcher};
use writer::{Request, Writer, WriterHandle};

pub use options::{Hook, Options, StoreFailure};
pub use stats::Stats;

/// A store in a directory. Dropping it finishes pending requests and checkpoints the log into the database file; it
/// blocks until that is done.
#[derive(Debug)]
pub struct Embedded {
    shared: Arc<Shared>,
    requests: Option<mpsc::Sender<Request>>,
    readers: Readers,
    note: Note,
    stop: Arc<Stop>,
    handle: Option<Arc<WriterHandle>>,
    writer: Option<JoinHandle<()>>,
    answerer: Option<JoinHandle<()>>,
    keeper: Option<JoinHandle<()>>,
    watcher: Watcher,
    /// Released last, when no file of the store is open any more.
    _lock: Lock,
}

impl Embedded {
    /// Opens the store in a directory, or creates one there.
    pub fn open(dir: &Path, options: Options) -> Result<Embedded> {
        files::refuse_unfinished(dir)?;
        files::make_directory(dir)?;
        let lock = Lock::take(dir, options.clock.wall())?;
        files::check(dir)?;
        let mut conn = files::open_writer(dir, &options).map_err(|error| failed_to_open(dir, error))?;
        schema::migrate(&mut conn)?;
        let found = Restored::read(&conn, &options).map_err(|error| failed_to_open(dir, error))?;
        let shared = Arc::new(Shared::new(dir.to_owned(), options, found.time, found.queues));
        shared.served_at.store(found.served_at, Ordering::Relaxed);
        shared.deletions_from.store(found.deletions_from, Ordering::Relaxed);
        let note = Note::open(dir)?;
        let (requests, queue) = mpsc::channel(writer::WAITING);
        let watcher = Watcher::start(&shared)?;
        let readers = Readers::start(&shared, watcher.watch())?;
        let keeper = files::open_checkpointer(dir)
            .and_then(|conn| Keeper::new(conn, shared.clone(), requests.downgrade()))
            .map_err(|error| failed_to_open(dir, error))?;
        // Everything is open, so every file exists.
        let intact = Intact::new(dir);
        shared.intact.get_or_init(|| intact);
        let stop = Arc::new(Stop::default());
        let (answers, durable) = std::sync::mpsc::sync_channel(writer::UNANSWERED);
        let handle =
            Arc::new(WriterHandle::new(Writer::new(conn, found.cache, shared.clone(), answers), watcher.watch()));
        let answerer = spawn_essential("eddyline-answer", &shared, move || writer::answer(durable))?;
        let served = handle.clone();
        let writer = spawn_essential("eddyline-write", &shared, move || served.run(queue))?;
        let asked = stop.clone();
        let keeper = spawn_essential("eddyline-keep", &shared, move || keeper.run(&asked))?;
        Ok(Embedded {
            shared,
            requests: Some(requests),
            readers,
            note,
            stop,
            handle: Some(handle),
            writer: Some(writer),
            answerer: Some(answerer),
            keeper: Some(keeper),
            watcher,
            _lock: lock,
        })
    }

    /// Finishes pending requests, checkpoints the log into the database file and unlocks the directory.
    pub fn close(self) -> Result<()> {
        let shared = self.shared.clone();
        drop(self);
        shared.check()
    }

    /// Copies a consistent snapshot of the store into a new directory while the store stays in use. The copy is checked
    /// and can be opened as a store.
    pub async fn backup(&self, to: &Path) -> Result<()> {
        self.shared.check()?;
        let (from, to) = (self.shared.dir.clone(), to.to_owned());
        let (answer, answered) = oneshot::channel();
        spawn("eddyline-backup", move || {
            let _ = answer.send(Embedded::backup_of(&from, &to));
        })?;
        answered.await.map_err(|_| StoreError::Unavailable("the backup was aborted".to_owned()))?
    }

    /// Like [`Embedded::backup`], for the store in a directory, whether or not a process has it open.
    pub fn backup_of(dir: &Path, to: &Path) -> Result<()> {
        files::refuse_unfinished(dir)?;
        files::check(dir)?;
        let conn = files::open_reader(dir).map_err(|error| failed_to_open(dir, error))?;
        backup::copy(&conn, to)
    }

    /// How far store time is ahead of the wall clock. Negative: for how long no process had the store open. Read-only;
    /// works whether or not a process has it open.
    pub fn time_ahead(dir: &Path) -> Result<Millis> {
        files::check(dir)?;
        let latest = files::open_reader(dir).and_then(|conn| opening::latest(&conn));
        Ok(latest.map_err(|error| failed_to_open(dir, error))? - SystemClock::default().wall())
    }

    pub fn stats(&self) -> Stats {
        self.shared.counters.read(files::bytes(&files::log(&self.shared.dir)))
    }

    /// Sends a request to the writer and waits until it is durable.
    async fn write<T>(&self, request: impl FnOnce(oneshot::Sender<Result<T>>) -> Request) -> Result<T> {
        self.shared.check_files()?;
        let closed = || self.shared.check_files().err().unwrap_or(StoreError::Unknown);
        let (answer, answered) = oneshot::channel();
        let (Some(writer), Some(requests)) = (&self.handle, &self.requests) else { return Err(closed()) };
        if let Some(request) = writer.at_once(request(answer)) {
            let room = requests.reserve().await.map_err(|_| closed())?;
            writer.expect();
            room.send(request);
        }
        answered.await.map_err(|_| closed())?
    }

    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&rusqlite::Connection) -> SqliteResult<T> + Send + 'static,
    ) -> Result<T> {
        self.shared.check()?;
        self.readers.read(read).await
    }

    async fn read_few<T: Send + 'static>(
        &self,
        read: impl FnOnce(&rusqlite::Connection) -> SqliteResult<T> + Send + 'static,
    ) -> Result<T> {
        self.shared.check()?;
        self.readers.read_few(read).await
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        self.stop.ask();
        let join = |thread: &mut Option<JoinHandle<()>>| thread.take().map(JoinHandle::join);
        join(&mut self.keeper);
        // Before the writer ends: a reader would keep the log from being truncated.
        self.readers.stop();
        self.requests = None;
        join(&mut self.writer);
        self.handle = None;
        join(&mut self.answerer);
    }
}

#[async_trait]
impl Store for Embedded {
    async fn now(&self) -> Result<Millis> {
        self.shared.check()?;
        Ok(self.shared.time.now())
    }

    async fn health(&self) -> Result<()> {
        self.shared.check_files()?;
        if self.shared.refused.load(Ordering::Relaxed) {
            // The last commit could not be written: try a write to find out whether the next one can.
            self.write(|answer| Request::Probe { answer }).await?;
        }
        self.read(opening::latest).await.map(drop)
    }

    async fn deletion_waits(&self) -> Result<Option<Millis>> {
        self.shared.check()?;
        let from = self.shared.deletions_from.load(Ordering::Relaxed);
        Ok((from > self.shared.time.now()).then_some(from))
    }

    async fn load(&self, run: RunId, since: Option<Version>) -> Result<Found> {
        self.read(move |conn| load::load(conn, run, since)).await
    }

    async fn summary(&self, run: RunId) -> Result<Option<Summary>> {
        self.read_few(move |conn| load::summary_of(conn, run)).await
    }

    async fn values(&self, run: RunId, ids: &[ValueId]) -> Result<Vec<(ValueId, Data)>> {
        let ids: Arc<[ValueId]> = ids.into();
        if ids.len() <= load::FEW_VALUES {
            let few = ids.clone();
            if let Some(values) = self.read_few(move |conn| load::few_values(conn, run, &few)).await? {
                return Ok(values);
            }
        }
        self.read(move |conn| load::values(conn, run, &ids)).await
    }

    async fn pending(&self, run: RunId) -> Result<PendingWork> {
        let mut pending = self.read(move |conn| load::pending(conn, run)).await?;
        let now = self.shared.time.now();
        load::complete(&mut pending.tasks, run, &self.shared.tasks().queues, now);
        Ok(pending)
    }

    async fn commit(&self, commands: Vec<Command>, claims: Vec<ClaimRequest>) -> Result<Written> {
        let commands: Arc<[_]> = commands.into_iter().map(encode::encode).collect::<Result<_>>()?;
        let shared = commands.clone();
        let written = self.write(|answer| Request::Commit { commands: shared, claims, answer }).await;
        drop(commands);
        written
    }

    async fn extend(&self, ns: &Namespace, worker: Option<&str>, leases: &[Lease]) -> Result<Vec<Extended>> {
        self.shared.check()?;
        let now = self.shared.time.now();
        let queues = &mut self.shared.tasks().queues;
        Ok(leases.iter().map(|lease| queues.extend(ns, worker, *lease, now)).collect())
    }

    async fn leases(&self, ns: &Namespace, worker: Option<&str>, leases: &[Lease]) -> Result<Vec<LeaseState>> {
        self.shared.check()?;
        let queues = &self.shared.tasks().queues;
        Ok(leases.iter().map(|lease| queues.lease(ns, worker, *lease)).collect())
    }

    async fn due(&self, what: Due, skip: &[Namespace], limit: usize) -> Result<DueBatch> {
        let shared = self.shared.clone();
        // The SQL statements take a JSON list.
        let skipped = Value::from_iter(skip.iter().map(Namespace::as_str)).to_string();
        match what {
            Due::Leases => {
                shared.check()?;
                Ok(due::leases(&shared, skip, limit))
            }
            Due::Timers => self.read(move |conn| due::timers(conn, &shared, &skipped, limit)).await,
            Due::Messages => self.read(move |conn| due::messages(conn, &shared, &skipped, limit)).await,
            Due::Documents => self.read(move |conn| due::documents(conn, &shared, &skipped, limit)).await,
        }
    }

    async fn records(&self, run: RunId, after: u64, limit: usize) -> Result<Vec<Numbered>> {
        self.read(move |conn| load::records(conn, run, after, limit)).await
    }

    async fn logs(&self, run: RunId, activation: &str, after: u64, limit: usize) -> Result<Vec<Numbered>> {
        let activation = activation.to_owned();
        self.read(move |conn| load::logs(conn, run, &activation, after, limit)).await
    }

    async fn runs(&self, ns: Option<&Namespace>, filter: &RunFilter, page: Page) -> Result<Vec<Summary>> {
        let (ns, filter) = (ns.cloned(), filter.clone());
        self.read(move |conn| list::runs(conn, ns.as_ref(), &filter, page)).await
    }

    async fn count_runs(&self, ns: &Namespace, filter: &RunFilter) -> Result<u64> {
        let (ns, filter) = (ns.clone(), filter.clone());
        self.read(move |conn| list::count_runs(conn, &ns, &filter)).await
    }

    async fn gates(&self, ns: Option<&Namespace>, filter: &GateFilter, page: Page) -> Result<Vec<GateRow>> {
        let (ns, filter) = (ns.cloned(), filter.clone());
        self.read(move |conn| list::gates(conn, ns.as_ref(), &filter, page)).await
    }

    async fn documents(&self, ns: Option<&Namespace>, filter: &DocumentFilter, limit: usize) -> Result<Vec<Document>> {
        let (ns, filter) = (ns.cloned(), filter.clone());
        let one = filter.id.is_some();
        let read = move |conn: &rusqlite::Connection| list::documents(conn, ns.as_ref(), &filter, limit);
        if one { self.read_few(read).await } else { self.read(read).await }
    }

    fn documents_changed(&self) -> Option<u64> {
        Some(self.shared.documents_changed.load(Ordering::Acquire))
    }

    async fn feed(&self, ns: &Namespace, feed: &Feed, page: Page) -> Result<Vec<FeedItem>> {
        let (ns, feed) = (ns.clone(), feed.clone());
        self.read(move |conn| list::feed(conn, &ns, &feed, page)).await
    }

    async fn going(&self) -> Result<Vec<GoingRuns>> {
        self.read(list::going).await
    }

    async fn event(&self, ns: &Namespace, id: &str) -> Result<Option<EventState>> {
        let (ns, id) = (ns.clone(), id.to_owned());
        self.read(move |conn| list::event(conn, &ns, &id)).await
    }

    async fn queues(&self, ns: &Namespace) -> Result<Vec<QueueState>> {
        self.shared.check()?;
        Ok(self.shared.tasks().queues.states(ns))
    }

    async fn limits(&self, ns: &Namespace) -> Result<Vec<LimitState>> {
        self.shared.check()?;
        Ok(self.shared.tasks().queues.closed_limits(ns, self.shared.time.now()))
    }

    async fn held_by(&self, ns: &Namespace, worker: &str) -> Result<usize> {
        self.shared.check()?;
        Ok(self.shared.tasks().queues.held_by(ns, worker))
    }

    async fn backlog(&self, ns: &Namespace) -> Result<usize> {
        self.shared.check()?;
        Ok(self.shared.tasks().queues.ready(ns))
    }

    async fn trim(&self, what: &Trim) -> Result<bool> {
        let what = what.clone();
        self.write(|answer| Request::Trim { what, answer }).await
    }

    fn note_handling(&self, handling: &Handling) {
        // Usually the kernel takes the write at once, but it blocks if the disk hangs. The last runtime thread that
        // drives network and timers must not block.
        let watch = self.watcher.watch();
        let waiting = watch.wait(For::Note);
        let may_wait = waiting.is_some() || tokio::runtime::Handle::try_current().is_err();
        self.note.write(handling, may_wait);
    }

    fn handled_before(&self) -> Handling {
        self.note.before().clone()
    }

    fn watch(&self) -> Hints {
        self.shared.hints.listen()
    }
}

/// The state read from disk when the store is opened.
struct Restored {
    time: StoreTime,
    served_at: Millis,
    deletions_from: Millis,
    queues: crate::task_queues::TaskQueues,
    cache: writer_cache::WriterCache,
}

impl Restored {
    fn read(conn: &rusqlite::Connection, options: &Options) -> SqliteResult<Restored> {
        let mut latest = opening::latest(conn)?;
        if options.reset_clock {
            opening::reset_clock(conn, latest, options.clock.wall())?;
            latest = opening::latest(conn)?;
        }
        let wall = options.clock.wall();
        opening::tell_behind(latest, wall);
        let deletions_from = opening::deletions_from(conn, latest, wall)?;
        let served_at = restore::meta(conn, "served_at")?;
        let time = StoreTime::open(options.clock.clone(), latest);
        let now = time.now();
        let held = |_, _, held| restore::reopened(held, latest, now);
        let start = |by, queued_at| restore::still_to_start(by, queued_at, latest, now);
        let mut queues = restore::queues(conn, held, start)?;
        queues.opened(now);
        let served_at = match restore::note_unserved(conn, latest, now, deletions_from) {
            Ok(()) => now,
            // A full disk must not keep the store from opening: reads work, and retention may free space.
            Err(error) if error.severity() == Severity::Full => served_at,
            Err(error) => return Err(error),
        };
        Ok(Restored { time, served_at, deletions_from, queues, cache: restore::cache(conn)? })
    }
}

/// Adds the path of the store to an error from opening it.
fn failed_to_open(dir: &Path, error: SqliteError) -> StoreError {
    let path = files::database(dir);
    match error.into_error() {
        StoreError::Corrupt(what) => {
            StoreError::Corrupt(format!("{}: {what}. Restore it from a backup", path.display()))
        }
        StoreError::Unavailable(what) => StoreError::Unavailable(format!("{}: {what}", path.display())),
        StoreError::Full(what) => StoreError::Full(format!("{}: {what}", path.display())),
        other => other,
    }
}
