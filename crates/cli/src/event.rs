//! `eddy event` and `eddy gate`: publishes events, lists, opens and cancels gates.

use std::time::{Duration, Instant};

use clap::builder::NonEmptyStringValueParser;
use eddyline_protocol::{EventInfo, GateInfo, Page, PublishEvent, Published};
use serde_json::{Value, json};

use super::connect::{Remote, segment, understood};
use super::screen::{Ink, Line, table};
use super::trouble::{Exit, Trouble};
use super::{Context, input, run_id};

/// The records that close a gate, and how to describe each.
const CLOSED: [(&str, &str); 3] =
    [("step.await.triggered", "opened"), ("step.await.timeout", "timed out"), ("step.await.cancelled", "cancelled")];

/// How long to wait for the delivery of an event, and how often to poll.
const DELIVERY: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// How often to poll after the delivery: runs take the event in later commits of their own.
const SETTLING: u32 = 3;

#[derive(Debug, clap::Subcommand)]
pub enum EventCommand {
    /// Publish an event to the namespace
    Publish {
        name: String,
        /// JSON, @FILE, or - for standard input
        #[arg(value_name = "JSON")]
        payload: Option<String>,
        /// The key that gates and triggers match: a text, taken literally
        #[arg(long, value_name = "KEY", conflicts_with = "key_json")]
        key: Option<String>,
        /// The key as JSON, such as a number
        #[arg(long, value_name = "JSON")]
        key_json: Option<String>,
        /// Publishing the same id again changes nothing
        #[arg(long, value_parser = NonEmptyStringValueParser::new())]
        id: Option<String>,
    },
}

#[derive(Debug, clap::Subcommand)]
pub enum GateCommand {
    /// List the open gates
    List {
        #[arg(long, value_name = "RUN")]
        run: Option<String>,
        /// time, webhook, event or manual
        #[arg(long)]
        reason: Option<String>,
    },
    /// Open a gate: the step that waits at it continues
    Open {
        /// Its token; or its id, as `eddy gate list` shows it
        #[arg(value_name = "TOKEN|ID", value_parser = NonEmptyStringValueParser::new())]
        gate: String,
        /// The output of the gate: JSON, @FILE, or - for standard input
        #[arg(value_name = "JSON")]
        payload: Option<String>,
    },
    /// Cancel a gate: the step that waits at it fails
    Cancel {
        #[arg(value_name = "ID", value_parser = NonEmptyStringValueParser::new())]
        gate: String,
    },
}

pub async fn event(ctx: &Context, command: EventCommand) -> Result<(), Trouble> {
    let EventCommand::Publish { name, payload, key, key_json, id } = command;
    let payload = payload.as_deref().map(input::read).transpose()?.unwrap_or_default();
    let key_json = key_json.map(|key| {
        serde_json::from_str(&key).map_err(|error| Trouble::usage(format!("--key-json {key} is not JSON: {error}")))
    });
    let key = key_json.transpose()?.or(key.map(Value::String));
    let event = PublishEvent { name, key, payload, id };
    let remote = ctx.remote()?;
    let answer: Value = remote.post("/v1/events", &event).await?;
    let Published { existing, ids, .. } = understood(answer.clone())?;
    let outcome = match ids.first() {
        Some(id) => delivered(&remote, id).await,
        None => None,
    };
    if ctx.screen.json {
        let mut answer = answer;
        answer["event"] = json!(outcome);
        return ctx.screen.document(&answer);
    }
    let text = match (existing, ids.first()) {
        (0, _) | (_, None) => format!("{} published", event.name),
        (_, Some(id)) => format!("an event with the id {id} already exists"),
    };
    let outcome = outcome.map(|outcome| format!(": {}", outcome_text(&outcome))).unwrap_or_default();
    ctx.screen.say(text + &outcome)
}

/// Waits until the event is delivered, and returns how many gates it opened. `None` if that cannot be read: the event
/// is published in any case.
async fn delivered(remote: &Remote, id: &str) -> Option<EventInfo> {
    let path = format!("/v1/events/{}", segment(id));
    let (until, mut pause) = (Instant::now() + DELIVERY, FIRST_PAUSE);
    let mut settling = SETTLING;
    loop {
        let outcome: EventInfo = remote.get(&path, &[]).await.ok()?;
        // Runs take the event shortly after its delivery.
        settling -= u32::from(outcome.delivered);
        if settling == 0 || Instant::now() + pause > until {
            return Some(outcome);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn outcome_text(outcome: &EventInfo) -> String {
    match (outcome.delivered, outcome.gates_opened) {
        (false, _) => "it is still being delivered".to_owned(),
        (true, 0) => "it has not opened any gate so far".to_owned(),
        (true, 1) => "it has opened 1 gate".to_owned(),
        (true, gates) => format!("it has opened {gates} gates"),
    }
}

pub async fn gate(ctx: &Context, command: GateCommand) -> Result<(), Trouble> {
    match command {
        GateCommand::List { run, reason } => list(ctx, run, reason).await,
        GateCommand::Open { gate, payload } => {
            let payload = payload.as_deref().map(input::read).transpose()?.unwrap_or_default();
            let remote = ctx.remote()?;
            let answer: Value = match remote.post(&format!("/v1/gates/{}", segment(&gate)), &payload).await {
                Err(trouble) => return Err(not_opened(&remote, &gate, trouble).await),
                answer => answer?,
            };
            ctx.screen.answer(&answer, "opened")
        }
        GateCommand::Cancel { gate } => {
            let answer = ctx.remote()?.delete(&format!("/v1/gates/{}", segment(&gate)), &[]).await?;
            ctx.screen.answer(&answer, format!("{gate} cancelled"))
        }
    }
}

/// The run of a gate id `<run>.<number>`; `None` for a token.
fn run_of(gate: &str) -> Option<&str> {
    let (run, number) = gate.rsplit_once('.')?;
    let is_id = run.len() == 36 && !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit());
    is_id.then_some(run)
}

/// Why a gate could not be opened: how and when it was closed, from the timeline of its run. A key that may open gates
/// need not be allowed to read timelines; then the original error is kept.
async fn not_opened(remote: &Remote, gate: &str, trouble: Trouble) -> Trouble {
    let Some(run) = run_of(gate).filter(|_| trouble.exit() == Exit::Refused) else { return trouble };
    let path = format!("/v1/streams/nq:flow:{}", segment(run));
    let (mut last, mut after) = (None, Some("0".to_owned()));
    while let Some(from) = after {
        let mut query = vec![("after", from)];
        query.extend(CLOSED.map(|(kind, _)| ("kind", kind.to_owned())));
        let Ok(page) = remote.get::<Page<Value>>(&path, &query).await else { return trouble };
        last = page.items.into_iter().rfind(|record| record["data"]["token"] == gate).or(last);
        after = page.next;
    }
    let Some(record) = last else { return trouble };
    let how = CLOSED.into_iter().find(|(kind, _)| record["kind"] == *kind).map_or("closed", |(_, how)| how);
    let at = record["ts"].as_str().unwrap_or_default();
    Trouble::refused(format!("the gate {gate} is no longer open: {how} at {at}"))
}

async fn list(ctx: &Context, run: Option<String>, reason: Option<String>) -> Result<(), Trouble> {
    let remote = ctx.remote()?;
    let run = match run {
        Some(run) => Some(run_id::resolve(&remote, &run).await?),
        None => None,
    };
    let query: Vec<_> =
        [("run", run), ("reason", reason)].into_iter().filter_map(|(name, value)| Some((name, value?))).collect();
    let gates = remote.list("/v1/gates", &query, None).await?;
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
        true => ctx.screen.say("no open gates"),
        false => ctx.screen.lines(&table(&["GATE", "STEP", "WAITS FOR", "UNTIL", "URL"], &rows)),
    }
}
