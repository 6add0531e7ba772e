//! Late and repeated reports, also after the end of the run; and concurrent starts.

use eddyline::{Client, Method};
use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::eddy::Eddy;
use crate::timeline::check;

async fn post(client: &Client, path: &str, body: Value) -> Value {
    client.call(Method::POST, path, &[], Some(&body)).await.unwrap()
}

async fn claim(client: &Client) -> Value {
    let ask = json!({"worker_id": "w", "max": 1, "wait_ms": 30_000});
    let tasks = post(client, "/v1/tasks/claim", ask).await["tasks"].take();
    assert_eq!(tasks.as_array().map(Vec::len), Some(1), "{tasks}");
    tasks[0].clone()
}

/// Sends a report; returns its outcome and whether it was a duplicate.
async fn report(client: &Client, task: &Value, seq: u32, op: Value) -> (String, bool) {
    let mut report = json!({"task_id": task["task_id"], "token": task["token"], "seq": seq});
    report.as_object_mut().unwrap().extend(op.as_object().unwrap().clone());
    let answer = post(client, "/v1/tasks/report", json!({"worker_id": "w", "reports": [report]})).await;
    let outcome = &answer["outcomes"][0];
    (outcome["outcome"].as_str().unwrap().to_owned(), outcome["duplicate"] == true)
}

fn is(outcome: &str, duplicate: bool) -> (String, bool) {
    (outcome.to_owned(), duplicate)
}

#[tokio::test]
async fn a_report_after_its_lease_is_stale_and_the_next_attempt_counts() {
    let eddy = Eddy::start(&["--lease", "300ms"]);
    let client = eddy.client();
    client.register_flow("f", "{steps: {a: {retry: {initial: 1ms}}}, output: \"${steps.a.output}\"}").await.unwrap();
    let run = client.start("f", &json!(null)).await.unwrap();
    let first = claim(&client).await;
    // The task is offered again, so the lease has expired.
    let second = claim(&client).await;
    assert_eq!((&second["attempt"], &second["run_id"]), (&json!(2), &first["run_id"]));
    assert_ne!(first["task_id"], second["task_id"]);
    assert_eq!(first["key"], second["key"]);
    let done = |by: &str| json!({"op": "complete", "output": by});
    assert_eq!(report(&client, &first, 1, done("first")).await, is("stale", false));
    assert_eq!(report(&client, &second, 1, done("second")).await, is("applied", false));
    assert_eq!(run.result::<String>().await.unwrap(), "second");
    assert_eq!(check(&client, run.id()).await["a"], 2);
    // `closed` takes precedence over `stale`.
    assert_eq!(report(&client, &first, 1, done("first")).await, is("closed", false));
}

#[tokio::test]
async fn a_report_that_is_repeated_gets_its_first_outcome_after_the_end_and_after_a_crash_too() {
    let mut eddy = Eddy::start(&[]);
    let client = eddy.client();
    let flow = "{steps: {a: {emits: [told]}, b: {after: [a]}}, output: \"${steps.b.output}\"}";
    client.register_flow("f", flow).await.unwrap();
    let run = client.start("f", &json!(null)).await.unwrap();
    let a = claim(&client).await;
    let (log, emit) = (json!({"op": "log", "msg": "hello"}), json!({"op": "emit", "event": "told", "payload": 1}));
    let done = json!({"op": "complete", "output": 1});
    assert_eq!(report(&client, &a, 1, log.clone()).await, is("applied", false));
    assert_eq!(report(&client, &a, 1, log.clone()).await, is("applied", true));
    assert_eq!(report(&client, &a, 2, emit.clone()).await, is("applied", false));
    eddy.kill();
    eddy.restart();
    // A new client: its old connections are dead.
    let client = eddy.client();
    assert_eq!(report(&client, &a, 2, emit.clone()).await, is("applied", true));
    assert_eq!(report(&client, &a, 3, done.clone()).await, is("applied", false));
    assert_eq!(report(&client, &a, 3, done.clone()).await, is("applied", true));
    let b = claim(&client).await;
    assert_eq!(report(&client, &b, 1, json!({"op": "complete", "output": "b"})).await, is("applied", false));
    assert_eq!(run.result::<String>().await.unwrap(), "b");
    eddy.kill();
    eddy.restart();
    let client = eddy.client();
    for (task, seq, op) in [(&a, 1, log), (&a, 2, emit), (&a, 3, done), (&b, 1, json!({"op": "complete"}))] {
        assert_eq!(report(&client, task, seq, op).await, is("applied", true), "{} {seq}", task["step"]);
    }
    assert_eq!(report(&client, &b, 2, json!({"op": "complete"})).await, is("closed", false));
    check(&client, run.id()).await;
    let logs = crate::timeline::records(&client, run.id()).await;
    assert_eq!(logs.iter().filter(|record| record.kind == "runner.log").count(), 1);
    assert_eq!(logs.iter().filter(|record| record.kind == "emit").count(), 1);
}

#[tokio::test]
async fn many_starts_with_one_key_at_one_moment_are_one_run() {
    let eddy = Eddy::start(&[]);
    let client = eddy.client();
    client.register_flow("f", "{steps: {a: {set: 1}}}").await.unwrap();
    let starts = (0..50).map(|_| {
        // One connection per start.
        let client = eddy.client();
        async move { client.start("f", &json!({"order": 7})).idempotency_key("order-7").await.unwrap() }
    });
    let runs = join_all(starts).await;
    assert_eq!(runs.iter().filter(|run| !run.existing()).count(), 1, "not exactly one start created the run");
    assert!(runs.iter().all(|run| run.id() == runs[0].id()));
    let other = client.start("f", &json!({"order": 8})).idempotency_key("order-7").await.unwrap_err();
    assert!(other.is_conflict(), "{other}");
    let listed: Value =
        client.call(Method::GET, "/v1/runs", &[("count", "true".to_owned())], None::<&()>).await.unwrap();
    assert_eq!(listed["total"], 1);
}
