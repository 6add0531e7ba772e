//! The environment of a decision, and the reasons why there may be none.

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
    /// Base URL of webhooks: `https://example.org/hooks/`.
    pub hooks: &'a str,
    /// The most activations one transition touches: [`MAX_TOUCHED`], or less in a test.
    pub max_touched: usize,
    /// What one transition may use before the rest is deferred: [`BUDGET`], or less in a test.
    pub budget: Cost,
    /// The most activations a run may have: [`MAX_ACTIVATIONS`], or less in a test.
    pub max_activations: u32,
    /// For callers that others wait for: a decision that takes more steps than this halts with [`Halt::Heavy`] and must
    /// be repeated elsewhere without this limit. It does not influence what is decided.
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
    /// [`crate::Run::values`] and start over. No other value of the run is needed yet.
    #[error("the decision needs the values {0:?}")]
    Need(Vec<ValueRef>),
    /// It takes more than [`Env::inline_steps`]: decide again without that limit, where nothing else waits.
    #[error("the decision takes too many steps to be made inline")]
    Heavy,
    /// An invariant is violated. Nothing may be committed.
    #[error("the run is in an impossible state, please report this: {0}")]
    Bug(String),
}
