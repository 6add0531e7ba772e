//! `eddy tail`: a run's timeline, record by record.

use eddyline_protocol::RunInfo;

use super::Context;
use super::connect::segment;
use super::run::timeline::{Timeline, line, patiently};
use super::run_id;
use super::trouble::Trouble;

#[derive(Debug, clap::Args)]
pub struct Tail {
    /// Its id, either end of it, or `latest`
    run: String,
    /// Go on until the run has ended
    #[arg(long, short)]
    follow: bool,
    /// Begin behind this record
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    after: u64,
}

pub async fn run(ctx: &Context, tail: Tail) -> Result<(), Trouble> {
    let remote = ctx.remote()?;
    let run = run_id::resolve(&remote, &tail.run).await?;
    let mut timeline = Timeline::new(remote, &run, tail.after);
    // There is nothing to wait for.
    let mut over = !tail.follow;
    // Only a server that was there is waited for.
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
        // Begun behind the last record of a run that has ended, there is none to come. But if it has ended since records
        // were asked for, there are some.
        over = over || (records.is_empty() && has_ended(ctx, &run).await?);
        records = if over { timeline.rest().await? } else { timeline.next().await? };
    }
}

async fn has_ended(ctx: &Context, run: &str) -> Result<bool, Trouble> {
    let (remote, path) = (ctx.remote()?, format!("/v1/runs/{}", segment(run)));
    // A server that stops lets go of those who wait for records: it is likely to be away now.
    let run: RunInfo = patiently(|| remote.get(&path, &[])).await?;
    Ok(run.completed_at.is_some())
}
