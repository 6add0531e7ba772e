//! Events that are told late, in many namespaces, to many gates.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use eddyline_engine::{Config, PublishRequest, StartRequest};
use eddyline_store::{ManualClock, Memory, Namespace};
use rig::Rig;
use rig::hooked::Hooked;
use serde_json::{Value, json};

fn event(payload: Value) -> Vec<PublishRequest> {
    vec![PublishRequest { name: "paid".to_owned(), key: None, payload, id: None }]
}

const WAITS: &str = "name: f\nsteps: {paid: {await: {event: paid}}}\noutput: '${steps.paid.output}'";

/// The gate came after the event, and before the event was told to anybody.
#[tokio::test]
async fn an_event_from_before_a_run_opens_no_gate_of_it_however_late_it_is_told() {
    let clock = ManualClock::at(1_767_323_045_678);
    let store = Arc::new(Hooked::new(Arc::new(Memory::with_clock(clock.clone()))));
    let rig = Rig::on(store.clone(), Config { poll_ms: 5, ..Config::default() });
    rig.register(WAITS).await;
    store.telling.send_replace(false);
    rig.engine.publish(&rig.ns, event(json!("before the run"))).await.unwrap();
    clock.advance(10);
    let run = rig.start("f", json!(null)).await;
    store.telling.send_replace(true);
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
    // Its gate has looked back, so the event must come to it.
    while !rig.engine.store().beside(run).await.unwrap().messages.is_empty() {
        tokio::task::yield_now().await;
    }
    rig.engine.publish(&last, event(json!(1))).await.unwrap();
    let result = rig.engine.result(&last, run, Duration::from_secs(30)).await.unwrap();
    assert_eq!(result.expect("the event was never told").output, Some(json!(1)));
    rig.stop().await;
}
