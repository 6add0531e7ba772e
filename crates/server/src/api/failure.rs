//! Maps every error to an HTTP status and a body.

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::Response;
use eddyline_engine::EngineError;
use eddyline_protocol::{ApiError, Code, ErrorBody};
use serde_json::{Value, json};
use uuid::Uuid;

use super::call::json_response;

/// The `Retry-After` of a 429 or 503, in seconds.
const RETRY_AFTER: &str = "1";

/// The maximum size of an error response, in bytes of the message and of all details, however much of the request it
/// quotes.
const WHOLE: Bounds = Bounds { message: 4 << 10, details: 64 << 10 };
/// The same for one item of a list of thousands.
const ITEM: Bounds = Bounds { message: 1 << 10, details: 1 << 10 };
/// Marks a truncated text.
const CUT: &str = "… (cut)";

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

    /// Adds the individual problems.
    pub fn details(mut self, details: Vec<Value>) -> Failure {
        self.0.details = details;
        self
    }

    /// Truncates, so that a client that sends an invalid megabyte does not get it back.
    pub fn bounded(self) -> Failure {
        self.within(&WHOLE)
    }

    /// Truncates to the bounds of an item in a list.
    pub fn brief(self) -> Failure {
        self.within(&ITEM)
    }

    fn within(mut self, bounds: &Bounds) -> Failure {
        cut(&mut self.0.message, bounds.message);
        let (all, mut left) = (self.0.details.len(), bounds.details);
        for detail in &mut self.0.details {
            cut_texts(detail, bounds.message);
        }
        let fits = |detail: &Value| {
            left = left.saturating_sub(detail.to_string().len());
            left > 0
        };
        let kept = self.0.details.iter().map(fits).take_while(|fits| *fits).count();
        if kept < all {
            self.0.details.truncate(kept);
            self.0.details.push(Value::from(format!("… and {} more", all - kept)));
        }
        self
    }

    pub fn response(self) -> Response {
        let code = self.0.code;
        let status = StatusCode::from_u16(code.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response: Response<Body> = json_response(status, &ErrorBody { error: self.bounded().0 });
        let headers = response.headers_mut();
        match code {
            Code::TooMany | Code::Unavailable => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_AFTER));
            }
            Code::Unauthorized => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            // The rest of the body would be parsed as the next request.
            Code::TooLarge | Code::Timeout => {
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }
}

struct Bounds {
    message: usize,
    details: usize,
}

fn cut(text: &mut String, most: usize) {
    if text.len() > most {
        text.truncate(text.floor_char_boundary(most - CUT.len()));
        text.push_str(CUT);
    }
}

fn cut_texts(detail: &mut Value, most: usize) {
    match detail {
        Value::String(text) => cut(text, most),
        Value::Object(fields) => fields.values_mut().for_each(|field| cut_texts(field, most)),
        _ => {}
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Failure {
        let message = error.to_string();
        match error {
            EngineError::NotFound { .. } => Failure::new(Code::NotFound, message),
            EngineError::Trimmed(_) => Failure::new(Code::Trimmed, message),
            EngineError::Definition(problems) => Failure::invalid(message)
                .details(problems.0.iter().map(|problem| json!(super::to_wire::problem(problem))).collect()),
            EngineError::Invalid { details, .. } => {
                Failure::invalid(message).details(details.into_iter().map(Value::from).collect())
            }
            EngineError::Conflict(_) | EngineError::Quarantined(_) => Failure::new(Code::Conflict, message),
            EngineError::TooLarge { .. } => Failure::new(Code::TooLarge, message),
            EngineError::TooMany { .. } => Failure::new(Code::TooMany, message),
            EngineError::Store(error) => {
                tracing::warn!("store error: {error}");
                Failure::new(Code::Unavailable, message)
            }
            EngineError::Stopped => Failure::new(Code::Unavailable, message),
            EngineError::Bug(bug) => {
                let id = Uuid::new_v4();
                tracing::error!(%id, "{bug}");
                let message = format!("internal error, logged as {id}; nothing was changed");
                Failure::new(Code::Internal, message)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_quoted_is_cut_and_what_is_left_out_is_counted() {
        let (long, longer) = ("é".repeat(1 << 20), "é".repeat(WHOLE.message));
        let message = |n| if n == 0 { &long } else { &longer };
        let details: Vec<Value> = (0..300).map(|n| json!({"path": n, "message": message(n)})).collect();
        let failure = Failure::invalid(long.clone()).details(details);
        for (bounds, bounded) in [(WHOLE, failure.clone().bounded()), (ITEM, failure.brief())] {
            let ApiError { message, details, .. } = bounded.0;
            assert!(message.len() <= bounds.message && message.ends_with(CUT));
            let left_out = format!("… and {} more", 301 - details.len());
            assert_eq!(details.last(), Some(&json!(left_out)));
            assert!(json!(details).to_string().len() < bounds.details + 100);
        }
        let short = Failure::invalid("short").details(vec![json!("é"), json!({"path": "a", "message": "b"})]);
        assert_eq!(short.clone().bounded().0, short.0);
    }
}
