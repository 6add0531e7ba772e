//! The connection to PostgreSQL: encryption, passwords, proxies, tables of every version, and databases that are cut off,
//! stopped or hang.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "postgres_connection/cuts.rs"]
mod cuts;
#[path = "postgres_connection/migrations.rs"]
mod migrations;
#[path = "postgres_connection/passwords.rs"]
mod passwords;
#[path = "postgres_connection/pgbouncer.rs"]
mod pgbouncer;
#[path = "postgres/private.rs"]
mod private;
#[path = "postgres/server.rs"]
#[allow(dead_code)]
mod server;
mod story;
#[path = "postgres_connection/tls.rs"]
mod tls;
#[path = "postgres_connection/views.rs"]
mod views;

use std::sync::Arc;
use std::time::Duration;

use eddyline_machine::RunId;
use eddyline_store::*;
use serde_json::json;
use story::{Decider, claim, run_id};
use tokio::time::{Instant, sleep};

pub async fn open(url: &str) -> Result<Postgres> {
    Postgres::open(url, PostgresOptions::default()).await
}

/// Why it could not be opened.
pub async fn refused(url: &str) -> String {
    open(url).await.unwrap_err().to_string()
}

pub fn schema_of(url: &str) -> &str {
    url.split("schema=").nth(1).unwrap().split('&').next().unwrap()
}

/// A connection that is ours, to the server of the tests.
pub async fn beside(url: &str) -> tokio_postgres::Client {
    let plain = url.split("&schema=").next().unwrap().split("?schema=").next().unwrap();
    let (client, connection) = tokio_postgres::connect(plain, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// Submits a commit until it is known what became of it.
pub async fn until_known(store: &Postgres, commit: &RunCommit) -> Committed {
    let begun = Instant::now();
    loop {
        match store.commit(vec![Command::Run(commit.clone())], Vec::new()).await {
            Ok(mut written) => return written.commands.remove(0).unwrap(),
            Err(StoreError::Unknown | StoreError::Unavailable(_)) if begun.elapsed() < Duration::from_secs(60) => {
                sleep(Duration::from_millis(20)).await;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// The same for a claim.
pub async fn claimed(store: &Postgres, request: ClaimRequest) -> Vec<Claimed> {
    let begun = Instant::now();
    loop {
        match store.commit(Vec::new(), vec![request.clone()]).await {
            Ok(mut written) => return written.claims.remove(0).tasks,
            Err(StoreError::Unknown | StoreError::Unavailable(_)) if begun.elapsed() < Duration::from_secs(60) => {
                sleep(Duration::from_millis(20)).await;
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A run of the flow `line` from its start to its end.
pub async fn whole_run(store: &Postgres, decider: &mut Decider, n: u128) -> RunId {
    whole_run_decided_on(store, store, decider, n).await
}

/// The same, whatever fails on the way; what decisions need is read from a store that works.
pub async fn whole_run_decided_on(store: &Postgres, calm: &Postgres, decider: &mut Decider, n: u128) -> RunId {
    let started = decider.start(calm, n, "line", json!({"n": n as u64})).await;
    until_known(store, &started).await;
    finish(store, calm, decider, n).await;
    run_id(n)
}

/// The rest of such a run, of which no step was done.
pub async fn finish(store: &Postgres, calm: &Postgres, decider: &mut Decider, n: u128) {
    for step in 0..3 {
        let tasks = claimed(store, claim(n * 10 + step, "ann", 1)).await;
        let [task] = tasks.as_slice() else { panic!("step {step} of run {n}: {tasks:?}") };
        let done = decider.complete(calm, task, json!({"step": step as u64})).await;
        until_known(store, &done).await;
    }
}

/// Waits until the store works.
pub async fn available(store: &Postgres) {
    let begun = Instant::now();
    while let Err(error) = store.health().await {
        assert!(begun.elapsed() < Duration::from_secs(60), "{error}");
        sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until something holds.
pub async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let begun = Instant::now();
    while !holds().await {
        assert!(begun.elapsed() < Duration::from_secs(30), "{what}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// The run has completed, and its timeline is whole.
pub async fn assert_whole(store: &Postgres, run: RunId) {
    let summary = store.summary(run).await.unwrap().unwrap();
    assert_eq!(summary.header.status(), eddyline_machine::run::Status::Completed);
    let records = store.records(run, 0, 1_000).await.unwrap();
    let numbers: Vec<u64> = records.iter().map(|record| record.n).collect();
    assert_eq!(numbers, (1..=summary.records).collect::<Vec<_>>());
    // The start, each step scheduled, started, its attempt and itself completed, and the end.
    assert_eq!(records.len(), 14, "{records:?}");
}

pub fn shared(store: Postgres) -> Arc<Postgres> {
    Arc::new(store)
}
