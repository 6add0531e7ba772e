//! Events: publish, show, delete.

use eddyline_engine::{EventOutcome, PublishRequest, PublishedEvents};
use eddyline_language::definition::wrong_name;
use eddyline_language::time::iso;
use eddyline_protocol::{EventInfo, PublishEvent, Published};
use serde_json::{Value, json};

use super::body::{check_labels, many};
use super::call::{ApiResult, Call, ok};
use super::failure::Failure;

/// `POST /v1/events`
pub(crate) async fn publish(mut call: Call) -> ApiResult {
    let expected = "expected an event {\"name\": …, \"key\": …, \"payload\": …}, or a list of them";
    let events: Vec<PublishEvent> = many(call.any_json().await?, expected)?;
    let wrong: Vec<_> =
        events.iter().enumerate().filter_map(|(at, event)| Some((at, wrong_name(&event.name)?))).collect();
    if let Some((_, first)) = wrong.first() {
        let details = wrong.iter().map(|(at, why)| json!({"path": format!("[{at}].name"), "message": why})).collect();
        return Err(Failure::bad(format!("invalid event name: {first}")).details(details));
    }
    if let Some(at) = events.iter().position(|event| event.id.as_deref() == Some("")) {
        let details = vec![json!({"path": format!("[{at}].id"), "message": "it is empty"})];
        return Err(Failure::bad("the id of an event is empty: set it, or leave out `id`").details(details));
    }
    check_labels(events.iter().filter_map(|event| event.id.as_ref()))?;
    let published = events.len();
    let requests = events.into_iter().map(|event| PublishRequest {
        name: event.name,
        key: event.key,
        payload: event.payload,
        id: event.id,
    });
    let PublishedEvents { ids, existing } = call.engine().publish(call.ns(), requests.collect()).await?;
    ok(&Published { published, existing, ids })
}

/// `GET /v1/events/{id}`
pub(crate) async fn show(call: Call) -> ApiResult {
    let id = call.param("id").to_owned();
    let EventOutcome { name, key, published_at, delivered, gates_opened } = call.engine().event(call.ns(), &id).await?;
    // Keys are stored as JSON.
    let key = key.map(|key| serde_json::from_str(&key).unwrap_or(Value::String(key)));
    // Triggers do not exist yet, so events start no runs.
    let runs_started = 0;
    ok(&EventInfo { id, name, key, published_at: iso(published_at), delivered, gates_opened, runs_started })
}

/// `DELETE /v1/events/{id}`
pub(crate) async fn delete(call: Call) -> ApiResult {
    call.engine().delete_event(call.ns(), call.param("id")).await?;
    ok(&json!({"deleted": true}))
}
