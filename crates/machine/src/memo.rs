//! What the function of a code run remembers.

use crate::run::{Activations, End, MemoKind, Place, Run, State};

/// An entry of a code run's memo, as its function gets it.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoEntry<'a> {
    pub name: &'a str,
    pub kind: MemoKind,
    pub n: u64,
    /// Its newest change is not the function's own doing.
    pub news: bool,
    pub attempt: u32,
    pub state: MemoState<'a>,
}

#[derive(Debug, Clone, PartialEq)]
pub enum MemoState<'a> {
    Ended(&'a End),
    Pending,
    /// To be tried again by the function; `due` says that its back-off is over.
    Retry {
        due: bool,
    },
}

impl Run {
    /// What the function of a code run remembers, as far as it changed after `n`; failures of earlier attempts of the
    /// function are forgotten.
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
