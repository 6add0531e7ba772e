//! All lists are paged.

use serde_json::json;

use crate::client::{DIAMOND, Rig};

/// Reads a list page by page, and counts it.
async fn check(rig: &Rig, path: &str, name: &str, expected: &[&str]) {
    let with = |query: &str| format!("{path}{}{query}", if path.contains('?') { '&' } else { '?' });
    let whole = rig.get(path).await;
    assert!(whole.body["total"].is_null() && whole.body["next"].is_null(), "{path}: {}", whole.body);
    let (mut found, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = rig.get(&with(&format!("limit=1&count=true&cursor={cursor}"))).await;
        assert_eq!(page.body["total"], expected.len(), "{path}");
        assert!(page.items().len() <= 1, "{path}");
        found.extend(page.items().iter().map(|item| item[name].as_str().unwrap().to_owned()));
        match page.body["next"].as_str() {
            Some(next) => cursor = next.to_owned(),
            None => break,
        }
    }
    let all: Vec<&str> = whole.items().iter().map(|item| item[name].as_str().unwrap()).collect();
    assert_eq!(found, all, "{path}");
    found.sort();
    assert_eq!(found, expected, "{path}");
    for bad in ["limit=abc", "limit=0", "limit=-1", "limit=", "count=perhaps", "count="] {
        assert_eq!(rig.get(&with(bad)).await.code(), (400, "bad_request"), "{path} {bad}");
    }
    assert_eq!(rig.get(&with("limit=99999999")).await.status, 200, "{path}");
}

#[tokio::test]
async fn every_list_is_read_in_pages_and_counted() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {await: {manual: true}}, b: {await: {manual: true}}, c: {await: {event: e}}}").await;
    rig.flow("g", "steps: {a: {set: 1}}").await;
    rig.run("f", json!(1)).await;
    let mut keys = Vec::new();
    for _ in 0..3 {
        keys.push(rig.post("/v1/keys", json!({"name": "k", "scopes": ["read"]})).await.text("key_id"));
    }
    keys.sort();
    let mut workers = Vec::new();
    for name in ["one", "two"] {
        workers.push(rig.post("/v1/workers", json!({})).await.text("worker_id"));
        assert_eq!(rig.post("/v1/namespaces", json!({ "name": name })).await.status, 201);
        assert_eq!(rig.put(&format!("/v1/queues/{name}"), json!({})).await.status, 200);
        assert_eq!(rig.put(&format!("/v1/limits/{name}"), json!({})).await.status, 200);
    }
    workers.sort();
    let borrowed = |names: &'_ [String]| names.iter().map(|name| name.clone().leak() as &str).collect::<Vec<&str>>();
    check(&rig, "/v1/flows", "name", &["f", "g"]).await;
    check(&rig, "/v1/gates", "activation", &["a", "b", "c"]).await;
    check(&rig, "/v1/gates?reason=manual", "activation", &["a", "b"]).await;
    check(&rig, "/v1/queues", "name", &["one", "two"]).await;
    check(&rig, "/v1/limits", "name", &["one", "two"]).await;
    check(&rig, "/v1/namespaces", "name", &["default", "one", "two"]).await;
    check(&rig, "/v1/keys", "key_id", &borrowed(&keys)).await;
    check(&rig, "/v1/workers", "worker_id", &borrowed(&workers)).await;
    rig.server.stop().await;
}

#[tokio::test]
async fn the_records_of_a_stream_are_counted_whatever_page_is_read() {
    let rig = Rig::start().await;
    rig.flow("f", DIAMOND).await;
    let run = rig.run("f", json!(1)).await;
    rig.run("f", json!(2)).await;
    let task = rig.claim("w").await;
    rig.report(&task, json!({"op": "log", "seq": 1, "msg": "hello"})).await;
    let queries = ["", "&kind=step.scheduled", "&kind=step.scheduled&kind=flow.start", "&step=a", "&kind=none"];
    let streams = [
        format!("nq:flow:{run}"),
        format!("nq:proj:flow:f:{run}"),
        format!("nq:proj:flow-steps:{run}"),
        format!("nq:proj:flow-step-index:{run}"),
        "nq:proj:flow-runs:f".to_owned(),
    ];
    for stream in streams {
        for query in queries {
            let whole = rig.get(&format!("/v1/streams/{stream}?count=true{query}")).await;
            assert_eq!(whole.body["total"], whole.items().len(), "{stream} {query}");
            let part = rig.get(&format!("/v1/streams/{stream}?count=true&limit=1&after=1{query}")).await;
            assert_eq!(part.body["total"], whole.body["total"], "{stream} {query}");
        }
        let page = rig.get(&format!("/v1/streams/{stream}")).await;
        assert!(!page.items().is_empty() && page.body["total"].is_null(), "{stream}");
    }
    let path = format!("/v1/streams/nq:flow:{run}?kind=runner.log&kind=flow.start");
    let kinds: Vec<_> = rig.get(&path).await.items().iter().map(|record| record["kind"].clone()).collect();
    assert_eq!(kinds, ["flow.start", "runner.log"]);
    rig.server.stop().await;
}

#[tokio::test]
async fn runs_of_any_status_that_is_named_are_listed() {
    let rig = Rig::start().await;
    rig.flow("done", "steps: {a: {set: 1}}").await;
    rig.flow("wrong", "steps: {a: {fail: no}}").await;
    rig.flow("asks", "steps: {a: {await: {manual: true}}}").await;
    for flow in ["done", "wrong", "asks"] {
        rig.run(flow, json!(1)).await;
    }
    let list = async |query: &str| {
        let page = rig.get(&format!("/v1/runs?count=true&{query}")).await;
        assert_eq!(page.body["total"], page.items().len());
        page.items().iter().map(|run| run["flow"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(list("status=completed").await, ["done"]);
    assert_eq!(list("status=completed&status=failed").await, ["wrong", "done"]);
    assert_eq!(list("status=waiting&status=failed&flow=asks").await, ["asks"]);
    assert_eq!(list("status=paused&status=pending").await, [""; 0]);
    assert_eq!(rig.get("/v1/runs?status=completed&status=gone").await.code(), (400, "bad_request"));
    rig.server.stop().await;
}
