//! Code runs over the API: numbers, options, letting go, releasing, unwinding, builds.

use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio_tungstenite::connect_async;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use crate::client::{Client, Reply, Rig};

const LONG: Duration = Duration::from_secs(30);

/// Reports on one task, in one request.
async fn reports(client: &Client, task: &Value, ops: &[Value]) -> Reply {
    let report = |op: &Value| {
        let mut report = json!({"task_id": task["task_id"], "token": task["token"]});
        report.as_object_mut().unwrap().extend(op.as_object().unwrap().clone());
        report
    };
    let reports: Vec<Value> = ops.iter().map(report).collect();
    let reply = client.post("/v1/tasks/report", json!({"worker_id": "w", "reports": reports})).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply
}

fn verdicts(reply: &Reply) -> Vec<&str> {
    let outcomes = reply.body["outcomes"].as_array().unwrap();
    outcomes.iter().map(|outcome| outcome["outcome"].as_str().unwrap()).collect()
}

#[tokio::test]
async fn every_outcome_of_an_entry_has_its_number_and_news_below_it_comes_along() {
    let rig = Rig::start().await;
    rig.flow("job", "code: true").await;
    let run = rig.run("job", json!(1)).await;
    let task = rig.claim("w").await;
    assert_eq!((&task["intent"], &task["attempts"], &task["memo"]), (&json!(run), &json!(5), &json!({})));
    assert!(task["started_at"].is_string() && task.get("memo_next").is_none() && task.get("unwind").is_none());
    let asked = reports(
        &rig,
        &task,
        &[
            json!({"op": "call", "seq": 1, "name": "embed", "handler": "embed", "input": 1}),
            json!({"op": "sleep", "seq": 2, "name": "nap", "for": "1h"}),
            json!({"op": "wait", "seq": 3, "name": "gate", "manual": true}),
            json!({"op": "publish", "seq": 4, "as": "told", "name": "paid", "payload": 7}),
        ],
    )
    .await;
    let outcomes = asked.body["outcomes"].as_array().unwrap().clone();
    assert_eq!(outcomes.iter().map(|outcome| outcome["n"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2, 3, 4]);
    assert!(outcomes.iter().all(|outcome| outcome["at"].is_string()), "{}", asked.body);

    let call = rig.claim("other").await;
    assert_eq!(call["key"], json!(format!("{run}/embed")));
    assert_eq!(rig.report(&call, json!({"op": "complete", "output": "vector"})).await["outcome"], "applied");
    // The worker does not know the result; the response to its next report has it, as its number is lower.
    let paid = reports(&rig, &task, &[json!({"op": "step", "seq": 5, "name": "pay", "output": 5, "seen": 4})]).await;
    let n = paid.body["outcomes"][0]["n"].as_u64().unwrap();
    let news = &paid.body["news"][task["task_id"].as_str().unwrap()];
    assert_eq!(news.as_object().unwrap().keys().collect::<Vec<_>>(), ["embed"], "{}", paid.body);
    assert_eq!((&news["embed"]["output"], news["embed"]["n"].as_u64().unwrap()), (&json!("vector"), n - 1));
    // The reply was lost: the same report gets the same number.
    let again = reports(&rig, &task, &[json!({"op": "step", "seq": 5, "name": "pay", "output": 6})]).await;
    assert_eq!((&again.body["outcomes"][0]["n"], &again.body["outcomes"][0]["duplicate"]), (&json!(n), &json!(true)));

    assert_eq!(rig.report(&task, json!({"op": "release", "seq": 6})).await["outcome"], "applied");
    let task = rig.claim("w").await;
    assert_eq!(task["attempt"], 1, "a release does not count");
    let (memo, token) = (&task["memo"], outcomes[2]["token"].as_str().unwrap());
    assert_eq!((&memo["pay"]["output"], &memo["pay"]["n"]), (&json!(5), &json!(n)));
    assert_eq!((&memo["told"]["kind"], &memo["told"]["status"]), (&json!("publish"), &json!("completed")));
    assert_eq!((memo["gate"]["token"].as_str().unwrap(), &memo["gate"]["url"]), (token, &outcomes[2]["url"]));
    // A replay publishes nothing again.
    let told = reports(&rig, &task, &[json!({"op": "publish", "as": "told", "name": "paid", "payload": 7})]).await;
    assert_eq!(told.body["outcomes"][0]["duplicate"], true);
    let event = async |n: u32| rig.get(&format!("/v1/events/{run}.{n}")).await.status;
    assert_eq!((event(1).await, event(2).await), (200, 404));

    // Losers of a race are let go; that is no news and frees nobody twice.
    let let_go = |name: &str| json!({"op": "let_go", "name": name});
    let told = reports(&rig, &task, &[let_go("nap"), let_go("gate"), let_go("nap"), let_go("nothing")]).await;
    assert_eq!(verdicts(&told), ["applied", "applied", "applied", "invalid"]);
    assert_eq!(told.body["outcomes"][2]["duplicate"], true, "{}", told.body);
    assert_eq!(told.body["news"], json!({}));
    assert_eq!(rig.report(&task, json!({"op": "suspend"})).await["outcome"], "invalid", "nothing is pending");
    assert_eq!(rig.post(&format!("/v1/gates/{token}"), json!(1)).await.code(), (409, "conflict"));
    assert_eq!(rig.report(&task, json!({"op": "complete"})).await["outcome"], "applied");
    rig.server.stop().await;
}

#[tokio::test]
async fn calls_and_children_take_options_and_steps_a_policy_of_their_own() {
    let rig = Rig::start().await;
    rig.flow("job", "code: true\nstep_retry: {attempts: 9}").await;
    rig.flow("kid", "steps: {a: {run: a}}").await;
    rig.put("/v1/limits/tenant", json!({"concurrency": 1})).await;
    let run = rig.run("job", json!(1)).await;
    let task = rig.claim("w").await;
    let call = |name: &str| {
        json!({"op": "call", "name": name, "handler": "h", "queue": "q", "retry": {"attempts": 1}, "timeout": "1m",
               "priority": 3, "limits": [{"tenant": 7}], "requires": ["gpu"], "key": {"b": 1, "a": 2}})
    };
    let broken = json!({"kind": "Boom", "message": "x"});
    let told = reports(
        &rig,
        &task,
        &[
            call("one"),
            call("two"),
            json!({"op": "child", "name": "kid", "flow": "kid", "external_id": "e1", "tags": ["t"], "priority": 4,
                   "metadata": {"m": 1}, "queue": "kids", "deadline": "1h", "unique": {"key": "u"}}),
            json!({"op": "step", "name": "flaky", "error": broken, "retry": {"attempts": 2, "initial": "1h", "max": "1h"}}),
            json!({"op": "step", "name": "once", "error": broken, "retry": {"attempts": 1}}),
            json!({"op": "wait", "name": "old", "event": "ping", "since": "10m"}),
        ],
    )
    .await;
    assert_eq!(verdicts(&told), ["applied"; 6], "{}", told.body);
    let decisions: Vec<&Value> = told.body["outcomes"].as_array().unwrap().iter().map(|it| &it["decision"]).collect();
    assert_eq!((decisions[3], decisions[4]), (&json!("retry"), &json!("failed")));
    for (bad, why) in [
        (json!({"op": "call", "name": "x", "handler": "h", "retry": {"attempts": 0}}), "retry"),
        (json!({"op": "call", "name": "x", "handler": "h", "timeout": 0}), "timeout"),
        (json!({"op": "call", "name": "x", "handler": "h", "limits": [{"a": 1, "b": 2}]}), "limits"),
        (json!({"op": "call", "name": "x", "handler": "h", "limits": ["no limit!"]}), "not a name"),
        (json!({"op": "child", "name": "x", "flow": "kid", "unique": {"key": ""}}), "unique"),
        (json!({"op": "child", "name": "x", "flow": "kid", "deadline": "2030-01-01T00:00:00Z"}), "deadline"),
        (json!({"op": "wait", "name": "x", "manual": true, "since": "run"}), "since"),
        (json!({"op": "step", "name": "undo:one", "output": 1}), "unwind"),
        (json!({"op": "let_go", "name": "x"}), "no entry"),
    ] {
        let outcome = rig.report(&task, bad.clone()).await;
        let message = outcome["message"].as_str().unwrap_or_else(|| panic!("{bad} was not refused: {outcome}"));
        assert!(outcome["outcome"] == "invalid" && message.contains(why), "{bad}: {outcome}");
    }
    let register = json!({"queues": ["q"], "labels": ["gpu"]});
    let gpu = rig.post("/v1/workers", register).await.text("worker_id");
    let claimed = rig.post("/v1/tasks/claim", json!({"worker_id": gpu, "max": 2, "wait_ms": 20_000})).await;
    let calls = claimed.body["tasks"].as_array().unwrap();
    assert_eq!(calls.len(), 1, "the limit lets one pass: {}", claimed.body);
    assert!(calls[0]["deadline"].is_string() && calls[0]["attempts"] == 1, "{}", calls[0]);
    rig.report(&calls[0], json!({"op": "fail", "error": broken})).await;
    let news = reports(&rig, &task, &[json!({"op": "log", "msg": "still here"})]).await;
    let news = &news.body["news"][task["task_id"].as_str().unwrap()];
    assert_eq!(news["one"]["status"], "failed", "one attempt: {news}");
    let since = Instant::now();
    let child = loop {
        let listed = rig.get("/v1/runs?external_id=e1").await;
        if let Some(child) = listed.items().first() {
            break child["run_id"].as_str().unwrap().to_owned();
        }
        assert!(since.elapsed() < LONG, "the child never starts");
    };
    let child = rig.get(&format!("/v1/runs/{child}")).await.body;
    assert_eq!((&child["tags"], &child["priority"], &child["queue"]), (&json!(["t"]), &json!(4), &json!("kids")));
    assert_eq!((&child["metadata"], &child["unique"]["key"]), (&json!({"m": 1}), &json!("u")));
    assert!(child["deadline"].is_string() && child["parent"]["run_id"] == json!(run));
    rig.server.stop().await;
}

#[tokio::test]
async fn a_child_whose_unique_key_is_taken_waits_or_fails_its_entry() {
    let rig = Rig::start().await;
    rig.flow("job", "code: true").await;
    rig.flow("kid", "steps: {a: {run: a}}").await;
    let holder = rig.post("/v1/flows/kid/runs", json!({"unique": {"key": "u"}})).await.text("run_id");
    rig.run("job", json!(1)).await;
    let claim = async |flow: &str| loop {
        let task = rig.claim("w").await;
        if task["flow"] == flow {
            return task;
        }
    };
    let held = claim("kid").await;
    let task = claim("job").await;
    let child = |name: &str, on_conflict: &str| json!({"op": "child", "name": name, "flow": "kid", "unique": {"key": "u", "on_conflict": on_conflict}});
    reports(&rig, &task, &[child("reject", "reject"), child("queue", "queue")]).await;
    let since = Instant::now();
    let error = loop {
        let log = reports(&rig, &task, &[json!({"op": "log", "msg": "x"})]).await;
        let news = &log.body["news"][task["task_id"].as_str().unwrap()]["reject"];
        if news["status"] == "failed" {
            break news["error"].clone();
        }
        assert!(since.elapsed() < LONG, "the child is never refused");
    };
    assert!(error["kind"] == "UniqueTaken" && error["message"].as_str().unwrap().contains(&holder), "{error}");
    assert_eq!(rig.report(&held, json!({"op": "complete"})).await["outcome"], "applied");
    let queued = claim("kid").await;
    assert_ne!(queued["run_id"], json!(holder));
    assert_eq!(rig.report(&queued, json!({"op": "complete"})).await["outcome"], "applied");
    rig.server.stop().await;
}

#[tokio::test]
async fn what_was_pending_when_an_attempt_began_and_fails_later_is_its_news() {
    let rig = Rig::start().await;
    rig.flow("job", "code: true\nretry: {attempts: 3, initial: 0}\nstep_retry: {attempts: 1}").await;
    let run = rig.run("job", json!(1)).await;
    let first = rig.claim("w").await;
    let calls = ["early", "late"].map(|name| json!({"op": "call", "name": name, "handler": name, "queue": name}));
    reports(&rig, &first, &calls).await;
    let failed = async |queue: &str| {
        let claim = json!({"worker_id": "v", "queues": [queue], "wait_ms": 20_000});
        let call = rig.post("/v1/tasks/claim", claim).await.body["tasks"][0].clone();
        assert_eq!(call["key"], json!(format!("{run}/{queue}")), "{call}");
        rig.report(&call, json!({"op": "fail", "error": "no"})).await;
    };
    failed("early").await;
    rig.report(&first, json!({"op": "fail", "error": "no"})).await;
    let second = rig.claim("w").await;
    assert_eq!(second["attempt"], 2);
    assert_eq!(second["memo"].as_object().unwrap().keys().collect::<Vec<_>>(), ["late"], "early is forgotten");
    failed("late").await;
    let told = reports(&rig, &second, &[json!({"op": "log", "msg": "x"}), calls[0].clone()]).await;
    let news = &told.body["news"][second["task_id"].as_str().unwrap()];
    assert_eq!(news["late"]["status"], "failed", "{}", told.body);
    // The forgotten call is made again, under the same key.
    failed("early").await;
    rig.server.stop().await;
}

/// A run with two steps to undo, whose function is held by a worker.
async fn with_two_steps(rig: &Rig, definition: &str) -> (String, Value) {
    rig.flow("job", definition).await;
    let run = rig.run("job", json!(1)).await;
    let task = rig.claim("w").await;
    let step = |name: &str| json!({"op": "step", "name": name, "output": 1, "undo": true});
    let asked = [step("reserve"), step("pay"), json!({"op": "call", "name": "ship", "handler": "ship", "queue": "s"})];
    assert_eq!(verdicts(&reports(rig, &task, &asked).await), ["applied"; 3]);
    (run, task)
}

#[tokio::test]
async fn a_run_that_fails_for_good_unwinds_through_crashes() {
    let rig = Rig::start().await;
    let (run, task) = with_two_steps(&rig, "code: true").await;
    let error = json!({"kind": "Boom", "message": "sold out"});
    let told = reports(&rig, &task, &[json!({"op": "unwind", "error": error}), json!({"op": "unwind"})]).await;
    assert_eq!(verdicts(&told), ["applied"; 2]);
    assert_eq!(told.body["outcomes"][1]["duplicate"], true);
    for refused in [
        json!({"op": "step", "name": "more", "output": 1}),
        json!({"op": "sleep", "name": "undo:pay", "for": "1s"}),
        json!({"op": "step", "name": "undo:ship", "output": 1}),
        json!({"op": "publish", "name": "x", "as": "x"}),
        json!({"op": "continue"}),
        json!({"op": "complete"}),
    ] {
        assert_eq!(rig.report(&task, refused.clone()).await["outcome"], "invalid", "{refused}");
    }
    assert_eq!(rig.post(&format!("/v1/runs/{run}/cancel"), json!({})).await.code(), (409, "conflict"));
    let undone = reports(&rig, &task, &[json!({"op": "step", "name": "undo:pay", "output": null})]).await;
    assert_eq!(verdicts(&undone), ["applied"]);
    // The worker gives up in the middle: the next one goes on undoing.
    assert_eq!(rig.report(&task, json!({"op": "release"})).await["outcome"], "applied");
    let task = rig.claim("w").await;
    assert_eq!(task["unwind"]["error"]["message"], "sold out", "{task}");
    let status = |name: &str| task["memo"][name]["status"].clone();
    assert_eq!((status("ship"), status("undo:pay")), (json!("cancelled"), json!("completed")));
    assert_eq!((&task["memo"]["reserve"]["undo"], &task["attempt"]), (&json!(true), &json!(1)));
    let last = reports(&rig, &task, &[json!({"op": "fail", "error": {"kind": "Other", "message": "x"}})]).await;
    assert_eq!(verdicts(&last), ["applied"]);
    let ended = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await.body;
    assert_eq!((&ended["status"], &ended["error"]["message"]), (&json!("failed"), &json!("sold out")), "{ended}");
    let also = ended["error"]["also"].as_array().unwrap();
    assert_eq!((also.len(), &also[0]["kind"], &also[0]["step"]), (1, &json!("NotUndone"), &json!("reserve")));

    // A retry takes over what was not undone.
    let again = rig.post(&format!("/v1/runs/{run}/retry"), json!({})).await.text("run_id");
    let task = rig.claim("w").await;
    assert_eq!((&task["run_id"], &task["intent"]), (&json!(again), &json!(run)));
    assert_eq!(task["memo"].as_object().unwrap().keys().collect::<Vec<_>>(), ["reserve"]);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_cancel_with_a_grace_is_told_and_undone() {
    let rig = Rig::start().await;
    let (run, task) = with_two_steps(&rig, "code: true\ncancel_grace: 1h").await;
    let id = task["task_id"].clone();
    let beat = async || rig.post("/v1/workers/w/heartbeat", json!({"tasks": [id]})).await.body;
    assert_eq!((&beat().await["cancel"], beat().await.get("unwind")), (&json!([]), None));
    let cancelled = rig.post(&format!("/v1/runs/{run}/cancel"), json!({"reason": "enough"})).await;
    assert_eq!((cancelled.status, &cancelled.body["status"]), (200, &json!("running")));
    assert_eq!(rig.post(&format!("/v1/runs/{run}/cancel"), json!({})).await.code(), (409, "conflict"));
    // The step in hand is still taken.
    let late = reports(&rig, &task, &[json!({"op": "step", "name": "mail", "output": 1, "seen": 99})]).await;
    assert_eq!(verdicts(&late), ["applied"]);
    let told = beat().await;
    assert_eq!((&told["cancel"], &told["unwind"], &told["lost"]), (&json!([id]), &json!([id]), &json!([])), "{told}");
    let unwound = reports(&rig, &task, &[json!({"op": "unwind"})]).await;
    assert_eq!(unwound.body["outcomes"][0]["duplicate"], true);
    assert_eq!(beat().await.get("unwind"), None, "it has said so");
    let undo = |name: &str| json!({"op": "step", "name": format!("undo:{name}"), "output": null});
    let broken = json!({"op": "step", "name": "undo:reserve", "error": "gone", "retryable": false});
    assert_eq!(verdicts(&reports(&rig, &task, &[undo("pay"), broken]).await), ["applied"; 2]);
    assert_eq!(rig.report(&task, json!({"op": "fail", "error": "cancelled"})).await["outcome"], "applied");
    let ended = rig.get(&format!("/v1/runs/{run}")).await.body;
    assert_eq!((&ended["status"], &ended["reason"]), (&json!("cancelled"), &json!("enough")));
    let result = rig.get(&format!("/v1/runs/{run}/result")).await.body;
    assert!(result["error"].to_string().contains("gone"), "{result}");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_cancel_of_a_waiting_run_offers_its_function_again_to_unwind() {
    let rig = Rig::start().await;
    // Without `cancel_grace`: what can be undone gets a minute.
    let (run, task) = with_two_steps(&rig, "code: true").await;
    assert_eq!(rig.report(&task, json!({"op": "suspend"})).await["outcome"], "applied");
    rig.post(&format!("/v1/runs/{run}/cancel"), json!({"reason": "enough"})).await;
    let task = rig.claim("w").await;
    assert_eq!((&task["unwind"]["reason"], task["unwind"].get("error")), (&json!("enough"), None));
    assert!(task["unwind"]["until"].is_string());
    rig.report(&task, json!({"op": "fail", "error": "x"})).await;
    let ended = rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await.body;
    assert_eq!(ended["status"], "cancelled");
    assert!(ended["error"].to_string().contains("NotUndone"), "{ended}");

    // Nothing to undo, or no grace: it ends at once.
    for definition in ["code: true", "code: true\ncancel_grace: 0"] {
        rig.flow("plain", definition).await;
        let run = rig.run("plain", json!(1)).await;
        let task = rig.claim("w").await;
        let undo = definition.contains("grace");
        rig.report(&task, json!({"op": "step", "name": "a", "output": 1, "undo": undo})).await;
        let cancelled = rig.post(&format!("/v1/runs/{run}/cancel"), json!({})).await;
        assert_eq!(cancelled.body["status"], "cancelled", "{definition}");
        assert_eq!(rig.report(&task, json!({"op": "unwind"})).await["outcome"], "closed");
    }
    rig.server.stop().await;
}

#[tokio::test]
async fn a_socket_is_told_of_a_cancel_and_keeps_the_task() {
    let rig = Rig::start().await;
    rig.flow("job", "code: true\ncancel_grace: 1h").await;
    let run = rig.run("job", json!(1)).await;
    let mut socket = crate::socket::Socket::open(&rig, json!({"flows": ["job"]})).await;
    socket.say(json!({"type": "credit", "n": 1})).await;
    let task = socket.until("tasks").await["tasks"][0].clone();
    let id = task["task_id"].clone();
    rig.post(&format!("/v1/runs/{run}/cancel"), json!({})).await;
    let beat = socket.until("beat").await;
    assert_eq!((&beat["cancel"], &beat["unwind"]), (&json!([id]), &json!([id])), "{beat}");
    let report = |seq: u32, op: Value| {
        let mut report = json!({"task_id": task["task_id"], "token": task["token"], "seq": seq});
        report.as_object_mut().unwrap().extend(op.as_object().unwrap().clone());
        json!({"type": "report", "id": seq, "reports": [report]})
    };
    socket.say(report(1, json!({"op": "unwind"}))).await;
    assert_eq!(socket.until("reported").await["outcomes"][0]["outcome"], "applied");
    socket.say(report(2, json!({"op": "fail", "error": "x"}))).await;
    assert_eq!(socket.until("reported").await["outcomes"][0]["outcome"], "applied");
    assert_eq!(rig.get(&format!("/v1/runs/{run}/result?wait=20s")).await.body["status"], "cancelled");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_pinned_run_is_offered_to_its_build_until_it_is_unpinned() {
    let rig = Rig::start().await;
    rig.flow("job", "code: true\nbuilds: pinned").await;
    let register = async |build: &str| {
        let me = json!({"flows": [{"name": "job", "build": build}]});
        rig.post("/v1/workers", me).await.text("worker_id")
    };
    let (old, new) = (register("1").await, register("2").await);
    let run = rig.run("job", json!(1)).await;
    let claim = async |worker: &str| {
        rig.post("/v1/tasks/claim", json!({"worker_id": worker})).await.body["tasks"].as_array().unwrap().clone()
    };
    let task = claim(&old).await.remove(0);
    rig.report(&task, json!({"op": "step", "name": "a", "output": 1})).await;
    rig.report(&task, json!({"op": "release"})).await;
    assert_eq!(claim(&new).await, Vec::<Value>::new(), "it is pinned");
    let builds = rig.get("/v1/flows/job/builds").await.body;
    let expected = json!([{"build": "1", "runs": 1, "workers": 1}, {"build": "2", "runs": 0, "workers": 1}]);
    assert_eq!((&builds["policy"], &builds["items"]), (&json!("pinned"), &expected));
    assert_eq!(rig.post(&format!("/v1/runs/{run}/unpin"), json!({})).await.status, 200);
    assert_eq!(rig.post(&format!("/v1/runs/{run}/unpin"), json!({})).await.status, 200);
    let task = claim(&new).await.remove(0);
    assert_eq!(task["memo"]["a"]["output"], 1);
    rig.report(&task, json!({"op": "step", "name": "b", "output": 1})).await;
    assert_eq!(rig.get(&format!("/v1/runs/{run}")).await.body["build"], "2");
    rig.report(&task, json!({"op": "complete"})).await;
    assert_eq!(rig.post(&format!("/v1/runs/{run}/unpin"), json!({})).await.code(), (409, "conflict"));
    rig.flow("graph", "steps: {a: {run: a}}").await;
    assert_eq!(rig.get("/v1/flows/graph/builds").await.code(), (422, "invalid"));
    let graph = rig.run("graph", json!(1)).await;
    assert_eq!(rig.post(&format!("/v1/runs/{graph}/unpin"), json!({})).await.code(), (409, "conflict"));
    rig.server.stop().await;
}

#[tokio::test]
async fn workers_register_schemas_of_handlers_and_flows() {
    let rig = Rig::start().await;
    let schema = json!({"type": "object", "required": ["id"]});
    let me = json!({"handlers": ["pay"], "handler_schemas": {"pay": {"input_schema": schema}},
                    "flows": [{"name": "job", "input_schema": schema, "output_schema": {"type": "string"}}]});
    assert_eq!(rig.post("/v1/workers", me).await.status, 201);
    let listed = rig.get("/v1/handlers").await;
    assert_eq!(listed.items(), &vec![json!({"handler": "pay", "input_schema": schema, "output_schema": null})]);
    let flow = rig.get("/v1/flows/job").await.body;
    assert_eq!(flow["definition"]["output_schema"], json!({"type": "string"}));
    assert_eq!(rig.post("/v1/flows/job/runs", json!({"input": {}})).await.code(), (422, "invalid"));
    for bad in [
        json!({"handlers": ["pay"], "handler_schemas": {"other": {}}}),
        json!({"handlers": ["pay"], "handler_schemas": {"pay": {"input_schema": {"type": "strnig"}}}}),
    ] {
        assert_eq!(rig.post("/v1/workers", bad.clone()).await.code(), (422, "invalid"), "{bad}");
    }
    let other = rig.header("eddyline-namespace", "other");
    assert_eq!(other.get("/v1/handlers").await.items().len(), 0);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_browser_sends_its_key_as_a_subprotocol() {
    let rig = Rig::with_keys().await;
    assert!(rig.server.asks_for_keys());
    let connect = async |offered: &str| {
        let mut request = format!("ws://{}/v1/workers/connect", rig.client.addr).into_client_request().unwrap();
        request.headers_mut().insert("sec-websocket-protocol", offered.parse().unwrap());
        connect_async(request).await
    };
    // The admin key of the tests, in base64url.
    let encoded = encode(crate::client::ADMIN_KEY.as_bytes());
    let (mut socket, response) = connect(&format!("eddyline.v1, eddyline.key.{encoded}")).await.unwrap();
    assert_eq!(response.headers()["sec-websocket-protocol"], "eddyline.v1", "the key is not repeated");
    socket.send(Message::text(json!({"type": "hello"}).to_string())).await.unwrap();
    let welcome = socket.next().await.unwrap().unwrap().into_text().unwrap().to_string();
    assert!(welcome.contains("\"welcome\""), "{welcome}");
    for refused in ["eddyline.v1", "eddyline.v1, eddyline.key.AAAA", "eddyline.v1, eddyline.key.*"] {
        assert!(connect(refused).await.is_err(), "{refused}");
    }
    let info = rig.get("/v1/info").await.body;
    assert_eq!((&info["protocol"], &info["oldest_protocol"]), (&json!(1), &json!(1)));
    rig.server.stop().await;
}

/// Base64 for URLs, without padding.
fn encode(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for part in bytes.chunks(3) {
        let bits = part.iter().fold(0u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - part.len()));
        for digit in 0..=part.len() {
            text.push(char::from(DIGITS[(bits >> (18 - 6 * digit)) as usize & 63]));
        }
    }
    text
}
