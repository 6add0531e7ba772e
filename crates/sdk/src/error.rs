//! What can go wrong between a program and the server, and what to do about it.

use std::time::Duration;

use eddyline_protocol::{ApiError, Code, Failure};

type Cause = Box<dyn std::error::Error + Send + Sync>;

/// Why a call came to nothing. [`Error::is_retryable`] says whether the same call may help later.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The server answered, and the answer is no. The message is meant for people, `error.code` for programs.
    #[error("{}{}", .error.message, details(.error))]
    Api { status: u16, error: ApiError },
    /// There is no connection to the server: nothing was asked of it. Is it running, and is this its address?
    #[error("cannot reach Eddyline at {url}: {}; is `eddy serve` running there?", chain(.source.as_ref()))]
    Connect { url: String, source: Cause },
    /// The connection ended before the answer came: what was asked may or may not have been done.
    #[error("the connection to {url} ended before the answer came: {}", chain(.source.as_ref()))]
    Interrupted { url: String, source: Cause },
    /// The answer did not come in time: what was asked may or may not have been done.
    #[error("the server did not answer in time")]
    Timeout,
    /// The answer is not what this version of the library understands.
    #[error("{what} cannot be read: {source}")]
    Decode { what: String, source: serde_json::Error },
    /// A value given by the caller is not expressible as JSON.
    #[error("{what} cannot be written as JSON: {source}")]
    Encode { what: String, source: serde_json::Error },
    /// The answer is larger than this library takes.
    #[error("the answer has more than {limit} bytes; ask for fewer items at a time")]
    TooLarge { limit: usize },
    /// The address, the key or the namespace cannot be used as it is written.
    #[error("{0}")]
    Config(String),
    /// The run that was waited for has failed.
    #[error("run {run_id} failed: {}: {}", .failure.kind, .failure.message)]
    RunFailed { run_id: String, failure: Box<Failure> },
    /// The run that was waited for has completed, and its output is larger than 2 MiB: there are references in it, which
    /// [`crate::Run::value`] follows.
    #[error("the output of run {run_id} is larger than 2 MiB: read the references in it with `Run::value`")]
    LargeOutput { run_id: String, output: Box<serde_json::Value> },
    /// The run that was waited for was cancelled.
    #[error("run {run_id} was cancelled")]
    RunCancelled { run_id: String },
}

impl Error {
    /// Whether the same call may well succeed later. Of a call that changes something, see the variant for whether it may
    /// have been done already.
    pub fn is_retryable(&self) -> bool {
        match self {
            Error::Api { status, .. } => matches!(status, 408 | 429 | 502 | 503 | 504),
            Error::Connect { .. } | Error::Interrupted { .. } | Error::Timeout => true,
            _ => false,
        }
    }

    /// The code of a refusal.
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

    /// It cannot be done in the state that things are in.
    pub fn is_conflict(&self) -> bool {
        self.code() == Some(Code::Conflict)
    }
}

/// An error, and what the server said about when to come back.
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

/// An error with the errors behind it: the outermost alone often says only that there was one.
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

/// Every problem on a line of its own.
fn details(error: &ApiError) -> String {
    let line = |detail: &serde_json::Value| match (detail.as_str(), detail["path"].as_str(), detail["message"].as_str())
    {
        (Some(text), ..) => format!("\n  {text}"),
        (_, Some(path), Some(message)) => format!("\n  {path}: {message}"),
        _ => format!("\n  {detail}"),
    };
    error.details.iter().map(line).collect()
}
