//! Only the claimer of a task can report on it.

use std::time::{Duration, Instant};

use eddyline_server::{ServeArgs, Size};
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpSocket, TcpStream};

use crate::client::{Client, Rig, args};

/// Guessed tokens for the tasks of a run, with these last parts.
fn guesses(run: &str, macs: &[&str]) -> Vec<(String, String)> {
    let mut guesses = Vec::new();
    for (activation, attempt, fence) in [(0, 1, 1), (1, 1, 1), (1, 77, 1), (1, 1, 2), (1, 2, 2), (2, 1, 2), (1, 0, 0)] {
        let (id, token) = (format!("{run}.{fence}"), format!("{run}.{activation}.{attempt}.{fence}"));
        guesses.extend(macs.iter().map(|mac| (id.clone(), format!("{token}.{mac}"))));
        guesses.push((id, token));
    }
    guesses
}

fn mac_of(task: &Value) -> &str {
    task["token"].as_str().unwrap().rsplit('.').next().unwrap()
}

/// No forged token is accepted for any operation, and the timeline is unchanged.
async fn refuses(client: &Client, run: &str, macs: &[&str]) {
    let before = records(client, run).await;
    for op in [
        json!({"op": "complete", "output": "forged"}),
        json!({"op": "fail", "error": {"kind": "Forged", "message": "x"}}),
        json!({"op": "defer", "after": "1h"}),
        json!({"op": "log", "msg": "forged"}),
        json!({"op": "publish", "name": "forged"}),
        json!({"op": "step", "name": "forged", "output": 1}),
        json!({"op": "suspend"}),
    ] {
        let reports: Vec<Value> = guesses(run, macs)
            .into_iter()
            .map(|(id, token)| {
                let mut report = json!({"task_id": id, "token": token, "seq": 1});
                report.as_object_mut().unwrap().extend(op.as_object().unwrap().clone());
                report
            })
            .collect();
        let reply = client.post("/v1/tasks/report", json!({"worker_id": "w", "reports": reports})).await;
        assert_eq!(reply.status, 200, "{}", reply.body);
        for outcome in reply.body["outcomes"].as_array().unwrap() {
            // A token without its last part cannot be parsed, and later reports on its task are then not tried.
            assert!(["invalid", "not_tried"].contains(&outcome["outcome"].as_str().unwrap()), "{op}: {outcome}");
        }
    }
    assert_eq!(records(client, run).await, before, "the timeline of {run}");
}

async fn records(client: &Client, run: &str) -> Vec<Value> {
    client.get(&format!("/v1/streams/nq:flow:{run}?limit=1000")).await.items().clone()
}

async fn kinds(client: &Client, run: &str) -> Vec<String> {
    let records = records(client, run).await;
    records.iter().map(|record| record["kind"].as_str().unwrap().to_owned()).collect()
}

const ZEROS: &str = "00000000000000000000000000000000";

#[tokio::test]
async fn a_report_on_a_task_that_nobody_claimed_is_not_applied() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    rig.flow("slow", "steps: {a: {run: a, queue: slow}}").await;
    rig.flow("gpu", "steps: {a: {run: a, requires: [gpu]}}").await;
    rig.flow("job", "code: true").await;
    let known = rig.run("f", json!(1)).await;
    let known = (rig.claim("w").await, known);
    let macs = [ZEROS, mac_of(&known.0)];

    assert_eq!(rig.post("/v1/queues/slow/pause", json!({})).await.status, 200);
    let on_paused_queue = rig.run("slow", json!(1)).await;
    refuses(&rig, &on_paused_queue, &macs).await;
    let unmet = rig.run("gpu", json!(1)).await;
    assert_eq!(rig.post("/v1/tasks/claim", json!({"worker_id": "w"})).await.body["tasks"], json!([]));
    refuses(&rig, &unmet, &macs).await;
    let unclaimed = rig.run("f", json!(1)).await;
    refuses(&rig, &unclaimed, &macs).await;
    assert_eq!(rig.post(&format!("/v1/runs/{unclaimed}/pause"), json!({})).await.status, 200);
    refuses(&rig, &unclaimed, &macs).await;
    let code = rig.run("job", json!(1)).await;
    refuses(&rig, &code, &macs).await;
    for run in [&on_paused_queue, &unmet, &unclaimed, &code] {
        assert!(!kinds(&rig, run).await.iter().any(|kind| kind.starts_with("step.attempt")), "{run}");
    }

    // Claimed tasks can be reported on as usual.
    assert_eq!(rig.report(&known.0, json!({"op": "complete"})).await["outcome"], "applied");
    assert_eq!(rig.post(&format!("/v1/runs/{unclaimed}/resume"), json!({})).await.status, 200);
    let mut task = rig.claim("w").await;
    if task["kind"] == "run" {
        task = rig.claim("w").await;
    }
    assert_eq!(rig.report(&task, json!({"op": "complete"})).await["outcome"], "applied");
    let ends = ["step.attempt.started", "step.attempt.completed", "step.completed", "flow.completed"];
    let told = kinds(&rig, &unclaimed).await;
    assert_eq!(told[told.len() - ends.len()..], ends, "{told:?}");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_token_counts_for_its_own_attempt_run_fence_and_namespace_alone() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a, retry: {initial: 0ms}}}").await;
    let (first, second) = (rig.run("f", json!(1)).await, rig.run("f", json!(2)).await);
    let (one, two) = (rig.claim("w").await, rig.claim("w").await);
    assert_eq!((&one["run_id"], &two["run_id"]), (&json!(first), &json!(second)));
    let token = |task: &Value| task["token"].as_str().unwrap().to_owned();
    let parts = |task: &Value| token(task).split('.').map(str::to_owned).collect::<Vec<_>>();
    for (part, other) in [(0, second.as_str()), (1, "0"), (2, "77"), (3, "2"), (4, mac_of(&two))] {
        let mut changed = parts(&one);
        changed[part] = other.to_owned();
        let forged = json!({"task_id": format!("{}.{}", changed[0], changed[3]), "token": changed.join(".")});
        let outcome = rig.report(&forged, json!({"op": "complete", "output": "forged"})).await;
        assert_eq!((&outcome["outcome"], &outcome["message"]), (&json!("invalid"), &json!("there is no such task")));
    }
    let elsewhere = rig.header("eddyline-namespace", "other");
    assert_eq!(elsewhere.report(&one, json!({"op": "complete"})).await["outcome"], "invalid");

    // A new attempt has its own token; the previous token is useless for it.
    let failed = json!({"op": "fail", "error": {"kind": "Boom", "message": "x"}});
    assert_eq!(rig.report(&one, failed).await["outcome"], "applied");
    let forged = json!({"task_id": format!("{first}.2"), "token": format!("{first}.1.2.2.{}", mac_of(&one))});
    assert_eq!(rig.report(&forged, json!({"op": "complete"})).await["outcome"], "invalid");
    let again = rig.claim("w").await;
    assert_eq!((&again["run_id"], &again["attempt"]), (&json!(first), &json!(2)));
    assert_eq!(rig.report(&one, json!({"op": "complete"})).await["outcome"], "stale");
    assert_eq!(rig.report(&again, json!({"op": "complete"})).await["outcome"], "applied");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_claim_is_reported_on_after_a_restart_and_nothing_else_is() {
    let dir = tempfile::tempdir().unwrap();
    let with_store = || ServeArgs { store: Some(dir.path().join("store").display().to_string()), ..args() };
    let rig = Rig::with(with_store()).await;
    rig.flow("f", "steps: {a: {run: a}, b: {run: b}}").await;
    let run = rig.run("f", json!(1)).await;
    let task = rig.claim("w").await;
    rig.server.stop().await;

    let rig = Rig::with(with_store()).await;
    refuses(&rig, &run, &[ZEROS]).await;
    assert_eq!(rig.report(&task, json!({"op": "complete"})).await["outcome"], "applied");
    let other = rig.claim("w").await;
    assert_eq!(rig.report(&other, json!({"op": "complete"})).await["outcome"], "applied");
    assert_eq!(rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await.body["status"], "completed");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_worker_keeps_and_gives_back_no_lease_but_its_own() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    rig.run("f", json!(1)).await;
    let task = rig.claim("owner").await;
    let id = task["task_id"].clone();
    let beat = rig.post("/v1/workers/thief/heartbeat", json!({"tasks": [id]})).await;
    assert_eq!(beat.body["lost"], json!([id]), "the thief does not hold it");
    let beat = rig.post("/v1/workers/owner/heartbeat", json!({"tasks": [id]})).await;
    assert_eq!((&beat.body["lost"], &beat.body["cancel"]), (&json!([]), &json!([])));
    assert_eq!(rig.report(&task, json!({"op": "complete"})).await["outcome"], "applied");
    rig.server.stop().await;
}

/// Clients that requested large responses and do not read them, until there is no room for another.
async fn unread(rig: &Rig, run: &str) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_recv_buffer_size(4 << 10).unwrap();
    let mut stream = socket.connect(rig.addr).await.unwrap();
    let request = format!("GET /v1/runs/{run} HTTP/1.1\r\nhost: {}\r\n\r\n", rig.addr).repeat(8);
    stream.write_all(request.as_bytes()).await.unwrap();
    // The first responses may still fit into the buffers between server and client.
    let mut refused = 0;
    while refused < 5 {
        refused = if rig.get(&format!("/v1/runs/{run}")).await.status == 429 { refused + 1 } else { 0 };
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    stream
}

#[tokio::test]
async fn tasks_come_back_at_once_if_there_is_no_room_for_the_answer() {
    let rig = Rig::with(ServeArgs { response_memory: Some(Size { bytes: 200 << 10 }), ..args() }).await;
    rig.flow("large", "{steps: {a: {set: 1}}}").await;
    rig.flow("f", "{steps: {a: {}}}").await;
    let large = rig.run("large", json!("x".repeat(2_000_000))).await;
    rig.run("f", json!("small")).await;
    let small = rig.claim("w").await;
    rig.run("f", json!("y".repeat(30_000))).await;

    let slow = unread(&rig, &large).await;
    let refused = rig.post("/v1/tasks/claim", json!({"worker_id": "w", "max": 1})).await;
    assert_eq!(refused.code(), (429, "too_many"), "{}", refused.body);
    // A report is still answered, without the tasks that it claimed.
    let report = json!({"task_id": small["task_id"], "token": small["token"], "op": "complete", "output": 1});
    let asked = json!({"worker_id": "w", "reports": [report], "claim": {"max": 1}});
    let reported = rig.post("/v1/tasks/report", asked).await;
    assert_eq!(reported.status, 200, "{}", reported.body);
    assert_eq!(reported.body["outcomes"][0]["outcome"], "applied", "{}", reported.body);
    assert_eq!(reported.body["tasks"].as_array().map_or(0, Vec::len), 0);

    drop(slow);
    let since = Instant::now();
    let task = loop {
        let reply = rig.post("/v1/tasks/claim", json!({"worker_id": "w", "max": 1})).await;
        if let Some(task) = reply.body["tasks"].get(0) {
            break task.clone();
        }
        assert!(since.elapsed() < Duration::from_secs(15), "the task waits for its lease: {}", reply.body);
        tokio::time::sleep(Duration::from_millis(20)).await;
    };
    assert_eq!(task["attempt"], 1, "no attempt was used up");
    rig.server.stop().await;
}
