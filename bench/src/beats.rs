//! The cost to a server of extending a worker's leases: heartbeats over HTTP, and sessions over a WebSocket.

use std::time::{Duration, Instant};

use eddyline::Client;
use eddyline::protocol::{Beat, ClaimTasks, ClaimedTasks, Heartbeat};
use serde_json::{Value, json};

use crate::measure::{Measure, Row};
use crate::wire::{Role, Server};

type Failed = Box<dyn std::error::Error>;

/// The number of tasks that a worker holds.
const HELD: usize = 1_000;
const IDLE: Duration = Duration::from_secs(10);
/// All tasks belong to one run, so that reading that run is expensive.
const FLOW: &str = "steps: {each: {spread: input.items, run: hold, max_parallel: 2000}}";

/// Heartbeats that name 1,000 tasks each.
pub async fn heartbeats(count: usize) -> Result<Row, Failed> {
    let dir = tempfile::tempdir()?;
    let server = Server::start(dir.path())?;
    let client = Client::new(&server.url)?;
    start(&client, HELD).await?;
    let mut tasks: Vec<String> = Vec::new();
    while tasks.len() < HELD {
        tasks.extend(claim(&client, HELD).await?.into_iter().map(|task| task.task_id));
    }
    let beat = Heartbeat { tasks, ..Heartbeat::default() };
    for _ in 0..10 {
        kept(&client, &beat).await?;
    }
    let (measure, cpu, mut latencies) = (Measure::start(), server.process().cpu(), Vec::with_capacity(count));
    for _ in 0..count {
        let since = Instant::now();
        kept(&client, &beat).await?;
        latencies.push(since.elapsed());
    }
    let served = server.process().cpu() - cpu;
    let mut row = measure.row(format!("heartbeat of {HELD} tasks"), "http", count as u64, latencies);
    row.cpu_us_per_step = served.as_secs_f64() * 1e6 / count.max(1) as f64;
    row.peak_mb = server.process().peak_mb();
    row.note = format!("{:.2} ms of server CPU each", row.cpu_us_per_step / 1e3);
    server.role.stop()?;
    Ok(row)
}

/// A session that holds 1,000 tasks: while idle, and while their run changes all the time.
pub async fn session(changes: usize) -> Result<Row, Failed> {
    let dir = tempfile::tempdir()?;
    let server = Server::start(dir.path())?;
    let client = Client::new(&server.url)?;
    start(&client, HELD + 1).await?;
    let own = claim(&client, 1).await?.pop().ok_or("there is no task")?;
    let worker = Role::start(&format!("hold {} {HELD}", server.url))?;
    while claimed(&client).await? < HELD as u64 + 1 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let (measure, cpu) = (Measure::start(), server.process().cpu());
    tokio::time::sleep(IDLE).await;
    let idle = (server.process().cpu() - cpu).as_secs_f64() / IDLE.as_secs_f64();
    let (cpu, since) = (server.process().cpu(), Instant::now());
    for done in 0..changes {
        let report = json!({"task_id": own.task_id, "token": own.token, "op": "progress", "done": done});
        let body = json!({"worker_id": "own", "reports": [report]});
        client.call::<Value>(http::Method::POST, "/v1/tasks/report", &[], Some(&body)).await?;
    }
    let changing = (server.process().cpu() - cpu).as_secs_f64();
    let per_second = changes as f64 / since.elapsed().as_secs_f64();
    let mut row = measure.row(format!("session that holds {HELD} tasks"), "socket", changes as u64, Vec::new());
    row.per_second = 0.0;
    row.cpu_us_per_step = changing * 1e6 / changes.max(1) as f64;
    row.peak_mb = server.process().peak_mb();
    row.note = format!(
        "{:.2} % of a core while idle; {:.2} ms of CPU per change of their run, at {per_second:.0} changes per second",
        idle * 100.0,
        row.cpu_us_per_step / 1e3
    );
    worker.stop()?;
    server.role.stop()?;
    Ok(row)
}

async fn start(client: &Client, items: usize) -> Result<(), Failed> {
    client.register_flow("hold", FLOW).await?;
    client.start("hold", &json!({"items": (0..items).collect::<Vec<_>>()})).await?;
    Ok(())
}

async fn claim(client: &Client, max: usize) -> Result<Vec<eddyline::protocol::Task>, Failed> {
    let max = Some(u32::try_from(max)?);
    let ask = ClaimTasks { worker_id: "own".to_owned(), max, wait_ms: Some(5_000), ..ClaimTasks::default() };
    Ok(client.call::<ClaimedTasks>(http::Method::POST, "/v1/tasks/claim", &[], Some(&ask)).await?.tasks)
}

async fn kept(client: &Client, beat: &Heartbeat) -> Result<(), Failed> {
    let told: Beat = client.call(http::Method::POST, "/v1/workers/own/heartbeat", &[], Some(beat)).await?;
    if told == Beat::default() { Ok(()) } else { Err("a lease was lost".into()) }
}

/// The number of claimed tasks in all queues.
async fn claimed(client: &Client) -> Result<u64, Failed> {
    let queues: Value = client.call(http::Method::GET, "/v1/queues", &[], None::<&()>).await?;
    Ok(queues["items"].as_array().into_iter().flatten().filter_map(|queue| queue["claimed"].as_u64()).sum())
}
