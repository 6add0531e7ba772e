//! Options of starts.

use eddyline_server::ServeArgs;
use hyper::Method;
use serde_json::json;

use crate::client::{Rig, args, unreadable};

const TRACE: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
const OTHER_TRACE: &str = "00-11111111111111111111111111111111-2222222222222222-00";

#[tokio::test]
async fn every_task_of_a_run_and_of_its_children_carries_the_trace_it_was_started_in() {
    let dir = tempfile::tempdir().unwrap();
    let store = Some(dir.path().join("store").display().to_string());
    let rig = Rig::with(ServeArgs { store, ..args() }).await;
    rig.flow("child", "steps: {c: {run: c}}").await;
    rig.flow("f", "steps: {a: {run: a}, b: {after: [a], flow: child}}").await;
    let traced = rig.header("traceparent", TRACE);
    let start = async |client: &crate::client::Client, body| {
        let reply = client.post("/v1/flows/f/runs", body).await;
        assert_eq!(reply.status, 201, "{}", reply.body);
    };
    let trace_of = async || {
        let task = rig.claim("w").await;
        rig.report(&task, json!({"op": "complete", "seq": 1})).await;
        (task["step"].as_str().unwrap().to_owned(), task["traceparent"].clone())
    };
    start(&traced, json!({})).await;
    assert_eq!(trace_of().await, ("a".to_owned(), json!(TRACE)));
    assert_eq!(trace_of().await, ("c".to_owned(), json!(TRACE)));
    start(&traced, json!({"traceparent": OTHER_TRACE})).await;
    assert_eq!(trace_of().await.1, OTHER_TRACE, "the body takes precedence over the header");
    assert_eq!(trace_of().await.1, OTHER_TRACE);
    start(&rig.header("traceparent", "nonsense"), json!({})).await;
    assert_eq!((trace_of().await.1, trace_of().await.1), (json!(null), json!(null)));
    let bad = rig.post("/v1/flows/f/runs", json!({"traceparent": "nonsense"})).await;
    assert_eq!(bad.code(), (400, "bad_request"));
    let batch =
        json!([{"flow": "child"}, {"flow": "child", "traceparent": OTHER_TRACE}, {"flow": "f", "traceparent": ""}]);
    let items = traced.post("/v1/runs/batch", batch).await;
    assert_eq!(items.items()[2]["error"]["code"], "bad_request");
    assert_eq!((trace_of().await.1, trace_of().await.1), (json!(TRACE), json!(OTHER_TRACE)));
    rig.server.stop().await;
}

#[tokio::test]
async fn the_function_of_a_code_run_carries_its_trace_and_passes_it_on_when_it_continues() {
    let rig = Rig::start().await;
    rig.flow("job", "code: true").await;
    rig.post("/v1/flows/job/runs", json!({"traceparent": TRACE})).await;
    let task = rig.claim("w").await;
    assert_eq!(task["traceparent"], TRACE);
    rig.report(&task, json!({"op": "continue", "seq": 1, "input": 2})).await;
    let next = rig.claim("w").await;
    assert_eq!((&next["run_input"], &next["traceparent"]), (&json!(2), &json!(TRACE)));
    let failed = json!({"op": "fail", "seq": 1, "error": {"kind": "Bad", "message": "no"}, "retryable": false});
    rig.report(&next, failed).await;
    let retried = rig.post(&format!("/v1/runs/{}/retry", next["run_id"].as_str().unwrap()), json!({})).await;
    assert_eq!(retried.status, 200, "{}", retried.body);
    assert_eq!(rig.claim("w").await["traceparent"], TRACE);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_deadline_is_a_length_of_time_or_a_moment_to_come() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let start = async |deadline| rig.post("/v1/flows/f/runs", json!({ "deadline": deadline })).await;
    for good in [json!("1h"), json!(60_000), json!("2199-01-02T03:04:05Z"), json!("2199-01-02T03:04:05+02:00")] {
        // No run waits until the end of this century, except one.
        let far = good.as_str().is_some_and(|text| text.contains('T'));
        assert_eq!(start(good.clone()).await.status, if far { 422 } else { 201 }, "{good}");
    }
    for bad in [json!("2020-01-02T03:04:05Z"), json!("tomorrow"), json!(""), json!([]), json!(-1)] {
        assert_eq!(start(bad.clone()).await.code(), (400, "bad_request"), "{bad}");
    }
    let now = rig.get("/v1/info").await.text("now").parse::<jiff::Timestamp>().unwrap();
    let soon = now + jiff::SignedDuration::from_millis(1_500);
    let run = start(json!(soon.to_string())).await.text("run_id");
    let result = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    assert_eq!(result.body["status"], "failed", "{}", result.body);
    let ended = rig.get(&format!("/v1/runs/{run}")).await.text("completed_at").parse::<jiff::Timestamp>().unwrap();
    assert!(ended >= soon - jiff::SignedDuration::from_millis(100), "{ended} is long before {soon}");
    rig.server.stop().await;
}

#[tokio::test]
async fn an_item_of_a_batch_that_cannot_be_read_keeps_no_other_from_its_start() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {set: 1}}").await;
    let batch = json!([{"flow": "f"}, 5, {"flow": "f", "tags": "x"}, null, ["f"], {"flow": "f", "deadline": "2020-01-01T00:00:00Z"},
        {"flow": "f", "input": 2}]);
    for body in [batch.clone(), json!({ "runs": batch })] {
        let reply = rig.post("/v1/runs/batch", body).await;
        assert_eq!((reply.status, reply.items().len()), (200, 7), "{}", reply.body);
        for (at, item) in reply.items().iter().enumerate() {
            match at {
                0 | 6 => assert!(item["run_id"].is_string(), "{at}: {item}"),
                _ => assert_eq!(item["error"]["code"], "bad_request", "{at}: {item}"),
            }
        }
    }
    for bad in [json!(5), json!({"runs": 5}), json!({"x": []}), json!(null)] {
        assert_eq!(rig.post("/v1/runs/batch", bad).await.code(), (400, "bad_request"));
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn a_payload_in_a_batch_that_nobody_can_read_is_refused_alone() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {set: 1}}").await;
    for unreadable in unreadable() {
        let list = format!(r#"[{{"flow": "f"}}, {{"flow": "f", "input": {unreadable}}}, {{"flow": "f"}}]"#);
        for body in [list.clone(), format!(r#"{{"runs": {list}}}"#)] {
            let reply = rig.send(Method::POST, "/v1/runs/batch", Some("application/json"), body.into()).await;
            assert_eq!((reply.status, reply.body["items"].as_array().map(Vec::len)), (200, Some(3)), "{}", reply.body);
            let items = reply.items();
            assert!(items[0]["run_id"].is_string() && items[2]["run_id"].is_string(), "{}", reply.body);
            // A payload that is slightly too deep is parsed, and then refused as a payload.
            let code = items[1]["error"]["code"].as_str().unwrap_or("none");
            assert!(["bad_request", "invalid"].contains(&code), "{}", reply.body);
        }
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn whoever_starts_a_run_with_a_large_input_is_warned() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {set: 1}}").await;
    let large = json!({"flow": "f", "input": "x".repeat(1 << 20)});
    let small = json!({"flow": "f", "input": "x".repeat((1 << 20) - 100)});
    let warned = rig.post("/v1/flows/f/runs", large.clone()).await;
    assert_eq!((warned.status, warned.body["warnings"].as_array().unwrap().len()), (201, 1));
    assert!(warned.body["warnings"][0].as_str().unwrap().contains("1048578 bytes"), "{}", warned.body);
    assert!(rig.post("/v1/flows/f/runs", small.clone()).await.body.get("warnings").is_none());
    let batch = rig.post("/v1/runs/batch", json!([small, large])).await;
    assert!(batch.items()[0].get("warnings").is_none());
    assert_eq!(batch.items()[1]["warnings"].as_array().unwrap().len(), 1);
    rig.server.stop().await;
}

#[tokio::test]
async fn past_the_backlog_starts_are_told_to_come_back() {
    let rig = Rig::with(ServeArgs { backlog: Some(3), ..args() }).await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let mut started = 0;
    let refused = loop {
        let reply = rig.post("/v1/flows/f/runs", json!({})).await;
        match reply.status {
            201 => started += 1,
            _ => break reply,
        }
        assert!(started <= 10, "it never stops");
    };
    assert_eq!((refused.code(), started), ((429, "too_many"), 3));
    assert!(refused.headers.contains_key("retry-after"));
    let batch = rig.post("/v1/runs/batch", json!([{"flow": "f"}])).await;
    assert_eq!(batch.items()[0]["error"]["code"], "too_many");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_version_that_is_not_there_is_told_from_a_flow_that_is_not() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {set: 1}}").await;
    let message = |reply: crate::client::Reply| {
        assert_eq!(reply.code(), (404, "not_found"));
        reply.body["error"]["message"].as_str().unwrap().to_owned()
    };
    assert_eq!(message(rig.get("/v1/flows/f?version=12ab").await), "there is no version 12ab of flow f");
    let started = rig.post("/v1/flows/f/runs", json!({"version": "12ab"})).await;
    assert_eq!(message(started), "there is no version 12ab of flow f");
    assert_eq!(message(rig.get("/v1/flows/g?version=12ab").await), "there is no flow g");
    rig.server.stop().await;
}
