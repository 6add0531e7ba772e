//! What a transition has used, of what it may.

use std::mem;

use super::Env;
use eddyline_language::data::ValueRef;
use eddyline_language::expr::{Cost, EVALUATION, Fuel};

/// Counts what a decision costs: for each piece of work, so that one that is too much fails by itself, and in all, so
/// that the rest is put off when it is enough for one transition. A stored value counts for each piece of work that reads
/// it, so that none fails because of what came before it, and once in all.
#[derive(Debug)]
pub(super) struct Meter {
    limit: Cost,
    inline_steps: u64,
    /// Of the pieces of work before this one, and of all that is no evaluation.
    before: Cost,
    fuel: Fuel,
}

impl Meter {
    pub fn new(env: &Env<'_>) -> Meter {
        let inline_steps = env.inline_steps.unwrap_or(u64::MAX);
        Meter { limit: env.budget, inline_steps, before: Cost::default(), fuel: Fuel::new(EVALUATION) }
    }

    /// The next piece of work, of which every evaluation draws on the same fuel.
    pub fn next(&mut self) {
        self.before += self.fuel.added();
        self.fuel.refill();
    }

    /// What evaluations may still use. It is given back by [`Meter::refuel`].
    pub fn take_fuel(&mut self) -> Fuel {
        let fuel = mem::take(&mut self.fuel);
        fuel.inline(self.inline_steps.saturating_sub(self.before.steps))
    }

    pub fn refuel(&mut self, fuel: Fuel) {
        self.fuel = fuel;
    }

    /// Counts work that is done in any case.
    pub fn add(&mut self, cost: Cost) {
        self.before += cost;
    }

    /// Counts a stored value that is read in any case.
    pub fn read(&mut self, stored: ValueRef) {
        if self.fuel.note_read(stored) {
            self.before += Cost { read: stored.read_bytes(), ..Cost::default() };
        }
    }

    /// The stored values that were read so far.
    pub fn values_read(&self) -> impl Iterator<Item = ValueRef> {
        self.fuel.values_read()
    }

    /// Whether the transition has used its share: what is left is for the next one.
    pub fn is_spent(&self) -> bool {
        let spent = self.spent();
        spent.steps >= self.limit.steps || spent.bytes >= self.limit.bytes || spent.read >= self.limit.read
    }

    /// Whether it is more than should be decided inline.
    pub fn is_heavy(&self) -> bool {
        self.spent().steps > self.inline_steps
    }

    fn spent(&self) -> Cost {
        let mut spent = self.before;
        spent += self.fuel.added();
        spent
    }
}
