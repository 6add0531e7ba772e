//! An ordinary client that starts runs and waits for their results during the abuse.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use eddyline::{Client, StepCtx, StepError, Worker};
use serde_json::{Value, json};

use crate::eddy::Eddy;

/// A run takes milliseconds: this allows for a busy machine, but not for a server that hangs.
const SLOWEST: Duration = Duration::from_secs(10);
/// The pause between two runs, so that the bystander is no load itself.
const PACE: Duration = Duration::from_millis(50);
/// The most memory that the server may use.
const MAX_MEMORY_KB: u64 = 300 << 10;

/// Runs `abuse` against a new server, and checks that another client is still served.
pub async fn undisturbed(flags: &[&str], abuse: impl AsyncFnOnce(&Eddy)) {
    let eddy = Eddy::start(flags);
    let client = eddy.client();
    client.register_flow("calm", "{steps: {a: {run: double}}, output: \"${steps.a.output}\"}").await.unwrap();
    let worker = Worker::connect(eddy.url()).handler("double", double).queue("default");
    let worker = tokio::spawn(worker.run_until(std::future::pending::<()>()));
    play(&client, 0).await;

    let over = Arc::new(AtomicBool::new(false));
    let bystander = tokio::spawn(stand_by(client.clone(), over.clone()));
    abuse(&eddy).await;
    over.store(true, Ordering::Relaxed);
    let (played, slowest) = bystander.await.unwrap();
    assert!(played > 0 && slowest < SLOWEST, "{played} runs, of which one took {slowest:?}");
    let peak = memory(&eddy, "VmHWM");
    assert!(peak < MAX_MEMORY_KB, "the server needed {} MB", peak >> 10);
    // A new client afterwards.
    play(&eddy.client(), 1).await;
    worker.abort();
}

async fn double(_: StepCtx, n: u64) -> Result<u64, StepError> {
    Ok(n * 2)
}

async fn stand_by(client: Client, over: Arc<AtomicBool>) -> (u64, Duration) {
    let (mut played, mut slowest) = (0, Duration::ZERO);
    while !over.load(Ordering::Relaxed) || played == 0 {
        let since = Instant::now();
        play(&client, played).await;
        slowest = slowest.max(since.elapsed());
        played += 1;
        tokio::time::sleep(PACE).await;
    }
    (played, slowest)
}

async fn play(client: &Client, n: u64) {
    let run = client.start("calm", &json!(n)).await.unwrap();
    assert_eq!(run.result::<Value>().await.unwrap(), json!(n * 2));
}

/// A line of `/proc/<pid>/status`, in KiB.
pub fn memory(eddy: &Eddy, what: &str) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", eddy.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(what)?.strip_prefix(':'));
    line.and_then(|line| line.split_whitespace().next()?.parse().ok()).unwrap()
}
