//! Webhooks come in. Whoever has the token of a gate may open it, and needs nothing else.

use axum::http::{HeaderMap, header};
use eddyline_machine::OpenedBy;
use serde_json::Value;

use super::body::{self, Fields, Taken, check_shape, check_type};
use super::call::{Answer, Call};
use super::failure::Failure;
use super::gates::opened;

/// `POST /hooks/{token}`
pub(crate) async fn open(mut call: Call) -> Answer {
    // Anybody can call this, so the body is read only once the gate is known.
    let token = call.param("token").to_owned();
    let unknown = || Failure::not_found("gate", "with this token");
    let gate = call.engine().gate_anywhere(&token).await?.ok_or_else(unknown)?;
    let bytes = call.payload_bytes(&gate.ns).await?;
    let payload = payload(&bytes, call.headers())?;
    opened(call.engine().open_gate(&gate.ns, &token, OpenedBy::Webhook, payload).await)
}

/// Whatever it is that was sent: JSON as it is, anything else as text. What is said to be JSON has to be: the gate opens
/// once, and not with half of a payload.
fn payload(bytes: &[u8], headers: &HeaderMap) -> Result<Value, Failure> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(Value::Null);
    }
    if headers.contains_key(header::CONTENT_TYPE) && check_type(headers, Taken::Json).is_ok() {
        return body::json(bytes, headers, Fields::Any);
    }
    check_shape(bytes)?;
    Ok(serde_json::from_slice(bytes).unwrap_or_else(|_| Value::String(String::from_utf8_lossy(bytes).into_owned())))
}
