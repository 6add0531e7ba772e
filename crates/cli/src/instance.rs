//! `eddy instance`: the servers that share a store.

use serde_json::Value;

use super::Context;
use super::moment;
use super::screen::{Ink, Line, table};
use super::trouble::Trouble;

#[derive(Debug, clap::Subcommand)]
pub enum InstanceCommand {
    /// List the servers that share the server's store
    List,
}

pub async fn run(ctx: &Context, command: InstanceCommand) -> Result<(), Trouble> {
    match command {
        InstanceCommand::List => list(ctx).await,
    }
}

async fn list(ctx: &Context) -> Result<(), Trouble> {
    let instances = ctx.remote()?.list("/v1/instances", &[], None).await?;
    if ctx.screen.json {
        return ctx.screen.document(&instances);
    }
    let now = moment::now_ms();
    let text = |instance: &Value, field: &str| instance[field].as_str().unwrap_or_default().to_owned();
    let row = |instance: &Value| {
        let gone = instance["status"] == "gone";
        let status = Line::default().with(if gone { Ink::Bad } else { Ink::Good }, text(instance, "status"));
        let started = instance["started_at"].as_str().map(|at| moment::ago(at, now)).unwrap_or_default();
        let process = format!("{} {}", text(instance, "host"), instance["pid"]);
        vec![
            Line::plain(text(instance, "name")),
            status,
            Line::plain(text(instance, "url")),
            Line::plain(process),
            Line::plain(text(instance, "version")),
            Line::default().with(Ink::Faint, started),
        ]
    };
    let rows: Vec<_> = instances.iter().map(row).collect();
    ctx.screen.lines(&table(&["INSTANCE", "STATUS", "URL", "HOST AND PID", "VERSION", "STARTED"], &rows))
}
