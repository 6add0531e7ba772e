//! Reports of workers. Each report is parsed separately, so that an invalid one does not affect the others.

use std::collections::{BTreeMap, BTreeSet};

use eddyline_engine::{Reported, TaskReport, TaskToken, namespace_label};
use eddyline_language::time::iso;
use eddyline_machine::{Answer, Decision, Op, ReportResult};
use eddyline_protocol::{Report, ReportOutcome, Verdict};
use eddyline_store::Namespace;
use serde::Deserialize;
use serde_json::Value;

use super::item_errors::ItemErrors;
use super::report_op::op;

/// Parsed reports, each with its position in the request.
pub(crate) struct ReadReports {
    /// One per report of the request, in order; filled in as results arrive.
    outcomes: Vec<ReportOutcome>,
    /// The positions of the reports that go to the engine.
    places: Vec<usize>,
    pub reports: Vec<TaskReport>,
    /// The tasks of code runs among them.
    pub code: BTreeMap<TaskToken, CodeTaskReports>,
}

/// The reports on one task of a code run.
#[derive(Default)]
pub(crate) struct CodeTaskReports {
    /// The highest memo number that the worker has, if it sent one.
    pub seen: Option<u64>,
    reports: Vec<CodeReport>,
}

struct CodeReport {
    /// The position among the reports that go to the engine.
    place: usize,
    last: bool,
    /// The memo entry that the report is about.
    name: Option<String>,
}

impl CodeTaskReports {
    /// Whether the worker still holds the task.
    pub fn is_held(&self, reported: &[Reported]) -> bool {
        self.reports.iter().all(|report| match reported.get(report.place) {
            Some(Reported::Answer { answer: Answer::Applied(_) | Answer::Duplicate(_) | Answer::Nothing, .. }) => {
                !report.last
            }
            Some(Reported::Answer { answer: Answer::Stale | Answer::Closed, .. }) => false,
            _ => true,
        })
    }

    /// The names of reported entries that the memo already had; the worker needs their results.
    pub fn known<'a>(&'a self, reported: &[Reported]) -> Vec<&'a str> {
        let known = self.reports.iter().filter(|report| match reported.get(report.place) {
            Some(Reported::Answer { answer: Answer::Applied(result) | Answer::Duplicate(result), .. }) => result.known,
            _ => false,
        });
        known.filter_map(|report| report.name.as_deref()).collect()
    }
}

impl ReadReports {
    /// `unread` has the errors of items that failed to parse.
    pub fn new(written: Vec<Value>, mut unread: ItemErrors) -> ReadReports {
        let outcomes = Vec::with_capacity(written.len());
        let mut reading = ReadReports { outcomes, places: Vec::new(), reports: Vec::new(), code: BTreeMap::new() };
        let mut refused: BTreeSet<String> = BTreeSet::new();
        for (at, written) in written.into_iter().enumerate() {
            let task_id = written["task_id"].as_str().map(str::to_owned);
            let outcome = if task_id.as_ref().is_some_and(|task| refused.contains(task)) {
                ReportOutcome::new(task_id.unwrap_or_default(), Verdict::NotTried)
            } else {
                match unread.remove(&at).map_or_else(|| read(written), Err) {
                    Ok((report, seen)) => {
                        reading.wants_news(&report, seen);
                        reading.places.push(reading.outcomes.len());
                        reading.reports.push(report);
                        ReportOutcome::new(task_id.unwrap_or_default(), Verdict::Applied)
                    }
                    Err(message) => {
                        // A report without a task id blocks no other report.
                        refused.extend(task_id.clone());
                        let outcome = ReportOutcome::new(task_id.unwrap_or_default(), Verdict::Invalid);
                        ReportOutcome { message: Some(message), ..outcome }
                    }
                }
            };
            reading.outcomes.push(outcome);
        }
        reading
    }

    fn wants_news(&mut self, report: &TaskReport, seen: Option<u64>) {
        if report.token.activation.0 != 0 {
            return;
        }
        let of_task = self.code.entry(report.token).or_default();
        of_task.seen = of_task.seen.max(seen);
        let name = match &report.op {
            Op::Code { name, .. } | Op::Publish { as_name: Some(name), .. } => Some(name.clone()),
            _ => None,
        };
        of_task.reports.push(CodeReport { place: self.reports.len(), last: report.is_last(), name });
    }

    /// The outcome of each report, in order.
    pub fn outcomes(mut self, ns: &Namespace, reported: Vec<Reported>, hooks: &str) -> Vec<ReportOutcome> {
        for (at, reported) in self.places.into_iter().zip(reported) {
            let task_id = std::mem::take(&mut self.outcomes[at].task_id);
            self.outcomes[at] = outcome(task_id, reported, hooks);
        }
        let namespace = namespace_label(ns);
        for outcome in &self.outcomes {
            let labels = [("namespace", namespace.clone()), ("outcome", word(outcome.outcome).to_owned())];
            metrics::counter!("eddyline_reports_total", &labels).increment(1);
        }
        self.outcomes
    }
}

fn outcome(task_id: String, reported: Reported, hooks: &str) -> ReportOutcome {
    let (answer, warning) = match reported {
        Reported::NotTried => return ReportOutcome::new(task_id, Verdict::NotTried),
        Reported::Answer { answer, warning } => (answer, warning),
    };
    let outcome = match answer {
        Answer::Applied(result) => applied(task_id, result, false, hooks),
        Answer::Duplicate(result) => applied(task_id, result, true, hooks),
        Answer::Nothing => ReportOutcome::new(task_id, Verdict::Applied),
        Answer::Stale => ReportOutcome::new(task_id, Verdict::Stale),
        Answer::Closed => ReportOutcome::new(task_id, Verdict::Closed),
        Answer::Invalid(message) | Answer::Conflict(message) => {
            ReportOutcome { message: Some(message), ..ReportOutcome::new(task_id, Verdict::Invalid) }
        }
    };
    ReportOutcome { warning, ..outcome }
}

fn applied(task_id: String, result: ReportResult, repeated: bool, hooks: &str) -> ReportOutcome {
    let (decision, after_ms) = match result.decision {
        Some(Decision::Recorded) => (Some("recorded"), None),
        Some(Decision::Retry { after_ms }) => (Some("retry"), Some(u64::try_from(after_ms).unwrap_or(0))),
        Some(Decision::Failed) => (Some("failed"), None),
        None => (None, None),
    };
    ReportOutcome {
        duplicate: repeated || result.known,
        decision: decision.map(str::to_owned),
        after_ms,
        url: result.token.as_ref().map(|token| format!("{hooks}{token}")),
        token: result.token,
        n: result.n,
        at: result.at.map(iso),
        ..ReportOutcome::new(task_id, Verdict::Applied)
    }
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Applied => "applied",
        Verdict::Stale => "stale",
        Verdict::Closed => "closed",
        Verdict::Invalid => "invalid",
        Verdict::NotTried => "not_tried",
    }
}

/// Parses a report, and the highest memo number its worker has.
fn read(written: Value) -> Result<(TaskReport, Option<u64>), String> {
    // serde would read a list as the fields in order.
    if !written.is_object() {
        return Err("expected a report: an object {task_id, token, op, …}".to_owned());
    }
    // serde would also accept the variant's index.
    if let Some(op) = written.get("op") {
        String::deserialize(op).map_err(|error| format!("`op`: {error}"))?;
    }
    let report: Report = serde_json::from_value(written).map_err(|error| error.to_string())?;
    let token: TaskToken = report.token.parse().map_err(|error: eddyline_engine::NotAToken| error.to_string())?;
    if token.task_id() != report.task_id {
        return Err("the token belongs to another task".to_owned());
    }
    if report.seq == Some(0) {
        return Err("`seq` starts at 1".to_owned());
    }
    let seen = report.seen;
    Ok((TaskReport { token, seq: report.seq, op: op(report.op, seen)? }, seen))
}
