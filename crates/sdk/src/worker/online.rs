//! The transport to a server: a WebSocket, or plain HTTP if it is not supported.

use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::Method;

use super::http::{self as plain, Unanswered};
use super::link::{Cut, Hello, Opened, Transport};
use super::socket::{self, NoSocket};
use crate::client::{Client, segment};
use crate::code::driver::{MemoPage, MemoPages};
use crate::error::Error;

/// How long unregistering may take.
const LEAVE: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(crate) struct Online {
    client: Client,
    http_only: bool,
    unanswered: Unanswered,
}

impl Online {
    pub fn new(client: Client, http_only: bool) -> Online {
        Online { client, http_only, unanswered: Unanswered::default() }
    }
}

#[async_trait]
impl Transport for Online {
    async fn open(&mut self, hello: &Hello) -> Result<Opened, Cut> {
        if !self.http_only {
            match socket::open(&self.client, hello).await {
                Ok(opened) => {
                    // They were sent over HTTP. Tasks they may have claimed return to the queue when their leases
                    // expire.
                    self.unanswered.forget();
                    return Ok(opened);
                }
                Err(NoSocket::Cut(cut)) => return Err(cut),
                Err(NoSocket::NotOffered(why)) => tracing::info!("no WebSocket support, using plain HTTP: {why}"),
            }
        }
        plain::open(&self.client, &self.unanswered, hello).await
    }

    fn pages(&self) -> Arc<dyn MemoPages> {
        // Connections belong to the runtime that opened them; drivers have another than the worker's loop.
        Arc::new(self.client.clone().with_own_connections())
    }

    async fn leave(&mut self, worker_id: &str) -> Result<(), Error> {
        let path = format!("/v1/workers/{}", segment(worker_id));
        let leaving = self.client.call::<serde_json::Value>(Method::DELETE, &path, &[], None::<&()>);
        tokio::time::timeout(LEAVE, leaving).await.map_err(|_| Error::Timeout)?.map(drop)
    }
}

#[async_trait]
impl MemoPages for Client {
    async fn page(&self, task_id: &str, after: u64) -> Result<MemoPage, Error> {
        #[derive(serde::Deserialize)]
        struct Page {
            memo: serde_json::Map<String, serde_json::Value>,
            next: Option<String>,
        }
        let path = format!("/v1/tasks/{}/memo", segment(task_id));
        let page: Page = self.call(Method::GET, &path, &[("after", after.to_string())], None::<&()>).await?;
        Ok(MemoPage { memo: page.memo, next: page.next.and_then(|next| next.parse().ok()) })
    }
}
