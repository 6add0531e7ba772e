//! Registration, heartbeats and reports of workers, in every detail.

use std::collections::BTreeSet;

use eddyline_protocol::Span;
use eddyline_server::ServeArgs;
use serde_json::{Value, json};

use crate::client::{Reply, Rig, args};

async fn heartbeat(rig: &Rig, worker: &str, body: Value) -> Reply {
    rig.post(&format!("/v1/workers/{worker}/heartbeat"), body).await
}

/// Reports on a task, and returns the whole response.
async fn report(rig: &Rig, task: &Value, ops: &[Value]) -> Value {
    let reports: Vec<Value> = ops
        .iter()
        .map(|op| {
            let mut report = op.clone();
            (report["task_id"], report["token"]) = (task["task_id"].clone(), task["token"].clone());
            report
        })
        .collect();
    rig.post("/v1/tasks/report", json!({"worker_id": "w", "reports": reports})).await.body
}

#[tokio::test]
async fn a_heartbeat_brings_news_of_a_code_run_since_its_claim() {
    let rig = Rig::start().await;
    rig.flow("job", "code: true").await;
    rig.run("job", json!(1)).await;
    let task = rig.claim("w").await;
    let id = task["task_id"].as_str().unwrap();
    let beat = heartbeat(&rig, "w", json!({"tasks": [id]})).await;
    assert_eq!((beat.status, &beat.body["news"]), (200, &json!({})));
    report(&rig, &task, &[json!({"op": "call", "name": "embed", "handler": "embed"})]).await;
    let call = rig.claim("v").await;
    assert_eq!(rig.report(&call, json!({"op": "complete", "output": 7})).await["outcome"], "applied");
    let beat = heartbeat(&rig, "w", json!({"tasks": [id]})).await;
    assert_eq!(beat.body["news"][id]["embed"]["output"], 7, "{}", beat.body);
    let n = beat.body["news"][id]["embed"]["n"].clone();
    let beat = heartbeat(&rig, "w", json!({"tasks": [id], "seen": {id: n}})).await;
    assert_eq!(beat.body["news"], json!({}), "beyond what the worker has there is nothing");
    rig.server.stop().await;
}

#[tokio::test]
async fn news_is_what_a_worker_did_not_report_itself_and_what_it_may_suspend_on() {
    let rig = Rig::start().await;
    rig.flow("kid", "steps: {a: {set: 1}}").await;
    rig.flow("job", "code: true\nstep_retry: {attempts: 3, initial: 1h, max: 1h}").await;
    let run = rig.run("job", json!(1)).await;
    let task = rig.claim("w").await;
    let id = task["task_id"].as_str().unwrap();
    let beat = async || heartbeat(&rig, "w", json!({"tasks": [id]})).await.body["news"].clone();
    report(&rig, &task, &[json!({"op": "step", "name": "a", "output": 1})]).await;
    assert_eq!(beat().await, json!({}));
    let told = report(&rig, &task, &[json!({"op": "suspend"})]).await;
    assert_eq!((&told["outcomes"][0]["outcome"], &told["news"]), (&json!("invalid"), &json!({})));

    let broken = json!({"op": "step", "name": "pay", "error": {"kind": "Boom", "message": "x"}});
    report(&rig, &task, &[broken]).await;
    assert_eq!(beat().await, json!({}), "it knows that it is to be tried again");
    let by_hand = rig.post(&format!("/v1/runs/{run}/steps/pay/complete"), json!({"output": 5})).await;
    assert_eq!(by_hand.status, 200, "{}", by_hand.body);
    let news = beat().await;
    assert_eq!((news[id].as_object().unwrap().len(), &news[id]["pay"]["output"]), (1, &json!(5)), "{news}");

    let seen = news[id]["pay"]["n"].clone();
    let child = json!({"op": "child", "name": "kid", "flow": "kid", "detached": true, "seen": seen});
    report(&rig, &task, &[child]).await;
    let told = report(&rig, &task, &[json!({"op": "suspend", "seen": seen})]).await;
    assert_eq!(told["outcomes"][0]["outcome"], "applied", "the child is being started, or has started: {told}");
    let kid = rig.claim("w").await["memo"]["kid"].clone();
    assert_eq!(kid["status"], "completed", "it is offered again when the child has started: {kid}");
    assert!(kid["output"]["run_id"].is_string(), "{kid}");
    rig.server.stop().await;
}

#[tokio::test]
async fn the_answer_to_reports_tells_neither_what_they_say_nor_what_was_seen() {
    let rig = Rig::start().await;
    rig.flow("job", "code: true").await;
    rig.run("job", json!(1)).await;
    let task = rig.claim("w").await;
    let id = task["task_id"].as_str().unwrap();
    let told = report(&rig, &task, &[json!({"op": "step", "seq": 1, "name": "a", "output": 1})]).await;
    assert_eq!((&told["outcomes"][0]["outcome"], &told["news"]), (&json!("applied"), &json!({})));
    let told = report(&rig, &task, &[json!({"op": "step", "seq": 2, "name": "b", "output": 2})]).await;
    assert_eq!(told["news"], json!({}), "nor what the worker has said before");
    let told = report(&rig, &task, &[json!({"op": "step", "seq": 3, "name": "c", "output": 3, "seen": 1})]).await;
    assert_eq!(told["news"], json!({}));
    // A worker that reports an entry that is already known gets its result.
    let told = report(&rig, &task, &[json!({"op": "step", "seq": 4, "name": "a", "output": "another"})]).await;
    assert_eq!((&told["outcomes"][0]["duplicate"], &told["news"][id]["a"]["output"]), (&json!(true), &json!(1)));
    let told = report(&rig, &task, &[json!({"op": "complete", "seq": 5})]).await;
    assert_eq!((&told["outcomes"][0]["outcome"], &told["news"]), (&json!("applied"), &json!({})));
    rig.server.stop().await;
}

#[tokio::test]
async fn any_text_names_a_claim_and_the_same_text_of_others_names_another() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    for n in 0..3 {
        rig.run("f", json!(n)).await;
    }
    let claim = async |worker: &str| {
        let ask = json!({"worker_id": worker, "request_id": "r1", "wait_ms": 20_000});
        rig.post("/v1/tasks/claim", ask).await.body["tasks"][0]["task_id"].clone()
    };
    let (ann, bob) = (claim("ann").await, claim("bob").await);
    assert!(ann.is_string() && bob.is_string() && ann != bob);
    assert_eq!((claim("ann").await, claim("bob").await), (ann, bob));
    let other = rig.header("eddyline-namespace", "other");
    assert_eq!(
        other.post("/v1/tasks/claim", json!({"worker_id": "ann", "request_id": "r1"})).await.body,
        json!({"tasks": []})
    );
    for (text, status) in [("ü".repeat(200), 200), ("x".repeat(201), 400), (String::new(), 400)] {
        assert_eq!(rig.post("/v1/tasks/claim", json!({"max": 0, "request_id": text})).await.status, status);
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn a_worker_that_never_registered_is_told_what_became_of_each_of_its_tasks() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let run = rig.run("f", json!(1)).await;
    let task = rig.claim("passer-by").await;
    rig.post(&format!("/v1/runs/{run}/cancel"), json!({})).await;
    let tasks = json!([task["task_id"], "nonsense", "0198c0de-0000-7000-8000-000000000000.1"]);
    let beat = heartbeat(&rig, "passer-by", json!({ "tasks": tasks })).await;
    assert_eq!((beat.status, &beat.body["cancel"]), (200, &json!([task["task_id"]])));
    assert_eq!(beat.body["lost"], json!(["nonsense", "0198c0de-0000-7000-8000-000000000000.1"]));
    assert_eq!(heartbeat(&rig, "nobody", json!({})).await.status, 404, "neither registered nor with a task");
    rig.server.stop().await;
}

#[tokio::test]
async fn counters_that_a_heartbeat_leaves_out_stay() {
    let rig = Rig::start().await;
    let id = rig.post("/v1/workers", json!({})).await.text("worker_id");
    heartbeat(&rig, &id, json!({"completed": 4, "failed": 2})).await;
    heartbeat(&rig, &id, json!({"tasks": ["nonsense"]})).await;
    heartbeat(&rig, &id, json!({"failed": 3})).await;
    let listed = rig.get("/v1/workers").await;
    let mine = &listed.items()[0];
    assert_eq!((&mine["completed"], &mine["failed"], &mine["tasks"]), (&json!(4), &json!(3), &json!(0)));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_worker_is_online_while_its_claim_waits() {
    let rig = Rig::with(ServeArgs { lease: Some(Span::from_ms(300)), ..args() }).await;
    let id = rig.post("/v1/workers", json!({})).await.text("worker_id");
    let (client, worker) = (rig.client.clone(), id.clone());
    let claim = tokio::spawn(async move {
        client.post("/v1/tasks/claim", json!({"worker_id": worker, "wait_ms": 1_800})).await.status
    });
    // Twice as long as it takes to go offline.
    while !claim.is_finished() {
        assert_eq!(rig.get("/v1/workers").await.items()[0]["status"], "online");
    }
    assert_eq!(claim.await.unwrap(), 200);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_worker_brings_its_code_flows_along() {
    let rig = Rig::start().await;
    rig.flow("steps", "steps: {a: {run: a}}").await;
    rig.flow("mine", "{code: true, timeout: 5m}").await;
    let register = async |flows: Value| rig.post("/v1/workers", json!({"queues": ["slow"], "flows": flows})).await;
    let definition = async |name: &str| rig.get(&format!("/v1/flows/{name}")).await.body["definition"].clone();
    assert_eq!(register(json!(["new", "mine", "steps"])).await.status, 201);
    assert_eq!(definition("new").await, json!({"name": "new", "code": true, "queue": "slow"}));
    assert_eq!(definition("mine").await["queue"], json!(null), "what is there is left alone");
    assert_eq!(rig.get("/v1/flows/steps").await.body["kind"], "graph");
    assert_eq!(register(json!({"built": "b7"})).await.status, 201);
    assert_eq!(definition("built").await["code"], true);
    let whole = json!([{"name": "mine", "build": "b7", "timeout": "1m", "queue": "fast"}, "new"]);
    assert_eq!(register(whole.clone()).await.status, 201);
    let version = rig.get("/v1/flows/mine").await.text("version");
    assert_eq!(definition("mine").await["queue"], "fast");
    assert_eq!(register(whole).await.status, 201);
    assert_eq!(rig.get("/v1/flows/mine").await.text("version"), version, "the same is the same version");
    assert_eq!(register(json!([{"name": "steps", "timeout": "1m"}])).await.status, 409);

    let wrong = register(json!([{"name": "a b"}, {"name": "x", "timout": "1m"}, "good"])).await;
    let details = wrong.body["error"]["details"].as_array().unwrap();
    let paths: Vec<&str> = details.iter().filter_map(|problem| problem["path"].as_str()).collect();
    assert_eq!((wrong.status, paths), (422, vec!["flows.a b.name", "flows.x.timout"]));
    for flows in [json!(5), json!([5]), json!([{"build": "b"}])] {
        let wrong = register(flows).await;
        assert_eq!(wrong.status, 400);
        assert!(wrong.body["error"]["message"].as_str().unwrap().contains("expected the code flows"), "{}", wrong.body);
    }
    // Tasks of the flows it registered reach it.
    rig.run("new", json!(1)).await;
    let worker = register(json!(["new"])).await.text("worker_id");
    assert_eq!(rig.claim(&worker).await["handler"], "new");
    // A worker of the default queue names no queues.
    rig.post("/v1/workers", json!({"flows": ["plain"]})).await;
    assert_eq!(definition("plain").await, json!({"name": "plain", "code": true}));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_key_of_a_worker_is_enough_to_bring_code_flows() {
    let rig = Rig::with_keys().await;
    let key = rig.post("/v1/keys", json!({"name": "w", "scopes": ["worker"]})).await.text("key");
    assert_eq!(rig.with_key(&key).post("/v1/workers", json!({"flows": ["job"]})).await.status, 201);
    assert_eq!(rig.get("/v1/flows/job").await.body["kind"], "code");
    rig.server.stop().await;
}

#[tokio::test]
async fn reports_that_name_no_task_are_each_told_what_is_wrong() {
    let rig = Rig::start().await;
    let reports = json!(["x", 5, null, [], {}, {"op": "complete"}]);
    let reply = rig.post("/v1/tasks/report", json!({"worker_id": "w", "reports": reports})).await;
    for outcome in reply.body["outcomes"].as_array().unwrap() {
        assert_eq!(outcome["outcome"], "invalid", "{outcome}");
        let message = outcome["message"].as_str().unwrap();
        assert!(message.contains("expected a report: an object") || message == "missing field `task_id`", "{message}");
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn an_event_is_published_under_a_name_that_events_can_have() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    rig.run("f", json!(1)).await;
    let task = rig.claim("w").await;
    for name in ["", "a b", "ö", "a/b", "x".repeat(129).as_str()] {
        let said = rig.report(&task, json!({"op": "publish", "name": name})).await;
        assert_eq!(said["outcome"], "invalid", "{name}");
        assert!(said["message"].as_str().unwrap().contains("name"), "{said}");
    }
    assert_eq!(rig.report(&task, json!({"op": "publish", "name": "paid.in_full-1"})).await["outcome"], "applied");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_failure_that_says_little_is_still_one_that_people_understand() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a, retry: {attempts: 1}}}").await;
    for (said, kind, message) in [
        (json!({}), "Error", "failed without an error message"),
        (json!({"error": null}), "Error", "failed without an error message"),
        (json!({"error": "out of paper"}), "Error", "out of paper"),
        (json!({"error": {"kind": "Jam"}}), "Jam", "failed without an error message"),
    ] {
        let run = rig.run("f", json!(1)).await;
        let task = rig.claim("w").await;
        let mut op = said.clone();
        op["op"] = json!("fail");
        assert_eq!(rig.report(&task, op).await["outcome"], "applied", "{said}");
        let error = rig.get(&format!("/v1/runs/{run}")).await.body["error"].clone();
        assert_eq!((&error["kind"], &error["message"]), (&json!(kind), &json!(message)), "{said}");
    }
    rig.run("f", json!(1)).await;
    let task = rig.claim("w").await;
    let said = rig.report(&task, json!({"op": "fail", "error": 5})).await;
    assert_eq!(said["outcome"], "invalid");
    assert!(said["message"].as_str().unwrap().starts_with("expected an error: an object"), "{said}");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_claim_beside_reports_looks_where_it_says() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a, queue: fast}, b: {run: b, queue: slow}}").await;
    rig.run("f", json!(1)).await;
    let asked = json!({"worker_id": "w", "reports": [], "claim": {"max": 5, "wait_ms": 20_000, "queues": ["slow"]}});
    let reply = rig.post("/v1/tasks/report", asked).await;
    let steps: Vec<&Value> = reply.body["tasks"].as_array().unwrap().iter().map(|task| &task["step"]).collect();
    assert_eq!(steps, ["b"]);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_payload_near_its_limit_is_taken_with_a_warning() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a, emits: [told]}}").await;
    rig.flow("job", "code: true").await;
    rig.run("f", json!(1)).await;
    let task = rig.claim("w").await;
    let large = "x".repeat(1 << 20);
    let said = rig.report(&task, json!({"op": "emit", "event": "told", "payload": "small"})).await;
    assert_eq!((&said["outcome"], &said["warning"]), (&json!("applied"), &json!(null)));
    let said = rig.report(&task, json!({"op": "publish", "name": "e", "payload": large})).await;
    assert_eq!(said["outcome"], "applied");
    assert!(said["warning"].as_str().unwrap().starts_with("the payload is 1048578 bytes"), "{said}");
    let said = rig.report(&task, json!({"op": "complete", "output": "x".repeat(2 << 20)})).await;
    assert_eq!((&said["outcome"], &said["warning"]), (&json!("invalid"), &json!(null)));
    let emits = json!([{"event": "told", "payload": large}]);
    let said = rig.report(&task, json!({"op": "complete", "output": 1, "emits": emits})).await;
    assert!(said["warning"].as_str().unwrap().starts_with("the payload of told is"), "{said}");

    rig.run("job", json!(1)).await;
    let task = rig.claim("w").await;
    let said = rig.report(&task, json!({"op": "step", "name": "a", "output": large})).await;
    assert!(said["warning"].as_str().unwrap().starts_with("the output is"), "{said}");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_task_says_what_no_worker_has_of_what_it_asks_for() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {shot: {queue: pictures, run: render, requires: [gpu, eu]}}").await;
    let run = rig.run("f", json!(1)).await;
    let waits = async |run: &str| rig.get(&format!("/v1/runs/{run}")).await.body["waiting_for"][0]["waits_for"].clone();
    let register = async |worker: serde_json::Value| {
        let said = rig.post("/v1/workers", worker).await;
        assert_eq!(said.status, 201);
        said.text("worker_id")
    };
    assert_eq!(waits(&run).await["lack"], json!({"what": "queue"}));
    register(json!({"queues": ["other"], "handlers": ["render"], "labels": ["gpu", "eu"]})).await;
    assert_eq!(waits(&run).await["lack"], json!({"what": "queue"}), "it takes from another");
    register(json!({"queues": ["pictures"], "handlers": ["paint"], "labels": ["gpu", "eu"]})).await;
    assert_eq!(waits(&run).await["lack"], json!({"what": "handler"}));
    register(json!({"queues": ["pictures"], "labels": ["gpu"]})).await;
    assert_eq!(waits(&run).await["lack"], json!({"what": "labels", "labels": ["gpu", "eu"]}));
    let steps = rig.get(&format!("/v1/runs/{run}/steps")).await;
    assert_eq!(steps.items()[0]["waits_for"], waits(&run).await, "of the step as of the run");

    // A missing worker is shown in addition to what blocks the task for everyone.
    rig.post("/v1/queues/pictures/pause", json!({})).await;
    let both = waits(&run).await;
    assert_eq!((&both["bound"]["what"], &both["lack"]["what"]), (&json!("paused"), &json!("labels")));
    rig.post("/v1/queues/pictures/resume", json!({})).await;

    let able = register(json!({"queues": ["pictures"], "handlers": ["render"], "labels": ["eu", "x", "gpu"]})).await;
    assert!(waits(&run).await.get("lack").is_none());
    rig.post(&format!("/v1/workers/{able}/drain"), json!({})).await;
    assert_eq!(waits(&run).await["lack"]["what"], "labels", "a draining worker gets no more tasks");
    rig.delete(&format!("/v1/workers/{able}")).await;
    let able = register(json!({"queues": ["pictures"], "handlers": ["render"], "labels": ["gpu", "eu"]})).await;
    assert_eq!(rig.claim(&able).await["step"], "shot");
    assert!(waits(&run).await.get("lack").is_none(), "nothing is missing while a worker holds the task");
    rig.delete(&format!("/v1/workers/{able}")).await;
    assert!(waits(&run).await.get("lack").is_none(), "until its lease ends");
    rig.server.stop().await;
}

#[tokio::test]
async fn fields_are_known_by_their_names_and_words_are_texts() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a, emits: [x]}}").await;
    rig.run("f", json!(1)).await;
    let task = rig.claim("w").await;
    for (op, expected) in [
        (json!({"op": 0, "output": 5}), "expected a string"),
        (json!({"op": 1}), "expected a string"),
        (json!({"op": {"complete": null}}), "expected a string"),
        (json!({"op": ["complete"]}), "expected a string"),
        (json!({"op": null}), "expected a string"),
        (json!({}), "missing field `op`"),
        (json!({"op": "complete", "logs": [["info", "m"]]}), "invalid type: sequence, expected an object"),
        (json!({"op": "complete", "logs": ["m"]}), "invalid type: string \"m\", expected an object"),
        (json!({"op": "complete", "emits": [["x", 1]]}), "invalid type: sequence, expected an object"),
        (json!({"op": "complete", "emits": [null]}), "invalid type: null, expected an object"),
        (json!({"op": "fail", "error": ["Kind", "message"]}), "expected an error"),
    ] {
        let said = rig.report(&task, op.clone()).await;
        assert_eq!(said["outcome"], "invalid", "{op}: {said}");
        assert!(said["message"].as_str().unwrap().contains(expected), "{op}: {said}");
    }
    for scopes in [json!([{"admin": null}]), json!([4]), json!([["admin"]]), json!({"admin": null}), json!([null])] {
        let said = rig.post("/v1/keys", json!({"name": "k", "scopes": scopes})).await;
        assert_eq!(said.code(), (400, "bad_request"), "{scopes}");
    }
    let said = rig.put("/v1/queues/q", json!({"rate": [10, "1s", 5]})).await;
    assert_eq!(said.code(), (400, "bad_request"));
    let said = rig.post("/v1/workers", json!({"queues": ["two words"]})).await;
    assert_eq!(said.code(), (422, "invalid"), "no queue can have this name");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_field_of_a_report_that_is_null_is_as_good_as_left_out() {
    let rig = Rig::start().await;
    rig.flow("job", "code: true").await;
    rig.run("job", json!(1)).await;
    let task = rig.claim("w").await;
    let waits = json!({"op": "wait", "name": "e", "event": "paid", "webhook": null, "manual": null, "key": null});
    let child = json!({"op": "child", "name": "c", "flow": "job", "detached": null, "input": null});
    let beat = heartbeat(&rig, "w", json!({"tasks": [task["task_id"]], "seen": null, "completed": null})).await;
    assert_eq!((beat.status, &beat.body["lost"]), (200, &json!([])));
    let nobody = rig.post("/v1/tasks/claim", json!({"worker_id": null, "queues": null, "wait_ms": null})).await;
    assert_eq!(nobody.body, json!({"tasks": []}));
    for op in [
        json!({"op": "log", "msg": "m", "level": null, "meta": null, "seq": null, "seen": null}),
        json!({"op": "progress", "done": null, "total": null, "msg": null}),
        json!({"op": "step", "name": "s", "output": 1, "error": null, "retryable": null, "retry_after": null}),
        json!({"op": "sleep", "name": "z", "for": "1s", "until": null}),
        json!({"op": "wait", "name": "h", "webhook": true, "event": null, "manual": null, "timeout": null}),
        waits,
        child,
        json!({"op": "defer", "after": null, "limit": null}),
    ] {
        let said = rig.report(&task, op.clone()).await;
        assert_eq!(said["outcome"], "applied", "{op}: {said}");
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn what_a_worker_lost_is_told_from_what_was_called_off() {
    let rig = Rig::with(ServeArgs { lease: Some(Span::from_ms(400)), ..args() }).await;
    let other = "b: {await: {manual: true}}";
    rig.flow("lease", &format!("steps: {{a: {{queue: q, retry: {{attempts: 1}}}}, {other}}}")).await;
    rig.flow("time", &format!("steps: {{a: {{queue: q, timeout: 100ms, retry: {{attempts: 1}}}}, {other}}}")).await;
    rig.flow("ends", "steps: {a: {queue: q, retry: {attempts: 1}}}").await;
    let claim = async || {
        let claim = json!({"worker_id": "w1", "queues": ["q"], "wait_ms": 20_000});
        rig.post("/v1/tasks/claim", claim).await.body["tasks"][0].clone()
    };
    for flow in ["lease", "time", "ends"] {
        let run = rig.run(flow, json!(1)).await;
        let task = claim().await;
        while rig.get(&format!("/v1/runs/{run}/steps")).await.items()[0]["status"] != "failed" {}
        let beat = heartbeat(&rig, "w1", json!({"tasks": [task["task_id"]]})).await.body;
        assert_eq!((&beat["lost"], &beat["cancel"]), (&json!([task["task_id"]]), &json!([])), "{flow}");
    }
    // After the final report the worker no longer holds the task either.
    for op in [json!({"op": "complete"}), json!({"op": "fail", "error": "no"})] {
        rig.run("lease", json!(1)).await;
        let task = claim().await;
        assert_eq!(rig.report(&task, op).await["outcome"], "applied");
        let beat = heartbeat(&rig, "w1", json!({"tasks": [task["task_id"]]})).await.body;
        assert_eq!((&beat["lost"], &beat["cancel"]), (&json!([task["task_id"]]), &json!([])));
    }
    // By hand, while the worker is working on it.
    for (path, body) in [
        ("steps/a/complete", json!({"output": 1})),
        ("steps/a/fail", json!({"error": "no"})),
        ("steps/a/skip", json!({})),
        ("cancel", json!({})),
    ] {
        let run = rig.run("lease", json!(1)).await;
        let task = claim().await;
        assert_eq!(rig.post(&format!("/v1/runs/{run}/{path}"), body).await.status, 200);
        let beat = heartbeat(&rig, "w1", json!({"tasks": [task["task_id"]]})).await.body;
        assert_eq!((&beat["lost"], &beat["cancel"]), (&json!([]), &json!([task["task_id"]])), "{path}");
    }
    rig.flow("job", "{code: true, queue: q}").await;
    let run = rig.run("job", json!(1)).await;
    let task = claim().await;
    rig.post(&format!("/v1/runs/{run}/cancel"), json!({})).await;
    let beat = heartbeat(&rig, "w1", json!({"tasks": [task["task_id"]]})).await.body;
    assert_eq!((&beat["lost"], &beat["cancel"]), (&json!([]), &json!([task["task_id"]])), "a function");
    rig.server.stop().await;
}

#[tokio::test]
async fn the_same_instance_is_the_same_worker_and_without_one_each_is_new() {
    let rig = Rig::start().await;
    let register = async |body: Value| {
        let reply = rig.post("/v1/workers", body).await;
        assert_eq!(reply.status, 201, "{}", reply.body);
        reply.text("worker_id")
    };
    let nameless = json!({"host": "web", "pid": 1});
    assert_ne!(register(nameless.clone()).await, register(nameless).await);
    let one = register(json!({"host": "web", "pid": 1, "instance": "7c1e"})).await;
    assert_ne!(register(json!({"host": "web", "pid": 1, "instance": "7c1f"})).await, one);
    assert_eq!(rig.post(&format!("/v1/workers/{one}/drain"), json!({})).await.status, 200);
    assert_eq!(register(json!({"host": "renamed", "instance": "7c1e"})).await, one);
    let listed = rig.get("/v1/workers").await;
    let again = listed.items().iter().find(|worker| worker["worker_id"] == json!(one)).unwrap();
    assert_eq!((&again["host"], &again["status"]), (&json!("renamed"), &json!("draining")), "{again}");
    assert!(!listed.body.to_string().contains("7c1e"), "who knows the instance can connect as its worker");
    let other = rig.header("eddyline-namespace", "other");
    assert_ne!(other.post("/v1/workers", json!({"instance": "7c1e"})).await.text("worker_id"), one);
    assert_eq!(rig.post("/v1/workers", json!({"instance": ""})).await.code(), (422, "invalid"));
    rig.server.stop().await;
}

#[tokio::test]
async fn workers_are_listed_by_queue_and_status_and_shown_one_by_one() {
    let rig = Rig::start().await;
    let register = async |body: Value| rig.post("/v1/workers", body).await.text("worker_id");
    let red = register(json!({"queues": ["red"]})).await;
    let both = register(json!({"queues": ["red", "blue"]})).await;
    let blue = register(json!({"queues": ["blue"]})).await;
    rig.post(&format!("/v1/workers/{blue}/drain"), json!({})).await;
    let found = async |query: &str| {
        let page = rig.get(&format!("/v1/workers?count=true&{query}")).await;
        let ids: BTreeSet<String> =
            page.items().iter().map(|item| item["worker_id"].as_str().unwrap().into()).collect();
        assert_eq!(page.body["total"], ids.len(), "{query}: {}", page.body);
        ids
    };
    let of = |ids: &[&String]| ids.iter().map(|id| (*id).clone()).collect::<BTreeSet<_>>();
    assert_eq!(found("queue=red").await, of(&[&red, &both]));
    assert_eq!(found("queue=blue&status=online").await, of(&[&both]));
    assert_eq!(found("status=draining").await, of(&[&blue]));
    assert_eq!(found("status=draining&status=online").await.len(), 3);
    assert_eq!(found("status=offline").await.len() + found("queue=green").await.len(), 0);
    assert_eq!(rig.get("/v1/workers?status=asleep").await.code(), (400, "bad_request"));
    // Page by page, each item once.
    let (mut seen, mut cursor) = (BTreeSet::new(), String::new());
    loop {
        let page = rig.get(&format!("/v1/workers?queue=red&limit=1&cursor={cursor}")).await;
        seen.extend(page.items().iter().map(|item| item["worker_id"].as_str().unwrap().to_owned()));
        let Some(next) = page.body["next"].as_str() else { break };
        cursor = next.to_owned();
    }
    assert_eq!(seen, of(&[&red, &both]));
    let shown = rig.get(&format!("/v1/workers/{both}")).await;
    assert_eq!((&shown.body["worker_id"], &shown.body["queues"]), (&json!(both), &json!(["red", "blue"])));
    assert_eq!(rig.get("/v1/workers/nobody").await.code(), (404, "not_found"));
    let other = rig.header("eddyline-namespace", "other");
    assert_eq!(other.get(&format!("/v1/workers/{both}")).await.code(), (404, "not_found"));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_worker_never_has_more_than_max_concurrent_tasks_whichever_claims_it_makes() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    for n in 0..8 {
        rig.run("f", json!(n)).await;
    }
    let id = rig.post("/v1/workers", json!({"max_concurrent": 3})).await.text("worker_id");
    let claim = async |max: u32, wait_ms: u32| {
        let ask = json!({"worker_id": id, "max": max, "wait_ms": wait_ms});
        rig.post("/v1/tasks/claim", ask).await.body["tasks"].as_array().unwrap().clone()
    };
    let held = async || rig.get(&format!("/v1/workers/{id}")).await.body["tasks"].clone();
    assert_eq!(held().await, 0);
    let mut tasks = claim(2, 0).await;
    assert_eq!((tasks.len(), held().await), (2, json!(2)));
    // Both at the same time: together they get the one task that there is room for.
    let (one, other) = tokio::join!(claim(3, 50), claim(3, 50));
    assert_eq!((one.len() + other.len(), held().await), (1, json!(3)));
    assert_eq!(claim(1, 0).await.len() + claim(1, 50).await.len(), 0);
    // A full worker does not block one with free slots.
    assert_eq!(rig.claim("another").await["step"], "a");
    // A finished task frees a slot: in the same request, and for a waiting claim.
    let done = |task: &Value| json!({"task_id": task["task_id"], "token": task["token"], "op": "complete"});
    let reports = json!({"worker_id": id, "reports": [done(&tasks.pop().unwrap())], "claim": {"max": 5}});
    let reply = rig.post("/v1/tasks/report", reports).await;
    assert_eq!(reply.body["tasks"].as_array().unwrap().len(), 1, "{}", reply.body);
    let last = tasks.pop().unwrap();
    let finish = async {
        rig.until_waiting(1).await;
        rig.report(&last, json!({"op": "complete"})).await
    };
    let (waited, outcome) = tokio::join!(claim(5, 20_000), finish);
    assert_eq!((waited.len(), &outcome["outcome"]), (1, &json!("applied")));
    assert_eq!(held().await, 3);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_worker_is_offline_after_one_lease_of_silence() {
    let rig = Rig::with(ServeArgs { lease: Some(Span::from_ms(600)), ..args() }).await;
    let since = std::time::Instant::now();
    let id = rig.post("/v1/workers", json!({})).await.text("worker_id");
    let status = async || rig.get(&format!("/v1/workers/{id}")).await.text("status");
    assert_eq!(status().await, "online");
    while status().await != "offline" {
        assert!(since.elapsed() < std::time::Duration::from_secs(10), "it is never offline");
    }
    assert!(since.elapsed() >= std::time::Duration::from_millis(600), "{:?}", since.elapsed());
    heartbeat(&rig, &id, json!({})).await;
    assert_eq!(status().await, "online");
    rig.server.stop().await;
}
