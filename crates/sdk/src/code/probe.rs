//! What the test kit sees and changes of an execution.

use eddyline_protocol::EntryKind;
use futures_util::future::BoxFuture;
use serde_json::Value;

use crate::worker::StepError;

/// The result that replaces that of a body.
pub(crate) type Instead = BoxFuture<'static, Result<Value, StepError>>;

pub(crate) trait Probe: Send + Sync {
    /// The worker is registered, with its handlers and flows.
    fn joined(&self);
    /// What runs instead of the body of a step.
    fn instead(&self, step: &str, attempt: u32) -> Option<Instead>;
    /// Whether the worker dies now, before it reports the result of this step.
    fn dies_after(&self, step: &str) -> bool;
    /// Whether the worker dies now: before a message of a function is sent, or when it is answered.
    fn dies_at_message(&self, before: bool) -> bool;
    /// Whether functions are handed over after every new entry, so that they replay.
    fn shakes(&self) -> bool;
    /// A function begins from its start.
    fn begun(&self, run: &str, attempt: u32);
    /// A function begins only to say how its steps are undone. An execution whose worker has died is over.
    fn unwinds(&self, run: &str);
    fn asked(&self, run: &str, name: &str, kind: EntryKind);
    fn delivered(&self, run: &str, n: u64, name: &str);
    /// A function begins or ends to use its worker.
    fn at_work(&self, name: &str, at_work: bool);
    /// The execution has ended.
    fn ended(&self, run: &str);
}
