//! Webhooks come in. Whoever has the token of a gate may open it, and needs nothing else.

use eddyline_machine::OpenedBy;
use eddyline_machine::record::GateReason;
use serde_json::Value;

use super::body::check_depth;
use super::call::{Answer, Call};
use super::failure::Failure;
use super::gates::opened;

/// `POST /hooks/{token}`
pub(crate) async fn open(mut call: Call) -> Answer {
    let bytes = call.bytes().await?;
    let token = call.param("token").to_owned();
    let unknown = || Failure::not_found("gate", "with this token");
    let gate = call.engine().gate_anywhere(&token).await?.ok_or_else(unknown)?;
    if gate.arrival.as_ref().is_some_and(|arrived| arrived.gate.reason != GateReason::Webhook) {
        return Err(unknown());
    }
    opened(call.engine().open_gate(&gate.ns, &token, OpenedBy::Webhook, payload(&bytes)?).await)
}

/// Whatever it is that was sent: JSON as it is, anything else as text.
fn payload(bytes: &[u8]) -> Result<Value, Failure> {
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Ok(Value::Null);
    }
    check_depth(bytes)?;
    Ok(serde_json::from_slice(bytes).unwrap_or_else(|_| Value::String(String::from_utf8_lossy(bytes).into_owned())))
}
