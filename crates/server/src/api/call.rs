//! A request on its way to its handler: who calls, the path, the query, the body.

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
use super::apart::{self, List, Unread};
use super::body::{self, Fields};
use super::failure::Failure;
use super::guard::Caller;
use super::memory_budget::Reservation;
use super::parameters;
use super::routes::Route;
use super::secrets;

/// Pages hold this many items unless `limit` says otherwise.
const DEFAULT_PAGE: usize = 100;
pub(crate) const MAX_PAGE: usize = 1_000;
/// No request waits longer than this.
pub(crate) const MAX_WAIT: Span = Span::from_ms(60_000);

pub(crate) type Answer = Result<Response, Failure>;

pub(crate) struct Call {
    pub api: Api,
    pub route: &'static Route,
    pub caller: Caller,
    params: Option<RawPathParams>,
    query: Vec<(String, String)>,
    head: Parts,
    /// Behind a lock only because a body cannot be shared: nobody but the handler takes it.
    body: Mutex<Body>,
    /// What the body has of the budget, until the request is handled.
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

    /// Refuses parameters that the call does not have, and fields in the body of one that takes none.
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

    /// What is waited for, unless the caller loses its key meanwhile.
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

    /// What the connection added to the request.
    pub fn extension<T: Clone + Send + Sync + 'static>(&self) -> Option<T> {
        self.head.extensions.get().cloned()
    }

    pub fn into_head(self) -> Parts {
        self.head
    }

    /// A part of the path, decoded. The route names it, so it is there.
    pub fn param(&self, name: &str) -> &str {
        let params = self.params.as_ref();
        params.and_then(|params| params.iter().find(|(key, _)| *key == name)).map_or("", |(_, value)| value)
    }

    /// The run of the path. What is no id at all is no run either.
    pub fn run(&self) -> Result<RunId, Failure> {
        run_id(self.param("id"))
    }

    /// A parameter of the query; one without a value is as good as none.
    pub fn text(&self, name: &str) -> Option<&str> {
        self.check_described(name);
        self.query.iter().find(|(key, value)| key == name && !value.is_empty()).map(|(_, value)| value.as_str())
    }

    pub fn texts(&self, name: &str) -> Vec<String> {
        self.check_described(name);
        let wanted = self.query.iter().filter(|(key, value)| key == name && !value.is_empty());
        wanted.map(|(_, value)| value.clone()).collect()
    }

    /// What a handler reads has to be in the document, or it would be refused before.
    fn check_described(&self, name: &str) {
        debug_assert!(
            parameters::of(self.route).query.iter().any(|known| known == name),
            "openapi.json has no parameter `{name}` of {} {}",
            self.route.method,
            self.route.path
        );
    }

    /// It is there, and says nothing.
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

    /// How long to wait: `30s`, or a number of milliseconds. More than [`MAX_WAIT`] is that.
    pub fn wait(&self) -> Result<std::time::Duration, Failure> {
        let read = |text: &str| text.parse().ok().map(Span::from_ms).or_else(|| text.parse().ok());
        let wait: Option<Span> = self.read("wait", "a duration, such as 30s or a number of milliseconds", read)?;
        Ok(wait.unwrap_or_default().min(MAX_WAIT).into())
    }

    pub fn time(&self, name: &str) -> Result<Option<Millis>, Failure> {
        let read = |text: &str| moment(text);
        self.read(name, "a time such as 2026-01-02T03:04:05Z", read)
    }

    /// How many items a page has: at least one, and more than the most is the most.
    pub fn limit(&self) -> Result<usize, Failure> {
        let limit = self.number("limit")?.map_or(DEFAULT_PAGE, |limit| usize::try_from(limit).unwrap_or(MAX_PAGE));
        match limit {
            0 => Err(wrong("limit", "a whole number, 1 or more")),
            _ if self.is_blank("limit") => Err(wrong("limit", "a whole number, 1 or more")),
            _ => Ok(limit.min(MAX_PAGE)),
        }
    }

    /// Where a page begins, as it was given with the one before.
    pub fn cursor(&self) -> Result<Option<u64>, Failure> {
        self.read("cursor", "what `next` of the page before says", |text| text.parse().ok())
    }

    /// How many there are in all, if that is asked for.
    pub async fn total(
        &self,
        count: impl Future<Output = eddyline_engine::Result<u64>>,
    ) -> Result<Option<u64>, Failure> {
        Ok(if self.flag("count")? { Some(count.await?) } else { None })
    }

    /// The page that is asked for, of a list that is at hand as a whole, in the order of its names.
    pub fn page<T>(&self, all: Vec<T>, name: impl Fn(&T) -> &str) -> Result<Page<T>, Failure> {
        let (limit, after) = (self.limit()?, self.text("cursor").unwrap_or(""));
        let total = self.flag("count")?.then_some(all.len() as u64);
        let mut items: Vec<T> = all.into_iter().filter(|item| name(item) > after).collect();
        let next = (items.len() > limit).then(|| name(&items[limit - 1]).to_owned());
        items.truncate(limit);
        Ok(Page { items, next, total })
    }

    /// An answer with what callers and handlers sent, in which there may be URLs of gates: whoever may not open gates
    /// gets those without their secret.
    pub fn show<T: Serialize>(&self, status: StatusCode, body: &T) -> Answer {
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

    /// The body where it is a payload and nothing else, charged to a namespace.
    pub async fn payload_bytes(&mut self, ns: &Namespace) -> Result<Bytes, Failure> {
        let most = self.api.about().settings.max_body.min(self.engine().config().max_payload_bytes);
        self.bytes_within(most, ns).await
    }

    /// What the body came to is on its way: from now on it does not count, however long the request waits.
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

    /// The same where the body is a payload, and may be left out.
    pub async fn payload_or_null(&mut self) -> Result<Value, Failure> {
        let ns = self.caller.ns.clone();
        let bytes = self.payload_bytes(&ns).await?;
        if bytes.iter().all(u8::is_ascii_whitespace) {
            return Ok(Value::Null);
        }
        self.parse(&bytes)
    }

    /// The body, of which each item of a list is read for itself.
    pub async fn json_apart<T: DeserializeOwned>(&mut self, list: List) -> Result<(T, Unread), Failure> {
        let bytes = self.bytes().await?;
        if !list.bare {
            body::refuse_list(&bytes)?;
        }
        apart::read(&bytes, list, |bytes| self.parse(bytes))
    }

    /// The body, an object.
    pub async fn json<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        let bytes = self.bytes().await?;
        body::refuse_list(&bytes)?;
        self.parse(&bytes)
    }

    /// The same where the body may be left out.
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

/// The body of a call that takes none.
#[derive(Default, Deserialize)]
struct NoFields {}

fn wrong(name: &str, expected: &str) -> Failure {
    Failure::bad(format!("the parameter `{name}` is not {expected}"))
}

pub(crate) fn run_id(text: &str) -> Result<RunId, Failure> {
    Uuid::try_parse(text).map(RunId).map_err(|_| Failure::not_found("run", text))
}

/// A moment in RFC 3339.
pub(crate) fn moment(text: &str) -> Option<Millis> {
    text.parse::<jiff::Timestamp>().ok().map(jiff::Timestamp::as_millisecond)
}

pub(crate) fn ok<T: Serialize>(body: &T) -> Answer {
    Ok(json_response(StatusCode::OK, body))
}

pub(crate) fn answer<T: Serialize>(status: StatusCode, body: &T) -> Answer {
    Ok(json_response(status, body))
}

pub(crate) fn json_response<T: Serialize>(status: StatusCode, body: &T) -> Response {
    respond(status, written(body))
}

fn written<T: Serialize>(body: &T) -> Option<String> {
    serde_json::to_string(body).inspect_err(|error| tracing::error!("an answer could not be written: {error}")).ok()
}

fn respond(status: StatusCode, text: Option<String>) -> Response {
    let (status, text) = text.map_or((StatusCode::INTERNAL_SERVER_ERROR, String::new()), |text| (status, text));
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
