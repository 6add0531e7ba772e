//! What can go wrong, split by what the caller can do about it.

use eddyline_machine::{RunId, Version};

use crate::commit::Taken;
use crate::document::DocumentKey;

pub type Result<T> = std::result::Result<T, StoreError>;

/// The store itself could not do it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StoreError {
    /// Nothing was written; what is stored can still be read, and writing goes on by itself once there is space.
    #[error("the disk is full, nothing was written: {0}")]
    Full(String),
    /// Nothing was written; try again later.
    #[error("the store is away: {0}")]
    Unavailable(String),
    /// It may or may not have been written: submit the same commands again, which tells.
    #[error("the connection was cut before the answer came")]
    Unknown,
    /// Something stored is not what was written. It is never used.
    #[error("the store is damaged: {0}")]
    Corrupt(String),
    /// The store is closed, by its owner or because it could not be trusted any more.
    #[error("the store is closed: {0}")]
    Closed(String),
}

/// Why one command was refused. Nothing of it was written, and the other commands of its batch are not affected.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// The run is at another version than the transition was decided on: load it and decide again.
    #[error("the run is at version {current:?}")]
    Conflict { current: Option<Version> },
    /// The idempotency key belongs to a run already.
    #[error("the key belongs to run {run}")]
    KeyTaken { run: RunId, fingerprint: [u8; 32] },
    /// Another run has the unique key: this is the first in line.
    #[error("the unique key belongs to run {run}")]
    UniqueTaken { run: RunId },
    /// So many runs wait for the unique key that no other can.
    #[error("{} runs have or want the unique key", crate::LINE_LIMIT)]
    LineFull,
    /// Some of what it takes is not there (any more), or not due: decide again without.
    #[error("{} of what it takes are gone", .0.len())]
    Gone(Vec<Taken>),
    /// The document is at another revision.
    #[error("the document {key:?} is at revision {current:?}")]
    Revision { key: DocumentKey, current: Option<u64> },
}
