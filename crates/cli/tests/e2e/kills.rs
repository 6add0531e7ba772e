//! Kills the server and workers repeatedly in the middle of their work; `EDDYLINE_KILLS` sets how often.

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use eddyline::protocol::Page;
use eddyline::{Client, Method};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use crate::eddy::Eddy;
use crate::order;
use crate::proxy::Chance;
use crate::timeline::check;
use crate::working::{Transport, work};

const KILLS: &str = "EDDYLINE_KILLS";
const DEFAULT_KILLS: u64 = 10;
/// How many runs are started between two kills.
const STARTS: u64 = 20;
const LEASE: &str = "1s";
/// A run waits for a lease or two of dead workers, not longer.
const RUN_ENDS: Duration = Duration::from_secs(60);
const SEED: u64 = 0xD1B5_4A32_D192_ED03;

/// If set, this test binary runs as a worker.
const WORKER: &str = "EDDYLINE_TEST_WORKER";
const TEST: &str = "kills::nothing_is_lost_however_often_server_and_workers_are_killed";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_however_often_server_and_workers_are_killed() {
    run_as_worker_if_asked().await;
    let kills = std::env::var(KILLS).ok().and_then(|kills| kills.parse().ok()).unwrap_or(DEFAULT_KILLS);
    let mut eddy = Eddy::start(&["--lease", LEASE]);
    order::register(&eddy.client()).await;
    let steady = work(order::worker(eddy.url()), Transport::Socket);
    let mut workers = [Process::start(&eddy.url(), Transport::Socket), Process::start(&eddy.url(), Transport::Http)];
    let mut chance = Chance(SEED);
    let mut runs = Vec::new();
    for kill in 0..kills {
        let (acknowledge, mut acknowledged) = mpsc::unbounded_channel();
        let mut starts = JoinSet::new();
        for n in kill * STARTS..(kill + 1) * STARTS {
            let (client, acknowledge) = (eddy.client(), acknowledge.clone());
            starts.spawn(async move { acknowledge.send((n, start(&client, n).await)).unwrap() });
        }
        drop(acknowledge);
        // Kill in the middle: some starts are acknowledged, and the workers are busy.
        let before = 1 + chance.next() % (STARTS - 1);
        for _ in 0..before {
            runs.push(acknowledged.recv().await.unwrap());
        }
        if kill % 2 == 0 {
            let victim = &mut workers[(kill / 2 % 2) as usize];
            victim.restart(&eddy.url());
        }
        eddy.kill();
        eddy.restart();
        while let Some(run) = acknowledged.recv().await {
            runs.push(run);
        }
    }
    let client = eddy.client();
    for (n, run) in &runs {
        let ended = client.run(run).wait(RUN_ENDS).await.unwrap();
        let ended = ended.unwrap_or_else(|| panic!("{run} did not end"));
        assert_eq!((ended.status.as_str(), &ended.output), ("completed", &order::output(*n)), "{run}");
        assert_eq!(check(&client, run).await.len(), order::TASKS, "{run}");
    }
    let query = [("count", "true".to_owned())];
    let listed: Page<Value> = client.call(Method::GET, "/v1/runs", &query, None::<&()>).await.unwrap();
    assert_eq!(listed.total, Some(kills * STARTS), "some starts created no run or two");
    steady.stop().await;
    assert!(eddy.terminate().await.success());
}

/// Starts a run, with retries across kills, until the start is acknowledged.
async fn start(client: &Client, n: u64) -> String {
    loop {
        match client.start(order::NAME, &order::input(n)).idempotency_key(n.to_string()).await {
            Ok(run) => return run.id().to_owned(),
            Err(error) => assert!(error.is_retryable(), "{error}"),
        }
    }
}

/// A worker in a separate process.
struct Process {
    child: Child,
    transport: Transport,
}

impl Process {
    fn start(url: &str, transport: Transport) -> Process {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", TEST, "--nocapture"]).env(WORKER, format!("{transport:?} {url}"));
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        Process { child, transport }
    }

    /// Kills the worker with SIGKILL, and starts a new one.
    fn restart(&mut self, url: &str) {
        self.end();
        *self = Process::start(url, self.transport);
    }

    fn end(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

async fn run_as_worker_if_asked() {
    let Ok(setting) = std::env::var(WORKER) else { return };
    let (transport, url) = setting.split_once(' ').unwrap();
    let worker = order::worker(url.to_owned());
    let worker = if transport == "Http" { worker.http_only() } else { worker };
    let ended = worker.run().await;
    std::process::exit(if ended.is_ok() { 0 } else { 1 });
}
