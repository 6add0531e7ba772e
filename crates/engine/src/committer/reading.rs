//! The stored values that a decision needs. A decision that reads little is made on the committer's thread; one that
//! reads more is made on another thread. Decisions that hold large reads in memory are made one at a time.

use eddyline_machine::{RunId, ValueRef};

use super::Committer;
use super::load::Wanted;

/// A decision that reads more than this is made on another thread.
const INLINE_READ_BYTES: u64 = 64 << 10;
/// Only one decision at a time may have read more than this. Parsed values may take several times as much memory.
const LARGE_READ_BYTES: u64 = 4 << 20;
/// A decision asks for all values that it may need. Beyond this, values that it turned out not to need are dropped. The
/// limit is higher than what any decision can need, so every decision makes progress.
const MAX_READ_BYTES: u64 = 128 << 20;

impl Committer {
    /// Reads the values that a decision lacks, now or when the run has its turn.
    pub(super) fn read_values(&mut self, run: RunId, needed: &[ValueRef]) {
        let (Some(lane), Some(cached)) = (self.lanes.get(&run), self.cache.get(run)) else { return self.release(run) };
        let missing: Vec<ValueRef> =
            needed.iter().filter(|stored| !cached.run.values.contains_key(&stored.id)).copied().collect();
        let bytes: u64 = missing.iter().map(ValueRef::read_bytes).sum();
        if bytes > INLINE_READ_BYTES && !lane.heavy {
            return self.decide_elsewhere(run);
        }
        let in_all = cached.value_bytes() as u64 + bytes;
        if in_all > LARGE_READ_BYTES && !self.may_read_large(run) {
            return self.wait_for_large_read(run);
        }
        if in_all > MAX_READ_BYTES {
            self.cache.keep_values(run, needed);
        }
        self.load(run, Wanted::Values(missing));
    }

    /// Lets the next waiting run make a large read, if no other does. True if there was one.
    pub(super) fn start_next_large_read(&mut self) -> bool {
        if self.large_reader().is_some() {
            return false;
        }
        let Some(run) = self.large_read_waiting.pop() else { return false };
        self.large_read = Some(run);
        if let Some(lane) = self.lanes.get_mut(&run) {
            lane.has_turn = true;
        }
        self.decide_elsewhere(run);
        true
    }

    /// The decision on a run is made: drops the large values that were read for it, and lets the next run read.
    pub(super) fn finish_read(&mut self, run: RunId) {
        self.cache.settle(run);
        if self.large_read == Some(run) {
            self.large_read = None;
        }
    }

    /// The run that holds a large read, while its decision is not made.
    fn large_reader(&self) -> Option<RunId> {
        self.large_read.filter(|run| self.lanes.get(run).is_some_and(|lane| lane.heavy))
    }

    /// Suspects are always decided alone, so they need not wait.
    fn may_read_large(&mut self, run: RunId) -> bool {
        if self.suspects.contains_key(&run) {
            return true;
        }
        let free = self.large_reader().is_none_or(|reading| reading == run);
        if free {
            self.large_read = Some(run);
        }
        free
    }

    /// Gives up the run's thread and drops the large values it has read.
    fn wait_for_large_read(&mut self, run: RunId) {
        if let Some(lane) = self.lanes.get_mut(&run) {
            lane.busy = true;
            lane.has_turn = false;
        }
        self.heavy_reading.remove(&run);
        self.large_read_waiting.push(self.cache.get(run).map(|cached| cached.ns.clone()), run);
        self.cache.settle(run);
    }
}
