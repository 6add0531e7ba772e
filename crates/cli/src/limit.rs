//! `eddy limit`: named limits on tasks of any queue.

use std::str::FromStr;

use eddyline_protocol::{LimitInfo, LimitRules, Rate};
use serde_json::Value;

use super::connect::{segment, understood};
use super::queue::rules_text;
use super::screen::{Ink, Line, table};
use super::trouble::Trouble;
use super::{Context, input};

#[derive(Debug, clap::Subcommand)]
pub enum LimitCommand {
    /// List limits
    List,
    /// Set a limit; replaces all its rules, and what you omit is unbounded
    Set {
        name: String,
        /// How many tasks may run at once
        #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = input::whole::<u32>)]
        concurrency: Option<u32>,
        /// How many tasks may be claimed per period, such as 10/1s
        #[arg(long, value_name = "N/SPAN", value_parser = Rate::from_str)]
        rate: Option<Rate>,
    },
    /// Delete a limit: tasks that name it are no longer limited
    Delete { name: String },
}

pub async fn run(ctx: &Context, command: LimitCommand) -> Result<(), Trouble> {
    let remote = ctx.remote()?;
    let (answer, text): (Value, String) = match command {
        LimitCommand::List => return list(ctx).await,
        LimitCommand::Set { name, concurrency, rate } => {
            let answer = remote.put(&path(&name), &LimitRules { concurrency, rate, burst: None }).await?;
            (answer, format!("limit {name}: {}", rules_text(concurrency, rate, None)))
        }
        LimitCommand::Delete { name } => (remote.delete(&path(&name), &[]).await?, format!("limit {name} deleted")),
    };
    ctx.screen.answer(&answer, text)
}

fn path(name: &str) -> String {
    format!("/v1/limits/{}", segment(name))
}

async fn list(ctx: &Context) -> Result<(), Trouble> {
    let limits = ctx.remote()?.list("/v1/limits", &[], None).await?;
    if ctx.screen.json {
        return ctx.screen.document(&limits);
    }
    let mut rows = Vec::new();
    for limit in limits {
        let limit: LimitInfo = understood(limit)?;
        let state = match (&limit.fault, &limit.closed_until) {
            (Some(fault), _) => Line::default().with(Ink::Note, format!("closed: {fault}")),
            (None, Some(until)) => Line::default().with(Ink::Note, format!("closed by a worker until {until}")),
            (None, None) => Line::default(),
        };
        let rules = Line::plain(rules_text(limit.concurrency, limit.rate, None));
        rows.push(vec![Line::plain(&limit.name), rules, state]);
    }
    match rows.is_empty() {
        true => ctx.screen.say("no limits"),
        false => ctx.screen.lines(&table(&["LIMIT", "RULES", "STATE"], &rows)),
    }
}
