//! Converts the operations of reports to the engine's types.

use eddyline_language::definition::parse_retry;
use eddyline_machine::{CallOptions, ChildOptions, CodeOp, CodeWait, Data, Due, Op, Retry, Since, canonical_json};
use eddyline_protocol as wire;
use serde_json::Value;

use super::call::moment;
use super::to_wire::{inner_failure, inner_unique, millis};

/// The operation of a report. `seen` is the highest memo number that its worker has.
pub(super) fn op(op: wire::Op, seen: Option<u64>) -> Result<Op, String> {
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
        wire::Op::Release => Op::Release,
        wire::Op::Publish { name, as_name, key, payload } => {
            Op::Publish { name, as_name, key: key.map(Data::from), payload: Data::from(payload) }
        }
        wire::Op::Log(written) => Op::Log(log(written)),
        wire::Op::Progress { done, total, msg } => Op::Progress { done, total, msg },
        wire::Op::Step { name, error: Some(error), retryable, retry_after, retry, .. } => {
            let (retry_after_ms, retry) = (retry_after.map(millis), retry.map(policy).transpose()?);
            let op = CodeOp::Failed { error: inner_failure(error), retryable, retry_after_ms, retry };
            Op::Code { name, op }
        }
        wire::Op::Step { name, output, undo, .. } => {
            Op::Code { name, op: CodeOp::Done { output: Data::from(output), undo } }
        }
        wire::Op::Call { name, handler, input, queue, options } => {
            let options = call(options)?;
            Op::Code { name, op: CodeOp::Call { handler, input: Data::from(input), queue, options } }
        }
        wire::Op::Sleep { name, span, until } => Op::Code { name, op: CodeOp::Sleep { due: due(span, until)? } },
        wire::Op::Wait { name, event, key, webhook, manual, timeout, since } => {
            let wait = wait(event, key, webhook, manual, since)?;
            Op::Code { name, op: CodeOp::Wait { wait, timeout_ms: timeout.map(millis) } }
        }
        wire::Op::Child { name, flow, input, detached, options } => {
            let options = child(options)?;
            Op::Code { name, op: CodeOp::Child { flow, input: Data::from(input), detached, options } }
        }
        wire::Op::LetGo { name } => Op::LetGo { name },
        wire::Op::Unwind { error } => Op::Unwind { error: inner_failure(error.unwrap_or_default()) },
        wire::Op::Suspend => Op::Suspend { seen },
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
    let looks_back = since.is_some();
    let since = match since {
        Some(wire::Since::Ago(span)) => Since::Ago { ms: millis(span) },
        Some(wire::Since::Run(_)) | None => Since::Run,
    };
    match (event, webhook, manual) {
        (Some(name), false, false) => Ok(CodeWait::Event { name, key: key.map(Data::from), since }),
        _ if looks_back => Err("`since` goes with `event` only".to_owned()),
        (None, true, false) => Ok(CodeWait::Webhook),
        (None, false, true) => Ok(CodeWait::Manual),
        _ => Err("a wait needs one of `event`, `webhook` and `manual`".to_owned()),
    }
}

fn call(options: wire::CallOptions) -> Result<Option<Box<CallOptions>>, String> {
    let wire::CallOptions { retry, timeout, start_timeout, priority, limits, requires, key } = options;
    let options = CallOptions {
        retry: retry.map(policy).transpose()?,
        timeout_ms: timeout.map(millis),
        start_timeout_ms: start_timeout.map(millis),
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
        Some(wire::Deadline::After(span)) => Some(millis(span)),
        // The child starts later, and a replay may ask for it again: only a duration means the same then.
        Some(wire::Deadline::At(_)) => {
            return Err("the `deadline` of a child is a duration, counted from its start".to_owned());
        }
        None => None,
    };
    if unique.as_ref().is_some_and(|unique| unique.key.is_empty()) {
        return Err("the `key` of `unique` is empty".to_owned());
    }
    Ok(Some(Box::new(ChildOptions {
        external_id,
        tags,
        metadata: metadata.map(|metadata| Data::from(Value::Object(metadata))),
        queue,
        priority,
        delay_ms: delay.map(millis),
        deadline_ms,
        retry: retry.map(policy).transpose()?,
        unique: unique.map(inner_unique),
    })))
}

fn policy(written: Value) -> Result<Retry, String> {
    parse_retry(&written).map_err(|problems| {
        let told: Vec<String> = problems.0.iter().map(|found| format!("{}: {}", found.path, found.message)).collect();
        format!("`retry` is not a retry policy: {}", told.join("; "))
    })
}
