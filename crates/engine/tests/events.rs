//! Events and the gates that wait for them, whichever comes first.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;

use eddyline_engine::{Config, PublishRequest};
use eddyline_machine::{Data, Op};
use eddyline_store::{ManualClock, Memory};
use rig::{Rig, done};
use serde_json::{Value, json};

fn event(name: &str, key: Option<Value>, payload: Value) -> PublishRequest {
    PublishRequest { name: name.to_owned(), key, payload, id: None }
}

const WAITS: &str = "name: f\nsteps: {paid: {await: {event: paid, key: input.order}}}\noutput: '${steps.paid.output}'";

#[tokio::test]
async fn an_event_opens_the_gates_of_its_key_and_no_others() {
    let rig = Rig::memory();
    rig.register(WAITS).await;
    let (one, other) = (rig.start("f", json!({"order": 1})).await, rig.start("f", json!({"order": 2})).await);
    rig.engine.publish(&rig.ns, vec![event("paid", Some(json!(1.0)), json!("one"))]).await.unwrap();
    assert_eq!(rig.output(one).await, json!("one"));
    assert!(rig.engine.result(&rig.ns, other, std::time::Duration::ZERO).await.unwrap().is_none());
    rig.engine.publish(&rig.ns, vec![event("paid", Some(json!(2)), json!("two"))]).await.unwrap();
    assert_eq!(rig.output(other).await, json!("two"));
    rig.stop().await;
}

#[tokio::test]
async fn a_gate_looks_back_over_what_was_published_since_its_run_began() {
    let clock = ManualClock::at(1_767_323_045_678);
    let rig = Rig::on(Arc::new(Memory::with_clock(clock.clone())), Config::default());
    rig.register("name: f\nsteps: {a: {}, paid: {after: [a], await: {event: paid}}}\noutput: '${steps.paid.output}'")
        .await;
    rig.engine.publish(&rig.ns, vec![event("paid", None, json!("before the run"))]).await.unwrap();
    clock.advance(1);
    let run = rig.start("f", json!(null)).await;
    rig.engine.publish(&rig.ns, vec![event("paid", Some(json!("any")), json!("before the gate"))]).await.unwrap();
    let task = rig.claim("w").await.unwrap();
    rig.report(&task, done(json!(1))).await;
    assert_eq!(rig.output(run).await, json!("before the gate"));
    rig.stop().await;
}

#[tokio::test]
async fn what_a_step_publishes_opens_a_gate_of_another_run() {
    let rig = Rig::memory();
    rig.register(WAITS).await;
    rig.register("name: g\nsteps: {a: {}}").await;
    let waits = rig.start("f", json!({"order": "x"})).await;
    let sends = rig.start("g", json!(null)).await;
    let task = rig.claim("w").await.unwrap();
    let (key, payload) = (Some(Data::from(json!("x"))), Data::from(json!({"amount": 3})));
    rig.report(&task, Op::Publish { name: "paid".to_owned(), key, payload }).await;
    rig.report(&task, done(json!(1))).await;
    assert_eq!(rig.output(waits).await, json!({"amount": 3}));
    rig.output(sends).await;
    rig.stop().await;
}

#[tokio::test]
async fn events_and_gates_made_at_the_same_moment_always_meet() {
    let rig = Rig::memory();
    rig.register(&WAITS.replace("key: input.order", "key: input.order, since: 1h")).await;
    let mut runs = Vec::new();
    for order in 0..200 {
        let (start, publish) = tokio::join!(rig.start("f", json!({"order": order})), async {
            // At some moment of the run's way to its gate, or before.
            for _ in 0..order % 7 {
                tokio::task::yield_now().await;
            }
            rig.engine.publish(&rig.ns, vec![event("paid", Some(json!(order)), json!(order))]).await
        });
        publish.unwrap();
        runs.push((order, start));
    }
    for (order, run) in runs {
        assert_eq!(rig.output(run).await, json!(order));
    }
    rig.stop().await;
}
