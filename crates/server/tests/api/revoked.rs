//! A key that is revoked, expires or loses a scope loses its open sockets and polls within a second.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::client::{Client, Reply, Rig};
use crate::socket::Socket;

/// A second, plus slack for a busy machine.
const SOON: Duration = Duration::from_secs(2);

async fn key(admin: &Client, asked: Value) -> (Client, String) {
    let made = admin.post("/v1/keys", asked).await;
    assert_eq!(made.status, 201, "{}", made.body);
    (admin.with_key(&made.text("key")), made.text("key_id"))
}

/// Everything that a caller can wait on for a minute, all in progress.
fn waiting(client: &Client, run: &str) -> Vec<tokio::task::JoinHandle<Reply>> {
    let get = |path: String| {
        let client = client.clone();
        tokio::spawn(async move { client.get(&path).await })
    };
    let post = |path: &'static str, body: Value| {
        let client = client.clone();
        tokio::spawn(async move { client.post(path, body).await })
    };
    vec![
        get(format!("/v1/runs/{run}/result?wait=60s")),
        get(format!("/v1/streams/nq:flow:{run}?after=100&wait=60s")),
        get(format!("/v1/streams/nq:proj:flow-steps:{run}?after=100&wait=60s")),
        get("/v1/streams/nq:proj:flow-runs:f?after=100&wait=60s".to_owned()),
        post("/v1/tasks/claim", json!({"worker_id": "w", "queues": ["empty"], "wait_ms": 60_000})),
    ]
}

/// Soon after the key is no longer valid.
async fn all_are_refused(waiting: Vec<tokio::task::JoinHandle<Reply>>, invalid_from: Instant) {
    for (at, reply) in waiting.into_iter().enumerate() {
        let reply = tokio::time::timeout_at((invalid_from + SOON).into(), reply).await;
        let reply = reply.unwrap_or_else(|_| panic!("request {at} still waits"));
        assert_eq!(reply.unwrap().code(), (401, "unauthorized"), "number {at}");
    }
}

async fn is_closed(socket: &mut Socket) {
    let error = socket.next().await;
    assert_eq!((&error["type"], &error["error"]["code"]), (&json!("error"), &json!("unauthorized")), "{error}");
    assert_eq!(socket.next().await, json!({"type": "closed", "code": 4401}));
}

#[tokio::test]
async fn a_revoked_key_loses_its_socket_and_its_polls() {
    let rig = Rig::with_keys().await;
    let admin = rig.client.clone();
    admin.flow("f", "steps: {a: {run: a}}").await;
    let run = admin.run("f", json!(1)).await;
    let (tenant, id) = key(&admin, json!({"name": "t", "scopes": ["read", "worker"]})).await;
    let (other, _) = key(&admin, json!({"name": "o", "scopes": ["read", "worker"]})).await;
    let mut socket = Socket::open(&tenant, json!({"queues": ["empty"]})).await;
    let mut others = Socket::open(&other, json!({"queues": ["empty"]})).await;
    let waits = waiting(&tenant, &run);
    rig.until_waiting(5).await;
    let since = Instant::now();
    assert_eq!(admin.delete(&format!("/v1/keys/{id}")).await.status, 200);
    all_are_refused(waits, since).await;
    is_closed(&mut socket).await;
    assert!(since.elapsed() < SOON, "it took {:?}", since.elapsed());
    // Other keys are not affected.
    others.say(json!({"type": "heartbeat"})).await;
    assert_eq!(others.next().await["type"], "beat");
}

#[tokio::test]
async fn a_key_that_expires_loses_its_socket_and_its_polls() {
    let rig = Rig::with_keys().await;
    let admin = rig.client.clone();
    admin.flow("f", "steps: {a: {run: a}}").await;
    let run = admin.run("f", json!(1)).await;
    let lives = Duration::from_secs(5);
    let since = Instant::now();
    let asked = json!({"scopes": ["read", "worker"], "expires_in": lives.as_millis() as u64});
    let (tenant, _) = key(&admin, asked).await;
    let mut socket = Socket::open(&tenant, json!({"queues": ["empty"]})).await;
    let waits = waiting(&tenant, &run);
    all_are_refused(waits, since + lives).await;
    is_closed(&mut socket).await;
    assert!(since.elapsed() >= lives, "before its time, after {:?}", since.elapsed());
}

#[tokio::test]
async fn a_key_that_loses_a_scope_loses_what_it_was_open_for() {
    let rig = Rig::with_keys().await;
    let (tenant, id) = key(&rig, json!({"scopes": ["read", "worker"]})).await;
    let mut socket = Socket::open(&tenant, json!({})).await;
    // As another instance on the same store would do it: this one is not notified.
    let engine = rig.server.engine();
    let record = engine.key(&id).await.unwrap().unwrap();
    engine.delete_key(&record.ns, &id).await.unwrap();
    let fewer = eddyline_engine::KeyRecord { scopes: vec!["read".to_owned()], ..record };
    assert!(engine.add_key(&fewer).await.unwrap());
    is_closed(&mut socket).await;
    assert_eq!(tenant.get("/v1/runs").await.status, 200, "its remaining scope still works");
    assert_eq!(tenant.post("/v1/tasks/claim", json!({})).await.code(), (403, "forbidden"));
    rig.server.stop().await;
}
