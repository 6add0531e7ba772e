//! Events that are delivered late, in many namespaces, to many gates.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use eddyline_engine::{Config, PublishRequest, StartRequest};
use eddyline_machine::{ActId, Entry};
use eddyline_store::{HOLD_MS, ManualClock, Memory, Namespace};
use rig::Rig;
use rig::hooked::{Fault, Hooked};
use serde_json::{Value, json};

fn event(payload: Value) -> Vec<PublishRequest> {
    vec![PublishRequest { name: "paid".to_owned(), key: None, payload, id: None }]
}

const WAITS: &str = "name: f\nsteps: {paid: {await: {event: paid}}}\noutput: '${steps.paid.output}'";
const MANY: &str = "name: many\nsteps: {e: {spread: range(input), max_parallel: 5000, steps: {g: {await: {event: paid}}}}}\n\
                    output: '${steps.e.output}'";

/// The gate is created after the event is published and before it is delivered.
#[tokio::test]
async fn an_event_from_before_a_run_opens_no_gate_of_it_however_late_it_is_told() {
    let clock = ManualClock::at(1_767_323_045_678);
    let store = Arc::new(Hooked::new(Arc::new(Memory::with_clock(clock.clone()))));
    let rig = Rig::on(store.clone(), Config { poll_ms: 5, ..Config::default() });
    rig.register(WAITS).await;
    store.events_open.send_replace(false);
    rig.engine.publish(&rig.ns, event(json!("before the run"))).await.unwrap();
    clock.advance(10);
    let run = rig.start("f", json!(null)).await;
    store.events_open.send_replace(true);
    let mut rounds = rig.engine.rounds("events").unwrap();
    let now = *rounds.borrow();
    rounds.wait_for(|rounds| *rounds >= now + 3).await.unwrap();
    clock.advance(10);
    rig.engine.publish(&rig.ns, event(json!("after its start"))).await.unwrap();
    assert_eq!(rig.output(run).await, json!("after its start"));
    rig.stop().await;
}

#[tokio::test]
async fn one_event_to_thousands_of_gates_is_told_in_parts() {
    let store = Arc::new(Hooked::new(Arc::new(Memory::new())));
    let rig = Rig::on(store.clone(), Config::default());
    rig.register(WAITS).await;
    let request = || StartRequest { flow: "f".to_owned(), ..StartRequest::default() };
    let started = rig.engine.start_batch(&rig.ns, (0..3_000).map(|_| request()).collect()).await.unwrap();
    rig.engine.publish(&rig.ns, event(json!({"text": "x".repeat(20_000)}))).await.unwrap();
    for run in started {
        assert_eq!(rig.output(run.unwrap().run).await["text"].as_str().map(str::len), Some(20_000));
    }
    let most = store.most_messages.load(Ordering::SeqCst);
    assert!(most <= 250, "{most} messages of 20 kB in one commit");
    rig.stop().await;
}

/// Each gate gets a message to look back and one with the event. Once, each message took its own commit, and each look
/// back read all gates and messages of the run. The clock stands still, so nothing can rely on becoming due again.
#[tokio::test]
async fn one_event_to_many_gates_of_a_run_takes_few_commits_and_reads() {
    let clock = ManualClock::at(1_767_323_045_678);
    let store = Arc::new(Hooked::new(Arc::new(Memory::with_clock(clock))));
    let rig = Rig::on(store.clone(), Config::default());
    rig.register(MANY).await;
    let run = rig.start("many", json!(600)).await;
    rig.engine.publish(&rig.ns, event(json!(1))).await.unwrap();
    assert_eq!(rig.output(run).await.as_array().map(Vec::len), Some(600));
    let count = |of: &AtomicUsize| of.load(Ordering::SeqCst);
    let (commits, reads) = (count(&store.commits), count(&store.reads));
    assert!(commits <= 100 && reads <= 100, "{commits} commits and {reads} reads for 600 gates");
    rig.stop().await;
}

#[tokio::test]
async fn messages_do_not_overtake_those_that_could_not_be_committed() {
    let clock = ManualClock::at(1_767_323_045_678);
    let failing = Arc::new(AtomicUsize::new(usize::MAX));
    let countdown = failing.clone();
    let mut store = Hooked::new(Arc::new(Memory::with_clock(clock.clone())));
    // After the event is published and delivered: the first part of its messages.
    store.fate = Box::new(move |_| (countdown.fetch_sub(1, Ordering::SeqCst) == 2).then_some(Fault::Unavailable));
    let rig = Rig::on(Arc::new(store), Config { poll_ms: 5, ..Config::default() });
    rig.register(MANY).await;
    let run = rig.start("many", json!(900)).await;
    let is_waiting = async || {
        let pending = rig.engine.store().pending(run).await.unwrap();
        pending.messages.is_empty() && pending.gates.len() == 900
    };
    while !is_waiting().await {
        tokio::task::yield_now().await;
    }
    failing.store(4, Ordering::SeqCst);
    rig.engine.publish(&rig.ns, event(json!(1))).await.unwrap();
    while (2..=4).contains(&failing.load(Ordering::SeqCst)) {
        tokio::task::yield_now().await;
    }
    for _ in 0..50 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    clock.advance(HOLD_MS + 1);
    rig.output(run).await;
    let opened = rig.records(run).await.into_iter().filter_map(|record| match record.record.entry {
        Entry::AwaitTriggered { token, .. } => Some(token.activation),
        _ => None,
    });
    let opened: Vec<ActId> = opened.collect();
    assert_eq!(opened.len(), 900);
    assert!(opened.is_sorted(), "in the order in which they were sent");
    rig.stop().await;
}

#[tokio::test]
async fn a_run_whose_messages_take_long_keeps_no_other_from_its_own() {
    let store = Arc::new(Hooked::new(Arc::new(Memory::new())));
    let rig = Rig::on(store.clone(), Config::default());
    rig.register(MANY).await;
    rig.register("name: child\nsteps: {a: {set: 1}}\noutput: '${steps.a.output}'").await;
    rig.register("name: parent\nsteps: {a: {flow: child}}\noutput: '${steps.a.output}'").await;
    store.pending_open.send_replace(false);
    let many = rig.start("many", json!(10)).await;
    while store.reads.load(Ordering::SeqCst) == 0 {
        tokio::task::yield_now().await;
    }
    let parent = rig.start("parent", json!(null)).await;
    let result = rig.engine.result(&rig.ns, parent, Duration::from_secs(5)).await.unwrap();
    assert_eq!(result.expect("it waited for the messages of another run").output, Some(json!(1)));
    store.pending_open.send_replace(true);
    rig.engine.publish(&rig.ns, event(json!(1))).await.unwrap();
    assert_eq!(rig.output(many).await.as_array().map(Vec::len), Some(10));
    rig.stop().await;
}

#[tokio::test]
async fn events_are_told_in_every_namespace_however_many_there_are() {
    let rig = Rig::memory();
    let last = Namespace::new("zz");
    for n in 0..1_050 {
        rig.engine.publish(&Namespace::new(&format!("n{n}")), Vec::new()).await.unwrap();
    }
    rig.engine.register(&last, None, WAITS).await.unwrap();
    let request = StartRequest { flow: "f".to_owned(), ..StartRequest::default() };
    let run = rig.engine.start_run(&last, request).await.unwrap().run;
    // The gate has already looked back, so the event must be delivered to it.
    while !rig.engine.store().pending(run).await.unwrap().messages.is_empty() {
        tokio::task::yield_now().await;
    }
    rig.engine.publish(&last, event(json!(1))).await.unwrap();
    let result = rig.engine.result(&last, run, Duration::from_secs(30)).await.unwrap();
    assert_eq!(result.expect("the event was never delivered").output, Some(json!(1)));
    rig.stop().await;
}

#[tokio::test]
async fn an_event_is_looked_for_in_its_own_namespace_alone() {
    let store = Arc::new(Hooked::new(Arc::new(Memory::new())));
    let rig = Rig::on(store.clone(), Config { poll_ms: 60_000, ..Config::default() });
    for n in 0..20 {
        rig.engine.publish(&Namespace::new(&format!("tenant-{n}")), event(json!(n))).await.unwrap();
    }
    rig.register(WAITS).await;
    let warm = rig.start("f", json!(null)).await;
    rig.engine.publish(&rig.ns, event(json!("warm"))).await.unwrap();
    assert_eq!(rig.output(warm).await, json!("warm"));
    // Wait until all earlier events are delivered and the first sweep over all namespaces is over.
    let mut rounds = rig.engine.rounds("events").unwrap();
    while tokio::time::timeout(Duration::from_millis(200), rounds.changed()).await.is_ok() {}

    store.event_reads.lock().unwrap().clear();
    let run = rig.start("f", json!(null)).await;
    rig.engine.publish(&rig.ns, event(json!("now"))).await.unwrap();
    assert_eq!(rig.output(run).await, json!("now"));
    let told = store.event_reads.lock().unwrap().clone();
    assert!(!told.is_empty() && told.iter().all(|ns| *ns == rig.ns), "{told:?}");
    rig.stop().await;
}
