//! Panics in threads of the store: a reader continues with the next read; a panic in any other thread closes the store.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod story;

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use eddyline_machine::*;
use eddyline_store::Due;
use eddyline_store::*;
use serde_json::json;
use story::*;

/// A timeout that is reached only when something hangs.
const LONG: Duration = Duration::from_secs(30);

fn is_on(thread: &str) -> bool {
    std::thread::current().name() == Some(thread)
}

/// Waits until the store has failed; returns why.
async fn failure(failed: &mpsc::Receiver<StoreFailure>) -> String {
    let since = Instant::now();
    loop {
        if let Ok(failure) = failed.try_recv() {
            return failure.to_string();
        }
        assert!(since.elapsed() < LONG, "the store keeps running without its thread");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

type OnFailure = Arc<dyn Fn(&StoreFailure) + Send + Sync>;

fn on_failure() -> (OnFailure, mpsc::Receiver<StoreFailure>) {
    let (tell, failed) = mpsc::channel();
    let tell = Mutex::new(tell);
    (Arc::new(move |failure| tell.lock().unwrap().send(failure.clone()).unwrap()), failed)
}

#[tokio::test]
async fn a_read_that_panics_is_an_error_and_its_thread_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let armed = Arc::new(AtomicBool::new(true));
    let asked = armed.clone();
    let hook: Hook = Arc::new(move || assert!(!asked.load(Ordering::SeqCst), "on purpose"));
    let options = Options { after_due_read: Some(hook), readers: 1, ..Options::default() };
    let store = Embedded::open(dir.path(), options).unwrap();
    for _ in 0..3 {
        let error = tokio::time::timeout(LONG, store.due(Due::Timers, &[], 10)).await.unwrap().unwrap_err();
        assert_eq!(error, StoreError::Unavailable("the read panicked: on purpose".to_owned()));
        store.health().await.unwrap();
    }
    armed.store(false, Ordering::SeqCst);
    store.due(Due::Timers, &[], 10).await.unwrap();
    store.close().unwrap();
}

/// A clock that, once armed, panics when the keeper reads it.
#[derive(Debug, Default)]
struct Broken(AtomicBool, SystemClock);

impl Clock for Broken {
    fn wall(&self) -> Millis {
        assert!(!self.0.load(Ordering::SeqCst) || !is_on("eddyline-keep"), "on purpose");
        self.1.wall()
    }

    fn running(&self) -> Duration {
        self.1.running()
    }
}

#[tokio::test]
async fn a_store_gives_up_when_the_thread_panics_that_keeps_its_log_short() {
    let dir = tempfile::tempdir().unwrap();
    let (clock, (on_failure, failed)) = (Arc::new(Broken::default()), on_failure());
    let options = Options { clock: clock.clone(), on_failure, ..Options::default() };
    let store = Embedded::open(dir.path(), options).unwrap();
    store.health().await.unwrap();
    clock.0.store(true, Ordering::SeqCst);
    let why = failure(&failed).await;
    assert!(why.contains("failed: its thread eddyline-keep panicked: on purpose"), "{why}");
    for error in [store.health().await.unwrap_err(), store.now().await.unwrap_err()] {
        assert!(matches!(&error, StoreError::Closed(why) if why.contains("eddyline-keep")), "{error}");
    }
}

/// The wakers of callers that wait for commits: the first one panics when it is woken.
#[derive(Default)]
struct Fainting(AtomicBool);

impl Wake for Fainting {
    fn wake(self: Arc<Self>) {
        assert!(!is_on("eddyline-answer") || self.0.swap(true, Ordering::SeqCst), "on purpose");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_gives_up_when_the_thread_panics_that_answers() {
    let dir = tempfile::tempdir().unwrap();
    let (gate, opened) = mpsc::channel::<()>();
    let opened = Mutex::new(opened);
    // The first group waits until all the other requests are queued.
    let before_commit: Hook = Arc::new(move || _ = opened.lock().unwrap().recv());
    let (on_failure, failed) = on_failure();
    let options = Options { before_commit: Some(before_commit), on_failure, ..Options::default() };
    let store = Arc::new(Embedded::open(dir.path(), options).unwrap());
    let mut decider = Decider::new();
    let mut commits = Vec::new();
    for n in 1..=20 {
        commits.push(decider.start(&*store, n, "line", json!(n as u64)).await);
    }
    let (caller, first) = (store.clone(), commits.remove(0));
    let first = tokio::spawn(async move { caller.commit(vec![Command::Run(first)], vec![]).await });
    while store.stats().groups == 0 {
        tokio::task::yield_now().await;
    }
    let waker = Waker::from(Arc::new(Fainting::default()));
    let mut others: Vec<_> =
        commits.into_iter().map(|commit| Box::pin(store.commit(vec![Command::Run(commit)], vec![]))).collect();
    for other in &mut others {
        assert!(matches!(pin!(other).poll(&mut Context::from_waker(&waker)), Poll::Pending));
    }
    drop(gate);
    first.await.unwrap().unwrap();
    let why = failure(&failed).await;
    assert!(why.contains("failed: its thread eddyline-answer panicked: on purpose"), "{why}");
    assert!(matches!(store.health().await.unwrap_err(), StoreError::Closed(_)));
}
