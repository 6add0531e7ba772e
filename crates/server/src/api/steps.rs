//! The steps of a run: list, and manual acts.

use axum::http::StatusCode;
use eddyline_engine::StepActRequest;
use eddyline_machine::failure::kind;
use eddyline_protocol::{CompleteStep, FailStep, Failure as WireFailure};

use super::acts::acted;
use super::call::{ApiResult, Call};
use super::to_wire;

/// `GET /v1/runs/{id}/steps`
pub(crate) async fn list(call: Call) -> ApiResult {
    let (limit, from) = (call.limit()?, call.cursor()?.unwrap_or(0));
    let from = usize::try_from(from).unwrap_or(usize::MAX);
    let (steps, total) = call.engine().steps_from(call.ns(), call.run()?, from, limit).await?;
    let items: Vec<_> = steps.into_iter().map(to_wire::step_info).collect();
    let read = from.saturating_add(items.len());
    let next = (read < total).then(|| read.to_string());
    let total = if call.flag("count")? { Some(total as u64) } else { None };
    call.show(StatusCode::OK, &eddyline_protocol::Page { items, next, total })
}

/// `POST /v1/runs/{id}/steps/{activation}/complete`
pub(crate) async fn complete(mut call: Call) -> ApiResult {
    let asked: CompleteStep = call.json_or_default().await?;
    act(call, StepActRequest::Complete { output: asked.output }).await
}

/// `POST /v1/runs/{id}/steps/{activation}/fail`
pub(crate) async fn fail(mut call: Call) -> ApiResult {
    let asked: FailStep = call.json_or_default().await?;
    let error = asked.error.unwrap_or_else(|| WireFailure::new(kind::BY_HAND, "failed by hand"));
    act(call, StepActRequest::Fail { error: to_wire::inner_failure(error) }).await
}

/// `POST /v1/runs/{id}/steps/{activation}/skip`
pub(crate) async fn skip(call: Call) -> ApiResult {
    act(call, StepActRequest::Skip).await
}

/// `POST /v1/runs/{id}/steps/{activation}/retry`
pub(crate) async fn retry(call: Call) -> ApiResult {
    act(call, StepActRequest::Retry).await
}

async fn act(call: Call, act: StepActRequest) -> ApiResult {
    let (run, activation) = (call.run()?, call.param("activation").to_owned());
    call.engine().act_on_step(call.ns(), run, &activation, &call.caller.name, act).await?;
    acted(&call, run).await
}
