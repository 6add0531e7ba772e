//! A server whose disk is full, hangs or is removed, and whose clock is wrong.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use eddyline_store::{Embedded, ManualClock, Options};
use serde_json::{Value, json};

use crate::client::Client;
use crate::shim::{self, Faults};

/// A timeout that is reached only if something hangs.
const LONG: Duration = Duration::from_secs(20);
const ENOSPC: i32 = 28;
const DAY: i64 = 24 * 60 * 60 * 1_000;

/// `eddy serve` on a directory whose disk faults the test controls.
struct Served {
    process: Child,
    client: Client,
    faults: Faults,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Served {
    fn on(root: &Path, flags: &[&str]) -> Served {
        let (library, control) = (shim::library(), root.join("faults"));
        let faults = Faults::make(&control);
        let mut command = Command::new(env!("CARGO_BIN_EXE_eddy"));
        command.arg("serve").args(["--listen", "127.0.0.1:0", "--store"]).arg(root.join("store")).args(flags);
        command.env("LD_PRELOAD", &library).env(shim::ROOT, root.join("store")).env(shim::FAULTS, control);
        let mut process = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let _ = std::fs::remove_file(library);
        let (_, addr) = line.trim().split_once("http://").unwrap_or_else(|| panic!("no URL in {line:?}"));
        let client = Client { addr: addr.parse().unwrap(), key: None, headers: Vec::new() };
        Served { process, client, faults }
    }

    fn doctor(&self) -> String {
        let url = format!("http://{}", self.client.addr);
        let mut command = Command::new(env!("CARGO_BIN_EXE_eddy"));
        let said = command.args(["doctor", "--url", &url]).output().unwrap();
        String::from_utf8_lossy(&said.stdout).into_owned()
    }
}

async fn until_ready(client: &Client, status: u16) -> Value {
    let since = Instant::now();
    loop {
        let reply = client.get("/readyz").await;
        if reply.status == status {
            return reply.body;
        }
        assert!(since.elapsed() < LONG, "/readyz is {} and not {status}: {}", reply.status, reply.body);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_whose_disk_is_full_is_not_ready_until_there_is_space() {
    let root = tempfile::tempdir().unwrap();
    let served = Served::on(root.path(), &[]);
    let client = &served.client;
    client.flow("f", "steps: {a: {}}").await;
    client.run("f", json!(1)).await;
    until_ready(client, 200).await;
    served.faults.set(0, i32::MAX, ENOSPC, false);
    assert_eq!(client.post("/v1/flows/f/runs", json!({"input": 2})).await.status, 503);
    let said = until_ready(client, 503).await.to_string();
    assert!(said.contains("disk is full"), "{said}");
    assert_eq!(client.get("/v1/runs").await.items().len(), 1, "it cannot read");
    assert_eq!(client.get("/healthz").await.status, 200);
    served.faults.clear();
    until_ready(client, 200).await;
    client.run("f", json!(3)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_whose_disk_hangs_in_a_commit_answers_what_needs_no_disk() {
    let root = tempfile::tempdir().unwrap();
    let served = Served::on(root.path(), &[]);
    let client = &served.client;
    client.flow("f", "steps: {a: {}}").await;
    client.run("f", json!(1)).await;
    let worker =
        json!({"queues": ["default"], "handlers": [], "max_concurrent": 5, "version": "1", "host": "h", "pid": 1});
    let worker = client.post("/v1/workers", worker).await.text("worker_id");
    let task = client.claim(&worker).await;
    served.faults.hang(true);
    let hung = client.clone();
    let starting = tokio::spawn(async move { hung.post("/v1/flows/f/runs", json!({"input": 2})).await.status });
    let beat = format!("/v1/workers/{worker}/heartbeat");
    let answers = async {
        for _ in 0..20 {
            assert_eq!(client.get("/healthz").await.status, 200);
            let reply = client.post(&beat, json!({"tasks": [task["task_id"]]})).await;
            assert_eq!((reply.status, &reply.body["lost"]), (200, &json!([])), "{}", reply.body);
            assert_eq!(client.get("/v1/queues").await.status, 200);
        }
    };
    let answered = tokio::time::timeout(LONG, answers).await;
    assert!(!starting.is_finished(), "the disk does not hang");
    served.faults.hang(false);
    answered.expect("no response while the disk hangs");
    assert_eq!(starting.await.unwrap(), 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_whose_store_was_removed_acknowledges_nothing_and_is_not_ready() {
    let root = tempfile::tempdir().unwrap();
    let served = Served::on(root.path(), &[]);
    let client = &served.client;
    client.flow("f", "steps: {a: {}}").await;
    let run = client.run("f", json!(1)).await;
    std::fs::remove_dir_all(root.path().join("store")).unwrap();
    let said = until_ready(client, 503).await.to_string();
    assert!(said.contains("was removed while the store was open"), "{said}");
    assert_eq!(client.post("/v1/flows/f/runs", json!({"input": 2})).await.status, 503);
    assert_eq!(client.get(&format!("/v1/runs/{run}")).await.status, 200, "the run cannot be read");
    assert!(!root.path().join("store").exists(), "a new store was created in its place");
}

/// Creates a store that was last opened at `wall`.
fn opened_at(dir: &Path, wall: i64) {
    let options = Options { clock: ManualClock::at(wall), ..Options::default() };
    Embedded::open(&dir.join("store"), options).unwrap().close().unwrap();
}

fn now() -> i64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as i64
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clock_that_was_wrong_is_told_and_set_right() {
    let root = tempfile::tempdir().unwrap();
    opened_at(root.path(), now() + 40 * DAY);
    let served = Served::on(root.path(), &[]);
    let info = served.client.get("/v1/info").await.body;
    assert!(info["clock_ahead_ms"].as_i64().unwrap() > 39 * DAY, "{info}");
    let said = served.doctor();
    assert!(said.contains("ahead of the machine's clock") && said.contains("--reset-clock"), "{said}");
    drop(served);
    let mut look = Command::new(env!("CARGO_BIN_EXE_eddy"));
    let said = look.args(["doctor", "--store"]).arg(root.path().join("store")).output().unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("ahead of the machine's clock"), "{said}");

    let served = Served::on(root.path(), &["--reset-clock"]);
    let info = served.client.get("/v1/info").await.body;
    assert!(info["clock_ahead_ms"].as_i64().unwrap().abs() < 2_000, "{info}");
    assert!(!served.doctor().contains("--reset-clock"));
}

#[tokio::test(flavor = "multi_thread")]
async fn deletion_that_waits_after_a_jump_is_told() {
    let root = tempfile::tempdir().unwrap();
    opened_at(root.path(), now() - 40 * DAY);
    let mut look = Command::new(env!("CARGO_BIN_EXE_eddy"));
    let said = look.args(["doctor", "--store"]).arg(root.path().join("store")).output().unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("not opened, since that would set the store's time"), "{said}");
    let served = Served::on(root.path(), &[]);
    let info = served.client.get("/v1/info").await.body;
    assert!(info["deletion_waits_until"].is_string(), "{info}");
    let said = served.doctor();
    assert!(said.contains("nothing is deleted by age before"), "{said}");
}
