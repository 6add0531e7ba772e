//! Commits with an unknown outcome are submitted again and applied once.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use eddyline_engine::{Config, StartRequest};
use eddyline_store::{Memory, Page, RunFilter};
use rig::hooked::{Fault, Hooked};
use rig::{Rig, done};
use serde_json::json;

async fn survives(fault: Fault) {
    let mut store = Hooked::new(Arc::new(Memory::new()));
    // Registrations do not go through the committer.
    store.fate = Box::new(move |n| (n > 5 && n % 3 != 0).then_some(fault));
    let mut rig = Rig::on(Arc::new(store), Config::default());
    rig.register("name: kid\nsteps: {k: {}}").await;
    rig.register(
        "name: f\nsteps: {a: {}, b: {after: [a]}, c: {after: [b], flow: kid}, nap: {after: [c], await: {time: 1ms}}}",
    )
    .await;
    rig.work(3, |task| done(json!(task.activation)));
    let request =
        || StartRequest { flow: "f".to_owned(), idempotency_key: Some("once".to_owned()), ..StartRequest::default() };
    let started = rig.engine.start_run(&rig.ns, request()).await.unwrap();
    assert!(!started.existing, "the repeated commit counted as a second start");
    let mut runs = vec![started.run];
    for n in 0..10 {
        runs.push(rig.start("f", json!(n)).await);
    }
    for run in &runs {
        rig.output(*run).await;
        let kinds = rig.kinds(*run).await;
        let count = |wanted: &str| kinds.iter().filter(|kind| *kind == wanted).count();
        for once in
            ["flow.start", "step.attempt.started a", "step.completed a", "step.attempt.started b", "flow.completed"]
        {
            assert_eq!(count(once), 1, "{once} in {kinds:?}");
        }
    }
    let all = rig.engine.list(&rig.ns, &RunFilter::default(), Page::default()).await.unwrap();
    assert_eq!(all.len(), 2 * runs.len(), "each has one child");
    rig.stop().await;
}

#[tokio::test]
async fn what_was_written_is_not_done_twice() {
    survives(Fault::UnknownAfter).await;
}

#[tokio::test]
async fn what_was_not_written_is_not_lost() {
    survives(Fault::UnknownBefore).await;
}

/// The connection breaks after the commit, and the store cannot be reached for a while: the first answer that it gives
/// again is the outcome.
#[tokio::test]
async fn an_unknown_outcome_stays_unknown_while_the_store_cannot_be_reached() {
    let (mut store, left) = (Hooked::new(Arc::new(Memory::new())), Arc::new(AtomicUsize::new(0)));
    let faults = left.clone();
    store.fate = Box::new(move |_| match faults.load(Ordering::SeqCst) {
        0 => None,
        now => {
            faults.store(now - 1, Ordering::SeqCst);
            Some(if now == 3 { Fault::UnknownAfter } else { Fault::Unavailable })
        }
    });
    let rig = Rig::on(Arc::new(store), Config::default());
    rig.register("name: f\nsteps: {a: {set: 1}}").await;
    left.store(3, Ordering::SeqCst);
    let started = rig.engine.start_run(&rig.ns, StartRequest { flow: "f".to_owned(), ..StartRequest::default() }).await;
    let run = started.expect("it was committed").run;
    assert_eq!(left.load(Ordering::SeqCst), 0, "all faults came before the answer");
    rig.output(run).await;
    rig.stop().await;
}
