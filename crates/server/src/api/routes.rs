//! The table of all routes. It builds the router and decides who may call what; tests compare it with `openapi.json`.

use axum::http::Method;
use eddyline_protocol::Scope;
use futures_util::future::BoxFuture;

use super::call::{ApiResult, Call};
use super::{
    acts, connect, counts, events, flows, gates, handlers, health, hooks, info, instances, keys, limits, namespaces,
    queues, runs, starts, steps, streams, tasks, test_clock, values, workers,
};

/// A route.
#[derive(Debug)]
pub struct Route {
    pub method: Method,
    /// With `{name}` for path parameters.
    pub path: &'static str,
    pub access: Access,
    pub(crate) handler: fn(Call) -> BoxFuture<'static, ApiResult>,
}

impl Route {
    /// Whether unknown fields and parameters are refused. They are on every route that people write requests for.
    /// Workers may use an older or newer SDK, and open routes are called by programs that know nothing of Eddyline.
    pub(crate) fn refuses_unknown(&self) -> bool {
        !matches!(self.access, WORKER | Access::Open)
    }
}

/// Who may call a route when keys are on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// Everyone.
    Open,
    /// Any key.
    Key,
    /// A key with this scope, or `admin`.
    Needs(Scope),
    /// A key with one of these scopes, or `admin`.
    Either(Scope, Scope),
}

const READ: Access = Access::Needs(Scope::Read);
const START: Access = Access::Needs(Scope::Start);
const SIGNAL: Access = Access::Needs(Scope::Signal);
const WORKER: Access = Access::Needs(Scope::Worker);
const ADMIN: Access = Access::Needs(Scope::Admin);
const READ_OR_SIGNAL: Access = Access::Either(Scope::Read, Scope::Signal);

macro_rules! routes {
    ($($method:ident $path:literal $access:expr, $handler:path;)*) => {
        &[$(Route {
            method: Method::$method,
            path: $path,
            access: $access,
            handler: |call| Box::pin($handler(call)),
        },)*]
    };
}

pub fn routes() -> &'static [Route] {
    ROUTES
}

static ROUTES: &[Route] = routes! {
    GET    "/healthz"                                        Access::Open, health::alive;
    GET    "/readyz"                                         Access::Open, health::ready;
    GET    "/metrics"                                        READ, counts::show;
    GET    "/openapi.json"                                   Access::Open, info::openapi;
    GET    "/v1/info"                                        Access::Key, info::info;
    GET    "/v1/instances"                                   ADMIN, instances::list;
    POST   "/v1/test/clock"                                  START, test_clock::set;

    GET    "/v1/flows"                                       READ, flows::list;
    GET    "/v1/flows/{name}"                                READ, flows::show;
    PUT    "/v1/flows/{name}"                                START, flows::register;
    DELETE "/v1/flows/{name}"                                START, flows::delete;
    GET    "/v1/flows/{name}/builds"                         READ, flows::builds;
    POST   "/v1/flows/{name}/runs"                           START, starts::start;

    POST   "/v1/runs/batch"                                  START, starts::batch;
    GET    "/v1/runs"                                        READ, runs::list;
    GET    "/v1/runs/{id}"                                   READ, runs::show;
    DELETE "/v1/runs/{id}"                                   START, runs::delete;
    GET    "/v1/quarantine"                                  READ, runs::quarantined;
    GET    "/v1/runs/{id}/result"                            READ, runs::result;
    GET    "/v1/runs/{id}/steps"                             READ, steps::list;
    GET    "/v1/runs/{id}/values/{key}"                      READ, values::show;
    POST   "/v1/runs/{id}/cancel"                            START, acts::cancel;
    POST   "/v1/runs/{id}/pause"                             START, acts::pause;
    POST   "/v1/runs/{id}/resume"                            START, acts::resume;
    POST   "/v1/runs/{id}/unpin"                             START, acts::unpin;
    POST   "/v1/runs/{id}/retry"                             START, acts::retry;
    POST   "/v1/runs/{id}/rerun"                             START, acts::rerun;
    POST   "/v1/runs/{id}/steps/{activation}/complete"       START, steps::complete;
    POST   "/v1/runs/{id}/steps/{activation}/fail"           START, steps::fail;
    POST   "/v1/runs/{id}/steps/{activation}/skip"           START, steps::skip;
    POST   "/v1/runs/{id}/steps/{activation}/retry"          START, steps::retry;

    GET    "/v1/streams/{stream}"                            READ, streams::read;
    POST   "/v1/events"                                      SIGNAL, events::publish;
    GET    "/v1/events/{id}"                                 READ_OR_SIGNAL, events::show;
    DELETE "/v1/events/{id}"                                 SIGNAL, events::delete;
    GET    "/v1/gates"                                       READ_OR_SIGNAL, gates::list;
    POST   "/v1/gates/{gate}"                                SIGNAL, gates::open;
    DELETE "/v1/gates/{gate}"                                SIGNAL, gates::cancel;
    POST   "/hooks/{token}"                                  Access::Open, hooks::open;

    GET    "/v1/handlers"                                    READ, handlers::list;
    POST   "/v1/workers"                                     WORKER, workers::register;
    GET    "/v1/workers"                                     READ, workers::list;
    GET    "/v1/workers/connect"                             WORKER, connect::connect;
    GET    "/v1/workers/{id}"                                READ, workers::one;
    POST   "/v1/workers/{id}/heartbeat"                      WORKER, workers::heartbeat;
    POST   "/v1/workers/{id}/drain"                          WORKER, workers::drain;
    DELETE "/v1/workers/{id}"                                WORKER, workers::leave;
    POST   "/v1/tasks/claim"                                 WORKER, tasks::claim;
    POST   "/v1/tasks/report"                                WORKER, tasks::report;
    GET    "/v1/tasks/{id}/memo"                             WORKER, tasks::memo;

    GET    "/v1/queues"                                      READ, queues::list;
    PUT    "/v1/queues/{name}"                               ADMIN, queues::set;
    POST   "/v1/queues/{name}/pause"                         ADMIN, queues::pause;
    POST   "/v1/queues/{name}/resume"                        ADMIN, queues::resume;
    GET    "/v1/limits"                                      READ, limits::list;
    PUT    "/v1/limits/{name}"                               ADMIN, limits::set;
    DELETE "/v1/limits/{name}"                               ADMIN, limits::delete;
    GET    "/v1/keys"                                        ADMIN, keys::list;
    POST   "/v1/keys"                                        ADMIN, keys::create;
    DELETE "/v1/keys/{id}"                                   ADMIN, keys::revoke;
    GET    "/v1/namespaces"                                  ADMIN, namespaces::list;
    POST   "/v1/namespaces"                                  ADMIN, namespaces::create;
    GET    "/v1/namespaces/{name}"                           ADMIN, namespaces::show;
    PATCH  "/v1/namespaces/{name}"                           ADMIN, namespaces::change;
};
