//! A claimed task that can't be delivered is queued again less and less often, and fails in the end.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use eddyline_engine::Config;
use eddyline_machine::decide::MAX_UNDELIVERED;
use eddyline_store::{ManualClock, Memory};
use rig::hooked::Hooked;
use rig::{LONG, Rig, claim, done};
use serde_json::json;

fn on_damaged_store() -> (Rig, Arc<Hooked>, Arc<ManualClock>) {
    let clock = ManualClock::at(1_767_323_045_678);
    let store = Arc::new(Hooked::new(Arc::new(Memory::with_clock(clock.clone()))));
    store.damaged.store(true, Ordering::SeqCst);
    let config = Config { poll_ms: 5, ..Config::default() };
    (Rig::on(store.clone(), config), store, clock)
}

/// Larger than what the cache keeps of a run's payloads, so that it is read when the task is delivered.
const LARGE: usize = 1_200_000;

const FLOW: &str = "name: f\nsteps: {a: {input: {big: '${input.big}'}, retry: {attempts: 5}}}";

#[tokio::test]
async fn a_task_whose_payload_is_damaged_fails_after_a_bounded_number_of_tries_and_says_so() {
    let (rig, _store, clock) = on_damaged_store();
    rig.register(FLOW).await;
    let run = rig.start("f", json!({"big": "x".repeat(LARGE)})).await;
    for at in 0..MAX_UNDELIVERED {
        let got = rig.engine.claim(&rig.ns, claim("w"), LONG).await.unwrap();
        assert!(got.is_empty(), "{at}: {got:?}");
        clock.advance(60_000);
    }
    let result = rig.engine.result(&rig.ns, run, LONG).await.unwrap().expect("the run has ended");
    let error = result.error.expect("an error");
    assert_eq!(error.kind, "Undeliverable");
    assert!(error.message.contains("the checksum of"), "{error:?}");
    let kinds = rig.kinds(run).await;
    assert!(kinds.len() < 5 * MAX_UNDELIVERED as usize, "{kinds:?}");
    rig.stop().await;
}

#[tokio::test]
async fn a_task_that_cannot_be_handed_over_is_not_claimed_at_full_speed() {
    let (rig, store, clock) = on_damaged_store();
    rig.register(FLOW).await;
    let run = rig.start("f", json!({"big": "x".repeat(LARGE)})).await;
    for _ in 0..2 {
        assert!(rig.engine.claim(&rig.ns, claim("w"), LONG).await.unwrap().is_empty());
    }
    // The first release is immediate; from the second on the task waits, by the store's clock.
    let timers = rig.engine.store().pending(run).await.unwrap().timers;
    assert_eq!(timers.len(), 1, "{timers:?}");
    assert!(timers[0].due > rig.engine.store().now().await.unwrap());
    store.damaged.store(false, Ordering::SeqCst);
    clock.advance(60_000);
    let task = rig.claim("w").await.expect("it is queued again");
    assert_eq!(task.attempt, 1, "and used up no attempt");
    rig.report(&task, done(json!(1))).await;
    rig.output(run).await;
    rig.stop().await;
}
