//! The client: calls to a server.

mod address;
mod events;
mod follow;
mod http;
mod list;
mod run;
mod start;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ::http::{HeaderMap, Method};
use bytes::Bytes;
use eddyline_protocol::{FlowInfo, FlowRegistered, ServerInfo};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio_rustls::rustls::ClientConfig;

use crate::error::{Error, Refusal};
use address::{Address, route};
use http::{Http, Outgoing, Repeat, asked_to_wait, headers};

pub use address::segment;
pub use events::Gates;
pub use follow::{Follow, Record};
pub use list::{RunFilter, RunList};
pub use run::Run;
pub use start::Start;

pub(crate) use http::{ANSWER, CONNECT, refusal};
pub(crate) use start::{is_deeper, weigh, weigh_text};

const JSON: &str = "application/json";
const DEFAULT_URL: &str = "http://127.0.0.1:7070";

/// A client of a server. Cheap to clone; the clones share their connections.
///
/// ```no_run
/// # async fn example() -> Result<(), eddyline::Error> {
/// let client = eddyline::Client::from_env()?;
/// let run = client.start("order", &serde_json::json!({"id": 7})).await?;
/// let output: serde_json::Value = run.result().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Client {
    http: Arc<Http>,
    key: Option<Arc<str>>,
    namespace: Option<Arc<str>>,
}

impl fmt::Debug for Client {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (url, keyed) = (&self.http.address.url, self.key.is_some());
        f.debug_struct("Client").field("url", url).field("keyed", &keyed).field("namespace", &self.namespace).finish()
    }
}

impl Client {
    /// A client for the server at `url`: `http://` or `https://`, with a path if the server is behind a proxy. Does not
    /// connect until the first call.
    pub fn new(url: &str) -> Result<Client, Error> {
        Ok(Client { http: Arc::new(Http::new(Address::parse(url)?)?), key: None, namespace: None })
    }

    /// Configured by the environment: `EDDY_URL` (default `http://127.0.0.1:7070`), `EDDY_KEY`, `EDDY_NAMESPACE`.
    pub fn from_env() -> Result<Client, Error> {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let mut client = Client::new(set("EDDY_URL").as_deref().unwrap_or(DEFAULT_URL))?;
        client.key = set("EDDY_KEY").map(Arc::from);
        client.namespace = set("EDDY_NAMESPACE").map(Arc::from);
        Ok(client)
    }

    /// Sends this key with every request.
    pub fn with_key(mut self, key: impl Into<String>) -> Client {
        self.key = Some(Arc::from(key.into()));
        self
    }

    /// Selects a namespace when keys are off. A key belongs to one namespace.
    pub fn with_namespace(mut self, namespace: impl Into<String>) -> Client {
        self.namespace = Some(Arc::from(namespace.into()));
        self
    }

    /// The same client with its own connections.
    pub(crate) fn with_own_connections(mut self) -> Client {
        self.http = Arc::new(self.http.anew());
        self
    }

    /// The address of the server.
    pub fn url(&self) -> &str {
        &self.http.address.url
    }

    /// Any call of the API, with JSON request and response; an empty response reads as `null`. Characters that are not
    /// allowed in a path are percent-encoded, except percent signs: see [`segment`]. A `GET` is retried when the
    /// connection breaks or the server is busy, a limited number of times; other calls only if they cannot have reached
    /// the server.
    pub async fn call<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        query: &[(&str, String)],
        body: Option<&(impl Serialize + ?Sized + Sync)>,
    ) -> Result<T, Error> {
        let repeat = if method.is_safe() { Repeat::Safe } else { Repeat::Never };
        self.ask(repeat, method, path, query, body).await
    }

    /// A call with a body other than JSON: a definition in YAML, the payload of a webhook.
    pub async fn send_text<T: DeserializeOwned>(
        &self,
        method: Method,
        path: &str,
        content_type: &str,
        text: &str,
    ) -> Result<T, Error> {
        // PUT is idempotent.
        let repeat = if method == Method::PUT { Repeat::Safe } else { Repeat::Never };
        let body = Bytes::copy_from_slice(text.as_bytes());
        let content_type = Some(content_type);
        let wait = Duration::ZERO;
        self.exchange(&Outgoing { method, path, query: &[], content_type, body, repeat, wait }).await
    }

    /// Registers a flow in YAML or JSON. The details of the error list every problem.
    pub async fn register_flow(&self, name: &str, text: &str) -> Result<FlowRegistered, Error> {
        let content_type = if text.trim_start().starts_with('{') { JSON } else { "application/yaml" };
        self.send_text(Method::PUT, &format!("/v1/flows/{}", segment(name)), content_type, text).await
    }

    /// The current version of a flow.
    pub async fn flow(&self, name: &str) -> Result<FlowInfo, Error> {
        self.get(&format!("/v1/flows/{}", segment(name)), &[]).await
    }

    /// Information about the server.
    pub async fn info(&self) -> Result<ServerInfo, Error> {
        self.get("/v1/info", &[]).await
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str, query: &[(&str, String)]) -> Result<T, Error> {
        self.ask(Repeat::Safe, Method::GET, path, query, None::<&()>).await
    }

    pub(crate) async fn post<T: DeserializeOwned>(
        &self,
        repeat: Repeat,
        path: &str,
        body: &(impl Serialize + ?Sized + Sync),
    ) -> Result<T, Error> {
        self.ask(repeat, Method::POST, path, &[], Some(body)).await
    }

    /// A single attempt, for callers with their own retries. `wait` is how long the body asks the server to wait.
    pub(crate) async fn post_once<T: DeserializeOwned>(
        &self,
        path: &str,
        body: &(impl Serialize + Sync),
        wait: Duration,
    ) -> Result<T, Refusal> {
        let (method, content_type, body, repeat) = (Method::POST, Some(JSON), encode(body)?, Repeat::Never);
        let request = Outgoing { method, path, query: &[], content_type, body, repeat, wait };
        let body = self.http.send_once(&self.headers()?, &request).await?;
        Ok(decode(&request, &body)?)
    }

    async fn ask<T: DeserializeOwned>(
        &self,
        repeat: Repeat,
        method: Method,
        path: &str,
        query: &[(&str, String)],
        body: Option<&(impl Serialize + ?Sized + Sync)>,
    ) -> Result<T, Error> {
        let content_type = body.is_some().then_some(JSON);
        let body = body.map_or(Ok(Bytes::new()), encode)?;
        let wait = asked_to_wait(query);
        self.exchange(&Outgoing { method, path, query, content_type, body, repeat, wait }).await
    }

    async fn exchange<T: DeserializeOwned>(&self, request: &Outgoing<'_>) -> Result<T, Error> {
        let body = self.http.send(&self.headers()?, request).await?;
        decode(request, &body)
    }

    pub(crate) fn address(&self) -> &Address {
        &self.http.address
    }

    pub(crate) fn tls(&self) -> Arc<ClientConfig> {
        self.http.tls.clone()
    }

    pub(crate) fn headers(&self) -> Result<HeaderMap, Error> {
        headers(self.key.as_deref(), self.namespace.as_deref())
    }
}

fn encode(body: &(impl Serialize + ?Sized)) -> Result<Bytes, Error> {
    let text = serde_json::to_vec(body);
    text.map(Bytes::from).map_err(|source| Error::Encode { what: "the body".to_owned(), source })
}

fn decode<T: DeserializeOwned>(request: &Outgoing<'_>, body: &[u8]) -> Result<T, Error> {
    let body = if body.is_empty() { b"null" } else { body };
    serde_json::from_slice(body).map_err(|source| {
        let what = format!("the response to {} {}", request.method, route(request.path));
        Error::Decode { what, source }
    })
}
