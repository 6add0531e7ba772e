//! Gauges written from a census, so that a deleted queue or flow leaves no series behind.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

use eddyline_engine::{Census, WorkerStatus, namespace_label};
use eddyline_store::Namespace;

use super::counts::meaning;

/// The maximum number of queues, or flows, of a namespace with their own series; the first by name.
const NAMES: usize = 100;
/// The label of all others.
const OTHER: &str = "other";

/// The gauges of a census in the Prometheus text format.
pub(super) fn text(census: &Census) -> String {
    let mut text = String::new();
    let queues = Names::of(census.queues.iter().map(|(ns, queue)| (ns, queue.name.as_str())));
    let (mut tasks, mut oldest) = (Gauge::new("eddyline_queue_tasks"), Gauge::new("eddyline_queue_oldest_seconds"));
    for (ns, queue) in &census.queues {
        let labels = [("namespace", namespace_label(ns)), ("queue", queues.label(ns, &queue.name))];
        for (state, count) in [("ready", queue.ready), ("claimed", queue.claimed)] {
            tasks.add(labels.iter().cloned().chain([("state", state.to_owned())]), count as f64);
        }
        let waited = queue.oldest.map_or(0, |since| (census.at - since).max(0));
        oldest.most(labels, waited as f64 / 1_000.0);
    }
    let mut workers = Gauge::new("eddyline_workers");
    let mut count_workers = |ns: &Namespace, status: WorkerStatus, count: u64| {
        workers.add([("namespace", namespace_label(ns)), ("status", status.as_str().to_owned())], count as f64);
    };
    // Always present, so that 0 is visible.
    WorkerStatus::ALL.into_iter().for_each(|status| count_workers(&Namespace::default(), status, 0));
    census.workers.iter().for_each(|((ns, status), count)| count_workers(ns, *status, *count));
    let flows = Names::of(census.runs.iter().map(|going| (&going.ns, going.flow.as_str())));
    let mut runs = Gauge::new("eddyline_runs");
    for going in &census.runs {
        let flow = flows.label(&going.ns, &going.flow);
        let status = going.status.as_str().to_owned();
        runs.add([("namespace", namespace_label(&going.ns)), ("flow", flow), ("status", status)], going.count as f64);
    }
    for gauge in [tasks, oldest, workers, runs] {
        gauge.write(&mut text);
    }
    text
}

/// The names with their own series, by namespace.
struct Names<'a>(BTreeMap<&'a Namespace, BTreeSet<&'a str>>);

impl<'a> Names<'a> {
    fn of(all: impl Iterator<Item = (&'a Namespace, &'a str)>) -> Names<'a> {
        let mut names: BTreeMap<&Namespace, BTreeSet<&str>> = BTreeMap::new();
        for (ns, name) in all {
            let of_namespace = names.entry(ns).or_default();
            of_namespace.insert(name);
            if of_namespace.len() > NAMES {
                of_namespace.pop_last();
            }
        }
        Names(names)
    }

    fn label(&self, ns: &Namespace, name: &str) -> String {
        let is_counted = self.0.get(ns).is_some_and(|names| names.contains(name));
        if is_counted { name.to_owned() } else { OTHER.to_owned() }
    }
}

/// A gauge with its series by labels.
struct Gauge {
    name: &'static str,
    series: BTreeMap<String, f64>,
}

impl Gauge {
    fn new(name: &'static str) -> Gauge {
        Gauge { name, series: BTreeMap::new() }
    }

    /// Adds up values with the same labels.
    fn add(&mut self, labels: impl IntoIterator<Item = (&'static str, String)>, value: f64) {
        *self.series.entry(written(labels)).or_default() += value;
    }

    /// Takes the maximum of values with the same labels.
    fn most(&mut self, labels: impl IntoIterator<Item = (&'static str, String)>, value: f64) {
        let series = self.series.entry(written(labels)).or_default();
        *series = series.max(value);
    }

    fn write(self, text: &mut String) {
        // Writing to a `String` cannot fail.
        let _ = writeln!(text, "# HELP {0} {1}\n# TYPE {0} gauge", self.name, meaning(self.name));
        for (labels, value) in self.series {
            let _ = writeln!(text, "{}{{{labels}}} {value}", self.name);
        }
        text.push('\n');
    }
}

fn written(labels: impl IntoIterator<Item = (&'static str, String)>) -> String {
    let escaped = |value: String| value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    let labels = labels.into_iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value)));
    labels.collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use eddyline_machine::Status;
    use eddyline_store::{GoingRuns, QueueState};

    use super::*;

    fn queue(name: &str, ready: usize, oldest: Option<i64>) -> (Namespace, QueueState) {
        (Namespace::default(), QueueState { name: name.to_owned(), ready, claimed: 1, oldest })
    }

    #[test]
    fn what_goes_on_is_written_as_gauges() {
        let ns = Namespace::default();
        let census = Census {
            at: 10_000,
            queues: vec![queue("a\"b", 3, Some(7_500)), queue("idle", 0, None)],
            workers: BTreeMap::from([((ns.clone(), WorkerStatus::Online), 2)]),
            runs: vec![GoingRuns { ns, flow: "f".to_owned(), status: Status::Waiting, count: 7 }],
        };
        let text = text(&census);
        for line in [
            "# TYPE eddyline_queue_tasks gauge",
            r#"eddyline_queue_tasks{namespace="default",queue="a\"b",state="ready"} 3"#,
            r#"eddyline_queue_tasks{namespace="default",queue="idle",state="claimed"} 1"#,
            r#"eddyline_queue_oldest_seconds{namespace="default",queue="a\"b"} 2.5"#,
            r#"eddyline_queue_oldest_seconds{namespace="default",queue="idle"} 0"#,
            r#"eddyline_workers{namespace="default",status="online"} 2"#,
            r#"eddyline_workers{namespace="default",status="offline"} 0"#,
            r#"eddyline_runs{namespace="default",flow="f",status="waiting"} 7"#,
        ] {
            assert!(text.lines().any(|written| written == line), "no line {line} in\n{text}");
        }
    }

    #[test]
    fn names_beyond_the_limit_are_counted_together() {
        let queues = (0..NAMES + 50).map(|n| queue(&format!("q{n:04}"), 1, Some(0))).collect();
        let text = text(&Census { at: 5_000, queues, ..Census::default() });
        let ready = text.lines().filter(|line| line.contains("state=\"ready\"")).count();
        assert_eq!(ready, NAMES + 1);
        assert!(
            text.contains("eddyline_queue_tasks{namespace=\"default\",queue=\"other\",state=\"ready\"} 50"),
            "{text}"
        );
        assert!(text.contains("eddyline_queue_oldest_seconds{namespace=\"default\",queue=\"other\"} 5"), "{text}");
    }
}
