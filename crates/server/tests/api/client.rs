//! A server on a free port, and a small client that checks every response against `openapi.json`.

use std::net::SocketAddr;

use axum::body::Bytes;
use eddyline_server::{KeysMode, ServeArgs, Server, start};
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

use crate::document::check;

pub const DIAMOND: &str = "
steps:
  a: {run: a}
  b: {after: [a], run: b}
  c: {after: [a], run: c}
  d: {after: [b, c], run: d}
output: {all: \"${steps.d.output}\"}
";

pub struct Rig {
    pub server: Server,
    pub client: Client,
}

/// A caller: with a key, a namespace, or neither.
#[derive(Clone)]
pub struct Client {
    pub addr: SocketAddr,
    pub key: Option<String>,
    pub headers: Vec<(String, String)>,
}

#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub body: Value,
    pub headers: hyper::HeaderMap,
}

pub fn args() -> ServeArgs {
    // A PostgreSQL URL without parameters of ours: then each server has a new schema of that database.
    let schema = || format!("schema=api_{}", uuid::Uuid::new_v4().simple());
    let between = |url: &str| if url.contains('?') { '&' } else { '?' };
    let named = std::env::var("EDDYLINE_TEST_STORE").map(|url| format!("{url}{}{}", between(&url), schema()));
    ServeArgs {
        store: Some(named.unwrap_or_else(|_| "memory:".to_owned())),
        listen: Some("127.0.0.1:0".to_owned()),
        instance: Some("test".to_owned()),
        ..ServeArgs::default()
    }
}

/// Grammatically valid JSON that cannot be deserialised.
pub fn unreadable() -> Vec<String> {
    let deep = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    vec![deep(70), deep(100), deep(500), r#""\ud800""#.to_owned(), "1e999".to_owned(), r#"{"a": -1e999}"#.to_owned()]
}

pub const ADMIN_KEY: &str = "an-admin-key-that-only-the-tests-know";

impl Rig {
    pub async fn start() -> Rig {
        Rig::with(args()).await
    }

    pub async fn with(args: ServeArgs) -> Rig {
        let server = start(&args).await.unwrap();
        let client = Client { addr: server.addr(), key: None, headers: Vec::new() };
        Rig { server, client }
    }

    /// With keys on, calls as the admin of `default`.
    pub async fn with_keys() -> Rig {
        let admin_key = Some(ADMIN_KEY.to_owned());
        let mut rig = Rig::with(ServeArgs { keys: Some(KeysMode::On), admin_key, ..args() }).await;
        rig.client.key = Some(ADMIN_KEY.to_owned());
        rig
    }
}

impl Rig {
    /// Waits until this many requests are waiting.
    pub async fn until_waiting(&self, count: usize) {
        let since = std::time::Instant::now();
        while self.server.long_polls() != count {
            assert!(since.elapsed() < std::time::Duration::from_secs(20), "there are never {count} requests that wait");
            tokio::task::yield_now().await;
        }
    }
}

impl std::ops::Deref for Rig {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Client {
    pub fn with_key(&self, key: &str) -> Client {
        Client { key: Some(key.to_owned()), ..self.clone() }
    }

    pub fn header(&self, name: &str, value: &str) -> Client {
        let mut client = self.clone();
        client.headers.push((name.to_owned(), value.to_owned()));
        client
    }

    pub async fn get(&self, path: &str) -> Reply {
        self.send(Method::GET, path, None, Bytes::new()).await
    }

    pub async fn delete(&self, path: &str) -> Reply {
        self.send(Method::DELETE, path, None, Bytes::new()).await
    }

    pub async fn post(&self, path: &str, body: Value) -> Reply {
        self.send(Method::POST, path, Some("application/json"), body.to_string().into()).await
    }

    pub async fn put(&self, path: &str, body: Value) -> Reply {
        self.send(Method::PUT, path, Some("application/json"), body.to_string().into()).await
    }

    pub async fn patch(&self, path: &str, body: Value) -> Reply {
        self.send(Method::PATCH, path, Some("application/json"), body.to_string().into()).await
    }

    /// Registers a valid definition.
    pub async fn flow(&self, name: &str, text: &str) {
        let path = format!("/v1/flows/{name}");
        let reply = self.send(Method::PUT, &path, Some("application/yaml"), text.to_owned().into()).await;
        assert_eq!(reply.status, 200, "{}", reply.body);
    }

    pub async fn run(&self, flow: &str, input: Value) -> String {
        let reply = self.post(&format!("/v1/flows/{flow}/runs"), json!({ "input": input })).await;
        assert_eq!(reply.status, 201, "{}", reply.body);
        reply.text("run_id")
    }

    /// Claims one task, waiting for it.
    pub async fn claim(&self, worker: &str) -> Value {
        let reply = self.post("/v1/tasks/claim", json!({"worker_id": worker, "max": 1, "wait_ms": 20_000})).await;
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.body["tasks"][0].clone()
    }

    pub async fn report(&self, task: &Value, op: Value) -> Value {
        let mut report = json!({"task_id": task["task_id"], "token": task["token"]});
        for (key, value) in op.as_object().unwrap() {
            report[key] = value.clone();
        }
        let reply = self.post("/v1/tasks/report", json!({"worker_id": "w", "reports": [report]})).await;
        assert_eq!(reply.status, 200, "{}", reply.body);
        reply.body["outcomes"][0].clone()
    }

    pub async fn send(&self, method: Method, path: &str, content_type: Option<&str>, body: Bytes) -> Reply {
        let stream = TcpStream::connect(self.addr).await.unwrap();
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
        let connection = tokio::spawn(connection);
        let mut request = Request::builder().method(method.clone()).uri(path);
        if !self.headers.iter().any(|(name, _)| name.eq_ignore_ascii_case("host")) {
            request = request.header("host", self.addr.to_string());
        }
        if let Some(content_type) = content_type {
            request = request.header("content-type", content_type);
        }
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        for (name, value) in &self.headers {
            request = request.header(name, value);
        }
        let reply = sender.send_request(request.body(Full::new(body)).unwrap()).await.unwrap();
        let (head, body) = reply.into_parts();
        let bytes = body.collect().await.unwrap().to_bytes();
        connection.abort();
        let body = serde_json::from_slice(&bytes)
            .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned()));
        let reply = Reply { status: head.status.as_u16(), body, headers: head.headers };
        check(&method, path.split('?').next().unwrap(), reply.status, &reply.body);
        reply
    }
}

impl Reply {
    pub fn text(&self, field: &str) -> String {
        self.body[field].as_str().unwrap_or_else(|| panic!("no {field} in {}", self.body)).to_owned()
    }

    pub fn code(&self) -> (u16, &str) {
        (self.status, self.body["error"]["code"].as_str().unwrap_or("none"))
    }

    pub fn items(&self) -> &Vec<Value> {
        self.body["items"].as_array().unwrap_or_else(|| panic!("no items in {}", self.body))
    }
}
