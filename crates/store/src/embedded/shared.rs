//! What the threads of a store have in common.
//!
//! **The mirror.** [`Tasks::lines`] mirrors the table of tasks, and the writer changes it while it works on a group, so
//! between a change and its commit the mirror is ahead of the disk. What can be seen of that is harmless: nobody knows of
//! a claim before its answer, which comes after the commit, so nobody can extend or report it; what is handed out as due
//! is checked again by the writer when it is used up; the state of a queue is a snapshot anyway. What a decision rests
//! on, namely who has a task ([`crate::Store::beside`]), is read from the disk, and only how far its lease was extended
//! is taken from here. When a commit fails, what it changed in the mirror is read from the disk again; a worker that asked
//! in between may have been told that its task is gone, which costs at most the attempt.
//!
//! Threads of a runtime take the lock on the mirror, so nobody holds it while a disk is used.

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
use crate::lines::Lines;

#[derive(Debug)]
pub(super) struct Shared {
    pub dir: PathBuf,
    pub options: Options,
    pub time: StoreTime,
    pub hints: Teller,
    pub counters: Counters,
    /// Until when it is on disk that somebody served.
    pub served_at: AtomicI64,
    /// From when on things may be deleted for their age.
    pub deletions_from: AtomicI64,
    /// The last group could not be written.
    pub refused: AtomicBool,
    /// The files that are open; known once all of them are.
    pub intact: OnceLock<Intact>,
    /// The log is long enough for the writer to start it over.
    pub log_is_long: AtomicBool,
    /// Commits that changed documents.
    pub documents_changed: AtomicU64,
    tasks: Mutex<Tasks>,
    failed: OnceLock<String>,
    /// What happened to the files, if anything did.
    lost: OnceLock<String>,
}

#[derive(Debug, Default)]
pub(super) struct Tasks {
    pub lines: Lines,
    pub holds: Holds,
}

impl Shared {
    pub fn new(dir: PathBuf, options: Options, time: StoreTime, lines: Lines) -> Shared {
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
            tasks: Mutex::new(Tasks { lines, holds: Holds::default() }),
            failed: OnceLock::new(),
            lost: OnceLock::new(),
        }
    }

    pub fn tasks(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses to go on after a failure.
    pub fn check(&self) -> Result<()> {
        match self.failed.get() {
            Some(reason) => Err(StoreError::Closed(reason.clone())),
            None => Ok(()),
        }
    }

    /// Refuses to write after a failure, or when the files are gone.
    pub fn check_files(&self) -> Result<()> {
        self.check()?;
        match self.lost.get() {
            Some(what) => Err(StoreError::Unavailable(what.clone())),
            None => Ok(()),
        }
    }

    /// Looks whether the files are still there. If they are not, nothing more is written: it would be lost. What was
    /// opened can still be read. The process goes on, since one that is started in its place would find no store there
    /// and make an empty one.
    pub fn look_at_files(&self) {
        if let Some(Err(what)) = self.intact.get().map(Intact::check)
            && self.lost.set(what.clone()).is_ok()
        {
            tracing::error!(directory = %self.dir.display(), what, "the files of the store are gone");
        }
    }

    /// The disk can't be trusted any more.
    pub fn disk_failed(&self, error: &StoreError) {
        self.fail(&format!("its disk can't be trusted any more ({error}); check it before starting again"));
    }

    /// Closes the store for good, then tells whoever wants to know.
    pub fn fail(&self, reason: &str) {
        if self.failed.set(reason.to_owned()).is_ok() {
            let failure = StoreFailure { directory: self.dir.display().to_string(), reason: reason.to_owned() };
            tracing::error!(directory = %failure.directory, reason, "the store gave up");
            (self.options.on_failure)(&failure);
        }
    }
}
