//! The errors of the engine.

use eddyline_language::definition::Problems;
use eddyline_machine::{Millis, RunId};
use eddyline_store::StoreError;

pub type Result<T> = std::result::Result<T, EngineError>;

#[derive(Debug, Clone, thiserror::Error)]
pub enum EngineError {
    #[error("there is no {what} {id}")]
    NotFound { what: &'static str, id: String },
    /// The run's timeline was deleted by retention.
    #[error("the timeline of run {0} is no longer kept")]
    Trimmed(RunId),
    /// The definition has problems; all of them are listed.
    #[error("the definition has {} problem{}", .0.0.len(), if .0.0.len() == 1 { "" } else { "s" })]
    Definition(Problems),
    /// The request is invalid whatever the state.
    #[error("{message}")]
    Invalid { message: String, details: Vec<String> },
    /// The request is not possible in the current state.
    #[error("{0}")]
    Conflict(String),
    #[error("{what} is {bytes} bytes; the limit is {limit}")]
    TooLarge { what: &'static str, bytes: usize, limit: usize },
    /// The server is at a limit; the request may succeed later.
    #[error("{message}")]
    TooMany { message: String, retry_after_ms: Millis },
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Processes died while deciding on this run: nothing is decided on it until it is released.
    #[error("{0}")]
    Quarantined(String),
    #[error("the engine is shutting down")]
    Stopped,
    /// An invariant is broken. Nothing was changed.
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
