//! Queues, limits, health and server info.

use eddyline_language::time::iso;
use eddyline_store as store;
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
        ("/v1/limits/l", json!({"zzzzzzzzzz": 1}), "known here: concurrency, rate, burst"),
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
async fn a_limit_that_a_worker_closed_is_shown_and_opened_by_setting_or_deleting_it() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a, limits: [api]}}").await;
    let claim = async || rig.post("/v1/tasks/claim", json!({"worker_id": "w", "max": 1})).await.body["tasks"].clone();
    for way in ["put", "delete"] {
        for _ in 0..2 {
            rig.run("f", json!(1)).await;
        }
        let task = claim().await[0].clone();
        let (task_id, token) = (&task["task_id"], &task["token"]);
        // Ten years, and no task could ever pass it.
        let defer = json!({"task_id": task_id, "token": token, "op": "defer", "after": "3650d", "limit": "api"});
        let reply = rig.post("/v1/tasks/report", json!({"worker_id": "w", "reports": [defer]})).await;
        assert_eq!(reply.body["outcomes"][0]["outcome"], "applied", "{}", reply.body);
        assert_eq!(claim().await, json!([]));
        let limits = rig.get("/v1/limits").await;
        let until = limits.items()[0]["closed_until"].as_str().expect("a moment").to_owned();
        let now = jiff::Timestamp::now().as_millisecond();
        let hour = iso(now)..=iso(now + 3_600_000 + 60_000);
        assert!(hour.contains(&until), "an hour at most: {}", limits.body);
        let opened = match way {
            "put" => rig.put("/v1/limits/api", json!({})).await,
            _ => rig.delete("/v1/limits/api").await,
        };
        assert_eq!(opened.status, 200, "{}", opened.body);
        let task = claim().await[0].clone();
        let (task_id, token) = (&task["task_id"], &task["token"]);
        let done = json!({"task_id": task_id, "token": token, "op": "complete", "output": null});
        rig.post("/v1/tasks/report", json!({"worker_id": "w", "reports": [done]})).await;
        let limits = rig.get("/v1/limits").await;
        assert!(limits.items().iter().all(|limit| limit["closed_until"].is_null()), "{}", limits.body);
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn rules_that_cannot_be_read_close_their_queue_or_limit_and_say_why() {
    let dir = tempfile::tempdir().unwrap();
    let damaged = |kind: &str, id: &str| store::DocumentChange {
        key: store::DocumentKey::new(kind, id),
        expect: store::Expect::Any,
        body: Some(json!({"concurrency": "lots"})),
        due: None,
    };
    let commit = store::DocumentCommit {
        ns: store::Namespace::default(),
        command: serde_json::from_value(json!("00000000-0000-0000-0000-000000000001")).unwrap(),
        documents: vec![damaged("queue", "default"), damaged("limit", "api")],
        messages: Vec::new(),
        events: Vec::new(),
        drops: Vec::new(),
    };
    {
        let before = store::Embedded::open(dir.path(), store::Options::default()).unwrap();
        store::Store::commit(&before, vec![store::Command::Documents(commit)], Vec::new()).await.unwrap();
    }
    let at = dir.path().to_str().unwrap().to_owned();
    let rig = Rig::with(eddyline_server::ServeArgs { store: Some(at), ..crate::client::args() }).await;
    rig.flow("f", "steps: {a: {run: a}, b: {run: b, limits: [api]}}").await;
    rig.run("f", json!(1)).await;
    let claim = async || rig.post("/v1/tasks/claim", json!({"worker_id": "w", "max": 9})).await.body["tasks"].clone();
    assert_eq!(claim().await, json!([]), "without rules there would be no bounds");
    let queue = rig.get("/v1/queues").await.items()[0].clone();
    assert_eq!((&queue["paused"], &queue["ready"]), (&json!(true), &json!(2)));
    assert!(queue["fault"].as_str().unwrap().contains("its rules can't be read: invalid type"), "{queue}");
    let limit = rig.get("/v1/limits").await.items()[0].clone();
    assert!(limit["fault"].as_str().unwrap().contains("its rules can't be read: invalid type"), "{limit}");

    let set = rig.put("/v1/queues/default", json!({})).await;
    assert_eq!((&set.body["fault"], &set.body["paused"]), (&json!(null), &json!(true)), "{}", set.body);
    rig.post("/v1/queues/default/resume", json!({})).await;
    assert_eq!(claim().await.as_array().unwrap().iter().map(|task| &task["step"]).collect::<Vec<_>>(), ["a"]);
    rig.put("/v1/limits/api", json!({})).await;
    assert_eq!(claim().await.as_array().unwrap().iter().map(|task| &task["step"]).collect::<Vec<_>>(), ["b"]);
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

/// The value of the only series with this prefix.
fn series(metrics: &str, begins: &str) -> f64 {
    let line = metrics.lines().find(|line| line.starts_with(begins)).unwrap_or_else(|| panic!("no {begins}"));
    line.rsplit_once(' ').unwrap().1.parse().unwrap()
}

#[tokio::test]
async fn metrics_show_what_goes_on_and_every_counter_from_the_start() {
    let rig = Rig::start().await;
    let shop = rig.header("eddyline-namespace", "gauges");
    shop.flow("f", "steps: {a: {run: a, queue: slow}}").await;
    for n in 0..3 {
        shop.run("f", json!(n)).await;
    }
    shop.post("/v1/workers", json!({"queues": ["slow"]})).await;
    let claim = json!({"worker_id": "w", "queues": ["slow"], "max": 1, "wait_ms": 20_000});
    let task = shop.post("/v1/tasks/claim", claim).await.body["tasks"][0].clone();
    let metrics = rig.get("/metrics").await.body.as_str().unwrap().to_owned();
    for (begins, value) in [
        ("eddyline_queue_tasks{namespace=\"gauges\",queue=\"slow\",state=\"ready\"}", 2.0),
        ("eddyline_queue_tasks{namespace=\"gauges\",queue=\"slow\",state=\"claimed\"}", 1.0),
        ("eddyline_workers{namespace=\"gauges\",status=\"online\"}", 1.0),
        ("eddyline_workers{namespace=\"default\",status=\"offline\"}", 0.0),
        ("eddyline_runs{namespace=\"gauges\",flow=\"f\",status=\"running\"}", 3.0),
    ] {
        assert_eq!(series(&metrics, begins), value, "{begins}");
    }
    assert!(series(&metrics, "eddyline_queue_oldest_seconds{namespace=\"gauges\",queue=\"slow\"}") < 30.0);
    assert!(series(&metrics, "eddyline_start_to_claim_seconds_count") >= 1.0);
    assert!(series(&metrics, "eddyline_decision_seconds_count") >= 3.0);
    let docs = include_str!("../../../../docs/http.md");
    let counters = docs.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` | counter |"));
    let counters: Vec<&str> = counters.map(|(name, _)| name).collect();
    assert!(counters.len() > 15, "{counters:?}");
    for counter in counters {
        series(&metrics, counter);
    }
    series(&metrics, "eddyline_reports_total{namespace=\"default\",outcome=\"not_tried\"}");
    series(&metrics, "eddyline_loop_panics_total{loop=\"retention\"}");

    let reports = |metrics: &str| series(metrics, "eddyline_claim_to_report_seconds_count");
    let said = shop.report(&task, json!({"op": "complete"})).await;
    assert_eq!(said["outcome"], "applied", "{said}");
    let after = rig.get("/metrics").await.body.as_str().unwrap().to_owned();
    assert!(reports(&after) >= 1.0);
    let ready = "eddyline_queue_tasks{namespace=\"gauges\",queue=\"slow\",state=\"claimed\"}";
    assert_eq!(series(&after, ready), 1.0, "it is not counted again with every scrape");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_flow_is_deleted_when_none_of_its_runs_goes_on() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let run = rig.run("f", json!(1)).await;
    let refused = rig.delete("/v1/flows/f").await;
    assert_eq!(refused.code(), (409, "conflict"), "{}", refused.body);
    let message = refused.body["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("the flow f has 1 run that has not ended"), "{message}");
    rig.post(&format!("/v1/runs/{run}/cancel"), json!({})).await;
    assert_eq!(rig.delete("/v1/flows/f").await.body, json!({"deleted": true}));
    assert_eq!(rig.delete("/v1/flows/f").await.code(), (404, "not_found"));
    assert_eq!(rig.get("/v1/flows/f").await.code(), (404, "not_found"));
    assert_eq!(rig.get("/v1/flows").await.items().len(), 0);
    assert_eq!(rig.post("/v1/flows/f/runs", json!({})).await.code(), (404, "not_found"));
    // Its runs and their steps still exist; the flow returns when it is registered again.
    assert_eq!(rig.get(&format!("/v1/runs/{run}/steps")).await.items().len(), 1);
    rig.flow("f", "steps: {a: {run: a}}").await;
    rig.run("f", json!(2)).await;
    rig.server.stop().await;
}
