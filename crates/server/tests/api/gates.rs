//! Gates, webhooks and events.

use hyper::Method;
use serde_json::json;

use crate::client::{Client, Rig};

const FLOW: &str = "
steps:
  hook: {await: {webhook: true}}
  person: {await: {manual: true, timeout: 1h}}
  event: {await: {event: paid, key: \"input.order\"}}
output: {hook: \"${steps.hook.output}\", person: \"${steps.person.output}\", event: \"${steps.event.output}\"}
";

#[tokio::test]
async fn gates_are_listed_and_opened_once() {
    let rig = Rig::start().await;
    rig.flow("f", FLOW).await;
    let run = rig.run("f", json!({"order": 7})).await;
    let gates = rig.get(&format!("/v1/gates?run={run}")).await;
    let gate = |activation: &str| gates.items().iter().find(|gate| gate["activation"] == activation).unwrap().clone();
    assert_eq!(gates.items().len(), 3);
    let (hook, person, event) = (gate("hook"), gate("person"), gate("event"));
    assert!(hook["url"].as_str().unwrap().starts_with(&rig.server.url()));
    assert!(person["token"].is_string() && person["deadline"].is_string());
    assert!(event["token"].is_null());
    assert_eq!(rig.get("/v1/gates?reason=manual").await.items().len(), 1);
    assert_eq!(rig.get("/v1/gates?reason=x").await.status, 400);

    let token = hook["token"].as_str().unwrap();
    assert_eq!(rig.get(&format!("/hooks/{token}")).await.code(), (405, "method_not_allowed"));
    let posted = rig.send(Method::POST, &format!("/hooks/{token}"), Some("text/plain"), "a=1&b=2".into()).await;
    assert_eq!(posted.body, json!({"opened": true}));
    assert_eq!(rig.post(&format!("/hooks/{token}"), json!(1)).await.code(), (409, "conflict"));
    let manual = person["token"].as_str().unwrap();
    assert_eq!(rig.post(&format!("/v1/gates/{manual}"), json!({"by": "me"})).await.status, 200);
    assert_eq!(rig.post(&format!("/v1/gates/{manual}"), json!({})).await.code(), (409, "conflict"));
    assert_eq!(rig.post("/v1/gates/unknown", json!({})).await.status, 404);
    assert_eq!(rig.post("/hooks/unknown", json!({})).await.status, 404);

    let published = rig.post("/v1/events", json!({"name": "paid", "key": 8, "payload": "wrong key"})).await;
    assert_eq!((&published.body["published"], published.body.get("existing")), (&json!(1), None));
    let many = json!([{"name": "paid", "key": 7, "payload": "right", "id": "e1"}, {"name": "other"}]);
    let [first, again] = [rig.post("/v1/events", many.clone()).await.body, rig.post("/v1/events", many).await.body];
    assert_eq!((&first["published"], first.get("existing"), &first["ids"][0]), (&json!(2), None, &json!("e1")));
    assert_eq!((&again["published"], &again["existing"], &again["ids"][0]), (&json!(2), &json!(1), &json!("e1")));
    assert_eq!(rig.post("/v1/events", json!({"key": 1})).await.status, 400);
    assert_eq!(rig.post("/v1/events", json!({"name": ""})).await.status, 400);
    let result = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    assert_eq!(result.body["output"], json!({"hook": "a=1&b=2", "person": {"by": "me"}, "event": "right"}));
    assert_eq!(rig.post(&format!("/v1/gates/{manual}"), json!({})).await.code(), (409, "conflict"));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_gate_that_is_cancelled_fails_its_step() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {person: {await: {manual: true}}}").await;
    let run = rig.run("f", json!(1)).await;
    let gate = rig.get(&format!("/v1/gates?run={run}")).await.items()[0].clone();
    let path = format!("/v1/gates/{}", gate["gate_id"].as_str().unwrap());
    assert_eq!(rig.header("eddyline-namespace", "other").delete(&path).await.status, 404);
    assert_eq!(rig.delete(&path).await.body, json!({"cancelled": true}));
    let result = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    assert_eq!(result.body["error"]["kind"], "GateCancelled");
    assert_eq!(rig.delete(&path).await.code(), (409, "conflict"));
    let unknown = format!("/v1/gates/{run}.77");
    assert!(matches!(rig.delete(&unknown).await.status, 404 | 409));
    assert_eq!(rig.delete("/v1/gates/nonsense").await.status, 404);
    rig.server.stop().await;
}

/// The only gate of a run, as listed.
async fn gate(client: &Client, run: &str) -> serde_json::Value {
    client.get(&format!("/v1/gates?run={run}")).await.items()[0].clone()
}

#[tokio::test]
async fn a_manual_gate_is_opened_where_its_url_leads() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {ask: {run: ask, input: \"${gates.ok.url}\"}, ok: {after: [ask], await: {manual: true}}}")
        .await;
    let run = rig.run("f", json!(1)).await;
    let task = rig.claim("w").await;
    rig.report(&task, json!({"op": "complete", "seq": 1})).await;
    let listed = gate(&rig, &run).await;
    assert_eq!((&listed["url"], &listed["reason"]), (&task["input"], &json!("manual")));
    let path = listed["url"].as_str().unwrap().strip_prefix(&rig.server.url()).unwrap().to_owned();
    assert_eq!(rig.post(&path, json!({"by": "ann"})).await.body, json!({"opened": true}));
    assert_eq!(rig.post(&path, json!({"by": "bob"})).await.code(), (409, "conflict"));
    let result = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    assert_eq!(result.body["status"], "completed");

    rig.flow("code", "code: true").await;
    rig.run("code", json!(1)).await;
    let task = rig.claim("w").await;
    let waits = rig.report(&task, json!({"op": "wait", "seq": 1, "name": "ok", "manual": true})).await;
    let path = waits["url"].as_str().unwrap().strip_prefix(&rig.server.url()).unwrap();
    assert_eq!(rig.post(path, json!(1)).await.status, 200);
    rig.server.stop().await;
}

#[tokio::test]
async fn what_is_said_to_be_json_and_is_not_opens_nothing() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {hook: {await: {webhook: true}}}").await;
    let run = rig.run("f", json!(1)).await;
    let path = format!("/hooks/{}", gate(&rig, &run).await["token"].as_str().unwrap());
    let post = async |content_type: &str, body: &str| {
        rig.send(Method::POST, &path, Some(content_type), body.to_owned().into()).await
    };
    assert_eq!(post("application/json", "{\"half\": ").await.code(), (400, "bad_request"));
    assert_eq!(post("application/cloudevents+json; charset=utf-8", "nope").await.code(), (400, "bad_request"));
    assert_eq!(post("text/plain", "{\"half\": ").await.status, 200);
    let result = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    assert_eq!(result.body["status"], "completed");
    rig.server.stop().await;
}

#[tokio::test]
async fn gates_of_a_run_that_is_not_there_are_not_found_and_a_time_gate_says_when_it_opens() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {nap: {await: {time: 1h}}}").await;
    rig.flow("g", "steps: {nap: {await: {until: \"'2199-01-02T03:04:05Z'\"}}}").await;
    let (nap, until) = (rig.run("f", json!(1)).await, rig.run("g", json!(1)).await);
    let created = rig.get(&format!("/v1/runs/{nap}")).await.text("created_at");
    let at = |text: &str| text.parse::<jiff::Timestamp>().unwrap().as_millisecond();
    let opens = gate(&rig, &nap).await["deadline"].as_str().unwrap().to_owned();
    assert_eq!(at(&opens) - at(&created), 3_600_000);
    let opens = gate(&rig, &until).await["deadline"].as_str().unwrap().to_owned();
    assert!((at(&opens) - at("2199-01-02T03:04:05Z")).abs() < 60_000, "{opens}");
    let other = rig.header("eddyline-namespace", "other");
    assert_eq!(other.get(&format!("/v1/gates?run={nap}")).await.code(), (404, "not_found"));
    let unknown = "/v1/gates?run=01a1dff7-abb0-74f5-88e2-53de1b9a8247";
    assert_eq!(rig.get(unknown).await.code(), (404, "not_found"));
    rig.server.stop().await;
}

#[tokio::test]
async fn an_event_has_a_name_or_nothing_of_its_list_is_published() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {paid: {await: {event: paid}}}").await;
    let run = rig.run("f", json!(1)).await;
    for name in ["", "a b", "bezahlt!", "päid", &"x".repeat(129), &"x".repeat(1_000)] {
        let refused = rig.post("/v1/events", json!({ "name": name })).await;
        assert_eq!(refused.code(), (400, "bad_request"), "{name}");
    }
    let refused = rig.post("/v1/events", json!([{"name": "paid"}, {"name": "a/b"}, {"name": "c d"}])).await;
    assert_eq!(refused.code(), (400, "bad_request"));
    let error = &refused.body["error"];
    assert!(error["message"].as_str().unwrap().contains("`a/b` is not a valid name"), "{error}");
    assert_eq!((&error["details"][0]["path"], &error["details"][1]["path"]), (&json!("[1].name"), &json!("[2].name")));
    let refused = rig.post("/v1/events", json!([{"name": "paid"}, {"name": "paid", "id": ""}])).await;
    assert_eq!(refused.code(), (400, "bad_request"));
    assert_eq!(refused.body["error"]["details"][0]["path"], "[1].id");
    assert_eq!(gate(&rig, &run).await["activation"], "paid", "it still waits");
    assert_eq!(rig.post("/v1/events", json!([{"name": "paid"}, {"name": "A-b_c.9"}])).await.status, 200);
    assert_eq!(rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await.body["status"], "completed");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_gate_is_opened_by_its_id_before_its_run_gets_there_too() {
    let rig = Rig::start().await;
    let ok = "ok: {after: [ask], await: {manual: true}}";
    rig.flow(
        "f",
        &format!(
            "steps: {{ask: {{run: ask}}, {ok}, paid: {{await: {{event: paid}}}}}}\noutput: \"${{steps.ok.output}}\""
        ),
    )
    .await;
    let run = rig.run("f", json!(1)).await;
    let gates = rig.get(&format!("/v1/gates?run={run}")).await;
    assert_eq!(gates.items().len(), 1, "the other is not open yet");
    let by_event = format!("/v1/gates/{}", gates.items()[0]["gate_id"].as_str().unwrap());
    assert_eq!(rig.post(&by_event, json!(1)).await.code(), (409, "conflict"), "an event opens it");

    // The step numbers are those of their activations: find out which of them has a gate.
    let other = rig.header("eddyline-namespace", "other");
    let mut opened = Vec::new();
    for number in 0..5 {
        let path = format!("/v1/gates/{run}.{number}");
        if path == by_event {
            continue;
        }
        assert_eq!(other.post(&path, json!(1)).await.code(), (404, "not_found"), "{path}");
        assert_eq!(rig.post(&format!("/hooks/{run}.{number}"), json!(1)).await.code(), (404, "not_found"), "no secret");
        match rig.post(&path, json!({"by": "ann"})).await.status {
            200 => opened.push(path),
            status => assert_eq!(status, 404, "{path}"),
        }
    }
    let [path] = &opened[..] else { panic!("{opened:?}") };
    assert_eq!(rig.post(path, json!({"by": "bob"})).await.code(), (409, "conflict"), "a gate opens once");
    let early = rig.delete(path).await;
    assert_eq!(early.code(), (409, "conflict"));
    assert!(early.body["error"]["message"].as_str().unwrap().contains("has not reached the gate of ok yet"));
    let task = rig.claim("w").await;
    rig.report(&task, json!({"op": "complete", "seq": 1})).await;
    assert_eq!(rig.post("/v1/events", json!({"name": "paid"})).await.status, 200);
    let result = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    assert_eq!(result.body["output"], json!({"by": "ann"}));
    assert_eq!(rig.post(path, json!(1)).await.code(), (409, "conflict"), "after the end of its run too");
    rig.server.stop().await;
}

#[tokio::test]
async fn it_is_told_what_became_of_an_event_and_it_can_be_deleted() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {await: {event: paid, key: input}}}").await;
    let run = rig.run("f", json!({"order": 7})).await;
    let published =
        rig.post("/v1/events", json!([{"name": "paid", "key": {"order": 7}, "id": "p/7"}, {"name": "x"}])).await;
    assert_eq!((&published.body["published"], &published.body["ids"][0]), (&json!(2), &json!("p/7")));
    assert_eq!(rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await.body["status"], "completed");
    let shown = rig.get("/v1/events/p%2F7").await;
    let at = shown.text("published_at");
    let expected = json!({"id": "p/7", "name": "paid", "key": {"order": 7}, "published_at": at, "delivered": true,
        "gates_opened": 1, "runs_started": 0});
    assert_eq!(shown.body, expected);
    let other = published.body["ids"][1].as_str().unwrap();
    let shown = rig.get(&format!("/v1/events/{other}")).await;
    assert_eq!(
        (&shown.body["name"], &shown.body["key"], &shown.body["gates_opened"]),
        (&json!("x"), &json!(null), &json!(0))
    );

    let elsewhere = rig.header("eddyline-namespace", "other");
    assert_eq!(elsewhere.get("/v1/events/p%2F7").await.code(), (404, "not_found"));
    assert_eq!(elsewhere.delete("/v1/events/p%2F7").await.code(), (404, "not_found"));
    assert_eq!(rig.delete("/v1/events/p%2F7").await.body, json!({"deleted": true}));
    assert_eq!(rig.get("/v1/events/p%2F7").await.code(), (404, "not_found"));
    assert_eq!(rig.delete("/v1/events/p%2F7").await.code(), (404, "not_found"));
    let steps = rig.get(&format!("/v1/runs/{run}/steps")).await;
    assert_eq!(steps.items()[0]["status"], "completed", "the gate that got it keeps it");
    let again = rig.post("/v1/events", json!({"name": "paid", "id": "p/7"})).await;
    assert_eq!(again.body.get("existing"), None, "its id is free again");
    rig.server.stop().await;
}
