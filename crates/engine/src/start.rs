//! Starts runs.

use std::sync::Arc;

use eddyline_language::definition::wrong_name;
use eddyline_machine::{Answer, Canonical, Data, Input, Millis, Retry, RunId, Start, Unique};
use eddyline_store::{LINE_LIMIT, Namespace, StartKey};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::committer::{Answered, InputOutcome, NewRun, Order};
use crate::config::{Config, MAX_METADATA_BYTES, MAX_PAYLOAD_DEPTH, MAX_STARTS, MAX_WAIT_MS};
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::flows::Registered;
use crate::schema::{Allowance, Mismatch};
use crate::unique::Contender;

/// When a caller may retry a start that was refused for now.
const RETRY_AFTER_MS: Millis = 1_000;

/// A request to start a run.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StartRequest {
    pub flow: String,
    pub version: Option<String>,
    pub input: Value,
    /// A label that clients choose.
    pub external_id: Option<String>,
    /// A start with the same key returns the same run while that is kept.
    pub idempotency_key: Option<String>,
    /// Stored with the run and returned with it; at most [`MAX_METADATA_BYTES`].
    pub metadata: Option<Map<String, Value>>,
    /// The queue of steps that name none; for a code flow, of its function.
    pub queue: Option<String>,
    pub tags: Vec<String>,
    pub delay_ms: Option<Millis>,
    pub deadline_ms: Option<Millis>,
    pub priority: i32,
    /// For a code flow: the retry policy of the whole function.
    pub retry: Option<Retry>,
    /// At most one run of the flow with this key runs at a time.
    pub unique: Option<Unique>,
    /// Who starts it; recorded as the canceller of runs that it replaces.
    pub by: String,
    /// The W3C `traceparent`, passed on to every task and to the runs that it starts.
    pub traceparent: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Started {
    pub run: RunId,
    /// The run existed already, with the same idempotency key or unique key.
    pub existing: bool,
    /// The size of its input in bytes, if that is large enough for a warning.
    pub large_input: Option<usize>,
}

impl Engine {
    /// Starts a run. When this returns, the start is durable. To start many runs, use [`Engine::start_batch`], which
    /// commits them together.
    pub async fn start_run(&self, ns: &Namespace, request: StartRequest) -> Result<Started> {
        let (order, starting) = self.order_start(ns, request, &mut Allowance::of_starts()).await?;
        self.committing().ask(order).await?;
        self.started(starting).await
    }

    /// Starts many runs at once, independently: a failed start does not affect the others.
    pub async fn start_batch(&self, ns: &Namespace, requests: Vec<StartRequest>) -> Result<Vec<Result<Started>>> {
        if requests.len() > MAX_STARTS {
            let (what, bytes) = ("the number of starts in one call", requests.len());
            return Err(EngineError::TooLarge { what, bytes, limit: MAX_STARTS });
        }
        let mut handed_in = Vec::with_capacity(requests.len());
        let mut allowance = Allowance::of_starts();
        for request in requests {
            let handed = match self.order_start(ns, request, &mut allowance).await {
                Ok((order, starting)) => self.committing().send(order).await.map(|()| starting),
                Err(error) => Err(error),
            };
            handed_in.push(handed);
        }
        let mut started = Vec::with_capacity(handed_in.len());
        for answer in handed_in {
            started.push(match answer {
                Ok(starting) => self.started(starting).await,
                Err(error) => Err(error),
            });
        }
        Ok(started)
    }

    async fn order_start(
        &self,
        ns: &Namespace,
        request: StartRequest,
        allowance: &mut Allowance,
    ) -> Result<(Order, Starting)> {
        let flow = self.flow(ns, &request.flow, request.version.as_deref()).await?;
        self.backlogs.admit(&*self.instance.store, &self.instance.config, ns).await?;
        let (input, bytes) = weighed(&self.instance.config, "the input", request.input)?;
        self.check_input(ns, &flow, &input, bytes, allowance).await?;
        for (what, ms) in [("the delay", request.delay_ms), ("the deadline", request.deadline_ms)] {
            ms.and_then(|ms| bad_wait(what, ms)).map_or(Ok(()), |problem| Err(EngineError::invalid(problem)))?;
        }
        let now = self.instance.store.now().await?;
        let run = self.instance.new_run(now);
        let metadata = request.metadata.map(|given| metadata(&self.instance.config, given)).transpose()?;
        check_policy(&flow, request.retry.as_ref(), request.queue.as_deref())?;
        let key = request.idempotency_key.clone().map(|key| {
            let fingerprint = fingerprint(&input, request.version.as_deref());
            StartKey { flow: flow.flow.name.clone(), key, fingerprint }
        });
        let start = Start {
            input: Some(input),
            external_id: request.external_id,
            idempotency_key: request.idempotency_key,
            metadata,
            queue: request.queue,
            unique: request.unique,
            tags: request.tags,
            priority: request.priority,
            delay_ms: request.delay_ms,
            deadline_ms: request.deadline_ms,
            retry: request.retry,
            traceparent: request.traceparent,
            ..Start::default()
        };
        let large_input = (bytes >= self.instance.config.large_payload_bytes()).then_some(bytes);
        if large_input.is_some() {
            tracing::warn!(flow = flow.flow.name, %run, bytes, "starting a run with a large input");
        }
        let new = NewRun { ns: ns.clone(), flow, key, tells_line: None };
        let contender = Contender::of(&start, &new, request.by).map(Box::new);
        let (order, starting) = order_new(run, start, new);
        Ok((order, Starting { large_input, contender, ..starting }))
    }

    /// Rejects an input that does not match the flow's `input_schema`.
    pub(crate) async fn check_input(
        &self,
        ns: &Namespace,
        flow: &Arc<Registered>,
        input: &Data,
        bytes: usize,
        allowance: &mut Allowance,
    ) -> Result<()> {
        let Data::Json(json) = input else { return Ok(()) };
        self.instance.flows.check_input(ns, flow, json, bytes, allowance).await?.map_err(|mismatch| match mismatch {
            Mismatch::Invalid(details) => {
                let message = format!("the input does not match the input_schema of {}", flow.flow.name);
                EngineError::Invalid { message, details }
            }
            // The other starts of this call used up the allowance; a new call has its own.
            Mismatch::Exhausted(message) => EngineError::TooMany { message, retry_after_ms: RETRY_AFTER_MS },
        })
    }
}

pub(crate) fn order_new(run: RunId, start: Start, new: NewRun) -> (Order, Starting) {
    let fingerprint = new.key.as_ref().map(|key| key.fingerprint);
    let key = new.key.as_ref().map(|key| key.key.clone());
    let (order, answer) = Order::submit(run, vec![Input::Start(Box::new(start))], None, Some(new));
    (order, Starting { run, key, fingerprint, large_input: None, contender: None, answer })
}

/// A submitted start.
pub(crate) struct Starting {
    pub run: RunId,
    key: Option<String>,
    fingerprint: Option<[u8; 32]>,
    pub large_input: Option<usize>,
    /// What is needed to submit it again, if it has a unique key.
    pub contender: Option<Box<Contender>>,
    answer: Answered,
}

/// The result of a start.
pub(crate) enum StartOutcome {
    Started(Started),
    /// This run holds the unique key.
    UniqueTaken(RunId),
}

impl Starting {
    pub async fn started(self) -> Result<StartOutcome> {
        let outcome = self.answer.await.map_err(|_| EngineError::Stopped)??.pop();
        let large_input = self.large_input;
        match outcome {
            Some(InputOutcome::Answered { answer: Answer::Applied(_), .. }) => {
                Ok(StartOutcome::Started(Started { run: self.run, existing: false, large_input }))
            }
            Some(InputOutcome::KeyTaken { run, fingerprint }) if Some(fingerprint) == self.fingerprint => {
                metrics::counter!("eddyline_duplicates_prevented_total").increment(1);
                Ok(StartOutcome::Started(Started { run, existing: true, large_input }))
            }
            Some(InputOutcome::KeyTaken { run, .. }) => Err(EngineError::Conflict(format!(
                "the idempotency key `{}` was already used for run {run} with another input",
                self.key.unwrap_or_default()
            ))),
            Some(InputOutcome::UniqueTaken { run }) => Ok(StartOutcome::UniqueTaken(run)),
            Some(InputOutcome::LineFull) => {
                let message = format!("{LINE_LIMIT} runs hold or wait for this unique key, which is the limit");
                Err(EngineError::TooMany { message, retry_after_ms: RETRY_AFTER_MS })
            }
            other => Err(EngineError::Bug(format!("unexpected outcome of the start of run {}: {other:?}", self.run))),
        }
    }
}

/// Checks a payload from a client against the limits.
pub(crate) fn payload(config: &Config, what: &'static str, value: Value) -> Result<Data> {
    weighed(config, what, value).map(|(data, _)| data)
}

/// The same, with the payload's size in bytes.
pub(crate) fn weighed(config: &Config, what: &'static str, value: Value) -> Result<(Data, usize)> {
    let (data, limit) = (Data::from(value), config.max_payload_bytes);
    let bytes = data.bytes(limit + 1);
    if bytes > limit {
        return Err(EngineError::TooLarge { what, bytes, limit });
    }
    if data.depth() > MAX_PAYLOAD_DEPTH {
        return Err(EngineError::invalid(format!("{what} is nested more than {MAX_PAYLOAD_DEPTH} deep")));
    }
    Ok((data, bytes))
}

/// Metadata has a lower limit: it is part of the header, which every commit of the run writes.
fn metadata(config: &Config, written: Map<String, Value>) -> Result<Data> {
    let written = Value::Object(written);
    let bytes = written.to_string().len();
    let (data, _) = weighed(config, "the metadata", written)?;
    if bytes > MAX_METADATA_BYTES {
        return Err(EngineError::TooLarge { what: "the metadata", bytes, limit: MAX_METADATA_BYTES });
    }
    Ok(data)
}

fn check_policy(flow: &Registered, retry: Option<&Retry>, queue: Option<&str>) -> Result<()> {
    if retry.is_some() && flow.flow.graph().is_some() {
        let message = format!(
            "`retry` applies to the function of a code flow, and {} is a graph; set `retry` on its steps instead",
            flow.flow.name
        );
        return Err(EngineError::invalid(message));
    }
    match queue.and_then(wrong_name) {
        Some(problem) => Err(EngineError::invalid(format!("`queue`: {problem}"))),
        None => Ok(()),
    }
}

/// Why a client's wait time is invalid, if it is.
pub(crate) fn bad_wait(what: &str, ms: Millis) -> Option<String> {
    (!(0..=MAX_WAIT_MS).contains(&ms)).then(|| format!("{what} of {ms} ms is not between 0 and ten years"))
}

/// Identifies the input and version of a start: two starts with one idempotency key must have the same.
fn fingerprint(input: &Data, version: Option<&str>) -> [u8; 32] {
    let input = match input {
        Data::Json(json) => &**json,
        _ => &Value::Null,
    };
    let mut hash = Sha256::new();
    // Writing into a hash cannot fail.
    let _ = serde_json::to_writer(&mut hash, &(Canonical(input), version));
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_fingerprint_of_a_start_is_that_of_its_canonical_json() {
        for (input, version, canonical) in [
            (json!(null), None, "[null,null]"),
            (
                json!({"b": [1.0, 2.5, -3, 0.5], "a": {"\u{e9}\"": "\n", "z": null}}),
                Some("v1"),
                "[{\"a\":{\"z\":null,\"\u{e9}\\\"\":\"\\n\"},\"b\":[1,2.5,-3,0.5]},\"v1\"]",
            ),
            (json!([true, u64::MAX, "x"]), None, "[[true,18446744073709551615,\"x\"],null]"),
        ] {
            let before: [u8; 32] = Sha256::digest(canonical).into();
            assert_eq!(fingerprint(&Data::from(input), version), before, "{canonical}");
        }
    }
}
