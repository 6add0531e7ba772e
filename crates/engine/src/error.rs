//! What a caller is told when something cannot be done.

use eddyline_language::definition::Problems;
use eddyline_machine::{Millis, RunId};
use eddyline_store::StoreError;

pub type Result<T> = std::result::Result<T, EngineError>;

#[derive(Debug, Clone, thiserror::Error)]
pub enum EngineError {
    #[error("there is no {what} {id}")]
    NotFound { what: &'static str, id: String },
    /// It was there; its timeline is no longer kept.
    #[error("the timeline of run {0} is no longer kept")]
    Trimmed(RunId),
    /// The definition has problems, all of them listed.
    #[error("the definition has {} problem(s)", .0.0.len())]
    Definition(Problems),
    /// What was asked for is wrong in itself.
    #[error("{message}")]
    Invalid { message: String, details: Vec<String> },
    /// It cannot be done in the state that things are in.
    #[error("{0}")]
    Conflict(String),
    #[error("{what} is {bytes} bytes, and the limit is {limit}")]
    TooLarge { what: &'static str, bytes: usize, limit: usize },
    /// There is enough to do already; later there may be room.
    #[error("{message}")]
    TooMany { message: String, retry_after_ms: Millis },
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Processes ended while they handled this run: nothing is decided on it until it is released.
    #[error("{0}")]
    Quarantined(String),
    #[error("the engine is shutting down")]
    Stopped,
    /// An invariant does not hold. Nothing was changed.
    #[error("{0}")]
    Bug(String),
}

impl EngineError {
    pub(crate) fn invalid(message: impl Into<String>) -> EngineError {
        EngineError::Invalid { message: message.into(), details: Vec::new() }
    }

    pub(crate) fn no_run(run: RunId) -> EngineError {
        EngineError::NotFound { what: "run", id: run.to_string() }
    }

    pub(crate) fn no_version(flow: &str, version: &str) -> EngineError {
        let shown: String = version.chars().take(80).collect();
        EngineError::NotFound { what: "version", id: format!("{shown} of flow {flow}") }
    }

    pub(crate) fn no_flow(name: &str) -> EngineError {
        EngineError::NotFound { what: "flow", id: name.to_owned() }
    }
}
