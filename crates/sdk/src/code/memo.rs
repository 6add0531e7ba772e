//! What is known about the entries of a run, from its memo, from news, and from the outcomes of reports.

use std::sync::Arc;

use eddyline_protocol::{EntryKind, EntryStatus, Failure, MemoEntry};
use serde_json::{Map, Value};

use super::time::millis;

/// The full name of an entry: with its scope, key and number.
pub(crate) type EntryName = Arc<str>;

/// The last known state of an entry.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Known {
    pub kind: EntryKind,
    pub n: u64,
    /// When it changed, in milliseconds since 1970.
    pub at_ms: Option<u64>,
    pub attempt: u32,
    pub status: Status,
    /// It is a completed step that can be undone.
    pub undo: bool,
    /// What opens a wait for a webhook or a person.
    pub opener: Option<Opener>,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Status {
    Pending,
    /// A step between two attempts.
    BackOff {
        due: bool,
    },
    Ended(Ended),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Ended {
    Completed(Value),
    Failed(Failure),
    Cancelled,
}

/// The token that opens a gate, and the URL that does it with a request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Opener {
    pub token: String,
    pub url: String,
}

impl Known {
    pub fn is_ended(&self) -> bool {
        matches!(self.status, Status::Ended(_))
    }

    /// Whether the server brings its next change: there is nothing to start.
    pub fn is_under_way(&self) -> bool {
        matches!(self.status, Status::Pending | Status::BackOff { due: false })
    }
}

impl From<MemoEntry> for Known {
    fn from(entry: MemoEntry) -> Known {
        let status = match entry.status {
            EntryStatus::Pending => Status::Pending,
            EntryStatus::Retry => Status::BackOff { due: entry.due == Some(true) },
            EntryStatus::Completed => Status::Ended(Ended::Completed(entry.output)),
            EntryStatus::Failed => Status::Ended(Ended::Failed(entry.error.unwrap_or_default())),
            // The code of the function may expect any type; nobody chose a value for it.
            EntryStatus::Skipped => Status::Ended(Ended::Completed(Value::Null)),
            EntryStatus::Cancelled => Status::Ended(Ended::Cancelled),
        };
        Known {
            kind: entry.kind,
            n: entry.n,
            at_ms: millis(&entry.at),
            attempt: entry.attempt,
            status,
            undo: entry.undo,
            opener: entry.token.map(|token| Opener { token, url: entry.url.unwrap_or_default() }),
        }
    }
}

/// Parses the entries of a memo page or of news.
pub(crate) fn parse(entries: Map<String, Value>) -> Result<Vec<(EntryName, Known)>, String> {
    let parsed = entries.into_iter().map(|(name, entry)| match serde_json::from_value::<MemoEntry>(entry) {
        Ok(entry) => Ok((EntryName::from(name), entry.into())),
        Err(error) => Err(format!("cannot parse the entry `{name}` of the memo: {error}")),
    });
    parsed.collect()
}

pub(crate) fn kind_name(kind: EntryKind) -> &'static str {
    match kind {
        EntryKind::Step => "step",
        EntryKind::Call => "call",
        EntryKind::Sleep => "sleep",
        EntryKind::Wait => "wait",
        EntryKind::Child => "child",
        EntryKind::Publish => "publish",
    }
}
