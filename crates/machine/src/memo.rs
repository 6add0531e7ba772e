//! The memo of a code run: the recorded results of its function's steps.

use crate::run::{Activations, End, MemoKind, Place, Run, State};

/// An entry of a code run's memo, as sent to its function.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoEntry<'a> {
    pub name: &'a str,
    pub kind: MemoKind,
    pub n: u64,
    /// Its latest change was not made by the function itself.
    pub news: bool,
    pub attempt: u32,
    pub state: MemoState<'a>,
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
    /// The memo entries that changed after `n`. Failures of earlier attempts of the function are left out.
    pub fn memo(&self, after: u64) -> impl Iterator<Item = MemoEntry<'_>> {
        let attempt = self.activations.first().map_or(0, |root| root.attempt);
        self.index.memo.iter().filter_map(move |(name, id)| {
            let activation = self.at(*id);
            let Place::Memo(memo) = &activation.place else { return None };
            let forgotten = matches!(activation.end(), Some(End::Failed(_) | End::Cancelled)) && memo.made_by < attempt;
            let state = match &activation.state {
                State::Ended(end) => MemoState::Ended(end),
                State::Retrying { due, .. } => MemoState::Retry { due: *due },
                _ => MemoState::Pending,
            };
            let (kind, n, news, attempt) = (memo.kind, memo.n, memo.news, activation.attempt);
            let entry = MemoEntry { name, kind, n, news, attempt, state };
            (memo.n > after && !forgotten).then_some(entry)
        })
    }
}
