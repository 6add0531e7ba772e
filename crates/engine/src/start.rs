//! Runs are started.

use std::sync::Arc;

use eddyline_language::definition::wrong_name;
use eddyline_machine::{Answer, Canonical, Data, Input, Millis, Retry, RunId, Start, Unique};
use eddyline_store::{LINE_LIMIT, Namespace, StartKey};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::committer::{Answered, NewRun, Order, Outcome};
use crate::config::{Config, MAX_METADATA_BYTES, MAX_PAYLOAD_DEPTH, MAX_STARTS, MAX_WAIT_MS};
use crate::engine::Engine;
use crate::error::{EngineError, Result};
use crate::flows::Registered;
use crate::schema::{Allowance, Mismatch};
use crate::unique::Contender;

/// When to send those starts again that the checks of others left no room for.
const RETRY_AFTER_MS: Millis = 1_000;

/// What a run is started with.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct StartRequest {
    pub flow: String,
    pub version: Option<String>,
    pub input: Value,
    /// A label.
    pub external_id: Option<String>,
    /// The same key gives the same run back, as long as that is kept.
    pub idempotency_key: Option<String>,
    /// Kept and given back; at most [`MAX_METADATA_BYTES`].
    pub metadata: Option<Map<String, Value>>,
    /// The queue of steps that name none; of a code flow, of its function.
    pub queue: Option<String>,
    pub tags: Vec<String>,
    pub delay_ms: Option<Millis>,
    pub deadline_ms: Option<Millis>,
    pub priority: i32,
    /// Of a code flow: attempts of the whole function.
    pub retry: Option<Retry>,
    /// One run of the flow goes on under this key at a time.
    pub unique: Option<Unique>,
    /// Who starts it: where it replaces other runs, they were cancelled by this.
    pub by: String,
    /// The trace that it is part of, as W3C writes it: handed to every task, and to the runs that it starts.
    pub traceparent: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Started {
    pub run: RunId,
    /// It was there already, under the same idempotency key or unique key.
    pub existing: bool,
    /// How many bytes its input has, if those are so many that one should think again.
    pub large_input: Option<usize>,
}

impl Engine {
    /// Starts a run. When this returns, it will be seen through to its end. Whoever has many to start does so with
    /// [`Engine::start_batch`], which commits them together.
    pub async fn start_run(&self, ns: &Namespace, request: StartRequest) -> Result<Started> {
        let (order, starting) = self.order_start(ns, request, &mut Allowance::of_starts()).await?;
        self.committing().ask(order).await?;
        self.started(starting).await
    }

    /// Starts many runs at once, each for itself: one that cannot be started does not keep the others from it.
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
            tracing::warn!(flow = flow.flow.name, %run, bytes, "a run is started with a large input");
        }
        let new = NewRun { ns: ns.clone(), flow, key, tells_line: None };
        let contender = Contender::of(&start, &new, request.by).map(Box::new);
        let (order, starting) = order_new(run, start, new);
        Ok((order, Starting { large_input, contender, ..starting }))
    }

    /// Refuses an input that does not match the flow's schema.
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
                EngineError::Invalid { message: format!("the input is not what {} asks for", flow.flow.name), details }
            }
            // In another call it would be checked.
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

/// A start on its way.
pub(crate) struct Starting {
    pub run: RunId,
    key: Option<String>,
    fingerprint: Option<[u8; 32]>,
    pub large_input: Option<usize>,
    /// What it takes to start it again, if it has a unique key.
    pub contender: Option<Box<Contender>>,
    answer: Answered,
}

/// What a start has come to.
pub(crate) enum Came {
    Started(Started),
    /// This run has its unique key.
    UniqueTaken(RunId),
}

impl Starting {
    pub async fn started(self) -> Result<Came> {
        let outcome = self.answer.await.map_err(|_| EngineError::Stopped)??.pop();
        let large_input = self.large_input;
        match outcome {
            Some(Outcome::Answered { answer: Answer::Applied(_), .. }) => {
                Ok(Came::Started(Started { run: self.run, existing: false, large_input }))
            }
            Some(Outcome::KeyTaken { run, fingerprint }) if Some(fingerprint) == self.fingerprint => {
                metrics::counter!("eddyline_duplicates_prevented_total").increment(1);
                Ok(Came::Started(Started { run, existing: true, large_input }))
            }
            Some(Outcome::KeyTaken { run, .. }) => Err(EngineError::Conflict(format!(
                "the idempotency key `{}` was used for run {run} with another input",
                self.key.unwrap_or_default()
            ))),
            Some(Outcome::UniqueTaken { run }) => Ok(Came::UniqueTaken(run)),
            Some(Outcome::LineFull) => {
                let message = format!("{LINE_LIMIT} runs have or want this unique key, which is as many as may be");
                Err(EngineError::TooMany { message, retry_after_ms: RETRY_AFTER_MS })
            }
            other => Err(EngineError::Bug(format!("the start of run {} came to {other:?}", self.run))),
        }
    }
}

/// A payload from outside, within the limits.
pub(crate) fn payload(config: &Config, what: &'static str, value: Value) -> Result<Data> {
    weighed(config, what, value).map(|(data, _)| data)
}

/// The same with how many bytes it has.
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

/// It is part of the header, which is written with every commit of its run, so it is small.
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
            "`retry` is the policy of the function of a code flow, and {} is a graph: its steps have policies of their own",
            flow.flow.name
        );
        return Err(EngineError::invalid(message));
    }
    match queue.and_then(wrong_name) {
        Some(problem) => Err(EngineError::invalid(format!("`queue`: {problem}"))),
        None => Ok(()),
    }
}

/// What is wrong with a time to wait from outside.
pub(crate) fn bad_wait(what: &str, ms: Millis) -> Option<String> {
    (!(0..=MAX_WAIT_MS).contains(&ms)).then(|| format!("{what} of {ms} ms is not between nothing and ten years"))
}

/// Tells whether two starts under one key ask for the same.
fn fingerprint(input: &Data, version: Option<&str>) -> [u8; 32] {
    let input = match input {
        Data::Json(json) => &**json,
        _ => &Value::Null,
    };
    let mut hash = Sha256::new();
    // What is written into a hash is not refused.
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
