//! `eddy worker`: lists and drains workers, or runs one.

mod command;
mod exec;

use eddyline_protocol::{Flows, WorkerInfo};
use serde_json::{Value, json};

use super::Context;
use super::connect::{segment, understood};
use super::moment;
use super::screen::{Ink, Line, table};
use super::trouble::Trouble;

#[derive(Debug, clap::Subcommand)]
pub enum WorkerCommand {
    /// List workers
    List {
        /// Include offline workers
        #[arg(long, short)]
        all: bool,
    },
    /// Ask a worker to finish its tasks and leave
    Drain {
        #[arg(value_name = "WORKER")]
        id: String,
    },
    /// Run a worker that executes a command for each task
    #[command(after_long_help = exec::CONTRACT)]
    Exec(exec::Exec),
}

pub async fn run(ctx: &Context, command: WorkerCommand) -> Result<(), Trouble> {
    match command {
        WorkerCommand::List { all } => list(ctx, all).await,
        WorkerCommand::Drain { id } => {
            let answer: Value = ctx.remote()?.post(&format!("/v1/workers/{}/drain", segment(&id)), &json!({})).await?;
            ctx.screen.answer(&answer, format!("{id} is draining"))
        }
        WorkerCommand::Exec(exec) => exec::run(ctx, exec).await,
    }
}

async fn list(ctx: &Context, all: bool) -> Result<(), Trouble> {
    let workers = ctx.remote()?.list("/v1/workers", &[], None).await?;
    let workers: Vec<Value> = workers.into_iter().filter(|worker| all || worker["status"] != "offline").collect();
    if ctx.screen.json {
        return ctx.screen.document(&workers);
    }
    let now = moment::now_ms();
    let mut rows = Vec::new();
    for worker in workers {
        let worker: WorkerInfo = understood(worker)?;
        let place = match (&worker.host, worker.pid) {
            (Some(host), Some(pid)) => format!("{host}:{pid}"),
            (Some(host), None) => host.clone(),
            _ => String::new(),
        };
        let busy = match worker.max_concurrent {
            Some(most) => format!("{}/{most}", worker.tasks),
            None => worker.tasks.to_string(),
        };
        rows.push(vec![
            Line::plain(&worker.worker_id),
            Line::default().with(Ink::of_status(&worker.status), &worker.status),
            Line::plain(place),
            Line::plain(worker.queues.join(", ")),
            Line::plain(takes(&worker)),
            Line::plain(busy),
            Line::plain(format!("{} / {}", worker.completed, worker.failed)),
            Line::default().with(Ink::Faint, moment::ago(&worker.seen_at, now)),
        ]);
    }
    if rows.is_empty() {
        return ctx.screen.say(if all { "no workers" } else { "no worker is online" });
    }
    let heads = ["WORKER", "STATUS", "AT", "QUEUES", "TAKES", "TASKS", "DONE / FAILED", "SEEN"];
    ctx.screen.lines(&table(&heads, &rows))
}

/// The handlers and code flows of a worker; one without any takes everything.
fn takes(worker: &WorkerInfo) -> String {
    const SHOWN: usize = 5;
    let flows: Vec<&String> = match &worker.flows {
        Flows::Names(names) => names.iter().collect(),
        Flows::Builds(builds) => builds.keys().collect(),
    };
    let all: Vec<&String> = worker.handlers.iter().chain(flows).collect();
    let names: Vec<&str> = all.iter().take(SHOWN).map(|name| name.as_str()).collect();
    match all.len() {
        0 => "everything".to_owned(),
        n if n > SHOWN => format!("{}, … {} more", names.join(", "), n - SHOWN),
        _ => names.join(", "),
    }
}
