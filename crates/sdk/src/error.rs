//! Errors of calls to the server.

use std::time::Duration;

use eddyline_protocol::{ApiError, Code, Failure};

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Why a call failed. [`Error::is_retryable`] says whether the same call may succeed later.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server refused the call. The message is for people, `error.code` for programs.
    #[error("{}{}", .error.message, details(.error))]
    Api { status: u16, error: ApiError },
    /// The server could not be reached, so the call had no effect. Check that it is running at this address.
    #[error("cannot reach Eddyline at {url}: {}; is `eddy serve` running there?", chain(.source.as_ref()))]
    Connect { url: String, source: Cause },
    /// The connection ended before the response arrived: the call may or may not have taken effect.
    #[error("the connection to {url} ended before the response arrived: {}", chain(.source.as_ref()))]
    Interrupted { url: String, source: Cause },
    /// The response did not arrive in time: the call may or may not have taken effect.
    #[error("the server did not respond in time")]
    Timeout,
    /// This version of the library cannot parse the response.
    #[error("cannot parse {what}: {source}")]
    Decode { what: String, source: serde_json::Error },
    /// A value from the caller cannot be serialised as JSON.
    #[error("cannot serialise {what} as JSON: {source}")]
    Encode { what: String, source: serde_json::Error },
    /// The response exceeds the size limit of this library.
    #[error("the response has more than {limit} bytes; request fewer items at a time")]
    TooLarge { limit: usize },
    /// The address, the key or the namespace is invalid.
    #[error("{0}")]
    Config(String),
    /// The run has failed.
    #[error("run {run_id} failed: {}: {}", .failure.kind, .failure.message)]
    RunFailed { run_id: String, failure: Box<Failure> },
    /// The run has completed, but its output is larger than 2 MiB. The output contains references; read them with
    /// [`crate::Run::value`].
    #[error("the output of run {run_id} is larger than 2 MiB: read the references in it with `Run::value`")]
    LargeOutput { run_id: String, output: Box<serde_json::Value> },
    /// The run was cancelled.
    #[error("run {run_id} was cancelled")]
    RunCancelled { run_id: String },
}

impl Error {
    /// Whether the same call may succeed later. For a call that changes something, the variant says whether it may
    /// already have taken effect.
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Api { status, .. } => matches!(status, 408 | 429 | 502 | 503 | 504),
            Error::Connect { .. } | Error::Interrupted { .. } | Error::Timeout => true,
            _ => false,
        }
    }

    /// The error code, if the server refused the call.
    pub fn code(&self) -> Option<Code> {
        match self {
            Error::Api { error, .. } => Some(error.code),
            _ => None,
        }
    }

    /// There is no such thing in this namespace.
    pub fn is_not_found(&self) -> bool {
        self.code() == Some(Code::NotFound)
    }

    /// Not possible in the current state.
    pub fn is_conflict(&self) -> bool {
        self.code() == Some(Code::Conflict)
    }
}

/// An error with the server's `Retry-After`.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub error: Error,
    pub retry_after: Option<Duration>,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Refusal {
        Refusal { error, retry_after: None }
    }
}

/// An error with its sources: the outermost alone often carries little information.
pub(crate) fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let (mut text, mut at) = (error.to_string(), error.source());
    while let Some(source) = at {
        let more = source.to_string();
        if !text.contains(&more) {
            text.push_str(": ");
            text.push_str(&more);
        }
        at = source.source();
    }
    text
}

/// Each problem on its own line.
fn details(error: &ApiError) -> String {
    let line = |detail: &serde_json::Value| match (detail.as_str(), detail["path"].as_str(), detail["message"].as_str())
    {
        (Some(text), ..) => format!("\n  {text}"),
        (_, Some(path), Some(message)) => format!("\n  {path}: {message}"),
        _ => format!("\n  {detail}"),
    };
    error.details.iter().map(line).collect()
}
