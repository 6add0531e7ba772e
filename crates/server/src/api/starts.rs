//! Starts runs, one or many at a time.

use axum::http::StatusCode;
use eddyline_engine::{MAX_STARTS, StartRequest, Started};
use eddyline_language::definition::parse_retry;
use eddyline_machine::{Millis, Retry};
use eddyline_protocol::{BatchItem, BatchStarted, Code, Deadline, RunStarted, StartRun};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Value, json};

use super::body::{check_labels, one};
use super::call::{ApiResult, Call, answer, moment, ok};
use super::failure::Failure;
use super::item_errors::{ItemErrors, List};
use super::to_wire::{self, millis, problem};
use super::traceparent;

/// The maximum number of tags of a run.
const MAX_TAGS: usize = 64;

/// `POST /v1/flows/{name}/runs`
pub(crate) async fn start(mut call: Call) -> ApiResult {
    let asked: StartRun = call.json_or_default().await?;
    let name = call.param("name").to_owned();
    let wanted = request(&call, name, asked).await?;
    let started = call.engine().start_run(call.ns(), wanted).await?;
    let status = if started.existing { StatusCode::OK } else { StatusCode::CREATED };
    answer(status, &to_started(started, call.engine().config().max_payload_bytes))
}

/// `POST /v1/runs/batch`
pub(crate) async fn batch(mut call: Call) -> ApiResult {
    let expected = "expected {\"runs\": [{\"flow\": …, \"input\": …}]}, or a list of starts";
    let list = List { field: "runs", bare: true, most: MAX_STARTS };
    let (body, mut unread): (Value, ItemErrors) = call.json_apart(list).await?;
    let starts = match body {
        Value::Object(mut batch) => {
            let runs = batch.remove("runs").unwrap_or_default();
            let Batch { .. } = one(Value::Object(batch), expected)?;
            runs
        }
        list => list,
    };
    let Value::Array(asked) = starts else { return Err(Failure::bad(expected)) };
    if asked.len() > MAX_STARTS {
        return Err(Failure::new(Code::TooLarge, format!("more than {MAX_STARTS} starts in one call")));
    }
    let mut items: Vec<Option<BatchItem>> = Vec::with_capacity(asked.len());
    let (mut requests, mut places) = (Vec::new(), Vec::new());
    for (at, start) in asked.into_iter().enumerate() {
        let start = unread.remove(&at).map_or(Ok(start), |problem| Err(Failure::bad(problem)));
        items.push(match item(&call, start).await {
            Ok(wanted) => {
                requests.push(wanted);
                places.push(at);
                None
            }
            Err(failure) => Some(BatchItem::Refused { error: failure.brief().0 }),
        });
    }
    let limit = call.engine().config().max_payload_bytes;
    for (at, started) in places.into_iter().zip(call.engine().start_batch(call.ns(), requests).await?) {
        items[at] = Some(match started {
            Ok(started) => BatchItem::Started(to_started(started, limit)),
            Err(error) => BatchItem::Refused { error: Failure::from(error).brief().0 },
        });
    }
    ok(&BatchStarted { items: items.into_iter().flatten().collect() })
}

/// The fields of a batch. Its starts are parsed separately.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Batch {
    runs: Option<IgnoredAny>,
}

/// One start of a batch.
async fn item(call: &Call, written: Result<Value, Failure>) -> Result<StartRequest, Failure> {
    let mut start: StartRun = one(written?, "expected a start {\"flow\": …, \"input\": …}")?;
    match start.flow.take() {
        Some(flow) => request(call, flow, start).await,
        None => Err(Failure::invalid("`flow` is missing")),
    }
}

fn to_started(started: Started, limit: usize) -> RunStarted {
    let warning = |bytes| {
        format!(
            "the input has {bytes} bytes, near the limit of {limit}: store large data elsewhere and send a reference"
        )
    };
    RunStarted {
        run_id: started.run.to_string(),
        existing: started.existing,
        warnings: started.large_input.map(warning).into_iter().collect(),
    }
}

async fn request(call: &Call, flow: String, asked: StartRun) -> Result<StartRequest, Failure> {
    if asked.tags.len() > MAX_TAGS {
        return Err(Failure::invalid(format!("a run has at most {MAX_TAGS} tags")));
    }
    let unique = asked.unique.as_ref().map(|unique| &unique.key);
    let labels = [asked.external_id.as_ref(), asked.idempotency_key.as_ref(), unique].into_iter().flatten();
    check_labels(labels.chain(&asked.tags))?;
    if asked.idempotency_key.as_deref() == Some("") {
        return Err(Failure::bad("`idempotency_key` is empty: all such starts would share one run"));
    }
    if unique.is_some_and(String::is_empty) {
        return Err(Failure::bad("the `key` of `unique` is empty"));
    }
    Ok(StartRequest {
        flow,
        version: asked.version,
        input: asked.input,
        external_id: asked.external_id,
        idempotency_key: asked.idempotency_key,
        metadata: asked.metadata,
        queue: asked.queue,
        tags: asked.tags,
        delay_ms: asked.delay.map(millis),
        deadline_ms: match asked.deadline {
            Some(deadline) => Some(time_until(call, deadline).await?),
            None => None,
        },
        priority: asked.priority.unwrap_or(0),
        retry: asked.retry.map(retry).transpose()?,
        unique: asked.unique.map(to_wire::inner_unique),
        by: call.caller.name.clone(),
        traceparent: traceparent::of(asked.traceparent, call.headers())?,
    })
}

async fn time_until(call: &Call, deadline: Deadline) -> Result<Millis, Failure> {
    let written = match deadline {
        Deadline::After(span) => return Ok(millis(span)),
        Deadline::At(written) => written,
    };
    let shown: String = written.chars().take(40).collect();
    let at = moment(&written).ok_or_else(|| {
        let expected = "a duration, such as \"1h\" or a number of milliseconds, or a time such as 2026-01-02T03:04:05Z";
        Failure::bad(format!("the deadline \"{shown}\" is not {expected}"))
    })?;
    let left = at.saturating_sub(call.engine().now().await?);
    if left <= 0 { Err(Failure::bad(format!("the deadline {shown} has passed"))) } else { Ok(left) }
}

fn retry(written: Value) -> Result<Retry, Failure> {
    parse_retry(&written).map_err(|problems| {
        let details = problems.0.iter();
        let details = details.map(|found| json!({"path": problem(found).path, "message": found.message}));
        Failure::invalid("`retry` is not a retry policy").details(details.collect())
    })
}
