//! The context of a code flow.

use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use eddyline_protocol::{Failure, Log};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use super::Name;
use super::core::Core;
use super::entries::{Call, Child, Inbox, Place, Publish, Sleep, Wait, Webhook};
use super::error::{CtxError, FlowError};
use super::map::Map;
use super::step::{Attempt, Bare, OfItem, Step, With};
use super::time::{from_ms, iso};
use super::undo::undo_all;
use crate::worker::{StepCtx, StepError, too_deep};

/// The context of a code flow: everything that must be remembered goes through it. Cheap to clone.
///
/// A flow is `async fn(RunCtx, Input) -> Result<Output, Error>`. What it asks the context for is recorded by name. When
/// the run continues, perhaps on another worker, the function starts from its beginning and gets the recorded results
/// instead of repeating the work. All of these are futures, for `join!`, `select!`, `FuturesUnordered` and whatever else
/// takes futures: results arrive in the same order in every execution. Dropping one ends the
/// entry, since its result is no longer needed.
///
/// ```
/// use eddyline::{FlowError, RunCtx, StepError};
/// use std::time::Duration;
///
/// async fn charge(cents: u64, _key: &str) -> Result<String, StepError> {
///     Ok(format!("receipt for {cents}"))
/// }
///
/// async fn checkout(ctx: RunCtx, cents: u64) -> Result<String, FlowError> {
///     let key = ctx.key("pay");
///     let receipt = ctx.step("pay", || charge(cents, &key)).await?;
///     ctx.sleep("cooling-off", Duration::from_secs(14 * 24 * 3_600)).await?;
///     Ok(receipt)
/// }
/// ```
#[derive(Clone)]
pub struct RunCtx {
    place: Place,
}

impl RunCtx {
    pub(crate) fn new(core: Arc<Core>) -> RunCtx {
        RunCtx { place: Place { core, scope: Arc::from("") } }
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.place.core
    }

    /// Runs `body` and records its output, once: after that, the step is not executed again. If the body fails, it is
    /// called again, as the retry policy says. It may borrow from the function.
    ///
    /// The body may be executed more than once, if the worker dies before its output is recorded. Make its effects
    /// idempotent with [`RunCtx::key`].
    pub fn step<T, E, F, Fut>(&self, name: impl Into<Name>, body: F) -> Step<T, Bare<F>>
    where
        F: FnMut() -> Fut,
        Fut: Future<Output = Result<T, E>>,
        T: Serialize + DeserializeOwned,
        E: Into<StepError>,
    {
        self.new_step(&name.into(), Bare(body))
    }

    /// [`RunCtx::step`], with a context for the body: its key, the number of the attempt, logs and progress.
    pub fn step_with<T, E, F, Fut>(&self, name: impl Into<Name>, body: F) -> Step<T, With<F>>
    where
        F: FnMut(StepCtx) -> Fut,
        Fut: Future<Output = Result<T, E>>,
        T: Serialize + DeserializeOwned,
        E: Into<StepError>,
    {
        self.new_step(&name.into(), With(body))
    }

    fn new_step<T, B: Attempt>(&self, name: &Name, body: B) -> Step<T, B> {
        let Place { core, scope } = self.place.clone();
        Step::new(core, scope, self.place.full(name.as_str()), body)
    }

    /// A step for each item, `name[0]`, `name[1]`, … or with keys of its own, a bounded number at a time.
    pub fn map<A, T, E, F, Fut>(&self, name: &str, items: impl IntoIterator<Item = A>, body: F) -> Map<A, T, F>
    where
        F: Fn(A) -> Fut,
        A: Clone,
        Fut: Future<Output = Result<T, E>>,
        T: Serialize + DeserializeOwned,
        E: Into<StepError>,
        OfItem<A, F>: Attempt<Fut = Fut>,
    {
        Map::new(self.place.clone(), name, items, body)
    }

    /// A step that a worker with this handler executes. It has its own queue, limits and retries.
    pub fn call<Out: DeserializeOwned>(&self, handler: &str, input: &impl Serialize) -> Call<Out> {
        Call::new(self.place.clone(), handler, input)
    }

    /// A run of another flow. If this run is cancelled, so is the child.
    pub fn child<Out: DeserializeOwned>(&self, flow: &str, input: &impl Serialize) -> Child<Out> {
        Child::new(self.place.clone(), flow, input)
    }

    /// Waits for this long. The worker is free meanwhile, and may be restarted.
    pub fn sleep(&self, name: impl Into<Name>, duration: Duration) -> Sleep {
        Sleep::new(&self.place, name.into(), Some(duration), None)
    }

    /// Waits until this moment.
    pub fn sleep_until(&self, name: impl Into<Name>, until: SystemTime) -> Sleep {
        Sleep::new(&self.place, name.into(), None, Some(iso(until)))
    }

    /// Waits for an event of the namespace with this name and key: the first one since the run began that no other wait
    /// of this run has got. Without a key (`()`), any event of this name.
    pub fn wait_event<T: DeserializeOwned>(&self, event: &str, key: impl Serialize) -> Wait<T> {
        Wait::new(self.place.clone(), event, key)
    }

    /// The events with this name and key, one after another.
    pub fn inbox<T: DeserializeOwned>(&self, event: &str, key: impl Serialize) -> Inbox<T> {
        Inbox::new(self.place.clone(), event, key)
    }

    /// Makes a URL and returns a [`Gate`](crate::Gate) that waits for a request to it.
    pub fn webhook<T: DeserializeOwned>(&self, name: impl Into<Name>) -> Webhook<T> {
        Webhook::new(&self.place, &name.into(), false)
    }

    /// Returns a [`Gate`](crate::Gate) that a person opens: on the dashboard, with `eddy gate open`, or through the API.
    pub fn manual<T: DeserializeOwned>(&self, name: impl Into<Name>) -> Webhook<T> {
        Webhook::new(&self.place, &name.into(), true)
    }

    /// Publishes an event to the namespace, once.
    pub fn publish(&self, event: &str, key: impl Serialize, payload: impl Serialize) -> Publish {
        Publish::new(self.place.clone(), event, key, payload)
    }

    /// A context whose names begin with `name/`, so that code can be used twice in a flow.
    pub fn scope(&self, name: impl Into<Name>) -> RunCtx {
        let scope = format!("{}{}/", self.place.scope, name.into().as_str());
        RunCtx { place: Place { core: self.place.core.clone(), scope: scope.into() } }
    }

    /// Undoes all steps with [`Step::undo`] that have completed so far, the latest first, and continues. An undo that
    /// fails for good does not keep the others from being executed; the first such failure is returned.
    pub async fn undo(&self) -> Result<(), CtxError> {
        match undo_all(self, true).await.into_iter().next() {
            None => Ok(()),
            Some(failure) => Err(failure),
        }
    }

    /// Ends this run and continues it as a new one with this input, which keeps its external id and tags and gets the
    /// events that were not received. Return it: `return ctx.continue_as_new(&state)`.
    pub fn continue_as_new<T>(&self, input: &impl Serialize) -> Result<T, FlowError> {
        let input = serde_json::to_value(input)?;
        Err(match too_deep(&input) {
            None => FlowError::continuing(input),
            Some(problem) => FlowError::failed(Failure::new("Encode", format!("the input {problem}")), false),
        })
    }

    /// The idempotency key that the next step of this name has: the same for each of its attempts, and in a retry of the
    /// run. Ask for it before the step.
    pub fn key(&self, name: impl Into<Name>) -> String {
        let core = &self.place.core;
        let full = core.state().next_name(&self.place.full(name.into().as_str()));
        core.key(&full)
    }

    /// The time of the result that the function got last, or of its start: the same in every execution.
    pub fn now(&self) -> SystemTime {
        from_ms(self.place.core.state().now_ms())
    }

    /// An id that is the same whenever this name is asked for in this run, and in a retry of the run.
    pub fn uuid(&self, name: &str) -> Uuid {
        let hash = Sha256::digest(self.place.core.key(&self.place.full(name)));
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&hash[..16]);
        uuid::Builder::from_random_bytes(bytes).into_uuid()
    }

    pub fn run_id(&self) -> &str {
        &self.place.core.task.task.run_id
    }

    pub fn flow(&self) -> &str {
        &self.place.core.task.task.flow
    }

    /// The attempt of the function; counts from 1. A run that continues after a wait is still in the same attempt.
    pub fn attempt(&self) -> u32 {
        self.place.core.task.task.attempt
    }

    /// Writes a line to the run's timeline. It is sent with the next thing that the function asks for, and not again when
    /// that is replayed.
    pub fn log(&self, message: impl Into<String>) {
        self.log_as("info", message, None);
    }

    /// A line with a level and structured fields.
    pub fn log_as(&self, level: &str, message: impl Into<String>, meta: Option<Value>) {
        let meta = meta.filter(|meta| too_deep(meta).is_none());
        self.place.core.state().log(Log { level: level.to_owned(), msg: message.into(), meta });
    }
}

impl fmt::Debug for RunCtx {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RunCtx")
            .field("run_id", &self.run_id())
            .field("scope", &self.place.scope)
            .finish_non_exhaustive()
    }
}
