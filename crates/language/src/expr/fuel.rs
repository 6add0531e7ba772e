//! What an evaluation may use: steps, which stand for time, and bytes, which stand for memory. They are counted in the
//! same way wherever it runs, so that whether it is too much never depends on the machine or on what ran before.

use std::collections::BTreeMap;
use std::ops::AddAssign;

use super::halt::{Halt, Res};
use crate::data::ValueRef;
use crate::ids::ValueId;

/// An amount of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// A step is about one node, one element looked at, or 64 bytes of text.
    pub steps: u64,
    /// Memory that is allocated on the way, whether it is freed again or not.
    pub bytes: u64,
    /// Stored values that have to be in memory, each counted once ([`ValueRef::read_bytes`]).
    pub read: u64,
}

/// What the expressions and templates of one activation may use together each time the run decides on it. Measured
/// with `cargo bench -p eddyline-machine`: at most about 50 ms on a slow core.
pub const EVALUATION: Cost = Cost { steps: 1_000_000, bytes: 32 << 20, read: 32 << 20 };

impl AddAssign for Cost {
    fn add_assign(&mut self, more: Cost) {
        self.steps = self.steps.saturating_add(more.steps);
        self.bytes = self.bytes.saturating_add(more.bytes);
        self.read = self.read.saturating_add(more.read);
    }
}

/// What evaluations have used of what they may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fuel {
    limit: Cost,
    spent: Cost,
    /// Beyond so many steps the evaluation is heavy, and is stopped to be made elsewhere.
    inline_steps: u64,
    /// The stored values that were read, each with the piece of work that read it last.
    read: BTreeMap<ValueId, (ValueRef, u64)>,
    /// The number of this piece of work.
    piece: u64,
    /// The part of what was spent on reading that a piece of work before this one had read too.
    read_before: u64,
}

impl Fuel {
    pub fn new(limit: Cost) -> Fuel {
        let (spent, read) = (Cost::default(), BTreeMap::new());
        Fuel { limit, spent, inline_steps: u64::MAX, read, piece: 1, read_before: 0 }
    }

    /// The same, stopped with [`super::Stop::Heavy`] when it takes more than this many steps.
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

    /// What was spent, but for values that are in memory because a piece of work before this one has read them.
    pub fn added(&self) -> Cost {
        Cost { read: self.spent.read - self.read_before, ..self.spent }
    }

    /// As new for the next piece of work.
    pub fn refill(&mut self) {
        self.spent = Cost::default();
        self.read_before = 0;
        self.piece += 1;
    }

    /// The stored values that this piece of work and those before it have read.
    pub fn values_read(&self) -> impl Iterator<Item = ValueRef> {
        self.read.values().map(|(stored, _)| *stored)
    }

    /// A stored value that is read whatever it takes. True if no piece of work has read it.
    pub fn note_read(&mut self, stored: ValueRef) -> bool {
        let known = self.read.contains_key(&stored.id);
        self.read.entry(stored.id).or_insert((stored, 0));
        !known
    }

    /// Pays for a stored value, once.
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
