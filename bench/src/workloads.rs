//! W1: ten steps in a row. W2: one to n to one. W3: many runs of one step, started in batches.

use std::time::Duration;

use eddyline_engine::{Config, Engine, StartRequest};
use eddyline_store::Namespace;
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::measure::{Measure, Row, mean_ms, reset_peak};
use crate::stores::Opened;
use crate::work;

const LONG: Duration = Duration::from_secs(600);
pub const STEPS: usize = 10;

/// Runs of ten steps in a row, `in_flight` at once.
pub async fn chain(opened: &Opened, in_flight: usize, runs: usize) -> Row {
    let engine = engine(opened, &chain_text()).await;
    let slots = work::spawn(&engine, in_flight, 1);
    reset_peak();
    let (measure, before) = (Measure::start(), opened.counts());
    chains(&engine, in_flight, runs).await;
    finish(
        opened,
        measure,
        before,
        format!("W1 chain of 10, {in_flight} in flight"),
        (runs * STEPS) as u64,
        engine,
        slots,
    )
    .await
}

/// Starts runs of a chain and waits for them, `in_flight` at once.
pub async fn chains(engine: &Engine, in_flight: usize, runs: usize) {
    let lane = |share: usize| {
        let engine = engine.clone();
        async move {
            for at in 0..share {
                one(&engine, "chain", json!({"order": at, "note": "a payload like those of every day"})).await;
            }
        }
    };
    join_all((0..in_flight).map(|at| tokio::spawn(lane(runs / in_flight + usize::from(at < runs % in_flight))))).await;
}

pub fn chain_text() -> String {
    let steps = (1..STEPS).map(|at| format!("s{at}: {{after: [s{}]}}", at - 1)).collect::<Vec<_>>().join(", ");
    format!("name: chain\nsteps: {{s0: {{}}, {steps}}}")
}

/// One step, n items, one step.
pub async fn spread(opened: &Opened, n: usize, runs: usize) -> Row {
    let text = "name: fan\nsteps:\n  list: {set: '${input.items}'}\n  each: {after: [list], spread: steps.list.output, run: work}\n  end: {after: [each], run: work, input: {count: '${size(steps.each.output)}'}}";
    let engine = engine(opened, text).await;
    let slots = work::spawn(&engine, 64, 16);
    reset_peak();
    let (measure, before) = (Measure::start(), opened.counts());
    let items: Vec<Value> = (0..n).map(|at| json!(at)).collect();
    for _ in 0..runs {
        one(&engine, "fan", json!({"items": items})).await;
    }
    finish(opened, measure, before, format!("W2 1 → {n} → 1"), (runs * (n + 1)) as u64, engine, slots).await
}

/// Runs of one step, started a thousand at a time.
pub async fn many(opened: &Opened, runs: usize) -> Row {
    let engine = engine(opened, "name: one\nsteps: {only: {}}").await;
    let slots = work::spawn(&engine, 64, 8);
    reset_peak();
    let (measure, before) = (Measure::start(), opened.counts());
    let ns = Namespace::default();
    for at in (0..runs).step_by(1_000) {
        let count = 1_000.min(runs - at);
        let requests = (0..count).map(|at| request("one", json!({"n": at}))).collect();
        let started = engine.start_batch(&ns, requests).await.unwrap_or_default();
        let ends = started.into_iter().flatten().map(|started| engine.result(&ns, started.run, LONG));
        join_all(ends).await;
    }
    finish(opened, measure, before, format!("W3 {runs} runs of one step"), runs as u64, engine, slots).await
}

pub async fn engine(opened: &Opened, definition: &str) -> Engine {
    let engine = Engine::start(opened.store.clone(), Config::default());
    if let Err(error) = engine.register(&Namespace::default(), None, definition).await {
        eprintln!("{error}");
    }
    engine
}

pub fn request(flow: &str, input: Value) -> StartRequest {
    StartRequest { flow: flow.to_owned(), input, ..StartRequest::default() }
}

async fn one(engine: &Engine, flow: &str, input: Value) {
    let ns = Namespace::default();
    match engine.start_run(&ns, request(flow, input)).await {
        Ok(started) => match engine.result(&ns, started.run, LONG).await {
            Ok(Some(result)) if result.error.is_none() => {}
            other => eprintln!("{other:?}"),
        },
        Err(error) => eprintln!("{error}"),
    }
}

async fn finish(
    opened: &Opened,
    measure: Measure,
    before: (u64, u64),
    what: String,
    steps: u64,
    engine: Engine,
    slots: Vec<tokio::task::JoinHandle<work::Seen>>,
) -> Row {
    let mut row = measure.row(what, opened.name, steps, Vec::new());
    engine.shutdown().await;
    let (commits, bytes) = opened.counts();
    row.commits = commits - before.0;
    row.bytes_per_step = (bytes - before.1) as f64 / steps as f64;
    let work::Seen { reports: mut latencies, steps } = work::seen(slots).await;
    row.step_ms = mean_ms(&steps);
    latencies.sort_unstable();
    let at =
        |part: f64| latencies.get((latencies.len() as f64 * part) as usize).map_or(0.0, |at| at.as_secs_f64() * 1e3);
    (row.p50_ms, row.p99_ms) = (at(0.5), at(0.99));
    row
}
