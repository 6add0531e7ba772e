//! The tenant that measures: it starts and reads runs of a small flow, claims and reports their tasks and publishes
//! events, at a moderate pace, and times every request.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio::sync::watch::Receiver;

use crate::tenant::{Reply, Tenant};

/// The bound on the 99th percentile per kind of request. A development build is several times slower, and may share two
/// cores with the attacker.
pub const BOUND: Duration = Duration::from_millis(if cfg!(debug_assertions) { 400 } else { 100 });
/// On a slow machine: how many times slower than without an attack the requests may be.
pub const MAX_SLOWDOWN: u32 = 4;
/// The longest that a request may take: it may be delayed by the machine, but not by a decision of another tenant.
const SLOWEST: Duration = Duration::from_secs(3);
/// The pause between two rounds, so that this tenant is no load itself.
const PACE: Duration = Duration::from_millis(10);
/// Fewer rounds give no meaningful percentile.
const MIN_ROUNDS: usize = 25;
const FLOW: &str = "calm";
const WORKER: &str = "calm-worker";

#[derive(Debug, Default)]
pub struct Seen {
    times: BTreeMap<&'static str, Vec<Duration>>,
    pub failed: Option<String>,
}

pub async fn prepare(tenant: &Tenant) {
    let flow = json!({"steps": {"a": {"run": "double"}}, "output": "${steps.a.output}"});
    assert!(tenant.register(FLOW, &flow).await);
}

/// Repeats rounds until `over`, or until a request fails.
pub async fn watch(tenant: Tenant, over: Receiver<bool>) -> Seen {
    let mut seen = Seen::default();
    let mut rounds = 0;
    while !*over.borrow() || rounds < MIN_ROUNDS {
        if let Err(failed) = round(&tenant, rounds, &mut seen).await {
            seen.failed = Some(failed);
            break;
        }
        rounds += 1;
        tokio::time::sleep(PACE).await;
    }
    seen
}

async fn round(tenant: &Tenant, n: usize, seen: &mut Seen) -> Result<(), String> {
    let since = Instant::now();
    let started = tenant.post(&format!("/v1/flows/{FLOW}/runs"), &json!({ "input": n })).await?;
    seen.note("start", since);
    let run = expect(started, 201)?["run_id"].as_str().unwrap_or_default().to_owned();

    let since = Instant::now();
    let read = tenant.get(&format!("/v1/runs/{run}")).await?;
    seen.note("read", since);
    expect(read, 200)?;

    let since = Instant::now();
    let tasks = tenant.claim(WORKER, 10_000).await?;
    seen.note("claim", since);
    let task = tasks.first().ok_or("the task of a started run is not offered")?;
    if task["run_id"] != run.as_str() {
        return Err(format!("claimed a task of {} instead of {run}", task["run_id"]));
    }

    let since = Instant::now();
    let outcome = tenant.report(WORKER, task, json!({"op": "complete", "output": n * 2})).await?;
    seen.note("report", since);
    if outcome["outcome"] != "applied" {
        return Err(format!("the report was not applied: {outcome}"));
    }

    let since = Instant::now();
    let result = tenant.get(&format!("/v1/runs/{run}/result?wait=10s")).await?;
    seen.note("result", since);
    let result = expect(result, 200)?;
    if result["output"] != json!(n * 2) {
        return Err(format!("the run ended with {result}"));
    }

    let since = Instant::now();
    let published = tenant.post("/v1/events", &json!({"name": "calm.done", "payload": n})).await?;
    seen.note("event", since);
    expect(published, 200).map(drop)
}

fn expect(reply: Reply, status: u16) -> Result<Value, String> {
    if reply.status == status { Ok(reply.body) } else { Err(format!("expected {status}: {reply:?}")) }
}

impl Seen {
    fn note(&mut self, kind: &'static str, since: Instant) {
        self.times.entry(kind).or_default().push(since.elapsed());
    }

    /// The greatest 99th percentile of all kinds.
    pub fn p99(&self) -> Duration {
        self.times.values().map(|times| percentile(times, 99)).max().unwrap_or_default()
    }

    pub fn slowest(&self) -> Duration {
        self.times.values().flatten().copied().max().unwrap_or_default()
    }

    /// Fails if a request failed or was too slow, or if a 99th percentile reaches `bound`.
    pub fn judge(&self, bound: Duration) -> Result<(), String> {
        match &self.failed {
            Some(failed) => Err(format!("a request of the other tenant failed: {failed}; {self}")),
            None if self.p99() >= bound => Err(format!("requests of the other tenant took over {bound:?}: {self}")),
            None if self.slowest() >= SLOWEST => {
                Err(format!("a request of the other tenant took over {SLOWEST:?}: {self}"))
            }
            None => Ok(()),
        }
    }
}

impl std::fmt::Display for Seen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (kind, times) in &self.times {
            let (median, p99) = (percentile(times, 50), percentile(times, 99));
            let worst = times.iter().max().copied().unwrap_or_default();
            write!(f, "{kind} ×{}: p50 {median:.1?}, p99 {p99:.1?}, worst {worst:.1?}; ", times.len())?;
        }
        Ok(())
    }
}

/// The value that `percent` of the times do not exceed. Of fewer than a hundred times, the 99th percentile is the
/// second greatest, so that a single outlier does not fail the test.
fn percentile(times: &[Duration], percent: usize) -> Duration {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let at = (sorted.len() * percent / 100).min(sorted.len().saturating_sub(2));
    sorted.get(at).copied().unwrap_or_default()
}
