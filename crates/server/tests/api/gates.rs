//! Gates, webhooks and events.

use hyper::Method;
use serde_json::json;

use crate::client::Rig;

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
    assert!(person["url"].is_null() && person["token"].is_string() && person["deadline"].is_string());
    assert!(event["token"].is_null());
    assert_eq!(rig.get("/v1/gates?reason=manual").await.items().len(), 1);
    assert_eq!(rig.get("/v1/gates?reason=x").await.status, 400);

    let token = hook["token"].as_str().unwrap();
    assert_eq!(rig.get(&format!("/hooks/{token}")).await.code(), (405, "method_not_allowed"));
    let posted = rig.send(Method::POST, &format!("/hooks/{token}"), Some("text/plain"), "a=1&b=2".into()).await;
    assert_eq!(posted.body, json!({"opened": true}));
    assert_eq!(rig.post(&format!("/hooks/{token}"), json!(1)).await.code(), (409, "conflict"));
    let manual = person["token"].as_str().unwrap();
    assert_eq!(rig.post(&format!("/hooks/{manual}"), json!(1)).await.status, 404);
    assert_eq!(rig.post(&format!("/v1/gates/{manual}"), json!({"by": "me"})).await.status, 200);
    assert_eq!(rig.post(&format!("/v1/gates/{manual}"), json!({})).await.code(), (409, "conflict"));
    assert_eq!(rig.post("/v1/gates/unknown", json!({})).await.status, 404);
    assert_eq!(rig.post("/hooks/unknown", json!({})).await.status, 404);

    let published = rig.post("/v1/events", json!({"name": "paid", "key": 8, "payload": "wrong key"})).await;
    assert_eq!(published.body, json!({"published": 1}));
    let many = json!([{"name": "paid", "key": 7, "payload": "right", "id": "e1"}, {"name": "other"}]);
    assert_eq!(rig.post("/v1/events", many).await.body, json!({"published": 2}));
    assert_eq!(rig.post("/v1/events", json!({"key": 1})).await.status, 400);
    assert_eq!(rig.post("/v1/events", json!({"name": ""})).await.status, 422);
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
