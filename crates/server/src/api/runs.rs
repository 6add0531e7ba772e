//! Runs: list, show, wait for the result, delete.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use eddyline_engine::Standing;
use eddyline_machine::Status;
use eddyline_machine::run::Parent;
use eddyline_machine::{ActId, RunId};
use eddyline_protocol::{ParentInfo, Remains, RunDeleted, RunResult};
use eddyline_store::{Page, RunFilter, Summary};
use serde_json::Value;

use super::call::{ApiResult, Call, answer, ok};
use super::failure::Failure;
use super::to_wire;

/// The maximum size of the metadata in one page, unless the page has a single run.
const MAX_PAGE_METADATA_BYTES: usize = 4 << 20;

/// `GET /v1/runs`
pub(crate) async fn list(call: Call) -> ApiResult {
    let status = |word: String| {
        Status::ALL.into_iter().find(|status| status.as_str() == word).ok_or_else(|| {
            let known: Vec<&str> = Status::ALL.iter().map(|status| status.as_str()).collect();
            Failure::bad(format!("the parameter `status` is not one of {}", known.join(", ")))
        })
    };
    let filter = RunFilter {
        flow: call.text("flow").map(str::to_owned),
        status: call.texts("status").into_iter().map(status).collect::<Result<_, _>>()?,
        tags: call.texts("tag"),
        external_id: call.text("external_id").map(str::to_owned),
        since: call.time("since")?,
        until: call.time("until")?,
        ..RunFilter::default()
    };
    let (limit, after) = (call.limit()?, call.cursor()?);
    let total = call.total(call.engine().count(call.ns(), &filter)).await?;
    let mut found = call.engine().list(call.ns(), &filter, Page { after, limit }).await?;
    let is_full = found.len() == limit;
    let has_more = cut(&mut found) || is_full;
    let next = has_more.then(|| found.last().map(|last| last.position.to_string())).flatten();
    let parents = parents(&call, found.iter().filter_map(|summary| summary.header.parent)).await?;
    let show = |summary: Summary| {
        let parent = summary.header.parent.and_then(|parent| parents.get(&(parent.run, parent.activation)).cloned());
        to_wire::run_summary(summary, parent)
    };
    let items = found.into_iter().map(show).collect();
    call.show(StatusCode::OK, &eddyline_protocol::Page { items, next, total })
}

/// Ends a page early if the metadata of its runs is too large; returns whether it did.
fn cut(found: &mut Vec<Summary>) -> bool {
    let mut bytes = 0;
    let mut fits = |summary: &Summary| {
        let metadata = summary.header.metadata.as_ref();
        bytes += metadata.map_or(0, |metadata| metadata.bytes(MAX_PAGE_METADATA_BYTES));
        bytes <= MAX_PAGE_METADATA_BYTES
    };
    let most = found.iter().position(|summary| !fits(summary)).unwrap_or(found.len()).max(1);
    let is_cut = most < found.len();
    found.truncate(most);
    is_cut
}

/// `GET /v1/runs/{id}`
pub(crate) async fn show(call: Call) -> ApiResult {
    let info = call.engine().run(call.ns(), call.run()?).await?;
    let quarantine = match info.summary.ended_at {
        Some(_) => None,
        None => call.engine().quarantine(call.ns(), info.summary.run).await?,
    };
    let mut parents = parents(&call, info.summary.header.parent.into_iter()).await?;
    let mut shown = to_wire::run_info(info, parents.pop_first().map(|(_, parent)| parent));
    shown.error = shown.error.or_else(|| quarantine.map(to_wire::quarantined));
    call.show(StatusCode::OK, &shown)
}

/// `GET /v1/quarantine`
pub(crate) async fn quarantined(call: Call) -> ApiResult {
    let mut shown = Vec::new();
    for (summary, suspicion) in call.engine().quarantined(call.ns()).await? {
        let mut run = to_wire::run_summary(summary, None);
        run.error = Some(to_wire::quarantined(suspicion));
        shown.push(run);
    }
    let page = call.page(shown, |run: &eddyline_protocol::RunSummary| &run.run_id)?;
    call.show(StatusCode::OK, &page)
}

/// `DELETE /v1/runs/{id}`
pub(crate) async fn delete(call: Call) -> ApiResult {
    let run = call.run()?;
    let remains = call.engine().delete(call.ns(), run).await?;
    ok(&RunDeleted {
        deleted: true,
        run_id: run.to_string(),
        stays: Remains {
            events: u64::from(remains.events),
            children: remains.children,
            referred_to_by: remains.referring.iter().map(RunId::to_string).collect(),
        },
    })
}

/// `GET /v1/runs/{id}/result`
pub(crate) async fn result(call: Call) -> ApiResult {
    let (run, wait) = (call.run()?, call.wait()?);
    let _room = if wait.is_zero() { None } else { Some(call.api.long_poll(call.ns())?) };
    match call.while_admitted(call.engine().wait_for_end(call.ns(), run, wait)).await?? {
        Standing::Ended(result) => {
            let ended = RunResult {
                run_id: result.run.to_string(),
                status: result.status.as_str().to_owned(),
                output: result.output.unwrap_or_default(),
                error: result.error.map(to_wire::failure),
            };
            call.show(StatusCode::OK, &ended)
        }
        Standing::GoesOn { run, status } => {
            let status = status.as_str().to_owned();
            let going = RunResult { run_id: run.to_string(), status, output: Value::Null, error: None };
            answer(StatusCode::ACCEPTED, &going)
        }
    }
}

/// Parents with the names of their activations; each parent run is read once.
async fn parents(
    call: &Call,
    of: impl Iterator<Item = Parent>,
) -> Result<BTreeMap<(RunId, ActId), ParentInfo>, Failure> {
    let mut by_run: BTreeMap<RunId, Vec<ActId>> = BTreeMap::new();
    of.for_each(|parent| by_run.entry(parent.run).or_default().push(parent.activation));
    let mut found = BTreeMap::new();
    for (run, activations) in by_run {
        let names = call.engine().activation_names(call.ns(), run, &activations).await?;
        for (activation, name) in activations.into_iter().zip(names) {
            found.insert((run, activation), ParentInfo { run_id: run.to_string(), activation: name });
        }
    }
    Ok(found)
}
