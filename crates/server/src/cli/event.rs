//! `eddy event` and `eddy gate`: what runs are told from outside.

use eddyline_protocol::{GateInfo, Page, PublishEvent, Published};
use serde_json::Value;

use super::connect::{segment, understood};
use super::screen::{Ink, Line, table};
use super::trouble::{Exit, Trouble};
use super::{Context, input};

/// The kinds of the records that tell of gates.
const AT_GATES: [&str; 4] =
    ["step.await.scheduled", "step.await.triggered", "step.await.timeout", "step.await.cancelled"];

#[derive(Debug, clap::Subcommand)]
pub enum EventCommand {
    /// Publish an event to the namespace
    Publish {
        name: String,
        /// JSON, @FILE, or - for standard input
        #[arg(value_name = "JSON")]
        payload: Option<String>,
        /// What gates and triggers tell events of one name apart by; JSON, or a text as it is
        #[arg(long, value_name = "KEY")]
        key: Option<String>,
        /// The same id again changes nothing
        #[arg(long)]
        id: Option<String>,
    },
}

#[derive(Debug, clap::Subcommand)]
pub enum GateCommand {
    /// List the gates that are open
    List {
        #[arg(long, value_name = "RUN")]
        run: Option<String>,
        /// time, webhook, event or manual
        #[arg(long)]
        reason: Option<String>,
    },
    /// Let what waits at a gate go on
    Open {
        /// Its token; or its id, as `eddy gate list` shows it
        #[arg(value_name = "TOKEN|ID")]
        gate: String,
        /// What is handed to it: JSON, @FILE, or - for standard input
        #[arg(value_name = "JSON")]
        payload: Option<String>,
    },
    /// Cancel a gate: what waits at it fails
    Cancel {
        #[arg(value_name = "ID")]
        gate: String,
    },
}

pub async fn event(ctx: &Context, command: EventCommand) -> Result<(), Trouble> {
    let EventCommand::Publish { name, payload, key, id } = command;
    let payload = payload.as_deref().map(input::read).transpose()?.unwrap_or_default();
    let key = key.map(|key| serde_json::from_str(&key).unwrap_or(Value::String(key)));
    let event = PublishEvent { name, key, payload, id };
    let answer: Value = ctx.remote()?.post("/v1/events", &event).await?;
    if ctx.screen.json {
        return ctx.screen.document(&answer);
    }
    let PublishEvent { name, id, .. } = event;
    match (understood::<Published>(answer)?.existing, id) {
        (0, _) | (_, None) => ctx.screen.say(format!("{name} published")),
        (_, Some(id)) => ctx.screen.say(format!("an event was published under the id {id} before, and stands")),
    }
}

pub async fn gate(ctx: &Context, command: GateCommand) -> Result<(), Trouble> {
    match command {
        GateCommand::List { run, reason } => list(ctx, run, reason).await,
        GateCommand::Open { gate, payload } => {
            let payload = payload.as_deref().map(input::read).transpose()?.unwrap_or_default();
            let token = token_of(ctx, &gate).await?;
            let answer: Value = ctx.remote()?.post(&format!("/v1/gates/{}", segment(&token)), &payload).await?;
            if ctx.screen.json { ctx.screen.document(&answer) } else { ctx.screen.say("opened") }
        }
        GateCommand::Cancel { gate } => {
            let answer = ctx.remote()?.delete(&format!("/v1/gates/{}", segment(&gate))).await?;
            if ctx.screen.json { ctx.screen.document(&answer) } else { ctx.screen.say(format!("{gate} cancelled")) }
        }
    }
}

/// An id is `<run>.<number>`; whoever may see tokens may use it instead of one.
async fn token_of(ctx: &Context, gate: &str) -> Result<String, Trouble> {
    let Some((run, _)) = gate.rsplit_once('.').filter(|(run, number)| {
        run.len() == 36 && !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit())
    }) else {
        return Ok(gate.to_owned());
    };
    let gates: Vec<GateInfo> = ctx.remote()?.list_of("/v1/gates", &[("run", run.to_owned())]).await?;
    match gates.into_iter().find(|open| open.gate_id == gate) {
        Some(GateInfo { token: Some(token), .. }) => Ok(token),
        // Whoever may not open it does not get to see its token: the server says so.
        Some(open) if matches!(open.reason.as_str(), "manual" | "webhook") => Ok(gate.to_owned()),
        Some(open) => Err(Trouble::refused(format!("a gate for {} is not opened by hand", because(&open.reason)))),
        None => Err(not_open(ctx, run, gate).await?),
    }
}

/// Why a gate is not among those that are open: the timeline of its run tells one that was closed from one that never was.
async fn not_open(ctx: &Context, run: &str, gate: &str) -> Result<Trouble, Trouble> {
    let (remote, path) = (ctx.remote()?, format!("/v1/streams/nq:flow:{}", segment(run)));
    let (mut last, mut after) = (None, Some("0".to_owned()));
    while let Some(from) = after {
        let mut query = vec![("after", from)];
        query.extend(AT_GATES.map(|kind| ("kind", kind.to_owned())));
        let page: Page<Value> = match remote.get(&path, &query).await {
            // Whoever may open gates need not be allowed to read timelines.
            Err(trouble) if trouble.exit() == Exit::Denied => {
                return Ok(Trouble::not_found(format!("no gate {gate} is open")));
            }
            page => page?,
        };
        last = page.items.into_iter().rfind(|record| record["data"]["token"] == gate).or(last);
        after = page.next;
    }
    let Some(record) = last else {
        return Ok(Trouble::not_found(format!("there is no gate {gate}")));
    };
    let what = match record["kind"].as_str() {
        Some("step.await.triggered") => "opened",
        Some("step.await.timeout") => "timed out",
        Some("step.await.cancelled") => "cancelled",
        // What waited at it has ended, or is about to.
        _ => return Ok(Trouble::refused(format!("nothing waits at the gate {gate} any more"))),
    };
    let at = record["ts"].as_str().unwrap_or_default();
    Ok(Trouble::refused(format!("the gate {gate} is no longer open: {what} at {at}")))
}

fn because(reason: &str) -> &str {
    match reason {
        "event" => "an event",
        "time" => "a time",
        other => other,
    }
}

async fn list(ctx: &Context, run: Option<String>, reason: Option<String>) -> Result<(), Trouble> {
    let query: Vec<_> =
        [("run", run), ("reason", reason)].into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    let gates = ctx.remote()?.list("/v1/gates", &query, None).await?;
    if ctx.screen.json {
        return ctx.screen.document(&gates);
    }
    let mut rows = Vec::new();
    for gate in gates {
        let gate: GateInfo = understood(gate)?;
        rows.push(vec![
            Line::plain(&gate.gate_id),
            Line::default().with(Ink::Strong, &gate.activation),
            Line::plain(&gate.reason),
            Line::plain(gate.deadline.unwrap_or_default()),
            Line::default().with(Ink::Faint, gate.url.unwrap_or_default()),
        ]);
    }
    match rows.is_empty() {
        true => ctx.screen.say("nothing waits at a gate"),
        false => ctx.screen.lines(&table(&["GATE", "STEP", "WAITS FOR", "UNTIL", "URL"], &rows)),
    }
}
