//! The API: one table of routes, one file a resource.

mod acts;
mod apart;
mod body;
mod call;
mod connect;
pub(crate) mod counts;
mod events;
mod failure;
pub(crate) mod flows;
mod gates;
mod gauges;
mod guard;
mod health;
mod hooks;
mod info;
pub(crate) mod keyring;
mod keys;
mod known_fields;
mod limits;
mod memory_budget;
mod namespaces;
mod parameters;
mod projections;
mod queues;
mod read_meter;
mod reports;
pub(crate) mod routes;
mod runs;
mod secrets;
mod shares;
mod slots;
mod starts;
mod steps;
mod streams;
mod tasks;
mod traceparent;
mod unread;
mod unsent;
mod values;
mod wording;
mod words;
mod workers;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::rejection::RawPathParamsRejection;
use axum::extract::{RawPathParams, Request};
use axum::middleware::map_request;
use axum::response::Response;
use axum::routing::{MethodFilter, on};
use eddyline_engine::Engine;
use eddyline_machine::Millis;
use eddyline_protocol::Code;
use eddyline_store::Namespace;
use tokio::sync::{mpsc, watch};

use crate::serve::Settings;
use call::{Answer, Call};
use failure::Failure;
use keyring::Keyring;
use memory_budget::MemoryBudget;
pub(crate) use read_meter::{MayRead, ReadMeter};
use routes::{Route, routes};
use slots::{NoSlot, Slot, Slots};

/// Of what bodies and tasks may take, a namespace may use one of so many parts.
const MEMORY_PARTS: u32 = 4;

/// What every request has at hand. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Api(Arc<Inner>);

struct Inner {
    engine: Engine,
    about: About,
    keyring: Keyring,
    long_polls: Slots,
    sockets: Slots,
    bodies: MemoryBudget,
    task_memory: MemoryBudget,
    unsent: unsent::Unsent,
    projections: projections::ProjectionCache,
    left: connect::Left,
    stopping: watch::Receiver<bool>,
    /// Held by sockets, which outlive the connection that they were made from.
    open: mpsc::WeakSender<()>,
}

/// What a server knows of itself.
#[derive(Debug)]
pub(crate) struct About {
    /// The word for the kind of its store.
    pub store: &'static str,
    pub addr: SocketAddr,
    pub public_url: String,
    /// By the store's clock.
    pub started_at: Millis,
    pub keys: bool,
    pub settings: Settings,
}

impl Api {
    pub fn new(engine: Engine, about: About, stopping: watch::Receiver<bool>, open: mpsc::Sender<()>) -> Api {
        let settings = &about.settings;
        Api(Arc::new(Inner {
            keyring: Keyring::new(engine.clone()),
            long_polls: Slots::new(settings.max_long_polls),
            sockets: Slots::new(settings.max_connections),
            bodies: MemoryBudget::new(settings.body_memory, MEMORY_PARTS),
            task_memory: MemoryBudget::new(settings.task_memory, MEMORY_PARTS),
            unsent: unsent::Unsent::new(settings.response_memory),
            projections: projections::ProjectionCache::default(),
            left: connect::Left::default(),
            engine,
            about,
            stopping,
            open: open.downgrade(),
        }))
    }

    pub fn engine(&self) -> &Engine {
        &self.0.engine
    }

    pub fn about(&self) -> &About {
        &self.0.about
    }

    pub fn keyring(&self) -> &Keyring {
        &self.0.keyring
    }

    fn bodies(&self) -> &MemoryBudget {
        &self.0.bodies
    }

    /// For tasks that are on their way to workers.
    fn task_memory(&self) -> &MemoryBudget {
        &self.0.task_memory
    }

    fn unsent(&self) -> &unsent::Unsent {
        &self.0.unsent
    }

    fn projections(&self) -> &projections::ProjectionCache {
        &self.0.projections
    }

    fn left(&self) -> &connect::Left {
        &self.0.left
    }

    pub fn stopping(&self) -> watch::Receiver<bool> {
        self.0.stopping.clone()
    }

    pub fn long_polls(&self) -> usize {
        self.0.long_polls.taken()
    }

    /// Room for a request of a namespace that waits.
    pub fn long_poll(&self, ns: &Namespace) -> Result<LongPoll, Failure> {
        let slot = self.0.long_polls.take(ns).map_err(|no| {
            let message = match no {
                NoSlot::All => "too many requests wait already; come back in a second".to_owned(),
                NoSlot::Share(most) => format!(
                    "the namespace has used its share of waiting requests: {most} wait already; come back in a second"
                ),
            };
            Failure::new(Code::TooMany, message)
        })?;
        Ok(LongPoll { _slot: slot, _counted: Counted::new("eddyline_long_polls") })
    }

    /// Room for a socket of a namespace, and what tells the server that it is open.
    fn socket(&self, ns: &Namespace) -> Result<(Slot, mpsc::Sender<()>), Failure> {
        let slot = self.0.sockets.take(ns).map_err(|no| {
            let message = match no {
                NoSlot::All => "too many sockets are open already".to_owned(),
                NoSlot::Share(most) => {
                    format!("the namespace has used its share of sockets: {most} are open already")
                }
            };
            Failure::new(Code::TooMany, message)
        })?;
        let open = self.0.open.upgrade();
        let open = open.ok_or_else(|| Failure::new(Code::Unavailable, "the server is stopping"))?;
        Ok((slot, open))
    }
}

/// A request that waits, for as long as it does.
pub(crate) struct LongPoll {
    _slot: Slot,
    _counted: Counted,
}

/// Something that there is a number of: counted for as long as it is there, however it ends.
pub(crate) struct Counted(&'static str);

impl Counted {
    pub fn new(gauge: &'static str) -> Counted {
        metrics::gauge!(gauge).increment(1.0);
        Counted(gauge)
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        metrics::gauge!(self.0).decrement(1.0);
    }
}

/// Returns when the server is to stop.
pub(crate) async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // Whoever could say so is gone as well: it has stopped.
    let _ = stopping.wait_for(|stopping| *stopping).await;
}

pub(crate) fn router(api: Api) -> Router {
    let mut router = Router::new();
    for route in routes() {
        let Ok(filter) = MethodFilter::try_from(route.method.clone()) else { continue };
        let api = api.clone();
        let handler = move |params: Result<RawPathParams, RawPathParamsRejection>, request: Request| {
            answer(api.clone(), route, params.ok(), request)
        };
        router = router.route(route.path, on(filter, handler));
    }
    let wrong_method = async || Failure::new(Code::MethodNotAllowed, "this path has no such method").response();
    let nothing = async || Failure::new(Code::NotFound, "there is nothing at this path").response();
    let limit = api.about().settings.max_body;
    let taken = move |request: Request| async move { unread::taken_to_its_end(request, limit) };
    router.method_not_allowed_fallback(wrong_method).fallback(nothing).layer(map_request(taken))
}

/// What comes of a call that was let in.
async fn called(mut call: Call) -> Answer {
    call.refuse_unknown().await?;
    (call.route.handler)(call).await
}

/// From a request to its response. Logs and metrics name the route, never the path: paths may hold secrets.
async fn answer(api: Api, route: &'static Route, params: Option<RawPathParams>, request: Request) -> Response {
    let since = Instant::now();
    let (ns, answered) = match guard::admit(&api, route, request.headers()).await {
        Ok(caller) => (caller.ns.clone(), called(Call::new(api.clone(), route, caller, params, request)).await),
        Err(failure) => (Namespace::default(), Err(failure)),
    };
    let response = api.0.unsent.hold(&ns, answered.unwrap_or_else(|failure| failure.response())).await;
    let (took, status) = (since.elapsed(), response.status().as_u16());
    let labels = [("method", route.method.to_string()), ("route", route.path.to_owned())];
    metrics::histogram!("eddyline_http_seconds", &labels).record(took.as_secs_f64());
    let [method, path] = labels;
    metrics::counter!("eddyline_http_requests_total", &[method, path, ("status", status.to_string())]).increment(1);
    let instance = &api.about().settings.instance;
    tracing::debug!(instance, method = %route.method, route = route.path, status, ms = took.as_millis() as u64, "request");
    response
}
