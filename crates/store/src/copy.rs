//! Copies everything from one store to another, of any kind.
//!
//! A source yields all its rows in one typed form, with every checksum verified; a target writes them in its own form
//! and seals them again. Afterwards the target is read back in the same form, and rows and checksums are compared by
//! table. Only then is the target released: until then it cannot be served.
//!
//! State of the serving processes is not copied: holds of due items, hints, the turns of keys within a queue, and the
//! ends of leases (each gets its full time on the target).

mod latest_runs;
mod row;
mod rows;
mod sums;

use async_trait::async_trait;
use eddyline_machine::Millis;

pub(crate) use latest_runs::LatestRuns;
pub use row::{
    CopiedArrival, CopiedClaim, CopiedDocument, CopiedEvent, CopiedGate, CopiedKey, CopiedMessage, CopiedRecords,
    CopiedRun, CopiedTask, Row, Table,
};
pub(crate) use rows::Chunks;
pub use rows::Rows;
pub use sums::{Sum, Sums};

use crate::error::{Result, StoreError};

/// A target whose clock is behind by less waits until it has caught up.
const BEHIND_MS: Millis = 2_000;

/// The state of a store that is not in its rows.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Origin {
    /// The number of runs, to show progress.
    pub run_count: u64,
    /// The latest stored time. The target's time must not be behind it.
    pub latest: Millis,
    /// When a process last watched leases and timeouts: time since then does not count.
    pub served_at: Millis,
    /// Retention must not delete by age before this time.
    pub deletions_from: Millis,
    pub last: Numbers,
}

/// The last numbers that the store has assigned. A number is never assigned twice, even if its row is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Numbers {
    /// The order of runs in lists.
    pub run: u64,
    /// Their order in feeds.
    pub fed_run: u64,
    pub event: u64,
    pub gate: u64,
    pub revision: u64,
}

impl Numbers {
    /// Whether no number of the other can be assigned again.
    fn cover(&self, other: &Numbers) -> bool {
        let pairs = [
            (self.run, other.run),
            (self.fed_run, other.fed_run),
            (self.event, other.event),
            (self.gate, other.gate),
            (self.revision, other.revision),
        ];
        pairs.iter().all(|(own, other)| own >= other)
    }
}

/// A store that is not served while it is copied.
#[async_trait]
pub trait CopySource: Send + Sync {
    async fn origin(&self) -> Result<Origin>;

    /// Everything: first the rows that belong to no run, then runs in the order of their positions, each before its own
    /// rows and at most [`RUNS_TOGETHER`] of them together. Fails with the name of the first row that does not match
    /// its checksum.
    fn rows(&self) -> Rows;

    /// Fails if a process served the store since [`CopySource::origin`].
    async fn check_unserved(&self) -> Result<()>;
}

/// The most runs that are yielded before their rows.
pub const RUNS_TOGETHER: usize = 200;

/// An empty store to fill. It is then read back as a source.
#[async_trait]
pub trait CopyTarget: CopySource {
    /// Marks the store as unfinished, so that it cannot be served. Fails if it has rows, unless they are left by an
    /// interrupted copy and `restart` is set: then they are deleted.
    async fn begin(&mut self, restart: bool) -> Result<()>;

    /// The store's current time; `None` if it continues from the latest stored time.
    async fn time(&self) -> Result<Option<Millis>>;

    /// Writes some rows, in the order of [`CopySource::rows`].
    async fn write(&mut self, rows: Vec<Row>) -> Result<()>;

    /// Writes the state that is not in the rows.
    async fn finish(&mut self, origin: &Origin) -> Result<()>;

    /// Removes the mark, so that the store can be served.
    async fn release(&mut self, origin: &Origin) -> Result<()>;
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Copying,
    /// Reading the target back.
    Checking,
}

/// The progress of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    pub phase: Phase,
    pub rows: u64,
    pub runs: u64,
    /// The number of runs in the source.
    pub run_count: u64,
}

/// The rows of both stores, by table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyReport {
    pub source: Sums,
    pub target: Sums,
}

impl CopyReport {
    pub fn is_equal(&self) -> bool {
        self.source == self.target
    }
}

/// Copies everything and compares both stores. The target is released only if they are equal.
pub async fn copy(
    source: &dyn CopySource,
    target: &mut dyn CopyTarget,
    restart: bool,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<CopyReport> {
    let origin = source.origin().await?;
    check_time(&origin, target.time().await?)?;
    target.begin(restart).await?;
    let mut copied = Sums::default();
    let mut rows = source.rows();
    while let Some(batch) = rows.next().await? {
        copied.add(&batch);
        target.write(batch).await?;
        progress(Progress::of(Phase::Copying, &copied, &origin));
    }
    source.check_unserved().await?;
    target.finish(&origin).await?;
    let found = read_back(&*target, &origin, progress).await?;
    let report = CopyReport { source: copied, target: found };
    if report.is_equal() {
        target.release(&origin).await?;
    }
    Ok(report)
}

async fn read_back(
    target: &dyn CopyTarget,
    origin: &Origin,
    progress: &mut (dyn FnMut(Progress) + Send),
) -> Result<Sums> {
    if !target.origin().await?.last.cover(&origin.last) {
        return Err(StoreError::Corrupt("the copy would assign numbers again that the source has assigned".to_owned()));
    }
    let mut found = Sums::default();
    let mut rows = target.rows();
    while let Some(batch) = rows.next().await? {
        found.add(&batch);
        progress(Progress::of(Phase::Checking, &found, origin));
    }
    Ok(found)
}

impl Progress {
    fn of(phase: Phase, sums: &Sums, origin: &Origin) -> Progress {
        Progress { phase, rows: sums.rows(), runs: sums.of(Table::Runs).rows, run_count: origin.run_count }
    }
}

/// Refuses a target whose clock is behind: stored times would be in the future.
fn check_time(origin: &Origin, time: Option<Millis>) -> Result<()> {
    let behind = time.map_or(0, |time| origin.latest - time);
    match behind > BEHIND_MS {
        true => Err(StoreError::Unavailable(format!(
            "the target's clock is {} s behind the latest time in the source, and a store's time never goes back: set the \
             clock of the database server. If the source was once opened with a wrong clock, start it once with \
             `eddy serve --reset-clock`",
            behind / 1_000
        ))),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_whose_clock_is_behind_is_refused() {
        let origin = Origin { latest: 100_000, ..Origin::default() };
        for time in [None, Some(160_000), Some(98_000)] {
            assert_eq!(check_time(&origin, time), Ok(()));
        }
        let refused = check_time(&origin, Some(40_000)).map_err(|error| error.to_string());
        assert!(refused.is_err_and(|why| why.contains("60 s behind the latest time in the source")));
    }

    #[test]
    fn numbers_cover_others_if_none_is_smaller() {
        let numbers = Numbers { run: 3, fed_run: 2, event: 9, gate: 1, revision: 7 };
        assert!(numbers.cover(&numbers));
        assert!(!Numbers { event: 8, ..numbers }.cover(&numbers));
        assert!(Numbers { event: 10, ..numbers }.cover(&numbers));
    }
}
