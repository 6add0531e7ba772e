//! Flows that grow without end, children that cannot start, and schemas that take very long to check.

use std::time::{Duration, Instant};

use eddyline::{Client, Method};
use serde_json::{Value, json};

use crate::eddy::{Eddy, LONG};

/// The number of runs with a status, or of all runs if `status` is empty.
async fn count(client: &Client, status: &str) -> u64 {
    let query = [("limit", "1".to_owned()), ("count", "true".to_owned()), ("status", status.to_owned())];
    let query = if status.is_empty() { &query[..2] } else { &query[..] };
    let page: Value = client.call(Method::GET, "/v1/runs", query, None::<&Value>).await.unwrap();
    page["total"].as_u64().unwrap()
}

async fn open_runs(client: &Client) -> u64 {
    let mut all = 0;
    for status in ["pending", "running", "waiting", "paused"] {
        all += count(client, status).await;
    }
    all
}

async fn until_quiet(client: &Client) {
    let since = Instant::now();
    while open_runs(client).await > 0 {
        assert!(since.elapsed() < LONG, "{} of {} runs are open", open_runs(client).await, count(client, "").await);
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_fork_bomb_is_quiet_soon_after_its_root_is_cancelled() {
    let eddy = Eddy::start(&[]);
    let client = eddy.client();
    client.register_flow("bomb", "{steps: {a: {flow: bomb}, b: {flow: bomb}}}").await.unwrap();
    client.register_flow("quick", "{steps: {a: {set: 1}}, output: '${steps.a.output}'}").await.unwrap();
    let root = client.start("bomb", &json!(null)).await.unwrap();
    let began = Instant::now();
    while count(&client, "").await < 2_000 {
        assert!(began.elapsed() < LONG, "the tree does not grow");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    root.cancel(None).await.unwrap();
    let at_cancel = count(&client, "").await;
    until_quiet(&client).await;
    let all = count(&client, "").await;
    // Starts that were being delivered may still succeed; without the cancel there would be 100,000.
    assert!(all < at_cancel + 20_000, "{at_cancel} runs at the cancel, {all} at the end");
    let quick = client.start("quick", &json!(null)).await.unwrap();
    assert_eq!(quick.result::<Value>().await.unwrap(), json!(1));
    assert_eq!(count(&client, "").await, all + 1, "runs are still being started");
}

#[tokio::test]
async fn a_detached_child_that_cannot_start_fails_its_step_over_http() {
    let eddy = Eddy::start(&[]);
    let client = eddy.client();
    client.register_flow("kid", "{input_schema: {type: string}, steps: {a: {set: 1}}}").await.unwrap();
    for (flow, kind) in [("nowhere", "FlowNotFound"), ("kid", "InvalidInput")] {
        let text = format!("{{steps: {{c: {{flow: {flow}, detached: true, input: 1}}}}}}");
        client.register_flow("parent", &text).await.unwrap();
        let run = client.start("parent", &json!(null)).await.unwrap();
        let ended = run.wait(LONG).await.unwrap().unwrap();
        assert_eq!((ended.status.as_str(), ended.error.unwrap().kind.as_str()), ("failed", kind));
    }
}

#[tokio::test]
async fn detached_children_that_have_not_started_when_their_parent_is_cancelled_never_do() {
    const CHILDREN: u64 = 900;
    let eddy = Eddy::start(&[]);
    let client = eddy.client();
    client.register_flow("kid", "{steps: {a: {set: 1}}}").await.unwrap();
    let flow = format!("{{steps: {{each: {{spread: 'range({CHILDREN})', flow: kid, detached: true}}}}}}");
    client.register_flow("parent", &flow).await.unwrap();
    // The first commit sends all start messages; they are delivered one by one.
    let parent = client.start("parent", &json!(null)).await.unwrap();
    parent.cancel(None).await.unwrap();
    assert_eq!(parent.wait(LONG).await.unwrap().unwrap().status.as_str(), "cancelled");
    until_quiet(&client).await;
    let (all, completed) = (count(&client, "").await, count(&client, "completed").await);
    assert!(all < CHILDREN, "{all} runs: children start after the cancel of their parent");
    assert_eq!(completed, all - 1, "a detached child was cancelled with its parent");
}

#[tokio::test]
async fn runs_that_start_each_other_too_deep_fail_by_kind_detached_or_not() {
    /// The root and the runs below it.
    const CHAIN: u64 = 65;
    let eddy = Eddy::start(&[]);
    let client = eddy.client();
    for detached in [true, false] {
        let flow = format!("{{steps: {{a: {{flow: chain, detached: {detached}}}}}}}");
        client.register_flow("chain", &flow).await.unwrap();
        let before = count(&client, "").await;
        client.start("chain", &json!(null)).await.unwrap();
        let began = Instant::now();
        while count(&client, "").await < before + CHAIN {
            assert!(began.elapsed() < LONG, "the chain does not grow");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        until_quiet(&client).await;
        assert_eq!(count(&client, "").await, before + CHAIN);
        let query = [("status", "failed".to_owned()), ("limit", "1".to_owned())];
        let page: Value = client.call(Method::GET, "/v1/runs", &query, None::<&Value>).await.unwrap();
        let deepest = page["items"][0]["run_id"].as_str().unwrap();
        let run: Value = client.call(Method::GET, &format!("/v1/runs/{deepest}"), &[], None::<&Value>).await.unwrap();
        assert_eq!(run["error"]["kind"], "TooDeep", "{run}");
    }
}

#[tokio::test]
async fn a_schema_whose_alternatives_multiply_is_refused_with_its_place() {
    let eddy = Eddy::start(&[]);
    let client = eddy.client();
    let mut defs = serde_json::Map::new();
    for n in 0..40 {
        let next = json!({"$ref": format!("#/$defs/s{}", n + 1)});
        defs.insert(format!("s{n}"), json!({"anyOf": [next, next]}));
    }
    defs.insert("s40".to_owned(), json!({"type": "string"}));
    let flow = json!({"input_schema": {"$ref": "#/$defs/s0", "$defs": defs}, "steps": {"a": {"set": 1}}});
    let began = Instant::now();
    let error = client.register_flow("f", &flow.to_string()).await.unwrap_err().to_string();
    assert!(error.contains("input_schema.$defs.s"), "{error}");
    assert!(began.elapsed() < LONG);
}
