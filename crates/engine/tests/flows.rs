//! Flows from start to end through the engine, on the memory store unless the environment names another (`rig/stores.rs`).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use eddyline_engine::{Config, EngineError, StartRequest, TaskReport};
use eddyline_machine::{Answer, CodeOp, Data, Due, Op, OpenedBy, Status};
use eddyline_store::{Embedded, GateFilter, Namespace, Page, RunFilter, Store};
use rig::{LONG, Rig, claim, done, failed};
use serde_json::json;

#[tokio::test]
async fn a_chain_runs_to_its_end() {
    let mut rig = Rig::new();
    rig.register("name: chain\nsteps: {a: {}, b: {after: [a]}, c: {after: [b]}}\noutput: '${steps.c.output}'").await;
    rig.work(2, |task| done(json!({"at": task.activation, "got": task.input})));
    let run = rig.start("chain", json!({"n": 1})).await;
    let output = rig.output(run).await;
    assert_eq!(output["got"]["b"]["got"]["a"], json!({"at": "a", "got": {"n": 1}}));
    let kinds = rig.kinds(run).await;
    assert_eq!(kinds.first().unwrap(), "flow.start");
    assert_eq!(kinds.last().unwrap(), "flow.completed");
    assert_eq!(kinds.iter().filter(|kind| kind.starts_with("step.attempt.started")).count(), 3);
    rig.stop().await;
}

#[tokio::test]
async fn a_failed_attempt_is_tried_again_after_its_back_off() {
    let mut rig = Rig::new();
    rig.register("name: f\nsteps: {a: {retry: {attempts: 3, initial: 10ms}}}\noutput: '${steps.a.output}'").await;
    let tries = AtomicU32::new(0);
    rig.work(1, move |task| match tries.fetch_add(1, Ordering::SeqCst) {
        0 | 1 => failed("not yet"),
        _ => done(json!(task.attempt)),
    });
    let run = rig.start("f", json!(null)).await;
    assert_eq!(rig.output(run).await, json!(3));
    rig.stop().await;
}

#[tokio::test]
async fn a_spread_of_thousands_comes_together_in_order() {
    let mut rig = Rig::new();
    rig.register("name: f\nsteps:\n  each: {spread: input.items, run: twice}\n  sum: {after: [each], set: '${sum(steps.each.output)}'}\noutput: '${steps.sum.output}'")
        .await;
    rig.work(16, |task| done(json!(task.input.as_i64().unwrap() * 2)));
    let items: Vec<i64> = (0..3_000).collect();
    let run = rig.start("f", json!({"items": items})).await;
    assert_eq!(rig.output(run).await, json!(items.iter().sum::<i64>() * 2));
    rig.stop().await;
}

#[tokio::test]
async fn a_child_is_started_and_heard_of_and_a_missing_one_fails_its_step() {
    let mut rig = Rig::new();
    rig.register("name: child\ninput_schema: {type: object}\nsteps: {a: {}}\noutput: '${steps.a.output}'").await;
    rig.register("name: parent\nsteps: {c: {flow: child, input: {x: '${input}'}}}\noutput: '${steps.c.output}'").await;
    rig.register("name: lost\nsteps: {c: {flow: nowhere}}").await;
    rig.register("name: wrong\nsteps: {c: {flow: child, input: 7}}").await;
    rig.work(1, |task| done((*task.input).clone()));
    let run = rig.start("parent", json!(5)).await;
    assert_eq!(rig.output(run).await, json!({"x": 5}));
    for (flow, message) in [("lost", "there is no flow nowhere"), ("wrong", "is not of type")] {
        let run = rig.start(flow, json!(null)).await;
        let result = rig.engine.result(&rig.ns, run, LONG).await.unwrap().unwrap();
        assert_eq!(result.status, Status::Failed);
        assert!(format!("{:?}", result.error).contains(message), "{:?}", result.error);
    }
    rig.stop().await;
}

#[tokio::test]
async fn a_gate_waits_for_its_token_and_opens_once() {
    let rig = Rig::new();
    rig.register("name: f\nsteps: {ok: {await: {webhook: true}}}\noutput: '${steps.ok.output}'").await;
    let run = rig.start("f", json!(null)).await;
    let filter = GateFilter { run: Some(run), ..GateFilter::default() };
    let gate = rig.engine.store().gates(Some(&rig.ns), &filter, Page::default()).await.unwrap().pop().unwrap();
    let token = gate.token.unwrap();
    let other = Namespace::new("other");
    let foreign = rig.engine.open_gate(&other, &token, OpenedBy::Webhook, json!(1)).await;
    assert!(matches!(foreign, Err(EngineError::NotFound { .. })), "{foreign:?}");
    rig.engine.open_gate(&rig.ns, &token, OpenedBy::Webhook, json!({"yes": true})).await.unwrap();
    assert_eq!(rig.output(run).await, json!({"yes": true}));
    let again = rig.engine.open_gate(&rig.ns, &token, OpenedBy::Webhook, json!(2)).await;
    assert!(matches!(again, Err(EngineError::Conflict(_))), "{again:?}");
    rig.stop().await;
}

#[tokio::test]
async fn a_code_run_remembers_its_steps_over_a_durable_sleep() {
    let rig = Rig::new();
    rig.register(r#"{"name": "job", "code": true}"#).await;
    let run = rig.start("job", json!({"n": 2})).await;
    let task = rig.claim("w").await.unwrap();
    assert_eq!((task.handler.as_str(), task.memo.as_ref().unwrap().len()), ("job", 0));
    let code = |name: &str, op: CodeOp| Op::Code { name: name.to_owned(), op };
    let paid = code("pay", CodeOp::Done { output: Data::from(json!("receipt")), undo: false });
    assert!(matches!(rig.report(&task, paid).await, Answer::Applied(_)));
    let sleep = code("nap", CodeOp::Sleep { due: Due::After(20) });
    assert!(matches!(rig.report(&task, sleep).await, Answer::Applied(_)));
    assert!(matches!(rig.report(&task, Op::Suspend { seen: None }).await, Answer::Applied(_)));
    let task = rig.claim("w").await.unwrap();
    let memo = task.memo.clone().unwrap();
    assert_eq!((&memo["pay"]["output"], &memo["nap"]["status"]), (&json!("receipt"), &json!("completed")));
    assert!(matches!(rig.report(&task, done(json!("all"))).await, Answer::Applied(_)));
    assert_eq!(rig.output(run).await, json!("all"));
    rig.stop().await;
}

#[tokio::test]
async fn one_key_is_one_run_however_many_ask() {
    let rig = Rig::new();
    rig.register("name: f\nsteps: {a: {}}").await;
    let request = |input| StartRequest {
        flow: "f".to_owned(),
        input,
        idempotency_key: Some("k".to_owned()),
        ..StartRequest::default()
    };
    let starts = (0..50).map(|_| rig.engine.start_run(&rig.ns, request(json!({"a": 1}))));
    let started: Vec<_> = futures_util::future::join_all(starts).await.into_iter().map(Result::unwrap).collect();
    assert_eq!(started.iter().filter(|started| !started.existing).count(), 1);
    assert!(started.iter().all(|other| other.run == started[0].run));
    let other = rig.engine.start_run(&rig.ns, request(json!({"a": 2}))).await;
    assert!(matches!(other, Err(EngineError::Conflict(_))), "{other:?}");
    assert_eq!(rig.engine.list(&rig.ns, &RunFilter::default(), Page::default()).await.unwrap().len(), 1);
    rig.stop().await;
}

#[tokio::test]
async fn what_follows_a_report_that_was_not_applied_is_not_tried() {
    let rig = Rig::new();
    rig.register("name: f\nsteps: {a: {emits: [{x: {type: object}}]}}").await;
    rig.start("f", json!(null)).await;
    let task = rig.claim("w").await.unwrap();
    let report = |seq, op| TaskReport { token: task.token, seq: Some(seq), op };
    let emit = |event: &str, payload| Op::Emit { event: event.to_owned(), payload: Data::from(payload) };
    let progress = Op::Progress { done: Some(1.into()), total: None, msg: None };
    let reports = vec![report(1, progress), report(2, emit("y", json!({}))), report(3, done(json!(1)))];
    let reported = rig.engine.report(&rig.ns, reports).await.unwrap();
    let words: Vec<String> = reported.iter().map(|one| format!("{one:?}")).collect();
    assert!(words[0].contains("Applied") && words[1].contains("Invalid") && words[2] == "NotTried", "{words:?}");
    let schema = rig.report(&task, emit("x", json!(5))).await;
    assert!(matches!(&schema, Answer::Invalid(why) if why.contains("is not of type")), "{schema:?}");
    assert!(matches!(rig.report(&task, done(json!(1))).await, Answer::Applied(_)));
    assert!(matches!(rig.report(&task, done(json!(1))).await, Answer::Closed));
    rig.stop().await;
}

#[tokio::test]
async fn a_claim_waits_and_is_called_off_and_a_task_never_delivered_costs_no_attempt() {
    let rig = Rig::new();
    rig.register("name: f\nsteps: {a: {}}").await;
    let none = rig.engine.claim(&rig.ns, claim("w"), Duration::from_millis(20)).await.unwrap();
    assert!(none.is_empty());
    // The caller goes away before the answer.
    let waiting = rig.engine.ask(&rig.ns, claim("gone"), false).await.unwrap();
    let run = rig.start("f", json!(null)).await;
    drop(waiting);
    let task = rig.claim("w").await.unwrap();
    assert_eq!(task.attempt, 1);
    assert!(matches!(rig.report(&task, done(json!(1))).await, Answer::Applied(_)));
    rig.output(run).await;
    rig.stop().await;
}

#[tokio::test]
async fn a_silent_worker_loses_its_task_to_another() {
    let rig = Rig::new();
    rig.register("name: f\nsteps: {a: {retry: {initial: 1ms}}}").await;
    let run = rig.start("f", json!(null)).await;
    let silent = eddyline_engine::ClaimTasks { lease_ms: Some(50), ..claim("silent") };
    let lost = rig.engine.claim(&rig.ns, silent, LONG).await.unwrap().pop().unwrap();
    let task = rig.claim("w").await.unwrap();
    assert_eq!((task.attempt, task.activation.as_str(), &task.key), (2, "a", &lost.key));
    assert!(matches!(rig.report(&lost, done(json!("late"))).await, Answer::Stale));
    assert!(matches!(rig.report(&task, done(json!("ok"))).await, Answer::Applied(_)));
    rig.output(run).await;
    rig.stop().await;
}

#[tokio::test]
async fn pause_resume_cancel_retry_and_rerun() {
    let mut rig = Rig::new();
    rig.register("name: f\nsteps: {a: {}, b: {after: [a], retry: {attempts: 1}}}\noutput: '${steps.b.output}'").await;
    let run = rig.start("f", json!(null)).await;
    rig.engine.pause(&rig.ns, run, "me").await.unwrap();
    assert!(rig.engine.claim(&rig.ns, claim("w"), Duration::from_millis(20)).await.unwrap().is_empty());
    rig.engine.resume(&rig.ns, run, "me").await.unwrap();
    let task = rig.claim("w").await.unwrap();
    rig.report(&task, done(json!("A"))).await;
    let task = rig.claim("w").await.unwrap();
    rig.report(&task, failed("no")).await;
    assert_eq!(rig.engine.result(&rig.ns, run, LONG).await.unwrap().unwrap().status, Status::Failed);
    rig.work(1, |task| done(json!([task.activation, task.input])));
    let again = rig.engine.retry(&rig.ns, run, "ann").await.unwrap();
    assert_eq!(rig.output(again).await, json!(["b", {"a": "A"}]));
    let for_nothing = rig.engine.retry(&rig.ns, again, "ann").await;
    assert!(matches!(for_nothing, Err(EngineError::Conflict(_))), "{for_nothing:?}");
    let rerun = rig.engine.rerun(&rig.ns, again, "ann", Some("a"), Some(json!(9))).await.unwrap();
    assert_eq!(rig.output(rerun).await, json!(["b", {"a": ["a", 9]}]));
    let waiting = rig.engine.cancel(&rig.ns, rerun, "me", None).await;
    assert!(matches!(waiting, Err(EngineError::Conflict(_))), "{waiting:?}");
    rig.stop().await;
}

/// 48 outputs of 1 MiB are more than one transition may write, and `twice` refers to 2^30 strings: a retry neither
/// loads all values at once nor builds aggregates.
#[tokio::test]
async fn a_retry_takes_over_any_amount() {
    let rig = Rig::new();
    let twice: String = (1..=30)
        .map(|n| {
            let from = n - 1;
            format!("  d{n}: {{after: [d{from}], set: ['${{steps.d{from}.output}}', '${{steps.d{from}.output}}']}}\n")
        })
        .collect();
    rig.register(&format!(
        "name: f\nsteps:\n  each: {{spread: 'range(48)', run: large}}\n  d0: {{set: '${{input.text}}'}}\n{twice}  \
         b: {{run: last, after: [each, d30], input: {{n: '${{size(steps.d30.output[1][1][1])}}'}}, retry: {{attempts: 1}}}}\n\
         output: {{n: '${{steps.b.output.n}}', of: '${{steps.each.output[47]}}'}}"
    ))
    .await;
    let run = rig.start("f", json!({"text": "y".repeat(5_000)})).await;
    for _ in 0..48 {
        let task = rig.claim("w").await.unwrap();
        let item = task.activation.clone();
        rig.report(&task, done(json!([item, "x".repeat(1 << 20)]))).await;
    }
    let task = rig.claim("w").await.unwrap();
    assert_eq!((&*task.activation, task.input["n"].clone()), ("b", json!(2)));
    rig.report(&task, failed("no")).await;
    assert_eq!(rig.engine.result(&rig.ns, run, LONG).await.unwrap().unwrap().status, Status::Failed);
    let again = rig.engine.retry(&rig.ns, run, "ann").await.unwrap();
    let task = rig.claim("w").await.unwrap();
    assert_eq!((&*task.activation, task.input["n"].clone()), ("b", json!(2)), "{:?}", task.input);
    // The new run needs nothing of the old one.
    rig.engine.delete(&rig.ns, run).await.unwrap();
    rig.report(&task, done(json!({"n": 7}))).await;
    let output = rig.output(again).await;
    assert_eq!(
        (&output["n"], &output["of"][0], output["of"][1].as_str().map(str::len)),
        (&json!(7), &json!("each[47]"), Some(1 << 20))
    );
    rig.stop().await;
}

#[tokio::test]
async fn steps_say_what_they_wait_for_and_a_follower_sees_every_record_once() {
    let rig = Rig::new();
    rig.register("name: f\nsteps: {a: {}, b: {after: [a]}, c: {await: {manual: true}}}").await;
    let run = rig.start("f", json!({"x": 1})).await;
    let mut follower = rig.engine.follow(&rig.ns, run, 0).await.unwrap();
    let task = rig.claim("w").await.unwrap();
    let steps = rig.engine.steps(&rig.ns, run).await.unwrap();
    let told: Vec<String> =
        steps.iter().map(|step| format!("{} {} {}", step.activation, step.status, json!(step.waits_for))).collect();
    assert!(told[0].starts_with("a running") && told[0].contains("worker"), "{told:?}");
    assert!(told[1].starts_with("b pending") && told[1].contains(r#""from":["a"]"#), "{told:?}");
    assert!(told[2].starts_with("c waiting") && told[2].contains("gate"), "{told:?}");
    assert_eq!(steps[0].input, Some(json!({"x": 1})));
    let seen = tokio::spawn(async move {
        let mut seen = Vec::new();
        while let Some(records) = follower.next().await.unwrap() {
            seen.extend(records.into_iter().map(|record| record.n));
        }
        seen
    });
    rig.report(&task, done(json!(1))).await;
    let task = rig.claim("w").await.unwrap();
    rig.report(&task, done(json!(2))).await;
    rig.engine.act_on_step(&rig.ns, run, "c", "me", eddyline_engine::StepActRequest::Skip).await.unwrap();
    let seen = seen.await.unwrap();
    assert_eq!(seen, (1..=seen.len() as u64).collect::<Vec<_>>());
    assert_eq!(seen.len(), rig.records(run).await.len());
    rig.stop().await;
}

#[tokio::test]
async fn a_start_takes_the_newest_version_whoever_registered_it() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(dir.path(), eddyline_store::Options::default()).unwrap());
    let (rig, other) = (Rig::on(store.clone(), Config::default()), Rig::on(store.clone(), Config::default()));
    let version_of = async |run| store.summary(run).await.unwrap().unwrap().header.flow_version;
    let mut seen = Vec::new();
    for (at, by) in [&rig, &other, &rig, &other].into_iter().enumerate() {
        by.register(&format!("name: f\nsteps: {{a{at}: {{}}}}")).await;
        for _ in 0..2 {
            seen.push(version_of(rig.start("f", json!(null)).await).await);
        }
    }
    assert!(seen.chunks(2).all(|pair| pair[0] == pair[1]), "{seen:?}");
    seen.dedup();
    assert_eq!(seen.len(), 4, "{seen:?}");
    rig.stop().await;
    other.stop().await;
}
