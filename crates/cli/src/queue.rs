//! `eddy queue`: task queues.

use std::str::FromStr;

use eddyline_protocol::{QueueInfo, QueueRules, Rate, WorkerInfo};
use serde_json::{Value, json};

use super::connect::{segment, understood};
use super::moment;
use super::screen::{Ink, Line, table};
use super::trouble::Trouble;
use super::{Context, input};

#[derive(Debug, clap::Subcommand)]
pub enum QueueCommand {
    /// List queues, with the number of waiting and claimed tasks
    List,
    /// Set the rules of a queue; replaces all of them, and what you omit is unbounded
    Set {
        name: String,
        /// How many tasks may run at once
        #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = input::whole::<u32>)]
        concurrency: Option<u32>,
        /// How many tasks may be claimed per period, such as 10/1s
        #[arg(long, value_name = "N/SPAN", value_parser = Rate::from_str)]
        rate: Option<Rate>,
        /// How many tasks of one flow may run at once
        #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = input::whole::<u32>)]
        flow_concurrency: Option<u32>,
    },
    /// Hand out no more tasks
    Pause { name: String },
    /// Hand out tasks again
    Resume { name: String },
}

pub async fn run(ctx: &Context, command: QueueCommand) -> Result<(), Trouble> {
    match command {
        QueueCommand::List => list(ctx).await,
        QueueCommand::Set { name, concurrency, rate, flow_concurrency } => {
            let rules = QueueRules { concurrency, rate, burst: None, flow_concurrency };
            let answer: Value = ctx.remote()?.put(&path(&name), &rules).await?;
            ctx.screen.answer(&answer, format!("queue {name}: {}", rules_text(concurrency, rate, flow_concurrency)))
        }
        QueueCommand::Pause { name } => {
            warn_of_unknown(ctx, &name).await;
            let answer: Value = ctx.remote()?.post(&format!("{}/pause", path(&name)), &json!({})).await?;
            ctx.screen.answer(&answer, format!("queue {name} paused"))
        }
        QueueCommand::Resume { name } => {
            warn_of_unknown(ctx, &name).await;
            let answer: Value = ctx.remote()?.post(&format!("{}/resume", path(&name)), &json!({})).await?;
            ctx.screen.answer(&answer, format!("queue {name} resumed"))
        }
    }
}

/// You may pause a queue before its first task arrives, but an unknown name may also be a typo.
async fn warn_of_unknown(ctx: &Context, name: &str) {
    // A key that may pause queues but not list them gets no warning.
    let Ok(remote) = ctx.remote() else { return };
    let (Ok(queues), Ok(workers)) =
        (remote.list_of::<QueueInfo>("/v1/queues", &[]).await, remote.list_of::<WorkerInfo>("/v1/workers", &[]).await)
    else {
        return;
    };
    let known = queues.iter().any(|queue| queue.name == name);
    if !known && !workers.iter().any(|worker| worker.queues.iter().any(|queue| queue == name)) {
        ctx.screen.aside(format!("warning: queue {name} has never had tasks or workers: is the name right?"));
    }
}

fn path(name: &str) -> String {
    format!("/v1/queues/{}", segment(name))
}

pub fn rules_text(concurrency: Option<u32>, rate: Option<Rate>, flow_concurrency: Option<u32>) -> String {
    let mut rules = Vec::new();
    rules.extend(concurrency.map(|n| format!("{n} at once")));
    rules.extend(rate.map(|rate| format!("{} per {}", rate.count, rate.per)));
    rules.extend(flow_concurrency.map(|n| format!("{n} per flow")));
    if rules.is_empty() { "no bounds".to_owned() } else { rules.join(", ") }
}

async fn list(ctx: &Context) -> Result<(), Trouble> {
    let queues = ctx.remote()?.list("/v1/queues", &[], None).await?;
    if ctx.screen.json {
        return ctx.screen.document(&queues);
    }
    let now = moment::now_ms();
    let mut rows = Vec::new();
    for queue in queues {
        let queue: QueueInfo = understood(queue)?;
        let oldest = queue.oldest.as_deref().map(|oldest| moment::ago(oldest, now)).unwrap_or_default();
        let state = match &queue.fault {
            Some(fault) => Line::default().with(Ink::Note, format!("paused: {fault}")),
            None if queue.paused => Line::default().with(Ink::Note, "paused"),
            None => Line::default(),
        };
        rows.push(vec![
            Line::plain(&queue.name),
            Line::plain(queue.ready.to_string()),
            Line::plain(queue.claimed.to_string()),
            Line::plain(oldest),
            Line::plain(rules_text(queue.concurrency, queue.rate, queue.flow_concurrency)),
            state,
        ]);
    }
    match rows.is_empty() {
        true => ctx.screen.say("no queue has tasks or rules"),
        false => ctx.screen.lines(&table(&["QUEUE", "WAITING", "CLAIMED", "OLDEST", "RULES", "STATE"], &rows)),
    }
}
