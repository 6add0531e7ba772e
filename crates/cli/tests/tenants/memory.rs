//! Memory: large inputs of queued tasks, sockets that are not read, many versions of a large flow.

use std::time::Duration;

use axum::body::Bytes;
use futures_util::future::join_all;
use futures_util::{SinkExt, StreamExt};
use hyper::Method;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream, connect_async};

use crate::rig::{Rig, withstands_within};

/// Almost the maximum size of a payload.
const LARGE: usize = 2_000_000;
/// How many inputs there are, unless `EDDYLINE_QUEUED` sets it.
const DEFAULT_QUEUED: usize = 200;
const QUEUED: &str = "EDDYLINE_QUEUED";
/// Small budgets that are quickly used up, and the most memory that the server may use with them.
const BUDGETS: [&str; 8] =
    ["--cache-memory", "32MiB", "--body-memory", "128MiB", "--response-memory", "32MiB", "--task-memory", "32MiB"];
const MAX_MEMORY_MB: u64 = 350;
/// Concurrent starts.
const AT_ONCE: usize = 2;

async fn start_large(rig: &Rig, flow: &str, runs: usize) {
    assert!(rig.attacker.register(flow, &json!({"steps": {"a": {"run": "a", "queue": flow}}})).await);
    let (path, body) =
        (format!("/v1/flows/{flow}/runs"), Bytes::from(format!("{{\"input\":\"{}\"}}", "x".repeat(LARGE))));
    join_all((0..AT_ONCE).map(|_| async {
        for _ in 0..runs / AT_ONCE {
            let reply = rig.attacker.send(Method::POST, &path, "application/json", body.clone()).await.unwrap();
            assert!(matches!(reply.status, 201 | 429 | 503), "{reply:?}");
        }
    }))
    .await;
}

#[tokio::test]
async fn large_inputs_that_wait_are_not_kept_in_memory() {
    let queued = std::env::var(QUEUED).ok().and_then(|count| count.parse().ok()).unwrap_or(DEFAULT_QUEUED);
    withstands_within(MAX_MEMORY_MB, &BUDGETS, async |rig| {
        start_large(rig, "waiting", queued).await;
        // List them all.
        for _ in 0..4 {
            rig.attacker.get("/v1/runs?flow=waiting&limit=1000").await.unwrap();
        }
    })
    .await;
}

const SOCKETS: usize = 60;
const TASKS_A_SOCKET: usize = 3;

/// A worker's socket that takes tasks and reads none of them.
async fn deaf_worker(rig: &Rig, at: usize) -> WebSocketStream<MaybeTlsStream<TcpStream>> {
    let mut request = format!("ws://{}/v1/workers/connect", rig.eddy.addr).into_client_request().unwrap();
    let key = format!("Bearer {}", rig.attacker.key).parse().unwrap();
    request.headers_mut().insert("authorization", key);
    let (mut socket, _) = connect_async(request).await.unwrap();
    let hello = json!({"type": "hello", "queues": ["pushed"], "host": format!("h{at}"), "pid": at,
        "instance": format!("deaf-{at}"), "max_concurrent": 100});
    socket.send(Message::text(hello.to_string())).await.unwrap();
    let credit = json!({"type": "credit", "n": 100});
    socket.send(Message::text(credit.to_string())).await.unwrap();
    socket
}

/// 250 MB where the kernel buffers the first message of each socket, up to 510 MB where its cached congestion window of
/// 127.0.0.1 (`ip tcp_metrics`) is so small that it does not.
const MAX_SOCKETS_MB: u64 = 700;

#[tokio::test]
async fn sockets_that_are_not_read_fill_no_memory() {
    withstands_within(MAX_SOCKETS_MB, &BUDGETS, async |rig| {
        let sockets = join_all((0..SOCKETS).map(|at| deaf_worker(rig, at))).await;
        start_large(rig, "pushed", SOCKETS * TASKS_A_SOCKET).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        // One of them begins to read: it must be served, or have been closed.
        let mut socket = sockets.into_iter().next().unwrap();
        let read = tokio::time::timeout(Duration::from_secs(20), socket.next()).await;
        assert!(read.is_ok(), "the server neither serves the socket nor closes it");
    })
    .await;
}

/// The server took 145 MB with at most two versions in memory, and 230 MB more with all of them.
const MAX_VERSIONS_MB: u64 = 220;
const VERSIONS: usize = 200;
const DEFINITION: usize = 500_000;

#[tokio::test]
async fn versions_of_a_large_flow_are_not_all_kept_in_memory() {
    withstands_within(MAX_VERSIONS_MB, &BUDGETS, async |rig| {
        let text: Value = json!("y".repeat(DEFINITION / 100));
        for version in 0..VERSIONS {
            let mut steps: Value = (0..100).map(|at| (format!("s{at}"), json!({"set": [version, text]}))).collect();
            // The gate is never opened, so the run and its version stay.
            steps["waits"] = json!({"await": {"manual": true}});
            let steps = json!({ "steps": steps });
            assert!(rig.attacker.register("versions", &steps).await);
            assert!(rig.attacker.try_start("versions", &json!(version)).await.is_some());
        }
    })
    .await;
}
