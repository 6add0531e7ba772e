//! The reader threads, each with its own connection. They neither block the writer nor wait for it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rusqlite::Connection;
use tokio::sync::{mpsc, oneshot};

use super::files;
use super::shared::Shared;
use super::sqlite_error::{SqliteError, SqliteResult};
use super::threads::{panic_message, spawn_essential};
use super::watch::{For, Watch};
use crate::error::{Result, StoreError};

/// The capacity of the queue of reads; further callers wait for room.
const WAITING: usize = 1_024;

type Job = Box<dyn FnOnce(&Connection) + Send>;
type Jobs = Arc<Mutex<mpsc::Receiver<Job>>>;

#[derive(Debug)]
pub(super) struct Readers {
    jobs: Option<mpsc::Sender<Job>>,
    threads: Vec<JoinHandle<()>>,
    /// For reads that take less time than waking a thread.
    quick: Mutex<Option<Connection>>,
    watch: Arc<Watch>,
}

impl Readers {
    pub fn start(shared: &Arc<Shared>, watch: Arc<Watch>) -> Result<Readers> {
        let (dir, count) = (&shared.dir, shared.options.readers);
        let (jobs, queue) = mpsc::channel(WAITING);
        let queue: Jobs = Arc::new(Mutex::new(queue));
        let quick = files::open_reader(dir).map_err(SqliteError::into_error)?;
        let mut readers = Readers { jobs: Some(jobs), threads: Vec::new(), quick: Mutex::new(Some(quick)), watch };
        for n in 0..count.max(1) {
            let conn = files::open_reader(dir).map_err(SqliteError::into_error)?;
            let queue = queue.clone();
            let thread = spawn_essential(&format!("eddyline-read-{n}"), shared, move || serve(&conn, &queue))?;
            readers.threads.push(thread);
        }
        Ok(readers)
    }

    /// Reads on one of the threads, from one snapshot.
    pub async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Connection) -> SqliteResult<T> + Send + 'static,
    ) -> Result<T> {
        let closed = || StoreError::Closed("it was closed by its owner".to_owned());
        let (answer, answered) = oneshot::channel();
        let job: Job = Box::new(move |conn| {
            let _ = answer.send(at_one_moment(conn, read));
        });
        let jobs = self.jobs.as_ref().ok_or_else(closed)?;
        jobs.send(job).await.map_err(|_| closed())?;
        answered.await.map_err(|_| closed())?
    }

    /// Reads a few rows by key: on this thread, unless another thread is doing so or this one must not block on the
    /// disk.
    pub async fn read_few<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Connection) -> SqliteResult<T> + Send + 'static,
    ) -> Result<T> {
        if let Ok(quick) = self.quick.try_lock()
            && let Some(conn) = &*quick
            && let Some(_waiting) = self.watch.wait(For::Read)
        {
            return at_one_moment(conn, read);
        }
        self.read(read).await
    }

    /// Stops the threads after they have finished the queued reads.
    pub fn stop(&mut self) {
        self.jobs = None;
        *self.quick.get_mut().unwrap_or_else(PoisonError::into_inner) = None;
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn serve(conn: &Connection, queue: &Jobs) {
    loop {
        let job = queue.lock().unwrap_or_else(PoisonError::into_inner).blocking_recv();
        match job {
            Some(job) => job(conn),
            None => return,
        }
    }
}

/// Continues a read on a new snapshot.
pub(super) fn renew_snapshot(conn: &Connection) -> SqliteResult<()> {
    conn.prepare_cached("COMMIT")?.execute([])?;
    conn.prepare_cached("BEGIN")?.execute([])?;
    Ok(())
}

/// Reads from one snapshot. A panic becomes an error for the caller; the connection is reused, and the transaction left
/// open is rolled back before the next read.
fn at_one_moment<T>(conn: &Connection, read: impl FnOnce(&Connection) -> SqliteResult<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(|| in_transaction(conn, read))) {
        Ok(outcome) => outcome.map_err(SqliteError::into_error),
        Err(panic) => {
            let message = panic_message(&*panic);
            tracing::error!("a read panicked: {message}");
            Err(StoreError::Unavailable(format!("the read panicked: {message}")))
        }
    }
}

fn in_transaction<T>(conn: &Connection, read: impl FnOnce(&Connection) -> SqliteResult<T>) -> SqliteResult<T> {
    if !conn.is_autocommit() {
        conn.execute_batch("ROLLBACK")?;
    }
    conn.prepare_cached("BEGIN")?.execute([])?;
    let read = read(conn);
    let ended = conn.prepare_cached("COMMIT").and_then(|mut commit| commit.execute([]));
    let read = read?;
    ended?;
    Ok(read)
}
