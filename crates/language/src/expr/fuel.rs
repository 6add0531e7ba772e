//! The budget of an evaluation: steps, which stand for time, and bytes, which stand for memory. Counting is
//! deterministic, so that whether a limit is exceeded never depends on the machine or on what ran before.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use super::halt::{Halt, Res};
use crate::data::ValueRef;
use crate::ids::ValueId;

/// An amount of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// One step is about one node, one element visited, or 64 bytes of text.
    pub steps: u64,
    /// Memory allocated during the evaluation, including memory freed again.
    pub bytes: u64,
    /// Stored values that must be in memory, each counted once ([`ValueRef::read_bytes`]).
    pub read: u64,
}

/// The budget that the expressions and templates of one activation share each time the run decides on it. Measured with
/// `cargo bench -p eddyline-machine`: at most about 50 ms on a slow core.
pub const EVALUATION: Cost = Cost { steps: 1_000_000, bytes: 32 << 20, read: 32 << 20 };

impl AddAssign for Cost {
    fn add_assign(&mut self, more: Cost) {
        self.steps = self.steps.saturating_add(more.steps);
        self.bytes = self.bytes.saturating_add(more.bytes);
        self.read = self.read.saturating_add(more.read);
    }
}

/// A budget and what evaluations have spent of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fuel {
    limit: Cost,
    spent: Cost,
    /// Beyond this many steps the evaluation stops as heavy, to be repeated elsewhere.
    inline_steps: u64,
    /// The stored values read, each with the unit of work that read it last.
    read: BTreeMap<ValueId, (ValueRef, u64)>,
    /// The number of the current unit of work.
    piece: u64,
    /// The part of `spent.read` for values that an earlier unit of work had read too.
    read_before: u64,
}

impl Fuel {
    pub fn new(limit: Cost) -> Fuel {
        let (spent, read) = (Cost::default(), BTreeMap::new());
        Fuel { limit, spent, inline_steps: u64::MAX, read, piece: 1, read_before: 0 }
    }

    /// Stops with [`super::Stop::Heavy`] beyond this many steps.
    #[must_use]
    pub fn inline(self, steps: u64) -> Fuel {
        Fuel { inline_steps: steps, ..self }
    }

    pub fn spent(&self) -> Cost {
        self.spent
    }

    pub fn limit(&self) -> Cost {
        self.limit
    }

    /// What was spent, without values that are in memory because an earlier unit of work read them.
    pub fn added(&self) -> Cost {
        Cost { read: self.spent.read - self.read_before, ..self.spent }
    }

    /// Resets the budget for the next unit of work.
    pub fn refill(&mut self) {
        self.spent = Cost::default();
        self.read_before = 0;
        self.piece += 1;
    }

    /// The stored values read by all units of work so far.
    pub fn values_read(&self) -> impl Iterator<Item = ValueRef> {
        self.read.values().map(|(stored, _)| *stored)
    }

    /// Records a stored value that is read regardless of the budget. True if it was not read before.
    pub fn note_read(&mut self, stored: ValueRef) -> bool {
        let known = self.read.contains_key(&stored.id);
        self.read.entry(stored.id).or_insert((stored, 0));
        !known
    }

    /// Charges for a stored value, once per unit of work.
    pub(super) fn read(&mut self, stored: ValueRef) -> Res<()> {
        let by = self.read.get(&stored.id).map(|(_, piece)| *piece);
        if by == Some(self.piece) {
            return Ok(());
        }
        let bytes = stored.read_bytes();
        if by.is_some() {
            self.read_before += bytes;
        }
        self.take(Cost { read: bytes, ..Cost::default() })?;
        self.read.insert(stored.id, (stored, self.piece));
        Ok(())
    }

    pub(super) fn take(&mut self, cost: Cost) -> Res<()> {
        self.spent += cost;
        if self.spent.steps > self.inline_steps {
            return Err(Halt::Heavy);
        }
        if self.spent.steps > self.limit.steps {
            return Err(Halt::spent(format!("took more than {} steps", self.limit.steps)));
        }
        if self.spent.bytes > self.limit.bytes {
            return Err(Halt::spent(format!("used more than {} MiB of memory", self.limit.bytes >> 20)));
        }
        if self.spent.read > self.limit.read {
            let limit = self.limit.read >> 20;
            return Err(Halt::spent(format!(
                "read more than {limit} MiB of stored values, the limit of an evaluation"
            )));
        }
        Ok(())
    }
}

impl Default for Fuel {
    fn default() -> Fuel {
        Fuel::new(EVALUATION)
    }
}
