//! A server whose clock a test moves.

use std::time::{Duration, Instant};

use eddyline_language::time::{Time, iso};
use eddyline_server::{ServeArgs, start};
use serde_json::{Value, json};

use crate::client::{Rig, args};

const LONG: Duration = Duration::from_secs(30);

fn test_clock() -> ServeArgs {
    ServeArgs { test_clock: Some(true), ..args() }
}

async fn clock(rig: &Rig, body: Value) -> Value {
    let reply = rig.post("/v1/test/clock", body).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.body
}

fn ms(time: &Value) -> i64 {
    serde_json::from_value::<Time>(time.clone()).unwrap().millis()
}

#[tokio::test]
async fn two_weeks_pass_in_no_time_and_reminders_come_in_order() {
    let rig = Rig::with(test_clock()).await;
    rig.flow(
        "nap",
        "steps: {a: {await: {time: 2d}}, b: {after: [a], await: {time: 5d}}, c: {after: [b], await: {time: 7d}}}",
    )
    .await;
    let run = rig.run("nap", json!(1)).await;
    let started = clock(&rig, json!({})).await;
    assert_eq!((&started["auto"], clock(&rig, json!({})).await), (&json!(false), started.clone()), "it stands still");
    let day = 86_400_000;
    let moved = clock(&rig, json!({"advance": "3d"})).await;
    assert_eq!(moved["now"], json!(iso(ms(&started["now"]) + 3 * day)));
    let steps = rig.get(&format!("/v1/runs/{run}/steps")).await;
    let statuses: Vec<&Value> = steps.items().iter().map(|step| &step["status"]).collect();
    assert_eq!(statuses, ["completed", "waiting", "pending"], "{}", steps.body);
    clock(&rig, json!({"advance": "20d"})).await;
    let ended = rig.get(&format!("/v1/runs/{run}")).await.body;
    assert_eq!(ended["status"], "completed");
    assert_eq!(ended["duration_ms"], json!(14 * day), "each timer fired at its own time: {ended}");
    rig.server.stop().await;
}

#[tokio::test]
async fn it_jumps_by_itself_only_when_nothing_can_run() {
    let rig = Rig::with(test_clock()).await;
    rig.flow("f", "steps: {a: {run: a}, b: {after: [a], await: {time: 30d}}}").await;
    let run = rig.run("f", json!(1)).await;
    rig.flow("nap", "steps: {a: {await: {time: 10d}}}").await;
    let nap = rig.run("nap", json!(1)).await;
    let start = ms(&clock(&rig, json!({"auto": true})).await["now"]);
    // A task is queued, then claimed: time stands still.
    let task = rig.claim("w").await;
    assert_eq!(ms(&clock(&rig, json!({})).await["now"]), start);
    assert_eq!(rig.get(&format!("/v1/runs/{nap}")).await.body["status"], "waiting");
    rig.report(&task, json!({"op": "complete"})).await;
    for run in [&nap, &run] {
        let ended = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
        assert_eq!((ended.status, &ended.body["status"]), (200, &json!("completed")));
    }
    let stopped = clock(&rig, json!({"auto": false})).await;
    assert_eq!(ms(&stopped["now"]), start + 30 * 86_400_000, "no further than the last timer");
    rig.server.stop().await;
}

#[tokio::test]
async fn leases_and_rates_go_by_the_clock() {
    let rig = Rig::with(test_clock()).await;
    rig.flow("f", "steps: {a: {run: a, retry: {initial: 10s, jitter: 0}}}").await;
    rig.run("f", json!(1)).await;
    let first = rig.claim("w").await;
    // The worker is gone: its lease ends, then its back-off.
    clock(&rig, json!({"advance": "1m"})).await;
    let second = rig.claim("w").await;
    assert_eq!((&second["attempt"], &second["run_id"]), (&json!(2), &first["run_id"]));
    assert_eq!(rig.report(&first, json!({"op": "complete"})).await["outcome"], "stale");
    assert_eq!(rig.report(&second, json!({"op": "complete"})).await["outcome"], "applied");

    rig.put("/v1/limits/slow", json!({"rate": {"count": 1, "per": "1h"}})).await;
    rig.flow("g", "steps: {a: {run: a, limits: [slow]}}").await;
    rig.run("g", json!(1)).await;
    rig.run("g", json!(2)).await;
    let task = rig.claim("w").await;
    let before = ms(&clock(&rig, json!({"auto": true})).await["now"]);
    rig.report(&task, json!({"op": "complete"})).await;
    let since = Instant::now();
    let task = loop {
        let task = rig.claim("w").await;
        if !task.is_null() {
            break task;
        }
        assert!(since.elapsed() < LONG, "the limit lets nothing pass");
    };
    assert_eq!(task["input"], 2);
    assert_eq!(ms(&clock(&rig, json!({"auto": false})).await["now"]), before + 3_600_000);
    rig.server.stop().await;
}

#[tokio::test]
async fn other_servers_have_no_such_clock() {
    let rig = Rig::start().await;
    assert_eq!(rig.post("/v1/test/clock", json!({"advance": "1s"})).await.code(), (404, "not_found"));
    rig.server.stop().await;
    let dir = tempfile::tempdir().unwrap();
    let store = Some(dir.path().join("store").display().to_string());
    let refused = start(&ServeArgs { store, ..test_clock() }).await.unwrap_err().to_string();
    assert!(refused.contains("--store memory:"), "{refused}");
    let open = ServeArgs { listen: Some("0.0.0.0:0".to_owned()), insecure: Some(true), ..test_clock() };
    let refused = start(&open).await.unwrap_err().to_string();
    assert!(refused.contains("loopback"), "{refused}");
    let rig = Rig::with(test_clock()).await;
    assert_eq!(rig.post("/v1/test/clock", json!({"advanced": "1s"})).await.code(), (400, "bad_request"));
    rig.server.stop().await;
}
