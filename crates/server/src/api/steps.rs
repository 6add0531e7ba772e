//! The steps of a run: listed, and acted upon by hand.

use axum::http::StatusCode;
use eddyline_engine::StepActRequest;
use eddyline_machine::failure::kind;
use eddyline_protocol::{CompleteStep, FailStep, Failure as WireFailure};

use super::acts::acted;
use super::call::{Answer, Call};
use super::words;

/// `GET /v1/runs/{id}/steps`
pub(crate) async fn list(call: Call) -> Answer {
    let (limit, from) = (call.limit()?, call.cursor()?.unwrap_or(0));
    let from = usize::try_from(from).unwrap_or(usize::MAX);
    let (steps, total) = call.engine().steps_from(call.ns(), call.run()?, from, limit).await?;
    let items: Vec<_> = steps.into_iter().map(words::step_info).collect();
    let read = from.saturating_add(items.len());
    let next = (read < total).then(|| read.to_string());
    let total = if call.flag("count")? { Some(total as u64) } else { None };
    call.show(StatusCode::OK, &eddyline_protocol::Page { items, next, total })
}

/// `POST /v1/runs/{id}/steps/{activation}/complete`
pub(crate) async fn complete(mut call: Call) -> Answer {
    let asked: CompleteStep = call.json_or_default().await?;
    act(call, StepActRequest::Complete { output: asked.output }).await
}

/// `POST /v1/runs/{id}/steps/{activation}/fail`
pub(crate) async fn fail(mut call: Call) -> Answer {
    let asked: FailStep = call.json_or_default().await?;
    let error = asked.error.unwrap_or_else(|| WireFailure::new(kind::BY_HAND, "failed by hand"));
    act(call, StepActRequest::Fail { error: words::inner_failure(error) }).await
}

/// `POST /v1/runs/{id}/steps/{activation}/skip`
pub(crate) async fn skip(call: Call) -> Answer {
    act(call, StepActRequest::Skip).await
}

/// `POST /v1/runs/{id}/steps/{activation}/retry`
pub(crate) async fn retry(call: Call) -> Answer {
    act(call, StepActRequest::Retry).await
}

async fn act(call: Call, act: StepActRequest) -> Answer {
    let (run, activation) = (call.run()?, call.param("activation").to_owned());
    call.engine().act_on_step(call.ns(), run, &activation, &call.caller.name, act).await?;
    acted(&call, run).await
}
