//! Drivers: each starts a run, supplies what the run waits for, waits for its end, checks its output, and starts the
//! next.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use eddyline::protocol::{GateInfo, Page, Published, RunResult, RunStarted};
use eddyline::{Error, Method};
use serde_json::{Value, json};
use uuid::Uuid;

use crate::api::Api;
use crate::hands;
use crate::ledger::Ledger;

/// A run may be delayed by a few leases and outages.
const RUN_ENDS: Duration = Duration::from_secs(90);
const POLL: Duration = Duration::from_millis(50);
const ITEMS: u64 = 12;
const MANY_ITEMS: u64 = 120;

pub struct World {
    pub api: Api,
    pub ledger: Arc<Ledger>,
    pub next: AtomicU64,
    /// The drivers start no more runs.
    pub finishing: AtomicBool,
    /// All runs have ended.
    pub stopped: AtomicBool,
}

pub async fn drive(world: Arc<World>) {
    while !world.finishing.load(Ordering::Relaxed) {
        let n = world.next.fetch_add(1, Ordering::Relaxed);
        one(&world, n).await;
    }
}

async fn one(world: &World, n: u64) {
    let items: Vec<u64> = (n..n + ITEMS).collect();
    let diamond = |n: u64| 2 * n + 112;
    match n % 16 {
        0..=3 => {
            let run = start_by_tag(world, "diamond", &json!({"n": n})).await;
            check_end(world, &run, json!(diamond(n))).await;
        }
        4 | 5 => {
            let many = if n % 80 == 4 { MANY_ITEMS } else { ITEMS };
            let items: Vec<u64> = (n..n + many).collect();
            let run = start_by_key(world, "wide", &json!({"items": items})).await;
            check_end(world, &run, json!(items.iter().sum::<u64>() + many)).await;
        }
        6 | 7 => gate(world, n).await,
        8 | 9 => event(world, n).await,
        10 => {
            let run = start_by_key(world, "parent", &json!({"items": items[..3]})).await;
            check_end(world, &run, json!(items[..3].iter().map(|n| diamond(*n)).sum::<u64>())).await;
        }
        11 | 12 => {
            let tenant = format!("tenant-{}", n % 3);
            let run = start_by_key(world, "limited", &json!({"tenant": tenant})).await;
            world.ledger.book().tenants.insert(run.clone(), tenant);
            check_end(world, &run, json!(6)).await;
        }
        13 => {
            let flow = if n % 32 == 13 { "flaky" } else { "doomed" };
            let run = start_by_key(world, flow, &json!({"n": n})).await;
            check_end(world, &run, json!(if flow == "flaky" { 2 } else { n + 2 })).await;
        }
        14 => {
            let run = start_by_key(world, "hand", &json!({"n": n})).await;
            check_end(world, &run, json!(10 + 4 * (n + 1))).await;
        }
        _ => {
            let run = start_by_key(world, hands::CODE, &json!({"n": n})).await;
            check_end(world, &run, json!((n + 1) * 2)).await;
        }
    }
}

/// Starts with an idempotency key, often twice at once through different instances: it must create one run.
async fn start_by_key(world: &World, flow: &'static str, input: &Value) -> String {
    let key = Uuid::new_v4().to_string();
    let body = json!({"input": input, "idempotency_key": key});
    let path = format!("/v1/flows/{flow}/runs");
    let post = || world.api.post::<RunStarted>(&path, &body);
    let run = match world.api.chance() % 4 {
        0 => {
            let (one, other) = tokio::join!(post(), post());
            if one.run_id != other.run_id || one.existing == other.existing && !one.existing {
                world.ledger.problem(format!("the key {key} started {one:?} and {other:?}"));
            }
            one.run_id
        }
        _ => post().await.run_id,
    };
    let mut book = world.ledger.book();
    book.runs.insert(run.clone(), flow);
    book.keys.insert(key, run.clone());
    run
}

/// Starts without an idempotency key. If the response is lost, the tag tells whether the run was started.
async fn start_by_tag(world: &World, flow: &'static str, input: &Value) -> String {
    let tag = format!("tag-{}", Uuid::new_v4().simple());
    let body = json!({"input": input, "tags": [tag]});
    let path = format!("/v1/flows/{flow}/runs");
    world.ledger.book().tags.entry(tag.clone()).or_default();
    let answered = world.api.ask::<RunStarted>(Method::POST, &path, &[], Some(&body)).await;
    let run = answered.result.unwrap_or_else(|error| panic!("{path}: {error}")).run_id;
    let mut book = world.ledger.book();
    book.runs.insert(run.clone(), flow);
    let tagged = book.tags.entry(tag).or_default();
    tagged.acknowledged = Some(run.clone());
    tagged.uncertain = answered.uncertain;
    run
}

async fn gate(world: &World, n: u64) {
    let run = start_by_key(world, "gate", &json!({})).await;
    let gate = wait_for_gate(world, &run).await;
    let path = format!("/v1/gates/{}", gate.token.as_deref().unwrap_or(&gate.gate_id));
    // Two people open it through two instances: one of them succeeds.
    let open = |n: u64| {
        let (api, path) = (&world.api, &path);
        async move {
            let payload = json!({"n": n, "by": Uuid::new_v4().to_string()});
            let answered = api.ask::<Value>(Method::POST, path, &[], Some(&payload)).await;
            (payload, answered)
        }
    };
    let (one, other) = match world.api.chance() % 2 {
        0 => (open(n).await, None),
        _ => {
            let both = tokio::join!(open(n), open(n));
            (both.0, Some(both.1))
        }
    };
    let mut opened = 0;
    for (payload, answered) in [Some(one), other].into_iter().flatten() {
        match answered.result {
            Ok(_) => {
                opened += 1;
                world.ledger.book().gates.insert(run.clone(), payload);
            }
            Err(Error::Api { status: 409, .. }) => {}
            Err(error) => world.ledger.problem(format!("the gate of {run}: {error}")),
        }
    }
    if opened > 1 {
        world.ledger.problem(format!("the gate of {run} was opened twice"));
    }
    check_end(world, &run, json!(n + 1)).await;
}

async fn wait_for_gate(world: &World, run: &str) -> GateInfo {
    let (begun, query) = (Instant::now(), [("run", run.to_owned())]);
    loop {
        let mut gates: Page<GateInfo> = world.api.get("/v1/gates", &query).await;
        if let Some(gate) = gates.items.pop() {
            return gate;
        }
        assert!(begun.elapsed() < RUN_ENDS, "{run} does not reach its gate");
        tokio::time::sleep(POLL).await;
    }
}

async fn event(world: &World, n: u64) {
    let key = Uuid::new_v4().to_string();
    let run = start_by_key(world, "event", &json!({"id": key})).await;
    let id = format!("event-{key}");
    let body = json!({"name": "paid", "key": key, "payload": {"n": n}, "id": id});
    let _: Published = world.api.post("/v1/events", &body).await;
    world.ledger.book().events.insert(id, run.clone());
    check_end(world, &run, json!(n + 1)).await;
}

/// Waits for the end of a run through any instance.
async fn check_end(world: &World, run: &str, output: Value) {
    let (begun, path) = (Instant::now(), format!("/v1/runs/{run}/result"));
    while begun.elapsed() < RUN_ENDS {
        // Shorter than the time after which another instance is tried.
        let result: RunResult = world.api.get(&path, &[("wait", "2s".to_owned())]).await;
        match result.status.as_str() {
            "completed" if result.output == output => return,
            "completed" | "failed" | "cancelled" => {
                return world.ledger.problem(format!("{run} ended {result:?}; its output should be {output}"));
            }
            _ => {}
        }
    }
    let info: Value = world.api.get(&format!("/v1/runs/{run}"), &[]).await;
    world.ledger.problem(format!("{run} did not end: {info}"));
}
