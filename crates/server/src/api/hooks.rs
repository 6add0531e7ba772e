//! Incoming webhooks. The token of a gate is enough to open it.

use axum::http::{HeaderMap, header};
use eddyline_machine::OpenedBy;
use serde_json::Value;

use super::body::{self, BodyKind, Fields, check_shape, check_type};
use super::call::{ApiResult, Call};
use super::failure::Failure;
use super::gates::opened;

/// `POST /hooks/{token}`
pub(crate) async fn open(mut call: Call) -> ApiResult {
    // Anyone can call this, so the body is read only after the gate was found.
    let token = call.param("token").to_owned();
    let unknown = || Failure::not_found("gate", "with this token");
    let gate = call.engine().gate_anywhere(&token).await?.ok_or_else(unknown)?;
    let bytes = call.payload_bytes(&gate.ns).await?;
    let payload = payload(&bytes, call.headers())?;
    opened(call.engine().open_gate(&gate.ns, &token, OpenedBy::Webhook, payload).await)
}

/// JSON as it is, anything else as text. A body declared as JSON must be valid: the gate opens only once, and not with
/// half a payload.
fn payload(bytes: &[u8], headers: &HeaderMap) -> Result<Value, Failure> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(Value::Null);
    }
    if headers.contains_key(header::CONTENT_TYPE) && check_type(headers, BodyKind::Json).is_ok() {
        return body::json(bytes, headers, Fields::Any);
    }
    check_shape(bytes)?;
    Ok(serde_json::from_slice(bytes).unwrap_or_else(|_| Value::String(String::from_utf8_lossy(bytes).into_owned())))
}
