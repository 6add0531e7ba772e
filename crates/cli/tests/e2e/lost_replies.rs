//! Replies to starts, claims and reports are lost, and yet every step is executed once.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use eddyline::protocol::Page;
use eddyline::{Client, Method, Run, StepCtx, StepError, Worker};
use futures_util::future::join_all;
use serde_json::Value;

use crate::eddy::{Eddy, LONG};
use crate::order::{self, Sum};
use crate::proxy::Proxy;
use crate::timeline::check;
use crate::working::{Transport, work};

const RUNS: u64 = 30;
/// The least number of lost replies. How many bytes arrive in one piece depends on timing, so more runs may be needed
/// to reach it.
const LOST: usize = 10;
const MOST_ROUNDS: u64 = 10;
/// Longer than the test may take, so that no expired lease can repair anything.
const LEASE: &str = "5m";
const SEED: u64 = 0x9E37_79B9_7F4A_7C15;

/// How often each step was executed, by its key.
type Effects = Arc<Mutex<BTreeMap<String, usize>>>;

fn worker(proxy: &Proxy, effects: &Effects) -> Worker {
    let count = |effects: &Effects, ctx: &StepCtx| {
        *effects.lock().unwrap().entry(ctx.key().to_owned()).or_default() += 1;
    };
    let (adds, threes) = (effects.clone(), effects.clone());
    let add = move |ctx: StepCtx, sum: Sum| {
        count(&adds, &ctx);
        async move { Ok::<_, StepError>(sum.n + sum.by) }
    };
    let three = move |ctx: StepCtx, first: u64| {
        count(&threes, &ctx);
        async move { Ok::<_, StepError>([first, first + 1, first + 2]) }
    };
    Worker::connect(proxy.url()).handler("add", add).handler("three", three).max_concurrent(8)
}

/// Starts a run, with retries, until the start is acknowledged.
async fn start(client: &Client, n: u64) -> Run {
    loop {
        let start = client.start(order::NAME, &order::input(n)).idempotency_key(format!("order-{n}"));
        match start.await {
            Ok(run) => return run,
            Err(error) => assert!(error.is_retryable(), "{error}"),
        }
    }
}

async fn play(transport: Transport) {
    let played = tokio::time::timeout(LONG, play_through(transport));
    played.await.expect("the test waits for a lease to expire");
}

async fn play_through(transport: Transport) {
    let eddy = Eddy::start(&["--lease", LEASE]);
    let direct = eddy.client();
    order::register(&direct).await;
    let proxy = Proxy::start(eddy.addr, SEED).await;
    let effects = Effects::default();
    let working = work(worker(&proxy, &effects), transport);
    let through = Client::new(&proxy.url()).unwrap();
    let mut count = 0;
    while count == 0 || (proxy.lost() < LOST && count < MOST_ROUNDS * RUNS) {
        let numbers = count..count + RUNS;
        let runs = join_all(numbers.clone().map(|n| start(&through, n))).await;
        for (n, run) in numbers.zip(&runs) {
            let run = direct.run(run.id());
            assert_eq!(run.result::<Value>().await.unwrap(), order::output(n));
            assert_eq!(check(&direct, run.id()).await.len(), order::TASKS);
        }
        count += RUNS;
    }
    assert!(proxy.lost() >= LOST, "only {} replies were lost", proxy.lost());
    let query = [("count", "true".to_owned())];
    let listed: Page<Value> = direct.call(Method::GET, "/v1/runs", &query, None::<&()>).await.unwrap();
    assert_eq!(listed.total, Some(count), "a repeated start created another run");
    // A claim whose reply was lost was repeated with its id, or its tasks were offered again.
    let effects = effects.lock().unwrap().clone();
    assert_eq!(effects.len() as u64, count * order::TASKS as u64);
    let twice: Vec<_> = effects.iter().filter(|(_, times)| **times != 1).collect();
    assert!(twice.is_empty(), "{twice:?}");
    proxy.calm_down();
    working.stop().await;
}

#[tokio::test]
async fn over_plain_http_everything_is_done_once() {
    play(Transport::Http).await;
}

#[tokio::test]
async fn over_a_socket_everything_is_done_once() {
    play(Transport::Socket).await;
}
