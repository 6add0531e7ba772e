//! Which runs a process is handling: what the next one suspects, should this one die meanwhile.

use eddyline_machine::RunId;

/// The runs that are being decided on at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Handling {
    /// Decided one after the other, within moments.
    pub batch: Vec<RunId>,
    /// Decided on threads of their own, for as long as that takes.
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
