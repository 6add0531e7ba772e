//! Opening a store with a wrong wall clock: retention deletes nothing because of it, and it can be corrected.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod story;

use std::path::Path;

use eddyline_machine::{Data, Expiry, Millis, Op};
use eddyline_store::Due;
use eddyline_store::*;
use serde_json::json;
use story::*;

const HOUR: Millis = 60 * 60 * 1_000;
const DAY: Millis = 24 * HOUR;

fn open_at(dir: &Path, wall: Millis) -> (std::sync::Arc<ManualClock>, Embedded) {
    let clock = ManualClock::at(wall);
    let store = Embedded::open(dir, Options { clock: clock.clone(), ..Options::default() }).unwrap();
    (clock, store)
}

fn reset_at(dir: &Path, wall: Millis) -> Embedded {
    let options = Options { clock: ManualClock::at(wall), reset_clock: true, ..Options::default() };
    Embedded::open(dir, options).unwrap()
}

async fn start(store: &Embedded, n: u128, flow: &str) -> Claims {
    let commit = Decider::new().start(store, n, flow, big()).await;
    let command = command_id(1_000 + n);
    let written = store.commit(vec![Command::Run(RunCommit { command, ..commit })], vec![claim(n, "w", 1)]).await;
    written.unwrap().claims.remove(0)
}

#[tokio::test]
async fn a_jump_of_more_than_a_day_makes_deletion_wait_an_hour_through_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = open_at(dir.path(), START);
    assert_eq!(store.deletion_waits().await, Ok(None), "a new store has nothing to compare with");
    start(&store, 1, "line").await;
    store.close().unwrap();
    let (clock, store) = open_at(dir.path(), START + 23 * HOUR);
    assert_eq!(store.deletion_waits().await, Ok(None), "a machine may be off for a night");
    clock.advance(DAY);
    assert_eq!(store.deletion_waits().await, Ok(None), "passing time is no jump");
    store.close().unwrap();

    let jumped = START + 42 * DAY;
    let (clock, store) = open_at(dir.path(), jumped);
    assert_eq!(store.deletion_waits().await, Ok(Some(jumped + HOUR)));
    clock.advance(10 * 60_000);
    store.close().unwrap();
    let (clock, store) = open_at(dir.path(), jumped + 20 * 60_000);
    assert_eq!(store.deletion_waits().await, Ok(Some(jumped + HOUR)), "the hour is not over");
    clock.advance(HOUR);
    assert_eq!(store.deletion_waits().await, Ok(None));
}

#[tokio::test]
async fn a_reset_brings_time_back_and_waits_keep_what_is_left_of_them() {
    let dir = tempfile::tempdir().unwrap();
    let wrong = START + 40 * DAY;
    let (clock, store) = open_at(dir.path(), START);
    start(&store, 1, "line").await;
    store.close().unwrap();
    // One start with a clock that is forty days ahead: a run with a nap of two seconds and a gate of an hour, and an
    // attempt of half a minute.
    let (_, store) = open_at(dir.path(), wrong);
    start(&store, 2, "gated").await;
    assert_eq!(start(&store, 3, "shaky").await.tasks.len(), 1);
    store.close().unwrap();
    drop(clock);

    // Without a reset, store time does not go back.
    let (_, store) = open_at(dir.path(), START + HOUR);
    assert_eq!(store.now().await, Ok(wrong));
    store.close().unwrap();
    assert!(Embedded::time_ahead(dir.path()).unwrap() < 0, "the store is ahead of that clock, not of the system clock");

    let store = reset_at(dir.path(), START + HOUR);
    assert_eq!(store.now().await, Ok(START + HOUR));
    assert_eq!(store.deletion_waits().await, Ok(None));
    let due = store.due(Due::Timers, &[], 10).await.unwrap();
    assert_eq!((due.items.len(), due.next_in), (0, Some(2_000)), "the nap keeps its two seconds");
    let pending = store.pending(run_id(2)).await.unwrap();
    let deadlines = pending.gates.iter().filter_map(|gate| gate.arrival.as_ref()?.deadline);
    assert_eq!(deadlines.max(), Some(START + 2 * HOUR), "the webhook keeps its hour");
    let held = store.pending(run_id(3)).await.unwrap().tasks[0].held.clone().unwrap();
    assert_eq!((held.deadline, held.lease_until), (Some(START + HOUR + 30_000), START + HOUR + 30_000));
    let summary = store.summary(run_id(3)).await.unwrap().unwrap();
    assert_eq!(summary.created_at, START + HOUR);
    drop(store);

    // Opened again before anything was written, time continues from there, and so does everything else.
    let (clock, store) = open_at(dir.path(), START + HOUR + 1_000);
    assert_eq!(store.now().await, Ok(START + HOUR + 1_000));
    clock.advance(1_000);
    assert_eq!(store.due(Due::Timers, &[], 10).await.unwrap().items.len(), 1);
    let claimed = store.commit(vec![], vec![claim(3, "w", 1)]).await.unwrap().claims.remove(0).tasks.remove(0);
    let report = Op::Complete { output: Data::from(json!(1)), emits: vec![], logs: vec![] };
    let commit = Decider::new().report(&store, &claimed, report).await;
    store.commit(vec![Command::Run(RunCommit { command: command_id(9), ..commit })], vec![]).await.unwrap();
    let records = store.records(run_id(3), 0, 100).await.unwrap();
    assert!(records.last().unwrap().ts < records[0].ts, "records keep their times");
    for _ in 0..8 {
        clock.advance(4_500);
        store.due(Due::Leases, &[], 10).await.unwrap();
    }
    let up = store.due(Due::Leases, &[], 10).await.unwrap();
    assert!(up.items.iter().all(|item| !matches!(item, DueItem::Lease { why: Expiry::Timeout, .. })), "{up:?}");
}

#[tokio::test]
async fn a_reset_of_a_store_that_is_not_ahead_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (_, store) = open_at(dir.path(), START);
    start(&store, 1, "gated").await;
    store.close().unwrap();
    let store = reset_at(dir.path(), START + 1_500);
    assert_eq!(store.now().await, Ok(START + 1_500));
    assert_eq!(store.due(Due::Timers, &[], 10).await.unwrap().next_in, Some(500));
}

/// A virtual machine that was paused for five seconds.
#[tokio::test]
async fn an_open_store_catches_up_with_a_wall_clock_that_stays_ahead() {
    let dir = tempfile::tempdir().unwrap();
    let (clock, store) = open_at(dir.path(), START);
    clock.jump(5_000);
    assert_eq!(store.now().await, Ok(START), "not immediately");
    let since = std::time::Instant::now();
    while store.now().await.unwrap() != clock.wall() {
        assert!(since.elapsed().as_secs() < 20, "it does not catch up");
        clock.advance(60_000);
        tokio::time::sleep(std::time::Duration::from_millis(120)).await;
    }
    assert!(clock.wall() >= START + 5_000 + 10 * 60_000, "it followed the wall clock too soon");
}
