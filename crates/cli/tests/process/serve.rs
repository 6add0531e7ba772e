//! `eddy serve` as a process, and TLS.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use eddyline_server::{KeysMode, ServeArgs, start};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};

use crate::client::{ADMIN_KEY, Client, args};

/// Killed when its test ends, even by a panic.
pub struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

pub fn serve(arguments: &[&str]) -> (Process, Client) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_eddy"));
    command.arg("serve").args(["--listen", "127.0.0.1:0"]).args(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::null());
    let mut process = Process(command.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let (_, addr) = line.trim().split_once("http://").unwrap_or_else(|| panic!("no URL in {line:?}"));
    (process, Client { addr: addr.parse().unwrap(), key: None, headers: Vec::new() })
}

/// Waits until `count` long polls are open.
pub async fn until_waiting(client: &Client, count: u32) {
    let since = std::time::Instant::now();
    let line = format!("eddyline_long_polls {count}");
    while !client.get("/metrics").await.body.as_str().unwrap().lines().any(|shown| shown == line) {
        assert!(since.elapsed() < std::time::Duration::from_secs(20), "there are never {count} requests that wait");
    }
}

#[tokio::test]
async fn a_claim_whose_worker_went_away_takes_nothing_with_it() {
    let (mut process, client) = serve(&["--store", "memory:"]);
    client.flow("f", "steps: {a: {run: a}}").await;
    let body = r#"{"worker_id":"gone","wait_ms":60000}"#;
    let head = format!("host: {}\r\ncontent-length: {}", client.addr, body.len());
    let mut gone = TcpStream::connect(client.addr).await.unwrap();
    gone.write_all(format!("POST /v1/tasks/claim HTTP/1.1\r\n{head}\r\n\r\n{body}").as_bytes()).await.unwrap();
    until_waiting(&client, 1).await;
    drop(gone);
    until_waiting(&client, 0).await;
    let run = client.run("f", json!(1)).await;
    let task = client.claim("here").await;
    assert_eq!((&task["run_id"], &task["attempt"]), (&json!(run), &json!(1)));
    terminate(&process);
    assert!(tokio::task::spawn_blocking(move || process.0.wait().unwrap()).await.unwrap().success());
}

fn terminate(process: &Process) {
    let id = process.0.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
}

#[tokio::test]
async fn a_signal_stops_it_cleanly_and_what_was_kept_is_there_again() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store").display().to_string();
    let (mut process, client) = serve(&["--store", &store]);
    client.flow("f", "steps: {a: {run: a}}").await;
    let run = client.run("f", json!(1)).await;
    let task = client.claim("w").await;
    // A long poll must be answered when the server stops.
    let waiting = {
        let (client, path) = (client.clone(), format!("/v1/runs/{run}/result?wait=60s"));
        tokio::spawn(async move { client.get(&path).await.status })
    };
    until_waiting(&client, 1).await;
    terminate(&process);
    let status = tokio::task::spawn_blocking(move || process.0.wait().unwrap()).await.unwrap();
    assert!(status.success(), "{status}");
    assert!(matches!(waiting.await, Ok(202 | 503)));

    let (mut process, client) = serve(&["--store", &store]);
    assert_eq!(client.report(&task, json!({"op": "complete", "output": 5})).await["outcome"], "applied");
    assert_eq!(client.get(&format!("/v1/runs/{run}/result?wait=20s")).await.body["status"], "completed");
    terminate(&process);
    assert!(tokio::task::spawn_blocking(move || process.0.wait().unwrap()).await.unwrap().success());
}

#[tokio::test]
async fn the_first_key_is_said_once() {
    let dir = tempfile::tempdir().unwrap();
    let store = dir.path().join("store").display().to_string();
    let mut said = Vec::new();
    for _ in 0..2 {
        let mut command = Command::new(env!("CARGO_BIN_EXE_eddy"));
        command.args(["serve", "--listen", "127.0.0.1:0", "--keys", "on", "--store", &store]);
        let mut process = Process(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert!(line.contains("http://"), "{line}");
        terminate(&process);
        let mut stderr = String::new();
        std::io::Read::read_to_string(&mut process.0.stderr.take().unwrap(), &mut stderr).unwrap();
        assert!(process.0.wait().unwrap().success());
        let key = stderr.split_whitespace().find(|word| word.starts_with("eddy_")).map(str::to_owned);
        said.push(key);
    }
    assert!(said[0].as_ref().is_some_and(|key| key.len() > 64), "{said:?}");
    assert_eq!(said[1], None, "the key is shown again");
}

#[tokio::test]
async fn it_says_what_is_wrong_and_does_not_start() {
    let run = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_eddy")).arg("serve").args(arguments).output().unwrap();
        (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    let (ok, said) = run(&["--listen", "0.0.0.0:0", "--store", "memory:"]);
    assert!(!ok && said.contains("--behind-proxy"), "{said}");
    let (ok, said) = run(&["--store", "redis://x"]);
    assert!(!ok && said.contains("does not support redis stores"), "{said}");
    let (ok, said) = run(&["--store", "postgres://ann:s3cret@127.0.0.1:1/flows"]);
    assert!(!ok && said.contains("postgres://ann@127.0.0.1:1/flows") && !said.contains("s3cret"), "{said}");
    let (ok, said) = run(&["--store", "postgres://ann@127.0.0.1:1/flows", "--reset-clock"]);
    assert!(!ok && said.contains("--reset-clock does not go with PostgreSQL"), "{said}");
}

#[tokio::test]
async fn tls_is_spoken_with_the_certificate_that_is_given() {
    let dir = tempfile::tempdir().unwrap();
    let certified = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let (cert, key) = (dir.path().join("cert.pem"), dir.path().join("key.pem"));
    std::fs::write(&cert, certified.cert.pem()).unwrap();
    std::fs::write(&key, certified.signing_key.serialize_pem()).unwrap();
    let (tls_cert, tls_key) = (Some(cert.clone()), Some(key));
    let admin_key = Some(ADMIN_KEY.to_owned());
    let server = start(&ServeArgs { tls_cert, tls_key, keys: Some(KeysMode::On), admin_key, ..args() }).await.unwrap();
    assert!(server.url().starts_with("https://"));

    let mut roots = RootCertStore::empty();
    roots.add(certified.cert.der().clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let stream = TcpStream::connect(server.addr()).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
    let request = format!(
        "GET /v1/info HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {ADMIN_KEY}\r\nconnection: close\r\n\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said).await;
    let said = String::from_utf8_lossy(&said);
    assert!(said.starts_with("HTTP/1.1 200") && said.contains("\"keys\":true"), "{said}");
    drop(stream);
    server.stop().await;
    let bad = ServeArgs { tls_cert: Some(cert.clone()), tls_key: Some(cert), ..args() };
    assert!(start(&bad).await.unwrap_err().to_string().starts_with("TLS"));
}

#[tokio::test]
async fn a_flag_that_is_a_duration_takes_milliseconds_too() {
    for (lease, ms) in [("5000", 5_000), ("7s", 7_000)] {
        let (_process, client) =
            serve(&["--store", "memory:", "--lease", lease, "--header-timeout", "2000", "--backlog", "9"]);
        assert_eq!(client.get("/v1/info").await.body["lease_ms"], ms);
    }
}

#[test]
fn the_file_says_how_logs_are_written_and_what_it_says_wrong_is_wrong_usage() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("eddyline.toml");
    std::fs::write(&file, "store = \"memory:\"\nlisten = \"127.0.0.1:0\"\nlog-json = true\n").unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_eddy"));
    command.args(["serve", "--config"]).arg(&file).env("EDDY_LOG", "info");
    let mut process = Process(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap());
    let mut line = String::new();
    BufReader::new(process.0.stderr.take().unwrap()).read_line(&mut line).unwrap();
    assert!(serde_json::from_str::<serde_json::Value>(&line).is_ok(), "{line}");
    drop(process);
    std::fs::write(&file, "lissten = 1\n").unwrap();
    let wrong = command.stderr(Stdio::piped()).output().unwrap();
    assert_eq!(wrong.status.code(), Some(2), "{wrong:?}");
}

#[tokio::test]
async fn what_is_counted_is_there_from_the_start_and_children_count_as_started() {
    let (_process, client) = serve(&["--store", "memory:"]);
    let counted = async |name: &str| {
        let metrics = client.get("/metrics").await;
        let line = metrics.body.as_str().unwrap().lines().find_map(|line| line.strip_prefix(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("{name} is not counted")).parse::<u64>().unwrap()
    };
    let started = r#"eddyline_runs_started_total{namespace="default"}"#;
    let duplicates = "eddyline_duplicates_prevented_total";
    let failed = r#"eddyline_runs_ended_total{namespace="default",status="failed"}"#;
    let completed = r#"eddyline_runs_ended_total{namespace="default",status="completed"}"#;
    for name in [started, failed, completed, "eddyline_conflicts_total", duplicates] {
        assert_eq!(counted(name).await, 0, "{name}");
    }
    client.flow("child", "steps: {c: {set: 1}}").await;
    client.flow("f", "steps: {a: {flow: child}}").await;
    let mut run = String::new();
    for _ in 0..3 {
        run = client.post("/v1/flows/f/runs", json!({"idempotency_key": "k"})).await.text("run_id");
    }
    let ended = client.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    assert_eq!(ended.body["status"], "completed", "{}", ended.body);
    assert_eq!((counted(started).await, counted(duplicates).await), (2, 2));
    assert_eq!((counted(completed).await, counted(failed).await), (2, 0));
    assert!(counted(r#"eddyline_commit_seconds_bucket{le="10"}"#).await > 0);
    let metrics = client.get("/metrics").await.body;
    let lines = || metrics.as_str().unwrap().lines();
    for shown in lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()) {
        let help = format!("# HELP {shown} ");
        assert!(lines().any(|line| line.starts_with(&help)), "{shown} has no HELP line");
    }
}

#[tokio::test]
async fn a_server_for_tests_ends_with_the_program_that_started_it() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_eddy"));
    command.args(["serve", "--listen", "127.0.0.1:0", "--store", "memory:", "--test-clock", "--exit-with-stdin"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut process = Process(command.spawn().unwrap());
    let mut line = String::new();
    BufReader::new(process.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let (_, addr) = line.trim().split_once("http://").unwrap_or_else(|| panic!("no URL in {line:?}"));
    let client = Client { addr: addr.parse().unwrap(), key: None, headers: Vec::new() };
    client.flow("nap", "steps: {a: {await: {time: 14d}}}").await;
    let run = client.run("nap", json!(1)).await;
    assert_eq!(client.post("/v1/test/clock", json!({"auto": true})).await.status, 200);
    let ended = client.get(&format!("/v1/runs/{run}/result?wait=20s")).await;
    assert_eq!((ended.status, &ended.body["status"]), (200, &json!("completed")));
    drop(process.0.stdin.take());
    assert!(tokio::task::spawn_blocking(move || process.0.wait().unwrap()).await.unwrap().success());
}
