//! Code flows as a worker registers them.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::ctx::RunCtx;
use super::error::FlowError;
use super::retry::{Retry, written};
use crate::worker::{BAD_INPUT, BAD_REPORT, too_deep};

pub(crate) type FlowFuture = BoxFuture<'static, Result<Value, FlowError>>;
pub(crate) type FlowFn = Arc<dyn Fn(RunCtx, Value) -> FlowFuture + Send + Sync>;

/// A code flow of a worker.
#[derive(Clone)]
pub(crate) struct CodeFlow {
    pub run: FlowFn,
    pub retry: Option<Retry>,
}

impl fmt::Debug for CodeFlow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CodeFlow").field("retry", &self.retry).finish_non_exhaustive()
    }
}

pub(crate) fn erase<F, Fut, In, Out, E>(flow: F) -> FlowFn
where
    F: Fn(RunCtx, In) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<Out, E>> + Send + 'static,
    In: DeserializeOwned + Send + 'static,
    Out: Serialize + 'static,
    E: Into<FlowError> + 'static,
{
    let flow = Arc::new(flow);
    Arc::new(move |ctx: RunCtx, input: Value| {
        let flow = flow.clone();
        async move {
            let input = serde_json::from_value(input).map_err(|error| {
                FlowError::permanent(format!("the input does not match the flow's type: {error}")).kind(BAD_INPUT)
            })?;
            let output = flow(ctx, input).await.map_err(Into::into)?;
            let wrong = |problem: String| FlowError::permanent(format!("the output {problem}")).kind(BAD_REPORT);
            let output = serde_json::to_value(output)
                .map_err(|error| wrong(format!("cannot be serialised as JSON: {error}")))?;
            too_deep(&output).map_or(Ok(output), |problem| Err(wrong(problem)))
        }
        .boxed()
    })
}

/// The definition of a code flow, for [`Worker::flow_with`](crate::Worker::flow_with). What is left out keeps its
/// default; a flow registered with [`Worker::flow`](crate::Worker::flow) leaves an existing definition unchanged.
///
/// ```
/// use eddyline::{FlowOptions, Retry};
/// use std::time::Duration;
///
/// let options = FlowOptions::new()
///     .retry(Retry::attempts(3))
///     .step_retry(Retry::attempts(10).max(Duration::from_secs(600)))
///     .cancel_grace(Duration::from_secs(120));
/// # let _ = options;
/// ```
#[derive(Debug, Clone, Default)]
pub struct FlowOptions {
    pub(crate) definition: Map<String, Value>,
    pub(crate) build: Option<String>,
    pub(crate) retry: Option<Retry>,
}

impl FlowOptions {
    pub fn new() -> FlowOptions {
        FlowOptions::default()
    }

    /// The queue of the function and, unless they name another, of its calls.
    pub fn queue(self, queue: impl Into<String>) -> FlowOptions {
        self.with("queue", json!(queue.into()))
    }

    /// The retry policy of the function.
    pub fn retry(mut self, retry: Retry) -> FlowOptions {
        self.retry = Some(retry.clone());
        self.with("retry", retry.to_json())
    }

    /// The retry policy of steps and calls that name none.
    pub fn step_retry(self, retry: Retry) -> FlowOptions {
        self.with("step_retry", retry.to_json())
    }

    /// How long one task of the function may take, from its claim until it suspends or ends.
    pub fn timeout(self, timeout: Duration) -> FlowOptions {
        self.with("timeout", written(timeout))
    }

    /// How long the function may undo its steps after the run was cancelled; defaults to 60 s if a step has an undo.
    pub fn cancel_grace(self, grace: Duration) -> FlowOptions {
        self.with("cancel_grace", written(grace))
    }

    /// Added to the priority of each run.
    pub fn priority(self, priority: i32) -> FlowOptions {
        self.with("priority", json!(priority))
    }

    /// Labels that a worker must have to run the function.
    pub fn requires<L: Into<String>>(self, labels: impl IntoIterator<Item = L>) -> FlowOptions {
        let labels: Vec<String> = labels.into_iter().map(Into::into).collect();
        self.with("requires", json!(labels))
    }

    /// Limits that the function counts for: names, or objects `{name: key}` with an expression over `input` as the key.
    pub fn limits(self, limits: impl IntoIterator<Item = Value>) -> FlowOptions {
        let limits: Vec<Value> = limits.into_iter().collect();
        self.with("limits", json!(limits))
    }

    /// Offers a run only to workers of the build that began it, so that it never sees other code. By default a run
    /// continues on any worker.
    pub fn pinned(self) -> FlowOptions {
        self.with("builds", json!("pinned"))
    }

    /// The build of this flow; defaults to the worker's version.
    pub fn build(mut self, build: impl Into<String>) -> FlowOptions {
        self.build = Some(build.into());
        self
    }

    /// A JSON Schema that inputs are checked against when a run starts.
    pub fn input_schema(self, schema: Value) -> FlowOptions {
        self.with("input_schema", schema)
    }

    /// A JSON Schema of the output, for readers and generated types.
    pub fn output_schema(self, schema: Value) -> FlowOptions {
        self.with("output_schema", schema)
    }

    /// The schemas of these types.
    #[cfg(feature = "schema")]
    pub fn schemas<In: schemars::JsonSchema, Out: schemars::JsonSchema>(self) -> FlowOptions {
        self.input_schema(schemars::schema_for!(In).to_value()).output_schema(schemars::schema_for!(Out).to_value())
    }

    fn with(mut self, field: &str, value: Value) -> FlowOptions {
        self.definition.insert(field.to_owned(), value);
        self
    }
}
