//! The plans of the statements that the store executes all the time, on a database with 100,000 rows of everything: none
//! reads a large table from end to end, sorts a queue, or passes by more rows than it returns.
//!
//! The server says which plan each statement had, those inside of functions too, and how many rows went through it
//! (`auto_explain`). Statistics must not matter: a plan that was made while the tables were empty stays in use, so the same
//! calls are made on such connections first, and then on new ones after `ANALYZE`. Lists of runs and deletions are planned
//! for the values of their filters, each time.
//!
//! Not looked at are calls that count, which people and gauges make: `count_runs`, `going`, `queues`, `backlog`.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "postgres_plans/calls.rs"]
mod calls;
#[path = "postgres_plans/fill.rs"]
mod fill;
#[path = "postgres_plans/plans.rs"]
mod plans;
#[path = "postgres/private.rs"]
mod private;
#[path = "postgres/server.rs"]
#[allow(dead_code)]
mod server;
mod story;

use calls::Calls;
use eddyline_store::{Due, Postgres, PostgresOptions, Store};
use plans::Plans;
use private::{Private, TRUST};

/// A statement is prepared on a connection by its first execution, and has a generic plan from its sixth on.
const WARM_UP: usize = 6;

const SETTINGS: &str = "shared_preload_libraries = 'auto_explain'\nauto_explain.log_min_duration = 0\n\
     auto_explain.log_nested_statements = on\nauto_explain.log_analyze = on\nauto_explain.log_timing = off\n\
     auto_explain.log_format = json\nlog_min_messages = log\nautovacuum = off\nshared_buffers = 256MB\n";

/// One connection besides the one that listens: the first call of each kind prepares it.
async fn open(server: &Private, options: &str) -> Postgres {
    let url = server.url("eddy", "127.0.0.1", &format!("schema=plans&pool_size=2{options}"));
    Postgres::open(&url, PostgresOptions::default()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_hot_statement_reads_or_sorts_more_than_it_needs() {
    let server = Private::start(TRUST, SETTINGS, None);
    let mut plans = Plans::of(&server.dir.join("log"));
    let mut calls = Calls::new(open(&server, "").await);
    for _ in 0..WARM_UP {
        calls.all(&mut |_| ()).await;
    }
    calls.prepare().await;
    fill::fill(&server).await;
    // Filling took so long that time is added to all leases first.
    calls.store.due(Due::Leases, &[], 1).await.unwrap();
    plans.skip();
    calls.hot(&mut |call| plans.check(call, "planned while the tables were empty")).await;

    server.client().await.batch_execute("SET auto_explain.log_min_duration = -1; ANALYZE").await.unwrap();
    calls.store = open(&server, "&options=-c%20plan_cache_mode=force_generic_plan%20-c%20jit=off").await;
    plans.skip();
    calls.hot(&mut |call| plans.check(call, "with a generic plan")).await;

    calls.store = open(&server, "").await;
    plans.skip();
    calls.lists(&mut |call| plans.check(call, "planned for its values")).await;
    plans.assert_good();
}
