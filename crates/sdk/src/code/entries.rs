//! The futures of a context that have no body: the server, another worker or somebody else brings their result.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use eddyline_protocol::{CallOptions, ChildOptions, Deadline, Op, Since, SinceRun};
use futures_util::Stream;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::core::{Core, Entry};
use super::error::CtxError;
use super::memo::Opener;
use super::retry::{Retry, span};
use super::state::Ask;
use super::{Name, decode};

/// A name with the scope that it belongs to.
#[derive(Debug, Clone)]
pub(crate) struct Place {
    pub core: Arc<Core>,
    pub scope: Arc<str>,
}

impl Place {
    pub fn full(&self, name: &str) -> String {
        format!("{}{name}", self.scope)
    }

    fn entry(&self, name: &str, ask: Result<Ask, CtxError>) -> Entry {
        Entry::new(self.core.clone(), self.full(name), ask)
    }
}

fn encode(name: &str, value: impl Serialize) -> Result<Value, CtxError> {
    serde_json::to_value(value).map_err(|error| CtxError::Encode { name: name.to_owned(), problem: error.to_string() })
}

/// Applies a change to the report that the entry will be asked for with.
fn edit(entry: &mut Entry, change: impl FnOnce(&mut Op)) {
    entry.change(|ask| match ask {
        Ask::Op(op) | Ask::Opening(op) => change(op),
        Ask::Step { .. } => {}
    });
}

macro_rules! debug {
    ($($name:ident $(<$param:ident>)?),+) => {$(
        impl $(<$param>)? fmt::Debug for $name $(<$param>)? {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.debug_tuple(stringify!($name)).field(&self.entry).finish()
            }
        }
    )+};
}
debug!(Call<Out>, Child<Out>, Sleep, Wait<T>, Webhook<T>, Gate<T>, Publish);

/// The future of an entry whose result is decoded as it is.
macro_rules! plain_future {
    ($($name:ident<$param:ident>),+) => {$(
        impl<$param> Unpin for $name<$param> {}

        impl<$param: DeserializeOwned> Future for $name<$param> {
            type Output = Result<$param, CtxError>;

            fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
                poll_decoded(&mut self.entry, cx)
            }
        }
    )+};
}
plain_future!(Call<Out>, Child<Out>);

fn poll_decoded<T: DeserializeOwned>(entry: &mut Entry, cx: &mut Context<'_>) -> Poll<Result<T, CtxError>> {
    let name = entry.name().cloned();
    entry.poll_end(cx).map(|end| end.and_then(|output| decode(name.as_deref().unwrap_or_default(), output)))
}

/// A step that a handler of any worker executes, made by [`RunCtx::call`](crate::RunCtx::call).
#[must_use = "a call does nothing unless it is awaited"]
pub struct Call<Out> {
    entry: Entry,
    place: Place,
    output: PhantomData<fn() -> Out>,
}

impl<Out> Call<Out> {
    pub(crate) fn new(place: Place, handler: &str, input: &impl Serialize) -> Call<Out> {
        let ask = encode(handler, input).map(|input| {
            Ask::Op(Box::new(Op::Call {
                name: String::new(),
                handler: handler.to_owned(),
                input,
                queue: None,
                options: CallOptions::default(),
            }))
        });
        Call { entry: place.entry(handler, ask), place, output: PhantomData }
    }

    /// The name of the entry; defaults to the handler's.
    pub fn name(mut self, name: impl Into<Name>) -> Call<Out> {
        self.entry.rename(self.place.full(name.into().as_str()));
        self
    }

    /// The queue; defaults to that of the flow.
    pub fn queue(mut self, queue: impl Into<String>) -> Call<Out> {
        edit(&mut self.entry, |op| {
            if let Op::Call { queue: of_call, .. } = op {
                *of_call = Some(queue.into());
            }
        });
        self
    }

    /// The retry policy; defaults to the flow's `step_retry`.
    pub fn retry(self, retry: Retry) -> Call<Out> {
        self.with(|options| options.retry = Some(retry.to_json()))
    }

    /// How long one attempt may take.
    pub fn timeout(self, timeout: Duration) -> Call<Out> {
        self.with(|options| options.timeout = Some(span(timeout)))
    }

    /// How long it may wait for a worker.
    pub fn start_timeout(self, timeout: Duration) -> Call<Out> {
        self.with(|options| options.start_timeout = Some(span(timeout)))
    }

    /// Added to the priority of the run.
    pub fn priority(self, priority: i32) -> Call<Out> {
        self.with(|options| options.priority = Some(priority))
    }

    /// A limit that the call counts for. Can be called several times.
    pub fn limit(self, limit: impl Into<String>) -> Call<Out> {
        self.with(|options| options.limits.push(json!(limit.into())))
    }

    /// A limit that counts separately for each key, such as the rate of each tenant.
    pub fn limit_by(mut self, limit: &str, key: impl Serialize) -> Call<Out> {
        match encode(limit, key) {
            Ok(key) => self.with(|options| options.limits.push(json!({limit: key}))),
            Err(error) => {
                self.entry.fail(error);
                self
            }
        }
    }

    /// A label that the worker must have. Can be called several times.
    pub fn requires(self, label: impl Into<String>) -> Call<Out> {
        self.with(|options| options.requires.push(label.into()))
    }

    /// Calls on one queue are served in turn by this key.
    pub fn key(mut self, key: impl Serialize) -> Call<Out> {
        match encode("key", key) {
            Ok(key) => self.with(|options| options.key = Some(key)),
            Err(error) => {
                self.entry.fail(error);
                self
            }
        }
    }

    fn with(mut self, change: impl FnOnce(&mut CallOptions)) -> Call<Out> {
        edit(&mut self.entry, |op| {
            if let Op::Call { options, .. } = op {
                change(options);
            }
        });
        self
    }
}

/// A run of another flow whose output is waited for, made by [`RunCtx::child`](crate::RunCtx::child).
#[must_use = "a child does nothing unless it is awaited"]
pub struct Child<Out> {
    entry: Entry,
    place: Place,
    output: PhantomData<fn() -> Out>,
}

impl<Out> Child<Out> {
    pub(crate) fn new(place: Place, flow: &str, input: &impl Serialize) -> Child<Out> {
        let ask = encode(flow, input).map(|input| {
            Ask::Op(Box::new(Op::Child {
                name: String::new(),
                flow: flow.to_owned(),
                input,
                detached: false,
                options: ChildOptions::default(),
            }))
        });
        Child { entry: place.entry(flow, ask), place, output: PhantomData }
    }

    /// The name of the entry; defaults to that of the flow.
    pub fn name(mut self, name: impl Into<Name>) -> Child<Out> {
        self.entry.rename(self.place.full(name.into().as_str()));
        self
    }

    /// Starts the run without waiting for its end. The result is the run's id.
    pub fn spawn(mut self) -> Spawn {
        edit(&mut self.entry, |op| {
            if let Op::Child { detached, .. } = op {
                *detached = true;
            }
        });
        Spawn { child: Child { entry: self.entry, place: self.place, output: PhantomData } }
    }

    pub fn external_id(self, id: impl Into<String>) -> Child<Out> {
        self.with(|options| options.external_id = Some(id.into()))
    }

    /// A tag to find the run by. Can be called several times.
    pub fn tag(self, tag: impl Into<String>) -> Child<Out> {
        self.with(|options| options.tags.push(tag.into()))
    }

    pub fn queue(self, queue: impl Into<String>) -> Child<Out> {
        self.with(|options| options.queue = Some(queue.into()))
    }

    /// Defaults to the priority of this run.
    pub fn priority(self, priority: i32) -> Child<Out> {
        self.with(|options| options.priority = Some(priority))
    }

    /// When it begins.
    pub fn delay(self, delay: Duration) -> Child<Out> {
        self.with(|options| options.delay = Some(span(delay)))
    }

    /// How long it may take as a whole.
    pub fn deadline(self, deadline: Duration) -> Child<Out> {
        self.with(|options| options.deadline = Some(Deadline::After(span(deadline))))
    }

    /// The retry policy of its function, if it is a code flow.
    pub fn retry(self, retry: Retry) -> Child<Out> {
        self.with(|options| options.retry = Some(retry.to_json()))
    }

    fn with(mut self, change: impl FnOnce(&mut ChildOptions)) -> Child<Out> {
        edit(&mut self.entry, |op| {
            if let Op::Child { options, .. } = op {
                change(options);
            }
        });
        self
    }
}

/// The start of a run that is not waited for.
#[derive(Debug)]
#[must_use = "a child does nothing unless it is awaited"]
pub struct Spawn {
    child: Child<Value>,
}

impl Future for Spawn {
    type Output = Result<String, CtxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let started = Pin::new(&mut self.child).poll(cx);
        started.map(|started| Ok(started?["run_id"].as_str().unwrap_or_default().to_owned()))
    }
}

/// A wait for a moment, made by [`RunCtx::sleep`](crate::RunCtx::sleep).
#[must_use = "a sleep does nothing unless it is awaited"]
pub struct Sleep {
    entry: Entry,
}

impl Sleep {
    pub(crate) fn new(place: &Place, name: Name, wait: Option<Duration>, until: Option<String>) -> Sleep {
        let op = Op::Sleep { name: String::new(), span: wait.map(span), until };
        Sleep { entry: place.entry(name.as_str(), Ok(Ask::Op(Box::new(op)))) }
    }
}

impl Future for Sleep {
    type Output = Result<(), CtxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.entry.poll_end(cx).map(|end| end.map(drop))
    }
}

fn wait_op(event: Option<String>, key: Option<Value>, webhook: bool, manual: bool) -> Op {
    let since = event.is_some().then_some(Since::Run(SinceRun::Run));
    Op::Wait { name: String::new(), event, key, webhook, manual, timeout: None, since }
}

fn set_timeout(entry: &mut Entry, after: Duration) {
    edit(entry, |op| {
        if let Op::Wait { timeout, .. } = op {
            *timeout = Some(span(after));
        }
    });
}

/// A wait for an event, made by [`RunCtx::wait_event`](crate::RunCtx::wait_event). Its output is the event's payload.
#[must_use = "a wait does nothing unless it is awaited"]
pub struct Wait<T> {
    entry: Entry,
    place: Place,
    payload: PhantomData<fn() -> T>,
}

impl<T> Wait<T> {
    pub(crate) fn new(place: Place, event: &str, key: impl Serialize) -> Wait<T> {
        let ask = encode(event, key).map(|key| {
            let key = (!key.is_null()).then_some(key);
            Ask::Op(Box::new(wait_op(Some(event.to_owned()), key, false, false)))
        });
        Wait { entry: place.entry(event, ask), place, payload: PhantomData }
    }

    /// The name of the entry; defaults to that of the event.
    pub fn name(mut self, name: impl Into<Name>) -> Wait<T> {
        self.entry.rename(self.place.full(name.into().as_str()));
        self
    }

    /// How long to wait. After that the wait fails with [`CtxError::WaitTimeout`].
    pub fn timeout(mut self, after: Duration) -> Wait<T> {
        set_timeout(&mut self.entry, after);
        self
    }

    /// Also accepts an event that was published this long before the wait began, instead of since the run began.
    pub fn since(mut self, ago: Duration) -> Wait<T> {
        edit(&mut self.entry, |op| {
            if let Op::Wait { since, .. } = op {
                *since = Some(Since::Ago(span(ago)));
            }
        });
        self
    }

    /// A wait that ends with `None` after its timeout, instead of with an error.
    pub fn or_none(self) -> OrNone<Wait<T>> {
        OrNone(self)
    }
}

plain_future!(Wait<T>);

/// A wait for a request or a person, before its token is known; made by [`RunCtx::webhook`](crate::RunCtx::webhook) and
/// [`RunCtx::manual`](crate::RunCtx::manual). Its output is a [`Gate`].
#[must_use = "a webhook does nothing unless it is awaited"]
pub struct Webhook<T> {
    entry: Option<Entry>,
    payload: PhantomData<fn() -> T>,
}

impl<T> Webhook<T> {
    pub(crate) fn new(place: &Place, name: &Name, manual: bool) -> Webhook<T> {
        let op = wait_op(None, None, !manual, manual);
        let entry = place.entry(name.as_str(), Ok(Ask::Opening(Box::new(op))));
        Webhook { entry: Some(entry), payload: PhantomData }
    }

    /// How long the gate can be opened. After that it fails with [`CtxError::WaitTimeout`].
    pub fn timeout(mut self, after: Duration) -> Webhook<T> {
        if let Some(entry) = &mut self.entry {
            set_timeout(entry, after);
        }
        self
    }
}

impl<T> Unpin for Webhook<T> {}

impl<T> Future for Webhook<T> {
    type Output = Result<Gate<T>, CtxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(entry) = &mut self.entry else { return Poll::Pending };
        let Poll::Ready(opened) = entry.poll_opened(cx) else { return Poll::Pending };
        Poll::Ready(match (opened, self.entry.take()) {
            (Ok(opener), Some(entry)) => Ok(Gate { entry, opener, payload: PhantomData }),
            (Err(error), _) => Err(error),
            (Ok(_), None) => return Poll::Pending,
        })
    }
}

/// A wait that a request or a person opens. Its output is the body of the request.
#[must_use = "a gate is let go of when it is dropped"]
pub struct Gate<T> {
    entry: Entry,
    opener: Opener,
    payload: PhantomData<fn() -> T>,
}

impl<T> Gate<T> {
    /// A `POST` to this URL opens the gate, with the body as the output. Empty once the gate has been opened: then the
    /// function only replays.
    pub fn url(&self) -> &str {
        &self.opener.url
    }

    /// The token that opens the gate with `POST /v1/gates/{token}`. Empty once the gate has been opened.
    pub fn token(&self) -> &str {
        &self.opener.token
    }

    /// A gate that ends with `None` after its timeout, instead of with an error.
    pub fn or_none(self) -> OrNone<Gate<T>> {
        OrNone(self)
    }
}

plain_future!(Gate<T>);

/// A wait that ends with `None` after its timeout.
#[derive(Debug)]
#[must_use = "a wait does nothing unless it is awaited"]
pub struct OrNone<W>(W);

impl<W, T> Future for OrNone<W>
where
    W: Future<Output = Result<T, CtxError>> + Unpin,
{
    type Output = Result<Option<T>, CtxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(cx).map(|end| match end {
            Ok(payload) => Ok(Some(payload)),
            Err(CtxError::WaitTimeout { .. }) => Ok(None),
            Err(error) => Err(error),
        })
    }
}

/// The events of a name and key, one after another, made by [`RunCtx::inbox`](crate::RunCtx::inbox). Also a `Stream`.
///
/// A receive that is dropped loses no event: the inbox keeps waiting, and the next receive gets it. Dropping the inbox
/// ends the wait.
pub struct Inbox<T> {
    place: Place,
    event: String,
    key: Result<Option<Value>, CtxError>,
    current: Option<Entry>,
    payload: PhantomData<fn() -> T>,
}

impl<T: DeserializeOwned> Inbox<T> {
    pub(crate) fn new(place: Place, event: &str, key: impl Serialize) -> Inbox<T> {
        let key = encode(event, key).map(|key| (!key.is_null()).then_some(key));
        Inbox { place, event: event.to_owned(), key, current: None, payload: PhantomData }
    }

    /// The next event. The first one is the oldest since the run began.
    pub fn receive(&mut self) -> Receive<'_, T> {
        Receive(self)
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Result<T, CtxError>> {
        let entry = self.current.get_or_insert_with(|| {
            let ask =
                self.key.clone().map(|key| Ask::Op(Box::new(wait_op(Some(self.event.clone()), key, false, false))));
            self.place.entry(&self.event, ask)
        });
        let polled = poll_decoded(entry, cx);
        if polled.is_ready() {
            self.current = None;
        }
        polled
    }
}

impl<T> Unpin for Inbox<T> {}

impl<T: DeserializeOwned> Stream for Inbox<T> {
    type Item = Result<T, CtxError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.poll_event(cx).map(Some)
    }
}

impl<T> fmt::Debug for Inbox<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Inbox").field("event", &self.event).finish_non_exhaustive()
    }
}

/// The next event of an inbox.
#[derive(Debug)]
#[must_use = "a receive does nothing unless it is awaited"]
pub struct Receive<'a, T>(&'a mut Inbox<T>);

impl<T: DeserializeOwned> Future for Receive<'_, T> {
    type Output = Result<T, CtxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.poll_event(cx)
    }
}

/// The publication of an event, made by [`RunCtx::publish`](crate::RunCtx::publish).
#[must_use = "a publish does nothing unless it is awaited"]
pub struct Publish {
    entry: Entry,
    place: Place,
}

impl Publish {
    pub(crate) fn new(place: Place, event: &str, key: impl Serialize, payload: impl Serialize) -> Publish {
        let ask = encode(event, key).and_then(|key| {
            let key = (!key.is_null()).then_some(key);
            let payload = encode(event, payload)?;
            Ok(Ask::Op(Box::new(Op::Publish { name: event.to_owned(), as_name: None, key, payload })))
        });
        Publish { entry: place.entry(event, ask), place }
    }

    /// The name of the entry; defaults to that of the event.
    pub fn name(mut self, name: impl Into<Name>) -> Publish {
        self.entry.rename(self.place.full(name.into().as_str()));
        self
    }
}

impl Future for Publish {
    type Output = Result<(), CtxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.entry.poll_end(cx).map(|end| end.map(drop))
    }
}
