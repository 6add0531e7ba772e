//! The runs that a process is deciding on. If it dies meanwhile, the next process suspects them.

use eddyline_machine::RunId;

/// The runs being decided on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Handling {
    /// Decided in the committer, one after the other.
    pub batch: Vec<RunId>,
    /// Decided on threads of their own, without a time limit.
    pub apart: Vec<RunId>,
}

impl Handling {
    pub fn is_empty(&self) -> bool {
        self.batch.is_empty() && self.apart.is_empty()
    }

    pub fn runs(&self) -> impl Iterator<Item = RunId> {
        self.batch.iter().chain(&self.apart).copied()
    }
}
