//! The API: one table of routes, one file per resource.

mod acts;
mod body;
mod call;
mod connect;
pub(crate) mod counts;
mod drain_body;
mod events;
mod failure;
pub(crate) mod flows;
mod gates;
mod gauges;
mod guard;
mod handlers;
mod health;
mod hooks;
mod info;
mod instances;
mod item_errors;
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
mod report_op;
mod reports;
mod response_budget;
pub(crate) mod routes;
mod runs;
mod secrets;
mod shares;
mod slots;
mod socket_key;
mod starts;
mod steps;
mod streams;
mod tasks;
mod test_clock;
mod to_wire;
mod traceparent;
mod values;
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
use eddyline_engine::{Engine, TestClock};
use eddyline_machine::Millis;
use eddyline_protocol::Code;
use eddyline_store::Namespace;
use tokio::sync::{mpsc, watch};

use crate::serve::Settings;
use call::{ApiResult, Call};
use failure::Failure;
use keyring::Keyring;
use memory_budget::MemoryBudget;
pub(crate) use read_meter::{MayRead, ReadMeter};
use routes::{Route, routes};
use slots::{NoSlot, Slot, Slots};

/// A namespace can use one of this many parts of the memory for bodies and tasks.
const MEMORY_PARTS: u32 = 4;

/// The state shared by all requests. Cheap to clone.
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
    unsent: response_budget::ResponseBudget,
    projections: projections::ProjectionCache,
    pushed_tasks: connect::PushedTasks,
    stopping: watch::Receiver<bool>,
    /// Held by WebSockets, which outlive the connection they were upgraded from.
    open: mpsc::WeakSender<()>,
}

/// Facts about the server.
#[derive(Debug)]
pub(crate) struct About {
    /// The name of the store's kind.
    pub store: &'static str,
    pub addr: SocketAddr,
    pub public_url: String,
    /// By the store's clock.
    pub started_at: Millis,
    pub keys: bool,
    /// Only on a server with `--test-clock`.
    pub test_clock: Option<TestClock>,
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
            unsent: response_budget::ResponseBudget::new(settings.response_memory),
            projections: projections::ProjectionCache::default(),
            pushed_tasks: connect::PushedTasks::default(),
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

    /// For tasks on their way to workers.
    fn task_memory(&self) -> &MemoryBudget {
        &self.0.task_memory
    }

    fn unsent(&self) -> &response_budget::ResponseBudget {
        &self.0.unsent
    }

    fn projections(&self) -> &projections::ProjectionCache {
        &self.0.projections
    }

    fn pushed_tasks(&self) -> &connect::PushedTasks {
        &self.0.pushed_tasks
    }

    pub fn stopping(&self) -> watch::Receiver<bool> {
        self.0.stopping.clone()
    }

    pub fn long_polls(&self) -> usize {
        self.0.long_polls.taken()
    }

    /// A slot for a waiting request.
    pub fn long_poll(&self, ns: &Namespace) -> Result<LongPoll, Failure> {
        let slot = self.0.long_polls.take(ns).map_err(|no| {
            let message = match no {
                NoSlot::All => "too many requests are waiting; retry in a second".to_owned(),
                NoSlot::Share(most) => {
                    format!("the namespace has used its whole share of {most} waiting requests; retry in a second")
                }
            };
            Failure::new(Code::TooMany, message)
        })?;
        Ok(LongPoll { _slot: slot, _counted: GaugeGuard::new("eddyline_long_polls") })
    }

    /// A slot for a socket, and the sender that the socket holds while it is open.
    fn socket(&self, ns: &Namespace) -> Result<(Slot, mpsc::Sender<()>), Failure> {
        let slot = self.0.sockets.take(ns).map_err(|no| {
            let message = match no {
                NoSlot::All => "too many sockets are open".to_owned(),
                NoSlot::Share(most) => {
                    format!("the namespace has used its whole share of {most} sockets")
                }
            };
            Failure::new(Code::TooMany, message)
        })?;
        let open = self.0.open.upgrade();
        let open = open.ok_or_else(|| Failure::new(Code::Unavailable, "the server is stopping"))?;
        Ok((slot, open))
    }
}

/// Held by a request while it waits.
pub(crate) struct LongPoll {
    _slot: Slot,
    _counted: GaugeGuard,
}

/// Counts something in a gauge as long as this guard exists.
pub(crate) struct GaugeGuard(&'static str);

impl GaugeGuard {
    pub fn new(gauge: &'static str) -> GaugeGuard {
        metrics::gauge!(gauge).increment(1.0);
        GaugeGuard(gauge)
    }
}

impl Drop for GaugeGuard {
    fn drop(&mut self) {
        metrics::gauge!(self.0).decrement(1.0);
    }
}

/// Returns when the server should stop.
pub(crate) async fn stopped(stopping: &mut watch::Receiver<bool>) {
    // An error means that the sender was dropped: the server has stopped.
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
    let wrong_method = async || Failure::new(Code::MethodNotAllowed, "this method is not allowed here").response();
    let nothing = async || Failure::new(Code::NotFound, "no such path").response();
    let limit = api.about().settings.max_body;
    let taken = move |request: Request| async move { drain_body::taken_to_its_end(request, limit) };
    router.method_not_allowed_fallback(wrong_method).fallback(nothing).layer(map_request(taken))
}

/// Handles an admitted call.
async fn called(mut call: Call) -> ApiResult {
    call.refuse_unknown().await?;
    (call.route.handler)(call).await
}

/// Turns a request into its response. Logs and metrics name the route, never the path: paths may contain secrets.
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
