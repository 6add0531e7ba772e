//! Runs whose decisions take much time or memory do not delay others.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use eddyline_engine::{Config, Decision, EngineError, Reported, StartRequest, TaskReport};
use eddyline_machine::{Answer, Data, Op, RunId};
use eddyline_store::{Embedded, Found, Memory, Namespace, Options, Store};
use rig::hooked::Hooked;
use rig::{LONG, Rig, claim, done};
use serde_json::json;
use tokio::sync::watch;

const HEAVY: &str = "name: heavy\nsteps: {a: {set: '${size(range(100000).filter(i, i % 2 == 0))}'}}";
const LIGHT: &str = "name: light\nsteps: {a: {}}";

/// An engine whose heavy decisions block until they are released.
fn held_up(decided: &Arc<Mutex<Vec<RunId>>>) -> (Rig, watch::Sender<bool>) {
    let (go, held) = watch::channel(false);
    let decided = decided.clone();
    let on_decision = move |decision: Decision| {
        if decision.apart {
            let mut held = held.clone();
            let _ = blocking(held.wait_for(|go| *go));
            decided.lock().unwrap().push(decision.run);
        }
    };
    let config = Config { on_decision: Some(Arc::new(on_decision)), ..Config::default() };
    (Rig::on(Arc::new(Memory::new()), config), go)
}

fn blocking<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
}

async fn start_in(rig: &Rig, ns: &Namespace, flow: &str) -> Result<RunId, EngineError> {
    let request = StartRequest { flow: flow.to_owned(), ..StartRequest::default() };
    rig.engine.start_run(ns, request).await.map(|started| started.run)
}

#[tokio::test]
async fn other_runs_go_on_while_a_heavy_decision_is_made() {
    let decided = Arc::default();
    let (rig, go) = held_up(&decided);
    rig.register(HEAVY).await;
    rig.register(LIGHT).await;
    let engine = rig.engine.clone();
    let heavy = tokio::spawn(async move {
        let request = StartRequest { flow: "heavy".to_owned(), ..StartRequest::default() };
        engine.start_run(&Namespace::default(), request).await.unwrap().run
    });
    for _ in 0..10 {
        let light = rig.start("light", json!(null)).await;
        let task = rig.claim("w").await.unwrap();
        assert!(matches!(rig.report(&task, done(json!(1))).await, Answer::Applied(_)));
        rig.output(light).await;
    }
    assert!(!heavy.is_finished());
    go.send_replace(true);
    let heavy = heavy.await.unwrap();
    rig.output(heavy).await;
    assert_eq!(*decided.lock().unwrap(), [heavy]);
    rig.stop().await;
}

#[tokio::test]
async fn inputs_that_come_while_a_heavy_decision_is_made_are_decided_after_it() {
    let decided = Arc::default();
    let (rig, go) = held_up(&decided);
    rig.register(
        "name: f\nsteps: {a: {}, b: {after: [a], set: '${size(range(100000).filter(i, i % 2 == 0))}'}, c: {}}",
    )
    .await;
    let run = rig.start("f", json!(null)).await;
    let (a, c) = (rig.claim("w").await.unwrap(), rig.claim("w").await.unwrap());
    assert_eq!((a.activation.as_str(), c.activation.as_str()), ("a", "c"));
    let rig = Arc::new(rig);
    let (first, second) = (rig.clone(), rig.clone());
    let first = tokio::spawn(async move { first.report(&a, done(json!(1))).await });
    let second = tokio::spawn(async move { second.report(&c, done(json!(2))).await });
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    go.send_replace(true);
    assert!(matches!(first.await.unwrap(), Answer::Applied(_)));
    assert!(matches!(second.await.unwrap(), Answer::Applied(_)));
    rig.output(run).await;
    rig.engine.shutdown().await;
}

#[tokio::test]
async fn an_act_of_another_namespace_on_a_run_that_waits_for_its_decision_changes_nothing() {
    let decided = Arc::default();
    let (rig, go) = held_up(&decided);
    rig.register(HEAVY).await;
    rig.register(
        "name: f\nsteps: {a: {}, b: {after: [a], set: '${size(range(100000).filter(i, i % 2 == 0))}'}, c: {}}",
    )
    .await;
    let run = rig.start("f", json!(null)).await;
    let (a, c) = (rig.claim("w").await.unwrap(), rig.claim("w").await.unwrap());
    let rig = Arc::new(rig);
    // These keep every thread for heavy decisions busy.
    let busy: Vec<_> = (0..std::thread::available_parallelism().unwrap().get())
        .map(|_| {
            let rig = rig.clone();
            tokio::spawn(async move { start_in(&rig, &rig.ns, "heavy").await.unwrap() })
        })
        .collect();
    settle().await;
    let (first, foreign, last) = (rig.clone(), rig.clone(), rig.clone());
    let first = tokio::spawn(async move { first.report(&a, done(json!(1))).await });
    settle().await;
    let foreign = tokio::spawn(async move { foreign.engine.pause(&Namespace::new("other"), run, "them").await });
    settle().await;
    let last = tokio::spawn(async move { last.report(&c, done(json!(2))).await });
    settle().await;
    go.send_replace(true);
    assert!(matches!(first.await.unwrap(), Answer::Applied(_)));
    assert!(matches!(foreign.await.unwrap(), Err(EngineError::NotFound { .. })));
    assert!(matches!(last.await.unwrap(), Answer::Applied(_)));
    for run in busy {
        rig.output(run.await.unwrap()).await;
    }
    rig.output(run).await;
    rig.engine.shutdown().await;
}

/// Lets everything that can make progress do so.
async fn settle() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_namespace_with_many_heavy_runs_keeps_no_other_waiting() {
    let decided: Arc<Mutex<Vec<RunId>>> = Arc::default();
    let (rig, go) = held_up(&decided);
    let quiet = Namespace::new("quiet");
    rig.register(HEAVY).await;
    rig.engine.register(&quiet, None, HEAVY).await.unwrap();
    let rig = Arc::new(rig);
    let start = |ns: Namespace| {
        let rig = rig.clone();
        tokio::spawn(async move { start_in(&rig, &ns, "heavy").await.unwrap() })
    };
    let many: Vec<_> = (0..50).map(|_| start(rig.ns.clone())).collect();
    tokio::task::yield_now().await;
    let one = start(quiet);
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    go.send_replace(true);
    let one = one.await.unwrap();
    for run in many {
        run.await.unwrap();
    }
    let decided: Vec<RunId> = decided.lock().unwrap().clone();
    assert_eq!(decided.len(), 51);
    let place = decided.iter().position(|run| *run == one).unwrap();
    // As many decisions as threads began before it arrived, and as many may begin at the same time.
    let threads = std::thread::available_parallelism().unwrap().get();
    assert!(place <= 2 * threads, "it was number {place}");
    rig.engine.shutdown().await;
}

#[tokio::test]
async fn the_schema_of_an_event_is_not_evaluated_on_the_committers_thread() {
    let decided: Arc<Mutex<Vec<RunId>>> = Arc::default();
    let (rig, go) = held_up(&decided);
    go.send_replace(true);
    rig.register("name: f\nsteps: {a: {emits: [{seen: {type: integer}}]}}").await;
    let run = rig.start("f", json!(null)).await;
    let task = rig.claim("w").await.unwrap();
    let emit = |payload: serde_json::Value| Op::Emit { event: "seen".to_owned(), payload: payload.into() };
    assert!(matches!(rig.report(&task, emit(json!("no"))).await, Answer::Invalid(_)));
    assert!(matches!(rig.report(&task, emit(json!(1))).await, Answer::Applied(_)));
    assert!(decided.lock().unwrap().len() >= 2, "{decided:?}");
    assert!(matches!(rig.report(&task, done(json!(1))).await, Answer::Applied(_)));
    rig.output(run).await;
    rig.stop().await;
}

/// A flow with an event whose schema check costs about 800,000 steps although it is small, and the event's payload.
fn costly() -> (String, Data) {
    let mut ways: Vec<serde_json::Value> = (0..2_000).map(|n| json!({"const": n})).collect();
    ways.push(json!({"type": "integer"}));
    let schema = json!({"type": "array", "items": {"anyOf": ways}});
    let flow = json!({"name": "costly", "steps": {"a": {"emits": [{"seen": schema}]}}});
    (flow.to_string(), json!(vec![-1; 400]).into())
}

#[tokio::test]
async fn a_report_with_many_costly_events_is_refused_beside_quick_starts_of_another_namespace() {
    let rig = Rig::on(Arc::new(Memory::new()), Config::default());
    let quiet = Namespace::new("quiet");
    let (flow, payload) = costly();
    rig.register(&flow).await;
    rig.engine.register(&quiet, None, LIGHT).await.unwrap();
    rig.start("costly", json!(null)).await;
    let task = rig.claim("w").await.unwrap();
    let rig = Arc::new(rig);
    let reporting = {
        let (rig, task) = (rig.clone(), task.clone());
        let emits = vec![("seen".to_owned(), payload.clone()); 100];
        let op = Op::Complete { output: json!(1).into(), emits, logs: Vec::new() };
        tokio::spawn(async move { rig.report(&task, op).await })
    };
    for _ in 0..20 {
        let began = std::time::Instant::now();
        start_in(&rig, &quiet, "light").await.unwrap();
        assert!(began.elapsed() < Duration::from_secs(2), "a start took {:?}", began.elapsed());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let Answer::Invalid(why) = reporting.await.unwrap() else { panic!("it was not rejected") };
    assert!(why.contains("takes more than 40000000 steps, the limit for one report"), "{why}");
    let emits = vec![("seen".to_owned(), payload); 3];
    let op = Op::Complete { output: json!(1).into(), emits, logs: Vec::new() };
    assert!(matches!(rig.report(&task, op).await, Answer::Applied(_)), "the rejected report changed something");
    rig.engine.shutdown().await;
}

#[tokio::test]
async fn costly_reports_of_one_call_are_decided_in_parts() {
    let decided: Arc<Mutex<Vec<RunId>>> = Arc::default();
    let (rig, go) = held_up(&decided);
    go.send_replace(true);
    let (flow, payload) = costly();
    rig.register(&flow).await;
    rig.start("costly", json!(null)).await;
    let task = rig.claim("w").await.unwrap();
    let reports = (1..=30).map(|seq| {
        let op = Op::Emit { event: "seen".to_owned(), payload: payload.clone() };
        TaskReport { token: task.token, seq: Some(seq), op }
    });
    let reported = rig.engine.report(&rig.ns, reports.collect()).await.unwrap();
    for (at, reported) in reported.iter().enumerate() {
        assert!(matches!(reported, Reported::Answer { answer: Answer::Applied(_), .. }), "{at}: {reported:?}");
    }
    let decisions = decided.lock().unwrap().len();
    assert!(decisions >= 3, "30 events of 800,000 steps each were checked in {decisions} decisions");
    rig.stop().await;
}

#[tokio::test]
async fn a_large_run_stays_cached_while_small_ones_come_and_go() {
    let loads = Arc::new(AtomicUsize::new(0));
    let count = loads.clone();
    let tampering = move |found: &mut Found| {
        if let Found::Run(loaded) = found
            && loaded.rows.header.flow == "large"
        {
            count.fetch_add(1, Ordering::SeqCst);
        }
    };
    let store = Hooked { tampering: Some(Box::new(tampering)), ..Hooked::new(Arc::new(Memory::new())) };
    let config = Config { cache_bytes: 256 << 10, reconcile_ms: 3_600_000, ..Config::default() };
    let mut rig = Rig::on(Arc::new(store), config);
    rig.register(LIGHT).await;
    rig.register("name: large\nsteps: {each: {spread: 'range(2000)', run: item, max_parallel: 2000}}").await;
    let large = rig.start("large", json!(null)).await;
    let before = rig.start("light", json!(null)).await;
    rig.work(4, |task| done(json!(task.activation)));
    rig.output(before).await;
    for _ in 0..100 {
        let light = rig.start("light", json!("x".repeat(200))).await;
        rig.output(light).await;
    }
    rig.output(large).await;
    let loads = loads.load(Ordering::SeqCst);
    assert!(loads < 20, "it was loaded {loads} times");
    rig.stop().await;
}

#[tokio::test]
async fn queued_runs_with_large_inputs_take_no_memory() {
    const RUNS: usize = 60;
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Embedded::open(dir.path(), Options::default()).unwrap());
    let rig = Rig::on(store, Config::default());
    rig.register(LIGHT).await;
    let input = json!("x".repeat((2 << 20) - 100));
    // The allocator and the store keep some buffers of that size, the same number after 60 runs as after 600.
    for _ in 0..RUNS {
        rig.start("light", input.clone()).await;
    }
    let before = resident_mib();
    for _ in 0..RUNS {
        rig.start("light", input.clone()).await;
    }
    let grown = resident_mib().saturating_sub(before);
    assert!(grown < RUNS, "{RUNS} runs with inputs of 2 MiB made the process grow by {grown} MiB");
    let task = rig.claim("w").await.unwrap();
    assert_eq!(*task.input, input, "the input is not read when it is needed");
    rig.stop().await;
}

fn resident_mib() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() >> 10
}

#[tokio::test]
async fn a_claim_beside_a_heavy_decision_is_answered() {
    let decided = Arc::default();
    let (rig, go) = held_up(&decided);
    rig.register(HEAVY).await;
    let engine = rig.engine.clone();
    let heavy = tokio::spawn(async move {
        let request = StartRequest { flow: "heavy".to_owned(), ..StartRequest::default() };
        engine.start_run(&Namespace::default(), request).await.unwrap().run
    });
    tokio::task::yield_now().await;
    let nothing = rig.engine.claim(&rig.ns, claim("w"), Duration::from_millis(20)).await.unwrap();
    assert!(nothing.is_empty());
    go.send_replace(true);
    rig.output(heavy.await.unwrap()).await;
    rig.stop().await;
}

#[tokio::test]
async fn heavy_runs_that_do_not_fit_into_the_cache_are_all_decided() {
    // The cache has room for the last used run only.
    let mut rig = Rig::on(Arc::new(Memory::new()), Config { cache_bytes: 1, ..Config::default() });
    let set = "${size(range(100000).filter(i, i % 2 == 0)) + size(input)}";
    rig.register(&format!("name: f\nsteps: {{a: {{}}, b: {{after: [a], set: '{set}'}}}}")).await;
    let input = json!("x".repeat(100 << 10));
    let mut runs = Vec::new();
    for _ in 0..20 {
        runs.push(rig.start("f", input.clone()).await);
    }
    rig.work(20, |_| done(json!(1)));
    for run in runs {
        rig.output(run).await;
    }
    rig.stop().await;
}

#[tokio::test]
async fn due_items_of_one_namespace_leave_room_for_those_of_others() {
    let (go, held) = watch::channel(false);
    let on_decision = move |decision: Decision| {
        if decision.apart {
            let _ = blocking(held.clone().wait_for(|go| *go));
        }
    };
    let config = Config { on_decision: Some(Arc::new(on_decision)), due_batch: 2, ..Config::default() };
    let rig = Rig::on(Arc::new(Memory::new()), config);
    let quiet = Namespace::new("quiet");
    // More messages and timers than may be in flight, all for runs that wait for a thread.
    rig.register(HEAVY).await;
    rig.register("name: many\nsteps: {each: {spread: 'range(60)', flow: heavy}}").await;
    rig.register("name: nap\nsteps: {nap: {await: {time: 10ms}}, a: {after: [nap], set: '${size(range(100000).filter(i, i % 2 == 0))}'}}")
        .await;
    rig.start("many", json!(null)).await;
    for _ in 0..60 {
        rig.start("nap", json!(null)).await;
    }
    rig.engine.register(&quiet, None, "name: kid\nsteps: {a: {set: 1}}").await.unwrap();
    let parent = "name: parent\nsteps: {nap: {await: {time: 100ms}}, kid: {after: [nap], flow: kid}}";
    rig.engine.register(&quiet, None, parent).await.unwrap();
    let run = start_in(&rig, &quiet, "parent").await.unwrap();
    let ended = rig.engine.result(&quiet, run, Duration::from_secs(20)).await.unwrap();
    assert!(ended.is_some(), "it waits for the runs of another namespace");
    go.send_replace(true);
    rig.stop().await;
}

/// A flow that creates stored values of 1 MiB each and then reads them.
fn looking(values: usize, set: &str) -> String {
    format!(
        "name: looking\nsteps:\n  each:\n    spread: 'range({values})'\n    as: n\n    \
         steps: {{s: {{set: '${{run.input.s + string(n)}}'}}}}\n    output: '${{steps.s.output}}'\n  \
         all: {{after: [each], set: '${{{set}}}'}}\noutput: '${{steps.all.output}}'"
    )
}

#[tokio::test]
async fn stored_values_are_read_within_a_bound_and_for_a_decision_elsewhere() {
    let reading = Arc::new(Hooked::new(Arc::new(Memory::new())));
    let (store, read, read_here) = (reading.clone(), AtomicUsize::new(0), Arc::new(AtomicUsize::new(0)));
    let here = read_here.clone();
    let on_decision = move |decision: Decision| {
        let before = read.swap(store.read.load(Ordering::SeqCst), Ordering::SeqCst);
        if !decision.apart {
            // Everything read since the last decision was read for one on the committer's thread.
            here.fetch_max(store.read.load(Ordering::SeqCst) - before, Ordering::SeqCst);
        }
    };
    let config = Config { on_decision: Some(Arc::new(on_decision)), ..Config::default() };
    let rig = Rig::on(reading.clone(), config);
    let input = json!({"s": "x".repeat(1 << 20)});
    rig.register(&looking(20, "sum(steps.each.output.map(x, size(x)))")).await;
    let few = rig.start("looking", input.clone()).await;
    assert_eq!(rig.output(few).await, json!(20 * (1 << 20) + 30));
    assert!(reading.most_read.load(Ordering::SeqCst) > 20 << 20);
    rig.register(&looking(100, "sum(steps.each.output.map(x, size(x)))")).await;
    let many = rig.start("looking", input).await;
    let error = rig.engine.result(&rig.ns, many, LONG).await.unwrap().unwrap().error.unwrap();
    assert!(error.message.contains("read more than 32 MiB of stored values"), "{error:?}");
    let most = reading.most_read.load(Ordering::SeqCst) >> 20;
    assert!(most <= 32, "{most} MiB were read at once");
    let here = read_here.load(Ordering::SeqCst) >> 10;
    assert!(here <= 64, "{here} KiB were read for a decision on the committer's thread");
    rig.stop().await;
}

#[tokio::test]
async fn what_was_read_for_a_decision_is_let_go_of_after_it() {
    let dir = tempfile::tempdir().unwrap();
    let store: Arc<dyn Store> = Arc::new(Embedded::open(dir.path(), Options::default()).unwrap());
    let rig = Rig::on(store, Config::default());
    rig.register(
        &looking(24, "sum(steps.each.output.map(x, size(x)))")
            .replace("\noutput:", "\n  wait: {after: [all]}\noutput:"),
    )
    .await;
    let input = json!({"s": "x".repeat(1 << 20)});
    let look = async || {
        rig.start("looking", input.clone()).await;
        // The last step is queued when the others have read the values.
        rig.claim("w").await.unwrap();
    };
    look().await;
    look().await;
    let before = resident_mib();
    for _ in 0..4 {
        look().await;
    }
    let grown = resident_mib().saturating_sub(before);
    assert!(grown < 48, "4 runs that read 24 MiB each made the process grow by {grown} MiB");
    rig.stop().await;
}

#[tokio::test]
async fn runs_that_read_much_at_the_same_time_are_all_decided() {
    let rig = Rig::on(Arc::new(Memory::new()), Config::default());
    rig.register(&looking(8, "sum(steps.each.output.map(x, size(x)))")).await;
    let input = json!({"s": "x".repeat(1 << 20)});
    let mut runs = Vec::new();
    for _ in 0..12 {
        runs.push(rig.start("looking", input.clone()).await);
    }
    for run in runs {
        assert_eq!(rig.output(run).await, json!(8 * (1 << 20) + 8));
    }
    rig.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thread_that_decides_elsewhere_never_waits_for_the_disk_while_others_want_to_note() {
    let (go, held) = watch::channel(false);
    let apart: Arc<Mutex<Vec<std::thread::ThreadId>>> = Arc::default();
    let noting = apart.clone();
    let on_note = move || {
        // The disk hangs for notes that a thread of heavy decisions writes itself.
        if noting.lock().unwrap().contains(&std::thread::current().id()) {
            let _ = blocking(held.clone().wait_for(|go| *go));
        }
    };
    let on_decision = move |decision: Decision| {
        if decision.apart {
            apart.lock().unwrap().push(std::thread::current().id());
        }
    };
    let store = Hooked { on_note: Box::new(on_note), ..Hooked::new(Arc::new(Memory::new())) };
    let rig = Rig::on(Arc::new(store), Config { on_decision: Some(Arc::new(on_decision)), ..Config::default() });
    rig.register(HEAVY).await;
    rig.register(LIGHT).await;
    let engine = rig.engine.clone();
    let heavy = tokio::spawn(async move {
        let request = StartRequest { flow: "heavy".to_owned(), ..StartRequest::default() };
        engine.start_run(&Namespace::default(), request).await.unwrap().run
    });
    let light = async {
        for _ in 0..50 {
            rig.start("light", json!(null)).await;
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let answered = tokio::time::timeout(Duration::from_secs(10), light).await;
    go.send_replace(true);
    assert!(answered.is_ok(), "starts wait for the note of a heavy decision");
    rig.output(heavy.await.unwrap()).await;
    rig.stop().await;
}
