//! `eddy event` and `eddy gate`: what runs are told from outside.

use eddyline_protocol::{GateInfo, PublishEvent};
use serde_json::Value;

use super::connect::{segment, understood};
use super::screen::{Ink, Line, table};
use super::trouble::Trouble;
use super::{Context, input};

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
    let answer: Value =
        ctx.remote()?.post("/v1/events", &PublishEvent { name: name.clone(), key, payload, id }).await?;
    if ctx.screen.json { ctx.screen.document(&answer) } else { ctx.screen.say(format!("{name} published")) }
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
        Some(open) => Err(Trouble::refused(format!("a gate for {} is not opened by hand", because(&open.reason)))),
        None => Err(Trouble::not_found(format!("no gate {gate} is open"))),
    }
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
