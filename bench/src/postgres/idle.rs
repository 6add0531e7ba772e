//! What an instance asks of the database while nothing happens.

use std::collections::BTreeMap;
use std::time::Duration;

use super::server::{Server, Watch};
use crate::measure::{Measure, Row};
use crate::postgres::Failed;
use crate::wire;

/// Time for what an instance does once after its start.
const SETTLING: Duration = Duration::from_secs(15);
const SHOWN: usize = 48;

/// The statements that one idle server sends in `time`, counted in PostgreSQL's log.
pub async fn queries(server: &Server, watch: &Watch, time: Duration) -> Result<Row, Failed> {
    let instance = wire::Server::serve(&server.url("idle"))?;
    tokio::time::sleep(SETTLING).await;
    log_all(watch, "all").await?;
    let (first, before, measure) = (server.log()?.len(), watch.counts().await?, Measure::start());
    let own = instance.process().cpu();
    tokio::time::sleep(time).await;
    let (log, after, own) = (server.log()?, watch.counts().await?, instance.process().cpu() - own);
    log_all(watch, "none").await?;
    instance.role.stop()?;
    let statements: Vec<&str> = log.iter().skip(first).filter_map(|line| statement(line)).collect();
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for statement in &statements {
        *counts.entry(statement.chars().take(SHOWN).collect()).or_default() += 1;
    }
    let mut counts: Vec<(String, usize)> = counts.into_iter().collect();
    counts.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
    let minutes = time.as_secs_f64() / 60.0;
    let most: Vec<String> =
        counts.iter().map(|(text, count)| format!("{:.0} {text:?}", *count as f64 / minutes)).collect();
    let mut row = measure.row("idle, statements a minute", "postgres", statements.len() as u64, Vec::new());
    (row.per_second, row.cpu_us_per_step) = (statements.len() as f64 / time.as_secs_f64(), 0.0);
    row.note = format!(
        "{:.0} a minute; CPU a minute: {:.0} ms of the server, {:.0} ms of PostgreSQL; {:.0} bytes of WAL a minute; {}",
        statements.len() as f64 / minutes,
        own.as_secs_f64() * 1e3 / minutes,
        (after.cpu - before.cpu).as_secs_f64() * 1e3 / minutes,
        (after.wal - before.wal) as f64 / minutes,
        most.join(", ")
    );
    Ok(row)
}

async fn log_all(watch: &Watch, which: &str) -> Result<(), Failed> {
    watch.client.batch_execute(&format!("ALTER SYSTEM SET log_statement = '{which}'")).await?;
    watch.client.batch_execute("SELECT pg_reload_conf()").await?;
    // The server's processes read it when they next have something to do.
    tokio::time::sleep(Duration::from_secs(1)).await;
    Ok(())
}

/// The text of a statement of a store in a line of the log.
fn statement(line: &str) -> Option<&str> {
    let said = line.strip_prefix("eddyline|LOG:  ")?;
    match said.strip_prefix("execute ") {
        Some(execute) => execute.split_once(": ").map(|(_, text)| text),
        None => said.strip_prefix("statement: "),
    }
}
