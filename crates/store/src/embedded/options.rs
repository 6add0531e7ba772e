//! The options of an embedded store.

use std::fmt;
use std::sync::Arc;

use crate::clock::{Clock, SystemClock};

/// Called by a thread of the store at a certain point.
pub type Hook = Arc<dyn Fn() + Send + Sync>;

/// How to open an embedded store.
#[derive(Clone)]
pub struct Options {
    pub clock: Arc<dyn Clock>,
    /// Sets store time back to the clock, if the store was once opened with a clock that was ahead.
    pub reset_clock: bool,
    /// Threads that read, each with a connection of its own.
    pub readers: usize,
    /// Called when the disk can no longer be trusted or a thread of the store panicked, after the store was closed. The
    /// default prints the reason to stderr and aborts the process, whose memory may be ahead of the disk.
    pub on_failure: Arc<dyn Fn(&StoreFailure) + Send + Sync>,
    /// When the log has grown by this much, it is checkpointed, concurrently with writes.
    pub checkpoint_bytes: u64,
    /// When the log is larger than this, the writer restarts it.
    pub restart_bytes: u64,
    /// The most bytes of the database file; beyond, writes fail as if the disk were full.
    pub max_bytes: Option<u64>,
    /// Called inside a group, before each disk access. For tests with a disk that hangs.
    pub inside_commit: Option<Hook>,
    /// Called right before and right after a group becomes durable. For tests that cut the power there.
    pub before_commit: Option<Hook>,
    pub after_commit: Option<Hook>,
    /// Called after due items were read and before they are handed out. For tests that consume them in between.
    pub after_due_read: Option<Hook>,
}

/// Why a store failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreFailure {
    pub directory: String,
    pub reason: String,
}

impl fmt::Display for StoreFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StoreFailure { directory, reason } = self;
        write!(f, "the store in {directory} failed: {reason}. All acknowledged commits are stored")
    }
}

impl Default for Options {
    fn default() -> Options {
        Options {
            clock: Arc::new(SystemClock::default()),
            reset_clock: false,
            readers: 2,
            on_failure: Arc::new(say_and_abort),
            checkpoint_bytes: 4 << 20,
            restart_bytes: 32 << 20,
            max_bytes: None,
            inside_commit: None,
            before_commit: None,
            after_commit: None,
            after_due_read: None,
        }
    }
}

pub(super) fn call(hook: &Option<Hook>) {
    if let Some(hook) = hook {
        hook();
    }
}

fn say_and_abort(failure: &StoreFailure) {
    eprintln!("eddyline: {failure}");
    std::process::abort();
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("clock", &self.clock)
            .field("reset_clock", &self.reset_clock)
            .field("readers", &self.readers)
            .field("checkpoint_bytes", &self.checkpoint_bytes)
            .field("restart_bytes", &self.restart_bytes)
            .field("max_bytes", &self.max_bytes)
            .finish_non_exhaustive()
    }
}
