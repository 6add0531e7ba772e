//! Waiting claims: no wake-up is wasted on a claim that cannot use it, no caller waits forever, and nothing is claimed
//! during a shutdown.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use eddyline_engine::{ClaimTasks, Config, MAX_CLAIM_BYTES, PendingClaim, StartRequest};
use eddyline_store::{
    Command, CommandId, DocumentChange, DocumentCommit, DocumentKey, Expect, Memory, Offer, RequestId, Store, kind,
};
use rig::hooked::Hooked;
use rig::{LONG, Rig, claim, done};
use serde_json::{Value, json};
use uuid::Uuid;

/// A poll interval so long that only hints wake claims.
fn hints_only() -> Config {
    Config { poll_ms: 3_600_000, ..Config::default() }
}

fn only(worker: &str, handler: &str) -> ClaimTasks {
    let offer = Offer { handlers: [handler.to_owned()].into(), ..Offer::default() };
    ClaimTasks { offer: Arc::new(offer), ..claim(worker) }
}

/// Sends a claim and waits until it was tried without success.
async fn asked(rig: &Rig, store: &Hooked, claim: ClaimTasks) -> PendingClaim {
    let before = store.commits.load(Ordering::SeqCst);
    let waiting = rig.engine.ask(&rig.ns, claim, false).await.unwrap();
    while store.commits.load(Ordering::SeqCst) == before {
        tokio::task::yield_now().await;
    }
    // Lets the result return from the store to the committer.
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
    waiting
}

async fn set_queue(rig: &Rig, id: u128, rules: Value) {
    let key = DocumentKey::new(kind::QUEUE, "default");
    let commit = DocumentCommit {
        ns: rig.ns.clone(),
        command: CommandId(Uuid::from_u128(id)),
        documents: vec![DocumentChange { key, expect: Expect::Any, body: Some(rules), due: None }],
        messages: Vec::new(),
        events: Vec::new(),
        drops: Vec::new(),
    };
    rig.engine.store().commit(vec![Command::Documents(commit)], Vec::new()).await.unwrap();
}

#[tokio::test]
async fn a_wake_up_reaches_the_one_worker_that_it_suits() {
    let store = Arc::new(Hooked::new(Arc::new(Memory::new())));
    let rig = Rig::on(store.clone(), hints_only());
    rig.register("name: f\nsteps: {b: {}}").await;
    set_queue(&rig, 1, json!({"paused": true})).await;
    rig.start("f", json!(null)).await;
    let other = asked(&rig, &store, only("first in line", "a")).await;
    let suited = asked(&rig, &store, only("second in line", "b")).await;
    set_queue(&rig, 2, json!({"paused": false})).await;
    let tasks = suited.tasks(Duration::from_secs(20)).await.unwrap();
    assert_eq!(tasks.len(), 1, "the wake-up went only to a worker that cannot take the task");
    drop(other);
    rig.stop().await;
}

#[tokio::test]
async fn no_wake_up_is_lost_on_callers_that_went_away() {
    let store = Arc::new(Hooked::new(Arc::new(Memory::new())));
    let rig = Rig::on(store.clone(), hints_only());
    rig.register("name: f\nsteps: {a: {}}").await;
    set_queue(&rig, 1, json!({"paused": true})).await;
    let mut gone = Vec::new();
    for n in 0..20 {
        gone.push(asked(&rig, &store, claim(&format!("gone {n}"))).await);
    }
    let alive = asked(&rig, &store, claim("alive")).await;
    rig.start("f", json!(null)).await;
    drop(gone);
    set_queue(&rig, 2, json!({"paused": false})).await;
    let tasks = alive.tasks(Duration::from_secs(20)).await.unwrap();
    assert_eq!(tasks.len(), 1, "the wake-up went to a caller that is gone");
    assert_eq!(tasks[0].attempt, 1);
    rig.stop().await;
}

#[tokio::test]
async fn a_claim_that_is_repeated_while_the_first_still_waits_leaves_neither_waiting_for_ever() {
    let rig = Rig::on(Arc::new(Memory::new()), hints_only());
    rig.register("name: f\nsteps: {a: {}}").await;
    let again = || ClaimTasks { request: Some(RequestId(Uuid::from_u128(7))), ..claim("w") };
    let first = rig.engine.ask(&rig.ns, again(), false).await.unwrap();
    let second = rig.engine.ask(&rig.ns, again(), false).await.unwrap();
    let both = async { tokio::join!(first.tasks(Duration::from_millis(20)), second.tasks(Duration::from_millis(60))) };
    let (first, second) = tokio::time::timeout(Duration::from_secs(20), both).await.expect("one of them hangs");
    assert!(first.unwrap().is_empty() && second.unwrap().is_empty());
    // Answering the first claim must not drop its repeat.
    let first = rig.engine.ask(&rig.ns, again(), false).await.unwrap();
    let second = rig.engine.ask(&rig.ns, again(), false).await.unwrap();
    assert!(first.tasks(Duration::from_millis(20)).await.unwrap().is_empty());
    rig.start("f", json!(null)).await;
    assert_eq!(second.tasks(LONG).await.unwrap().len(), 1);
    rig.stop().await;
}

#[tokio::test]
async fn nothing_is_claimed_once_it_is_time_to_stop() {
    let store = Arc::new(Hooked::new(Arc::new(Memory::new())));
    let rig = Rig::on(store.clone(), Config { in_flight: 1, ..hints_only() });
    rig.register("name: f\nsteps: {a: {}}").await;
    // The first claim in a store creates the secret for task tokens, which takes a commit.
    rig.engine.claim(&rig.ns, claim("w"), Duration::ZERO).await.unwrap();
    // The claim is being committed and the start waits behind it when the shutdown begins.
    let before = store.commits.load(Ordering::SeqCst);
    store.committing.send_replace(false);
    let waiting = rig.engine.ask(&rig.ns, claim("w"), false).await.unwrap();
    let (engine, ns) = (rig.engine.clone(), rig.ns.clone());
    let request = StartRequest { flow: "f".to_owned(), ..StartRequest::default() };
    let starting = tokio::spawn(async move { engine.start_run(&ns, request).await });
    let engine = rig.engine.clone();
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    let stopping = tokio::spawn(async move { engine.shutdown().await });
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    store.committing.send_replace(true);
    stopping.await.unwrap();
    let run = starting.await.unwrap().expect("it was accepted before").run;
    let handed = waiting.tasks(LONG).await.unwrap_or_default();
    assert!(handed.is_empty(), "a task was claimed after the shutdown had begun");
    let tasks = store.pending(run).await.unwrap().tasks;
    assert!(tasks.len() == 1 && tasks[0].held.is_none(), "{tasks:?}");
    assert!(store.commits.load(Ordering::SeqCst) >= before + 2);
}

#[tokio::test]
async fn work_that_waits_for_room_in_a_limit_goes_on_in_every_queue() {
    let store = Arc::new(Hooked::new(Arc::new(Memory::new())));
    let rig = Rig::on(store.clone(), hints_only());
    rig.register("name: here\nsteps: {a: {limits: [api]}}").await;
    rig.register("name: there\nsteps: {b: {limits: [api], queue: far}}").await;
    let key = DocumentKey::new(kind::LIMIT, "api");
    let commit = DocumentCommit {
        ns: rig.ns.clone(),
        command: CommandId(Uuid::from_u128(9)),
        documents: vec![DocumentChange { key, expect: Expect::Any, body: Some(json!({"concurrency": 1})), due: None }],
        messages: Vec::new(),
        events: Vec::new(),
        drops: Vec::new(),
    };
    rig.engine.store().commit(vec![Command::Documents(commit)], Vec::new()).await.unwrap();
    rig.start("here", json!(null)).await;
    let held = rig.claim("w").await.unwrap();
    let far = ClaimTasks { queues: vec!["far".to_owned()], ..claim("v") };
    rig.start("there", json!(null)).await;
    let waiting = asked(&rig, &store, far).await;
    rig.report(&held, done(json!(1))).await;
    assert_eq!(waiting.tasks(Duration::from_secs(20)).await.unwrap().len(), 1);
    rig.stop().await;
}

#[tokio::test]
async fn what_is_too_much_for_one_answer_comes_in_parts_or_goes_back_uncounted() {
    let rig = Rig::memory();
    rig.register("name: f\nsteps: {a: {}}").await;
    for _ in 0..12 {
        rig.start("f", json!("x".repeat(2_000_000))).await;
    }
    // Twelve tasks of 4 MB each: the input of the step plus that of its run.
    let all = || ClaimTasks { max: 12, ..claim("w") };
    let first = rig.engine.claim(&rig.ns, all(), LONG).await.unwrap();
    assert!((1..6).contains(&first.len()), "{} in one answer", first.len());
    let (mut rest, mut waiting) = (Vec::new(), rig.engine.ask(&rig.ns, all(), false).await.unwrap());
    loop {
        let bytes = waiting.claimed(LONG, MAX_CLAIM_BYTES).await.unwrap();
        let (tasks, more) = waiting.part(MAX_CLAIM_BYTES).await.unwrap();
        assert!((4_000_000 * tasks.len()..4_100_000 * tasks.len()).contains(&bytes), "{bytes} bytes");
        assert!((1..6).contains(&tasks.len()), "{} in one part", tasks.len());
        rest.extend(tasks);
        match more {
            Some(more) => waiting = more,
            None => break,
        }
    }
    assert_eq!(first.len() + rest.len(), 12);
    assert!(first.iter().chain(&rest).all(|task| task.attempt == 1));
    for task in first.iter().chain(&rest) {
        assert!(matches!(rig.report(task, done(json!(1))).await, eddyline_machine::Answer::Applied(_)));
    }
    rig.stop().await;
}
