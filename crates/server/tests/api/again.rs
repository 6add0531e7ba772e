//! Retries and reruns: which idempotency keys their handlers get.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::client::Rig;

fn refused() -> Value {
    json!({"op": "fail", "seq": 1, "error": {"kind": "Declined", "message": "no"}, "retryable": false})
}

/// Claims and fails this many tasks of a run and its children; returns their keys by step and input.
async fn fail_all(rig: &Rig, tasks: usize) -> BTreeMap<String, String> {
    let mut keys = BTreeMap::new();
    for _ in 0..tasks {
        let task = rig.claim("w").await;
        keys.insert(format!("{} {}", task["step"], task["input"]), task["key"].as_str().unwrap().to_owned());
        rig.report(&task, refused()).await;
    }
    assert_eq!(keys.len(), tasks, "{keys:?}");
    keys
}

async fn again(rig: &Rig, run: &str, how: &str) -> String {
    let ended = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    assert_eq!(ended.body["status"], "failed", "{}", ended.body);
    let reply = rig.post(&format!("/v1/runs/{run}/{how}"), json!({})).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.text("run_id")
}

#[tokio::test]
async fn a_retry_keeps_the_keys_of_its_handlers_and_a_rerun_has_new_ones() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {first: {steps: {x: {run: x}}}, pay: {after: [first], run: pay, input: '${input}'}}").await;
    let run = rig.run("f", json!("order 7")).await;
    let x = rig.claim("w").await;
    rig.report(&x, json!({"op": "complete", "seq": 1})).await;
    let first = fail_all(&rig, 1).await;
    assert_eq!(first["\"pay\" \"order 7\""], format!("{run}/pay"));

    let retried = again(&rig, &run, "retry").await;
    assert_eq!(fail_all(&rig, 1).await["\"pay\" \"order 7\""], format!("{run}/pay"), "the same intent");
    let retried = again(&rig, &retried, "retry").await;
    assert_eq!(fail_all(&rig, 1).await["\"pay\" \"order 7\""], format!("{run}/pay"), "a retry of a retry too");

    let rerun = again(&rig, &retried, "rerun").await;
    let x = rig.claim("w").await;
    assert_eq!(x["key"], format!("{rerun}/first.x"));
    rig.report(&x, json!({"op": "complete", "seq": 1})).await;
    let new = fail_all(&rig, 1).await;
    assert_eq!(new["\"pay\" \"order 7\""], format!("{rerun}/pay"), "a new intent");
    rig.server.stop().await;
}

#[tokio::test]
async fn children_of_a_retried_run_have_the_keys_that_they_had_before() {
    let rig = Rig::start().await;
    rig.flow("child", "steps: {c: {run: c}}").await;
    // Results taken over from `first` are not opened again, so activations have other numbers in a retry.
    rig.flow(
        "f",
        "steps: {first: {steps: {x: {run: x}}}, each: {after: [first], spread: 'range(2)', as: n,
            steps: {sub: {flow: child, input: '${n}'}}}}",
    )
    .await;
    let run = rig.run("f", json!(null)).await;
    let x = rig.claim("w").await;
    rig.report(&x, json!({"op": "complete", "seq": 1})).await;
    // Both are claimed before one fails, because a failure cancels the other.
    let (one, two) = (rig.claim("w").await, rig.claim("w").await);
    let before: BTreeMap<String, Value> =
        [&one, &two].into_iter().map(|task| (task["input"].to_string(), task["key"].clone())).collect();
    assert!(before["0"] != before["1"], "{before:?}");
    rig.report(&one, refused()).await;
    let retried = again(&rig, &run, "retry").await;
    assert_ne!(retried, run);
    for _ in 0..2 {
        let task = rig.claim("w").await;
        assert_eq!(task["key"], before[&task["input"].to_string()]);
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn calls_of_a_retried_code_run_have_the_keys_that_they_had_before() {
    let rig = Rig::start().await;
    rig.flow("job", "code: true\nretry: {attempts: 1}\nstep_retry: {attempts: 1}").await;
    let run = rig.run("job", json!(null)).await;
    let driven = async || {
        let function = rig.claim("w").await;
        let call = json!({"op": "call", "seq": 1, "name": "print", "handler": "print", "input": 1});
        rig.report(&function, call).await;
        rig.report(&function, json!({"op": "suspend", "seq": 2})).await;
        let called = rig.claim("w").await;
        rig.report(&called, refused()).await;
        let resumed = rig.claim("w").await;
        rig.report(&resumed, refused()).await;
        (function["key"].clone(), called["key"].clone())
    };
    let before = driven().await;
    assert_eq!(before.1, format!("{run}/print"));
    again(&rig, &run, "retry").await;
    assert_eq!(driven().await, before);
    rig.server.stop().await;
}
