//! Converts the engine's types to wire types.

use std::sync::Arc;

use eddyline_engine::{Assignment, RunInfo, StepInfo};
use eddyline_language::definition;
use eddyline_language::time::{iso, span};
use eddyline_machine::view::{AttemptState, AttemptView};
use eddyline_machine::{Data, Millis, OnConflict, Retry, Unique};
use eddyline_protocol as wire;
use eddyline_store::Summary;
use serde_json::{Map, Value, json};

pub(crate) fn problem(problem: &definition::Problem) -> wire::Problem {
    wire::Problem {
        path: problem.path.clone(),
        message: problem.message.clone(),
        help: problem.help.clone(),
        line: Some(problem.line),
        column: Some(problem.column),
    }
}

pub(crate) fn failure(failure: eddyline_machine::Failure) -> wire::Failure {
    wire::Failure {
        kind: failure.kind,
        message: failure.message,
        stack: failure.stack,
        step: failure.step,
        also: failure.also.into_iter().map(self::failure).collect(),
    }
}

/// The error shown for a quarantined run, which has not ended.
pub(crate) fn quarantined(suspicion: eddyline_engine::Suspicion) -> wire::Failure {
    let message =
        format!("{} processes died while handling this run; resume it to try again, or cancel it", suspicion.deaths);
    wire::Failure { kind: "Quarantined".to_owned(), message, stack: None, step: None, also: Vec::new() }
}

pub(crate) fn inner_failure(failure: wire::Failure) -> eddyline_machine::Failure {
    eddyline_machine::Failure {
        kind: failure.kind,
        message: failure.message,
        stack: failure.stack,
        step: failure.step,
        also: failure.also.into_iter().map(inner_failure).collect(),
    }
}

pub(crate) fn run_info(info: RunInfo, parent: Option<wire::ParentInfo>) -> wire::RunInfo {
    let duration_ms = duration_ms(&info.summary);
    let RunInfo { summary, status, input, output, error, emitted_events, waiting_for, attempts } = info;
    let header = summary.header;
    let after_creation = |ms: Millis| iso(summary.created_at.saturating_add(ms));
    wire::RunInfo {
        run_id: summary.run.to_string(),
        flow: header.flow,
        version: header.flow_version,
        status: status.as_str().to_owned(),
        input: input.unwrap_or_default(),
        output: output.unwrap_or_default(),
        error: error.map(failure),
        created_at: iso(summary.created_at),
        started_at: summary.started_at.map(iso),
        completed_at: summary.ended_at.map(iso),
        step_count: header.step_count,
        completed_steps: header.completed_steps,
        emitted_events,
        duration_ms,
        tags: header.tags,
        external_id: header.external_id,
        idempotency_key: header.idempotency_key,
        namespace: summary.ns.as_str().to_owned(),
        metadata: header.metadata.and_then(metadata),
        queue: header.queue,
        retry: header.code.as_ref().and_then(|code| code.retry.clone()).map(retry),
        unique: header.unique.map(unique),
        delay_until: header.delay_ms.map(after_creation),
        deadline: header.deadline_ms.map(after_creation),
        attempts: attempts.into_iter().map(attempt).collect(),
        reason: header.cancel_reason,
        build: header.code.as_ref().and_then(|code| code.build.clone()),
        priority: header.priority,
        waiting_for: waiting_for
            .into_iter()
            .map(|(activation, waits_for)| wire::WaitingActivation { activation, waits_for: json!(waits_for) })
            .collect(),
        parent,
        retry_of: header.retry_of.map(|run| run.to_string()),
        continued_as: header.continued_as.map(|run| run.to_string()),
        trimmed: summary.trimmed,
    }
}

pub(crate) fn run_summary(summary: Summary, parent: Option<wire::ParentInfo>) -> wire::RunSummary {
    use eddyline_machine::run::RunOutcome;
    let (status, duration_ms) = (summary.header.status(), duration_ms(&summary));
    let header = summary.header;
    let error = match header.outcome {
        Some(RunOutcome::Failed(error)) if status.is_end() => Some(failure(error)),
        Some(RunOutcome::Cancelled(also)) if status.is_end() => also.into_iter().next().map(failure),
        _ => None,
    };
    wire::RunSummary {
        run_id: summary.run.to_string(),
        flow: header.flow,
        version: header.flow_version,
        status: status.as_str().to_owned(),
        created_at: iso(summary.created_at),
        started_at: summary.started_at.map(iso),
        completed_at: summary.ended_at.map(iso),
        step_count: header.step_count,
        completed_steps: header.completed_steps,
        emitted_events: header.emitted_events,
        duration_ms,
        tags: header.tags,
        external_id: header.external_id,
        metadata: header.metadata.and_then(metadata),
        error,
        parent,
        retry_of: header.retry_of.map(|run| run.to_string()),
    }
}

pub(crate) fn step_info(step: StepInfo) -> wire::StepInfo {
    wire::StepInfo {
        activation: step.activation,
        step: step.step,
        kind: step.kind.to_owned(),
        status: step.status.to_owned(),
        attempts: step.attempts.into_iter().map(attempt).collect(),
        input: step.input.unwrap_or_default(),
        output: step.output.unwrap_or_default(),
        error: step.error.map(failure),
        started_at: step.started_at.map(iso),
        ended_at: step.ended_at.map(iso),
        waits_for: step.waits_for.map(|waits_for| json!(waits_for)),
        child_run_id: step.child.map(|run| run.to_string()),
        retry_at: step.retry_at,
        queue: step.queue,
    }
}

/// From the start to the end of a run, as in its `flow.completed`.
fn duration_ms(summary: &Summary) -> Option<Millis> {
    Some(summary.ended_at?.saturating_sub(summary.started_at.unwrap_or(summary.created_at)).max(0))
}

fn unique(unique: Unique) -> wire::Unique {
    let on_conflict = match unique.on_conflict {
        OnConflict::Return => wire::OnConflict::Return,
        OnConflict::Reject => wire::OnConflict::Reject,
        OnConflict::Replace => wire::OnConflict::Replace,
        OnConflict::Queue => wire::OnConflict::Queue,
    };
    wire::Unique { key: unique.key, on_conflict }
}

pub(crate) fn inner_unique(unique: wire::Unique) -> Unique {
    let on_conflict = match unique.on_conflict {
        wire::OnConflict::Return => OnConflict::Return,
        wire::OnConflict::Reject => OnConflict::Reject,
        wire::OnConflict::Replace => OnConflict::Replace,
        wire::OnConflict::Queue => OnConflict::Queue,
    };
    Unique { key: unique.key, on_conflict }
}

fn metadata(data: Data) -> Option<Map<String, Value>> {
    match data {
        Data::Json(json) => match owned(json) {
            Value::Object(fields) => Some(fields),
            _ => None,
        },
        _ => None,
    }
}

/// A retry policy as written in definitions: always `attempts`, other fields only if they differ from the default.
fn retry(retry: Retry) -> Value {
    let default = Retry::default();
    let mut written = Map::new();
    written.insert("attempts".to_owned(), retry.attempts.map_or(json!(-1), |attempts| json!(attempts)));
    let mut add = |name: &str, differs: bool, value: Value| {
        if differs {
            written.insert(name.to_owned(), value);
        }
    };
    add("initial", retry.initial_ms != default.initial_ms, json!(span(retry.initial_ms)));
    add("factor", retry.factor != default.factor, json!(retry.factor));
    add("max", retry.max_ms != default.max_ms, json!(span(retry.max_ms)));
    add("jitter", retry.jitter != default.jitter, json!(retry.jitter));
    add("non_retryable", !retry.non_retryable.is_empty(), json!(retry.non_retryable));
    Value::Object(written)
}

fn attempt(attempt: AttemptView) -> wire::AttemptInfo {
    let (status, error) = match attempt.state {
        AttemptState::Running => ("running", None),
        AttemptState::Suspended => ("suspended", None),
        AttemptState::Deferred => ("deferred", None),
        AttemptState::Released => ("released", None),
        AttemptState::Completed => ("completed", None),
        AttemptState::Failed(error) => ("failed", Some(failure(error))),
        AttemptState::Cancelled => ("cancelled", None),
    };
    wire::AttemptInfo {
        attempt: attempt.number,
        status: status.to_owned(),
        worker: attempt.worker,
        started_at: attempt.started_at.map(iso),
        ended_at: attempt.ended_at.map(iso),
        error,
    }
}

/// How much of a memo is sent with its task; the worker fetches the rest.
const INLINE_MEMO_BYTES: usize = 1 << 20;

pub(crate) fn task(assignment: Assignment) -> wire::Task {
    let kind = match assignment.kind {
        eddyline_machine::TaskKind::Step => wire::TaskKind::Step,
        eddyline_machine::TaskKind::Run => wire::TaskKind::Run,
    };
    let task_id = assignment.task_id();
    let (memo, memo_next) = match assignment.memo {
        Some(memo) => {
            let (page, next) = memo_page(memo, INLINE_MEMO_BYTES);
            (Some(page), next.or(assignment.memo_next))
        }
        None => (None, None),
    };
    wire::Task {
        task_id,
        token: assignment.token.to_string(),
        run_id: assignment.run.to_string(),
        flow: assignment.flow,
        version: assignment.version,
        step: assignment.step,
        activation: assignment.activation,
        handler: assignment.handler,
        attempt: assignment.attempt,
        kind,
        input: owned(assignment.input),
        run_input: owned(assignment.run_input),
        gate: assignment.gate.map(owned).unwrap_or_default(),
        key: assignment.key,
        intent: assignment.intent.to_string(),
        lease_ms: u64::try_from(assignment.lease_ms).unwrap_or(0),
        deadline: assignment.deadline.map(iso),
        started_at: assignment.started_at.map(iso),
        attempts: assignment.attempts,
        memo,
        memo_next,
        unwind: assignment.unwind.map(|run| wire::Unwinding {
            error: run.error.map(failure),
            reason: run.reason,
            until: run.until.map(iso),
        }),
        traceparent: assignment.traceparent,
        undo: assignment.undo,
    }
}

/// The oldest entries of a memo that fit, and the cursor of the next page if there are more.
pub(crate) fn memo_page(
    memo: serde_json::Map<String, Value>,
    limit: usize,
) -> (serde_json::Map<String, Value>, Option<u64>) {
    let mut entries: Vec<(String, Value)> = memo.into_iter().collect();
    entries.sort_by_key(|(_, entry)| entry["n"].as_u64());
    let (mut page, mut bytes, mut last) = (serde_json::Map::new(), 0, 0);
    for (name, entry) in entries {
        bytes += name.len() + entry.to_string().len();
        // At least one, so that paging makes progress.
        if bytes > limit && !page.is_empty() {
            return (page, Some(last));
        }
        last = entry["n"].as_u64().unwrap_or(0);
        page.insert(name, entry);
    }
    (page, None)
}

fn owned(value: Arc<Value>) -> Value {
    Arc::try_unwrap(value).unwrap_or_else(|shared| Value::clone(&shared))
}

pub(crate) fn millis(span: wire::Span) -> Millis {
    Millis::try_from(span.ms).unwrap_or(Millis::MAX)
}
