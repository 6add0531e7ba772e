//! A disk that hangs in the middle of a commit: calls that need no disk still return. And undoing a group that could
//! not be written does not read all queued tasks.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod story;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use eddyline_machine::Fence;
use eddyline_store::Due;
use eddyline_store::*;
use rusqlite::Connection;
use story::*;

/// A timeout that is reached only when something hangs.
const LONG: Duration = Duration::from_secs(20);

/// A commit that adds a task, claims another and writes rules.
async fn commands(store: &Embedded, n: u128) -> Vec<Command> {
    let start = Decider::new().start(store, n, "line", big()).await;
    let rules = put("queue", "other", serde_json::json!({"concurrency": 1}), None);
    vec![Command::Run(RunCommit { command: command_id(n), ..start }), documents(100 + n, vec![rules])]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn heartbeats_and_queues_are_answered_while_the_disk_hangs_in_a_commit() {
    let dir = tempfile::tempdir().unwrap();
    // The number of the disk access at which the commit hangs; 0: none.
    let (at, calls) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let (hang, hung) = mpsc::channel();
    let (resume, resumed) = mpsc::channel::<()>();
    let (hangs_at, counted, resumed) = (at.clone(), calls.clone(), Mutex::new(resumed));
    let inside_commit: Hook = Arc::new(move || {
        if counted.fetch_add(1, Ordering::SeqCst) + 1 == hangs_at.load(Ordering::SeqCst) {
            hang.send(()).unwrap();
            let _ = resumed.lock().unwrap().recv_timeout(LONG);
        }
    });
    let options = Options { inside_commit: Some(inside_commit), ..Options::default() };
    let store = Arc::new(Embedded::open(dir.path(), options).unwrap());
    let written = store.commit(commands(&store, 1).await, vec![claim(1, "w", 1)]).await.unwrap();
    assert_eq!(written.claims[0].tasks.len(), 1);
    let uses = calls.load(Ordering::SeqCst);
    assert!(uses > 5, "the commit used the disk {uses} times");
    for use_of_disk in 1..=uses {
        let n = 1 + use_of_disk as u128;
        let commands = commands(&store, n).await;
        calls.store(0, Ordering::SeqCst);
        at.store(use_of_disk, Ordering::SeqCst);
        let writer = store.clone();
        let writing = tokio::spawn(async move { writer.commit(commands, vec![claim(n, "w", 1)]).await });
        let hung_there = tokio::task::block_in_place(|| hung.recv_timeout(LONG));
        assert_eq!(hung_there, Ok(()), "disk access {use_of_disk} was not reached");
        let reader = store.clone();
        let answers = tokio::spawn(async move {
            let lease = Lease { run: run_id(1), fence: Fence(1) };
            let extended = reader.extend(&ns(), Some("w"), &[lease]).await.unwrap();
            assert!(matches!(extended[..], [Extended::Until { .. }]), "{extended:?}");
            assert!(!reader.queues(&ns()).await.unwrap().is_empty());
            reader.backlog(&ns()).await.unwrap();
            assert!(reader.due(Due::Leases, &[], 10).await.unwrap().items.is_empty());
            assert!(reader.pending(run_id(1)).await.unwrap().tasks[0].held.is_some());
            reader.summary(run_id(1)).await.unwrap().unwrap();
        });
        let answered = tokio::time::timeout(Duration::from_secs(5), answers).await;
        resume.send(()).unwrap();
        answered.unwrap_or_else(|_| panic!("calls do not return while disk access {use_of_disk} hangs")).unwrap();
        assert!(writing.await.unwrap().unwrap().commands.iter().all(|done| done.is_ok()));
    }
}

/// One of the queued tasks has a wrong checksum, so reading all of them would fail.
#[tokio::test]
async fn a_refused_group_is_taken_back_without_reading_everything_that_is_queued() {
    let dir = tempfile::tempdir().unwrap();
    let clock = ManualClock::at(START);
    let options = Options { clock, max_bytes: Some(400 << 10), ..Options::default() };
    let store = Embedded::open(dir.path(), options).unwrap();
    let mut decider = Decider::new();
    let mut stored = 0;
    let full = loop {
        let commit = decider.start(&store, stored + 1, "line", big()).await;
        match store.commit(vec![Command::Run(commit)], vec![claim(stored + 1, "w", 0)]).await {
            Ok(_) => stored += 1,
            Err(error) => break error,
        }
        if stored == 1 {
            let raw = Connection::open(dir.path().join("eddyline.db")).unwrap();
            assert_eq!(raw.execute("UPDATE tasks SET crc = crc + 1", []), Ok(1));
        }
        assert!(stored < 10_000);
    };
    assert!(matches!(full, StoreError::Full(_)), "{full}");
    let ready = store.queues(&ns()).await.unwrap()[0].ready;
    assert_eq!(ready as u128, stored, "refused tasks are not queued");
}
