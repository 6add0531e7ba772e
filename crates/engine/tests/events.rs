//! Events and the gates that wait for them, in either order.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;

use eddyline_engine::{Config, EngineError, EventOutcome, PublishRequest};
use eddyline_machine::{Data, Op};
use eddyline_store::{
    Command, CommandId, DocumentChange, DocumentCommit, DocumentKey, Embedded, Expect, ManualClock, Memory, Options,
    Store,
};
use rig::{Rig, done};
use serde_json::{Value, json};

fn event(name: &str, key: Option<Value>, payload: Value) -> PublishRequest {
    PublishRequest { name: name.to_owned(), key, payload, id: None }
}

const WAITS: &str = "name: f\nsteps: {paid: {await: {event: paid, key: input.order}}}\noutput: '${steps.paid.output}'";

#[tokio::test]
async fn an_event_opens_the_gates_of_its_key_and_no_others() {
    let rig = Rig::new();
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
    let rig = Rig::new();
    rig.register(WAITS).await;
    rig.register("name: g\nsteps: {a: {}}").await;
    let waits = rig.start("f", json!({"order": "x"})).await;
    let sends = rig.start("g", json!(null)).await;
    let task = rig.claim("w").await.unwrap();
    let (key, payload) = (Some(Data::from(json!("x"))), Data::from(json!({"amount": 3})));
    rig.report(&task, Op::Publish { name: "paid".to_owned(), as_name: None, key, payload }).await;
    rig.report(&task, done(json!(1))).await;
    assert_eq!(rig.output(waits).await, json!({"amount": 3}));
    rig.output(sends).await;
    rig.stop().await;
}

#[tokio::test]
async fn events_and_gates_made_at_the_same_moment_always_meet() {
    let rig = Rig::new();
    rig.register(&WAITS.replace("key: input.order", "key: input.order, since: 1h")).await;
    let mut runs = Vec::new();
    for order in 0..200 {
        let (start, publish) = tokio::join!(rig.start("f", json!({"order": order})), async {
            // At some point before or while the run reaches its gate.
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

/// The outcome of an event, once it is delivered and `gates` gates have consumed it.
async fn outcome(rig: &Rig, id: &str, gates: u64) -> EventOutcome {
    let since = std::time::Instant::now();
    loop {
        let outcome = rig.engine.event(&rig.ns, id).await.unwrap();
        if outcome.delivered && outcome.gates_opened >= gates {
            return outcome;
        }
        assert!(since.elapsed() < rig::LONG, "{outcome:?}");
        tokio::task::yield_now().await;
    }
}

async fn tells_what_became_of_an_event(store: Arc<dyn Store>) {
    let rig = Rig::on(store, Config::default());
    rig.register("name: f\nsteps: {a: {await: {event: paid}}, b: {await: {event: paid, key: '7'}}}").await;
    let runs = [rig.start("f", json!(1)).await, rig.start("f", json!(2)).await];
    let publish = async |key: Value| {
        rig.engine.publish(&rig.ns, vec![event("paid", Some(key), json!("x"))]).await.unwrap().ids.remove(0)
    };
    // Gates without a key take any event, so all of them take the first.
    let first = publish(json!(8)).await;
    let opened = outcome(&rig, &first, 2).await;
    assert_eq!((opened.name.as_str(), opened.key.as_deref(), opened.gates_opened), ("paid", Some("8"), 2));
    let second = publish(json!(7)).await;
    assert_eq!(outcome(&rig, &second, 2).await.gates_opened, 2);
    for run in runs {
        rig.output(run).await;
    }
    // A gate that looks back is counted for the event that it finds.
    rig.register("name: back\nsteps: {a: {await: {event: paid, key: '8', since: 1h}}}").await;
    rig.output(rig.start("back", json!(null)).await).await;
    assert_eq!(outcome(&rig, &first, 3).await.gates_opened, 3);

    rig.engine.delete_event(&rig.ns, &first).await.unwrap();
    let gone = rig.engine.event(&rig.ns, &first).await;
    assert!(matches!(gone, Err(EngineError::NotFound { what: "event", .. })), "{gone:?}");
    assert!(rig.engine.delete_event(&rig.ns, &first).await.is_err());
    let waits = rig.start("back", json!(null)).await;
    let third = publish(json!(8)).await;
    rig.output(waits).await;
    assert_eq!(outcome(&rig, &third, 1).await.gates_opened, 1, "the deleted event is still found");
    rig.stop().await;
}

#[tokio::test]
async fn in_memory_it_is_told_what_became_of_an_event() {
    tells_what_became_of_an_event(Arc::new(Memory::new())).await;
}

#[tokio::test]
async fn on_disk_it_is_told_what_became_of_an_event() {
    let dir = tempfile::tempdir().unwrap();
    tells_what_became_of_an_event(Arc::new(Embedded::open(dir.path(), Options::default()).unwrap())).await;
}

/// An event is deleted while it is partly delivered. The position among its gates in the cursor must not be applied to
/// the next event.
#[tokio::test]
async fn an_event_after_one_that_was_deleted_while_it_was_told_reaches_all_gates() {
    let store: Arc<dyn Store> = Arc::new(Memory::new());
    let rig = Rig::on(store.clone(), Config::default());
    rig.register("name: f\nsteps: {a: {await: {event: paid}}}").await;
    let run = rig.start("f", json!(null)).await;
    let told = json!({"position": 0, "gates": {"any_key": true, "after": 1_000_000, "event": 1_000}});
    let key = DocumentKey::new("cursor", "events");
    let change = DocumentChange { key, expect: Expect::Any, body: Some(told), due: None };
    let commit = DocumentCommit {
        ns: rig.ns.clone(),
        command: CommandId(uuid::Uuid::from_u128(5)),
        documents: vec![change],
        messages: Vec::new(),
        events: Vec::new(),
        drops: Vec::new(),
    };
    store.commit(vec![Command::Documents(commit)], Vec::new()).await.unwrap();
    rig.engine.publish(&rig.ns, vec![event("paid", None, json!(1))]).await.unwrap();
    rig.output(run).await;
    rig.stop().await;
}
