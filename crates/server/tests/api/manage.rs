//! Queues, limits, health and what a server says of itself.

use serde_json::json;

use crate::client::Rig;

#[tokio::test]
async fn a_paused_queue_gives_nothing_out_until_it_is_resumed() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let set = rig.put("/v1/queues/default", json!({"concurrency": 5, "rate": {"count": 10, "per": "1s"}})).await;
    assert_eq!((&set.body["concurrency"], &set.body["rate"]["burst"]), (&json!(5), &json!(10)));
    assert_eq!(rig.post("/v1/queues/default/pause", json!({})).await.body["paused"], true);
    rig.run("f", json!(1)).await;
    assert_eq!(rig.post("/v1/tasks/claim", json!({"worker_id": "w"})).await.body, json!({"tasks": []}));
    let queues = rig.get("/v1/queues").await;
    assert_eq!((&queues.items()[0]["ready"], &queues.items()[0]["paused"]), (&json!(1), &json!(true)));
    let resumed = rig.post("/v1/queues/default/resume", json!({})).await;
    assert_eq!((&resumed.body["paused"], &resumed.body["concurrency"]), (&json!(false), &json!(5)));
    assert_eq!(rig.claim("w").await["step"], "a");
    assert_eq!(rig.put("/v1/queues/default", json!({"rate": 0})).await.code(), (422, "invalid"));
    assert_eq!(rig.put("/v1/queues/a%20b", json!({})).await.code(), (422, "invalid"));
    assert_eq!(rig.put("/v1/queues/default", json!({"rate": "fast"})).await.code(), (400, "bad_request"));
    for path in ["/v1/queues/bursty", "/v1/limits/bursty"] {
        let set = rig.put(path, json!({"rate": "10/2s", "burst": 20})).await;
        assert_eq!(set.body["rate"], json!({"count": 10, "per": 2_000, "burst": 20}), "{}", set.body);
        assert_eq!(rig.put(path, json!({"burst": 20})).await.code(), (422, "invalid"));
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn a_rule_that_nobody_knows_is_refused_with_the_one_that_was_meant() {
    let rig = Rig::start().await;
    for (path, body, meant) in [
        ("/v1/queues/q", json!({"concurency": 1}), "did you mean `concurrency`?"),
        ("/v1/queues/q", json!({"concurrency": 1, "flow_concurency": 2}), "did you mean `flow_concurrency`?"),
        ("/v1/queues/q", json!({"rate": {"count": 1, "brust": 2}}), "did you mean `burst`?"),
        ("/v1/limits/l", json!({"rat": 1}), "did you mean `rate`?"),
        ("/v1/limits/l", json!({"flow_concurrency": 1}), "`flow_concurrency`"),
        ("/v1/limits/l", json!({"zzzzzzzzzz": 1}), "known here: concurrency, burst, rate"),
    ] {
        let reply = rig.put(path, body).await;
        assert_eq!(reply.code(), (400, "bad_request"));
        let message = reply.body["error"]["message"].as_str().unwrap();
        assert!(message.contains("unknown field") && message.contains(meant), "{message}");
    }
    assert_eq!(rig.get("/v1/queues").await.items().len() + rig.get("/v1/limits").await.items().len(), 0);
    rig.server.stop().await;
}

#[tokio::test]
async fn limits_are_set_and_taken_away() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a, limits: [one]}, b: {run: b, limits: [one]}}").await;
    assert_eq!(rig.put("/v1/limits/one", json!({"concurrency": 1})).await.status, 200);
    rig.run("f", json!(1)).await;
    let claim = async || rig.post("/v1/tasks/claim", json!({"worker_id": "w", "max": 5})).await;
    assert_eq!(claim().await.body["tasks"].as_array().unwrap().len(), 1);
    assert_eq!(claim().await.body["tasks"].as_array().unwrap().len(), 0);
    assert_eq!(rig.get("/v1/limits").await.items()[0]["name"], "one");
    assert_eq!(rig.delete("/v1/limits/one").await.status, 200);
    assert_eq!(rig.delete("/v1/limits/one").await.status, 404);
    assert_eq!(claim().await.body["tasks"].as_array().unwrap().len(), 1);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_server_says_how_it_is() {
    let rig = Rig::start().await;
    assert_eq!(rig.get("/healthz").await.status, 200);
    assert_eq!(rig.get("/readyz").await.status, 200);
    let info = rig.get("/v1/info").await;
    assert_eq!(
        (&info.body["store"], &info.body["keys"], &info.body["instance"]),
        (&json!("memory"), &json!(false), &json!("test"))
    );
    assert_eq!(rig.get("/openapi.json").await.body["openapi"], "3.1.0");
    let metrics = rig.get("/metrics").await.body;
    assert!(metrics.as_str().unwrap().contains("eddyline_http_requests_total"), "{metrics}");
    assert_eq!(rig.get("/nothing").await.code(), (404, "not_found"));
    let wrong = rig.delete("/v1/info").await;
    assert_eq!(wrong.code(), (405, "method_not_allowed"));
    assert!(wrong.headers.contains_key("allow"));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_tenant_sees_what_is_counted_of_its_own_namespace_alone() {
    let rig = Rig::with_keys().await;
    let mut keys = Vec::new();
    for (name, scopes) in [("counted-1", json!(["read", "start"])), ("counted-2", json!(["admin"]))] {
        assert_eq!(rig.post("/v1/namespaces", json!({ "name": name })).await.status, 201);
        let key = rig.post("/v1/keys", json!({"name": "k", "scopes": scopes, "namespace": name})).await.text("key");
        let tenant = rig.with_key(&key);
        tenant.flow("f", "steps: {a: {set: 1}}").await;
        let run = tenant.run("f", json!(1)).await;
        tenant.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
        keys.push((name, tenant));
    }
    for (name, tenant) in keys {
        let metrics = tenant.get("/metrics").await.body;
        let text = metrics.as_str().unwrap();
        let own = format!("namespace=\"{name}\"");
        assert!(text.contains(&format!("eddyline_runs_started_total{{{own}}} 1\n")), "{text}");
        assert!(text.lines().all(|line| line.starts_with('#') || line.contains(&own)), "{text}");
    }
    let all = rig.get("/metrics").await.body;
    for name in ["namespace=\"counted-1\"", "namespace=\"counted-2\"", "eddyline_http_requests_total"] {
        assert!(all.as_str().unwrap().contains(name), "{name}");
    }
    rig.server.stop().await;
}
