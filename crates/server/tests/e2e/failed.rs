//! A server a part of which panics ends with its exit code, and is never ready in between.
//!
//! The part is the committer: it hands a decision that takes long to another thread, and the system refuses to start one
//! (`no_threads.c`).

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::eddy::{Eddy, LONG};

/// As the documentation says.
const ENGINE_FAILED: i32 = 70;
/// The runtime keeps an idle thread for ten seconds, and one that is there needs not be started.
const IDLE_THREADS_END: Duration = Duration::from_secs(11);

fn library(to: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/e2e/no_threads.c");
    let library = to.join("no_threads.so");
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_owned());
    let mut compile = Command::new(compiler);
    compile.args(["-shared", "-fPIC", "-O1", "-o"]).args([&library, &source]).arg("-ldl");
    assert!(compile.status().unwrap().success());
    library
}

/// The status of `/readyz`; none when nobody answers any more.
fn ready(addr: SocketAddr) -> Option<u16> {
    let mut stream = TcpStream::connect(addr).ok()?;
    stream.set_read_timeout(Some(LONG)).ok()?;
    write!(stream, "GET /readyz HTTP/1.1\r\nhost: {addr}\r\nconnection: close\r\n\r\n").ok()?;
    let mut said = String::new();
    let _ = stream.read_to_string(&mut said);
    said.split(' ').nth(1)?.parse().ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_committer_panics_says_so_and_ends_and_is_not_ready_meanwhile() {
    let dir = tempfile::tempdir().unwrap();
    let (library, none) = (library(dir.path()), dir.path().join("no_threads"));
    let mut eddy = Eddy::start_with(&[], &[("LD_PRELOAD", &library), ("NO_THREADS", &none)]);
    let client = eddy.client();
    let heavy = "{steps: {a: {set: '${size(range(90000).filter(i, i % 2 == 0))}'}}}";
    client.register_flow("heavy", heavy).await.unwrap();
    client.start("heavy", &json!(null)).await.unwrap().result::<Value>().await.unwrap();
    assert_eq!(ready(eddy.addr), Some(200));
    tokio::time::sleep(IDLE_THREADS_END).await;

    std::fs::write(&none, "").unwrap();
    let (addr, has_failed) = (eddy.addr, Arc::new(AtomicBool::new(false)));
    let failed = has_failed.clone();
    let looking = std::thread::spawn(move || {
        let (mut after, since) = (Vec::new(), Instant::now());
        while since.elapsed() < LONG {
            // Whether it had failed is read before it is asked.
            let after_failure = failed.load(Ordering::SeqCst);
            match ready(addr) {
                Some(status) if after_failure => after.push(status),
                None if after_failure => break,
                _ => {}
            }
        }
        after
    });
    let started = client.call::<Value>(eddyline::Method::POST, "/v1/flows/heavy/runs", &[], Some(&json!({}))).await;
    has_failed.store(true, Ordering::SeqCst);
    assert!(started.is_err(), "nobody decided on it: {started:?}");
    let status = eddy.ended().await;
    assert_eq!(status.code(), Some(ENGINE_FAILED), "{status}");
    let after = looking.join().unwrap();
    assert!(!after.contains(&200), "it said that it was ready after it had failed: {after:?}");
    let log = eddy.log();
    assert!(log.contains("the process ends with exit code 70: the engine has failed: the committer panicked"), "{log}");

    std::fs::remove_file(&none).unwrap();
    eddy.restart();
    client.start("heavy", &json!(null)).await.unwrap().result::<Value>().await.unwrap();
}
