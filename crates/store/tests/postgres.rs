//! What is PostgreSQL's own: connections that are cut, several processes on one database, servers that are refused.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "postgres/cut.rs"]
mod cut;
#[path = "postgres/server.rs"]
#[allow(dead_code)]
mod server;
mod story;

use std::sync::Arc;
use std::time::Duration;

use eddyline_machine::*;
use eddyline_store::*;
use serde_json::json;
use story::*;

async fn open(url: &str) -> Postgres {
    Postgres::open(url, PostgresOptions::default()).await.unwrap()
}

fn start() -> Input {
    Input::Start(Box::new(Start { input: Some(json!({"n": 1}).into()), ..Start::default() }))
}

fn ask(worker: &str, max: usize) -> ClaimRequest {
    ClaimRequest {
        ns: ns(),
        request: RequestId(uuid::Uuid::new_v4()),
        worker: worker.to_owned(),
        queues: vec!["default".to_owned()],
        offer: Arc::default(),
        max,
        most_held: None,
        lease_ms: 30_000,
    }
}

async fn one(store: &Postgres, commit: RunCommit) -> Result<std::result::Result<Committed, Refused>> {
    Ok(store.commit(vec![Command::Run(commit)], Vec::new()).await?.commands.remove(0))
}

/// A connection that is ours, to look and to interfere.
async fn beside(url: &str) -> tokio_postgres::Client {
    let plain = url.split("&schema=").next().unwrap().split("?schema=").next().unwrap();
    let (client, connection) = tokio_postgres::connect(plain, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

fn schema_of(url: &str) -> &str {
    url.split("schema=").nth(1).unwrap().split('&').next().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_backend_is_terminated_is_unknown_and_can_be_submitted_again() {
    let url = server::fresh_url();
    let (store, mut decider) = (open(&url).await, Decider::new());
    let run = run_id(1);
    let started = decider.decide(&store, run, Some("line"), &[start()]).await;
    one(&store, started).await.unwrap().unwrap();
    let pause = decider.decide(&store, run, None, &[Input::Pause { by: "ann".to_owned() }]).await;

    // Somebody has the run's row, so that the commit waits; then its backend is ended.
    let (holder, other) = (beside(&url).await, beside(&url).await);
    let schema = schema_of(&url);
    holder.batch_execute(&format!("BEGIN; SELECT 1 FROM {schema}.runs FOR UPDATE")).await.unwrap();
    let store = Arc::new(store);
    let waiting = tokio::spawn({
        let (store, pause) = (store.clone(), pause.clone());
        async move { one(&store, pause).await }
    });
    let waits = format!(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%{schema}%'"
    );
    while other.query(&waits, &[]).await.unwrap().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(waiting.await.unwrap().unwrap_err(), StoreError::Unknown);
    holder.batch_execute("COMMIT").await.unwrap();
    let again = one(&store, pause.clone()).await.unwrap().unwrap();
    assert!(!again.before, "it had not been written");
    assert!(one(&store, pause).await.unwrap().unwrap().before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_whose_answer_is_lost_is_unknown_and_its_repeat_tells_that_it_was_made() {
    let url = server::fresh_url();
    let Some(proxy) = cut::Proxy::before(&url).await else { return };
    let (store, mut decider) = (open(&proxy.url).await, Decider::new());
    let run = run_id(1);
    let commit = decider.decide(&store, run, Some("line"), &[start()]).await;
    // Everything is prepared by the first call.
    one(&store, decider.decide(&store, run_id(2), Some("line"), &[start()]).await).await.unwrap().unwrap();
    proxy.lose_answers(true);
    assert_eq!(one(&store, commit.clone()).await.unwrap_err(), StoreError::Unknown);
    proxy.lose_answers(false);
    let again = one(&store, commit).await.unwrap().unwrap();
    assert!(again.before, "it had been written, though nobody was told");

    let request = ask("ann", 10);
    store.commit(Vec::new(), vec![ClaimRequest { max: 0, ..ask("ann", 0) }]).await.unwrap();
    proxy.lose_answers(true);
    assert_eq!(store.commit(Vec::new(), vec![request.clone()]).await.unwrap_err(), StoreError::Unknown);
    proxy.lose_answers(false);
    let claims = store.commit(Vec::new(), vec![request]).await.unwrap().claims.remove(0);
    assert_eq!(claims.tasks.len(), 2, "the tasks that it had got");
    assert_eq!(store.held_by(&ns(), "ann").await.unwrap(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_go_on_when_all_connections_were_terminated() {
    let url = server::fresh_url();
    let (store, mut decider) = (open(&url).await, Decider::new());
    one(&store, decider.decide(&store, run_id(1), Some("line"), &[start()]).await).await.unwrap().unwrap();
    let other = beside(&url).await;
    for _ in 0..3 {
        let all = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity \
                   WHERE pid <> pg_backend_pid() AND query LIKE '%' || $1 || '%'";
        other.query(all, &[&schema_of(&url)]).await.unwrap();
        assert!(store.summary(run_id(1)).await.unwrap().is_some());
        assert_eq!(store.records(run_id(1), 0, 10).await.unwrap().len() as u64, 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_handles_claim_each_task_once_and_see_each_others_commits() {
    let url = server::fresh_url();
    let (a, b, mut decider) = (Arc::new(open(&url).await), Arc::new(open(&url).await), Decider::new());
    for n in 0..60 {
        let store = if n % 2 == 0 { &a } else { &b };
        one(store, decider.decide(&**store, run_id(n), Some("line"), &[start()]).await).await.unwrap().unwrap();
    }
    let claimers = [(a.clone(), "ann"), (b.clone(), "bob")].map(|(store, worker)| {
        tokio::spawn(async move {
            let mut got = Vec::new();
            loop {
                let claims = store.commit(Vec::new(), vec![ask(worker, 3)]).await.unwrap().claims.remove(0);
                if claims.tasks.is_empty() && claims.retry_at.is_none() {
                    return got;
                }
                got.extend(claims.tasks.into_iter().map(|claimed| (claimed.run, claimed.task.fence)));
            }
        })
    });
    let mut all = Vec::new();
    for claimer in claimers {
        all.extend(claimer.await.unwrap());
    }
    let count = all.len();
    all.sort();
    all.dedup();
    assert_eq!((all.len(), count), (60, 60), "each once");
    for n in 0..60 {
        let records = a.records(run_id(n), 0, 100).await.unwrap();
        assert_eq!(records, b.records(run_id(n), 0, 100).await.unwrap());
        assert_eq!(records.iter().map(|record| record.n).collect::<Vec<_>>(), [1, 2, 3]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_heartbeat_for_all_tasks_of_a_worker_writes_none_of_them() {
    let url = server::fresh_url();
    let (store, mut decider) = (open(&url).await, Decider::new());
    for n in 0..5 {
        one(&store, decider.decide(&store, run_id(n), Some("line"), &[start()]).await).await.unwrap().unwrap();
    }
    let tasks = store.commit(Vec::new(), vec![ask("ann", 9)]).await.unwrap().claims.remove(0).tasks;
    let leases: Vec<Lease> =
        tasks.iter().map(|claimed| Lease { run: claimed.run, fence: claimed.task.fence }).collect();
    let other = beside(&url).await;
    let sql = format!("SELECT string_agg(xmin::text, ' ' ORDER BY run) FROM {}.tasks", schema_of(&url));
    let written = async || other.query_one(&sql, &[]).await.unwrap().get::<_, String>(0);
    let until = |told: &[Extended]| match told {
        [Extended::Until { lease_until, .. }, ..] => *lease_until,
        told => panic!("{told:?}"),
    };
    let first = until(&store.extend(&ns(), Some("ann"), &leases).await.unwrap());
    let before = written().await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    let second = until(&store.extend(&ns(), Some("ann"), &leases).await.unwrap());
    assert!(second > first);
    assert_eq!(written().await, before);
    // One that is left out is not kept.
    store.extend(&ns(), Some("ann"), &leases[1..]).await.unwrap();
    let held = store.pending(leases[0].run).await.unwrap().tasks.remove(0).held.unwrap();
    assert_eq!(held.lease_until, second);
}

#[tokio::test]
async fn without_prepared_statements_everything_works_as_well() {
    let url = format!("{}&prepare=false", server::fresh_url());
    let (store, mut decider) = (open(&url).await, Decider::new());
    one(&store, decider.decide(&store, run_id(1), Some("line"), &[start()]).await).await.unwrap().unwrap();
    let commit = decider.decide(&store, run_id(2), Some("line"), &[start()]).await;
    let written = store.commit(vec![Command::Run(commit)], vec![ask("ann", 5)]).await.unwrap();
    assert!(written.commands[0].is_ok());
    assert_eq!(written.claims[0].tasks.len(), 2);
}

#[tokio::test]
async fn tables_of_a_newer_version_are_refused() {
    let url = server::fresh_url();
    drop(open(&url).await);
    let sql = format!("INSERT INTO {}.versions (version) VALUES (999)", schema_of(&url));
    beside(&url).await.batch_execute(&sql).await.unwrap();
    let refused = Postgres::open(&url, PostgresOptions::default()).await.unwrap_err().to_string();
    assert!(refused.contains("version 999") && refused.contains("newer Eddyline"), "{refused}");
}

#[tokio::test]
async fn tables_are_not_made_unless_asked_for() {
    let options = PostgresOptions { migrate: false, ..PostgresOptions::default() };
    let refused = Postgres::open(&server::fresh_url(), options).await.unwrap_err().to_string();
    assert!(refused.contains("eddy migrate"), "{refused}");
}

#[tokio::test]
async fn settings_that_would_lose_commits_are_refused() {
    for (setting, word) in [
        ("synchronous_commit%3Doff", "synchronous_commit"),
        ("default_transaction_isolation%3Dserializable", "read committed"),
    ] {
        let url = format!("{}&options=-c%20{setting}", server::fresh_url());
        let refused = Postgres::open(&url, PostgresOptions::default()).await.unwrap_err().to_string();
        assert!(refused.contains(word), "{refused}");
    }
}

#[tokio::test]
async fn a_server_that_is_not_there_is_told() {
    let refused = Postgres::open("postgres://ann@127.0.0.1:1/none", PostgresOptions::default()).await.unwrap_err();
    assert!(matches!(&refused, StoreError::Unavailable(why) if why.contains("127.0.0.1:1/none")), "{refused}");
}
