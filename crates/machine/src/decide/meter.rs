//! The budget of a transition.

use std::mem;

use super::Env;
use eddyline_language::data::ValueRef;
use eddyline_language::expr::{Cost, EVALUATION, Fuel};

/// Counts the cost of a decision: per unit of work, so that an expensive one fails by itself, and in total, so that the
/// rest is deferred to the next transition. A stored value counts for each unit of work that reads it, so that none
/// fails because of earlier ones, but only once in total.
#[derive(Debug)]
pub(super) struct Meter {
    limit: Cost,
    inline_steps: u64,
    /// The cost of earlier units of work, and of everything other than evaluations.
    before: Cost,
    fuel: Fuel,
}

impl Meter {
    pub fn new(env: &Env<'_>) -> Meter {
        let inline_steps = env.inline_steps.unwrap_or(u64::MAX);
        Meter { limit: env.budget, inline_steps, before: Cost::default(), fuel: Fuel::new(EVALUATION) }
    }

    /// Starts the next unit of work; its evaluations share the same fuel.
    pub fn next(&mut self) {
        self.before += self.fuel.added();
        self.fuel.refill();
    }

    /// Takes the fuel for an evaluation; return it with [`Meter::refuel`].
    pub fn take_fuel(&mut self) -> Fuel {
        let fuel = mem::take(&mut self.fuel);
        fuel.inline(self.inline_steps.saturating_sub(self.before.steps))
    }

    pub fn refuel(&mut self, fuel: Fuel) {
        self.fuel = fuel;
    }

    /// Counts work that is done regardless of the budget.
    pub fn add(&mut self, cost: Cost) {
        self.before += cost;
    }

    /// Counts a stored value that is read regardless of the budget.
    pub fn read(&mut self, stored: ValueRef) {
        if self.fuel.note_read(stored) {
            self.before += Cost { read: stored.read_bytes(), ..Cost::default() };
        }
    }

    /// The stored values read so far.
    pub fn values_read(&self) -> impl Iterator<Item = ValueRef> {
        self.fuel.values_read()
    }

    /// Whether the budget is used up: the rest is left to the next transition.
    pub fn is_spent(&self) -> bool {
        let spent = self.spent();
        spent.steps >= self.limit.steps || spent.bytes >= self.limit.bytes || spent.read >= self.limit.read
    }

    /// Whether it exceeds [`Env::inline_steps`].
    pub fn is_heavy(&self) -> bool {
        self.spent().steps > self.inline_steps
    }

    fn spent(&self) -> Cost {
        let mut spent = self.before;
        spent += self.fuel.added();
        spent
    }
}
