//! What a handler knows of its step, and what it can do besides returning.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use eddyline_protocol::{Emit, Log, Op, Outcome, Task, Verdict};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Number, Value};
use tokio::sync::oneshot;

use super::failure::StepError;
use super::outbox::too_deep;
use super::task::{MAX_EMITS, Said, Shared};

/// The kind of failure of something that the server does not take.
pub(crate) const BAD_REPORT: &str = "BadReport";
/// The kind of failure of an input that is not what the handler takes.
pub(crate) const BAD_INPUT: &str = "BadInput";
/// The kind of failure of what is said of a task that is somebody else's, or nobody's, by now.
const LOST: &str = "TaskLost";

/// An attempt at a step, as its handler sees it. Cheap to clone.
#[derive(Debug, Clone)]
pub struct StepCtx(Arc<Shared>);

impl StepCtx {
    pub(crate) fn new(shared: Arc<Shared>) -> StepCtx {
        StepCtx(shared)
    }

    /// The same for every attempt of this step in this run: what to make effects outside idempotent by.
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

    /// The step as the flow names it: `price`.
    pub fn step(&self) -> &str {
        &self.0.task.step
    }

    /// The step in this run: `each[3].price`.
    pub fn activation(&self) -> &str {
        &self.0.task.activation
    }

    /// The task as it came.
    pub fn task(&self) -> &Task {
        &self.0.task
    }

    /// The input of the run that the step belongs to.
    pub fn run_input<T: DeserializeOwned>(&self) -> Result<T, StepError> {
        T::deserialize(&self.0.task.run_input).map_err(|error| bad_input("the input of the run", &error))
    }

    /// What opened the gate before this step; nothing if there was none, or if it went on without being opened.
    pub fn gate<T: DeserializeOwned>(&self) -> Result<Option<T>, StepError> {
        Option::<T>::deserialize(&self.0.task.gate).map_err(|error| bad_input("the gate's payload", &error))
    }

    /// When the attempt's time is up, by the server's clock.
    pub fn deadline(&self) -> Option<SystemTime> {
        let ms = millis(self.0.task.deadline.as_deref()?)?;
        SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms))
    }

    /// The run was cancelled, or the task is not this worker's any more. Nobody waits for the result; a handler that does
    /// not return soon is stopped where it stands. In a flow with `undo` a handler whose run was cancelled is not stopped,
    /// unless its task is [lost](StepCtx::is_lost) too: what it returns is reported, so that what it did is undone.
    pub fn is_cancelled(&self) -> bool {
        self.0.is_cancelled()
    }

    /// Comes back once the task is cancelled.
    pub async fn cancelled(&self) {
        self.0.until_cancelled().await;
    }

    /// The task is not this worker's any more: its lease or its time ended. No report on it is taken.
    pub fn is_lost(&self) -> bool {
        self.0.is_lost()
    }

    /// Comes back once the task is lost.
    pub async fn lost(&self) {
        self.0.until_lost().await;
    }

    /// Emits an event of the run together with the step's completion. If the attempt fails it never happened.
    pub fn emit(&self, event: &str, payload: impl Serialize) -> Result<(), StepError> {
        let payload = json(event, payload)?;
        if self.0.emit(Emit { event: event.to_owned(), payload }) {
            return Ok(());
        }
        Err(StepError::permanent(format!("an attempt emits at most {MAX_EMITS} events")).kind(BAD_REPORT))
    }

    /// Emits an event of the run at once. It is durable when this returns, and stays if the attempt fails later.
    pub async fn emit_now(&self, event: &str, payload: impl Serialize) -> Result<(), StepError> {
        let payload = json(event, payload)?;
        self.ask(Op::Emit(Emit { event: event.to_owned(), payload })).await
    }

    /// Publishes an event to the namespace. Gates that wait for `name` with this key open.
    pub async fn publish(&self, name: &str, key: impl Serialize, payload: impl Serialize) -> Result<(), StepError> {
        let (key, payload) = (json(name, key)?, json(name, payload)?);
        let key = (!key.is_null()).then_some(key);
        self.ask(Op::Publish { name: name.to_owned(), key, payload }).await
    }

    /// Writes a line into the run's timeline. Lines are gathered for a moment, and never wait.
    pub fn log(&self, message: impl Into<String>) {
        self.log_as("info", message, None);
    }

    pub fn warn(&self, message: impl Into<String>) {
        self.log_as("warn", message, None);
    }

    pub fn error(&self, message: impl Into<String>) {
        self.log_as("error", message, None);
    }

    /// A line with a level of your choice and fields beside it.
    pub fn log_as(&self, level: &str, message: impl Into<String>, meta: Option<Value>) {
        // A line never fails: what no server takes is left out, and it is said.
        let meta =
            meta.map(|meta| too_deep(&meta).map_or(meta, |problem| Value::String(format!("what was here {problem}"))));
        self.0.log(Log { level: level.to_owned(), msg: message.into(), meta });
    }

    /// How far the step has come. Of several in a row the last one counts.
    pub fn progress(&self, done: f64, total: Option<f64>, message: Option<&str>) {
        let (done, total) = (Number::from_f64(done), total.and_then(Number::from_f64));
        self.0.progress(Op::Progress { done, total, msg: message.map(str::to_owned) });
    }

    async fn ask(&self, op: Op) -> Result<(), StepError> {
        let (answer, answered) = oneshot::channel();
        let gone = || StepError::new("the worker is stopping").kind(LOST);
        let said = Said::Asked { task: self.0.id.clone(), op, answer };
        self.0.voice.send(said).await.map_err(|_| gone())?;
        let outcome: Outcome = answered.await.map_err(|_| gone())?;
        match outcome.outcome {
            Verdict::Applied => Ok(()),
            Verdict::Stale | Verdict::NotTried => {
                Err(StepError::new("another attempt has this step by now").kind(LOST))
            }
            Verdict::Closed => Err(StepError::new("the run has ended").kind(LOST)),
            Verdict::Invalid => {
                let message = outcome.message.unwrap_or_else(|| "the server does not say what is wrong".to_owned());
                Err(StepError::permanent(message).kind(BAD_REPORT))
            }
        }
    }
}

/// What is to be sent, as JSON that a server takes.
pub(crate) fn json(what: &str, value: impl Serialize) -> Result<Value, StepError> {
    let wrong = |problem: String| StepError::permanent(format!("{what} {problem}")).kind(BAD_REPORT);
    let json = serde_json::to_value(value).map_err(|error| wrong(format!("cannot be written as JSON: {error}")))?;
    too_deep(&json).map_or(Ok(json), |problem| Err(wrong(problem)))
}

pub(crate) fn bad_input(what: &str, error: &serde_json::Error) -> StepError {
    StepError::permanent(format!("{what} is not what the handler takes: {error}")).kind(BAD_INPUT)
}

/// Milliseconds since 1970 of `2026-01-02T03:04:05.678Z`.
fn millis(text: &str) -> Option<u64> {
    let (date, time) = text.strip_suffix('Z')?.split_once('T')?;
    let mut date = date.splitn(3, '-').map(str::parse::<u64>);
    let (year, month, day) = (date.next()?.ok()?, date.next()?.ok()?, date.next()?.ok()?);
    let (whole, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let mut whole = whole.splitn(3, ':').map(str::parse::<u64>);
    let (hour, minute, second) = (whole.next()?.ok()?, whole.next()?.ok()?, whole.next()?.ok()?);
    let fraction = format!("{fraction:0<3}").get(..3)?.parse::<u64>().ok()?;
    if !(1970..=9999).contains(&year) || !(1..=12).contains(&month) || !(1..=31).contains(&day) {
        return None;
    }
    // Years begin in March, so that the leap day is the last one.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    let days = days.checked_sub(719_468)?;
    Some((((days * 24 + hour) * 60 + minute) * 60 + second) * 1_000 + fraction)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_read_as_they_are_written() {
        for (text, ms) in [
            ("1970-01-01T00:00:00.000Z", 0),
            ("2000-02-29T12:00:00.500Z", 951_825_600_500),
            ("2026-01-02T03:04:05.678Z", 1_767_323_045_678),
            ("2026-12-31T23:59:59Z", 1_798_761_599_000),
        ] {
            assert_eq!(millis(text), Some(ms), "{text}");
        }
        for text in ["", "now", "2026-01-02", "2026-13-02T00:00:00Z", "2026-01-02T03:04:05.678"] {
            assert_eq!(millis(text), None, "{text}");
        }
    }
}
