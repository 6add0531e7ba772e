//! Steps: work that the function does itself and that is remembered.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use eddyline_protocol::Failure;
use futures_util::FutureExt;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::time::Sleep as TokioSleep;

use super::core::{Core, Entry};
use super::decode;
use super::error::CtxError;
use super::memo::EntryName;
use super::probe::Instead;
use super::retry::Retry;
use super::state::{Ask, Polled};
use crate::worker::{BAD_REPORT, PANIC, StepCtx, StepError, json, panic_message};

/// The kind of failure of an attempt that took too long.
const TIMEOUT: &str = "Timeout";

/// How a step begins its body. Implemented for what [`RunCtx`](crate::RunCtx) takes.
#[doc(hidden)]
pub trait Attempt {
    type Fut: Future;
    fn begin(&mut self, ctx: &mut dyn FnMut() -> StepCtx) -> Self::Fut;
}

/// A body without a context: `|| async { … }`.
#[doc(hidden)]
pub struct Bare<F>(pub(crate) F);

/// A body with a context: `|s| async move { … }`.
#[doc(hidden)]
pub struct With<F>(pub(crate) F);

/// The body of one item of a map.
#[doc(hidden)]
pub struct OfItem<A, F>(pub(crate) A, pub(crate) Arc<F>);

impl<F: FnMut() -> Fut, Fut: Future> Attempt for Bare<F> {
    type Fut = Fut;
    fn begin(&mut self, _: &mut dyn FnMut() -> StepCtx) -> Fut {
        (self.0)()
    }
}

impl<F: FnMut(StepCtx) -> Fut, Fut: Future> Attempt for With<F> {
    type Fut = Fut;
    fn begin(&mut self, ctx: &mut dyn FnMut() -> StepCtx) -> Fut {
        (self.0)(ctx())
    }
}

impl<A: Clone, F: Fn(A) -> Fut, Fut: Future> Attempt for OfItem<A, F> {
    type Fut = Fut;
    fn begin(&mut self, _: &mut dyn FnMut() -> StepCtx) -> Fut {
        (self.1)(self.0.clone())
    }
}

/// A step, made by [`RunCtx::step`](crate::RunCtx::step). It begins when it is polled for the first time.
#[must_use = "a step does nothing unless it is awaited"]
pub struct Step<T, B: Attempt> {
    entry: Entry,
    scope: Arc<str>,
    body: B,
    at_work: Option<AtWork<B::Fut>>,
    timeout: Option<Duration>,
    output: PhantomData<fn() -> T>,
}

/// A body in progress, with a waker of its own: that tells the driver, which wakes the step at an idle point, after
/// whatever is to be delivered. So a body that wakes itself all the time delays no delivery.
struct AtWork<F> {
    body: Body<F>,
    wake: Arc<BodyWake>,
    limit: Option<Pin<Box<TokioSleep>>>,
}

enum Body<F> {
    Own(Pin<Box<F>>),
    /// What a test runs instead.
    Instead(Instead),
}

struct BodyWake {
    core: Arc<Core>,
    name: EntryName,
    woken: AtomicBool,
}

impl Wake for BodyWake {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            self.core.state().body_woken(&self.name);
            self.core.flow.notify.notify_one();
        }
    }
}

/// Its parts are never pinned in place: the body is boxed.
impl<T, B: Attempt> Unpin for Step<T, B> {}

impl<T, B: Attempt> Step<T, B> {
    pub(crate) fn new(core: Arc<Core>, scope: Arc<str>, full: String, body: B) -> Step<T, B> {
        let entry = Entry::new(core, full, Ok(Ask::Step { retry: None, undo: false }));
        Step { entry, scope, body, at_work: None, timeout: None, output: PhantomData }
    }

    pub(crate) fn undoing(core: Arc<Core>, full: String, body: B) -> Step<T, B> {
        let entry = Entry::undoing(core, full);
        Step { entry, scope: Arc::from(""), body, at_work: None, timeout: None, output: PhantomData }
    }

    /// The retry policy of this step; defaults to the flow's `step_retry`.
    pub fn retry(mut self, retry: Retry) -> Step<T, B> {
        self.entry.change(|ask| {
            if let Ask::Step { retry: of_step, .. } = ask {
                *of_step = Some(retry);
            }
        });
        self
    }

    /// How long one attempt may take. After that its body is dropped, and the attempt fails with the kind `Timeout`.
    pub fn timeout(mut self, timeout: Duration) -> Step<T, B> {
        self.timeout = Some(timeout);
        self
    }

    /// What undoes the step. If the run fails for good or is cancelled after the step has completed, it is called with
    /// the step's output, as a step of its own named `undo:` and this name. The undo steps of a run are executed one at
    /// a time, the latest step first.
    pub fn undo<U, UFut, UE>(mut self, mut undo: U) -> Step<T, B>
    where
        U: FnMut(T) -> UFut + Send + 'static,
        UFut: Future<Output = Result<(), UE>> + Send + 'static,
        UE: Into<StepError>,
        T: DeserializeOwned,
    {
        self.entry.set_undo(Box::new(move |output| match serde_json::from_value(output) {
            Ok(output) => {
                let undoing = undo(output);
                async move { undoing.await.map_err(Into::into) }.boxed()
            }
            Err(error) => {
                let message = format!("the recorded output does not match the type that `undo` expects: {error}");
                async move { Err(StepError::permanent(message)) }.boxed()
            }
        }));
        self
    }

    /// Another name than the one it was made with.
    pub fn name(mut self, name: impl Into<super::Name>) -> Step<T, B> {
        self.entry.rename(format!("{}{}", self.scope, name.into().as_str()));
        self
    }

    fn begin(&mut self, attempt: u32) {
        let Some(name) = self.entry.name().cloned() else { return };
        let core = self.entry.core.clone();
        let instead = core.task.probe.as_ref().and_then(|probe| probe.instead(&name, attempt));
        let mut ctx = || StepCtx::of_step(&core.task, &name, core.key(&name), attempt);
        let body = match instead {
            Some(instead) => Body::Instead(instead),
            None => match catch_unwind(AssertUnwindSafe(|| Box::pin(self.body.begin(&mut ctx)))) {
                Ok(body) => Body::Own(body),
                Err(panic) => return self.finish(Err(panicked(&*panic))),
            },
        };
        let limit = self.timeout.map(|limit| Box::pin(tokio::time::sleep(limit)));
        let wake = Arc::new(BodyWake { core: core.clone(), name, woken: AtomicBool::new(true) });
        self.at_work = Some(AtWork { body, wake, limit });
    }

    /// The attempt has ended. The step is not ready yet: the function sees the result once it is recorded, and as it is
    /// recorded.
    fn finish(&mut self, result: Result<Value, StepError>) {
        self.at_work = None;
        if let Some(name) = self.entry.name() {
            if self.entry.core.task.probe.as_ref().is_some_and(|probe| probe.dies_after(name)) {
                return;
            }
            self.entry.core.state().finish(name, result);
            self.entry.core.flow.notify.notify_one();
        }
    }
}

impl<T, E, B> Future for Step<T, B>
where
    B: Attempt,
    B::Fut: Future<Output = Result<T, E>>,
    T: Serialize + DeserializeOwned,
    E: Into<StepError>,
{
    type Output = Result<T, CtxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<T, CtxError>> {
        let this = &mut *self;
        let name = this.entry.name().cloned();
        match this.entry.poll(cx.waker()) {
            Polled::Ended(end) => {
                this.at_work = None;
                return Poll::Ready(end.and_then(|output| decode(name.as_deref().unwrap_or_default(), output)));
            }
            Polled::Begin(attempt) => this.begin(attempt),
            Polled::Pending | Polled::Opened(_) => {}
        }
        if let Some(result) = this.at_work.as_mut().and_then(AtWork::poll) {
            this.finish(result);
        }
        Poll::Pending
    }
}

impl<F> AtWork<F> {
    /// The result of the attempt, if it has ended.
    fn poll<T, E>(&mut self) -> Option<Result<Value, StepError>>
    where
        F: Future<Output = Result<T, E>>,
        T: Serialize,
        E: Into<StepError>,
    {
        if !self.wake.woken.swap(false, Ordering::AcqRel) {
            // Polled for the sake of another future.
            return None;
        }
        let waker = Waker::from(self.wake.clone());
        let cx = &mut Context::from_waker(&waker);
        let polled = catch_unwind(AssertUnwindSafe(|| match &mut self.body {
            // A value that cannot be written is a failure, and is remembered as one.
            Body::Own(body) => body.as_mut().poll(cx).map(|end| match end {
                Ok(output) => json("the output", output),
                Err(error) => Err(error.into()),
            }),
            Body::Instead(instead) => instead.as_mut().poll(cx),
        }));
        match polled {
            Ok(Poll::Ready(result)) => return Some(result),
            Ok(Poll::Pending) => {}
            Err(panic) => return Some(Err(panicked(&*panic))),
        }
        let limit = self.limit.as_mut()?;
        let timed_out = || StepError::failed(Failure::new(TIMEOUT, "the attempt took longer than its timeout"), true);
        limit.as_mut().poll(cx).is_ready().then(|| Err(timed_out()))
    }
}

fn panicked(panic: &(dyn Any + Send)) -> StepError {
    StepError::failed(Failure::new(PANIC, panic_message(panic)), true)
}

/// The failure of a step whose result the server does not accept.
pub(crate) fn not_recorded(message: String) -> StepError {
    StepError::permanent(message).kind(BAD_REPORT)
}

impl<T, B: Attempt> fmt::Debug for Step<T, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Step").field(&self.entry).finish()
    }
}

macro_rules! opaque {
    ($($name:ident<$($param:ident),+>),+) => {$(
        impl<$($param),+> fmt::Debug for $name<$($param),+> {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(stringify!($name))
            }
        }
    )+};
}
opaque!(Bare<F>, With<F>, OfItem<A, F>);
