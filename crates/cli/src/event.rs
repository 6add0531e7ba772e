//! `eddy event` and `eddy gate`: what runs are told from outside.

use std::time::{Duration, Instant};

use clap::builder::NonEmptyStringValueParser;
use eddyline_protocol::{EventInfo, GateInfo, Page, PublishEvent, Published};
use serde_json::{Value, json};

use super::connect::{Remote, segment, understood};
use super::screen::{Ink, Line, table};
use super::trouble::{Exit, Trouble};
use super::{Context, input, run_id};

/// The kinds of the records that tell of the end of a gate, in words.
const CLOSED: [(&str, &str); 3] =
    [("step.await.triggered", "opened"), ("step.await.timeout", "timed out"), ("step.await.cancelled", "cancelled")];

/// How long it is waited until everything that waits for an event has been told; how often is asked meanwhile.
const DELIVERY: Duration = Duration::from_secs(5);
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// How often is asked once all have been told: their runs take the event in commits of their own.
const SETTLING: u32 = 3;

#[derive(Debug, clap::Subcommand)]
pub enum EventCommand {
    /// Publish an event to the namespace
    Publish {
        name: String,
        /// JSON, @FILE, or - for standard input
        #[arg(value_name = "JSON")]
        payload: Option<String>,
        /// What gates and triggers tell events of one name apart by: a text, as it is
        #[arg(long, value_name = "KEY", conflicts_with = "key_json")]
        key: Option<String>,
        /// The same, where it is not a text: a number, or other JSON
        #[arg(long, value_name = "JSON")]
        key_json: Option<String>,
        /// The same id again changes nothing
        #[arg(long, value_parser = NonEmptyStringValueParser::new())]
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
        #[arg(value_name = "TOKEN|ID", value_parser = NonEmptyStringValueParser::new())]
        gate: String,
        /// What is handed to it: JSON, @FILE, or - for standard input
        #[arg(value_name = "JSON")]
        payload: Option<String>,
    },
    /// Cancel a gate: what waits at it fails
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
    let said = match (existing, ids.first()) {
        (0, _) | (_, None) => format!("{} published", event.name),
        (_, Some(id)) => format!("an event was published under the id {id} before, and stands"),
    };
    let became = outcome.map(|outcome| format!(": {}", became(&outcome))).unwrap_or_default();
    ctx.screen.say(said + &became)
}

/// What became of an event, as soon as everything that waits for it has been told; nothing, if that cannot be asked for. It is
/// published whatever comes of this.
async fn delivered(remote: &Remote, id: &str) -> Option<EventInfo> {
    let path = format!("/v1/events/{}", segment(id));
    let (until, mut pause) = (Instant::now() + DELIVERY, FIRST_PAUSE);
    let mut settling = SETTLING;
    loop {
        let outcome: EventInfo = remote.get(&path, &[]).await.ok()?;
        // Runs take the event a moment after they have been told of it.
        settling -= u32::from(outcome.delivered);
        if settling == 0 || Instant::now() + pause > until {
            return Some(outcome);
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

fn became(outcome: &EventInfo) -> String {
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
            if ctx.screen.json { ctx.screen.document(&answer) } else { ctx.screen.say("opened") }
        }
        GateCommand::Cancel { gate } => {
            let answer = ctx.remote()?.delete(&format!("/v1/gates/{}", segment(&gate)), &[]).await?;
            if ctx.screen.json { ctx.screen.document(&answer) } else { ctx.screen.say(format!("{gate} cancelled")) }
        }
    }
}

/// The run of a gate that is named by its id, `<run>.<number>`, rather than by its token.
fn run_of(gate: &str) -> Option<&str> {
    let (run, number) = gate.rsplit_once('.')?;
    let is_id = run.len() == 36 && !number.is_empty() && number.bytes().all(|digit| digit.is_ascii_digit());
    is_id.then_some(run)
}

/// Why a gate could not be opened: how it was closed and when, if the timeline of its run tells that. Whoever may open gates
/// need not be allowed to read timelines.
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
        true => ctx.screen.say("nothing waits at a gate"),
        false => ctx.screen.lines(&table(&["GATE", "STEP", "WAITS FOR", "UNTIL", "URL"], &rows)),
    }
}
