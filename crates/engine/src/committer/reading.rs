//! The stored values that a decision needs. What is small is read for a decision here; what is large is read, on threads of
//! the store, for a decision elsewhere. Decisions that need much memory for what they read are made one at a time.

use eddyline_machine::{RunId, ValueRef};

use super::Committer;
use super::load::Wanted;

/// More than this is not read for a decision on the committer's thread.
const READ_HERE: u64 = 64 << 10;
/// A decision that has more than this in memory is the only such one. Parsed, it may be several times as much.
const READ_TOGETHER: u64 = 4 << 20;
/// A decision asks for what it may need, as far as it can tell before it has read anything. When this much is in memory,
/// what it turned out not to need is let go of. It is more than a decision can need, so that it always gets further.
const READ_AT_MOST: u64 = 128 << 20;

impl Committer {
    /// Reads what is missing of the values that the decision on a run needs, here or when its turn has come.
    pub(super) fn read_values(&mut self, run: RunId, needed: &[ValueRef]) {
        let (Some(lane), Some(hot)) = (self.lanes.get(&run), self.hot.get(run)) else { return self.release(run) };
        let missing: Vec<ValueRef> =
            needed.iter().filter(|stored| !hot.run.values.contains_key(&stored.id)).copied().collect();
        let bytes: u64 = missing.iter().map(ValueRef::read_bytes).sum();
        if bytes > READ_HERE && !lane.heavy {
            return self.decide_elsewhere(run);
        }
        let in_all = hot.value_bytes() as u64 + bytes;
        if in_all > READ_TOGETHER && !self.may_read_much(run) {
            return self.wait_to_read_much(run);
        }
        if in_all > READ_AT_MOST {
            self.hot.keep_values(run, needed);
        }
        self.load(run, Wanted::Values(missing));
    }

    /// Lets the next run read much, if it is its turn. True if there was one.
    pub(super) fn next_to_read_much(&mut self) -> bool {
        if self.reading_much().is_some() {
            return false;
        }
        let Some(run) = self.much_to_read.pop() else { return false };
        self.reads_much = Some(run);
        if let Some(lane) = self.lanes.get_mut(&run) {
            lane.has_turn = true;
        }
        self.decide_elsewhere(run);
        true
    }

    /// The decision on a run is made: what was read for it is let go of, and the next may read.
    pub(super) fn has_read(&mut self, run: RunId) {
        self.hot.settle(run);
        if self.reads_much == Some(run) {
            self.reads_much = None;
        }
    }

    /// The run that reads much, while there is still something to decide on it.
    fn reading_much(&self) -> Option<RunId> {
        self.reads_much.filter(|run| self.lanes.get(run).is_some_and(|lane| lane.heavy))
    }

    /// Suspects are decided on alone in any case.
    fn may_read_much(&mut self, run: RunId) -> bool {
        if self.suspects.contains_key(&run) {
            return true;
        }
        let free = self.reading_much().is_none_or(|reading| reading == run);
        if free {
            self.reads_much = Some(run);
        }
        free
    }

    /// It gives way, with its thread, and keeps nothing that it has read.
    fn wait_to_read_much(&mut self, run: RunId) {
        if let Some(lane) = self.lanes.get_mut(&run) {
            lane.busy = true;
            lane.has_turn = false;
        }
        self.heavy_reading.remove(&run);
        self.much_to_read.push(self.hot.get(run).map(|hot| hot.ns.clone()), run);
        self.hot.settle(run);
    }
}
