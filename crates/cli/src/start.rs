//! `eddy start`: a run of a flow.

use eddyline_protocol::{Deadline, RunStarted, Span, StartRun};
use serde_json::Value;

use super::connect::segment;
use super::run::watch::watch;
use super::trouble::{Exit, Trouble};
use super::{Context, input};

#[derive(Debug, clap::Args)]
pub struct Start {
    /// The flow
    flow: String,
    /// The run's input: JSON, @FILE, or - for standard input
    #[arg(long, short, value_name = "JSON")]
    input: Option<String>,
    /// The same key gives the same run back
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// A label; may be given several times
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// An id of your own to find it by
    #[arg(long, value_name = "ID")]
    external_id: Option<String>,
    /// Begin after this long, such as 10m
    #[arg(long, value_name = "SPAN", value_parser = Span::from_text)]
    delay: Option<Span>,
    /// Fail unless it has ended after this long, or by a time
    #[arg(long, value_name = "SPAN|TIME")]
    deadline: Option<Deadline>,
    /// Tasks of a higher priority go first
    #[arg(long, allow_negative_numbers = true)]
    priority: Option<i32>,
    /// A version other than the current one
    #[arg(long)]
    version: Option<String>,
    /// Follow it to its end; exits 1 unless it completes
    #[arg(long, short)]
    wait: bool,
}

pub async fn run(ctx: &Context, start: Start) -> Result<(), Trouble> {
    let body = StartRun {
        input: start.input.as_deref().map(input::read).transpose()?.unwrap_or(Value::Null),
        external_id: start.external_id,
        idempotency_key: start.key,
        version: start.version,
        tags: start.tags,
        delay: start.delay,
        deadline: start.deadline,
        priority: start.priority,
        ..StartRun::default()
    };
    let remote = ctx.remote()?;
    let started = remote.post(&format!("/v1/flows/{}/runs", segment(&start.flow)), &body).await;
    let started: RunStarted = match started {
        Err(trouble) => return Err(remote.name_near(&start.flow, trouble).await),
        Ok(started) => started,
    };
    for warning in started.warnings.iter().filter(|_| !ctx.screen.json) {
        ctx.screen.aside(format!("warning: {warning}"));
    }
    if !start.wait {
        return match ctx.screen.json {
            true => ctx.screen.document(&started),
            false => ctx.screen.say(&started.run_id),
        };
    }
    if ctx.screen.json {
        let quiet = Context { screen: super::screen::Screen { live: false, ..ctx.screen.clone() }, at: ctx.at.clone() };
        return result(&quiet, &started.run_id).await.map_err(|trouble| goes_on(trouble, &started.run_id));
    }
    let watched = watch(ctx, &remote, &started.run_id).await;
    let moment = watched.map_err(|trouble| goes_on(trouble, &started.run_id))?;
    match moment.run.status.as_str() {
        "completed" => Ok(()),
        status => Err(Trouble::failed(format!("the run ended {status}"))),
    }
}

/// That it cannot be waited for does not stop it.
fn goes_on(trouble: Trouble, run: &str) -> Trouble {
    match trouble.exit() {
        Exit::Failed => trouble,
        _ => trouble.help(format!("run {run} was started, and goes on")),
    }
}

/// For programs: one document, once the run has ended.
async fn result(ctx: &Context, run: &str) -> Result<(), Trouble> {
    let remote = ctx.remote()?;
    loop {
        let result: Value = remote.get(&format!("/v1/runs/{}/result", segment(run)), &[("wait", "30s".into())]).await?;
        let status = result["status"].as_str().unwrap_or_default().to_owned();
        match status.as_str() {
            "completed" => return ctx.screen.document(&result),
            "failed" | "cancelled" => {
                ctx.screen.document(&result)?;
                return Err(Trouble::failed(format!("the run ended {status}")));
            }
            _ => {}
        }
    }
}
