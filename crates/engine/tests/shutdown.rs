//! A shutdown under load is clean: every accepted request is answered, and the disk is consistent.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod rig;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use eddyline_engine::{Config, EngineError, StartRequest};
use eddyline_store::{Embedded, Namespace, Options, RunFilter, Store};
use rig::{Rig, done};
use serde_json::json;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shutdown_under_load_takes_less_than_two_seconds() {
    let dir = tempfile::tempdir().unwrap();
    let store = Arc::new(Embedded::open(dir.path(), Options::default()).unwrap());
    let mut rig = Rig::on(store.clone(), Config::default());
    rig.register("name: f\nsteps: {a: {}, b: {after: [a]}, nap: {after: [b], await: {time: 10ms}}, c: {after: [nap]}}")
        .await;
    rig.work(40, |task| done(json!({"of": task.activation})));
    let acknowledged = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = (0..20)
        .map(|_| {
            let (engine, acknowledged) = (rig.engine.clone(), acknowledged.clone());
            tokio::spawn(async move {
                loop {
                    let request = StartRequest { flow: "f".to_owned(), ..StartRequest::default() };
                    match engine.start_run(&Namespace::default(), request).await {
                        Ok(_) => acknowledged.fetch_add(1, Ordering::SeqCst),
                        Err(EngineError::Stopped) => return,
                        Err(error) => panic!("{error}"),
                    };
                }
            })
        })
        .collect();
    while acknowledged.load(Ordering::SeqCst) < 500 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let since = Instant::now();
    rig.stop().await;
    for client in clients {
        client.await.unwrap();
    }
    let took = since.elapsed();
    assert!(took < Duration::from_secs(2), "it took {took:?}");
    let stored = store.count_runs(&Namespace::default(), &RunFilter::default()).await.unwrap();
    assert_eq!(stored, acknowledged.load(Ordering::SeqCst) as u64, "acknowledged and stored are the same");
    drop(store);
    // The store opens again with all data.
    let store = Embedded::open(dir.path(), Options::default()).unwrap();
    assert_eq!(store.count_runs(&Namespace::default(), &RunFilter::default()).await.unwrap(), stored);
}
