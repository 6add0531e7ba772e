//! What an evaluation may use: steps, which stand for time, and bytes, which stand for memory. Both are counted in the
//! same way wherever it runs, so that whether it is too much never depends on the machine or on what ran before.

use std::ops::AddAssign;

use super::halt::{Halt, Res};

/// An amount of work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// A step is about one node, one element looked at, or 64 bytes of text.
    pub steps: u64,
    /// Memory that is allocated on the way, whether it is freed again or not.
    pub bytes: u64,
}

/// What the expressions and templates of one activation may use together each time the run decides on it. Measured
/// with `cargo bench -p eddyline-machine`: at most about 50 ms on a slow core.
pub const EVALUATION: Cost = Cost { steps: 1_000_000, bytes: 32 << 20 };

impl AddAssign for Cost {
    fn add_assign(&mut self, more: Cost) {
        self.steps = self.steps.saturating_add(more.steps);
        self.bytes = self.bytes.saturating_add(more.bytes);
    }
}

/// What evaluations have used of what they may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fuel {
    limit: Cost,
    spent: Cost,
    /// Beyond so many steps the evaluation is heavy, and is stopped to be made elsewhere.
    inline_steps: u64,
}

impl Fuel {
    pub fn new(limit: Cost) -> Fuel {
        Fuel { limit, spent: Cost::default(), inline_steps: u64::MAX }
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
        Ok(())
    }
}

impl Default for Fuel {
    fn default() -> Fuel {
        Fuel::new(EVALUATION)
    }
}
