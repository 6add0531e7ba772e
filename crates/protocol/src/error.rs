//! What is said when something cannot be done: one shape for all.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The body of every answer that is not a success.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorBody {
    pub error: ApiError,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ApiError {
    /// What a program can switch on.
    pub code: Code,
    /// What a person can act on.
    pub message: String,
    /// Each problem for itself, where there are several or where one has a place: texts, or objects with `path`,
    /// `message`, `line`, `column` and `help`.
    #[serde(default)]
    pub details: Vec<Value>,
}

/// The codes, each with one HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// 400: the request is not what it should be: its JSON, a parameter, a header.
    BadRequest,
    /// 401: there is no key, or not one that is known.
    Unauthorized,
    /// 403: the key's scopes do not reach so far, or the request comes from where it must not.
    Forbidden,
    /// 404: there is no such thing in this namespace.
    NotFound,
    /// 405.
    MethodNotAllowed,
    /// 408: the request took too long to arrive.
    Timeout,
    /// 409: it cannot be done in the state that things are in.
    Conflict,
    /// 410: its timeline is no longer kept.
    Trimmed,
    /// 413: the body or a payload is over its limit.
    TooLarge,
    /// 415: the body is neither JSON nor, where that is taken, YAML.
    UnsupportedMediaType,
    /// 422: it was understood, and is wrong: a definition with problems, an input that its schema refuses.
    Invalid,
    /// 429: more than is taken at the moment; `Retry-After` says when to come back.
    TooMany,
    /// 431: the headers are over their limit.
    HeadersTooLarge,
    /// 500: a fault of the server's own. Nothing was changed.
    Internal,
    /// 503: the store is away, or the server is stopping. The same request may be sent again.
    Unavailable,
    /// One that this version does not know.
    #[serde(other)]
    Unknown,
}

impl Code {
    pub const ALL: [Code; 15] = [
        Code::BadRequest,
        Code::Unauthorized,
        Code::Forbidden,
        Code::NotFound,
        Code::MethodNotAllowed,
        Code::Timeout,
        Code::Conflict,
        Code::Trimmed,
        Code::TooLarge,
        Code::UnsupportedMediaType,
        Code::Invalid,
        Code::TooMany,
        Code::HeadersTooLarge,
        Code::Internal,
        Code::Unavailable,
    ];

    pub fn status(self) -> u16 {
        match self {
            Code::BadRequest => 400,
            Code::Unauthorized => 401,
            Code::Forbidden => 403,
            Code::NotFound => 404,
            Code::MethodNotAllowed => 405,
            Code::Timeout => 408,
            Code::Conflict => 409,
            Code::Trimmed => 410,
            Code::TooLarge => 413,
            Code::UnsupportedMediaType => 415,
            Code::Invalid => 422,
            Code::TooMany => 429,
            Code::HeadersTooLarge => 431,
            Code::Internal | Code::Unknown => 500,
            Code::Unavailable => 503,
        }
    }
}

/// Why an attempt, a step or a run failed.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Failure {
    /// What a program can switch on: whatever a handler reports, or a kind of Eddyline's own such as `LeaseLost`.
    #[serde(default = "Failure::default_kind")]
    pub kind: String,
    #[serde(default)]
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stack: Option<String>,
    /// The activation in which it began, where that is not the one that carries it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// What failed besides: other steps, undo, `finally`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<Failure>,
}

impl Failure {
    pub fn new(kind: impl Into<String>, message: impl Into<String>) -> Failure {
        Failure { kind: kind.into(), message: message.into(), ..Failure::default() }
    }

    fn default_kind() -> String {
        "Error".to_owned()
    }
}
