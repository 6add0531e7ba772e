//! A caller who finds the committer idle drives it itself. This must only make a difference in time.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use eddyline_engine::{Config, EngineError, RunChanges, StartRequest, TaskReport};
use eddyline_store::Memory;
use futures_util::FutureExt;
use rig::hooked::Hooked;
use rig::{LONG, Rig, claim, done};
use serde_json::json;
use tokio::time::Instant;

const FLOW: &str = "name: f\nsteps: {a: {}, b: {after: [a]}}";

fn request() -> StartRequest {
    StartRequest { flow: "f".to_owned(), ..StartRequest::default() }
}

/// Lets the loops finish their work.
async fn settle() {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_lone_caller_is_answered_without_another_task_being_woken() {
    let rig = Rig::memory();
    rig.register(FLOW).await;
    settle().await;
    let (engine, ns) = (&rig.engine, &rig.ns);
    let run = engine.start_run(ns, request()).now_or_never().expect("nobody to wait for").unwrap().run;
    let mut task = engine.claim(ns, claim("w"), LONG).now_or_never().expect("nobody to wait for").unwrap().remove(0);
    for step in ["a", "b"] {
        assert_eq!(task.activation, step);
        let report = TaskReport { token: task.token, seq: Some(1), op: done(json!(step)) };
        let reported = engine.report_and_ask(ns, vec![report], Some(claim("w"))).now_or_never();
        let (_, waiting) = reported.expect("nobody to wait for").unwrap();
        let mut next = waiting.unwrap().tasks(Duration::ZERO).await.unwrap();
        match next.pop() {
            Some(next) => task = next,
            None => assert_eq!(step, "b", "the commit that adds the next step also claims it"),
        }
    }
    assert!(rig.output(run).now_or_never().is_some());
    rig.stop().await;
}

/// Time advances only while every task sleeps: a waiter that is not woken and polls instead would have slept.
#[tokio::test(start_paused = true)]
async fn whoever_waits_is_woken_by_what_another_caller_does() {
    let (rig, since) = (Rig::memory(), Instant::now());
    rig.register(FLOW).await;
    let (engine, ns) = (rig.engine.clone(), rig.ns.clone());
    let worker = tokio::spawn(async move { engine.claim(&ns, claim("w"), LONG).await.unwrap().pop().unwrap() });
    settle().await;
    let run = rig.start("f", json!(null)).await;
    let (engine, ns) = (rig.engine.clone(), rig.ns.clone());
    let waiting = tokio::spawn(async move { engine.result(&ns, run, LONG).await.unwrap().unwrap() });
    let mut follower = rig.engine.follow(&rig.ns, run, 0).await.unwrap();
    let task = worker.await.unwrap();
    rig.report(&task, done(json!(1))).await;
    let task = rig.claim("w").await.unwrap();
    rig.report(&task, done(json!(2))).await;
    waiting.await.unwrap();
    let mut records = Vec::new();
    while let Some(more) = follower.next().await.unwrap() {
        records.extend(more);
    }
    assert_eq!(records.len(), rig.records(run).await.len());
    assert!(since.elapsed() < Duration::from_secs(1), "somebody looked again after {:?}", since.elapsed());
    rig.stop().await;
}

#[tokio::test]
async fn starts_of_one_call_are_committed_together() {
    let store = Arc::new(Hooked::new(Arc::new(Memory::new())));
    let rig = Rig::on(store.clone(), Config::default());
    rig.register(FLOW).await;
    settle().await;
    let before = store.commits.load(Ordering::SeqCst);
    let started = rig.engine.start_batch(&rig.ns, vec![request(); 100]).await.unwrap();
    assert!(started.iter().all(Result::is_ok));
    let commits = store.commits.load(Ordering::SeqCst) - before;
    assert!(commits <= 3, "{commits} commits for one call");
    rig.stop().await;
}

/// A slow commit is left to the loop; inputs that arrive meanwhile are committed together.
#[tokio::test]
async fn a_caller_who_has_to_wait_holds_nobody_up() {
    let store = Arc::new(Hooked::new(Arc::new(Memory::new())));
    let rig = Rig::on(store.clone(), Config { in_flight: 1, ..Config::default() });
    rig.register(FLOW).await;
    settle().await;
    store.committing.send_replace(false);
    let start = || {
        let (engine, ns) = (rig.engine.clone(), rig.ns.clone());
        tokio::spawn(async move { engine.start_run(&ns, request()).await.unwrap().run })
    };
    let starts: Vec<_> = (0..50).map(|_| start()).collect();
    settle().await;
    assert!(starts.iter().all(|start| !start.is_finished()));
    let before = store.commits.load(Ordering::SeqCst);
    store.committing.send_replace(true);
    for start in starts {
        start.await.unwrap();
    }
    let commits = store.commits.load(Ordering::SeqCst) - before;
    assert!(commits <= 3, "{commits} commits for the waiting inputs");
    rig.stop().await;
}

/// After a panic the committer's state cannot be trusted: all callers get an error, and nobody waits forever.
#[tokio::test]
async fn a_panic_ends_the_engine_and_leaves_nobody_waiting() {
    let broken = Arc::new(AtomicBool::new(false));
    let mut store = Hooked::new(Arc::new(Memory::new()));
    let breaks = broken.clone();
    store.fate = Box::new(move |_| if breaks.load(Ordering::SeqCst) { panic!("a store that panics") } else { None });
    let rig = Rig::on(Arc::new(store), Config::default());
    rig.register(FLOW).await;
    let (engine, ns) = (rig.engine.clone(), rig.ns.clone());
    let worker = tokio::spawn(async move { engine.claim(&ns, claim("w"), LONG).await });
    settle().await;
    broken.store(true, Ordering::SeqCst);
    let (engine, ns) = (rig.engine.clone(), rig.ns.clone());
    let start = tokio::spawn(async move { engine.start_run(&ns, request()).await });
    assert!(matches!(start.await.unwrap(), Err(EngineError::Stopped)));
    assert!(matches!(worker.await.unwrap(), Err(EngineError::Stopped)));
    assert!(matches!(rig.engine.start_run(&rig.ns, request()).await, Err(EngineError::Stopped)));
    rig.stop().await;
}

#[tokio::test]
async fn attention_is_told_of_its_own_runs_alone() {
    let rig = Rig::memory();
    rig.register(FLOW).await;
    let mut attention = rig.engine.attention();
    let (mine, other) = (rig.start("f", json!(1)).await, rig.start("f", json!(2)).await);
    attention.add(mine);
    rig.engine.pause(&rig.ns, other, "me").await.unwrap();
    assert!(attention.changed().now_or_never().is_none(), "it was notified of a run that it does not watch");
    rig.engine.pause(&rig.ns, mine, "me").await.unwrap();
    assert_eq!(attention.changed().await, RunChanges::Changed([(mine, false)].into()));
    rig.engine.resume(&rig.ns, mine, "me").await.unwrap();
    rig.engine.cancel(&rig.ns, mine, "me", None).await.unwrap();
    assert_eq!(attention.changed().await, RunChanges::Changed([(mine, true)].into()), "changes are reported once");
    attention.add(other);
    attention.remove(other);
    rig.engine.cancel(&rig.ns, other, "me", None).await.unwrap();
    assert!(attention.changed().now_or_never().is_none(), "it was notified of a run that was removed");
    rig.stop().await;
}

/// A connection's own reports must not wake it, but it must still see the changes.
#[tokio::test]
async fn whoever_turned_from_its_runs_to_something_else_is_not_woken() {
    #[derive(Default)]
    struct Woken(AtomicBool);
    impl std::task::Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.store(true, Ordering::SeqCst);
        }
    }
    let rig = Rig::memory();
    rig.register(FLOW).await;
    let run = rig.start("f", json!(null)).await;
    let mut attention = rig.engine.attention();
    attention.add(run);
    let woken = Arc::new(Woken::default());
    let waker = woken.clone().into();
    let mut cx = std::task::Context::from_waker(&waker);
    let mut listening = Box::pin(attention.changed());
    assert!(listening.poll_unpin(&mut cx).is_pending());
    drop(listening);
    rig.engine.pause(&rig.ns, run, "me").await.unwrap();
    assert!(!woken.0.load(Ordering::SeqCst));
    let mut listening = Box::pin(attention.changed());
    assert!(listening.poll_unpin(&mut cx).is_ready(), "a change that happened meanwhile was lost");
    drop(listening);
    let mut listening = Box::pin(attention.changed());
    assert!(listening.poll_unpin(&mut cx).is_pending());
    rig.engine.resume(&rig.ns, run, "me").await.unwrap();
    assert!(woken.0.load(Ordering::SeqCst));
    drop(listening);
    rig.stop().await;
}

/// Time advances only while every task sleeps: a waiter that missed the end would have slept.
#[tokio::test(start_paused = true)]
async fn the_end_of_a_run_that_goes_on_is_waited_for_without_a_look_and_never_denied_without_one() {
    let store = Arc::new(Hooked::new(Arc::new(Memory::new())));
    let [here, there] = [0, 1].map(|_| Rig::on(store.clone(), Config::default()));
    here.register("name: f\nsteps: {a: {}}").await;
    let looks = || store.summaries.swap(0, Ordering::SeqCst);
    let (run, since) = (here.start("f", json!(null)).await, Instant::now());
    looks();
    let (engine, ns) = (here.engine.clone(), here.ns.clone());
    let waiting = tokio::spawn(async move { engine.result(&ns, run, LONG).await.unwrap().is_some() });
    settle().await;
    assert_eq!(looks(), 0);
    assert!(here.engine.result(&here.ns, run, Duration::ZERO).await.unwrap().is_none());
    assert_eq!(looks(), 1, "\"not ended\" is answered only after reading the store");

    let task = there.claim("w").await.unwrap();
    there.report(&task, done(json!(1))).await;
    assert!(waiting.await.unwrap());
    settle().await;
    assert!(here.engine.result(&here.ns, run, LONG).await.unwrap().is_some(), "another instance ended it");
    assert!(since.elapsed() < Duration::from_secs(1), "somebody looked again after {:?}", since.elapsed());
    here.stop().await;
    there.stop().await;
}
