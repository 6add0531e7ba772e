//! The context of a handler: its task, and calls to the server.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use eddyline_protocol::{Emit, Log, Op, ReportOutcome, Task, Verdict};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Number, Value};
use tokio::sync::oneshot;

use super::failure::StepError;
use super::outbox::too_deep;
use super::task::{HandlerMessage, MAX_EMITS, TaskState};
use crate::code::time::millis;

/// The kind of failure when the server rejects a report.
pub(crate) const BAD_REPORT: &str = "BadReport";
/// The kind of failure when the input does not match the handler's type.
pub(crate) const BAD_INPUT: &str = "BadInput";
/// The kind of failure of a call for a task that this worker no longer holds.
const LOST: &str = "TaskLost";

/// An attempt at a step. Cheap to clone.
#[derive(Debug, Clone)]
pub struct StepCtx(Arc<TaskState>);

impl StepCtx {
    pub(crate) fn new(shared: Arc<TaskState>) -> StepCtx {
        StepCtx(shared)
    }

    /// The context of a step that the function of a code run executes itself.
    pub(crate) fn of_step(function: &Arc<TaskState>, name: &str, key: String, attempt: u32) -> StepCtx {
        StepCtx(Arc::new(TaskState::of_step(function, name, key, attempt)))
    }

    /// The same for every attempt of this step in this run: use it as the idempotency key of side effects.
    pub fn key(&self) -> &str {
        &self.0.task.key
    }

    /// Counts from 1.
    pub fn attempt(&self) -> u32 {
        self.0.task.attempt
    }

    pub fn run_id(&self) -> &str {
        &self.0.task.run_id
    }

    pub fn flow(&self) -> &str {
        &self.0.task.flow
    }

    /// The name of the step in the flow: `price`.
    pub fn step(&self) -> &str {
        &self.0.task.step
    }

    /// The activation of the step in this run: `each[3].price`.
    pub fn activation(&self) -> &str {
        &self.0.task.activation
    }

    /// The task as received.
    pub fn task(&self) -> &Task {
        &self.0.task
    }

    /// The input of the run.
    pub fn run_input<T: DeserializeOwned>(&self) -> Result<T, StepError> {
        T::deserialize(self.0.run_input()).map_err(|error| bad_input("the input of the run", &error))
    }

    /// The payload that opened the gate before this step; `None` without a gate, or if it timed out.
    pub fn gate<T: DeserializeOwned>(&self) -> Result<Option<T>, StepError> {
        Option::<T>::deserialize(&self.0.task.gate).map_err(|error| bad_input("the gate's payload", &error))
    }

    /// When the attempt times out, by the server's clock.
    pub fn deadline(&self) -> Option<SystemTime> {
        let ms = millis(self.0.task.deadline.as_deref()?)?;
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms))
    }

    /// The run was cancelled, or this worker no longer holds the task. The result is not needed; a handler that does
    /// not return soon is aborted. In a flow with `undo`, a handler whose run was cancelled is not aborted, unless its
    /// task is [lost](StepCtx::is_lost) too: its result is reported, so that its effects are undone.
    pub fn is_cancelled(&self) -> bool {
        self.0.is_cancelled()
    }

    /// Returns once the task is cancelled.
    pub async fn cancelled(&self) {
        self.0.until_cancelled().await;
    }

    /// This worker no longer holds the task: its lease expired or the attempt timed out. Reports on it are rejected.
    pub fn is_lost(&self) -> bool {
        self.0.is_lost()
    }

    /// Returns once the task is lost.
    pub async fn lost(&self) {
        self.0.until_lost().await;
    }

    /// Emits an event in the run together with the step's completion. If the attempt fails, the event is not emitted.
    pub fn emit(&self, event: &str, payload: impl Serialize) -> Result<(), StepError> {
        self.check_emit()?;
        let payload = json(event, payload)?;
        if self.0.emit(Emit { event: event.to_owned(), payload }) {
            return Ok(());
        }
        Err(StepError::permanent(format!("an attempt can emit at most {MAX_EMITS} events")).kind(BAD_REPORT))
    }

    /// Emits an event in the run immediately. It is durable when this returns, and remains if the attempt fails later.
    pub async fn emit_now(&self, event: &str, payload: impl Serialize) -> Result<(), StepError> {
        self.check_emit()?;
        let payload = json(event, payload)?;
        self.ask(Op::Emit(Emit { event: event.to_owned(), payload })).await
    }

    /// Publishes an event to the namespace. It opens gates that wait for `name` with this key.
    pub async fn publish(&self, name: &str, key: impl Serialize, payload: impl Serialize) -> Result<(), StepError> {
        let (key, payload) = (json(name, key)?, json(name, payload)?);
        let key = (!key.is_null()).then_some(key);
        self.ask(Op::Publish { name: name.to_owned(), as_name: None, key, payload }).await
    }

    /// Writes a line to the run's timeline. Lines are sent in batches; this never waits.
    pub fn log(&self, message: impl Into<String>) {
        self.log_as("info", message, None);
    }

    pub fn warn(&self, message: impl Into<String>) {
        self.log_as("warn", message, None);
    }

    pub fn error(&self, message: impl Into<String>) {
        self.log_as("error", message, None);
    }

    /// A line with a level and structured fields.
    pub fn log_as(&self, level: &str, message: impl Into<String>, meta: Option<Value>) {
        // Logging never fails: fields that no server accepts are replaced.
        let meta =
            meta.map(|meta| too_deep(&meta).map_or(meta, |problem| Value::String(format!("left out: it {problem}"))));
        self.0.log(Log { level: level.to_owned(), msg: message.into(), meta });
    }

    /// The progress of the step. Of several calls in a row only the last is sent.
    pub fn progress(&self, done: f64, total: Option<f64>, message: Option<&str>) {
        let (done, total) = (Number::from_f64(done), total.and_then(Number::from_f64));
        self.0.progress(Op::Progress { done, total, msg: message.map(str::to_owned) });
    }

    fn check_emit(&self) -> Result<(), StepError> {
        if !self.0.is_of_function() {
            return Ok(());
        }
        let message = "a step of a code flow cannot emit, because no other step subscribes; use `publish`";
        Err(StepError::permanent(message).kind(BAD_REPORT))
    }

    async fn ask(&self, op: Op) -> Result<(), StepError> {
        let (answer, answered) = oneshot::channel();
        let stopping = || StepError::new("the worker is stopping").kind(LOST);
        let message = HandlerMessage::Asked { task: self.0.id.clone(), op, answer };
        self.0.voice.send(message).await.map_err(|_| stopping())?;
        let outcome: ReportOutcome = answered.await.map_err(|_| stopping())?;
        match outcome.outcome {
            Verdict::Applied => Ok(()),
            Verdict::Stale | Verdict::NotTried => {
                Err(StepError::new("another attempt of this step is in progress").kind(LOST))
            }
            Verdict::Closed => Err(StepError::new("the run has ended").kind(LOST)),
            Verdict::Invalid => {
                let message = outcome.message.unwrap_or_else(|| "the server gave no reason".to_owned());
                Err(StepError::permanent(message).kind(BAD_REPORT))
            }
        }
    }
}

/// Serialises a value to JSON that a server accepts.
pub(crate) fn json(what: &str, value: impl Serialize) -> Result<Value, StepError> {
    let wrong = |problem: String| StepError::permanent(format!("{what} {problem}")).kind(BAD_REPORT);
    let json = serde_json::to_value(value).map_err(|error| wrong(format!("cannot be serialised as JSON: {error}")))?;
    too_deep(&json).map_or(Ok(json), |problem| Err(wrong(problem)))
}

pub(crate) fn bad_input(what: &str, error: &serde_json::Error) -> StepError {
    StepError::permanent(format!("{what} does not match the handler's type: {error}")).kind(BAD_INPUT)
}
