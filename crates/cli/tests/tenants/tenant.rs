//! HTTP requests with the key of one tenant, and with a timeout.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use axum::body::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;

/// Longer than any response takes, including long polls.
pub const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug, Clone)]
pub struct Tenant {
    pub addr: SocketAddr,
    pub key: String,
}

#[derive(Debug)]
pub struct Reply {
    pub status: u16,
    pub body: Value,
}

impl Reply {
    pub fn text(&self, field: &str) -> &str {
        self.body[field].as_str().unwrap_or_else(|| panic!("no {field} in {self:?}"))
    }
}

impl Tenant {
    pub async fn get(&self, path: &str) -> Result<Reply, String> {
        self.send(Method::GET, path, "application/json", Bytes::new()).await
    }

    pub async fn post(&self, path: &str, body: &Value) -> Result<Reply, String> {
        self.send(Method::POST, path, "application/json", body.to_string().into()).await
    }

    pub async fn put(&self, path: &str, body: &Value) -> Result<Reply, String> {
        self.send(Method::PUT, path, "application/json", body.to_string().into()).await
    }

    /// Registers a definition; false if it is rejected as too expensive or invalid.
    pub async fn register(&self, flow: &str, definition: &Value) -> bool {
        let reply = self.put(&format!("/v1/flows/{flow}"), definition).await.unwrap();
        assert!(matches!(reply.status, 200 | 413 | 422), "{reply:?}");
        reply.status == 200
    }

    /// Starts a run; `None` if the start is refused.
    pub async fn try_start(&self, flow: &str, input: &Value) -> Option<String> {
        let reply = self.post(&format!("/v1/flows/{flow}/runs"), &json!({ "input": input })).await.unwrap();
        match reply.status {
            201 => Some(reply.text("run_id").to_owned()),
            413 | 422 | 429 => None,
            _ => panic!("{reply:?}"),
        }
    }

    pub async fn start(&self, flow: &str, input: &Value) -> String {
        self.try_start(flow, input).await.unwrap_or_else(|| panic!("the start of {flow} is refused"))
    }

    /// The result of a run; `None` if it has not ended after `seconds`.
    pub async fn result(&self, run: &str, seconds: u32) -> Option<Value> {
        let until = Instant::now() + Duration::from_secs(seconds.into());
        loop {
            let wait = until.saturating_duration_since(Instant::now()).min(PATIENCE / 2);
            let reply = self.get(&format!("/v1/runs/{run}/result?wait={}ms", wait.as_millis())).await.unwrap();
            match reply.status {
                200 => return Some(reply.body),
                202 if Instant::now() < until => {}
                202 => return None,
                _ => panic!("{reply:?}"),
            }
        }
    }

    pub async fn claim(&self, worker: &str, wait_ms: u64) -> Result<Vec<Value>, String> {
        let reply = self.post("/v1/tasks/claim", &json!({"worker_id": worker, "max": 1, "wait_ms": wait_ms})).await?;
        match reply.body["tasks"].as_array() {
            Some(tasks) if reply.status == 200 => Ok(tasks.clone()),
            _ => Err(format!("the claim was answered with {reply:?}")),
        }
    }

    pub async fn report(&self, worker: &str, task: &Value, report: Value) -> Result<Value, String> {
        let mut report = report;
        report["task_id"] = task["task_id"].clone();
        report["token"] = task["token"].clone();
        let reply = self.post("/v1/tasks/report", &json!({"worker_id": worker, "reports": [report]})).await?;
        match reply.status {
            200 => Ok(reply.body["outcomes"][0].clone()),
            _ => Err(format!("the report was answered with {reply:?}")),
        }
    }

    pub async fn send(&self, method: Method, path: &str, content_type: &str, body: Bytes) -> Result<Reply, String> {
        let what = format!("{method} {path}");
        match tokio::time::timeout(PATIENCE, self.exchange(method, path, content_type, body)).await {
            Ok(Ok(reply)) => Ok(reply),
            Ok(Err(error)) => Err(format!("{what}: {error}")),
            Err(_) => Err(format!("{what}: no answer within {PATIENCE:?}")),
        }
    }

    async fn exchange(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        body: Bytes,
    ) -> Result<Reply, Box<dyn std::error::Error + Send + Sync>> {
        let stream = TcpStream::connect(self.addr).await?;
        stream.set_nodelay(true)?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await?;
        let connection = tokio::spawn(connection);
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", self.addr.to_string())
            .header("content-type", content_type)
            .header("authorization", format!("Bearer {}", self.key))
            .body(Full::new(body))?;
        let (head, body) = sender.send_request(request).await?.into_parts();
        let bytes = body.collect().await?.to_bytes();
        connection.abort();
        let body = serde_json::from_slice(&bytes)
            .unwrap_or_else(|_| Value::String(String::from_utf8_lossy(&bytes).into_owned()));
        Ok(Reply { status: head.status.as_u16(), body })
    }
}
