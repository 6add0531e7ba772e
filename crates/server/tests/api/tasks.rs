//! Workers over plain HTTP: claims, reports, heartbeats.

use eddyline_protocol::Span;
use eddyline_server::ServeArgs;
use hyper::Method;
use serde_json::{Value, json};

use crate::client::{Rig, args, unreadable};

/// Longer than anything here takes; only reached if something hangs.
const LONG: std::time::Duration = std::time::Duration::from_secs(30);

#[tokio::test]
async fn a_claim_that_waits_is_woken_by_a_start() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let client = rig.client.clone();
    let claim = tokio::spawn(async move { client.claim("w").await });
    let run = rig.run("f", json!({"x": 1})).await;
    let task = claim.await.unwrap();
    assert_eq!(
        (&task["run_id"], &task["input"], &task["run_input"]),
        (&json!(run), &json!({"x": 1}), &json!({"x": 1}))
    );
    assert_eq!((&task["handler"], &task["attempt"], &task["kind"]), (&json!("a"), &json!(1), &json!("step")));
    assert_eq!(task["key"], json!(format!("{run}/a")));
    let nothing = rig.post("/v1/tasks/claim", json!({"worker_id": "w"})).await;
    assert_eq!(nothing.body, json!({"tasks": []}));
    let none = rig.post("/v1/tasks/claim", json!({"worker_id": "w", "max": 0, "wait_ms": 20_000})).await;
    assert_eq!(none.body, json!({"tasks": []}));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_repeated_claim_gets_the_same_tasks() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    rig.run("f", json!(1)).await;
    let ask = json!({"worker_id": "w", "request_id": "6f2c1b8e-0d5b-4f0a-9a55-0f7d0c4c2a11", "wait_ms": 20_000});
    let first = rig.post("/v1/tasks/claim", ask.clone()).await;
    let again = rig.post("/v1/tasks/claim", ask).await;
    assert_eq!(first.body["tasks"].as_array().unwrap().len(), 1);
    assert_eq!(first.body["tasks"][0]["task_id"], again.body["tasks"][0]["task_id"]);
    assert_eq!(rig.post("/v1/tasks/claim", json!({"request_id": ""})).await.status, 400);
    rig.server.stop().await;
}

#[tokio::test]
async fn each_report_is_taken_for_itself() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a, emits: [told]}, b: {run: b}}").await;
    let run = rig.run("f", json!(1)).await;
    let asked = rig.post("/v1/tasks/claim", json!({"worker_id": "w", "max": 2, "wait_ms": 20_000})).await;
    let tasks = asked.body["tasks"].as_array().unwrap();
    let report = |task: &Value, seq: u32, op: Value| {
        let mut report = json!({"task_id": task["task_id"], "token": task["token"], "seq": seq});
        report.as_object_mut().unwrap().extend(op.as_object().unwrap().clone());
        report
    };
    let (a, b) = match tasks[0]["step"] == "a" {
        true => (&tasks[0], &tasks[1]),
        false => (&tasks[1], &tasks[0]),
    };
    let reports = json!([
        report(a, 1, json!({"op": "log", "msg": "hello"})),
        report(a, 2, json!({"op": "progress", "done": 1, "total": 2})),
        report(b, 1, json!({"op": "no such thing"})),
        report(b, 2, json!({"op": "complete"})),
        {"task_id": a["task_id"], "token": b["token"], "op": "complete"},
        {"task_id": "x", "token": "y", "op": "complete"},
        "nonsense",
    ]);
    let reply = rig.post("/v1/tasks/report", json!({"worker_id": "w", "reports": reports})).await;
    let outcomes: Vec<&str> =
        reply.body["outcomes"].as_array().unwrap().iter().map(|o| o["outcome"].as_str().unwrap()).collect();
    assert_eq!(outcomes, ["applied", "applied", "invalid", "not_tried", "invalid", "invalid", "invalid"]);
    assert!(reply.body["outcomes"][2]["message"].is_string());
    let records = rig.get(&format!("/v1/streams/nq:flow:{run}?kind=step.progress")).await;
    let data = serde_json::to_string(&records.items()[0]["data"]).unwrap();
    assert_eq!(data, r#"{"done":1,"stepKey":"a","total":2}"#, "numbers stay as they were sent");

    let done = json!({"op": "complete", "seq": 3, "output": 1, "emits": [{"event": "told", "payload": 5}]});
    assert_eq!(rig.report(a, done.clone()).await["outcome"], "applied");
    let again = rig.report(a, done).await;
    assert_eq!((&again["outcome"], &again["duplicate"]), (&json!("applied"), &json!(true)));
    assert_eq!(rig.report(a, json!({"op": "complete", "seq": 4})).await["outcome"], "stale");
    rig.post(&format!("/v1/runs/{run}/cancel"), json!({})).await;
    assert_eq!(rig.report(b, json!({"op": "complete", "seq": 2})).await["outcome"], "closed");
    assert_eq!(rig.get(&format!("/v1/runs/{run}")).await.body["emitted_events"], json!(["told"]));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_report_that_cannot_be_read_is_in_nobodys_way() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}, b: {run: b}}").await;
    let post =
        async |body: String| rig.send(Method::POST, "/v1/tasks/report", Some("application/json"), body.into()).await;
    for unreadable in unreadable() {
        rig.run("f", json!(1)).await;
        let asked = rig.post("/v1/tasks/claim", json!({"worker_id": "w", "max": 2, "wait_ms": 20_000})).await;
        let [first, second] = &asked.body["tasks"].as_array().unwrap()[..] else { panic!("{}", asked.body) };
        let report = |task: &Value, output: &str| {
            let (id, token) = (&task["task_id"], &task["token"]);
            format!(r#"{{"task_id": {id}, "token": {token}, "op": "complete", "output": {output}}}"#)
        };
        let reports = [report(first, &unreadable), report(second, "1"), report(first, "2")].join(", ");
        let reply = post(format!(r#"{{"worker_id": "w", "reports": [{reports}]}}"#)).await;
        assert_eq!(reply.status, 200, "{}", reply.body);
        let outcomes: Vec<_> = reply.body["outcomes"].as_array().unwrap().iter().collect();
        let said: Vec<_> = outcomes.iter().map(|said| said["outcome"].as_str().unwrap()).collect();
        assert_eq!(said, ["invalid", "applied", "not_tried"], "{}", reply.body);
        assert_eq!((&outcomes[0]["task_id"], &outcomes[2]["task_id"]), (&first["task_id"], &first["task_id"]));
        assert!(!outcomes[0]["message"].as_str().unwrap().is_empty());
        assert_eq!(
            rig.report(first, json!({"op": "complete"})).await["outcome"],
            "applied",
            "it is still the worker's"
        );
    }
    // A request that is hostile or malformed as a whole is refused as a whole.
    for broken in [format!("{}{}", "[".repeat(2_000), "]".repeat(2_000)), "1 2".to_owned(), "\"".to_owned()] {
        let reply = post(format!(r#"{{"worker_id": "w", "reports": [{broken}, 1]}}"#)).await;
        assert_eq!(reply.code(), (400, "bad_request"));
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn a_report_brings_the_next_task_with_it() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}, b: {after: [a], run: b}}").await;
    rig.run("f", json!(1)).await;
    let task = rig.claim("w").await;
    let report = json!({"task_id": task["task_id"], "token": task["token"], "op": "complete"});
    let reply = rig.post("/v1/tasks/report", json!({"worker_id": "w", "reports": [report], "claim": {"max": 5}})).await;
    assert_eq!(reply.body["tasks"][0]["step"], "b");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_worker_that_drains_gets_nothing_new_but_what_it_was_given_and_did_not_hear_of() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {}, b: {}}").await;
    rig.run("f", json!(1)).await;
    let id = rig.post("/v1/workers", json!({"host": "h", "pid": 1})).await.text("worker_id");
    let claim = async |request: &str| {
        let claim = json!({"worker_id": id, "max": 1, "request_id": request});
        rig.post("/v1/tasks/claim", claim).await.body["tasks"].clone()
    };
    let first = claim("one").await;
    assert_eq!(first.as_array().unwrap().len(), 1);
    rig.post(&format!("/v1/workers/{id}/drain"), json!({})).await;
    assert_eq!(claim("one").await[0]["task_id"], first[0]["task_id"]);
    assert_eq!(claim("two").await, json!([]));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_claim_that_waits_gets_nothing_once_its_worker_drains_or_is_gone() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {}}").await;
    for gone in [false, true] {
        let id = rig.post("/v1/workers", json!({"host": "h", "pid": 1})).await.text("worker_id");
        let (client, worker) = (rig.client.clone(), id.clone());
        let claim = tokio::spawn(async move {
            let claim = json!({"worker_id": worker, "wait_ms": 20_000});
            client.post("/v1/tasks/claim", claim).await.body
        });
        let (client, worker) = (rig.client.clone(), id.clone());
        let beside = tokio::spawn(async move {
            let report = json!({"worker_id": worker, "reports": [], "claim": {"wait_ms": 20_000}});
            client.post("/v1/tasks/report", report).await.body["tasks"].clone()
        });
        // Nothing shows that they wait.
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        let since = std::time::Instant::now();
        let said = match gone {
            false => rig.post(&format!("/v1/workers/{id}/drain"), json!({})).await,
            true => rig.delete(&format!("/v1/workers/{id}")).await,
        };
        assert_eq!(said.status, 200);
        let run = rig.run("f", json!(1)).await;
        assert_eq!((claim.await.unwrap(), beside.await.unwrap()), (json!({"tasks": []}), json!([])));
        assert!(since.elapsed() < std::time::Duration::from_secs(10), "at once");
        let task = rig.claim("another").await;
        assert_eq!((&task["run_id"], &task["attempt"]), (&json!(run), &json!(1)));
        rig.report(&task, json!({"op": "complete"})).await;
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn a_worker_registers_is_offered_what_it_names_and_keeps_its_leases() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}, b: {run: b}}").await;
    let me = json!({"handlers": ["b"], "queues": ["default"], "instance": "i", "version": "7", "max_concurrent": 3});
    let worker = rig.post("/v1/workers", me.clone()).await;
    assert_eq!(worker.status, 201);
    let id = worker.text("worker_id");
    assert_eq!(rig.post("/v1/workers", me).await.text("worker_id"), id);
    assert_ne!(rig.post("/v1/workers", json!({})).await.text("worker_id"), id);
    let run = rig.run("f", json!(1)).await;
    let task = rig.claim(&id).await;
    assert_eq!(task["handler"], "b");
    let beat = json!({"tasks": [task["task_id"], "nonsense", format!("{run}.99")], "completed": 4, "failed": 1});
    let beat = rig.post(&format!("/v1/workers/{id}/heartbeat"), beat).await;
    assert_eq!((&beat.body["cancel"], &beat.body["drain"]), (&json!([]), &json!(false)));
    assert_eq!(beat.body["lost"], json!(["nonsense", format!("{run}.99")]));
    let listed = rig.get("/v1/workers").await;
    let mine = listed.items().iter().find(|worker| worker["worker_id"] == json!(id)).unwrap();
    assert_eq!((&mine["status"], &mine["completed"], &mine["tasks"]), (&json!("online"), &json!(4), &json!(1)));

    // Another namespace cannot use it.
    let other = rig.header("eddyline-namespace", "other");
    let foreign = other.post(&format!("/v1/workers/{id}/heartbeat"), json!({"tasks": [task["task_id"]]})).await;
    assert_eq!((foreign.status, &foreign.body["lost"]), (200, &json!([task["task_id"]])));
    assert_eq!(other.post(&format!("/v1/workers/{id}/heartbeat"), json!({})).await.status, 404);
    assert_eq!(other.get(&format!("/v1/tasks/{}/memo", task["task_id"].as_str().unwrap())).await.status, 404);

    let drained = rig.post(&format!("/v1/workers/{id}/drain"), json!({})).await;
    assert_eq!(drained.body["status"], "draining");
    rig.post(&format!("/v1/runs/{run}/cancel"), json!({})).await;
    let beat = rig.post(&format!("/v1/workers/{id}/heartbeat"), json!({"tasks": [task["task_id"]]})).await;
    assert_eq!((&beat.body["cancel"], &beat.body["drain"]), (&json!([task["task_id"]]), &json!(true)));
    assert_eq!(rig.delete(&format!("/v1/workers/{id}")).await.status, 200);
    for path in ["heartbeat", "drain"] {
        assert_eq!(rig.post(&format!("/v1/workers/{id}/{path}"), json!({})).await.status, 404);
    }
    assert_eq!(rig.delete(&format!("/v1/workers/{id}")).await.status, 404);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_claim_gets_no_more_than_its_worker_can_do_at_once() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}, b: {run: b}, c: {run: c}}").await;
    let id = rig.post("/v1/workers", json!({"max_concurrent": 2})).await.text("worker_id");
    rig.run("f", json!(1)).await;
    let claim = async |worker: &str| {
        let reply = rig.post("/v1/tasks/claim", json!({"worker_id": worker, "max": 10, "wait_ms": 20_000})).await;
        reply.body["tasks"].as_array().unwrap().len()
    };
    assert_eq!((claim(&id).await, claim("nobody").await), (2, 1));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_lease_that_is_not_kept_is_lost_and_its_worker_offline() {
    let rig = Rig::with(ServeArgs { lease: Some(Span::from_ms(300)), ..args() }).await;
    rig.flow("f", "steps: {a: {run: a, retry: {initial: 1ms}}}").await;
    let id = rig.post("/v1/workers", json!({})).await.text("worker_id");
    rig.run("f", json!(1)).await;
    let task = rig.claim(&id).await;
    let second = rig.claim("another").await;
    assert_eq!((&second["attempt"], &second["run_id"]), (&json!(2), &task["run_id"]));
    assert_eq!(rig.report(&task, json!({"op": "complete"})).await["outcome"], "stale");
    let beat = rig.post(&format!("/v1/workers/{id}/heartbeat"), json!({"tasks": [task["task_id"]]})).await;
    assert_eq!((&beat.body["lost"], &beat.body["cancel"]), (&json!([task["task_id"]]), &json!([])));
    // Three leases of silence, by the store's clock.
    let since = std::time::Instant::now();
    while rig.get("/v1/workers").await.items()[0]["status"] != "offline" {
        assert!(since.elapsed() < LONG, "it is never offline");
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn the_back_off_of_a_code_step_is_ended_by_hand_and_its_worker_is_told() {
    let rig = Rig::start().await;
    rig.flow("job", "code: true\nstep_retry: {attempts: 3, initial: 1h, max: 1h}").await;
    let run = rig.run("job", json!(null)).await;
    let retry = async || rig.post(&format!("/v1/runs/{run}/steps/pay/retry"), json!({})).await;
    let broken = json!({"op": "step", "name": "pay", "error": {"kind": "Boom", "message": "x"}});
    let task = rig.claim("w").await;
    assert_eq!(rig.report(&task, broken.clone()).await["decision"], "retry");
    assert_eq!(retry().await.status, 200);
    let report = json!({"task_id": task["task_id"], "token": task["token"], "op": "log", "msg": "still here"});
    let reply = rig.post("/v1/tasks/report", json!({"worker_id": "w", "reports": [report]})).await;
    let news = &reply.body["news"][task["task_id"].as_str().unwrap()];
    assert_eq!((&news["pay"]["status"], &news["pay"]["due"]), (&json!("retry"), &json!(true)), "{}", reply.body);
    assert_eq!(retry().await.code(), (409, "conflict"), "it has ended");

    assert_eq!(rig.report(&task, broken).await["decision"], "retry");
    assert_eq!(rig.report(&task, json!({"op": "suspend", "seen": 1_000})).await["outcome"], "applied");
    assert_eq!(retry().await.status, 200);
    let task = rig.claim("w").await;
    assert_eq!(task["memo"]["pay"]["due"], true);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_code_run_is_driven_over_plain_calls() {
    let rig = Rig::start().await;
    rig.flow("job", "code: true").await;
    let run = rig.run("job", json!({"x": 1})).await;
    let task = rig.claim("w").await;
    assert_eq!((&task["kind"], &task["handler"], &task["memo"]), (&json!("run"), &json!("job"), &json!({})));
    let step = rig.report(&task, json!({"op": "step", "seq": 1, "name": "pay", "output": 5})).await;
    assert_eq!((&step["outcome"], &step["decision"]), (&json!("applied"), &json!("recorded")));
    let wait = rig.report(&task, json!({"op": "wait", "seq": 2, "name": "hook", "webhook": true})).await;
    let token = wait["token"].as_str().unwrap().to_owned();
    assert!(wait["url"].as_str().unwrap().ends_with(&token));
    let bad = rig.report(&task, json!({"op": "wait", "seq": 3, "name": "x", "webhook": true, "manual": true})).await;
    assert_eq!(bad["outcome"], "invalid");
    for nameless in [
        json!({"op": "wait", "seq": 3, "name": "x", "event": "no such name"}),
        json!({"op": "call", "seq": 3, "name": "x", "handler": "h\n"}),
        json!({"op": "call", "seq": 3, "name": "x", "handler": "h", "queue": "no queue!"}),
        json!({"op": "child", "seq": 3, "name": "x", "flow": "no flow!"}),
    ] {
        let bad = rig.report(&task, nameless.clone()).await;
        assert_eq!(bad["outcome"], "invalid", "no event could ever match {nameless}: {bad}");
    }
    let memo = rig.get(&format!("/v1/tasks/{}/memo", task["task_id"].as_str().unwrap())).await;
    assert_eq!(memo.body["memo"]["pay"]["output"], 5);
    assert_eq!(rig.report(&task, json!({"op": "suspend", "seq": 3})).await["outcome"], "applied");
    assert_eq!(rig.post(&format!("/hooks/{token}"), json!({"ok": true})).await.status, 200);
    let task = rig.claim("w").await;
    assert_eq!(task["memo"]["hook"]["output"], json!({"ok": true}));
    assert_eq!(rig.report(&task, json!({"op": "complete", "seq": 1, "output": "done"})).await["outcome"], "applied");
    assert_eq!(rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await.body["output"], "done");
    rig.server.stop().await;
}

#[tokio::test]
async fn the_function_of_a_code_flow_passes_limits_needs_labels_and_has_a_priority() {
    let rig = Rig::start().await;
    rig.put("/v1/limits/tenant", json!({"concurrency": 1})).await;
    let flow = "code: true\nlimits: [{tenant: '${input.t}'}]\nrequires: [gpu]\npriority: 9";
    rig.flow("job", flow).await;
    rig.flow("plain", "code: true").await;
    rig.run("plain", json!(1)).await;
    for tenant in ["a", "a", "b"] {
        rig.run("job", json!({"t": tenant})).await;
    }
    let register = async |labels: Value| rig.post("/v1/workers", json!({"labels": labels})).await.text("worker_id");
    let (bare, gpu) = (register(json!([])).await, register(json!(["gpu"])).await);
    let claim = async |worker: &str, max: u32| {
        let claimed = rig.post("/v1/tasks/claim", json!({"worker_id": worker, "max": max})).await;
        let tasks = claimed.body["tasks"].as_array().unwrap().clone();
        tasks.iter().map(|task| format!("{} {}", task["flow"], task["input"]["t"])).collect::<Vec<_>>()
    };
    // From the later ones, except the second of tenant `a`, which the limit holds back.
    assert_eq!(claim(&gpu, 2).await, ["\"job\" \"a\"", "\"job\" \"b\""]);
    assert_eq!(claim(&bare, 9).await, ["\"plain\" null"]);
    assert_eq!(claim(&gpu, 9).await, [""; 0]);
    rig.server.stop().await;
}
