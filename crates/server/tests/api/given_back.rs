//! What runs, lists, steps and gates show of a run's start and results.

use eddyline_server::ServeArgs;
use serde_json::{Value, json};

use crate::client::{Client, Reply, Rig, args};

fn time(value: &Value) -> jiff::Timestamp {
    value.as_str().unwrap_or_else(|| panic!("{value} is not a time")).parse().unwrap()
}

fn ms_between(from: &Value, to: &Value) -> i64 {
    time(to).as_millisecond() - time(from).as_millisecond()
}

async fn start(client: &Client, flow: &str, body: Value) -> String {
    let reply = client.post(&format!("/v1/flows/{flow}/runs"), body).await;
    assert_eq!(reply.status, 201, "{}", reply.body);
    reply.text("run_id")
}

async fn shown(client: &Client, run: &str) -> Value {
    let reply = client.get(&format!("/v1/runs/{run}")).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.body
}

async fn steps(client: &Client, run: &str) -> Vec<Value> {
    let reply = client.get(&format!("/v1/runs/{run}/steps")).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.items().clone()
}

async fn step(client: &Client, run: &str, activation: &str) -> Value {
    let all = steps(client, run).await;
    all.iter().find(|step| step["activation"] == activation).unwrap_or_else(|| panic!("{all:?}")).clone()
}

async fn ended(client: &Client, run: &str) -> Reply {
    let reply = client.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply
}

async fn claim_from(client: &Client, queue: &str) -> Value {
    let claim = json!({"worker_id": "w", "queues": [queue], "max": 1, "wait_ms": 20_000});
    let reply = client.post("/v1/tasks/claim", claim).await;
    assert_eq!(reply.status, 200, "{}", reply.body);
    reply.body["tasks"][0].clone()
}

fn refused() -> Value {
    json!({"op": "fail", "seq": 1, "error": {"kind": "Declined", "message": "no"}, "retryable": false})
}

#[tokio::test]
async fn a_run_gives_back_what_it_was_started_with_also_after_a_restart() {
    let dir = tempfile::tempdir().unwrap();
    let args = || ServeArgs { store: Some(dir.path().join("store").display().to_string()), ..args() };
    let rig = Rig::with(args()).await;
    rig.flow("f", "steps: {a: {run: a}}").await;
    let metadata = json!({"customer": 7, "path": ["a", {"b": null}]});
    let body = json!({"delay": "1h", "deadline": "2h", "queue": "slow", "idempotency_key": "k-1", "metadata": metadata,
        "tags": ["web"]});
    let run = start(&rig, "f", body).await;
    let before = shown(&rig, &run).await;
    assert_eq!(ms_between(&before["created_at"], &before["delay_until"]), 3_600_000);
    assert_eq!(ms_between(&before["created_at"], &before["deadline"]), 7_200_000);
    assert_eq!(before["waiting_for"][0]["waits_for"]["until"], before["delay_until"]);
    for (field, expected) in [
        ("queue", json!("slow")),
        ("idempotency_key", json!("k-1")),
        ("namespace", json!("default")),
        ("metadata", metadata.clone()),
        ("retry", json!(null)),
        ("attempts", json!([])),
        ("reason", json!(null)),
        ("duration_ms", json!(null)),
    ] {
        assert_eq!(before[field], expected, "{field}");
    }
    rig.server.stop().await;

    let rig = Rig::with(args()).await;
    assert_eq!(shown(&rig, &run).await, before);
    let plain = shown(&rig, &start(&rig, "f", json!({})).await).await;
    for field in ["deadline", "delay_until", "queue", "idempotency_key", "metadata", "retry", "reason"] {
        assert_eq!(plain[field], json!(null), "{field}");
    }
    let reason = json!({"reason": "the customer called"});
    assert_eq!(rig.post(&format!("/v1/runs/{run}/cancel"), reason).await.status, 200);
    assert_eq!(shown(&rig, &run).await["reason"], "the customer called");
    rig.server.stop().await;
}

#[tokio::test]
async fn metadata_is_a_small_object_and_queues_and_policies_are_checked() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {set: 1}}").await;
    rig.flow("job", "code: true").await;
    let code_of = async |flow: &str, body| {
        let reply = rig.post(&format!("/v1/flows/{flow}/runs"), body).await;
        (reply.status, reply.code().1.to_owned())
    };
    // With its quotes, braces and name it has 16 KiB.
    let fits = "x".repeat((16 << 10) - r#"{"x":""}"#.len());
    assert_eq!(code_of("f", json!({"metadata": {"x": fits}})).await.0, 201);
    let refused = code_of("f", json!({"metadata": {"x": format!("{fits}x")}})).await;
    assert_eq!(refused, (413, "too_large".to_owned()));
    for bad in [json!([1]), json!("x"), json!(5)] {
        assert_eq!(code_of("f", json!({"metadata": bad})).await, (400, "bad_request".to_owned()), "{bad}");
    }
    for bad in ["", "a b", "a/b"] {
        assert_eq!(code_of("f", json!({"queue": bad})).await, (422, "invalid".to_owned()), "{bad}");
    }
    assert_eq!(code_of("f", json!({"retry": {"attempts": 2}})).await, (422, "invalid".to_owned()), "a graph has none");
    assert_eq!(code_of("job", json!({"retry": {"attempts": 2}})).await.0, 201);
    let batch = json!([{"flow": "f", "metadata": {"n": 1}, "queue": "slow"}, {"flow": "f", "metadata": [1]}]);
    let items = rig.post("/v1/runs/batch", batch).await;
    assert_eq!(items.items()[1]["error"]["code"], "bad_request");
    let run = shown(&rig, items.items()[0]["run_id"].as_str().unwrap()).await;
    assert_eq!((&run["metadata"], &run["queue"]), (&json!({"n": 1}), &json!("slow")));
    rig.server.stop().await;
}

#[tokio::test]
async fn the_queue_of_a_start_is_for_steps_that_name_none_and_retries_and_reruns_keep_it() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a}, b: {after: [a], run: b, queue: own}}").await;
    let run = start(&rig, "f", json!({"queue": "slow", "metadata": {"n": 1}})).await;
    let a = claim_from(&rig, "slow").await;
    assert_eq!(a["step"], "a");
    assert_eq!(step(&rig, &run, "a").await["queue"], "slow");
    assert_eq!(step(&rig, &run, "b").await["queue"], "own");
    rig.report(&a, json!({"op": "complete", "seq": 1})).await;
    let b = claim_from(&rig, "own").await;
    assert_eq!(b["step"], "b");
    rig.report(&b, refused()).await;
    assert_eq!(ended(&rig, &run).await.body["status"], "failed");

    let retried = rig.post(&format!("/v1/runs/{run}/retry"), json!({})).await.text("run_id");
    let b = claim_from(&rig, "own").await;
    rig.report(&b, refused()).await;
    ended(&rig, &retried).await;
    let rerun = rig.post(&format!("/v1/runs/{retried}/rerun"), json!({})).await.text("run_id");
    assert_eq!(claim_from(&rig, "slow").await["run_id"], rerun.as_str());
    for run in [&retried, &rerun] {
        let run = shown(&rig, run).await;
        assert_eq!((&run["queue"], &run["metadata"]), (&json!("slow"), &json!({"n": 1})));
    }
    let records = rig.get(&format!("/v1/streams/nq:flow:{run}")).await;
    assert_eq!(records.items()[0]["data"]["queue"], "slow");
    assert_eq!(records.items()[0]["meta"]["queue"], "slow");
    rig.server.stop().await;
}

#[tokio::test]
async fn a_code_run_gives_back_its_policy_and_queue_and_shows_the_attempts_of_its_function() {
    let rig = Rig::start().await;
    rig.flow("job", "code: true\nqueue: usual\nretry: {attempts: 1}").await;
    let policy = json!({"attempts": 2, "initial": "10ms", "non_retryable": ["Fatal"]});
    let body = json!({"queue": "slow", "retry": policy, "metadata": {"n": 1}});
    let run = start(&rig, "job", body).await;
    let first = claim_from(&rig, "slow").await;
    let call = json!({"op": "call", "seq": 1, "name": "print", "handler": "print", "input": {"page": 1}});
    rig.report(&first, call).await;
    let called = claim_from(&rig, "slow").await;
    assert_eq!(called["handler"], "print", "calls that name no queue go where the function goes");
    rig.report(&first, json!({"op": "fail", "seq": 2, "error": {"kind": "Oops", "message": "no"}})).await;
    let second = claim_from(&rig, "slow").await;
    assert_eq!((&second["kind"], &second["attempt"]), (&json!("run"), &json!(2)));
    let info = shown(&rig, &run).await;
    assert_eq!((&info["retry"], &info["queue"]), (&policy, &json!("slow")));
    let attempts: Vec<(Value, Value)> = info["attempts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|attempt| (attempt["attempt"].clone(), attempt["status"].clone()))
        .collect();
    assert_eq!(attempts, [(json!(1), json!("failed")), (json!(2), json!("running"))]);
    assert_eq!(info["attempts"][0]["error"]["kind"], "Oops");

    rig.report(&second, json!({"op": "fail", "seq": 1, "error": {"kind": "Fatal", "message": "no"}})).await;
    ended(&rig, &run).await;
    let retried = rig.post(&format!("/v1/runs/{run}/retry"), json!({})).await.text("run_id");
    let info = shown(&rig, &retried).await;
    assert_eq!((&info["retry"], &info["queue"], &info["metadata"]), (&policy, &json!("slow"), &json!({"n": 1})));

    let function = claim_from(&rig, "slow").await;
    rig.report(&function, json!({"op": "continue", "seq": 1, "input": 2})).await;
    let next = claim_from(&rig, "slow").await;
    let info = shown(&rig, next["run_id"].as_str().unwrap()).await;
    assert_eq!((&info["retry"], &info["queue"], &info["metadata"]), (&policy, &json!("slow"), &json!({"n": 1})));
    rig.server.stop().await;
}

#[tokio::test]
async fn lists_show_metadata_events_and_durations_and_the_last_record_says_the_same() {
    let rig = Rig::start().await;
    rig.flow(
        "f",
        "steps: {a: {run: a, emits: [paid, sent]}, b: {subscribes: [paid], set: 1}}\noutput: '${steps.b.output}'",
    )
    .await;
    let run = start(&rig, "f", json!({"metadata": {"n": 1}})).await;
    let task = rig.claim("w").await;
    let emits =
        json!([{"event": "sent", "payload": 1}, {"event": "paid", "payload": 2}, {"event": "sent", "payload": 3}]);
    rig.report(&task, json!({"op": "complete", "seq": 1, "emits": emits})).await;
    ended(&rig, &run).await;
    let info = shown(&rig, &run).await;
    let listed = rig.get("/v1/runs").await.items()[0].clone();
    for run in [&info, &listed] {
        assert_eq!(run["metadata"], json!({"n": 1}));
        assert_eq!(run["emitted_events"], json!(["sent", "paid"]));
        assert_eq!(run["duration_ms"], ms_between(&run["started_at"], &run["completed_at"]));
    }
    let records = rig.get(&format!("/v1/streams/nq:flow:{run}")).await;
    let last = records.items().last().unwrap();
    assert_eq!(last["kind"], "flow.completed");
    assert_eq!(last["data"], json!({"output": 1, "stepCount": 2, "durationMs": info["duration_ms"]}));
    let waiting = start(&rig, "f", json!({})).await;
    let listed = rig.get("/v1/runs").await.items()[0].clone();
    assert_eq!((&listed["run_id"], &listed["duration_ms"]), (&json!(waiting), &json!(null)));
    assert_eq!((&listed["metadata"], &listed["emitted_events"]), (&json!(null), &json!([])));
    rig.server.stop().await;
}

#[tokio::test]
async fn steps_say_what_they_are_and_which_run_they_started() {
    let rig = Rig::start().await;
    rig.flow("child", "steps: {c: {set: 1}}").await;
    rig.flow(
        "f",
        "steps:
  work: {run: work, undo: {run: unwork}}
  value: {set: 1}
  sub: {flow: child}
  gate: {await: {event: paid, key: input.order, timeout: 1h}}
  held: {await: {manual: true}}
  group: {steps: {inner: {set: 2}}}
  each: {spread: 'range(2)', as: n, steps: {v: {set: '${n}'}}}
  loop: {repeat: {while: 'round < 1', max: 3}, steps: {once: {set: 3}}}
  broken: {after: [never], fail: no}
  done: {after: [never], return: 1}
  never: {if: 'false', set: 1}",
    )
    .await;
    let run = start(&rig, "f", json!({"input": {"order": {"id": 7}}})).await;
    let kinds = |steps: &[Value]| -> std::collections::BTreeMap<String, String> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        steps.iter().map(|step| (text(&step["activation"]), text(&step["kind"]))).collect()
    };
    let found = kinds(&steps(&rig, &run).await);
    for (activation, kind) in [
        ("work", "worker"),
        ("value", "set"),
        ("sub", "child"),
        ("gate", "gate"),
        ("group", "group"),
        ("group.inner", "set"),
        ("each", "spread"),
        ("each[1]", "group"),
        ("each[1].v", "set"),
        ("loop", "repeat"),
        ("loop[0]", "group"),
        ("loop[0].once", "set"),
        ("broken", "fail"),
        ("done", "return"),
    ] {
        assert_eq!(found.get(activation).map(String::as_str), Some(kind), "{activation} in {found:?}");
    }
    let child = rig.get("/v1/runs?flow=child").await.items()[0]["run_id"].clone();
    ended(&rig, child.as_str().unwrap()).await;
    assert_eq!(step(&rig, &run, "sub").await["child_run_id"], child);
    assert_eq!(step(&rig, &run, "work").await["child_run_id"], json!(null));
    assert_eq!(step(&rig, &run, "value").await["queue"], json!(null));

    let gate = step(&rig, &run, "gate").await;
    let waits = &gate["waits_for"];
    assert_eq!((&waits["event"], &waits["key"]), (&json!("paid"), &json!({"id": 7})));
    assert_eq!(ms_between(&gate["started_at"], &waits["until"]), 3_600_000);
    let held = step(&rig, &run, "held").await["waits_for"].clone();
    assert_eq!(held, json!({"what": "gate", "reason": "manual", "event": null, "key": null, "until": null}));
    let gates = rig.get(&format!("/v1/gates?run={run}")).await;
    let of = |reason: &str| gates.items().iter().find(|gate| gate["reason"] == reason).unwrap().clone();
    assert_eq!((&of("event")["event"], &of("event")["key"]), (&json!("paid"), &json!({"id": 7})));
    assert_eq!(of("event")["deadline"], waits["until"]);
    assert_eq!((&of("manual")["event"], &of("manual")["key"]), (&json!(null), &json!(null)));

    // The gate's URL opens it.
    let published = rig.post("/v1/events", json!({"name": "paid", "key": of("event")["key"], "payload": 1})).await;
    assert_eq!(published.status, 200, "{}", published.body);
    let task = rig.claim("w").await;
    rig.report(&task, refused()).await;
    assert_eq!(rig.post(&format!("/v1/gates/{}", of("manual")["token"].as_str().unwrap()), json!(1)).await.status, 200);
    ended(&rig, &run).await;
    assert_eq!(step(&rig, &run, "gate").await["status"], "completed");
    rig.server.stop().await;
}

#[tokio::test]
async fn steps_of_a_code_run_have_kinds_inputs_times_and_the_moment_of_their_next_attempt() {
    let rig = Rig::start().await;
    rig.flow("child", "steps: {c: {run: c, queue: elsewhere}}").await;
    rig.flow("job", "code: true\nstep_retry: {attempts: 3, initial: 1h, max: 1h}").await;
    let run = start(&rig, "job", json!({})).await;
    let function = rig.claim("w").await;
    for (at, op) in [
        json!({"op": "step", "name": "local", "output": 5}),
        json!({"op": "step", "name": "flaky", "error": {"kind": "Oops", "message": "no"}, "retryable": true}),
        json!({"op": "call", "name": "print", "handler": "print", "input": {"page": 1}, "queue": "printers"}),
        json!({"op": "sleep", "name": "rest", "for": "1h"}),
        json!({"op": "wait", "name": "signal", "event": "paid", "key": "o-7", "timeout": "2h"}),
        json!({"op": "child", "name": "sub", "flow": "child", "input": 9}),
    ]
    .into_iter()
    .enumerate()
    {
        let mut op = op;
        op["seq"] = json!(at + 1);
        let outcome = rig.report(&function, op).await;
        assert_eq!(outcome["outcome"], "applied", "{outcome}");
    }
    let all = steps(&rig, &run).await;
    let of = |name: &str| all.iter().find(|step| step["activation"] == name).unwrap();
    for (name, kind, input, queue) in [
        ("local", "step", json!(null), json!(null)),
        ("flaky", "step", json!(null), json!(null)),
        ("print", "call", json!({"page": 1}), json!("printers")),
        ("rest", "sleep", json!(null), json!(null)),
        ("signal", "wait", json!(null), json!(null)),
        ("sub", "child", json!(9), json!(null)),
    ] {
        let step = of(name);
        assert_eq!((&step["kind"], &step["input"], &step["queue"]), (&json!(kind), &input, &queue), "{name}");
        time(&step["started_at"]);
    }
    let flaky = of("flaky");
    assert_eq!(flaky["waits_for"]["what"], "function");
    assert_eq!(flaky["retry_at"], flaky["waits_for"]["until"]);
    assert_eq!(ms_between(&flaky["started_at"], &flaky["retry_at"]), 3_600_000);
    assert_eq!(ms_between(&of("rest")["started_at"], &of("rest")["waits_for"]["until"]), 3_600_000);
    let signal = &of("signal")["waits_for"];
    assert_eq!((&signal["event"], &signal["key"]), (&json!("paid"), &json!("o-7")));
    assert_eq!(ms_between(&of("signal")["started_at"], &signal["until"]), 7_200_000);
    assert_eq!(of("sub")["waits_for"]["run_id"], of("sub")["child_run_id"]);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_step_that_backs_off_says_when_it_is_tried_again() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {run: a, retry: {attempts: 2, initial: 1h, max: 1h}}}").await;
    let run = start(&rig, "f", json!({})).await;
    let task = rig.claim("w").await;
    rig.report(&task, json!({"op": "fail", "seq": 1, "error": {"kind": "Oops", "message": "no"}})).await;
    let a = step(&rig, &run, "a").await;
    assert_eq!(a["waits_for"]["what"], "back_off");
    assert_eq!(a["retry_at"], a["waits_for"]["until"]);
    assert_eq!(ms_between(&a["attempts"][0]["ended_at"], &a["retry_at"]), 3_600_000);
    rig.server.stop().await;
}

#[tokio::test]
async fn a_page_of_runs_with_much_metadata_is_short_and_misses_none() {
    let rig = Rig::start().await;
    rig.flow("f", "steps: {a: {set: 1}}").await;
    let metadata = json!({"x": "x".repeat(15 << 10)});
    let batch: Vec<Value> = (0..300).map(|_| json!({"flow": "f", "metadata": metadata})).collect();
    let started = rig.post("/v1/runs/batch", json!(batch)).await.items().len();
    let first = rig.get("/v1/runs?limit=1000").await;
    assert!(first.items().len() < 300, "{}", first.items().len());
    let rest = rig.get(&format!("/v1/runs?limit=1000&cursor={}", first.text("next"))).await;
    assert_eq!((started, first.items().len() + rest.items().len()), (300, 300));
    assert_eq!(rest.body["next"], json!(null));
    rig.server.stop().await;
}
