//! The server gets SIGTERM, or is the second one on a directory.

use std::process::Command;
use std::time::{Duration, Instant};

use eddyline::{Method, StepCtx, StepError, Worker};
use serde_json::{Value, json};

use crate::eddy::Eddy;
use crate::working::{Transport, work};

/// Well below the grace period for open requests.
const PROMPTLY: Duration = Duration::from_secs(5);

#[tokio::test]
async fn sigterm_ends_it_at_once_however_many_wait_for_something() {
    let mut eddy = Eddy::start(&[]);
    let client = eddy.client();
    client.register_flow("f", "{steps: {a: {run: never}}}").await.unwrap();
    let run = client.start("f", &json!(null)).await.unwrap();
    let worker = work(
        Worker::connect(eddy.url()).handler("other", async |_: StepCtx, _: Value| Ok::<_, StepError>(1)),
        Transport::Socket,
    );
    let calls = [
        (Method::GET, format!("/v1/runs/{}/result?wait=60s", run.id()), None),
        (Method::GET, format!("/v1/streams/nq:flow:{}?after=1000&wait=60s", run.id()), None),
        (Method::GET, "/v1/streams/nq:proj:flow-runs:f?after=1000&wait=60s".to_owned(), None),
        (Method::POST, "/v1/tasks/claim".to_owned(), Some(json!({"queues": ["empty"], "wait_ms": 60_000}))),
    ];
    let waiting: Vec<_> = (0..10)
        .flat_map(|_| calls.clone())
        .map(|(method, path, body)| {
            let client = eddy.client();
            tokio::spawn(async move {
                let (path, query) = path.split_once('?').unwrap_or((&path, ""));
                let query: Vec<_> = query.split('&').filter_map(|pair| pair.split_once('=')).collect();
                let query: Vec<_> = query.into_iter().map(|(name, value)| (name, value.to_owned())).collect();
                let _ = client.call::<Value>(method, path, &query, body.as_ref()).await;
            })
        })
        .collect();
    // All requests have arrived once the server counts that many connections.
    loop {
        let connections = crate::eddy::metric(&eddy, "eddyline_connections").await;
        let sockets = crate::eddy::metric(&eddy, "eddyline_sockets").await;
        if connections >= waiting.len() as f64 && sockets >= 1.0 {
            break;
        }
    }
    let asked = Instant::now();
    let status = eddy.terminate().await;
    assert!(status.success(), "{status}");
    assert!(asked.elapsed() < PROMPTLY, "it took {:?}", asked.elapsed());
    waiting.iter().for_each(tokio::task::JoinHandle::abort);
    drop(worker);
    eddy.restart();
    assert_eq!(client.run(run.id()).info().await.unwrap().status, "running");
}

#[tokio::test]
async fn a_second_server_on_a_directory_is_told_who_has_it() {
    let eddy = Eddy::start(&[]);
    let mut second = Command::new(env!("CARGO_BIN_EXE_eddy"));
    second.args(["serve", "--listen", "127.0.0.1:0", "--store"]).arg(eddy.store());
    let output = second.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains(&eddy.pid().to_string()), "{said}");
    assert_eq!(eddy.client().info().await.unwrap().store, "embedded", "the first server does not respond");
}
