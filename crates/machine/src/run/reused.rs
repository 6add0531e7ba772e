//! What a retry or a rerun takes over from an earlier run.

use serde::{Deserialize, Serialize};

use super::{End, MemoKind, is_default};
use eddyline_language::data::Data;

/// An activation that a retry or a rerun takes over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Reused {
    pub activation: String,
    pub how: TakenOver,
    pub input: Option<Data>,
    /// Events it emitted, by name.
    pub emits: Vec<(String, Data)>,
    /// Set for a memo entry.
    pub memo: Option<MemoKind>,
    /// For a memo entry: the number of its latest change. Entries are taken over in this order.
    #[serde(default, skip_serializing_if = "is_default")]
    pub n: u64,
    /// For a memo entry: its function can undo it.
    #[serde(default, skip_serializing_if = "is_default")]
    pub undo: bool,
}

/// How much of an activation is taken over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum TakenOver {
    /// All of it: `Completed` or `Skipped`.
    Whole(End),
    /// Only its contents, because they may have to be undone; its gate opens with the earlier run's payload.
    Inside { gate: Option<Data> },
}

impl Reused {
    pub fn payloads(&self) -> impl Iterator<Item = &Data> {
        let own = match &self.how {
            TakenOver::Whole(End::Completed(output)) => Some(output),
            TakenOver::Whole(_) => None,
            TakenOver::Inside { gate } => gate.as_ref(),
        };
        own.into_iter().chain(&self.input).chain(self.emits.iter().map(|(_, payload)| payload))
    }
}
