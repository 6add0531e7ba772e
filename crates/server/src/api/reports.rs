//! What workers say of their tasks, each report read for itself: a bad one does not sink the others.

use std::collections::BTreeSet;

use eddyline_engine::{Reported, TaskReport, TaskToken};
use eddyline_machine::{Answer, CodeOp, CodeWait, Data, Decision, Due, Op, Said};
use eddyline_protocol as wire;
use eddyline_protocol::{Outcome, Report, Verdict};
use serde_json::Value;

use super::call::moment;
use super::words::{inner_failure, millis};

/// Reports that were read, with the place of each among those that were sent.
pub(crate) struct Reading {
    /// In the order in which they were sent: what is known of each already.
    outcomes: Vec<Outcome>,
    /// The places of those that go to the engine.
    places: Vec<usize>,
    pub reports: Vec<TaskReport>,
}

impl Reading {
    pub fn new(written: Vec<Value>) -> Reading {
        let mut reading =
            Reading { outcomes: Vec::with_capacity(written.len()), places: Vec::new(), reports: Vec::new() };
        let mut refused: BTreeSet<String> = BTreeSet::new();
        for written in written {
            let task_id = written["task_id"].as_str().unwrap_or_default().to_owned();
            let outcome = if refused.contains(&task_id) {
                outcome(task_id, Verdict::NotTried)
            } else {
                match read(written) {
                    Ok(report) => {
                        reading.places.push(reading.outcomes.len());
                        reading.reports.push(report);
                        outcome(task_id, Verdict::Applied)
                    }
                    Err(message) => {
                        refused.insert(task_id.clone());
                        Outcome { message: Some(message), ..outcome(task_id, Verdict::Invalid) }
                    }
                }
            };
            reading.outcomes.push(outcome);
        }
        reading
    }

    /// The tasks of code runs that are reported on.
    pub fn code_tasks(&self) -> Vec<TaskToken> {
        let mut tokens: Vec<TaskToken> =
            self.reports.iter().map(|report| report.token).filter(|token| token.activation.0 == 0).collect();
        tokens.sort();
        tokens.dedup();
        tokens
    }

    /// What came of each, in their order.
    pub fn outcomes(mut self, reported: Vec<Reported>, hooks: &str) -> Vec<Outcome> {
        for (at, reported) in self.places.into_iter().zip(reported) {
            let task_id = std::mem::take(&mut self.outcomes[at].task_id);
            self.outcomes[at] = said(task_id, reported, hooks);
        }
        for outcome in &self.outcomes {
            metrics::counter!("eddyline_reports_total", "outcome" => word(outcome.outcome)).increment(1);
        }
        self.outcomes
    }
}

/// Whether a report is the last one on its task.
pub(crate) fn is_last(op: &Op) -> bool {
    matches!(op, Op::Complete { .. } | Op::Fail { .. } | Op::Defer { .. } | Op::Suspend { .. } | Op::ContinueAs { .. })
}

fn said(task_id: String, reported: Reported, hooks: &str) -> Outcome {
    let answer = match reported {
        Reported::NotTried => return outcome(task_id, Verdict::NotTried),
        Reported::Answer(answer) => answer,
    };
    match answer {
        Answer::Applied(said) => applied(task_id, said, false, hooks),
        Answer::Duplicate(said) => applied(task_id, said, true, hooks),
        Answer::Nothing => outcome(task_id, Verdict::Applied),
        Answer::Stale => outcome(task_id, Verdict::Stale),
        Answer::Closed => outcome(task_id, Verdict::Closed),
        Answer::Invalid(message) | Answer::Conflict(message) => {
            Outcome { message: Some(message), ..outcome(task_id, Verdict::Invalid) }
        }
    }
}

fn applied(task_id: String, said: Said, repeated: bool, hooks: &str) -> Outcome {
    let (decision, after_ms) = match said.decision {
        Some(Decision::Recorded) => (Some("recorded"), None),
        Some(Decision::Retry { after_ms }) => (Some("retry"), Some(u64::try_from(after_ms).unwrap_or(0))),
        Some(Decision::Failed) => (Some("failed"), None),
        None => (None, None),
    };
    Outcome {
        duplicate: repeated || said.known,
        decision: decision.map(str::to_owned),
        after_ms,
        url: said.token.as_ref().map(|token| format!("{hooks}{token}")),
        token: said.token,
        ..outcome(task_id, Verdict::Applied)
    }
}

fn outcome(task_id: String, outcome: Verdict) -> Outcome {
    let (message, decision, after_ms, token, url) = (None, None, None, None, None);
    Outcome { task_id, outcome, duplicate: false, message, decision, after_ms, token, url }
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

fn read(written: Value) -> Result<TaskReport, String> {
    let report: Report = serde_json::from_value(written).map_err(|error| error.to_string())?;
    let token: TaskToken = report.token.parse().map_err(|error: eddyline_engine::NotAToken| error.to_string())?;
    if token.task_id() != report.task_id {
        return Err("the token is another task's".to_owned());
    }
    if report.seq == Some(0) {
        return Err("`seq` counts from 1".to_owned());
    }
    Ok(TaskReport { token, seq: report.seq, op: op(report.op)? })
}

fn op(op: wire::Op) -> Result<Op, String> {
    Ok(match op {
        wire::Op::Complete { output, emits, logs } => Op::Complete {
            output: Data::from(output),
            emits: emits.into_iter().map(|emit| (emit.event, Data::from(emit.payload))).collect(),
            logs: logs.into_iter().map(log).collect(),
        },
        wire::Op::Fail { error, retryable, retry_after } => {
            Op::Fail { error: inner_failure(error), retryable, retry_after_ms: retry_after.map(millis) }
        }
        wire::Op::Defer { after, limit } => Op::Defer { after_ms: millis(after), limit },
        wire::Op::Emit(emit) => Op::Emit { event: emit.event, payload: Data::from(emit.payload) },
        wire::Op::Publish { name, key, payload } => {
            Op::Publish { name, key: key.map(Data::from), payload: Data::from(payload) }
        }
        wire::Op::Log(written) => Op::Log(log(written)),
        wire::Op::Progress { done, total, msg } => Op::Progress { done, total, msg },
        wire::Op::Step { name, error: Some(error), retryable, retry_after, .. } => {
            let retry_after_ms = retry_after.map(millis);
            Op::Code { name, op: CodeOp::Failed { error: inner_failure(error), retryable, retry_after_ms } }
        }
        wire::Op::Step { name, output, .. } => Op::Code { name, op: CodeOp::Done { output: Data::from(output) } },
        wire::Op::Call { name, handler, input, queue } => {
            Op::Code { name, op: CodeOp::Call { handler, input: Data::from(input), queue } }
        }
        wire::Op::Sleep { name, span, until } => Op::Code { name, op: CodeOp::Sleep { due: due(span, until)? } },
        wire::Op::Wait { name, event, key, webhook, manual, timeout } => {
            let wait = wait(event, key, webhook, manual)?;
            Op::Code { name, op: CodeOp::Wait { wait, timeout_ms: timeout.map(millis) } }
        }
        wire::Op::Child { name, flow, input, detached } => {
            Op::Code { name, op: CodeOp::Child { flow, input: Data::from(input), detached } }
        }
        wire::Op::Suspend { seen } => Op::Suspend { seen },
        wire::Op::Continue { input } => Op::ContinueAs { input: Data::from(input) },
    })
}

fn log(log: wire::Log) -> eddyline_machine::Log {
    eddyline_machine::Log { level: log.level, msg: log.msg, meta: log.meta.map(Data::from) }
}

fn due(span: Option<wire::Span>, until: Option<String>) -> Result<Due, String> {
    match (span, until) {
        (Some(span), None) => Ok(Due::After(millis(span))),
        (None, Some(until)) => {
            moment(&until).map(Due::At).ok_or_else(|| "`until` is not a time such as 2026-01-02T03:04:05Z".to_owned())
        }
        _ => Err("a sleep has either `for` or `until`".to_owned()),
    }
}

fn wait(event: Option<String>, key: Option<Value>, webhook: bool, manual: bool) -> Result<CodeWait, String> {
    match (event, webhook, manual) {
        (Some(name), false, false) => Ok(CodeWait::Event { name, key: key.map(Data::from) }),
        (None, true, false) => Ok(CodeWait::Webhook),
        (None, false, true) => Ok(CodeWait::Manual),
        _ => Err("a wait is for one of `event`, `webhook` and `manual`".to_owned()),
    }
}
