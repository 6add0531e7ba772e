//! State shared by the threads of a store.
//!
//! **The mirror.** [`TaskMirror::queues`] mirrors the table of tasks. The writer changes it while it works on a group,
//! so until the commit the mirror is ahead of the disk. What others can see of that is harmless: a claim is known only
//! after the commit, so no worker can extend or report it before; the writer checks due items again when they are
//! consumed; the state of a queue is a snapshot anyway. The holder of a task, on which decisions depend
//! ([`crate::Store::pending`]), is read from disk; only the extension of its lease is taken from the mirror. When a
//! commit fails, its changes to the mirror are undone by reading the disk again; a heartbeat in between may have been
//! told that its task is lost, which costs at most the attempt.
//!
//! Runtime threads lock the mirror, so it is never locked during disk access.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use super::intact::Intact;
use super::options::{Options, StoreFailure};
use super::stats::Counters;
use crate::clock::StoreTime;
use crate::error::{Result, StoreError};
use crate::hints::Teller;
use crate::holds::Holds;
use crate::task_queues::TaskQueues;

#[derive(Debug)]
pub(super) struct Shared {
    pub dir: PathBuf,
    pub options: Options,
    pub time: StoreTime,
    pub hints: Teller,
    pub counters: Counters,
    /// The stored time until which the store was served.
    pub served_at: AtomicI64,
    /// From when on retention may delete.
    pub deletions_from: AtomicI64,
    /// The last group could not be written.
    pub refused: AtomicBool,
    /// The open files; set once all of them are open.
    pub intact: OnceLock<Intact>,
    /// The log is long enough for the writer to restart it.
    pub log_is_long: AtomicBool,
    /// The number of commits that changed documents.
    pub documents_changed: AtomicU64,
    tasks: Mutex<TaskMirror>,
    failed: OnceLock<String>,
    /// Which file was removed or replaced, if any.
    lost: OnceLock<String>,
}

#[derive(Debug, Default)]
pub(super) struct TaskMirror {
    pub queues: TaskQueues,
    pub holds: Holds,
}

impl Shared {
    pub fn new(dir: PathBuf, options: Options, time: StoreTime, queues: TaskQueues) -> Shared {
        Shared {
            dir,
            options,
            time,
            hints: Teller::default(),
            counters: Counters::default(),
            served_at: AtomicI64::new(0),
            deletions_from: AtomicI64::new(0),
            refused: AtomicBool::new(false),
            intact: OnceLock::new(),
            log_is_long: AtomicBool::new(false),
            documents_changed: AtomicU64::new(0),
            tasks: Mutex::new(TaskMirror { queues, holds: Holds::default() }),
            failed: OnceLock::new(),
            lost: OnceLock::new(),
        }
    }

    pub fn tasks(&self) -> MutexGuard<'_, TaskMirror> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fails once the store has failed.
    pub fn check(&self) -> Result<()> {
        match self.failed.get() {
            Some(reason) => Err(StoreError::Closed(reason.clone())),
            None => Ok(()),
        }
    }

    /// Fails once the store has failed or its files were removed or replaced.
    pub fn check_files(&self) -> Result<()> {
        self.check()?;
        match self.lost.get() {
            Some(what) => Err(StoreError::Unavailable(what.clone())),
            None => Ok(()),
        }
    }

    /// Checks whether the files still exist. If not, writes are refused, because they would be lost; reads still work.
    /// The process keeps running: a restarted one would find no store and create an empty one.
    pub fn look_at_files(&self) {
        if let Some(Err(what)) = self.intact.get().map(Intact::check)
            && self.lost.set(what.clone()).is_ok()
        {
            tracing::error!(directory = %self.dir.display(), what, "files were removed or replaced; writes are refused");
        }
    }

    /// Closes the store because its disk can no longer be trusted.
    pub fn disk_failed(&self, error: &StoreError) {
        self.fail(&format!("its disk can no longer be trusted ({error}); check the disk before restarting"));
    }

    /// Closes the store permanently and calls `on_failure`.
    pub fn fail(&self, reason: &str) {
        if self.failed.set(reason.to_owned()).is_ok() {
            let failure = StoreFailure { directory: self.dir.display().to_string(), reason: reason.to_owned() };
            tracing::error!(directory = %failure.directory, reason, "the store failed");
            (self.options.on_failure)(&failure);
        }
    }
}
