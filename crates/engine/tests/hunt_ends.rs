//! Results of cancelled runs, late followers, and starts that the backlog refuses.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;
use std::time::Duration;

use eddyline_engine::{Config, EngineError, StartRequest};
use eddyline_machine::Status;
use eddyline_store::Memory;
use rig::{LONG, Rig, done, failed};
use serde_json::json;

/// The failures of a cancelled run are those of its undo and `finally`; every way to read the run reports all of them.
#[tokio::test]
async fn a_cancelled_run_tells_everything_that_failed_on_its_way_to_the_end() {
    let mut rig = Rig::new();
    let undo = |name: &str| format!("undo: {{run: un{name}}}, retry: {{attempts: 1}}");
    rig.register(&format!(
        "name: f\nsteps: {{a: {{{}}}, b: {{after: [a], {}}}, wait: {{after: [b], await: {{manual: true}}}}}}",
        undo("a"),
        undo("b")
    ))
    .await;
    rig.register("name: g\nsteps: {wait: {await: {manual: true}}}").await;
    rig.work(1, |task| if task.handler.starts_with("un") { failed(&task.handler) } else { done(json!(1)) });
    let run = rig.start("f", json!(null)).await;
    let mut follower = rig.engine.follow(&rig.ns, run, 0).await.unwrap();
    while !rig.kinds(run).await.contains(&"step.await.scheduled wait".to_owned()) {
        follower.next().await.unwrap();
    }
    rig.engine.cancel(&rig.ns, run, "me", None).await.unwrap();
    let result = rig.engine.result(&rig.ns, run, LONG).await.unwrap().unwrap();
    assert_eq!((result.status, &result.output), (Status::Cancelled, &None));
    let error = result.error.expect("its undo failed");
    let told: Vec<&str> = std::iter::once(&error).chain(&error.also).map(|failure| &*failure.message).collect();
    assert_eq!(told, ["unb", "una"], "in the order in which they were undone");
    assert_eq!(rig.engine.run(&rig.ns, run).await.unwrap().error, Some(error), "the header says the same");

    let clean = rig.start("g", json!(null)).await;
    rig.engine.cancel(&rig.ns, clean, "me", None).await.unwrap();
    let result = rig.engine.result(&rig.ns, clean, LONG).await.unwrap().unwrap();
    assert_eq!((result.status, result.error), (Status::Cancelled, None), "nothing went wrong");
    rig.stop().await;
}

#[tokio::test]
async fn who_follows_from_the_last_record_on_is_told_that_it_was_the_last() {
    let mut rig = Rig::new();
    rig.register("name: f\nsteps: {a: {}}").await;
    rig.work(1, |_| done(json!(1)));
    let run = rig.start("f", json!(null)).await;
    rig.output(run).await;
    let last = rig.records(run).await.len() as u64;
    for after in [last, last + 5] {
        let mut follower = rig.engine.follow(&rig.ns, run, after).await.unwrap();
        let next = tokio::time::timeout(Duration::from_secs(20), follower.next()).await;
        assert_eq!(next.expect("it waits for a record that never comes").unwrap(), None);
    }
    rig.stop().await;
}

#[tokio::test(start_paused = true)]
async fn starts_are_refused_while_too_much_waits() {
    // The clock of the test stands still, which only a store in memory does not notice.
    let rig = Rig::on(Arc::new(Memory::new()), Config { backlog: 3, ..Config::default() });
    rig.register("name: f\nsteps: {a: {retry: {attempts: 1}}}").await;
    let start = || rig.engine.start_run(&rig.ns, StartRequest { flow: "f".to_owned(), ..StartRequest::default() });
    let first = start().await.unwrap().run;
    for _ in 0..2 {
        start().await.unwrap();
    }
    let refused = start().await;
    assert!(matches!(refused, Err(EngineError::TooMany { retry_after_ms: 1.., .. })), "{refused:?}");
    // The backlog is counted again after a second.
    tokio::time::advance(Duration::from_secs(2)).await;
    assert!(matches!(start().await, Err(EngineError::TooMany { .. })));
    // A retry is not refused: it is the rest of an admitted run.
    let task = rig.claim("w").await.unwrap();
    assert_eq!(task.run, first);
    rig.report(&task, failed("no")).await;
    rig.engine.retry(&rig.ns, first, "ann").await.unwrap();
    for _ in 0..2 {
        let task = rig.claim("w").await.unwrap();
        rig.report(&task, done(json!(1))).await;
    }
    tokio::time::advance(Duration::from_secs(2)).await;
    start().await.unwrap();
    let elsewhere = eddyline_store::Namespace::new("other");
    rig.engine.register(&elsewhere, None, "name: f\nsteps: {a: {}}").await.unwrap();
    for _ in 0..3 {
        let request = StartRequest { flow: "f".to_owned(), ..StartRequest::default() };
        rig.engine.start_run(&elsewhere, request).await.expect("each namespace has its own");
    }
    rig.stop().await;
}
