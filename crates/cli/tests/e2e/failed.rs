//! A server in which a task panics is no longer ready, and exits with its exit code.
//!
//! Here the committer panics: it hands a long decision to another thread, and the system refuses to start one
//! (`no_threads.c`).

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use eddyline::Client;
use eddyline_server::{ServeArgs, start};
use serde_json::{Value, json};

use crate::eddy::{Eddy, LONG};

/// The documented exit code.
const ENGINE_FAILED: i32 = 70;
/// The runtime keeps idle threads for ten seconds and would reuse one.
const IDLE_THREADS_END: Duration = Duration::from_secs(11);

const HEAVY: &str = "{steps: {a: {set: '${size(range(90000).filter(i, i % 2 == 0))}'}}}";

fn library(to: &Path) -> PathBuf {
    compiled("tests/e2e/no_threads.c", to)
}

fn compiled(source: &str, to: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let library = to.join("layer.so");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut compile = Command::new(compiler);
    compile.args(["-shared", "-fPIC", "-O1", "-o"]).args([&library, &source]).arg("-ldl");
    assert!(compile.status().unwrap().success());
    library
}

/// The response of `/readyz`; `None` if the server does not answer any more.
fn ready(addr: SocketAddr) -> Option<(u16, String)> {
    let mut stream = TcpStream::connect(addr).ok()?;
    stream.set_read_timeout(Some(LONG)).ok()?;
    write!(stream, "GET /readyz HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\n\r\n").ok()?;
    let mut said = String::new();
    let _ = stream.read_to_string(&mut said);
    Some((said.split(' ').nth(1)?.parse().ok()?, said))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_committer_panics_says_so_and_ends_with_its_exit_code() {
    let dir = tempfile::tempdir().unwrap();
    let (library, none) = (library(dir.path()), dir.path().join("no_threads"));
    let mut eddy = Eddy::start_with(&[], &[("LD_PRELOAD", &library), ("NO_THREADS", &none)]);
    let client = eddy.client();
    client.register_flow("heavy", HEAVY).await.unwrap();
    client.start("heavy", &json!(null)).await.unwrap().result::<Value>().await.unwrap();
    assert_eq!(ready(eddy.addr).unwrap().0, 200);
    tokio::time::sleep(IDLE_THREADS_END).await;

    std::fs::write(&none, "").unwrap();
    let started = client.call::<Value>(eddyline::Method::POST, "/v1/flows/heavy/runs", &[], Some(&json!({}))).await;
    assert!(started.is_err(), "the start was decided: {started:?}");
    let status = eddy.ended().await;
    assert_eq!(status.code(), Some(ENGINE_FAILED), "{status}");
    let log = eddy.log();
    assert!(log.contains("exiting with code 70: the engine has failed: the committer panicked"), "{log}");

    std::fs::remove_file(&none).unwrap();
    eddy.restart();
    client.start("heavy", &json!(null)).await.unwrap().result::<Value>().await.unwrap();
}

/// Controls the disk shim of the store tests (`disk.c`): `succeed` writes succeed, then `fail` writes fail with
/// `error`.
fn set_faults(file: &Path, succeed: i32, fail: i32, error: i32) {
    let bytes: Vec<u8> = [succeed, fail, error, 0, 0].iter().flat_map(|number| number.to_ne_bytes()).collect();
    // Write in place: the server has the file mapped.
    let mut file = std::fs::File::options().create(true).truncate(false).write(true).open(file).unwrap();
    file.write_all(&bytes).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_disk_fails_ends_with_its_exit_code() {
    const EIO: i32 = 5;
    let dir = tempfile::tempdir().unwrap();
    let (library, faults) = (compiled("../store/tests/shim/disk.c", dir.path()), dir.path().join("faults"));
    set_faults(&faults, 0, 0, 0);
    let root = std::env::temp_dir();
    let envs: [(&str, &Path); 3] = [("LD_PRELOAD", &library), ("DISK_ROOT", &root), ("DISK_FAULTS", &faults)];
    let mut eddy = Eddy::start_with(&[], &envs);
    let client = eddy.client();
    client.register_flow("f", "{steps: {a: {set: 1}}}").await.unwrap();
    assert_eq!(ready(eddy.addr).unwrap().0, 200);
    set_faults(&faults, 0, 1_000, EIO);
    let started = client.call::<Value>(eddyline::Method::POST, "/v1/flows/f/runs", &[], Some(&json!({}))).await;
    assert!(started.is_err(), "the start was written: {started:?}");
    let status = eddy.ended().await;
    assert_eq!(status.code(), Some(ENGINE_FAILED), "{status}");
    let log = eddy.log();
    assert!(log.contains("exiting with code 70: the store in") && log.contains("failed: "), "{log}");

    set_faults(&faults, 0, 0, 0);
    eddy.restart();
    client.start("f", &json!(null)).await.unwrap().result::<Value>().await.unwrap();
}

/// Names the file that forbids threads, for [`a_server_whose_engine_has_failed`] in a separate process.
const CHILD: &str = "NO_THREADS";

#[test]
fn a_server_whose_engine_has_failed_is_not_ready() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "failed::a_server_whose_engine_has_failed", "--ignored", "--nocapture"]);
    child.env("LD_PRELOAD", library(dir.path())).env(CHILD, dir.path().join("no_threads"));
    let output = child.output().unwrap();
    let (said, log) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.contains("1 passed"), "{said}\n{log}");
}

/// A server used as a library: the process does not exit when its engine has failed.
#[test]
#[ignore = "run as a separate process by the test above"]
fn a_server_whose_engine_has_failed() {
    let Some(none) = std::env::var_os(CHILD) else { return };
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(2).thread_keep_alive(Duration::from_millis(1)).enable_all().build().unwrap();
    runtime.block_on(async {
        let (listen, store) = (Some("127.0.0.1:0".to_owned()), Some("memory:".to_owned()));
        let server = start(&ServeArgs { listen, store, ..ServeArgs::default() }).await.unwrap();
        let client = Client::new(&server.url()).unwrap();
        client.register_flow("heavy", HEAVY).await.unwrap();
        assert_eq!(ready(server.addr()).unwrap().0, 200);
        tokio::time::sleep(Duration::from_millis(500)).await;
        std::fs::write(none, "").unwrap();
        let path = "/v1/flows/heavy/runs";
        let started = client.call::<Value>(eddyline::Method::POST, path, &[], Some(&json!({}))).await;
        assert!(started.is_err(), "the start was decided: {started:?}");
        let (status, said) = ready(server.addr()).unwrap();
        assert!(status == 503 && said.contains("the engine has failed"), "{said}");
    });
    // Dropping the runtime would need a new thread.
    std::mem::forget(runtime);
}
