//! Liveness and readiness.

use std::time::Duration;

use eddyline_engine::Health;
use eddyline_protocol::Code;
use serde_json::json;

use super::call::{ApiResult, Call, ok};
use super::failure::Failure;

/// A store that takes longer than this to commit or to return its time is not ready.
const TIMEOUT: Duration = Duration::from_secs(5);

/// `GET /healthz`
pub(crate) async fn alive(_call: Call) -> ApiResult {
    ok(&json!({"status": "ok"}))
}

/// `GET /readyz`
pub(crate) async fn ready(call: Call) -> ApiResult {
    if *call.api.stopping().borrow() {
        return Err(Failure::new(Code::Unavailable, "the server is stopping"));
    }
    match call.engine().health() {
        Health::Working => {}
        Health::NotCommitting(why) => {
            return Err(Failure::new(Code::Unavailable, format!("commits fail: {why}")));
        }
        Health::Failed(why) => return Err(Failure::new(Code::Unavailable, format!("the engine has failed: {why}"))),
    }
    let silence = call.engine().silence_of_store();
    if silence > TIMEOUT {
        return Err(Failure::new(
            Code::Unavailable,
            format!("the store has not responded for {} s", silence.as_secs()),
        ));
    }
    match tokio::time::timeout(TIMEOUT, call.engine().now()).await {
        Ok(answered) => answered?,
        Err(_) => return Err(Failure::new(Code::Unavailable, "the store does not respond")),
    };
    match tokio::time::timeout(TIMEOUT, call.engine().store_health()).await {
        Ok(healthy) => healthy?,
        Err(_) => return Err(Failure::new(Code::Unavailable, "the store does not commit")),
    };
    ok(&json!({"status": "ready"}))
}
