//! Stores with many records or many waiting runs.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use eddyline_engine::{Config, Engine};
use eddyline_machine::Status;
use eddyline_store::{Embedded, Namespace, Options, RunFilter, Store};
use serde_json::json;

use crate::measure::{Measure, Row, cpu_time, resident_mb};
use crate::stores::Opened;
use crate::workloads::{self, engine, request};

type Failed = Box<dyn std::error::Error>;

/// The environment variable with the store that the child process opens.
pub const OPEN: &str = "EDDYLINE_BENCH_OPEN";
/// A chain of ten steps leaves about this many records.
const RECORDS_A_RUN: usize = 42;
const IDLE: Duration = Duration::from_secs(10);

/// A store with `records` records of ended runs: the time to open it, and the memory of an engine on it.
pub async fn open(records: usize) -> Result<Row, Failed> {
    let opened = Opened::embedded()?;
    workloads::chain(&opened, 200, records / RECORDS_A_RUN + 1).await;
    let dir = opened.close().ok_or("not on disk")?;
    // In a separate process, so that its memory is that of the engine alone.
    let output = Command::new(std::env::current_exe()?).env(OPEN, dir.path()).output()?;
    let row = serde_json::from_slice(&output.stdout);
    row.map_err(|_| String::from_utf8_lossy(&output.stderr).into_owned().into())
}

/// Opens the store and runs an engine on it for three seconds.
pub async fn opened(dir: &Path) -> Result<Row, Failed> {
    let (measure, since) = (Measure::start(), Instant::now());
    let store = Arc::new(Embedded::open(dir, Options::default())?);
    let took = since.elapsed();
    let ns = Namespace::default();
    let engine = Engine::start(store.clone(), Config::default());
    tokio::time::sleep(Duration::from_secs(3)).await;
    let filter = RunFilter { status: vec![Status::Completed], ..RunFilter::default() };
    let runs = store.count_runs(&ns, &filter).await?;
    let newest = store.runs(Some(&ns), &RunFilter::default(), Default::default()).await?;
    let records: u64 = newest.first().map_or(0, |run| run.records) * runs;
    engine.shutdown().await;
    let mut row = measure.row(format!("open with {records} records"), "embedded", runs, vec![took]);
    row.per_second = 0.0;
    row.note = format!("opened in {:.0} ms, {:.0} MB with an engine on it", took.as_secs_f64() * 1e3, resident_mb());
    Ok(row)
}

/// `runs` runs wait for a gate that never opens: the load of the engine meanwhile, and the effect on other runs.
pub async fn idle(runs: usize) -> Result<Vec<Row>, Failed> {
    let alone = workloads::chain(&Opened::embedded()?, 50, 1_000).await;
    let opened = Opened::embedded()?;
    let engine = engine(&opened, "name: waits\nsteps: {never: {await: {event: never, timeout: 30d}}}").await;
    let ns = Namespace::default();
    let since = Instant::now();
    for _ in 0..runs / 1_000 {
        let requests = (0..1_000).map(|at| request("waits", json!({"n": at}))).collect();
        engine.start_batch(&ns, requests).await?;
    }
    let started = since.elapsed();
    // Wait until every gate has looked back and nothing is left to do.
    let mut quiet = 0;
    let mut before = opened.counts();
    while quiet < 4 {
        tokio::time::sleep(Duration::from_millis(500)).await;
        quiet = if opened.counts() == before { quiet + 1 } else { 0 };
        before = opened.counts();
    }
    let (measure, cpu) = (Measure::start(), cpu_time());
    tokio::time::sleep(IDLE).await;
    let share = (cpu_time() - cpu).as_secs_f64() / IDLE.as_secs_f64();
    let mut row = measure.row(format!("{runs} waiting runs, idle"), "embedded", runs as u64, Vec::new());
    row.per_second = 0.0;
    row.cpu_us_per_step = 0.0;
    row.note = format!(
        "{:.2} % of a core for {} s; {:.0} MB; started in {:.1} s",
        share * 100.0,
        IDLE.as_secs(),
        resident_mb(),
        started.as_secs_f64()
    );
    engine.shutdown().await;
    let mut loaded = workloads::chain(&opened, 50, 1_000).await;
    loaded.what = format!("W1 at 50 with {runs} waiting runs");
    loaded.note = format!("{:.2} of the speed without them", loaded.per_second / alone.per_second);
    Ok(vec![alone, row, loaded])
}
