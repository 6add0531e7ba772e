//! A flipped bit in the write-ahead log, as described in docs/stores.md: the store opens in a consistent, slightly
//! earlier state and continues from there.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod story;

use std::fs;
use std::path::Path;

use eddyline_store::*;
use serde_json::json;
use story::*;

const HEADER_BYTES: usize = 32;
const FRAME_BYTES: usize = 24 + 4_096;
const RUNS: u128 = 40;

/// The files that a process killed now would leave behind.
fn killed(from: &Path) -> tempfile::TempDir {
    let to = tempfile::tempdir().unwrap();
    for file in ["eddyline.db", "eddyline.db-wal"] {
        fs::copy(from.join(file), to.path().join(file)).unwrap();
    }
    to
}

async fn runs(store: &Embedded) -> Vec<eddyline_machine::RunId> {
    let listed = store.runs(Some(&ns()), &RunFilter::default(), Page::default()).await.unwrap();
    listed.into_iter().rev().map(|summary| summary.run).collect()
}

#[tokio::test]
async fn a_damaged_log_ends_before_the_damage_and_what_is_left_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let store = Embedded::open(dir.path(), Options { clock: ManualClock::at(START), ..Options::default() }).unwrap();
    let mut decider = Decider::new();
    for n in 1..=RUNS {
        let commit = decider.start(&store, n, "line", big()).await;
        store.commit(vec![Command::Run(commit)], vec![claim(n, "w", 1)]).await.unwrap();
    }
    let all = runs(&store).await;
    let whole = Embedded::open(killed(dir.path()).path(), Options::default()).unwrap();
    assert_eq!(runs(&whole).await, all, "without damage nothing is lost");

    let frames =
        (fs::metadata(dir.path().join("eddyline.db-wal")).unwrap().len() as usize - HEADER_BYTES) / FRAME_BYTES;
    let mut lengths = Vec::new();
    for part in [4, 2] {
        let copy = killed(dir.path());
        let log = copy.path().join("eddyline.db-wal");
        let mut bytes = fs::read(&log).unwrap();
        let at = HEADER_BYTES + (frames - frames / part) * FRAME_BYTES + 24 + 100;
        bytes[at] ^= 1;
        fs::write(&log, bytes).unwrap();
        let store =
            Embedded::open(copy.path(), Options { clock: ManualClock::at(START), ..Options::default() }).unwrap();
        let left = runs(&store).await;
        assert!(left.len() < all.len() && !left.is_empty(), "{} of {} are left", left.len(), all.len());
        assert_eq!(left, all[..left.len()], "the rest is an earlier state of the store");
        for run in &left {
            assert!(matches!(store.load(*run, None).await.unwrap(), Found::Run(_)));
            assert_eq!(store.records(*run, 0, 100).await.unwrap().len(), 3, "a start and its claim are one commit");
            assert!(store.pending(*run).await.unwrap().tasks[0].held.is_some());
        }
        // The store continues from there: lost work can be repeated.
        let commit = Decider::new().start(&store, left.len() as u128 + 1, "line", json!(1)).await;
        store.commit(vec![Command::Run(commit)], vec![]).await.unwrap().commands.remove(0).unwrap();
        lengths.push(left.len());
    }
    assert!(lengths[0] > lengths[1], "earlier damage loses more: {lengths:?}");
}
