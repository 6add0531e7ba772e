//! Whether the server is alive, and whether it can be used.

use std::time::Duration;

use eddyline_protocol::Code;
use serde_json::json;

use super::call::{Answer, Call, ok};
use super::failure::Failure;

/// A store that takes longer than this to commit, or to say its time, is not ready.
const PATIENCE: Duration = Duration::from_secs(5);

/// `GET /healthz`
pub(crate) async fn alive(_call: Call) -> Answer {
    ok(&json!({"status": "ok"}))
}

/// `GET /readyz`
pub(crate) async fn ready(call: Call) -> Answer {
    if *call.api.stopping().borrow() {
        return Err(Failure::new(Code::Unavailable, "the server is stopping"));
    }
    let silence = call.engine().silence_of_store();
    if silence > PATIENCE {
        return Err(Failure::new(Code::Unavailable, format!("the store has been silent for {} s", silence.as_secs())));
    }
    match tokio::time::timeout(PATIENCE, call.engine().now()).await {
        Ok(answered) => answered?,
        Err(_) => return Err(Failure::new(Code::Unavailable, "the store does not answer")),
    };
    match tokio::time::timeout(PATIENCE, call.engine().store_health()).await {
        Ok(healthy) => healthy?,
        Err(_) => return Err(Failure::new(Code::Unavailable, "the store does not commit")),
    };
    ok(&json!({"status": "ready"}))
}
