//! Counters of the store.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counted since the store was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Requests to the writer.
    pub requests: u64,
    /// Groups of requests.
    pub groups: u64,
    /// Groups that became durable, each with one sync. The others had nothing to write.
    pub commits: u64,
    /// Groups that failed and were rolled back.
    pub rollbacks: u64,
    /// Checkpoints of the log.
    pub checkpoints: u64,
    /// Restarts of the log.
    pub restarts: u64,
    /// The current size of the log file.
    pub log_bytes: u64,
}

#[derive(Debug, Default)]
pub(super) struct Counters {
    pub requests: AtomicU64,
    pub groups: AtomicU64,
    pub commits: AtomicU64,
    pub rollbacks: AtomicU64,
    pub checkpoints: AtomicU64,
    pub restarts: AtomicU64,
}

pub(super) fn count(counter: &AtomicU64, by: usize) {
    counter.fetch_add(by as u64, Ordering::Relaxed);
}

impl Counters {
    pub fn read(&self, log_bytes: u64) -> Stats {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            requests: of(&self.requests),
            groups: of(&self.groups),
            commits: of(&self.commits),
            rollbacks: of(&self.rollbacks),
            checkpoints: of(&self.checkpoints),
            restarts: of(&self.restarts),
            log_bytes,
        }
    }
}
