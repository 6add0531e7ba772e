//! `eddy start`: starts a run of a flow.

use eddyline_protocol::{Deadline, OnConflict, RunStarted, Span, StartRun, Unique};
use serde_json::{Map, Value};

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
    /// Idempotency key: starting again with the same key returns the same run
    #[arg(long, value_name = "KEY")]
    key: Option<String>,
    /// A label; may be given several times
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Your own id for the run, to find it by
    #[arg(long, value_name = "ID")]
    external_id: Option<String>,
    /// Begin after this long, such as 10m
    #[arg(long, value_name = "SPAN", value_parser = Span::from_text, allow_hyphen_values = true)]
    delay: Option<Span>,
    /// Fail the run unless it ends within this duration, or by this time
    #[arg(long, value_name = "SPAN|TIME", allow_hyphen_values = true)]
    deadline: Option<Deadline>,
    /// Tasks with a higher priority are claimed first
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = input::whole::<i32>)]
    priority: Option<i32>,
    /// The queue of steps that name none
    #[arg(long)]
    queue: Option<String>,
    /// A small object that is kept with the run and given back: JSON, @FILE, or - for standard input
    #[arg(long, value_name = "JSON")]
    metadata: Option<String>,
    /// Run at most one run of the flow with this key at a time
    #[arg(long, value_name = "KEY")]
    unique: Option<String>,
    /// With --unique, what to do while another run has the key: return it, reject the start, replace it or queue behind it
    #[arg(long, value_name = "WHAT", requires = "unique", value_parser = on_conflict)]
    on_conflict: Option<OnConflict>,
    /// A version other than the current one
    #[arg(long)]
    version: Option<String>,
    /// Follow the run to its end; exits 1 unless it completes
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
        queue: start.queue,
        metadata: start.metadata.as_deref().map(object).transpose()?,
        unique: start.unique.map(|key| Unique { key, on_conflict: start.on_conflict.unwrap_or_default() }),
        ..StartRun::default()
    };
    let remote = ctx.remote()?;
    let started = remote.post(&format!("/v1/flows/{}/runs", segment(&start.flow)), &body).await;
    let started: RunStarted = match started {
        Err(trouble) if names_file(&start.flow) => {
            let path = &start.flow;
            return Err(
                trouble.help(format!("{path} looks like a file: register it first with `eddy flow apply {path}`"))
            );
        }
        Err(trouble) => return Err(remote.name_near(&start.flow, trouble).await),
        Ok(started) => started,
    };
    if started.existing && !ctx.screen.json {
        ctx.screen.aside(format!("run {} already exists: no run was started", started.run_id));
    }
    for warning in started.warnings.iter().filter(|_| !ctx.screen.json) {
        ctx.screen.aside(format!("warning: {warning}"));
    }
    if !start.wait {
        return ctx.screen.answer(&started, &started.run_id);
    }
    if ctx.screen.json {
        let quiet = Context { screen: super::screen::Screen { live: false, ..ctx.screen.clone() }, at: ctx.at.clone() };
        return result(&quiet, &started.run_id).await.map_err(|trouble| still_running(trouble, &started.run_id));
    }
    let watched = watch(ctx, &remote, &started.run_id).await;
    let moment = watched.map_err(|trouble| still_running(trouble, &started.run_id))?;
    match moment.run.status.as_str() {
        "completed" => Ok(()),
        status => Err(not_completed(status)),
    }
}

/// The error of a run that ended without completing.
pub fn not_completed(status: &str) -> Trouble {
    Trouble::failed(match status {
        "cancelled" => "the run was cancelled".to_owned(),
        _ => format!("the run {status}"),
    })
}

/// A flow's name never has these.
fn names_file(flow: &str) -> bool {
    flow.contains('/') || [".yaml", ".yml", ".json"].iter().any(|end| flow.ends_with(end))
}

fn object(text: &str) -> Result<Map<String, Value>, Trouble> {
    match input::read(text)? {
        Value::Object(fields) => Ok(fields),
        _ => Err(Trouble::usage("--metadata: expected a JSON object")),
    }
}

fn on_conflict(text: &str) -> Result<OnConflict, String> {
    match text {
        "return" => Ok(OnConflict::Return),
        "reject" => Ok(OnConflict::Reject),
        "replace" => Ok(OnConflict::Replace),
        "queue" => Ok(OnConflict::Queue),
        _ => Err("expected return, reject, replace or queue".to_owned()),
    }
}

/// The run continues even if this command can no longer wait for it.
fn still_running(trouble: Trouble, run: &str) -> Trouble {
    match trouble.exit() {
        Exit::Failed => trouble,
        _ => trouble.help(format!("run {run} was started and continues")),
    }
}

/// Waits for the end of the run and prints its result as JSON.
async fn result(ctx: &Context, run: &str) -> Result<(), Trouble> {
    let remote = ctx.remote()?;
    loop {
        let result: Value = remote.get(&format!("/v1/runs/{}/result", segment(run)), &[("wait", "30s".into())]).await?;
        let status = result["status"].as_str().unwrap_or_default().to_owned();
        match status.as_str() {
            "completed" => return ctx.screen.document(&result),
            "failed" | "cancelled" => {
                ctx.screen.document(&result)?;
                return Err(not_completed(&status));
            }
            _ => {}
        }
    }
}
