//! Settings of namespaces: retention, `disabled` and the backlog.

use std::time::{Duration, Instant};

use eddyline_server::{ServeArgs, Size};
use serde_json::{Value, json};

use crate::client::{Client, Rig, args};
use crate::socket::Socket;

/// Longer than anything here takes; only reached if something never happens.
const LONG: Duration = Duration::from_secs(30);
/// A second, plus slack for a busy machine.
const SOON: Duration = Duration::from_secs(2);

async fn key(admin: &Client, scopes: Value, namespace: &str) -> Client {
    let made = admin.post("/v1/keys", json!({"name": "t", "scopes": scopes, "namespace": namespace})).await;
    assert_eq!(made.status, 201, "{}", made.body);
    admin.with_key(&made.text("key"))
}

#[tokio::test]
async fn settings_are_shown_changed_and_reset() {
    let retention_runs = Some("20d".parse().unwrap());
    let rig = Rig::with(ServeArgs { retention_runs, backlog: Some(77), ..args() }).await;
    let none = json!({"timelines": null, "runs": null, "events": null});
    let made = rig.post("/v1/namespaces", json!({"name": "shop"})).await;
    assert_eq!((made.status, &made.body["retention"], &made.body["backlog"]), (201, &none, &json!(null)));
    let path = "/v1/namespaces/shop";
    let shown = rig.get(path).await;
    assert_eq!(shown.body, made.body);
    let server = json!({"timelines": "7d", "runs": "20d", "events": "7d"});
    assert_eq!(shown.body["effective"], json!({"backlog": 77, "retention": server}));

    let changed = rig.patch(path, json!({"retention": {"timelines": "36h", "events": 5_000}, "backlog": 3})).await;
    assert_eq!(changed.status, 200, "{}", changed.body);
    assert_eq!(changed.body["retention"], json!({"timelines": "1d12h", "runs": null, "events": "5s"}));
    let effective = json!({"timelines": "1d12h", "runs": "20d", "events": "5s"});
    assert_eq!(changed.body["effective"], json!({"backlog": 3, "retention": effective}));
    assert_eq!(rig.get(path).await.body, changed.body);
    let listed = rig.get("/v1/namespaces").await;
    assert_eq!(listed.items().iter().find(|ns| ns["name"] == "shop"), Some(&changed.body));

    let reset = rig.patch(path, json!({"retention": {"events": null}, "backlog": null})).await;
    assert_eq!(reset.body["retention"], json!({"timelines": "1d12h", "runs": null, "events": null}));
    assert_eq!(reset.body["effective"]["backlog"], 77);
    assert_eq!(rig.patch(path, json!({"retention": null})).await.body["retention"], none);
    assert_eq!(rig.patch(path, json!({})).await.body, shown.body);
    let wrong = rig.patch(path, json!({"retention": 1})).await;
    assert_eq!(wrong.code(), (400, "bad_request"));
    let message = wrong.body["error"]["message"].as_str().unwrap();
    assert!(message.starts_with("invalid body: invalid type: integer `1`, expected an object"), "{message}");

    for (body, status, said) in [
        (json!({"retention": {"timelines": "21d"}}), 422, "kept for 21d and their runs for 20d"),
        (json!({"retention": {"runs": "1d"}}), 422, "timelines would be kept for 7d and their runs for 1d"),
        (json!({"retention": {"events": "1ms"}}), 422, "at least 1s"),
        (json!({"retention": {"timeline": "1d"}}), 400, "did you mean `timelines`?"),
        (json!({"disable": true}), 400, "did you mean `disabled`?"),
        (json!({"backlog": -1}), 400, "invalid value: integer `-1`, expected u64"),
    ] {
        let refused = rig.patch(path, body.clone()).await;
        let message = refused.body["error"]["message"].as_str().unwrap();
        assert!(refused.status == status && message.contains(said), "{body} → {} {message}", refused.status);
    }
    assert_eq!(rig.get(path).await.body, shown.body, "what is refused changes nothing");
    assert_eq!(rig.patch("/v1/namespaces/default", json!({"disabled": true})).await.code(), (422, "invalid"));
    assert_eq!(rig.patch("/v1/namespaces/default", json!({"backlog": 5})).await.body["backlog"], 5);
    for reply in [rig.get("/v1/namespaces/none").await, rig.patch("/v1/namespaces/none", json!({})).await] {
        assert_eq!(reply.code(), (404, "not_found"));
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn only_an_admin_of_default_changes_settings() {
    let rig = Rig::with_keys().await;
    let one = key(&rig, json!(["admin"]), "one").await;
    rig.post("/v1/namespaces", json!({"name": "one"})).await;
    rig.post("/v1/namespaces", json!({"name": "two"})).await;
    assert_eq!(one.get("/v1/namespaces/one").await.body["name"], "one");
    assert_eq!(one.patch("/v1/namespaces/one", json!({"backlog": 1})).await.code(), (403, "forbidden"));
    assert_eq!(one.get("/v1/namespaces/two").await.code(), (404, "not_found"));
    assert_eq!(one.patch("/v1/namespaces/two", json!({"backlog": 1})).await.code(), (404, "not_found"));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_disabled_namespace_lets_nobody_in_and_cuts_who_waits() {
    let rig = Rig::with_keys().await;
    rig.post("/v1/namespaces", json!({"name": "shop"})).await;
    let shop = key(&rig, json!(["admin"]), "shop").await;
    let other = key(&rig, json!(["admin"]), "other").await;
    shop.flow("f", "steps: {a: {run: a}}").await;
    let run = shop.run("f", json!(1)).await;
    let mut socket = Socket::open(&shop, json!({"queues": ["empty"]})).await;
    let (waits, result) = (shop.clone(), format!("/v1/runs/{run}/result?wait=60s"));
    let poll = tokio::spawn(async move { waits.get(&result).await });
    rig.until_waiting(1).await;

    let since = Instant::now();
    assert_eq!(rig.patch("/v1/namespaces/shop", json!({"disabled": true})).await.body["disabled"], true);
    let refused = shop.get("/v1/runs").await;
    assert_eq!(refused.code(), (403, "forbidden"));
    assert!(refused.body["error"]["message"].as_str().unwrap().contains("shop is disabled"), "{}", refused.body);
    let cut = tokio::time::timeout_at((since + SOON).into(), poll).await.expect("the poll did not end").unwrap();
    assert_eq!(cut.code(), (403, "forbidden"));
    assert_eq!(socket.next().await["error"]["code"], "forbidden");
    assert_eq!(socket.next().await["type"], "closed");
    assert!(since.elapsed() < SOON, "it took {:?}", since.elapsed());
    assert_eq!(other.get("/v1/runs").await.status, 200);

    assert_eq!(rig.patch("/v1/namespaces/shop", json!({"disabled": null})).await.body["disabled"], false);
    assert_eq!(shop.get(&format!("/v1/runs/{run}")).await.body["status"], "running", "its run continued");
    rig.server.stop().await;
}

#[tokio::test]
async fn where_keys_are_off_a_disabled_namespace_is_not_to_be_named() {
    let rig = Rig::start().await;
    let shop = rig.header("eddyline-namespace", "shop");
    shop.flow("f", "steps: {a: {run: a}}").await;
    assert_eq!(rig.patch("/v1/namespaces/shop", json!({"disabled": true})).await.status, 200);
    assert_eq!(shop.get("/v1/flows").await.code(), (403, "forbidden"));
    assert_eq!(rig.patch("/v1/namespaces/shop", json!({"disabled": false})).await.status, 200);
    assert_eq!(shop.get("/v1/flows").await.status, 200);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_namespace_has_a_backlog_of_its_own() {
    let rig = Rig::start().await;
    let shop = rig.header("eddyline-namespace", "shop");
    for client in [&rig.client, &shop] {
        client.flow("f", "steps: {a: {run: a}}").await;
        client.run("f", json!(1)).await;
    }
    rig.patch("/v1/namespaces/shop", json!({"backlog": 1})).await;
    assert_eq!(shop.post("/v1/flows/f/runs", json!({})).await.code(), (429, "too_many"));
    assert_eq!(rig.post("/v1/flows/f/runs", json!({})).await.status, 201);
    rig.patch("/v1/namespaces/shop", json!({"backlog": null})).await;
    assert_eq!(shop.post("/v1/flows/f/runs", json!({})).await.status, 201);
    rig.server.stop().await;
}

#[tokio::test]
async fn what_is_kept_for_a_second_is_gone_soon_after_and_longer_settings_keep_it() {
    let [second, day] = ["1s", "1d"].map(|text| Some(text.parse().unwrap()));
    let kept = ServeArgs { retention_timelines: second, retention_runs: day, retention_events: second, ..args() };
    let rig = Rig::with(kept).await;
    let shop = rig.header("eddyline-namespace", "shop");
    let mut runs = Vec::new();
    for client in [&shop, &rig.client] {
        client.flow("f", "steps: {a: {set: 1}}").await;
        rig.patch("/v1/namespaces/shop", json!({"retention": {"timelines": "1h"}})).await;
        runs.push(format!("/v1/streams/nq:flow:{}", client.run("f", json!(1)).await));
    }
    let since = Instant::now();
    while rig.get(&runs[1]).await.status != 410 {
        assert!(since.elapsed() < LONG, "the timeline stays");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(since.elapsed() >= Duration::from_millis(900), "it was kept for a second");
    assert_eq!(shop.get(&runs[0]).await.status, 200);
    rig.server.stop().await;
}

#[tokio::test]
async fn the_largest_payload_is_what_was_set() {
    let sizes = |max, warn| (Some(Size { bytes: max }), Some(Size { bytes: warn }));
    let (max_payload, warn_payload) = sizes(4 << 10, 1 << 10);
    let rig = Rig::with(ServeArgs { max_payload, warn_payload, ..args() }).await;
    rig.flow("f", "steps: {a: {run: a, emits: [e]}, g: {await: {manual: true}}}").await;
    let text = |bytes: usize| json!("x".repeat(bytes));
    let start = async |bytes| rig.post("/v1/flows/f/runs", json!({"input": text(bytes)})).await;
    let [small, large, over] = [start(1_000).await, start(2_000).await, start(4_100).await];
    assert_eq!((small.status, small.body.get("warnings")), (201, None));
    let warned = large.body["warnings"][0].as_str().unwrap();
    assert!(large.status == 201 && warned.contains("the limit of 4096"), "{warned}");
    assert_eq!(over.code(), (413, "too_large"));
    let event = json!({"name": "e", "payload": text(4_100)});
    assert_eq!(rig.post("/v1/events", event).await.code(), (413, "too_large"));
    let gate = rig.get("/v1/gates").await.items()[0]["token"].as_str().unwrap().to_owned();
    assert_eq!(rig.post(&format!("/v1/gates/{gate}"), text(4_100)).await.code(), (413, "too_large"));
    assert_eq!(rig.post(&format!("/hooks/{gate}"), text(4_100)).await.code(), (413, "too_large"));
    let task = rig.claim("w").await;
    let emits = json!([{"event": "e", "payload": text(4_100)}]);
    let said = rig.report(&task, json!({"op": "complete", "output": 1, "emits": emits})).await;
    assert_eq!(said["outcome"], "invalid", "{said}");
    let said = rig.report(&task, json!({"op": "complete", "output": text(2_000)})).await;
    assert!(said["outcome"] == "applied" && said["warning"].as_str().unwrap().contains("4096"), "{said}");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_larger_limit_takes_larger_payloads_and_shows_them() {
    let rig = Rig::with(ServeArgs { max_payload: Some(Size { bytes: 5 << 20 }), ..args() }).await;
    rig.flow("f", "steps: {a: {run: a}}\noutput: {all: \"${steps.a.output}\"}").await;
    let large = json!("x".repeat(4 << 20));
    let run = rig.run("f", json!(1)).await;
    let task = rig.claim("w").await;
    let said = rig.report(&task, json!({"op": "complete", "output": large})).await;
    assert_eq!(said["outcome"], "applied", "{said}");
    let result = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    assert!(result.body["output"]["all"] == large, "the output is shown as it is");
    let record = rig.get(&format!("/v1/streams/nq:flow:{run}?kind=step.completed")).await.items()[0].clone();
    let value = record["data"]["result"]["$value"].as_str().unwrap_or_else(|| panic!("{record}")).to_owned();
    let (of, key) = value.split_once('/').unwrap();
    assert!(rig.get(&format!("/v1/runs/{of}/values/{key}")).await.body == large, "the reference is resolved");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_silent_worker_is_offline_after_the_time_that_was_set() {
    let offline_after = Some("400ms".parse().unwrap());
    let rig = Rig::with(ServeArgs { offline_after, ..args() }).await;
    let since = Instant::now();
    let registered = rig.post("/v1/workers", json!({})).await;
    assert_eq!((&registered.body["lease_ms"], &registered.body["heartbeat_ms"]), (&json!(30_000), &json!(133)));
    let status = async || rig.get("/v1/workers").await.items()[0]["status"].clone();
    while status().await != "offline" {
        assert!(since.elapsed() < LONG, "it is never offline");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(since.elapsed() >= Duration::from_millis(390), "it was online for {:?}", since.elapsed());
    let id = registered.text("worker_id");
    rig.post(&format!("/v1/workers/{id}/heartbeat"), json!({})).await;
    assert_eq!(status().await, "online");
    rig.server.stop().await;
}
