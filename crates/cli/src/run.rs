//! `eddy run`: lists, shows, follows and changes runs.

mod retry;
#[cfg(test)]
mod tests;
pub mod timeline;
mod tree;
pub mod watch;
pub mod words;

use eddyline_protocol::{
    Acted, CancelRun, CompleteStep, FailStep, NewRun, Remains, RerunRun, RunDeleted, RunSummary, Span,
};
use serde_json::{Value, json};

use super::Context;
use super::connect::{segment, understood};
use super::input;
use super::moment;
use super::run_id;
use super::screen::{Ink, Line, table};
use super::start::not_completed;
use super::trouble::Trouble;
use watch::Moment;

const LISTED: usize = 20;

const NAMED: &str = "RUN is the id of a run, the beginning or the end of it, or `latest`.";

#[derive(Debug, clap::Subcommand)]
pub enum RunCommand {
    /// List runs, newest first
    List {
        #[arg(long)]
        flow: Option<String>,
        /// pending, running, waiting, paused, completed, failed or cancelled; may be given several times
        #[arg(long, value_delimiter = ',')]
        status: Vec<String>,
        #[arg(long)]
        tag: Option<String>,
        #[arg(long)]
        external_id: Option<String>,
        /// Only runs created since then: a duration ago, such as 1h, or a time
        #[arg(long, value_name = "SPAN|TIME")]
        since: Option<String>,
        /// How many runs to list
        #[arg(long, value_name = "N", default_value_t = LISTED, value_parser = input::at_least_one)]
        limit: usize,
    },
    /// Show a run, and what it waits for
    #[command(after_help = NAMED)]
    Show { run: String },
    /// Print a large payload, by its reference
    Value {
        /// The `$value` of the reference: RUN/KEY
        #[arg(value_name = "RUN/KEY")]
        reference: String,
    },
    /// Follow a run, and the runs that continue it, until the end; exits 1 unless it completes
    Watch { run: String },
    /// Cancel a run
    Cancel {
        run: String,
        #[arg(long)]
        reason: Option<String>,
    },
    /// Pause a run: its tasks are no longer offered
    Pause { run: String },
    /// Resume a paused or quarantined run
    Resume { run: String },
    /// Let workers of any build run a code run whose flow pins runs to their build
    Unpin { run: String },
    /// Start a new run from the failed steps of an ended run, or of every failed run of a flow; with --step, retry one
    /// step now
    Retry(retry::Retry),
    /// Start a new run from any step of an ended run
    Rerun {
        run: String,
        /// A top-level step; without it all steps run again
        #[arg(long, value_name = "STEP")]
        from: Option<String>,
        /// Another input: JSON, @FILE, or - for standard input
        #[arg(long, value_name = "JSON")]
        input: Option<String>,
    },
    /// Complete one step by hand
    Complete {
        run: String,
        #[arg(value_name = "ACTIVATION")]
        step: String,
        /// JSON, @FILE, or - for standard input
        #[arg(long, value_name = "JSON")]
        output: Option<String>,
    },
    /// Fail one step by hand
    Fail {
        run: String,
        #[arg(value_name = "ACTIVATION")]
        step: String,
        #[arg(long, default_value = "failed by hand")]
        message: String,
    },
    /// Skip one step by hand
    Skip {
        run: String,
        #[arg(value_name = "ACTIVATION")]
        step: String,
    },
    /// Delete an ended run
    Delete { run: String },
}

pub async fn run(ctx: &Context, command: RunCommand) -> Result<(), Trouble> {
    match command {
        RunCommand::List { flow, status, tag, external_id, since, limit } => {
            let since = since.map(|since| since_text(&since)).transpose()?;
            let fields = [("flow", flow), ("tag", tag), ("external_id", external_id), ("since", since)];
            let mut query: Vec<_> =
                fields.into_iter().filter_map(|(name, value)| value.map(|value| (name, value))).collect();
            query.extend(status.into_iter().map(|status| ("status", status)));
            list(ctx, &query, limit).await
        }
        RunCommand::Show { run } => show(ctx, &resolve(ctx, &run).await?).await,
        RunCommand::Value { reference } => value(ctx, &reference).await,
        RunCommand::Watch { run } => follow(ctx, &resolve(ctx, &run).await?).await,
        RunCommand::Cancel { run, reason } => act(ctx, &run, "cancel", &CancelRun { reason }).await,
        RunCommand::Pause { run } => act(ctx, &run, "pause", &json!({})).await,
        RunCommand::Resume { run } => act(ctx, &run, "resume", &json!({})).await,
        RunCommand::Unpin { run } => act(ctx, &run, "unpin", &json!({})).await,
        RunCommand::Retry(retry) => retry::run(ctx, retry).await,
        RunCommand::Rerun { run, from, input } => {
            let input = input.as_deref().map(input::read).transpose()?;
            again(ctx, &run, "rerun", &RerunRun { from, input }).await
        }
        RunCommand::Complete { run, step, output } => {
            let output = output.as_deref().map(input::read).transpose()?.unwrap_or_default();
            act_on(ctx, &run, &step, "complete", &CompleteStep { output }).await
        }
        RunCommand::Fail { run, step, message } => {
            let error = Some(eddyline_protocol::Failure::new("FailedByHand", message));
            act_on(ctx, &run, &step, "fail", &FailStep { error }).await
        }
        RunCommand::Skip { run, step } => act_on(ctx, &run, &step, "skip", &json!({})).await,
        RunCommand::Delete { run } => {
            let run = resolve(ctx, &run).await?;
            let answer = ctx.remote()?.delete(&format!("/v1/runs/{}", segment(&run)), &[]).await?;
            if ctx.screen.json {
                return ctx.screen.document(&answer);
            }
            ctx.screen.say(format!("{run} deleted"))?;
            what_stays(&understood::<RunDeleted>(answer)?.stays).iter().try_for_each(|line| ctx.screen.say(line))
        }
    }
}

/// What remains elsewhere of a deleted run, one line each.
fn what_stays(stays: &Remains) -> Vec<String> {
    let mut lines = Vec::new();
    match stays.events {
        0 => {}
        1 => lines.push("the event that it published stays, as long as events are kept".to_owned()),
        n => lines.push(format!("the {n} events that it published stay, as long as events are kept")),
    }
    match stays.children {
        0 => {}
        1 => lines.push("its child run stays: delete it by its own id".to_owned()),
        n => lines.push(format!("the {n} runs below it stay: delete them by their own ids")),
    }
    if !stays.referred_to_by.is_empty() {
        lines.push(format!("these runs refer to it: {}", stays.referred_to_by.join(", ")));
    }
    lines
}

/// The full id of a run: see [`run_id`].
async fn resolve(ctx: &Context, run: &str) -> Result<String, Trouble> {
    run_id::resolve(&ctx.remote()?, run).await
}

fn since_text(since: &str) -> Result<String, Trouble> {
    if moment::ms(since).is_some() {
        return Ok(since.to_owned());
    }
    let span = Span::from_text(since).map_err(|_| {
        Trouble::usage(format!("--since {since} is neither a duration, such as 1h, nor a time in RFC 3339"))
    })?;
    let from = moment::now_ms().saturating_sub(i64::try_from(span.ms).unwrap_or(i64::MAX));
    jiff::Timestamp::from_millisecond(from)
        .map(|at| at.to_string())
        .map_err(|_| Trouble::usage(format!("--since {since} is too long ago")))
}

async fn list(ctx: &Context, query: &[(&str, String)], limit: usize) -> Result<(), Trouble> {
    // Read one more than is shown, to know whether there are more.
    let mut runs = ctx.remote()?.list("/v1/runs", query, Some(limit.saturating_add(1))).await?;
    if runs.len() > limit {
        runs.truncate(limit);
        ctx.screen.aside(format!("more than {limit} runs match: raise --limit to see more"));
    }
    if ctx.screen.json {
        return ctx.screen.document(&runs);
    }
    let now = moment::now_ms();
    let mut rows = Vec::new();
    for run in runs {
        let run: RunSummary = understood(run)?;
        let took = moment::between(run.started_at.as_deref(), run.completed_at.as_deref(), now).unwrap_or_default();
        let error = run.error.as_ref().map(|error| format!("{}: {}", error.kind, error.message)).unwrap_or_default();
        let error = error.lines().next().unwrap_or("").to_owned();
        rows.push(vec![
            Line::plain(&run.run_id),
            Line::plain(&run.flow),
            Line::default().with(Ink::of_status(&run.status), &run.status),
            Line::plain(format!("{}/{}", run.completed_steps, run.step_count)),
            Line::plain(took),
            Line::default().with(Ink::Faint, moment::ago(&run.created_at, now)),
            Line::default().with(Ink::Bad, error),
        ]);
    }
    if rows.is_empty() {
        return ctx.screen.say("no runs");
    }
    ctx.screen.rows(table(&["RUN", "FLOW", "STATUS", "STEPS", "TOOK", "CREATED", "ERROR"], &rows))
}

/// How many explanations of waiting steps are printed.
const SENTENCES: usize = 12;

async fn show(ctx: &Context, run: &str) -> Result<(), Trouble> {
    let moment = Moment::read(&ctx.remote()?, run).await?;
    if ctx.screen.json {
        return ctx.screen.document(&json!({"run": moment.run, "steps": moment.steps}));
    }
    ctx.screen.lines(&moment.lines(ctx.screen.edge()))?;
    let header = &moment.run;
    let mut facts = vec![("input", header.input.to_string()), ("version", header.version.clone())];
    facts.extend(header.external_id.clone().map(|id| ("external id", id)));
    facts.extend((!header.tags.is_empty()).then(|| ("tags", header.tags.join(", "))));
    facts.extend(header.retry_of.clone().map(|run| ("retry of", run)));
    facts.extend(
        header.parent.as_ref().map(|parent| ("started by", format!("{} of {}", parent.activation, parent.run_id))),
    );
    facts.extend((!header.emitted_events.is_empty()).then(|| ("emitted", header.emitted_events.join(", "))));
    facts.extend(moment.reason.clone().map(|reason| ("reason", reason)));
    facts.extend(header.trimmed.then(|| ("kept", "header only; timeline and payloads were deleted".to_owned())));
    ctx.screen.say("")?;
    for (name, value) in facts {
        let line = Line::default().with(Ink::Faint, format!("{name:<12}")).with(Ink::Plain, value);
        ctx.screen.line(&line.cut(ctx.screen.edge()))?;
    }
    let sentences = words::explain(header, &moment.steps);
    if !sentences.is_empty() {
        ctx.screen.say("")?;
        sentences.iter().take(SENTENCES).try_for_each(|sentence| ctx.screen.line(&Line::plain(sentence)))?;
        if sentences.len() > SENTENCES {
            let more = format!("… and {} more: `eddy run show --json` shows all", sentences.len() - SENTENCES);
            ctx.screen.line(&Line::default().with(Ink::Faint, more))?;
        }
    }
    Ok(())
}

/// Prints JSON with and without `--json`.
async fn value(ctx: &Context, reference: &str) -> Result<(), Trouble> {
    let Some((run, key)) = reference.split_once('/') else {
        return Err(Trouble::usage(format!("\"{reference}\" is not a reference: expected RUN/KEY, as in `$value`")));
    };
    let run = resolve(ctx, run).await?;
    let value: Value = ctx.remote()?.get(&format!("/v1/runs/{}/values/{}", segment(&run), segment(key)), &[]).await?;
    ctx.screen.document(&value)
}

/// Follows a run to its end; fails unless it completes.
pub async fn follow(ctx: &Context, run: &str) -> Result<(), Trouble> {
    let moment = watch::watch(ctx, &ctx.remote()?, run).await?;
    match moment.run.status.as_str() {
        "completed" => Ok(()),
        status => Err(not_completed(status)),
    }
}

async fn act(ctx: &Context, run: &str, what: &str, body: &(impl serde::Serialize + Sync)) -> Result<(), Trouble> {
    let run = resolve(ctx, run).await?;
    let answer: Value = ctx.remote()?.post(&format!("/v1/runs/{}/{what}", segment(&run)), body).await?;
    print_acted(ctx, answer)
}

async fn act_on(
    ctx: &Context,
    run: &str,
    step: &str,
    what: &str,
    body: &(impl serde::Serialize + Sync),
) -> Result<(), Trouble> {
    let run = resolve(ctx, run).await?;
    let path = format!("/v1/runs/{}/steps/{}/{what}", segment(&run), segment(step));
    let answer: Value = ctx.remote()?.post(&path, body).await?;
    print_acted(ctx, answer)
}

fn print_acted(ctx: &Context, answer: Value) -> Result<(), Trouble> {
    if ctx.screen.json {
        return ctx.screen.document(&answer);
    }
    let acted: Acted = understood(answer)?;
    ctx.screen.line(&Line::plain(format!("{} ", acted.run_id)).with(Ink::of_status(&acted.status), &acted.status))
}

async fn again(ctx: &Context, run: &str, what: &str, body: &(impl serde::Serialize + Sync)) -> Result<(), Trouble> {
    let run = resolve(ctx, run).await?;
    let answer: NewRun = ctx.remote()?.post(&format!("/v1/runs/{}/{what}", segment(&run)), body).await?;
    if ctx.screen.json { ctx.screen.document(&answer) } else { ctx.screen.say(answer.run_id) }
}
