//! A request on its way to its handler: caller, path, query, body.

use std::sync::{Mutex, PoisonError};

use axum::body::Body;
use axum::extract::{Query, RawPathParams, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::response::Response;
use bytes::Bytes;
use eddyline_engine::Engine;
use eddyline_machine::{Millis, RunId};
use eddyline_protocol::{Page, Scope, Span};
use eddyline_store::Namespace;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use super::Api;
use super::body::{self, Fields};
use super::failure::Failure;
use super::guard::Caller;
use super::item_errors::{self, ItemErrors, List};
use super::memory_budget::Reservation;
use super::parameters;
use super::routes::Route;
use super::secrets;

/// The page size without `limit`.
const DEFAULT_PAGE: usize = 100;
pub(crate) const MAX_PAGE: usize = 1_000;
/// The longest time that a request can wait.
pub(crate) const MAX_WAIT: Span = Span::from_ms(60_000);

pub(crate) type ApiResult = Result<Response, Failure>;

pub(crate) struct Call {
    pub api: Api,
    pub route: &'static Route,
    pub caller: Caller,
    params: Option<RawPathParams>,
    query: Vec<(String, String)>,
    head: Parts,
    /// Behind a lock only because `Body` is not `Sync`; only the handler uses it.
    body: Mutex<Body>,
    /// The body's part of the memory budget, until the request is handled.
    reserved: Option<Reservation>,
}

impl Call {
    pub fn new(
        api: Api,
        route: &'static Route,
        caller: Caller,
        params: Option<RawPathParams>,
        request: Request,
    ) -> Call {
        let query = Query::<Vec<(String, String)>>::try_from_uri(request.uri());
        let query = query.map(|Query(pairs)| pairs).unwrap_or_default();
        let (head, body) = request.into_parts();
        Call { api, route, caller, params, query, head, body: Mutex::new(body), reserved: None }
    }

    /// Refuses unknown query parameters, and any field in the body of a call without a body.
    pub async fn refuse_unknown(&mut self) -> Result<(), Failure> {
        if !self.route.refuses_unknown() {
            return Ok(());
        }
        let takes = parameters::of(self.route);
        parameters::refuse_unknown(&self.query, &takes.query)?;
        if !takes.body && self.route.method == Method::POST {
            let NoFields {} = self.json_or_default().await?;
        }
        Ok(())
    }

    pub fn engine(&self) -> &Engine {
        self.api.engine()
    }

    pub fn ns(&self) -> &Namespace {
        &self.caller.ns
    }

    pub fn may(&self, scope: Scope) -> bool {
        self.caller.may(scope)
    }

    /// Awaits `waits`, unless the caller's key becomes invalid meanwhile.
    pub async fn while_admitted<T>(&self, waits: impl Future<Output = T>) -> Result<T, Failure> {
        tokio::select! {
            biased;
            done = waits => Ok(done),
            failure = self.caller.shut_out(&self.api) => Err(failure),
        }
    }

    pub fn headers(&self) -> &HeaderMap {
        &self.head.headers
    }

    /// An extension that the connection added to the request.
    pub fn extension<T: Clone + Send + Sync + 'static>(&self) -> Option<T> {
        self.head.extensions.get().cloned()
    }

    pub fn into_head(self) -> Parts {
        self.head
    }

    /// A path parameter, decoded. It exists, because the route names it.
    pub fn param(&self, name: &str) -> &str {
        let params = self.params.as_ref();
        params.and_then(|params| params.iter().find(|(key, _)| *key == name)).map_or("", |(_, value)| value)
    }

    /// The run id in the path. A malformed id is reported as an unknown run.
    pub fn run(&self) -> Result<RunId, Failure> {
        run_id(self.param("id"))
    }

    /// A query parameter; an empty one counts as missing.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.check_described(name);
        self.query.iter().find(|(key, value)| key == name && !value.is_empty()).map(|(_, value)| value.as_str())
    }

    pub fn texts(&self, name: &str) -> Vec<String> {
        self.check_described(name);
        let wanted = self.query.iter().filter(|(key, value)| key == name && !value.is_empty());
        wanted.map(|(_, value)| value.clone()).collect()
    }

    /// A parameter missing in openapi.json would be refused before the handler reads it.
    fn check_described(&self, name: &str) {
        debug_assert!(
            parameters::of(self.route).query.iter().any(|known| known == name),
            "openapi.json has no parameter `{name}` of {} {}",
            self.route.method,
            self.route.path
        );
    }

    /// Present without a value.
    fn is_blank(&self, name: &str) -> bool {
        self.query.iter().any(|(key, value)| key == name && value.is_empty())
    }

    pub fn number(&self, name: &str) -> Result<Option<u64>, Failure> {
        self.read(name, "a whole number, 0 or more", |text| text.parse().ok())
    }

    pub fn flag(&self, name: &str) -> Result<bool, Failure> {
        let read = |text: &str| match text {
            "true" | "1" => Some(true),
            "false" | "0" => Some(false),
            _ => None,
        };
        match self.read(name, "true or false", read)? {
            None if self.is_blank(name) => Err(wrong(name, "true or false")),
            read => Ok(read.unwrap_or(false)),
        }
    }

    /// `30s`, or a number of milliseconds; clamped to [`MAX_WAIT`].
    pub fn wait(&self) -> Result<std::time::Duration, Failure> {
        let read = |text: &str| text.parse().ok().map(Span::from_ms).or_else(|| text.parse().ok());
        let wait: Option<Span> = self.read("wait", "a duration, such as 30s or a number of milliseconds", read)?;
        Ok(wait.unwrap_or_default().min(MAX_WAIT).into())
    }

    pub fn time(&self, name: &str) -> Result<Option<Millis>, Failure> {
        let read = |text: &str| moment(text);
        self.read(name, "a time such as 2026-01-02T03:04:05Z", read)
    }

    /// The page size: at least 1, clamped to [`MAX_PAGE`].
    pub fn limit(&self) -> Result<usize, Failure> {
        let limit = self.number("limit")?.map_or(DEFAULT_PAGE, |limit| usize::try_from(limit).unwrap_or(MAX_PAGE));
        match limit {
            0 => Err(wrong("limit", "a whole number, 1 or more")),
            _ if self.is_blank("limit") => Err(wrong("limit", "a whole number, 1 or more")),
            _ => Ok(limit.min(MAX_PAGE)),
        }
    }

    /// The cursor from the previous page.
    pub fn cursor(&self) -> Result<Option<u64>, Failure> {
        self.read("cursor", "the `next` of the previous page", |text| text.parse().ok())
    }

    /// The total number of items, if requested.
    pub async fn total(
        &self,
        count: impl Future<Output = eddyline_engine::Result<u64>>,
    ) -> Result<Option<u64>, Failure> {
        Ok(if self.flag("count")? { Some(count.await?) } else { None })
    }

    /// The requested page of a complete list that is sorted by name.
    pub fn page<T>(&self, all: Vec<T>, name: impl Fn(&T) -> &str) -> Result<Page<T>, Failure> {
        let (limit, after) = (self.limit()?, self.text("cursor").unwrap_or(""));
        let total = self.flag("count")?.then_some(all.len() as u64);
        let mut items: Vec<T> = all.into_iter().filter(|item| name(item) > after).collect();
        let next = (items.len() > limit).then(|| name(&items[limit - 1]).to_owned());
        items.truncate(limit);
        Ok(Page { items, next, total })
    }

    /// Responds with data of callers and handlers, which may contain gate URLs: tokens are removed if the caller may
    /// not open gates.
    pub fn show<T: Serialize>(&self, status: StatusCode, body: &T) -> ApiResult {
        let text = written(body);
        Ok(match self.may(Scope::Signal) {
            true => respond(status, text),
            false => respond(status, text.map(secrets::left_out)),
        })
    }

    pub async fn bytes(&mut self) -> Result<Bytes, Failure> {
        let ns = self.caller.ns.clone();
        self.bytes_within(self.api.about().settings.max_body, &ns).await
    }

    /// The body as a payload, charged to `ns`.
    pub async fn payload_bytes(&mut self, ns: &Namespace) -> Result<Bytes, Failure> {
        let most = self.api.about().settings.max_body.min(self.engine().config().max_payload_bytes);
        self.bytes_within(most, ns).await
    }

    /// Releases the body's part of the budget; call it when the body is no longer needed but the request still waits.
    pub fn body_done(&mut self) {
        self.reserved = None;
    }

    async fn bytes_within(&mut self, limit: usize, ns: &Namespace) -> Result<Bytes, Failure> {
        let body = self.body.get_mut().unwrap_or_else(PoisonError::into_inner);
        let reserved = self.reserved.insert(self.api.bodies().reservation(ns));
        body::read(std::mem::take(body), &self.head.headers, limit, reserved).await
    }

    /// The body as JSON of any shape.
    pub async fn any_json(&mut self) -> Result<Value, Failure> {
        let bytes = self.bytes().await?;
        self.parse(&bytes)
    }

    /// The body as a payload; empty is null.
    pub async fn payload_or_null(&mut self) -> Result<Value, Failure> {
        let ns = self.caller.ns.clone();
        let bytes = self.payload_bytes(&ns).await?;
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(Value::Null);
        }
        self.parse(&bytes)
    }

    /// Parses the body, with each item of `list` parsed separately.
    pub async fn json_apart<T: DeserializeOwned>(&mut self, list: List) -> Result<(T, ItemErrors), Failure> {
        let bytes = self.bytes().await?;
        if !list.bare {
            body::refuse_list(&bytes)?;
        }
        item_errors::read(&bytes, list, |bytes| self.parse(bytes))
    }

    /// The body as an object.
    pub async fn json<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        let bytes = self.bytes().await?;
        body::refuse_list(&bytes)?;
        self.parse(&bytes)
    }

    /// The body as an object; empty gives the default.
    pub async fn json_or_default<T: DeserializeOwned + Default>(&mut self) -> Result<T, Failure> {
        let bytes = self.bytes().await?;
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(T::default());
        }
        body::refuse_list(&bytes)?;
        self.parse(&bytes)
    }

    fn parse<T: DeserializeOwned>(&self, bytes: &[u8]) -> Result<T, Failure> {
        let fields = if self.route.refuses_unknown() { Fields::Known } else { Fields::Any };
        body::json(bytes, &self.head.headers, fields)
    }

    fn read<T>(&self, name: &str, expected: &str, read: impl Fn(&str) -> Option<T>) -> Result<Option<T>, Failure> {
        self.text(name).map(|text| read(text).ok_or_else(|| wrong(name, expected))).transpose()
    }
}

/// For calls without a body.
#[derive(Default, Deserialize)]
struct NoFields {}

fn wrong(name: &str, expected: &str) -> Failure {
    Failure::bad(format!("the parameter `{name}` is not {expected}"))
}

pub(crate) fn run_id(text: &str) -> Result<RunId, Failure> {
    Uuid::try_parse(text).map(RunId).map_err(|_| Failure::not_found("run", text))
}

/// Parses RFC 3339.
pub(crate) fn moment(text: &str) -> Option<Millis> {
    text.parse::<jiff::Timestamp>().ok().map(jiff::Timestamp::as_millisecond)
}

pub(crate) fn ok<T: Serialize>(body: &T) -> ApiResult {
    Ok(json_response(StatusCode::OK, body))
}

pub(crate) fn answer<T: Serialize>(status: StatusCode, body: &T) -> ApiResult {
    Ok(json_response(status, body))
}

pub(crate) fn json_response<T: Serialize>(status: StatusCode, body: &T) -> Response {
    respond(status, written(body))
}

fn written<T: Serialize>(body: &T) -> Option<String> {
    serde_json::to_string(body).inspect_err(|error| tracing::error!("cannot serialise a response: {error}")).ok()
}

fn respond(status: StatusCode, text: Option<String>) -> Response {
    let (status, text) = text.map_or((StatusCode::INTERNAL_SERVER_ERROR, String::new()), |text| (status, text));
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
