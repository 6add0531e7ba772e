//! Deliveries to different runs are concurrent.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use eddyline_engine::Config;
use eddyline_store::{HOLD_MS, Memory};
use rig::Rig;
use rig::hooked::Hooked;
use serde_json::json;

#[tokio::test(start_paused = true)]
async fn a_slow_delivery_holds_up_nobody_and_the_inbox_does_not_poll_meanwhile() {
    let store = Arc::new(Hooked::new(Arc::new(Memory::new())));
    let rig = Rig::on(store.clone(), Config::default());
    rig.register("{name: slow, steps: {a: {await: {event: never, timeout: 1h}}}}").await;
    rig.register("{name: kid, steps: {a: {set: 1}}, output: '${steps.a.output}'}").await;
    rig.register("{name: quick, steps: {a: {flow: kid}}, output: '${steps.a.output}'}").await;

    // The message that makes its gate look back is not delivered until this is true again.
    store.pending_open.send_replace(false);
    rig.start("slow", json!(null)).await;
    for _ in 0..10 {
        let run = rig.start("quick", json!(null)).await;
        assert_eq!(rig.output(run).await, json!(1));
    }
    let before = store.message_polls.load(Ordering::SeqCst);
    tokio::time::sleep(Duration::from_secs(60)).await;
    let asked = store.message_polls.load(Ordering::SeqCst) - before;
    // One poll every two seconds, and one when the hold of the message expires.
    assert!(asked <= 60, "{asked} polls in a minute without any change");
    store.pending_open.send_replace(true);
    rig.stop().await;
}

#[tokio::test]
async fn more_due_items_than_a_namespaces_share_do_not_wait_for_the_end_of_a_hold() {
    let rig = Rig::on(Arc::new(Memory::new()), Config { due_batch: 2, ..Config::default() });
    rig.register("{name: kid, steps: {nap: {await: {time: 10ms}}}}").await;
    rig.register("{name: many, steps: {each: {spread: 'range(200)', flow: kid}}}").await;
    let begun = Instant::now();
    let run = rig.start("many", json!(null)).await;
    rig.output(run).await;
    let took = begun.elapsed();
    assert!(
        took < Duration::from_millis(HOLD_MS as u64 / 2),
        "200 children, their timers and their ends took {took:?}"
    );
    rig.stop().await;
}
