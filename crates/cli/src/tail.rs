//! `eddy tail`: prints the timeline of a run.

use eddyline_protocol::RunInfo;

use super::Context;
use super::connect::segment;
use super::run::timeline::{Timeline, line, patiently};
use super::run_id;
use super::trouble::Trouble;

#[derive(Debug, clap::Args)]
pub struct Tail {
    /// The id of the run, the beginning or the end of it, or `latest`
    run: String,
    /// Continue until the run has ended
    #[arg(long, short)]
    follow: bool,
    /// Begin after this record
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    after: u64,
}

pub async fn run(ctx: &Context, tail: Tail) -> Result<(), Trouble> {
    let remote = ctx.remote()?;
    let run = run_id::resolve(&remote, &tail.run).await?;
    let mut timeline = Timeline::new(remote, &run, tail.after);
    // Without `--follow` there is nothing to wait for.
    let mut over = !tail.follow;
    // Not `rest`: wait only for a server that has answered before.
    let mut records = timeline.read().await?;
    loop {
        for record in &records {
            match ctx.screen.json {
                true => ctx.screen.ndjson(record)?,
                false => ctx.screen.rows(vec![line(record)])?,
            }
        }
        if timeline.ended || (records.is_empty() && over) {
            return Ok(());
        }
        // No record follows the last one of an ended run. But if the run ended after the previous read, there are more:
        // read once again.
        over = over || (records.is_empty() && has_ended(ctx, &run).await?);
        records = if over { timeline.rest().await? } else { timeline.next().await? };
    }
}

async fn has_ended(ctx: &Context, run: &str) -> Result<bool, Trouble> {
    let (remote, path) = (ctx.remote()?, format!("/v1/runs/{}", segment(run)));
    // A stopping server ends long polls without records, so it may be unavailable now.
    let run: RunInfo = patiently(|| remote.get(&path, &[])).await?;
    Ok(run.completed_at.is_some())
}
