//! Prometheus metrics. They are per process and shared by all servers in it.

use std::sync::OnceLock;
use std::time::Duration;

use axum::body::Body;
use axum::http::HeaderValue;
use axum::http::header::CONTENT_TYPE;
use axum::response::Response;
use eddyline_engine::LOOPS;
use eddyline_protocol::{Code, Scope};
use eddyline_store::Namespace;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::sync::watch;

use super::call::{ApiResult, Call};
use super::failure::Failure;
use super::routes::routes;
use super::{gauges, stopped};

const VERSION: &str = env!("CARGO_PKG_VERSION");

/// How often observations are folded into histograms.
const UPKEEP: Duration = Duration::from_secs(5);

/// Histogram buckets in seconds: from a tenth of a millisecond, for commits, to half a minute, for waiting requests.
const SECONDS: [f64; 17] =
    [0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];
const SIZES: [f64; 10] = [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0];

enum Kind {
    Counter,
    Gauge,
    Histogram,
}

/// The description of a gauge.
pub(super) fn meaning(name: &str) -> &'static str {
    ALL.iter().find(|(_, known, _)| *known == name).map_or("", |(_, _, meaning)| meaning)
}

/// All metrics with their descriptions.
const ALL: &[(Kind, &str, &str)] = &[
    (Kind::Gauge, "eddyline_info", "1, with the instance, the version and the kind of store as labels."),
    (Kind::Counter, "eddyline_runs_started_total", "Runs started, including children, by namespace."),
    (Kind::Counter, "eddyline_runs_ended_total", "Runs that ended, by namespace and status."),
    (Kind::Counter, "eddyline_tasks_claimed_total", "Tasks handed to workers, by namespace."),
    (Kind::Counter, "eddyline_reports_total", "Reports of workers, by namespace and outcome."),
    (
        Kind::Counter,
        "eddyline_attempts_expired_total",
        "Attempts whose lease or timeout expired before their final report.",
    ),
    (Kind::Counter, "eddyline_duplicates_prevented_total", "Repeated starts and reports that had no further effect."),
    (
        Kind::Counter,
        "eddyline_conflicts_total",
        "Commits refused because another one came first; the decision is repeated.",
    ),
    (
        Kind::Counter,
        "eddyline_starts_refused_total",
        "Starts refused because too many tasks are waiting, by namespace.",
    ),
    (Kind::Counter, "eddyline_runs_trimmed_total", "Runs or timelines deleted by retention."),
    (Kind::Counter, "eddyline_timers_late_total", "Late timers found by the reconciler. Should stay 0."),
    (Kind::Counter, "eddyline_reconciled_total", "Stalled work that the reconciler resumed. Should stay 0."),
    (Kind::Counter, "eddyline_loop_errors_total", "Failed background work that is retried, by loop."),
    (
        Kind::Counter,
        "eddyline_loop_panics_total",
        "Panics in background work, by loop. Should stay 0; please report it.",
    ),
    (Kind::Counter, "eddyline_bugs_total", "Decisions refused as impossible. Should stay 0; please report it."),
    (Kind::Counter, "eddyline_heavy_decisions_total", "Decisions made on a blocking thread because they take long."),
    (Kind::Gauge, "eddyline_heavy_decisions_waiting", "Runs waiting for such a thread."),
    (Kind::Counter, "eddyline_records_folded_total", "Records read to show steps, projections and their counts."),
    (Kind::Gauge, "eddyline_cached_runs_bytes", "Approximate memory used by cached runs."),
    (Kind::Gauge, "eddyline_queue_tasks", "Tasks, by namespace, queue and state: `ready` for a worker, or `claimed`."),
    (
        Kind::Gauge,
        "eddyline_queue_oldest_seconds",
        "How long the oldest task has been waiting, by namespace and queue.",
    ),
    (Kind::Gauge, "eddyline_workers", "Workers, by namespace and status."),
    (Kind::Gauge, "eddyline_runs", "Runs that have not ended, by namespace, flow and status."),
    (Kind::Histogram, "eddyline_start_to_claim_seconds", "From the start of a run until its first task is claimed."),
    (
        Kind::Histogram,
        "eddyline_claim_to_report_seconds",
        "From the claim of a task until its final report is applied.",
    ),
    (Kind::Histogram, "eddyline_decision_seconds", "One decision on a run, without reads and writes."),
    (Kind::Histogram, "eddyline_batch_size", "Runs in a commit; 0 if it only claims."),
    (Kind::Histogram, "eddyline_commit_seconds", "From handing a commit to the store until it is durable."),
    (Kind::Histogram, "eddyline_http_seconds", "Requests, by method and route, including requested waiting time."),
    (Kind::Counter, "eddyline_http_requests_total", "Requests, by method, route and status."),
    (Kind::Counter, "eddyline_connections_refused_total", "Connections closed immediately because too many are open."),
    (
        Kind::Counter,
        "eddyline_answers_refused_total",
        "Large responses refused because too many are waiting to be read.",
    ),
    (Kind::Counter, "eddyline_bodies_refused_total", "Bodies refused because the memory for bodies is used up."),
    (Kind::Gauge, "eddyline_connections", "Open connections."),
    (Kind::Gauge, "eddyline_long_polls", "Waiting requests."),
    (Kind::Gauge, "eddyline_sockets", "Workers connected by WebSocket."),
];

const ENDS: [&str; 3] = ["completed", "failed", "cancelled"];
const OUTCOMES: [&str; 5] = ["applied", "stale", "closed", "invalid", "not_tried"];

type Labels = Vec<(&'static str, String)>;

/// The series that a counter has from the start, so that they show 0 before anything happens. Series of other
/// namespaces and request statuses appear with their first event.
fn from_the_start(counter: &str) -> Vec<Labels> {
    let namespace = ("namespace", Namespace::default().as_str().to_owned());
    let one = |label: &'static str, of: &[&str]| -> Vec<Labels> {
        of.iter().map(|value| vec![(label, (*value).to_owned())]).collect()
    };
    let in_default = |label, of: &[&str]| -> Vec<Labels> {
        one(label, of).into_iter().map(|labels| [vec![namespace.clone()], labels].concat()).collect()
    };
    match counter {
        "eddyline_runs_started_total" | "eddyline_tasks_claimed_total" | "eddyline_starts_refused_total" => {
            vec![vec![namespace]]
        }
        "eddyline_runs_ended_total" => in_default("status", &ENDS),
        "eddyline_reports_total" => in_default("outcome", &OUTCOMES),
        "eddyline_loop_errors_total" | "eddyline_loop_panics_total" => one("loop", &LOOPS),
        "eddyline_http_requests_total" => routes()
            .iter()
            .map(|route| {
                let status = "200".to_owned();
                vec![("method", route.method.to_string()), ("route", route.path.to_owned()), ("status", status)]
            })
            .collect(),
        _ => vec![Vec::new()],
    }
}

static METRICS: OnceLock<Option<PrometheusHandle>> = OnceLock::new();

/// `GET /metrics`
pub(crate) async fn show(call: Call) -> ApiResult {
    let Some(handle) = begin() else {
        return Err(Failure::new(Code::Unavailable, "the metrics of this process are recorded elsewhere"));
    };
    let all = handle.render() + &gauges::text(&*call.engine().census().await?);
    // With keys off, every caller is an admin of `default`, whatever namespace it names.
    let sees_all = !call.api.about().keys || (call.may(Scope::Admin) && *call.ns() == Namespace::default());
    let shown = if sees_all { all } else { of_namespace(&all, call.ns().as_str()) };
    let mut response = Response::new(Body::from(shown));
    let written = HeaderValue::from_static("text/plain; version=0.0.4");
    response.headers_mut().insert(CONTENT_TYPE, written);
    Ok(response)
}

/// The series of one namespace with their descriptions. Series of the whole process would reveal other namespaces.
fn of_namespace(all: &str, ns: &str) -> String {
    let label = format!("namespace=\"{ns}\"");
    let is_own = |line: &str| {
        let labels = line.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map_or("", |(labels, _)| labels);
        labels.split(',').any(|written| written == label)
    };
    let (mut shown, mut about) = (String::new(), Vec::new());
    for line in all.lines() {
        if line.starts_with("# HELP") {
            about.clear();
        }
        if line.starts_with('#') {
            about.push(line);
        } else if is_own(line) {
            for line in about.drain(..).chain([line]) {
                shown.push_str(line);
                shown.push('\n');
            }
        }
    }
    shown
}

/// Runs the upkeep of the histograms, which keeps them from growing, until the server stops.
pub(crate) async fn keep(mut stopping: watch::Receiver<bool>) {
    let mut upkeep = tokio::time::interval(UPKEEP);
    loop {
        tokio::select! {
            _ = upkeep.tick() => {
                if let Some(handle) = begin() {
                    handle.run_upkeep();
                }
            }
            () = stopped(&mut stopping) => return,
        }
    }
}

/// Sets the labels of `eddyline_info`.
pub(crate) fn introduce(instance: &str, store: &'static str) {
    let labels = [("instance", instance.to_owned()), ("version", VERSION.to_owned()), ("store", store.to_owned())];
    metrics::gauge!("eddyline_info", &labels).set(1.0);
}

/// Installs the metrics recorder, unless this process already has one.
pub(crate) fn begin() -> Option<&'static PrometheusHandle> {
    let begin = || {
        let builder = PrometheusBuilder::new();
        let builder = builder.set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), &SECONDS).ok()?;
        let builder = builder.set_buckets_for_metric(Matcher::Suffix("_size".to_owned()), &SIZES).ok()?;
        let handle = builder.install_recorder().ok()?;
        for (kind, name, meaning) in ALL {
            match kind {
                Kind::Counter => metrics::describe_counter!(*name, *meaning),
                Kind::Gauge => metrics::describe_gauge!(*name, *meaning),
                Kind::Histogram => metrics::describe_histogram!(*name, *meaning),
            }
        }
        for (_, name, _) in ALL.iter().filter(|(kind, ..)| matches!(kind, Kind::Counter)) {
            for labels in from_the_start(name) {
                metrics::counter!(*name, &labels).increment(0);
            }
        }
        Some(handle)
    };
    METRICS.get_or_init(begin).as_ref()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_sees_its_own_series_and_what_they_mean() {
        let all = "# HELP a A.\n# TYPE a counter\na{namespace=\"one\",status=\"x\"} 1\na{namespace=\"one-2\"} 2\n\n\
                   # HELP b B.\n# TYPE b gauge\nb 3\nb{route=\"namespace\"} 4\n";
        assert_eq!(of_namespace(all, "one"), "# HELP a A.\n# TYPE a counter\na{namespace=\"one\",status=\"x\"} 1\n");
        assert_eq!(of_namespace(all, "other"), "");
    }

    #[test]
    fn whatever_is_counted_is_in_the_docs() {
        let docs = include_str!("../../../../docs/http.md");
        for (kind, name, meaning) in ALL {
            let kind = match kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
                Kind::Histogram => "histogram",
            };
            let line = format!("| `{name}` | {kind} | {meaning} |");
            assert!(docs.contains(&line), "docs/http.md has no line: {line}");
        }
    }
}
