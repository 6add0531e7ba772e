//! Hints: listeners learn of each kind of change.

use std::sync::Arc;
use std::time::Duration;

use serde_json::json;

use super::drive::{event, note};
use super::{NAP, ONE, Trial};
use crate::*;

/// A timeout, so that a missing hint fails the case instead of hanging it.
const LONG: Duration = Duration::from_secs(10);

pub async fn a_hint_comes_for_each_kind_of_change(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.flow(NAP);
    t.flow("{name: start, steps: {work: {start_timeout: 3s, queue: slow}}}");
    let tasks = |queue: &str| Change::Tasks { ns: t.ns.clone(), queue: queue.to_owned() };
    let documents = |kind: &str| Change::Documents { ns: t.ns.clone(), kind: kind.to_owned() };

    let mut hints = t.store.watch();
    let run = t.start("one", json!(null)).await;
    expect(&mut hints, &[Change::Run { run, ended: false }, tasks("default")]).await;

    let mut hints = t.store.watch();
    t.take_one().await;
    expect(&mut hints, &[Change::Run { run, ended: false }]).await;

    // Leases are hinted only if one ends soon.
    let mut hints = t.store.watch();
    t.start("start", json!(null)).await;
    expect(&mut hints, &[tasks("slow"), Change::Leases]).await;

    let mut hints = t.store.watch();
    let nap = t.start("nap", json!(null)).await;
    expect(&mut hints, &[Change::Run { run: nap, ended: false }, Change::Timers]).await;

    let mut hints = t.store.watch();
    t.send(vec![note(run, "m1")]).await;
    expect(&mut hints, &[Change::Messages]).await;

    let mut hints = t.store.watch();
    t.publish(event("e1", "ping", None, json!(1))).await;
    expect(&mut hints, &[Change::Events { ns: t.ns.clone() }]).await;

    let mut hints = t.store.watch();
    t.put("thing", "a", json!(1)).await;
    expect(&mut hints, &[documents("thing")]).await;

    // A queue is hinted only while it has tasks to claim.
    let mut hints = t.store.watch();
    t.put(kind::QUEUE, "slow", json!({"concurrency": 1})).await;
    expect(&mut hints, &[documents(kind::QUEUE), tasks("slow")]).await;
}

pub async fn a_hint_comes_when_there_is_room_again(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.put(kind::QUEUE, "default", json!({"concurrency": 1})).await;
    t.start_all("one", (0..2).map(|n| json!(n))).await;
    let claimed = t.take_one().await;
    let mut hints = t.store.watch();
    t.complete(&claimed, json!(null)).await;
    expect(&mut hints, &[Change::Tasks { ns: t.ns.clone(), queue: "default".to_owned() }]).await;
}

/// A limit applies across queues, and so does its free capacity.
pub async fn a_hint_comes_when_a_limit_has_room_again_in_another_queue(t: &mut Trial<'_>) {
    t.flow("{name: here, steps: {work: {limits: [api]}}}");
    t.flow("{name: there, steps: {work: {limits: [api], queue: far}}}");
    t.put(kind::LIMIT, "api", json!({"concurrency": 1})).await;
    t.start("here", json!(null)).await;
    let claimed = t.take_one().await;
    t.start("there", json!(null)).await;
    // A claim finds nothing: hints are only needed for such queues.
    let far = ClaimRequest { queues: vec!["far".to_owned()], ..t.ask() };
    assert!(t.claim(far).await.tasks.is_empty());
    let mut hints = t.store.watch();
    t.complete(&claimed, json!(null)).await;
    expect(&mut hints, &[Change::Tasks { ns: t.ns.clone(), queue: "far".to_owned() }]).await;
}

pub async fn a_hint_comes_when_a_limit_changes(t: &mut Trial<'_>) {
    t.flow(ONE);
    t.start("one", json!(null)).await;
    let mut hints = t.store.watch();
    t.put(kind::LIMIT, "api", json!({"concurrency": 3})).await;
    expect(&mut hints, &[Change::Tasks { ns: t.ns.clone(), queue: "default".to_owned() }]).await;
}

pub async fn a_hint_says_that_a_run_has_ended(t: &mut Trial<'_>) {
    t.flow(ONE);
    let run = t.start("one", json!(null)).await;
    let claimed = t.take_one().await;
    let mut hints = t.store.watch();
    t.complete(&claimed, json!(null)).await;
    expect(&mut hints, &[Change::Run { run, ended: true }]).await;
}

pub async fn a_hint_comes_when_a_run_is_resumed(t: &mut Trial<'_>) {
    t.flow(ONE);
    let run = t.start("one", json!(null)).await;
    t.pause(run).await;
    let mut hints = t.store.watch();
    t.resume(run).await;
    expect(
        &mut hints,
        &[Change::Run { run, ended: false }, Change::Tasks { ns: t.ns.clone(), queue: "default".to_owned() }],
    )
    .await;
}

/// A listener that reads the store after a hint finds the change.
pub async fn a_hint_does_not_come_before_what_it_hints_at(t: &mut Trial<'_>) {
    t.flow(ONE);
    let mut hints = t.store.watch();
    let drive = t.drive.clone();
    let writing = tokio::spawn(async move {
        for _ in 0..20 {
            drive.start("one", json!(null)).await;
        }
    });
    let mut seen = 0;
    while seen < 20 {
        for change in next(&mut hints).await.iter() {
            if let Change::Run { run, .. } = change {
                assert!(matches!(t.store.load(*run, None).await.unwrap(), Found::Run(_)));
                seen += 1;
            }
        }
    }
    writing.await.unwrap();
}

/// Reads hints until all expected ones have come.
async fn expect(hints: &mut Hints, expected: &[Change]) {
    let mut missing = expected.to_vec();
    while !missing.is_empty() {
        let Ok(changes) = tokio::time::timeout(LONG, hints.next()).await else {
            panic!("no hint came for {missing:?}")
        };
        match changes {
            Some(Heard::Changes(changes)) => missing.retain(|change| !changes.contains(change)),
            Some(Heard::Missed) => panic!("hints were missed"),
            None => panic!("the store was dropped"),
        }
    }
}

async fn next(hints: &mut Hints) -> Arc<[Change]> {
    match tokio::time::timeout(LONG, hints.next()).await.expect("a hint") {
        Some(Heard::Changes(changes)) => changes,
        other => panic!("{other:?} instead of a hint"),
    }
}
