//! Code flows on a real engine, through the test kit: time, workers that die, undo, children, graph flows.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use eddyline::testing::{Replayed, TestEngine, replay};
use eddyline::{CtxError, Error, FlowError, FlowOptions, Retry, RunCtx, StepCtx, StepError, Worker};
use eddyline_engine::{Config, Engine, StartRequest};
use eddyline_store::{Memory, Namespace};
use serde_json::{Map, Value, json};
use tokio::sync::oneshot;

const DAY: Duration = Duration::from_secs(24 * 3_600);
/// Longer than anything here takes; only reached if something hangs.
const LONG: Duration = Duration::from_secs(30);

async fn one() -> Result<u32, StepError> {
    Ok(1)
}

#[tokio::test]
async fn a_sleep_of_fourteen_days_takes_a_moment_and_now_knows_it() {
    let trial = |ctx: RunCtx, (): ()| async move {
        let began = ctx.now();
        ctx.step("begin", one).await?;
        ctx.sleep("trial", 14 * DAY).await?;
        let slept = ctx.now().duration_since(began).map_err(|error| FlowError::new(error.to_string()))?;
        Ok::<_, FlowError>(slept.as_secs() / DAY.as_secs())
    };
    let t = TestEngine::start(move |worker| worker.flow("trial", trial)).await;
    let began = Instant::now();
    assert_eq!(t.run("trial", ()).await.result::<u64>().await.unwrap(), 14);
    println!("fourteen days took {:?}", began.elapsed());
    t.stop().await;
}

#[tokio::test]
async fn every_kind_of_entry_works_and_the_handler_of_a_call_gets_the_key_of_its_name() {
    let all = |ctx: RunCtx, id: u32| async move {
        let called: String = ctx.call("echo", &id).name(("say", id)).await?;
        let doubled: u32 = ctx.child("double", &id).tag("kid").await?;
        let detached = ctx.child::<Value>("double", &id).name("apart").spawn().await?;
        let gate = ctx.webhook::<Value>("hook").timeout(DAY).await?;
        assert!(gate.token().is_empty() || gate.url().ends_with(gate.token()));
        let opened = gate.await?;
        let by_hand: u32 = ctx.manual("hand").await?.await?;
        let late: Option<Value> = ctx.wait_event("never", id).timeout(DAY).or_none().await?;
        let too_late = ctx.wait_event::<Value>("never", id).timeout(DAY).await;
        assert_eq!(too_late, Err(CtxError::WaitTimeout { name: "never#2".to_owned() }));
        ctx.publish("told", id, json!({"x": 1})).await?;
        let told: Value = ctx.wait_event("told", id).name("heard").await?;
        Ok::<_, FlowError>(json!([called, doubled, detached.len(), opened, by_hand, late, told]))
    };
    let double = |ctx: RunCtx, n: u32| async move {
        Ok::<_, FlowError>(ctx.step("double", || async { Ok::<_, StepError>(2 * n) }).await?)
    };
    let staff = move |worker: Worker| {
        worker.flow("all", all).flow("double", double).handler("echo", |step: StepCtx, n: u32| async move {
            let (_, name) = step.key().split_once('/').unwrap_or_default();
            Ok::<_, StepError>(format!("{n} {name}"))
        })
    };
    for shaking in [false, true] {
        let t = if shaking { TestEngine::shaking(staff).await } else { TestEngine::start(staff).await };
        let run = t.run("all", 7).await;
        run.open("hook", json!("yes")).await;
        run.open("hand", 5).await;
        let result: Value = run.result().await.unwrap();
        assert_eq!(result, json!(["7 say[7]", 14, 36, "yes", 5, null, {"x": 1}]), "shaking: {shaking}");
        t.stop().await;
    }
}

/// Parallel steps, a call, a sleep, a wait, a child, and steps that are undone.
async fn saga(ctx: RunCtx, input: (u32, bool), effects: Arc<Mutex<Vec<String>>>) -> Result<u32, FlowError> {
    let (id, fails) = input;
    let step = |name: &'static str| {
        let (done, undone) = (effects.clone(), effects.clone());
        ctx.step_with(name, move |step: StepCtx| {
            let done = done.clone();
            async move {
                done.lock().unwrap().push(step.key().rsplit('/').next().unwrap_or_default().to_owned());
                Ok::<_, StepError>(name.to_owned())
            }
        })
        .undo(move |name: String| {
            let undone = undone.clone();
            async move {
                undone.lock().unwrap().push(format!("undo {name}"));
                Ok::<_, StepError>(())
            }
        })
    };
    step("first").await?;
    let (left, right, called) = tokio::join!(step("left"), step("right"), ctx.call::<u32>("remote", &id));
    left?;
    right?;
    ctx.sleep("nap", Duration::from_secs(3_600)).await?;
    let child: u32 = ctx.child("kid", &id).await?;
    let event: u32 = ctx.wait_event("go", id).await?;
    step("last").await?;
    if fails {
        return Err(FlowError::permanent("boom").kind("Boom"));
    }
    Ok(called? + child + event)
}

fn staff_of_saga(effects: &Arc<Mutex<Vec<String>>>) -> impl Fn(Worker) -> Worker + Send + Sync + 'static {
    let effects = effects.clone();
    move |worker: Worker| {
        let effects = effects.clone();
        worker
            .flow("saga", move |ctx: RunCtx, input: (u32, bool)| saga(ctx, input, effects.clone()))
            .flow("kid", |ctx: RunCtx, n: u32| async move {
                ctx.step("work", one).await?;
                Ok::<_, FlowError>(n + 1)
            })
            .handler("remote", |_: StepCtx, n: u32| async move { Ok::<_, StepError>(n + 2) })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flow_survives_the_death_of_its_worker_before_and_after_every_message() {
    for fails in [false, true] {
        let mut messages = 0;
        for (at, before) in (1..100).flat_map(|at| [(at, true), (at, false)]) {
            let effects = Arc::<Mutex<Vec<String>>>::default();
            let t = TestEngine::start(staff_of_saga(&effects)).await;
            if before {
                t.lose_worker_before_message(at)
            } else {
                t.lose_worker_after_message(at)
            }
            let run = t.run("saga", (7, fails)).await;
            t.publish("go", 7, 100).await;
            let result = run.result::<u32>().await;
            let lost = t.lost_workers();
            match (fails, result) {
                (false, Ok(117)) => {}
                (true, Err(Error::RunFailed { failure, .. })) => {
                    assert_eq!(
                        (failure.kind.as_str(), failure.also.len()),
                        ("Boom", 0),
                        "death at {at}, {before}: {failure:?}"
                    );
                }
                (_, other) => panic!("death at message {at}, before: {before}: {other:?}"),
            }
            check_effects(&effects.lock().unwrap(), fails, &format!("death at message {at}, before: {before}"));
            t.stop().await;
            if lost == 0 {
                break;
            }
            messages = at;
        }
        println!("fails: {fails}: it survived a death at each of {messages} messages");
        assert!(messages >= 8, "{messages}");
    }
}

/// At most one repetition of what was in progress, and the undo steps in reverse order.
fn check_effects(effects: &[String], fails: bool, when: &str) {
    for name in ["first", "left", "right", "last"] {
        let times = effects.iter().filter(|done| *done == name).count();
        assert!((1..=2).contains(&times), "{when}: {name} {times} times in {effects:?}");
    }
    let mut undone: Vec<&str> = effects.iter().filter_map(|done| done.strip_prefix("undo ")).collect();
    undone.dedup();
    match fails {
        false => assert!(undone.is_empty(), "{when}: {undone:?}"),
        true => {
            assert_eq!(
                (undone.first(), undone.last(), undone.len()),
                (Some(&"last"), Some(&"first"), 4),
                "{when}: {undone:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_cancelled_run_undoes_what_it_did() {
    let effects = Arc::<Mutex<Vec<String>>>::default();
    let t = TestEngine::start(staff_of_saga(&effects)).await;
    let run = t.run("saga", (7, false)).await;
    run.waits_at("go").await;
    run.cancel().await;
    assert!(matches!(run.result::<u32>().await, Err(Error::RunCancelled { .. })));
    let effects = effects.lock().unwrap().clone();
    let undone: Vec<&String> = effects.iter().filter(|done| done.starts_with("undo ")).collect();
    assert_eq!((undone.len(), undone.last().map(|name| name.as_str())), (3, Some("undo first")), "{effects:?}");
    t.stop().await;
}

#[tokio::test]
async fn a_step_is_retried_as_its_policy_says_and_a_failed_attempt_of_the_function_keeps_what_completed() {
    let bodies = Arc::<AtomicUsize>::default();
    let counted = bodies.clone();
    let flow = move |ctx: RunCtx, (): ()| {
        let bodies = counted.clone();
        async move {
            ctx.step("once", || async {
                bodies.fetch_add(1, Ordering::SeqCst);
                one().await
            })
            .await?;
            let patient = Retry::attempts(4).initial(DAY).factor(1.0).jitter(0.0);
            let tries =
                ctx.step_with("flaky", |step| async move { Ok::<_, StepError>(step.attempt()) }).retry(patient).await?;
            if ctx.attempt() == 1 {
                return Err(FlowError::new("the first attempt of the function"));
            }
            Ok(tries)
        }
    };
    let t = TestEngine::start(move |worker| worker.flow("flaky", flow.clone())).await;
    t.fail("flaky", 1..=3, || StepError::new("busy"));
    let (began, run) = (t.now(), t.run("flaky", ()).await);
    assert_eq!(run.result::<u32>().await.unwrap(), 4);
    assert!(t.now().duration_since(began).unwrap() >= 3 * DAY, "three back-offs of a day");
    assert_eq!(bodies.load(Ordering::SeqCst), 1);
    t.fail("flaky", 1..=4, || StepError::new("broken").kind("Broken"));
    let Err(Error::RunFailed { failure, .. }) = t.run("flaky", ()).await.result::<u32>().await else {
        panic!("it fails")
    };
    assert_eq!((failure.kind.as_str(), failure.step.as_deref()), ("Broken", Some("flaky")));
    t.stop().await;
}

#[tokio::test]
async fn a_parent_on_a_worker_with_one_place_does_not_starve_its_children() {
    let parent = |ctx: RunCtx, depth: u32| async move {
        if depth == 0 {
            return Ok(0);
        }
        let (left, right) = tokio::try_join!(
            ctx.child::<u32>("tree", &(depth - 1)),
            ctx.child::<u32>("tree", &(depth - 1)).name("right")
        )?;
        Ok::<_, FlowError>(left + right + 1)
    };
    let t = TestEngine::start(move |worker| worker.flow("tree", parent).max_concurrent(1)).await;
    assert_eq!(t.run("tree", 4).await.result::<u32>().await.unwrap(), 15);
    t.stop().await;
}

#[tokio::test]
async fn shaking_finds_what_differs_between_two_executions() {
    let calls = Arc::<AtomicUsize>::default();
    let fickle = move |ctx: RunCtx, (): ()| {
        let calls = calls.clone();
        async move {
            ctx.step("a", one).await?;
            let name = if calls.fetch_add(1, Ordering::SeqCst) % 2 == 0 { "b" } else { "c" };
            Ok::<_, FlowError>(ctx.step(name, one).await?)
        }
    };
    let failed = tokio::spawn(async move {
        let t = TestEngine::shaking(move |worker| worker.flow("fickle", fickle.clone())).await;
        let _ = t.run("fickle", ()).await.result::<u32>().await;
        t.stop().await;
    });
    let panic = failed.await.expect_err("the test fails").into_panic();
    let message = panic.downcast_ref::<String>().expect("a message");
    assert!(message.contains("after the delivery of `a`"), "{message}");
    assert!(message.contains("step b") && message.contains("step c"), "{message}");
}

#[tokio::test]
async fn a_run_that_waits_for_ever_fails_the_test_with_what_it_waits_for() {
    let waits = |ctx: RunCtx, (): ()| async move { Ok::<Value, FlowError>(ctx.wait_event("never", 7).await?) };
    let failed = tokio::spawn(async move {
        let t = TestEngine::start(move |worker| worker.flow("waits", waits)).await;
        let _ = t.run("waits", ()).await.result::<Value>().await;
    });
    let panic = failed.await.expect_err("the test fails").into_panic();
    let message = panic.downcast_ref::<String>().expect("a message");
    assert!(message.contains("nothing is due") && message.contains("`never`"), "{message}");
}

#[tokio::test]
async fn graph_flows_are_driven_by_the_same_kit() {
    let t = TestEngine::start(|worker| {
        worker.handler("double", |_: StepCtx, n: u32| async move { Ok::<_, StepError>(2 * n) })
    })
    .await;
    t.apply(
        "
name: graph
steps:
  load: {run: double, input: '${input}', retry: {attempts: 3, initial: 1d}}
  wait: {after: [load], await: {manual: true, timeout: 30d}}
  last: {after: [wait], run: double, input: '${steps.load.output}'}
output: '${steps.last.output}'
",
    )
    .await;
    t.fail("double", [1], || StepError::new("busy"));
    let run = t.run("graph", 3).await;
    run.open("wait", json!({})).await;
    assert_eq!(run.result::<u32>().await.unwrap(), 12);
    t.stop().await;
}

#[tokio::test]
async fn ten_thousand_steps_and_their_replay() {
    let long = |ctx: RunCtx, n: u32| async move {
        let mut sum = 0;
        for i in 0..n {
            sum += ctx.step("add", || async { Ok::<_, StepError>(i % 7) }).await?;
        }
        Ok::<_, FlowError>(sum)
    };
    let t = TestEngine::start(move |worker| worker.flow("long", long)).await;
    let began = Instant::now();
    let expected: u32 = (0..10_000).map(|i| i % 7).sum();
    assert_eq!(t.run("long", 10_000).await.result::<u32>().await.unwrap(), expected);
    println!("10,000 steps took {:?}", began.elapsed());
    t.stop().await;

    let mut memo = Map::new();
    for i in 1..=10_000_u32 {
        let name = if i == 1 { "add".to_owned() } else { format!("add#{i}") };
        memo.insert(name, json!({"kind": "step", "n": i, "status": "completed", "output": (i - 1) % 7}));
    }
    let began = Instant::now();
    assert_eq!(replay(long, 10_000, memo).await, Replayed::Completed(json!(expected)));
    println!("a replay of 10,000 entries took {:?}", began.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_that_stops_hands_its_runs_over_after_the_step_in_hand() {
    let engine = Engine::start(Arc::new(Memory::new()), Config::default());
    let bodies = Arc::<AtomicUsize>::default();
    let counted = bodies.clone();
    let slow = move |ctx: RunCtx, n: usize| {
        let bodies = counted.clone();
        async move {
            for _ in 0..n {
                ctx.step("slow", || async {
                    bodies.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    one().await
                })
                .await?;
            }
            Ok::<_, FlowError>(ctx.attempt())
        }
    };
    let worker = || {
        let (stop, stopped) = oneshot::channel();
        let options = FlowOptions::new().retry(Retry::none());
        let worker = Worker::in_process(engine.clone()).flow_with("slow", options, slow.clone());
        (stop, tokio::spawn(worker.run_until(stopped)))
    };
    let (stop, first) = worker();
    while engine.flow(&Namespace::default(), "slow", None).await.is_err() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let request = StartRequest { flow: "slow".to_owned(), input: json!(20), ..StartRequest::default() };
    let run = engine.start_run(&Namespace::default(), request).await.unwrap().run;
    while bodies.load(Ordering::SeqCst) < 3 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let began = Instant::now();
    stop.send(()).unwrap();
    tokio::time::timeout(LONG, first).await.unwrap().unwrap().unwrap();
    let took = began.elapsed();
    assert!(took < Duration::from_millis(1_100), "one step of 100 ms was in hand: {took:?}");
    let (stop, second) = worker();
    let result = engine.result(&Namespace::default(), run, LONG).await.unwrap().expect("the run ends");
    assert_eq!(result.output, Some(json!(1)), "no attempt was counted: {:?}", result.error);
    assert_eq!(bodies.load(Ordering::SeqCst), 20, "no step twice");
    stop.send(()).unwrap();
    second.await.unwrap().unwrap();
    engine.shutdown().await;
}
