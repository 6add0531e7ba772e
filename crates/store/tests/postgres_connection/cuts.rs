//! Connections that are cut, a database that is away, and one that hangs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use eddyline_store::*;
use serde_json::json;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout};

use crate::private::{Private, TRUST};
use crate::story::{Decider, claim};
use crate::*;

/// How soon a database that is back is noticed.
const SOON: Duration = Duration::from_secs(2);
/// How soon one that hangs is noticed: by the limit for its health, and some time for the machine.
const NOTICED: Duration = Duration::from_secs(4);

fn private() -> (Private, String) {
    let server = Private::start(TRUST, "", None);
    let url = server.url("eddy", "127.0.0.1", "pool_size=4");
    (server, url)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_that_are_terminated_at_random_lose_and_repeat_nothing() {
    let name = format!("cut-{}", uuid::Uuid::new_v4());
    let url = format!("{}&application_name={name}", server::fresh_url());
    let store = shared(open(&url).await.unwrap());
    let (stop, terminated) = (Arc::new(AtomicBool::new(false)), beside(&url).await);
    let killer = tokio::spawn({
        let (stop, name) = (stop.clone(), name.clone());
        async move {
            let mut killed = 0;
            while !stop.load(Ordering::Relaxed) {
                let some = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1 \
                            AND random() < 0.3";
                killed += terminated.query(some, &[&name]).await.unwrap().len();
                sleep(Duration::from_millis(15)).await;
            }
            killed
        }
    });
    // What decisions need is read on connections that nobody ends.
    let (calm, mut decider) = (open(&url.replace(&name, "calm")).await.unwrap(), Decider::new());
    let mut runs = Vec::new();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(6) {
        let n = runs.len() as u128 + 1;
        runs.push(whole_run_decided_on(&store, &calm, &mut decider, n).await);
    }
    stop.store(true, Ordering::Relaxed);
    let killed = killer.await.unwrap();
    assert!(killed > 50, "{killed}");
    for run in &runs {
        assert_whole(&calm, *run).await;
    }
    assert_eq!(calm.count_runs(&story::ns(), &RunFilter::default()).await.unwrap(), runs.len() as u64);
    until("it listens again", async || store.hears_others() == Some(true)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_restarts_or_is_away_for_a_while_is_found_again() {
    let (server, url) = private();
    let store = shared(open(&url).await.unwrap());
    let mut decider = Decider::new();
    assert_whole(&store, whole_run(&store, &mut decider, 1).await).await;

    // It is killed in the middle of work, and comes back.
    let commit = decider.start(&*store, 2, "line", json!({})).await;
    let restarting = tokio::task::spawn_blocking(move || {
        server.restart("immediate");
        (server, Instant::now())
    });
    until_known(&store, &commit).await;
    let tasks = claimed(&store, claim(20, "ann", 1)).await;
    let (server, back) = restarting.await.unwrap();
    available(&store).await;
    assert!(back.elapsed() < SOON, "{:?}", back.elapsed());
    assert_eq!(tasks, claimed(&store, claim(20, "ann", 1)).await, "the same request gets the same");
    finish(&store, &store, &mut decider, 2).await;
    assert_whole(&store, story::run_id(2)).await;

    // It is stopped for five seconds.
    let commit = decider.start(&*store, 3, "line", json!({})).await;
    let server = tokio::task::spawn_blocking(move || {
        server.end("fast");
        server
    });
    let server = server.await.unwrap();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(5) {
        assert!(matches!(store.health().await, Err(StoreError::Unavailable(_))));
        assert!(store.commit(vec![Command::Run(commit.clone())], Vec::new()).await.is_err());
        sleep(Duration::from_millis(100)).await;
    }
    assert_ne!(store.hears_others(), Some(true));
    let (server, back) = tokio::task::spawn_blocking(move || {
        server.begin();
        (server, Instant::now())
    })
    .await
    .unwrap();
    available(&store).await;
    assert!(back.elapsed() < SOON, "{:?}", back.elapsed());
    until_known(&store, &commit).await;
    finish(&store, &store, &mut decider, 3).await;
    assert_whole(&store, story::run_id(3)).await;
    until("it listens again", async || store.hears_others() == Some(true)).await;
    drop(server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_hangs_is_not_healthy_and_goes_on_where_it_was() {
    let (server, url) = private();
    let store = shared(open(&url).await.unwrap());
    let mut decider = Decider::new();
    assert_whole(&store, whole_run(&store, &mut decider, 1).await).await;
    let commit = decider.start(&*store, 2, "line", json!({})).await;
    server.signal("STOP");
    let begun = Instant::now();
    assert!(store.health().await.is_err());
    assert!(begun.elapsed() < NOTICED, "{:?}", begun.elapsed());
    let waiting = tokio::spawn({
        let (store, commit) = (store.clone(), commit.clone());
        async move { store.commit(vec![Command::Run(commit)], Vec::new()).await }
    });
    assert!(timeout(Duration::from_secs(1), store.health()).await.map_or(true, |health| health.is_err()));
    server.signal("CONT");
    let back = Instant::now();
    available(&store).await;
    assert!(back.elapsed() < SOON, "{:?}", back.elapsed());
    match waiting.await.unwrap() {
        Ok(written) => assert!(!written.commands[0].as_ref().unwrap().before, "it was only slow"),
        // A new connection could not be made in time.
        Err(error) => assert!(matches!(error, StoreError::Unavailable(_) | StoreError::Unknown), "{error}"),
    }
    until_known(&store, &commit).await;
    finish(&store, &store, &mut decider, 2).await;
    assert_whole(&store, story::run_id(2)).await;
}

/// A proxy that can stop answering: what it has got by then, and what it gets, arrives; nothing comes back, ever, on the
/// connections that there are.
struct Swallowing {
    port: u16,
    swallows: Arc<AtomicBool>,
}

impl Swallowing {
    async fn before(port: u16) -> Swallowing {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (own, swallows) = (listener.local_addr().unwrap().port(), Arc::new(AtomicBool::new(false)));
        let asked = swallows.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let server = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
                let (from_client, to_client) = client.into_split();
                let (from_server, to_server) = server.into_split();
                tokio::spawn(pass(from_client, to_server, Arc::default()));
                tokio::spawn(pass(from_server, to_client, asked.clone()));
            }
        });
        Swallowing { port: own, swallows }
    }
}

async fn pass(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, swallows: Arc<AtomicBool>) {
    let (mut buffer, mut dead) = (vec![0; 1 << 16], false);
    while let Ok(read @ 1..) = from.read(&mut buffer).await {
        dead |= swallows.load(Ordering::SeqCst);
        if !dead && to.write_all(&buffer[..read]).await.is_err() {
            return;
        }
    }
    if dead {
        // Not even the end is told.
        std::future::pending::<()>().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_is_never_answered_is_unknown_and_was_made() {
    let (server, _) = private();
    let proxy = Swallowing::before(server.port).await;
    let url = format!("postgres://eddy@127.0.0.1:{}/postgres?pool_size=4", proxy.port);
    let store = shared(open(&url).await.unwrap());
    let mut decider = Decider::new();
    let run = whole_run(&store, &mut decider, 1).await;
    until("it listens", async || store.hears_others() == Some(true)).await;
    let commit = decider.start(&*store, 2, "line", json!({})).await;
    // Connections of the pool that were used, and are not now.
    let reads = (0..4).map(|_| store.summary(run));
    for read in reads.collect::<Vec<_>>() {
        read.await.unwrap();
    }

    proxy.swallows.store(true, Ordering::SeqCst);
    let begun = Instant::now();
    let answer = store.commit(vec![Command::Run(commit.clone())], Vec::new()).await;
    let waited = begun.elapsed();
    assert_eq!(answer.unwrap_err(), StoreError::Unknown);
    assert!(waited > Duration::from_secs(10) && waited < Duration::from_secs(20), "{waited:?}");
    let begun = Instant::now();
    assert!(store.health().await.is_err());
    assert!(begun.elapsed() < NOTICED, "{:?}", begun.elapsed());
    until("it is noticed that hints don't arrive", async || store.hears_others() == Some(false)).await;

    // It answers again, on new connections.
    proxy.swallows.store(false, Ordering::SeqCst);
    let back = Instant::now();
    available(&store).await;
    assert!(back.elapsed() < SOON, "{:?}", back.elapsed());
    assert!(until_known(&store, &commit).await.before, "nobody was told");
    until("it listens again", async || store.hears_others() == Some(true)).await;
    finish(&store, &store, &mut decider, 2).await;
    assert_whole(&store, story::run_id(2)).await;
    let request = claim(900, "bob", 5);
    assert_eq!(claimed(&store, request).await.len(), 0);
}

#[tokio::test]
async fn a_server_that_accepts_and_says_nothing_is_given_up() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let begun = Instant::now();
    let url = format!("postgres://eddy@127.0.0.1:{port}/postgres?connect_timeout=1");
    let why = refused(&url).await;
    assert!(why.contains("did not respond"), "{why}");
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}
