//! Unknown fields and parameters: refused in requests of people, ignored in those of workers.

use serde_json::{Value, json};

use crate::client::{Reply, Rig};

/// A refusal with this message.
fn refused(reply: &Reply, said: &str) {
    assert_eq!(reply.code(), (400, "bad_request"), "{}", reply.body);
    let message = reply.body["error"]["message"].as_str().unwrap();
    assert!(message.contains(said), "{message}");
}

#[tokio::test]
async fn an_unknown_field_is_refused_with_the_one_that_was_meant() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let run = rig.run("f", json!(1)).await;
    let of_run = |act: &str| format!("/v1/runs/{run}/{act}");
    for (path, body, said) in [
        ("/v1/flows/f/runs".to_owned(), json!({"inputs": 1}), "unknown field `inputs`; did you mean `input`?"),
        (
            "/v1/flows/f/runs".to_owned(),
            json!({"idempotencyKey": "k"}),
            "unknown field `idempotencyKey`; did you mean `idempotency_key`?",
        ),
        ("/v1/runs/batch".to_owned(), json!({"runs": [], "run": []}), "unknown field `run`; did you mean `runs`?"),
        ("/v1/events".to_owned(), json!({"name": "e", "data": 1}), "unknown field `data`; known here: name, key"),
        ("/v1/events".to_owned(), json!([{"name": "e"}, {"name": "e", "kye": 1}]), "did you mean `key`?"),
        ("/v1/keys".to_owned(), json!({"scopes": ["read"], "scope": "read"}), "did you mean `scopes`?"),
        ("/v1/namespaces".to_owned(), json!({"name": "n", "nmae": "n"}), "did you mean `name`?"),
        (of_run("cancel"), json!({"reasn": "x"}), "did you mean `reason`?"),
        (of_run("rerun"), json!({"form": "a"}), "did you mean `from`?"),
        (of_run("pause"), json!({"for": "1h"}), "unknown field `for`; this call takes no fields"),
        (of_run("steps/a/complete"), json!({"result": 1}), "unknown field `result`"),
        (of_run("steps/a/fail"), json!({"error": {"message": "m", "kid": "k"}}), "did you mean `kind`?"),
        (of_run("steps/a/skip"), json!({"reason": "x"}), "unknown field `reason`"),
        ("/v1/queues/default/pause".to_owned(), json!({"until": 1}), "unknown field `until`"),
    ] {
        let reply = rig.post(&path, body).await;
        refused(&reply, said);
    }
    // Nothing of it took effect.
    let shown = rig.get(&format!("/v1/runs/{run}")).await;
    assert_eq!(shown.body["status"], "running");
    assert_eq!(rig.get("/v1/runs?count=true").await.body["total"], 1);
    assert_eq!(rig.get("/v1/keys").await.items().len() + rig.get("/v1/namespaces?limit=5").await.items().len(), 1);
    rig.server.stop().await;
}

#[tokio::test]
async fn an_unknown_field_in_one_start_of_a_batch_refuses_that_one() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let starts = json!({"runs": [{"flow": "f", "inputs": 1}, {"flow": "f", "input": {"inputs": 1}}]});
    let reply = rig.post("/v1/runs/batch", starts).await;
    let items: &Vec<Value> = reply.items();
    assert_eq!(items[0]["error"]["code"], "bad_request");
    assert_eq!(items[0]["error"]["message"], "unknown field `inputs`; did you mean `input`?");
    assert_eq!(items[1]["existing"], false);
    rig.server.stop().await;
}

#[tokio::test]
async fn an_unknown_parameter_is_refused_with_the_one_that_was_meant() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let run = rig.run("f", json!(1)).await;
    for (path, said) in [
        ("/v1/runs?stauts=failed".to_owned(), "unknown parameter `stauts`; did you mean `status`?"),
        ("/v1/gates?runs=x".to_owned(), "did you mean `run`?"),
        ("/v1/queues?nmae=x".to_owned(), "unknown parameter `nmae`"),
        ("/v1/flows?limits=1".to_owned(), "did you mean `limit`?"),
        ("/v1/keys?namspace=x".to_owned(), "did you mean `namespace`?"),
        ("/v1/info?x=1".to_owned(), "this call has no parameters"),
        (format!("/v1/runs/{run}/result?wiat=1s"), "did you mean `wait`?"),
        (format!("/v1/streams/nq:flow:{run}?kinds=emit"), "did you mean `kind`?"),
    ] {
        refused(&rig.get(&path).await, said);
    }
    refused(&rig.delete(&format!("/v1/runs/{run}?force=true")).await, "unknown parameter `force`");
    refused(&rig.post("/v1/flows/f/runs?wait=1s", json!({})).await, "unknown parameter `wait`");
    assert_eq!(rig.get("/v1/runs?count=true").await.body["total"], 1);
    rig.server.stop().await;
}

#[tokio::test]
async fn what_workers_send_may_have_fields_of_a_newer_sdk() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let run = rig.run("f", json!(1)).await;
    let worker = rig.post("/v1/workers?sdk=2", json!({"handlers": ["a"], "colour": "red"})).await;
    assert_eq!(worker.status, 201, "{}", worker.body);
    let id = worker.text("worker_id");
    let claimed = rig.post("/v1/tasks/claim?sdk=2", json!({"worker_id": id, "max": 1, "mood": "good"})).await;
    let task = &claimed.body["tasks"][0];
    let beat = json!({"tasks": [task["task_id"]], "temperature": 36});
    assert_eq!(rig.post(&format!("/v1/workers/{id}/heartbeat"), beat).await.status, 200);
    let done = json!({"task_id": task["task_id"], "token": task["token"], "op": "complete", "output": 1, "took": 5});
    let reply = rig.post("/v1/tasks/report", json!({"worker_id": id, "reports": [done], "sent": 1})).await;
    assert_eq!(reply.body["outcomes"][0]["outcome"], "applied", "{}", reply.body);
    assert_eq!(rig.get(&format!("/v1/runs/{run}/result?wait=5s")).await.body["status"], "completed");
    assert_eq!(rig.get("/healthz?probe=1").await.status, 200);
    rig.server.stop().await;
}
