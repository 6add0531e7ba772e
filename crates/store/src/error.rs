//! Errors, split by what the caller can do about them.

use eddyline_machine::{RunId, Version};

use crate::commit::Consumed;
use crate::document::DocumentKey;

pub type Result<T> = std::result::Result<T, StoreError>;

/// The store itself failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Nothing was written. Reads still work, and writes succeed again once there is space.
    #[error("the disk is full; nothing was written: {0}")]
    Full(String),
    /// Nothing was written; try again later.
    #[error("the store is unavailable: {0}")]
    Unavailable(String),
    /// The commands may or may not have been written: submit the same ones again to find out.
    #[error("the connection closed before the store responded")]
    Unknown,
    /// Stored data differs from what was written. It is never used.
    #[error("the store is damaged: {0}")]
    Corrupt(String),
    /// The store is closed, by its owner or because its disk cannot be trusted any more.
    #[error("the store is closed: {0}")]
    Closed(String),
}

impl StoreError {
    /// The message where the context says that a store does not open: without "the store is unavailable".
    pub fn reason(&self) -> String {
        match self {
            StoreError::Unavailable(why) => why.clone(),
            error => error.to_string(),
        }
    }
}

/// Why one command was refused. Nothing of it was written, and the other commands of its batch are not affected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The transition was decided on another version of the run: load it and decide again.
    #[error("the run is at version {current:?}")]
    Conflict { current: Option<Version> },
    /// Another run has the idempotency key.
    #[error("the idempotency key belongs to run {run}")]
    KeyTaken { run: RunId, fingerprint: [u8; 32] },
    /// Another run has the unique key; `run` is the first in line.
    #[error("the unique key belongs to run {run}")]
    UniqueTaken { run: RunId },
    /// The line of the unique key has [`LINE_LIMIT`](crate::LINE_LIMIT) runs.
    #[error("{} runs have or wait for the unique key, which is the maximum", crate::LINE_LIMIT)]
    LineFull,
    /// Some items that the commit consumes no longer exist or are not due: decide again without them.
    #[error("{} of the items to consume no longer exist or are not due", .0.len())]
    Gone(Vec<Consumed>),
    /// The store does not take it, now or ever: a value is out of range, or too long for an index.
    #[error("the store cannot store it: {0}")]
    Unstorable(String),
    /// The document is at another revision.
    #[error("the document {key:?} is at revision {current:?}")]
    Revision { key: DocumentKey, current: Option<u64> },
}
