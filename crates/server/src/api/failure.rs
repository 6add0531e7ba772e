//! What is answered when something cannot be done: one way from every error to a status and a body.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use eddyline_engine::EngineError;
use eddyline_protocol::{ApiError, Code, ErrorBody};
use serde_json::{Value, json};
use uuid::Uuid;

use super::call::json_response;

/// When to come back after a 429 or a 503, in seconds.
const RETRY_AFTER: &str = "1";

#[derive(Debug, Clone)]
pub(crate) struct Failure(pub ApiError);

impl Failure {
    pub fn new(code: Code, message: impl Into<String>) -> Failure {
        Failure(ApiError { code, message: message.into(), details: Vec::new() })
    }

    pub fn bad(message: impl Into<String>) -> Failure {
        Failure::new(Code::BadRequest, message)
    }

    pub fn invalid(message: impl Into<String>) -> Failure {
        Failure::new(Code::Invalid, message)
    }

    pub fn not_found(what: &str, id: &str) -> Failure {
        let shown: String = id.chars().take(120).collect();
        Failure::new(Code::NotFound, format!("there is no {what} {shown}"))
    }

    /// The same with each problem for itself.
    pub fn details(mut self, details: Vec<Value>) -> Failure {
        self.0.details = details;
        self
    }

    pub fn response(self) -> Response {
        let code = self.0.code;
        let status = StatusCode::from_u16(code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response: Response<Body> = json_response(status, &ErrorBody { error: self.0 });
        let headers = response.headers_mut();
        match code {
            Code::TooMany | Code::Unavailable => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER));
            }
            Code::Unauthorized => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            // What is left of the body would be taken for the next request.
            Code::TooLarge | Code::Timeout => {
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Failure {
        let message = error.to_string();
        match error {
            EngineError::NotFound { .. } => Failure::new(Code::NotFound, message),
            EngineError::Trimmed(_) => Failure::new(Code::Trimmed, message),
            EngineError::Definition(problems) => Failure::invalid(message)
                .details(problems.0.iter().map(|problem| json!(super::words::problem(problem))).collect()),
            EngineError::Invalid { details, .. } => {
                Failure::invalid(message).details(details.into_iter().map(Value::from).collect())
            }
            EngineError::Conflict(_) | EngineError::Quarantined(_) => Failure::new(Code::Conflict, message),
            EngineError::TooLarge { .. } => Failure::new(Code::TooLarge, message),
            EngineError::TooMany { .. } => Failure::new(Code::TooMany, message),
            EngineError::Store(error) => {
                tracing::warn!("the store: {error}");
                Failure::new(Code::Unavailable, message)
            }
            EngineError::Stopped => Failure::new(Code::Unavailable, message),
            EngineError::Bug(bug) => {
                let id = Uuid::new_v4();
                tracing::error!(%id, "{bug}");
                let said = format!("a fault of the server's own, logged as {id}; nothing was changed");
                Failure::new(Code::Internal, said)
            }
        }
    }
}
