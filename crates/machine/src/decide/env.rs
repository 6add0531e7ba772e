//! What a decision depends on besides the run and its inputs, and why there may be none.

use super::{BUDGET, MAX_ACTIVATIONS, MAX_TOUCHED};
use crate::ids::Millis;
use eddyline_language::data::ValueRef;
use eddyline_language::expr::Cost;

/// What a decision depends on besides the run and its inputs.
#[derive(Debug, Clone)]
pub struct Env<'a> {
    /// The store's time.
    pub now: Millis,
    pub seed: [u8; 32],
    /// Where webhooks come in: `https://example.org/hooks/`.
    pub hooks: &'a str,
    /// How many activations one transition touches at most: [`MAX_TOUCHED`], unless a test wants to see what happens
    /// when there are more.
    pub max_touched: usize,
    /// What one transition uses before the rest is put off: [`BUDGET`], unless a test wants to see less.
    pub budget: Cost,
    /// How many activations a run may have: [`MAX_ACTIVATIONS`], unless a test wants to see what happens beyond.
    pub max_activations: u32,
    /// Where others wait for the caller: a decision that takes more steps than this halts with [`Halt::Heavy`], and is
    /// to be made again elsewhere without this limit. What is decided does not depend on it.
    pub inline_steps: Option<u64>,
}

impl<'a> Env<'a> {
    /// With the usual limits.
    pub fn new(now: Millis, seed: [u8; 32], hooks: &'a str) -> Env<'a> {
        let (max_touched, max_activations) = (MAX_TOUCHED, MAX_ACTIVATIONS);
        Env { now, seed, hooks, max_touched, budget: BUDGET, max_activations, inline_steps: None }
    }
}

/// Why there is no decision.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Halt {
    /// The decision has read these stored values so far, and some of them are not loaded: load them into
    /// [`crate::Run::values`] and start over. No other value of the run has to be loaded.
    #[error("the decision needs the values {0:?}")]
    Need(Vec<ValueRef>),
    /// It takes more than [`Env::inline_steps`]: decide again without that limit, where nobody waits for it.
    #[error("the decision is too much work to be made inline")]
    Heavy,
    /// An invariant does not hold. Nothing may be committed.
    #[error("the state of the run is not one that can be reached, please report this: {0}")]
    Bug(String),
}
