//! How a store is opened.

use std::fmt;
use std::sync::Arc;

use crate::clock::{Clock, SystemClock};

/// Called by a thread of the store at a point of interest.
pub type Hook = Arc<dyn Fn() + Send + Sync>;

/// How an embedded store is opened; what is not said is taken from [`Options::default`].
#[derive(Clone)]
pub struct Options {
    pub clock: Arc<dyn Clock>,
    /// Sets the store's time back to the clock's, if the store was once opened with a clock that was ahead.
    pub reset_clock: bool,
    /// Threads that read, each with a connection of its own.
    pub readers: usize,
    /// What to do when the disk can't be trusted any more, or a thread of the store panicked. The store is closed by then.
    /// The default says so on stderr and ends the process: whatever it still holds in memory may be ahead of what is
    /// stored.
    pub on_failure: Arc<dyn Fn(&StoreFailure) + Send + Sync>,
    /// When the log has grown by so much, it is copied back into the database while writing goes on.
    pub checkpoint_bytes: u64,
    /// When the log is larger than this, the writer makes it start over.
    pub restart_bytes: u64,
    /// The database grows to at most this, as if the disk were full then.
    pub max_bytes: Option<u64>,
    /// Inside a group of commits, before each time that it uses the disk. For tests with a disk that hangs.
    pub inside_commit: Option<Hook>,
    /// Right before and right after a group of commits becomes durable. For tests that cut the power there.
    pub before_commit: Option<Hook>,
    pub after_commit: Option<Hook>,
    /// After what is due was read and before it is handed out. For tests that use it up just then.
    pub after_due_read: Option<Hook>,
}

/// Why a store gave up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreFailure {
    pub directory: String,
    pub reason: String,
}

impl fmt::Display for StoreFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let StoreFailure { directory, reason } = self;
        write!(f, "the store in {directory} gave up: {reason}. Nothing was acknowledged that is not stored")
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
