//! Why an attempt, an activation or a run failed.

use serde::{Deserialize, Serialize};

use crate::wire::cut;

/// How many further failures a failure lists.
pub const MAX_ALSO: usize = 10;
/// The longest texts of a failure, in bytes; longer ones are cut and end in [`crate::wire::CUT`].
pub const MAX_KIND_BYTES: usize = 256;
pub const MAX_MESSAGE_BYTES: usize = 8 << 10;
pub const MAX_STACK_BYTES: usize = 32 << 10;

/// A failure, as recorded and shown to users.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Failure {
    /// For programs to match on: one of [`kind`], or a kind that a handler reports.
    pub kind: String,
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stack: Option<String>,
    /// The activation in which it originated, if not the one that carries it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// Further failures: other steps, undo, `finally`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<Failure>,
}

/// The kinds of failure that the machine itself creates.
pub mod kind {
    pub const LEASE_LOST: &str = "LeaseLost";
    pub const TIMEOUT: &str = "Timeout";
    /// A task could not be delivered to any worker, because part of it cannot be read.
    pub const UNDELIVERABLE: &str = "Undeliverable";
    /// A retry or a rerun did not receive all values that it takes over.
    pub const INTERRUPTED: &str = "RetryInterrupted";
    pub const START_TIMEOUT: &str = "StartTimeout";
    pub const GATE_TIMEOUT: &str = "GateTimeout";
    pub const GATE_CANCELLED: &str = "GateCancelled";
    pub const EXPRESSION: &str = "ExpressionError";
    pub const FAIL_STEP: &str = "Fail";
    pub const MAX_ROUNDS: &str = "MaxRounds";
    pub const TOO_MANY_ITEMS: &str = "TooManyItems";
    pub const TOO_MANY_FAILURES: &str = "TooManyFailures";
    pub const CHILD_FAILED: &str = "ChildFailed";
    pub const CHILD_CANCELLED: &str = "ChildCancelled";
    pub const TOO_DEEP: &str = "TooDeep";
    pub const TOO_MANY_ACTIVATIONS: &str = "TooManyActivations";
    pub const DEADLINE: &str = "DeadlineExceeded";
    /// A code run ended before its function had undone this step.
    pub const NOT_UNDONE: &str = "NotUndone";
    pub const KIND_CHANGED: &str = "KindChanged";
    pub const BY_HAND: &str = "FailedByHand";
}

impl Failure {
    pub fn new(kind: impl Into<String>, message: impl Into<String>) -> Failure {
        let mut message = message.into();
        cut(&mut message, MAX_MESSAGE_BYTES);
        Failure { kind: kind.into(), message, stack: None, step: None, also: Vec::new() }
    }

    /// Cuts the texts to bounded lengths: a failure is stored in rows that are read and written as a whole.
    pub(crate) fn bounded(mut self) -> Failure {
        cut(&mut self.kind, MAX_KIND_BYTES);
        cut(&mut self.message, MAX_MESSAGE_BYTES);
        self.stack.iter_mut().for_each(|stack| cut(stack, MAX_STACK_BYTES));
        self.step.iter_mut().for_each(|step| cut(step, MAX_MESSAGE_BYTES));
        for other in std::mem::take(&mut self.also) {
            self.add(other);
        }
        self.also = self.also.into_iter().map(|other| Failure { also: Vec::new(), ..other }.bounded()).collect();
        self
    }

    /// Sets the originating step, unless already set.
    pub(crate) fn within(mut self, step: &str) -> Failure {
        self.step.get_or_insert_with(|| step.to_owned());
        self
    }

    /// Adds another failure and those it lists, flattened to one level, so that failures of nested children grow
    /// neither deep nor wide.
    pub(crate) fn add(&mut self, mut other: Failure) {
        let besides = std::mem::take(&mut other.also);
        self.also.extend(std::iter::once(other).chain(besides));
        self.also.truncate(MAX_ALSO);
    }
}
