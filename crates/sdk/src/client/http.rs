//! HTTP requests, responses and retries.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use eddyline_protocol::{ApiError, Code, ErrorBody, NAMESPACE_HEADER, Span};
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper_rustls::{ConfigBuilderExt, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::address::{Address, route};
use crate::backoff::Backoff;
use crate::error::{Error, Refusal};

/// The timeout for establishing a connection.
pub(crate) const CONNECT: Duration = Duration::from_secs(5);
/// The timeout for a response, in addition to the time that the request asks the server to wait.
pub(crate) const ANSWER: Duration = Duration::from_secs(30);
/// The maximum number of idle connections, and how long they are kept.
const IDLE_CONNECTIONS: usize = 32;
const IDLE: Duration = Duration::from_secs(60);
/// The maximum response size: more than a full page of the largest records.
const MAX_ANSWER_BYTES: usize = 128 << 20;
/// The maximum number of attempts for a request that can be repeated.
const MAX_TRIES: u32 = 5;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// If the server asks for a longer pause than this, the error is returned instead.
const LONGEST_RETRY_AFTER: Duration = Duration::from_secs(10);

const NOT_A_KEY: &str = "the key is invalid: it has a control or non-ASCII character";

/// Whether a request that may already have taken effect can be sent again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Repeat {
    Safe,
    Never,
}

#[derive(Debug)]
pub(crate) struct Outgoing<'a> {
    pub method: Method,
    pub path: &'a str,
    pub query: &'a [(&'a str, String)],
    pub content_type: Option<&'a str>,
    pub body: Bytes,
    pub repeat: Repeat,
    /// How long the request asks the server to wait.
    pub wait: Duration,
}

type Connections = Pool<HttpsConnector<HttpConnector>, Full<Bytes>>;

/// The connections to a server.
#[derive(Debug, Clone)]
pub(crate) struct Http {
    pub address: Address,
    pool: Connections,
    pub tls: Arc<ClientConfig>,
}

impl Http {
    pub fn new(address: Address) -> Result<Http, Error> {
        let tls = Arc::new(tls(&address)?);
        Ok(Http { pool: pool(&tls), address, tls })
    }

    /// The same server with new connections.
    pub fn anew(&self) -> Http {
        Http { address: self.address.clone(), pool: pool(&self.tls), tls: self.tls.clone() }
    }

    /// The response body, after retries.
    pub async fn send(&self, headers: &HeaderMap, request: &Outgoing<'_>) -> Result<Bytes, Error> {
        let mut pauses = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        loop {
            let Refusal { error, retry_after } = match self.send_once(headers, request).await {
                Ok(body) => return Ok(body),
                Err(refusal) => refusal,
            };
            let pause = pauses.next().max(retry_after.unwrap_or_default());
            if pauses.tries() >= MAX_TRIES || pause > LONGEST_RETRY_AFTER || !may_repeat(request.repeat, &error) {
                return Err(error);
            }
            tracing::debug!("{} {}: {error}; retrying in {pause:?}", request.method, route(request.path));
            tokio::time::sleep(pause).await;
        }
    }

    /// A single attempt.
    pub async fn send_once(&self, headers: &HeaderMap, request: &Outgoing<'_>) -> Result<Bytes, Refusal> {
        let mut message = http::Request::new(Full::new(request.body.clone()));
        *message.method_mut() = request.method.clone();
        *message.uri_mut() = self.address.uri(request.path, request.query)?;
        *message.headers_mut() = headers.clone();
        if let Some(content_type) = request.content_type {
            let value = HeaderValue::from_str(content_type)
                .map_err(|_| Error::Config(format!("\"{content_type}\" is not a content type")))?;
            message.headers_mut().insert(CONTENT_TYPE, value);
        }
        match tokio::time::timeout(ANSWER + request.wait, self.exchange(message)).await {
            Ok(answer) => answer,
            Err(_) => Err(Error::Timeout.into()),
        }
    }

    async fn exchange(&self, message: http::Request<Full<Bytes>>) -> Result<Bytes, Refusal> {
        let answer = self.pool.request(message).await.map_err(|error| self.broken(error.is_connect(), error.into()))?;
        let (head, body) = answer.into_parts();
        let body = match Limited::new(body, MAX_ANSWER_BYTES).collect().await {
            Ok(body) => body.to_bytes(),
            Err(error) if error.is::<LengthLimitError>() => {
                return Err(Error::TooLarge { limit: MAX_ANSWER_BYTES }.into());
            }
            Err(error) => return Err(self.broken(false, error).into()),
        };
        if head.status.is_success() {
            return Ok(body);
        }
        let retry_after = head.headers.get(RETRY_AFTER).and_then(|value| value.to_str().ok()?.trim().parse().ok());
        let error = refusal(head.status.as_u16(), &body);
        Err(Refusal { error, retry_after: retry_after.map(Duration::from_secs) })
    }

    fn broken(&self, before_sending: bool, source: Box<dyn std::error::Error + Send + Sync>) -> Error {
        let url = self.address.url.clone();
        if before_sending { Error::Connect { url, source } } else { Error::Interrupted { url, source } }
    }
}

fn pool(tls: &ClientConfig) -> Connections {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT));
    let connector =
        HttpsConnectorBuilder::new().with_tls_config(tls.clone()).https_or_http().enable_http1().wrap_connector(tcp);
    Pool::builder(TokioExecutor::new())
        .pool_max_idle_per_host(IDLE_CONNECTIONS)
        .pool_idle_timeout(IDLE)
        .pool_timer(TokioTimer::new())
        .build(connector)
}

/// The headers of every request.
pub(crate) fn headers(key: Option<&str>, namespace: Option<&str>) -> Result<HeaderMap, Error> {
    let mut headers = HeaderMap::new();
    headers.insert(USER_AGENT, HeaderValue::from_static(concat!("eddyline-rust/", env!("CARGO_PKG_VERSION"))));
    headers.insert(ACCEPT, HeaderValue::from_static("application/json"));
    if let Some(key) = key {
        let wrong = || Error::Config(NOT_A_KEY.to_owned());
        // Header values can contain other bytes too, but no server accepts them in a key.
        let mut value = HeaderValue::from_str(&format!("Bearer {key}")).map_err(|_| wrong())?;
        value.to_str().map_err(|_| wrong())?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    if let Some(namespace) = namespace {
        let value = HeaderValue::from_str(namespace)
            .map_err(|_| Error::Config(format!("{namespace:?} is not the name of a namespace")))?;
        headers.insert(NAMESPACE_HEADER, value);
    }
    Ok(headers)
}

/// The error of an unsuccessful response, from Eddyline or a proxy.
pub(crate) fn refusal(status: u16, body: &[u8]) -> Error {
    let error = serde_json::from_slice::<ErrorBody>(body).map(|body| body.error).unwrap_or_else(|_| {
        let code = Code::ALL.into_iter().find(|code| code.status() == status).unwrap_or(Code::Unknown);
        let text: String = String::from_utf8_lossy(body).chars().take(200).collect();
        let message = format!("the server responded with {status}, but not in Eddyline's format: {}", text.trim());
        ApiError { code, message, details: Vec::new() }
    });
    Error::Api { status, error }
}

/// A connection that was never established carried nothing, so any request can be retried.
fn may_repeat(repeat: Repeat, error: &Error) -> bool {
    matches!(error, Error::Connect { .. }) || (repeat == Repeat::Safe && error.is_retryable())
}

/// The value of the query parameter `wait`.
pub(crate) fn asked_to_wait(query: &[(&str, String)]) -> Duration {
    let wait = query.iter().find(|(name, _)| *name == "wait").map(|(_, value)| value);
    let ms = wait.and_then(|value| value.parse::<Span>().map(|span| span.ms).or_else(|_| value.parse()).ok());
    Duration::from_millis(ms.unwrap_or(0))
}

/// Trusts the system's certificates, which are loaded only for TLS.
fn tls(address: &Address) -> Result<ClientConfig, Error> {
    let wrong = |error: &dyn std::fmt::Display| Error::Config(format!("cannot set up TLS: {error}"));
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| wrong(&error))?;
    let builder = if address.tls {
        builder.with_native_roots().map_err(|error| wrong(&error))?
    } else {
        builder.with_root_certificates(RootCertStore::empty())
    };
    Ok(builder.with_no_client_auth())
}
