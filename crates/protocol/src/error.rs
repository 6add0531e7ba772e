//! Errors: one shape for all of them.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

use crate::nullable;

/// The body of every response that is not a success.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ErrorBody {
    pub error: ApiError,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ApiError {
    /// For programs.
    pub code: Code,
    /// For people.
    pub message: String,
    /// The individual problems, if there are several or one has a location: texts, or objects with `path`, `message`,
    /// `line`, `column` and `help`.
    #[serde(default)]
    pub details: Vec<Value>,
}

/// Error codes; each has one HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// 400: the request is malformed: its JSON, a parameter, a header.
    BadRequest,
    /// 401: the key is missing or unknown.
    Unauthorized,
    /// 403: the key lacks the scope, or the request comes from a forbidden origin.
    Forbidden,
    /// 404: no such thing in this namespace.
    NotFound,
    /// 405.
    MethodNotAllowed,
    /// 408: the request took too long to arrive.
    Timeout,
    /// 409: not possible in the current state.
    Conflict,
    /// 410: the timeline has been trimmed.
    Trimmed,
    /// 413: the body or a payload exceeds its limit.
    TooLarge,
    /// 415: the body is neither JSON nor, where accepted, YAML.
    UnsupportedMediaType,
    /// 422: well-formed but invalid: a definition with problems, an input that does not match its schema.
    Invalid,
    /// 429: over a limit at the moment; `Retry-After` says when to retry.
    TooMany,
    /// 431: the headers exceed their limit.
    HeadersTooLarge,
    /// 500: an error in the server. Nothing was changed.
    Internal,
    /// 503: the store is unavailable, or the server is stopping. The request can be sent again.
    Unavailable,
    /// A code that this version does not know.
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(from = "WrittenFailure")]
pub struct Failure {
    /// For programs: a kind that a handler reports, or one of Eddyline's own such as `LeaseLost`.
    pub kind: String,
    pub message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stack: Option<String>,
    /// The activation that failed first, if it is not the one that carries this failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    /// Further failures: of other steps, undo, `finally`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub also: Vec<Failure>,
}

impl Failure {
    pub fn new(kind: impl Into<String>, message: impl Into<String>) -> Failure {
        Failure { kind: kind.into(), message: message.into(), stack: None, step: None, also: Vec::new() }
    }
}

/// The failure of a handler that gives no details.
impl Default for Failure {
    fn default() -> Failure {
        Failure::new("Error", "failed without an error message")
    }
}

/// A failure as handlers report it: any of its fields, or only the message.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected an error: an object with `kind`, `message` and `stack`, or only the message")]
enum WrittenFailure {
    Message(String),
    Parts {
        kind: Option<String>,
        message: Option<String>,
        stack: Option<String>,
        step: Option<String>,
        #[serde(default, deserialize_with = "nullable")]
        also: Vec<Failure>,
    },
    Nothing,
}

impl From<WrittenFailure> for Failure {
    fn from(written: WrittenFailure) -> Failure {
        let default = Failure::default();
        match written {
            WrittenFailure::Message(message) => Failure { message, ..default },
            WrittenFailure::Parts { kind, message, stack, step, also } => {
                let (kind, message) = (kind.unwrap_or(default.kind), message.unwrap_or(default.message));
                Failure { kind, message, stack, step, also }
            }
            WrittenFailure::Nothing => default,
        }
    }
}

/// A failure as people write it: unknown fields are errors.
pub(crate) fn by_hand<'de, D: Deserializer<'de>>(written: D) -> Result<Option<Failure>, D::Error> {
    let written: Option<ByHand> = Option::deserialize(written)?;
    Ok(written.map(|ByHand(failure)| failure))
}

struct ByHand(Failure);

impl<'de> Deserialize<'de> for ByHand {
    fn deserialize<D: Deserializer<'de>>(written: D) -> Result<ByHand, D::Error> {
        written.deserialize_any(FailureForms).map(ByHand)
    }
}

struct FailureForms;

impl<'de> Visitor<'de> for FailureForms {
    type Value = Failure;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an error: an object with `kind`, `message` and `stack`, or only the message")
    }

    fn visit_str<E: serde::de::Error>(self, message: &str) -> Result<Failure, E> {
        Ok(WrittenFailure::Message(message.to_owned()).into())
    }

    fn visit_map<A: MapAccess<'de>>(self, fields: A) -> Result<Failure, A::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Parts {
            kind: Option<String>,
            message: Option<String>,
            stack: Option<String>,
            step: Option<String>,
            #[serde(default, deserialize_with = "nullable")]
            also: Vec<Failure>,
        }
        let Parts { kind, message, stack, step, also } = Parts::deserialize(MapAccessDeserializer::new(fields))?;
        Ok(WrittenFailure::Parts { kind, message, stack, step, also }.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_said_in_parts_or_by_its_message_alone_or_not_at_all() {
        let read = |text: &str| serde_json::from_str::<Failure>(text).ok();
        assert_eq!(read("\"broken\""), Some(Failure::new("Error", "broken")));
        assert_eq!(read("null"), Some(Failure::new("Error", "failed without an error message")));
        assert_eq!(read("{}"), Some(Failure::new("Error", "failed without an error message")));
        assert_eq!(read("{\"kind\": \"Declined\"}"), Some(Failure::new("Declined", "failed without an error message")));
        assert_eq!(read("{\"message\": \"\"}"), Some(Failure::new("Error", "")));
        for text in ["5", "{\"kind\": 5}"] {
            let error = serde_json::from_str::<Failure>(text).map(|_| ()).map_err(|error| error.to_string());
            assert!(error.is_err_and(|said| said.starts_with("expected an error: an object with `kind`")), "{text}");
        }
    }
}
