//! `eddy tail`: a run's timeline, record by record.

use std::time::Duration;

use eddyline_protocol::RunInfo;

use super::Context;
use super::connect::segment;
use super::run::timeline::{Timeline, line};
use super::trouble::Trouble;

/// Wide enough for most records, and short enough to be read.
const LINE: usize = 160;
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug, clap::Args)]
pub struct Tail {
    run: String,
    /// Go on until the run has ended
    #[arg(long, short)]
    follow: bool,
    /// Begin behind this record
    #[arg(long, default_value_t = 0, value_name = "NUMBER")]
    after: u64,
}

pub async fn run(ctx: &Context, tail: Tail) -> Result<(), Trouble> {
    let mut timeline = Timeline::new(ctx.remote()?, &tail.run, tail.after, PATIENCE);
    loop {
        let records = if tail.follow { timeline.next().await? } else { timeline.read().await? };
        for record in &records {
            match ctx.screen.json {
                true => ctx.screen.ndjson(record)?,
                false => ctx.screen.line(&line(record).cut(ctx.screen.edge().max(LINE)))?,
            }
        }
        if timeline.ended || (records.is_empty() && !tail.follow) {
            return Ok(());
        }
        // Begun behind the last record of a run that has ended, there is none to come.
        if records.is_empty() && has_ended(ctx, &tail.run).await? {
            return Ok(());
        }
    }
}

async fn has_ended(ctx: &Context, run: &str) -> Result<bool, Trouble> {
    let run: RunInfo = ctx.remote()?.get(&format!("/v1/runs/{}", segment(run)), &[]).await?;
    Ok(run.completed_at.is_some())
}
