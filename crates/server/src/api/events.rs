//! Events are published to the namespace.

use eddyline_engine::PublishRequest;
use eddyline_protocol::PublishEvent;
use serde_json::json;

use super::body::{check_labels, many};
use super::call::{Answer, Call, ok};

/// `POST /v1/events`
pub(crate) async fn publish(mut call: Call) -> Answer {
    let expected = "expected an event {\"name\": …, \"key\": …, \"payload\": …}, or a list of them";
    let events: Vec<PublishEvent> = many(call.any_json().await?, expected)?;
    check_labels(events.iter().flat_map(|event| std::iter::once(&event.name).chain(&event.id)))?;
    let published = events.len();
    let requests = events.into_iter().map(|event| PublishRequest {
        name: event.name,
        key: event.key,
        payload: event.payload,
        id: event.id,
    });
    call.engine().publish(call.ns(), requests.collect()).await?;
    ok(&json!({"published": published}))
}
