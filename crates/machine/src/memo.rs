//! The memo of a code run: the recorded results of its function's steps.

use crate::ids::Millis;
use crate::run::{Activations, End, Memo, MemoKind, Place, Run, State};

/// An entry of a code run's memo, as sent to its function.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoEntry<'a> {
    pub name: &'a str,
    pub kind: MemoKind,
    pub n: u64,
    /// The time of that change, by the store's clock.
    pub at: Millis,
    /// Its latest change was not made by the function itself.
    pub news: bool,
    pub attempt: u32,
    pub state: MemoState<'a>,
    /// Its function can undo it.
    pub undo: bool,
    /// What opens it, for a pending wait for a webhook or a person.
    pub token: Option<&'a str>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum MemoState<'a> {
    Ended(&'a End),
    Pending,
    /// To be retried by the function; `due` once its back-off is over.
    Retry {
        due: bool,
    },
}

impl Run {
    /// The memo entries that changed after `n`, without those that the current attempt of the function has forgotten.
    pub fn memo(&self, after: u64) -> impl Iterator<Item = MemoEntry<'_>> {
        self.index.memo.iter().filter_map(move |(name, id)| {
            let activation = self.at(*id);
            let Place::Memo(memo) = &activation.place else { return None };
            let forgotten = self.header.code.as_ref().is_some_and(|code| code.has_forgotten(memo, activation.end()));
            let state = match &activation.state {
                State::Ended(end) => MemoState::Ended(end),
                State::Retrying { due, .. } => MemoState::Retry { due: *due },
                _ => MemoState::Pending,
            };
            let token = activation.gate_token.as_deref().filter(|_| matches!(state, MemoState::Pending));
            let Memo { kind, n, at, news, undo, .. } = *memo;
            let entry = MemoEntry { name, kind, n, at, news, attempt: activation.attempt, state, undo, token };
            (memo.n > after && !forgotten).then_some(entry)
        })
    }
}
