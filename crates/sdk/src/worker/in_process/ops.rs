//! Converts reports to the engine's types, and its answers back.

use eddyline_language::definition::parse_retry;
use eddyline_language::time::iso;
use eddyline_machine as machine;
use eddyline_machine::{
    Answer, CallOptions, ChildOptions, CodeOp, CodeWait, Data, Decision, Due, ReportResult, Since, canonical_json,
};
use eddyline_protocol as wire;
use eddyline_protocol::{Op, ReportOutcome, Verdict};
use serde_json::Value;

use crate::code::time::millis;

/// Converts an operation to the engine's type. `seen` is the highest memo number that the worker has.
pub(super) fn op(of: &Op, seen: Option<u64>) -> Result<machine::Op, String> {
    let of = of.clone();
    Ok(match of {
        Op::Complete { output, emits, logs } => machine::Op::Complete {
            output: Data::from(output),
            emits: emits.into_iter().map(|emit| (emit.event, Data::from(emit.payload))).collect(),
            logs: logs.into_iter().map(log).collect(),
        },
        Op::Fail { error, retryable, retry_after } => {
            machine::Op::Fail { error: failure(error), retryable, retry_after_ms: retry_after.map(ms) }
        }
        Op::Defer { after, limit } => machine::Op::Defer { after_ms: ms(after), limit },
        Op::Emit(emit) => machine::Op::Emit { event: emit.event, payload: Data::from(emit.payload) },
        Op::Release => machine::Op::Release,
        Op::Publish { name, as_name, key, payload } => {
            machine::Op::Publish { name, as_name, key: key.map(Data::from), payload: Data::from(payload) }
        }
        Op::Log(line) => machine::Op::Log(log(line)),
        Op::Progress { done, total, msg } => machine::Op::Progress { done, total, msg },
        Op::Step { name, error: Some(error), retryable, retry_after, retry, .. } => {
            let (retry_after_ms, retry) = (retry_after.map(ms), retry.map(policy).transpose()?);
            let op = CodeOp::Failed { error: failure(error), retryable, retry_after_ms, retry };
            machine::Op::Code { name, op }
        }
        Op::Step { name, output, undo, .. } => {
            machine::Op::Code { name, op: CodeOp::Done { output: Data::from(output), undo } }
        }
        Op::Call { name, handler, input, queue, options } => {
            let options = call(options)?;
            machine::Op::Code { name, op: CodeOp::Call { handler, input: Data::from(input), queue, options } }
        }
        Op::Sleep { name, span, until } => machine::Op::Code { name, op: CodeOp::Sleep { due: due(span, until)? } },
        Op::Wait { name, event, key, webhook, manual, timeout, since } => {
            let wait = wait(event, key, webhook, manual, since)?;
            machine::Op::Code { name, op: CodeOp::Wait { wait, timeout_ms: timeout.map(ms) } }
        }
        Op::Child { name, flow, input, detached, options } => {
            let options = child(options)?;
            machine::Op::Code { name, op: CodeOp::Child { flow, input: Data::from(input), detached, options } }
        }
        Op::LetGo { name } => machine::Op::LetGo { name },
        Op::Unwind { error } => machine::Op::Unwind { error: failure(error.unwrap_or_default()) },
        Op::Suspend => machine::Op::Suspend { seen },
        Op::Continue { input } => machine::Op::ContinueAs { input: Data::from(input) },
    })
}

/// The outcome of a report, from the engine's answer.
pub(super) fn outcome(task_id: &str, answer: Answer, warning: Option<String>, hooks: &str) -> ReportOutcome {
    let bare = |verdict| ReportOutcome { warning: warning.clone(), ..ReportOutcome::new(task_id, verdict) };
    match answer {
        Answer::Applied(result) => applied(bare(Verdict::Applied), result, false, hooks),
        Answer::Duplicate(result) => applied(bare(Verdict::Applied), result, true, hooks),
        Answer::Nothing => bare(Verdict::Applied),
        Answer::Stale => bare(Verdict::Stale),
        Answer::Closed => bare(Verdict::Closed),
        Answer::Invalid(message) | Answer::Conflict(message) => {
            ReportOutcome { message: Some(message), ..bare(Verdict::Invalid) }
        }
    }
}

fn applied(of: ReportOutcome, result: ReportResult, repeated: bool, hooks: &str) -> ReportOutcome {
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
        ..of
    }
}

pub(super) fn failure(of: wire::Failure) -> machine::Failure {
    machine::Failure {
        kind: of.kind,
        message: of.message,
        stack: of.stack,
        step: of.step,
        also: of.also.into_iter().map(failure).collect(),
    }
}

pub(super) fn wire_failure(of: machine::Failure) -> wire::Failure {
    wire::Failure {
        kind: of.kind,
        message: of.message,
        stack: of.stack,
        step: of.step,
        also: of.also.into_iter().map(wire_failure).collect(),
    }
}

fn log(log: wire::Log) -> machine::Log {
    machine::Log { level: log.level, msg: log.msg, meta: log.meta.map(Data::from) }
}

fn ms(span: wire::Span) -> i64 {
    i64::try_from(span.ms).unwrap_or(i64::MAX)
}

fn due(span: Option<wire::Span>, until: Option<String>) -> Result<Due, String> {
    match (span, until) {
        (Some(span), None) => Ok(Due::After(ms(span))),
        (None, Some(until)) => millis(&until)
            .and_then(|at| i64::try_from(at).ok())
            .map(Due::At)
            .ok_or_else(|| "`until` is not a time such as 2026-01-02T03:04:05Z".to_owned()),
        _ => Err("a sleep needs either `for` or `until`".to_owned()),
    }
}

fn wait(
    event: Option<String>,
    key: Option<Value>,
    webhook: bool,
    manual: bool,
    since: Option<wire::Since>,
) -> Result<CodeWait, String> {
    let since = match since {
        Some(wire::Since::Ago(span)) => Since::Ago { ms: ms(span) },
        Some(wire::Since::Run(_)) | None => Since::Run,
    };
    match (event, webhook, manual) {
        (Some(name), false, false) => Ok(CodeWait::Event { name, key: key.map(Data::from), since }),
        (None, true, false) => Ok(CodeWait::Webhook),
        (None, false, true) => Ok(CodeWait::Manual),
        _ => Err("a wait needs one of `event`, `webhook` and `manual`".to_owned()),
    }
}

fn call(options: wire::CallOptions) -> Result<Option<Box<CallOptions>>, String> {
    let wire::CallOptions { retry, timeout, start_timeout, priority, limits, requires, key } = options;
    let options = CallOptions {
        retry: retry.map(policy).transpose()?,
        timeout_ms: timeout.map(ms),
        start_timeout_ms: start_timeout.map(ms),
        priority: priority.unwrap_or(0),
        limits: limits.into_iter().map(limit).collect::<Result<_, _>>()?,
        requires,
        key: key.map(canonical_json),
    };
    Ok((options != CallOptions::default()).then(|| Box::new(options)))
}

/// `"stripe"`, or `{"tenant": 7}`.
fn limit(written: Value) -> Result<(String, Option<String>), String> {
    match written {
        Value::String(name) => Ok((name, None)),
        Value::Object(fields) if fields.len() == 1 => {
            let (name, key) = fields.into_iter().next().unwrap_or_default();
            Ok((name, Some(canonical_json(key))))
        }
        _ => Err("`limits`: expected the name of a limit, or an object of one name with its key".to_owned()),
    }
}

fn child(options: wire::ChildOptions) -> Result<Option<Box<ChildOptions>>, String> {
    if options == wire::ChildOptions::default() {
        return Ok(None);
    }
    let wire::ChildOptions { external_id, tags, metadata, queue, priority, delay, deadline, retry, unique } = options;
    let deadline_ms = match deadline {
        Some(wire::Deadline::After(span)) => Some(ms(span)),
        Some(wire::Deadline::At(_)) => return Err("the `deadline` of a child is a duration".to_owned()),
        None => None,
    };
    if unique.is_some() {
        return Err("this worker cannot start a child with a unique key".to_owned());
    }
    Ok(Some(Box::new(ChildOptions {
        external_id,
        tags,
        metadata: metadata.map(|metadata| Data::from(Value::Object(metadata))),
        queue,
        priority,
        delay_ms: delay.map(ms),
        deadline_ms,
        retry: retry.map(policy).transpose()?,
        unique: None,
    })))
}

fn policy(written: Value) -> Result<machine::Retry, String> {
    parse_retry(&written).map_err(|problems| {
        let told: Vec<String> = problems.0.iter().map(|found| format!("{}: {}", found.path, found.message)).collect();
        format!("`retry` is not a retry policy: {}", told.join("; "))
    })
}
