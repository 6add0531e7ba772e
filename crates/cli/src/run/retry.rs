//! `eddy run retry`: one run, one step, or every failed run of a flow.

use std::collections::BTreeSet;

use eddyline_protocol::{NewRun, RunSummary};
use serde_json::json;

use super::{act_on, again, since_text};
use crate::Context;
use crate::connect::{Remote, segment};
use crate::trouble::Trouble;

#[derive(Debug, clap::Args)]
pub struct Retry {
    /// The run; or use --failed for all failed runs
    #[arg(required_unless_present = "failed", conflicts_with = "failed")]
    run: Option<String>,
    #[arg(long, value_name = "ACTIVATION", conflicts_with = "failed")]
    step: Option<String>,
    /// Retry every failed run of --flow that was not retried yet, oldest first
    #[arg(long, requires = "flow")]
    failed: bool,
    /// The flow whose runs are retried
    #[arg(long, requires = "failed")]
    flow: Option<String>,
    /// Only runs created since then: a duration ago, such as 1h, or a time
    #[arg(long, value_name = "SPAN|TIME", requires = "failed")]
    since: Option<String>,
}

pub async fn run(ctx: &Context, retry: Retry) -> Result<(), Trouble> {
    match (retry.run, retry.step) {
        (Some(run), Some(step)) => act_on(ctx, &run, &step, "retry", &json!({})).await,
        (Some(run), None) => again(ctx, &run, "retry", &json!({})).await,
        (None, _) => retry_failed(ctx, retry.flow.unwrap_or_default(), retry.since).await,
    }
}

async fn retry_failed(ctx: &Context, flow: String, since: Option<String>) -> Result<(), Trouble> {
    let remote = ctx.remote()?;
    // Fail for an unknown flow, instead of finding no runs.
    remote.flow(&flow, None).await?;
    let mut query = vec![("flow", flow)];
    query.extend(since.map(|since| since_text(&since)).transpose()?.map(|since| ("since", since)));
    let (mut retried, mut refused) = (Vec::new(), 0);
    for run in not_retried(&remote, &query).await? {
        let path = format!("/v1/runs/{}/retry", segment(&run));
        match remote.post::<NewRun>(&path, &json!({})).await {
            Ok(new) => {
                if !ctx.screen.json {
                    ctx.screen.say(format!("{run} → {}", new.run_id))?;
                }
                retried.push(json!({"retry_of": run, "run_id": new.run_id}));
            }
            Err(trouble) => {
                refused += 1;
                if !ctx.screen.json {
                    ctx.screen.aside(format!("{run}: {}", trouble.message()));
                }
                retried.push(json!({"retry_of": run, "error": trouble.json()["error"]}));
            }
        }
    }
    match (ctx.screen.json, retried.is_empty()) {
        (true, _) => ctx.screen.document(&retried)?,
        (false, true) => ctx.screen.say("no failed runs to retry")?,
        (false, false) => {}
    }
    match refused {
        0 => Ok(()),
        _ => Err(Trouble::refused(format!("{refused} of {} runs were not retried", retried.len()))),
    }
}

/// Failed runs that have not been retried yet, oldest first.
async fn not_retried(remote: &Remote, query: &[(&str, String)]) -> Result<Vec<String>, Trouble> {
    let (mut again, mut failed) = (BTreeSet::new(), Vec::new());
    // Newest first: a retry comes before the run that it retries.
    for run in remote.list_of::<RunSummary>("/v1/runs", query).await? {
        if run.status == "failed" && !again.contains(&run.run_id) {
            failed.push(run.run_id);
        }
        again.extend(run.retry_of);
    }
    failed.reverse();
    Ok(failed)
}
