//! Starts runs, one or many.

use std::future::IntoFuture;
use std::time::Duration;

use eddyline_protocol::{ApiError, BatchItem, BatchStarted, OnConflict, RunStarted, StartBatch, StartRun, Unique};
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde_json::{Map, Value};

use super::address::segment;
use super::http::Repeat;
use super::{Client, Run};
use crate::error::Error;

/// The maximum number of runs in one request; a longer batch is split.
const MAX_BATCH: usize = 1_000;
/// A part of a batch is sent when its inputs have about this many bytes, well below the server's body limit.
const MAX_BATCH_BYTES: usize = 8 << 20;

/// A run to be started: `.await` starts it.
#[must_use = "`.await` starts the run"]
#[derive(Debug)]
pub struct Start {
    client: Client,
    flow: String,
    input: Result<Value, Error>,
    rest: StartRun,
}

impl Client {
    /// Starts a run of a flow. With an idempotency key the call can be repeated safely, and is retried if a response is
    /// lost.
    ///
    /// ```no_run
    /// # async fn example(client: eddyline::Client) -> Result<(), eddyline::Error> {
    /// let order = serde_json::json!({"id": 7});
    /// let run = client.start("order", &order).idempotency_key("order-7").tags(["web"]).await?;
    /// println!("{} {}", run.id(), if run.existing() { "already existed" } else { "is new" });
    /// # Ok(()) }
    /// ```
    pub fn start(&self, flow: &str, input: &(impl Serialize + ?Sized)) -> Start {
        let input = serde_json::to_value(input)
            .map_err(|source| Error::Encode { what: format!("the input of {flow}"), source });
        Start { client: self.clone(), flow: flow.to_owned(), input, rest: StartRun::default() }
    }

    /// Starts many runs, each independently, and returns their results in order. Each item names its flow.
    ///
    /// An error means that a whole request of the batch failed. Set idempotency keys, and the batch can be started
    /// again.
    pub async fn start_batch(
        &self,
        runs: impl IntoIterator<Item = StartRun>,
    ) -> Result<Vec<Result<Run, ApiError>>, Error> {
        let (mut part, mut bytes, mut started) = (Vec::new(), 0, Vec::new());
        for run in runs {
            bytes += weigh(&run.input);
            part.push(run);
            if part.len() == MAX_BATCH || bytes >= MAX_BATCH_BYTES {
                bytes = 0;
                self.start_part(std::mem::take(&mut part), &mut started).await?;
            }
        }
        self.start_part(part, &mut started).await?;
        Ok(started)
    }

    async fn start_part(&self, runs: Vec<StartRun>, into: &mut Vec<Result<Run, ApiError>>) -> Result<(), Error> {
        if runs.is_empty() {
            return Ok(());
        }
        let keyed = runs.iter().all(|run| run.idempotency_key.is_some());
        let repeat = if keyed { Repeat::Safe } else { Repeat::Never };
        let batch: BatchStarted = self.post(repeat, "/v1/runs/batch", &StartBatch { runs }).await?;
        into.extend(batch.items.into_iter().map(|item| match item {
            BatchItem::Started(run) => Ok(Run::new(self.clone(), run.run_id, run.existing)),
            BatchItem::Refused { error } => Err(error),
        }));
        Ok(())
    }
}

impl Start {
    /// Your own label, to find the run by.
    pub fn external_id(mut self, id: impl Into<String>) -> Start {
        self.rest.external_id = Some(id.into());
        self
    }

    /// A start with the same key and flow returns the existing run; with another input it is a conflict.
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Start {
        self.rest.idempotency_key = Some(key.into());
        self
    }

    pub fn tags<T: Into<String>>(mut self, tags: impl IntoIterator<Item = T>) -> Start {
        self.rest.tags.extend(tags.into_iter().map(Into::into));
        self
    }

    /// The run begins after this delay.
    pub fn delay(mut self, delay: Duration) -> Start {
        self.rest.delay = Some(delay.into());
        self
    }

    /// The run fails unless it has ended within this time.
    pub fn deadline(mut self, deadline: Duration) -> Start {
        self.rest.deadline = Some(deadline.into());
        self
    }

    /// Another version than the current one.
    pub fn version(mut self, version: impl Into<String>) -> Start {
        self.rest.version = Some(version.into());
        self
    }

    /// In a queue, tasks of higher priority come first.
    pub fn priority(mut self, priority: i32) -> Start {
        self.rest.priority = Some(priority);
        self
    }

    /// Your own small JSON object, stored with the run and returned; at most 16 KiB.
    pub fn metadata(mut self, metadata: Map<String, Value>) -> Start {
        self.rest.metadata = Some(metadata);
        self
    }

    /// The queue of steps that name none; for a code flow, the queue of its function.
    pub fn queue(mut self, queue: impl Into<String>) -> Start {
        self.rest.queue = Some(queue.into());
        self
    }

    /// At most one run of the flow is active under this key; `on_conflict` decides what this start does if another run
    /// holds it.
    pub fn unique(mut self, key: impl Into<String>, on_conflict: OnConflict) -> Start {
        self.rest.unique = Some(Unique { key: key.into(), on_conflict });
        self
    }

    /// Converts it to an item of [`Client::start_batch`] instead of starting it.
    pub fn into_item(self) -> Result<StartRun, Error> {
        Ok(StartRun { flow: Some(self.flow), input: self.input?, ..self.rest })
    }
}

impl IntoFuture for Start {
    type Output = Result<Run, Error>;
    type IntoFuture = BoxFuture<'static, Result<Run, Error>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let request = StartRun { input: self.input?, ..self.rest };
            let repeat = if request.idempotency_key.is_some() { Repeat::Safe } else { Repeat::Never };
            let path = format!("/v1/flows/{}/runs", segment(&self.flow));
            let started: RunStarted = self.client.post(repeat, &path, &request).await?;
            Ok(Run::new(self.client, started.run_id, started.existing))
        })
    }
}

/// The approximate size of a value as JSON, in bytes.
pub(crate) fn weigh(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) => 5,
        Value::Number(_) => 12,
        Value::String(text) => weigh_text(text),
        Value::Array(items) => 2 + items.iter().map(|item| weigh(item) + 1).sum::<usize>(),
        Value::Object(fields) => {
            2 + fields.iter().map(|(name, value)| weigh_text(name) + weigh(value) + 2).sum::<usize>()
        }
    }
}

/// The size of a text as JSON, in bytes: a control character takes six.
pub(crate) fn weigh_text(text: &str) -> usize {
    let byte = |byte: u8| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
        0..0x20 => 6,
        _ => 1,
    };
    2 + text.bytes().map(byte).sum::<usize>()
}

/// Whether a value is nested deeper than `most`.
pub(crate) fn is_deeper(value: &Value, most: usize) -> bool {
    match value {
        Value::Array(items) => most == 0 || items.iter().any(|item| is_deeper(item, most - 1)),
        Value::Object(fields) => most == 0 || fields.values().any(|item| is_deeper(item, most - 1)),
        _ => false,
    }
}
