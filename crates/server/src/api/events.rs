//! Events are published to the namespace.

use eddyline_engine::PublishRequest;
use eddyline_language::definition::wrong_name;
use eddyline_protocol::{PublishEvent, Published};
use serde_json::json;

use super::body::{check_labels, many};
use super::call::{Answer, Call, ok};
use super::failure::Failure;

/// `POST /v1/events`
pub(crate) async fn publish(mut call: Call) -> Answer {
    let expected = "expected an event {\"name\": …, \"key\": …, \"payload\": …}, or a list of them";
    let events: Vec<PublishEvent> = many(call.any_json().await?, expected)?;
    let wrong: Vec<_> =
        events.iter().enumerate().filter_map(|(at, event)| Some((at, wrong_name(&event.name)?))).collect();
    if let Some((_, first)) = wrong.first() {
        let details = wrong.iter().map(|(at, why)| json!({"path": format!("[{at}].name"), "message": why})).collect();
        return Err(Failure::bad(format!("an event cannot have this name: {first}")).details(details));
    }
    if let Some(at) = events.iter().position(|event| event.id.as_deref() == Some("")) {
        let details = vec![json!({"path": format!("[{at}].id"), "message": "it is empty"})];
        return Err(Failure::bad("the id of an event is empty: give one, or leave `id` out").details(details));
    }
    check_labels(events.iter().filter_map(|event| event.id.as_ref()))?;
    let published = events.len();
    let requests = events.into_iter().map(|event| PublishRequest {
        name: event.name,
        key: event.key,
        payload: event.payload,
        id: event.id,
    });
    let existing = call.engine().publish(call.ns(), requests.collect()).await?;
    ok(&Published { published, existing })
}
