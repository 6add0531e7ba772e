//! Behind PgBouncer, which gives each transaction another session.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use eddyline_store::conformance::Backend;
use eddyline_store::*;

use crate::private::Bouncer;
use crate::story::Decider;
use crate::{assert_whole, open, shared, whole_run};

/// Sessions of the server that PgBouncer uses.
const SESSIONS: usize = 4;

/// The statements that are prepared in all sessions of the server, as seen through the proxy.
async fn prepared(bouncer: &Bouncer) -> i64 {
    let mut clients = Vec::new();
    let mut count = 0;
    for _ in 0..SESSIONS {
        let (client, connection) = tokio_postgres::connect(&bouncer.url(""), tokio_postgres::NoTls).await.unwrap();
        tokio::spawn(connection);
        // While a transaction is open, nobody else has its session.
        client.batch_execute("BEGIN").await.unwrap();
        let row = client.query_typed_one("SELECT count(*) FROM pg_prepared_statements", &[]).await.unwrap();
        count += row.get::<_, i64>(0);
        clients.push(client);
    }
    for client in clients {
        client.batch_execute("COMMIT").await.unwrap();
    }
    count
}

/// Runs through one store, several at a time, so that its connections share sessions.
async fn runs(store: &Arc<Postgres>, first: u128) {
    let one_by_one = (first..first + 6).map(|n| {
        let store = store.clone();
        tokio::spawn(async move {
            let mut decider = Decider::new();
            let run = crate::story::run_id(n);
            let start = || eddyline_machine::Input::Start(Box::default());
            let mut commit = decider.decide(&*store, run, Some("gated"), &[start()]).await;
            commit.command = CommandId(uuid::Uuid::new_v4());
            crate::until_known(&store, &commit).await;
            for _ in 0..20 {
                assert!(store.summary(run).await.unwrap().is_some());
                store.pending(run).await.unwrap();
            }
        })
    });
    for run in one_by_one.collect::<Vec<_>>() {
        run.await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxy_is_found_before_anything_is_prepared_and_nobody_listens() {
    let Some(bouncer) = Bouncer::start() else { return };
    for (parameters, first) in [("schema=found", 100), ("schema=told&prepare=false", 200)] {
        let store = shared(open(&bouncer.url(parameters)).await.unwrap());
        assert_eq!(store.hears_others(), Some(false), "hints don't arrive");
        runs(&store, first).await;
        let run = whole_run(&store, &mut Decider::new(), first + 50).await;
        assert_whole(&store, run).await;
        assert_eq!(prepared(&bouncer).await, 0);
    }
    let direct = open(&bouncer.server.url("eddy", "127.0.0.1", "schema=found")).await.unwrap();
    assert_eq!(direct.hears_others(), Some(true), "without the proxy they do");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxy_that_was_not_found_is_noticed_by_its_errors() {
    let Some(bouncer) = Bouncer::start() else { return };
    let store = shared(open(&bouncer.url("schema=late&prepare=true")).await.unwrap());
    runs(&store, 300).await;
    assert!(prepared(&bouncer).await > 0, "it was not known at first");
    // By now it is: nothing new is prepared.
    let before = prepared(&bouncer).await;
    whole_run(&store, &mut Decider::new(), 399).await;
    // A connection that ends may take some along.
    assert!(prepared(&bouncer).await <= before);
}

/// The suite, through the proxy.
struct Through {
    bouncer: Option<Bouncer>,
    opened: AtomicU64,
    urls: Mutex<HashMap<usize, String>>,
}

fn address(store: &Arc<dyn Store>) -> usize {
    Arc::as_ptr(store).cast::<()>() as usize
}

impl Through {
    fn new() -> Through {
        Through { bouncer: Bouncer::start(), opened: AtomicU64::new(0), urls: Mutex::default() }
    }

    async fn open_at(&self, url: String, clock: Arc<ManualClock>) -> Arc<dyn Store> {
        let options = PostgresOptions { clock: Some(clock), ..PostgresOptions::default() };
        let store: Arc<dyn Store> = Arc::new(Postgres::open(&url, options).await.unwrap());
        self.urls.lock().unwrap().insert(address(&store), url);
        store
    }
}

#[async_trait]
impl Backend for Through {
    async fn open(&self, clock: Arc<ManualClock>) -> Arc<dyn Store> {
        let Some(bouncer) = &self.bouncer else { return Arc::new(Memory::with_clock(clock)) };
        let number = self.opened.fetch_add(1, Ordering::Relaxed);
        self.open_at(bouncer.url(&format!("schema=suite_{number}")), clock).await
    }

    async fn reopen(&self, store: Arc<dyn Store>, clock: Arc<ManualClock>) -> Option<Arc<dyn Store>> {
        let url = self.urls.lock().unwrap().remove(&address(&store))?;
        drop(store);
        Some(self.open_at(url, clock).await)
    }

    fn keeps_leases(&self) -> bool {
        self.bouncer.is_some()
    }
}

/// One server for all cases: starting it takes longer than most of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes a quarter of an hour: whoever opens a store behind a proxy waits some seconds for hints"]
async fn the_suite_passes_behind_a_proxy() {
    let through = Through::new();
    if through.bouncer.is_some() {
        for case in eddyline_store::conformance::cases() {
            eddyline_store::conformance::check(&through, case.name).await;
        }
    }
}
