//! Claims while much waits: tasks in the queue, runs that wait for something else, and a transaction that keeps what is
//! dead from being cleaned up.

use std::time::{Duration, Instant};

use eddyline_engine::{Config, Engine};
use eddyline_store::Namespace;
use serde_json::json;

use super::server::{Server, Watch};
use crate::claims::{AT_ONCE, Driver};
use crate::measure::{self, Measure, Row};
use crate::postgres::Failed;
use crate::stores::Opened;
use crate::workloads::request;

const TURNS: usize = 5;
/// How many runs a commit starts.
const STARTED: usize = 250;
/// The queue in which the churn takes place.
const SHALLOW: usize = 1_000;
const FLOW: &str = "name: one\nsteps: {work: {}}";

/// A queue of a certain depth, in a schema of its own.
struct Queue {
    driver: Driver,
    started: usize,
}

impl Queue {
    async fn open(server: &Server, schema: &str) -> Result<Queue, Failed> {
        let opened = Opened::postgres(&server.url(schema)).await?;
        Ok(Queue { driver: Driver::new(opened.store.clone(), FLOW), started: 0 })
    }

    /// Fills it up, in runs that are never completed.
    async fn fill(&mut self, tasks: usize) -> Result<(), Failed> {
        while self.started < tasks {
            self.add((self.started + 100 * STARTED).min(tasks)).await?;
            self.driver.forget();
        }
        Ok(())
    }

    async fn add(&mut self, tasks: usize) -> Result<(), Failed> {
        let store = self.driver.store();
        while self.started < tasks {
            let mut commits = Vec::new();
            for _ in 0..2 {
                let starts = (0..STARTED.min(tasks - self.started)).map(|_| self.start()).collect();
                commits.push(store.commit(starts, Vec::new()));
            }
            futures_util::future::try_join_all(commits).await?;
        }
        Ok(())
    }

    fn start(&mut self) -> eddyline_store::Command {
        self.started += 1;
        self.driver.start(self.started, 0)
    }

    /// Claims, with as many new tasks before each: only the claims are timed.
    async fn claims(&mut self, what: &str, claims: usize) -> Result<Row, Failed> {
        let (measure, mut latencies) = (Measure::start(), Vec::with_capacity(claims));
        for _ in 0..claims {
            let starts = (0..AT_ONCE).map(|_| self.start()).collect();
            self.driver.store().commit(starts, Vec::new()).await?;
            let since = Instant::now();
            let claimed = self.driver.commit(Vec::new(), AT_ONCE).await?;
            latencies.push(since.elapsed());
            if claimed.len() < AT_ONCE {
                return Err(format!("a claim got {} tasks of {AT_ONCE}", claimed.len()).into());
            }
        }
        self.driver.forget();
        Ok(timed(measure, what, latencies))
    }

    /// Claims and completes, with as many new tasks, for some time: the claims of its beginning and of its end.
    async fn churn(&mut self, what: &str, time: Duration) -> Result<[Row; 2], Failed> {
        let (begun, mut samples) = (Instant::now(), Vec::new());
        while begun.elapsed() < time {
            let since = Instant::now();
            let claimed = self.driver.commit(Vec::new(), AT_ONCE).await?;
            samples.push((begun.elapsed(), since.elapsed()));
            let mut next: Vec<_> = claimed.iter().map(|claimed| self.driver.complete(claimed)).collect();
            for claimed in &claimed {
                self.driver.drop_run(claimed.run);
            }
            next.extend((0..AT_ONCE).map(|_| self.start()));
            self.driver.store().commit(next, Vec::new()).await?;
        }
        let part = |from: f64, to: f64| {
            let within = |at: Duration| (from..to).contains(&(at.as_secs_f64() / time.as_secs_f64()));
            samples.iter().filter(|(at, _)| within(*at)).map(|(_, took)| *took).collect::<Vec<_>>()
        };
        let row = |when: &str, latencies| timed(Measure::start(), &format!("{what}, {when}"), latencies);
        let mut rows = [row("first tenth", part(0.0, 0.1)), row("last tenth", part(0.9, 2.0))];
        rows[1].note = format!(
            "{:.2}× the first; {} tasks in {} s",
            rows[1].p50_ms / rows[0].p50_ms,
            samples.len() * AT_ONCE,
            time.as_secs()
        );
        Ok(rows)
    }
}

fn timed(measure: Measure, what: &str, latencies: Vec<Duration>) -> Row {
    let count = latencies.len();
    let took: f64 = latencies.iter().map(Duration::as_secs_f64).sum();
    let mut row = measure.row(what, "postgres", (count * AT_ONCE) as u64, latencies);
    (row.seconds, row.per_second, row.cpu_us_per_step) = (took, (count * AT_ONCE) as f64 / took, 0.0);
    row
}

/// What autovacuum does within a minute.
async fn settle(server: &Server, watch: &Watch) -> Result<(), Failed> {
    server.connect().await?.batch_execute("VACUUM ANALYZE").await?;
    watch.client.batch_execute("CHECKPOINT").await?;
    Ok(())
}

/// Claims with more and more tasks in the queue, in turns.
pub async fn depths(server: &Server, watch: &Watch, depths: &[usize], claims: usize) -> Result<Vec<Row>, Failed> {
    let mut queues = Vec::new();
    for depth in depths {
        let mut queue = Queue::open(server, &format!("depth_{depth}")).await?;
        let since = Instant::now();
        queue.fill(*depth).await?;
        queues.push((queue, format!("claims of {AT_ONCE}, {depth} tasks queued"), Vec::new(), since.elapsed()));
    }
    settle(server, watch).await?;
    for (queue, what, _, _) in &mut queues {
        queue.claims(what, 20).await?;
    }
    for _ in 0..TURNS {
        for (queue, what, rows, _) in &mut queues {
            rows.push(queue.claims(what, claims).await?);
        }
    }
    let filled: Vec<Duration> = queues.iter().map(|(.., filled)| *filled).collect();
    let mut rows: Vec<Row> = queues.into_iter().filter_map(|(.., rows, _)| measure::merge(rows)).collect();
    let base = rows[0].p50_ms;
    for (row, (depth, filled)) in rows.iter_mut().zip(depths.iter().zip(filled)) {
        let pace = *depth as f64 / filled.as_secs_f64();
        row.note = format!("{:.2}× the first line's; filled at {pace:.0} starts/s", row.p50_ms / base);
    }
    Ok(rows)
}

/// Churn in a short queue, alone and while a transaction holds a snapshot.
pub async fn snapshot(server: &Server, watch: &Watch, time: Duration) -> Result<Vec<Row>, Failed> {
    let mut rows = Vec::new();
    for held in [false, true] {
        let mut queue = Queue::open(server, if held { "churn_held" } else { "churn" }).await?;
        queue.add(SHALLOW).await?;
        settle(server, watch).await?;
        let holder = server.connect().await?;
        if held {
            holder.batch_execute("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT count(*) FROM churn_held.runs").await?;
        }
        let what = if held { "claims of 8, snapshot held open" } else { "claims of 8, no snapshot held" };
        rows.extend(queue.churn(what, time).await?);
        drop(holder);
    }
    Ok(rows)
}

/// Claims beside runs that wait for an event until a timeout, in turns with claims in an empty table.
pub async fn beside(server: &Server, watch: &Watch, runs: usize, claims: usize) -> Result<Vec<Row>, Failed> {
    let opened = Opened::postgres(&server.url("waiting")).await?;
    let engine = Engine::start(opened.store.clone(), Config::default());
    let ns = Namespace::default();
    engine.register(&ns, None, "name: waits\nsteps: {never: {await: {event: never, timeout: 30d}}}").await?;
    let since = Instant::now();
    for _ in 0..runs / 1_000 {
        let requests = (0..1_000).map(|at| request("waits", json!({"n": at}))).collect();
        engine.start_batch(&ns, requests).await?;
    }
    let pace = runs as f64 / since.elapsed().as_secs_f64();
    engine.shutdown().await;
    let (mut alone, mut beside) = (Queue::open(server, "alone").await?, Queue::open(server, "waiting").await?);
    alone.fill(100).await?;
    beside.fill(100).await?;
    settle(server, watch).await?;
    let what = ["claims, 100 tasks queued".to_owned(), format!("claims, {runs} waiting runs")];
    let mut turns = [Vec::new(), Vec::new()];
    alone.claims("", 20).await?;
    beside.claims("", 20).await?;
    for _ in 0..TURNS {
        turns[0].push(alone.claims(&what[0], claims).await?);
        turns[1].push(beside.claims(&what[1], claims).await?);
    }
    let mut rows: Vec<Row> = turns.into_iter().filter_map(measure::merge).collect();
    rows[1].note = format!("{:.2}× the line above; started at {pace:.0} runs/s", rows[1].p50_ms / rows[0].p50_ms);
    Ok(rows)
}
