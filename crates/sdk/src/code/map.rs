//! The same step for each of many items, a bounded number at a time.

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use futures_util::Stream;
use futures_util::stream::FuturesUnordered;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Name;
use super::entries::Place;
use super::error::CtxError;
use super::retry::Retry;
use super::step::{Attempt, OfItem, Step};
use crate::worker::StepError;

/// How many items are in progress at the same time, unless a map says otherwise.
const DEFAULT_LIMIT: usize = 1_000;

/// A step for each item, made by [`RunCtx::map`](crate::RunCtx::map). The output is the list of outputs, in the order of
/// the items. The first failure ends the map: items in progress are dropped, and no more begin.
#[must_use = "a map does nothing unless it is awaited"]
pub struct Map<A, T, F>
where
    OfItem<A, F>: Attempt,
{
    place: Place,
    name: String,
    items: VecDeque<(usize, A)>,
    run: Arc<F>,
    rules: Rules<A>,
    outputs: Vec<Option<Result<T, CtxError>>>,
    at_work: FuturesUnordered<Indexed<A, T, F>>,
}

/// Makes the key of an item.
type KeyOf<A> = Box<dyn Fn(&A) -> String + Send>;

struct Rules<A> {
    limit: usize,
    key: Option<KeyOf<A>>,
    retry: Option<Retry>,
    timeout: Option<Duration>,
}

/// The step of an item, with the item's position.
struct Indexed<A, T, F>
where
    OfItem<A, F>: Attempt,
{
    at: usize,
    step: Step<T, OfItem<A, F>>,
}

impl<A, T, F> Unpin for Map<A, T, F> where OfItem<A, F>: Attempt {}

impl<A, T, F> Map<A, T, F>
where
    OfItem<A, F>: Attempt,
{
    pub(crate) fn new(place: Place, name: &str, items: impl IntoIterator<Item = A>, run: F) -> Map<A, T, F> {
        let items: VecDeque<(usize, A)> = items.into_iter().enumerate().collect();
        let outputs = items.iter().map(|_| None).collect();
        let rules = Rules { limit: DEFAULT_LIMIT, key: None, retry: None, timeout: None };
        let (name, run) = (name.to_owned(), Arc::new(run));
        Map { place, name, items, run, rules, outputs, at_work: FuturesUnordered::new() }
    }

    /// How many items are in progress at the same time; defaults to 1,000.
    pub fn limit(mut self, items: usize) -> Map<A, T, F> {
        self.rules.limit = items.max(1);
        self
    }

    /// The key of an item, by which it is remembered; defaults to its position. Give one if the list may differ in a
    /// later execution.
    pub fn key<K: fmt::Display>(mut self, key: impl Fn(&A) -> K + Send + 'static) -> Map<A, T, F> {
        self.rules.key = Some(Box::new(move |item| key(item).to_string()));
        self
    }

    /// The retry policy of each item.
    pub fn retry(mut self, retry: Retry) -> Map<A, T, F> {
        self.rules.retry = Some(retry);
        self
    }

    /// How long one attempt at an item may take.
    pub fn timeout(mut self, timeout: Duration) -> Map<A, T, F> {
        self.rules.timeout = Some(timeout);
        self
    }

    /// A map that does not end at the first failure: its output is the result of each item.
    pub fn settled(self) -> Settled<A, T, F> {
        Settled(self)
    }

    fn begin(&mut self) {
        while self.at_work.len() < self.rules.limit
            && let Some((at, item)) = self.items.pop_front()
        {
            let key = self.rules.key.as_ref().map_or_else(|| at.to_string(), |key| key(&item));
            let full = self.place.full(Name::from((self.name.as_str(), key)).as_str());
            let Place { core, scope } = self.place.clone();
            let mut step = Step::new(core, scope, full, OfItem(item, self.run.clone()));
            if let Some(retry) = &self.rules.retry {
                step = step.retry(retry.clone());
            }
            if let Some(timeout) = self.rules.timeout {
                step = step.timeout(timeout);
            }
            self.at_work.push(Indexed { at, step });
        }
    }
}

impl<A, T, F, E> Map<A, T, F>
where
    OfItem<A, F>: Attempt,
    <OfItem<A, F> as Attempt>::Fut: Future<Output = Result<T, E>>,
    T: Serialize + DeserializeOwned,
    E: Into<StepError>,
{
    /// Ready when all items have ended, or, with `to_first_failure`, with the first error.
    fn poll_items(&mut self, cx: &mut Context<'_>, to_first_failure: bool) -> Poll<Result<(), CtxError>> {
        loop {
            self.begin();
            match ready!(Pin::new(&mut self.at_work).poll_next(cx)) {
                None => return Poll::Ready(Ok(())),
                Some((_, Err(error))) if to_first_failure => {
                    self.items.clear();
                    self.at_work.clear();
                    return Poll::Ready(Err(error));
                }
                Some((at, end)) => self.outputs[at] = Some(end),
            }
        }
    }
}

impl<A, T, F, E> Future for Map<A, T, F>
where
    OfItem<A, F>: Attempt,
    <OfItem<A, F> as Attempt>::Fut: Future<Output = Result<T, E>>,
    T: Serialize + DeserializeOwned,
    E: Into<StepError>,
{
    type Output = Result<Vec<T>, CtxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        ready!(self.poll_items(cx, true))?;
        Poll::Ready(self.outputs.drain(..).flatten().collect())
    }
}

impl<A, T, F, E> Future for Indexed<A, T, F>
where
    OfItem<A, F>: Attempt,
    <OfItem<A, F> as Attempt>::Fut: Future<Output = Result<T, E>>,
    T: Serialize + DeserializeOwned,
    E: Into<StepError>,
{
    type Output = (usize, Result<T, CtxError>);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let at = self.at;
        Pin::new(&mut self.step).poll(cx).map(|end| (at, end))
    }
}

/// A [`Map`] whose output is the result of each item.
#[must_use = "a map does nothing unless it is awaited"]
pub struct Settled<A, T, F>(Map<A, T, F>)
where
    OfItem<A, F>: Attempt;

impl<A, T, F, E> Future for Settled<A, T, F>
where
    OfItem<A, F>: Attempt,
    <OfItem<A, F> as Attempt>::Fut: Future<Output = Result<T, E>>,
    T: Serialize + DeserializeOwned,
    E: Into<StepError>,
{
    type Output = Result<Vec<Result<T, CtxError>>, CtxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        ready!(self.0.poll_items(cx, false))?;
        Poll::Ready(Ok(self.0.outputs.drain(..).flatten().collect()))
    }
}

impl<A, T, F> fmt::Debug for Map<A, T, F>
where
    OfItem<A, F>: Attempt,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Map").field("name", &self.name).finish_non_exhaustive()
    }
}

impl<A, T, F> fmt::Debug for Settled<A, T, F>
where
    OfItem<A, F>: Attempt,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Settled").field(&self.0).finish()
    }
}
