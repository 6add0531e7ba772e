//! Whether the server is alive, whether it can be used, and what it counts.

use std::sync::OnceLock;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::Response;
use eddyline_protocol::Code;
use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};
use serde_json::json;
use tokio::sync::watch;

use super::call::{Answer, Call, ok};
use super::failure::Failure;
use super::stopped;

/// A store that takes longer than this to say its time is not ready.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often what was observed is folded into histograms.
const UPKEEP: Duration = Duration::from_secs(5);

const FROM_THE_START: [&str; 5] = [
    "eddyline_runs_started_total",
    "eddyline_runs_ended_total",
    "eddyline_conflicts_total",
    "eddyline_duplicates_prevented_total",
    "eddyline_bugs_total",
];

/// What is counted is counted for the process, so there is one for all its servers.
static METRICS: OnceLock<Option<PrometheusHandle>> = OnceLock::new();

/// `GET /healthz`
pub(crate) async fn alive(_call: Call) -> Answer {
    ok(&json!({"status": "ok"}))
}

/// `GET /readyz`
pub(crate) async fn ready(call: Call) -> Answer {
    if *call.api.stopping().borrow() {
        return Err(Failure::new(Code::Unavailable, "the server is stopping"));
    }
    match tokio::time::timeout(PATIENCE, call.engine().now()).await {
        Ok(answered) => answered?,
        Err(_) => return Err(Failure::new(Code::Unavailable, "the store does not answer")),
    };
    ok(&json!({"status": "ready"}))
}

/// `GET /metrics`
pub(crate) async fn metrics(_call: Call) -> Answer {
    let Some(handle) = count() else {
        return Err(Failure::new(Code::Unavailable, "this process counts elsewhere"));
    };
    let mut response = Response::new(Body::from(handle.render()));
    let written = HeaderValue::from_static("text/plain; version=0.0.4");
    response.headers_mut().insert(header::CONTENT_TYPE, written);
    Ok(response)
}

/// Keeps what was counted from growing, for as long as the server is there.
pub(crate) async fn keep_counting(mut stopping: watch::Receiver<bool>) {
    let mut upkeep = tokio::time::interval(UPKEEP);
    loop {
        tokio::select! {
            _ = upkeep.tick() => {
                if let Some(handle) = count() {
                    handle.run_upkeep();
                }
            }
            () = stopped(&mut stopping) => return,
        }
    }
}

/// Begins to count, if nobody in this process did.
pub(crate) fn count() -> Option<&'static PrometheusHandle> {
    let begin = || {
        let handle = PrometheusBuilder::new().install_recorder().ok();
        // Whoever watches these wants to see that nothing has happened yet.
        for name in FROM_THE_START {
            metrics::counter!(name).increment(0);
        }
        handle
    };
    METRICS.get_or_init(begin).as_ref()
}
