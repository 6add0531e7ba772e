//! Workers do not lose leases or time because a group could not be written, or because of any number of times without
//! service.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod story;

use eddyline_machine::{Data, Expiry};
use eddyline_store::*;
use serde_json::json;
use story::*;

/// Heartbeats are only in memory. A report that finds the disk full has already removed its task from memory; when the
/// task is restored, its lease must not be the one on disk, which ended long ago.
#[tokio::test]
async fn a_lease_that_was_extended_outlives_a_report_that_found_the_disk_full() {
    let dir = tempfile::tempdir().unwrap();
    let clock = ManualClock::at(START);
    let options = Options { clock: clock.clone(), max_bytes: Some(1 << 20), ..Options::default() };
    let store = Embedded::open(dir.path(), options).unwrap();
    let mut decider = Decider::new();
    let commit = decider.start(&store, 1, "line", json!(1)).await;
    let written = store.commit(vec![Command::Run(commit)], vec![claim(1, "w", 1)]).await.unwrap();
    let held = written.claims[0].tasks[0].clone();
    let lease = Lease { run: held.run, fence: held.task.fence };
    // An hour of work, with a heartbeat every few seconds.
    for _ in 0..900 {
        clock.advance(4_000);
        assert!(matches!(store.extend(&ns(), Some("w"), &[lease]).await.unwrap()[..], [Extended::Until { .. }]));
        assert!(store.due(Due::Leases, &[], 10).await.unwrap().items.is_empty());
    }
    let mut report = decider.complete(&store, &held, json!(1)).await;
    let mut transition = (*report.transition).clone();
    transition
        .values
        .extend((100..140).map(|id| (eddyline_machine::ValueId(id), Data::from(json!("x".repeat(60_000))))));
    report.transition = std::sync::Arc::new(transition);
    let refused = store.commit(vec![Command::Run(report)], vec![]).await.unwrap_err();
    assert!(matches!(refused, StoreError::Full(_)), "{refused}");
    assert!(store.due(Due::Leases, &[], 10).await.unwrap().items.is_empty(), "the lease of a live worker has ended");
    let small = decider.complete(&store, &held, json!(1)).await;
    store.commit(vec![Command::Run(small)], vec![]).await.unwrap().commands.remove(0).unwrap();
}

/// The credit for the first time without service must survive the second.
#[tokio::test]
async fn an_attempt_goes_on_from_where_it_was_however_often_the_store_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let clock = ManualClock::at(START);
    let open = || Embedded::open(dir.path(), Options { clock: clock.clone(), ..Options::default() }).unwrap();
    let store = open();
    let mut decider = Decider::new();
    // One is claimed and has a timeout of 30 s; the other waits and has a start timeout of 50 s.
    let (claimed, waits) =
        (decider.start(&store, 1, "shaky", json!(1)).await, decider.start(&store, 2, "shaky", json!(1)).await);
    store.commit(vec![Command::Run(claimed)], vec![claim(1, "w", 1)]).await.unwrap();
    store.commit(vec![Command::Run(waits)], vec![]).await.unwrap();
    drop(store);
    for _ in 0..3 {
        clock.advance(3_600_000);
        let store = open();
        clock.advance(4_000);
        let due = store.due(Due::Leases, &[], 10).await.unwrap();
        assert!(due.items.is_empty(), "an hour without service was counted: {due:?}");
    }
    clock.advance(3_600_000);
    let store = open();
    let (mut left, mut ended) = (0, Vec::<(eddyline_machine::RunId, Expiry, i32)>::new());
    while ended.len() < 2 {
        assert!(left < 120, "not all of them expired: {ended:?}");
        for item in store.due(Due::Leases, &[], 10).await.unwrap().items {
            let DueItem::Lease { run, why, .. } = item else { panic!("{item:?}") };
            // Items that are not consumed are due again after the hold.
            if ended.iter().all(|(known, ..)| *known != run) {
                ended.push((run, why, left));
            }
        }
        clock.advance(1_000);
        left += 1;
    }
    let expected = [(run_id(1), Expiry::Timeout, 30 - 12), (run_id(2), Expiry::StartTimeout, 50 - 12)];
    assert_eq!(ended, expected);
}
