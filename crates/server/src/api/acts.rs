//! Acts on runs: cancel, pause, resume, retry, rerun.

use std::time::Duration;

use eddyline_engine::{RunResult, Standing};
use eddyline_machine::RunId;
use eddyline_protocol::{Acted, CancelRun, NewRun, RerunRun};

use super::call::{ApiResult, Call, ok};

/// `POST /v1/runs/{id}/cancel`
pub(crate) async fn cancel(mut call: Call) -> ApiResult {
    let asked: CancelRun = call.json_or_default().await?;
    let run = call.run()?;
    call.engine().cancel(call.ns(), run, &call.caller.name, asked.reason).await?;
    // For a continued run, the last run of the chain was cancelled.
    let (run, status) = match call.engine().wait_for_end(call.ns(), run, Duration::ZERO).await? {
        Standing::Ended(RunResult { run, status, .. }) | Standing::GoesOn { run, status } => (run, status),
    };
    ok(&Acted { run_id: run.to_string(), status: status.as_str().to_owned() })
}

/// `POST /v1/runs/{id}/pause`
pub(crate) async fn pause(call: Call) -> ApiResult {
    let run = call.run()?;
    call.engine().pause(call.ns(), run, &call.caller.name).await?;
    acted(&call, run).await
}

/// `POST /v1/runs/{id}/resume`
pub(crate) async fn resume(call: Call) -> ApiResult {
    let run = call.run()?;
    call.engine().resume(call.ns(), run, &call.caller.name).await?;
    acted(&call, run).await
}

/// `POST /v1/runs/{id}/unpin`
pub(crate) async fn unpin(call: Call) -> ApiResult {
    let run = call.run()?;
    call.engine().unpin(call.ns(), run, &call.caller.name).await?;
    acted(&call, run).await
}

/// `POST /v1/runs/{id}/retry`
pub(crate) async fn retry(call: Call) -> ApiResult {
    let new = call.engine().retry(call.ns(), call.run()?, &call.caller.name).await?;
    ok(&NewRun { run_id: new.to_string() })
}

/// `POST /v1/runs/{id}/rerun`
pub(crate) async fn rerun(mut call: Call) -> ApiResult {
    let asked: RerunRun = call.json_or_default().await?;
    let (run, by) = (call.run()?, &call.caller.name);
    let new = call.engine().rerun(call.ns(), run, by, asked.from.as_deref(), asked.input).await?;
    ok(&NewRun { run_id: new.to_string() })
}

pub(super) async fn acted(call: &Call, run: RunId) -> ApiResult {
    let status = call.engine().header(call.ns(), run).await?.header.status().as_str().to_owned();
    ok(&Acted { run_id: run.to_string(), status })
}
